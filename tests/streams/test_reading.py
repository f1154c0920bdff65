"""Claims about the rows that Spark is given: between a begin and an end, in order, lateness decided once."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from penstock.streams.bus.log import LOW_MIN, CategorySpec
from penstock.streams.bus.memory_log import MemoryLog
from penstock.streams.injector import Injector
from penstock.streams.reading import read_ranges, row_schema
from penstock.streams.rows.memory_rows import MemoryRows
from penstock.streams.rows.row_store import IntervalRef
from penstock.streams.task import BAD, BEGIN, DATA, END, Input, OwnedInterval, TaskDescriptor

REF = IntervalRef(job="j", job_birth="b", partition=0, birth="i")


class World:
    """One JSON category of one partition, and the interval that reads it."""

    def __init__(self, watermark: str, lateness_ms: int = 0) -> None:
        self.log, self.rows = MemoryLog(), MemoryRows()
        spec = CategorySpec(
            name="in",
            partitions=1,
            columns=(("q", "string"), ("ts", "bigint")),
            format="json",
            watermark=watermark,
            lateness_ms=lateness_ms,
            ts_column="ts",
        )
        birth = self.log.create(spec).birth
        self.source = Input(
            category="in",
            birth=birth,
            columns=spec.columns,
            format="json",
            watermark=watermark,
            lateness_ms=lateness_ms,
            ts_column="ts",
            partitions=1,
        )
        self.rows.create(REF, offsets={birth: 0}, low=LOW_MIN)
        self.injector = Injector(self.log, "in", "me", epoch=1)

    def publish(self, *stamps: int | None) -> None:
        values = [b"broken" if ts is None else json.dumps({"q": "x", "ts": ts}).encode() for ts in stamps]
        self.injector.publish(["k"] * len(stamps), [0] * len(stamps), values)

    def read(self, start: int, end: int) -> list[dict[str, object]]:
        interval = OwnedInterval(ref=REF, token=1, producers={})
        task = TaskDescriptor(
            task_id="j/0",
            job="j",
            kind="stateless",
            bus="",
            rows="",
            intervals=(interval,),
            inputs=(self.source,),
            outputs=(),
            plan={},
            package_hash="",
            package_folder="",
            package_entry="",
        )
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
    from penstock.streams.rows.row_store import Changes

    changes = Changes(offsets={world.source.birth: cut}, event_time_max=seen)
    world.rows.commit(REF, token=row.token, version=row.version, changes=changes)
    rows = first + world.read(cut, 5)
    late = {row["_offset"]: row["_late"] for row in rows if row["_kind"] == DATA}
    assert late == {0: False, 1: True, 2: False, 3: False, 4: True}
