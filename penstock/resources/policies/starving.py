"""Tasks that wait for a slot of their container's session while others use them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.tasks.messages import TaskReport

WAIT_S = 30.0  # longer than turns of many tasks take, however busy the container is


@dataclass(frozen=True, slots=True, kw_only=True)
class Starved:
    """A task that waits for a slot, and the job that holds most of its container's slots."""

    job: str
    task_id: str
    container: str
    wait_s: float
    by: str  # "": nobody says that it holds one
    slots: float  # that `by` held lately, on the average
    user_share: float  # of these, in its own code


def starved_tasks(reports: Iterable[tuple[str, TaskReport]]) -> tuple[Starved, ...]:
    """From what containers say, (container, report) each; those that wait longest first."""
    known = list(reports)
    held: dict[str, dict[str, tuple[float, float]]] = {}
    for container, task in known:
        jobs = held.setdefault(container, {})
        slots, user = jobs.get(task.job, (0.0, 0.0))
        mine = task.metrics.get("slots_held", 0.0), task.metrics.get("slots_user", 0.0)
        jobs[task.job] = slots + mine[0], user + mine[1]
    found = []
    for container, task in known:
        wait_s = task.metrics.get("slot_wait_s", 0.0)
        if wait_s < WAIT_S:
            continue
        by, (slots, user) = max(held[container].items(), key=lambda item: (item[1][0], item[0]))
        found.append(
            Starved(
                job=task.job,
                task_id=task.task_id,
                container=container,
                wait_s=wait_s,
                by=by if slots > 0 else "",
                slots=slots,
                user_share=min(1.0, user / slots) if slots > 0 else 0.0,
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.wait_s, one.task_id)))


def told(starved: Starved) -> str:
    """One sentence for people: who waits, and for whom."""
    start = f"{starved.task_id} has waited {starved.wait_s:.0f} s for a slot of {starved.container}"
    if not starved.by:
        return f"{start}, and no task says that it holds one"
    code = f", {starved.user_share:.0%} of it in its own code" if starved.user_share >= 0.5 else ""
    return f"{start}: {starved.by} holds {starved.slots:.1f} of its slots{code}"
