"""The first record of each key is the one that plain Python finds, however the log is cut and whoever dies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import StateMismatch
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, partition_of
from penstock.streams.operators.build import operator_of
from penstock.streams.rows.memory import MemoryRows
from tests.streams.operator_world import Event, Low, OperatorWorld, Rec

OUT = (("x", "bigint"), ("words", "array<string>"))
WITHIN, WINDOW = {"within": {"within_ms": 20}}, {"window": {"kind": "tumbling", "size_ms": 15}}


def dedup_world(events: list[Event], span: dict[str, Any]) -> OperatorWorld:
    plan = {"operator": "dedup", "keys": ["k"], **span}
    return OperatorWorld(logic=lambda: operator_of(plan, OUT), inputs=(OUT,), out=OUT).build(events)


def first_records(events: list[Event], span: dict[str, Any]) -> list[tuple[Any, ...]]:
    """(_ts, key, x, words) of what is given, by time and key. Late ones are dropped where they enter."""
    low, on_time, until, found = LOW_MIN, [], {}, []
    for event in events:
        if isinstance(event, Low):
            low = max(low, event.low)
        elif event.ts >= low:
            on_time.append(event)
    encode = msgspec.msgpack.encode
    for record in sorted(on_time, key=lambda r: (r.ts, r.key, encode(r.values))):
        if record.ts >= until.get(record.key, LOW_MIN):
            until[record.key] = record.ts + 20 if "within" in span else record.ts // 15 * 15 + 15
            found.append((record.ts, record.key, *record.values))
    return found


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Records around a low that rises; some are behind it, some have the time of another."""
    low, events = 0, []
    for _ in range(draw(st.integers(1, 20))):
        if draw(st.integers(0, 3)) == 0:
            low += draw(st.integers(1, 40))
            events.append(Low(low=low))
        else:
            ts = max(0, low + draw(st.integers(-12, 24)) // 3 * 3)
            words = draw(st.sampled_from([None, [], ["a"], ["b", None]]))
            key = draw(st.sampled_from(["a", "b", ""]))
            events.append(Rec(key=key, ts=ts, values=(draw(st.integers(0, 3)), words)))
    return [*events, Low(low=LOW_MAX)]


def rows_of(world: OperatorWorld) -> list[tuple[Any, ...]]:
    rows = world.out_rows()
    assert not any(row["_late"] for row in rows)
    return [(row["_ts"], row["_key"], row["x"], row["words"]) for row in rows]


@pytest.mark.parametrize("span", [WITHIN, WINDOW], ids=["within", "window"])
@settings(max_examples=30, deadline=None)
@given(
    events=logs(),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    deaths=st.lists(st.integers(0, 30), max_size=2),
)
def test_first_records_are_those_of_plain_python(
    span: dict[str, Any], events: list[Event], cuts: list[int], deaths: list[int]
):
    world = dedup_world(events, span)
    for at in deaths:
        world.live_and_die(cuts, at)
    world.live(cuts)
    assert rows_of(world) == sorted(first_records(events, span), key=lambda row: partition_of(row[1], 2))
    world.check_marks()
    assert isinstance(world.rows, MemoryRows)
    (interval,) = world.rows._intervals.values()
    assert not interval.states and not interval.timers  # what can no longer be repeated is forgotten


def test_a_record_is_given_when_nothing_earlier_can_come_and_remembered_for_its_time_alone():
    late_twin = Rec(key="k", ts=4, values=(1, None))
    events: list[Event] = [
        Rec(key="k", ts=9, values=(2, None)),
        late_twin,  # earlier by its time, later by its arrival
        Low(low=5),
        Rec(key="k", ts=23, values=(3, None)),
        Rec(key="k", ts=24, values=(4, None)),
        Low(low=24),
    ]
    world = dedup_world(events, WITHIN)
    world.live([2])
    assert [row["x"] for row in world.out_rows()] == [1]
    assert isinstance(world.rows, MemoryRows)
    (interval,) = world.rows._intervals.values()
    ((_, timer),) = interval.timers.items()
    assert timer.at_ms == 25  # 24 waits; nothing is kept for what was given at 4
    assert world.log.watermark("out") == 24


def test_the_state_of_another_plan_is_refused():
    world = dedup_world([Rec(key="k", ts=9, values=(2, None))], WITHIN)
    world.live([1])
    other = {"operator": "dedup", "keys": ["k"], **WITHIN}
    step = operator_of(other, (("x", "bigint"),))
    assert isinstance(world.rows, MemoryRows)
    (interval,) = world.rows._intervals.values()
    for states, why in ((interval.states, "other columns"), ({"k": b"\xff"}, "")):
        with pytest.raises(StateMismatch, match="does not match its dedup") as caught:
            step._decoded(states, "job")  # type: ignore[attr-defined]
        assert why in caught.value.why and "reset" in caught.value.fix
