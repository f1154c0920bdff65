"""`make demo`, first part: where things run. Three containers, twelve jobs of plain processes, no Java.

One container is killed with -9: its tasks run elsewhere, and when it is back it gets its share again. Then
all jobs are released at once. Every process writes down when it lived, so at the end it is known that no task
ever ran twice at a time. Exit code 0: every claim held. Everything is in a temporary folder, and nothing is
left running.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import traces
from story import Story, tell

from penstock.cli.output import connect
from penstock.client import Client, new_key

WORKER = Path(__file__).with_name("worker.py")
CONTAINERS = ("c1", "c2", "c3")
JOBS = tuple(f"fleet.job{number:02}" for number in range(1, 13))
TASKS_PER_JOB = 2
TASKS = len(JOBS) * TASKS_PER_JOB
FAILOVER_S, REBALANCE_S, RELEASE_S = 20.0, 40.0, 30.0


class Demo(Story):
    """The story of a fleet."""

    @property
    def _traces(self) -> Path:
        return self._folder / "traces"

    def run(self) -> None:
        """Everything, in order."""
        self._traces.mkdir()
        self._start()
        with connect(self._folder) as client:
            self._submit(client)
            victim = self._kill_a_container(client)
            self._rebalance(client, victim)
            self._release(client)

    def _start(self) -> None:
        self._say("starting a control plane and three containers for plain processes")
        self._start_up("--engine", "process", "--containers", str(len(CONTAINERS)))
        with connect(self._folder) as client:
            self._wait("three containers are ready", lambda: _ready(client) == set(CONTAINERS))

    def _submit(self, client: Client) -> None:
        for job in JOBS:
            client.apply_job(job, _config(job, self._traces), why="the demo", key=new_key())
        self._say(f"applied {len(JOBS)} jobs of {TASKS_PER_JOB} tasks each")
        took = self._wait(f"{TASKS} tasks run", lambda: self._alive("1") == TASKS)
        self.numbers["first start of all tasks"] = f"{took:.1f} s"
        self._wait("they are spread", lambda: _is_spread(client))
        self._say(f"tasks per container: {_say_spread(_spread(client))}")

    def _kill_a_container(self, client: Client) -> str:
        spread = _spread(client)
        victim = max(spread, key=lambda name: (spread[name], name))
        lost = {task["task_id"] for task in client.tasks(container=victim)}
        warden = int((self._folder / "containers" / victim / "warden.pid").read_text())
        engine = next(row["pid"] for row in client.containers() if row["name"] == victim)
        began_ms = traces.now_ms()
        self._say(f"kill -9 of {victim}, its warden and its engine; {len(lost)} tasks are on it")
        for pid in (warden, engine):
            os.kill(pid, signal.SIGKILL)
        took = self._wait(
            f"all {len(lost)} run elsewhere",
            lambda: (
                {task["task_id"] for task in _running(client) if task["container"] != victim} >= lost
                and self._alive("1") == TASKS
            ),
        )
        gap_s = traces.longest_gap_ms(self._traces, since_ms=began_ms) / 1000
        self._claim("tasks of a killed container run elsewhere", took, FAILOVER_S)
        self.numbers["longest pause of any of them"] = f"{gap_s:.1f} s"
        for entry in client.journal(subject=victim)[-2:]:
            self._say(f"journal: {entry['decision']}, because {entry['reason']}")
        return victim

    def _rebalance(self, client: Client, victim: str) -> None:
        began = time.monotonic()
        self._wait(f"{victim} is back, new and empty", lambda: victim in _ready(client))
        self._wait(f"{victim} has its share again", lambda: _is_spread(client))
        self._claim("a returned container has its share again", time.monotonic() - began, REBALANCE_S)
        self._say(f"tasks per container: {_say_spread(_spread(client))}")
        self._wait(f"{TASKS} tasks run", lambda: self._alive("1") == TASKS)

    def _release(self, client: Client) -> None:
        began_ms = traces.now_ms()
        self._say(f"a release of all {len(JOBS)} jobs: version 1 → 2")
        for job in JOBS:
            client.patch_layer(
                job, "provisioner", {"arguments.version": "2"}, why="second release", key=new_key()
            )
        took = self._wait(f"{TASKS} tasks run version 2", lambda: self._alive("2") == TASKS)
        gap_s = traces.longest_gap_ms(self._traces, since_ms=began_ms) / 1000
        self._claim("a release of all jobs reaches every task", took, RELEASE_S)
        self.numbers["longest pause of any task in it"] = f"{gap_s:.1f} s"

    def judge(self) -> None:
        """Read what the processes wrote down."""
        twice = traces.overlaps(self._traces) if self._traces.is_dir() else []
        lives = sum(len(traces.lives_of(path)) for path in self._traces.iterdir())
        self.numbers["processes started in all"] = str(lives)
        self.numbers["times a task ran twice at once"] = str(len(twice))
        self.failures += [f"a task ran twice at once: {case}" for case in twice[:5]]

    def _alive(self, version: str) -> int:
        """How many tasks live under a version, by their own word."""
        return sum(life.version == version for life in traces.alive(self._traces).values())

    def _claim(self, what: str, took_s: float, limit_s: float) -> None:
        self.numbers[what] = f"{took_s:.1f} s (limit {limit_s:.0f} s)"
        if took_s > limit_s:
            self.failures.append(f"{what}: took {took_s:.1f} s, more than {limit_s:.0f} s")


def _config(job: str, folder: Path) -> dict[str, Any]:
    return {
        "name": job,
        "pipeline": "fleet",
        "kind": "process",
        "task_count": TASKS_PER_JOB,
        "arguments": {"version": "1"},
        "command": [sys.executable, str(WORKER), str(folder), "{task}", "{arguments.version}"],
        "resources": {"cpu": 0.1, "memory_mb": 128},
    }


def _ready(client: Client) -> set[str]:
    return {row["name"] for row in client.containers() if row["ready"] and row["state"] == "live"}


def _running(client: Client) -> list[dict[str, Any]]:
    live = _ready(client)
    return [task for task in client.tasks() if task["state"] == "running" and task["container"] in live]


def _spread(client: Client) -> dict[str, int]:
    """Container -> how many running tasks it has."""
    found = Counter(task["container"] for task in _running(client))
    return {name: found[name] for name in CONTAINERS}


def _is_spread(client: Client) -> bool:
    """Whether all run, and no container has less than half its share."""
    spread = _spread(client)
    return sum(spread.values()) == TASKS and min(spread.values()) * 2 >= TASKS // len(CONTAINERS)


def _say_spread(spread: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in spread.items())


if __name__ == "__main__":
    sys.exit(tell(Demo, title="the fleet in numbers", whole="whole part", more=list))
