"""One look at a job: who is asked, what was answered, what is remembered and told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.core.clock import Millis
from penstock.core.workers import Now
from penstock.resources.frames import NoFrame
from penstock.resources.policies.controls import ControlSettings
from penstock.resources.policies.policy import Broken, RaiseAlert, Verdict
from penstock.resources.policies.ports import ManagedJob, ManagedJobs
from penstock.resources.policies.records import JobRecord
from penstock.resources.policies.round import RoundDecision
from penstock.resources.policies.runnable import Declared, Runnable
from penstock.resources.policies.telling import keys_of

Answer = tuple[int, Verdict | Broken]  # priority as declared, verdict


@dataclass(slots=True)
class Look:
    """What a round knows of one job."""

    job: ManagedJob
    record: JobRecord
    version: int
    began_ms: Millis
    waiting: set[str]
    settings: dict[str, ControlSettings]
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def verdicts(self) -> dict[str, Verdict | Broken]:
        return {policy: verdict for policy, (_, verdict) in self.answers.items()}


def remembered(found: Look, decision: RoundDecision) -> tuple[JobRecord, bool]:
    """The record after a round, and whether the journal has not heard that before."""
    keys, known = keys_of(decision, found.verdicts), found.record.said
    # Policies are not all asked in every round: what the others last said still stands.
    kept = {each: key for each, key in known.items() if each in found.settings}
    is_news = any(known.get(each) != key for each, key in keys.items())
    return msgspec.structs.replace(decision.record, said=kept | keys), is_news


def alerts_of(found: Look, decision: RoundDecision) -> dict[str, tuple[RaiseAlert, ...]]:
    """By policy that had its say, its alerts: none is a word too."""
    alerts: dict[str, tuple[RaiseAlert, ...]] = {policy: () for policy in found.answers}
    for policy, alert in decision.alerts:
        alerts[policy] = (*alerts.get(policy, ()), alert)
    return alerts


def work_of(
    policy: Runnable, jobs: ManagedJobs, name: str, settings: Mapping[str, Any]
) -> Callable[[Now], Answer]:
    """What a policy's answer takes, to be done beside the round."""

    def work(now: Now) -> Answer:
        declared = policy.declare()
        if not isinstance(declared, Declared):
            return 0, declared
        minutes = settings.get("minutes") or declared.minutes  # checked with what every policy has
        facts = jobs.facts(name, declared.metrics, minutes, declared.if_known)
        if isinstance(facts, NoFrame):
            return declared.priority, Broken(policy=policy.name, how="metrics", text=facts.reason[:2000])
        return declared.priority, policy.run(facts, settings)

    return work


def answer_of(policy: str, work: Callable[[Now], Answer], now: Now) -> Answer:
    """The answer, here and now; one that raises is broken."""
    try:
        return work(now)
    except Exception as error:  # a policy raises what it likes
        return 0, Broken(policy=policy, how="raised", text=f"{type(error).__name__}: {error}"[:2000])


def priority_of(settings: ControlSettings, declared: int) -> int:
    """As the job says, or else the policy."""
    return declared if settings.priority is None else settings.priority


def hung(policy: str, text: str) -> Broken:
    """It gave no answer in its time."""
    return Broken(policy=policy, how="hung", text=text)


def key_of(job: str, policy: str) -> str:
    """Of a policy's work on a job."""
    return f"{job} {policy}"


def parts_of(key: str) -> tuple[str, str]:
    """Job and policy of such a key."""
    job, _, policy = key.rpartition(" ")
    return job, policy
