"""Readable errors of runs; detection of poison records and of fencing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.core.errors import Fenced, PenstockError
from penstock.streams.dsl.computation import (
    MESSAGE_CHARS_MAX,
    cut_short,
    error_text,
    user_file_line,
    user_line,
)
from penstock.streams.places import hidden_password
from penstock.streams.spark.query import apply_stages
from penstock.streams.step.step import OwnedInterval, TaskDescriptor

# With more poison records in one range the plan itself is wrong, and the task fails.
POISON_MAX = 20
_CLASS = re.compile(r"\[([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)\]")
# Errors that only wrap another one.
_WRAPPERS = frozenset({"STREAM_FAILED", "FAILED_EXECUTE_UDF", "TASK_WRITE_FAILED", "WRITE_STREAM"})
# Errors caused by a value. Others (memory, network, a lost executor) would affect every record.
_OF_VALUES = re.compile(
    r"DIVIDE_BY_ZERO|REMAINDER_BY_ZERO|CAST_|ARITHMETIC_OVERFLOW|BINARY_ARITHMETIC_OVERFLOW|INVALID_|NUMERIC_|"
    r"DATETIME_|CANNOT_PARSE|FAILED_PARSE|MALFORMED_|UNEXPECTED_|USER_RAISED_EXCEPTION|INTERVAL_|NULL_MAP_KEY|"
    r"DUPLICATED_MAP_KEY|ELEMENT_AT|CONVERSION_|DECIMAL_|COLLECTION_SIZE"
)


def error_class(error: BaseException) -> str:
    """Spark's most specific error condition; "" if it has none."""
    found = [name for name in _CLASS.findall(str(error)) if name.split(".")[0] not in _WRAPPERS]
    return found[0] if found else ""


def is_of_values(error: BaseException) -> bool:
    """Whether the error is caused by a value."""
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
    """Run the plan over a range of one input without output; returns the error of a value, or None."""
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


TEXT_CHARS_MAX = 2000
_NAMED = re.compile(
    r"penstock\.(?:core\.errors|streams\.\w+)\.(\w+): (.*?)"
    r"(?=\s+SQLSTATE: |\n\s*\n|\n\tat |\nDriver stacktrace|\Z)",
    re.S,
)
# A traceback of a Python worker in Spark's text.
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (.+)$', re.M)
_RAISED = re.compile(r"^(?:\w+\.)*(\w+(?:: .*)?)$")
_OF_JAVA = re.compile(r"^(?:\tat |\t\.\.\. |Caused by: |Driver stacktrace|JVM stacktrace)")


def readable(error: BaseException) -> str:
    """Our own error's three parts where there is one inside; else what user code raised and at which of its
    lines; else what Spark says, its error class first. Never a trace of Java.

    Everybody reads it, and Spark may print what a query was given: addresses lose their passwords.
    """
    return hidden_password(_said(error))


def _said(error: BaseException) -> str:
    if isinstance(error, PenstockError):
        return cut_short(str(error), TEXT_CHARS_MAX)
    text = str(error)
    named = _NAMED.search(text)
    if named is not None:
        return cut_short(named.group(2).strip(), TEXT_CHARS_MAX)
    return cut_short(_of_worker(text) or _of_driver(error) or _of_spark(error, text), TEXT_CHARS_MAX)


def _of_worker(text: str) -> str:
    """The error of a user's function in a Python worker: the end of the first traceback in the text."""
    if _TRACEBACK not in text:
        return ""
    lines = text.partition(_TRACEBACK)[2].splitlines()
    raised = next((line for line in lines if _RAISED.match(line)), "")
    trace = "\n".join(lines[: lines.index(raised)] if raised else lines)
    found = [user_file_line(file, int(line), name) for file, line, name in _FRAME.findall(trace)]
    at = next((line for line in reversed(found) if line), "")
    why = cut_short(_RAISED.sub(r"\1", raised), MESSAGE_CHARS_MAX)
    return f"user code failed at {at}\nWhy: {why}" if raised and at else ""


def _of_driver(error: BaseException) -> str:
    """The error of a user's function in this process."""
    at = user_line(error)
    is_sparks = type(error).__module__.split(".")[0] in ("pyspark", "py4j")
    return f"user code failed at {at}\nWhy: {error_text(error)}" if at and not is_sparks else ""


def _of_spark(error: BaseException, text: str) -> str:
    name = error_class(error)
    lines = text[text.index(f"[{name}]") if name else 0 :].strip().splitlines()
    kept = [line for line in lines if not _OF_JAVA.match(line)][:12]
    at = user_line(error)  # it was called from there
    return "\n".join(kept) + (f"\nAt: {at}" if at else "")


def is_fenced(error: BaseException) -> bool:
    """A successor owns an interval of this task: told by type, or by name when it comes out of a worker's
    traceback.
    """
    if isinstance(error, Fenced):
        return True
    named = _NAMED.search(str(error))
    return named is not None and named.group(1) == "Fenced"
