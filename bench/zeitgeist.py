"""How many records per second the demo's pipeline carries, against the same counting in Spark alone.

Both run in one process and one session on this machine, on the same JSON records. Penstock: read from the
bus, parse, filter, shuffle through the bus, count per query and second with state and watermark timers,
publish; exactly once, every commit on disk. Baseline: Spark's own file source, `from_json`, `groupBy(query,
second).count()` with state, into nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.streams.bus.log import LOW_MAX
from penstock.streams.spark.session import build_session
from tests.support.stage import Stage, wait_for

ZEITGEIST = Path(__file__).parent.parent / "examples" / "zeitgeist"
JOBS = ("zeitgeist.by_query", "zeitgeist.count_per_second")
# Spark alone keeps no exactly-once sink, no shuffle on disk and no outbox: this share of its rate is the
# floor.
RATIO_MIN = 0.2


def make_records(count: int) -> list[tuple[str, int, bytes]]:
    """Search queries over 100 seconds and 2,000 distinct queries."""
    rng = random.Random(7)
    found = []
    for n in range(count):
        ts = n * 100_000 // count
        value = {"query": f"Query {rng.randrange(2000)}", "lang": "en", "ts": ts}
        found.append((str(n), ts, json.dumps(value).encode()))
    return found


def run_penstock(spark: Any, records: list[tuple[str, int, bytes]]) -> float:
    """Seconds from the first task's start to the last count in the sink."""
    with tempfile.TemporaryDirectory() as folder:
        category = json.loads((ZEITGEIST / "queries.json").read_text())
        stage = Stage(spark, Path(folder), ZEITGEIST / "pipeline.py", category)
        injector = stage.injector("queries")
        for first in range(0, len(records), 20_000):
            keys, stamps, values = zip(*records[first : first + 20_000], strict=True)
            injector.publish(keys, stamps, values)
            injector.report_low(stamps[-1], now_ms=first)
        injector.close(now_ms=len(records))
        began = time.monotonic()
        ids = [task_id for job in JOBS for task_id in stage.start(job)]
        wait_for(lambda: stage.log.watermark("query_counts") == LOW_MAX, "the end of the stream", seconds=600)
        took = time.monotonic() - began
        stage.stop(ids)
        return took


def run_baseline(spark: Any, records: list[tuple[str, int, bytes]]) -> float:
    """Seconds of one Spark query over the same JSON in files."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in"
        source.mkdir()
        for first in range(0, len(records), 50_000):
            part = records[first : first + 50_000]
            (source / f"{first:09d}.json").write_bytes(b"\n".join(value for _, _, value in part))
        began = time.monotonic()
        rows = (
            spark.readStream.format("text")
            .option("maxFilesPerTrigger", 1)
            .load(str(source))
            .selectExpr("from_json(value, 'query string, lang string, ts bigint') AS r")
            .where("length(trim(r.query)) > 0 AND r.lang <> 'robot'")
            .selectExpr("lower(trim(r.query)) AS query", "timestamp_millis(r.ts) AS at")
            .withWatermark("at", "1 second")
        )
        query = (
            rows.groupBy("query", _window())
            .count()
            .writeStream.format("noop")
            .outputMode("append")
            .option("checkpointLocation", str(Path(folder) / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return time.monotonic() - began


def _window() -> Any:
    from pyspark.sql import functions as F

    return F.window("at", "1 second")


def main() -> int:
    """Measure, print, and with --check fail when the floor is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    records = make_records(options.records)
    with tempfile.TemporaryDirectory() as scratch:
        spark = build_session("bench", 2, Path(scratch))
        run_penstock(spark, records[:5000])
        run_baseline(spark, records[:5000])
        times: dict[str, list[float]] = {"penstock": [], "spark alone": []}
        for _ in range(options.repeats):
            times["penstock"].append(run_penstock(spark, records))
            times["spark alone"].append(run_baseline(spark, records))
        spark.stop()
    rates = {name: options.records / statistics.median(found) for name, found in times.items()}
    ratio = rates["penstock"] / rates["spark alone"]
    table = Table(title=f"{options.records:,} records, {options.repeats} runs, medians", title_justify="left")
    for name in ("engine", "seconds", "spread", "records/s"):
        table.add_column(name, justify="right" if name != "engine" else "left")
    for name, found in times.items():
        spread = f"{min(found):.1f} – {max(found):.1f}"
        table.add_row(name, f"{statistics.median(found):.1f}", spread, f"{rates[name]:,.0f}")
    console = Console(stderr=options.json)
    console.print(table)
    console.print(f"ratio {ratio:.2f} of Spark alone (floor {RATIO_MIN})")
    if options.json:
        print(
            json.dumps(
                {
                    "bench": "zeitgeist",
                    "records": options.records,
                    "seconds": times,
                    "rates": rates,
                    "ratio": ratio,
                }
            )
        )
    return 1 if options.check and ratio < RATIO_MIN else 0


if __name__ == "__main__":
    sys.exit(main())
