"""The auto scaler as a service: looks at every job, decides, writes the scaler layer, checks what came of it.

By minutes for all jobs, whole pipelines together; in seconds for those that are behind. What it does is kept
in the job's record before it is done, under the version that all policies share: of two that would act, one
does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog

from penstock.core.clock import Millis
from penstock.core.errors import CorruptData, PenstockError
from penstock.core.journal import Journal
from penstock.core.workers import Rest, RoundPace, no_rest, share_of
from penstock.fleet.messages import TaskReport, summarize_error
from penstock.scaling.metrics.frames import MINUTE_MS, Frame, Incomplete, JobLoad, NoFrame, add_up
from penstock.scaling.policies.policy import RaiseAlert
from penstock.scaling.policies.ports import AlertSink, Kept, Records
from penstock.scaling.policies.round import FleetState, JobRecord, forget_action
from penstock.scaling.policies.service import Quiet, keep_quiet
from penstock.scaling.scaler.apply import (
    NAME,
    NOT_TOLD,
    Turn,
    action_of,
    alerts_of,
    changes_of,
    edges_of,
    entry_of,
    key_of,
    resolve,
    temper,
    unless_watched,
    with_part,
    without_own,
)
from penstock.scaling.scaler.decide import LookBack, decide
from penstock.scaling.scaler.observation import (
    Decision,
    Hold,
    Observation,
    Rebalance,
    Resize,
    ScalerMemory,
    Shape,
)
from penstock.scaling.scaler.observe import Capacity, ScalableJob, SecondsBook, hasten, minutes_of, observe
from penstock.scaling.scaler.observe import settings_of as scaler_settings_of
from penstock.scaling.scaler.pattern import History
from penstock.scaling.scaler.pipeline import decide_pipeline

Reports = Mapping[str, Sequence[TaskReport]]


class JobLayer(Protocol):
    """Jobs, tasks and containers, as the scaler needs them."""

    def task_counts(self) -> Mapping[str, tuple[int, int]]:
        """By job that has tasks: its generation, and how many they are."""

    def task_reports(self) -> Reports:
        """What tasks say now, by job."""

    def scalable_jobs(self, names: Sequence[str]) -> tuple[ScalableJob, ...]:
        """Those of these jobs that could be scaled."""

    def capacity(self) -> Capacity:
        """What a container has, and what is left of all."""

    def fleet(self) -> FleetState:
        """What the whole fleet allows now."""

    def patch(self, job: str, changes: Mapping[str, Any], *, expected_version: int, reason: str) -> None:
        """Write the scaler layer; VersionConflict if somebody wrote since."""


class Minutes(Protocol):
    """The metrics store, as the scaler needs it."""

    def newest(self) -> int:
        """The newest minute recorded; -1: none."""

    def frames(self, jobs: Sequence[str], minutes: int, *, now_ms: Millis) -> Mapping[str, Frame | NoFrame]:
        """What a decision may look at, of many jobs."""

    def history(self, job: str, *, now_ms: Millis) -> History | NoFrame:
        """The last 14 days."""


log = structlog.get_logger(__name__)

NEVER: tuple[Millis, int] = (-MINUTE_MS, -1)
LEAST, ROUNDS = 50, 30  # jobs that a round looks at by minutes, and rounds of a second that all of them take
RESTART_MAX_MS: Millis = 900_000  # what takes longer is not the restart alone
FAILED_MS: Millis = 60_000  # so long after a failure what seconds show may be what it left behind

_ByMinutes = tuple[Observation, Decision]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A decision of which nothing is done, with what is remembered and told of it."""

    quiet: Quiet
    may_be_over: bool  # others write to the record too: what held it may be over with the next look


class AutoScaler:
    """The scaler's rounds. Requires: ticks come one after another."""

    def __init__(
        self,
        jobs: JobLayer,
        minutes: Minutes,
        records: Records,
        journal: Journal,
        alerts: AlertSink,
        *,
        heartbeat_ms: Millis,
        rest: Rest = no_rest,
    ) -> None:
        """`rest` is called now and then in a round, for whoever waits meanwhile."""
        self._jobs, self._minutes, self._records = jobs, minutes, records
        self._journal, self._alerts, self._pace = journal, alerts, RoundPace(rest)
        self._held: dict[str, _Held] = {}  # not written yet
        self._seconds = SecondsBook(heartbeat_ms)
        self._kept: dict[str, tuple[JobRecord, int]] = {}  # as last read or written
        self._looked: dict[
            str, tuple[Millis, int]
        ] = {}  # by job: when last by minutes, and the newest one then
        self._slo_s: dict[str, float] = {}
        self._whole: dict[str, tuple[int, Millis]] = {}  # by job: generation and time of the last whole load
        self._restarts: dict[str, float] = {}  # measured, not yet written
        self._failures: dict[
            str, tuple[int, Millis]
        ] = {}  # by job: how many were told, when the last was new
        self.loads: dict[str, JobLoad | Incomplete] = {}
        self.decisions: dict[str, Decision] = {}

    # -- a round ----------------------------------------------------------------------------------------

    def tick(self, now_ms: Millis) -> None:
        """One look. A job that fails is left for the next."""
        self._held.clear()  # of a round that failed
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
        turn = Turn(self._jobs.capacity(), self._jobs.fleet(), reports, now_ms)
        self._look_at([jobs[name] for name in due if name in jobs], jobs, hurried, turn)

    def _forget(self, counts: Mapping[str, object]) -> None:
        for gone in self._looked.keys() - counts.keys():
            del self._looked[gone]
            for kept in (
                self._kept,
                self._slo_s,
                self._whole,
                self._restarts,
                self._failures,
                self.loads,
                self.decisions,
            ):
                kept.pop(gone, None)

    def _add_up(self, counts: Mapping[str, tuple[int, int]], reports: Reports, now_ms: Millis) -> None:
        """What each job does now, for people; and how long restarts take."""
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
        told = sum(report.restarts + sum(report.failures.values()) for report in reports)
        before, last_ms = self._failures.get(name, (told, -FAILED_MS))
        is_new = told > before or any(report.state == "backoff" for report in reports)
        self._failures[name] = told, now_ms if is_new else last_ms

    def _has_failed(self, name: str, now_ms: Millis) -> bool:
        return 0 <= now_ms - self._failures.get(name, (0, -FAILED_MS))[1] < FAILED_MS

    def _behind(self, counts: Mapping[str, tuple[int, int]], reports: Reports) -> dict[str, tuple[int, int]]:
        """Who is watched in seconds: from half of the SLO on, so that enough was seen when it is broken."""
        return {
            name: count
            for name, count in counts.items()
            if _lag_s(reports.get(name, ())) > self._slo_s.get(name, 0.0) / 2
        }

    def _lags(self, name: str, reports: Reports) -> bool:
        """Whether it is over its SLO, as far as that is known."""
        return name in self._slo_s and _lag_s(reports.get(name, ())) > self._slo_s[name]

    def _due(self, counts: Mapping[str, object], now_ms: Millis) -> list[str]:
        """Who is looked at by minutes: once for each that is recorded, or when none is for a minute."""
        newest = self._minutes.newest()
        pipelines: dict[str, list[str]] = {}
        for name in sorted(counts):
            at_ms, minute = self._looked.get(name, NEVER)
            if minute != newest or not 0 <= now_ms - at_ms < MINUTE_MS:
                pipelines.setdefault(name.partition(".")[0], []).append(name)
        # Whoever waits longest is first: more jobs than a minute has time for are served all the same.
        waiting = sorted(
            pipelines.values(), key=lambda members: min(self._looked.get(name, NEVER)[0] for name in members)
        )
        due: list[str] = []
        for members in waiting:  # decided on as a whole
            if len(due) < share_of(len(counts), least=LEAST, rounds=ROUNDS):
                due += members
        self._looked |= dict.fromkeys(due, (now_ms, newest))
        return due

    # -- decisions --------------------------------------------------------------------------------------

    def _look_at(
        self,
        due: Sequence[ScalableJob],
        jobs: Mapping[str, ScalableJob],
        hurried: Mapping[str, Frame],
        turn: Turn,
    ) -> None:
        """Decide, and serve privileged jobs first, in seconds as by minutes; then by priority."""
        looks = self._by_minutes(due, turn)
        for is_first in (True, False):
            some = sorted(
                (job for job in jobs.values() if job.config.privileged is is_first), key=_first_served
            )
            acted = self._hurry(some, hurried, turn)
            self._serve_looks(
                [job for job in some if job.name in looks and job.name not in acted], looks, turn
            )

    def _hurry(self, jobs: Sequence[ScalableJob], frames: Mapping[str, Frame], turn: Turn) -> set[str]:
        """Jobs over their SLO get more, or another deal of partitions, at once; all else waits."""
        acted = set()
        for job in jobs:
            name, frame = job.name, frames.get(job.name)
            if frame is None or not job.config.scaler.enabled:
                continue
            nothing = NoFrame(job=name, reason="")
            by_minutes = self._observe(job, nothing, turn)
            observation = hasten(by_minutes, frame, job)
            decision = decide(observation)
            self.decisions[name] = decision
            is_urgent = isinstance(decision, Resize | Rebalance) and decision.direction in ("up", "rebalance")
            if is_urgent and self._guarded(job, observation, decision, turn, is_hurried=True):
                acted.add(name)
        self._keep_held(turn.now_ms)
        return acted

    def _by_minutes(self, jobs: Sequence[ScalableJob], turn: Turn) -> dict[str, _ByMinutes]:
        frames = self._frames(jobs, turn.now_ms)
        observations = {job.name: self._observe(job, frames[job.name], turn) for job in jobs}
        decisions = self._decide(jobs, observations, turn.now_ms)
        return {name: (observation, decisions[name]) for name, observation in observations.items()}

    def _serve_looks(self, jobs: Sequence[ScalableJob], looks: Mapping[str, _ByMinutes], turn: Turn) -> None:
        for job in jobs:
            observation, decision = looks[job.name]
            if isinstance(decision, Resize) and turn.short_of(job, decision.shape):
                # Others were first in this round: the largest step that fits what they left.
                observation = replace(observation, remaining=turn.remaining)
                decision = temper(decide(observation, self._look_back(job.name, turn.now_ms)), observation)
            self.decisions[job.name] = decision
            self._guarded(job, observation, decision, turn, is_hurried=False)
        self._keep_held(turn.now_ms)

    def _observe(self, job: ScalableJob, frame: Frame | NoFrame, turn: Turn) -> Observation:
        reports = turn.reports.get(job.name, ())
        return observe(job, frame, self._memory(job), turn.capacity, reports, now_ms=turn.now_ms)

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

    # -- what becomes of a decision ---------------------------------------------------------------------

    def _guarded(
        self,
        job: ScalableJob,
        observation: Observation,
        decision: Decision,
        turn: Turn,
        *,
        is_hurried: bool,
    ) -> bool:
        """Whether something was done; what could not be kept is decided again with the next round."""
        try:
            return self._serve(job, observation, decision, turn, is_hurried=is_hurried)
        except PenstockError as error:
            self._not_kept(job.name, error)
            return False

    def _not_kept(self, job: str, error: PenstockError | None) -> None:
        """It is decided again; without an error, because others served the job meanwhile."""
        self._kept.pop(job, None)
        self._looked[job] = NEVER
        if error is not None:
            log.warning("a decision of the scaler was not kept", job=job, error=error.what)
            self.decisions[job] = Hold(reason=f"the last decision was not written: {error.what}")

    def _serve(
        self,
        job: ScalableJob,
        observation: Observation,
        decision: Decision,
        turn: Turn,
        *,
        is_hurried: bool,
    ) -> bool:
        """Keep what was learnt, do what may be done, tell what is new."""
        now_ms = turn.now_ms
        record, version = self._record(job.name)
        memory = self._memory(job).learning(decision.learnt, now_ms)
        if job.name in self._restarts:
            memory = memory.restarted(self._restarts.pop(job.name))
        if memory.pending is None:
            record = without_own(record)  # it was judged: others need not wait for it any more
        applied: Shape | None = None
        changed = record
        if isinstance(decision, Resize | Rebalance):
            decision = unless_watched(decision, observation, memory.pending)
        is_held = False
        if isinstance(decision, Resize | Rebalance):
            decision, applied, changed = resolve(job, decision, record, turn)
            self.decisions[job.name] = decision
            is_held = applied is None
        if applied is not None:
            assert isinstance(decision, Resize | Rebalance)
            memory = memory.acting(action_of(decision, applied, observation))
        said = key_of(decision)
        is_news = applied is not None or (
            said != memory.said and not (isinstance(decision, Hold) and decision.bound in NOT_TOLD)
        )
        if is_news:
            memory = memory.telling(said)
        changed = with_part(changed, scaler=memory)
        if applied is not None and memory.pending is None:
            changed = with_part(changed, open=None)  # an undo is not watched
        entry = entry_of(job, decision, applied, now_ms) if is_news else None
        alerts = None if is_hurried else {NAME: self._alerts_of(job, decision, memory, turn)}
        if applied is None:
            kept = Kept(job=job.name, record=changed, version=version, entry=entry)
            is_new = changed != self._kept[job.name][0]
            quiet = Quiet(job=job.name, kept=kept if is_new else None, alerts=alerts)
            self._held[job.name] = _Held(quiet=quiet, may_be_over=is_held)
            return False
        if not self._save(job.name, changed, version):
            self._not_kept(job.name, None)
            return False
        self._write(job, decision, applied, changed, turn)
        if entry is not None:
            self._journal.append(None, entry)
        if alerts is not None:
            self._alerts.report(job.name, alerts, now_ms)
        return True

    def _keep_held(self, now_ms: Millis) -> None:
        """Remember and tell of what nothing is done about, many jobs at a time."""
        held, self._held = self._held, {}
        for names in self._pace.slices([*held]):
            quiet = [held[name].quiet for name in names]
            lost = keep_quiet(quiet, self._records, self._alerts, now_ms)
            for item in quiet:
                if item.job in lost:
                    self._not_kept(item.job, lost[item.job])
                elif held[item.job].may_be_over:
                    del self._kept[item.job]
                elif item.kept is not None:
                    self._kept[item.job] = item.kept.record, item.kept.version + 1

    def _write(
        self, job: ScalableJob, decision: Decision, applied: Shape, record: JobRecord, turn: Turn
    ) -> None:
        changes = changes_of(job, applied)
        try:
            self._jobs.patch(job.name, changes, expected_version=job.expected_version, reason=decision.reason)
        except PenstockError:
            # It was not done after all: nothing is watched, nothing is expected of it.
            memory = record.scaler or ScalerMemory()
            undone = with_part(forget_action(record, NAME), scaler=memory.without_last())
            self._save(job.name, undone, self._kept[job.name][1])
            raise
        turn.spend(job, applied)

    def _alerts_of(
        self, job: ScalableJob, decision: Decision, memory: ScalerMemory, turn: Turn
    ) -> tuple[RaiseAlert, ...]:
        errors = [summarize_error(report.error) for report in turn.reports.get(job.name, ()) if report.error]
        remember_min = scaler_settings_of(job.config.scaler).remember_min
        return alerts_of(decision, memory, remember_min, errors, turn.now_ms)

    # -- memory -----------------------------------------------------------------------------------------

    def _readable(self, jobs: Mapping[str, ScalableJob]) -> dict[str, ScalableJob]:
        """Those of which it is known what is remembered."""
        found = dict(jobs)
        for name, record in self._records.load_all([name for name in jobs if name not in self._kept]).items():
            if isinstance(record, CorruptData):
                log.warning("the scaler cannot look at a job", job=name, error=record.what)
                self.decisions[name] = Hold(reason=record.what)
                del found[name]
            else:
                self._kept[name] = record
        return found

    def _record(self, job: str) -> tuple[JobRecord, int]:
        if job not in self._kept:
            self._kept[job] = self._records.load(job)
        return self._kept[job]

    def _memory(self, job: ScalableJob) -> ScalerMemory:
        memory = self._record(job.name)[0].scaler
        return memory if memory is not None and memory.birth == job.birth else ScalerMemory(birth=job.birth)

    def _save(self, job: str, record: JobRecord, version: int) -> bool:
        if record == self._kept[job][0]:
            return True
        if not self._records.save(job, record, version):
            del self._kept[job]
            return False
        self._kept[job] = record, version + 1
        return True


def _first_served(job: ScalableJob) -> tuple[bool, int, str]:
    return not job.config.privileged, -job.config.priority, job.name


def _lag_s(reports: Sequence[TaskReport]) -> float:
    """The longest that a record of any task waits, as far as tasks tell."""
    return max((report.metrics.get("lag_s", 0.0) for report in reports), default=0.0)
