"""P, what one thread can sustain: bootstrapped while staging, adjusted from outcomes (Turbine V-C). Pure."""

from __future__ import annotations

from math import inf

from penstock.resources.frames import Frame
from penstock.resources.scaler.estimators import BUSY_MIN
from penstock.resources.scaler.observation import JobFacts
from penstock.resources.scaler.shapes import at_work

NOISE = 0.01  # so little above what P allows is no sign that it is wrong
STAGING_MIN = 30  # minutes of work that show what a thread can do
_NAMES = ("processed_rate", "busy_mean", "task_count")


def bootstrap_rate(frame: Frame, job: JobFacts, *, minutes: int) -> float | None:
    """P from the last `minutes` under one shape; None: too few of them show it.

    The median of the busier half of the minutes: idle ones tell little, and one odd minute tells nothing.
    """
    count = min(minutes, frame.minutes)
    values = frame.values
    if count < STAGING_MIN or any(name not in values for name in _NAMES):
        return None
    # Lists: of so few numbers NumPy's calls cost more than its loops save.
    processed, busy, tasks = [values[name][-count:].tolist() for name in _NAMES]
    wanted = job.shape.task_count
    usable = [
        (share if share < 1.0 else 1.0, rate)
        for rate, share, n in zip(processed, busy, tasks, strict=True)
        if 0.0 < rate < inf and BUSY_MIN <= share <= 1.5 and n == wanted
    ]
    if len(usable) < STAGING_MIN:
        return None
    middle = _median(sorted([share for share, _ in usable]))
    busier = sorted([rate / share for share, rate in usable if share >= middle])
    return _median(busier) / at_work(wanted, job.shape.task.threads, job.partitions)


def _median(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


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
