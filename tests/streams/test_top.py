"""The first results of each window are those that plain Python finds, however the log is cut and whoever dies."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import StateMismatch
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, partition_of
from penstock.streams.operators.blocks import decode_rows
from penstock.streams.operators.build import operator_of
from penstock.streams.rows.memory import MemoryRows
from tests.streams.operator_world import Event, Low, OperatorWorld, Rec

IN = (("q", "string"), ("window_start", "bigint"), ("window_end", "bigint"), ("n", "double"))
OUT = (*IN, ("rank", "int"))


def top_world(events: list[Event], *, count: int = 2, lowest: bool = False) -> OperatorWorld:
    plan = {"operator": "top", "keys": ["window_start"], "count": count, "by": "n", "lowest": lowest}
    return OperatorWorld(logic=lambda: operator_of(plan, OUT), inputs=(IN,), out=OUT).build(events)


def a_result(word: str | None, start: int, value: float | None) -> Rec:
    return Rec(key=str(start), ts=start + 9, values=(word, start, start + 10, value))


def first_results(events: list[Event], count: int, lowest: bool) -> list[tuple[Any, ...]]:
    """(_ts, key, q, n, rank); None is below every value, NaN above."""
    low, windows, found = LOW_MIN, defaultdict(list), []

    def order(value: float | None) -> tuple[int, float]:
        return (0, 0) if value is None else (2, 0) if value != value else (1, value)

    for event in events:
        if isinstance(event, Low):
            low = max(low, event.low)
        elif event.ts >= low:
            windows[event.values[1]].append(event.values)
    for start, rows in windows.items():
        rows.sort(key=lambda row: (row[0] is not None, row[0] or ""))
        rows.sort(key=lambda row: order(row[3]), reverse=not lowest)
        found += [(start + 9, str(start), row[0], row[3], n) for n, row in enumerate(rows[:count], start=1)]
    return sorted(found, key=lambda row: (row[0], row[1], row[4]))


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Results of windows as an aggregate gives them, each group once; some behind the low."""
    low, events, seen = 0, [], set()
    for _ in range(draw(st.integers(1, 25))):
        if draw(st.integers(0, 4)) == 0:
            low += draw(st.integers(1, 15))
            events.append(Low(low=low))
            continue
        start = max(0, low // 10 * 10 + draw(st.sampled_from([-10, 0, 0, 10])))
        word = draw(st.sampled_from([None, "", *"abcdef"]))
        value = draw(st.sampled_from([None, 1.0, 1.0, 2.0, -1.5, float("nan")]))
        if (start, word) not in seen:
            seen.add((start, word))
            events.append(a_result(word, start, value))
    return [*events, Low(low=LOW_MAX)]


@settings(max_examples=40, deadline=None)
@given(
    events=logs(),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    deaths=st.lists(st.integers(0, 30), max_size=2),
    count=st.integers(1, 3),
    lowest=st.booleans(),
)
def test_first_results_are_those_of_plain_python(
    events: list[Event], cuts: list[int], deaths: list[int], count: int, lowest: bool
):
    world = top_world(events, count=count, lowest=lowest)
    for at in deaths:
        world.live_and_die(cuts, at)
    world.live(cuts)
    rows = world.out_rows()
    assert all(row["window_end"] == row["_ts"] + 1 and not row["_late"] for row in rows)
    found = [(row["_ts"], row["_key"], row["q"], row["n"], row["rank"]) for row in rows]
    expected = sorted(first_results(events, count, lowest), key=lambda row: partition_of(row[1], 2))
    assert repr(found) == repr(expected)  # NaN is equal to itself here
    world.check_marks()
    assert isinstance(world.rows, MemoryRows)
    (interval,) = world.rows._intervals.values()
    assert not interval.states and not interval.timers


def test_a_window_keeps_no_more_than_it_gives():
    events: list[Event] = [a_result(f"w{n}", 0, float(n * 7 % 50)) for n in range(50)]
    world = top_world([*events], count=3)
    world.live([10])
    assert isinstance(world.rows, MemoryRows)
    (interval,) = world.rows._intervals.values()
    (state,) = interval.states.values()
    assert len(state) < 150 and not world.out_rows()


def test_the_state_of_another_plan_is_refused():
    schema = pa.schema([("_key", pa.string()), ("n", pa.int64())])
    for data in (b"\xff", b"\x91\x92\x01\x02", b"\x91\x91\xa1x"):
        with pytest.raises(StateMismatch, match="state of key '0' of job 'job' does not match its top"):
            decode_rows({"0": data}, schema, job="job", operator="top")
    kept = decode_rows({"1": b"\x91\x91\x05", "0": b"\x90"}, schema, job="job", operator="top")
    assert kept.to_pylist() == [{"_key": "1", "n": 5}]
    assert decode_rows({}, schema, job="job", operator="top").num_rows == 0
