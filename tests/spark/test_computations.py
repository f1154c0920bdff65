"""Claims about computations inside Spark tasks: timers by the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.streams.testing import Stage, wait_for

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
