"""The input of a policy: one job's config, its metrics by the minute, and its tasks now. Pure.

A metric that was not reported is None: unknown is not zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite

from penstock.core.clock import Millis
from penstock.fleet.messages import TaskReport
from penstock.jobs.config import JobConfig
from penstock.scaling.metrics.frames import Frame

# Field of `TaskFacts` -> metrics of a task report; the first that is reported is used.
_REPORTED: Mapping[str, tuple[str, ...]] = {
    "busy": ("busy",),
    "rate": ("processed_rate",),
    "arrival": ("input_rate",),
    "lag_records": ("lag_records",),
    "lag_s": ("lag_s",),
    "cpu": ("cpu",),
    "memory_mb": ("memory_peak_mb", "memory_mb"),
    "batch_ms": ("batch_ms",),
    "late": ("late",),
    "bad": ("bad",),
    "records": ("records",),
    "slot_wait_s": ("slot_wait_s",),
    "slots_held": ("slots_held",),
    "slots_user": ("slots_user",),
    "user_ms_per_record": ("user_ms_per_record",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """One task, as its container last reported it."""

    task_id: str
    container: str
    host: str = ""
    state: str = "running"
    busy: float | None = None  # share of its time spent on batches
    rate: float | None = None  # records read per second
    arrival: float | None = None  # records per second that arrive for it, read or not
    lag_records: float | None = None
    lag_s: float | None = None
    cpu: float | None = None
    memory_mb: float | None = None
    batch_ms: float | None = None
    late: float | None = None  # total of records behind the watermark
    bad: float | None = None  # total of records that could not be processed
    records: float | None = None
    slot_wait_s: float | None = None  # how long its batch has waited for a slot of its Spark session
    slots_held: float | None = None  # slots of its session in use, recent average
    slots_user: float | None = None  # of these, slots that run the job's own code
    user_ms_per_record: float | None = None
    restarts: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """One job at one moment. `frame` has only the metrics that the policy declared."""

    job: str
    at_ms: Millis
    config: JobConfig  # the running config
    task_count: int
    frame: Frame
    tasks: tuple[TaskFacts, ...] = ()
    is_settled: bool = True  # no change of the job is in progress
    oncall: frozenset[str] = field(default_factory=frozenset)  # config paths set in the oncall layer
    containers: frozenset[str] = field(default_factory=frozenset)  # containers that may run its tasks
    user_update_ms: Millis | None = None  # time of its owner's last change

    @property
    def task_count_max(self) -> int:
        """The largest task count that the job may have."""
        return min(self.config.task_count_max, self.config.partitions)

    def last(self, metric: str) -> float | None:
        """The metric's value in the newest minute; None if it is not known."""
        points = self.frame.values.get(metric)
        if points is None or not len(points):
            return None
        value = float(points[-1])
        return value if isfinite(value) else None


def task_facts(
    reports: Iterable[tuple[str, TaskReport]], hosts: Mapping[str, str] | None = None
) -> tuple[TaskFacts, ...]:
    """Convert task reports, given as (container, report)."""
    found = []
    for container, report in reports:
        numbers = {name: _first(report.metrics, names) for name, names in _REPORTED.items()}
        found.append(
            TaskFacts(
                task_id=report.task_id,
                container=container,
                host=(hosts or {}).get(container, ""),
                state=report.state,
                restarts=report.restarts,
                error=report.error,
                **numbers,
            )
        )
    return tuple(sorted(found, key=lambda task: task.task_id))


def _first(metrics: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = metrics.get(name)
        # Negative and infinite values are treated as unknown.
        if value is not None and isfinite(value) and value >= 0:
            return float(value)
    return None
