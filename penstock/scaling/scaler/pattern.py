"""The pattern analyzer: checks a smaller shape against the last 14 days (Turbine V-C). Pure.

A step down is allowed only if the smaller shape would have carried the next x hours on the days before. If
the input of the last half hour differs from the same half hour on those days, the history is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.scaling.metrics.frames import Points
from penstock.scaling.scaler.observation import DAY_MIN, DecisionSettings

DAYS = 14
RECENT_MIN = 30
# Share of a day's stretch that must be known; deviation between days, in standard deviations, that is normal.
KNOWN_MIN = 0.8
USUAL_DEVIATIONS = 3.0
# One day in fourteen may be an outlier. A weekly peak is there on two.
ODD_DAYS = 1 / 14


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A job's input per minute, up to 14 days back; NaN if not known."""

    first_minute: int
    input_rate: Points
    key_count: Points | None = None
    last_day: Mapping[str, Points] = field(
        default_factory=dict
    )  # by metric, the last day of those that show the cost of the input


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """The expected peak of input and keys in the next hours; `off` is the reason if there is none."""

    off: str = ""
    days: int = 0
    recent_rate: float = 0.0
    usual_rate: float = 0.0
    input_peak: float = 0.0  # without outlier days, averaged over a decision's window
    key_peak: float = float("nan")


def analyse(history: History, recent: Points, *, end_minute: int, settings: DecisionSettings) -> Pattern:
    """The pattern of the next `history_hours` from `end_minute` on, the first minute without data.

    `recent` is the input of the last half hour.
    """
    hours_min = max(1, round(settings.history_hours * 60))
    days_back = _days(history.input_rate, history.first_minute, end_minute)
    ahead = _cleaned(days_back[:, :hours_min])
    # A row ends at this time of the following day; the last row ends now.
    before = _cleaned(days_back[:-1, -RECENT_MIN:])
    known, usual_known = _is_known(ahead), _is_known(before)
    days = int(known.sum())
    if min(days, int(usual_known.sum())) < settings.history_days_min:
        return Pattern(off=f"{days} days of history are too few", days=days)
    if len(recent) < RECENT_MIN or not _is_known(recent[None, :])[0]:
        return Pattern(off="the last half hour has gaps", days=days)
    recent_rate = float(np.nanmean(recent))
    means = np.nanmean(before[usual_known], axis=1)
    usual, spread = float(means.mean()), float(means.std())
    if abs(recent_rate - usual) > max(settings.unlike_at * usual, USUAL_DEVIATIONS * spread):
        return Pattern(
            off=f"{recent_rate:.3g} records/s in the last half hour differ from the usual {usual:.3g}",
            days=days,
            recent_rate=recent_rate,
            usual_rate=usual,
        )
    peaks = np.sort(_peaks(ahead[known], min(settings.window_min, hours_min)))
    odd = int(days * ODD_DAYS + 1e-9)
    return Pattern(
        days=days,
        recent_rate=recent_rate,
        usual_rate=usual,
        input_peak=float(peaks[days - 1 - odd]),
        key_peak=_key_peak(history, end_minute, hours_min, known, odd),
    )


def _key_peak(history: History, end_minute: int, minutes: int, known: NDArray[np.bool_], odd: int) -> float:
    if history.key_count is None or len(history.key_count) != len(history.input_rate):
        return float("nan")
    keys = _cleaned(_days(history.key_count, history.first_minute, end_minute)[:, :minutes][known])
    known_days = keys[_is_known(keys)]
    if not len(known_days):
        return float("nan")
    return float(np.sort(np.nanmax(known_days, axis=1))[max(0, len(known_days) - 1 - odd)])


def _days(points: Points, first_minute: int, end_minute: int) -> Points:
    """A row per day up to `end_minute`, oldest first, from this time of the day on; NaN where unknown."""
    begin = end_minute - DAYS * DAY_MIN - first_minute
    end = begin + DAYS * DAY_MIN
    if begin >= 0 and end <= len(points):
        return points[begin:end].reshape(DAYS, DAY_MIN)  # a view: nothing is copied
    found = np.full(DAYS * DAY_MIN, np.nan)
    low, high = max(0, begin), min(len(points), end)
    if low < high:
        found[low - begin : high - begin] = points[low:high]
    return found.reshape(DAYS, DAY_MIN)


def _cleaned(rows: Points) -> Points:
    """Replace invalid values by NaN."""
    with np.errstate(invalid="ignore"):
        return np.where((rows >= 0) & (rows < np.inf), rows, np.nan)


def _is_known(rows: Points) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(rows).mean(axis=1) >= KNOWN_MIN)


def _peaks(rows: Points, width: int) -> Points:
    """The largest mean of `width` minutes of each row. A gap counts as the mean of its row."""
    filled = np.where(np.isfinite(rows), rows, np.nanmean(rows, axis=1)[:, None])
    sums = np.cumsum(np.concatenate((np.zeros((len(filled), 1)), filled), axis=1), axis=1)
    return np.asarray(((sums[:, width:] - sums[:, :-width]) / width).max(axis=1))
