"""Which tasks are to be ended and started again: told in every reply, until a beat says that it was done.

Kept in memory alone: an order that is lost with its Shard Manager changes nothing, and may be given again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.core.errors import Refused
from penstock.tasks.container_store import ContainerRow
from penstock.tasks.messages import Heartbeat, RestartOrder

_TERM_BITS = 32  # orders of a later term are larger than all before


@dataclass(slots=True)
class RestartOrders:
    """Open orders by task. One per task: asking twice before it is obeyed is asking once."""

    term: int
    _count: int = 0
    _open: dict[str, tuple[str, str, RestartOrder]] = field(default_factory=dict)

    def ask(self, task_id: str, container: str, incarnation: str) -> None:
        """Order a restart of a task where it is now."""
        known = self._open.get(task_id)
        if known is not None and known[:2] == (container, incarnation):
            return
        self._count += 1
        order = RestartOrder(task_id=task_id, number=(self.term << _TERM_BITS) + self._count)
        self._open[task_id] = container, incarnation, order

    def on_beat(self, beat: Heartbeat) -> tuple[RestartOrder, ...]:
        """What this container has yet to obey. Another life of it has started its tasks anew already."""
        mine = [(life, order) for name, life, order in self._open.values() if name == beat.container]
        for life, order in mine:
            if life != beat.incarnation or order.number <= beat.order:
                del self._open[order.task_id]
        return tuple(order for life, order in mine if life == beat.incarnation and order.number > beat.order)


def container_of(task_id: str, containers: Sequence[ContainerRow]) -> ContainerRow:
    """Where a task runs or is to run, by what containers last said of themselves."""
    job = task_id.rpartition("/")[0]
    for row in containers:
        if row.may_run and any(task.task_id == task_id for task in row.tasks_of(job)):
            return row
    raise Refused(
        f"no container runs {task_id} now",
        why="its job is stopped or changing, or its shard is on its way",
        fix="`penstock task ls` shows where tasks are; ask again once it is there",
    )
