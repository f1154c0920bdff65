"""Lateness and cuts: functions of the log alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.streams.bus.log import LOW_MAX, LOW_MIN, Mark
from penstock.streams.step.watermark import Cut, cut_at_marks, event_time_low, event_time_lows, low_at_end

_times = st.lists(st.integers(-(10**6), 10**15), max_size=30)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(
    ("ts", "max_before", "lateness", "late", "max_after"),
    [
        ([], LOW_MIN, 0, [], LOW_MIN),
        ([5], LOW_MIN, 0, [False], 5),  # the first record of a log is never late
        ([10, 9, 10, 11], LOW_MIN, 0, [False, True, False, False], 11),
        ([10, 9, 4], LOW_MIN, 5, [False, False, True], 10),
        ([10, 5], LOW_MIN, 5, [False, False], 10),  # exactly at the low is on time
        ([1, 2], 100, 10, [True, True], 100),  # what came in earlier batches counts
        ([-5, -7], LOW_MIN, 1, [False, True], -5),
    ],
)
def test_late_is_behind_the_running_maximum_minus_lateness(
    ts: list[int], max_before: int, lateness: int, late: list[bool], max_after: int
) -> None:
    lows, after = event_time_lows(np.array(ts, dtype=np.int64), max_before, lateness)
    assert ((np.array(ts) < lows).tolist(), after) == (late, max_after)


@given(ts=_times, cut=st.integers(0, 30), lateness=st.integers(0, 10**6))
def test_lateness_does_not_depend_on_batches(ts: list[int], cut: int, lateness: int) -> None:
    whole, after = event_time_lows(ts, LOW_MIN, lateness)
    first, middle = event_time_lows(ts[:cut], LOW_MIN, lateness)
    second, end = event_time_lows(ts[cut:], middle, lateness)
    assert ([*first, *second], end) == (whole.tolist(), after)


@given(ts=_times, lateness=st.integers(0, 10**6))
def test_no_record_on_time_is_behind_the_low_before_it(ts: list[int], lateness: int) -> None:
    seen = LOW_MIN
    for moment in ts:
        (low,), after = event_time_lows([moment], seen, lateness)
        assert low == event_time_low(seen, lateness)
        seen = after


def test_a_log_without_records_has_no_low() -> None:
    assert event_time_low(LOW_MIN, 5000) == LOW_MIN
    assert event_time_low(7000, 5000) == 2000


@pytest.mark.parametrize(
    ("marks", "event_time", "low"),
    [
        ([], None, 10),
        ([Mark(low=30, end=1), Mark(low=50, end=4)], None, 50),
        ([], 70, 70),
        ([], 5, 10),  # never back
        ([Mark(low=50, end=4)], 20, 20),  # marks below the end do not speak for an event-time input
        ([Mark(low=LOW_MAX, end=4)], 20, LOW_MAX),  # the end of a bounded source does
    ],
)
def test_the_low_after_a_range(marks: list[Mark], event_time: int | None, low: int) -> None:
    assert low_at_end(marks, before=10, event_time=event_time) == low


def test_rows_are_cut_where_a_mark_ends() -> None:
    marks = [Mark(low=10, end=5), Mark(low=20, end=7), Mark(low=30, end=7), Mark(low=40, end=9)]
    cuts = cut_at_marks(ints(0, 0, 0), ints(5, 6, 7), [marks], low=LOW_MIN)
    assert cuts == (
        Cut(position=0, low=10),
        Cut(position=2, low=20),
        Cut(position=2, low=30),  # two marks at one place are two lows, one after the other
        Cut(position=3, low=40),
    )


def test_rows_that_were_filtered_out_do_not_move_a_cut() -> None:
    assert cut_at_marks(ints(0, 0), ints(2, 8), [[Mark(low=10, end=5)]], low=0) == (Cut(position=1, low=10),)


def test_the_low_of_two_inputs_is_the_smaller_one() -> None:
    marks = [[Mark(low=10, end=1), Mark(low=50, end=2)], [Mark(low=30, end=1)]]
    cuts = cut_at_marks(ints(0, 0, 1), ints(0, 1, 0), marks, low=0)
    assert cuts == (Cut(position=3, low=30),)


def test_without_marks_there_is_no_cut() -> None:
    assert cut_at_marks(ints(0, 0), ints(0, 1), [[]], low=0) == ()
    assert cut_at_marks(ints(), ints(), [], low=0) == ()


@given(
    ends=st.lists(st.integers(0, 12), max_size=8).map(sorted),
    rows=st.integers(0, 12),
    split=st.integers(0, 12),
)
def test_cuts_do_not_depend_on_where_a_batch_ends(ends: list[int], rows: int, split: int) -> None:
    """Each record meets the same low, whether the rows come in one batch or in two."""
    marks = [Mark(low=10 * (place + 1), end=end) for place, end in enumerate(ends)]

    def lows(start: int, end: int, low: int) -> list[int]:
        visible = [mark for mark in marks if mark.low > low and mark.end <= end]
        cuts = cut_at_marks(ints(*[0] * (end - start)), ints(*range(start, end)), [visible], low=low)
        met, at = [], low
        for place in range(end - start + 1):
            at = max([at, *(cut.low for cut in cuts if cut.position <= place)])
            met.append(at)
        return met

    split = min(split, rows)
    whole = lows(0, rows, 0)
    first = lows(0, split, 0)
    assert whole == [*first[:-1], *lows(split, rows, first[-1])]
