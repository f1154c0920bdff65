"""May a job's plan go to Spark? Pure: no JVM.

A job's config may be written by hand, so what the compiler checked is checked again where it is used: only
expressions of allowed functions over columns that are there, and only names and types of our own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.core.errors import ConfigError, PipelineError
from penstock.streams.bus.log import ARROW_TYPES
from penstock.streams.expressions import check_filter, check_value
from penstock.streams.graph import Columns, Place, check_columns
from penstock.streams.sql_types import can_cast, element_of

_NOWHERE = Place(file="plan", line=0)


def check_plan(plan: Mapping[str, Any], inputs: Sequence[Columns]) -> None:
    """ConfigError unless every stage fits the columns that reach it; `inputs`: what is read of each."""
    try:
        columns = inputs[0]
        for branch in plan.get("branches") or ():
            columns = _checked(branch["stages"], inputs[branch["input"]])
        columns = _checked(plan.get("stages", ()), columns)
        if plan.get("key"):
            _checked([{"op": "key", "expr": plan["key"]}], columns)
    except PipelineError as error:
        raise ConfigError(
            f"the job's plan cannot be run: {error.what}", why=error.why, fix=error.fix
        ) from None


def _checked(stages: Iterable[Mapping[str, Any]], columns: Columns) -> Columns:
    for stage in stages:
        match stage["op"]:
            case "filter":
                check_filter(stage["expr"], columns)
            case "key":
                check_value(stage["expr"], columns)
            case "select":
                for _, text, kind in stage["columns"]:
                    _check_type(text, check_value(text, columns).type, kind)
                columns = tuple((name, kind) for name, _, kind in stage["columns"])
            case "explode":
                found = check_value(stage["array"], columns).type
                made = tuple((name, kind) for name, kind in stage["columns"])
                _check_type(stage["array"], element_of(found), made[-1][1])
                columns = (*columns, *made)
            case other:
                raise PipelineError(
                    f"there is no stage {other!r}",
                    why="known: filter, select, explode, key",
                    fix="correct it",
                )
        check_columns(columns, what=f"stage {stage['op']!r}", place=_NOWHERE)
    return columns


def _check_type(text: str, found: str, wanted: str) -> None:
    if wanted not in ARROW_TYPES or (found != wanted and not can_cast(found, wanted)):
        raise PipelineError(
            f"{text!r} cannot become {wanted!r}",
            why=f"it gives {found}",
            fix=f"use one of {', '.join(ARROW_TYPES)}",
        )
