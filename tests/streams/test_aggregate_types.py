"""Every aggregate function over every type of column, the first values null: what windows give is what one
pass over all values gives, also if each step stores its state and the next one reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import StateMismatch
from penstock.streams.bus.log import ARROW_TYPES, LOW_MAX, partition_of
from penstock.streams.compile.functions import AGGREGATE_NAMES, AGGREGATES, accepts
from penstock.streams.dsl.windows import Firing, Spans, session, sliding, tumbling
from penstock.streams.operators.aggregates import Aggregates, AggregateValue
from penstock.streams.operators.build import operator_of
from penstock.streams.rows.memory import MemoryRows
from tests.streams.operator_world import Event, Low, OperatorWorld, Rec
from tests.streams.window_reference import results_with_firing, sessions_with_firing

# Doubles and floats have values that both can hold, so that sums of them are exact.
_REALS = [-1.5, -0.25, 0.0, 2.5, 1024.125]
VALUES: dict[str, list[Any]] = {
    "string": ["", "b", "c", "Ä", "zz"],
    "bigint": [-(2**40), -1, 0, 7, 2**40],
    "int": [-(2**31), -1, 0, 7, 2**31 - 1],
    "double": _REALS,
    "float": _REALS,
    "boolean": [False, True],
    "binary": [b"", b"\x00", b"b", b"\xff"],
}
VALUES |= {f"array<{kind}>": [[], [None], *([value] for value in found)] for kind, found in VALUES.items()}
SPANS: dict[str, Spans] = {
    "tumbling": tumbling(20),
    "sliding": sliding(30, every=10),
    "session": session(gap=12),
}
Way = tuple[int | None, int | None, bool, Firing]  # early, lateness, accumulating, and all as one
FIRINGS: list[Way] = [
    (early, lateness, mode == "accumulating", Firing(early_ms=early, **late, mode=mode))
    for early in (None, 3)
    for lateness, late in (
        (None, {"late": "drop"}),
        (50, {"late": "update", "lateness_ms": 50}),
    )
    for mode in ("accumulating", "discarding")
]


def test_every_type_of_column_is_drawn():
    assert VALUES.keys() == ARROW_TYPES.keys()


def values_for(kind: str) -> list[AggregateValue]:
    """Each function that takes a column of this type, and count(*)."""
    made = [AggregateValue(name="v0", function="count", column=None, parameter=None, type="bigint")]
    for name, signature in AGGREGATES.items():
        if name in AGGREGATE_NAMES or not accepts(signature.kinds[0], kind):
            continue
        total = "bigint" if kind in ("int", "bigint") else "double"
        made.append(
            AggregateValue(
                name=f"v{len(made)}",
                function=name,
                column="x",
                parameter=0.5 if len(signature.kinds) > 1 else None,
                type={"first": kind, "total": total}.get(signature.result, signature.result),
            )
        )
    return made


def test_every_function_meets_every_type_it_takes():
    functions = {kind: {value.function for value in values_for(kind)} for kind in VALUES}
    assert functions["string"] == {"count", "min", "max", "approx_count_distinct"} == functions["boolean"]
    assert functions["binary"] == {"count", "approx_count_distinct"}
    assert functions["int"] == AGGREGATES.keys() - AGGREGATE_NAMES.keys() == functions["bigint"]
    assert functions["int"] - functions["double"] == {"approx_count_distinct"}
    assert functions["double"] == functions["float"] and functions["array<int>"] == {"count"}


def one_pass(value: AggregateValue, kind: str, values: Sequence[Any]) -> Any:
    """The value of all of these at once."""
    aggregates = Aggregates([value])
    table = pa.table({"_key": pa.array(["k"] * len(values)), "x": pa.array(values, ARROW_TYPES[kind])})
    lifted = aggregates.lift(table, np.zeros(len(values), dtype=np.int64))
    return aggregates.finish(aggregates.merge([lifted]))[value.name][0].as_py()


def expected_rows(
    spans: Spans, kind: str, events: list[Event], early: int | None, lateness: int | None, whole: bool
) -> list[tuple[Any, ...]]:
    asked = {"early": early, "lateness": lateness, "accumulating": whole, "functions": ["all"]}
    if spans.kind == "session":
        found = sessions_with_firing(events, gap=spans.size_ms, **asked, value=lambda _, values: list(values))
        rows = [(stamp, late, key, values) for stamp, late, _, _, key, values in found]
    else:
        slide = spans.slide_ms or spans.size_ms
        found = results_with_firing(
            events, size=spans.size_ms, slide=slide, **asked, value=lambda _, values: list(values)
        )
        rows = [(stamp, late, key, values) for stamp, late, _, key, values in found]
    made = [
        (stamp, late, key, *(one_pass(value, kind, values) for value in values_for(kind)))
        for stamp, late, key, values in rows
    ]
    return sorted(made, key=lambda row: partition_of(row[2], 2))


def a_world(spans: Spans, kind: str, events: list[Event], firing: Firing) -> OperatorWorld:
    values = values_for(kind)
    names = ("name", "function", "column", "parameter", "type")
    plan = {
        "operator": "aggregate",
        "keys": ["k"],
        "window": spans.to_json(),
        "firing": firing.to_json(),
        "columns": [{name: getattr(value, name) for name in names} for value in values],
    }
    out = (
        ("k", "string"),
        ("window_start", "bigint"),
        ("window_end", "bigint"),
        *((v.name, v.type) for v in values),
    )
    return OperatorWorld(logic=lambda: operator_of(plan, out), inputs=((("x", kind),),), out=out).build(
        events
    )


def rows_of(world: OperatorWorld, kind: str) -> list[tuple[Any, ...]]:
    names = ["_ts", "_late", "k", *(value.name for value in values_for(kind))]
    return [tuple(row[name] for name in names) for row in world.out_rows()]


def check(spans: Spans, kind: str, events: list[Event], cuts: Sequence[int], way: Way) -> None:
    early, lateness, whole, firing = way
    world = a_world(spans, kind, events, firing)
    world.live(cuts)
    assert rows_of(world, kind) == expected_rows(spans, kind, events, early, lateness, whole), firing


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_nulls_that_come_first_do_not_decide_about_types(spans: Spans, kind: str):
    """Two keys, nulls before and between the values, results before, at and after the end."""
    low, high = VALUES[kind][0], VALUES[kind][-1]
    events: list[Event] = [Rec(key="a", ts=1, values=(None,)), Low(low=4)]
    events += [Rec(key="b", ts=5, values=(None,)), Rec(key="a", ts=6, values=(None,)), Low(low=9)]
    events += [Rec(key="a", ts=10, values=(high,)), Low(low=12), Rec(key="a", ts=13, values=(low,))]
    events += [Low(low=40), Rec(key="b", ts=6, values=(low,)), Rec(key="a", ts=7, values=(high,))]
    for way in FIRINGS:
        check(spans, kind, [*events, Low(low=LOW_MAX)], [1], way)


@pytest.mark.parametrize("kind", [kind for kind in VALUES if not kind.startswith("array")])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_windows_over_every_type_are_those_of_one_pass(spans: Spans, kind: str, data: st.DataObject):
    nulls = {key: data.draw(st.integers(0, 4)) for key in "ab"}
    low, events = 0, list[Event]()
    for _ in range(data.draw(st.integers(4, 14))):
        if data.draw(st.integers(0, 2)) == 0:
            low += data.draw(st.integers(1, 25))
            events.append(Low(low=low))
            continue
        key = data.draw(st.sampled_from("ab"))
        nulls[key] -= 1
        value = None if nulls[key] >= 0 else data.draw(st.sampled_from([None, *VALUES[kind]]))
        ts = max(0, low + data.draw(st.integers(-20, 30)))
        events.append(Rec(key=key, ts=ts, values=(value,)))
    cuts, way = data.draw(st.sampled_from([[1], [2], [1, 100]])), data.draw(st.sampled_from(FIRINGS))
    check(spans, kind, [*events, Low(low=LOW_MAX)], cuts, way)


@pytest.mark.parametrize("row", [{"7.max": "b"}, {"0.sum": "b"}, {"what": 1}], ids=str)
@pytest.mark.parametrize("firing", [Firing(), Firing(early_ms=3)], ids=["plain", "early"])
def test_sessions_that_another_plan_wrote_are_refused(firing: Firing, row: dict[str, Any]):
    events: list[Event] = [Rec(key="a", ts=1, values=("b",)), Rec(key="a", ts=2, values=(None,))]
    world = a_world(session(gap=20), "string", events, firing)
    owned = world.open()
    world.step(owned, [0], [1])
    assert isinstance(world.rows, MemoryRows)
    (interval,) = world.rows._intervals.values()
    sessions = (["_cell", "end.max", *row], [[1, 21, *row.values()]], {})
    interval.states["a"] = msgspec.msgpack.encode(sessions if firing.is_plain else (sessions, sessions))
    with pytest.raises(StateMismatch, match="not that of session windows"):
        world.step(owned, [1], [2])
