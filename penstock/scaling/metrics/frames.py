"""Metrics of one job over a range of minutes (`Frame`), or why there are none (`NoFrame`). Pure.

A minute without a report is NaN: unknown is not zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.clock import Millis
from penstock.fleet.messages import TaskReport

NEEDED = ("input_rate", "processed_rate", "busy", "lag_records", "lag_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLoad:
    """The load of a job now, all its tasks together."""

    at_ms: Millis
    task_count: int
    input_rate: float  # X, records per second arriving
    processed_rate: float  # records per second read
    busy: float  # of the busiest task, 0..1
    lag_records: float  # B, unread records
    lag_s: float  # time_lagged = B / processed rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Incomplete:
    """Why the load is not known."""

    reason: str


def add_up(
    reports: Iterable[TaskReport], *, task_count: int, generation: int, at_ms: Millis
) -> JobLoad | Incomplete:
    """The load of one job from the newest reports of its tasks."""
    current = [report for report in reports if report.generation == generation]
    reported = Counter(report.task_id for report in current)
    if len(reported) < task_count:
        return Incomplete(reason=f"{len(reported)} of {task_count} tasks report")
    twice = sorted(task for task, count in reported.items() if count > 1)
    if twice:
        return Incomplete(reason=f"reported more than once: {', '.join(twice)}")
    not_running = sorted(report.task_id for report in current if report.state != "running")
    if not_running:
        return Incomplete(reason=f"not running yet: {', '.join(not_running)}")
    without = sorted(report.task_id for report in current if not report.metrics)
    if without:
        return Incomplete(reason=f"no metrics yet: {', '.join(without)}")
    for report in sorted(current, key=lambda report: report.task_id):
        # A missing or invalid value is not zero: the load is not known.
        wrong = [name for name in NEEDED if not 0 <= report.metrics.get(name, -1) < inf]
        if wrong:
            return Incomplete(reason=f"{report.task_id} does not report {', '.join(wrong)}")
    lag_records = sum(report.metrics["lag_records"] for report in current)
    processed_rate = sum(report.metrics["processed_rate"] for report in current)
    lag_s = lag_records / processed_rate if processed_rate > 0 else max(r.metrics["lag_s"] for r in current)
    return JobLoad(
        at_ms=at_ms,
        task_count=task_count,
        input_rate=sum(report.metrics["input_rate"] for report in current),
        processed_rate=processed_rate,
        busy=max(report.metrics["busy"] for report in current),
        lag_records=lag_records,
        lag_s=lag_s,
    )


MINUTE_MS = 60_000

Points = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """How a metric is aggregated over a job's tasks and over a minute."""

    name: str
    unit: str
    over_tasks: Literal["sum", "max", "min"]
    over_time: Literal["mean", "max", "min", "last"]


def _metric(
    name: str,
    unit: str,
    over_tasks: Literal["sum", "max", "min"] = "sum",
    over_time: Literal["mean", "max", "min", "last"] = "mean",
) -> tuple[str, Metric]:
    return name, Metric(name=name, unit=unit, over_tasks=over_tasks, over_time=over_time)


# The metrics of a job's minute. Rates are differences of cumulative counters over the time between them,
# never averages of sampled rates; `ingest_rate` counts arriving records, read or not: read + growth of lag.
METRICS: Mapping[str, Metric] = dict(
    (
        _metric("ingest_rate", "records/s"),
        _metric("processed_rate", "records/s"),
        _metric("output_rate", "records/s"),
        _metric("busy", "share of a task's time", "max"),
        _metric("busy_mean", "share of the tasks' time"),
        _metric("lag_records", "records", "sum", "last"),
        _metric("lag_bytes", "bytes", "sum", "last"),
        _metric("lag_s", "s", "max", "last"),
        _metric("lag_spread", "share: standard deviation over mean of the tasks' lag", "max", "last"),
        _metric("cpu", "cores"),
        _metric("memory_mb", "MB", "sum", "max"),
        _metric("memory_task_mb", "MB", "max", "max"),
        _metric("disk_mb", "MB", "sum", "max"),
        _metric("network_mb_s", "MB/s"),
        _metric("key_count", "keys", "sum", "last"),
        _metric("state_bytes", "bytes", "sum", "last"),
        _metric("watermark_lag_s", "s", "max", "last"),
        _metric("restarts", "starts after a failure", "sum", "max"),
        _metric("oom", "ends above the memory reserved", "sum", "max"),
        _metric("exceptions", "failures", "sum", "max"),
        _metric("task_count", "tasks", "max", "last"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The requested metrics of a job, one value per minute, oldest first."""

    job: str
    first_minute: int  # minutes since the epoch
    values: Mapping[str, Points]
    step_ms: int = MINUTE_MS  # length of a "minute": some seconds for jobs with lag

    @property
    def minutes(self) -> int:
        """The number of minutes."""
        return len(next(iter(self.values.values()))) if self.values else 0

    def last(self, metric: str) -> float:
        """The value of the newest minute."""
        return float(self.values[metric][-1])

    def tail(self, minutes: int) -> Frame:
        """The frame of its newest minutes."""
        count = min(minutes, self.minutes)
        return Frame(
            job=self.job,
            first_minute=self.first_minute + self.minutes - count,
            values={name: points[len(points) - count :] for name, points in self.values.items()},
            step_ms=self.step_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFrame:
    """Why a policy gets no metrics (I20), and which metrics are the reason."""

    job: str
    reason: str
    metrics: tuple[str, ...] = ()
