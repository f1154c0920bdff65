"""The lows of what runs, read from a bus and rows as a plan makes them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from penstock.core.errors import NotFound
from penstock.jobs.tasks import interval_birth
from penstock.streams.bus.log import LOW_MAX, CategorySpec
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.data_plane import StreamDataPlane
from penstock.streams.dsl.injector import expect_injectors
from penstock.streams.inspect.watermark_view import JobToInspect, WatermarkView
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.row_store import Changes, IntervalRef, OutboxRow, TimerRow
from tests.builders import a_stored_config

OUT = {"stream": "out", "category": "out", "partitions": 1, "columns": [["q", "string"]], "internal": False}
CONFIG = a_stored_config(partitions=2, inputs=[{"category": "in"}], outputs=[OUT])


class World:
    """in -> j -> out, two intervals; `commit` moves one of them, `tell` reports what it has."""

    def __init__(self, watermark: str = "injector") -> None:
        self.log, self.rows = MemoryLog(), MemoryRows()
        self.spec = CategorySpec(
            name="in", partitions=2, columns=(("q", "string"),), watermark=watermark, lateness_ms=0
        )
        self.birth = self.log.create(self.spec).birth
        StreamDataPlane(self.log, self.rows).prepare("j", "b", CONFIG)
        self.trouble: dict[int, str] = {}

    def ref(self, partition: int) -> IntervalRef:
        birth = interval_birth("b", "stateful", 0, partition)
        return IntervalRef(job="j", job_birth="b", partition=partition, birth=birth)

    def publish(self, partition: int, *seqs: int) -> None:
        rows = [{"_seq": n, "_ts": n, "_key": "k", "_late": False, "q": "x"} for n in seqs]
        batch = pa.RecordBatch.from_pylist(rows, schema=self.spec.schema())
        self.log.publish("in", producer="a", epoch=1, batches={partition: batch}, gapless=False)

    def commit(self, partition: int, **changes: Any) -> None:
        ref = self.ref(partition)
        row = self.rows.acquire(ref, generation=1, shard_epoch=1)
        new = self.rows.commit(ref, token=row.token, version=row.version, changes=Changes(**changes))
        self.log.report_low(
            "out", producer=ref.birth, epoch=row.token, low=new.output_low, now_ms=partition * 1000
        )

    def percentile(self, percent: int) -> dict[str, tuple[int, int]]:
        """Of each category its low, and the percentile."""
        job = JobToInspect(name="j", birth="b", config=CONFIG, pipeline="p")
        found = WatermarkView(self.log, self.rows).explain([job], "out", now_ms=10_000, percent=percent)
        return {line["category"]: (line["low"], line["percentile_low"]) for line in found["categories"]}

    def text(self, subject: str = "out") -> str:
        job = JobToInspect(name="j", birth="b", config=CONFIG, pipeline="p", trouble=self.trouble)
        found = WatermarkView(self.log, self.rows).explain([job], subject, now_ms=10_000)
        (line,) = found["held_back"]
        return str(line["text"])


def test_one_of_several_injectors_that_never_came_is_named_at_the_sink():
    world = World()
    expect_injectors(world.log, "in", ["a", "b"])
    world.log.report_low("in", producer="a", epoch=1, low=500, now_ms=0)
    assert world.text() == "held back by injector b, because it has not reported yet"


@pytest.mark.parametrize("subject", ["", "j", "p", "out"])
def test_a_job_a_pipeline_and_nothing_lead_to_what_is_written(subject: str):
    assert World().text(subject) == "held back by category in, because no injector has started"


def test_an_interval_behind_is_named_with_what_it_has_to_read_and_why_it_does_not():
    world = World()
    world.log.register_producer("in", "a")
    world.publish(1, 1, 2, 3)
    world.log.report_low("in", producer="a", epoch=1, low=500, now_ms=0)
    world.commit(0, input_low=500)
    world.trouble = {1: "no container runs its task j/1"}
    assert world.text() == (
        "held back by j[1], because it has 3 records of in to read; no container runs its task j/1"
    )


def test_an_unsent_production_and_a_hold_are_told_apart():
    world = World()
    world.log.register_producer("in", "a")
    world.log.report_low("in", producer="a", epoch=1, low=500, now_ms=0)
    world.commit(0, input_low=500)
    out_birth = world.log.describe("out").birth
    unsent = OutboxRow(
        id=0, category="out", category_birth=out_birth, partition=0, first_seq=1, count=1, ts_min=300, payload=b""
    )  # fmt: skip
    world.commit(1, input_low=500, outbox=(unsent,))
    assert "j[1], because its production of 1970-01-01T00:00:00.300Z is not sent" in world.text()
    held = World()
    held.log.register_producer("in", "a")
    held.log.report_low("in", producer="a", epoch=1, low=500, now_ms=0)
    held.commit(0, input_low=500)
    held.commit(1, input_low=500, timers_set=(TimerRow(key="k", tag="t", at_ms=900, hold_ms=200),))
    assert "j[1], because a timer holds it at 1970-01-01T00:00:00.200Z" in held.text()


def test_the_partition_of_an_event_time_source_is_named():
    world = World("event_time")
    world.commit(0, input_low=400, event_time_max={world.birth: 400})
    world.commit(1, input_low=150, event_time_max={world.birth: 150})
    assert world.text().startswith(
        "held back by partition 1 of in, because its newest record is from 1970-01-01T00:00:00.150Z"
    )
    assert world.text("in").startswith("held back by partition 1 of in")


def test_a_partition_with_few_of_the_records_does_not_hold_a_percentile():
    """Two intervals, one stands still: at first it has little to read, then half of all. What was said stays."""
    world = World()
    world.log.register_producer("in", "a")
    world.publish(0, *range(1, 200))
    world.publish(1, 1)
    world.log.report_low("in", producer="a", epoch=1, low=500, now_ms=0)
    world.commit(0, input_low=500)
    world.commit(1, input_low=100)
    assert world.percentile(99) == {"out": (100, 500), "in": (500, 500)}
    assert world.percentile(100)["out"] == (100, 100)
    world.publish(1, *range(2, 200))
    world.commit(0, input_low=600)
    assert world.percentile(98)["out"] == (100, 100), "it has half of the records now"
    assert world.percentile(99)["out"] == (100, 500), "it never goes back"


def test_a_partition_of_a_source_with_few_of_the_records_does_not_hold_a_percentile():
    world = World("event_time")
    world.log.register_producer("in", "a")
    world.publish(0, *range(1, 400))
    world.publish(1, 1)
    world.commit(0, input_low=400, event_time_max={world.birth: 400})
    world.commit(1, input_low=150, event_time_max={world.birth: 150})
    assert world.percentile(99)["in"] == (150, 400) and world.percentile(100)["in"] == (150, 150)


def test_what_has_ended_is_held_by_nobody():
    world = World()
    world.log.register_producer("in", "a")
    world.log.report_low("in", producer="a", epoch=1, low=LOW_MAX, now_ms=0)
    for partition in (0, 1):
        world.commit(partition, input_low=LOW_MAX)
    assert world.text() == "nothing holds it back: the input has ended"


def test_a_name_that_nothing_has_is_not_found():
    with pytest.raises(NotFound, match="there is no category, job or pipeline"):
        World().text("nope")
