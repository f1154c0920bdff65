"""Runs policies on jobs: looks who is due, asks each beside the round, applies one decision, tells why.

A policy is somebody else's code: one that raises, hangs or answers nonsense costs its own answer, no other.
What is remembered of a job lies in the store under a version: any instance may serve it, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.journal import Entry, Journal
from penstock.core.workers import Now, Workers
from penstock.resources.frames import NoFrame
from penstock.resources.policies.controls import ControlSettings, read_settings, split_settings
from penstock.resources.policies.facts import JobFacts
from penstock.resources.policies.policy import Action, Broken, RaiseAlert, Verdict
from penstock.resources.policies.records import JobRecord
from penstock.resources.policies.round import (
    FleetState,
    Rival,
    RoundDecision,
    RoundJob,
    decide_round,
    forget_action,
)
from penstock.resources.policies.runnable import Declared, Runnable
from penstock.resources.policies.triggers import Due, Signals, decide_due

log = structlog.get_logger(__name__)

ACTOR = "policies"
TURN_MAX = 500  # jobs that begin in one tick
SOON_MS: Millis = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedJob:
    """A job as the service sees it."""

    round_job: RoundJob
    settings: Mapping[str, Mapping[str, Any]]  # `policies` of its config
    signals: Signals
    expected_version: int


class ManagedJobs(Protocol):
    """The fleet, as the service needs it. `facts` is called beside the round."""

    def names(self) -> Sequence[str]:
        """Every job that runs."""

    def job(self, name: str) -> ManagedJob | None:
        """One of them; None: no longer there."""

    def facts(self, name: str, metrics: tuple[str, ...], minutes: int) -> JobFacts | NoFrame:
        """What a policy is shown, or why nothing can be (I20)."""

    def fleet(self) -> FleetState:
        """What the fleet allows now."""

    def apply(self, name: str, policy: str, action: Action, *, expected_version: int, reason: str) -> None:
        """Do it; PenstockError if it cannot be done now."""


class Records(Protocol):
    """What is remembered between rounds."""

    def load(self, job: str) -> tuple[JobRecord, int]:
        """The record and its version; an empty one has version 0."""

    def save(self, job: str, record: JobRecord, version: int) -> bool:
        """Keep it if the version is still this one; False: somebody else served the job meanwhile."""


class AlertSink(Protocol):
    """Who is told. Levels: every call says all there is to say of these sources."""

    def report(self, job: str, alerts: Mapping[str, tuple[RaiseAlert, ...]], now_ms: Millis) -> None:
        """By policy that had its say: its alerts now."""


Answer = tuple[int, Verdict | Broken]  # priority as declared, verdict


@dataclass(slots=True)
class _Round:
    job: ManagedJob
    record: JobRecord
    version: int
    began_ms: Millis
    waiting: set[str]
    settings: dict[str, ControlSettings]
    answers: dict[str, Answer] = field(default_factory=dict)


class PolicyService:
    """One instance. Requires: ticks come one after another."""

    def __init__(
        self,
        jobs: ManagedJobs,
        records: Records,
        alerts: AlertSink,
        journal: Journal,
        policies: Sequence[Runnable],
        workers: Workers[Answer],
        *,
        load: Callable[[str, str], Runnable] | None = None,
    ) -> None:
        self._jobs, self._records, self._alerts, self._journal = jobs, records, alerts, journal
        self._policies = {policy.name: policy for policy in policies}
        self._workers, self._load = workers, load
        self._rounds: dict[str, _Round] = {}
        self._next_ms: dict[str, Millis] = {}
        self._looked: dict[tuple[str, str], Millis] = {}
        self._asked: set[str] = set()
        self.last: dict[str, RoundDecision] = {}

    def ask(self, job: str) -> None:
        """Somebody wants a look at this job now, whatever the schedule says."""
        self._asked.add(job)

    def tick(self, now_ms: Millis) -> None:
        """One look at who is due, and at what has come back."""
        names = self._jobs.names()
        self._forget({*names})
        due = [name for name in names if name not in self._rounds and self._may_be_due(name, now_ms)]
        for name in due[:TURN_MAX]:
            self._begin(name, now_ms)
        self._collect()
        for name in [name for name, found in self._rounds.items() if not found.waiting]:
            self._end(name, self._rounds.pop(name), now_ms)

    def _may_be_due(self, name: str, now_ms: Millis) -> bool:
        next_ms = self._next_ms.get(name, 0)
        return name in self._asked or not now_ms < next_ms <= now_ms + 7 * 86_400_000

    def _forget(self, names: set[str]) -> None:
        for gone in self._next_ms.keys() - names:
            del self._next_ms[gone]
            self.last.pop(gone, None)
        self._asked &= names
        for key in [key for key in self._looked if key[0] not in names]:
            del self._looked[key]

    # -- the beginning of a round -----------------------------------------------------------------------

    def _begin(self, name: str, now_ms: Millis) -> None:
        job = self._jobs.job(name)
        if job is None:
            return
        asked = name in self._asked
        self._asked.discard(name)
        chosen, settings, answers = self._due_policies(name, job, asked, now_ms)
        every_ms = [int(found.every_s * 1000) for found in settings.values() if found.enabled]
        self._next_ms[name] = now_ms + min(every_ms, default=60_000)
        if not chosen and not answers:
            return
        record, version = self._records.load(name)
        found = _Round(
            job=job,
            record=record,
            version=version,
            began_ms=now_ms,
            waiting=set(),
            settings=settings,
            answers=answers,
        )
        busy = self._workers.busy()
        for policy in chosen:
            self._looked[name, policy.name] = now_ms
            if _key(name, policy.name) in busy:
                found.answers[policy.name] = 0, _hung(policy.name, "its last look has not ended yet")
                continue
            found.waiting.add(policy.name)
            work = _work(policy, self._jobs, name, job.settings.get(policy.name, {}))
            self._workers.start(_key(name, policy.name), work, now_ms)
        self._rounds[name] = found

    def _due_policies(
        self, name: str, job: ManagedJob, asked: bool, now_ms: Millis
    ) -> tuple[list[Runnable], dict[str, ControlSettings], dict[str, Answer]]:
        chosen: list[Runnable] = []
        settings: dict[str, ControlSettings] = {}
        answers: dict[str, Answer] = {}
        for policy in {**self._policies, **dict.fromkeys(job.settings)}:
            try:
                common, _ = split_settings(job.settings.get(policy, {}))
                read = settings[policy] = read_settings(ControlSettings, policy, common)
                runnable = self._runnable(policy, read)
            except PenstockError as error:
                settings.setdefault(policy, ControlSettings())
                answers[policy] = 0, Broken(policy=policy, how="settings", text=str(error)[:2000])
                continue
            last_ms = self._looked.get((name, policy))
            due = decide_due(read, last_ms=last_ms, signals=job.signals, now_ms=now_ms, asked=asked)
            if isinstance(due, Due):
                chosen.append(runnable)
        return chosen, settings, answers

    def _runnable(self, name: str, settings: ControlSettings) -> Runnable:
        if name in self._policies:
            return self._policies[name]
        if settings.code is None or self._load is None:
            raise ConfigError(
                f"there is no policy {name!r}",
                why=f"there are {', '.join(sorted(self._policies))}, and it names no code of its own",
                fix=f"take policies.{name} out of the job's config, or say where it is: policies.{name}.code",
            )
        return self._load(name, settings.code)

    # -- what comes back --------------------------------------------------------------------------------

    def _collect(self) -> None:
        for done in self._workers.take_finished():
            job, policy = _parts(done.key)
            found = self._rounds.get(job)
            if found is None or policy not in found.waiting:
                continue  # it was given up
            found.waiting.discard(policy)
            if done.result is not None:
                found.answers[policy] = done.result
            else:
                text = f"{type(done.error).__name__}: {done.error}"[:2000]
                found.answers[policy] = 0, Broken(policy=policy, how="raised", text=text)
        for stuck in self._workers.stuck():
            job, policy = _parts(stuck.key)
            found = self._rounds.get(job)
            if found is not None and policy in found.waiting:
                found.waiting.discard(policy)
                found.answers[policy] = 0, _hung(policy, f"no answer after {stuck.for_ms / 1000:.0f} s")

    # -- the end of a round -----------------------------------------------------------------------------

    def _end(self, name: str, found: _Round, now_ms: Millis) -> None:
        rivals = [
            Rival(
                verdict=verdict,
                priority=_priority(found.settings[policy], priority),
                settings=found.settings[policy],
            )
            for policy, (priority, verdict) in found.answers.items()
        ]
        decision = decide_round(rivals, found.job.round_job, found.record, self._jobs.fleet(), now_ms=now_ms)
        self.last[name] = decision
        said = " ".join(f"{each.policy}:{each.outcome}" for each in decision.said)
        is_news = said != found.record.said or decision.apply is not None
        record = JobRecord(
            **{
                field: getattr(decision.record, field)
                for field in JobRecord.__struct_fields__
                if field != "said"
            },
            said=said,
        )
        alerts: dict[str, tuple[RaiseAlert, ...]] = {policy: () for policy in found.answers}
        for policy, alert in decision.alerts:
            alerts[policy] = (*alerts.get(policy, ()), alert)
        try:
            # Before anything is done: of two instances one saves, and only that one acts.
            if record != found.record and not self._records.save(name, record, found.version):
                self._next_ms[name] = now_ms + SOON_MS
                return
            refused = self._apply(name, found, decision, record)
            if is_news:
                self._journal.append(None, _entry(name, decision, refused, now_ms))
            self._alerts.report(name, alerts, now_ms)
        except PenstockError as error:
            # Whatever was not written is decided again.
            log.warning("a round of policies was not kept", job=name, error=error.what)
            self._next_ms[name] = now_ms + SOON_MS

    def _apply(self, name: str, found: _Round, decision: RoundDecision, record: JobRecord) -> str:
        """Do what was decided; returns why it could not be done, "" if it was."""
        if decision.apply is None:
            return ""
        apply = decision.apply
        try:
            self._jobs.apply(
                name,
                apply.policy,
                apply.action,
                expected_version=found.job.expected_version,
                reason=apply.reason,
            )
        except PenstockError as error:
            self._records.save(name, forget_action(record, apply.policy), found.version + 1)
            return error.what
        return ""


def _work(
    policy: Runnable, jobs: ManagedJobs, name: str, settings: Mapping[str, Any]
) -> Callable[[Now], Answer]:
    def work(now: Now) -> Answer:
        declared = policy.declare()
        if not isinstance(declared, Declared):
            return 0, declared
        facts = jobs.facts(name, declared.metrics, declared.minutes)
        if isinstance(facts, NoFrame):
            return declared.priority, Broken(policy=policy.name, how="metrics", text=facts.reason[:2000])
        return declared.priority, policy.run(facts, settings)

    return work


def _entry(name: str, decision: RoundDecision, refused: str, now_ms: Millis) -> Entry:
    apply = decision.apply
    if apply is None:
        words = sorted({said.outcome for said in decision.said} - {"nothing"})
        done = f"nothing done: {', '.join(words)}" if words else "nothing"
        reason = "; ".join(f"{said.policy}: {said.reason}" for said in decision.said)
    else:
        done = f"{apply.policy}: {apply.action.text}"
        reason = f"not done, {refused}" if refused else apply.reason
    said = [{"policy": s.policy, "outcome": s.outcome, "reason": s.reason} for s in decision.said]
    return Entry(
        at_ms=now_ms,
        actor=ACTOR,
        kind="policy",
        subject=name,
        decision=done,
        reason=reason,
        data={"said": said},
    )


def _priority(settings: ControlSettings, declared: int) -> int:
    return declared if settings.priority is None else settings.priority


def _hung(policy: str, text: str) -> Broken:
    return Broken(policy=policy, how="hung", text=text)


def _key(job: str, policy: str) -> str:
    return f"{job} {policy}"


def _parts(key: str) -> tuple[str, str]:
    job, _, policy = key.rpartition(" ")
    return job, policy
