"""The work of a task's steps as its plan says: an operator of our own, or a user's computation. Pure."""

from __future__ import annotations

from collections.abc import Callable

from penstock.streams.dsl.computation import Computation
from penstock.streams.operators.build import operator_of
from penstock.streams.step.logic import KeyedLogic, StepLogic
from penstock.streams.step.record_ids import DropRepeated, IdFilters
from penstock.streams.step.step import is_dead
from penstock.streams.step.task import TaskDescriptor
from penstock.streams.step.vectorised import VectorComputation, VectorLogic


def logic_of(
    task: TaskDescriptor,
    partition: int,
    make: Callable[[str], Computation | VectorComputation],
    filters: IdFilters,
) -> StepLogic:
    """What the steps of a stateful task run; `make`: a computation by the name of its class.

    If the plan says that records have ids of their own, those whose id came before are left out.
    """
    computation = task.plan["computation"]
    logic, ids = _logic(task, partition, make), computation.get("ids")
    if ids is None:
        return logic
    return DropRepeated(
        logic,
        column=ids["column"],
        slack_ms=ids["slack_ms"],
        filters=filters,
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
    # Without a place for dead letters a record that raises stops it.
    dead = next((output.stream for output in task.outputs if is_dead(output.stream)), None)
    return KeyedLogic(
        found,
        inputs=computation.get("inputs", ()),
        late=late,
        dead=(dead, partition) if dead is not None and task.poison == "skip" else None,
    )
