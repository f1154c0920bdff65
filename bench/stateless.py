"""How fast stateless work is, what a micro-batch costs, and how many idle tasks one container holds.

Three parts, each against Spark as it comes, in the same run on the same records; both sides have two cores
and a process of their own.

1. 1,000,000 JSON records parsed, filtered and projected. Penstock reads them from the bus and publishes the
   result, exactly once and on disk. Stock PySpark reads them from Parquet, `from_json`, and throws the result
   away. A second job then reads what the first one published: nothing is parsed again.
2. The floor of a micro-batch: 10 records per trigger, the median time of a trigger. Stock PySpark reads
   them from a file per trigger and throws the result away.
3. How many tasks with nothing to do one container holds at a trigger of 5 s, and what each costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from bench.tools.usage import cpu_of, memory_of
from penstock.jobs.config import JobConfig
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.catalogue import category_from_json
from tests.support.stage import Stage, wait_for

CATEGORY = {
    "name": "events",
    "partitions": 2,
    "columns": [["user", "string"], ["kind", "string"], ["amount", "double"], ["ts", "bigint"]],
    "format": "json",
    "watermark": "event_time",
    "lateness_ms": 0,
    "ts_column": "ts",
}
PIPELINE = """
from penstock import Pipeline

p = Pipeline("bench", partitions=2)
(
    p.source("events")
    .filter("kind <> 'ping' AND amount > 1")
    .select("user", "upper(kind) AS kind", "amount * 2 AS twice")
    .sink("results")
)
"""
SECOND = """
from penstock import Pipeline

p = Pipeline("second", partitions=2)
p.source("results").filter("twice > 3").select("user", "twice").sink("again")
"""
FILTER = "kind <> 'ping' AND amount > 1"
SELECT = ["user", "upper(kind) AS kind", "amount * 2 AS twice"]
DDL = "user string, kind string, amount double, ts bigint"
CHUNK = 50_000
FLOOR_ROWS, FLOOR_BATCHES = 10, 40
IDLE_TRIGGER_MS = 5_000
# Each has a Python process of its own at the driver, 62 MB that nobody shares: more than 80 fill a laptop.
IDLE_STEPS = (0, 20, 40, 60, 80)
IDLE_WATCH_S = 16.0
RATE_MIN, FLOOR_MAX = 2.0, 0.5


def values(count: int, first: int = 0) -> Iterator[list[bytes]]:
    kinds = (b"view", b"buy", b"ping", b"look")
    for start in range(first, first + count, CHUNK):
        numbers = range(start, min(start + CHUNK, first + count))
        yield [
            b'{"user": "user %d", "kind": "%s", "amount": %.3f, "ts": %d}'
            % (n * 7919 % 10_000, kinds[n % 4], n % 97 / 7, n)
            for n in numbers
        ]


def make_input(folder: Path, count: int) -> None:
    """The same records as a category of the bus and as a Parquet file."""
    log = EmbeddedLog(folder / "bus")
    log.create(category_from_json(CATEGORY))
    done = 0
    with pq.ParquetWriter(folder / "events.parquet", pa.schema([("value", pa.string())])) as writer:
        for chunk in values(count):
            writer.write_table(pa.table({"value": [value.decode() for value in chunk]}))
            publish(log, "events", chunk, done, producer="bench")
            done += len(chunk)


def publish(log: Any, category: str, chunk: Sequence[bytes], first: int, producer: str) -> None:
    spec = log.describe(category).spec
    halves = np.arange(len(chunk)) % 2
    batches = {}
    for partition in range(2):
        picked = np.flatnonzero(halves == partition)
        batches[partition] = pa.RecordBatch.from_arrays(
            [
                pa.array(picked + first + 1),
                pa.array(picked + first),
                pa.nulls(len(picked), pa.string()),
                pa.array(np.zeros(len(picked), dtype=np.bool_)),
                pa.array([chunk[index] for index in picked], pa.binary()),
            ],
            schema=spec.schema(),
        )
    log.publish(category, producer=producer, epoch=1, batches=batches, gapless=False)


class Ours:
    """Penstock's side, in a process of its own."""

    def __init__(self, folder: Path, count: int) -> None:
        from penstock.streams.spark.session import build_session

        self.folder, self.count = folder, count
        self.cpu: dict[str, list[float]] = {}  # seconds of all processes of this side
        # As a container has it: what nobody reads again lies in memory.
        memory = Path("/dev/shm")
        self.checkpoints = (memory if memory.is_dir() else folder) / f"{folder.name}-checkpoints"
        self.fast = {"trigger_ms": 0, "batch_rows_max": max(1000, count // 5)}
        self.spark = build_session("bench", 2, folder / "scratch")

    def stage(self, name: str, text: str, category: dict[str, Any], **config: Any) -> Stage:
        path = self.folder / f"{name}.py"
        path.write_text(text)
        stage = Stage(self.spark, self.folder, path, category, checkpoints=self.checkpoints)
        stage.configs.clear()
        stage.compile(path, **config)
        return stage

    def throughput(self, repeats: int) -> dict[str, Any]:
        """Seconds for all records at the rate from the first commit to the last; a new life each time.

        A stream starts once and runs for months: its start is not its rate.
        """
        found: dict[str, list[float]] = {"json": [], "typed": []}
        self.run_once("warm", 1, found={"json": [], "typed": []})
        for repeat in range(repeats):
            self.run_once(f"r{repeat}", repeat + 2, found)
        return {**found, "kept": self.kept, "cpu": {kind: times[1:] for kind, times in self.cpu.items()}}

    def run_once(self, name: str, lineage: int, found: dict[str, list[float]]) -> None:
        first = self.stage(
            f"first_{name}", PIPELINE.replace("results", f"results_{name}"), CATEGORY, **self.fast
        )
        found["json"].append(self._timed(first, "events", "json"))
        spec = {
            "name": f"results_{name}",
            "partitions": 2,
            "columns": [["user", "string"], ["kind", "string"], ["twice", "double"]],
            "format": "typed",
            "watermark": "producers",
        }
        text = SECOND.replace("results", f"results_{name}").replace("again", f"again_{name}")
        second = self.stage(f"second_{name}", text.replace('"second"', f'"second{name}"'), spec, **self.fast)
        self.kept = sum(second.log.end_offsets(f"results_{name}"))
        found["typed"].append(self._timed(second, f"results_{name}", "typed"))

    def _timed(self, stage: Stage, source: str, kind: str) -> float:
        (job,) = stage.configs
        stage.births = {job: os.urandom(4).hex()}
        stage.data.prepare(job, stage.birth(job), JobConfig.from_stored(stage.configs[job]))
        total = sum(stage.log.end_offsets(source))
        ids = stage.start(job)
        wait_for(lambda: _read(stage, job) > 0, "the first batch", seconds=300)
        began, first, cpu = time.monotonic(), _read(stage, job), cpu_of(psutil.Process())
        wait_for(lambda: _read(stage, job) >= total, "the end of the input", seconds=600)
        took, cpu = time.monotonic() - began, cpu_of(psutil.Process()) - cpu
        stage.stop(ids)
        self.cpu.setdefault(kind, []).append(cpu * total / (total - first))
        return took * total / (total - first)

    def floor(self) -> list[float]:
        """Milliseconds of each trigger that had ten records."""
        stage = self.stage(
            "floor", PIPELINE.replace("results", "floored"), {**CATEGORY, "name": "events"}, trigger_ms=0
        )
        (job,) = stage.configs
        chunk = next(values(FLOOR_ROWS))
        ids = stage.start(job)
        wait_for(
            lambda: _read(stage, job) >= sum(stage.log.end_offsets("events")), "the backlog", seconds=600
        )
        query = stage.tasks._runs[ids[0]]._query
        times: list[float] = []
        for n in range(FLOOR_BATCHES):
            publish(stage.log, "events", chunk, self.count + n * FLOOR_ROWS, producer="floor")
            goal = sum(stage.log.end_offsets("events"))
            wait_for(lambda goal=goal: _read(stage, job) >= goal, "ten records", seconds=60)
            time.sleep(0.05)
            times += [
                float(progress["durationMs"]["triggerExecution"])
                for progress in query.recentProgress
                if _has_records(progress)
            ][-1:]
        stage.stop(ids)
        return times[5:]

    def idle(self) -> list[dict[str, float]]:
        """Tasks with nothing to do: the slowest trigger, CPU and memory per task."""
        found = []
        spec = {**CATEGORY, "name": "nothing", "partitions": 1}
        started = 0
        stages: list[tuple[Stage, list[str]]] = []
        for tasks in IDLE_STEPS:
            while started < tasks:
                text = PIPELINE.replace("results", f"none_{started}").replace('"events"', '"nothing"')
                stage = self.stage(
                    f"idle_{started}",
                    text.replace('"bench"', f'"idle{started}"'),
                    spec,
                    trigger_ms=IDLE_TRIGGER_MS,
                )
                (job,) = stage.configs
                stages.append((stage, stage.start(job)))
                started += 1
            for stage, _ in stages:
                wait_for(
                    lambda stage=stage: all(v.state == "running" for v in stage.tasks.poll()),
                    "tasks",
                    seconds=300,
                )
            seen = watch_idle(stages, tasks)
            found.append(seen)
            if seen["slowest_ms"] > IDLE_TRIGGER_MS or seen["late_ms"] > IDLE_TRIGGER_MS * 0.1:
                break
        for stage, ids in stages:
            stage.stop(ids)
        return found


def watch_idle(stages: list[tuple[Stage, list[str]]], tasks: int) -> dict[str, float]:
    """What the session uses while its tasks wait, and how late their triggers come."""
    me = psutil.Process()
    time.sleep(IDLE_TRIGGER_MS / 1000 if tasks else 1)
    before, began = cpu_of(me), time.monotonic()
    time.sleep(IDLE_WATCH_S)
    cpu = (cpu_of(me) - before) / (time.monotonic() - began)
    slowest = late = 0.0
    for stage, ids in stages:
        for task_id in ids:
            recent = stage.tasks._runs[task_id]._query.recentProgress[-3:]
            slowest = max(slowest, *(progress["durationMs"]["triggerExecution"] for progress in recent))
            stamps = [_seconds(progress["timestamp"]) for progress in recent]
            gaps = [after - before for before, after in itertools.pairwise(stamps)]
            late = max([late, *(gap * 1000 - IDLE_TRIGGER_MS for gap in gaps)])
    return {"tasks": tasks, "cpu": cpu, "memory_mb": memory_of(me), "slowest_ms": slowest, "late_ms": late}


def _has_records(progress: Any) -> bool:
    """Whether its offsets moved, beside the tick that every trigger has. What the source yields does not
    tell: it may have done all the work itself.
    """
    (source,) = progress["sources"]
    before, after = (json.loads(source[name]) or {} for name in ("startOffset", "endOffset"))
    return {**before, "tick": 0} != {**after, "tick": 0}


def _seconds(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def _read(stage: Stage, job: str) -> int:
    from penstock.jobs.tasks import interval_birth
    from penstock.streams.rows.row_store import IntervalRef

    config, birth = stage.configs[job], stage.birth(job)
    total = 0
    for partition in range(config["partitions"]):
        own = interval_birth(birth, config["kind"], config["lineage"], partition)
        row = stage.rows.peek(IntervalRef(job=job, job_birth=birth, partition=partition, birth=own))
        total += sum(row.offsets.values())
    return total


class Stock:
    """Spark as it comes, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        from pyspark.sql import SparkSession

        self.folder = folder
        self.spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
        self.spark.sparkContext.setLogLevel("ERROR")

    def throughput(self, repeats: int) -> list[float]:
        from pyspark.sql import functions as F

        found, self.cpu = [], []
        for repeat in range(repeats + 1):
            rows = self.spark.read.parquet(str(self.folder / "events.parquet"))
            parsed = rows.select(F.from_json("value", DDL).alias("v")).select("v.*")
            began, cpu = time.monotonic(), cpu_of(psutil.Process())
            parsed.where(FILTER).selectExpr(*SELECT).write.format("noop").mode("overwrite").save()
            if repeat:
                found.append(time.monotonic() - began)
                self.cpu.append(cpu_of(psutil.Process()) - cpu)
        return found

    def floor(self) -> list[float]:
        """The same ten records in a file per trigger, read by Spark's own file source."""
        from pyspark.sql import functions as F

        place = self.folder / "tens"
        place.mkdir()
        chunk = next(values(FLOOR_ROWS))
        for n in range(FLOOR_BATCHES):
            (place / f"{n:04}.ndjson").write_bytes(b"\n".join(chunk))
        rows = self.spark.readStream.option("maxFilesPerTrigger", 1).text(str(place))
        parsed = rows.select(F.from_json("value", DDL).alias("v")).select("v.*")
        query = (
            parsed.where(FILTER)
            .selectExpr(*SELECT)
            .writeStream.format("noop")
            .option("checkpointLocation", str(self.folder / "stock-checkpoint"))
            .trigger(processingTime="0 seconds")
            .start()
        )
        wait_for(lambda: len(query.recentProgress) >= FLOOR_BATCHES, "batches", seconds=120)
        progresses = [progress for progress in query.recentProgress if progress["numInputRows"]]
        times = [float(progress["durationMs"]["triggerExecution"]) for progress in progresses]
        query.stop()
        return times[5:FLOOR_BATCHES]


def side(role: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One side in a process of its own."""
    command = [sys.executable, "-m", "bench.stateless", "--role", role, "--folder", str(folder)]
    command += ["--records", str(options.records), "--repeats", str(options.repeats)]
    if options.no_idle:
        command.append("--no-idle")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def play(options: argparse.Namespace) -> None:
    """The process of one side."""
    folder = Path(options.folder)
    if options.role == "stock":
        stock = Stock(folder)
        found: dict[str, Any] = {"json": stock.throughput(options.repeats), "floor_ms": stock.floor()}
        found["cpu"] = stock.cpu
    else:
        ours = Ours(folder, options.records)
        found = ours.throughput(options.repeats)
        found["floor_ms"] = ours.floor()
        found["idle"] = [] if options.no_idle else ours.idle()
        shutil.rmtree(ours.checkpoints, ignore_errors=True)
    print(json.dumps(found), flush=True)
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-idle", action="store_true", help="leave the third part out")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        play(options)
    with tempfile.TemporaryDirectory(prefix="bench-stateless-") as folder:
        make_input(Path(folder), options.records)
        stock, ours = side("stock", Path(folder), options), side("penstock", Path(folder), options)
    return report(options, ours, stock)


def report(options: argparse.Namespace, ours: dict[str, Any], stock: dict[str, Any]) -> int:
    console = Console(stderr=options.json)
    table = Table(
        title=f"{options.records:,} JSON records, medians of {options.repeats}", title_justify="left"
    )
    for name in ("side", "seconds", "spread", "records/s", "CPU seconds"):
        table.add_column(name, justify="left" if name == "side" else "right")
    rows = (
        ("stock PySpark, from Parquet into nothing", stock["json"], options.records, stock["cpu"]),
        ("Penstock, from the bus to the bus", ours["json"], options.records, ours["cpu"]["json"]),
        ("its second job, of typed records", ours["typed"], ours["kept"], ours["cpu"]["typed"]),
    )
    for name, times, records, cpu in rows:
        middle = statistics.median(times)
        spread = f"{min(times):.2f} – {max(times):.2f}"
        cells = (f"{middle:.2f}", spread, f"{records / middle:,.0f}", f"{statistics.median(cpu):.2f}")
        table.add_row(name, *cells)
    console.print(table)
    ratio = statistics.median(stock["json"]) / statistics.median(ours["json"])
    floors = {
        name: statistics.median(found["floor_ms"]) for name, found in (("stock", stock), ("ours", ours))
    }
    share = floors["ours"] / floors["stock"]
    console.print(f"rate: {ratio:.2f} times stock PySpark (goal {RATE_MIN})")
    console.print(
        f"floor of a trigger with 10 records: {floors['ours']:.0f} ms, stock {floors['stock']:.0f} ms: "
        f"{share:.2f} (goal {FLOOR_MAX})"
    )
    for seen in ours["idle"]:
        base = ours["idle"][0]
        per = max(1, seen["tasks"])
        cpu, memory = (seen["cpu"] - base["cpu"]) / per, (seen["memory_mb"] - base["memory_mb"]) / per
        console.print(
            f"{seen['tasks']:>4.0f} idle tasks: {seen['cpu']:.2f} cores, {seen['memory_mb']:,.0f} MB; "
            f"per task {cpu * 1000:.1f} mCPU, {memory:.1f} MB; slowest trigger {seen['slowest_ms']:.0f} ms, "
            f"{max(0.0, seen['late_ms']):.0f} ms late"
        )
    ok = ratio >= RATE_MIN and share <= FLOOR_MAX
    if options.json:
        said = {
            "bench": "stateless",
            "ratio": ratio,
            "floor_share": share,
            "ours": ours,
            "stock": stock,
            "ok": ok,
        }
        print(json.dumps(said))
    return 1 if options.check and not ok else 0


if __name__ == "__main__":
    sys.exit(main())
