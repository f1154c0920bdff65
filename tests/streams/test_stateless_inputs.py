"""The stateless step with two inputs: crashes, zombies and twins at every point, the low of the slower input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest

from penstock.core.errors import Fenced, IntervalError
from penstock.jobs.tasks import stateless_producer
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, CategorySpec, Log
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.row_store import IntervalRef, IntervalRow, RowStore
from penstock.streams.step.stateful import InputRange, OutputSpec, open_interval
from penstock.streams.step.stateless import StatelessStep
from tests.streams.stateless_world import DEAD_COLUMNS
from tests.streams.step_world import LOG_EFFECTS, ROW_EFFECTS, Crash, Faulty, Points, crash, deaths, published

REF = IntervalRef(job="p.both", job_birth="j1", partition=0, birth="i1")
INPUTS = ("left", "right")
QUERY = (("query", "string"),)
# "bad" does not parse, "no" is filtered out, "two" makes two records.
LEFT = [("a", 100), ("bad", 150), ("two", 200)]
RIGHT = [("no", 60), ("two", 70), ("bad", 80), ("d", 90)]
KINDS = (
    ("_input", pa.int8()), ("_offset", pa.int64()), ("_ts", pa.int64()), ("_key", pa.string()),
    ("_late", pa.bool_()), ("query", pa.string()), ("_bad", pa.string()), ("_raw", pa.binary()),
)  # fmt: skip


@dataclass(slots=True)
class World:
    """Two sources with lows of their own, one interval that reads both, one sink and two for dead letters."""

    rows: RowStore
    log: Log
    clock_ms: int = 1_000_000

    def build(self) -> World:
        for name, records in zip(INPUTS, (LEFT, RIGHT), strict=True):
            self.log.create(CategorySpec(name=name, partitions=1, columns=QUERY))
            self.log.register_producer(name, "source")
            rows = {"_seq": range(1, len(records) + 1), "_ts": [ts for _, ts in records]}
            rows |= {"_key": [None] * len(records), "_late": [False] * len(records)}
            batch = pa.RecordBatch.from_pydict(
                {**rows, "query": [query for query, _ in records]},
                schema=self.log.describe(name).spec.schema(),
            )
            self.log.publish(name, producer="source", epoch=1, batches={0: batch}, gapless=True)
        self.log.create(CategorySpec(name="out", partitions=2, columns=QUERY))
        for name in ("dead", "dead.1"):
            self.log.create(CategorySpec(name=name, partitions=1, columns=DEAD_COLUMNS))
        self.rows.create(REF, offsets={self.birth(name): 0 for name in INPUTS}, low=LOW_MIN)
        for producer in self.producers.values():
            self.log.register_producer("out", producer)
        return self

    def low(self, name: str, low: int) -> None:
        self.clock_ms += 1000
        self.log.report_low(name, producer="source", epoch=1, low=low, now_ms=self.clock_ms)

    def birth(self, name: str) -> str:
        return self.log.describe(name).birth

    @property
    def producers(self) -> dict[str, str]:
        return {birth: stateless_producer("j1", birth, 0) for birth in map(self.birth, INPUTS)}

    def outputs(self) -> list[OutputSpec]:
        out = OutputSpec(stream="out", category="out", birth=self.birth("out"), partitions=2, columns=QUERY)
        dead = [
            replace(out, stream=n, category=n, birth=self.birth(n), partitions=1, columns=DEAD_COLUMNS, watermarked=False)
            for n in ("dead", "dead.1")
        ]  # fmt: skip
        return [out, *dead]

    def open(self) -> IntervalRow:
        return open_interval(
            ref=REF, generation=1, shard_epoch=1, producer_for=self.producers.__getitem__, rows=self.rows, log=self.log,
            outputs=self.outputs(),
        )  # fmt: skip

    def offsets(self) -> list[int]:
        found = self.rows.peek(REF).offsets
        return [found[self.birth(name)] for name in INPUTS]

    def run(self, token: int, starts: list[int], ends: list[int]) -> Any:
        self.clock_ms += 1000
        step = StatelessStep(
            ref=REF, token=token, producers=self.producers, rows=self.rows, log=self.log, outputs=self.outputs(),
            plan={}, plan_hash="h", package="p1",
        )  # fmt: skip
        spans = list(zip(INPUTS, starts, ends, strict=True))
        ranges = [
            InputRange(category=name, birth=self.birth(name), start=start, end=end, number=number)
            for number, (name, start, end) in enumerate(spans)
        ]
        if not step.begin(ranges):
            return step.already_done(now_ms=self.clock_ms)
        made = [row for number, span in enumerate(spans) for row in self._made(number, *span)]
        batch = pa.RecordBatch.from_pylist(made, schema=pa.schema(list(KINDS)))
        return step.finish([batch], now_ms=self.clock_ms)

    def _made(self, number: int, name: str, start: int, end: int) -> list[dict[str, Any]]:
        found = []
        rows = [row for batch in self.log.read(name, 0, start, end) for row in batch.to_pylist()]
        for offset, row in enumerate(rows, start):
            base = {"_input": number, "_offset": offset, "_ts": row["_ts"], "_late": False}
            if row["query"] == "bad":
                found.append({**base, "_bad": "no JSON", "_raw": b"{"})
            else:
                copies = {"no": 0, "two": 2}.get(row["query"], 1)
                found += [{**base, "_key": row["query"], "query": f"{row['query']}{number}"}] * copies
        return found

    def live(self, cut: int) -> None:
        """One life: own the interval, replay what was promised, then read each input by `cut` records."""
        row = self.open()
        at = [row.offsets[self.birth(name)] for name in INPUTS]
        if row.intent is not None:
            spans = [
                row.intent.ranges.get(self.birth(name)) or (at[n], at[n]) for n, name in enumerate(INPUTS)
            ]
            self.run(row.token, [start for start, _ in spans], [end for _, end in spans])
        ends = [self.log.end_offsets(name)[0] for name in INPUTS]
        turn = 0
        while (at := self.offsets()) != ends:
            # Now of one input, now of the other, now of both.
            wanted = [min(end, place + cut * ((turn + n) % 3 > 0)) for n, (place, end) in enumerate(zip(at, ends, strict=True))]  # fmt: skip
            self.run(row.token, at, wanted)
            turn += 1
        self.run(row.token, ends, ends)

    def result(self) -> dict[str, Any]:
        row = self.rows.peek(REF)
        return {
            "bus": {
                name: _bags(rows) for name, rows in published(self.log, ["out", "dead", "dead.1"]).items()
            },
            "offsets": self.offsets(),
            "lows": (row.input_low, row.output_low),
            "intent": row.intent,
            "counters": dict(row.counters),
            "reported": [self.log.producers("out")[producer] for producer in self.producers.values()],
        }


def _bags(partitions: Any) -> Any:
    """Records of two producers may come in any order between each other, never within one."""
    return {number: sorted(map(repr, rows)) for number, rows in partitions.items()}


def a_world() -> World:
    world = World(rows=MemoryRows(), log=MemoryLog()).build()
    world.low("left", 250)
    world.low("right", 85)
    return world


def faulty(world: World, points: Points) -> World:
    return replace(
        world,
        rows=Faulty(world.rows, ROW_EFFECTS, points),
        log=Faulty(world.log, LOG_EFFECTS, points),
        clock_ms=world.clock_ms + 1_000_000,
    )


def undisturbed() -> dict[str, Any]:
    world = a_world()
    world.live(2)
    return world.result()


def points_of(cut: int) -> int:
    points = Points()
    faulty(a_world(), points).live(cut)
    return points.passed


def test_all_records_of_both_inputs_come_out_once():
    result = undisturbed()
    rows = [row for rows in result["bus"]["out"].values() for row in rows]
    for query in ("a0", "two0", "two1", "d1"):
        assert sum(f"'{query}'" in row for row in rows) == (2 if "two" in query else 1)
    assert len(rows) == 6 and result["offsets"] == [3, 4]
    assert [sum(map(len, result["bus"][name].values())) for name in ("dead", "dead.1")] == [1, 1]
    assert result["counters"] == {"records": 7, "productions": 6, "bad": 2}


def test_the_low_is_that_of_the_slower_input():
    world = a_world()
    world.live(2)
    assert world.result()["lows"] == (85, 85) and world.result()["reported"] == [85, 85]
    world.low("right", LOW_MAX)
    world.live(2)
    assert world.result()["lows"] == (250, 250)


def test_a_replay_of_one_input_does_not_pass_the_low_of_the_other():
    """Life 1 promises a range of the left input alone and dies; its successor replays it."""
    world = a_world()
    token = world.open().token
    points = Points(1, crash)  # right after the promise
    with pytest.raises(Crash):
        faulty(world, points).run(token, [0, 0], [3, 0])
    intent = world.rows.peek(REF).intent
    assert intent is not None and list(intent.ranges) == [world.birth("left")]
    token = world.open().token
    world.run(token, [0, 0], [3, 0])
    assert world.offsets() == [3, 0] and world.rows.peek(REF).input_low == LOW_MIN


def test_every_pair_of_crashes_in_two_lives_changes_nothing():
    expected, pairs = undisturbed(), 0
    for first in deaths(points_of(2)):
        for second in deaths(1000):
            world = a_world()
            with pytest.raises(Crash):
                faulty(world, Points(first, crash)).live(2)
            points = Points(second, crash)
            try:
                faulty(world, points).live(3)
            except Crash:
                faulty(world, Points()).live(1)
                assert world.result() == expected, (first, second)
                pairs += 1
                continue
            assert points.passed <= second
            assert world.result() == expected, (first, second)
            break
    assert pairs > 100


def test_a_zombie_paused_at_every_point_changes_nothing():
    expected, count = undisturbed(), points_of(2)
    for at in range(count):
        world = a_world()
        try:
            faulty(world, Points(at, lambda world=world: faulty(world, Points()).live(3))).live(2)
        except Fenced:
            pass
        else:
            assert at in (0, count - 1), at
        assert world.result() == expected, at


def test_a_twin_at_every_point_changes_nothing():
    expected = undisturbed()
    for at in range(100):
        world = a_world()
        token = world.open().token
        twin = faulty(world, Points())
        points = Points(at, lambda twin=twin, token=token: twin.run(token, [0, 0], [3, 2]) and None)
        faulty(world, points).run(token, [0, 0], [3, 2])
        if points.passed <= at:
            break
        faulty(world, Points()).live(1)
        assert world.result() == expected, at
    assert at >= 8


def test_rows_of_an_input_beyond_its_own_range_are_refused():
    world = a_world()
    token = world.open().token
    step = StatelessStep(
        ref=REF, token=token, producers=world.producers, rows=world.rows, log=world.log, outputs=world.outputs(),
        plan={}, plan_hash="h", package="p1",
    )  # fmt: skip
    ranges = [
        InputRange(category=name, birth=world.birth(name), start=0, end=end, number=number)
        for number, (name, end) in enumerate(zip(INPUTS, (3, 1), strict=True))
    ]
    assert step.begin(ranges)
    rows = world._made(0, "left", 0, 3) + world._made(1, "right", 0, 3)
    with pytest.raises(IntervalError, match="outside of its ranges"):
        step.finish([pa.RecordBatch.from_pylist(rows, schema=pa.schema(list(KINDS)))], now_ms=1)
