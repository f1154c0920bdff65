"""The stateless step: the promise, the publish, the commit; crashes, zombies, twins and a changed plan in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest

from penstock.core.errors import Fenced, IntentStands, IntervalError, OffsetAhead, RowsOlderThanBus
from penstock.jobs.births import stateless_producer
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, CategorySpec, Log
from penstock.streams.bus.memory_log import MemoryLog
from penstock.streams.interval import InputRange, OutputSpec, open_interval
from penstock.streams.rows.memory_rows import MemoryRows
from penstock.streams.rows.row_store import IntervalRef, IntervalRow, RowStore
from penstock.streams.stateless import StatelessStep, pending_intent
from penstock.streams.watermark import event_time_lows
from tests.streams.step_world import LOG_EFFECTS, ROW_EFFECTS, Crash, Faulty, Points, crash, deaths, published

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
        return [out, dead]

    def open(self) -> IntervalRow:
        return open_interval(
            ref=REF,
            generation=1,
            shard_epoch=1,
            producer=self.producer,
            rows=self.rows,
            log=self.log,
            outputs=self.outputs(),
        )

    def step(self, token: int, suffix: str | None = None) -> StatelessStep:
        plan = {"suffix": self.suffix if suffix is None else suffix}
        return StatelessStep(
            ref=REF,
            token=token,
            producer=self.producer,
            rows=self.rows,
            log=self.log,
            outputs=self.outputs(),
            plan=plan,
            plan_hash=f"hash of {plan}",
            package="p1",
            lateness={} if self.lateness_ms is None else {self.birth("in"): self.lateness_ms},
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
            (late,), seen = event_time_lows([row["_ts"]], seen, self.lateness_ms or 0)
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
    with pytest.raises(IntentStands, match="promised another step"):
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
    with pytest.raises(IntervalError, match="range does not hold"):
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


# Crashes, zombies, twins.


def points_of(cuts: list[int]) -> int:
    points = Points()
    faulty(a_world(), points).live(cuts)
    return points.passed


def test_every_pair_of_crashes_in_two_lives_changes_nothing() -> None:
    expected, pairs = undisturbed(), 0
    for first in deaths(points_of([2])):
        for second in deaths(1000):
            world = a_world()
            with pytest.raises(Crash):
                faulty(world, Points(first, crash)).live([2])
            points = Points(second, crash)
            try:
                faulty(world, points).live([3])
            except Crash:
                faulty(world, Points()).live([1])
                assert world.result() == expected, (first, second)
                pairs += 1
                continue
            assert points.passed <= second
            assert world.result() == expected, (first, second)
            break
    assert pairs > 100


def test_a_plan_that_changes_between_lives_never_doubles_or_loses_a_record() -> None:
    """Each life has a plan of its own. Whatever was promised is finished with the plan that promised it: every input
    record is seen exactly once, and records of one promised range all carry the same plan.
    """
    for first in deaths(points_of([2])):
        for second in deaths(1000):
            world = a_world()
            with pytest.raises(Crash):
                faulty(world, Points(first, crash), suffix="-1").live([2])
            promised = pending_intent(world.rows.peek(REF))
            points = Points(second, crash)
            try:
                faulty(world, points, suffix="-2").live([3])
            except Crash:
                faulty(world, Points(), suffix="-3").live([1])
            found = outputs_of(world)
            assert [query.split("-")[0] for query in found] == ["a", "b", "two", "two", "a"], (
                first,
                second,
                found,
            )
            plans = [query.split("-")[1] for query in found]
            assert plans == sorted(plans), (first, second, found)
            assert plans[2] == plans[3], "both records made of one are of one plan"
            if promised is not None:
                ((start, end),) = promised.ranges.values()
                rows = [row for rows in published(world.log, ["out"])["out"].values() for row in rows]
                of_range = {
                    row["query"].split("-")[1] for row in rows if start <= (row["_seq"] >> 16) - 1 < end
                }
                assert of_range <= {"1"}, (first, second, found)
            if points.passed <= second:
                break


def _run_with(world: World, at: int, act: Callable[[], object]) -> bool:
    try:
        faulty(world, Points(at, lambda: (act(), None)[1])).live([2])
    except Fenced:
        return True
    return False


def test_a_zombie_paused_at_every_point_changes_nothing_and_is_fenced() -> None:
    expected, count = undisturbed(), points_of([2])
    for at in range(count):
        world = a_world()
        fenced = _run_with(world, at, lambda world=world: faulty(world, Points()).live([3]))
        assert fenced or at in (0, count - 1), at
        assert world.result() == expected, at


def test_a_zombie_with_an_old_plan_changes_nothing() -> None:
    """Life 1 pauses, life 2 replays its promise and goes on with a new plan, life 1 wakes up with the old one."""
    for at in range(1, points_of([2]) - 1):
        world = a_world()
        kept: list[dict[str, Any]] = []

        def successor(world: World = world, kept: list[dict[str, Any]] = kept) -> None:
            faulty(world, Points(), suffix="-2").live([3])
            kept.append(world.result())

        assert _run_with(world, at, successor), at
        assert world.result() == kept[0], at
        assert [query.split("-")[0] for query in outputs_of(world)] == ["a", "b", "two", "two", "a"], at


def test_a_twin_at_every_point_changes_nothing() -> None:
    """Two workers of one token are given the same range; the second runs whole inside the first, then life goes on."""
    expected = undisturbed()
    for at in range(100):
        world = a_world()
        token = world.open().token
        twin = faulty(world, Points())
        points = Points(
            at, lambda twin=twin, token=token: (twin.run(token, 0, 4), twin.run(token, 4, 6), None)[2]
        )
        slow = faulty(world, points)
        slow.run(token, 0, 4)
        if points.passed <= at:
            break
        faulty(world, Points()).live([1])
        assert world.result() == expected, at
    assert at >= 8
