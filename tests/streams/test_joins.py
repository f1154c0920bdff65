"""Joins over Arrow tables give the pairs that plain Python finds, however the two logs are cut and whoever dies."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.streams.bus.log import LOW_MAX, LOW_MIN, NULL_KEY
from penstock.streams.dsl.windows import Spans, sliding, tumbling
from penstock.streams.operators.build import operator_of
from penstock.streams.rows.memory import MemoryRows
from tests.streams.operator_world import Event, Low, OperatorWorld, Rec

OUT = (("k", "string"), ("a", "bigint"), ("b", "bigint"))
INPUTS = (
    (("side", "int"), ("l0", "string"), ("l1", "bigint")),
    (("side", "int"), ("r0", "string"), ("r1", "bigint")),
)
BEFORE, AFTER = 7, 4


def a_world(events: list[Event], how: str, window: Spans | None) -> OperatorWorld:
    near = {"within": {"before_ms": BEFORE, "after_ms": AFTER}}
    plan = {
        "operator": "join",
        "how": how,
        "keys": [["k"], ["k"]],
        "columns": [[["k", "string"], ["a", "bigint"]], [["k", "string"], ["b", "bigint"]]],
        **({"window": window.to_json()} if window else near),
    }
    return OperatorWorld(logic=lambda: operator_of(plan, OUT), inputs=INPUTS, out=OUT).build(events)


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Records of two inputs, each with a low of its own; some are behind it."""
    lows, events = [0, 0], []
    for number in range(draw(st.integers(1, 30))):
        side = draw(st.integers(0, 1))
        if draw(st.integers(0, 3)) == 0:
            lows[side] += draw(st.integers(1, 20))
            events.append(Low(low=lows[side], input=side))
        else:
            key = draw(st.sampled_from(["x", "y", "", NULL_KEY]))
            ts = max(0, lows[side] + draw(st.integers(-10, 25)))
            events.append(
                Rec(key=key, ts=ts, values=(side, None if key == NULL_KEY else key, number), input=side)
            )
    return [*events, Low(low=LOW_MAX, input=0), Low(low=LOW_MAX, input=1)]


def expected(events: list[Event], how: str, window: Spans | None) -> Counter[tuple[Any, ...]]:
    """(_ts, key, a, b) of every pair, and of what has no partner. Late ones are dropped where they enter."""
    lows, sides = [LOW_MIN, LOW_MIN], ([], [])
    for event in events:
        if isinstance(event, Low):
            lows[event.input] = max(lows[event.input], event.low)
        elif event.ts >= lows[event.input]:
            sides[event.input].append(event)
    size = window.size_ms if window else 0
    slide = (window.slide_ms or size) if window else 0
    found: Counter[tuple[Any, ...]] = Counter()
    matched = set()
    for left in sides[0]:
        for right in sides[1]:
            if window:
                starts = [
                    {s for s in range(-200, 1200, slide) if s <= r.ts < s + size} for r in (left, right)
                ]
                times = len(starts[0] & starts[1])
            else:
                times = int(left.ts - BEFORE <= right.ts <= left.ts + AFTER)
            if left.key == right.key != NULL_KEY and times:
                matched |= {left, right}
                found[max(left.ts, right.ts), left.key, left.values[2], right.values[2]] += times
    for side, mine in enumerate(sides):
        for one in mine:
            if one in matched or how == "inner" or (how == "left" and side == 1):
                continue
            until = one.ts // slide * slide + size - 1 if window else one.ts + (AFTER, BEFORE)[side]
            values = (one.values[2], None) if side == 0 else (None, one.values[2])
            found[(until, one.key, *values)] += 1
    return found


@pytest.mark.parametrize(
    "window", [None, tumbling(10), sliding(20, every=5)], ids=["within", "tumbling", "sliding"]
)
@settings(max_examples=40, deadline=None)
@given(
    events=logs(),
    how=st.sampled_from(["inner", "left", "outer"]),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    deaths=st.lists(st.integers(0, 30), max_size=3),
)
def test_joins_are_those_of_plain_python_however_the_logs_are_cut_and_whoever_dies(
    window: Spans | None, events: list[Event], how: str, cuts: list[int], deaths: list[int]
):
    world = a_world(events, how, window)
    for at in deaths:
        world.live_and_die(cuts, at)
    world.live(cuts)
    rows = world.out_rows()
    assert all(row["_key"] == (NULL_KEY if row["k"] is None else row["k"]) for row in rows)
    assert not any(row["_late"] for row in rows)
    found = Counter((row["_ts"], row["_key"], row["a"], row["b"]) for row in rows)
    assert found == expected(events, how, window)
    world.check_marks()
    assert isinstance(world.rows, MemoryRows)
    (interval,) = world.rows._intervals.values()
    assert not interval.states and not interval.timers
