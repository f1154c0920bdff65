"""Into Spark from Kafka: Penstock's source against Spark's own connector, on the same topic in the same run.

A JSON category of two partitions, its records committed in transactions of 10,000, read once over the same
offsets, `read_committed`, two cores, into nothing. Three ways:
ours: what a task reads, decoded to columns, with offsets, event times, keys and lateness;
connector: `format("kafka")` with `assign` and explicit offsets, decoded with `from_json`; no event time of
ours, no lateness, nothing set aside;
connector, then ours: the connector's bytes through the same decoder as ours, in a Python worker.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.streams.bus.log import CategorySpec
from penstock.streams.dsl.injector import Injector
from penstock.streams.places import open_log
from tests.support.stage import reading_task

SPEC = CategorySpec(
    name="bench",
    partitions=2,
    columns=(("query", "string"), ("lang", "string"), ("n", "bigint"), ("ts", "bigint")),
    format="json",
    watermark="event_time",
    ts_column="ts",
)
DDL = ", ".join(f"{name} {kind}" for name, kind in SPEC.columns)
CHUNK = 10_000


def main() -> int:
    arguments = _arguments()
    from tests.kafka import NoBroker, fetch_connector, kafka_server

    try:
        jars = sorted(str(jar) for jar in (arguments.jars or fetch_connector()).glob("*.jar"))
    except NoBroker as reason:
        print(f"no connector: {reason}")
        return 0
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--jars {','.join(jars)} pyspark-shell"
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        with kafka_server() as server:
            rates = _measure(folder, server.new_place(), server.address, arguments)
    finally:
        shutil.rmtree(folder)
    results = {way: _summary(found, rates["ours"]) for way, found in rates.items()}
    _print(results)
    # The decision stands for as long as the connector is not clearly faster at the same work.
    ok = results["connector"]["ratio"] < 1.5
    if arguments.json:
        print(json.dumps({"bench": "kafka_source", "results": results, "ok": ok}))
    return 1 if arguments.check and not ok else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000, help="records in the topic")
    parser.add_argument("--repeat", type=int, default=5, help="runs to take the median of")
    parser.add_argument(
        "--jars", type=Path, help="a folder with the connector's jars, if they cannot be fetched"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--check", action="store_true", help="exit 1 when the connector is 1.5 times as fast")
    return parser.parse_args()


def _measure(folder: Path, place: str, address: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    from penstock.streams.spark.session import build_session

    log = open_log(place)
    log.create(SPEC)
    injector = Injector(log, SPEC.name, "bench", epoch=1)
    for first in range(0, arguments.records, CHUNK):
        numbers = range(first, min(arguments.records, first + CHUNK))
        values = [
            b'{"query": "query %d", "lang": "en", "n": %d, "ts": %d}' % (n % 5000, n, n) for n in numbers
        ]
        injector.publish([str(n % 97) for n in numbers], list(numbers), values)
    session = build_session("bench-kafka-source", 2, folder / "spark")
    try:
        topic = place.rpartition("/")[2] + SPEC.name
        descriptor = reading_task(folder, place, SPEC.name, replays=True).to_json()
        ways: dict[str, Callable[[], Any]] = {
            "ours": lambda: session.read.format("penstock").option("task", descriptor).load(),
            "connector": lambda: _connector(session, address, topic, log.end_offsets(SPEC.name)),
            "connector, then ours": lambda: _through_ours(
                session, address, topic, log.end_offsets(SPEC.name)
            ),
        }
        for way, frame in ways.items():
            rows = frame().where("n is not null").count()
            assert rows == arguments.records, f"{way}: {rows} rows"
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.repeat):
            for way, frame in ways.items():
                begin = time.perf_counter()
                frame().write.format("noop").mode("overwrite").save()
                rates[way].append(arguments.records / (time.perf_counter() - begin))
    finally:
        session.stop()
    return rates


def _connector(session: Any, address: str, topic: str, ends: tuple[int, ...]) -> Any:
    from pyspark.sql import functions as F

    value = F.from_json(F.col("value").cast("string"), DDL).alias("v")
    return (
        _raw(session, address, topic, ends)
        .select("partition", "offset", "key", value)
        .select("partition", "offset", F.col("key").cast("string"), "v.*")
    )


def _through_ours(session: Any, address: str, topic: str, ends: tuple[int, ...]) -> Any:
    def decode(batches: Iterator[Any]) -> Iterator[Any]:
        from penstock.streams.bus.decode import decode_json

        for batch in batches:
            yield from decode_json(batch.column("value"), SPEC.columns).table.to_batches()

    return _raw(session, address, topic, ends).select("value").mapInArrow(decode, DDL)


def _raw(session: Any, address: str, topic: str, ends: tuple[int, ...]) -> Any:
    return (
        session.read.format("kafka")
        .option("kafka.bootstrap.servers", address)
        .option("kafka.isolation.level", "read_committed")
        .option("assign", json.dumps({topic: list(range(len(ends)))}))
        .option("startingOffsets", json.dumps({topic: {str(p): 0 for p in range(len(ends))}}))
        .option("endingOffsets", json.dumps({topic: {str(p): end for p, end in enumerate(ends)}}))
        .load()
    )


def _summary(found: list[float], ours: list[float]) -> dict[str, float]:
    ratio = statistics.median(one / other for one, other in zip(found, ours, strict=True))
    return {
        "rows_per_s": round(statistics.median(found)),
        "min": round(min(found)),
        "max": round(max(found)),
        "ratio": round(ratio, 2),
    }


def _print(results: dict[str, dict[str, float]]) -> None:
    print(f"{'way':<24}{'rows/s':>12}{'(min - max)':>26}{'of ours':>10}")
    for way, row in results.items():
        spread = f"({row['min']:,} - {row['max']:,})"
        print(f"{way:<24}{row['rows_per_s']:>12,}{spread:>26}{row['ratio']:>10.2f}")


if __name__ == "__main__":
    sys.exit(main())
