"""`make demo`, first part: where things run. Three containers, twelve jobs of plain processes, no Java.

One container is killed with -9: its tasks run elsewhere, and when it is back it gets its share again. Then
all jobs are released at once. Every process writes down when it lived, so at the end it is known that no task
ever ran twice at a time. Exit code 0: every claim held. Everything is in a temporary folder, and nothing is
left running.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import traces
from rich.console import Console
from rich.table import Table

from penstock.cli.connection import connect
from penstock.client import Client, new_key
from penstock.core.errors import EnvironmentProblem, PenstockError

WORKER = Path(__file__).with_name("worker.py")
CONTAINERS = ("c1", "c2", "c3")
JOBS = tuple(f"fleet.job{number:02}" for number in range(1, 13))
TASKS_PER_JOB = 2
TASKS = len(JOBS) * TASKS_PER_JOB
FAILOVER_S, REBALANCE_S, RELEASE_S = 20.0, 40.0, 30.0
console = Console(highlight=False)


class Demo:
    """The story, step by step; each step says what it waits for and how long it took."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._traces, self._began = folder, folder / "traces", time.monotonic()
        self._up: subprocess.Popen[bytes] | None = None
        self.failures: list[str] = []
        self.numbers: dict[str, str] = {}

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
        with (self._folder / "up.log").open("wb") as output:
            self._up = subprocess.Popen(
                [
                    *(sys.executable, "-m", "penstock.cli.main", "up", "--engine", "process"),
                    *("--folder", str(self._folder), "--port", "0", "--containers", str(len(CONTAINERS))),
                ],
                stdout=output,
                stderr=output,
            )
        self._wait("the API answers", lambda: (self._folder / "endpoint.json").exists())
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

    def stop(self) -> None:
        """End everything that was started, and see that it has ended."""
        if self._up is None:
            return
        kin = psutil.Process(self._up.pid).children(recursive=True) if self._up.poll() is None else []
        self._up.send_signal(signal.SIGTERM)
        try:
            self._up.wait(40)
        except subprocess.TimeoutExpired:
            self._up.kill()
            self.failures.append("penstock up did not stop in 40 s")
        left = psutil.wait_procs(kin, timeout=5)[1]
        for process in left:
            process.kill()
        if left:
            self.failures.append(f"{len(left)} processes were left running")
        self._say(
            "stopped; nothing is left running" if not left else f"{len(left)} processes had to be killed"
        )

    def _alive(self, version: str) -> int:
        """How many tasks live under a version, by their own word."""
        return sum(life.version == version for life in traces.alive(self._traces).values())

    def _claim(self, what: str, took_s: float, limit_s: float) -> None:
        self.numbers[what] = f"{took_s:.1f} s (limit {limit_s:.0f} s)"
        if took_s > limit_s:
            self.failures.append(f"{what}: took {took_s:.1f} s, more than {limit_s:.0f} s")

    def _say(self, text: str) -> None:
        console.print(f"[dim]{time.monotonic() - self._began:6.1f} s[/]  {text}")

    def _wait(self, what: str, condition: Callable[[], bool], *, seconds: float = 60) -> float:
        began = time.monotonic()
        with console.status(f"waiting: {what}"):
            while not _holds(condition):
                if self._up is None or self._up.poll() is not None:
                    raise EnvironmentProblem(
                        "penstock up ended", why=_tail(self._folder / "up.log"), fix="see the message above"
                    )
                if time.monotonic() - began > seconds:
                    raise EnvironmentProblem(
                        f"gave up waiting: {what}",
                        why=f"it did not happen within {seconds:.0f} s",
                        fix="look at the logs in the folder named below",
                    )
                time.sleep(0.1)
        took = time.monotonic() - began
        self._say(f"[green]✓[/] {what} [dim]({took:.1f} s)[/]")
        return took


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


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except PenstockError:
        return False  # not there yet, or not answering for a moment


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


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:])


def main() -> int:
    """Run it, print the numbers, clear up, say whether it held."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-fleet-"))
    demo, began = Demo(folder), time.monotonic()
    try:
        demo.run()
    except PenstockError as error:
        demo.failures.append(str(error))
    except KeyboardInterrupt:
        demo.failures.append("interrupted")
    finally:
        demo.stop()
    demo.judge()
    table = Table(title="the fleet in numbers", title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right")
    for what, measured in [*demo.numbers.items(), ("whole part", f"{time.monotonic() - began:.0f} s")]:
        table.add_row(what, measured)
    console.print(table)
    for failure in demo.failures:
        console.print(f"[bold red]failed:[/] {failure}", markup=True)
    if demo.failures:
        console.print(f"logs are kept in {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    console.print("[bold green]nothing lost, nothing doubled[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
