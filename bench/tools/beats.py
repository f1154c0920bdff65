"""A fleet's heartbeats over real HTTP while shards move and all jobs are released: is anybody failed over?

The server is a whole control plane with its workers, with 30,000 jobs of four tasks each. The containers
are 2,000 connections of this process, each with a beat every 10 s (the paper's profile) that acknowledges its
shards and reports its 60 tasks. All have registered and are ready when the Shard Manager begins. After a
third of the time every job gets a new package; from half of the time on, 20 containers are drained.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import structlog

from bench.tools.http_load import Done, Kind, Pool, Request

CONTAINERS, TASKS_PER_JOB, SHARDS = 2_000, 4, 10_000
BEAT_S, DEADLINE_S = 10.0, 40.0
IDLE_S = 15.0  # less than the server keeps a connection
DRAINED = 20
AT_ONCE = 8  # containers that register at the same time
METRICS = {"input_rate": 100.5, "processed_rate": 100.5, "busy": 0.25, "lag_s": 0.5, "lag_records": 50.0}
OLD, NEW = '"version":"r0"', '"version":"r1"'


# --- the server's process


def serve(folder: Path, jobs: int) -> None:
    """Run a control plane; obey lines of standard input; end with it."""
    from bench.syncer import expect_change, seed_jobs
    from penstock.app import ControlPlane
    from penstock.db.database import Database
    from penstock.server.serving import Listening, bind
    from penstock.server.workers import ApiProcesses, tune_process
    from penstock.settings import Settings

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    tune_process()
    names = [_job(number) for number in range(jobs)]
    database = Database(folder / "store.db")
    seed_jobs(database, names, task_count=TASKS_PER_JOB)
    database.close()
    plane = ControlPlane(Settings(folder=folder, profile="paper", shards=SHARDS))
    tokens = fleet_tokens(plane)
    with bind(Listening()) as listener, bind(Listening()) as control:
        server = ApiProcesses(plane, listener, control, Listening()).start()
        said = {"url": server.control.url, "pid": os.getpid(), "tokens": tokens}
        print(json.dumps(said), flush=True)
        for line in sys.stdin:
            if line.strip() == "begin":
                plane.start()
            elif line.strip() == "release":
                expect_change(plane.database, names, OLD, NEW)
                plane.wake_syncer()
            elif line.strip() == "drain":
                for number in range(DRAINED):
                    plane.shard_manager.drain(f"c{number:04d}", plane.clock.boot_ms(), reason="a bench")
            else:
                print(json.dumps(_facts(plane, jobs)), flush=True)
        server.stop()
        plane.stop()


def fleet_tokens(plane: Any) -> dict[str, str]:
    """A token for each container."""
    now_ms, issue = plane.clock.now_ms(), plane.tokens.issue
    fleet = [f"c{number:04d}" for number in range(CONTAINERS)]
    return {name: issue(name, "container", now_ms=now_ms, container=name) for name in fleet}


def _job(number: int) -> str:
    return f"p{number % 100:02d}.job{number:06d}"


def _facts(plane: Any, jobs: int) -> dict[str, Any]:
    from penstock.jobs.running_store import RunningStore

    owned: dict[str, int] = {}
    for shard in plane.fleet.shards():
        owned[shard.container or ""] = owned.get(shard.container or "", 0) + 1
    rows = RunningStore(plane.database).snapshot().rows
    return {
        "jobs": jobs,
        "released": sum(NEW in row.config_json for row in rows),
        "failovers": [entry.reason for entry in plane.journal.entries(kind="failover", limit=1000)],
        "unowned": owned.get("", 0),
        "left_on_drained": sum(owned.get(f"c{number:04d}", 0) for number in range(DRAINED)),
        "loops": plane.loop_counts(),
    }


@contextlib.contextmanager
def _server(jobs: int) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    with tempfile.TemporaryDirectory(prefix="bench-beats-") as folder:
        command = [sys.executable, "-m", "bench.tools.beats", "--serve", folder, "--jobs", str(jobs)]
        log = Path(folder) / "server.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=Path(__file__).parents[2],
            )
        assert process.stdin is not None
        try:
            said = _said(process)
            if not said:
                raise SystemExit(log.read_text()[-2000:])
            yield said, process
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that is a map."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    return {}


def _tell(process: subprocess.Popen[str], order: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{order}\n")
    process.stdin.flush()


# --- the containers


@dataclass(slots=True)
class Container:
    """One container as the control plane sees it: it does what it is told, at once."""

    name: str
    pool: Pool
    head: str
    tasks: str
    sequence: int = 0
    assignment_version: int = 0
    list_version: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)
    heard: list[float] = field(default_factory=list)  # when the beats that were acknowledged were sent
    reboots: int = 0

    def register(self, kind: Kind) -> Request:
        body = json.dumps({"incarnation": f"i-{self.name}", "folder_id": f"f-{self.name}"})
        return self._request("register", body, kind, None)

    def beat(self, kind: Kind) -> Request:
        self.sequence += 1
        sent = time.perf_counter()
        body = (
            f'{{"container":"{self.name}","incarnation":"i-{self.name}","sequence":{self.sequence},'
            f'"acked":{msgspec.json.encode(self.shards).decode()},'
            f'"assignment_version":{self.assignment_version},"list_version":{self.list_version},'
            f'"tasks":{self.tasks},"engine_ready":true,"host":"bench","pid":1}}'
        )
        return self._request("beat", body, kind, lambda _, answer: self._hear(answer, sent))

    def _hear(self, answer: bytes, sent: float) -> None:
        reply = msgspec.json.decode(answer)
        if reply["verdict"] != "ok":
            self.reboots += 1
            return
        self.heard.append(sent)
        self.shards, self.list_version = reply["shards"], reply["list_version"]
        self.assignment_version = reply["assignment_version"]

    def _request(self, verb: str, body: str, kind: Kind, done: Done | None) -> Request:
        line = f"POST /api/v1/containers/{self.name}/{verb} HTTP/1.1\r\n"
        data = f"{line}{self.head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        return Request(kind, time.perf_counter(), data, done)


def make_fleet(said: dict[str, Any], count: int, jobs: int) -> list[Container]:
    """Containers that send their heartbeats to `url`; `jobs` have the tasks that they report."""
    url, found = urlsplit(said["url"]), []
    share = jobs * TASKS_PER_JOB // count
    for number in range(count):
        token = said["tokens"][f"c{number:04d}"]
        head = f"Host: {url.netloc}\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        tasks = [
            {
                "task_id": f"{_job(task // TASKS_PER_JOB)}/{task % TASKS_PER_JOB}",
                "job": _job(task // TASKS_PER_JOB),
                "shard": task % SHARDS,
                "state": "running",
                "generation": 1,
                "running_version": 1,
                "metrics": METRICS,
            }
            for task in range(number * share, (number + 1) * share)
        ]
        pool = Pool(str(url.hostname), url.port or 0)
        found.append(Container(f"c{number:04d}", pool, head, json.dumps(tasks)))
    return found


async def register(fleet: Sequence[Container], registered: Kind) -> None:
    """All of them, a few at the same time; each says that it is ready."""
    await asyncio.gather(*(_register(fleet[number::AT_ONCE], registered) for number in range(AT_ONCE)))


async def _register(fleet: Sequence[Container], registered: Kind) -> None:
    first = Kind("first beat")
    for container in fleet:
        await container.pool.open(1)
        for request in (container.register(registered), container.beat(first)):
            container.pool.send(request)
            while container.pool.under_way:
                await asyncio.sleep(0.01)


async def _live(container: Container, kind: Kind, *, offset_s: float, until: float) -> None:
    """Beat every 10 s, from an offset of its own; the next one waits for the answer to the last."""
    due = time.perf_counter() + offset_s
    while due < until:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        container.pool.hang_up(idle_s=IDLE_S)
        if not container.pool.is_connected:
            await container.pool.open(1)
        container.pool.send(container.beat(kind))
        while container.pool.under_way:
            await asyncio.sleep(0.05)
        due = max(due + BEAT_S, time.perf_counter())


def live(fleet: Sequence[Container], kind: Kind, *, until: float) -> list[asyncio.Task[None]]:
    """Let all containers beat until then, evenly spread."""
    return [
        asyncio.create_task(_live(item, kind, offset_s=BEAT_S * number / len(fleet), until=until))
        for number, item in enumerate(fleet)
    ]


async def _run(
    said: dict[str, Any], process: subprocess.Popen[str], *, seconds: float, jobs: int, containers: int
) -> dict[str, Any]:
    fleet = make_fleet(said, containers, jobs)
    registered, beats = Kind("register"), Kind("beat")
    began = time.perf_counter()
    await register(fleet, registered)
    print(f"  {containers} registered in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    _tell(process, "begin")
    server = psutil.Process(said["pid"])
    watched = [server, *server.children(recursive=True), psutil.Process()]
    before = [item.cpu_times() for item in watched]
    began = time.perf_counter()
    until = began + seconds
    lives = live(fleet, beats, until=until)
    for share, order in ((1 / 3, "release"), (1 / 2, "drain")):
        await asyncio.sleep(max(0.0, began + share * seconds - time.perf_counter()))
        print(f"  {time.perf_counter() - began:.0f} s: {order}", file=sys.stderr, flush=True)
        _tell(process, order)
    await asyncio.gather(*lives)
    took = time.perf_counter() - began
    after = [item.cpu_times() for item in watched]
    cores = [(b.user + b.system - a.user - a.system) / took for a, b in zip(before, after, strict=True)]
    _tell(process, "facts")
    facts = await asyncio.to_thread(_said, process)
    for container in fleet:
        container.pool.is_closing = True
    ends = [([began, *item.heard], [*item.heard, until]) for item in fleet]
    silence = max(b - a for begins, followers in ends for a, b in zip(begins, followers, strict=True))
    return {
        "containers": containers,
        "tasks": jobs * TASKS_PER_JOB,
        "seconds": round(seconds),
        "beats": len(beats.times_ms),
        "beats_per_s": round(len(beats.times_ms) / took, 1),
        **{f"p{share}_ms": round(beats.quantile(share / 100), 1) for share in (50, 99)},
        "max_ms": round(max(beats.times_ms), 1),
        "errors": len(beats.errors) + len(registered.errors),
        "first_errors": [*registered.errors, *beats.errors][:3],
        "rebooted": sum(item.reboots for item in fleet),
        "longest_silence_s": round(silence, 1),
        "cores_server": round(sum(cores[:-1]), 2),
        "cores_load": round(cores[-1], 2),
        **facts,
    }


def measure(seconds: float, *, jobs: int, containers: int = CONTAINERS) -> dict[str, Any]:
    """What the beats of a fleet met."""
    with _server(jobs) as (said, process):
        return asyncio.run(_run(said, process, seconds=seconds, jobs=jobs, containers=containers))


def problems(found: dict[str, Any]) -> list[str]:
    """What was not as it must be."""
    wrong = []
    if found["failovers"] or found["rebooted"]:
        wrong.append(f"failed over falsely: {found['failovers'][:3]}, told to reboot: {found['rebooted']}")
    if found["errors"]:
        wrong.append(f"{found['errors']} errors: {found['first_errors']}")
    if found["longest_silence_s"] >= DEADLINE_S:
        wrong.append(f"a container was not acknowledged for {found['longest_silence_s']} s")
    if found["released"] != found["jobs"]:
        wrong.append(f"{found['released']} of {found['jobs']} jobs were released")
    failing = [name for name, counts in found["loops"].items() if counts["failures"]]
    if failing:
        wrong.append(f"rounds failed: {', '.join(failing)}")
    if found["unowned"] or found["left_on_drained"]:
        wrong.append(f"shards without an owner: {found['unowned']}, undrained: {found['left_on_drained']}")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=Path, required=True)
    parser.add_argument("--jobs", type=int, required=True)
    options = parser.parse_args()
    serve(options.serve, options.jobs)
