"""How fast the bus publishes and reads records of 100 bytes, against the same records as SQLite rows.

Publish: batches of 10,000 (and of 10), on disk when the call returns; the log also checks sequences and
epochs and writes checksums. Baseline: one SQLite transaction per batch, WAL, synchronous=FULL, a row per
record.
Read: ranges of 50,000, through the log into Arrow, and through Penstock's source into Spark on 2 cores;
baseline: SELECT in the same ranges into Python. Spark reads a log of three times the size. With --kafka the
same on a Kafka broker of this machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.streams.bus.log import CategorySpec, Log
from penstock.streams.places import open_log
from tests.support.stage import reading_task

SPEC = CategorySpec(
    name="bench",
    partitions=2,
    columns=(("text", "string"), ("n", "bigint")),
    watermark="event_time",
    lateness_ms=0,
)
TEXT_BYTES = 84  # with `n` and the event time 100
SPARK_TIMES = 3  # as large is the log that Spark reads: the start of its job is no rate of reading
READ_ROWS = 50_000  # as many as a task reads in one micro-batch
FLOORS = {"publish": 500_000, "read_spark": 1_000_000}  # records per second, on 2 cores
RATIO_FLOORS = {"publish": 1.5, "publish_small": 0.2, "read": 2.0}  # against SQLite in the same run

Batches = list[pa.RecordBatch]


def main() -> int:
    arguments = _arguments()
    large = _batches(10_000, arguments.batches)
    small = _batches(10, max(20, arguments.batches // 2))
    rates: dict[str, list[float]] = {}
    for repeat in range(arguments.repeat + 1):
        found = {**_run_log("embedded", large, small), **_run_sqlite(large, small)}
        if repeat:  # the first one warms up
            for case, rate in found.items():
                rates.setdefault(case, []).append(rate)
    rates["read_spark"] = _read_spark(large, arguments.repeat)
    if arguments.kafka:
        from tests.kafka import kafka_server

        with kafka_server() as server:
            for case, rate in _run_log(server.new_place(), large, small).items():
                rates[f"kafka_{case}"] = [rate]
    results = {case: _summary(found, rates.get(f"sqlite_{case}")) for case, found in rates.items()}
    _print(results)
    low = _complaints(results)
    for complaint in low:
        print(complaint)
    if arguments.json:
        print(json.dumps({"bench": "bus", "results": results, "floors": FLOORS, "ok": not low}))
    return 1 if arguments.check and low else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=100, help="publishes of 10,000 records per run")
    parser.add_argument("--repeat", type=int, default=5, help="runs to take the median of")
    parser.add_argument("--kafka", action="store_true", help="also on a Kafka broker that is started for it")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--check", action="store_true", help="exit 1 when a rate is below its floor")
    return parser.parse_args()


def _batches(rows: int, count: int) -> Batches:
    """What one producer sends; both partitions get every other batch."""
    rng = np.random.default_rng(1)
    letters = rng.integers(97, 123, (rows, TEXT_BYTES), dtype=np.uint8)
    texts = pa.array([bytes(line).decode() for line in letters])
    made = []
    for number in range(count):
        first = number * rows + 1
        numbers = np.arange(first, first + rows)
        columns = [
            pa.array(numbers),
            pa.array(numbers + 1_700_000_000_000),
            pa.nulls(rows, pa.string()),
            pa.array(np.zeros(rows, dtype=bool)),
            texts,
            pa.array(rng.integers(0, 100, rows)),
        ]
        made.append(pa.RecordBatch.from_arrays(columns, schema=SPEC.schema()))
    return made


# The log


def _run_log(place: str, large: Batches, small: Batches) -> dict[str, float]:
    with _folder() as folder:
        log = open_log(f"embedded:{folder}" if place == "embedded" else place)
        log.create(SPEC)
        rates = {
            "publish": _rate(large, lambda: _publish(log, large, "large")),
            "read": _rate(large, lambda: _read(log)),
            "publish_small": _rate(small, lambda: _publish(log, small, "small")),
        }
        log.close()  # type: ignore[attr-defined]
    return rates


def _publish(log: Log, batches: Batches, producer: str) -> None:
    for number, batch in enumerate(batches):
        log.publish(SPEC.name, producer=producer, epoch=1, batches={number % 2: batch}, gapless=False)


def _read(log: Log) -> None:
    for partition, end in enumerate(log.end_offsets(SPEC.name)):
        for start in range(0, end, READ_ROWS):
            for batch in log.read(SPEC.name, partition, start, min(start + READ_ROWS, end)):
                pc.sum(batch.column("n"))


# Rows in SQLite


def _run_sqlite(large: Batches, small: Batches) -> dict[str, float]:
    with _folder() as folder:
        connection = sqlite3.connect(folder / "rows.db", isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(
            "CREATE TABLE records (partition INTEGER, offset INTEGER, seq INTEGER, ts INTEGER, key TEXT,"
            " late INTEGER, text TEXT, n INTEGER, PRIMARY KEY (partition, offset)) WITHOUT ROWID"
        )
        rows = sum(batch.num_rows for batch in large)
        rates = {
            "sqlite_publish": _rate(large, lambda: _insert(connection, large, 0)),
            "sqlite_read": _rate(large, lambda: _select(connection)),
            "sqlite_publish_small": _rate(small, lambda: _insert(connection, small, rows)),
        }
        connection.close()
    return rates


def _insert(connection: sqlite3.Connection, batches: Batches, offset: int) -> None:
    for number, batch in enumerate(batches):
        columns = [column.to_pylist() for column in batch.columns]
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(
            f"INSERT INTO records VALUES ({number % 2}, ?, ?, ?, ?, ?, ?, ?)",
            zip(range(offset, offset + batch.num_rows), *columns, strict=True),
        )
        connection.execute("COMMIT")
        offset += batch.num_rows


def _select(connection: sqlite3.Connection) -> None:
    for partition in (0, 1):
        (end,) = connection.execute(
            "SELECT max(offset) + 1 FROM records WHERE partition = ?", (partition,)
        ).fetchone()
        for start in range(0, end, 2 * READ_ROWS):  # every other offset is the other partition's
            rows = connection.execute(
                "SELECT * FROM records WHERE partition = ? AND offset >= ? AND offset < ?",
                (partition, start, start + 2 * READ_ROWS),
            ).fetchall()
            sum(row[-1] for row in rows)


# Spark


def _read_spark(batches: Batches, repeat: int) -> list[float]:
    """The whole log through Penstock's source, one Spark partition per bus partition, into nothing."""
    from penstock.streams.spark.session import build_session

    with _folder() as folder:
        session = build_session("bench-bus", 2, folder / "spark")
        try:
            log = open_log(f"embedded:{folder / 'bus'}")
            log.create(SPEC)
            for number in range(SPARK_TIMES):
                _publish(log, batches, f"large{number}")
            descriptor = reading_task(folder, f"embedded:{folder / 'bus'}", SPEC.name, replays=True).to_json()
            everything = batches * SPARK_TIMES
            rates = [_rate(everything, lambda: _load(session, descriptor)) for _ in range(repeat + 2)]
        finally:
            session.stop()
    return rates[2:]  # workers start and imports are read in the first ones


def _load(session: Any, descriptor: str) -> None:
    frame = session.read.format("penstock").option("task", descriptor).load()
    frame.write.format("noop").mode("overwrite").save()


# Results


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _rate(batches: Batches, work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return sum(batch.num_rows for batch in batches) / (time.perf_counter() - begin)


def _summary(found: list[float], baseline: list[float] | None) -> dict[str, float]:
    row = {
        "records_per_s": round(statistics.median(found)),
        "min": round(min(found)),
        "max": round(max(found)),
    }
    if baseline is None:
        return row
    # Each run against the baseline's run right after it: both meet the same noise.
    ratio = statistics.median(a / b for a, b in zip(found, baseline, strict=True))
    return {**row, "baseline_records_per_s": round(statistics.median(baseline)), "ratio": round(ratio, 2)}


def _complaints(results: dict[str, dict[str, float]]) -> list[str]:
    slow = [
        f"{case}: {results[case]['records_per_s']:,} records/s, fewer than {floor:,}"
        for case, floor in FLOORS.items()
        if results[case]["records_per_s"] < floor
    ]
    return slow + [
        f"{case}: {results[case]['ratio']} times SQLite, less than {floor}"
        for case, floor in RATIO_FLOORS.items()
        if results[case]["ratio"] < floor
    ]


def _print(results: dict[str, dict[str, float]]) -> None:
    print(f"{'case':<22}{'records/s':>12}{'(min - max)':>26}{'SQLite rows':>13}{'ratio':>8}")
    for case, row in results.items():
        spread = f"({row['min']:,} - {row['max']:,})"
        baseline = f"{row['baseline_records_per_s']:,}" if "ratio" in row else ""
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        print(f"{case:<22}{row['records_per_s']:>12,}{spread:>26}{baseline:>13}{ratio:>8}")


if __name__ == "__main__":
    sys.exit(main())
