"""Claims about a step where its rows are read: the whole range at once, or all of it through Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from penstock.streams.step.arrow_stages import shortcut, step_at_source
from penstock.streams.step.reading import row_schema
from penstock.streams.step.step import BAD, BEGIN, DATA, DONE, END, InputSpec, TaskDescriptor
from tests.streams.descriptors import a_descriptor

SHOUT = {"op": "select", "columns": [["word", "upper(word)", "string"]]}


def a_task(plan: dict[str, Any], kind: str = "stateless", inputs: int = 1) -> TaskDescriptor:
    source = InputSpec(
        category="in",
        birth="b",
        columns=(("word", "string"),),
        format="json",
        watermark="injector",
        lateness_ms=0,
        ts_column="",
        partitions=1,
    )
    return a_descriptor(kind, plan, inputs=(source,) * inputs)


TASK = a_task({"stages": [SHOUT]})


def some_rows(*rows: tuple[int, int, str | None]) -> pa.RecordBatch:
    given = {
        "_kind": pa.array([kind for kind, _, _ in rows], pa.int8()),
        "_offset": pa.array([offset for _, offset, _ in rows], pa.int64()),
        "word": pa.array([word for _, _, word in rows], pa.string()),
    }
    schema = row_schema(TASK)
    arrays = [given[f.name] if f.name in given else pa.nulls(len(rows), f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


BATCHES = (
    some_rows((BEGIN, 0, None)),
    some_rows((DATA, 0, "one"), (BAD, 1, None), (DATA, 2, None)),
    some_rows((DATA, 3, "four")),
    some_rows((END, 0, None)),
)


class Steps:
    """A step that keeps what it was given."""

    def __init__(self) -> None:
        self.runs: list[list[dict[str, Any]]] = []

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch:
        self.runs.append([row for batch in batches for row in batch.to_pylist()])
        return pa.RecordBatch.from_pydict({"partition": [3], "records": [4]})


def run(*batches: pa.RecordBatch) -> tuple[list[pa.RecordBatch], Steps]:
    plan, steps = shortcut(TASK), Steps()
    assert plan is not None
    return list(step_at_source(TASK, iter(batches), plan, steps)), steps


def test_one_row_says_what_was_done():
    (found,), steps = run(*BATCHES)
    assert found.schema == row_schema(TASK)
    (row,) = found.to_pylist()
    assert row["_kind"] == DONE and json.loads(row["_meta"]) == {"partition": 3, "records": 4}
    (given,) = steps.runs
    assert [(row["_kind"], row["_offset"], row["word"]) for row in given] == [
        (BEGIN, 0, None),
        (DATA, 0, "ONE"),
        (DATA, 2, None),
        (BAD, 1, None),
        (DATA, 3, "FOUR"),
        (END, 0, None),
    ]


def test_one_value_that_only_spark_knows_leaves_the_whole_range_as_it_is():
    batches = (*BATCHES[:3], some_rows((DATA, 4, "fünf")), some_rows((DATA, 5, "six")), BATCHES[3])
    found, steps = run(*batches)
    assert found == list(batches) and not steps.runs


def test_other_plans_have_no_shortcut():
    trim = {"op": "filter", "expr": "trim(word) <> ''"}
    explode = {
        "op": "explode",
        "array": "split(word, '')",
        "type": "array<string>",
        "columns": [["c", "string"]],
    }
    assert shortcut(TASK) is not None
    assert shortcut(a_task({"stages": []})) is not None
    assert shortcut(a_task({"stages": [SHOUT, trim]})) is None
    assert shortcut(a_task({"stages": [explode]})) is None
    assert shortcut(a_task({"stages": [SHOUT], "key": "trim(word)"})) is None
    assert shortcut(a_task({"stages": [SHOUT]}, kind="stateful")) is None
    assert shortcut(a_task({"stages": [SHOUT], "branches": [{"input": 0, "stages": []}]}, inputs=2)) is None
