"""Timers by the clock: with or without records, once, in order, through crashes and twins, on every store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import testing
from penstock.core.errors import ComputationFailed
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.dsl.computation import Computation, Context, Record, Timer, Value
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.sqlite import SqliteRows
from penstock.streams.step.keyed_work import KeyedWork
from penstock.streams.trial.run import Schedule
from tests.streams.step_world import REF, Crash, Points, World, crash, deaths, faulty, published

FIRED = {"out": {"tag": "string", "at": "bigint", "now": "bigint", "wall": "boolean"}}


class Reminds(Computation):
    """A wall timer `wait` ms after the step that saw the record; a second record puts it off."""

    outputs = FIRED
    asked = Value(int)
    wait = 1000

    def process_record(self, record: Record, ctx: Context) -> None:
        ctx.state.asked += 1
        ctx.set_wall_timer("remind", ctx.now + self.wait)

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        ctx.produce({"tag": timer.tag, "at": timer.at_ms, "now": ctx.now, "wall": timer.wall})


class RemindsLater(Reminds):
    wait = 1500


def doing(record: Any, timer: Any = None) -> Computation:
    def told(timer: Timer, ctx: Context) -> None:
        ctx.produce({"tag": timer.tag, "at": timer.at_ms, "now": ctx.now, "wall": timer.wall})

    hooks = {
        "outputs": FIRED,
        "process_record": lambda self, given, ctx: record(given, ctx),
        "process_timer": lambda self, given, ctx: (timer or told)(given, ctx),
    }
    made: Computation = type("Doing", (Computation,), hooks)()
    return made


def tags(run: testing.Run) -> list[str]:
    return [row["tag"] for row in run.outputs()]


def test_a_wall_timer_fires_by_the_clock_without_any_record_and_once() -> None:
    run = testing.Run(Reminds())
    run.advance_clock(5_000)
    run.record("a", 1)
    assert [(timer.at_ms, timer.wall) for timer in run.timers("a")] == [(6_000, True)]
    run.advance_clock(5_999)
    assert run.outputs() == []
    run.advance_clock(6_200)
    assert run.outputs() == [{"tag": "remind", "at": 6_000, "now": 6_200, "wall": True}]
    assert run.timers("a") == []
    run.advance_clock(90_000)
    run.close()
    assert len(run.outputs()) == 1


def test_setting_again_replaces_and_deleting_forgets_whatever_the_kind() -> None:
    def act(record: Record, ctx: Context) -> None:
        match record["do"]:
            case "wall":
                ctx.set_wall_timer("t", 100)
            case "put off":
                ctx.set_wall_timer("t", 200)
            case "low":
                ctx.set_timer("t", 5_000)
            case "delete":
                ctx.delete_timer("t")

    for calls, expected in [
        (["wall", "put off"], [(200, True)]),
        (["put off", "wall"], [(100, True)]),
        (["wall", "low"], [(5_000, False)]),
        (["low", "wall"], [(100, True)]),
        (["wall", "delete"], []),
        (["low", "delete", "put off"], [(200, True)]),
    ]:
        run = testing.Run(doing(act))
        for call in calls:
            run.record("a", 1, do=call)
        assert [(timer.at_ms, timer.wall) for timer in run.timers("a")] == expected, calls
        run.advance_clock(1_000)
        run.close()
        assert [(row["at"], row["wall"]) for row in run.outputs()] == expected, calls


def test_they_fire_in_the_order_of_time_key_and_tag_before_the_records_of_the_step() -> None:
    def act(record: Record, ctx: Context) -> None:
        if record["text"] == "set":
            for tag, at in (("y", 30), ("x", 30), ("late", 40), ("early", 10)):
                ctx.set_wall_timer(f"{ctx.key}-{tag}", at)
        else:
            ctx.produce({"tag": "record", "at": 0, "now": ctx.now, "wall": False})

    run = testing.Run(doing(act))
    run.prepare(Schedule(settles=frozenset()), run.trial.faults)
    run.record("b", 1, text="set")
    run.record("a", 1, text="set")
    run.trial.settle()
    run.record("a", 2, text="look")
    run.trial.now_ms = 35
    assert tags(run) == ["a-early", "b-early", "a-x", "a-y", "b-x", "b-y", "record"]


def test_a_timer_set_at_or_before_now_fires_next_in_the_same_step() -> None:
    def act(record: Record, ctx: Context) -> None:
        ctx.set_wall_timer("first", ctx.now)
        ctx.set_timer("low", -5)

    def again(timer: Timer, ctx: Context) -> None:
        ctx.produce({"tag": timer.tag, "at": timer.at_ms, "now": ctx.now, "wall": timer.wall})
        if timer.tag == "first":
            ctx.set_wall_timer("second", ctx.now - 5)

    run = testing.Run(doing(act, again))
    run.advance_watermark(0)
    run.record("a", 1)
    assert tags(run) == ["low", "first", "second"]


def test_timers_that_are_always_due_are_refused() -> None:
    def again(timer: Timer, ctx: Context) -> None:
        ctx.set_wall_timer("t", ctx.now)

    work = KeyedWork(doing(None, again), job="j", low=0, now_ms=5, timers_max=100)
    work.set_wall_timer("a", "t", 5, floor=0)
    with pytest.raises(ComputationFailed, match="or before now fired 100 times"):
        work.run([], [], [])


def test_productions_are_stamped_with_the_low_at_firing_and_nothing_is_held_back() -> None:
    run = testing.Run(Reminds())
    run.record("a", 700)
    run.advance_watermark(500)
    assert run.low_watermark == 500
    run.advance_watermark(50_000)
    assert run.low_watermark == 50_000, "a wall timer holds nothing"
    run.advance_clock(2_000)
    (made,) = run.productions()
    assert (made.ts, made.late) == (50_000, False)

    unknown = testing.Run(Reminds())
    unknown.record("a", 700)
    unknown.advance_clock(2_000)
    assert [made.ts for made in unknown.productions()] == [700], (
        "as long as no low is known: its record's time"
    )

    early = testing.Run(
        doing(lambda r, ctx: ctx.set_wall_timer("t", 1), lambda t, ctx: ctx.produce({}, ts=499))
    )
    early.record("a", 1)
    early.advance_watermark(500)
    with pytest.raises(ComputationFailed, match="before 500"):
        early.advance_clock(10)


def test_a_crash_after_every_effect_and_other_cuts_change_nothing() -> None:
    def script(run: testing.Run) -> None:
        run.record("a", 100)
        run.record("b", 200)
        run.advance_clock(500)
        run.record("a", 300)
        run.advance_watermark(1000)
        run.advance_clock(1_200)
        run.record("b", 1500)
        run.advance_clock(2_600)

    crashed = testing.crash_everywhere(Reminds, script)
    assert crashed.runs > 30
    assert crashed.result == testing.cut_everywhere(Reminds, script).result
    assert [made.values["at"] for made in crashed.result["stream 'out', key 'b'"]] == [1000, 2200]
    assert [made.values["at"] for made in crashed.result["stream 'out', key 'a'"]] == [1500]


def stores(folder: Path) -> dict[str, Callable[[], Any]]:
    return {"memory": MemoryRows, "sqlite": lambda: SqliteRows(folder / "rows")}


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_the_step_fires_wall_timers_once_on_every_store_through_a_crash_at_every_point(
    tmp_path: Path, store: str
) -> None:
    """The world's clock rises by a second with each step: two records, then idle steps until all have fired."""

    def built(name: str) -> World:
        folder = tmp_path / name
        folder.mkdir()
        columns = {"out": tuple(FIRED["out"].items())}
        world = World(rows=stores(folder)[store](), log=MemoryLog(), computation=Reminds, columns=columns)
        return world.build([("a", 100), ("b", 200), 1000])

    def live(world: World) -> None:
        world.live([1])
        step, end = world.step(world.rows.peek(REF).token), world.log.end_offsets("in")[0]
        for _ in range(3):
            world.run(step, end, end)

    def fired(world: World) -> list[tuple[str, str, int]]:
        rows = [row for rows in published(world.log, ["out"])["out"].values() for row in rows]
        return sorted((row["_key"], row["tag"], row["_ts"]) for row in rows)

    points = Points()
    live(faulty(built("count"), points))
    for at in deaths(points.passed):
        world = built(str(at))
        with pytest.raises(Crash):
            live(faulty(world, Points(at, crash)))
        live(faulty(world, Points()))
        assert [(key, tag) for key, tag, _ in fired(world)] == [("a", "remind"), ("b", "remind")], at
        assert {ts for _, _, ts in fired(world)} <= {100, 200, 1000}, at
        row = world.rows.peek(REF)
        left = world.rows.snapshot(REF, token=row.token, keys=(), timers_up_to=10**12, wall_up_to=10**12)
        assert (left.timers, left.outbox, row.counters["timers"]) == ((), (), 2), at
        world.check_marks()


def test_a_twin_at_every_point_of_a_step_of_wall_timers_alone_changes_nothing() -> None:
    at = 0
    while True:
        columns = {"out": tuple(FIRED["out"].items())}
        world = World(rows=MemoryRows(), log=MemoryLog(), computation=RemindsLater, columns=columns)
        world.build([("a", 100), 1000]).live([1])
        token = world.rows.peek(REF).token
        twin = faulty(world, Points())
        points = Points(at, lambda twin=twin, token=token: twin.run(twin.step(token), 1, 1))
        slow = faulty(world, points)
        slow.run(slow.step(token), 1, 1)
        last = faulty(world, Points())
        last.run(last.step(token), 1, 1)
        rows = [row for rows in published(world.log, ["out"])["out"].values() for row in rows]
        assert [row["tag"] for row in rows] == ["remind"], at
        if points.passed <= at:
            break
        at += 1
    assert at >= 4
