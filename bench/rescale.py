"""How long a job with much state stands still when it gets another number of tasks, and how much is copied.

1,000,000 keys of 100 bytes are put into the state of a job; then records of random keys keep coming while the
job goes from 1 task to 4, and from 4 to 2, through the control plane as oncall would have it. A pause is the
longest time that any partition of the job did not commit, looked at ten times a second, so also of one that
would have waited for its trigger. Copied is what lies in files of state that were not there before.

Beside it Spark: the same state in a `groupBy` with RocksDB; its query is stopped, its checkpoint brought to
another number of partitions by Spark's own offline repartition, and started again. Its pause ends with its
first batch; copied is what the repartition wrote into the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from examples.pauses import PauseWatch
from penstock.client import Client
from penstock.core.errors import PenstockError
from penstock.streams.bus.log import Log
from penstock.streams.catalogue import category_from_json
from penstock.streams.places import open_log

PAUSE_MAX_S, COPIED_MAX = 3.0, 0
STEPS = ((1, 4), (4, 2))
VALUE_BYTES, PARTITIONS, RATE = 100, 4, 2_000
CHUNK = 100_000
STEADY_S = 4.0
JOB = "keeps.kept"
EVENTS = {
    "name": "events",
    "partitions": PARTITIONS,
    "columns": [["name", "string"], ["value", "string"], ["ts", "bigint"]],
    "format": "typed",
    "watermark": "event_time",
    "lateness_ms": 1000,
}
PIPELINE = """
import pyarrow as pa

from penstock import Pipeline, VectorComputation


class Keep(VectorComputation):
    outputs = {"out": {"name": "string"}}
    state = {"value": "string"}

    def process_batch(self, records, states):
        last = records.group_by("_key", use_threads=False).aggregate([("value", "last"), ("_ts", "max")])
        kept = pa.table({"_key": last["_key"], "value": last["value_last"]})
        return kept, {"out": pa.table({"_key": last["_key"], "_ts": last["_ts_max"], "name": last["_key"]})}


p = Pipeline("keeps", partitions=4)
p.source("events").key_by("name", name="routed").process(Keep, name="kept").sink("kept_out")
"""


def chunk(start: int, count: int) -> dict[str, pa.Array]:
    """Records of keys start.. with their values of 100 bytes."""
    numbers = np.arange(start, start + count)
    names = pa.array([f"key {number:09d}" for number in numbers])
    values = pa.array([f"{number:0{VALUE_BYTES}d}" for number in numbers])
    return {"name": names, "value": values}


class Feeder:
    """Records of random keys at a steady rate, from a thread."""

    def __init__(self, log: Log, keys: int) -> None:
        self._log, self._keys, self._random = log, keys, np.random.default_rng(3)
        self._schema = log.describe("events").spec.schema()
        self._stop = threading.Event()
        self._sequence = 0
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def load(self, start: int, count: int) -> None:
        """A chunk of new keys."""
        self._publish(chunk(start, count), count)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            numbers = self._random.integers(0, self._keys, RATE // 10)
            names = pa.array([f"key {number:09d}" for number in numbers])
            values = pa.array([f"{number:0{VALUE_BYTES}d}" for number in numbers])
            self._publish({"name": names, "value": values}, len(numbers))

    def _publish(self, columns: dict[str, pa.Array], count: int) -> None:
        now_ms = time.time_ns() // 1_000_000
        batches = {}
        for partition in range(PARTITIONS):
            picked = pa.array(np.arange(partition, count, PARTITIONS))
            size = len(picked)
            batches[partition] = pa.RecordBatch.from_arrays(
                [
                    pa.array(np.arange(size) + self._sequence + 1),
                    pa.array(np.full(size, now_ms)),
                    pa.nulls(size, pa.string()),
                    pa.array(np.zeros(size, dtype=np.bool_)),
                    columns["name"].take(picked),
                    columns["value"].take(picked),
                    pa.array(np.full(size, now_ms)),
                ],
                schema=self._schema,
            )
        self._sequence += count
        self._log.publish("events", producer="bench", epoch=1, batches=batches, gapless=False)


@contextmanager
def installation(folder: Path) -> Iterator[Client]:
    """A real `penstock up` with two containers."""
    from penstock.cli.output import connect

    command = [sys.executable, "-m", "penstock.cli.main", "up", "--folder", str(folder)]
    command += ["--containers", "2", "--port", "0"]
    folder.mkdir()
    with (folder / "up.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    client = None
    try:
        deadline = time.monotonic() + 180
        while client is None:
            try:
                client = connect(folder)
                assert sum(row["ready"] for row in client.status()["containers"]) == 2
            except (PenstockError, AssertionError):
                client = None
                assert time.monotonic() < deadline, (folder / "up.log").read_text()[-2000:]
                time.sleep(0.2)
        yield client
    finally:
        if client is not None:
            client.close()
        process.terminate()
        process.wait(60)


def penstock(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", *arguments, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def ours(folder: Path, keys: int, repeats: int) -> dict[str, list[float]]:
    """Pauses, and bytes in new files of state, per step."""
    place = folder / "penstock"
    pipeline = folder / "keeps.py"
    pipeline.write_text(PIPELINE)
    found: dict[str, list[float]] = {}
    with installation(place) as client:
        log = open_log(f"embedded:{place.resolve() / 'bus'}")
        log.create(category_from_json(EVENTS))
        penstock(place, "submit", str(pipeline))
        penstock(place, "oncall", "set", JOB, "task_count=1", "--why", "a bench")
        feeder = Feeder(log, keys)
        for start in range(0, keys, CHUNK):
            feeder.load(start, min(CHUNK, keys - start))
        _until(lambda: _tasks(client, 1), "the first task")
        watch = PauseWatch(client, f"sqlite:{place.resolve() / 'rows'}", [JOB])
        watch.start()
        _until(lambda: watch.read >= keys, "all keys", seconds=600)
        feeder.start()
        _until(lambda: watch.read >= keys + 4 * RATE, "a steady stream")
        for _ in range(repeats):
            for before, after in STEPS:
                if not _tasks(client, before):
                    penstock(place, "oncall", "set", JOB, f"task_count={before}", "--why", "a bench")
                    _until(lambda n=before: _tasks(client, n), f"{before} tasks")
                time.sleep(STEADY_S)
                files = _files(place / "rows")
                began = time.monotonic()
                penstock(place, "oncall", "set", JOB, f"task_count={after}", "--why", "a bench")
                _until(lambda n=after: _tasks(client, n), f"{after} tasks")
                time.sleep(STEADY_S)
                name = f"{before} -> {after}"
                found.setdefault(name, []).append(watch.longest(began, time.monotonic()))
                new = {inode: size for inode, size in _files(place / "rows").items() if inode not in files}
                found.setdefault(f"{name} copied", []).append(sum(new.values()))
        watch.stop()
        feeder.stop()
        found["state bytes"] = [sum(_files(place / "rows").values())]
    return found


def _tasks(client: Client, count: int) -> bool:
    line = next((line for line in client.jobs() if line["name"] == JOB), None)
    if line is None or line["state"] != "running":
        return False
    running = [t for t in line["tasks"] if t["state"] == "running" and t["generation"] == line["generation"]]
    return len(running) == count


def _files(folder: Path) -> dict[int, int]:
    """Inodes and sizes; a log that SQLite writes beside its file is no copy of the state."""
    return {
        status.st_ino: status.st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(("-wal", "-shm", "-journal"))
        for status in [path.stat()]
    }


def _until(condition: Any, what: str, *, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"gave up waiting for {what}"
        time.sleep(0.1)


def stock(folder: Path, keys: int) -> dict[str, list[float]]:
    """Spark's own way, once per step."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    os.environ["PYSPARK_PYTHON"] = sys.executable
    rocks = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.streaming.stateStore.providerClass", rocks)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    source, checkpoint = folder / "parquet", folder / "checkpoint"
    source.mkdir()

    def add(number: int, columns: dict[str, pa.Array]) -> None:
        pq.write_table(pa.table(columns), folder / "next.parquet")
        (folder / "next.parquet").rename(source / f"{number:04}.parquet")

    def start() -> Any:
        rows = spark.readStream.schema("name string, value string").parquet(str(source))
        kept = rows.groupBy("name").agg(F.max("value").alias("value"))
        return (
            kept.writeStream.format("noop")
            .outputMode("update")
            .option("checkpointLocation", str(checkpoint))
            .start()
        )

    add(0, chunk(0, keys))
    query = start()
    query.processAllAvailable()
    found: dict[str, list[float]] = {}
    for number, (before, after) in enumerate(STEPS):
        add(10 * number + 1, chunk(0, 1000))
        query.processAllAvailable()
        size = sum(_files(checkpoint).values())
        began = time.monotonic()
        query.stop()
        spark._streamingCheckpointManager.repartition(str(checkpoint), after)
        written = sum(_files(checkpoint).values()) - size
        add(10 * number + 2, chunk(0, 1000))
        query = start()
        query.processAllAvailable()
        found[f"{before} -> {after}"] = [time.monotonic() - began]
        found[f"{before} -> {after} copied"] = [float(written)]
    query.stop()
    spark.stop()
    return found


def main() -> int:
    """Measure, print, and with --check fail when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3, help="of Penstock's steps; medians are shown")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--check", action="store_true", help="exit 1 when a limit is missed")
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        folder = Path(options.folder)
        result = (
            stock(folder, options.keys)
            if options.role == "stock"
            else ours(folder, options.keys, options.repeats)
        )
        print(json.dumps(result), flush=True)
        return 0
    sides: dict[str, dict[str, list[float]]] = {}
    for role in ("penstock", "stock"):
        # Short, so that Spark's sockets have room beneath it, as in a folder that somebody chose.
        with tempfile.TemporaryDirectory(prefix="rescale-") as folder:
            command = [sys.executable, "-m", "bench.rescale", "--role", role, "--folder", folder]
            command += ["--keys", str(options.keys), "--repeats", str(options.repeats)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            sides[role] = json.loads(done.stdout.splitlines()[-1])
    return report(options, sides["penstock"], sides["stock"])


def report(options: argparse.Namespace, mine: dict[str, list[float]], theirs: dict[str, list[float]]) -> int:
    console = Console(stderr=options.json)
    state = mine["state bytes"][0]
    title = f"{options.keys:,} keys of {VALUE_BYTES} bytes, {state / 2**20:,.0f} MB of state"
    table = Table(title=title, title_justify="left")
    for name in (
        "step",
        "Penstock: pause, s",
        "spread",
        "copied, bytes",
        "Spark: pause, s",
        "written, bytes",
    ):
        table.add_column(name, justify="left" if name == "step" else "right")
    missed = []
    for before, after in STEPS:
        name = f"{before} -> {after}"
        pauses, copied = mine[name], max(mine[f"{name} copied"])
        middle = statistics.median(pauses)
        table.add_row(
            name,
            f"{middle:.1f}",
            f"{min(pauses):.1f} – {max(pauses):.1f}",
            f"{copied:,.0f}",
            f"{theirs[name][0]:.1f}",
            f"{theirs[f'{name} copied'][0]:,.0f}",
        )
        if middle > PAUSE_MAX_S:
            missed.append(f"{name}: a pause of {middle:.1f} s, the limit is {PAUSE_MAX_S:g} s")
        if copied > COPIED_MAX:
            missed.append(f"{name}: {copied:,.0f} bytes of state were copied")
    console.print(table)
    for line in missed:
        console.print(line)
    if options.json:
        print(json.dumps({"bench": "rescale", "penstock": mine, "spark": theirs, "missed": missed}))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
