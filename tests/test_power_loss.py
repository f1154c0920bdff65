"""I8: what was acknowledged is there after the power failed at any moment, whatever of the rest is lost or torn.

Each test records one run on files, then tries many moments of it: the disk as it may be found then is opened by
the real code, and must hold every acknowledged write, whole, and nothing of a write that was not made.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.db.database import Database
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.package_store import PackageStore
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.sqlite import SqliteRows
from tests.builders import a_job
from tests.jobs.asking import everything
from tests.jobs.world import World as SyncerWorld
from tests.power_loss import Acknowledged, Event, Recorder, Rename, Sync, Write, disk_after
from tests.streams.bus.publishers import LARGE, SMALL, SPEC, publish, stored
from tests.streams.step_world import REF, SMALL_LOG
from tests.streams.step_world import World as StepWorld

MOMENTS = 60  # of each run; the first and the last among them


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


class Run:
    """One recorded run, and the disks that a power failure may leave of it."""

    def __init__(self, recorder: Recorder, tmp_path: Path) -> None:
        self.recorder, self._tmp_path = recorder, tmp_path
        self.folder, self._before = tmp_path / "disk", tmp_path / "before"
        self.folder.mkdir()
        self.events: Sequence[Event] = ()

    def settled(self) -> None:
        """What lies in the folder now is durable, and whatever comes next is not until it is synced."""
        shutil.copytree(self.folder, self._before)

    def disks(self, seed: int = 1) -> Iterator[tuple[Path, list[Any]]]:
        """A disk for each moment, with what had been acknowledged then."""
        rng = random.Random(seed)
        assert any(isinstance(event, Write | Rename) for event in self.events), "nothing was recorded"
        assert any(isinstance(event, Sync) for event in self.events), "nothing was synced"
        count = len(self.events)
        moments = sorted({0, count, *rng.sample(range(count + 1), min(count, MOMENTS))})
        for moment in moments:
            into = self._tmp_path / f"after-{moment}"
            past = self.events[:moment]
            into.mkdir()
            disk_after(past, before=self._before, folder=self.folder, into=into, rng=rng)
            yield into, [event.what for event in past if isinstance(event, Acknowledged)]
            shutil.rmtree(into)


@pytest.fixture
def run(recorder: Recorder, tmp_path: Path) -> Run:
    return Run(recorder, tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_the_store_is_what_some_commit_left_and_the_last_acknowledged_one_at_least(run: Run, seed: int):
    """Plan: a job, a change that needs a plan, one that does not; the state after each commit is acknowledged."""
    database = Database(run.folder / "store.db")
    states = [everything(database)]
    database.close()
    run.settled()
    with run.recorder.recording(run.folder) as run.events:
        world = SyncerWorld(run.folder / "store.db")
        inner = world.database._fault

        def acknowledged(point: str) -> None:
            inner(point)
            if point == "committed":
                states.append(everything(world.database))
                run.recorder.acknowledge(len(states) - 1)

        acknowledged("committed")  # its term
        world.database._fault = acknowledged
        a_job(world.service)
        world.settle()
        world.write("oncall", task_count=3)
        world.settle()
        world.write("provisioner", arguments={"a": "b" * 9000})
        world.settle()
        world.database.close()
    assert len(states) > 8
    for disk, known in run.disks(seed):
        database = Database(disk / "store.db")
        found, last = everything(database), max(known, default=0)
        database.close()
        assert found in states[last : last + 2]
        assert _is_whole(disk / "store.db")


def _is_whole(path: Path) -> bool:
    connection = sqlite3.connect(path)
    try:
        return connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        connection.close()


@pytest.mark.parametrize("seed", range(3))
def test_published_records_are_there_whole_also_those_in_files(run: Run, seed: int):
    log = EmbeddedLog(run.folder)
    log.create(SPEC)
    log.close()
    run.settled()
    with run.recorder.recording(run.folder) as run.events:
        log = EmbeddedLog(run.folder)
        for number in range(8):
            first = number * 10 + 1
            publish(log, "a", first, first + 9, LARGE if number % 2 else SMALL)
            run.recorder.acknowledge(first + 9)
        log.close()
    for disk, known in run.disks(seed):
        log, last = EmbeddedLog(disk), max(known, default=0)
        one, two = stored(log, 0), stored(log, 1)
        assert one == two == list(range(1, len(one) + 1))
        assert len(one) in (last, last + 10)
        # The producer repeats what it was not told of, and goes on.
        for first in range(last + 1, 81, 10):
            publish(log, "a", first, first + 9)
        assert stored(log, 0) == stored(log, 1) == list(range(1, 81))
        log.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_step_goes_on_after_the_power_failed_as_if_nothing_had_been(run: Run, seed: int):
    """Plan: a driver works through a log, rows and bus on one disk; a successor finishes what that disk holds."""
    undisturbed = StepWorld(rows=MemoryRows(), log=MemoryLog()).build(SMALL_LOG)
    undisturbed.live([100])
    world = _step_world(run.folder).build(SMALL_LOG)
    _close(world)
    run.settled()
    with run.recorder.recording(run.folder) as run.events:
        world = _step_world(run.folder)
        world.clock_ms += 1_000_000
        world.live([2, 1])
        _close(world)
    for disk, _ in run.disks(seed):
        successor = _step_world(disk)
        successor.clock_ms += 2_000_000
        successor.live([3])
        assert successor.result() == undisturbed.result()
        successor.check_marks()
        _close(successor)


def test_a_package_that_was_taken_is_there_under_its_hash(run: Run):
    """Also the one that is put again: whoever put it first may have died before its name was on disk."""
    shelf = PackageStore(run.folder / "packages")
    run.settled()
    contents = [bytes([number]) * 3000 for number in range(6)]
    with run.recorder.recording(run.folder) as run.events:
        for content in [*contents, *contents[:2]]:
            hash_ = hashlib.sha256(content).hexdigest()
            shelf.put(hash_, content)
            run.recorder.acknowledge(content)
    for disk, known in run.disks():
        (disk / "packages").mkdir(parents=True, exist_ok=True)
        found = PackageStore(disk / "packages")
        for content in known:
            assert found.get(hashlib.sha256(content).hexdigest()) == content
        for content in contents:  # and it can be put again, whatever lies there
            found.put(hashlib.sha256(content).hexdigest(), content)


def test_a_name_whose_folder_is_not_synced_is_found_to_be_lost(run: Run):
    """The check can fail: files that are synced and renamed, and their folder is not."""
    run.settled()
    with run.recorder.recording(run.folder) as run.events:
        for number in range(30):
            with (run.folder / ".new").open("wb") as file:
                file.write(b"x")
                file.flush()
                os.fsync(file.fileno())
            os.replace(run.folder / ".new", run.folder / str(number))
            run.recorder.acknowledge(number)
    lost = sum(not (disk / str(number)).exists() for disk, known in run.disks() for number in known)
    assert lost > 10


def _step_world(folder: Path) -> StepWorld:
    return StepWorld(rows=SqliteRows(folder / "rows"), log=EmbeddedLog(folder / "bus"))


def _close(world: StepWorld) -> None:
    world.rows._files.discard(world.rows._path(REF))
    world.log.close()


def test_a_write_without_a_sync_is_found_to_be_lost(run: Run):
    """The check can fail: SQLite that does not sync its commits loses acknowledged ones."""
    path = run.folder / "loose.db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE t (n INTEGER)")
    connection.close()
    run.settled()
    with run.recorder.recording(run.folder) as run.events:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA synchronous=NORMAL")
        for number in range(30):
            connection.execute("INSERT INTO t VALUES (?)", (number,))
            run.recorder.acknowledge(number)
        connection.close()
    lost = 0
    for disk, known in run.disks():
        connection = sqlite3.connect(disk / "loose.db")
        found = [n for (n,) in connection.execute("SELECT n FROM t ORDER BY n")]
        connection.close()
        assert found == list(range(len(found)))
        lost += len(found) < len(known)
    assert lost > 10
