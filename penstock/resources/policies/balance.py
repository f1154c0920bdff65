"""How a job's load lies on its tasks: even, on stragglers, or skewed (StreamOps 5.2 and 5.3). Pure.

Both have tasks that are busier than their peers. A straggler does no more work than they do, so its place is
slow; a task with skewed input does more, so its keys are hot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.resources.policies.facts import TaskFacts

# A normal distribution's standard deviation is so many times its median absolute deviation.
MAD_TO_SIGMA = 1.4826
TASKS_MIN = 3  # of two nobody can say which is the odd one
# However alike the others are: nobody is odd for less of its time, nor for what noise of ten per cent does.
BUSY_SPREAD_MIN = 0.03
BUSY_RATIO_MIN = 1.25
RATE_SIMILAR = 1.2  # up to so many times the others' rate is no more work than theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class Even:
    """No task stands out."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """It cannot be told."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OddTask:
    """A task that is busier than its peers."""

    task: TaskFacts
    busy: float
    rate: float
    z: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven:
    """Some tasks are busier: those that do no more work, and those that do."""

    stragglers: tuple[OddTask, ...]
    skewed: tuple[OddTask, ...]
    busy_median: float
    rate_median: float  # of the others


def robust_z(values: Sequence[float], *, spread_min: float) -> NDArray[np.float64]:
    """How far each lies from the median, in standard deviations that a few odd ones do not widen."""
    points = np.asarray(values, dtype=np.float64)
    median = np.median(points)
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(points - median)))
    return np.asarray((points - median) / max(sigma, spread_min))


def judge_balance(tasks: Sequence[TaskFacts], *, z_min: float = 3.5) -> Even | Uneven | Unknown:
    """Compare a job's tasks with each other by their useful time and their rate."""
    silent = sorted(
        task.task_id for task in tasks if task.state != "running" or task.busy is None or task.rate is None
    )
    if silent:
        return Unknown(reason=f"not known how busy: {', '.join(silent[:5])}")
    if len(tasks) < TASKS_MIN:
        return Unknown(reason=f"{len(tasks)} tasks are too few to compare")
    busy, rate = [task.busy or 0.0 for task in tasks], np.array([task.rate or 0.0 for task in tasks])
    z = robust_z(busy, spread_min=BUSY_SPREAD_MIN)
    is_odd = (z >= z_min) & (np.array(busy) >= BUSY_RATIO_MIN * float(np.median(busy)))
    if not is_odd.any():
        return Even(
            reason=f"the busiest task is {float(z.max()):.1f} deviations above the others, below {z_min:g}"
        )
    others = float(np.median(rate[~is_odd]))
    odd = [
        OddTask(task=task, busy=busy[number], rate=float(rate[number]), z=float(z[number]))
        for number, task in enumerate(tasks)
        if is_odd[number]
    ]
    odd.sort(key=lambda found: (-found.z, found.task.task_id))
    return Uneven(
        stragglers=tuple(found for found in odd if found.rate <= others * RATE_SIMILAR),
        skewed=tuple(found for found in odd if found.rate > others * RATE_SIMILAR),
        busy_median=float(np.median(busy)),
        rate_median=others,
    )
