"""When a policy looks at a job: on schedule, on a condition, or on request (StreamOps 3.1.2). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.clock import Millis
from penstock.resources.policies.controls import ControlSettings

HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """The few numbers that conditions are made of; None: not known."""

    lag_s: float | None = None
    busy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """It is time, because."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotDue:
    """It is not, because."""

    reason: str


def decide_due(
    settings: ControlSettings,
    *,
    last_ms: Millis | None,
    signals: Signals,
    now_ms: Millis,
    asked: bool = False,
) -> Due | NotDue:
    """Whether a policy looks now. `asked`: somebody wants it, whatever the schedule says."""
    if not settings.enabled:
        return NotDue(reason="switched off for this job")
    if asked:
        return Due(reason="asked for")
    # A last time in the future is of a clock that was wrong.
    if last_ms is not None and 0 <= now_ms - last_ms < settings.every_s * 1000:
        return NotDue(reason=f"looked {(now_ms - last_ms) / 1000:.0f} s ago, every {settings.every_s:g} s")
    if not _is_hour(settings, now_ms):
        return NotDue(reason=f"only from {settings.from_hour} to {settings.to_hour} o'clock UTC")
    if settings.when_lag_s is None and settings.when_busy is None:
        return Due(reason="scheduled")
    if settings.when_lag_s is not None and (signals.lag_s or 0.0) >= settings.when_lag_s > 0:
        return Due(reason=f"it lags {signals.lag_s:.0f} s")
    if settings.when_busy is not None and (signals.busy or 0.0) >= settings.when_busy > 0:
        return Due(reason=f"a task is {signals.busy:.0%} busy")
    return NotDue(reason="no condition holds")


def _is_hour(settings: ControlSettings, now_ms: Millis) -> bool:
    first, end = settings.from_hour, settings.to_hour
    if first is None or end is None or first == end:
        return True
    hour = now_ms // HOUR_MS % 24
    return first <= hour < end if first < end else hour >= first or hour < end
