"""Builds the scaler's `Observation` from a job's config, metrics and memory. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, inf
from typing import Any

import numpy as np

from penstock.core.clock import Millis
from penstock.fleet.messages import TaskReport
from penstock.jobs.config import JobConfig, ScalerSettings
from penstock.scaling.metrics.frames import METRICS, MINUTE_MS, Frame, NoFrame, Points
from penstock.scaling.metrics.minutes import MinuteAggregator
from penstock.scaling.scaler.estimators import join_facts
from penstock.scaling.scaler.load import STAGING_MIN
from penstock.scaling.scaler.observation import (
    DAY_MIN,
    KINDS,
    AvailableResources,
    DecisionSettings,
    JobShape,
    Observation,
    Remaining,
    ScalerJobFacts,
    ScalerMemory,
    ShapeLimits,
    State,
    TaskResources,
    with_mapping,
)
from penstock.scaling.scaler.rebalance import can_rebalance, loads_of
from penstock.scaling.scaler.window import METRICS_OPTIONAL, METRICS_REQUIRED

# Limit of threads per task if containers declare their size; a fifth of a container limits it further (V-E).
THREADS_MAX = 64
STALE_STEPS = 4
JOIN_MORE_MIN = 30  # minutes beyond a join's window, for disorder and lag
_OWN = ("generation", "recovery_s", "target", "up_at", "history_hours")
_STATES: Mapping[str, State] = {"join": "join"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalableJob:
    """A job as the scaler sees it."""

    name: str
    birth: str
    pipeline: str
    expected_version: int
    generation: int
    task_count: int
    mapping: tuple[int, ...] = ()  # by partition, the task that reads it; empty: not known
    is_settled: bool  # running, without an open plan or hold
    config: JobConfig  # the running config
    layer: Mapping[str, Any] = field(default_factory=dict)  # the scaler layer
    oncall: frozenset[str] = frozenset()  # paths set in the oncall layer, which the scaler may not change
    created_ms: Millis = 0
    changed_ms: Millis = 0  # time of the last change of its running config
    updated_ms: Millis | None = None  # time of its owner's last change after its creation

    @property
    def shape(self) -> JobShape:
        """Its tasks as they run now."""
        resources = self.config.resources
        task = TaskResources(
            threads=self.config.threads, **{kind: float(getattr(resources, kind)) for kind in KINDS}
        )
        shape = JobShape(task_count=self.task_count, task=task)
        return with_mapping(shape, self.mapping) if self.mapping else shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCapacity:
    """Resources of one container, and what is left in the cluster; infinite if not limited."""

    container: AvailableResources = field(default_factory=AvailableResources)
    remaining: AvailableResources = field(default_factory=AvailableResources)
    privileged_only: bool = False


@lru_cache(maxsize=1024)
def settings_of(given: ScalerSettings) -> DecisionSettings:
    """Decision settings from a job's config."""
    own = {name: getattr(given, name) for name in _OWN}
    idle: dict[str, Any] = {}
    if given.quiet_s is not None:
        minutes = min(14 * DAY_MIN, max(1, ceil(given.quiet_s / 60)))
        idle = {"down_after_min": minutes, "reactive_quiet_min": minutes}
    return DecisionSettings(settle_min=min(60, ceil(given.settle_s / 60)), **idle, **own)


@lru_cache(maxsize=1024)
def _in_steps(settings: DecisionSettings, settle_s: float, step_ms: int) -> DecisionSettings:
    """The settings for frames whose "minute" is a step of some seconds."""
    return replace(settings, settle_min=min(60, ceil(settle_s * 1000 / step_ms)), stale_min=STALE_STEPS)


def minutes_needed(settings: DecisionSettings) -> int:
    """How many minutes a decision may read, apart from the history of 14 days."""
    idle = settings.reactive_quiet_min if settings.generation == "reactive" else settings.down_after_min
    return min(14 * DAY_MIN, max(2 * STAGING_MIN, idle + settings.window_min))


def minutes_of(job: ScalableJob) -> int:
    """The same for one job: for a join at least the time for which it stores records, up to a day."""
    needed, join = minutes_needed(settings_of(job.config.scaler)), join_facts(job.config, job.created_ms)
    return needed if join is None else max(needed, min(DAY_MIN, ceil(join.window_s / 60) + JOIN_MORE_MIN))


def observe(
    job: ScalableJob,
    frame: Frame | NoFrame,
    memory: ScalerMemory,
    capacity: ClusterCapacity,
    reports: Sequence[TaskReport] = (),
    *,
    now_ms: Millis,
) -> Observation:
    """The observation of a job from its minutes, and from its tasks' newest reports by partition."""
    config = job.config
    updated = job.updated_ms
    by_partition = loads_of(reports, job.mapping, generation=job.generation)
    facts = ScalerJobFacts(
        name=job.name,
        shape=job.shape,
        limits=_limits(job, capacity.container),
        partitions=config.partitions,
        priority=config.priority,
        is_privileged=config.privileged,
        slo_lag_s=config.slo.lag_s,
        state=_state(config),
        join=join_facts(config, job.created_ms),
        restart_s=memory.restart_s,
        changed_minute=job.changed_ms // MINUTE_MS,
        updated_minute=None if updated is None else updated // MINUTE_MS,
        is_changing=not job.is_settled,
        can_rebalance=can_rebalance(config.partitions, job.task_count, by_partition),
    )
    return Observation(
        job=facts,
        frame=_with_read_limit(frame, config, job.task_count),
        now_ms=now_ms,
        footprint=memory.footprint,
        remaining=Remaining(room=capacity.remaining, privileged_only=capacity.privileged_only),
        past=memory.past,
        settings=settings_of(config.scaler),
        by_partition=by_partition,
    )


def hasten(observation: Observation, frame: Frame, job: ScalableJob) -> Observation:
    """The observation by the second: no action is pending, and updates and bad outcomes count as of now."""
    settings, facts, now_minute = observation.settings, observation.job, observation.now_ms // MINUTE_MS
    step = observation.now_ms // frame.step_ms
    updated = facts.updated_minute
    is_updated = updated is not None and 0 <= now_minute - updated <= settings.update_recent_min
    footprint = observation.footprint
    learnt = footprint.thread_rate_minute
    if updated is not None and (learnt is None or learnt < updated):
        footprint = replace(footprint, thread_rate=None)
    past = tuple(
        replace(action, at_minute=step, judged_minute=step)
        for action in observation.past
        if action.judged_minute is not None
        and action.outcome == "ineffective"
        and 0 <= now_minute - action.judged_minute <= settings.remember_min
        and (updated is None or updated < action.at_minute)
    )
    return replace(
        observation,
        job=replace(
            facts,
            changed_minute=job.changed_ms // frame.step_ms,
            updated_minute=step - 1 if is_updated else None,
        ),
        frame=_with_read_limit(frame, job.config, job.task_count),
        footprint=replace(footprint, thread_rate_minute=step),
        past=past,
        settings=_in_steps(settings, job.config.scaler.settle_s, frame.step_ms),
    )


def _limits(job: ScalableJob, container: AvailableResources) -> ShapeLimits:
    config = job.config
    has_threads = config.isolation == "process" and container.cpu < inf
    return ShapeLimits(
        task_count_min=config.scaler.task_count_min,
        task_count_max=config.task_count_max,
        threads_max=max(THREADS_MAX if has_threads else 1, config.threads),
        container=container,
        set_by="oncall" if "task_count_max" in job.oncall else "",
    )


def _state(config: JobConfig) -> State:
    if config.kind == "stateless":
        return "none"
    operator = config.computation.get("operator")
    return "other" if operator is None else _STATES.get(operator, "aggregation")


def _with_read_limit(frame: Frame | NoFrame, config: JobConfig, task_count: int) -> Frame | NoFrame:
    """Count a task that reads its maximum per trigger as busy, however short its batches are."""
    trigger_ms = config.trigger_ms
    if isinstance(frame, NoFrame) or trigger_ms <= 0:
        return frame
    most = config.batch_rows_max * 1000 / trigger_ms * task_count
    values = frame.values
    if "busy_mean" not in values or "processed_rate" not in values:
        return frame
    reading = np.minimum(values["processed_rate"] / most, 1.0)
    if not (reading > values["busy_mean"]).any():
        return frame
    return replace(frame, values={**values, "busy_mean": np.maximum(values["busy_mean"], reading)})


STEPS = 6
_ORDER = list(METRICS)
_RATES = [_ORDER.index(name) for name in METRICS_REQUIRED]
_NAMES = (*METRICS_REQUIRED, *METRICS_OPTIONAL)
_COLUMNS = [_ORDER.index(name) for name in _NAMES]


@dataclass(slots=True)
class _Steps:
    generation: int
    last: int = -1
    rows: deque[Points] = field(default_factory=lambda: deque(maxlen=STEPS))


class SecondsAggregator:
    """The last steps of some seconds of the jobs with lag. Requires: calls do not overlap."""

    def __init__(self, heartbeat_ms: Millis) -> None:
        self.step_ms = 2 * heartbeat_ms
        self._book = MinuteAggregator(self.step_ms, covered_min_ms=heartbeat_ms / 2, whole_batches=True)
        self._steps: dict[str, _Steps] = {}

    def observe(
        self,
        now_ms: Millis,
        watched: Mapping[str, tuple[int, int]],
        reports: Mapping[str, Sequence[TaskReport]],
    ) -> None:
        """Add reports. `watched`: by job, its generation and number of tasks."""
        ended = self._book.observe(now_ms, watched, reports)
        if ended is not None:
            for name, row in zip(ended.jobs, ended.values, strict=True):
                self._put(name, ended.minute, row)
        # Forget jobs only now, since the step that ended was for those watched before.
        for gone in self._steps.keys() - watched.keys():
            del self._steps[gone]
        for name, (generation, _) in watched.items():
            found = self._steps.get(name)
            if found is None or found.generation != generation:
                self._steps[name] = _Steps(generation)

    def _put(self, job: str, step: int, row: Points) -> None:
        steps = self._steps.get(job)
        if steps is None:
            return
        if steps.last >= 0 and not 0 < step - steps.last <= STEPS:
            steps.rows.clear()  # rows before and after a gap do not belong together
        if not np.isnan(row[_RATES]).any():
            steps.last = step
            steps.rows.append(row)

    def frame(self, job: str) -> Frame | NoFrame:
        """The last seconds of a job, or why they cannot be used."""
        steps = self._steps.get(job)
        if steps is None or not steps.rows:
            return NoFrame(job=job, reason="it has not been observed for long enough")
        columns = np.array(steps.rows).T[_COLUMNS]
        return Frame(
            job=job,
            first_minute=steps.last - len(steps.rows) + 1,
            values=dict(zip(_NAMES, columns, strict=True)),
            step_ms=self.step_ms,
        )
