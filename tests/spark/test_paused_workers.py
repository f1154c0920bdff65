"""Claims about a Python worker of Spark that stands still, or dies, in a batch while a successor takes over."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.container.task_manager import TaskManager, TaskManagerSettings
from penstock.core.system_clock import SystemClock
from penstock.fleet.messages import HeartbeatReply, HeartbeatVerdict, ShardEntry, TaskReport
from penstock.fleet.shard_load import shard_of
from penstock.fleet.task_service import TaskList
from penstock.jobs.config import JobConfig
from penstock.jobs.tasks import FINAL
from penstock.streams.data_plane import intervals_of
from tests.spark.test_tasks import CATEGORY, publish
from tests.support.stage import Stage, wait_for

PIPELINE = """
import os
import time
from pathlib import Path

from penstock import Computation, Pipeline, Value

FOLDER = Path({folder!r})


class Running(Computation):
    outputs = {{"out": {{"query": "string", "n": "bigint", "by": "bigint"}}}}
    n = Value(int)

    def process_record(self, record, ctx):
        ctx.state.n += 1
        ctx.produce({{"query": ctx.key, "n": ctx.state.n, "by": os.getpid()}})
        if record.ts == {at}:
            self.meet()

    def meet(self):
        # The first who comes here says who it is, and waits to be stopped and told to go on.
        try:
            with (FOLDER / "met").open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return
        (FOLDER / "met").rename(FOLDER / "pid")
        (FOLDER / "met").touch()
        while not (FOLDER / "go").exists():
            time.sleep(0.01)
        (FOLDER / "went").touch()


p = Pipeline("paused", partitions=1)
p.source("queries").key_by("query", name="keyed").process(Running, name="running").sink("paused_out")
"""
KEYED, RUNNING = "paused.keyed", "paused.running"
KEYS, FIRST, BEHIND, LAST = 5, 100, 200, 300
STOP_AT = 150  # a record in the middle of the second lot
SHARDS = 16


def lot(first: int, end: int) -> list[tuple[str, int, bytes]]:
    """Records by their event times: key, time, JSON."""
    rows = ({"query": f"q{ts % KEYS}", "lang": "en", "ts": ts} for ts in range(first, end))
    return [(str(row["ts"]), row["ts"], json.dumps(row).encode()) for row in rows]


@contextmanager
def paused(pid: int) -> Iterator[Callable[[], None]]:
    """A process that stands still until it is told to go on, or the test is over."""
    os.kill(pid, signal.SIGSTOP)
    is_paused = [True]

    def go_on() -> None:
        if is_paused.pop():
            os.kill(pid, signal.SIGCONT)

    try:
        yield go_on
    finally:
        if is_paused:
            go_on()


class Container:
    """A Task Manager over an engine: who is told once that it owns a task, and hears of no change."""

    def __init__(self, stage: Stage, job: str) -> None:
        self._clock, self._task = SystemClock(), f"{job}/0"
        self.engine = stage.new_engine()
        self._manager = TaskManager(
            self.engine, settings=TaskManagerSettings(backoff_ms=100, backoff_max_ms=100)
        )
        (spec,) = stage.specs(job)
        self._manager.on_task_list(TaskList(version=1, full=True, jobs={job: (spec,)}), self._clock.boot_ms())
        entry = ShardEntry(shard=shard_of(self._task, SHARDS), epoch=1)
        reply = HeartbeatReply(
            verdict=HeartbeatVerdict.OK,
            term=1,
            sequence=1,
            assignment_version=1,
            shards=(entry,),
            shard_count=SHARDS,
            list_version=1,
        )
        self._manager.on_reply(reply, self._clock.boot_ms())

    def turn(self) -> TaskReport:
        """One round, and what it says of the task."""
        self._manager.tick(self._clock.boot_ms())
        (report,) = self._manager.report().tasks
        return report


def stored(stage: Stage) -> tuple[Any, ...]:
    """All that a worker could have changed: the interval's row, its states and timers, the bus."""
    (ref,) = intervals_of(RUNNING, stage.birth(RUNNING), JobConfig.from_stored(stage.configs[RUNNING]))
    row = stage.rows.peek(ref)
    states = stage.rows.scan(ref, start="", limit=1000)
    timers = stage.rows.scan_timers(ref, start=("", ""), limit=1000)
    return row, states, timers, stage.records("paused_out"), stage.log.watermark("paused_out")


def test_a_worker_that_was_paused_in_a_batch_writes_and_publishes_nothing(spark: Any, tmp_path: Path) -> None:
    """Plan: the worker stops in user code; a successor acquires, does its batch and more; the worker goes on.

    The old container is told nothing: only the token stands between the worker and the rows and the bus.
    """
    path = tmp_path / "paused.py"
    path.write_text(PIPELINE.format(folder=str(tmp_path), at=STOP_AT))
    stage = Stage(spark, tmp_path, path, CATEGORY)
    injector = stage.injector("queries")
    old = Container(stage, RUNNING)
    ids = stage.start(KEYED)
    publish(stage, lot(0, FIRST), injector, now_ms=1000)

    def is_there(count: int) -> bool:
        old.turn()
        return sum(stage.log.end_offsets("paused_out")) >= count

    wait_for(lambda: is_there(FIRST), "the first results")
    publish(stage, lot(FIRST, BEHIND), injector, now_ms=2000)
    wait_for(lambda: is_there(FIRST) and (tmp_path / "pid").exists(), "the worker to come to the record")
    zombie = int((tmp_path / "pid").read_text())
    with paused(zombie) as go_on:
        (tmp_path / "go").touch()
        ids += stage.start(RUNNING, epoch=2)
        publish(stage, lot(BEHIND, LAST), injector, now_ms=3000)
        injector.close(now_ms=4000)
        wait_for(lambda: is_there(LAST), "the successor to do the batch and what came after it")
        before: list[tuple[Any, ...]] = []

        def is_at_rest() -> bool:
            before.append(stored(stage))
            return before[-5:] == [before[-1]] * 5

        wait_for(is_at_rest, "the successor to rest")
        assert not (tmp_path / "went").exists() and old.turn().state == "running"
        go_on()
        wait_for(lambda: old.turn().state == "fenced", "the old task to end")
    assert (tmp_path / "went").exists(), "it was this worker's step that was refused"
    assert stored(stage) == before[-1]
    rows = stage.records("paused_out")
    expected = sorted((f"q{key}", n) for key in range(KEYS) for n in range(1, LAST // KEYS + 1))
    assert sorted((row["query"], row["n"]) for row in rows) == expected
    # What came before that record may have been a batch of its own, which the worker had finished.
    theirs = {row["by"] for row in rows if row["n"] > STOP_AT // KEYS}
    assert zombie not in theirs, "what the worker did of its batch is nowhere"

    clock = SystemClock()
    until_ms = clock.boot_ms() + 3000  # thirty times the wait before a restart
    while clock.boot_ms() < until_ms:
        report = old.turn()
        assert (report.state, report.restarts) == ("fenced", 0) and not old.engine.poll()
    assert stored(stage) == before[-1]
    assert {view.state for view in stage.tasks.poll()} == {"running"}
    stage.stop(ids)
    assert not stage.deaths


@pytest.mark.parametrize(("is_replaced", "expected"), [(True, "fenced"), (False, "failed")])
def test_a_worker_that_dies_is_a_crash_unless_its_task_has_a_successor(
    spark: Any, tmp_path: Path, is_replaced: bool, expected: str
) -> None:
    """The worker is killed in user code: it tells nobody that it was fenced, so the engine looks."""
    path = tmp_path / "paused.py"
    path.write_text(PIPELINE.format(folder=str(tmp_path), at=STOP_AT))
    stage = Stage(spark, tmp_path, path, CATEGORY)
    injector = stage.injector("queries")
    ids = stage.start(KEYED)
    old = stage.new_engine()
    stage.start(RUNNING, engine=old)
    publish(stage, lot(0, BEHIND), injector, now_ms=1000)
    wait_for((tmp_path / "pid").exists, "the worker to come to the record")
    if is_replaced:
        (spec,) = stage.specs(RUNNING)
        stage.tasks.open(spec, 2)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    wait_for(lambda: all(view.state in FINAL for view in old.poll()), "the old task to end")
    (view,) = old.poll()
    assert view.state == expected, view.error
    assert ("has a new owner" in view.error) == is_replaced
    stage.stop(ids)
