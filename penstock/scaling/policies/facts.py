"""What a policy is shown of one job: its config, its numbers by the minute, its tasks now. Pure.

A number that nobody reported is None: unknown is not zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite

from penstock.core.clock import Millis
from penstock.fleet.messages import TaskReport
from penstock.jobs.config import JobConfig
from penstock.scaling.metrics.frames import Frame

# Of the first that a report has. A task of a plain process has no rate.
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
    """One task as it was last seen."""

    task_id: str
    container: str
    host: str = ""
    state: str = "running"
    busy: float | None = None  # useful share of its time
    rate: float | None = None  # records read per second
    arrival: float | None = None  # records per second that came for it, read or not
    lag_records: float | None = None
    lag_s: float | None = None
    cpu: float | None = None
    memory_mb: float | None = None
    batch_ms: float | None = None
    late: float | None = None  # records so far that came behind the watermark
    bad: float | None = None  # records so far that could not be worked on
    records: float | None = None
    slot_wait_s: float | None = None  # for how long its batch waits for a slot of its session
    slots_held: float | None = None  # of its session's slots, on the average lately
    slots_user: float | None = None  # of these, in the job's own code
    user_ms_per_record: float | None = None
    restarts: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """One job at one moment. `frame` has the metrics that the policy declared, no others."""

    job: str
    at_ms: Millis
    config: JobConfig  # what runs, whole
    task_count: int
    frame: Frame
    tasks: tuple[TaskFacts, ...] = ()
    is_settled: bool = True  # no change is under way
    oncall: frozenset[str] = field(default_factory=frozenset)  # paths that a person has set
    containers: frozenset[str] = field(default_factory=frozenset)  # those that may take its tasks
    user_update_ms: Millis | None = None  # when its owner last changed it

    @property
    def task_count_max(self) -> int:
        """More tasks than this it cannot have."""
        return min(self.config.task_count_max, self.config.partitions)

    def last(self, metric: str) -> float | None:
        """The newest minute's number; None if it is not known."""
        points = self.frame.values.get(metric)
        if points is None or not len(points):
            return None
        value = float(points[-1])
        return value if isfinite(value) else None


def task_facts(
    reports: Iterable[tuple[str, TaskReport]], hosts: Mapping[str, str] | None = None
) -> tuple[TaskFacts, ...]:
    """Tasks from what containers said of them, (container, report) each."""
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
        # A number that cannot be is not known.
        if value is not None and isfinite(value) and value >= 0:
            return float(value)
    return None
