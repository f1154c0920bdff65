"""Windows over Arrow tables give what plain Python gives, however the log is cut and whoever dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.streams.bus.log import LOW_MAX, partition_of
from penstock.streams.dsl.windows import Firing, Spans, session, sliding, tumbling
from penstock.streams.operators.build import operator_of
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.sqlite import SqliteRows
from tests.streams.operator_world import Event, Low, OperatorWorld, Rec
from tests.streams.window_reference import on_time_results, results_with_firing, session_results

FUNCTIONS = ("count(*)", "count", "sum", "min", "max", "avg")
KINDS = {"count(*)": "bigint", "count": "bigint", "avg": "double"}
ON_TIME = Firing()
numbers = st.one_of(st.none(), st.integers(-(2**40), 2**40))
doubles = st.one_of(
    st.none(), st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)
)


def window_plan(spans: Spans, firing: Firing = ON_TIME, kind: str = "bigint") -> dict[str, Any]:
    values = [
        {
            "name": f"v{place}",
            "function": function.split("(")[0],
            "column": None if function == "count(*)" else "x",
            "parameter": None,
            "type": KINDS.get(function, kind),
        }
        for place, function in enumerate(FUNCTIONS)
    ]
    return {
        "operator": "aggregate",
        "keys": ["k"],
        "window": spans.to_json(),
        "firing": firing.to_json(),
        "columns": values,
    }


def window_columns(kind: str = "bigint") -> tuple[tuple[str, str], ...]:
    made = [(f"v{place}", KINDS.get(function, kind)) for place, function in enumerate(FUNCTIONS)]
    return (("k", "string"), ("window_start", "bigint"), ("window_end", "bigint"), *made)


def a_world(
    events: list[Event], spans: Spans, kind: str = "bigint", firing: Firing = ON_TIME
) -> OperatorWorld:
    plan = window_plan(spans, firing, kind)
    return OperatorWorld(
        logic=lambda: operator_of(plan, window_columns(kind)),
        inputs=((("x", kind),),),
        out=window_columns(kind),
    ).build(events)


@st.composite
def logs(draw: st.DrawFn, values: st.SearchStrategy[Any] = numbers, size: int = 40) -> list[Event]:
    """Records around a low that rises; some are behind it. At the end everything has come."""
    low, events = 0, []
    for _ in range(draw(st.integers(1, size))):
        if draw(st.integers(0, 3)) == 0:
            low += draw(st.integers(1, 40))
            events.append(Low(low=low))
        else:
            ts = max(0, low + draw(st.integers(-30, 60)))
            events.append(Rec(key=draw(st.sampled_from(["a", "b", ""])), ts=ts, values=(draw(values),)))
    return [*events, Low(low=LOW_MAX)]


def by_partition(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(rows, key=lambda row: partition_of(row[2], 2))  # stable: the order in each stays


def rows_of(world: OperatorWorld) -> list[tuple[Any, ...]]:
    found = []
    for row in world.out_rows():
        assert row["_ts"] == row["window_end"] - 1 and row["_key"] == row["k"] and not row["_late"]
        values = [row[f"v{place}"] for place in range(len(FUNCTIONS))]
        found.append((row["window_start"], row["window_end"], row["k"], *values))
    return found


SPANS = [(tumbling(20), 20, 20), (sliding(30, every=10), 30, 10)]


@pytest.mark.parametrize(("spans", "size", "slide"), SPANS, ids=["tumbling", "sliding"])
@settings(max_examples=25, deadline=None)
@given(
    events=logs(),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    deaths=st.lists(st.integers(0, 30)),
)
def test_windows_are_those_of_plain_python_however_the_log_is_cut_and_whoever_dies(
    spans: Spans, size: int, slide: int, events: list[Event], cuts: list[int], deaths: list[int]
):
    expected = on_time_results(events, size=size, slide=slide, functions=FUNCTIONS)
    world = a_world(events, spans)
    for at in deaths:
        world.live_and_die(cuts, at)
    world.live(cuts)
    assert rows_of(world) == by_partition(expected)
    world.check_marks()
    whole = a_world(events, spans)
    whole.live([1000])
    assert world.result() == whole.result()
    assert isinstance(world.rows, MemoryRows)
    (interval,) = world.rows._intervals.values()
    assert not interval.states and not interval.timers  # nothing is left behind


@settings(max_examples=20, deadline=None)
@given(events=logs(doubles), cuts=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_sums_of_doubles_are_exact_so_that_no_order_and_no_cut_shows(events: list[Event], cuts: list[int]):
    expected = on_time_results(events, size=20, slide=20, functions=FUNCTIONS)
    world = a_world(events, tumbling(20), "double")
    world.live(cuts)
    assert rows_of(world) == by_partition(expected)


@settings(max_examples=25, deadline=None)
@given(
    events=logs(),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    deaths=st.lists(st.integers(0, 30), max_size=3),
    early=st.sampled_from([None, 5, 7]),
    lateness=st.sampled_from([None, 0, 15, 1000]),
    accumulating=st.booleans(),
    slide=st.sampled_from([20, 10]),
)
def test_early_results_and_late_updates_are_those_of_plain_python(
    events: list[Event],
    cuts: list[int],
    deaths: list[int],
    early: int | None,
    lateness: int | None,
    accumulating: bool,
    slide: int,
):
    firing = Firing(
        early_ms=early,
        late="drop" if lateness is None else "update",
        lateness_ms=lateness or 0,
        mode="accumulating" if accumulating else "discarding",
    )
    expected = results_with_firing(
        events,
        size=20,
        slide=slide,
        early=early,
        lateness=lateness,
        accumulating=accumulating,
        functions=FUNCTIONS,
    )
    spans = tumbling(20) if slide == 20 else sliding(20, every=slide)
    world = a_world(events, spans, firing=firing)
    for at in deaths:
        world.live_and_die(cuts, at)
    world.live(cuts)
    found = [
        (row["_ts"], row["_late"], row["window_start"], row["k"], *(row[f"v{n}"] for n in range(6)))
        for row in world.out_rows()
    ]
    assert found == sorted(expected, key=lambda row: partition_of(row[3], 2))
    world.check_marks()
    assert isinstance(world.rows, MemoryRows)
    (interval,) = world.rows._intervals.values()
    assert not interval.states


@settings(max_examples=20, deadline=None)
@given(
    events=logs(),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    deaths=st.lists(st.integers(0, 30), max_size=3),
)
def test_sessions_are_those_of_plain_python(events: list[Event], cuts: list[int], deaths: list[int]):
    expected = session_results(events, gap=12, functions=FUNCTIONS)
    world = a_world(events, session(gap=12))
    for at in deaths:
        world.live_and_die(cuts, at)
    world.live(cuts)
    assert rows_of(world) == by_partition(expected)
    world.check_marks()
    assert isinstance(world.rows, MemoryRows)
    (interval,) = world.rows._intervals.values()
    assert not interval.states and not interval.timers


def test_a_window_of_many_steps_has_few_rows_and_the_right_result():
    """Blocks are merged as they become many: 300 steps add to one window, and never are there 30 rows of it."""
    events: list[Event] = [Rec(key=f"k{n % 5}", ts=n, values=(n,)) for n in range(300)]
    world = a_world([*events, Low(low=LOW_MAX)], tumbling(1000))
    most = 0
    step = world.open()
    for at in range(300):
        world.step(step, [at], [at + 1])
        assert isinstance(world.rows, MemoryRows)
        (interval,) = world.rows._intervals.values()
        most = max(most, len(interval.states))
    assert 8 < most < 30
    world.live([1])
    expected = on_time_results([*events, Low(low=LOW_MAX)], size=1000, slide=1000, functions=FUNCTIONS)
    assert rows_of(world) == by_partition(expected)


def test_windows_are_the_same_on_sqlite_rows(tmp_path: Path):
    events = [*(Rec(key=f"k{n % 7}", ts=n * 3 % 500, values=(n,)) for n in range(200)), Low(low=LOW_MAX)]
    world = a_world(events, sliding(50, every=10))
    world.live([1000])
    plan = window_plan(sliding(50, every=10))
    other = OperatorWorld(
        logic=lambda: operator_of(plan, window_columns()),
        inputs=((("x", "bigint"),),),
        out=window_columns(),
        rows=SqliteRows(tmp_path),
    ).build(events)
    other.live_and_die([17], 21)
    other.live([17])
    assert other.result() == world.result()


def test_approximate_values_do_not_depend_on_cuts_and_are_near():
    plan = window_plan(tumbling(1000))
    plan["columns"] = [
        {
            "name": "d",
            "function": "approx_count_distinct",
            "column": "x",
            "parameter": None,
            "type": "bigint",
        },
        {"name": "q", "function": "approx_percentile", "column": "x", "parameter": 0.9, "type": "bigint"},
    ]
    out = (*window_columns()[:3], ("d", "bigint"), ("q", "bigint"))
    events = [*(Rec(key="k", ts=n, values=(n * 7 % 613,)) for n in range(900)), Low(low=LOW_MAX)]
    found = []
    for cuts in ([1000], [7], [1, 50]):
        world = OperatorWorld(
            logic=lambda: operator_of(plan, out), inputs=((("x", "bigint"),),), out=out
        ).build(events)
        world.live(cuts)
        found.append(world.out_rows())
    assert found[0] == found[1] == found[2]
    (row,) = found[0]
    values = sorted(n * 7 % 613 for n in range(900))
    assert row["d"] == pytest.approx(613, rel=0.05) and row["q"] == pytest.approx(values[809], rel=0.011)
