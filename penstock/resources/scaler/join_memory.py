"""What a join needs, by its window, its degree of matching and its degree of disorder (Turbine V-B). Pure.

A record is kept once, until the low watermark has passed its window. How many bytes one takes is what is kept
now over the records that came in that time; so a window that is not full yet, and one that a higher rate will
fill, are seen before they are full.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, isfinite
from typing import Any, NamedTuple

from penstock.core.clock import Millis
from penstock.resources.frames import Frame
from penstock.resources.scaler.observation import JoinFacts
from penstock.resources.scaler.window import Window, optional

MB = 2**20


class JoinNeeds(NamedTuple):
    """What it will keep, and what pairs will take beyond what they take now."""

    state_mb: float
    pairs_mb: float  # of each task


def join_facts(config: Mapping[str, Any], created_ms: Millis) -> JoinFacts | None:
    """From a job's plan; None: it is no join, or says no window."""
    plan = config["plan"].get("computation") or {}
    if plan.get("operator") != "join":
        return None
    near, window = plan.get("within") or {}, plan.get("window") or {}
    waits_ms = [near.get("before_ms", 0), near.get("after_ms", 0), window.get("size_ms", 0)]
    if not max(waits_ms) > 0:
        return None
    return JoinFacts(
        window_s=max(waits_ms) / 1000,
        created_ms=created_ms,
        batch_rows_max=config["batch_rows_max"],
        trigger_s=max(config["trigger_ms"], 1000) / 1000,
    )


def join_state_mb(input_rate: float, kept_s: float, record_bytes: float) -> float:
    """Proportional to what comes while a record is kept: its window, and for as long as the low is behind."""
    return input_rate * kept_s * record_bytes / MB


def join_pairs_mb(rows: float, match_degree: float, record_bytes: float) -> float:
    """The pairs that one batch makes: they are in memory together, and each has two records."""
    return rows * match_degree * 2 * record_bytes / MB


def estimate_join(
    window: Window, frame: Frame, join: JoinFacts, *, tasks: int, rate: float
) -> JoinNeeds | None:
    """What it needs at `rate` records per second; None: what it keeps cannot be told apart by records."""
    state_bytes = optional(frame.values, "state_bytes")
    kept_s = join.window_s + disorder_s(frame, window)
    records = records_kept(frame, join, kept_s, lag_s=window.lag_s)
    if records is None or not records > 0 or not state_bytes > 0:
        return None
    record_bytes = state_bytes / records
    state_mb = max(state_bytes / MB, join_state_mb(rate, kept_s, record_bytes))
    match_degree = (
        optional(frame.values, "output_rate") / window.processed_rate if window.processed_rate > 0 else 0.0
    )
    if not match_degree > 0:
        return JoinNeeds(state_mb, 0.0)
    # A record meets more partners when more are kept.
    fuller = max(1.0, rate * kept_s / records)
    rows = min(float(join.batch_rows_max), rate * join.trigger_s / tasks)
    more = join_pairs_mb(rows, match_degree * (fuller - 1), record_bytes)
    return JoinNeeds(state_mb, more)


def disorder_s(frame: Frame, window: Window) -> float:
    """For how long records are kept because others may be late: the low is behind by this and by the lag."""
    behind = optional(frame.values, "watermark_lag_s")
    return max(0.0, behind - window.lag_s) if behind == behind else 0.0


def records_kept(frame: Frame, join: JoinFacts, kept_s: float, *, lag_s: float) -> float | None:
    """How many records came in the time whose records are kept; None: not all of that time is known."""
    ingest, step_s = frame.values.get("ingest_rate"), frame.step_ms / 1000
    if ingest is None:
        return None
    unread = round(lag_s / step_s)  # what waits on the bus is not kept yet
    end = frame.first_minute + frame.minutes - unread
    steps = min(ceil(kept_s / step_s), end - join.created_ms // frame.step_ms)
    first = frame.minutes - unread - steps
    if steps < 1 or first < 0:
        return None
    rates = ingest[first : first + steps].tolist()
    # The minute in which a job is made is not whole and may be missing.
    if steps > 1 and not isfinite(rates[0]) and join.created_ms // frame.step_ms == end - steps:
        rates = rates[1:]
    records = sum(rates) * step_s
    return records if isfinite(records) else None
