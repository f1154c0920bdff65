"""Runs policies on jobs: looks who is due, asks each beside the round, applies one decision, tells why.

A policy is somebody else's code: one that raises, hangs or answers nonsense costs its own answer, no other.
What is remembered of a job lies in the store under a version: any instance may serve it, one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, NotFound, PenstockError, Refused, StoreUnavailable
from penstock.core.journal import Entry, Journal
from penstock.core.text import did_you_mean, some_of
from penstock.core.workers import Now, Rest, RoundPace, Workers, jobs_per_round, no_rest
from penstock.scaling.metrics.frames import NoFrame
from penstock.scaling.policies.policy import (
    Broken,
    ControlSettings,
    RaiseAlert,
    Verdict,
    read_settings,
    split_settings,
)
from penstock.scaling.policies.ports import AlertSink, Kept, ManagedJob, ManagedJobs, Records
from penstock.scaling.policies.process import Declared, Runnable
from penstock.scaling.policies.round import (
    Apply,
    Due,
    JobRecord,
    Rival,
    RoundDecision,
    decide_due,
    decide_round,
    entry_of,
    forget_action,
    keys_of,
)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """A job to which nothing is done."""

    job: str
    kept: Kept | None = None  # None: what is remembered of it stands
    alerts: Mapping[str, tuple[RaiseAlert, ...]] | None = None  # by source that had its say; None: of none


def keep_quiet(
    quiet: Sequence[Quiet], records: Records, alerts: AlertSink, now_ms: Millis
) -> dict[str, PenstockError | None]:
    """Remember and tell; returns the jobs to decide on again: why, or None if others served them."""
    try:
        lost = records.keep([item.kept for item in quiet if item.kept is not None])
        told = {item.job: item.alerts for item in quiet if item.alerts is not None and item.job not in lost}
        alerts.report_all(told, now_ms)
    except PenstockError as error:
        return {item.job: error for item in quiet}
    return dict.fromkeys(lost)


log = structlog.get_logger(__name__)

LEAST, ROUNDS = 25, 40  # jobs that begin in one tick, and ticks of a second that all of them take
TOGETHER = 5  # jobs between rests: each is asked about by several policies
WRITTEN = 25  # jobs of one transaction
TRIES = 5  # of a look that somebody asked for, while others write to the job's record
SOON_MS: Millis = 1_000
ROUND_MS: Millis = 60_000  # a policy that has not had its turn by then costs its own answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Managed:
    """What a round that somebody asked for came to."""

    decision: RoundDecision
    verdicts: Mapping[str, Verdict | Broken]
    off: tuple[str, ...]  # policies that the job has switched off
    refused: str = ""  # why what was decided could not be done
    is_dry: bool = False


class PolicyService:
    """One instance. Ticks come one after another; `manage` may be called beside them."""

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
        rest: Rest = no_rest,
    ) -> None:
        """`rest` is called now and then in a tick, without any lock."""
        self._jobs, self._records, self._alerts, self._journal = jobs, records, alerts, journal
        self._policies = {policy.name: policy for policy in policies}
        self._workers, self._load, self._pace = workers, load, RoundPace(rest, size=TOGETHER)
        self._rounds: dict[str, Look] = {}
        self._next_ms: dict[str, Millis] = {}
        self._looked: dict[tuple[str, str], Millis] = {}
        self._asked: set[str] = set()
        self._managed: set[str] = set()  # jobs that somebody's own look is at
        self._lock = threading.RLock()
        self.last: dict[str, RoundDecision] = {}

    def ask(self, job: str) -> None:
        """Somebody wants a look at this job with the next tick, whatever the schedule says."""
        self._asked.add(job)

    def tick(self, now_ms: Millis) -> None:
        """One look at who is due, and at what has come back."""
        names = self._jobs.names()
        with self._lock:
            self._forget({*names})
            taken = self._rounds.keys() | self._managed
            due = [name for name in names if name not in taken and self._may_be_due(name, now_ms)]
            # Whoever was asked for or waits longest is first: nobody is left out when there are too many.
            due.sort(key=lambda name: (name not in self._asked, self._next_ms.get(name, 0)))
        turn = jobs_per_round(len(names), least=LEAST, rounds=ROUNDS)
        for some in self._pace.slices(due[:turn]):
            with self._lock:
                self._begin_some([name for name in some if name not in self._managed], now_ms)
        with self._lock:
            self._collect(now_ms)
        while self._end_some(now_ms):
            self._pace.rest()

    def stand_by(self) -> None:
        """Another instance looks at the jobs: what is open here is given up."""
        with self._lock:
            self._rounds.clear()
            self._next_ms.clear()
            self._looked.clear()

    def manage(
        self,
        name: str,
        *,
        now: Now,
        policy: str | None = None,
        is_dry: bool = False,
        asked_by: str = "",
    ) -> Managed:
        """A round on one job now, in the caller's thread. Dry: nothing is done, remembered or told.

        One that the schedule began is given up for it; a second one of somebody's own is refused.
        """
        with self._lock:
            if name in self._managed:
                raise Refused(
                    f"a look at {name} is under way",
                    why="one at a time looks at a job, and somebody asked before you",
                    fix="wait a moment, then ask again",
                )
            self._managed.add(name)
            self._rounds.pop(name, None)
        try:
            return self._manage(name, now, policy, is_dry, asked_by)
        finally:
            with self._lock:
                self._managed.discard(name)

    def _manage(self, name: str, now: Now, policy: str | None, is_dry: bool, asked_by: str) -> Managed:
        job = self._jobs.job(name) if name in self._jobs.names() else None
        if job is None:
            raise Refused(
                f"{name} does not run",
                why="policies look at jobs that have tasks",
                fix=f"`penstock job get {name}` says what it does and what is expected of it",
            )
        chosen, settings, answers = self._due_policies(name, job, True, now())
        if policy is not None and policy not in settings:
            raise NotFound(
                f"{name} has no policy {policy!r}",
                why=f"it has {some_of(settings)}",
                fix=did_you_mean(policy, settings, otherwise="name one of these, or none for all"),
            )
        wanted = {policy} if policy is not None else {*settings}
        found = Look(
            job=job,
            record=JobRecord(),
            version=0,
            began_ms=now(),
            waiting=set(),
            settings=settings,
            answers={each: answer for each, answer in answers.items() if each in wanted},
        )
        for runnable in chosen:
            if runnable.name in wanted:
                work = work_of(runnable, self._jobs, name, job.settings.get(runnable.name, {}))
                found.answers[runnable.name] = answer_of(runnable.name, work, now)
        off = tuple(sorted(each for each in wanted if not settings[each].enabled))
        for _ in range(TRIES):
            # Read after policies took their time: the scaler keeps what it knows in the same record.
            found.record, found.version = self._records.load(name)
            decision = self._decide(found, now())
            if is_dry:
                return Managed(decision=decision, verdicts=found.verdicts, off=off, is_dry=True)
            with self._lock:
                for each in found.answers:
                    self._looked[name, each] = now()
                refused = self._conclude(name, found, decision, now(), asked_by=asked_by)
            if refused is not None:
                break
        if refused is None:
            raise Refused(
                f"another control plane looked at {name} at the same time",
                why="what policies remember of it was written meanwhile, so nothing was done here",
                fix="ask again in a moment",
            )
        return Managed(decision=decision, verdicts=found.verdicts, off=off, refused=refused)

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

    def _begin_some(self, names: Sequence[str], now_ms: Millis) -> None:
        jobs = self._jobs.jobs(names)
        records = self._records.load_all([*jobs])
        for name, job in jobs.items():
            record = records[name]
            try:
                if isinstance(record, PenstockError):
                    raise record
                self._begin(name, job, *record, now_ms=now_ms)
            except StoreUnavailable:
                raise  # it is away for all of them
            except PenstockError as error:  # one job whose record is damaged must not stop the rest
                log.warning("policies cannot look at a job", job=name, error=error.what)
                self._next_ms[name] = now_ms + 60_000

    def _begin(self, name: str, job: ManagedJob, record: JobRecord, version: int, *, now_ms: Millis) -> None:
        asked = name in self._asked
        self._asked.discard(name)
        chosen, settings, answers = self._due_policies(name, job, asked, now_ms)
        every_ms = [int(found.every_s * 1000) for found in settings.values() if found.enabled]
        self._next_ms[name] = now_ms + min(every_ms, default=60_000)
        if not chosen and not answers:
            return
        found = Look(
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
            if key_of(name, policy.name) in busy:
                found.answers[policy.name] = 0, hung(policy.name, "its last look has not ended yet")
                continue
            found.waiting.add(policy.name)
            work = work_of(policy, self._jobs, name, job.settings.get(policy.name, {}))
            self._workers.start(key_of(name, policy.name), work, now_ms)
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

    def _collect(self, now_ms: Millis) -> None:
        for done in self._workers.take_finished():
            job, policy = parts_of(done.key)
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
            job, policy = parts_of(stuck.key)
            found = self._rounds.get(job)
            if found is not None and policy in found.waiting:
                found.waiting.discard(policy)
                found.answers[policy] = 0, hung(policy, f"no answer after {stuck.for_ms / 1000:.0f} s")
        for found in self._rounds.values():
            if not 0 <= now_ms - found.began_ms < ROUND_MS:
                for policy in found.waiting:
                    found.answers[policy] = 0, hung(policy, f"its turn did not come in {ROUND_MS // 1000} s")
                found.waiting.clear()

    # -- the end of a round -----------------------------------------------------------------------------

    def _end_some(self, now_ms: Millis) -> int:
        """End some rounds of which all answers are there; returns how many they were."""
        with self._lock:
            done = [name for name, found in self._rounds.items() if not found.waiting][:WRITTEN]
            quiet: list[Quiet] = []
            for name in done:
                found = self._rounds.pop(name)
                decision = self._decide(found, now_ms)
                if decision.apply is None:
                    quiet.append(self._quiet(name, found, decision, now_ms))
                else:
                    self._end(name, found, decision, now_ms)
            for name, error in keep_quiet(quiet, self._records, self._alerts, now_ms).items():
                self._not_kept(name, error, now_ms)
        return len(done)

    def _end(self, name: str, found: Look, decision: RoundDecision, now_ms: Millis) -> None:
        try:
            if self._conclude(name, found, decision, now_ms) is None:
                self._not_kept(name, None, now_ms)
        except PenstockError as error:
            self._not_kept(name, error, now_ms)

    def _not_kept(self, name: str, error: PenstockError | None, now_ms: Millis) -> None:
        """It is decided again; without an error, because others served the job meanwhile."""
        if error is not None:
            log.warning("a round of policies was not kept", job=name, error=error.what)
        self._next_ms[name] = now_ms + SOON_MS

    def _quiet(
        self, name: str, found: Look, decision: RoundDecision, now_ms: Millis, *, asked_by: str = ""
    ) -> Quiet:
        self.last[name] = decision
        record, is_news = remembered(found, decision)
        entry: Entry | None = None
        if is_news or asked_by:
            entry = entry_of(name, decision, found.verdicts, refused="", asked_by=asked_by, now_ms=now_ms)
        must_save = record != found.record or bool(asked_by)
        kept = Kept(job=name, record=record, version=found.version, entry=entry) if must_save else None
        return Quiet(job=name, kept=kept, alerts=alerts_of(found, decision))

    def _decide(self, found: Look, now_ms: Millis) -> RoundDecision:
        rivals = [
            Rival(
                verdict=verdict,
                priority=priority_of(found.settings[policy], priority),
                settings=found.settings[policy],
            )
            for policy, (priority, verdict) in found.answers.items()
        ]
        return decide_round(rivals, found.job.round_job, found.record, self._jobs.fleet(), now_ms=now_ms)

    def _conclude(
        self, name: str, found: Look, decision: RoundDecision, now_ms: Millis, *, asked_by: str = ""
    ) -> str | None:
        """Remember, do and tell what was decided; returns why it could not be done, "" if it was.

        None: another instance served the job meanwhile, and nothing was done here.
        """
        if decision.apply is None:
            quiet = self._quiet(name, found, decision, now_ms, asked_by=asked_by)
            lost = keep_quiet([quiet], self._records, self._alerts, now_ms)
            if (error := lost.get(name)) is not None:
                raise error
            return None if lost else ""
        self.last[name] = decision
        record, _ = remembered(found, decision)
        # Before anything is done: of two instances one saves, and only that one acts.
        if not self._records.save(name, record, found.version):
            return None
        refused = self._apply(name, found, decision.apply, record)
        entry = entry_of(name, decision, found.verdicts, refused=refused, asked_by=asked_by, now_ms=now_ms)
        self._journal.append(None, entry)
        self._alerts.report(name, alerts_of(found, decision), now_ms)
        return refused

    def _apply(self, name: str, found: Look, apply: Apply, record: JobRecord) -> str:
        """Do what was decided; returns why it could not be done, "" if it was."""
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
