"""What a job's stages do to rows without Spark: what Arrow computes, or a plain word on what only Spark can.

Pure: no JVM, the same rows as Spark would make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock.core.errors import PipelineError
from penstock.streams.arrow_expressions import as_type, in_arrow
from penstock.streams.arrow_stages import ArrowPlan, plan_in_arrow
from penstock.streams.task import Input

Columns = Sequence[tuple[str, str]]


def stages_in_arrow(
    job: str, plan: Mapping[str, Any], inputs: Sequence[Input]
) -> Callable[[pa.RecordBatch], list[pa.RecordBatch]]:
    """A job's stages as a function of rows of one input; PipelineError if an expression is Spark's alone."""
    branches = plan.get("branches") or [{"input": 0, "stages": []}]
    common = {"stages": plan["stages"], "key": plan.get("key")}
    ways: dict[int, list[tuple[ArrowPlan, ArrowPlan]]] = {}
    for branch in branches:
        own = _planned(job, {"stages": branch["stages"]}, inputs[branch["input"]].columns)
        ways.setdefault(branch["input"], []).append((own, _planned(job, common, own.columns)))
    prefixed = bool(plan.get("branches"))

    def run(rows: pa.RecordBatch) -> list[pa.RecordBatch]:
        number = rows.column("_input")[0].as_py()
        plain = _without_prefix(rows, number) if prefixed else rows
        return [
            made
            for own, rest in ways[number]
            for before in _computed(job, own, plain)
            for made in _computed(job, rest, before)
        ]

    return run


def _planned(job: str, plan: Mapping[str, Any], columns: Columns) -> ArrowPlan:
    found = plan_in_arrow(plan, columns)
    if found is None:
        raise PipelineError(
            f"job {job} cannot be tried without Spark",
            why=f"only Spark computes {', '.join(_only_spark(plan, columns))}",
            fix="try what comes before and behind it apart, or run the whole pipeline with `penstock run`",
        )
    return found


def _only_spark(plan: Mapping[str, Any], columns: Columns) -> Iterator[str]:
    """The expressions that Arrow has no form for."""
    stages = [*plan["stages"], *([{"op": "key", "expr": plan["key"]}] if plan.get("key") else [])]
    for stage in stages:
        if stage["op"] == "explode":
            yield f"explode({stage['array']})"
            columns = (*columns, *((name, kind) for name, kind in stage["columns"]))
        elif stage["op"] == "select":
            for name, text, kind in stage["columns"]:
                if not _has_form(text, kind, columns):
                    yield f"{text} AS {name}"
            columns = tuple((name, kind) for name, _, kind in stage["columns"])
        elif not _has_form(stage["expr"], "string" if stage["op"] == "key" else "", columns):
            yield str(stage["expr"])


def _has_form(text: str, kind: str, columns: Columns) -> bool:
    found = in_arrow(text, dict(columns))
    return found is not None and (not kind or as_type(found, kind) is not None)


def _computed(job: str, plan: ArrowPlan, rows: pa.RecordBatch) -> list[pa.RecordBatch]:
    if not rows.num_rows:
        return []
    made = plan.run(rows)
    if made is None:
        raise PipelineError(
            f"job {job} cannot be tried without Spark on these records",
            why="Arrow and Spark may differ on some of their values: text beyond ASCII, NaN, overflow",
            fix="try it with other values, or run the whole pipeline with `penstock run`",
        )
    return made


def _without_prefix(rows: pa.RecordBatch, number: int) -> pa.RecordBatch:
    """The system columns, and those of this input under their own names."""
    prefix = f"_i{number}_"
    kept = [
        name
        for name in rows.schema.names
        if not name.startswith("_i") or name == "_input" or name.startswith(prefix)
    ]
    chosen = rows.select(kept)
    return chosen.rename_columns([name.removeprefix(prefix) for name in kept])
