"""Decides which records are late, and where a step fires timers between records (MillWheel 4.5).

Pure: both are functions of the log alone, so results do not depend on batches, restarts or backlog.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.clock import Millis
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, Mark

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """After the first `position` rows of the step the input low is `low`."""

    position: int
    low: Millis


def event_time_lows(ts: npt.ArrayLike, max_before: Millis, lateness_ms: Millis) -> tuple[Ints, Millis]:
    """For each record the low at which it is read, and the running maximum after the last one.

    The low is the maximum event time of all records before, minus the lateness. It starts with LOW_MIN.
    """
    times = np.asarray(ts, dtype=np.int64)
    running = np.maximum.accumulate(np.concatenate((np.array([max_before], dtype=np.int64), times)))
    before = running[:-1]
    return np.where(before <= LOW_MIN, LOW_MIN, before - lateness_ms), int(running[-1])


def event_time_low(max_seen: Millis, lateness_ms: Millis) -> Millis:
    """The low watermark for a running maximum of event times."""
    return LOW_MIN if max_seen <= LOW_MIN else max_seen - lateness_ms


def marks_of_event_time(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """The marks that count for an event-time input: those of an idle partition, and the end of a source."""
    return tuple(mark for mark in marks if mark.idle or mark.low >= LOW_MAX)


def lows_by_marks(offsets: Ints, marks: Sequence[Mark], *, low: Millis) -> Ints:
    """For each record the low of the marks before it; `low`: the value before the first mark.

    A record comes after every mark whose end is at most its offset. Marks ascend by low.
    """
    ends = np.maximum.accumulate(np.array([mark.end for mark in marks], dtype=np.int64))
    lows = np.array([low, *(mark.low for mark in marks)], dtype=np.int64)
    return np.asarray(lows[np.searchsorted(ends, offsets, side="right")], dtype=np.int64)


def low_at_end(marks: Sequence[Mark], *, before: Millis, event_time: Millis | None) -> Millis:
    """An input's low at the end of a range. `event_time`: for event-time inputs the maximum minus lateness.

    For event-time inputs only some marks count, see `marks_of_event_time`.
    """
    counted = marks if event_time is None else marks_of_event_time(marks)
    marked = max((mark.low for mark in counted), default=before)
    return max(before, marked, before if event_time is None else event_time)


def cut_at_marks(
    row_inputs: Ints, row_offsets: Ints, marks: Sequence[Sequence[Mark]], *, low: Millis
) -> tuple[Cut, ...]:
    """The positions among the rows of a step where the input low rises, and its values.

    `marks[i]` are those of input i above `low`, in order; rows of one input ascend by offset. The input low
    is the minimum over the inputs; each starts at `low`.
    """
    events = []
    for number, found in enumerate(marks):
        places = np.flatnonzero(row_inputs == number)
        passed = np.searchsorted(row_offsets[places], np.array([mark.end for mark in found], dtype=np.int64))
        events += [
            (int(places[count - 1]) + 1 if count else 0, mark.low, number)
            for mark, count in zip(found, passed, strict=True)
        ]
    cuts, lows, reached = [], [low] * len(marks), low
    for position, new, number in sorted(events):
        lows[number] = max(lows[number], new)
        if min(lows) > reached:
            reached = min(lows)
            cuts.append(Cut(position=position, low=reached))
    return tuple(cuts)


def order_at_marks(
    row_inputs: Ints, row_offsets: Ints, marks: Sequence[Sequence[Mark]], *, low: Millis
) -> Ints | None:
    """The order in which a step processes the rows of several inputs; None: the given order.

    Rows are ordered by the mark level of their own input, so that what is due at a mark is processed before
    later rows of any input, independent of how much a step reads. Rows of one input keep their order.
    """
    if len(marks) < 2:
        return None
    levels = np.full(len(row_inputs), low, dtype=np.int64)
    for number, found in enumerate(marks):
        places = np.flatnonzero(row_inputs == number)
        passed = np.searchsorted(
            np.array([mark.end for mark in found], dtype=np.int64), row_offsets[places], side="right"
        )
        levels[places] = np.array([low, *(mark.low for mark in found)], dtype=np.int64)[passed]
    order = np.lexsort((row_offsets, row_inputs, levels))
    return None if (np.diff(order) > 0).all() else np.asarray(order, dtype=np.int64)
