"""The task list of a large fleet: built, encoded, followed by deltas, polled; and the fleet's heartbeats.

120,000 tasks of 30,000 jobs in the running table of a SQLite file. Baseline in the same run: reading and
encoding everything from the store at each poll, as a service without memory would.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.tools.beats import CONTAINERS, measure, problems
from penstock.container.task_manager import ShardTaskIndex
from penstock.db.database import Database, next_values, upsert
from penstock.fleet.task_service import TaskList, TaskService
from penstock.jobs.config import validate_config
from penstock.jobs.running_store import RUNNING, TASKS_COUNTER, RunningStore

TASKS_PER_JOB = 4
LIMITS_MS = {"snapshot": 1_000.0, "delta": 50.0, "unchanged poll": 2.0}


def a_config(job: str, package: str) -> dict[str, Any]:
    body = {
        "pipeline": "bench",
        "kind": "stateless",
        "package": {"name": "bench", "version": package, "hash": "aa" * 32, "entry": "pipeline"},
        "task_count": TASKS_PER_JOB,
        "partitions": 8,
        "inputs": [{"category": f"input_{hash(job) % 1000}"}],
        "outputs": [
            {"stream": "out", "category": f"{job}.out", "partitions": 8, "internal": False,
             "columns": [["query", "string"], ["count", "bigint"]]}
        ],
        "plan": {"stages": [{"op": "filter", "expr": "length(trim(query)) > 0"}], "key": "query"},
    }  # fmt: skip
    return validate_config(job, body).to_json()


def write_running(database: Database, jobs: list[str], package: str) -> None:
    """The rows as the State Syncer leaves them."""
    for start in range(0, len(jobs), 2_000):
        part = jobs[start : start + 2_000]
        with database.transaction() as connection:
            versions = next_values(connection, TASKS_COUNTER, len(part))
            rows = [
                {
                    "job": job,
                    "birth": f"birth-{job}",
                    "version": version,
                    "restart_version": version,
                    "expected_version": 1,
                    "config": a_config(job, package),
                    "generation": 1,
                    "mapping": [partition % TASKS_PER_JOB for partition in range(8)],
                    "hold_generation": 0,
                    "state": "running",
                    "updated_ms": 0,
                }
                for job, version in zip(part, versions, strict=True)
            ]
            upsert(
                connection,
                RUNNING,
                rows,
                replace=[column.name for column in RUNNING.c if column.name != "job"],
            )


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return (time.perf_counter() - begin) * 1000, result


def measure_list(folder: Path, *, tasks: int, repeats: int) -> dict[str, list[float]]:
    jobs = [f"bench.job_{number:06d}" for number in range(tasks // TASKS_PER_JOB)]
    database = Database(folder / "store.db")
    write_running(database, jobs, "1")
    source = RunningStore(database)
    times: dict[str, list[float]] = {}

    def note(name: str, ms: float) -> None:
        times.setdefault(name, []).append(ms)

    for repeat in range(repeats):
        service, index = TaskService(source), ShardTaskIndex()
        ms, text = timed(service.encoded)
        note("snapshot", ms)
        if repeat == 0:
            print(f"{tasks:,} tasks of {len(jobs):,} jobs: {len(text) / 2**20:.1f} MB encoded", flush=True)
        note(
            "read by a container",
            timed(lambda index=index, text=text: index.apply(TaskList.from_json(msgspec.json.decode(text))))[
                0
            ],
        )
        assert index.full_list is not None
        note(
            "first look at its shards", timed(lambda index=index: list(index.tasks_of(range(10), 20_000)))[0]
        )
        since = service.version()
        write_running(database, jobs[::100][: len(jobs) // 100], f"2.{repeat}")
        ms, text = timed(lambda service=service, since=since: service.encoded(since))
        note("delta", ms)
        delta = TaskList.from_json(msgspec.json.decode(text))
        assert len(delta.jobs) == len(jobs) // 100 and not delta.full
        note("delta into a container", timed(lambda index=index, delta=delta: index.apply(delta))[0])
        version = service.version()
        polls = [
            timed(lambda service=service, version=version: service.encoded(version))[0] for _ in range(200)
        ]
        note("unchanged poll", statistics.median(polls))
        note(
            "baseline: a poll without memory",
            timed(lambda: json.dumps(TaskService(source).snapshot().to_json()))[0],
        )
    database.close()
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=120_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--beats-s", type=float, default=180, help="how long containers beat; 0: not at all")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--check", action="store_true", help="exit 1 when a number is missed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        times = measure_list(Path(folder), tasks=options.tasks, repeats=options.repeats)
    missed = []
    print(f"{'step':<36}{'ms':>10}{'spread':>20}{'limit':>8}")
    for name, found in times.items():
        middle, limit = statistics.median(found), LIMITS_MS.get(name)
        spread = f"{min(found):.1f}–{max(found):.1f}"
        print(f"{name:<36}{middle:>10.1f}{spread:>20}{'' if limit is None else f'{limit:.0f}':>8}")
        if limit is not None and middle > limit:
            missed.append(f"{name}: {middle:.1f} ms, not within {limit:.0f} ms")
    beats: dict[str, Any] = {}
    if options.beats_s:
        print(f"heartbeats of {CONTAINERS:,} containers over HTTP for {options.beats_s:.0f} s", flush=True)
        beats = measure(options.beats_s, jobs=options.tasks // TASKS_PER_JOB)
        for name, value in beats.items():
            print(f"  {name:<34}{value}")
        missed += problems(beats)
    for what in missed:
        print(f"missed: {what}")
    if options.json:
        medians = {name: statistics.median(found) for name, found in times.items()}
        print(
            json.dumps(
                {"bench": "task_service", "ms": medians, "beats": beats, "missed": missed, "ok": not missed}
            )
        )
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
