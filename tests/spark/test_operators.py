"""Windows and joins run as Spark tasks, in Python and in SQL, and a batch makes the same rows as the stream."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from penstock.streams.bus.log import LOW_MAX
from penstock.streams.catalogue import category_from_json
from tests.support.stage import Stage, wait_for

WINDOWS = """
from penstock import Pipeline, tumbling

p = Pipeline("shops", partitions=2)
windows = p.source("sales").key_by("shop", "till").window(tumbling("1s"))
windows.aggregate("count(*) AS n", "sum(amount * 2) AS twice", "max(amount) AS most").sink("per_second")
"""
WINDOWS_SQL = """
CREATE PIPELINE shops_sql WITH (partitions = 2);
INSERT INTO per_slide
SELECT shop, window.start AS start, count(*) AS n, avg(amount) AS mean, approx_count_distinct(till) AS tills
FROM sales GROUP BY shop, window(event_time, '2 seconds', '1 second');
"""
JOIN = """
from penstock import Pipeline

p = Pipeline("orders", partitions=2)
sales = p.source("sales").select("shop", "amount", "ts AS sold").key_by("shop")
visits = p.source("visits").select("shop", "ts AS seen").key_by("shop", name="visits_by_shop")
sales.join(visits, within=("20ms", "10ms"), how="left").sink("pairs")
"""
JOIN_SQL = """
CREATE PIPELINE orders_sql WITH (partitions = 2);
INSERT INTO sql_pairs
SELECT s.shop AS shop, amount, seen
FROM (SELECT shop, amount FROM sales) s
JOIN (SELECT shop, ts AS seen FROM visits) v
ON s.shop = v.shop AND v.event_time BETWEEN s.event_time - INTERVAL 20 MILLISECONDS
AND s.event_time + INTERVAL 10 MILLISECONDS;
"""


def a_category(name: str, columns: list[list[str]]) -> dict[str, Any]:
    return {
        "name": name,
        "partitions": 2,
        "columns": columns,
        "format": "json",
        "watermark": "injector",
        "ts_column": "ts",
    }


SALES = a_category("sales", [["shop", "string"], ["till", "int"], ["amount", "double"], ["ts", "bigint"]])
VISITS = a_category("visits", [["shop", "string"], ["ts", "bigint"]])


def sales(count: int) -> list[dict[str, Any]]:
    return [
        {"shop": f"shop {n % 7}", "till": n % 3, "amount": n / 7, "ts": n * 13 % 5000} for n in range(count)
    ]


def visits(count: int) -> list[dict[str, Any]]:
    return [{"shop": f"shop {n % 9}", "ts": n * 29 % 5000} for n in range(count)]


def inject(stage: Stage, category: str, rows: list[dict[str, Any]]) -> None:
    injector = stage.injector(category)
    injector.publish(
        [row["shop"] for row in rows], [row["ts"] for row in rows], [json.dumps(r).encode() for r in rows]
    )
    injector.report_low(2000, now_ms=10**6)
    injector.close(now_ms=2 * 10**6)


def run_all(stage: Stage, sink: str, *others: str) -> list[dict[str, Any]]:
    ids = [task for job in stage.configs for task in stage.start(job, tasks=2)]

    def is_done() -> bool:
        for category in stage.log.categories():
            stage.log.advance(category.spec.name, now_ms=10**12)
        views = stage.tasks.poll()
        assert all(view.state in ("starting", "running") for view in views), views
        return all(stage.log.watermark(name) >= LOW_MAX for name in (sink, *others))

    wait_for(is_done, f"the end of {sink}")
    stage.stop(ids)
    return stage.records(sink)


def batched(spark: Any, stage: Stage, sink: str, categories: list[str]) -> Counter[tuple[Any, ...]]:
    from penstock.streams.spark.backfill import Code, Span, read_category, run_jobs

    package = next(iter(stage.configs.values()))["package"]
    code = Code(folder=stage.folder_of(package["hash"]), entry=package["entry"], hash=package["hash"])
    inputs = {name: read_category(spark, stage.bus, stage.log.describe(name)) for name in categories}
    found = run_jobs(list(stage.configs.values()), inputs, span=Span(), code=code)[sink]
    return Counter(tuple(row) for row in found.collect())


def as_rows(stage: Stage, sink: str, records: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    names = ["_ts", "_key", "_late", *(name for name, _ in stage.log.describe(sink).spec.columns)]
    return Counter(tuple(record[name] for name in names) for record in records)


def a_stage(spark: Any, folder: Path, name: str, text: str, bus: str = "") -> Stage:
    from penstock.streams.places import open_log

    open_log(bus or f"embedded:{folder / 'bus'}").create(category_from_json(VISITS))
    path = folder / name
    path.write_text(text)
    return Stage(spark, folder, path, SALES, bus=bus)


@pytest.mark.smoke
def test_windows_run_on_spark_and_a_batch_makes_the_same_rows(spark: Any, tmp_path: Path):
    stage = a_stage(spark, tmp_path, "shops.py", WINDOWS)
    inject(stage, "sales", sales(3000))
    records = run_all(stage, "per_second")
    expected = defaultdict(list)
    for row in sales(3000):
        expected[row["shop"], row["till"], row["ts"] // 1000 * 1000].append(row["amount"])
    assert len(records) == len(expected)
    for found in records:
        amounts = expected[found["shop"], found["till"], found["window_start"]]
        assert (found["n"], found["most"]) == (len(amounts), max(amounts))
        assert found["twice"] == pytest.approx(sum(amounts) * 2)
    assert batched(spark, stage, "per_second", ["sales"]) == as_rows(stage, "per_second", records)


def test_windows_of_sql_run_on_spark(spark: Any, tmp_path: Path):
    stage = a_stage(spark, tmp_path, "shops.sql", WINDOWS_SQL)
    inject(stage, "sales", sales(2000))
    records = run_all(stage, "per_slide")
    expected = Counter(
        (row["shop"], start)
        for row in sales(2000)
        for start in (row["ts"] // 1000 * 1000, row["ts"] // 1000 * 1000 - 1000)
    )
    assert {(row["shop"], row["start"]): row["n"] for row in records} == expected
    assert {row["tills"] for row in records} == {3}


def pairs_of(count: int) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    by_shop = defaultdict(list)
    for visit in visits(count):
        by_shop[visit["shop"]].append(visit["ts"])
    for sale in sales(count):
        near = [ts for ts in by_shop[sale["shop"]] if sale["ts"] - 20 <= ts <= sale["ts"] + 10]
        found.update((sale["shop"], sale["amount"], ts) for ts in near or [None])
    return found


@pytest.mark.smoke
def test_a_join_runs_on_spark_and_a_batch_makes_the_same_rows(spark: Any, tmp_path: Path):
    stage = a_stage(spark, tmp_path, "orders.py", JOIN)
    inject(stage, "sales", sales(1500))
    inject(stage, "visits", visits(1500))
    records = run_all(stage, "pairs")
    assert Counter((row["shop"], row["amount"], row["seen"]) for row in records) == pairs_of(1500)
    assert batched(spark, stage, "pairs", ["sales", "visits"]) == as_rows(stage, "pairs", records)


def test_a_join_of_sql_runs_on_spark(spark: Any, tmp_path: Path):
    stage = a_stage(spark, tmp_path, "orders.sql", JOIN_SQL)
    inject(stage, "sales", sales(1500))
    inject(stage, "visits", visits(1500))
    records = run_all(stage, "sql_pairs")
    expected = Counter({pair: n for pair, n in pairs_of(1500).items() if pair[2] is not None})
    assert Counter((row["shop"], row["amount"], row["seen"]) for row in records) == expected


NULLS_SQL = """
CREATE PIPELINE nulls WITH (partitions = 2);
INSERT INTO per_shop
SELECT shop, count(*) AS n FROM sales GROUP BY shop, window(event_time, '1 hour');
INSERT INTO per_till
SELECT shop, till, count(*) AS n FROM sales GROUP BY shop, till, window(event_time, '1 hour');
INSERT INTO best
SELECT shop, till, count(*) AS n FROM sales GROUP BY shop, till, window(event_time, '1 hour')
QUALIFY row_number() OVER (PARTITION BY window, shop ORDER BY n DESC) <= 1;
INSERT INTO met
SELECT s.shop AS shop, amount, seen
FROM (SELECT shop, amount FROM sales) s LEFT JOIN (SELECT shop, ts AS seen FROM visits) v
ON s.shop = v.shop AND v.event_time BETWEEN s.event_time - INTERVAL 1 HOUR AND s.event_time + INTERVAL 1 HOUR;
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("bus", ["embedded", "kafka"])
def test_null_keys_on_spark_are_apart_from_the_empty_text_and_join_nothing(
    spark: Any, tmp_path: Path, bus: str, request: pytest.FixtureRequest
):
    """Streams on both buses, and the batch over the same records, beside plain Python."""
    place = "" if bus == "embedded" else request.getfixturevalue("kafka").new_place()
    stage = a_stage(spark, tmp_path, "nulls.sql", NULLS_SQL, bus=place)
    names = [None, "", "a", None, "[null]"]
    sold = [
        {"shop": names[n % 5], "till": n % 3 or None, "amount": float(n), "ts": 1000 + n} for n in range(60)
    ]
    came = [{"shop": names[n], "ts": 1500 + n} for n in range(5)]
    for category, rows in (("sales", sold), ("visits", came)):
        injector = stage.injector(category)
        injector.publish(
            [str(n) for n in range(len(rows))],
            [row["ts"] for row in rows],
            [json.dumps(row).encode() for row in rows],
        )
        injector.close(now_ms=2 * 10**6)
    found = {"per_shop": run_all(stage, "per_shop", "per_till", "best", "met")}
    found |= {sink: stage.records(sink) for sink in ("per_till", "best", "met")}
    assert {row["shop"]: row["n"] for row in found["per_shop"]} == Counter(row["shop"] for row in sold)
    assert len(found["per_shop"]) == 4
    both = Counter((row["shop"], row["till"]) for row in sold)
    assert {(row["shop"], row["till"]): row["n"] for row in found["per_till"]} == both
    assert Counter(row["shop"] for row in found["best"]) == dict.fromkeys(set(names), 1)
    met = Counter()
    for row in sold:
        partners = [visit["ts"] for visit in came if visit["shop"] == row["shop"] and row["shop"] is not None]
        met.update((row["shop"], row["amount"], seen) for seen in partners or [None])
    assert Counter((row["shop"], row["amount"], row["seen"]) for row in found["met"]) == met
    for sink, rows in found.items():
        assert batched(spark, stage, sink, ["sales", "visits"]) == as_rows(stage, sink, rows)
