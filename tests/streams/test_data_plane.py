"""Claims about what a plan prepares, fences and retires on the bus and in the rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from penstock.core.errors import ConfigError, Fenced, NotYet, StoreUnavailable
from penstock.jobs.config import JobConfig
from penstock.jobs.tasks import interval_birth, producer_of
from penstock.streams.bus.log import LOW_MIN, CategorySpec
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.data_plane import StreamDataPlane
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.row_store import Changes, Intent, IntervalRef, OutboxRow
from tests.builders import a_stored_config

OUT = {"stream": "out", "category": "out", "partitions": 3, "columns": [["q", "string"]], "internal": False}
DEAD = {**OUT, "stream": "dead", "category": "in.dead", "partitions": 2, "columns": [["reason", "string"]]}


def a_config(**changes: Any) -> JobConfig:
    base = {"kind": "stateful", "lineage": 0, "partitions": 2, "outputs": [OUT, DEAD]}
    return a_stored_config(**{**base, "inputs": [{"category": "in", "start": "earliest"}], **changes})


def a_ref(partition: int, lineage: int = 0) -> IntervalRef:
    birth = interval_birth("b", "stateful", lineage, partition)
    return IntervalRef(job="j", job_birth="b", partition=partition, birth=birth)


class World:
    def __init__(self) -> None:
        self.log, self.rows = MemoryLog(), MemoryRows()
        self.plane = StreamDataPlane(self.log, self.rows)

    def with_input(self, partitions: int = 2) -> World:
        columns = (("q", "string"),)
        self.log.create(CategorySpec(name="in", partitions=partitions, columns=columns, watermark="injector"))
        return self


def test_prepare_makes_outputs_intervals_and_producers_and_may_be_repeated():
    world = World().with_input()
    for _ in range(2):
        world.plane.prepare("j", "b", a_config())
    assert [c.spec.name for c in world.log.categories()] == ["in", "in.dead", "out"]
    assert all(world.rows.peek(a_ref(p)).token == 0 for p in range(2))
    assert world.log.producers("out") == {a_ref(0).birth: LOW_MIN, a_ref(1).birth: LOW_MIN}
    assert world.log.producers("in.dead") == {}


def test_a_job_whose_input_is_not_there_yet_waits():
    with pytest.raises(StoreUnavailable, match="waits for its input"):
        World().plane.prepare("j", "b", a_config())


def test_another_number_of_partitions_is_refused_by_name():
    with pytest.raises(ConfigError, match="expects 2 partitions"):
        World().with_input(3).plane.prepare("j", "b", a_config())


@pytest.mark.parametrize("world", [World(), World().with_input(3)], ids=["not there", "another number"])
def test_a_job_that_could_never_be_prepared_can_be_removed(world: World):
    with pytest.raises((StoreUnavailable, ConfigError)):
        world.plane.prepare("j", "b", a_config())
    world.plane.retire("j", "b", a_config(), None)


def test_a_job_removed_before_its_plan_was_prepared_has_no_outputs_to_leave():
    world = World().with_input()
    world.log.create(CategorySpec(name="out", partitions=3, columns=(("q", "string"),)))
    world.log.register_producer("out", "another")
    world.plane.retire("j", "b", a_config(outputs=[OUT, OUT | {"category": "never_made"}]), None)
    assert set(world.log.producers("out")) == {"another"}


def test_a_fenced_owner_can_neither_commit_nor_publish():
    world = World().with_input()
    world.plane.prepare("j", "b", a_config())
    old = world.rows.acquire(a_ref(0), generation=1, shard_epoch=7)
    for _ in range(2):
        world.plane.fence("j", "b", a_config(), generation=2)
    with pytest.raises(Fenced):
        world.rows.commit(a_ref(0), token=old.token, version=old.version, changes=Changes())
    with pytest.raises(Fenced):
        world.log.publish("out", producer=a_ref(0).birth, epoch=old.token, batches={}, gapless=True)
    with pytest.raises(Fenced):
        world.rows.acquire(a_ref(0), generation=1, shard_epoch=9)
    assert world.rows.acquire(a_ref(0), generation=2, shard_epoch=1).token > old.token


def test_retire_forgets_only_producers_that_are_gone():
    world = World().with_input()
    world.plane.prepare("j", "b", a_config())
    other = a_config(outputs=[{**OUT, "category": "other"}])
    world.plane.prepare("j", "b", other)
    world.plane.retire("j", "b", a_config(), a_config())
    assert len(world.log.producers("out")) == 2
    world.plane.retire("j", "b", a_config(), other)
    assert world.log.producers("out") == {} and len(world.log.producers("other")) == 2
    world.plane.retire("j", "b", other, None)
    assert world.log.producers("other") == {}


def test_a_reset_starts_with_empty_rows_and_as_a_new_producer():
    world = World().with_input()
    world.plane.prepare("j", "b", a_config())
    world.rows.acquire(a_ref(0), generation=1, shard_epoch=1)
    world.plane.prepare("j", "b", a_config(lineage=1))
    assert world.rows.peek(a_ref(0, lineage=1)).token == 0
    ids = {
        producer_of(job_birth="b", kind=kind, lineage=lineage, input_birth="c", partition=0)
        for kind in ("stateless", "stateful")
        for lineage in (0, 1)
    }
    assert len(ids) == 4


TWO = [{"category": "in", "start": "earliest"}, {"category": "more", "start": "latest"}]


def two_inputs() -> tuple[World, JobConfig]:
    """`in` has two partitions, `more` three, and already a record in its last one."""
    world = World().with_input()
    spec = CategorySpec(name="more", partitions=3, columns=(("q", "string"),), watermark="injector")
    world.log.create(spec)
    batch = pa.RecordBatch.from_pydict(
        {"_seq": [1], "_ts": [5], "_key": [None], "_late": [False], "q": ["x"]}, schema=spec.schema()
    )
    world.log.publish("more", producer="me", epoch=1, batches={2: batch}, gapless=True)
    return world, a_config(kind="stateless", partitions=3, inputs=TWO)


def stateless_ref(partition: int) -> IntervalRef:
    birth = interval_birth("b", "stateless", 0, partition)
    return IntervalRef(job="j", job_birth="b", partition=partition, birth=birth)


def test_an_interval_reads_its_partition_of_each_input_that_has_one():
    world, config = two_inputs()
    world.plane.prepare("j", "b", config)
    births = {name: world.log.describe(name).birth for name in ("in", "more")}
    assert dict(world.rows.peek(stateless_ref(0)).offsets) == {births["in"]: 0, births["more"]: 0}
    assert dict(world.rows.peek(stateless_ref(2)).offsets) == {births["more"]: 1}  # from now on


def test_a_stateless_job_is_a_producer_for_each_input_and_all_are_fenced_and_retired():
    world, config = two_inputs()
    world.plane.prepare("j", "b", config)
    producers = world.log.producers("out")
    assert len(producers) == 2 + 3
    world.plane.fence("j", "b", config, generation=7)
    schema = world.log.describe("out").spec.schema()
    batch = pa.RecordBatch.from_pydict(
        {"_seq": [1], "_ts": [5], "_key": [None], "_late": [False], "q": ["x"]}, schema=schema
    )
    for producer in producers:
        with pytest.raises(Fenced):
            world.log.publish("out", producer=producer, epoch=0, batches={0: batch}, gapless=False)
    fewer = a_config(kind="stateless", partitions=3, inputs=TWO[1:])
    world.plane.retire("j", "b", config, fewer)
    assert len(world.log.producers("out")) == 3


def test_the_largest_input_decides_how_many_intervals_there_are():
    world, _ = two_inputs()
    with pytest.raises(ConfigError, match="expects 2 partitions of 'in', 'more'"):
        world.plane.prepare("j", "b", a_config(kind="stateless", partitions=2, inputs=TWO))


def a_batch(*sequences: int) -> pa.RecordBatch:
    columns = {
        "_seq": pa.array(sequences, pa.int64()),
        "_ts": pa.array([1] * len(sequences), pa.int64()),
        "_key": pa.array(["k"] * len(sequences)),
        "_late": pa.array([False] * len(sequences)),
        "q": pa.array([str(number) for number in sequences]),
    }
    return pa.RecordBatch.from_pydict(columns)


def in_the_outbox(world: World, ref: IntervalRef, count: int = 2) -> None:
    """A step was committed, and its worker died before it sent anything."""
    sink = pa.BufferOutputStream()
    batch = a_batch(*range(1, count + 1))
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    row = world.rows.acquire(ref, generation=1, shard_epoch=1)
    outbox = OutboxRow(
        id=0,
        category="out",
        category_birth=world.log.describe("out").birth,
        partition=1,
        first_seq=1,
        count=count,
        ts_min=1,
        payload=sink.getvalue().to_pybytes(),
    )
    world.rows.commit(ref, token=row.token, version=row.version, changes=Changes(outbox=(outbox,)))


def test_producers_stay_until_what_they_promised_is_there():
    world = World().with_input()
    other = a_config(outputs=[{**OUT, "category": "other"}])
    for config in (a_config(), other):
        world.plane.prepare("j", "b", config)
    in_the_outbox(world, a_ref(1))
    for _ in range(2):
        with pytest.raises(NotYet, match="has unsent output for 'out'"):
            world.plane.retire("j", "b", a_config(), other)
    assert len(world.log.producers("out")) == 2
    row = world.rows.acquire(a_ref(1), generation=2, shard_epoch=1)  # the next task sends it
    world.rows.delivered(a_ref(1), token=row.token, ids=[1])
    world.plane.retire("j", "b", a_config(), other)
    assert world.log.producers("out") == {}


def test_an_intent_for_an_output_that_is_left_keeps_its_producers():
    world = World().with_input()
    config = a_config(kind="stateless")
    other = a_config(kind="stateless", outputs=[{**OUT, "category": "other"}])
    for one in (config, other):
        world.plane.prepare("j", "b", one)
    birth = interval_birth("b", "stateless", 0, 0)
    ref = IntervalRef(job="j", job_birth="b", partition=0, birth=birth)
    row = world.rows.acquire(ref, generation=1, shard_epoch=1)
    source = world.log.describe("in").birth
    intent = Intent(ranges={source: (0, 5)}, package="p", plan={"outputs": [OUT]}, plan_hash="h")
    row = world.rows.commit(ref, token=row.token, version=row.version, changes=Changes(intent=intent))
    with pytest.raises(NotYet):
        world.plane.retire("j", "b", config, other)
    world.rows.commit(ref, token=row.token, version=row.version, changes=Changes(clear_intent=True))
    world.plane.retire("j", "b", config, other)
    assert world.log.producers("out") == {}


def test_the_outbox_of_a_removed_job_is_sent_before_it_is_forgotten():
    world = World().with_input()
    world.plane.prepare("j", "b", a_config())
    in_the_outbox(world, a_ref(1), count=3)
    for _ in range(2):
        world.plane.retire("j", "b", a_config(), None)
    assert world.log.end_offsets("out") == (0, 3, 0) and world.log.producers("out") == {}


def test_a_reader_is_at_the_end_when_the_writers_are_gone_and_all_is_read():
    world = World().with_input()
    world.plane.prepare("j", "b", a_config())
    reads = a_config(partitions=3, inputs=[{"category": "out"}], outputs=[])
    world.plane.prepare("r", "c", reads)
    world.log.publish("out", producer=a_ref(0).birth, epoch=1, batches={1: a_batch(1, 2)}, gapless=True)

    def unread(is_stopped: bool = False) -> str:
        return world.plane.unread("r", "c", reads, "out", is_stopped=is_stopped)

    assert "is still registered" in unread()
    assert unread(is_stopped=True) == "1 of its 3 partitions are not read to their end yet"
    world.plane.retire("j", "b", a_config(), None)
    assert unread() == "1 of its 3 partitions are not read to their end yet"
    ref = IntervalRef(job="r", job_birth="c", partition=1, birth=interval_birth("c", "stateful", 0, 1))
    row = world.rows.acquire(ref, generation=1, shard_epoch=1)
    offsets = {world.log.describe("out").birth: 2}
    world.rows.commit(ref, token=row.token, version=row.version, changes=Changes(offsets=offsets))
    assert unread() == "" and world.plane.unread("r", "c", reads, "gone", is_stopped=False) == ""


def test_the_earliest_record_is_the_first_that_retention_left():
    world = World().with_input()
    world.log.publish("in", producer="p", epoch=1, batches={0: a_batch(1, 2, 3)}, gapless=True)
    world.log.truncate("in", {0: 2})
    world.plane.prepare("j", "b", a_config())
    source = world.log.describe("in").birth
    assert [world.rows.peek(a_ref(p)).offsets[source] for p in range(2)] == [2, 0]
