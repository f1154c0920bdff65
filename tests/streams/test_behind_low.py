"""Records behind the low that nobody flagged: every operator counts them, and does what protocols.md says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.core.system_clock import SystemClock
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, CategorySpec
from penstock.streams.dsl.windows import PARTIAL, Firing, Spans, session, sliding, tumbling
from penstock.streams.operators.build import operator_of
from penstock.streams.places import open_log, open_rows
from penstock.streams.rows.row_store import Changes
from penstock.streams.spark.worker import REPORT_DDL, run_interval
from penstock.streams.step.reading import read_ranges
from penstock.streams.step.step import OutputSpec, OwnedInterval, input_of
from penstock.streams.step.vectorised import VectorComputation, VectorLogic
from tests.streams.descriptors import a_descriptor
from tests.streams.operator_world import REF, Event, Low, OperatorWorld, Rec
from tests.streams.test_joins import a_world as join_world
from tests.streams.test_top import top_world
from tests.streams.test_windows import a_world as window_world
from tests.streams.test_windows import window_columns, window_plan

World = Callable[[list[Event]], OperatorWorld]
X = (("x", "bigint"),)
PARTS = (("window_start", "bigint"), (PARTIAL, "binary"))
END = [Low(low=LOW_MAX)]
ENDS = [*END, Low(low=LOW_MAX, input=1)]


def lived(world: OperatorWorld, cut: int) -> OperatorWorld:
    world.live([cut])
    return world


def windows(spans: Spans, firing: Firing | None = None) -> World:
    return lambda events: window_world(events, spans, firing=firing or Firing())


def phase(name: str) -> World:
    """The first phase of an aggregate, or the second: its records are results of the first."""
    plan = {**window_plan(tumbling(100)), "operator": name}
    out = window_columns() if name == "combine" else PARTS
    given = PARTS if name == "combine" else X
    return lambda events: OperatorWorld(logic=lambda: operator_of(plan, out), inputs=(given,), out=out).build(
        events
    )


def a_part(ts: int, *, promised: bool = False) -> Rec:
    """What the first phase makes of one record of the window that `ts` is in."""
    (row,) = lived(phase("partial")([a_record(ts), *END]), 1).out_rows()
    return Rec(key="a", ts=ts, values=(row["window_start"], row[PARTIAL]), promised=promised)


def dedup(events: list[Event]) -> OperatorWorld:
    plan = {"operator": "dedup", "keys": ["k"], "within": {"within_ms": 5}}
    return OperatorWorld(logic=lambda: operator_of(plan, X), inputs=(X,), out=X).build(events)


class Passing(VectorComputation):
    """Every record as it is, behind whatever low."""

    outputs = {"out": dict(X)}
    state = {"n": "bigint"}

    def process_batch(self, records: pa.Table, states: pa.Table) -> tuple[pa.Table, Mapping[str, pa.Table]]:
        return states, {"out": records.select(["_key", "_ts", "x"])}


def vectorised(events: list[Event]) -> OperatorWorld:
    return OperatorWorld(logic=lambda: VectorLogic(Passing()), inputs=(X,), out=X).build(events)


def a_record(ts: int, *, promised: bool = False) -> Rec:
    return Rec(key="a", ts=ts, values=(ts,), promised=promised)


def a_result(start: int, ts: int, *, promised: bool = False) -> Rec:
    """Of a window of ten, for `top`."""
    return Rec(key=str(start), ts=ts, values=("q", start, start + 10, float(ts)), promised=promised)


def a_side(side: int, ts: int, *, promised: bool = False) -> Rec:
    return Rec(key="a", ts=ts, values=(side, "a", ts), input=side, promised=promised)


def joined(window: Spans | None) -> World:
    return lambda events: join_world(events, "inner", window)


# Operator, what comes first, the record behind the low, what ends it.
RECORDS = ([a_record(130), Low(low=400)], a_record(140, promised=True), END)
SIDES = (
    [a_side(0, 130), a_side(1, 131), Low(low=400), Low(low=400, input=1)],
    a_side(0, 132, promised=True),
    ENDS,
)
CLOSED = {
    "tumbling": (windows(tumbling(100)), *RECORDS),
    "sliding": (windows(sliding(100, every=50)), *RECORDS),
    "early": (windows(tumbling(100), Firing(early_ms=10)), *RECORDS),
    "sessions": (windows(session(gap=50)), *RECORDS),
    "early sessions": (windows(session(gap=50), Firing(early_ms=10)), *RECORDS),
    "partial": (phase("partial"), *RECORDS),
    "combine": (phase("combine"), [a_part(130), Low(low=400)], a_part(140, promised=True), END),
    "dedup": (dedup, *RECORDS),
    "top": (top_world, [a_result(0, 9), Low(low=50)], a_result(0, 9, promised=True), END),
    "join near": (joined(None), *SIDES),
    "join in windows": (joined(tumbling(50)), *SIDES),
}


def behind(world: OperatorWorld) -> tuple[int, int]:
    counters = world.rows.peek(REF).counters
    return counters.get("behind_low", 0), counters.get("late", 0)


@pytest.mark.parametrize("cut", [1, 100])
@pytest.mark.parametrize("name", CLOSED)
def test_where_all_is_decided_it_is_counted_and_changes_no_result(name: str, cut: int):
    make, first, record, end = CLOSED[name]
    with_it, without = lived(make([*first, record, *end]), cut), lived(make([*first, *end]), cut)
    assert behind(with_it) == (1, 0)
    assert behind(without) == (0, 0)
    assert with_it.out_rows() == without.out_rows() != []


OPEN = {
    "tumbling": (windows(tumbling(100)), a_record(130), a_record(140, promised=True), Low(low=150), END),
    "sliding": (
        windows(sliding(100, every=50)),
        a_record(130),
        a_record(140, promised=True),
        Low(low=149),
        END,
    ),
    "early": (
        windows(tumbling(100), Firing(early_ms=70)),
        a_record(130),
        a_record(140, promised=True),
        Low(low=150),
        END,
    ),
    "sessions": (windows(session(gap=50)), a_record(130), a_record(140, promised=True), Low(low=150), END),
    "partial": (phase("partial"), a_record(130), a_record(140, promised=True), Low(low=150), END),
    "combine": (phase("combine"), a_part(130), a_part(140, promised=True), Low(low=150), END),
    "top": (top_world, a_result(0, 3), a_result(0, 4, promised=True), Low(low=7), END),
}


@pytest.mark.parametrize("cut", [1, 100])
@pytest.mark.parametrize("name", OPEN)
def test_where_its_window_is_open_it_counts_in_the_result(name: str, cut: int):
    make, first, record, low, end = OPEN[name]
    on_time = Rec(key=record.key, ts=record.ts, values=record.values)
    with_it = lived(make([first, low, record, *end]), cut)
    assert behind(with_it) == (1, 0)
    assert with_it.out_rows() == lived(make([first, on_time, low, *end]), cut).out_rows()


@pytest.mark.parametrize("cut", [1, 100])
def test_a_join_pairs_it_with_what_still_waits(cut: int):
    lows = [Low(low=133), Low(low=133, input=1)]
    world = lived(
        join_world([a_side(1, 135), *lows, a_side(0, 132, promised=True), *ENDS], "inner", None), cut
    )
    assert behind(world) == (1, 0)
    assert [(row["_ts"], row["a"], row["b"]) for row in world.out_rows()] == [(135, 132, 135)]


@pytest.mark.parametrize("spans", [tumbling(100), session(gap=50)], ids=["tumbling", "session"])
def test_with_late_updates_it_makes_one_as_a_late_record_does(spans: Spans):
    firing = Firing(late="update", lateness_ms=1000)
    events = [a_record(130), Low(low=400)]
    promised = lived(window_world([*events, a_record(140, promised=True), *END], spans, firing=firing), 1)
    late = lived(window_world([*events, a_record(140), *END], spans, firing=firing), 1)
    assert (behind(promised), behind(late)) == ((1, 0), (0, 1))
    assert promised.out_rows() == late.out_rows() and promised.out_rows()[-1]["_late"]


def test_a_computation_over_tables_gets_it_and_what_it_makes_of_it_is_flagged():
    world = lived(vectorised([a_record(130), Low(low=400), a_record(140, promised=True), *END]), 1)
    assert behind(world) == (1, 0)
    assert [(row["x"], row["_late"]) for row in world.out_rows()] == [(130, False), (140, True)]


def test_a_task_reports_how_many_there_were_since_its_intervals_began(tmp_path: Path):
    from penstock.streams.spark.load import LoadMeter
    from tests.streams.test_load import a_task

    task = a_task(tmp_path, offsets=(0, 0))
    meter, now_ms = LoadMeter(task, trigger_ms=1000), SystemClock().now_ms()
    found: dict[str, Any] = meter.measure(None, at_s=1.0, now_ms=now_ms)
    assert found["behind_low"] == 0 and not any(name.startswith("behind_low.") for name in found)
    rows, ref = open_rows(task.rows), task.intervals[1].ref
    for _ in range(2):
        row = rows.peek(ref)
        rows.commit(ref, token=row.token, version=row.version, changes=Changes(counters={"behind_low": 3}))
    found = meter.measure(None, at_s=2.0, now_ms=now_ms)
    assert {name: value for name, value in found.items() if name.startswith("behind_low")} == {
        "behind_low": 6,
        f"behind_low.{ref.partition}": 6,
    }


def test_a_worker_says_so_in_the_report_of_its_step(tmp_path: Path):
    bus, rows_place = f"embedded:{tmp_path / 'bus'}", f"sqlite:{tmp_path / 'rows'}"
    log, rows = open_log(bus), open_rows(rows_place)
    source = log.create(CategorySpec(name="in", partitions=1, columns=X))
    out = log.create(CategorySpec(name="out", partitions=1, columns=X))
    log.register_producer("in", "source")
    log.register_producer("out", REF.birth)
    for seq, ts in enumerate((130, 140), start=1):  # the second one behind what was promised
        batch = pa.RecordBatch.from_pydict(
            {"_seq": [seq], "_ts": [ts], "_key": ["a"], "_late": [False], "x": [ts]},
            schema=source.spec.schema(),
        )
        log.publish("in", producer="source", epoch=1, batches={0: batch}, gapless=True)
        log.report_low("in", producer="source", epoch=1, low=400, now_ms=1000)
    rows.create(REF, offsets={source.birth: 0}, low=LOW_MIN)
    token = rows.acquire(REF, generation=1, shard_epoch=1).token
    interval = OwnedInterval(ref=REF, token=token, producers={source.birth: REF.birth})
    task = a_descriptor(
        "stateful",
        {"computation": {"operator": "dedup", "keys": ["k"], "within": {"within_ms": 5}}},
        bus=bus,
        rows=rows_place,
        intervals=(interval,),
        inputs=(input_of(source),),
        outputs=(OutputSpec(stream="out", category="out", birth=out.birth, partitions=1, columns=X),),
    ).with_config(state_cache_bytes=0)  # workers tell each other of theirs through Spark
    batches = read_ranges(task=task, interval=interval, spans={source.birth: (0, 2)}, log=log, rows=rows)
    (report,) = run_interval(task, batches, now_ms=2000).to_pylist()
    assert (report["records"], report["late"], report["behind_low"]) == (2, 0, 1)
    assert list(report) == [column.split()[0] for column in REPORT_DDL.split(", ")]
