"""A real `penstock up` in a temporary folder, with real containers, driven the way a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from penstock.cli.output import connect
from penstock.client import Client
from penstock.core.errors import PenstockError
from penstock.streams.bus.log import LOW_MAX, Log
from penstock.streams.dsl.injector import Injector
from penstock.streams.places import open_log
from tests.kin import kill_all, kin_of
from tests.tidy_rules import ROOT
from tests.waiting import LIMIT_S

ZEITGEIST = ROOT / "examples" / "zeitgeist"
PARSE, COUNT = "zeitgeist.by_query", "zeitgeist.count_per_second"


class Platform:
    """One installation: start it, break it, look at it."""

    def __init__(
        self,
        folder: Path,
        *,
        containers: int,
        engine: str = "spark",
        port: int = 0,
        environment: Mapping[str, str] | None = None,
        bus: str = "",
        code: Path = ROOT,
    ) -> None:
        self.folder, self._containers, self._engine = folder, containers, engine
        self._bus = bus
        self.code = code  # the tree whose `penstock` runs
        self._port, self._given = port, environment or {}
        self.process: subprocess.Popen[bytes] | None = None
        self.injected: list[tuple[int, str]] = []  # (second, query)
        self.asked: list[tuple[int, str]] = []  # (ts, query) of the same
        self._client: Client | None = None

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self._given, "PYTHONPATH": str(self.code)}

    def start(self) -> None:
        """Run `penstock up` and wait until every container is ready."""
        self.launch()
        self.wait("containers", lambda: len(self.ready()) == self._containers)

    def launch(self) -> None:
        """Run `penstock up` and wait until it answers."""
        arguments = ["up", "--folder", str(self.folder), "--engine", self._engine]
        arguments += ["--port", str(self._port)]
        arguments += ["--containers", str(self._containers)]
        arguments += ["--bus", self._bus] if self._bus else []
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "up.log").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.main", *arguments],
                stdout=output,
                stderr=output,
                cwd=self.code,
                env=self._environment,
            )
        self.wait("the API", lambda: bool(self.client.status()))

    def stop(self) -> list[psutil.Process]:
        """SIGTERM; returns what was left running."""
        assert self.process is not None
        kin = kin_of(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(LIMIT_S) == 0
        self._close()
        left: list[psutil.Process] = psutil.wait_procs(kin, timeout=LIMIT_S)[1]
        return left

    def kill(self) -> None:
        """Whatever happens, nothing of it survives the test."""
        if self.process is not None and self.process.poll() is None:
            kin = kin_of(self.process.pid)
            self.process.kill()
            self.process.wait()
            kill_all(kin)
        self._close()

    def _close(self) -> None:
        """Of the client: the next `penstock up` may answer at another address."""
        if self._client is not None:
            self._client.close()
            self._client = None

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = connect(self.folder)
        return self._client

    @property
    def log(self) -> Log:
        return open_log(self._bus or f"embedded:{self.folder.resolve() / 'bus'}")

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A `penstock` command."""
        command = [sys.executable, "-m", "penstock.cli.main", *arguments, "--folder", str(self.folder)]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            cwd=self.code,
            env=self._environment,
        )

    def ready(self) -> set[str]:
        rows = self.client.status()["containers"]
        return {row["name"] for row in rows if row["ready"] and row["state"] == "live"}

    def line(self, job: str) -> dict[str, Any]:
        return next(line for line in self.client.jobs() if line["name"] == job)

    def running(self, job: str) -> list[dict[str, Any]]:
        """The running tasks of a settled job."""
        line = self.line(job)
        if line["state"] != "running":
            return []
        return [t for t in line["tasks"] if t["state"] == "running" and t["generation"] == line["generation"]]

    def owner(self, job: str) -> str:
        """The container of a job's first task."""
        return str(self.running(job)[0]["container"])

    def engine_pid(self, container: str) -> int:
        rows = self.client.status()["containers"]
        return int(next(row["pid"] for row in rows if row["name"] == container))

    def warden_pid(self, container: str) -> int:
        return int((self.folder / "containers" / container / "warden.pid").read_text())

    def inject(
        self,
        injector: Injector,
        *,
        seconds: range,
        per_second: int,
        asked: Callable[[int, int], str] = lambda second, n: f"query {n % 50}",
    ) -> None:
        """Queries of some seconds of event time, out of order within each; `asked` says which is the nth."""
        for second in seconds:
            keys, stamps, values = [], [], []
            for n in range(per_second):
                ts, query = second * 1000 + (n * 7919) % 1000, asked(second, n)
                keys.append(str(n))
                stamps.append(ts)
                values.append(json.dumps({"query": query, "lang": "en", "ts": ts}).encode())
                self.injected.append((second, query))
                self.asked.append((ts, query))
            injector.publish(keys, stamps, values)
            injector.report_low((second + 1) * 1000, now_ms=time.time_ns() // 1_000_000)

    def assert_exact(self) -> None:
        """Every count is there once, and nothing else is."""
        self.wait("the end of the stream", lambda: self.log.watermark("query_counts") == LOW_MAX)
        found: Counter[tuple[int, str, int]] = Counter()
        for partition, end in enumerate(self.log.end_offsets("query_counts")):
            for batch in self.log.read("query_counts", partition, 0, end):
                found.update((row["second"], row["query"], row["count"]) for row in batch.to_pylist())
        expected = Counter({(second, query, n): 1 for (second, query), n in Counter(self.injected).items()})
        assert found == expected

    def wait(self, what: str, condition: Callable[[], object], *, seconds: float = LIMIT_S) -> float:
        """Poll until it holds; on failure show the end of every log."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            assert self.process is not None and self.process.poll() is None, self.logs()
            try:
                if condition():
                    return time.monotonic() - began
            except (PenstockError, IndexError, StopIteration):
                pass  # not there yet
            time.sleep(0.1)
        raise AssertionError(f"gave up waiting for {what}\n{self.logs()}")

    def await_still(self) -> None:
        """Wait until no shard is on its way, and no later look at placement would move one.

        A shard that should move and must wait for the next round, since a round moves only so many, will move.
        """
        later = ("would move", "should move but cannot: shards with an owner may not move now")

        def will_move(outlook: str) -> bool:
            return outlook.startswith(later) or "moves per round is reached" in outlook

        def is_still() -> bool:
            rows = self.client.shards()
            rests = all(row["container"] and not row["target"] for row in rows) and not any(
                will_move(self.client.shard(row["shard"])["outlook"]) for row in rows
            )
            # Shards were asked one after another: what was heard counts if nothing began to move meanwhile.
            return rests and _owners(rows) == _owners(self.client.shards())

        self.wait("shards to stay", is_still)

    def logs(self) -> str:
        """The ends of all logs, for a failed test's report."""
        found = []
        for path in sorted(self.folder.rglob("*.log")):
            found += [f"== {path.name}", *path.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(found)


def _owners(rows: list[dict[str, Any]]) -> list[tuple[int, str, int]]:
    return [(row["shard"], row["container"], row["epoch"]) for row in rows]


def pause(session_leader: int) -> Callable[[], None]:
    """SIGSTOP everything in a session; returns what wakes it again."""
    members = members_of(session_leader)
    for pid in members:
        os.kill(pid, signal.SIGSTOP)

    def wake() -> None:
        for pid in members:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)

    return wake


def members_of(session_leader: int) -> list[int]:
    """Every process of a session."""
    return [pid for pid in psutil.pids() if _session(pid) == session_leader]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1
