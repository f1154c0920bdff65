"""Runs policies on jobs: starts those that are due, collects verdicts, applies one action, journals why.

Policies are not trusted: one that raises, hangs or returns an invalid value loses its own verdict only.
A job's record is stored with a version (compare-and-set), so only one instance at a time acts on a job.
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
from penstock.scaling.policies.ports import AlertSink, ManagedJob, ManagedJobs, PolicyRecords, RecordUpdate
from penstock.scaling.policies.process import Declared, Runnable
from penstock.scaling.policies.round import (
    Candidate,
    ChosenAction,
    Due,
    PolicyRecord,
    RoundDecision,
    decide_due,
    decide_round,
    entry_of,
    forget_action,
    keys_of,
)

Answer = tuple[int, Verdict | Broken]  # priority as declared, verdict


@dataclass(slots=True)
class OpenRound:
    """A round in progress: what is known of the job, and the verdicts so far."""

    job: ManagedJob
    record: PolicyRecord
    version: int
    began_ms: Millis
    waiting: set[str]
    settings: dict[str, ControlSettings]
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def verdicts(self) -> dict[str, Verdict | Broken]:
        return {policy: verdict for policy, (_, verdict) in self.answers.items()}


def updated_record(found: OpenRound, decision: RoundDecision) -> tuple[PolicyRecord, bool]:
    """The record after a round, and whether the outcome is new and must be journaled."""
    keys, known = keys_of(decision, found.verdicts), found.record.said
    # Not every policy runs in every round: the others keep their last outcome.
    unchanged = {each: key for each, key in known.items() if each in found.settings}
    is_news = any(known.get(each) != key for each, key in keys.items())
    return msgspec.structs.replace(decision.record, said=unchanged | keys), is_news


def alerts_of(found: OpenRound, decision: RoundDecision) -> dict[str, tuple[RaiseAlert, ...]]:
    """Alerts by policy that ran. A policy without alerts has an empty tuple, which ends its old ones."""
    alerts: dict[str, tuple[RaiseAlert, ...]] = {policy: () for policy in found.answers}
    for policy, alert in decision.alerts:
        alerts[policy] = (*alerts.get(policy, ()), alert)
    return alerts


def work_of(
    policy: Runnable, jobs: ManagedJobs, name: str, settings: Mapping[str, Any]
) -> Callable[[Now], Answer]:
    """The work of one policy on one job, to run in a worker thread."""

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
    """Run the policy in this thread; an exception becomes a `Broken` answer."""
    try:
        return work(now)
    except Exception as error:  # a policy raises what it likes
        return 0, Broken(policy=policy, how="raised", text=f"{type(error).__name__}: {error}"[:2000])


def priority_of(settings: ControlSettings, declared: int) -> int:
    """The priority in the job's settings, or else the policy's own."""
    return declared if settings.priority is None else settings.priority


def hung(policy: str, text: str) -> Broken:
    """The answer for a policy that timed out."""
    return Broken(policy=policy, how="hung", text=text)


def key_of(job: str, policy: str) -> str:
    """The worker key of a policy's work on a job."""
    return f"{job} {policy}"


def parts_of(key: str) -> tuple[str, str]:
    """Job and policy of a worker key."""
    job, _, policy = key.rpartition(" ")
    return job, policy


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """The result of a round that applies no action."""

    job: str
    update: RecordUpdate | None = None  # None: the record is unchanged
    alerts: Mapping[str, tuple[RaiseAlert, ...]] | None = None  # by source that ran; None: no source ran


def save_results(
    results: Sequence[RoundResult], records: PolicyRecords, alerts: AlertSink, now_ms: Millis
) -> dict[str, PenstockError | None]:
    """Store records and report alerts. Returns the jobs to decide again, with the error, or None if another
    instance changed their record.
    """
    try:
        lost = records.save_all([result.update for result in results if result.update is not None])
        reported = {
            result.job: result.alerts
            for result in results
            if result.alerts is not None and result.job not in lost
        }
        alerts.report_all(reported, now_ms)
    except PenstockError as error:
        return {result.job: error for result in results}
    return dict.fromkeys(lost)


log = structlog.get_logger(__name__)

LEAST, ROUNDS = 25, 40  # rounds started per tick at least; ticks of a second in which all jobs have one
TOGETHER = 5  # jobs started between two rests
WRITTEN = 25  # jobs stored in one transaction
TRIES = 5  # attempts of a requested round while others change the job's record
SOON_MS: Millis = 1_000
ROUND_MS: Millis = 60_000  # timeout of a round: policies that have not answered by then count as hung


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedRound:
    """The result of a round that a user requested."""

    decision: RoundDecision
    verdicts: Mapping[str, Verdict | Broken]
    off: tuple[str, ...]  # policies that are disabled for the job
    refused: str = ""  # why the chosen action could not be applied
    is_dry: bool = False


class PolicyService:
    """The policies of one instance. Ticks must not overlap; `manage` may be called from other threads."""

    def __init__(
        self,
        jobs: ManagedJobs,
        records: PolicyRecords,
        alerts: AlertSink,
        journal: Journal,
        policies: Sequence[Runnable],
        workers: Workers[Answer],
        *,
        load: Callable[[str, str], Runnable] | None = None,
        rest: Rest = no_rest,
    ) -> None:
        """`rest` is called between slices of a tick, without holding a lock."""
        self._jobs, self._records, self._alerts, self._journal = jobs, records, alerts, journal
        self._policies = {policy.name: policy for policy in policies}
        self._workers, self._load, self._pace = workers, load, RoundPace(rest, size=TOGETHER)
        self._rounds: dict[str, OpenRound] = {}
        self._next_ms: dict[str, Millis] = {}
        self._looked: dict[tuple[str, str], Millis] = {}
        self._asked: set[str] = set()
        self._managed: set[str] = set()  # jobs with a requested round in progress
        self._lock = threading.RLock()
        self.last: dict[str, RoundDecision] = {}

    def ask(self, job: str) -> None:
        """Run all policies on this job in the next tick, whatever the schedule."""
        self._asked.add(job)

    def tick(self, now_ms: Millis) -> None:
        """Start the rounds that are due, collect answers, and finish rounds."""
        names = self._jobs.names()
        with self._lock:
            self._forget({*names})
            taken = self._rounds.keys() | self._managed
            due = [name for name in names if name not in taken and self._may_be_due(name, now_ms)]
            # Requested jobs and those that have waited longest come first, so that no job starves.
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
        """Another instance is active: drop the rounds in progress."""
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
    ) -> RequestedRound:
        """Run a round on one job now, in the caller's thread. Dry: nothing is applied, stored or reported.

        A scheduled round in progress is dropped; a second requested round at the same time is refused.
        """
        with self._lock:
            if name in self._managed:
                raise Refused(
                    f"policies run on {name} already",
                    why="only one requested round per job may run at a time",
                    fix="wait some seconds, then try again",
                )
            self._managed.add(name)
            self._rounds.pop(name, None)
        try:
            return self._manage(name, now, policy, is_dry, asked_by)
        finally:
            with self._lock:
                self._managed.discard(name)

    def _manage(self, name: str, now: Now, policy: str | None, is_dry: bool, asked_by: str) -> RequestedRound:
        job = self._jobs.job(name) if name in self._jobs.names() else None
        if job is None:
            raise Refused(
                f"the job {name} does not run",
                why="policies run only on jobs that have tasks",
                fix=f"see its running and expected state: `penstock job get {name}`",
            )
        chosen, settings, answers = self._due_policies(name, job, True, now())
        if policy is not None and policy not in settings:
            raise NotFound(
                f"the job {name} has no policy {policy!r}",
                why=f"its policies are {some_of(settings)}",
                fix=did_you_mean(policy, settings, otherwise="name one of these, or no policy to run all"),
            )
        wanted = {policy} if policy is not None else {*settings}
        found = OpenRound(
            job=job,
            record=PolicyRecord(),
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
            # Read after the policies have run: the scaler writes to the same record meanwhile.
            found.record, found.version = self._records.load(name)
            decision = self._decide(found, now())
            if is_dry:
                return RequestedRound(decision=decision, verdicts=found.verdicts, off=off, is_dry=True)
            with self._lock:
                for each in found.answers:
                    self._looked[name, each] = now()
                refused = self._conclude(name, found, decision, now(), asked_by=asked_by)
            if refused is not None:
                break
        if refused is None:
            raise Refused(
                f"the record of {name} was changed at the same time",
                why=f"another writer changed it in each of {TRIES} attempts, so nothing was applied",
                fix="try again in some seconds",
            )
        return RequestedRound(decision=decision, verdicts=found.verdicts, off=off, refused=refused)

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
                raise  # the store is down for all jobs
            except PenstockError as error:  # a damaged record must not stop the other jobs
                log.warning("policies cannot run on a job", job=name, error=error.what)
                self._next_ms[name] = now_ms + 60_000

    def _begin(
        self, name: str, job: ManagedJob, record: PolicyRecord, version: int, *, now_ms: Millis
    ) -> None:
        asked = name in self._asked
        self._asked.discard(name)
        chosen, settings, answers = self._due_policies(name, job, asked, now_ms)
        every_ms = [int(found.every_s * 1000) for found in settings.values() if found.enabled]
        self._next_ms[name] = now_ms + min(every_ms, default=60_000)
        if not chosen and not answers:
            return
        found = OpenRound(
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
                found.answers[policy.name] = 0, hung(policy.name, "its last run has not ended yet")
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
                f"the policy {name!r} does not exist",
                why=f"it is not built in ({', '.join(sorted(self._policies))}), and has no setting `code`",
                fix=f"remove policies.{name} from the job's config, or set policies.{name}.code",
            )
        return self._load(name, settings.code)

    # -- answers of policies ----------------------------------------------------------------------------

    def _collect(self, now_ms: Millis) -> None:
        for done in self._workers.take_finished():
            job, policy = parts_of(done.key)
            found = self._rounds.get(job)
            if found is None or policy not in found.waiting:
                continue  # the round was dropped
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
                    found.answers[policy] = 0, hung(policy, f"it was not started within {ROUND_MS // 1000} s")
                found.waiting.clear()

    # -- the end of a round -----------------------------------------------------------------------------

    def _end_some(self, now_ms: Millis) -> int:
        """Finish some rounds that have all answers; returns how many."""
        with self._lock:
            done = [name for name, found in self._rounds.items() if not found.waiting][:WRITTEN]
            results: list[RoundResult] = []
            for name in done:
                found = self._rounds.pop(name)
                decision = self._decide(found, now_ms)
                if decision.apply is None:
                    results.append(self._result(name, found, decision, now_ms))
                else:
                    self._end(name, found, decision, now_ms)
            for name, error in save_results(results, self._records, self._alerts, now_ms).items():
                self._retry_soon(name, error, now_ms)
        return len(done)

    def _end(self, name: str, found: OpenRound, decision: RoundDecision, now_ms: Millis) -> None:
        try:
            if self._conclude(name, found, decision, now_ms) is None:
                self._retry_soon(name, None, now_ms)
        except PenstockError as error:
            self._retry_soon(name, error, now_ms)

    def _retry_soon(self, name: str, error: PenstockError | None, now_ms: Millis) -> None:
        """Run the job's round again soon. No error: another instance changed the job's record."""
        if error is not None:
            log.warning("the result of a policy round was not stored", job=name, error=error.what)
        self._next_ms[name] = now_ms + SOON_MS

    def _result(
        self, name: str, found: OpenRound, decision: RoundDecision, now_ms: Millis, *, asked_by: str = ""
    ) -> RoundResult:
        self.last[name] = decision
        record, is_news = updated_record(found, decision)
        entry: Entry | None = None
        if is_news or asked_by:
            entry = entry_of(name, decision, found.verdicts, refused="", asked_by=asked_by, now_ms=now_ms)
        must_save = record != found.record or bool(asked_by)
        update = (
            RecordUpdate(job=name, record=record, version=found.version, entry=entry) if must_save else None
        )
        return RoundResult(job=name, update=update, alerts=alerts_of(found, decision))

    def _decide(self, found: OpenRound, now_ms: Millis) -> RoundDecision:
        rivals = [
            Candidate(
                verdict=verdict,
                priority=priority_of(found.settings[policy], priority),
                settings=found.settings[policy],
            )
            for policy, (priority, verdict) in found.answers.items()
        ]
        return decide_round(rivals, found.job.round_job, found.record, self._jobs.fleet(), now_ms=now_ms)

    def _conclude(
        self, name: str, found: OpenRound, decision: RoundDecision, now_ms: Millis, *, asked_by: str = ""
    ) -> str | None:
        """Store, apply and journal a decision; returns why it could not be applied, "" if it was.

        None: another instance changed the job's record, and nothing was applied.
        """
        if decision.apply is None:
            result = self._result(name, found, decision, now_ms, asked_by=asked_by)
            lost = save_results([result], self._records, self._alerts, now_ms)
            if (error := lost.get(name)) is not None:
                raise error
            return None if lost else ""
        self.last[name] = decision
        record, _ = updated_record(found, decision)
        # Before the action: of two instances only one can store the record, and only that one acts.
        if not self._records.save(name, record, found.version):
            return None
        refused = self._apply(name, found, decision.apply, record)
        entry = entry_of(name, decision, found.verdicts, refused=refused, asked_by=asked_by, now_ms=now_ms)
        self._journal.append(None, entry)
        self._alerts.report(name, alerts_of(found, decision), now_ms)
        return refused

    def _apply(self, name: str, found: OpenRound, apply: ChosenAction, record: PolicyRecord) -> str:
        """Apply an action; returns why it could not be applied, "" if it was."""
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
