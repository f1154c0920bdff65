"""How fast state is: a running count per key, and counts per key and window, against Spark as it comes.

All sides read the same records in as many batches, have two cores and a process of their own, and keep state
on disk. Penstock reads the bus, shuffles through the bus, commits exactly once and publishes its results;
Spark reads Parquet and throws its results away.

1. Running count: a VectorComputation, against `groupBy().count()` in the JVM and against PySpark's
   `transformWithState` over rows, both with RocksDB.
2. Windows: tumbling ones of 10 s over 200 s of event time with a lateness of 1 s, against Spark's own.
3. Record by record: a Computation in Python with a state and a timer per window, with rows in SQLite and in
   PostgreSQL; beside it the same in bytewax and in PyFlink, if they install (`bench/tools/peers.py`).

Times are from the end of the first batch to the end of the last: a stream starts once and runs for months.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from bench.tools.peers import time_peer
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.catalogue import category_from_json
from tests.support.stage import Stage, wait_for

SPAN_MS, LATENESS_MS, WINDOW_S = 200_000, 1000, 10
BATCHES = 5
EVENTS = {
    "name": "events",
    "partitions": 2,
    "columns": [["user", "string"], ["ts", "bigint"]],
    "format": "typed",
    "watermark": "event_time",
    "lateness_ms": LATENESS_MS,
}
RUNNING = """
import pyarrow as pa
import pyarrow.compute as pc

from penstock import Pipeline, VectorComputation


class RunningCount(VectorComputation):
    outputs = {"out": {"user": "string", "n": "bigint"}}
    state = {"n": "bigint"}

    def process_batch(self, records, states):
        counts = records.group_by("_key").aggregate([("_ts", "count"), ("_ts", "max")])
        found = counts.join(states, "_key")
        n = pc.add(found["_ts_count"], pc.fill_null(found["n"], 0))
        rows = {"_key": found["_key"], "_ts": found["_ts_max"], "user": found["_key"], "n": n}
        return pa.table({"_key": found["_key"], "n": n}), {"out": pa.table(rows)}


p = Pipeline("NAME", partitions=2)
p.source("events").key_by("user").process(RunningCount).sink("NAME_out")
"""
WINDOWS = """
from penstock import Pipeline, tumbling

p = Pipeline("NAME", partitions=2)
p.source("events").key_by("user").window(tumbling("10s")).aggregate("count(*) AS n").sink("NAME_out")
"""
BY_RECORD = """
from penstock import Computation, Pipeline, Value


class PerWindow(Computation):
    outputs = {"out": {"user": "string", "window": "bigint", "n": "bigint"}}
    counts = Value(dict[int, int])

    def process_record(self, record, ctx):
        window = record.ts // 10_000
        ctx.state.counts[window] = ctx.state.counts.get(window, 0) + 1
        ctx.set_timer(str(window), (window + 1) * 10_000)

    def process_timer(self, timer, ctx):
        window = int(timer.tag)
        ctx.produce({"user": ctx.key, "window": window, "n": ctx.state.counts.pop(window)})


p = Pipeline("NAME", partitions=2)
p.source("events").key_by("user").process(PerWindow).sink("NAME_out")
"""
PEER_SHARE = {"bytewax": 1, "PyFlink": 20}  # one over so much of the records: it would take too long else
# What is asked for: against transformWithState, against groupBy().count(), against Spark's windowed count.
ROWS_MIN, GROUP_MIN, WINDOW_MIN = 5.0, 0.9, 1.3


def make_input(folder: Path, count: int, keys: int) -> None:
    """The same records on the bus and as Parquet files, one per batch; disorder is within the lateness."""
    random = np.random.default_rng(7)
    users = pa.array([f"user {n}" for n in range(keys)]).take(pa.array(random.integers(0, keys, count)))
    stamps = np.arange(count, dtype=np.int64) * SPAN_MS // count + random.integers(0, LATENESS_MS, count)
    log = EmbeddedLog(folder / "bus")
    log.create(category_from_json(EVENTS))
    schema = log.describe("events").spec.schema()
    (folder / "parquet").mkdir()
    size = -(-count // BATCHES)
    for number, start in enumerate(range(0, count, size)):
        end = min(count, start + size)
        names, times = users.slice(start, end - start), stamps[start:end]
        file = folder / "parquet" / f"{number:03}.parquet"
        pq.write_table(pa.table({"user": names, "ts": pa.array(times)}), file)
        os.utime(file, (number, number))  # files are read in the order of their times
        batches = {}
        for partition in range(2):
            picked = np.arange(partition, end - start, 2)
            batches[partition] = pa.RecordBatch.from_arrays(
                [
                    pa.array(picked + start + 1),
                    pa.array(times[picked]),
                    pa.nulls(len(picked), pa.string()),
                    pa.array(np.zeros(len(picked), dtype=np.bool_)),
                    names.take(pa.array(picked)),
                    pa.array(times[picked]),
                ],
                schema=schema,
            )
        log.publish("events", producer="bench", epoch=1, batches=batches, gapless=False)


class Ours:
    """Penstock's side."""

    def __init__(self, folder: Path, count: int) -> None:
        from penstock.streams.spark.session import build_session

        self.folder, self.count = folder, count
        memory = Path("/dev/shm")
        self.checkpoints = (memory if memory.is_dir() else folder) / f"{folder.name}-checkpoints"
        self.spark = build_session("bench", 2, folder / "scratch")

    def times(self, kind: str, text: str, repeats: int, rows: str = "") -> list[float]:
        return [self._once(f"{kind}{repeat}", text, rows) for repeat in range(repeats + 1)][1:]

    def _once(self, name: str, text: str, rows: str) -> float:
        path = self.folder / f"{name}.py"
        path.write_text(text.replace("NAME", name))
        stage = Stage(self.spark, self.folder, path, EVENTS, rows=rows, checkpoints=self.checkpoints)
        stage.configs.clear()
        stage.compile(path, trigger_ms=0, batch_rows_max=-(-self.count // BATCHES))
        first, last = stage.configs
        ids = [task for job in (first, last) for task in stage.start(job)]
        wait_for(lambda: _progress(stage, last, self.count) > 0, "the first batch", seconds=300)
        began, done = time.monotonic(), _progress(stage, last, self.count)
        wait_for(lambda: _progress(stage, last, self.count) >= self.count, "the end", seconds=600)
        took = time.monotonic() - began
        stage.stop(ids)
        return took * self.count / max(1, self.count - done)


def _progress(stage: Stage, job: str, total: int) -> int:
    """Records that the job with state has committed; the low is told to the bus on the way."""
    from penstock.jobs.tasks import interval_birth
    from penstock.streams.rows.row_store import IntervalRef

    for view in stage.tasks.poll():
        assert view.state in ("starting", "running"), view
    for category in stage.log.categories():
        stage.log.advance(category.spec.name, now_ms=time.time_ns() // 1_000_000)
    config, birth, found = stage.configs[job], stage.birth(job), 0
    for partition in range(config["partitions"]):
        own = interval_birth(birth, config["kind"], config["lineage"], partition)
        row = stage.rows.peek(IntervalRef(job=job, job_birth=birth, partition=partition, birth=own))
        found += sum(row.offsets.values())
    return found


class Stock:
    """Spark as it comes, with RocksDB."""

    def __init__(self, folder: Path, count: int) -> None:
        from pyspark.sql import SparkSession

        self.folder, self.count = folder, count
        os.environ["PYSPARK_PYTHON"] = sys.executable  # else the first python3 of the path
        rocks = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        self.spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.streaming.stateStore.providerClass", rocks)
            .config("spark.sql.session.timeZone", "UTC")
            .getOrCreate()
        )
        self.spark.sparkContext.setLogLevel("ERROR")

    def times(self, kind: str, repeats: int) -> list[float]:
        query: Callable[[Any], Any] = getattr(self, kind)
        return [self._once(kind, repeat, query) for repeat in range(repeats + 1)][1:]

    def _once(self, kind: str, repeat: int, made: Callable[[Any], Any]) -> float:
        from pyspark.sql import functions as F

        rows = (
            self.spark.readStream.schema("user string, ts bigint")
            .option("maxFilesPerTrigger", 1)
            .parquet(str(self.folder / "parquet"))
            .withColumn("at", F.timestamp_millis("ts"))
        )
        frame, mode = made(rows)
        query = (
            frame.writeStream.format("noop")
            .outputMode(mode)
            .option("checkpointLocation", str(self.folder / f"stock-{kind}-{repeat}"))
            .trigger(processingTime="0 seconds")
            .start()
        )

        def seen() -> list[Any]:
            if query.exception() is not None:
                raise query.exception()
            return [progress for progress in query.recentProgress if progress["numInputRows"]]

        wait_for(lambda: len(seen()) >= BATCHES, f"{kind}", seconds=600)
        took = [progress["durationMs"]["triggerExecution"] / 1000 for progress in seen()[1:BATCHES]]
        query.stop()
        return sum(took) * BATCHES / (BATCHES - 1)

    def group(self, rows: Any) -> tuple[Any, str]:
        return rows.groupBy("user").count(), "update"

    def window(self, rows: Any) -> tuple[Any, str]:
        from pyspark.sql import functions as F

        late = rows.withWatermark("at", f"{LATENESS_MS} milliseconds")
        return late.groupBy(F.window("at", f"{WINDOW_S} seconds"), "user").count(), "append"

    def rows(self, rows: Any) -> tuple[Any, str]:
        from bench.tools.running_count import RunningCount

        counted = (
            rows.select("user")
            .groupBy("user")
            .transformWithState(
                statefulProcessor=RunningCount(),
                outputStructType="user string, n bigint",
                outputMode="Update",
                timeMode="None",
            )
        )
        return counted, "update"


def side(role: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One side in a process of its own."""
    command = [sys.executable, "-m", "bench.stateful", "--role", role, "--folder", str(folder)]
    command += ["--records", str(options.records), "--repeats", str(options.repeats)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def play(options: argparse.Namespace) -> None:
    """The process of one side."""
    folder = Path(options.folder)
    if options.role == "stock":
        stock = Stock(folder, options.records)
        found = {kind: stock.times(kind, options.repeats) for kind in ("group", "rows", "window")}
    else:
        from tests.postgres import postgres_server

        ours = Ours(folder, options.records)
        found = {
            "running": ours.times("running", RUNNING, options.repeats),
            "window": ours.times("window", WINDOWS, options.repeats),
            "record_sqlite": ours.times("record_sqlite", BY_RECORD, options.repeats),
        }
        with postgres_server(on_disk=True) as server:
            rows = server.new_database()
            found["record_postgres"] = ours.times("record_postgres", BY_RECORD, options.repeats, rows)
        shutil.rmtree(ours.checkpoints, ignore_errors=True)
    print(json.dumps(found), flush=True)
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true", help="without bytewax and PyFlink")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        play(options)
    with tempfile.TemporaryDirectory(prefix="bench-stateful-") as folder:
        make_input(Path(folder), options.records, options.keys)
        ours, stock = side("penstock", Path(folder), options), side("stock", Path(folder), options)
        peers = {} if options.no_peers else time_peers(Path(folder), options)
    return report(options, ours, stock, peers)


def time_peers(folder: Path, options: argparse.Namespace) -> dict[str, list[float] | str]:
    """Seconds that each peer would take for all records, or why there are none."""
    table = pa.concat_tables(pq.read_table(path) for path in sorted((folder / "parquet").iterdir()))
    rows = list(zip(table["user"].to_pylist(), table["ts"].to_pylist(), strict=True))
    found: dict[str, list[float] | str] = {}
    for name, share in PEER_SHARE.items():
        times = time_peer(name, rows[: len(rows) // share], options.repeats)
        found[name] = times if isinstance(times, str) else [taken * share for taken in times]
    return found


def report(
    options: argparse.Namespace,
    ours: dict[str, Any],
    stock: dict[str, Any],
    peers: dict[str, list[float] | str],
) -> int:
    console = Console(stderr=options.json)
    title = f"{options.records:,} records, {options.keys:,} keys, medians of {options.repeats}"
    table = Table(title=title, title_justify="left")
    for name in ("what", "seconds", "spread", "records/s"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for name, times in (
        ("running count, PySpark transformWithState", stock["rows"]),
        ("running count, Spark groupBy().count()", stock["group"]),
        ("running count, Penstock", ours["running"]),
        ("windows, Spark", stock["window"]),
        ("windows, Penstock", ours["window"]),
        *((f"record by record, {name}", times) for name, times in peers.items()),
        ("record by record, Penstock, SQLite", ours["record_sqlite"]),
        ("record by record, Penstock, PostgreSQL", ours["record_postgres"]),
    ):
        if isinstance(times, str):
            table.add_row(name, times, "", "")
            continue
        middle = statistics.median(times)
        spread = f"{min(times):.2f} – {max(times):.2f}"
        table.add_row(name, f"{middle:.2f}", spread, f"{options.records / middle:,.0f}")
    console.print(table)
    ratios = {
        "rows": (_ratio(stock["rows"], ours["running"]), ROWS_MIN, "transformWithState"),
        "group": (_ratio(stock["group"], ours["running"]), GROUP_MIN, "groupBy().count()"),
        "window": (_ratio(stock["window"], ours["window"]), WINDOW_MIN, "Spark's windowed count"),
    }
    for ratio, goal, name in ratios.values():
        console.print(f"{ratio:.2f} times the rate of {name} (goal {goal})")
    ok = all(ratio >= goal for ratio, goal, _ in ratios.values())
    if options.json:
        said = {name: ratio for name, (ratio, _, _) in ratios.items()}
        print(
            json.dumps(
                {"bench": "stateful", "ratios": said, "ours": ours, "stock": stock, "peers": peers, "ok": ok}
            )
        )
    return 1 if options.check and not ok else 0


def _ratio(theirs: list[float], mine: list[float]) -> float:
    return statistics.median(theirs) / statistics.median(mine)


if __name__ == "__main__":
    sys.exit(main())
