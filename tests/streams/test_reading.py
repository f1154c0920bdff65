"""Claims about the rows that Spark is given: between a begin and an end, in order, lateness decided once."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from penstock.streams.bus.log import LOW_MIN, CategorySpec, Mark
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.dsl.injector import Injector
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.row_store import Changes, IntervalRef
from penstock.streams.step.reading import read_ranges, row_schema
from penstock.streams.step.step import BAD, BEGIN, DATA, END, InputSpec, OwnedInterval
from tests.streams.descriptors import a_descriptor

REF = IntervalRef(job="j", job_birth="b", partition=0, birth="i")


class World:
    """One JSON category of one partition, and the interval that reads it."""

    def __init__(
        self, watermark: str, lateness_ms: int = 0, *, now_ms: int = 0, ahead_max_ms: int = 0
    ) -> None:
        self.now_ms = now_ms
        self.log, self.rows = MemoryLog(now_ms=lambda: self.now_ms), MemoryRows()
        spec = CategorySpec(
            name="in",
            partitions=1,
            columns=(("q", "string"), ("ts", "bigint")),
            format="json",
            watermark=watermark,
            lateness_ms=lateness_ms,
            ts_column="ts",
            idle_after_ms=1000 if watermark == "event_time" else 0,
        )
        birth = self.log.create(spec).birth
        self.source = InputSpec(
            category="in",
            birth=birth,
            columns=spec.columns,
            format="json",
            watermark=watermark,
            lateness_ms=lateness_ms,
            ts_column="ts",
            partitions=1,
            idle_after_ms=spec.idle_after_ms,
            ahead_max_ms=ahead_max_ms,
        )
        self.rows.create(REF, offsets={birth: 0}, low=LOW_MIN)
        self.injector = Injector(self.log, "in", "me", epoch=1)

    def publish(self, *stamps: int | None) -> None:
        values = [b"broken" if ts is None else json.dumps({"q": "x", "ts": ts}).encode() for ts in stamps]
        self.injector.publish(["k"] * len(stamps), [0] * len(stamps), values)

    def read(self, start: int, end: int) -> list[dict[str, object]]:
        interval = OwnedInterval(ref=REF, token=1, producers={})
        task = a_descriptor(intervals=(interval,), inputs=(self.source,))
        spans = {self.source.birth: (start, end)}
        batches = list(read_ranges(task=task, interval=interval, spans=spans, log=self.log, rows=self.rows))
        assert all(batch.schema == row_schema(task) for batch in batches)
        return pa.Table.from_batches(batches).to_pylist()


def test_an_empty_range_still_has_its_begin_and_end():
    found = World("injector").read(0, 0)
    assert [row["_kind"] for row in found] == [BEGIN, END]
    assert json.loads(str(found[0]["_meta"]))["ranges"]


def test_broken_records_stay_in_their_place():
    world = World("injector")
    world.publish(5, None, 7, None)
    found = world.read(0, 4)[1:-1]
    assert [(row["_kind"], row["_offset"]) for row in found] == [(DATA, 0), (BAD, 1), (DATA, 2), (BAD, 3)]
    assert [row["_ts"] for row in found if row["_kind"] == DATA] == [5, 7]
    assert all(row["_raw"] == b"broken" for row in found if row["_kind"] == BAD)


def test_a_record_without_its_time_is_broken():
    world = World("injector")
    world.injector.publish(["k"], [0], [b'{"q": "x"}'])
    (row,) = world.read(0, 1)[1:-1]
    assert row["_kind"] == BAD and "event time" in str(row["_bad"])


def test_behind_an_injectors_mark_is_late_from_there_on():
    world = World("injector")
    world.publish(10, 5)
    world.injector.report_low(8, now_ms=0)
    world.publish(7, 9)
    late = {row["_offset"]: row["_late"] for row in world.read(0, 4) if row["_kind"] == DATA}
    assert late == {0: False, 1: False, 2: True, 3: False}


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4])
def test_event_time_lateness_does_not_depend_on_where_batches_end(cut: int):
    """The running maximum after the first batch is committed with it, as the step does."""
    world = World("event_time", lateness_ms=2)
    world.publish(10, 7, 20, 18, 17)
    first, seen = world.read(0, cut), {}
    seen = json.loads(str(first[-1]["_meta"]))["event_time_max"]
    row = world.rows.acquire(REF, generation=1, shard_epoch=1)
    changes = Changes(offsets={world.source.birth: cut}, event_time_max=seen)
    world.rows.commit(REF, token=row.token, version=row.version, changes=changes)
    rows = first + world.read(cut, 5)
    late = {row["_offset"]: row["_late"] for row in rows if row["_kind"] == DATA}
    assert late == {0: False, 1: True, 2: False, 3: False, 4: True}


def test_a_record_from_the_future_is_set_aside_and_moves_no_watermark():
    world = World("event_time", lateness_ms=2, now_ms=1_000_000, ahead_max_ms=3_600_000)
    world.publish(1_000_000, 4_600_000, 4_600_001, None, 4_599_999)
    found = world.read(0, 5)
    assert [row["_kind"] for row in found[1:-1]] == [DATA, DATA, BAD, BAD, DATA]
    assert "from the future" in str(found[3]["_bad"]) and b"4600001" in found[3]["_raw"]
    assert json.loads(str(found[-1]["_meta"]))["event_time_max"] == {world.source.birth: 4_600_000}
    assert [row["_late"] for row in found if row["_kind"] == DATA] == [False, False, False]


def test_whether_a_record_is_from_the_future_does_not_depend_on_when_it_is_read():
    world = World("event_time", now_ms=1_000, ahead_max_ms=10_000)
    world.publish(11_001)
    world.now_ms = 20_000
    world.publish(11_001)
    for _ in range(2):
        assert [row["_kind"] for row in world.read(0, 2)[1:-1]] == [BAD, DATA]
        world.now_ms = 10**9


def test_of_records_whose_append_time_is_unknown_none_is_from_the_future():
    world = World("event_time", now_ms=0, ahead_max_ms=10_000)
    world.publish(10**12)
    assert [row["_kind"] for row in world.read(0, 1)[1:-1]] == [DATA]


def commit(world: World, cut: int, rows: list[dict[str, object]]) -> None:
    seen = json.loads(str(rows[-1]["_meta"]))["event_time_max"]
    row = world.rows.acquire(REF, generation=1, shard_epoch=1)
    changes = Changes(offsets={world.source.birth: cut}, event_time_max=seen)
    world.rows.commit(REF, token=row.token, version=row.version, changes=changes)


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 5])
def test_behind_an_idle_mark_is_late_wherever_batches_end(cut: int):
    """The partition falls idle at offset 2 and follows another to 100; then it speaks again."""
    world = World("event_time", lateness_ms=2)
    world.publish(10, 20)
    stored = world.log._of("in")
    stored.idle_marks.append((0, Mark(low=100, end=2, idle=True)))
    world.publish(99, 100, 150)
    first = world.read(0, cut)
    commit(world, cut, first)
    late = {row["_offset"]: row["_late"] for row in first + world.read(cut, 5) if row["_kind"] == DATA}
    assert late == {0: False, 1: False, 2: True, 3: False, 4: False}


def test_what_comes_after_the_end_of_a_bounded_source_is_late():
    world = World("event_time", lateness_ms=2)
    world.publish(10)
    world.injector.close(now_ms=0)
    world.publish(50)
    assert [row["_late"] for row in world.read(0, 2) if row["_kind"] == DATA] == [False, True]
