"""Stream and batch make the same rows of the same records: over categories, files, and the whole command."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from penstock.streams.bus.copy import export_lines, export_parquet
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.inspect.record_lines import Lines
from tests.support.stage import Stage, wait_for

ZEITGEIST = Path(__file__).parents[2] / "examples" / "zeitgeist"
SHOPS = """
from penstock import Pipeline

p = Pipeline("shops", partitions=2)
(
    p.source("sales")
    .filter("amount > 1")
    .select("shop", "amount * 2 AS twice", "cast(ts / 1000 as bigint) AS second")
    .key_by("shop")
    .sink("twice_sales")
)
"""
SALES = {
    "name": "sales",
    "partitions": 3,
    "columns": [["shop", "string"], ["amount", "double"], ["ts", "bigint"]],
    "format": "json",
    "watermark": "event_time",
    "lateness_ms": 0,
    "ts_column": "ts",
    "ahead_max_ms": 0,  # any time is fine
}
SHOPS_SQL = """
CREATE PIPELINE shops_sql WITH (partitions = 2);
INSERT INTO sql_twice_sales
SELECT shop, amount * 2 AS twice, cast(ts / 1000 as bigint) AS second FROM sales WHERE amount > 1
DISTRIBUTE BY shop;
"""
COLUMNS = ["_ts", "_key", "shop", "twice", "second"]
YEAR_2100_MS = 4_102_444_800_000


def sales(count: int) -> list[tuple[str, int, bytes]]:
    found = []
    for n in range(count):
        ts = YEAR_2100_MS if n == 77 else n * 3
        row = {"shop": None if n % 31 == 0 else f"shop {n % 13}", "amount": n / 7, "ts": ts}
        found.append((str(n % 17), ts, json.dumps(row).encode()))
    bad = [b"{nonsense", b"null", b'{"shop": 5, "ts": 1}', b'{"shop": "no time"}', b"\xff"]
    return found + [("bad", 12, value) for value in bad]


@pytest.fixture
def shops(spark: Any, tmp_path: Path) -> Stage:
    pipeline = tmp_path / "shops.py"
    pipeline.write_text(SHOPS)
    return Stage(spark, tmp_path, pipeline, SALES)


def published(stage: Stage, records: list[tuple[str, int, bytes]]) -> None:
    keys, stamps, values = zip(*records, strict=True)
    stage.injector("sales").publish(keys, stamps, values)


def streamed(stage: Stage, job: str, category: str, count: int) -> Counter[tuple[Any, ...]]:
    ids = stage.start(job, tasks=2)
    wait_for(lambda: sum(stage.log.end_offsets(category)) >= count, f"{count} records in {category}")
    stage.stop(ids)
    names = ["_ts", "_key", *(name for name, _ in stage.log.describe(category).spec.columns)]
    return Counter(tuple(row[name] for name in names) for row in stage.records(category))


def frames(stage: Stage, inputs: Any, **options: Any) -> dict[str, Any]:
    from penstock.streams.spark.backfill import Code, Span, run_jobs

    config = next(iter(stage.configs.values()))
    package = config["package"]
    code = Code(folder=stage.folder_of(package["hash"]), entry=package["entry"], hash=package["hash"])
    return run_jobs(list(stage.configs.values()), inputs, span=options.get("span", Span()), code=code)


def batched(stage: Stage, category: str, inputs: Any, **options: Any) -> Counter[tuple[Any, ...]]:
    return Counter(
        tuple(value for name, value in row.asDict().items() if name != "_late")
        for row in frames(stage, inputs, **options)[category].collect()
    )


@pytest.mark.smoke
def test_stream_and_batch_make_the_same_rows(spark: Any, shops: Stage, tmp_path: Path):
    from penstock.streams.spark.backfill import Span, read_category, read_files

    published(shops, sales(2000))
    stream = streamed(shops, next(iter(shops.configs)), "twice_sales", 1992)
    category = shops.log.describe("sales")
    rows = read_category(spark, shops.bus, category)
    assert batched(shops, "twice_sales", {"sales": rows}) == stream
    dead = batched(shops, "sales.dead", {"sales": rows})
    names = ("_ts", "_key", "reason", "value", "source_partition", "source_offset")
    assert dead == Counter(tuple(row[name] for name in names) for row in shops.records("sales.dead"))
    assert dead.total() == 5

    export_lines(shops.log, "sales", tmp_path / "sales.ndjson", resume=False)
    export_parquet(shops.log, "sales", tmp_path / "sales.parquet")
    plain = tmp_path / "values.ndjson"
    plain.write_bytes(b"\n".join(value for _, _, value in sales(2000)))
    for path, form in (
        ("sales.ndjson", Lines.RECORD),
        ("sales.parquet", Lines.VALUE),
        ("values.ndjson", Lines.VALUE),
    ):
        rows = read_files(spark, [str(tmp_path / path)], category, form)
        assert batched(shops, "twice_sales", {"sales": rows}) == stream, path

    some = batched(shops, "twice_sales", {"sales": rows}, span=Span(start=300, end=3000))
    assert some == Counter({row: count for row, count in stream.items() if 300 <= row[0] < 3000})
    assert 0 < some.total() < stream.total()


def test_stream_and_batch_put_the_same_records_from_the_future_aside(spark: Any, tmp_path: Path):
    from penstock.streams.spark.backfill import read_category

    pipeline = tmp_path / "shops.py"
    pipeline.write_text(SHOPS)
    stage = Stage(spark, tmp_path, pipeline, {**SALES, "ahead_max_ms": 3_600_000})
    published(stage, sales(100)[8:100])  # one of them is of 2100; those before are too small for the filter
    stream = streamed(stage, next(iter(stage.configs)), "twice_sales", 91)
    rows = read_category(spark, stage.bus, stage.log.describe("sales"))
    assert batched(stage, "twice_sales", {"sales": rows}) == stream and stream.total() == 91
    for dead in (batched(stage, "sales.dead", {"sales": rows}), stage.records("sales.dead")):
        (record,) = dead
        assert YEAR_2100_MS in (record if isinstance(record, tuple) else record.values())


@pytest.mark.parametrize("format_", ["json", "avro"])
def test_a_table_of_spark_is_an_input_as_files_are(spark: Any, tmp_path: Path, format_: str):
    """Plan: the same sales as lines, as Parquet and as a table of ORC files, for JSON and Avro categories."""
    from penstock.core.errors import ConfigError
    from penstock.streams.bus.log import Category
    from penstock.streams.catalogue import category_from_json
    from penstock.streams.spark.backfill import read_files

    category = Category(spec=category_from_json({**SALES, "format": format_}), birth="b1")
    rows = [(f"shop {n % 3}", n / 2, n * 10) for n in range(200)]
    table = spark.createDataFrame(rows, "shop string, amount double, ts bigint")
    table.write.orc(str(tmp_path / "orc"))
    table.write.parquet(str(tmp_path / "some.parquet"))
    lines = tmp_path / "lines.ndjson"
    lines.write_text(
        "".join(json.dumps(dict(zip(("shop", "amount", "ts"), row, strict=True))) + "\n" for row in rows)
    )

    def read(*paths: str) -> list[tuple[Any, ...]]:
        found = read_files(spark, list(paths), category, Lines.VALUE)
        return sorted((row["shop"], row["amount"], row["ts"], row["_ts"]) for row in found.collect())

    orc = f"table:orc.`{tmp_path / 'orc'}`"
    expected = sorted((*row, row[2]) for row in rows)
    assert read(str(lines)) == expected
    assert read(str(tmp_path / "some.parquet")) == expected
    assert read(orc) == expected
    assert read(orc, orc) == sorted(expected * 2)
    with pytest.raises(ConfigError, match="of two kinds"):
        read(orc, str(lines))


def test_a_computation_gives_the_same_in_a_batch(spark: Any, tmp_path: Path):
    from penstock.streams.spark.backfill import read_category
    from tests.spark.test_tasks import CATEGORY, COUNT, PARSE, publish, queries

    stage = Stage(spark, tmp_path, ZEITGEIST / "pipeline.py", CATEGORY)
    injector = stage.injector("queries")
    publish(stage, queries(0, 3000), injector, now_ms=1000)
    injector.close(now_ms=2000)
    ids = stage.start(PARSE, tasks=2) + stage.start(COUNT, tasks=2)
    rows = read_category(spark, stage.bus, stage.log.describe("queries"))
    batch = batched(stage, "query_counts", {"queries": rows})
    wait_for(lambda: sum(stage.log.end_offsets("query_counts")) >= batch.total(), "the counts")
    names = ("_ts", "_key", "query", "second", "count")
    assert batch == Counter(tuple(row[name] for name in names) for row in stage.records("query_counts"))
    assert batch.total() > 100
    stage.stop(ids)


def test_zeitgeist_finds_the_same_in_a_stream_and_in_a_batch(spark: Any, tmp_path: Path):
    """Counter, model calculator and detector on Spark, records out of order: both are what the reference finds."""
    from penstock.streams.spark.backfill import read_category
    from tests.examples.test_anomalies import reference, rounded, searches
    from tests.spark.test_tasks import CATEGORY, publish

    stage = Stage(spark, tmp_path, ZEITGEIST / "anomalies.py", CATEGORY)
    asked = searches(random.Random(4), seconds=24)
    expected = rounded(reference().anomalies_of(asked))
    injector = stage.injector("queries")
    records = [
        (str(n), ts, json.dumps({"query": query, "lang": lang, "ts": ts}).encode())
        for n, (ts, query, lang) in enumerate(asked)
    ]
    for first in range(0, len(records), 200):
        batch, rest = records[first : first + 200], records[first + 200 :]
        low = min((ts for _, ts, _ in rest), default=24_000)
        publish(stage, batch, injector, low=low, now_ms=1000 + first)
    injector.close(now_ms=10**6)
    ids = [task for job in stage.configs for task in stage.start(job)]
    wait_for(lambda: stage.log.watermark("anomalies") == LOW_MAX, "the end of the stream", seconds=300)
    stage.stop(ids)
    rows = read_category(spark, stage.bus, stage.log.describe("queries"))
    found = batched(stage, "anomalies", {"queries": rows})
    names = ("_ts", "_key", "query", "second", "kind", "count", "expected")
    assert found == Counter(tuple(row[name] for name in names) for row in stage.records("anomalies"))
    assert rounded(row[2:] for row in found) == expected and found.total() == len(expected) > 2


def many_sales(count: int) -> Iterator[tuple[list[str], list[int], list[bytes]]]:
    for first in range(0, count, 50_000):
        numbers = range(first, min(count, first + 50_000))
        values = [
            b'{"shop": "shop %d", "amount": %.2f, "ts": %d}' % (n * 31 % 5000, n % 1009 / 3, n)
            for n in numbers
        ]
        yield [str(n % 97) for n in numbers], list(numbers), values


def twice_sales(count: int) -> pa.Table:
    """What must come out, computed by hand."""
    rows = ((n, f"shop {n * 31 % 5000}", float(f"{n % 1009 / 3:.2f}")) for n in range(count))
    kept = [(ts, shop, shop, 2 * amount, ts // 1000) for ts, shop, amount in rows if amount > 1]
    return pa.table([pa.array(column) for column in zip(*kept, strict=True)], names=COLUMNS)


def stream_of(stage: Stage, category: str) -> pa.Table:
    ends = stage.log.end_offsets(category)
    batches = [batch for p, end in enumerate(ends) for batch in stage.log.read(category, p, 0, end)]
    return pa.Table.from_batches(batches).select(COLUMNS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("bus", ["embedded", "kafka"])
def test_many_records_give_identical_tables(
    request: pytest.FixtureRequest, spark: Any, tmp_path: Path, bus: str
):
    """Python and SQL, stream and batch, on this bus: the same table. `make same` runs it with a million."""
    from penstock.streams.spark.backfill import read_category

    count = int(os.environ.get("SAME_RECORDS", "5000"))
    pipelines = {"twice_sales": tmp_path / "shops.py", "sql_twice_sales": tmp_path / "shops_sql.sql"}
    for path, text in zip(pipelines.values(), (SHOPS, SHOPS_SQL), strict=True):
        path.write_text(text)
    place = request.getfixturevalue("kafka").new_place() if bus == "kafka" else ""
    stage = Stage(spark, tmp_path, pipelines["twice_sales"], SALES, bus=place)
    stage.compile(pipelines["sql_twice_sales"])
    times, began = {}, time.monotonic()

    def took(what: str) -> None:
        nonlocal began
        times[what], began = time.monotonic() - began, time.monotonic()

    injector = stage.injector("sales")
    for part in many_sales(count):
        injector.publish(*part)
    took("published")
    expected = in_order(twice_sales(count))
    for job, sink in zip(list(stage.configs), pipelines, strict=True):
        began = time.monotonic()
        stage.configs[job] |= {"batch_rows_max": 250_000, "trigger_ms": 0}
        ids = stage.start(job, tasks=2)
        wait_for(lambda: has_read_all(stage), f"{job} to read all", seconds=600)
        took(f"{sink} as a stream")
        stage.stop(ids)
        assert in_order(stream_of(stage, sink)).equals(expected), sink
    began = time.monotonic()
    rows = read_category(spark, stage.bus, stage.log.describe("sales"))
    for sink, made in frames(stage, {"sales": rows}).items():
        if sink in pipelines:
            made.select(*COLUMNS).write.parquet(str(tmp_path / f"made-{sink}"))
            took(f"{sink} as a batch")
            assert in_order(ds.dataset(tmp_path / f"made-{sink}").to_table()).equals(expected), sink
    print(f"{bus}, {count:,} records:", ", ".join(f"{what} {took_s:.1f} s" for what, took_s in times.items()))


def in_order(table: pa.Table) -> pa.Table:
    schema = pa.schema(
        zip(COLUMNS, (pa.int64(), pa.string(), pa.string(), pa.float64(), pa.int64()), strict=True)
    )
    return table.cast(schema).sort_by([(name, "ascending") for name in COLUMNS]).combine_chunks()


def has_read_all(stage: Stage) -> bool:
    views = stage.tasks.poll()
    assert all(view.state in ("starting", "running") for view in views), [view.error for view in views]
    return all(view.metrics.get("lag_records", 1) == 0 for view in views)
