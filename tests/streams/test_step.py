"""The stateful step: what it reads, in which order it works, and that results do not depend on how it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import Fenced, IntervalError, OffsetAhead, RowsOlderThanBus
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, CategorySpec
from penstock.streams.dsl.computation import Context, Record
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.step.stateful import InputRange, open_interval
from tests.streams.computations import (
    DropsLate,
    Forgets,
    ProcessesLate,
    a_world,
    counts_of,
    does,
    everything,
    records_of,
)
from tests.streams.step_world import REF, Event, World


def test_a_window_is_produced_once_the_low_has_passed_it() -> None:
    world = a_world([("a", 100), ("a", 900), ("b", 300), 999])
    report = everything(world)
    assert counts_of(world) == []
    assert (report.records, report.timers, report.published) == (3, 0, 3)
    world.append([1000])
    report = everything(world)
    assert counts_of(world) == [("a", 0, 2), ("b", 0, 1)]
    assert (report.records, report.timers, report.published, report.input_low) == (0, 2, 2, 1000)


def traced(events: Sequence[Event]) -> list[str]:
    """The order in which one step calls the hooks; each record sets a timer 400 ms later."""
    seen: list[str] = []

    def record(record: Record, ctx: Context) -> None:
        seen.append(f"record {record.ts} of {ctx.key}")
        ctx.set_timer(str(record.ts), record.ts // 100 * 100 + 400)

    everything(does(events, record, lambda timer, ctx: seen.append(f"timer {timer.tag} of {ctx.key}")))
    return seen


def test_timers_fire_between_the_records_before_and_after_a_mark() -> None:
    """One batch holds both sides of the mark; what comes after it must not be counted before it."""
    assert traced([("a", 100), 1000, ("a", 1200), 2000]) == [
        "record 100 of a",
        "timer 100 of a",
        "record 1200 of a",
        "timer 1200 of a",
    ]


def test_timers_fire_in_order_of_time_key_and_tag() -> None:
    fired = traced([("b", 199), ("b", 101), ("a", 180), ("c", 50), 10_000])[4:]
    assert fired == ["timer 50 of c", "timer 180 of a", "timer 101 of b", "timer 199 of b"]


def test_everything_due_fires_at_the_end_of_all_input() -> None:
    world = a_world([("a", 10**15), LOW_MAX])
    report = everything(world)
    assert counts_of(world) == [("a", 10**12, 1)]
    assert (report.input_low, report.output_low) == (LOW_MAX, LOW_MAX)
    assert world.log.watermark("out") == LOW_MAX


def test_an_idle_step_writes_nothing() -> None:
    world = a_world()
    step = world.open()
    end = world.log.end_offsets("in")[0]
    world.run(step, 0, end)
    before = world.rows.peek(REF)
    report = world.run(step, end, end)
    assert not report.committed
    assert world.rows.peek(REF) == before


def test_state_that_is_back_at_its_defaults_is_deleted() -> None:
    world = a_world([("a", 100), LOW_MAX], computation=Forgets)
    everything(world)
    assert world.result()["states"] == {}


def test_late_records_are_dropped_and_counted() -> None:
    world = a_world([("a", 100), 1000, ("a", 200), ("b", 1200), LOW_MAX])
    report = everything(world)
    assert counts_of(world) == [("a", 0, 1), ("b", 1, 1)]
    assert (report.records, report.late, report.behind_low) == (3, 1, 0)
    assert world.rows.peek(REF).counters["late"] == 1


def test_late_records_are_processed_on_request_and_what_comes_of_them_is_flagged() -> None:
    """The correction of a window that was produced before is late itself; it must not hold or move any low."""
    world = a_world([("a", 100), 1000, ("a", 200), 1001, ("a", 1200), LOW_MAX], computation=ProcessesLate)
    report = everything(world)
    assert [(row["second"], row["n"], row["_late"]) for row in records_of(world)] == [
        (0, 1, False),
        (0, 1, True),
        (1, 1, False),
    ]
    assert report.late == 1
    world.check_marks()


def test_an_unflagged_record_behind_the_low_raises_an_alarm_and_is_processed() -> None:
    world = a_world([("a", 100), 1000])
    batch = pa.RecordBatch.from_pydict(
        {"_seq": [2], "_ts": [200], "_key": ["a"], "_late": [False], "query": ["a"]},
        schema=world.log.describe("in").spec.schema(),
    )
    world.log.publish("in", producer="source", epoch=1, batches={0: batch}, gapless=True)
    report = everything(world)
    assert (report.behind_low, report.late, report.records) == (1, 0, 2)
    assert counts_of(world) == [("a", 0, 1), ("a", 0, 1)]


def test_a_start_above_the_committed_offset_is_an_error() -> None:
    world = a_world()
    step = world.open()
    with pytest.raises(OffsetAhead, match="would skip"):
        world.run(step, 1, 3)
    assert world.position() == 0


def test_rows_below_the_committed_offset_are_not_processed_twice() -> None:
    world, expected = a_world(), a_world()
    everything(expected)
    step = world.open()
    world.run(step, 0, 3)
    report = world.run(step, 0, world.log.end_offsets("in")[0])
    assert report.records == 3
    assert world.result() == expected.result()


def test_a_range_that_a_twin_committed_changes_nothing() -> None:
    world = a_world()
    step = world.open()
    world.run(step, 0, 4)
    before = world.result()
    report = world.run(step, 0, 3)
    assert not report.committed
    assert world.result() == before


def test_the_position_is_the_planned_end_even_without_rows() -> None:
    world = a_world()
    step = world.open()
    ranges, _ = world.input(0, 4)
    step.run(ranges, [], now_ms=5)
    assert world.position() == 4


def test_an_input_of_another_birth_is_refused() -> None:
    world = a_world()
    step = world.open()
    other = InputRange(category="in", birth="reborn", start=0, end=1)
    with pytest.raises(IntervalError, match="does not read"):
        step.run([other], [], now_ms=5)


def test_rows_older_than_the_bus_are_refused_at_open() -> None:
    """The rows were restored from a copy: the bus has sequences that they never gave."""
    world = a_world()
    everything(world)
    restored = World(rows=MemoryRows(), log=world.log)
    restored.rows.create(REF, offsets={world.birth("in"): 0}, low=LOW_MIN)
    with pytest.raises(RowsOlderThanBus, match="older than the bus"):
        restored.open()


def test_an_output_that_was_created_anew_is_refused_at_open() -> None:
    world = a_world()
    outputs = [replace(output, birth="reborn") for output in world.outputs()]
    with pytest.raises(IntervalError, match="not the one that was planned"):
        open_interval(
            ref=REF,
            generation=1,
            shard_epoch=1,
            producer_for=lambda birth: REF.birth,
            rows=world.rows,
            log=world.log,
            outputs=outputs,
        )


def test_an_old_generation_cannot_open() -> None:
    world = a_world()
    world.open(generation=2)
    with pytest.raises(Fenced):
        world.open(generation=1, shard_epoch=99)


def test_leftovers_of_a_predecessor_are_sent_first() -> None:
    """A life that died between commit and publish; its successor has nothing to read, and still sends."""
    world, expected = a_world(), a_world()
    everything(expected)

    class Died(BaseException):
        pass

    def die(point: str) -> None:
        if point == "publish:before":
            raise Died

    step = world.open()
    world.log._fault = die
    with pytest.raises(Died):
        world.run(step, 0, world.log.end_offsets("in")[0])
    world.log._fault = lambda point: None
    assert world.rows.peek(REF).output_low < LOW_MAX
    report = everything(world)
    assert report.records == 0
    assert world.result() == expected.result()


def test_two_inputs_wait_for_the_slower_one() -> None:
    world = a_world([("a", 100), ("b", 200), 5000])
    world.log.create(CategorySpec(name="in2", partitions=1, columns=(("query", "string"),)))
    world.log.register_producer("in2", "source")
    other = world.birth("in2")
    world.rows.create(REF, offsets={other: 0}, low=LOW_MIN)
    step = world.open()
    (first,), batches = world.input(0, 2)
    second = InputRange(category="in2", birth=other, start=0, end=0)
    assert step.run([first, second], list(batches), now_ms=10).input_low == LOW_MIN
    world.log.report_low("in2", producer="source", epoch=1, low=700, now_ms=20)
    assert step.run([replace(first, start=2), second], [], now_ms=30).input_low == 700
    world.log.report_low("in2", producer="source", epoch=1, low=9000, now_ms=2000)
    assert step.run([replace(first, start=2), second], [], now_ms=40).input_low == 5000
    assert counts_of(world) == [("a", 0, 1), ("b", 0, 1)]


# However the log is cut, the results are the same.

_lows = st.integers(0, 50).map(lambda n: n * 100)
_records = st.tuples(st.sampled_from("abc"), st.integers(0, 5000))
_logs = st.lists(st.one_of(_records, _records, _lows), max_size=25).map(lambda events: [*events, LOW_MAX])
_sizes = st.lists(st.integers(1, 7), min_size=1, max_size=6)


@settings(max_examples=60)
@given(events=_logs, sizes=_sizes, lives=st.integers(1, 4), process_late=st.booleans())
def test_results_do_not_depend_on_batches_or_restarts(
    events: list[Event], sizes: list[int], lives: int, process_late: bool
) -> None:
    kind = ProcessesLate if process_late else DropsLate
    whole, cut = a_world(events, computation=kind), a_world(events, computation=kind)
    everything(whole)
    end = cut.log.end_offsets("in")[0]
    for life in range(lives):
        step = cut.open()
        for size in sizes if life < lives - 1 else sizes * end:
            position = cut.position()
            cut.run(step, position, min(end, position + size))
    cut.run(step, end, end)
    assert cut.result() == whole.result()
    cut.check_marks()


@settings(max_examples=40)
@given(events=_logs, sizes=_sizes)
def test_results_do_not_depend_on_how_far_behind_the_reader_is(events: list[Event], sizes: list[int]) -> None:
    """One world reads a finished log; the other reads while the log is being written."""
    whole, live = a_world(events), a_world([])
    everything(whole)
    step, written = live.open(), 0
    for turn in range(len(events)):
        size = sizes[turn % len(sizes)]
        live.append(events[written : written + size])
        written += size
        live.run(step, live.position(), live.log.end_offsets("in")[0])
    assert live.result() == whole.result()
    live.check_marks()
