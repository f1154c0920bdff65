"""P, what one thread can sustain: bootstrapped while staging, adjusted from outcomes (Turbine V-C). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from penstock.resources.frames import Frame, Points
from penstock.resources.scaler.estimators import BUSY_MIN
from penstock.resources.scaler.load import SATURATED, Load
from penstock.resources.scaler.observation import JobFacts
from penstock.resources.scaler.shapes import at_work
from penstock.resources.scaler.window import LAG_GROWTH_MIN

NOISE = 0.01  # so little above what P allows is no sign that it is wrong
STAGING_MIN = 30  # minutes of work that show what a thread can do
_NAMES = ("processed_rate", "busy_mean", "task_count", "lag_s")
# What the cost of the input was is read from these.
COST_METRICS = ("ingest_rate", "processed_rate", "busy_mean", "task_count", "lag_s", "lag_records")
LIKE_INPUT = 1.25  # input within this factor is like that of now
COST_MIN = 5  # minutes on end
DEAR = 0.8  # a thread that gave less than this part of what it gives now: the input was dear then


def bootstrap_rate(frame: Frame, job: JobFacts, *, minutes: int) -> float | None:
    """P from the last `minutes` under one shape; None: too few of them show it.

    The median of the busier half of the minutes: idle ones tell little, and one odd minute tells nothing.
    """
    count = min(minutes, frame.minutes)
    values = frame.values
    if count < STAGING_MIN or any(name not in values for name in _NAMES):
        return None
    # Lists: of so few numbers NumPy's calls cost more than its loops save.
    processed, busy, tasks, lags = [values[name][-count:].tolist() for name in _NAMES]
    wanted, slo_lag_s = job.shape.task_count, job.slo_lag_s
    # Threads that are busy all the time and keep up show what they were given, not what they can do.
    usable = [
        (share if share < 1.0 else 1.0, rate)
        for rate, share, n, lag_s in zip(processed, busy, tasks, lags, strict=True)
        if 0.0 < rate < inf
        and BUSY_MIN <= share <= 1.5
        and n == wanted
        and (share < SATURATED or lag_s > slo_lag_s)
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


def dearest_rate(
    values: Mapping[str, Points], job: JobFacts, load: Load, *, input_rate: float
) -> float | None:
    """The lowest P over five minutes with input like `input_rate`; None: not clearly below that of now.

    Where tasks were busy all the time and records piled up, P is what they processed. Else busy time tells.
    It counts what batches cost too, so only minutes of as many tasks as now are compared, with each other.
    """
    rate_now, measured = load.thread_rate, load.measured_rate
    if any(name not in values for name in COST_METRICS) or not 0 < rate_now < inf:
        return None
    ingest, processed, busy, tasks, lag_s, lag = (values[name] for name in COST_METRICS)
    k, partitions = job.shape.task.threads, job.partitions
    with np.errstate(invalid="ignore"):
        share = np.minimum(busy, 1.0)
        is_like = (ingest >= input_rate / LIKE_INPUT) & (ingest <= input_rate * LIKE_INPUT)
        is_usable = is_like & (processed > 0) & (processed < inf) & (share >= BUSY_MIN) & (tasks >= 1)
        piles_up = (lag_s > job.slo_lag_s) | (np.diff(lag, prepend=lag[:1]) > 60 * LAG_GROWTH_MIN * ingest)
        is_full = is_usable & (share >= SATURATED) & piles_up
    is_usable &= np.isfinite(tasks)
    threads = np.zeros(len(tasks))
    for n in np.unique(tasks[is_usable]).tolist():
        threads[tasks == n] = at_work(int(n), k, partitions)
    # Minutes in which the number of tasks changed show a restart.
    is_same = np.zeros(len(tasks), bool)
    is_same[1:] = tasks[1:] == tasks[:-1]
    full = _ratios(processed, threads, is_full & is_same)
    lowest = float(full.min()) if len(full) else inf
    shown = _ratios(processed, share * threads, is_usable & is_same & (tasks == job.shape.task_count))
    if len(shown):
        usual = max(float(np.median(shown)), measured if measured is not None else 0.0)
        lowest = min(lowest, rate_now * float(shown.min()) / usual)
    return lowest if lowest < DEAR * rate_now else None


def _ratios(amounts: Points, costs: Points, usable: NDArray[np.bool_]) -> Points:
    """Amount over cost of each five minutes on end that are all usable."""
    if len(usable) < COST_MIN:
        return np.zeros(0)
    amount, cost, count = (
        sliding_window_view(np.where(usable, points, 0.0), COST_MIN).sum(axis=1)
        for points in (amounts, costs, np.ones(len(usable)))
    )
    whole = count >= COST_MIN
    return np.asarray(amount[whole] / np.maximum(cost[whole], 1e-12))
