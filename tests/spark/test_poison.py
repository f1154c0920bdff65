"""Records that cannot be processed: put aside with offset and reason, or the task stops at the first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.stage import Stage, wait_for

SALES = {
    "name": "sales",
    "partitions": 3,
    "columns": [["shop", "string"], ["amount", "string"], ["ts", "bigint"]],
    "format": "json",
    "watermark": "event_time",
    "lateness_ms": 0,
    "ts_column": "ts",
    "ahead_max_ms": 0,  # any time is fine
}
SHOPS = """
from penstock import Pipeline

p = Pipeline("shops", partitions=2)
(
    p.source("sales")
    .filter("length(shop) > 0 OR shop IS NULL")
    .select("shop", "100 / cast(amount as int) AS share", "length(shop) AS size")
    .key_by("shop")
    .sink("shares")
)
"""
YEAR_2100_MS = 4_102_444_800_000
MakeStage = Callable[..., Stage]


@pytest.fixture
def make(spark: Any, tmp_path: Path) -> MakeStage:
    def build(text: str = SHOPS, **config: Any) -> Stage:
        pipeline = tmp_path / "shops.py"
        pipeline.write_text(text)
        stage = Stage(spark, tmp_path, pipeline, SALES)
        stage.compile(pipeline, **config)
        return stage

    return build


def publish(stage: Stage, values: list[bytes], key: str = "k") -> None:
    stage.injector("sales").publish([key] * len(values), list(range(len(values))), values)


def sale(shop: str | None, amount: str, ts: int = 1) -> bytes:
    return json.dumps({"shop": shop, "amount": amount, "ts": ts}).encode()


def run_until(stage: Stage, category: str, count: int) -> None:
    ids = stage.start(next(iter(stage.configs)))
    wait_for(
        lambda: sum(stage.log.end_offsets(category)) >= count or _failed(stage), f"{count} in {category}"
    )
    assert not _failed(stage), _failed(stage)
    stage.stop(ids)


def _failed(stage: Stage) -> str:
    return next((view.error for view in stage.tasks.poll() if view.state == "failed"), "")


def test_bad_input_of_every_kind_is_put_aside_or_goes_through(make: MakeStage):
    """Not JSON, wrong types, no time, null keys, 10 MB, 1970 and 2100; two of three partitions are empty."""
    stage = make()
    large = "x" * 10_000_000
    good = [sale("a", "1", 0), sale("b", "2", YEAR_2100_MS), sale(None, "4", 3), sale(large, "5", 4)]
    bad = [b"{", b"null", b"[]", b'{"shop": 1, "ts": 1}', b'{"shop": "x"}', b"\xff\xfe", b""]
    publish(stage, [good[0], *bad, *good[1:]])
    run_until(stage, "shares", 4)
    found = {(row["_ts"], row["_key"], row["share"], row["size"]) for row in stage.records("shares")}
    assert found == {
        (0, "a", 100.0, 1),
        (YEAR_2100_MS, "b", 50.0, 1),
        (3, "[null]", 25.0, None),
        (4, large, 20.0, 10**7),
    }
    dead = stage.records("sales.dead")
    assert [(row["source_offset"], row["value"]) for row in dead] == list(enumerate(bad, 1))
    assert all(row["reason"] for row in dead) and "no event time" in dead[4]["reason"]
    assert len({row["source_partition"] for row in dead}) == 1


def test_values_that_spark_cannot_compute_are_found_and_put_aside(make: MakeStage):
    """Two of three hundred: a division by zero and a cast that cannot be; the rest is there exactly once."""
    stage = make()
    values = [sale(f"s{n}", "abc" if n == 201 else "0" if n == 77 else "4", n) for n in range(300)]
    publish(stage, values)
    run_until(stage, "shares", 298)
    assert sorted(row["_ts"] for row in stage.records("shares")) == [
        n for n in range(300) if n not in (77, 201)
    ]
    dead = {row["source_offset"]: row for row in stage.records("sales.dead")}
    assert set(dead) == {77, 201}
    assert dead[77]["reason"].startswith("[DIVIDE_BY_ZERO]") and dead[77]["value"] == values[77]
    assert dead[201]["reason"].startswith("[CAST_INVALID_INPUT]")


def test_a_plan_that_fails_on_everything_fails_the_task_with_the_class_of_the_error(make: MakeStage):
    stage = make()
    publish(stage, [sale("a", "0", n) for n in range(60)])
    ids = stage.start(next(iter(stage.configs)))
    wait_for(lambda: bool(_failed(stage)), "the task to fail")
    assert _failed(stage).startswith("[DIVIDE_BY_ZERO]"), _failed(stage)
    assert sum(stage.log.end_offsets("sales.dead")) == sum(stage.log.end_offsets("shares")) == 0
    stage.stop(ids)


def test_a_job_that_is_to_stop_at_poison_stops_and_goes_on_when_told_otherwise(make: MakeStage):
    stage = make(poison="fail")
    publish(stage, [sale("a", "1", 1), b"{nonsense", sale("b", "2", 2)])
    ids = stage.start(next(iter(stage.configs)))
    wait_for(lambda: bool(_failed(stage)), "the task to fail")
    error = _failed(stage)
    assert "offset 1: not the JSON object" in error and "poison: dead_letter" in error, error
    assert sum(stage.log.end_offsets("shares")) == sum(stage.log.end_offsets("sales.dead")) == 0
    stage.stop(ids)
    for config in stage.configs.values():
        config.pop("poison")
    run_until(stage, "shares", 2)
    assert [row["source_offset"] for row in stage.records("sales.dead")] == [1]


def test_null_keys_stay_together_whatever_they_come_with(make: MakeStage):
    """A batch of nulls alone and one with others: the key NULL has one partition, so one state."""
    stage = make()
    publish(stage, [sale(None, "1", 1)], key="k")
    run_until(stage, "shares", 1)
    stage.injector("sales", epoch=2).publish(["z"] * 2, [1, 2], [sale(None, "1", 2), sale("a", "1", 3)])
    run_until(stage, "shares", 3)
    places = {
        partition
        for partition, end in enumerate(stage.log.end_offsets("shares"))
        for batch in stage.log.read("shares", partition, 0, end)
        for row in batch.to_pylist()
        if row["_key"] == "[null]"
    }
    assert len(places) == 1
