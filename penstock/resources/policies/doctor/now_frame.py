"""What tasks say now, as one more minute after those that are kept. Pure: what one task owes is unknown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.clock import Millis
from penstock.resources.frames import MINUTE_MS, Frame, NoFrame
from penstock.resources.policies.facts import TaskFacts


def with_now(
    kept: Frame | NoFrame, job: str, tasks: Sequence[TaskFacts], *, task_count: int, now_ms: Millis
) -> Frame | NoFrame:
    """The minutes that are kept, and the newest reports of all tasks as the last one.

    Counts of a minute (restarts, ends above the memory) are not known of one that is not over.
    """
    numbers = _numbers(tasks, task_count)
    if isinstance(kept, NoFrame) or not kept.values:
        if not numbers:
            return kept if isinstance(kept, NoFrame) else NoFrame(job=job, reason=_silence(tasks, task_count))
        values = {name: np.array([value]) for name, value in numbers.items()}
        return Frame(job=job, first_minute=now_ms // MINUTE_MS, values=values)
    values = {name: np.append(points, numbers.get(name, np.nan)) for name, points in kept.values.items()}
    return Frame(job=job, first_minute=kept.first_minute, values=values)


def _numbers(tasks: Sequence[TaskFacts], task_count: int) -> dict[str, float]:
    """The newest reports added up as `frames.METRICS` says; nothing while a task of the job is silent."""
    if not tasks or len(tasks) < task_count or any(task.state != "running" for task in tasks):
        return {}
    return {
        "lag_s": _over(tasks, "lag_s", max),
        "lag_records": _over(tasks, "lag_records", sum),
        "busy": _over(tasks, "busy", max),
        "busy_mean": _over(tasks, "busy", sum) / len(tasks),
        "ingest_rate": _over(tasks, "arrival", sum),
        "processed_rate": _over(tasks, "rate", sum),
        "cpu": _over(tasks, "cpu", sum),
        "memory_task_mb": _over(tasks, "memory_mb", max),
    }


def _silence(tasks: Sequence[TaskFacts], task_count: int) -> str:
    if not tasks:
        return "no task of it reports anything"
    running = sum(task.state == "running" for task in tasks)
    return f"{running} of {max(task_count, len(tasks))} tasks run and report"


def _over(tasks: Sequence[TaskFacts], name: str, add: Callable[[list[float]], float]) -> float:
    found = [getattr(task, name) for task in tasks]
    return float("nan") if None in found else float(add(found))
