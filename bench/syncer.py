"""How fast the State Syncer brings 100,000 jobs to what is expected of them, on SQLite and on PostgreSQL.

- release: the package of every job changed; one round commits all of them to the running table. Baseline, in
  the same run: the same changes in a transaction each, on a sample.
- idle, sweep: a round with nothing to do, and one that compares all jobs and finds nothing to do.
- plans: 1,000 jobs get another task count; each plan makes four calls (prepare, is_stopped, fence, retire)
  that take 50 ms. Then once more with two other jobs among them (plans_poison): the calls of one always fail,
  the first call of the other never comes back.

Jobs are put into the real tables in bulk; the rounds are the control plane's, with its worker threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from rich.console import Console
from rich.table import Table

from penstock.core import text as json_text
from penstock.core.errors import CorruptData
from penstock.core.loop import ThreadExecutor, WorkerThreads
from penstock.core.system_clock import SystemClock
from penstock.db.bulk import insert_rows, is_one_of
from penstock.db.database import COUNTERS, Database, next_value, next_values, take_term
from penstock.jobs.config import JobConfig, validate_config
from penstock.jobs.job_store import EXPECTED_COUNTER, JOBS, JobStore
from penstock.jobs.layer_store import LAYERS
from penstock.jobs.running_store import PLANS, RETIREMENTS, RUNNING, TASKS_COUNTER
from penstock.jobs.syncer.state_syncer import StateSyncer, SyncerSettings
from penstock.jobs.tasks import map_partitions
from penstock.server.workers import tune_process

LIMITS_S = {"release": 10.0, "idle": 2.0, "sweep": 2.0, "plans": 30.0, "plans_poison": 30.0}
CALL_S = 0.05
ROUND_S = 0.1  # as the control plane waits while a plan is open
CLOCK = SystemClock()

Results = dict[str, Any]


def main() -> int:
    """Measure, print, and with --check fail when a limit is missed."""
    tune_process()  # as the control plane does
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--store", choices=["sqlite", "postgres", "both"], default="both")
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--plans", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=3, help="of release and idle; medians are shown")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--check", action="store_true", help="exit 1 when a limit is missed")
    options = parser.parse_args()
    stores = ["sqlite", "postgres"] if options.store == "both" else [options.store]
    results: dict[str, Results] = {}
    for store in stores:
        with _database(store) as database:
            results[store] = _measure(database, options)
    missed = [
        f"{store}: {case} took {found[case]['seconds']:.2f} s, the limit is {limit} s"
        for store, found in results.items()
        for case, limit in LIMITS_S.items()
        if found[case]["seconds"] > limit
    ]
    console = Console(stderr=options.json)
    _print(console, results, options)
    for line in missed:
        console.print(line)
    if options.json:
        facts = {"bench": "syncer", "jobs": options.jobs, "plans": options.plans}
        print(json.dumps({**facts, "results": results, "limits_s": LIMITS_S, "ok": not missed}))
    return 1 if options.check and missed else 0


@contextmanager
def _database(store: str) -> Iterator[Database]:
    if store == "postgres":
        from tests.postgres import postgres_server

        with postgres_server(on_disk=True) as server:
            database = Database(server.new_database())
            yield database
            database.close()
    else:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            database = Database(Path(folder) / "store.db")
            yield database
            database.close()


def _measure(database: Database, options: argparse.Namespace) -> Results:
    names = [f"p{number % 100:02d}.job{number:06d}" for number in range(options.jobs)]
    seeded_s = _seconds(lambda: seed_jobs(database, names))
    release, idle, sweep = [], [], []
    world = _World(database)
    world.syncer.sync_once(0)  # a syncer that has just started knows nothing yet
    for repeat in range(options.repeats):
        expect_change(database, names, f'"version":"r{repeat}"', f'"version":"r{repeat + 1}"')
        release.append(_seconds(lambda: world.expect_simple(len(names))))
        idle.append(_seconds(world.expect_quiet))
        sweep.append(_seconds(lambda: world.expect_quiet(sweep=True)))
        _check_released(database, f"r{repeat + 1}", len(names))
    sample = names[:: max(1, len(names) // 500)]
    alone = _World(database, settings=SyncerSettings(batch_jobs=1, batch_jobs_max=1))
    alone.syncer.sync_once(0)
    expect_change(database, sample, '"version":"r', '"version":"alone')
    alone_s = _seconds(lambda: alone.expect_simple(len(sample))) / len(sample) * len(names)
    return {
        "seeded_s": seeded_s,
        "release": _summary(release) | {"baseline_seconds": alone_s},
        "idle": _summary(idle),
        "sweep": _summary(sweep),
        "plans": _summary([_plans(database, names[: options.plans])]),
        "plans_poison": _summary([_plans(database, names[: options.plans], poison=names[-2:])]),
    }


class _World:
    """A syncer of the newest term, on calls that take 50 ms; those of two jobs never succeed."""

    def __init__(
        self,
        database: Database,
        *,
        settings: SyncerSettings | None = None,
        failing: str = "",
        hanging: str = "",
    ) -> None:
        self._failing, self._hanging, self._over = failing, hanging, threading.Event()
        self.workers: WorkerThreads[Any] = WorkerThreads("bench", CLOCK)
        self._background = ThreadExecutor("bench background", threads=2)
        self.syncer = StateSyncer(
            JobStore(database),
            self,
            self,
            term=take_term(database, "syncer", "bench"),
            settings=settings or SyncerSettings(fence_after_ms=0),
            workers=self.workers,
            background=self._background if database.is_shared else None,
            measure_ms=CLOCK.boot_ms,
        )

    def expect_simple(self, jobs: int) -> None:
        report = self.syncer.sync_once(1)
        assert len(report.simple) == jobs and not report.failed, (len(report.simple), report.failed[:3])

    def expect_quiet(self, *, sweep: bool = False) -> None:
        report = self.syncer.sync_once(10**6 if sweep else 2)
        assert report.is_idle, report

    def close(self) -> None:
        self._over.set()
        self.workers.stop()
        self._background.stop()

    def prepare(self, job: str, birth: str, config: JobConfig) -> None:
        self._call(job)

    def is_stopped(self, job: str, *, generation: int, list_version: int) -> bool:
        self._call(job)
        return False

    def fence(self, job: str, birth: str, config: JobConfig, *, generation: int) -> None:
        self._call(job)

    def retire(self, job: str, birth: str, old: JobConfig, new: JobConfig | None) -> None:
        self._call(job)

    def _call(self, job: str) -> None:
        if job == self._hanging:
            self._over.wait()
        time.sleep(CALL_S)
        if job == self._failing:
            raise CorruptData("poison")


def _plans(database: Database, names: Sequence[str], *, poison: Sequence[str] = ()) -> float:
    """Seconds until the plans of `names` are committed, and what they leave behind is retired."""
    failing, hanging = poison or ("", "")
    world = _World(database, failing=failing, hanging=hanging)
    world.syncer.sync_once(CLOCK.now_ms())
    for tasks in (2, 1):  # the larger first, or those that have it already would get it twice
        expect_change(database, [*names, *poison], f'"task_count":{tasks}', f'"task_count":{tasks + 1}')
    committed: set[str] = set()
    began = time.perf_counter()
    while committed < set(names) or _left(database, names) > 0:
        report = world.syncer.sync_once(CLOCK.now_ms())
        committed |= set(report.complex)
        assert {job for job, _ in report.failed} <= set(poison), report.failed
        if time.perf_counter() - began > 120:
            raise AssertionError(f"{len(committed)} of {len(names)} plans in 120 s")
        time.sleep(ROUND_S)
    took = time.perf_counter() - began
    world.close()
    return took


# --- jobs in bulk


def a_body(name: str, *, package: str, task_count: int) -> dict[str, Any]:
    columns = [["query", "string"], ["at", "bigint"], ["count", "bigint"]]
    output = {
        "stream": "out",
        "category": f"{name}.out",
        "partitions": 8,
        "columns": columns,
        "internal": True,
    }
    return {
        "pipeline": name.split(".")[0],
        "owner": "search",
        "labels": {"team": "search", "tier": "2"},
        "kind": "stateless",
        "package": {"name": "pipelines", "version": package, "hash": "ab" * 32, "entry": "pipeline"},
        "arguments": {"language": "en"},
        "task_count": task_count,
        "partitions": 8,
        "inputs": [{"category": f"{name}.in"}],
        "outputs": [output],
        "plan": {"stages": [{"op": "filter", "expr": "length(query) > 0"}], "key": "query"},
    }


def seed_jobs(database: Database, names: Sequence[str], *, task_count: int = 1) -> None:
    """Jobs that run as expected."""
    mark = "p00.job000000"  # one job is validated; the others are its text under another name
    body = a_body(mark, package="r0", task_count=task_count)
    config = json_text.dumps(validate_config(mark, body).to_json())
    text, mapping = json_text.dumps(body), json_text.dumps(map_partitions(8, task_count))
    for start in range(0, len(names), 5_000):
        part = names[start : start + 5_000]
        jobs, layers, running, generations = [], [], [], []
        with database.transaction() as connection:
            for number, name in enumerate(part, start=start + 1):
                pipeline = name.split(".")[0]
                jobs.append((name, f"birth-{number}", pipeline, 0, False, 1, 0, "running"))
                layers.append((name, "base", 0, "{}", 0, "bench", "new", 0, "[]"))
                own = _renamed(text, mark, name)
                layers.append((name, "provisioner", 10, own, 1, "bench", "new", 0, "[]"))
                own = _renamed(config, mark, name)
                running.append((name, f"birth-{number}", number, number, 1, own, 1, mapping, 0, "running", 0))
                generations.append((f"generation/{name}", 1))
            columns = ("name", "birth", "pipeline", "created_ms", "deleted", "expected_version", "changed")
            insert_rows(connection, JOBS, (*columns, "desired"), jobs)
            columns = ("job", "layer", "precedence", "body", "version", "actor", "reason", "at_ms", "origins")
            insert_rows(connection, LAYERS, columns, layers)
            insert_rows(connection, RUNNING, [column.name for column in RUNNING.columns], running)
            insert_rows(connection, COUNTERS, ("name", "value"), generations)
            next_values(connection, TASKS_COUNTER, len(part))


def _renamed(text: str, mark: str, name: str) -> str:
    return text.replace(f'"{mark.split(".")[0]}"', f'"{name.split(".")[0]}"').replace(mark, name)


def expect_change(database: Database, names: Sequence[str], old: str, new: str) -> None:
    """Change the provisioner layer of these jobs, as their text."""
    with database.transaction() as connection:
        body: Any = sa.func.replace(sa.cast(LAYERS.c.body, sa.Text), old, new)
        body = sa.cast(body, sa.JSON) if database.is_shared else sa.type_coerce(body, sa.JSON)
        chosen = is_one_of(connection, LAYERS.c.job, names)
        connection.execute(
            sa.update(LAYERS)
            .where(chosen, LAYERS.c.layer == "provisioner")
            .values(body=body, version=LAYERS.c.version + 1)
        )
        chosen = is_one_of(connection, JOBS.c.name, names)
        changed = next_value(connection, EXPECTED_COUNTER)
        values = {"expected_version": JOBS.c.expected_version + 1, "changed": changed}
        connection.execute(sa.update(JOBS).where(chosen).values(**values))


def _check_released(database: Database, package: str, jobs: int) -> None:
    """Every running row has the new package, every job one audit row of it."""
    with database.reading() as connection:
        config = sa.cast(RUNNING.c.config, sa.Text)
        query = sa.select(sa.func.count()).select_from(RUNNING)
        found = connection.execute(query.where(config.contains(f'"version":"{package}"'))).scalar_one()
        assert found == jobs, f"{found} of {jobs} rows have the package {package}"


def _left(database: Database, names: Sequence[str]) -> int:
    """Plans and retirements that are not over."""
    with database.reading() as connection:
        return sum(
            connection.execute(
                sa.select(sa.func.count()).where(is_one_of(connection, table.c.job, names))
            ).scalar_one()
            for table in (PLANS, RETIREMENTS)
        )


# --- numbers


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _summary(seconds: list[float]) -> dict[str, float]:
    return {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def _print(console: Console, results: Mapping[str, Results], options: argparse.Namespace) -> None:
    title = f"{options.jobs:,} jobs, {options.plans:,} plans; medians of {options.repeats} (plans: one run)"
    table = Table(title=title, title_justify="left")
    for column in ("store", "case", "seconds", "spread", "limit"):
        table.add_column(column, justify="left" if column in ("store", "case") else "right")
    for store, found in results.items():
        for case, limit in LIMITS_S.items():
            row = found[case]
            spread = f"{row['min']:.3f} – {row['max']:.3f}"
            table.add_row(store, case, f"{row['seconds']:.3f}", spread, f"{limit:.0f}")
    console.print(table)
    for store, found in results.items():
        release = found["release"]
        rate = options.jobs / release["seconds"]
        ratio = release["baseline_seconds"] / release["seconds"]
        console.print(
            f"{store}: {rate:,.0f} jobs/s; in a transaction each it would take "
            f"{release['baseline_seconds']:.0f} s, {ratio:.1f} times as long"
        )


if __name__ == "__main__":
    sys.exit(main())
