"""Which records make Spark's own expressions fail: found by halving the range that was promised.

A division by zero or a cast that cannot be fails the whole batch, and Spark does not say at which record. The
plan is run again over halves, without the step, until single records are left; those are put aside with the
error that they cause. The same records fail every time, so a successor finds the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.streams.engine.query import apply_stages
from penstock.streams.task import OwnedInterval, TaskDescriptor

# More than so many in one range are no exceptions: the plan itself is wrong, and the task says so.
POISON_MAX = 20
_CLASS = re.compile(r"\[([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)\]")
# What says only that something else went wrong.
_WRAPPERS = frozenset({"STREAM_FAILED", "FAILED_EXECUTE_UDF", "TASK_WRITE_FAILED", "WRITE_STREAM"})
# Errors that a value causes. Others (memory, network, a lost executor) would hit every record.
_OF_VALUES = re.compile(
    r"DIVIDE_BY_ZERO|REMAINDER_BY_ZERO|CAST_|ARITHMETIC_OVERFLOW|BINARY_ARITHMETIC_OVERFLOW|INVALID_|NUMERIC_|"
    r"DATETIME_|CANNOT_PARSE|FAILED_PARSE|MALFORMED_|UNEXPECTED_|USER_RAISED_EXCEPTION|INTERVAL_|NULL_MAP_KEY|"
    r"DUPLICATED_MAP_KEY|ELEMENT_AT|CONVERSION_|DECIMAL_|COLLECTION_SIZE"
)


def error_class(error: BaseException) -> str:
    """Spark's name for what went wrong, the most particular one; "" if it has none."""
    found = [name for name in _CLASS.findall(str(error)) if name.split(".")[0] not in _WRAPPERS]
    return found[0] if found else ""


def is_of_values(error: BaseException) -> bool:
    """Whether another value would not have failed."""
    return _OF_VALUES.match(error_class(error)) is not None


def find_poison(
    spark: SparkSession, task: TaskDescriptor, interval: OwnedInterval, birth: str, span: tuple[int, int]
) -> dict[str, str]:
    """Offset and reason of each record in one input's range that fails the plan; none if too many do."""
    found: dict[str, str] = {}
    if span[0] >= span[1]:
        return found
    for offset, reason in _failing(spark, replace(task, intervals=(interval,)), birth, span):
        found[str(offset)] = reason
        if len(found) > POISON_MAX:
            return {}
    return found


def _failing(
    spark: SparkSession, task: TaskDescriptor, birth: str, span: tuple[int, int]
) -> Iterator[tuple[int, str]]:
    start, end = span
    error = _try(spark, task, birth, span)
    if error is None:
        return
    if end - start == 1:
        yield start, f"[{error_class(error)}] {_first_sentence(error)}"
        return
    middle = (start + end) // 2
    yield from _failing(spark, task, birth, (start, middle))
    yield from _failing(spark, task, birth, (middle, end))


def _try(spark: SparkSession, task: TaskDescriptor, birth: str, span: tuple[int, int]) -> Exception | None:
    """Run the plan over a range of one input and throw the rows away; the error of a value, or None."""
    (interval,) = task.intervals
    ranged = replace(task, replay={str(interval.ref.partition): {birth: span}})
    rows = spark.read.format("penstock").option("task", ranged.to_json()).load()
    try:
        apply_stages(rows, task.plan).write.format("noop").mode("overwrite").save()
    except (PySparkException, Py4JJavaError) as error:
        if not is_of_values(error):
            raise
        return error
    return None


def _first_sentence(error: Exception) -> str:
    name = error_class(error)
    text = str(error)[str(error).index(f"[{name}]") + len(name) + 2 :].strip()
    return re.split(r"\. |\n|SQLSTATE", text, maxsplit=1)[0][:500]
