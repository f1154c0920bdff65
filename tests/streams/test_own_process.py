"""A task that tells how it is in a file: its states, its last word, and what an end by force says."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.container.engine import ISOLATED, KindRunner
from penstock.container.process_runner import ProcessRunner
from penstock.core.errors import NotFound
from penstock.core.system_clock import SystemClock
from penstock.jobs.tasks import FINAL, Runner, RunState, RunStatus, TaskSpec
from penstock.streams.spark.own_process import STATUS_FILE, STOP_FILE, OwnProcessRunner
from tests.fleet.harness import a_spec
from tests.waiting import until

# Says what it is told to say, waits for the stop file, then says a last word and ends with a code.
TELLER = """
import json, os, sys, time
folder, first, last, code = sys.argv[1:5]
def say(state, error=""):
    open(folder + "/new", "w").write(json.dumps({"state": state, "error": error, "metrics": {"lag_records": 3}}))
    os.replace(folder + "/new", folder + "/status.json")
say(first)
while not os.path.exists(folder + "/stop"):
    time.sleep(0.02)
if last:
    say(last, "its own words")
sys.exit(int(code))
"""
HUNGRY = "import time; data = bytearray(300 * 2**20); time.sleep(600)"


class World:
    """A runner whose commands the test chooses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tasks" / "a_0"
        self.command: list[str] = []
        self.runner = OwnProcessRunner(
            ProcessRunner(folder / "p", SystemClock()), folder / "tasks", self._prepare
        )

    def _prepare(self, spec: TaskSpec, shard_epoch: int, folder: Path) -> list[str]:
        if not self.command:
            raise NotFound("there is no package", why="it was never stored here", fix="submit again")
        return [str(folder) if part == "FOLDER" else part for part in self.command]

    def start(self, *command: str, **config: object) -> None:
        self.command = [sys.executable, "-c", *command] if command else []
        self.runner.start(a_spec("a/0", config=config), shard_epoch=3)

    @property
    def status(self) -> RunStatus:
        (found,) = self.runner.poll()
        return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    for status in found.runner.poll():
        found.runner.kill(status.task_id)
    until(lambda: all(status.state in FINAL for status in found.runner.poll()))


def test_it_is_a_runner_and_follows_what_the_process_says(world: World):
    fits: Runner = world.runner
    world.start(TELLER, "FOLDER", "running", "stopped", "0")
    until(lambda: world.status.state is RunState.RUNNING)
    until(lambda: "memory_mb" in world.status.metrics)
    assert world.status.metrics["lag_records"] == 3
    fits.stop("a/0")
    until(lambda: world.status.state is RunState.STOPPED)
    fits.forget("a/0")
    assert fits.poll() == ()


@pytest.mark.parametrize("last", ["failed", "fenced"])
def test_its_last_word_is_its_end(world: World, last: str):
    world.start(TELLER, "FOLDER", "running", last, "1")
    until(lambda: world.status.state is RunState.RUNNING)
    (world.folder / STOP_FILE).touch()
    until(lambda: world.status.state in FINAL)
    assert (world.status.state, world.status.error) == (RunState(last), "its own words")


def test_a_process_that_ends_without_a_word_has_failed(world: World):
    world.start("import sys; sys.exit(70)")
    until(lambda: world.status.state is RunState.FAILED)
    assert "it ended with code 70" in world.status.error


def test_above_its_memory_it_is_ended_and_says_how_much_it_used(world: World):
    world.start(HUNGRY, resources={"memory_mb": 100})
    until(lambda: world.status.state is RunState.FAILED)
    said = re.fullmatch(r"out of memory: it used (\d+) MB and had reserved 100 MB", world.status.error)
    # A look may fall into the middle of its growth: above the limit is what counts, not how far.
    assert said and 100 < int(said[1]) <= 350
    assert world.status.metrics["memory_peak_mb"] > 100


def test_one_that_does_not_stop_is_killed(world: World):
    world.start("import time; time.sleep(600)")
    until(lambda: world.status.state is RunState.STARTING)
    world.runner.stop("a/0")
    assert world.status.state is RunState.STOPPING
    world.runner.kill("a/0")
    until(lambda: world.status.state is RunState.STOPPED)


def test_words_of_a_life_before_do_not_count(world: World):
    world.folder.mkdir(parents=True)
    (world.folder / STATUS_FILE).write_text(json.dumps({"state": "running"}))
    (world.folder / STOP_FILE).touch()
    world.start("import time; time.sleep(600)")
    assert world.status.state is RunState.STARTING


def test_what_cannot_be_prepared_is_a_run_that_failed(world: World):
    world.start()
    assert world.status.state is RunState.FAILED and "there is no package" in world.status.error
    world.runner.forget("a/0")
    assert world.runner.poll() == ()


def test_isolation_decides_which_runner_gets_a_task(world: World, tmp_path: Path):
    shared = ProcessRunner(tmp_path / "shared", SystemClock())
    runner = KindRunner({ISOLATED: world.runner}, shared)
    world.command = [sys.executable, "-c", "import time; time.sleep(600)"]
    runner.start(a_spec("a/0", config={"kind": "stateless", "isolation": "process"}), shard_epoch=1)
    assert [status.task_id for status in world.runner.poll()] == ["a/0"] and shared.poll() == ()
    refusing = KindRunner({}, None)
    refusing.start(a_spec("b/0", config={"kind": "stateless", "isolation": "process"}), shard_epoch=1)
    assert "cannot run tasks of kind" in refusing.poll()[0].error
