"""A fleet for drills: a real control plane, real containers, tasks that mark; and what must hold of the marks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.client import new_key
from penstock.container.host import reap_container
from penstock.db.database import Database
from penstock.db.journal_store import JournalStore
from penstock.fleet.shard_load import SHARD_COUNT, shard_of
from tests.builders import a_process
from tests.drills import marks as judge
from tests.drills.marks import Overlap, Run, worker_command
from tests.e2e.platform import Platform, members_of, pause
from tests.tidy_rules import ROOT

JOBS = ("drill.left", "drill.right")
TASKS_PER_JOB = 3
DATABASE = "PENSTOCK_DATABASE"


class DrillFleet(Platform):
    """`penstock up` on a port that stays, containers of its own or that joined, and the marks of their tasks."""

    def __init__(self, folder: Path, *, containers: int = 0, database: str = "") -> None:
        environment = {DATABASE: database} if database else {}
        super().__init__(
            folder / "penstock",
            containers=containers,
            engine="process",
            port=_free_port(),
            environment=environment,
        )
        self._root, self._database = folder, database
        self.marks = folder / "marks"
        self.marks.mkdir()
        self.hosts: dict[str, subprocess.Popen[bytes]] = {}
        self._folders: dict[str, Path] = {}
        self._container_tokens: dict[str, str] = {}

    def __enter__(self) -> DrillFleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing survives, whoever was killed on the way."""
        for host in self.hosts.values():
            if host.poll() is None:
                host.kill()
                host.wait()
        super().kill()
        for folder in (*self._folders.values(), *(self.folder / "containers").glob("*/")):
            reap_container(folder)

    @property
    def port(self) -> int:
        return self._port

    # -- containers that joined -------------------------------------------------------------------------

    def join(
        self, name: str, *, port: int = 0, database: str = "", folder: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """A container with a host of its own, through a port that may be a proxy's."""
        home = folder or self._root / name
        home.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "penstock.cli.main", "container", "--name", name, "--dir", str(home)]
        token = (
            self._container_tokens.get(name)
            or self.client.issue_token(name, "container", days=1, why="a drill", key=f"token-{name}")["token"]
        )
        self._container_tokens[name] = token
        environment = {**os.environ, "PENSTOCK_TOKEN": token} | ({DATABASE: database} if database else {})
        with (home / "host.log").open("ab") as output:
            host = subprocess.Popen(
                [*command, "--join", f"http://127.0.0.1:{port or self.port}"],
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env=environment,
            )
        key = name if folder is None else f"{name} in {home}"
        self.hosts[key], self._folders[key] = host, home
        return host

    def home_of(self, container: str) -> Path:
        """A container's own folder."""
        return self._folders.get(container, self.folder / "containers" / container)

    def warden_pid(self, container: str) -> int:
        return int((self.home_of(container) / "warden.pid").read_text())

    def processes_of(self, container: str, *, with_host: bool = False) -> list[int]:
        """Everything that dies with a container's machine: its host first, or it clears up after the others."""
        pids = members_of(self.warden_pid(container)) + members_of(self.engine_pid(container))
        return [self.hosts[container].pid, *pids] if with_host else pids

    def freeze(self, container: str) -> Callable[[], None]:
        """SIGSTOP everything of a container; returns what wakes it."""
        wakers = [pause(self.warden_pid(container)), pause(self.engine_pid(container))]

        def wake() -> None:
            for waker in reversed(wakers):
                waker()

        return wake

    def await_ready(self, *names: str) -> None:
        self.wait(f"{', '.join(names)}", lambda: set(names) <= self.ready(), seconds=60)

    def container(self, name: str) -> dict[str, Any]:
        """Its line in `penstock container ls`."""
        return next(row for row in self.client.containers() if row["name"] == name)

    # -- tasks ------------------------------------------------------------------------------------------

    def run_jobs(self, *, linger_s: float = 0) -> None:
        """Two jobs; returns when every task marks and no shard moves any more."""
        for job in JOBS:
            config = a_process(
                job, task_count=TASKS_PER_JOB, command=worker_command(self.marks, linger_s=linger_s)
            )
            self.client.apply_job(job, config, why="a drill", key=new_key())
        self.await_marks(self.tasks)
        self.await_still()
        self.wait("every task where its shard is", self._is_at_home)
        self.await_marks(self.tasks)
        print(f"\n  fleet: {self.spread()}", flush=True)

    def _is_at_home(self) -> bool:
        """A shard has its new owner before that one has started the shard's tasks."""
        owners = {row["shard"]: row["container"] for row in self.client.shards()}
        places = {task: run.place for task, run in self.current().items()}
        return all(places[task] == owners[shard] for task, shard in self.shards_of_tasks.items())

    @property
    def shards_of_tasks(self) -> dict[str, int]:
        """Task, as marks name it -> its shard."""
        indices = range(TASKS_PER_JOB)
        return {f"{job}_{n}": shard_of(f"{job}/{n}", SHARD_COUNT) for job in JOBS for n in indices}

    @property
    def tasks(self) -> list[str]:
        """All there are, as marks name them."""
        return [f"{job}_{index}" for job in JOBS for index in range(TASKS_PER_JOB)]

    def runs(self) -> list[Run]:
        return judge.read_runs(self.marks)

    def current(self) -> dict[str, Run]:
        """Task -> its newest process."""
        return {run.task: run for run in self.runs()}

    def spread(self) -> dict[str, int]:
        """Container -> how many tasks it has, by their marks."""
        places = [run.place for run in self.current().values()]
        return {place: places.count(place) for place in sorted(set(places))}

    def tasks_on(self, container: str) -> list[str]:
        """What runs there, by its marks."""
        return sorted(task for task, run in self.current().items() if run.place == container)

    def busiest(self) -> str:
        """The container with the most tasks."""
        spread = self.spread()
        return max(spread, key=lambda name: (spread[name], name))

    def await_marks(self, tasks: Iterable[str]) -> None:
        wanted = list(tasks)

        def are_there() -> bool:
            runs = self.runs()
            return all(judge.is_marking(runs, task) for task in wanted)

        self.wait("every task to mark", are_there, seconds=60)

    def await_recovery(self, tasks: Iterable[str], fault: float, *, seconds: float = 60) -> float:
        """Wait until every one of these tasks has a process that began after the fault; how long the last took."""
        wanted = list(tasks)
        assert wanted, "nothing was broken"

        def are_back() -> bool:
            runs = self.runs()
            return all(judge.recovery_s(runs, task, fault) is not None for task in wanted)

        self.wait("the tasks to recover", are_back, seconds=seconds)
        runs = self.runs()
        return max(judge.recovery_s(runs, task, fault) or 0.0 for task in wanted)

    # -- what must hold ---------------------------------------------------------------------------------

    def assert_well(self) -> None:
        """At the end: every task marks, and over the whole time never two processes of one at once."""
        self.await_still()
        self.await_marks(self.tasks)
        overlaps = list(self.overlaps())
        assert not overlaps, "\n".join(str(overlap) for overlap in overlaps)

    def overlaps(self) -> list[Overlap]:
        """Where two took effect at once; epochs grew from owner to owner in any case."""
        runs = self.runs()
        assert not list(judge.epochs_out_of_order(runs))
        return list(judge.overlaps_in(runs))

    def assert_undisturbed(self, before: dict[str, Run], since: float, *, silence_s: float = 2.5) -> None:
        """These processes are still the only ones of their tasks, and never fell silent.

        Tasks that the Shard Manager moved to balance loads are left out: they use more or less CPU than a
        moment ago, which is no trace of the fault. One at least has to be left to look at.
        """
        runs, balanced = self.runs(), self._balanced(since)
        kept = {task: run for task, run in before.items() if task not in balanced}
        assert kept, f"every task was moved to balance loads: {balanced}"
        for task, old in kept.items():
            later = [run for run in judge.runs_of(runs, task) if run.last >= since]
            assert [run.pid for run in later] == [old.pid], f"{task} was restarted: {later}"
            assert later[0].longest_silence(since) < silence_s, f"{task} fell silent"

    def _balanced(self, since: float) -> set[str]:
        """The tasks whose shards were moved from container to container, as the journal in the store says."""
        since_ms = (time.time() - (time.monotonic() - since)) * 1000
        database = Database(self._database or self.folder / "store.db")
        try:
            entries = JournalStore(database).entries(limit=1000, kind="placement")
        finally:
            database.close()
        moves = [entry.data.get("moves", {}) for entry in entries if entry.at_ms >= since_ms]
        shards = {int(shard) for found in moves for shard, (source, _) in found.items() if source}
        return {task for task, shard in self.shards_of_tasks.items() if shard in shards}


def kill_all(pids: Iterable[int]) -> float:
    """SIGKILL them; returns when."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def watch_for(seconds: float, what: str) -> None:
    """Let time pass, and say so."""
    print(f"  … {seconds:.0f} s: {what}", flush=True)
    time.sleep(seconds)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
