"""States kept between batches: never stale whoever wrote meanwhile, dropped by failures, bounded."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ComputationFailed, Fenced
from penstock.jobs.config import JobConfig
from penstock.streams.bus.log import LOW_MAX, LOW_MIN
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.dsl.computation import Context, Record
from penstock.streams.dsl.windows import tumbling
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.row_store import Snapshot, new_row
from penstock.streams.step.stateful import (
    ENTRY_BYTES,
    FILE_BYTES_MIN,
    JOBS_MAX,
    CachedChange,
    CachedStates,
    FilePosition,
    SharedChanges,
    StateCache,
    StateCaches,
)
from tests.builders import a_config
from tests.streams import test_windows
from tests.streams.descriptors import a_descriptor
from tests.streams.operator_world import Low, Rec
from tests.streams.step_world import (
    REF,
    CountPerSecond,
    Crash,
    Points,
    WorkersInTurn,
    World,
    crash,
    faulty,
    news_folder,
)

ROW = replace(new_row(REF, {}, LOW_MIN), token=3, version=7)


class CountingRows(MemoryRows):
    """Notes which states are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[str]] = []

    def snapshot(self, ref: Any, *, keys: Iterable[str], **others: Any) -> Snapshot:
        wanted = list(keys)
        if wanted:
            self.asked.append(sorted(wanted))
        return super().snapshot(ref, keys=wanted, **others)


def a_world(cache: StateCache | None = None) -> tuple[World, CountingRows]:
    rows = CountingRows()
    return World(rows=rows, log=MemoryLog(), cache=cache).build(), rows


def test_a_key_is_read_once_while_its_worker_stays():
    world, rows = a_world(StateCache(10**6))
    step = world.open()
    for number in range(4):
        world.append([("a", 100 + number), ("b", 200 + number), *([("c", 300)] if number == 2 else [])])
        world.run(step, world.position(), world.log.end_offsets("in")[0])
    assert rows.asked == [["a", "b"], ["c"]]
    assert CountPerSecond.state_codec.decode(rows.scan(REF, start="a", limit=1)[0].value or b"").total == 4


def test_without_a_cache_every_batch_reads():
    world, rows = a_world()
    step = world.open()
    for number in range(3):
        world.append([("a", 100 + number)])
        world.run(step, number, number + 1)
    assert rows.asked == [["a"]] * 3


def test_what_another_worker_wrote_is_read_again():
    """Two workers with caches of their own take turns under one token, as Spark hands out batches."""
    world, rows = a_world(StateCache(10**6))
    token = world.rows.peek(REF).token if world.open() else 0
    workers = [replace(world, cache=StateCache(10**6)) for _ in range(2)]
    turns = [0, 0, 1, 1, 0, 1, 0, 0]
    for number, who in enumerate(turns):
        world.append([("a", 100 + number)])
        workers[who].run(workers[who].step(token), number, number + 1)
    assert len(rows.asked) == 1 + sum(a != b for a, b in pairwise(turns))
    assert CountPerSecond.state_codec.decode(rows.scan(REF, start="a", limit=1)[0].value or b"").total == 8


def test_what_another_worker_of_the_machine_wrote_is_applied():
    """As before, but the workers tell each other: each reads a key once, and then never again."""
    world, rows = a_world(WorkersInTurn(10**6))
    step = world.open()
    for number in range(12):
        world.append([("a", 100 + number), ("b", 200 + number)])
        world.run(step, world.position(), world.log.end_offsets("in")[0])
    assert rows.asked == [["a", "b"]] * 3
    assert CountPerSecond.state_codec.decode(rows.scan(REF, start="a", limit=1)[0].value or b"").total == 12


@pytest.mark.parametrize("harm", ["lost", "cut", "damaged", "no folder"])
def test_news_that_are_lost_or_damaged_cost_a_look_at_the_rows_and_nothing_else(tmp_path: Path, harm: str):
    news = [SharedChanges(tmp_path / "news", 10**6) for _ in range(2)]
    world, rows = a_world()
    token = world.rows.peek(REF).token if world.open() else 0
    workers = [replace(world, cache=StateCache(10**6, each)) for each in news]
    for number in range(20):
        world.append([("a", 100 + number)])
        worker = workers[number % 2]
        worker.run(worker.step(token), number, number + 1)
        if number == 9:
            (path,) = (tmp_path / "news").glob("*.news")
            _harm(path, harm)
    assert CountPerSecond.state_codec.decode(rows.scan(REF, start="a", limit=1)[0].value or b"").total == 20
    assert len(rows.asked) < 10


def _harm(path: Path, harm: str) -> None:
    content = path.read_bytes()
    match harm:
        case "lost":
            path.unlink()
        case "cut":
            path.write_bytes(content[:-3])
        case "damaged":
            path.write_bytes(content[:-3] + b"???")
        case "no folder":
            shutil.rmtree(path.parent)


def test_a_file_of_news_is_begun_anew_before_it_is_large(tmp_path: Path):
    news = SharedChanges(tmp_path, 1000)
    for version in range(3000):
        news.append(REF, CachedChange(token=1, old=version, new=version + 1, states={"a": b"x" * 900}))
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size <= FILE_BYTES_MIN
    changes, place = news.read_after(REF, FilePosition())
    assert changes[-1].new == 3000 and [c.old for c in changes[1:]] == [c.new for c in changes[:-1]]
    assert news.read_after(REF, place) == ([], place)
    assert news.end(REF) == place, "who knows nothing yet reads none of it"
    news.append(REF, CachedChange(token=1, old=3000, new=3001, states={"a": b"x" * 1001}))
    assert news.read_after(REF, place) == ([], place), "more than anybody keeps is left out"


def test_a_zombie_with_a_warm_cache_is_refused_and_its_cache_is_gone():
    cache = StateCache(10**6)
    world, rows = a_world(cache)
    zombie = world.open()
    world.append([("a", 100), ("a", 101)])
    world.run(zombie, 0, 1)
    assert cache.size > 0
    successor = replace(world, cache=StateCache(10**6))
    successor.run(successor.open(), 1, 2)
    before = rows.peek(REF)
    with pytest.raises(Fenced):
        world.run(zombie, 1, 2)
    assert rows.peek(REF) == before and cache.size == 0


def test_a_new_life_in_the_same_process_does_not_use_what_the_old_one_kept():
    world, rows = a_world(StateCache(10**6))
    world.append([("a", 100), ("a", 101)])
    world.run(world.open(), 0, 1)
    world.run(world.open(), 1, 2)
    assert rows.asked == [["a"], ["a"]]


def test_after_any_failure_nothing_is_kept():
    for at in range(40):
        cache = StateCache(10**6)
        world, _ = a_world(cache)
        world.append([("a", 100), ("a", 101)])
        world.run(world.open(), 0, 1)
        assert cache.size > 0
        points = Points(at, crash)
        broken = faulty(world, points)
        broken_step = broken.step(world.rows.peek(REF).token)
        try:
            broken.run(broken_step, 1, 2)
        except Crash:
            # Past the last write of its rows only the bus is told of lows, and what is kept is what was written.
            assert cache.size == 0 or world.rows.peek(REF).offsets[world.birth("in")] == 2
            continue
        break
    assert at > 5


def test_user_code_that_fails_leaves_nothing_in_the_cache():
    class Fails(CountPerSecond):
        def process_record(self, record: Record, ctx: Context) -> None:
            if record.ts == 101:
                raise ValueError("no")
            super().process_record(record, ctx)

    cache = StateCache(10**6)
    world, _ = a_world(cache)
    world.computation = Fails
    world.append([("a", 100), ("a", 101)])
    step = world.open()
    world.run(step, 0, 1)
    with suppress(ComputationFailed):
        world.run(step, 1, 2)
    assert cache.size == 0


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.sampled_from("abcd"), min_size=1, max_size=24),
    turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.booleans()), min_size=1, max_size=12),
    size=st.sampled_from([0, 230, 700, 10**6]),
    tells=st.booleans(),
)
def test_any_mix_of_workers_lives_and_sizes_gives_what_no_cache_gives(
    keys: list[str], turns: list[tuple[int, int, bool]], size: int, tells: bool
):
    """Three worker processes share the batches at random; now and then the task starts again."""
    events = [(key, 100 * number) for number, key in enumerate(keys)]
    plain = World(rows=MemoryRows(), log=MemoryLog()).build([*events, 1000, LOW_MAX])
    plain.live([100])
    world = World(rows=MemoryRows(), log=MemoryLog()).build([*events, 1000, LOW_MAX])
    news = SharedChanges(news_folder(), size) if tells else None
    caches = [StateCache(size, news) for _ in range(3)]
    token, end = 0, len(events)
    for number in range(200):
        who, count, restarts = turns[number % len(turns)]
        worker = replace(world, cache=caches[who], clock_ms=world.clock_ms + 10_000 * number)
        if restarts or number == 0:
            worker.open()
            token = world.rows.peek(REF).token
        at = world.position()
        worker.run(worker.step(token), at, min(end, at + count))
        assert all(cache.size <= size for cache in caches)
        if at == end:
            break
    assert world.result() == plain.result()


def test_windows_read_their_blocks_from_what_is_kept():
    """Blocks written by earlier batches are merged when a window is due, without being read again."""
    events: list[Any] = [Rec(key="a", ts=number, values=(number,)) for number in range(8)]
    plain = test_windows.a_world([*events, Low(low=LOW_MAX)], tumbling(10))
    plain.live([2])
    cached = test_windows.a_world([*events, Low(low=LOW_MAX)], tumbling(10))
    cached.rows = rows = CountingRows()
    rows.create(REF, offsets={cached.log.describe("in0").birth: 0}, low=LOW_MIN)
    cached.cache = StateCache(10**6)
    with suppress(Crash):
        cached.live([2])
    assert cached.result() == plain.result()
    assert rows.asked == [["#index"]]


def test_the_longest_unused_makes_room():
    known = CachedStates()
    known.add_read(ROW, ["a", "b", "c"], {"a": b"1" * 10, "b": b"2" * 10})
    assert known.size == 3 * (ENTRY_BYTES + 1) + 20
    assert known.split(["a", "x"]) == ({"a": b"1" * 10}, ["x"])
    assert known.split(["c"]) == ({}, [])  # known to have no state
    known.shrink(2 * (ENTRY_BYTES + 1) + 10)
    assert known.split(["a", "b", "c"]) == ({"a": b"1" * 10}, ["b"])
    known.shrink(0)
    assert len(known) == 0 and known.size == 0


def test_a_cache_stays_within_its_bound_over_all_intervals():
    cache = StateCache(5 * (ENTRY_BYTES + 11))
    refs = [replace(REF, partition=partition) for partition in range(3)]
    for ref in refs:
        known = cache.take(ref)
        known.add_read(ROW, [], {f"k{number}": bytes(9) for number in range(3)})
        cache.put_back(ref, known)
        assert cache.size <= cache.bytes_max
    assert [len(cache.take(ref)) for ref in refs] == [0, 2, 3]
    large = CachedStates()
    large.add_read(ROW, [], {"k": bytes(10_000)})
    cache.put_back(refs[0], large)
    assert cache.size == 0


@pytest.mark.parametrize(
    "row", [replace(ROW, version=8), replace(ROW, version=6), replace(ROW, token=4), replace(ROW, token=2)]
)
def test_another_version_or_token_forgets_everything(row: Any):
    known = CachedStates()
    known.add_read(ROW, [], {"a": b"1"})
    assert known.matches(ROW) and not known.matches(row) and len(known) == 0


def test_a_write_that_was_not_the_next_one_forgets_everything():
    for new in (replace(ROW, version=9), replace(ROW, version=7), replace(ROW, token=4, version=8)):
        known = CachedStates()
        known.add_read(ROW, [], {"a": b"1"})
        known.committed(ROW, new, {"a": b"2"})
        assert len(known) == 0
    known.add_read(ROW, [], {"a": b"1"})
    known.committed(ROW, replace(ROW, version=8), {"a": None})
    assert known.matches(replace(ROW, version=8)) and known.split(["a"]) == ({}, [])


def test_a_process_keeps_caches_of_few_jobs():
    caches = StateCaches()
    first = caches.of("rows", "j0", 100)
    assert first is not None and caches.of("rows", "j0", 100) is first
    assert caches.of("other rows", "j0", 100) is not first
    assert caches.of("rows", "j0", 200) is not first
    assert caches.of("rows", "j0", 0) is None
    second = caches.of("rows", "j1", 100)
    for number in range(JOBS_MAX):
        caches.of("rows", f"more{number}", 100)
    assert caches.of("rows", "j1", 100) is not second


def test_a_job_says_how_much_and_jobs_from_before_are_as_they_were():
    plain, sized = a_config().to_json(), a_config(state_cache_bytes=0).to_json()
    default = JobConfig.model_fields["state_cache_bytes"].default
    assert "state_cache_bytes" not in plain
    assert a_descriptor().with_config(**plain).state_cache_bytes == default
    assert a_descriptor().with_config(**sized).state_cache_bytes == 0


def test_a_twin_that_writes_between_two_looks_of_a_worker_never_leaves_it_a_stale_state():
    """At every effect of a worker its twin, with a cache of its own, runs on; then the worker goes on."""
    events = [("a", 100 * number) for number in range(4)]
    plain = World(rows=MemoryRows(), log=MemoryLog()).build(events)
    plain.live([100])
    for at in range(100):
        world = World(rows=MemoryRows(), log=MemoryLog(), cache=StateCache(10**6)).build(events)
        world.run(world.open(), 0, 1)
        token = world.rows.peek(REF).token
        twin = faulty(replace(world, cache=StateCache(10**6)), Points())
        points = Points(at, lambda twin=twin, token=token: twin.run(twin.step(token), 1, 3))
        slow = faulty(world, points)
        slow.run(slow.step(token), 1, 2)
        if points.passed <= at:
            break
        last = faulty(world, Points())
        last.run(last.step(token), world.position(), 4)
        last.run(last.step(token), 4, 4)
        assert world.result()["states"] == plain.result()["states"], at
        assert world.result()["out"] == plain.result()["out"], at
    assert at >= 6
