"""The auto scaler as a service: observes every job, decides, writes the scaler layer, checks the effect.

All jobs are decided by the minute, pipeline by pipeline; jobs with lag also by the second. An action is
stored in the job's record before it is applied. Policies compare-and-set the same record: only one acts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog

from penstock.core.clock import Millis
from penstock.core.errors import CorruptData, PenstockError
from penstock.core.journal import Journal
from penstock.core.workers import Rest, RoundPace, jobs_per_round, no_rest
from penstock.fleet.messages import TaskReport, summarize_error
from penstock.scaling.metrics.frames import MINUTE_MS, Frame, Incomplete, JobLoad, NoFrame, add_up
from penstock.scaling.policies.policy import RaiseAlert
from penstock.scaling.policies.ports import AlertSink, PolicyRecords, RecordUpdate
from penstock.scaling.policies.round import FleetState, PolicyRecord, forget_action
from penstock.scaling.policies.service import RoundResult, save_results
from penstock.scaling.scaler.apply import (
    NAME,
    NOT_JOURNALED,
    RoundContext,
    action_of,
    alerts_of,
    changes_of,
    edges_of,
    entry_of,
    key_of,
    resolve,
    temper,
    unless_pending,
    with_part,
    without_own,
)
from penstock.scaling.scaler.decide import LookBack, decide
from penstock.scaling.scaler.observation import (
    Decision,
    Hold,
    JobShape,
    Observation,
    Rebalance,
    Resize,
    ScalerMemory,
)
from penstock.scaling.scaler.observe import (
    ClusterCapacity,
    ScalableJob,
    SecondsAggregator,
    hasten,
    minutes_of,
    observe,
)
from penstock.scaling.scaler.observe import settings_of as scaler_settings_of
from penstock.scaling.scaler.pattern import History
from penstock.scaling.scaler.pipeline import decide_pipeline

Reports = Mapping[str, Sequence[TaskReport]]


class ScalableJobs(Protocol):
    """Jobs, tasks and containers: the scaler's interface to the control plane."""

    def task_counts(self) -> Mapping[str, tuple[int, int]]:
        """By job that has tasks: its generation and its number of tasks."""

    def task_reports(self) -> Reports:
        """The newest task reports, by job."""

    def scalable_jobs(self, names: Sequence[str]) -> tuple[ScalableJob, ...]:
        """Those of these jobs that can be scaled."""

    def capacity(self) -> ClusterCapacity:
        """Resources of one container, and what is left in the cluster."""

    def fleet(self) -> FleetState:
        """The fleet's limits, and how much of them is in use."""

    def patch(self, job: str, changes: Mapping[str, Any], *, expected_version: int, reason: str) -> None:
        """Write the scaler layer; VersionConflict if it was written since."""


class MinuteMetrics(Protocol):
    """The metrics store, as the scaler needs it."""

    def newest(self) -> int:
        """The newest minute recorded; -1: none."""

    def frames(self, jobs: Sequence[str], minutes: int, *, now_ms: Millis) -> Mapping[str, Frame | NoFrame]:
        """The minutes that decisions need, of many jobs."""

    def history(self, job: str, *, now_ms: Millis) -> History | NoFrame:
        """The last 14 days."""


log = structlog.get_logger(__name__)

NEVER: tuple[Millis, int] = (-MINUTE_MS, -1)
LEAST, ROUNDS = 50, 30  # jobs decided per round at least; rounds of a second in which all jobs are decided
RESTART_MAX_MS: Millis = 900_000  # a longer gap is not counted as a restart
FAILED_MS: Millis = 60_000  # for this time after a failure a job is not decided by the second

_ByMinutes = tuple[Observation, Decision]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unchanged:
    """A decision that changes nothing, with its record and alerts to store."""

    result: RoundResult
    was_held: bool  # by a rule that may not apply any more in the next round: read the record again


class AutoScaler:
    """The scaler's rounds. Requires: ticks do not overlap."""

    def __init__(
        self,
        jobs: ScalableJobs,
        minutes: MinuteMetrics,
        records: PolicyRecords,
        journal: Journal,
        alerts: AlertSink,
        *,
        heartbeat_ms: Millis,
        rest: Rest = no_rest,
    ) -> None:
        """`rest` is called between slices of a round, so that other threads can run."""
        self._jobs, self._minutes, self._records = jobs, minutes, records
        self._journal, self._alerts, self._pace = journal, alerts, RoundPace(rest)
        self._unchanged: dict[str, _Unchanged] = {}  # to be stored at the end of the round
        self._seconds = SecondsAggregator(heartbeat_ms)
        self._stored: dict[str, tuple[PolicyRecord, int]] = {}  # as last read or written
        self._looked: dict[
            str, tuple[Millis, int]
        ] = {}  # by job: time of the last decision by the minute, and the newest minute then
        self._slo_s: dict[str, float] = {}
        self._whole: dict[
            str, tuple[int, Millis]
        ] = {}  # by job: generation and time of the last complete load
        self._restarts: dict[str, float] = {}  # measured, not stored yet
        self._failures: dict[
            str, tuple[int, Millis]
        ] = {}  # by job: failures reported, and time of the newest
        self.loads: dict[str, JobLoad | Incomplete] = {}
        self.decisions: dict[str, Decision] = {}

    # -- a round ----------------------------------------------------------------------------------------

    def tick(self, now_ms: Millis) -> None:
        """One round. A job whose decision cannot be stored is decided again in the next."""
        self._unchanged.clear()  # left over if the last round failed
        counts, reports = self._jobs.task_counts(), self._jobs.task_reports()
        self._forget(counts)
        self._add_up(counts, reports, now_ms)
        self._seconds.observe(now_ms, self._behind(counts, reports), reports)
        due = self._due(counts, now_ms)
        hurried = {
            name: frame
            for name in counts
            if self._lags(name, reports)
            and not self._has_failed(name, now_ms)
            and isinstance(frame := self._seconds.frame(name), Frame)
        }
        if not due and not hurried:
            return
        jobs = {job.name: job for job in self._jobs.scalable_jobs([*dict.fromkeys([*due, *hurried])])}
        for job in jobs.values():
            self._slo_s[job.name] = job.config.slo.lag_s
        jobs = self._readable(jobs)
        if not jobs:
            return
        context = RoundContext(self._jobs.capacity(), self._jobs.fleet(), reports, now_ms)
        self._decide_all([jobs[name] for name in due if name in jobs], jobs, hurried, context)

    def _forget(self, counts: Mapping[str, object]) -> None:
        for gone in self._looked.keys() - counts.keys():
            del self._looked[gone]
            for by_job in (
                self._stored,
                self._slo_s,
                self._whole,
                self._restarts,
                self._failures,
                self.loads,
                self.decisions,
            ):
                by_job.pop(gone, None)

    def _add_up(self, counts: Mapping[str, tuple[int, int]], reports: Reports, now_ms: Millis) -> None:
        """Update each job's current load, which users see, and measure restarts."""
        for name, (generation, task_count) in counts.items():
            load = add_up(reports.get(name, ()), task_count=task_count, generation=generation, at_ms=now_ms)
            self.loads[name] = load
            self._count_failures(name, reports.get(name, ()), now_ms)
            if isinstance(load, Incomplete):
                continue
            before = self._whole.get(name)
            if before is not None and before[0] != generation and now_ms - before[1] < RESTART_MAX_MS:
                self._restarts[name] = (now_ms - before[1]) / 1000
            self._whole[name] = generation, now_ms

    def _count_failures(self, name: str, reports: Sequence[TaskReport], now_ms: Millis) -> None:
        total = sum(report.restarts + sum(report.failures.values()) for report in reports)
        before, last_ms = self._failures.get(name, (total, -FAILED_MS))
        is_new = total > before or any(report.state == "backoff" for report in reports)
        self._failures[name] = total, now_ms if is_new else last_ms

    def _has_failed(self, name: str, now_ms: Millis) -> bool:
        return 0 <= now_ms - self._failures.get(name, (0, -FAILED_MS))[1] < FAILED_MS

    def _behind(self, counts: Mapping[str, tuple[int, int]], reports: Reports) -> dict[str, tuple[int, int]]:
        """Jobs to observe by the second: from half of the SLO on, so that data is there when it is broken."""
        return {
            name: count
            for name, count in counts.items()
            if _lag_s(reports.get(name, ())) > self._slo_s.get(name, 0.0) / 2
        }

    def _lags(self, name: str, reports: Reports) -> bool:
        """Whether the job's lag is known to be over its SLO."""
        return name in self._slo_s and _lag_s(reports.get(name, ())) > self._slo_s[name]

    def _due(self, counts: Mapping[str, object], now_ms: Millis) -> list[str]:
        """Jobs to decide by the minute: once for each recorded minute, or after a minute without one."""
        newest = self._minutes.newest()
        pipelines: dict[str, list[str]] = {}
        for name in sorted(counts):
            at_ms, minute = self._looked.get(name, NEVER)
            if minute != newest or not 0 <= now_ms - at_ms < MINUTE_MS:
                pipelines.setdefault(name.partition(".")[0], []).append(name)
        # Longest waiting first, so that no job starves if there are more than a minute has time for.
        waiting = sorted(
            pipelines.values(), key=lambda members: min(self._looked.get(name, NEVER)[0] for name in members)
        )
        due: list[str] = []
        for members in waiting:  # a pipeline is decided as a whole
            if len(due) < jobs_per_round(len(counts), least=LEAST, rounds=ROUNDS):
                due += members
        self._looked |= dict.fromkeys(due, (now_ms, newest))
        return due

    # -- decisions --------------------------------------------------------------------------------------

    def _decide_all(
        self,
        due: Sequence[ScalableJob],
        jobs: Mapping[str, ScalableJob],
        hurried: Mapping[str, Frame],
        context: RoundContext,
    ) -> None:
        """Decide and apply, privileged jobs first, then by priority; by the second before by the minute."""
        planned = self._by_minutes(due, context)
        for is_first in (True, False):
            some = sorted(
                (job for job in jobs.values() if job.config.privileged is is_first), key=_serving_order
            )
            acted = self._hurry(some, hurried, context)
            self._serve_all(
                [job for job in some if job.name in planned and job.name not in acted], planned, context
            )

    def _hurry(
        self, jobs: Sequence[ScalableJob], frames: Mapping[str, Frame], context: RoundContext
    ) -> set[str]:
        """Scale up or rebalance jobs over their SLO at once; any other change waits for the minute."""
        acted = set()
        for job in jobs:
            name, frame = job.name, frames.get(job.name)
            if frame is None or not job.config.scaler.enabled:
                continue
            nothing = NoFrame(job=name, reason="")
            by_minutes = self._observe(job, nothing, context)
            observation = hasten(by_minutes, frame, job)
            decision = decide(observation)
            self.decisions[name] = decision
            is_urgent = isinstance(decision, Resize | Rebalance) and decision.direction in ("up", "rebalance")
            if is_urgent and self._guarded(job, observation, decision, context, is_hurried=True):
                acted.add(name)
        self._store_unchanged(context.now_ms)
        return acted

    def _by_minutes(self, jobs: Sequence[ScalableJob], context: RoundContext) -> dict[str, _ByMinutes]:
        frames = self._frames(jobs, context.now_ms)
        observations = {job.name: self._observe(job, frames[job.name], context) for job in jobs}
        decisions = self._decide(jobs, observations, context.now_ms)
        return {name: (observation, decisions[name]) for name, observation in observations.items()}

    def _serve_all(
        self, jobs: Sequence[ScalableJob], planned: Mapping[str, _ByMinutes], context: RoundContext
    ) -> None:
        for job in jobs:
            observation, decision = planned[job.name]
            if isinstance(decision, Resize) and context.short_of(job, decision.shape):
                # Jobs served before it used up resources: take the largest step that fits what is left.
                observation = replace(observation, remaining=context.remaining)
                decision = temper(decide(observation, self._look_back(job.name, context.now_ms)), observation)
            self.decisions[job.name] = decision
            self._guarded(job, observation, decision, context, is_hurried=False)
        self._store_unchanged(context.now_ms)

    def _observe(self, job: ScalableJob, frame: Frame | NoFrame, context: RoundContext) -> Observation:
        reports = context.reports.get(job.name, ())
        return observe(job, frame, self._memory(job), context.capacity, reports, now_ms=context.now_ms)

    def _frames(self, jobs: Sequence[ScalableJob], now_ms: Millis) -> dict[str, Frame | NoFrame]:
        by_range: dict[int, list[str]] = {}
        for job in jobs:
            by_range.setdefault(minutes_of(job), []).append(job.name)
        found: dict[str, Frame | NoFrame] = {}
        for minutes, names in by_range.items():
            for some in self._pace.slices(names):
                found |= self._minutes.frames(some, minutes, now_ms=now_ms)
        return found

    def _decide(
        self, jobs: Sequence[ScalableJob], observations: Mapping[str, Observation], now_ms: Millis
    ) -> dict[str, Decision]:
        found: dict[str, Decision] = {}
        pipelines: dict[str, list[ScalableJob]] = {}
        for job in jobs:
            if job.config.scaler.enabled:
                pipelines.setdefault(job.pipeline, []).append(job)
            else:
                found[job.name] = Hold(reason="the scaler is switched off for this job", bound="enabled")
        for members in pipelines.values():
            look_back = {job.name: self._look_back(job.name, now_ms) for job in members}
            own = {job.name: observations[job.name] for job in members}
            edges = edges_of(members)
            if edges:
                found |= decide_pipeline(own, edges, look_back)
                self._pace.step(len(own))
            else:
                found |= {name: decide(own[name], look_back[name]) for name in self._pace.over(own)}
        return {
            name: temper(decision, observations[name]) if name in observations else decision
            for name, decision in found.items()
        }

    def _look_back(self, job: str, now_ms: Millis) -> LookBack:
        return lambda: self._minutes.history(job, now_ms=now_ms)

    # -- applying a decision ----------------------------------------------------------------------------

    def _guarded(
        self,
        job: ScalableJob,
        observation: Observation,
        decision: Decision,
        context: RoundContext,
        *,
        is_hurried: bool,
    ) -> bool:
        """Whether an action was applied; a decision that could not be stored is made again next round."""
        try:
            return self._serve(job, observation, decision, context, is_hurried=is_hurried)
        except PenstockError as error:
            self._retry_soon(job.name, error)
            return False

    def _retry_soon(self, job: str, error: PenstockError | None) -> None:
        """Decide again in the next round. No error: another instance changed the job's record."""
        self._stored.pop(job, None)
        self._looked[job] = NEVER
        if error is not None:
            log.warning("a decision of the scaler was not stored", job=job, error=error.what)
            self.decisions[job] = Hold(reason=f"the last decision was not stored: {error.what}")

    def _serve(
        self,
        job: ScalableJob,
        observation: Observation,
        decision: Decision,
        context: RoundContext,
        *,
        is_hurried: bool,
    ) -> bool:
        """Store what was learnt, apply the action if it is allowed, journal what is new."""
        now_ms = context.now_ms
        record, version = self._record(job.name)
        memory = self._memory(job).with_learnt(decision.learnt, now_ms)
        if job.name in self._restarts:
            memory = memory.with_restart(self._restarts.pop(job.name))
        if memory.pending is None:
            record = without_own(record)  # the last action was judged: policies need not wait for it
        applied: JobShape | None = None
        changed = record
        if isinstance(decision, Resize | Rebalance):
            decision = unless_pending(decision, observation, memory.pending)
        is_held = False
        if isinstance(decision, Resize | Rebalance):
            decision, applied, changed = resolve(job, decision, record, context)
            self.decisions[job.name] = decision
            is_held = applied is None
        if applied is not None:
            assert isinstance(decision, Resize | Rebalance)
            memory = memory.with_action(action_of(decision, applied, observation))
        key = key_of(decision)
        is_news = applied is not None or (
            key != memory.said and not (isinstance(decision, Hold) and decision.bound in NOT_JOURNALED)
        )
        if is_news:
            memory = memory.with_journal_key(key)
        changed = with_part(changed, scaler=memory)
        if applied is not None and memory.pending is None:
            changed = with_part(changed, open=None)  # the effect of an undo is not checked
        entry = entry_of(job, decision, applied, now_ms) if is_news else None
        alerts = None if is_hurried else {NAME: self._alerts_of(job, decision, memory, context)}
        if applied is None:
            update = RecordUpdate(job=job.name, record=changed, version=version, entry=entry)
            is_new = changed != self._stored[job.name][0]
            result = RoundResult(job=job.name, update=update if is_new else None, alerts=alerts)
            self._unchanged[job.name] = _Unchanged(result=result, was_held=is_held)
            return False
        if not self._save(job.name, changed, version):
            self._retry_soon(job.name, None)
            return False
        self._write(job, decision, applied, changed, context)
        if entry is not None:
            self._journal.append(None, entry)
        if alerts is not None:
            self._alerts.report(job.name, alerts, now_ms)
        return True

    def _store_unchanged(self, now_ms: Millis) -> None:
        """Store the records and alerts of decisions that change nothing, many jobs at a time."""
        unchanged, self._unchanged = self._unchanged, {}
        for names in self._pace.slices([*unchanged]):
            results = [unchanged[name].result for name in names]
            lost = save_results(results, self._records, self._alerts, now_ms)
            for result in results:
                if result.job in lost:
                    self._retry_soon(result.job, lost[result.job])
                elif unchanged[result.job].was_held:
                    del self._stored[result.job]
                elif result.update is not None:
                    self._stored[result.job] = result.update.record, result.update.version + 1

    def _write(
        self,
        job: ScalableJob,
        decision: Decision,
        applied: JobShape,
        record: PolicyRecord,
        context: RoundContext,
    ) -> None:
        changes = changes_of(job, applied)
        try:
            self._jobs.patch(job.name, changes, expected_version=job.expected_version, reason=decision.reason)
        except PenstockError:
            # The write was refused: take the action out of the record.
            memory = record.scaler or ScalerMemory()
            undone = with_part(forget_action(record, NAME), scaler=memory.without_last())
            self._save(job.name, undone, self._stored[job.name][1])
            raise
        context.spend(job, applied)

    def _alerts_of(
        self, job: ScalableJob, decision: Decision, memory: ScalerMemory, context: RoundContext
    ) -> tuple[RaiseAlert, ...]:
        errors = [
            summarize_error(report.error) for report in context.reports.get(job.name, ()) if report.error
        ]
        remember_min = scaler_settings_of(job.config.scaler).remember_min
        return alerts_of(decision, memory, remember_min, errors, context.now_ms)

    # -- memory -----------------------------------------------------------------------------------------

    def _readable(self, jobs: Mapping[str, ScalableJob]) -> dict[str, ScalableJob]:
        """The jobs whose record can be read."""
        found = dict(jobs)
        for name, record in self._records.load_all(
            [name for name in jobs if name not in self._stored]
        ).items():
            if isinstance(record, CorruptData):
                log.warning("the scaler cannot read a job's record", job=name, error=record.what)
                self.decisions[name] = Hold(reason=record.what)
                del found[name]
            else:
                self._stored[name] = record
        return found

    def _record(self, job: str) -> tuple[PolicyRecord, int]:
        if job not in self._stored:
            self._stored[job] = self._records.load(job)
        return self._stored[job]

    def _memory(self, job: ScalableJob) -> ScalerMemory:
        memory = self._record(job.name)[0].scaler
        return memory if memory is not None and memory.birth == job.birth else ScalerMemory(birth=job.birth)

    def _save(self, job: str, record: PolicyRecord, version: int) -> bool:
        if record == self._stored[job][0]:
            return True
        if not self._records.save(job, record, version):
            del self._stored[job]
            return False
        self._stored[job] = record, version + 1
        return True


def _serving_order(job: ScalableJob) -> tuple[bool, int, str]:
    return not job.config.privileged, -job.config.priority, job.name


def _lag_s(reports: Sequence[TaskReport]) -> float:
    """The longest time that a record waits for any task, as far as tasks report it."""
    return max((report.metrics.get("lag_s", 0.0) for report in reports), default=0.0)
