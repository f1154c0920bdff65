"""One minute of what tasks say now, where no history is kept. Pure: what one task owes is unknown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.clock import Millis
from penstock.resources.frames import MINUTE_MS, Frame, NoFrame
from penstock.resources.policies.facts import TaskFacts


def frame_of_now(job: str, tasks: Sequence[TaskFacts], *, now_ms: Millis) -> Frame | NoFrame:
    """The newest reports of a job's tasks, added up as `frames.METRICS` says."""
    if not tasks:
        return NoFrame(job=job, reason="no task of it reports anything")
    numbers = {
        "lag_s": _over(tasks, "lag_s", max),
        "lag_records": _over(tasks, "lag_records", sum),
        "busy": _over(tasks, "busy", max),
        "busy_mean": _over(tasks, "busy", sum) / len(tasks),
        "processed_rate": _over(tasks, "rate", sum),
        "cpu": _over(tasks, "cpu", sum),
        "memory_task_mb": _over(tasks, "memory_mb", max),
        "restarts": float(sum(task.restarts for task in tasks)),
    }
    values = {name: np.array([value]) for name, value in numbers.items()}
    return Frame(job=job, first_minute=now_ms // MINUTE_MS, values=values)


def _over(tasks: Sequence[TaskFacts], name: str, add: Callable[[list[float]], float]) -> float:
    found = [getattr(task, name) for task in tasks]
    return float("nan") if None in found else float(add(found))
