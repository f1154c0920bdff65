"""What a job was seen doing: the reports of its tasks added up, and whether they are all there. Pure.

Retrieval checks completeness first: a job one of whose tasks is silent has no load, not a smaller one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from penstock.core.clock import Millis
from penstock.fleet.messages import TaskReport

NEEDED = ("input_rate", "processed_rate", "busy", "lag_records", "lag_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLoad:
    """One look at a job, all its tasks together."""

    at_ms: Millis
    task_count: int
    input_rate: float  # X, records per second arriving
    processed_rate: float  # records per second read
    busy: float  # of the busiest task, 0..1
    lag_records: float  # B, records waiting to be read
    lag_s: float  # time_lagged = B / processed rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Incomplete:
    """Why there is no load to decide on."""

    reason: str


def add_up(
    reports: Iterable[TaskReport], *, task_count: int, generation: int, at_ms: Millis
) -> JobLoad | Incomplete:
    """The load of one job from the newest reports of its tasks."""
    current = [report for report in reports if report.generation == generation]
    heard = Counter(report.task_id for report in current)
    if len(heard) < task_count:
        return Incomplete(reason=f"{len(heard)} of {task_count} tasks report")
    twice = sorted(task for task, count in heard.items() if count > 1)
    if twice:
        return Incomplete(reason=f"reported more than once: {', '.join(twice)}")
    not_running = sorted(report.task_id for report in current if report.state != "running")
    if not_running:
        return Incomplete(reason=f"not running yet: {', '.join(not_running)}")
    silent = sorted(report.task_id for report in current if not report.metrics)
    if silent:
        return Incomplete(reason=f"no metrics yet: {', '.join(silent)}")
    for report in sorted(current, key=lambda report: report.task_id):
        # A number that is missing or cannot be is not zero: there is nothing to decide on.
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
