"""Sessions with early results and late updates are those of plain Python, however the log is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import StateMismatch
from penstock.streams.bus.log import LOW_MAX, partition_of
from penstock.streams.dsl.windows import Firing, session
from penstock.streams.operators.build import operator_of
from penstock.streams.rows.memory import MemoryRows
from tests.streams.operator_world import Event, Low, OperatorWorld, Rec
from tests.streams.test_windows import FUNCTIONS, a_world, logs, window_columns, window_plan
from tests.streams.window_reference import sessions_with_firing


def firing_of(early: int | None, lateness: int | None, accumulating: bool) -> Firing:
    return Firing(
        early_ms=early,
        late="drop" if lateness is None else "update",
        lateness_ms=lateness or 0,
        mode="accumulating" if accumulating else "discarding",
    )


def rows_of(world: OperatorWorld) -> list[tuple[object, ...]]:
    names = ["_ts", "_late", "window_start", "window_end", "k", *(f"v{n}" for n in range(len(FUNCTIONS)))]
    return [tuple(row[name] for name in names) for row in world.out_rows()]


@settings(max_examples=40, deadline=None)
@given(
    events=logs(size=20),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    deaths=st.lists(st.integers(0, 30), max_size=1),
    early=st.sampled_from([None, 5, 7]),
    lateness=st.sampled_from([None, 0, 15, 1000]),
    accumulating=st.booleans(),
)
def test_results_are_those_of_plain_python(
    events: list[Event],
    cuts: list[int],
    deaths: list[int],
    early: int | None,
    lateness: int | None,
    accumulating: bool,
):
    expected = sessions_with_firing(
        events, gap=12, early=early, lateness=lateness, accumulating=accumulating, functions=FUNCTIONS
    )
    world = a_world(events, session(gap=12), firing=firing_of(early, lateness, accumulating))
    for at in deaths:
        world.live_and_die(cuts, at)
    world.live(cuts)
    assert rows_of(world) == sorted(expected, key=lambda row: partition_of(row[4], 2))
    world.check_marks()
    assert isinstance(world.rows, MemoryRows)
    (interval,) = world.rows._intervals.values()
    assert not interval.states and not interval.timers


def a_log(*late: int) -> list[Event]:
    """Two sessions of 12 that are over, and records that belong to them."""
    return [
        *(Rec(key="k", ts=ts, values=(1,)) for ts in (0, 20)),
        Low(low=40),
        *(Rec(key="k", ts=ts, values=(10,)) for ts in late),
        Low(low=LOW_MAX),
    ]


@pytest.mark.parametrize(
    ("late", "said"),
    [
        ((5,), [(False, 0, 12, 1), (False, 20, 32, 1), (True, 0, 17, 11)]),
        ((10,), [(False, 0, 12, 1), (False, 20, 32, 1), (True, 0, 32, 12)]),  # both are one now
        ((10, 30), [(False, 0, 12, 1), (False, 20, 32, 1), (True, 0, 32, 12), (False, 0, 42, 22)]),
        ((30, 10), [(False, 0, 12, 1), (False, 20, 32, 1), (False, 0, 42, 22)]),  # open again, so it waits
    ],
    ids=["one", "between", "open again", "in the other order"],
)
def test_a_late_record_updates_joins_or_reopens_sessions(
    late: tuple[int, ...], said: list[tuple[object, ...]]
):
    world = a_world(a_log(*late), session(gap=12), firing=firing_of(None, 100, True))
    world.live([3])
    place = FUNCTIONS.index("sum")
    assert [(row[1], *row[2:4], row[5 + place]) for row in rows_of(world)] == said


def test_the_state_of_another_kind_of_step_is_refused():
    for firing in (firing_of(None, 100, True), Firing()):
        step = operator_of(window_plan(session(gap=12), firing), window_columns())
        world = OperatorWorld(
            logic=lambda step=step: step, inputs=((("x", "bigint"),),), out=window_columns()
        )
        world.build([Rec(key="k", ts=1, values=(1,)), Rec(key="k", ts=2, values=(1,))])
        owned = world.open()
        world.step(owned, [0], [1])
        assert isinstance(world.rows, MemoryRows)
        (interval,) = world.rows._intervals.values()
        interval.states["k"] = b"\xff"
        with pytest.raises(StateMismatch, match="not that of session windows"):
            world.step(owned, [1], [2])
