"""A computation as its task's plan says: which inputs it has, where records go at which it raises. Pure."""

from __future__ import annotations

from penstock.streams.computation import Computation
from penstock.streams.record_ids import DropRepeated, IdFilters
from penstock.streams.step import is_dead
from penstock.streams.step_logic import KeyedLogic, StepLogic
from penstock.streams.task import TaskDescriptor


def dropping_repeated(task: TaskDescriptor, logic: StepLogic, filters: IdFilters) -> StepLogic:
    """The same work, without records whose own id came before, if the task's plan says that they have one."""
    ids = task.plan["computation"].get("ids")
    if ids is None:
        return logic
    return DropRepeated(logic, column=ids["column"], slack_ms=ids["slack_ms"], filters=filters)


def keyed_logic(task: TaskDescriptor, computation: Computation, partition: int) -> KeyedLogic:
    """The work of a step of this task. Without a place for dead letters a record that raises stops it."""
    dead = next((output.stream for output in task.outputs if is_dead(output.stream)), None)
    return KeyedLogic(
        computation,
        inputs=task.plan["computation"].get("inputs", ()),
        dead=(dead, partition) if dead is not None and task.poison == "skip" else None,
    )
