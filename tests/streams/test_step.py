"""The stateful step: what it reads, in which order it works, what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import (
    ComputationFailed,
    ConfigError,
    Fenced,
    IntervalError,
    OffsetAhead,
    ProductionRefused,
    RowsOlderThanBus,
    StateMismatch,
    TimerRefused,
)
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, CategorySpec
from penstock.streams.bus.memory_log import MemoryLog
from penstock.streams.computation import Computation, Context, Record, Timer, Value
from penstock.streams.interval import InputRange, StatefulStep, open_interval
from penstock.streams.rows.memory_rows import MemoryRows
from penstock.streams.rows.row_store import Changes
from tests.streams.step_world import REF, SMALL_LOG, Event, World, published

SEEN = {"out": (("at", "bigint"),)}


def a_world(events: Sequence[Event] = SMALL_LOG, **others: Any) -> World:
    return World(rows=MemoryRows(), log=MemoryLog(), **others).build(events)


def records_of(world: World, stream: str = "out") -> list[dict[str, Any]]:
    found = published(world.log, [stream])[stream]
    return sorted((row for rows in found.values() for row in rows), key=lambda row: (row["_ts"], row["_key"]))


def counts_of(world: World) -> list[tuple[str, int, int]]:
    return [(row["query"], row["second"], row["n"]) for row in records_of(world)]


def everything(world: World) -> Any:
    end = world.log.end_offsets("in")[0]
    return world.run(world.open(), world.position(), end)


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
    world = a_world([("a", 100), LOW_MAX], computation=_Forgets)
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
    world = a_world([("a", 100), 1000, ("a", 200), 1001, ("a", 1200), LOW_MAX], computation=_Processes)
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
            producer=REF.birth,
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


# What user code may not do.


class _Forgets(Computation):
    outputs = {"out": {"query": "string", "second": "bigint", "n": "bigint"}, "seen": {"at": "bigint"}}
    counts = Value(dict[int, int])

    def process_record(self, record: Record, ctx: Context) -> None:
        ctx.state.counts[1] = 1
        ctx.set_timer("t", record.ts + 1)

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        del ctx.state.counts[1]


class _Processes(_Forgets):
    late = "process"

    def process_record(self, record: Record, ctx: Context) -> None:
        second = record.ts // 1000
        ctx.state.counts[second] = ctx.state.counts.get(second, 0) + 1
        ctx.set_timer(str(second), (second + 1) * 1000)

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        second = int(timer.tag)
        ctx.produce({"query": ctx.key, "second": second, "n": ctx.state.counts.pop(second)})


class _Does(Computation):
    """Whatever a test wants it to do with a record, or with a timer."""

    outputs = {"out": {"at": "bigint"}}
    on_record: Any = staticmethod(lambda record, ctx: None)
    on_timer: Any = staticmethod(lambda timer, ctx: None)

    def process_record(self, record: Record, ctx: Context) -> None:
        type(self).on_record(record, ctx)

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        type(self).on_timer(timer, ctx)


def does(events: Sequence[Event], record: Any, timer: Any = lambda timer, ctx: None) -> World:
    kind = type("Does", (_Does,), {"on_record": staticmethod(record), "on_timer": staticmethod(timer)})
    return a_world(events, computation=kind, columns=SEEN)


@pytest.mark.parametrize(
    ("record", "error", "said"),
    [
        (lambda record, ctx: ctx.produce({"at": 1}, ts=record.ts - 1), ProductionRefused, "stamped 99"),
        (lambda record, ctx: ctx.produce({"at": 1}, stream="none"), ProductionRefused, "'none'"),
        (lambda record, ctx: ctx.produce({"wrong": 1}), ProductionRefused, "wrong"),
        (lambda record, ctx: ctx.produce({"at": 1, "more": 1}), ProductionRefused, "more"),
        (lambda record, ctx: ctx.produce({"at": 1}, key=7), ProductionRefused, "7"),
        (lambda record, ctx: ctx.set_timer("t", 500, hold_ms=99), TimerRefused, "hold from 99"),
        (lambda record, ctx: ctx.set_timer(5, 500), TimerRefused, "a tag is a string"),
        (lambda record, ctx: ctx.set_timer("t", LOW_MAX + 1), TimerRefused, "cannot be set"),
        (lambda record, ctx: ctx.set_timer("t", 1.5), ComputationFailed, "TypeError"),
        (lambda record, ctx: 1 // 0, ComputationFailed, "ZeroDivisionError"),
        (lambda record, ctx: record.qury, ComputationFailed, r"no column 'qury', only \['query'\]"),
        (lambda record, ctx: setattr(ctx.state, "none", 1), ComputationFailed, "AttributeError"),
    ],
)
def test_a_hook_that_fails_is_named_with_job_key_and_offset(record: Any, error: type, said: str) -> None:
    world = does([("zz", 50), ("k", 100)], lambda r, ctx: record(r, ctx) if r.key == "k" else None)
    step = world.open()
    before = world.rows.peek(REF)
    with pytest.raises(error, match=said) as caught:
        world.run(step, 0, 2)
    found = caught.value
    assert (found.job, found.key, found.offset) == ("z.count", "k", 1)
    assert found.what and found.why and found.fix
    assert world.rows.peek(REF) == before


def test_a_timer_hook_that_fails_is_named_too() -> None:
    world = does([("k", 100), 500], lambda r, ctx: ctx.set_timer("t", 200), lambda t, ctx: {}["x"])
    with pytest.raises(ComputationFailed, match="timer 't'") as caught:
        everything(world)
    assert (caught.value.key, caught.value.offset) == ("k", None)


@pytest.mark.parametrize("value", ["text", 1.5, 2**63, [1]])
def test_a_value_that_does_not_fit_its_column_is_refused(value: object) -> None:
    world = does([("k", 100)], lambda record, ctx: ctx.produce({"at": value}))
    with pytest.raises(ProductionRefused, match="declared 'bigint'") as caught:
        everything(world)
    assert caught.value.key == "k"


def test_a_production_may_be_stamped_from_the_hold_on_and_holds_the_output_low() -> None:
    events: list[Event] = [("k", 100), 450]
    world = does(
        events,
        lambda record, ctx: ctx.set_timer("t", 500, hold_ms=200),
        lambda timer, ctx: ctx.produce({"at": timer.at_ms}, ts=200),
    )
    assert everything(world).output_low == 200
    world.append([600])
    assert everything(world).output_low == 600
    assert [(row["_ts"], row["_late"]) for row in records_of(world)] == [(200, False)]
    world.check_marks()


def test_a_timer_set_behind_the_low_fires_before_the_next_record_and_is_on_time() -> None:
    seen: list[str] = []

    def record(record: Record, ctx: Context) -> None:
        seen.append(f"record {record.ts}")
        ctx.set_timer("t", 5)

    def timer(timer: Timer, ctx: Context) -> None:
        seen.append(f"timer at low {ctx.low_watermark}")
        ctx.produce({"at": timer.at_ms})

    world = does([1000, ("k", 1100), ("k", 1200)], record, timer)
    everything(world)
    assert seen == ["record 1100", "timer at low 1000", "record 1200", "timer at low 1000"]
    assert [(row["_ts"], row["_late"]) for row in records_of(world)] == [(1000, False), (1000, False)]


def test_timers_without_end_are_an_error_not_a_hang() -> None:
    world = does(
        [("k", 1), LOW_MAX],
        lambda record, ctx: ctx.set_timer("t", 5),
        lambda timer, ctx: ctx.set_timer("t", timer.at_ms + 1),
    )
    row = world.rows.acquire(REF, generation=1, shard_epoch=1)
    step = StatefulStep(
        ref=REF,
        token=row.token,
        rows=world.rows,
        log=world.log,
        outputs=world.outputs(),
        computation=world.computation(),
        timers_per_step_max=100,
    )
    with pytest.raises(TimerRefused, match="100 times in one step"):
        world.run(step, 0, 1)


def test_a_deleted_timer_does_not_fire_even_if_an_earlier_step_set_it() -> None:
    def record(record: Record, ctx: Context) -> None:
        if record.ts < 200:
            ctx.set_timer("t", 500)
        else:
            ctx.delete_timer("t")

    world = does([("k", 100), ("k", 300), LOW_MAX], record, lambda timer, ctx: ctx.produce({"at": 1}))
    step = world.open()
    world.run(step, 0, 1)
    world.run(step, 1, 2)
    assert records_of(world) == []
    assert world.result()["timers"] == ()


def test_state_of_another_version_is_refused_not_emptied() -> None:
    world = a_world([("a", 100)])
    row = world.rows.acquire(REF, generation=1, shard_epoch=1)
    world.rows.commit(REF, token=1, version=row.version, changes=Changes(states={"a": b"\x81\xa4gone\x01"}))
    with pytest.raises(StateMismatch, match="'a'"):
        everything(world)


def test_a_computation_whose_outputs_differ_from_the_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="stream 'seen'"):
        a_world(columns={"out": (("query", "string"), ("second", "bigint"), ("n", "bigint"))}).open()


def test_rows_that_did_not_parse_are_counted_and_passed_over() -> None:
    world = a_world([("a", 100), ("b", 300)])
    step = world.open()
    ranges, batches = world.input(0, 2)
    table = pa.Table.from_batches(list(batches)).append_column("_bad", pa.array(["no JSON", None]))
    report = step.run(ranges, table.to_batches(), now_ms=5)
    assert (report.bad, report.records) == (1, 1)


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
    kind = _Processes if process_late else _Whole
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


class _Whole(_Processes):
    late = "drop"
