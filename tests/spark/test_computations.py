"""Claims about computations inside Spark tasks: timers by the clock, several inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.streams.catalogue import category_from_json
from penstock.streams.places import open_log
from tests.support.stage import Stage, wait_for

ALARMS = '''
from penstock import Computation, Pipeline


class Alarm(Computation):
    """Rings twice, by the clock alone."""

    outputs = {"out": {"name": "string", "rung": "bigint", "is_due": "boolean"}}

    def process_record(self, record, ctx):
        ctx.set_wall_timer("1", ctx.now + 300)

    def process_timer(self, timer, ctx):
        rung = int(timer.tag)
        ctx.produce({"name": ctx.key, "rung": rung, "is_due": timer.wall and timer.at_ms <= ctx.now})
        if rung < 2:
            ctx.set_wall_timer(str(rung + 1), ctx.now + 300)


p = Pipeline("alarms", partitions=2)
p.source("calls").key_by("name").process(Alarm, name="alarm").sink("rings")
'''
CALLS = {
    "name": "calls",
    "partitions": 1,
    "columns": [["name", "string"]],
    "format": "json",
    "watermark": "injector",
}


def test_wall_timers_fire_in_a_task_without_any_further_record(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "alarms.py").write_text(ALARMS)
    stage = Stage(spark, tmp_path, tmp_path / "alarms.py", CALLS)
    injector = stage.injector("calls")
    injector.publish(["a", "b"], [100, 200], [b'{"name": "a"}', b'{"name": "b"}'])
    ids = stage.start("alarms.by_name") + stage.start("alarms.alarm")
    wait_for(lambda: len(stage.records("rings")) >= 4, "four rings")
    stage.stop(ids)
    rung = sorted((row["name"], row["rung"], row["is_due"]) for row in stage.records("rings"))
    assert rung == [("a", 1, True), ("a", 2, True), ("b", 1, True), ("b", 2, True)]


VISITS = '''
from penstock import Computation, Pipeline, Value


class Visits(Computation):
    """Counts clicks, sums orders, per user and second."""

    outputs = {"out": {"user": "string", "second": "bigint", "clicks": "bigint", "spent": "double"}}
    inputs = {"clicks": {"page": "string"}, "orders": {"price": "double"}}
    seconds = Value(dict[int, tuple[int, float]])

    def process_record(self, record, ctx):
        second = record.ts // 1000
        clicks, spent = ctx.state.seconds.get(second, (0, 0.0))
        if record.stream == "clicks":
            clicks += len(record.page)
        else:
            spent += record.price
        ctx.state.seconds[second] = (clicks, spent)
        ctx.set_timer(str(second), (second + 1) * 1000)

    def process_timer(self, timer, ctx):
        clicks, spent = ctx.state.seconds.pop(int(timer.tag))
        ctx.produce({"user": ctx.key, "second": int(timer.tag), "clicks": clicks, "spent": spent})


p = Pipeline("visits", partitions=2)
clicks = p.source("clicks").filter("page LIKE 'x%'").key_by("user")
p.process(Visits, clicks=clicks, orders=p.source("orders").key_by("buyer"), name="both").sink("per_user")
'''


def _json_category(name: str, *columns: tuple[str, str]) -> dict[str, Any]:
    listed = [list(column) for column in columns]
    return {"name": name, "partitions": 1, "columns": listed, "format": "json", "watermark": "injector"}


def test_two_inputs_with_keys_and_columns_of_their_own_meet_in_one_task(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "visits.py").write_text(VISITS)
    bus = f"embedded:{tmp_path / 'bus'}"
    open_log(bus).create(
        category_from_json(_json_category("orders", ("buyer", "string"), ("price", "double")))
    )
    clicks = _json_category("clicks", ("user", "string"), ("page", "string"))
    stage = Stage(spark, tmp_path, tmp_path / "visits.py", clicks, bus=bus)
    expected: dict[tuple[str, int], tuple[int, float]] = {}
    made: dict[str, list[tuple[int, dict[str, Any]]]] = {"clicks": [], "orders": []}
    for n in range(400):
        user, second = f"u{n % 7}", n // 100
        seen, spent = expected.get((user, second), (0, 0.0))
        if n % 3:
            made["clicks"].append((n * 10, {"user": user, "page": "xy" if n % 2 else "no"}))
            seen += 2 * (n % 2)
        else:
            made["orders"].append((n * 10, {"buyer": user, "price": n / 2}))
            spent += n / 2
        if n % 3 == 0 or n % 2:
            expected[user, second] = (seen, spent)
    ids = [task for job in stage.configs for task in stage.start(job)]
    for name, rows in made.items():
        injector = stage.injector(name)
        values = [json.dumps(row).encode() for _, row in rows]
        injector.publish([str(ts) for ts, _ in rows], [ts for ts, _ in rows], values)
        injector.close(now_ms=1)
    wait_for(lambda: len(stage.records("per_user")) >= len(expected), "all seconds")
    stage.stop(ids)
    found = {(row["user"], row["second"]): (row["clicks"], row["spent"]) for row in stage.records("per_user")}
    assert found == expected
    assert len(stage.records("per_user")) == len(expected)

    from penstock.streams.spark.backfill import read_category
    from tests.spark.test_backfill import frames

    inputs = {name: read_category(spark, bus, stage.log.describe(name)) for name in made}
    rows = frames(stage, inputs)["per_user"].collect()
    assert {(row["user"], row["second"]): (row["clicks"], row["spent"]) for row in rows} == expected
    assert len(rows) == len(expected), "a batch gives the same"
