"""A small world for the stateless step: a source, a plan that can change, drivers that live, die and come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from penstock.jobs.tasks import stateless_producer
from penstock.streams.bus.log import LOW_MIN, CategorySpec, Log
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.row_store import IntervalRef, IntervalRow, RowStore
from penstock.streams.step.stateful import InputRange, OutputSpec, open_interval
from penstock.streams.step.stateless import StatelessStep, pending_intent
from penstock.streams.step.watermark import event_time_lows
from tests.streams.step_world import LOG_EFFECTS, ROW_EFFECTS, Faulty, Points, published

REF = IntervalRef(job="z.by_query", job_birth="j1", partition=0, birth="i1")
DEAD_COLUMNS = (
    ("reason", "string"), ("value", "binary"), ("source_partition", "int"), ("source_offset", "bigint"),
)  # fmt: skip

# (text, event time): "bad" does not parse, "no" is filtered out, "two" makes two records.
SOURCE = [("a", 100), ("bad", 0), ("b", 300), ("two", 350), ("no", 5000), ("a", 400)]


@dataclass(slots=True)
class World:
    """A source, a job that upper-cases it in a way its plan says, and the outputs."""

    rows: RowStore
    log: Log
    suffix: str = ""  # the plan: what is appended to each query
    lateness_ms: int | None = 1000
    clock_ms: int = 1_000_000
    stops_at_poison: bool = False
    has_dead_letters: bool = True

    def build(self, source: list[tuple[str, int]] = SOURCE) -> World:
        self.log.create(CategorySpec(name="in", partitions=1, columns=(("query", "string"),)))
        self.log.register_producer("in", "source")
        self.log.create(CategorySpec(name="out", partitions=2, columns=(("query", "string"),)))
        self.log.create(CategorySpec(name="dead", partitions=1, columns=DEAD_COLUMNS))
        self.rows.create(REF, offsets={self.birth("in"): 0}, low=LOW_MIN)
        self.log.register_producer("out", self.producer)
        for number, (query, ts) in enumerate(source):
            self.add(number, query, ts)
        return self

    def add(self, number: int, query: str, ts: int) -> None:
        batch = pa.RecordBatch.from_pydict(
            {"_seq": [number + 1], "_ts": [ts], "_key": [None], "_late": [False], "query": [query]},
            schema=self.log.describe("in").spec.schema(),
        )
        self.log.publish("in", producer="source", epoch=1, batches={0: batch}, gapless=True)

    def birth(self, category: str) -> str:
        return self.log.describe(category).birth

    @property
    def producer(self) -> str:
        return stateless_producer(REF.job_birth, self.birth("in"), REF.partition)

    def outputs(self) -> list[OutputSpec]:
        out = OutputSpec(
            stream="out",
            category="out",
            birth=self.birth("out"),
            partitions=2,
            columns=(("query", "string"),),
        )
        dead = OutputSpec(
            stream="dead",
            category="dead",
            birth=self.birth("dead"),
            partitions=1,
            columns=DEAD_COLUMNS,
            watermarked=False,
        )
        return [out, dead] if self.has_dead_letters else [out]

    def open(self) -> IntervalRow:
        return open_interval(
            ref=REF,
            generation=1,
            shard_epoch=1,
            producer_for={self.birth("in"): self.producer}.__getitem__,
            rows=self.rows,
            log=self.log,
            outputs=self.outputs(),
        )

    def step(self, token: int, suffix: str | None = None) -> StatelessStep:
        plan = {"suffix": self.suffix if suffix is None else suffix}
        return StatelessStep(
            ref=REF,
            token=token,
            producers={self.birth("in"): self.producer},
            rows=self.rows,
            log=self.log,
            outputs=self.outputs(),
            plan=plan,
            plan_hash=f"hash of {plan}",
            package="p1",
            lateness={} if self.lateness_ms is None else {self.birth("in"): self.lateness_ms},
            stops_at_poison=self.stops_at_poison,
        )

    def range(self, start: int, end: int) -> tuple[InputRange, ...]:
        return (InputRange(category="in", birth=self.birth("in"), start=start, end=end),)

    def made(self, start: int, end: int, suffix: str) -> tuple[list[pa.RecordBatch], Mapping[str, int]]:
        """What the engine would make of a range: a function of range and plan, and of the rows' running maximum."""
        rows = [row for batch in self.log.read("in", 0, start, end) for row in batch.to_pylist()]
        seen = self.rows.peek(REF).event_time_max.get(self.birth("in"), LOW_MIN)
        out: list[dict[str, Any]] = []
        for offset, row in enumerate(rows, start):
            query, blank = row["query"], {"_bad": None, "_raw": None}
            if query == "bad":
                out.insert(0, _dead(offset))  # as a source does: what does not parse comes first
                continue
            (low,), seen = event_time_lows([row["_ts"]], seen, self.lateness_ms or 0)
            late = row["_ts"] < low
            values = [] if query == "no" else [query, query] if query == "two" else [query]
            out += [
                {
                    "_offset": offset,
                    "_ts": row["_ts"],
                    "_key": v,
                    "_late": bool(late),
                    "query": v + suffix,
                    **blank,
                }
                for v in values
            ]
        kinds = [
            ("_offset", pa.int64()), ("_ts", pa.int64()), ("_key", pa.string()), ("_late", pa.bool_()),
            ("query", pa.string()), ("_bad", pa.string()), ("_raw", pa.binary()),
        ]  # fmt: skip
        return [pa.RecordBatch.from_pylist(out, schema=pa.schema(kinds))], {self.birth("in"): seen}

    def run(self, token: int, start: int, end: int, suffix: str | None = None) -> Any:
        self.clock_ms += 1000
        step = self.step(token, suffix)
        if not step.begin(self.range(start, end)):
            return step.already_done(now_ms=self.clock_ms)
        batches, seen = self.made(start, end, self.suffix if suffix is None else suffix)
        return step.finish(batches, event_time_max=seen, now_ms=self.clock_ms)

    def position(self) -> int:
        return self.rows.peek(REF).offsets[self.birth("in")]

    def live(self, cuts: list[int]) -> None:
        """One life: own the interval, replay what was promised with its own plan, then go on with ours."""
        row = self.open()
        intent = pending_intent(row)
        if intent is not None:
            ((start, end),) = intent.ranges.values()
            self.run(row.token, start, end, intent.plan["suffix"])
        end = self.log.end_offsets("in")[0]
        for turn in range(100):
            position = self.position()
            if position >= end:
                break
            self.run(row.token, position, min(end, position + cuts[turn % len(cuts)]))
        self.run(row.token, end, end)

    def result(self) -> dict[str, Any]:
        row = self.rows.peek(REF)
        return {
            "bus": published(self.log, ["out", "dead"]),
            "offset": self.position(),
            "lows": (row.input_low, row.output_low),
            "seen": list(row.event_time_max.values()),
            "intent": row.intent,
            "counters": dict(row.counters),
            "reported": self.log.producers("out")[self.producer],
        }


def _dead(offset: int) -> dict[str, Any]:
    return {
        "_offset": offset, "_ts": None, "_key": None, "_late": None, "query": None, "_bad": "no JSON", "_raw": b"{",
    }  # fmt: skip


def a_world(**others: Any) -> World:
    return World(rows=MemoryRows(), log=MemoryLog(), **others).build()


def faulty(world: World, points: Points, suffix: str = "") -> World:
    return replace(
        world,
        rows=Faulty(world.rows, ROW_EFFECTS, points),
        log=Faulty(world.log, LOG_EFFECTS, points),
        suffix=suffix,
        clock_ms=world.clock_ms + 1_000_000,
    )


def outputs_of(world: World) -> list[str]:
    found = published(world.log, ["out"])["out"]
    rows = sorted((row for rows in found.values() for row in rows), key=lambda row: row["_seq"])
    return [row["query"] for row in rows]


def undisturbed() -> dict[str, Any]:
    world = a_world()
    world.live([100])
    return world.result()
