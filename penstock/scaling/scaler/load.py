"""A job's load against what it can do: the terms of equations 2 and 3 for its last minutes. Pure."""

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
# A job whose single task works while the others wait: so busy, and the rest no more than this part of it.
HOT_BUSY, HOT_SHARE = 0.9, 0.6
SATURATED = 0.95


class Load(NamedTuple):
    """What a decision compares."""

    input_rate: float  # X, with what the jobs above will send
    thread_rate: float  # P; infinite for a job that has nothing to do
    measured_rate: float | None  # P as the last minutes alone show it
    parallel: float  # k * n, as the busiest thread has it
    capacity: float  # P * k * n
    used: float  # equation 3
    is_lagging: bool
    is_updated: bool  # by its owner, a short time ago
    is_at_least: bool  # P is not known, and its threads keep up with what there is: they may do more


def assess(observation: Observation, window: LoadWindow) -> Load:
    """Equation 3 for the last minutes. P is what was learnt, unless an update made that void.

    Threads that are busy all the time show what they can do only where records pile up. Else they show what
    they were given: batches that run back to back cost time however few records they have.
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
        # A job too idle to tell does at least this much with a busier thread.
        thread_rate = measured if measured is not None else proved / BUSY_MIN
        if keeps_up or (not is_saturated and window.lag_s <= job.slo_lag_s):
            thread_rate = max(thread_rate, _shown_before(observation))
    else:
        thread_rate = max(thread_rate, proved)
        if measured is not None and is_saturated and not keeps_up:
            # Busy threads that give somewhat less than before: records or state grew. Much less is a symptom.
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
    """What a thread of this code processed before one of the last changes; 0: nobody knows.

    Small batches cost nearly as much time as full ones: by its busy time a job with little to do seems slow.
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
    """P as it was learnt, if it is of the code that runs."""
    footprint, job = observation.footprint, observation.job
    rate = footprint.thread_rate
    if rate is None or not 0 < rate < inf:
        return None
    learnt = footprint.thread_rate_minute
    if job.updated_minute is not None and (learnt is None or learnt < job.updated_minute):
        return None
    return rate


def inputs_of(observation: Observation, window: LoadWindow, load: Load) -> Inputs:
    """The numbers behind a decision, by the paper's letters where it has them."""
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
    """Whether a few tasks have most of the lag, or one is busy while the others wait."""
    hot = window.busy >= HOT_BUSY and window.busy_mean <= HOT_SHARE * window.busy
    return hot or window.lag_spread >= imbalance_at  # NaN is not above anything


def wanted_parallel(rate: float, load: Load) -> float:
    """As how many threads a job must work for this rate."""
    return rate / load.thread_rate if load.thread_rate > 0 else inf


def rate_after_change(observation: Observation, input_rate: float, backlog: float) -> float:
    """What a changed job must be able to do: its input at the target share, and within t the backlog and what
    comes in while it restarts."""
    settings = observation.settings
    catch_up = (backlog + input_rate * observation.job.restart_s) / settings.recovery_s
    # The second keeps a job that is mostly backlog from being short again at once.
    return max(input_rate / settings.target + catch_up, (input_rate + catch_up) / settings.up_at)


def useful_part(observation: Observation, rate: float) -> float:
    """Of a rate what the jobs below can follow."""
    return rate if observation.demand is None else min(rate, observation.demand.useful_rate)


NOISE = 0.01  # so little above what P allows is no sign that it is wrong
STAGING_MIN = 30  # minutes of work that show what a thread can do
_NAMES = ("processed_rate", "busy_mean", "task_count", "lag_s")
# What the cost of the input was is read from these.
COST_METRICS = ("ingest_rate", "processed_rate", "busy_mean", "task_count", "lag_s", "lag_records")
LIKE_INPUT = 1.25  # input within this factor is like that of now
COST_MIN = 5  # minutes on end
DEAR = 0.8  # a thread that gave less than this part of what it gives now: the input was dear then


def bootstrap_rate(frame: Frame, job: ScalerJobFacts, *, minutes: int) -> float | None:
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
    values: Mapping[str, Points], job: ScalerJobFacts, load: Load, *, input_rate: float
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
