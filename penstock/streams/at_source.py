"""A step where its rows are read: rows that Arrow can work on need not go through the JVM and back.

It decides for the whole range of an interval: published in pieces, by two workers, its records would lose
their order. Knows nothing of Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from penstock.streams.arrow_stages import ArrowPlan, plan_in_arrow
from penstock.streams.reading import control_row, row_schema
from penstock.streams.task import DONE, TaskDescriptor

Step = Callable[[Iterator[pa.RecordBatch]], pa.RecordBatch]


def shortcut(task: TaskDescriptor) -> ArrowPlan | None:
    """The task's plan for Arrow, if it can be done at the source."""
    if len(task.inputs) != 1 or not (task.kind == "stateless" or _is_operator(task)):
        return None
    return plan_in_arrow(task.plan, task.inputs[0].columns)


def _is_operator(task: TaskDescriptor) -> bool:
    """Windows and what is called with tables are Arrow's work too."""
    computation = task.plan.get("computation") or {}
    return "operator" in computation or bool(computation.get("vectorised"))


def step_at_source(
    task: TaskDescriptor, rows: Iterator[pa.RecordBatch], plan: ArrowPlan, step: Step
) -> Iterator[pa.RecordBatch]:
    """One row that says what `step` did; or, if the plan is Spark's to compute here, the rows as they are."""
    read: list[pa.RecordBatch] = []
    made: list[pa.RecordBatch] = []
    for batch in rows:
        read.append(batch)
        found = plan.run(batch)
        if found is None:
            yield from read
            yield from rows
            return
        made += found
    (report,) = step(iter(made)).to_pylist()
    yield control_row(row_schema(task), DONE, report)
