"""A computation over tables: exactly once, the same final results however the log is cut, mistakes named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import VectorComputation
from penstock.core.errors import (
    ComputationFailed,
    PenstockError,
    ProductionRefused,
    StateMismatch,
    StateRefused,
)
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.step.vectorised import VectorLogic
from tests.streams.operator_world import Event, Low, OperatorWorld, Rec
from tests.streams.test_windows import logs

OUT = (("k", "string"), ("n", "bigint"), ("total", "bigint"))


class Running(VectorComputation):
    """Count and sum per key, a row for each key and batch."""

    outputs = {"out": dict(OUT)}
    state = {"n": "bigint", "total": "bigint"}

    def process_batch(self, records: pa.Table, states: pa.Table) -> tuple[pa.Table, Mapping[str, pa.Table]]:
        asked = [("_ts", "count"), ("_ts", "max"), ("x", "sum")]
        found = records.group_by("_key").aggregate(asked).join(states, "_key").sort_by("_key")
        n = pc.add(found["_ts_count"], pc.fill_null(found["n"], 0))
        total = pc.add(pc.fill_null(found["x_sum"], 0), pc.fill_null(found["total"], 0))
        rows = {"_key": found["_key"], "_ts": found["_ts_max"], "k": found["_key"], "n": n, "total": total}
        return pa.table({"_key": found["_key"], "n": n, "total": total}), {"out": pa.table(rows)}


def a_world(events: list[Event], kind: type[VectorComputation] = Running) -> OperatorWorld:
    return OperatorWorld(
        logic=lambda: VectorLogic(kind()), inputs=((("x", "bigint"),),), out=OUT, partitions=1
    ).build(events)


@settings(max_examples=40, deadline=None)
@given(
    events=logs(),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    deaths=st.lists(st.integers(0, 30), max_size=3),
)
def test_final_results_are_those_of_plain_python_however_the_log_is_cut_and_whoever_dies(
    events: list[Event], cuts: list[int], deaths: list[int]
):
    world = a_world(events)
    for at in deaths:
        world.live_and_die(cuts, at)
    world.live(cuts)
    low, expected = -1, {}
    for event in events:
        if isinstance(event, Low):
            low = event.low
        elif event.ts >= low:
            n, total = expected.get(event.key, (0, 0))
            expected[event.key] = (n + 1, total + (event.values[0] or 0))
    assert {row["k"]: (row["n"], row["total"]) for row in world.out_rows()} == expected
    world.check_marks()


class Early(Running):
    """Stamps what it makes before the records it is made of."""

    def process_batch(self, records: pa.Table, states: pa.Table) -> tuple[pa.Table, Mapping[str, pa.Table]]:
        changed, made = super().process_batch(records, states)
        stamps = pc.subtract(made["out"]["_ts"], 1000)
        return changed, {"out": made["out"].set_column(1, "_ts", stamps)}


class Wrong(Running):
    """Lacks a column."""

    def process_batch(self, records: pa.Table, states: pa.Table) -> tuple[pa.Table, Mapping[str, pa.Table]]:
        changed, made = super().process_batch(records, states)
        return changed, {"out": made["out"].drop_columns(["total"])}


class Fails(Running):
    """Divides by nothing."""

    def process_batch(self, records: pa.Table, states: pa.Table) -> Any:
        return 1 // 0


class Breaks(Running):
    """Raises what no list of errors has."""

    def process_batch(self, records: pa.Table, states: pa.Table) -> Any:
        raise RuntimeError("the model is gone")


class Complains(Running):
    """Raises an error of Penstock's own."""

    def process_batch(self, records: pa.Table, states: pa.Table) -> Any:
        raise PenstockError("the model is old", why="it is from May", fix="train it")


class Foreign(Running):
    """Gives a state to a key that has no record here."""

    def process_batch(self, records: pa.Table, states: pa.Table) -> Any:
        return pa.table({"_key": ["a", "elsewhere"], "n": [1, 1], "total": [1, 1]}), {}


class Twice(Running):
    """Gives a key two states."""

    def process_batch(self, records: pa.Table, states: pa.Table) -> Any:
        return pa.table({"_key": ["a", "a"], "n": [1, 2], "total": [1, 1]}), {}


class Short(Running):
    """Gives states that lack a column."""

    def process_batch(self, records: pa.Table, states: pa.Table) -> Any:
        return pa.table({"_key": ["a"], "n": [1]}), {}


class Typed(Running):
    """Gives states of another type."""

    def process_batch(self, records: pa.Table, states: pa.Table) -> Any:
        return pa.table({"_key": ["a"], "n": ["many"], "total": [1]}), {}


class Makes(Running):
    """Gives whatever it is told to give to its streams."""

    made: Any = None

    def process_batch(self, records: pa.Table, states: pa.Table) -> Any:
        return super().process_batch(records, states)[0], self.made


def making(name: str, made: Any) -> type[VectorComputation]:
    return type(name, (Makes,), {"made": made})


def a_row(**changes: Any) -> dict[str, pa.Table]:
    return {"out": pa.table({"_key": ["a"], "_ts": [5], "k": ["a"], "n": [1], "total": [1], **changes})}


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (making("Nothing", None), ComputationFailed, "NoneType instead of a mapping of tables"),
        (making("Row", {"out": {"n": 1}}), ProductionRefused, "it returned dict"),
        (making("Elsewhere", {"other": a_row()["out"]}), ProductionRefused, "the declared streams are out"),
        (
            making("NoStamp", a_row(_ts=pa.array([None], pa.int64()))),
            ProductionRefused,
            "a timestamp is null",
        ),
        (
            making("NoKey", a_row(_key=pa.array([None], pa.string()))),
            ProductionRefused,
            "a timestamp is null",
        ),
        (making("Day", a_row(_ts=["monday"])), ProductionRefused, "monday"),
        (making("Word", a_row(n=["many"])), ProductionRefused, "many"),
        (Breaks, ComputationFailed, "RuntimeError: the model is gone"),
        (Complains, ComputationFailed, "train it"),
        (Foreign, StateRefused, "key 'elsewhere' has no record in this batch"),
        (Twice, StateRefused, "occurs twice"),
        (Short, StateRefused, "the declared columns are _key, n, total"),
        (Typed, StateRefused, "many"),
        (Early, ProductionRefused, "before its key's records"),
        (Wrong, ProductionRefused, "exactly the declared columns"),
        (Fails, ComputationFailed, "ZeroDivisionError"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(kind: type[VectorComputation], error: Any, said: str):
    world = a_world([Rec(key="a", ts=5, values=(1,)), Low(low=LOW_MAX)], kind)
    with pytest.raises(error) as caught:
        world.live([10])
    assert said in str(caught.value) and caught.value.job and caught.value.why and caught.value.fix
    assert world.out_rows() == [] and world.result()["counters"]["records"] == 0


class Longer(Running):
    """Keeps one column more."""

    state = {**Running.state, "more": "string"}


def test_states_from_before_a_column_was_added_are_read_without_it_and_longer_ones_are_not_read():
    short = VectorLogic(Running())._changed(pa.table({"_key": ["a"], "n": [1], "total": [2]}), {})
    rows = {key: row for key, row in short.items() if row is not None}
    (found,) = VectorLogic(Longer())._decoded(rows, "j").to_pylist()
    assert found == {"_key": "a", "n": 1, "total": 2, "more": None}
    longer = VectorLogic(Longer())._changed(
        pa.table({"_key": ["a"], "n": [1], "total": [2], "more": ["x"]}), {}
    )
    with pytest.raises(StateMismatch, match="more values than the columns n, total"):
        VectorLogic(Running())._decoded({"a": longer["a"] or b""}, "j")
