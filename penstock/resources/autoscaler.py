"""How many tasks a job needs, the reactive generation (Turbine V-A, Algorithm 2). Pure: no clock, no I/O, no
logging.

Lag over the SLO means more tasks, at once. A quiet job gets fewer, one at a time, after a quiet period, and
never while its lag grows or while the rest could not carry its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from penstock.core.clock import Millis
from penstock.resources.metrics import JobLoad

# A rest carries the input when it is used to at most this share.
TARGET_UTILISATION = 0.7
# Metrics older than this decide nothing.
STALE_MS: Millis = 10_000
# So many looks in a row must show the lag: one may be a hiccup.
LOOKS_BEFORE_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerLimits:
    """What the scaler may do to one job."""

    lag_slo_s: float
    quiet_s: float
    settle_s: float  # what a job does so soon after its tasks started says nothing about what it can do
    task_count_min: int
    task_count_max: int
    recovery_s: float = 30.0  # t, within which a backlog should be gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Nothing to do, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescale:
    """Another number of tasks, and why."""

    task_count: int
    reason: str


def decide_task_count(loads: Sequence[JobLoad], limits: ScalerLimits, *, now_ms: Millis) -> Hold | Rescale:
    """Decide on the looks since the last change of the job, oldest first."""
    if not loads:
        return Hold(reason="no metrics since the last change")
    last = loads[-1]
    if now_ms - last.at_ms > STALE_MS:
        return Hold(reason=f"the newest metrics are {(now_ms - last.at_ms) / 1000:.0f} s old")
    settled = [load for load in loads if load.at_ms - loads[0].at_ms >= limits.settle_s * 1000]
    if not settled:
        return Hold(reason="its tasks have just started")
    recent = settled[-LOOKS_BEFORE_UP:]
    if len(recent) == LOOKS_BEFORE_UP and all(load.lag_s > limits.lag_slo_s for load in recent):
        return _up(last, limits)
    return _down(loads, last, limits, now_ms)


def _up(load: JobLoad, limits: ScalerLimits) -> Hold | Rescale:
    lag = f"lag {load.lag_s:.1f} s over the SLO of {limits.lag_slo_s:g} s"
    if load.task_count >= limits.task_count_max:
        return Hold(reason=f"{lag}, but {load.task_count} tasks is the limit")
    rate_needed = load.input_rate + load.lag_records / limits.recovery_s  # X + B/t
    task_rate = load.processed_rate / load.task_count  # P: while it lags, a task gives what it can
    wanted = (
        ceil(min(rate_needed / task_rate, limits.task_count_max)) if task_rate > 0 else load.task_count + 1
    )
    wanted = min(max(wanted, load.task_count + 1), limits.task_count_max)
    return Rescale(
        task_count=wanted,
        reason=f"{lag}: needs {rate_needed:.0f} records/s, one task gives {task_rate:.0f}; "
        f"{load.task_count} -> {wanted} tasks",
    )


def _down(loads: Sequence[JobLoad], last: JobLoad, limits: ScalerLimits, now_ms: Millis) -> Hold | Rescale:
    if last.task_count <= limits.task_count_min:
        return Hold(reason="within the SLO")
    if now_ms - loads[0].at_ms < limits.quiet_s * 1000:
        return Hold(reason="within the SLO, not quiet for long enough")
    quiet = [load for load in loads if now_ms - load.at_ms <= limits.quiet_s * 1000]
    if max(load.lag_s for load in quiet) > limits.lag_slo_s / 2:
        return Hold(reason="the lag was over half of the SLO within the quiet period")
    if last.lag_records > quiet[0].lag_records + last.input_rate:
        return Hold(reason="the lag grows")
    busy = max(load.busy for load in quiet)
    fewer = last.task_count - 1
    if busy * last.task_count / fewer > TARGET_UTILISATION:
        return Hold(reason=f"{fewer} tasks would be {busy * last.task_count / fewer:.0%} busy")
    return Rescale(
        task_count=fewer,
        reason=f"quiet for {limits.quiet_s:g} s, {busy:.0%} busy: {last.task_count} -> {fewer} tasks",
    )
