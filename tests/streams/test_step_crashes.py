"""A crash after every operation of the stateful step, in every order of retries; zombies and twins at every point.

Every run must end with the state, timers, outputs, offsets and lows of a run that nothing happened to.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import Fenced
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.dsl.computation import Context, Timer
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.postgres import PostgresRows
from penstock.streams.rows.row_store import RowStore
from penstock.streams.rows.sqlite import SqliteRows
from penstock.streams.step.stateful import StateCache
from tests.streams.step_world import (
    REF,
    SMALL_LOG,
    CountPerSecond,
    Crash,
    Event,
    Points,
    WorkersInTurn,
    World,
    crash,
    deaths,
    fastest_folder,
    faulty,
)
from tests.waiting import LIMIT_S

# Two records, one mark between them, the end: small enough for every pair of crashes.
TINY_LOG: tuple[Event, ...] = (("a", 100), 1000, ("b", 1100), LOW_MAX)


# What workers keep of states between batches: nothing, everything, or a single entry. All lives of a test share
# it, as lives of a task do whose workers outlive its driver.
# Workers in turn have a cache each, and tell each other what they wrote.
CACHES: dict[str, Callable[[], Any]] = {
    "no cache": lambda: None,
    "cache": lambda: StateCache(10**6),
    "tiny cache": lambda: StateCache(230),
    "workers in turn": lambda: WorkersInTurn(10**6),
}
with_and_without_cache = pytest.mark.parametrize("cache", ["no cache", "cache"])
with_every_cache = pytest.mark.parametrize("cache", CACHES)


def a_world(events: tuple[Event, ...], cache: str = "no cache") -> World:
    return World(rows=MemoryRows(), log=MemoryLog(), cache=CACHES[cache]()).build(events)


def undisturbed(events: tuple[Event, ...]) -> dict[str, Any]:
    world = a_world(events)
    world.live([100])
    return world.result()


def points_of(events: tuple[Event, ...], cuts: list[int], cache: str = "no cache") -> int:
    points = Points()
    faulty(a_world(events, cache), points).live(cuts)
    return points.passed


def check(world: World, expected: dict[str, Any], where: object) -> None:
    assert world.result() == expected, where
    world.check_marks()


@with_every_cache
@pytest.mark.parametrize("cuts", [[1], [2, 1], [100]])
def test_a_crash_at_every_point_changes_nothing(cuts: list[int], cache: str) -> None:
    """The successor cuts the rest of the log otherwise than the one that died."""
    expected = undisturbed(SMALL_LOG)
    count = points_of(SMALL_LOG, cuts, cache)
    assert count >= 14
    for at in deaths(count):
        world = a_world(SMALL_LOG, cache)
        with pytest.raises(Crash):
            faulty(world, Points(at, crash)).live(cuts)
        faulty(world, Points()).live([3])
        check(world, expected, at)


@with_and_without_cache
def test_every_pair_of_crashes_in_two_lives_changes_nothing(cache: str) -> None:
    """Life 1 dies at every point; life 2 at every point of what it then does; life 3 finishes."""
    expected, pairs = undisturbed(TINY_LOG), 0
    for first in deaths(points_of(TINY_LOG, [1], cache)):
        for second in deaths(1000):
            world = a_world(TINY_LOG, cache)
            with pytest.raises(Crash):
                faulty(world, Points(first, crash)).live([1])
            points = Points(second, crash)
            try:
                faulty(world, points).live([2])
            except Crash:
                faulty(world, Points()).live([1])
                check(world, expected, (first, second))
                pairs += 1
                continue
            assert points.passed <= second, "life 2 crashes at each of its points before it survives"
            check(world, expected, (first, second))
            break
    assert pairs > 150


@with_every_cache
def test_a_zombie_paused_at_every_point_changes_nothing_and_is_fenced(cache: str) -> None:
    """Life 1 pauses at a point; life 2 acquires and finishes all; life 1 wakes up and goes on."""
    expected = undisturbed(SMALL_LOG)
    count = points_of(SMALL_LOG, [2], cache)
    for at in range(count):
        world = a_world(SMALL_LOG, cache)
        fenced = _run_with(world, at, lambda world=world: faulty(world, Points()).live([3]))
        # Past its last effect there is nothing left to refuse; before its acquire it is the newer owner.
        assert fenced or at in (0, count - 1), at
        check(world, expected, at)


@with_and_without_cache
def test_a_zombie_that_wakes_while_its_successor_has_only_acquired_changes_nothing(cache: str) -> None:
    expected = undisturbed(SMALL_LOG)
    for at in range(1, points_of(SMALL_LOG, [2], cache) - 1):
        world = a_world(SMALL_LOG, cache)
        successor = faulty(world, Points())
        held: list[Any] = []
        assert _run_with(world, at, lambda held=held, successor=successor: held.append(successor.open())), at
        end = successor.log.end_offsets("in")[0]
        successor.run(held[0], successor.position(), end)
        successor.run(held[0], end, end)
        check(world, expected, at)


@with_every_cache
def test_a_twin_at_every_point_changes_nothing(cache: str) -> None:
    """Two workers of one life and token run the same range; the second runs whole inside the first."""
    expected = undisturbed(SMALL_LOG)
    end = len([event for event in SMALL_LOG if isinstance(event, tuple)])
    for middle in (2, end):
        at = 0
        while True:
            world = a_world(SMALL_LOG, cache)
            world.run(world.open(), 0, 1)
            token = world.rows.peek(REF).token
            twin = faulty(world, Points())
            points = Points(at, lambda twin=twin, token=token: twin.run(twin.step(token), 0, end))
            slow = faulty(world, points)
            slow.run(slow.step(token), 1, middle)
            if points.passed <= at:
                break
            last = faulty(world, Points())
            last.run(last.step(token), world.position(), end)
            check(world, expected, (middle, at))
            at += 1
        assert at >= 6


@with_and_without_cache
def test_a_twin_that_crashes_inside_a_twin_that_crashes_changes_nothing(cache: str) -> None:
    expected = undisturbed(TINY_LOG)
    for outer in range(12):
        for inner in deaths(12):
            world = a_world(TINY_LOG, cache)
            world.open()
            token = world.rows.peek(REF).token
            twin = faulty(world, Points(inner, crash))
            slow = faulty(
                world, Points(outer, lambda twin=twin, token=token: twin.run(twin.step(token), 0, 2))
            )
            with suppress(Crash):
                slow.run(slow.step(token), 0, 1)
            faulty(world, Points()).live([1])
            check(world, expected, (outer, inner))


def _run_with(world: World, at: int, act: Any) -> bool:
    """Life 1, with `act` at one of its points. True if it was fenced after it."""
    try:
        faulty(world, Points(at, act)).live([2])
    except Fenced:
        return True
    return False


# Real files, real processes, SIGKILL.


@pytest.fixture
def memory_disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=fastest_folder()) as folder:
        yield Path(folder)


def _rows(place: str, fault: Callable[[str], None] | None = None) -> RowStore:
    if place.startswith("postgresql:"):
        return PostgresRows(place, fault=fault)
    return SqliteRows(Path(place), fault=fault)


def _files(folder: Path, place: str) -> World:
    return World(rows=_rows(place), log=EmbeddedLog(folder / "bus"), cache=StateCache(10**6))


def _build(folder: Path, place: str) -> None:
    _files(folder, place).build(TINY_LOG)


def _run(process: Any) -> int | None:
    process.start()
    process.join(LIMIT_S)
    code: int | None = process.exitcode
    return code


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _life(folder: Path, place: str, at: int, cuts: list[int], in_transaction: bool) -> None:
    """One process: a life that kills itself at a point, between two effects or inside a transaction of the rows."""
    points = Points(at, _die)
    if in_transaction:
        rows = _rows(place, fault=lambda _point: points.next())
        world = World(rows=rows, log=EmbeddedLog(folder / "bus"), clock_ms=10**9, cache=StateCache(10**6))
        world.live(cuts)
    else:
        world = _files(folder, place)
        world.clock_ms = 10**9
        faulty(world, points).live(cuts)


@pytest.mark.parametrize("in_transaction", [False, True], ids=["between effects", "inside transactions"])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_sigkill_at_every_point_changes_nothing(
    request: pytest.FixtureRequest, memory_disk: Path, kind: str, in_transaction: bool
) -> None:
    """Life 1 is killed at a point, life 2 at another one, and so on until one lives to the end."""
    context = multiprocessing.get_context("forkserver")
    # pyarrow imports pandas at its first array, which would cost every process a second.
    context.set_forkserver_preload(["tests.streams.test_step_crashes", "pandas"])
    expected, killed = undisturbed(TINY_LOG), 0
    built = str(memory_disk / "new" / "rows")
    if kind == "postgres":
        built = str(request.getfixturevalue("postgres").new_database())
    # Built elsewhere: copying a file that this process has open through SQLite would drop SQLite's locks.
    assert _run(context.Process(target=_build, args=(memory_disk / "new", built))) == 0
    for at in range(1000) if in_transaction else deaths(1000):
        folder = memory_disk / str(at)
        shutil.copytree(memory_disk / "new", folder)
        place = str(folder / "rows")
        if kind == "postgres":
            place = str(request.getfixturevalue("postgres").new_database(like=built))
        codes: list[int | None] = []
        for point in (at, at // 4 * 2 + 1, -1):
            cuts = [1 + len(codes)]
            codes.append(
                _run(context.Process(target=_life, args=(folder, place, point, cuts, in_transaction)))
            )
            if codes[-1] == 0:
                break
        check(_files(folder, place), expected, (at, codes))
        assert codes[-1] == 0 and set(codes) <= {0, -signal.SIGKILL}, (at, codes)
        if codes == [0]:
            break
        killed += len(codes) - 1
    assert killed >= 20


def test_a_worker_that_wakes_from_user_code_after_its_successor_has_worked_is_fenced(
    postgres: Any, memory_disk: Path
) -> None:
    """On PostgreSQL: paused inside user code, outside any transaction; nothing of what it then writes is seen."""
    place = str(postgres.new_database())
    world = _files(memory_disk, place).build(SMALL_LOG)
    expected = undisturbed(SMALL_LOG)

    class Paused(CountPerSecond):
        def process_timer(self, timer: Timer, ctx: Context) -> None:
            if not successors:
                successors.append(_files(memory_disk, place))
                successors[0].clock_ms = 10**9
                successors[0].live([3])
            super().process_timer(timer, ctx)

    successors: list[World] = []
    zombie = World(rows=_rows(place), log=world.log, computation=Paused, clock_ms=10**8)
    with pytest.raises(Fenced):
        zombie.live([2])
    check(successors[0], expected, "the zombie")
