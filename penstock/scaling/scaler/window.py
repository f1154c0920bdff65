"""A job's load in its last minutes, or why it cannot be used for a decision (I20). Pure.

A value that is missing, negative or NaN is unknown. Unknown is not zero: there is no action then.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import inf, nan
from typing import NamedTuple

from penstock.scaling.metrics.frames import NoFrame, Points
from penstock.scaling.scaler.observation import Hold, Observation

# Without the required metrics there is no decision; without an optional one, none about what it measures.
METRICS_REQUIRED = ("ingest_rate", "processed_rate", "busy_mean", "lag_records", "lag_s", "task_count")
METRICS_OPTIONAL = (
    "busy", "lag_spread", "oom", "restarts", "exceptions", "cpu", "memory_task_mb", "disk_mb", "network_mb_s",
    "key_count", "state_bytes", "watermark_lag_s",
)  # fmt: skip
# Clocks differ a little, so a busy share may be above 1; above this it is invalid.
BUSY_MAX = 1.5
# Lag growth below this share of the input rate is jitter between two triggers.
LAG_GROWTH_MIN = 0.02


class LoadWindow(NamedTuple):
    """The load of a job in its last minutes. Optional values that are not known are NaN."""

    end_minute: int  # exclusive
    minutes: int
    input_rate: float  # X, records per second arriving
    processed_rate: float
    busy_mean: float
    busy: float  # of the busiest task
    lag_records: float  # B
    lag_growth: float  # records per second
    lag_grows: bool
    lag_s: float  # how long the oldest unread record has waited
    lag_s_before: float  # the same a minute before
    lag_s_min: float  # smallest of these minutes
    lag_step: float  # lag growth in the last minute, records per second
    lag_spread: float
    oom: float
    failures: float  # restarts and exceptions
    processed_min: float  # smallest rate of these minutes
    processed_last: float  # rate of the newest minute
    input_mean: float  # mean of these minutes

    @property
    def is_filling(self) -> bool:
        """Whether the lag grows by more than the jitter between two triggers."""
        return self.lag_growth > LAG_GROWTH_MIN * self.input_rate

    @property
    def is_stuck(self) -> bool:
        """Whether nothing was processed in the newest minute although records wait."""
        return self.processed_last <= 0 and (self.lag_records > 0 or self.processed_rate <= 0)

    @property
    def time_lagged(self) -> float:
        """Equation 1: unread records over the processing rate."""
        if self.lag_records <= 0:
            return 0.0
        return self.lag_records / self.processed_rate if self.processed_rate > 0 else inf


def read_window(observation: Observation) -> LoadWindow | Hold:
    """The complete minutes since the job's last change, or why they cannot be used."""
    frame, job, settings = observation.frame, observation.job, observation.settings
    problem = _problem_with_job(observation)
    if problem is not None:
        return problem
    if isinstance(frame, NoFrame):
        return Hold(reason=frame.reason, bound="metrics")
    values = frame.values
    minutes = frame.minutes
    end_minute = frame.first_minute + minutes
    now_minute = observation.now_ms // frame.step_ms
    step_s = frame.step_ms / 1000
    age = now_minute - (end_minute - 1)
    if age > settings.stale_min:
        return Hold(reason=f"the newest metrics are {age} min old", bound="metrics")
    if age < 0 or job.changed_minute > now_minute:
        return Hold(reason="the clock was set back: there are metrics from the future", bound="metrics")
    settled = end_minute - 1 - job.changed_minute - settings.settle_min
    count = min(settings.window_min, settled, minutes)
    if count < min(2, settings.window_min):
        return Hold(reason="its tasks have just started", bound="settle")
    lists: list[list[float]] = []
    sums: list[float] = []
    for name in METRICS_REQUIRED:
        points = values.get(name)
        if points is None or len(points) < count:
            return Hold(reason=f"{name} was not measured", bound="metrics")
        numbers = points[-count:].tolist()
        whole = sum(numbers)
        if not (0.0 <= whole < inf and min(numbers) >= 0.0):
            return Hold(reason=f"{name} has gaps or is invalid: {numbers[-1]:g}", bound="metrics")
        lists.append(numbers)
        sums.append(whole)
    ingest, processed, busy_mean, lag, lag_s, tasks = lists
    if max(busy_mean) > BUSY_MAX:
        return Hold(reason=f"busy_mean is {max(busy_mean):g}, above {BUSY_MAX:g}", bound="metrics")
    if tasks[0] != job.shape.task_count or tasks.count(tasks[0]) != count:
        return Hold(
            reason=f"the metrics are of {tasks[-1]:g} tasks, the job has {job.shape.task_count}",
            bound="metrics",
        )
    # A rise of the input counts at once, by the newest two minutes; a fall when the mean of all shows it.
    input_rate = max(sums[0] / count, (ingest[-2] + ingest[-1]) / 2 if count > 1 else ingest[-1])
    growth = (lag[-1] - lag[0]) / (step_s * (count - 1)) if count > 1 else 0.0
    return LoadWindow(
        end_minute,
        count,
        input_rate,
        sums[1] / count,
        min(1.0, sums[2] / count),
        optional(values, "busy"),
        lag[-1],
        growth,
        growth > LAG_GROWTH_MIN * input_rate or _only_grows(lag),
        lag_s[-1],
        lag_s[-2] if count > 1 else lag_s[-1],
        min(lag_s),
        (lag[-1] - lag[-2]) / step_s if count > 1 else 0.0,
        optional(values, "lag_spread"),
        total(values, "oom", count),
        total(values, "restarts", count) + total(values, "exceptions", count),
        min(processed),
        processed[-1],
        sums[0] / count,
    )


def optional(values: Mapping[str, Points], name: str) -> float:
    """A metric's newest value; NaN if it is unknown or invalid."""
    points = values.get(name)
    if points is None or not len(points):
        return nan
    value: float = points.item(-1)
    return value if 0.0 <= value < inf else nan


def total(values: Mapping[str, Points], name: str, count: int) -> float:
    """The sum of a counter over the last minutes; unknown minutes count as 0."""
    points = values.get(name)
    if points is None:
        return 0.0
    numbers: list[float] = points[-count:].tolist()
    found = sum(numbers)
    if 0.0 <= found < inf:
        return found
    return sum(number for number in numbers if 0.0 < number < inf)


def _only_grows(lag: list[float]) -> bool:
    # The cheap comparison first: it rules out most jobs.
    return len(lag) >= 4 and lag[-1] > lag[-2] and all(b > a for a, b in pairwise(lag))


def _problem_with_job(observation: Observation) -> Hold | None:
    """Why no decision about the job is possible, whatever its metrics."""
    job = observation.job
    if job.is_changing:
        return Hold(reason="a change of the job is in progress", bound="plan")
    task, limits = job.shape.task, job.limits
    if job.shape.task_count < 1 or task.threads < 1 or limits.task_count_max < 1:
        return Hold(reason="the job has no tasks", bound="config")
    if not (job.slo_lag_s > 0 and 0 <= job.restart_s < inf):
        return Hold(reason="its SLO or its restart time is invalid", bound="config")
    reserved = (task.cpu, task.memory_mb, task.disk_mb, task.network_mbps)
    if not (0 <= sum(reserved) < inf and min(reserved) >= 0):
        return Hold(reason="the resources of its tasks are invalid", bound="config")
    return None
