"""Are the two lists of docs/code.md true? They name the files that a record and a config change pass, in all processes.

`penstock up` runs as a user has it, with one container. The loops of the control plane tick all the time, so of what is
entered during a change that counts which nobody enters while nothing happens. For a record nothing is left out: Spark
has a batch at every trigger, and one with a record goes the same way as an empty one. Nobody sees
`streams/spark/planner_client.py`, which Spark starts without anything that a test could add.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.platform import Platform
from tests.support.entered_files import Entry, Watch
from tests.test_docs import DOCS, FUNCTION, readme_code, section
from tests.tidy_rules import ROOT

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1500)]

BY_SHOP, TOTAL = "shops.by_shop", "shops.running_total"
# Who writes and reads, what plans batches, and what they run in.
DATA_PATH = {"caller", "planner", "worker"}
# Loops that look on, or move shards: what they enter depends on the minute and on the load.
LOOKS_ON = (
    "shard manager",
    "bus",
    "resources",
    "metrics",
    "capacity",
    "alarms",
    "policies",
    "users' policies",
)
# A turn in which nothing happens: a batch of each job, a request for the task list, a heartbeat, the slowest loops.
TURN = {
    "IntervalStreamReader.latestOffset",
    "StatelessStep.begin",
    "StatefulStep.run",
    "Client.task_list",
    "Client.beat",
    "MetricRecorder.tick",
    "CapacityManager.tick",
}
TURNS = 3  # so many, one after another, enter nothing new
PLANS = {"IntervalStreamReader.initialOffset", "IntervalStreamReader.partitions"}  # of the first batch
STEP = re.compile(r"^\d+\. (.*(?:\n {3}.*)*)", re.M)

Entered = dict[str, list[Entry]]  # by file


class Shops(Platform):
    """The pipeline of the README in an installation whose processes are watched."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.watch = Watch(folder / "watch")
        super().__init__(folder / "penstock", containers=1)
        self._till: subprocess.Popen[str] | None = None
        self._sold = 0

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": self.watch.path}

    def open(self) -> None:
        """Start it, submit the pipeline, and wait for its tasks."""
        self.start()
        pipeline = self.folder / "shops.py"
        pipeline.write_text(readme_code(0), encoding="utf-8")
        columns = ("--columns", "shop:string,amount:double,ts:bigint", "--ts", "ts")
        self._must("category", "sales", "--create", "--partitions", "4", *columns)
        self._must("submit", str(pipeline), "--why", "first release")
        self.wait("its tasks", lambda: self._runs(BY_SHOP, 1) and self._runs(TOTAL, 1))
        self._till = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.till", f"embedded:{self.folder.resolve() / 'bus'}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=self._environment,
        )

    def close(self) -> None:
        """Whatever happens, nothing of it survives the test."""
        if self._till is not None:
            self._till.kill()
            self._till.communicate()
        self.kill()

    def sell(self) -> int:
        """One record, until its result is read from the sink; returns the phase."""
        phase = self.watch.begin()
        self._sold += 1
        self._ask(do="sell", shop="north", amount=1.0, ts=self._sold * 1000)
        self.wait("the total", lambda: self._sold in self._ask(do="read"))
        return phase

    def change(self, tasks: int) -> int:
        """Give the second job so many tasks, until each has planned a batch; returns the phase."""
        phase = self.watch.begin()
        self._must("oncall", "set", TOTAL, f"task_count={tasks}", "--why", "a test")
        self.wait("the new tasks", lambda: self._runs(TOTAL, tasks))
        self.wait("their batches", lambda: self._planners(phase) >= tasks)
        return phase

    def idle(self) -> list[int]:
        """Nothing happens, until everybody has had turns that entered nothing new; returns the phases."""
        phases: list[int] = []
        known: set[str] = set()
        turns = 0
        while turns < TURNS:
            phases.append(self.watch.begin())
            self.wait("a turn", lambda: {entry.function for entry in self.watch.entries(phases[-1])} >= TURN)
            found = {entry.file for entry in self.watch.entries(*phases) if entry.thread not in LOOKS_ON}
            turns = turns + 1 if found == known else 0
            known = found
        return phases

    def _must(self, *arguments: str) -> None:
        done = self.cli(*arguments)
        assert done.returncode == 0, done.stderr

    def _ask(self, **asked: Any) -> Any:
        assert self._till is not None and self._till.stdin is not None and self._till.stdout is not None
        self._till.stdin.write(json.dumps(asked) + "\n")
        self._till.stdin.flush()
        return json.loads(self._till.stdout.readline())

    def _runs(self, job: str, tasks: int) -> bool:
        """Whether no plan is left, and all tasks of the job run.

        It is seen in the store: a request would be answered by the processes that are watched.
        """
        store = sqlite3.connect(f"file:{self.folder / 'store.db'}?mode=ro", uri=True)
        try:
            plans = store.execute("SELECT count(*) FROM plans").fetchone()[0]
            generation = store.execute("SELECT generation FROM running WHERE job = ?", (job,)).fetchone()
            reports = [json.loads(found) for (found,) in store.execute("SELECT tasks FROM containers")]
        finally:
            store.close()
        states = [
            task["state"]
            for report in reports
            for task in report
            if (task["job"], (task["generation"],)) == (job, generation)
        ]
        return not plans and states == ["running"] * tasks

    def _planners(self, phase: int) -> int:
        """How many processes have planned their first batch in this phase."""
        entered: dict[int, set[str]] = {}
        for entry in self.watch.entries(phase):
            entered.setdefault(entry.pid, set()).add(entry.function)
        return sum(functions >= PLANS for functions in entered.values())


@dataclass(frozen=True)
class Measured:
    """What was entered, each phase by itself."""

    records: list[Entered]
    idle: Entered
    changes: list[Entered]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    """Plan: a few records; nothing; two changes with nothing between them."""
    shops = Shops(tmp_path_factory.mktemp("shops") / "watched")
    try:
        shops.open()
        shops.sell()  # it waits until both queries have started
        records = [shops.sell() for _ in range(4)]
        idle = shops.idle()
        changes = [shops.change(2)]
        idle += shops.idle()
        changes.append(shops.change(1))
        watch = shops.watch
        yield Measured(
            records=[by_file(e for e in watch.entries(phase) if e.role in DATA_PATH) for phase in records],
            idle=by_file(e for e in watch.entries(*records, *idle) if not looks_on(e)),
            # A change is done when the queries run: what their workers do is the way of a record.
            changes=[
                by_file(e for e in watch.entries(phase) if not looks_on(e) and e.role != "worker")
                for phase in changes
            ],
        )
    finally:
        shops.close()


def looks_on(entry: Entry) -> bool:
    return entry.role == "control plane" and entry.thread.removesuffix(" worker") in LOOKS_ON


def by_file(entries: Iterable[Entry]) -> Entered:
    """`core/` is used everywhere, and no step of its own."""
    found: Entered = {}
    for entry in entries:
        if not entry.file.startswith("core/"):
            found.setdefault(entry.file, []).append(entry)
    return found


def differences(way: str, phases: list[Entered], *, idle: Entered) -> str:
    """What a list names and not every phase enters, and what every phase enters, idle ones do not, and it leaves out.

    What one phase enters and another does not is chance: a worker that was just forked opens its files.
    """
    found, listed = [], set()
    for step in STEP.findall(section(DOCS / "code.md", way)):
        for file, function in FUNCTION.findall(step):
            listed.add(file)
            if not all(function in {entry.function for entry in phase.get(file, [])} for phase in phases):
                found.append(f"named, but not entered: {file}: {function}")
    common = set.intersection(*(set(phase) for phase in phases))
    for file in sorted(common - idle.keys() - listed):
        first = min(phases[-1][file], key=lambda entry: "<" in entry.function)  # a name, if there is one
        found.append(f"entered, but not named: {file}: {first.function} ({first.role}, {first.thread})")
    return "\n".join(found)


def test_a_record_passes_the_files_of_its_list_and_no_others(measured: Measured):
    found = differences("A record's way through the code", measured.records, idle={})
    assert not found, found


def test_a_config_change_passes_the_files_of_its_list_and_no_others(measured: Measured):
    found = differences("A config change's way through the code", measured.changes, idle=measured.idle)
    assert not found, found
