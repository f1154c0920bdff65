"""Computations that do what a test wants, and the shortest way to run and read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.streams.bus.memory import MemoryLog
from penstock.streams.dsl.computation import Computation, Context, Record, Timer, Value
from penstock.streams.rows.memory import MemoryRows
from tests.streams.step_world import SMALL_LOG, Event, World, published

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


class Forgets(Computation):
    outputs = {"out": {"query": "string", "second": "bigint", "n": "bigint"}, "seen": {"at": "bigint"}}
    counts = Value(dict[int, int])

    def process_record(self, record: Record, ctx: Context) -> None:
        ctx.state.counts[1] = 1
        ctx.set_timer("t", record.ts + 1)

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        del ctx.state.counts[1]


class ProcessesLate(Forgets):
    late = "process"

    def process_record(self, record: Record, ctx: Context) -> None:
        second = record.ts // 1000
        ctx.state.counts[second] = ctx.state.counts.get(second, 0) + 1
        ctx.set_timer(str(second), (second + 1) * 1000)

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        second = int(timer.tag)
        ctx.produce({"query": ctx.key, "second": second, "n": ctx.state.counts.pop(second)})


class Does(Computation):
    """Whatever a test wants it to do with a record, or with a timer."""

    outputs = {"out": {"at": "bigint"}}
    on_record: Any = staticmethod(lambda record, ctx: None)
    on_timer: Any = staticmethod(lambda timer, ctx: None)

    def process_record(self, record: Record, ctx: Context) -> None:
        type(self).on_record(record, ctx)

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        type(self).on_timer(timer, ctx)


def does(events: Sequence[Event], record: Any, timer: Any = lambda timer, ctx: None) -> World:
    kind = type("Does", (Does,), {"on_record": staticmethod(record), "on_timer": staticmethod(timer)})
    return a_world(events, computation=kind, columns=SEEN)


class DropsLate(ProcessesLate):
    late = "drop"
