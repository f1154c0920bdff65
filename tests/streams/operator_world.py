"""A small world for windows and joins: logs with marks, steps cut anywhere, drivers that die and come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.streams.bus.log import ARROW_TYPES, LOW_MIN, CategorySpec, Log
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.row_store import IntervalRef, RowStore
from penstock.streams.step.keyed_work import StepLogic
from penstock.streams.step.stateful import InputRange, OutputSpec, StateCache, StatefulStep, open_interval
from tests.contracts.intervals import full_count, said
from tests.streams.step_world import LOG_EFFECTS, ROW_EFFECTS, Crash, Faulty, Points, crash, published

REF = IntervalRef(job="w.aggregate", job_birth="j1", partition=0, birth="i1")
Columns = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rec:
    """One record of an input. `promised`: behind the low its source has told, and yet not flagged."""

    key: str
    ts: int
    values: tuple[Any, ...] = ()
    input: int = 0
    promised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Low:
    """The source of an input promises that nothing on time comes before this."""

    low: int
    input: int = 0


Event = Rec | Low


@dataclass(slots=True)
class OperatorWorld:
    """Rows, log, the categories, and the logic between them."""

    logic: Callable[[], StepLogic]
    inputs: tuple[Columns, ...]
    out: Columns
    rows: RowStore = field(default_factory=MemoryRows)
    log: Log = field(default_factory=MemoryLog)
    partitions: int = 2
    clock_ms: int = 1_000_000
    cache: StateCache | None = None
    _seq: int = 0

    def build(self, events: Sequence[Event]) -> OperatorWorld:
        for number, columns in enumerate(self.inputs):
            self.log.create(CategorySpec(name=f"in{number}", partitions=1, columns=columns))
            self.log.register_producer(f"in{number}", "source")
        self.log.create(CategorySpec(name="out", partitions=self.partitions, columns=self.out))
        self.log.register_producer("out", REF.birth)
        self.rows.create(
            REF, offsets={self._birth(f"in{n}"): 0 for n in range(len(self.inputs))}, low=LOW_MIN
        )
        for event in events:
            self._append(event)
        return self

    def open(self) -> StatefulStep:
        """Own the interval."""
        outputs = [
            OutputSpec(
                stream="out",
                category="out",
                birth=self._birth("out"),
                partitions=self.partitions,
                columns=self.out,
            )
        ]
        row = open_interval(
            ref=REF,
            generation=1,
            shard_epoch=1,
            producer_for=lambda birth: REF.birth,
            rows=self.rows,
            log=self.log,
            outputs=outputs,
        )
        return StatefulStep(
            ref=REF,
            token=row.token,
            rows=self.rows,
            log=self.log,
            outputs=outputs,
            computation=self.logic(),
            cache=self.cache,
        )

    def live(self, cuts: Sequence[int]) -> None:
        """One life of a driver: own the interval, read all inputs in steps of these sizes, then once more."""
        step = self.open()
        ends = [self.log.end_offsets(f"in{n}")[0] for n in range(len(self.inputs))]
        for turn in range(10_000):
            stands = [self.rows.peek(REF).offsets[self._birth(f"in{n}")] for n in range(len(self.inputs))]
            size = cuts[turn % len(cuts)]
            self.step(step, stands, [min(end, at + size) for at, end in zip(stands, ends, strict=True)])
            if stands == ends:
                break

    def out_rows(self) -> list[dict[str, Any]]:
        """All results, partition by partition, without what only the bus needs."""
        found = published(self.log, ["out"])["out"]
        return [
            {name: value for name, value in row.items() if name != "_seq"}
            for partition in sorted(found)
            for row in found[partition]
        ]

    def result(self) -> dict[str, Any]:
        """All that must be the same however the work was cut and repeated."""
        row = self.rows.peek(REF)
        return {
            "out": self.out_rows(),
            "lows": (row.input_low, row.output_low),
            "counters": {name: row.counters.get(name, 0) for name in ("records", "late", "productions")},
        }

    def check_marks(self) -> None:
        """No result on time lies behind a mark that came before it."""
        for partition, records in published(self.log, ["out"])["out"].items():
            for mark in self.log.marks("out", partition, above=LOW_MIN, up_to=10**9):
                behind = [r for r in records[mark.end :] if r["_ts"] < mark.low and not r["_late"]]
                assert not behind, (partition, mark, behind)

    def faulty(self, points: Points) -> OperatorWorld:
        """The same rows and log, seen through faults."""
        return OperatorWorld(
            logic=self.logic,
            inputs=self.inputs,
            out=self.out,
            rows=Faulty(self.rows, ROW_EFFECTS, points),
            log=Faulty(self.log, LOG_EFFECTS, points),
            partitions=self.partitions,
            clock_ms=self.clock_ms + 1_000_000,
            cache=self.cache,
        )

    def live_and_die(self, cuts: Sequence[int], at: int) -> None:
        """A life that ends at one of its effects, if it gets there."""
        with suppress(Crash):
            self.faulty(Points(at, crash)).live(cuts)

    def step(self, step: StatefulStep, starts: Sequence[int], ends: Sequence[int]) -> None:
        """One step over these ranges of the inputs."""
        self.clock_ms += 1000
        ranges = tuple(
            InputRange(category=f"in{n}", birth=self._birth(f"in{n}"), start=starts[n], end=ends[n], number=n)
            for n in range(len(self.inputs))
        )
        batches = [batch for n in range(len(self.inputs)) for batch in self._read(n, starts[n], ends[n])]
        step.run(ranges, batches, now_ms=self.clock_ms)
        if isinstance(self.rows, MemoryRows):  # whatever a test is about: what is kept is counted
            assert said(self.rows.peek(REF).kept) == full_count(self.rows, REF)

    def _read(self, number: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
        every = dict(column for columns in self.inputs for column in columns)
        offset = start
        for batch in self.log.read(f"in{number}", 0, start, end):
            count = batch.num_rows
            columns = {
                "_input": pa.array([number] * count, pa.int8()),
                "_offset": pa.array(range(offset, offset + count), pa.int64()),
                **{name: batch.column(name) for name in ("_ts", "_key", "_late")},
                **{
                    name: batch.column(name)
                    if name in batch.schema.names
                    else pa.nulls(count, ARROW_TYPES[kind])
                    for name, kind in every.items()
                },
            }
            offset += count
            yield pa.RecordBatch.from_pydict(columns)

    def _append(self, event: Event) -> None:
        self.clock_ms += 1000
        name = f"in{event.input}"
        if isinstance(event, Low):
            self.log.report_low(name, producer="source", epoch=1, low=event.low, now_ms=self.clock_ms)
            return
        self._seq += 1
        late = event.ts < self.log.watermark(name) and not event.promised
        own = {c: [v] for (c, _), v in zip(self.inputs[event.input], event.values, strict=True)}
        batch = pa.RecordBatch.from_pydict(
            {"_seq": [self._seq], "_ts": [event.ts], "_key": [event.key], "_late": [late], **own},
            schema=self.log.describe(name).spec.schema(),
        )
        self.log.publish(name, producer="source", epoch=1, batches={0: batch}, gapless=False)

    def _birth(self, category: str) -> str:
        return self.log.describe(category).birth
