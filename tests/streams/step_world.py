"""A small world for the step: a log with marks, a count per key and second, drivers that live, die and come back."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.streams.bus.log import LOW_MAX, LOW_MIN, CategorySpec, Log
from penstock.streams.dsl.computation import Computation, Context, Record, Timer, Value
from penstock.streams.rows.row_store import IntervalRef, RowStore, TimerRow
from penstock.streams.step.stateful import (
    CachedStates,
    InputRange,
    OutputSpec,
    SharedChanges,
    StateCache,
    StatefulStep,
    open_interval,
)
from tests.contracts.intervals import full_count, said

REF = IntervalRef(job="z.count", job_birth="j1", partition=0, birth="i1")
IN_COLUMNS = (("query", "string"),)
OUT_COLUMNS = (("query", "string"), ("second", "bigint"), ("n", "bigint"))
OUT_PARTITIONS = 2

# A log is a list of records (key, ts) and of lows, in the order in which they reach the bus.
Event = tuple[str, int] | int
SMALL_LOG: tuple[Event, ...] = (
    ("a", 100), ("b", 300), 0, ("a", 900), ("a", 1100), 1000, ("b", 1500), 2000, ("c", 2100), LOW_MAX,
)  # fmt: skip


@cache
def _all_news() -> Path:
    folder = Path(tempfile.mkdtemp(dir=fastest_folder()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_numbers = itertools.count()


def news_folder() -> Path:
    """A new one, gone with this process."""
    return _all_news() / str(next(_numbers))


class WorkersInTurn:
    """Workers of one machine, each with a cache of its own: steps go to one after another, as with Spark."""

    def __init__(self, bytes_max: int, *, count: int = 3) -> None:
        news = SharedChanges(news_folder(), bytes_max)
        self._caches, self._turn = [StateCache(bytes_max, news) for _ in range(count)], 0

    def take(self, ref: IntervalRef) -> CachedStates:
        self._turn += 1
        return self._of_turn().take(ref)

    def put_back(self, ref: IntervalRef, known: CachedStates) -> None:
        self._of_turn().put_back(ref, known)

    def _of_turn(self) -> StateCache:
        return self._caches[self._turn % len(self._caches)]


class CountPerSecond(Computation):
    """Counts per key and second; also tells of every record at once."""

    outputs = {"out": dict(OUT_COLUMNS), "seen": {"at": "bigint"}}
    counts = Value(dict[int, int])
    total = Value(int)

    def process_record(self, record: Record, ctx: Context) -> None:
        second = record.ts // 1000
        ctx.state.counts[second] = ctx.state.counts.get(second, 0) + 1
        ctx.state.total += 1
        ctx.set_timer(str(second), (second + 1) * 1000)
        ctx.produce({"at": record.ts}, stream="seen")

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        second = int(timer.tag)
        ctx.produce({"query": ctx.key, "second": second, "n": ctx.state.counts.pop(second)})


@dataclass(slots=True)
class World:
    """Rows, log and the categories between them."""

    rows: RowStore
    log: Log
    computation: Callable[[], Computation] = CountPerSecond
    columns: Mapping[str, tuple[tuple[str, str], ...]] = field(
        default_factory=lambda: {"out": OUT_COLUMNS, "seen": (("at", "bigint"),)}
    )
    clock_ms: int = 1_000_000  # rises far enough between two reports for a mark each
    cache: StateCache | WorkersInTurn | None = None
    _seq: int = 0

    def build(self, events: Sequence[Event] = ()) -> World:
        self.log.create(CategorySpec(name="in", partitions=1, columns=IN_COLUMNS))
        self.log.register_producer("in", "source")
        for stream, columns in self.columns.items():
            self.log.create(CategorySpec(name=stream, partitions=OUT_PARTITIONS, columns=columns))
            self.log.register_producer(stream, REF.birth)
        self.rows.create(REF, offsets={self.birth("in"): 0}, low=LOW_MIN)
        self.append(events)
        return self

    def append(self, events: Sequence[Event]) -> None:
        for event in events:
            self.clock_ms += 1000
            if isinstance(event, int):
                self.log.report_low("in", producer="source", epoch=1, low=event, now_ms=self.clock_ms)
                continue
            key, ts = event
            # Late is decided where a record enters: behind the low that the source has already announced.
            late = ts < self.log.watermark("in")
            self._seq += 1
            batch = pa.RecordBatch.from_pydict(
                {"_seq": [self._seq], "_ts": [ts], "_key": [key], "_late": [late], "query": [key]},
                schema=self.log.describe("in").spec.schema(),
            )
            self.log.publish("in", producer="source", epoch=1, batches={0: batch}, gapless=True)

    def birth(self, category: str) -> str:
        return self.log.describe(category).birth

    def outputs(self) -> list[OutputSpec]:
        return [
            OutputSpec(
                stream=stream,
                category=stream,
                birth=self.birth(stream),
                partitions=OUT_PARTITIONS,
                columns=columns,
            )
            for stream, columns in self.columns.items()
        ]

    def open(self, *, generation: int = 1, shard_epoch: int = 1) -> StatefulStep:
        row = open_interval(
            ref=REF,
            generation=generation,
            shard_epoch=shard_epoch,
            producer_for=lambda birth: REF.birth,
            rows=self.rows,
            log=self.log,
            outputs=self.outputs(),
        )
        return self.step(row.token)

    def step(self, token: int) -> StatefulStep:
        return StatefulStep(
            ref=REF,
            token=token,
            rows=self.rows,
            log=self.log,
            outputs=self.outputs(),
            computation=self.computation(),
            cache=self.cache,
        )

    def input(self, start: int, end: int) -> tuple[tuple[InputRange, ...], Iterator[pa.RecordBatch]]:
        ranges = (InputRange(category="in", birth=self.birth("in"), start=start, end=end),)
        return ranges, self.read(start, end)

    def read(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        offset = start
        for batch in self.log.read("in", 0, start, end):
            count = batch.num_rows
            columns = {
                "_input": pa.array([0] * count, pa.int8()),
                "_offset": pa.array(range(offset, offset + count), pa.int64()),
                **{name: batch.column(name) for name in ("_ts", "_key", "_late", "query")},
            }
            offset += count
            yield pa.RecordBatch.from_pydict(columns)

    def run(self, step: StatefulStep, start: int, end: int) -> Any:
        self.clock_ms += 1000
        ranges, batches = self.input(start, end)
        return step.run(ranges, batches, now_ms=self.clock_ms)

    def position(self) -> int:
        return self.rows.peek(REF).offsets[self.birth("in")]

    def live(self, cuts: Sequence[int]) -> None:
        """One life of a driver: own the interval, run to the end of the input in steps of these sizes."""
        step = self.open()
        end = self.log.end_offsets("in")[0]
        for turn in range(1000):
            position = self.position()
            if position >= end:
                break
            self.run(step, position, min(end, position + cuts[turn % len(cuts)]))
        self.run(step, end, end)

    def result(self) -> dict[str, Any]:
        """All that must be the same however the work was cut off and repeated."""
        row = self.rows.peek(REF)
        assert said(row.kept) == full_count(self.rows, REF)
        stored = self.rows.snapshot(REF, token=row.token, keys=["a", "b", "c", "d"], timers_up_to=LOW_MAX)
        timers: tuple[TimerRow, ...] = stored.timers
        names = {self.birth(category): category for category in ("in", *self.columns)}
        return {
            "out": published(self.log, list(self.columns)),
            "states": dict(stored.states),
            "timers": timers,
            "outbox": stored.outbox,
            "offsets": {names[birth]: offset for birth, offset in row.offsets.items()},
            "lows": (row.input_low, row.output_low),
            "counters": dict(row.counters),
            "next_seq": {
                (names[at.split(":")[0]], at.split(":")[1]): seq for at, seq in row.next_seq.items()
            },
            "reported": {stream: self.log.producers(stream)[REF.birth] for stream in self.columns},
        }

    def check_marks(self) -> None:
        """No record on time lies behind a mark that came before it."""
        for stream in self.columns:
            for partition, records in published(self.log, [stream])[stream].items():
                for mark in self.log.marks(stream, partition, above=LOW_MIN, up_to=10**9):
                    behind = [r for r in records[mark.end :] if r["_ts"] < mark.low and not r["_late"]]
                    assert not behind, (stream, partition, mark, behind)


def published(log: Log, categories: Sequence[str]) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Everything on the bus, per category and partition, in order."""
    return {
        name: {
            partition: [row for batch in log.read(name, partition, 0, end) for row in batch.to_pylist()]
            for partition, end in enumerate(log.end_offsets(name))
        }
        for name in categories
    }


def fastest_folder() -> Path | None:
    """A disk in memory if there is one: a killed process leaves the page cache as it is, so fsync decides nothing."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else None


class Crash(BaseException):
    """A process that is gone: nothing in the code may catch it."""


ROW_EFFECTS = frozenset({"acquire", "commit", "delivered", "fence"})
LOG_EFFECTS = frozenset({"publish", "report_low", "fence"})


class Faulty:
    """Passes every call on; before and after each effect it calls `at(index)`, index counting both."""

    def __init__(self, inner: Any, effects: frozenset[str], points: Points) -> None:
        self._inner, self._effects, self._points = inner, effects, points

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)
        if name not in self._effects:
            return call

        def faulty(*args: Any, **kwargs: Any) -> Any:
            self._points.next()
            result = call(*args, **kwargs)
            self._points.next()
            return result

        return faulty


class Points:
    """Counts the points passed, and does something at one of them, once."""

    def __init__(self, at: int = -1, act: Callable[[], None] | None = None) -> None:
        self.passed, self._at, self._act = 0, at, act

    def next(self) -> None:
        index, self.passed = self.passed, self.passed + 1
        if index == self._at and self._act is not None:
            self._act()


def deaths(count: int) -> list[int]:
    """The points at which to die. Between one effect and the next there are only reads, so dying after the one is
    dying before the other. (A pause is another matter: reads may come before or after it.)
    """
    return [0, *range(1, count, 2)]


def crash() -> None:
    raise Crash


def faulty(world: World, points: Points) -> World:
    """The same rows and log, seen through faults."""
    return World(
        rows=Faulty(world.rows, ROW_EFFECTS, points),
        log=Faulty(world.log, LOG_EFFECTS, points),
        computation=world.computation,
        columns=world.columns,
        clock_ms=world.clock_ms + 1_000_000,
        cache=world.cache,
    )
