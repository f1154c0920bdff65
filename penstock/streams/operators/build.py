"""Builds the step logic for a job's plan. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.core.errors import ConfigError
from penstock.streams.dsl.computation import Computation
from penstock.streams.operators.dedup import Dedup, DedupSpec
from penstock.streams.operators.joins import JoinSpec, StreamJoin
from penstock.streams.operators.sessions import SessionAggregate, SessionFirings
from penstock.streams.operators.top import TopOfWindow, TopSpec
from penstock.streams.operators.windowed import (
    CombinedAggregate,
    FiringAggregate,
    PartialAggregate,
    WindowedAggregate,
    WindowSpec,
)
from penstock.streams.step.keyed_work import KeyedLogic, StepLogic
from penstock.streams.step.record_ids import DropRepeated, IdFilters
from penstock.streams.step.step import TaskDescriptor, is_dead
from penstock.streams.step.vectorised import VectorComputation, VectorLogic


def operator_of(plan: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> StepLogic:
    """The logic of `computation` in a job's plan; `columns`: of what it produces."""
    if plan["operator"] == "aggregate":
        spec = WindowSpec.of(plan, columns)
        if spec.spans.kind == "session":
            return SessionAggregate(spec) if spec.firing.is_plain else SessionFirings(spec)
        if not spec.firing.is_plain:
            return FiringAggregate(spec)
        return WindowedAggregate(spec)
    if plan["operator"] in ("partial", "combine"):
        spec = WindowSpec.of(plan, columns)
        return PartialAggregate(spec) if plan["operator"] == "partial" else CombinedAggregate(spec)
    if plan["operator"] == "join":
        return StreamJoin(JoinSpec.of(plan))
    if plan["operator"] == "dedup":
        return Dedup(DedupSpec.of(plan, columns))
    if plan["operator"] == "top":
        return TopOfWindow(TopSpec.of(plan, columns))
    raise ConfigError(
        f"{plan['operator']!r} cannot be run",
        why="this version has no such operator",
        fix="use a Computation with state and timers",
    )


def logic_of(
    task: TaskDescriptor,
    partition: int,
    make: Callable[[str], Computation | VectorComputation],
    filters: Callable[[], IdFilters],
) -> StepLogic:
    """The step logic of a stateful task; `make` creates a computation by class name.

    If the plan has record ids, records with an id that was seen before are dropped.
    """
    computation = task.plan["computation"]
    logic, ids = _logic(task, partition, make), computation.get("ids")
    if ids is None:
        return logic
    return DropRepeated(
        logic,
        column=ids["column"],
        slack_ms=ids["slack_ms"],
        filters=filters(),
        inputs=[name for name, _ in computation.get("inputs", ())],
    )


def _logic(
    task: TaskDescriptor, partition: int, make: Callable[[str], Computation | VectorComputation]
) -> StepLogic:
    computation = task.plan["computation"]
    if "operator" in computation:
        return operator_of(computation, task.outputs[0].columns)
    found = make(computation["class"])
    late = task.plan.get("late")
    if isinstance(found, VectorComputation):
        return VectorLogic(found, late=late)
    # Without a dead-letter stream an exception stops the task.
    dead = next((output.stream for output in task.outputs if is_dead(output.stream)), None)
    return KeyedLogic(
        found,
        inputs=computation.get("inputs", ()),
        late=late,
        dead=(dead, partition) if dead is not None and task.poison == "skip" else None,
    )
