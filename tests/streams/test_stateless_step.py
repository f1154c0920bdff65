"""The stateless step: what it promises, publishes and commits, and what it refuses."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.core.errors import IntentStands, IntervalError, OffsetAhead, PoisonRecord, RowsOlderThanBus
from penstock.streams.bus.log import LOW_MAX, LOW_MIN
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.step.stateless import pending_intent
from tests.streams.stateless_world import REF, World, a_world, outputs_of
from tests.streams.step_world import published


def test_records_are_filtered_split_and_keyed_and_bad_ones_set_aside() -> None:
    world = a_world()
    report = world.run(world.open().token, 0, 6)
    assert outputs_of(world) == ["a", "b", "two", "two", "a"]
    assert (report.records, report.published, report.bad, report.late, report.committed) == (6, 5, 1, 1, True)
    (dead,) = published(world.log, ["dead"])["dead"][0]
    assert (dead["reason"], dead["value"], dead["source_partition"], dead["source_offset"]) == (
        "no JSON",
        b"{",
        0,
        1,
    )
    rows = [row for rows in published(world.log, ["out"])["out"].values() for row in rows]
    assert {row["_seq"] for row in rows} == {1 << 16, 3 << 16, 4 << 16, 4 << 16 | 1, 6 << 16}
    assert [row["_ts"] for row in rows if row["_late"]] == [400]


def test_event_time_counts_records_that_the_plan_drops() -> None:
    world = a_world()
    report = world.run(world.open().token, 0, 6)
    assert (report.input_low, report.output_low) == (4000, 4000)
    assert world.log.producers("out")[world.producer] == 4000


def test_an_input_with_marks_passes_them_on() -> None:
    world = a_world(lateness_ms=None)
    token = world.open().token
    assert world.run(token, 0, 3).input_low == LOW_MIN
    world.log.report_low("in", producer="source", epoch=1, low=250, now_ms=1)
    assert world.run(token, 3, 4).input_low == LOW_MIN  # the mark lies at the end, which is not reached
    assert world.run(token, 4, 6).input_low == 250
    world.log.report_low("in", producer="source", epoch=1, low=LOW_MAX, now_ms=2)
    report = world.run(token, 6, 6)
    assert (report.input_low, report.committed, report.records) == (LOW_MAX, True, 0)
    assert world.log.watermark("out") == LOW_MAX


def test_the_end_of_a_bounded_event_time_source_is_passed_on() -> None:
    world = a_world()
    token = world.open().token
    world.run(token, 0, 6)
    world.log.report_low("in", producer="source", epoch=1, low=LOW_MAX, now_ms=2)
    assert world.run(token, 6, 6).input_low == LOW_MAX


def test_the_intent_is_durable_before_the_publish_and_gone_with_the_commit() -> None:
    world = a_world(suffix="!")
    token = world.open().token
    step = world.step(token)
    assert step.begin(world.range(0, 2))
    intent = pending_intent(world.rows.peek(REF))
    assert intent is not None
    assert (dict(intent.ranges), intent.package, intent.plan) == (
        {world.birth("in"): (0, 2)},
        "p1",
        {"suffix": "!"},
    )
    assert outputs_of(world) == []
    batches, seen = world.made(0, 2, "!")
    step.finish(batches, event_time_max=seen, now_ms=5)
    assert pending_intent(world.rows.peek(REF)) is None


@pytest.mark.parametrize(("end", "suffix"), [(3, ""), (1, ""), (2, "?")])
def test_another_range_or_plan_is_refused_while_an_intent_stands(end: int, suffix: str) -> None:
    world = a_world()
    token = world.open().token
    assert world.step(token).begin(world.range(0, 2))
    with pytest.raises(IntentStands, match="unfinished intent for another step"):
        world.step(token, suffix).begin(world.range(0, end))
    assert world.step(token).begin(world.range(0, 2))  # the same again is a replay


def test_an_empty_range_does_not_step_over_a_standing_intent() -> None:
    world = a_world()
    token = world.open().token
    assert world.step(token).begin(world.range(0, 2))
    with pytest.raises(IntentStands):
        world.step(token).begin(world.range(0, 0))


def test_a_start_above_the_committed_offset_is_an_error() -> None:
    world = a_world()
    with pytest.raises(OffsetAhead):
        world.step(world.open().token).begin(world.range(1, 2))


def test_a_committed_range_is_not_done_again() -> None:
    world = a_world()
    token = world.open().token
    world.run(token, 0, 4)
    before = world.result()
    report = world.run(token, 0, 3)
    assert not report.committed
    assert not world.step(token).begin(world.range(0, 4))
    assert world.result() == before


def test_a_range_that_overlaps_what_is_committed_publishes_only_the_rest() -> None:
    world = a_world()
    token = world.open().token
    world.run(token, 0, 3)
    report = world.run(token, 0, 6)
    assert report.records == 3
    assert outputs_of(world) == ["a", "b", "two", "two", "a"]


def test_an_idle_step_writes_nothing() -> None:
    world = a_world()
    token = world.open().token
    world.run(token, 0, 6)
    before = world.rows.peek(REF)
    assert not world.run(token, 6, 6).committed
    assert world.rows.peek(REF) == before


def test_rows_older_than_the_bus_are_refused_at_open() -> None:
    world = a_world()
    world.run(world.open().token, 0, 6)
    restored = World(rows=MemoryRows(), log=world.log)
    restored.rows.create(REF, offsets={world.birth("in"): 0}, low=LOW_MIN)
    with pytest.raises(RowsOlderThanBus):
        restored.open()


def test_rows_outside_the_range_are_refused() -> None:
    world = a_world()
    step = world.step(world.open().token)
    assert step.begin(world.range(0, 2))
    batches, seen = world.made(0, 3, "")
    with pytest.raises(IntervalError, match="outside of its ranges"):
        step.finish(batches, event_time_max=seen, now_ms=5)
    assert outputs_of(world) == []


def test_missing_columns_are_named() -> None:
    world = a_world()
    step = world.step(world.open().token)
    assert step.begin(world.range(0, 2))
    batches, seen = world.made(0, 2, "")
    with pytest.raises(IntervalError, match=r"lack columns \['query'\]"):
        step.finish([batch.drop_columns(["query"]) for batch in batches], event_time_max=seen, now_ms=5)


def test_records_without_a_key_stay_in_one_partition() -> None:
    world = a_world()
    step = world.step(world.open().token)
    assert step.begin(world.range(0, 6))
    batches, seen = world.made(0, 6, "")
    table = pa.Table.from_batches(batches)
    place = table.column_names.index("_key")
    unkeyed = table.set_column(place, "_key", pa.nulls(table.num_rows, pa.null()))
    step.finish(unkeyed.to_batches(), event_time_max=seen, now_ms=5)
    assert [len(rows) for rows in published(world.log, ["out"])["out"].values()] == [5, 0]


def test_a_job_that_stops_at_poison_publishes_nothing_of_the_step_and_goes_on_when_told_otherwise() -> None:
    """The range stays promised; with dead letters allowed the same range is done, once."""
    world = a_world(stops_at_poison=True)
    token = world.open().token
    with pytest.raises(PoisonRecord) as caught:
        world.run(token, 0, 6)
    assert "offset 1: no JSON" in caught.value.why and "poison: dead_letter" in caught.value.fix
    assert caught.value.offset == 1
    assert outputs_of(world) == [] and world.position() == 0
    world.stops_at_poison = False
    world.live([6])
    assert outputs_of(world) == ["a", "b", "two", "two", "a"]
    assert len(published(world.log, ["dead"])["dead"][0]) == 1


def test_poison_without_a_place_for_dead_letters_stops_the_task_in_any_case() -> None:
    world = a_world(has_dead_letters=False)
    with pytest.raises(PoisonRecord, match="cannot be processed") as caught:
        world.run(world.open().token, 0, 6)
    assert "has no dead-letter category" in caught.value.fix and world.position() == 0
