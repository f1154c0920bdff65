"""Two weeks of minutes of 10,000 jobs: how much room they take, how fast they come in and are given out.

The data is made here. A job's input has a level (log-normal), a daily wave of 20 to 80 %, a weekend, and
noise of 5 % from minute to minute; rates, busy time and cpu follow it with noise of 1 to 3 % of their own;
lag is an exponential draw; memory, keys and state drift; a minute in a thousand has a failure. Disk and
network are unknown, as they are of most tasks. So 19 of 21 metrics are kept, 12 of them with noise. 500 jobs
are drawn; the others repeat them, which the store cannot see: it packs each job by itself.

A *sample* is one metric of one job in one minute. History is written as sealed days; the last five hours come
in as they do in a control plane, a transaction per minute, and are then sealed, all of it on one core. A
*report value* is one number of one task's report, as looked at every five seconds.

An *evaluation* retrieves 30 minutes of six metrics of one job and decides on them (`decide`, below): the
preactive scaler that knows what a thread can do, as nearly all jobs have it. *Staging*: it does not know yet.
*History* is one metric over all days, of jobs drawn at random, as a veto from the past reads it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from penstock.db.bulk import insert_rows
from penstock.db.database import Database
from penstock.fleet.messages import TaskReport
from penstock.scaling.metrics.frames import METRICS, MINUTE_MS, Frame
from penstock.scaling.metrics.minutes import BITS, DAY, UNKNOWN, Minute, MinuteAggregator, encode, pack
from penstock.scaling.metrics.retriever import MetricQuery, Retriever
from penstock.scaling.metrics.store import BLOCKS, JOB, METRIC, NAMES, OPEN_MIN, SEAL_EVERY, MetricStore
from penstock.scaling.scaler.decide import decide as decide_job
from penstock.scaling.scaler.observation import (
    DEFAULTS,
    Footprint,
    JobShape,
    Observation,
    ScalerJobFacts,
    TaskResources,
)
from penstock.scaling.scaler.observation import DecisionSettings as ScalerSettings
from penstock.scaling.scaler.window import METRICS_REQUIRED

TODAY = 20_600  # days since 1970
SLICE = 125  # jobs that are made at a time
OPEN = SEAL_EVERY + OPEN_MIN
LOOKS_A_MINUTE = 12
KNOWN = Footprint(thread_rate=9_000.0, thread_rate_minute=0)  # as the data is made
RECENT = MetricQuery(metrics=METRICS_REQUIRED, minutes=30)
# What must hold: samples and evaluations per second at least, bytes per job for 14 days at most.
SAMPLES_MIN, EVALUATIONS_MIN, BYTES_MAX = 50_000, 3_000, 400_000

Values = NDArray[np.float32]


def decide(frame: Frame, settings: ScalerSettings = DEFAULTS, known: Footprint = KNOWN) -> object:
    """The decision that is timed: the preactive auto scaler's, on a job of the shape that the frame shows."""
    shape = JobShape(task_count=int(frame.last("task_count")), task=TaskResources())
    job = ScalerJobFacts(name=frame.job, shape=shape, partitions=32)
    now_ms = (frame.first_minute + frame.minutes) * MINUTE_MS
    return decide_job(Observation(job=job, frame=frame, now_ms=now_ms, settings=settings, footprint=known))


@dataclass
class Fleet:
    """What tells jobs apart."""

    level: Values
    swing: Values
    phase: Values
    tasks: Values
    memory: Values

    @staticmethod
    def of(jobs: int, rng: np.random.Generator) -> Fleet:
        def draw(low: float, high: float) -> Values:
            return rng.uniform(low, high, jobs).astype(np.float32)

        level = rng.lognormal(np.log(2_000), 1.5, jobs).astype(np.float32)
        tasks = np.ceil(np.clip(level / 4_000, 1, 32))
        return Fleet(level, draw(0.2, 0.8), draw(0, 1), tasks.astype(np.float32), draw(300, 1_500))

    def part(self, begin: int, end: int) -> Fleet:
        return Fleet(*(getattr(self, name)[begin:end] for name in self.__dataclass_fields__))


def a_day(fleet: Fleet, day: int, minutes: int, rng: np.random.Generator) -> Values:
    """`values[job, metric, minute]` from the beginning of a day on."""
    jobs = len(fleet.level)
    at = np.arange(minutes, dtype=np.float32) / DAY
    weekend = 0.7 if day % 7 in (2, 3) else 1.0

    def noise(share: float) -> Values:
        return 1 + share * rng.standard_normal((jobs, minutes), dtype=np.float32)

    def column(values: Values) -> Values:
        return values[:, None]

    wave = 1 + column(fleet.swing) * np.sin(2 * np.pi * (at[None, :] + column(fleet.phase)))
    ingest = np.maximum(column(fleet.level) * wave * weekend * noise(0.05), 0)
    processed = ingest * noise(0.01)
    busy = np.clip(processed / (column(fleet.tasks) * 9_000) * noise(0.03), 0, 1)
    lag = rng.exponential(1, (jobs, minutes)).astype(np.float32) * ingest
    drift = (
        1 + 0.02 * np.cumsum(rng.standard_normal((jobs, minutes), dtype=np.float32), axis=1) / minutes**0.5
    )
    memory = column(fleet.memory) * drift
    keys = column(fleet.level) * 10 * (1 + 0.05 * at[None, :])
    failed = (rng.random((jobs, minutes), dtype=np.float32) < 0.001).astype(np.float32)
    known = {
        "ingest_rate": ingest,
        "processed_rate": processed,
        "output_rate": processed * 0.4 * noise(0.01),
        "busy": busy,
        "busy_mean": busy * 0.9 * noise(0.02),
        "lag_records": np.round(lag),
        "lag_bytes": np.round(lag) * 120,
        "lag_s": lag / np.maximum(processed, 1),
        "lag_spread": rng.random((jobs, minutes), dtype=np.float32),
        "cpu": busy * column(fleet.tasks) * noise(0.03),
        "memory_mb": memory * column(fleet.tasks),
        "memory_task_mb": memory * noise(0.01),
        "key_count": keys,
        "state_bytes": keys * 90,
        "watermark_lag_s": 2 * noise(0.1),
        "restarts": failed,
        "oom": np.zeros((jobs, minutes), np.float32),
        "exceptions": failed,
        "task_count": np.broadcast_to(column(fleet.tasks), (jobs, minutes)),
    }
    unknown = np.full((jobs, minutes), np.nan, np.float32)
    return np.stack([known.get(name, unknown) for name in METRICS], axis=1)


@dataclass
class Bench:
    """Runs parts, keeps rows and what missed."""

    jobs: int
    days: int
    repeats: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def add(self, name: str, values: list[float], unit: str, *, least: float = 0, most: float = 0) -> None:
        middle = statistics.median(values)
        row = {"case": name, "value": middle, "min": min(values), "max": max(values), "unit": unit}
        self.rows.append(row | {"at_least": least or None, "at_most": most or None})
        limit = f"≥ {least:,.0f}" if least else f"≤ {most:,.0f}" if most else ""
        print(
            f"{name:<52}{middle:>14,.0f}{min(values):>14,.0f}{max(values):>14,.0f}  {unit:<18}{limit}",
            flush=True,
        )
        if (least and middle < least) or (most and middle > most):
            self.missed.append(f"{name}: {middle:,.0f} {unit}, not {limit}")

    def rate(self, name: str, run: Callable[[], int], unit: str, *, least: float = 0) -> None:
        """How many a second, several times."""
        found = []
        for _ in range(self.repeats):
            begin = time.process_time()
            count = run()
            found.append(count / (time.process_time() - begin))
        self.add(name, found, unit, least=least)


def names_of(jobs: int) -> list[str]:
    return [f"pipeline{number // 4}.job{number % 4}" for number in range(jobs)]


def fill(
    database: Database, store: MetricStore, fleet: Fleet, bench: Bench, rng: np.random.Generator
) -> None:
    """The days before today, as sealing leaves them."""
    names = names_of(bench.jobs)
    nothing = np.full((bench.jobs, len(METRICS)), np.nan)
    nothing[:, list(METRICS).index("oom")] = 0
    store.put(Minute(minute=(TODAY - bench.days) * DAY, jobs=tuple(names), values=nothing))  # gives numbers
    with database.reading() as connection:
        found = connection.execute(sa.select(NAMES.c.kind, NAMES.c.name, NAMES.c.number)).all()
    numbers = {name: number for kind, name, number in found if kind == JOB}
    columns = {name: number for kind, name, number in found if kind == METRIC}
    kinds = len(fleet.level)
    for begin in range(0, kinds, SLICE):
        part = fleet.part(begin, begin + SLICE)
        made = [packed_day(part, day, rng) for day in range(TODAY - bench.days, TODAY)]
        for first in range(begin, bench.jobs, kinds):
            rows = [
                (numbers[name], columns[metric], day, points)
                for place, name in enumerate(names[first : first + len(part.level)])
                for day, blocks in enumerate(made, TODAY - bench.days)
                for metric, points in blocks[place].items()
            ]
            with database.transaction() as connection:
                insert_rows(connection, BLOCKS, ("job", "metric", "day", "points"), rows)


def packed_day(fleet: Fleet, day: int, rng: np.random.Generator) -> list[dict[str, bytes]]:
    """One day of some jobs: the blocks of each, by metric."""
    codes = encode(a_day(fleet, day, DAY, rng).astype(np.float64).transpose(0, 2, 1), BITS)
    codes = np.ascontiguousarray(codes.transpose(0, 2, 1))
    return [
        {
            metric: pack(points)
            for metric, points in zip(METRICS, job, strict=True)
            if (points != UNKNOWN).any()
        }
        for job in codes
    ]


def come_in(store: MetricStore, fleet: Fleet, bench: Bench, rng: np.random.Generator) -> None:
    """The first hours of today: a transaction a minute, then the sealing of four hours."""
    names = tuple(names_of(bench.jobs))
    drawn = a_day(fleet, TODAY, OPEN, rng)
    today = drawn[np.arange(bench.jobs) % len(drawn)]
    samples = int(np.isfinite(today[:, :, 0]).sum())
    spent, slowest_ms = 0.0, []
    for minute in range(OPEN):
        values = today[:, :, minute].astype(np.float64)
        begin, began = time.process_time(), time.perf_counter()
        store.put(Minute(minute=TODAY * DAY + minute, jobs=names, values=values))
        spent += time.process_time() - begin
        slowest_ms.append((time.perf_counter() - began) * 1000)
    bench.add("a minute of all jobs, one transaction", slowest_ms, "ms")
    pieces = []
    while True:
        begin, began = time.process_time(), time.perf_counter()
        if not store.seal(TODAY * DAY + OPEN):
            break
        spent += time.process_time() - begin
        pieces.append((time.perf_counter() - began) * 1000)
    bench.add("sealing four hours of 128 jobs", pieces, "ms")
    bench.add("ingest with sealing", [samples * OPEN / spent], "samples/s", least=SAMPLES_MIN)


def look(bench: Bench) -> Callable[[], int]:
    """One minute of looks at a report of one task of each job."""
    names = names_of(bench.jobs)
    counts = {name: (1, 1) for name in names}
    book, at = MinuteAggregator(), [0]

    def run() -> int:
        seen = 0
        for _ in range(LOOKS_A_MINUTE):
            at[0] += 5_000
            gauges = {"lag_records": 70.0, "lag_bytes": 9_000.0, "lag_s": 0.4, "memory_mb": 400.0}
            grown = {"read_total": 2.0, "written_total": 1.0, "busy_ms_total": 0.4, "cpu_ms_total": 0.3}
            metrics = {name: at[0] * rate for name, rate in grown.items()} | gauges
            for clock, life in (("at_ms", "started_ms"), ("cpu_at_ms", "cpu_started_ms")):
                metrics |= {clock: float(at[0]), life: 1.0}
            reports = {
                name: [
                    TaskReport(
                        task_id=f"{name}/0", job=name, generation=1, shard=0, state="running", metrics=metrics
                    )
                ]
                for name in names
            }
            book.observe(TODAY * DAY * MINUTE_MS + at[0], counts, reports)
            seen += len(metrics) * len(names)
        return seen

    return run


def retrieve(store: MetricStore, bench: Bench, rng: np.random.Generator) -> None:
    retriever, now_ms = Retriever(store), (TODAY * DAY + OPEN) * MINUTE_MS + 1_000
    names = names_of(bench.jobs)
    asked = [names[number] for number in rng.integers(0, bench.jobs, 3_000)]
    some = [retriever.frame(name, RECENT, now_ms=now_ms) for name in asked[:1_000]]
    frames = [frame for frame in some if isinstance(frame, Frame)]
    assert len(frames) == len(some), f"not whole: {some[0]}"

    def one_by_one() -> int:
        return sum(isinstance(retriever.frame(name, RECENT, now_ms=now_ms), Frame) for name in asked)

    def together() -> int:
        return sum(
            isinstance(found, Frame) for found in retriever.frames(names, RECENT, now_ms=now_ms).values()
        )

    def decisions(settings: ScalerSettings, known: Footprint) -> Callable[[], int]:
        return lambda: sum(decide(frame, settings, known) is not None for frame in frames)

    def evaluations() -> int:
        found = retriever.frames(names, RECENT, now_ms=now_ms)
        return sum(decide(frame) is not None for frame in found.values() if isinstance(frame, Frame))

    def single_evaluations() -> int:
        found = (retriever.frame(name, RECENT, now_ms=now_ms) for name in asked)
        return sum(decide(frame) is not None for frame in found if isinstance(frame, Frame))

    bench.rate("30 minutes of 6 metrics, job by job", one_by_one, "frames/s")
    bench.rate("30 minutes of 6 metrics, all jobs together", together, "frames/s")
    proactive = ScalerSettings(generation="proactive")
    bench.rate("decisions alone, proactive", decisions(proactive, KNOWN), "decisions/s")
    bench.rate("decisions alone, preactive", decisions(DEFAULTS, KNOWN), "decisions/s")
    bench.rate("decisions alone, preactive, staging", decisions(DEFAULTS, Footprint()), "decisions/s")
    bench.rate("evaluations, job by job", single_evaluations, "evaluations/s", least=EVALUATIONS_MIN)
    bench.rate("evaluations, all jobs together", evaluations, "evaluations/s", least=EVALUATIONS_MIN)
    past = MetricQuery(metrics=("ingest_rate",), minutes=bench.days * DAY, missing_max=0.1)
    jobs = list(dict.fromkeys(asked))[:500]

    def history() -> int:
        return sum(isinstance(retriever.frame(name, past, now_ms=now_ms), Frame) for name in jobs)

    def histories() -> int:
        return sum(isinstance(found, Frame) for found in retriever.frames(jobs, past, now_ms=now_ms).values())

    assert history() == len(jobs), retriever.frame(jobs[0], past, now_ms=now_ms)
    bench.rate(f"history: 1 metric over {bench.days} days, job by job", history, "frames/s")
    bench.rate(f"history: 1 metric over {bench.days} days, together", histories, "frames/s")


def size_of(database: Database, place: Path | str) -> int:
    """What the database takes on disk."""
    if isinstance(place, str):
        with database.reading() as connection:
            return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar())
    with contextlib.closing(sqlite3.connect(place)) as own:
        own.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return place.stat().st_size


def room(database: Database, whole: int, bench: Bench) -> None:
    with database.reading() as connection:
        size = int(connection.execute(sa.select(sa.func.sum(sa.func.length(BLOCKS.c.points)))).scalar_one())
    scale = 14 / bench.days / bench.jobs
    bench.add("packed, for 14 days", [size * scale], "bytes/job")
    bench.add("on disk, for 14 days", [whole * scale], "bytes/job", most=BYTES_MAX)
    bench.add("on disk, all jobs", [whole / 2**20], "MB")


@contextlib.contextmanager
def a_place(store: str) -> Iterator[Path | str]:
    if store == "postgres":
        from tests.postgres import postgres_server

        with postgres_server(on_disk=True) as server:
            yield server.new_database()
        return
    with tempfile.TemporaryDirectory(prefix="bench-policies-") as folder:
        yield Path(folder) / "store.db"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--days", type=int, default=14)
    parser.add_argument("--kinds", type=int, default=500, help="jobs that are drawn; the others repeat them")
    parser.add_argument("--repeats", type=int, default=3, help="runs to take the median of")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--check", action="store_true", help="exit 1 when a number is missed")
    options = parser.parse_args()
    if not 1 <= options.days <= 14 or min(options.jobs, options.kinds) < 1:
        parser.error("--days is from 1 to 14, --jobs and --kinds at least 1")
    bench, rng = Bench(options.jobs, options.days, options.repeats), np.random.default_rng(options.seed)
    fleet = Fleet.of(min(options.jobs, options.kinds), rng)
    print(f"{options.jobs:,} jobs, {options.days} days, {options.store}, rates per second of one core's time")
    print(f"{'case':<52}{'median':>14}{'min':>14}{'max':>14}  {'unit':<18}limit")
    bench.rate("looks at reports", look(bench), "report values/s", least=SAMPLES_MIN)
    with a_place(options.store) as place:
        database = Database(place)
        store = MetricStore(database)
        empty = size_of(database, place)
        fill(database, store, fleet, bench, rng)
        room(database, size_of(database, place) - empty, bench)
        come_in(store, fleet, bench, rng)
        retrieve(store, bench, rng)
        database.close()
    for line in bench.missed:
        print(f"missed: {line}")
    if options.json:
        told = {"jobs": options.jobs, "days": options.days, "store": options.store, "rows": bench.rows}
        print(json.dumps(told | {"missed": bench.missed}))
    return 1 if options.check and bench.missed else 0


if __name__ == "__main__":
    sys.exit(main())
