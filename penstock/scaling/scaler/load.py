"""A job's load and capacity: the terms of equations 2 and 3 for its last minutes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from penstock.scaling.metrics.frames import Frame, Points
from penstock.scaling.scaler.estimators import BUSY_MIN, cpu_units_with_backlog, measured_thread_rate
from penstock.scaling.scaler.observation import Inputs, Observation, ScalerJobFacts, at_work, parallel
from penstock.scaling.scaler.window import LAG_GROWTH_MIN, LoadWindow

FORMULA = "(X + B/t) / (P*k*n)"
# Imbalance: one task is at least so busy, and the mean is at most this part of it.
HOT_BUSY, HOT_SHARE = 0.9, 0.6
SATURATED = 0.95


class Load(NamedTuple):
    """A job's load and capacity, which a decision compares."""

    input_rate: float  # X, including what upstream jobs will send
    thread_rate: float  # P; infinite for a job without input
    measured_rate: float | None  # P from the last minutes alone
    parallel: float  # k * n, effective number of threads
    capacity: float  # P * k * n
    used: float  # equation 3
    is_lagging: bool
    is_updated: bool  # its owner changed it recently
    is_at_least: bool  # P is only a lower bound: it is not known, and the threads keep up with the input


def assess(observation: Observation, window: LoadWindow) -> Load:
    """Equation 3 for the last minutes. P is the stored one, unless an update invalidated it.

    Threads that are always busy show their capacity only while lag grows. Otherwise they show their input:
    batches that run back to back take time however few records they have.
    """
    job, settings = observation.job, observation.settings
    shape = job.shape
    slots = parallel(shape.task_count, shape.task.threads, job.partitions)
    measured = measured_thread_rate(window, job)
    updated = job.updated_minute
    is_updated = updated is not None and 0 <= window.end_minute - updated <= settings.update_recent_min
    thread_rate = known_thread_rate(observation)
    proved = window.processed_rate / slots
    is_saturated = window.busy_mean >= SATURATED
    keeps_up = window.lag_s <= job.slo_lag_s and not window.is_filling
    is_at_least = thread_rate is None and is_saturated and keeps_up
    if thread_rate is None:
        # Lower bound for a job that is too idle for a measurement.
        thread_rate = measured if measured is not None else proved / BUSY_MIN
        if keeps_up or (not is_saturated and window.lag_s <= job.slo_lag_s):
            thread_rate = max(thread_rate, _shown_before(observation))
    else:
        thread_rate = max(thread_rate, proved)
        if measured is not None and is_saturated and not keeps_up:
            # A somewhat lower rate of busy threads is normal (larger records or state). A much lower one is a
            # symptom, and P stays.
            slower = settings.slower_at * thread_rate <= measured < thread_rate
            thread_rate = measured if slower else thread_rate
    demand = observation.demand
    input_rate = window.input_rate if demand is None else max(window.input_rate, demand.input_rate)
    backlog = window.lag_records
    if thread_rate <= 0 and input_rate <= 0 and backlog <= 0:
        thread_rate = inf
    return Load(
        input_rate,
        thread_rate,
        measured,
        slots,
        thread_rate * slots,
        cpu_units_with_backlog(input_rate, backlog, settings.recovery_s, thread_rate, 1.0, slots),
        window.lag_s > job.slo_lag_s and window.lag_s_before > job.slo_lag_s,
        is_updated,
        is_at_least,
    )


def _shown_before(observation: Observation) -> float:
    """The best rate per thread before one of the last changes, with the same code; 0 if not known.

    Small batches take nearly as long as full ones, so by busy time alone a job with little input seems slow.
    """
    updated = observation.job.updated_minute
    return max(
        (
            action.rate_before / action.parallel_before
            for action in observation.past
            if action.parallel_before > 0 and (updated is None or updated < action.at_minute)
        ),
        default=0.0,
    )


def known_thread_rate(observation: Observation) -> float | None:
    """The stored P, if it was measured with the running code."""
    footprint, job = observation.footprint, observation.job
    rate = footprint.thread_rate
    if rate is None or not 0 < rate < inf:
        return None
    learnt = footprint.thread_rate_minute
    if job.updated_minute is not None and (learnt is None or learnt < job.updated_minute):
        return None
    return rate


def inputs_of(observation: Observation, window: LoadWindow, load: Load) -> Inputs:
    """The inputs of a decision, with the paper's letters where it has them."""
    job = observation.job
    return {
        "X": load.input_rate,
        "B": window.lag_records,
        "t": observation.settings.recovery_s,
        "P": load.thread_rate,
        "k": job.shape.task.threads,
        "n": job.shape.task_count,
        "k*n": load.parallel,
        "used": load.used,
        "restart_s": job.restart_s,
        "lag_s": window.lag_s,
        "slo_lag_s": job.slo_lag_s,
        "busy_mean": window.busy_mean,
    }


def is_imbalanced(window: LoadWindow, imbalance_at: float) -> bool:
    """Whether few tasks have most of the lag, or one is busy while the others are idle."""
    hot = window.busy >= HOT_BUSY and window.busy_mean <= HOT_SHARE * window.busy
    return hot or window.lag_spread >= imbalance_at  # NaN compares false


def wanted_parallel(rate: float, load: Load) -> float:
    """The effective number of threads that a rate needs."""
    return rate / load.thread_rate if load.thread_rate > 0 else inf


def rate_after_change(observation: Observation, input_rate: float, backlog: float) -> float:
    """The rate that a changed job must sustain: its input at the target share, plus the backlog and the input
    during the restart within t."""
    settings = observation.settings
    catch_up = (backlog + input_rate * observation.job.restart_s) / settings.recovery_s
    # The second term prevents another step up at once for a job whose load is mostly backlog.
    return max(input_rate / settings.target + catch_up, (input_rate + catch_up) / settings.up_at)


def useful_part(observation: Observation, rate: float) -> float:
    """The part of a rate that downstream jobs can process."""
    return rate if observation.demand is None else min(rate, observation.demand.useful_rate)


NOISE = 0.01  # a rate up to this share above what P allows does not prove P wrong
STAGING_MIN = 30  # minutes of work needed to measure the first P
_NAMES = ("processed_rate", "busy_mean", "task_count", "lag_s")
# Metrics that show the cost of the input.
COST_METRICS = ("ingest_rate", "processed_rate", "busy_mean", "task_count", "lag_s", "lag_records")
LIKE_INPUT = 1.25  # input rates within this factor are compared
COST_MIN = 5  # consecutive minutes
DEAR = 0.8  # below this share of the rate now, the input was more expensive then


def bootstrap_rate(frame: Frame, job: ScalerJobFacts, *, minutes: int) -> float | None:
    """P from the last `minutes` with one shape; None if too few are usable.

    It is the median of the busier half of the minutes: idle minutes and outliers do not count.
    """
    count = min(minutes, frame.minutes)
    values = frame.values
    if count < STAGING_MIN or any(name not in values for name in _NAMES):
        return None
    # Plain lists: for so few numbers NumPy is slower.
    processed, busy, tasks, lags = [values[name][-count:].tolist() for name in _NAMES]
    wanted, slo_lag_s = job.shape.task_count, job.slo_lag_s
    # Threads that are always busy and keep up show their input, not their capacity.
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
    """P after a round without lag: if n' = ceil(X/P) is above n, P was too low; None if P stays.

    The new P is the mean throughput of a thread, or the measured one if that is larger.
    """
    if p * slots * (1 + NOISE) >= x:
        return None
    average = x / slots
    return average if measured is None else max(average, measured)


def between(sustained: float, p: float, measured: float | None) -> float:
    """P after a step down that broke the SLO: between X/n, which was sustained, and the old estimate.

    It is the measured rate if that lies in between; else the middle.
    """
    low, high = min(sustained, p), max(sustained, p)
    return measured if measured is not None and low <= measured <= high else (low + high) / 2


def dearest_rate(
    values: Mapping[str, Points], job: ScalerJobFacts, load: Load, *, input_rate: float
) -> float | None:
    """The lowest P over five minutes at a similar input rate; None if it is not clearly below P now.

    While tasks were always busy and lag grew, P is what they processed. Otherwise it comes from busy time,
    which includes the fixed cost of batches: only minutes with the current number of tasks are compared.
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
    # Minutes in which the number of tasks changed contain a restart and are left out.
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
    """Amount over cost of each five consecutive minutes that are all usable."""
    if len(usable) < COST_MIN:
        return np.zeros(0)
    amount, cost, count = (
        sliding_window_view(np.where(usable, points, 0.0), COST_MIN).sum(axis=1)
        for points in (amounts, costs, np.ones(len(usable)))
    )
    whole = count >= COST_MIN
    return np.asarray(amount[whole] / np.maximum(cost[whole], 1e-12))
