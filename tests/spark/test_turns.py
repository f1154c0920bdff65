"""A job with slow code and a backlog shares a session with others: every task gets its turn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.streams.catalogue import category_from_json
from penstock.streams.dsl.injector import Injector
from tests.support.stage import Stage, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
ORDERS = {
    "name": "orders",
    "partitions": 4,
    "columns": [["k", "string"], ["n", "bigint"], ["ts", "bigint"]],
    "format": "json",
    "watermark": "injector",
    "ts_column": "ts",
}
TWO = """
import time

from penstock import Computation, Pipeline


class Fast(Computation):
    outputs = {"out": {"k": "string", "n": "bigint"}}

    def process_record(self, record, ctx):
        ctx.produce({"k": ctx.key, "n": record["n"]})


class Slow(Fast):
    def process_record(self, record, ctx):
        time.sleep(0.02)
        ctx.produce({"k": ctx.key, "n": record["n"]})


p = Pipeline("two", partitions=4)
p.source("orders").key_by("k").process(Slow).sink("slow_out")
p.source("items").key_by("k", name="by_item").process(Fast).sink("fast_out")
"""
SLOW, FAST = 12_000, 2_000  # 240 s of one slot against as good as nothing


def test_others_are_answered_while_a_slow_job_of_four_tasks_has_a_backlog(spark: Any, tmp_path: Path):
    pipeline = tmp_path / "two.py"
    pipeline.write_text(TWO)
    (tmp_path / "first.py").write_text(
        TWO.split("p = ")[0] + 'p = Pipeline("one", partitions=4)\n'
        'p.source("orders").key_by("k").process(Fast).sink("one_out")\n'
    )
    stage = Stage(spark, tmp_path, tmp_path / "first.py", ORDERS)
    stage.log.create(replace(category_from_json(ORDERS), name="items"))
    stage.compile(pipeline)
    slow = [name for name in stage.configs if name in ("two.by_k", "two.slow")]
    fast = [name for name in stage.configs if name.startswith("two.") and name not in slow]
    publish(stage, "orders", SLOW)
    ids = [task for job in slow for task in stage.start(job, tasks=4)]
    wait_for(lambda: answered(stage, "slow_out") > 0, "the slow job to begin", seconds=300)
    ids += [task for job in fast for task in stage.start(job)]
    publish(stage, "items", FAST)
    wait_for(lambda: answered(stage, "fast_out") == FAST, "the others to be answered", seconds=300)
    assert answered(stage, "slow_out") < SLOW, "it had a backlog all the time"

    metrics = {view.task_id: view.metrics for view in stage.tasks.poll()}
    of_slow = [found for task, found in metrics.items() if task.startswith("two.slow/")]
    assert len(of_slow) == 4 and all(found["user_ms_per_record"] >= 20 for found in of_slow), of_slow
    assert all(found["slots_user"] > 0 for found in of_slow)
    assert all("slot_wait_s" in found for found in metrics.values())
    stage.stop(ids)


def publish(stage: Stage, category: str, count: int) -> None:
    values = [json.dumps({"k": f"k{n % 97}", "n": n, "ts": 1}).encode() for n in range(count)]
    Injector(stage.log, category, "test", epoch=1).publish(
        [f"k{n % 97}" for n in range(count)], [1] * count, values
    )


def answered(stage: Stage, category: str) -> int:
    return sum(stage.log.end_offsets(category))
