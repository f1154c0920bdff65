"""What the doctor is shown of a job. Pure: values only, all gathered before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.clock import Millis
from penstock.core.journal import Entry
from penstock.resources.frames import Frame, NoFrame
from penstock.resources.policies.facts import TaskFacts
from penstock.resources.policies.starving import Starved

# What the doctor asks the metrics store for, and of how many minutes.
METRICS = (
    *("lag_s", "lag_records", "busy", "busy_mean", "ingest_rate", "processed_rate"),
    *("cpu", "memory_task_mb", "oom", "restarts", "watermark_lag_s"),
)
MINUTES = 60
FRESH_MINUTES = 3  # what was said longer ago is no news: the open minute, and two that a clock may be behind
GROWTH_MINUTES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFacts:
    """A category that the job reads."""

    category: str
    is_known: bool = True  # False: the bus did not answer
    exists: bool = True
    retention_ms: Millis = 0  # 0: records stay
    lateness_ms: Millis = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkFacts:
    """How far behind the clock what the job writes is, and who holds it back."""

    category: str
    age_s: float | None  # None: it has not begun, or has ended
    who: str = ""
    because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record that was put aside."""

    category: str  # where it came from
    partition: int
    offset: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The engine process of a container that runs tasks of the job: Spark's driver, and what is shared."""

    container: str
    cpu: float | None = None
    cpu_max: float | None = None
    memory_mb: float | None = None
    memory_max_mb: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """One job, as whole as it could be gathered. What nobody looked at is None or empty, and then the rules
    that need it say so.
    """

    job: str
    at_ms: Millis
    config: Mapping[str, Any]
    state: str = ""  # as `penstock job ls` says it
    problem: str = ""  # why its layers do not fit together, or why its plan was given up
    task_count: int = 0
    tasks: tuple[TaskFacts, ...] = ()
    starved: tuple[Starved, ...] = ()  # of its tasks, those that wait for a slot
    frame: Frame | NoFrame
    journal: tuple[Entry, ...] = ()  # the newest about it, oldest first
    watermarks: tuple[WatermarkFacts, ...] | None = None
    inputs: tuple[InputFacts, ...] | None = None
    is_package_there: bool | None = None
    dead_letters: tuple[DeadLetter, ...] = ()
    engines: tuple[EngineFacts, ...] = ()
    container_memory_mb: float | None = None  # of the smallest container that could run it
    user_update_ms: Millis | None = None
    last_good_version: int | None = None  # of the job before its owner's last change
    excluded: frozenset[str] = field(default_factory=frozenset)

    def series(self, metric: str, minutes: int = MINUTES) -> NDArray[np.float64] | None:
        """The known minutes of a metric, oldest first; None if nothing is known."""
        points = self._points(metric)[-minutes:]
        known = points[np.isfinite(points)]
        return known if len(known) else None

    def last(self, metric: str) -> float | None:
        """What a metric is now; None if nobody has said it in the last minutes."""
        known = self.series(metric, FRESH_MINUTES)
        return None if known is None else float(known[-1])

    def growth(self, metric: str, minutes: int = GROWTH_MINUTES) -> float | None:
        """By how much a metric has grown in its last minutes; None unless it is known then and now."""
        points = self._points(metric)[-minutes:]
        known = points[np.isfinite(points)]
        return float(known[-1] - known[0]) if len(known) > 1 and self.last(metric) is not None else None

    def _points(self, metric: str) -> NDArray[np.float64]:
        if isinstance(self.frame, NoFrame) or metric not in self.frame.values:
            return np.zeros(0)
        return self.frame.values[metric]

    def why_unknown(self, metric: str) -> str:
        """Why a metric is not known, for people."""
        if isinstance(self.frame, NoFrame):
            return self.frame.reason
        known = int(np.isfinite(self._points(metric)).sum())
        if known:
            return f"nobody reported it in the last {FRESH_MINUTES} minutes"
        return f"nobody reported it in the last {len(self._points(metric)) or 1} minutes"

    @property
    def lag_slo_s(self) -> float:
        """What its owner was promised."""
        return float(self.config["slo"]["lag_s"])
