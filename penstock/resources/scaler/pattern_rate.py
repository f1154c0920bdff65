"""P, what one thread can sustain: bootstrapped while staging, adjusted from outcomes (Turbine V-C). Pure."""

from __future__ import annotations

import numpy as np

from penstock.resources.frames import Frame
from penstock.resources.scaler.estimators import BUSY_MIN
from penstock.resources.scaler.observation import JobFacts
from penstock.resources.scaler.shapes import at_work

NOISE = 0.01  # so little above what P allows is no sign that it is wrong
STAGING_MIN = 30  # minutes of work that show what a thread can do


def bootstrap_rate(frame: Frame, job: JobFacts, *, minutes: int) -> float | None:
    """P from the last `minutes` under one shape; None: too few of them show it.

    The median of the busier half of the minutes: idle ones tell little, and one odd minute tells nothing.
    """
    count = min(minutes, frame.minutes)
    names = ("processed_rate", "busy_mean", "task_count")
    if count < STAGING_MIN or any(name not in frame.values for name in names):
        return None
    processed, busy, tasks = (frame.values[name][-count:] for name in names)
    with np.errstate(invalid="ignore"):
        usable = (
            np.isfinite(processed)
            & (processed > 0)
            & (busy >= BUSY_MIN)
            & (busy <= 1.5)
            & (tasks == job.shape.task_count)
        )
    if int(usable.sum()) < STAGING_MIN:
        return None
    processed, busy = processed[usable], np.minimum(busy[usable], 1.0)
    busier = busy >= np.median(busy)
    threads = at_work(job.shape.task_count, job.shape.task.threads, job.partitions)
    return float(np.median(processed[busier] / busy[busier])) / threads


def adjust_rate(*, p: float, x: float, slots: float, measured: float | None) -> float | None:
    """P after a round without lag: n' = ceil(X/P) above n shows that P was too low; None: it stands.

    It becomes the average throughput of a thread, or what its busy time shows if that is more.
    """
    if p * slots * (1 + NOISE) >= x:
        return None
    average = x / slots
    return average if measured is None else max(average, measured)


def between(sustained: float, p: float, measured: float | None) -> float:
    """P after a step down that broke the SLO: between X/n, which was sustained, and the estimate before.

    Threads that are busy all the time show where in between; else it is the middle.
    """
    low, high = min(sustained, p), max(sustained, p)
    return measured if measured is not None and low <= measured <= high else (low + high) / 2
