"""What a plan makes of rows, computed by Arrow where the rows are read. Pure: no JVM.

The same rows as Spark would make, or none at all: then the batch goes through Spark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.streams.arrow_expressions import ArrowExpression, Unsure, as_type, in_arrow
from penstock.streams.bus.log import ARROW_TYPES
from penstock.streams.keys import key_texts
from penstock.streams.task import DATA, SYSTEM_COLUMNS

_SYSTEM = [name for name, _ in SYSTEM_COLUMNS]
_Stage = Callable[[pa.RecordBatch], pa.RecordBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowPlan:
    """A plan whose every stage Arrow can compute; `columns`: what comes out."""

    stages: tuple[_Stage, ...]
    columns: tuple[tuple[str, str], ...]

    def run(self, rows: pa.RecordBatch) -> list[pa.RecordBatch] | None:
        """What Spark would make of these rows; None: ask Spark. Rows that are no data pass untouched."""
        is_data = pc.equal(rows.column("_kind"), DATA)
        data = pc.sum(is_data).as_py() or 0
        if not data:
            return [self._passed(rows)]
        try:
            if data == rows.num_rows:
                return [self._worked(rows)]
            others = self._passed(rows.filter(pc.invert(is_data)))
            return [self._worked(rows.filter(is_data)), others]
        except (Unsure, pa.ArrowInvalid):
            return None

    def _worked(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        for stage in self.stages:
            rows = stage(rows)
        return rows

    def _passed(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        own = {name: pa.nulls(rows.num_rows, ARROW_TYPES[kind]) for name, kind in self.columns}
        return _with_own(rows, own)


def plan_in_arrow(plan: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> ArrowPlan | None:
    """The plan for Arrow; None if a part of it is Spark's alone. Requires: it passed its checks."""
    return _planned(json.dumps(plan), tuple(columns))


@lru_cache(maxsize=64)
def _planned(text: str, columns: tuple[tuple[str, str], ...]) -> ArrowPlan | None:
    plan = json.loads(text)
    if plan.get("branches") or _is_per_record(plan.get("computation")):
        return None
    stages = list(plan["stages"])
    if plan.get("key"):
        stages.append({"op": "key", "expr": plan["key"]})
    made: list[_Stage] = []
    for stage in stages:
        found = _stage(stage, dict(columns))
        if found is None:
            return None
        made.append(found)
        if stage["op"] == "select":
            columns = tuple((name, kind) for name, _, kind in stage["columns"])
    return ArrowPlan(stages=tuple(made), columns=columns)


def _is_per_record(computation: Mapping[str, Any] | None) -> bool:
    return computation is not None and "class" in computation and not computation.get("vectorised")


def _stage(stage: Mapping[str, Any], columns: Mapping[str, str]) -> _Stage | None:
    if stage["op"] == "filter":
        return _filter(in_arrow(stage["expr"], columns))
    if stage["op"] == "key":
        return _key(in_arrow(stage["expr"], columns))
    if stage["op"] == "select":
        made = {name: _typed(expr, kind, columns) for name, expr, kind in stage["columns"]}
        return _select(made)
    return None


def _typed(text: str, kind: str, columns: Mapping[str, str]) -> ArrowExpression | None:
    found = in_arrow(text, columns)
    return None if found is None else as_type(found, kind)


def _filter(condition: ArrowExpression | None) -> _Stage | None:
    if condition is None:
        return None
    # What is neither true nor false is dropped, as in Spark.
    return lambda rows: rows.filter(_spread(condition, rows))


def _key(key: ArrowExpression | None) -> _Stage | None:
    text = None if key is None else as_type(key, "string")
    if text is None:
        return None
    place = _SYSTEM.index("_key")

    def run(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.set_column(place, "_key", key_texts(_spread(text, rows)))

    return run


def _select(made: Mapping[str, ArrowExpression | None]) -> _Stage | None:
    known = {name: one for name, one in made.items() if one is not None}
    if len(known) != len(made):
        return None
    return lambda rows: _with_own(rows, {name: _spread(one, rows) for name, one in known.items()})


def _spread(expression: ArrowExpression, rows: pa.RecordBatch) -> pa.Array:
    found = expression.compute(dict(zip(rows.schema.names, rows.columns, strict=True)))
    return found if isinstance(found, pa.Array) else pa.repeat(found, rows.num_rows)


def _with_own(rows: pa.RecordBatch, own: Mapping[str, pa.Array]) -> pa.RecordBatch:
    system = [rows.column(name) for name in _SYSTEM]
    return pa.RecordBatch.from_arrays([*system, *own.values()], names=[*_SYSTEM, *own])
