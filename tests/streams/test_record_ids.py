"""Records with ids of their own: one that came before, under its key and within the slack, has no effect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import testing
from penstock.core.errors import ComputationFailed, PipelineError, StateMismatch
from penstock.streams.bus.log import LOW_MAX, CategorySpec
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.catalogue import StaticCatalogue
from penstock.streams.compile.drawing import draw_plan
from penstock.streams.compile.packages import build_package, load_pipeline
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.dsl.computation import Computation, Context, Record, Value
from penstock.streams.dsl.injector import Injector
from penstock.streams.dsl.windows import tumbling
from penstock.streams.operators.build import operator_of
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.row_store import PREFIX, Changes, RowStore, Snapshot
from penstock.streams.rows.sqlite import SqliteRows
from penstock.streams.step.keyed_work import KeyedLogic, StepLogic
from penstock.streams.step.record_ids import (
    CHUNK_IDS_MAX,
    DIGEST_BYTES,
    FAN,
    INDEX,
    Chunk,
    DropRepeated,
    FilterCache,
    IdFilters,
    _chunks_to_merge,
    _digests,
    _first_ids,
)
from penstock.streams.step.stateful import StateCache
from tests.streams import test_windows
from tests.streams.operator_world import REF, Event, Low, OperatorWorld, Rec

SLACK, SLOT = 4000, 1000
OUT = (("n", "bigint"),)


class Running(Computation):
    """Tells for each record the how many-th of its key it is."""

    outputs = {"out": dict(OUT)}
    late = "process"
    record_id = "own"
    record_id_slack = "4s"
    n = Value(int)

    def process_record(self, record: Record, ctx: Context) -> None:
        ctx.state.n += 1
        if not record.late:
            ctx.produce({"n": ctx.state.n})


class NotedRows(MemoryRows):
    """Notes which rows of ids are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def snapshot(self, ref: Any, *, keys: Iterable[str], **others: Any) -> Snapshot:
        wanted = list(keys)
        self.asked += [name for name in wanted if name.startswith(f"{PREFIX}i") and name != INDEX]
        return super().snapshot(ref, keys=wanted, **others)


class Suspicious(IdFilters):
    """A filter that knows nothing as new."""

    def maybe(self, digest: bytes) -> list[int]:
        return list(self._slots)


def a_world(
    events: list[Event],
    *,
    filters: Callable[[], IdFilters] = IdFilters,
    rows: RowStore | None = None,
    cache: StateCache | None = None,
) -> OperatorWorld:
    """Each life has filters of its own, as workers that start anew; a call of `filters` may give the same."""

    def logic() -> StepLogic:
        return DropRepeated(KeyedLogic(Running()), column="own", slack_ms=SLACK, filters=filters())

    world = OperatorWorld(
        logic=logic,
        inputs=((("own", "string"),),),
        out=OUT,
        rows=rows or MemoryRows(),
        partitions=1,
        cache=cache,
    )
    return world.build(events)


def rec(key: str, own: str | None, ts: int = 100) -> Rec:
    return Rec(key=key, ts=ts, values=(own,))


def counts(world: OperatorWorld) -> dict[str, int]:
    """How many records of each key had an effect."""
    decode, found = Running.state_codec.decode, world.rows.scan(REF, start="", limit=100_000)
    return {row.key: decode(row.value).n for row in found if row.value and not row.key.startswith(PREFIX)}


def id_rows(world: OperatorWorld) -> list[str]:
    return [
        row.key for row in world.rows.scan(REF, start=PREFIX, limit=100_000) if row.key.startswith(PREFIX)
    ]


def expected(events: list[Event]) -> dict[str, int]:
    """The rule in plain Python, record by record: no batches, no rows."""
    taken: dict[tuple[str, str], list[int]] = {}
    low, found = -(2**62), dict[str, int]()
    for event in events:
        if isinstance(event, Low):
            low = max(low, event.low)
            continue
        (own,), key = event.values, event.key
        end = (event.ts // SLOT + 1) * SLOT
        if own is not None:
            if any(slot + SLACK > low for slot in taken.get((key, own), [])):
                continue
            if end + SLACK > low:
                taken.setdefault((key, own), []).append(end)
        found[key] = found.get(key, 0) + 1
    return found


def test_a_repeat_is_dropped_in_a_batch_and_across_batches_and_only_under_its_key():
    events: list[Event] = [
        *(rec("a", "1"), rec("a", "1"), rec("a", "2"), rec("b", "1"), rec("a", None), rec("a", None)),
        *(rec("a", "2", ts=900), rec("b", "1"), rec("b", ""), rec("b", "")),
    ]
    for cuts in ([1], [3], [100]):
        world = a_world(events)
        world.live(cuts)
        assert counts(world) == {"a": 4, "b": 2} == expected(events)
        assert world.rows.peek(REF).counters["repeated"] == 4
        assert world.rows.peek(REF).counters["records"] == 6


def test_new_ids_need_no_look_at_the_store_and_repeats_need_one():
    filters, rows = IdFilters(), NotedRows()
    world = a_world([rec("a", str(n)) for n in range(200)], filters=lambda: filters, rows=rows)
    world.live([20])
    assert rows.asked == []
    world = a_world(
        [rec("a", str(n)) for n in (1, 2, 3, 1)], filters=lambda: filters, rows=(rows := NotedRows())
    )
    world.live([2])
    assert len(rows.asked) == 1 and counts(world) == {"a": 3}


def test_after_a_restart_the_filter_is_built_again_from_the_rows(tmp_path: Path):
    """Every life begins with empty filters, on files too; with and without states kept in memory."""
    events: list[Event] = [rec("a", str(n % 7), ts=500 * (n % 7)) for n in range(40)]
    for rows, cache in ((MemoryRows(), None), (SqliteRows(tmp_path / "rows"), StateCache(10**6))):
        world = a_world(events, rows=rows, cache=cache)
        step = world.open()
        world.step(step, [0], [7])
        for at in range(7, 40, 3):
            world.step(world.open(), [at], [min(40, at + 3)])
        assert counts(world) == {"a": 7}


def test_a_filter_that_missed_what_another_worker_wrote_learns_it_before_it_is_asked():
    """Two workers with filters of their own take turns on one interval."""
    mine, yours = IdFilters(), IdFilters()
    turn: list[IdFilters] = []
    world = a_world([rec("a", str(n // 2)) for n in range(20)], filters=lambda: turn[-1])
    for at in range(20):
        turn.append(mine if at % 2 else yours)
        world.step(world.open(), [at], [at + 1])
    assert counts(world) == {"a": 10}


def test_ids_are_cleared_away_once_the_low_has_passed_them_by_the_slack():
    events: list[Event] = [rec("a", "1", ts=100), rec("a", "2", ts=2500), Low(low=3000)]
    world = a_world(events)
    world.live([1])
    assert len(id_rows(world)) == 2 + 2 + 1  # ids, chunks, index
    more = [*events, Low(low=1000 + SLACK), rec("a", "1", ts=7000), rec("a", "2", ts=7000)]
    world = a_world(more)
    world.live([1])
    assert counts(world) == {"a": 3} == expected(more)
    world = a_world([*more, Low(low=LOW_MAX)])
    world.live([2])
    assert id_rows(world) == [] and counts(world) == {"a": 3}


def test_more_than_a_steps_share_is_cleared_away_in_several_steps():
    chunks = [Chunk(1000, 0, version, CHUNK_IDS_MAX // 2, 0) for version in range(5)]
    assert _first_ids(chunks) == chunks[:2] and _first_ids([Chunk(1, 0, 1, 10**9, 0)]) != []
    assert _chunks_to_merge(chunks, 1000, 1) == ([], 0)
    small = [Chunk(1000, 0, version, 1, 0) for version in range(FAN - 1)]
    assert _chunks_to_merge(small, 1000, 1) == (small, 1) and _chunks_to_merge(small, 2000, 1) == ([], 0)


def test_many_steps_leave_few_chunks():
    world = a_world([rec("a", str(n)) for n in range(100)])
    world.live([1])
    chunks = [name for name in id_rows(world) if name.startswith(f"{PREFIX}c")]
    assert len(chunks) <= 2 * FAN and len(id_rows(world)) == 100 + len(chunks) + 1
    assert counts(world) == {"a": 100}


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Few ids, times around a low that rises by more and less than the slack."""
    low, events = 0, list[Event]()
    for _ in range(draw(st.integers(1, 40))):
        if draw(st.integers(0, 4)) == 0:
            low += draw(st.integers(1, 3000))
            events.append(Low(low=low))
        else:
            ts = max(0, low + draw(st.integers(-6000, 3000)))
            own = draw(st.sampled_from(["1", "2", "3", None]))
            events.append(rec(draw(st.sampled_from("ab")), own, ts))
    return events


@settings(max_examples=50, deadline=None)
@given(
    events=logs(),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    deaths=st.lists(st.integers(0, 40), max_size=3),
    suspicious=st.booleans(),
    cached=st.booleans(),
)
def test_what_is_dropped_is_a_function_of_the_log_whoever_dies_and_whatever_a_filter_suspects(
    events: list[Event], cuts: list[int], deaths: list[int], suspicious: bool, cached: bool
):
    kept = FilterCache()
    filters: Callable[[], IdFilters] = Suspicious if suspicious else lambda: kept.of("rows", REF)
    world = a_world(events, filters=filters, cache=StateCache(10**6) if cached else None)
    for at in deaths:
        world.live_and_die(cuts, at)
    world.live(cuts)
    assert counts(world) == expected(events)


def a_day(run: testing.Run) -> None:
    run.record("a", 1000, own="1")
    run.record("a", 1000, own="1")
    run.advance_watermark(2000)
    run.record("a", 2100, own="1")
    run.advance_watermark(8000)
    run.record("a", 8100, own="1")


def test_the_testing_kit_drops_them_too_and_no_crash_or_cut_changes_it():
    assert testing.crash_everywhere(lambda: testing.Run(Running()), a_day).runs > 10
    tried = testing.cut_everywhere(lambda: testing.Run(Running()), a_day)
    assert tried.result["state of key 'a'"] == {"n": 2}


def test_an_id_belongs_to_the_name_of_its_input_and_that_of_a_single_one_is_what_it_always_was():
    def digest(number: int, *inputs: str) -> bytes | None:
        table = pa.table({"_input": pa.array([number], pa.int8()), "_key": ["k"], "own": ["id1"]})
        return next(_digests(table, "own", "j", inputs))

    assert digest(0, "a", "b") == digest(1, "b", "a") != digest(1, "a", "b")
    assert digest(0) == hashlib.blake2b(b"0:1:kid1", digest_size=DIGEST_BYTES).digest() != digest(0, "0")


def test_windows_count_a_repeat_once():
    plan = test_windows.window_plan(tumbling(10))
    events: list[Event] = [Rec(key="a", ts=3, values=(5,)), Rec(key="a", ts=3, values=(5,)), Low(low=LOW_MAX)]
    world = OperatorWorld(
        logic=lambda: DropRepeated(
            operator_of(plan, test_windows.window_columns()), column="x", slack_ms=SLACK, filters=IdFilters()
        ),
        inputs=((("x", "bigint"),),),
        out=test_windows.window_columns(),
    ).build(events)
    world.live([1])
    assert [row["v0"] for row in world.out_rows()] == [1]


def test_an_injector_that_starts_again_under_another_name_sends_its_records_twice_without_effect():
    log = MemoryLog()
    spec = CategorySpec(
        name="sales", partitions=1, columns=(("own", "string"),), format="json", watermark="injector"
    )
    log.create(spec)
    for name in ("first life", "second life"):
        injector = Injector(log, "sales", name, epoch=1)
        injector.publish(["a", "a"], [1, 2], [json.dumps({"own": own}).encode() for own in ("1", "2")])
    lines = [row for batch in log.read("sales", 0, 0, 4) for row in batch.to_pylist()]
    world = a_world([rec(row["_key"], json.loads(row["_value"])["own"], row["_ts"]) for row in lines])
    world.live([1])
    assert len(lines) == 4 and counts(world) == {"a": 2}


def test_a_damaged_index_or_chunk_is_named():
    for damage in ({INDEX: b"\xc1"}, "chunk"):
        world = a_world([rec("a", "1"), rec("a", "2")])
        world.step(world.open(), [0], [1])
        row = world.rows.peek(REF)
        if damage == "chunk":
            damage = {name: b"short" for name in id_rows(world) if name.startswith(f"{PREFIX}c")}
        changes = Changes(states=damage)  # type: ignore[arg-type]
        world.rows.commit(REF, token=row.token, version=row.version, changes=changes)
        with pytest.raises(StateMismatch, match="the record ids of job") as refused:
            world.step(world.open(), [1], [2])
        assert refused.value.why and refused.value.fix


def test_a_key_that_would_hit_the_rows_of_ids_is_refused():
    world = a_world([rec(f"{PREFIX}i", "1")])
    with pytest.raises(ComputationFailed, match="cannot store state for a key") as refused:
        world.live([1])
    assert refused.value.why and refused.value.fix


PIPELINE = """
from penstock import Computation, Pipeline, Value

class Total(Computation):
    outputs = {{"out": {{"n": "bigint"}}}}
    record_id = "{column}"
    record_id_slack = "{slack}"
    n = Value(int)

    def process_record(self, record, ctx):
        ctx.state.n += 1
        ctx.produce({{"n": ctx.state.n}})

p = Pipeline("shops", partitions=2)
p.source("sales").key_by("shop").process(Total).sink("totals")
"""
SALES = CategorySpec(
    name="sales",
    partitions=2,
    columns=(("shop", "string"), ("sale", "string"), ("amount", "double")),
    format="json",
)


def compiled(tmp_path: Path, column: str, slack: str = "30m") -> Any:
    path = tmp_path / "shops.py"
    path.write_text(PIPELINE.format(column=column, slack=slack))
    return compile_pipeline(load_pipeline(path), StaticCatalogue([SALES]), build_package(path).ref())


def test_a_plan_says_which_column_is_the_id_and_for_how_long(tmp_path: Path):
    found = compiled(tmp_path, "sale")
    plan = found.to_json()["jobs"][1]["plan"]["computation"]
    assert plan["ids"] == {"column": "sale", "slack_ms": 1_800_000}
    assert "a record whose sale came before" in draw_plan(found)


@pytest.mark.parametrize(
    ("column", "slack", "said"),
    [
        ("nope", "30m", "not an id column"),
        ("amount", "30m", "not an id column"),
        ("not a name", "30m", "record_id"),
        ("sale", "soon", "soon"),
    ],
)
def test_an_id_that_no_record_has_is_refused_before_anything_runs(
    tmp_path: Path, column: str, slack: str, said: str
):
    with pytest.raises(PipelineError, match=said) as refused:
        compiled(tmp_path, column, slack)
    assert refused.value.why and refused.value.fix


def test_a_batch_says_that_it_cannot_drop_them(tmp_path: Path):
    from penstock.streams.spark.backfill import Code, Span, run_jobs

    jobs = compiled(tmp_path, "sale").to_json()["jobs"]
    with pytest.raises(PipelineError, match="cannot be run as a batch") as refused:
        run_jobs(jobs, {}, span=Span(), code=Code(folder=tmp_path, entry="shops.py", hash="x"))
    assert refused.value.why and refused.value.fix
