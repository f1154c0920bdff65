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
from penstock.core.errors import ComputationFailed, ProductionRefused
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.vectorised import VectorLogic
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


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (Early, ProductionRefused, "before its key's records"),
        (Wrong, ProductionRefused, "exactly the declared columns"),
        (Fails, ComputationFailed, "ZeroDivisionError"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(kind: type[VectorComputation], error: Any, said: str):
    world = a_world([Rec(key="a", ts=5, values=(1,)), Low(low=LOW_MAX)], kind)
    with pytest.raises(error) as caught:
        world.live([10])
    assert said in str(caught.value)
    assert world.out_rows() == [] and world.result()["counters"]["records"] == 0
