"""A task as a Spark query: source, the plan's stateless stages as Spark SQL, then the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from penstock.streams.bus.log import key_sql
from penstock.streams.compile.expressions import check_plan
from penstock.streams.spark.worker import REPORT_DDL, step_function
from penstock.streams.step.step import DATA, SYSTEM_COLUMNS, TaskDescriptor

_PASSED_THROUGH = [name for name, _ in SYSTEM_COLUMNS]
_IS_DATA = f"_kind = {DATA}"


def start_query(
    spark: SparkSession, task: TaskDescriptor, *, checkpoint: Path, trigger_ms: int
) -> StreamingQuery:
    """Start the task's query. The checkpoint is temporary: offsets come from the row store."""
    descriptor = task.to_json()
    rows = spark.readStream.format("penstock").option("task", descriptor).option("step", "").load()
    return (
        _with_step(rows, task, descriptor)
        .writeStream.format("noop")
        .queryName(f"{task.spec.task_id} {checkpoint.parent.name}")
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime=f"{trigger_ms} milliseconds")
        .start()
    )


def replay(spark: SparkSession, task: TaskDescriptor) -> None:
    """Run the fixed ranges of `task.replay` once: a predecessor's intent, which may be partly published."""
    descriptor = task.to_json()
    rows = spark.read.format("penstock").option("task", descriptor).option("step", "").load()
    _with_step(rows, task, descriptor).write.format("noop").mode("overwrite").save()


def _with_step(rows: DataFrame, task: TaskDescriptor, descriptor: str) -> DataFrame:
    return apply_stages(rows, task.plan).mapInArrow(step_function(descriptor), REPORT_DDL)


def apply_stages(rows: DataFrame, plan: Mapping[str, Any]) -> DataFrame:
    """Apply the plan's stages to each record. Rows that are not data (ranges, bad records) pass unchanged."""
    check_plan(plan, _columns_of(rows, plan))
    if plan.get("branches"):
        rows = _union(rows, plan["branches"])
    for stage in plan["stages"]:
        rows = _apply(rows, stage, _IS_DATA)
    if plan.get("key"):
        rows = _apply(rows, {"op": "key", "expr": plan["key"]}, _IS_DATA)
    return rows


def _columns_of(rows: DataFrame, plan: Mapping[str, Any]) -> list[tuple[tuple[str, str], ...]]:
    """The columns of each input, by the names that stages use."""
    own = [(field.name, field.dataType.simpleString()) for field in rows.schema]
    own = [column for column in own if column[0] not in _PASSED_THROUGH]
    if not plan.get("branches"):
        return [tuple(own)]
    count = 1 + max(branch["input"] for branch in plan["branches"])
    prefixes = [f"_i{number}_" for number in range(count)]
    return [
        tuple((name.removeprefix(prefix), kind) for name, kind in own if name.startswith(prefix))
        for prefix in prefixes
    ]


def _apply(rows: DataFrame, stage: Mapping[str, Any], mine: str, *carried: str) -> DataFrame:
    """Apply one stage to the rows where `mine` is true; a select also keeps the columns `carried`."""
    if stage["op"] == "filter":
        return rows.where(f"NOT ({mine}) OR coalesce(({stage['expr']}), false)")
    if stage["op"] == "key":
        text = key_sql(f"CAST(({stage['expr']}) AS STRING)")
        key = f"CASE WHEN {mine} THEN {text} ELSE _key END"
        return rows.withColumn("_key", F.expr(key))
    if stage["op"] == "explode":
        names, kinds = zip(*stage["columns"], strict=True)
        generator = ("pos" * (len(names) > 1)) + "explode" + ("_outer" * stage["outer"])
        array = f"CASE WHEN {mine} THEN ({stage['array']}) ELSE array(CAST(NULL AS {kinds[-1]})) END"
        return rows.select("*", F.expr(f"{generator}({array})").alias(*names))
    own = [
        F.expr(f"CASE WHEN {mine} THEN CAST(({expr}) AS {kind}) END").alias(name)
        for name, expr, kind in stage["columns"]
    ]
    return rows.select(*_PASSED_THROUGH, *carried, *own)


def _union(rows: DataFrame, branches: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Apply each branch's stages to the rows of its input, then unite them under the same columns.

    Not a union of DataFrames: that would make several Spark partitions for one interval. Each row has its
    branch's number; the columns of other branches have other names while one branch is processed.
    """
    of_input: dict[int, list[int]] = {}
    for number, branch in enumerate(branches):
        of_input.setdefault(branch["input"], []).append(number)
    cases = " ".join(f"WHEN {n} THEN array({', '.join(map(str, found))})" for n, found in of_input.items())
    found = f"CASE WHEN {_IS_DATA} THEN CASE _input {cases} END ELSE array(-1) END"
    if len(branches) == len(of_input):  # a record of an input goes through one branch
        rows = rows.withColumn("_branch", F.expr(f"({found})[0]"))
    else:
        rows = rows.select("*", F.explode(F.expr(found)).alias("_branch"))
    for number, branch in enumerate(branches):
        prefix = f"_i{branch['input']}_"
        aside = [name for name in rows.columns if name not in _PASSED_THROUGH]
        own = [name.removeprefix(prefix) for name in aside if name.startswith(prefix)]
        rows = rows.select(*_PASSED_THROUGH, *aside, *(F.col(prefix + name).alias(name) for name in own))
        for stage in branch["stages"]:
            rows = _apply(rows, stage, f"{_IS_DATA} AND _branch = {number}", *aside)
        made = [name for name in rows.columns if not name.startswith("_")]
        rows = rows.select(
            *_PASSED_THROUGH, *aside, *(F.col(name).alias(f"_b{number}_{name}") for name in made)
        )
    whens = {
        name: " ".join(f"WHEN {number} THEN `_b{number}_{name}`" for number in range(len(branches)))
        for name in made
    }
    return rows.select(
        *_PASSED_THROUGH, *(F.expr(f"CASE _branch {cases} END").alias(name) for name, cases in whens.items())
    )
