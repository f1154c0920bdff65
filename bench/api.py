"""How long the API takes under 300 reads/s and 60 writes/s beside the heartbeats of a fleet, on both stores.

The server is a whole control plane with its loops and its workers, as `penstock up` starts them, with 1,000
jobs, behind HTTP on loopback, in processes of their own. Beside it 2,000 containers (`bench/tools/beats.py`)
send a heartbeat every 10 s to the control plane's own listener, each with a task to report. They are
connections of this process, as is the load, open loop: requests are due at random moments of a given rate,
whether or not earlier ones were answered, and a time counts from the moment a request was due.
Reads: nine of ten are GET of a job, one is a page of 20 jobs. Writes: PATCH of a layer with an idempotency
key, every other one on the version last seen. Baseline, just before: GET /health at the same total rate.
One token may ask 200 times a second of one process: there are twelve.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import structlog
from rich.console import Console
from rich.table import Table

from bench.tools.beats import CONTAINERS, DEADLINE_S, fleet_tokens, live, make_fleet, register
from bench.tools.http_load import Done, Kind, Pool, Request, drive, settle

JOBS = 1_000
READS, WRITES = 300, 60  # per second
PAGE = 20
TOKENS = 12
CONNECTIONS = {"read": 24, "write": 12}
P99_MS_MAX = 100.0
WARM_UP_S = 3.0


# --- the server's process


def serve(folder: Path, database: str, jobs: int) -> None:
    """Run a control plane with its jobs; say where it is; end with standard input."""
    from penstock.app import ControlPlane
    from penstock.server.serving import Listening, bind
    from penstock.server.workers import ApiProcesses, tune_process
    from penstock.settings import Settings

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    tune_process()  # as `penstock up` does
    plane = ControlPlane(Settings(folder=folder, database=database, profile="paper"))
    now_ms = plane.clock.now_ms()
    tokens = [plane.tokens.issue(f"bench-{number}", "admin", now_ms=now_ms) for number in range(TOKENS)]
    versions = make_jobs(plane, jobs)
    fleet = fleet_tokens(plane)
    with bind(Listening()) as listener, bind(Listening()) as control:
        server = ApiProcesses(plane, listener, control, Listening()).start()
        said = {"url": server.url, "control": server.control.url, "pid": os.getpid()}
        said |= {"tokens": tokens, "versions": versions, "fleet": fleet}
        print(json.dumps(said), flush=True)
        sys.stdin.readline()  # all containers have registered and are ready
        plane.start()
        wait_until_synced(plane)
        print("{}", flush=True)
        sys.stdin.readline()
        failovers = [entry.reason for entry in plane.journal.entries(kind="failover", limit=1000)]
        print(json.dumps({"failovers": failovers, "loops": plane.loop_counts()}), flush=True)
        sys.stdin.read()
        server.stop()
        plane.stop()


def make_jobs(plane: Any, jobs: int) -> dict[str, int]:
    """Jobs of ten pipelines, with labels, and a word from oncall about each."""
    from penstock.jobs.job_service import Actor
    from penstock.streams.bus.log import CategorySpec

    plane.log.create(CategorySpec(name="queries", partitions=1, columns=(("query", "string"),)))
    versions = {}
    for number in range(jobs):
        name = f"bench{number % 10}.job{number:05}"
        output = {
            "stream": "out",
            "category": f"counts{number % 10}",
            "partitions": 1,
            "columns": [["query", "string"], ["second", "bigint"], ["count", "bigint"]],
            "internal": False,
        }
        body = {
            "name": name,
            "pipeline": name.partition(".")[0],
            "kind": "stateless",
            "labels": {"team": f"team{number % 7}", "tier": f"tier{number % 3}"},
            "owner": f"owner{number % 20}",
            "package": {"name": "bench", "version": "1", "hash": "a" * 64, "entry": "bench"},
            "arguments": {f"argument{index}": f"value {index}" for index in range(8)},
            "partitions": 1,  # preparing the state of thousands of them is not what is measured
            "inputs": [{"category": "queries"}],
            "outputs": [output],
            "plan": {"stages": [{"op": "filter", "expr": "length(query) > 0"}], "key": "query"},
        }
        asked = {"actor": Actor(name="bench", role="admin"), "idempotency_key": None, "now_ms": 0}
        plane.jobs.apply(name, body, expected_version=None, birth=f"b{number}", reason="a bench", **asked)
        versions[name] = plane.jobs.patch_layer(
            name, "oncall", {"priority": 1}, expected_version=None, reason="a bench", **asked
        )
    return versions


def wait_until_synced(plane: Any) -> None:
    deadline = time.monotonic() + 300
    while not all(view.is_in_sync for view in plane.jobs.every_view()):
        assert time.monotonic() < deadline, "the jobs were not synced within 300 s"
        time.sleep(0.5)


@contextlib.contextmanager
def server_process(database: str, jobs: int) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    with tempfile.TemporaryDirectory(prefix="bench-api-") as folder:
        command = [sys.executable, "-m", "bench.api", "--serve", folder, "--database", database]
        command += ["--jobs", str(jobs)]
        log = (Path(folder) / "server.log").open("wb")
        with (
            log,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).parents[1],
            ) as process,
        ):
            assert process.stdout is not None and process.stdin is not None
            try:
                said = process.stdout.readline()
                if not said:
                    raise SystemExit((Path(folder) / "server.log").read_text()[-2000:])
                yield json.loads(said.splitlines()[-1]), process
            finally:
                process.stdin.close()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


# --- the load


class Load:
    """Makes the requests of one run."""

    def __init__(self, said: dict[str, Any], seed: int) -> None:
        self._host = urlsplit(said["url"]).netloc
        self._tokens: list[str] = said["tokens"]
        self._versions: dict[str, int] = said["versions"]
        self._names = sorted(self._versions)
        self._random = random.Random(seed)
        self._number = 0
        # A write on a known version must be the only writer of its job.
        half = len(self._names) // 2
        self._cas, self._free = deque(self._names[:half]), self._names[half:]

    def head(self, method: str, path: str, *more: str) -> str:
        self._number += 1
        token = self._tokens[self._number % len(self._tokens)]
        lines = [f"{method} /api/v1{path} HTTP/1.1", f"Host: {self._host}", f"Authorization: Bearer {token}"]
        return "\r\n".join([*lines, *more, "", ""])

    def get(self, path: str, kind: Kind, due: float) -> Request:
        path = path.format(name=self._random.choice(self._names))
        return Request(kind, due, self.head("GET", path).encode())

    def write(self, kind: Kind, due: float) -> Request:
        return self._patch(kind, due, self._random.choice(self._free), "")

    def write_cas(self, kind: Kind, due: float) -> Request:
        name = self._cas[0]
        self._cas.rotate(-1)

        def done(status: int, body: bytes) -> None:
            self._versions[name] = json.loads(body)["version"]

        return self._patch(kind, due, name, f'If-Match: "{self._versions[name]}"', done)

    def _patch(self, kind: Kind, due: float, name: str, match: str, done: Done | None = None) -> Request:
        body = json.dumps({"changes": {"priority": self._random.randrange(1_000)}, "why": "a bench"})
        head = self.head(
            "PATCH",
            f"/jobs/{name}/layers/oncall",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            f"Idempotency-Key: {self._random.getrandbits(96):024x}",
            *([match] if match else []),
        )
        return Request(kind, due, (head + body).encode(), done)


def obey(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Let the server go on; its next line."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    return dict(json.loads(process.stdout.readline()))


async def run_load(
    said: dict[str, Any], process: subprocess.Popen[bytes], seconds: float, seed: int
) -> tuple[dict[str, Kind], dict[str, Any]]:
    registered, beats = Kind("register"), Kind("heartbeat")
    fleet = make_fleet({"url": said["control"], "tokens": said["fleet"]}, CONTAINERS, CONTAINERS // 4)
    await register(fleet, registered)
    began = time.perf_counter()
    lives = live(fleet, beats, until=began + 3_600)
    await asyncio.to_thread(obey, process)
    kinds, cores = await run_mix(said, seconds, seed)
    kinds[beats.name] = beats
    for task in lives:
        task.cancel()
    ends = [([began, *item.heard], [*item.heard, time.perf_counter()]) for item in fleet]
    silence = max(b - a for begins, followers in ends for a, b in zip(begins, followers, strict=True))
    facts = await asyncio.to_thread(obey, process)
    facts |= {"longest_silence_s": round(silence, 1), "rebooted": sum(item.reboots for item in fleet)}
    facts |= {"errors_of_registering": registered.errors[:3], "cores_used": cores}
    return kinds, facts


async def run_mix(
    said: dict[str, Any], seconds: float, seed: int
) -> tuple[dict[str, Kind], dict[str, float]]:
    url, load = urlsplit(said["url"]), Load(said, seed)
    kinds = {name: Kind(name) for name in ("health", "get job", "list page", "patch", "patch, If-Match")}
    pools = {name: Pool(str(url.hostname), url.port or 0) for name in CONNECTIONS}
    for name, pool in pools.items():
        await pool.open(CONNECTIONS[name])
    reads, writes = pools["read"], pools["write"]

    async def baseline(length: float) -> None:
        rate = READS + WRITES
        await drive(reads, rate, length, lambda due: load.get("/health", kinds["health"], due), seed)

    async def mix(length: float, into: dict[str, Kind]) -> None:
        page = f"/jobs?limit={PAGE}&after={{name}}"
        await asyncio.gather(
            drive(
                reads,
                READS * 0.9,
                length,
                lambda due: load.get("/jobs/{name}", into["get job"], due),
                seed + 1,
            ),
            drive(reads, READS * 0.1, length, lambda due: load.get(page, into["list page"], due), seed + 2),
            drive(writes, WRITES / 2, length, lambda due: load.write(into["patch"], due), seed + 3),
            drive(
                writes, WRITES / 2, length, lambda due: load.write_cas(into["patch, If-Match"], due), seed + 4
            ),
        )

    await mix(WARM_UP_S, {name: Kind(name) for name in kinds})
    await settle(pools)
    await baseline(max(5.0, seconds / 6))
    await settle(pools)
    server = psutil.Process(said["pid"])
    processes = [server, *server.children(recursive=True), psutil.Process()]
    before = [process.cpu_times() for process in processes]
    await mix(seconds, kinds)
    await settle(pools)
    after = [process.cpu_times() for process in processes]
    cores = [(b.user + b.system - a.user - a.system) / seconds for a, b in zip(before, after, strict=True)]
    for pool in pools.values():
        pool.is_closing = True
    *of_server, of_load = cores
    return kinds, {"server": round(sum(of_server), 2), "load": round(of_load, 2)}


# --- the report


def measure(store: str, *, jobs: int, seconds: float, seed: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        database = ""
        if store == "postgres":
            from tests.postgres import postgres_server

            database = stack.enter_context(postgres_server(on_disk=True)).new_database()
        said, process = stack.enter_context(server_process(database, jobs))
        kinds, facts = asyncio.run(run_load(said, process, seconds, seed))
    rows = {
        kind.name: {
            "requests": len(kind.times_ms),
            **{f"p{share}_ms": round(kind.quantile(share / 100), 2) for share in (50, 95, 99)},
            "max_ms": round(max(kind.times_ms, default=float("nan")), 2),
            "errors": len(kind.errors),
            "first_errors": kind.errors[:3],
        }
        for kind in kinds.values()
    }
    return {"requests": rows, **facts}


def problems(results: dict[str, Any]) -> list[str]:
    """What is not as it must be. How long heartbeats take is no limit: that none is failed over is."""
    wrong = [
        f"{name}: {row['requests']} requests, {row['errors']} errors, p99 {row['p99_ms']} ms"
        for name, row in results["requests"].items()
        if row["errors"] or not row["requests"] or (row["p99_ms"] > P99_MS_MAX and name != "heartbeat")
    ]
    if results["failovers"] or results["rebooted"]:
        wrong.append(f"failed over falsely: {results['failovers'][:3]}, {results['rebooted']} rebooted")
    if results["longest_silence_s"] >= DEADLINE_S:
        wrong.append(f"a container was not acknowledged for {results['longest_silence_s']} s")
    failing = [name for name, counts in results["loops"].items() if counts["failures"]]
    if failing:
        wrong.append(f"rounds failed: {', '.join(failing)}")
    return wrong


def report(console: Console, store: str, seconds: float, results: dict[str, Any]) -> None:
    title = f"{store}: {READS} reads/s and {WRITES} writes/s for {seconds:.0f} s"
    table = Table(title=title, title_justify="left")
    for name in ("request", "count", "p50 ms", "p95 ms", "p99 ms", "max ms", "errors"):
        table.add_column(name, justify="left" if name == "request" else "right")
    for name, row in results["requests"].items():
        shown = [f"{row[key]:,.1f}" for key in ("p50_ms", "p95_ms", "p99_ms", "max_ms")]
        table.add_row(name, f"{row['requests']:,}", *shown, str(row["errors"]))
    console.print(table)
    cores = results["cores_used"]
    console.print(f"cores used: {cores['server']} by the server, {cores['load']} by the load")
    console.print(
        f"heartbeats of {CONTAINERS:,} containers: {len(results['failovers'])} failed over, longest silence "
        f"{results['longest_silence_s']} s"
    )
    for error in [error for row in results["requests"].values() for error in row["first_errors"]]:
        console.print(error, markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", choices=("sqlite", "postgres", "both"), default="both")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"fail unless every p99 is at most {P99_MS_MAX:.0f} ms and no container is failed over",
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--database", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.database, options.jobs)
        return 0
    console = Console(stderr=options.json)
    stores = ("sqlite", "postgres") if options.store == "both" else (options.store,)
    results = {}
    for store in stores:
        results[store] = measure(store, jobs=options.jobs, seconds=options.seconds, seed=options.seed)
        report(console, store, options.seconds, results[store])
    missed = [f"{store}: {what}" for store, found in results.items() for what in problems(found)]
    for what in missed:
        console.print(f"missed: {what}", markup=False)
    ok = not missed
    if options.json:
        said = {
            "bench": "api",
            "cores": os.cpu_count(),
            "seconds": options.seconds,
            "results": results,
            "ok": ok,
        }
        print(json.dumps(said))
    return 1 if options.check and not ok else 0


if __name__ == "__main__":
    sys.exit(main())
