"""Claims about what a plan prepares, fences and retires on the bus and in the rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from penstock.core.errors import ConfigError, Fenced, StoreUnavailable
from penstock.jobs.births import interval_birth, producer_of
from penstock.streams.bus.log import LOW_MIN, CategorySpec
from penstock.streams.bus.memory_log import MemoryLog
from penstock.streams.data_plane import StreamDataPlane
from penstock.streams.rows.memory_rows import MemoryRows
from penstock.streams.rows.row_store import IntervalRef

OUT = {"stream": "out", "category": "out", "partitions": 3, "columns": [["q", "string"]]}
DEAD = {"stream": "dead", "category": "in.dead", "partitions": 2, "columns": [["reason", "string"]]}


def a_config(**changes: Any) -> dict[str, Any]:
    base = {"kind": "stateful", "lineage": 0, "partitions": 2, "outputs": [OUT, DEAD]}
    return {**base, "inputs": [{"category": "in", "start": "earliest"}], **changes}


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


def test_a_fenced_owner_can_neither_commit_nor_publish():
    from penstock.streams.rows.row_store import Changes

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


def two_inputs() -> tuple[World, dict[str, Any]]:
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
    fewer = {**config, "inputs": TWO[1:]}
    world.plane.retire("j", "b", config, fewer)
    assert len(world.log.producers("out")) == 3


def test_the_largest_input_decides_how_many_intervals_there_are():
    world, config = two_inputs()
    with pytest.raises(ConfigError, match="expects 2 partitions of 'in', 'more'"):
        world.plane.prepare("j", "b", {**config, "partitions": 2})
