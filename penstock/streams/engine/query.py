"""A task as a Spark query: source, the plan's stateless stages as Spark SQL, then the step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from penstock.streams.engine.step_worker import REPORT_DDL, step_function
from penstock.streams.task import DATA, SYSTEM_COLUMNS, TaskDescriptor

_PASSED_ON = [name for name, _ in SYSTEM_COLUMNS]


def start_query(
    spark: SparkSession, task: TaskDescriptor, *, checkpoint: Path, trigger_ms: int
) -> StreamingQuery:
    """Start the task's query. The checkpoint is scratch: offsets come from the row store."""
    descriptor = task.to_json()
    # A pool per job: in one pool for all, jobs wait for each other in the order of their batches.
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", task.job)
    rows = spark.readStream.format("penstock").option("task", descriptor).load()
    return (
        _through_the_step(rows, task, descriptor)
        .writeStream.format("noop")
        .queryName(f"{task.task_id} {checkpoint.parent.name}")
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime=f"{trigger_ms} milliseconds")
        .start()
    )


def replay(spark: SparkSession, task: TaskDescriptor) -> None:
    """Run the fixed ranges of `task.replay` once: what a predecessor promised and may have half published."""
    descriptor = task.to_json()
    rows = spark.read.format("penstock").option("task", descriptor).load()
    _through_the_step(rows, task, descriptor).write.format("noop").mode("overwrite").save()


def _through_the_step(rows: DataFrame, task: TaskDescriptor, descriptor: str) -> DataFrame:
    return apply_stages(rows, task.plan).mapInArrow(step_function(descriptor), REPORT_DDL)


def apply_stages(rows: DataFrame, plan: Mapping[str, Any]) -> DataFrame:
    """The plan's filters and projections. Rows that are not data (ranges, unreadable records) pass
    untouched.
    """
    for stage in plan["stages"]:
        if stage["op"] == "filter":
            rows = rows.where(f"_kind <> {DATA} OR coalesce(({stage['expr']}), false)")
        else:
            own = [
                F.expr(f"CASE WHEN _kind = {DATA} THEN CAST(({expr}) AS {kind}) END").alias(name)
                for name, expr, kind in stage["columns"]
            ]
            rows = rows.select(*_PASSED_ON, *own)
    if plan.get("key"):
        rows = rows.withColumn(
            "_key", F.expr(f"CASE WHEN _kind = {DATA} THEN CAST(({plan['key']}) AS STRING) END")
        )
    return rows
