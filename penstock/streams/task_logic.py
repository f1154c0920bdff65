"""A computation as its task's plan says: which inputs it has, where records go at which it raises. Pure."""

from __future__ import annotations

from penstock.streams.computation import Computation
from penstock.streams.step import is_dead
from penstock.streams.step_logic import KeyedLogic
from penstock.streams.task import TaskDescriptor


def keyed_logic(task: TaskDescriptor, computation: Computation, partition: int) -> KeyedLogic:
    """The work of a step of this task. Without a place for dead letters a record that raises stops it."""
    dead = next((output.stream for output in task.outputs if is_dead(output.stream)), None)
    return KeyedLogic(
        computation,
        inputs=task.plan["computation"].get("inputs", ()),
        dead=(dead, partition) if dead is not None and task.poison == "skip" else None,
    )
