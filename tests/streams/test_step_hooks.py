"""What user code may and may not do inside the stateful step, and how it is told."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from penstock.core.errors import (
    ComputationFailed,
    ConfigError,
    ProductionRefused,
    StateMismatch,
    TimerRefused,
)
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.dsl.computation import Context, Record, Timer
from penstock.streams.rows.row_store import Changes
from penstock.streams.step.stateful import StatefulStep
from tests.streams.computations import (
    a_world,
    does,
    everything,
    records_of,
)
from tests.streams.step_world import REF, Event


@pytest.mark.parametrize(
    ("record", "error", "said"),
    [
        (lambda record, ctx: ctx.produce({"at": 1}, ts=record.ts - 1), ProductionRefused, "timestamp 99"),
        (lambda record, ctx: ctx.produce({"at": 1}, stream="none"), ProductionRefused, "'none'"),
        (lambda record, ctx: ctx.produce({"wrong": 1}), ProductionRefused, "wrong"),
        (lambda record, ctx: ctx.produce({"at": 1, "more": 1}), ProductionRefused, "more"),
        (lambda record, ctx: ctx.produce({"at": 1}, key=7), ProductionRefused, "7"),
        (lambda record, ctx: ctx.set_timer("t", 500, hold_ms=99), TimerRefused, "hold from 99"),
        (lambda record, ctx: ctx.set_timer(5, 500), TimerRefused, "a tag must be a string"),
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
