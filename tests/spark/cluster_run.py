"""One pipeline on another Spark, as a process of its own: a process has one Spark context, and the tests' is local."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from penstock.streams.spark.session import build_session, end_session
from tests.spark.test_tasks import CATEGORY, COUNT, PARSE, ZEITGEIST, publish, queries, reference
from tests.support.stage import Stage, wait_for


def run(folder: Path, master: str, count: int, bus: str) -> dict[str, Any]:
    """Publish, run until all is counted; says where the work was done. `bus`: empty, or where Kafka is."""
    spark = build_session("cluster test", 2, folder / "scratch", master=master)
    category = {**CATEGORY, "partitions": 2}  # an executor each
    stage = Stage(spark, folder, ZEITGEIST / "pipeline.py", category, bus=bus)
    injector = stage.injector("queries")
    records = queries(0, count)
    publish(stage, records[: count // 2], injector, now_ms=1000)
    ids = stage.start(PARSE, tasks=2) + stage.start(COUNT, tasks=2)
    publish(stage, records[count // 2 :], injector, now_ms=2000)
    injector.close(now_ms=3000)
    expected = reference(records)
    wait_for(
        lambda: sum(stage.log.end_offsets("query_counts")) >= expected.total(), "the counts", seconds=300
    )
    executors = _tasks_done(spark)
    stage.stop(ids)
    found = sorted((row["query"], row["second"], row["count"]) for row in stage.records("query_counts"))
    end_session(spark)
    return {
        "is_exact": found == sorted(expected),
        "counted": len(found),
        "executors": executors,
        "deaths": stage.deaths,
    }


def _tasks_done(spark: Any) -> dict[str, int]:
    """How many of Spark's tasks each executor has done, by its id; the driver is none."""
    listed = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    found = [listed.apply(index) for index in range(listed.size())]
    return {one.id(): int(one.totalTasks()) for one in found if one.id() != "driver"}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])))
