"""Where plain processes run, on real ones: a container joins, tasks are restarted, drained, killed and found again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.client import new_key
from tests.builders import a_process
from tests.e2e.platform import Platform
from tests.kin import kill_all, kin_of
from tests.tidy_rules import ROOT
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.timeout(900)
JOB = "demo.tick"
# Says who it is and what it was given, then writes down that it lives; one file per process.
WORKER = """
import os, pathlib, sys, time
folder, task = pathlib.Path(sys.argv[1]), sys.argv[2]
print(task, sorted(name for name in os.environ if name.startswith("PENSTOCK_")), flush=True)
path = folder / f"{task.replace('/', '_')}-{os.getpid()}"
while True:
    path.touch()
    time.sleep(0.05)
"""


class Fleet(Platform):
    """Two containers of the host, and one that joined."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, containers=2, engine="process")
        self.marks = folder.parent / "marks"
        self.marks.mkdir()
        self.far = folder.parent / "far"
        self.host: subprocess.Popen[bytes] | None = None

    def join(self) -> None:
        """A container from elsewhere, with a token of its own; the token is not among its arguments."""
        token = self.client.issue_token("far", "container", days=1, why="a test", key=new_key())["token"]
        url = str(self.client._link._url)
        command = [sys.executable, "-m", "penstock.cli.main", "container", "--join", url, "--name", "far"]
        self.far.mkdir()
        with (self.far / "host.log").open("ab") as output:
            self.host = subprocess.Popen(
                [*command, "--dir", str(self.far), "--region", "north"],
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, "PENSTOCK_TOKEN": token},
            )

    def kill(self) -> None:
        if self.host is not None and self.host.poll() is None:
            kin = kin_of(self.host.pid)
            self.host.kill()
            self.host.wait()
            kill_all(kin)
        super().kill()

    def tasks(self) -> dict[str, Any]:
        """Task -> its line, of those that run."""
        return {line["task_id"]: line for line in self.client.tasks(job=JOB) if line["state"] == "running"}

    def spread(self) -> dict[str, int]:
        """Container -> how many tasks run on it."""
        lines = self.tasks().values()
        return {name: sum(line["container"] == name for line in lines) for name in ("c1", "c2", "far")}

    def alive(self) -> dict[str, list[int]]:
        """Task -> the processes of it that live: they are there, and wrote it down a moment ago."""
        found: dict[str, list[int]] = {}
        limit = time.time() - 2
        for path in self.marks.iterdir():
            task, _, pid = path.name.rpartition("-")
            if path.stat().st_mtime >= limit and is_alive(int(pid)):
                found.setdefault(task, []).append(int(pid))
        return found

    def assert_each_once(self, tasks: int) -> None:
        self.wait(f"{tasks} tasks", lambda: len(self.alive()) == tasks and len(self.tasks()) == tasks)
        assert all(len(pids) == 1 for pids in self.alive().values()), self.alive()


def is_alive(pid: int) -> bool:
    """Whether a process can still do something: one that nobody has reaped yet cannot."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    found = Fleet(tmp_path / "penstock")
    try:
        found.start()
        yield found
    finally:
        found.kill()


def test_processes_run_once_wherever_they_go(fleet: Fleet) -> None:
    """Plan: a container joins; a job of six processes; look at them, restart one, drain the newcomer, take it back,
    kill its warden and engine with -9 (its host clears up and tells), let it leave in order, stop. No Java."""
    fleet.join()
    config = a_process(JOB, task_count=6, command=[sys.executable, "-c", WORKER, str(fleet.marks), "{task}"])
    fleet.client.apply_job(JOB, config, why="new", key=new_key())
    fleet.wait("the newcomer", lambda: "far" in fleet.ready())
    fleet.await_still()
    fleet.assert_each_once(6)

    # What it printed, and that nothing which opens doors was given to it.
    said = fleet.cli("task", "logs", f"{JOB}/3")
    if fleet.tasks()[f"{JOB}/3"]["container"] == "far":
        assert said.returncode == 3 and "cannot be reached" in said.stderr
        said_text = (fleet.far / "tasks" / "logs" / f"{JOB}_3.log").read_text()
    else:
        assert said.returncode == 0, said.stderr
        said_text = said.stdout
    assert said_text.startswith(f"{JOB}/3 ['PENSTOCK_COUNT', 'PENSTOCK_EPOCH'")
    assert not any(name in said_text for name in ("PENSTOCK_TOKEN", "PENSTOCK_DATABASE", "PENSTOCK_URL"))
    assert fleet.host is not None
    arguments = list(kin_of(fleet.host.pid).values())
    assert arguments and not any("pk_" in text for text in arguments)

    # One is restarted, and only that one.
    before = fleet.alive()
    assert fleet.cli("task", "restart", f"{JOB}/1", "--why", "it hangs").returncode == 0
    fleet.wait(
        "a new process", lambda: fleet.alive().get(f"{JOB}_1", before[f"{JOB}_1"]) != before[f"{JOB}_1"]
    )
    fleet.assert_each_once(6)
    after = fleet.alive()
    assert {task for task in before if before[task] != after[task]} == {f"{JOB}_1"}

    # Everything onto the newcomer and away from it again.
    for name in ("c1", "c2"):
        fleet.client.drain(name, why="new kernel")
    fleet.wait("all on the newcomer", lambda: fleet.spread()["far"] == 6)
    fleet.assert_each_once(6)
    explained = fleet.client.shard(fleet.tasks()[f"{JOB}/0"]["shard"])
    assert explained["container"] == "far" and explained["history"][-1]["decision"].endswith("→ far")

    # Its warden and its engine are killed; nobody but its host is there to end the orphaned tasks.
    for name in ("c1", "c2"):
        fleet.client.uncordon(name, why="it is back")
    lost = fleet.alive()
    for pid in (int((fleet.far / "warden.pid").read_text()), fleet.engine_pid("far")):
        os.kill(pid, signal.SIGKILL)
    fleet.wait("its tasks elsewhere", lambda: sum(fleet.spread().values()) - fleet.spread()["far"] == 6)
    fleet.assert_each_once(6)
    told = fleet.client.journal(subject="far", limit=100)
    assert "its exit was observed" in [entry["reason"] for entry in told if entry["decision"] == "dead"], told
    assert not any(is_alive(pid) for pids in lost.values() for pid in pids)

    # It comes back, and then leaves in order: its shards are elsewhere at once, and nothing of it is left.
    fleet.wait("the newcomer again", lambda: "far" in fleet.ready())
    kin = kin_of(fleet.host.pid)
    fleet.host.send_signal(signal.SIGTERM)
    assert fleet.host.wait(LIMIT_S) == 0
    assert psutil.wait_procs(kin, timeout=LIMIT_S)[1] == []
    states = {row["name"]: row["state"] for row in fleet.client.containers()}
    assert states["far"] == "dead"
    fleet.assert_each_once(6)
    assert fleet.stop() == []
    assert [path for path in fleet.marks.iterdir() if is_alive(int(path.name.rpartition("-")[2]))] == []
