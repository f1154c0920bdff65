"""Which task reads which partition: the ordinary deal, and one that a layer asks for. Pure.

A deal that a layer asks for counts while it fits the job's partitions and tasks. When somebody changes
those, it is ignored and said to be: a number in one layer must not stop a job because of another layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.errors import ConfigError
from penstock.jobs.config import JobConfig
from penstock.jobs.layers import LayerRow, is_same
from penstock.jobs.text_rules import shown

FIELD = "partition_tasks"
# A layer above that says one of these decides whether the deal fits.
_FITS_BY = frozenset({FIELD, "partitions", "task_count", "task_count_max", "privileged", "kind"})
# What a plan or a decision says of them fits a line.
_TASKS_SHOWN_MAX, _PARTITIONS_SHOWN_MAX = 6, 8

Mapped = tuple[int, ...]


def map_partitions(partitions: int, task_count: int) -> Mapped:
    """Partition -> task index: contiguous runs whose sizes differ by at most one."""
    assert 1 <= task_count <= partitions, "a task without a partition would have nothing to do"
    return tuple(partition * task_count // partitions for partition in range(partitions))


def why_unfit(asked: Sequence[int], *, partitions: int, task_count: int) -> str:
    """Why a deal cannot be: not all partitions, or not all tasks and only those; "" if it can."""
    if len(asked) != partitions:
        return f"it has {len(asked)} entries, the job has {partitions} partitions"
    beyond = sorted({index for index in asked if index >= task_count})
    if beyond:
        return f"it names task {beyond[0]}, the job has {task_count} tasks, from 0 on"
    idle = sorted(set(range(task_count)) - set(asked))
    return f"task {idle[0]} of {task_count} would have no partition" if idle else ""


def asked_mapping(config: JobConfig) -> Mapped | None:
    """The deal that a config asks for; None: it asks for none that fits."""
    asked = config.partition_tasks
    if not asked or why_unfit(asked, partitions=config.partitions, task_count=config.task_count):
        return None
    return asked


def why_ignored(config: JobConfig) -> str:
    """Why the deal that a config asks for does not count; "" if it does, or if there is none."""
    asked = config.partition_tasks
    return why_unfit(asked, partitions=config.partitions, task_count=config.task_count) if asked else ""


def tell_moves(before: Sequence[int], after: Sequence[int]) -> str:
    """Which partitions change their task, in words; "" if none does, or if they are others."""
    moves: dict[tuple[int, int], list[int]] = {}
    for partition, (old, new) in enumerate(zip(before, after, strict=False)):
        if old != new:
            moves.setdefault((old, new), []).append(partition)
    if len(before) != len(after) or not moves:
        return ""
    said = [
        f"partition{'s' * (len(some) > 1)} {_some(some)} from task {old} to {new}"
        for (old, new), some in sorted(moves.items())[:_TASKS_SHOWN_MAX]
    ]
    rest = sum(len(some) for _, some in sorted(moves.items())[_TASKS_SHOWN_MAX:])
    return ", ".join(said) + (f" and {rest} more" if rest else "")


def _some(partitions: Sequence[int]) -> str:
    rest = len(partitions) - _PARTITIONS_SHOWN_MAX
    shown = ", ".join(map(str, partitions[:_PARTITIONS_SHOWN_MAX]))
    return f"{shown} and {rest} more" if rest > 0 else shown


def check_asked(
    job: str, before: LayerRow | None, row: LayerRow, others: Sequence[LayerRow], config: JobConfig
) -> None:
    """Refuse a write of a deal that does not fit the job as this layer and those below make it."""
    asked = row.body.get(FIELD)
    if not asked or (before is not None and is_same(before.body.get(FIELD), asked)):
        return
    above = (other for other in others if other.precedence > row.precedence)
    if any(_FITS_BY & other.body.keys() for other in above):
        return  # a layer above decides; where the deal does not fit it is ignored, and said to be
    why = why_unfit(asked, partitions=config.partitions, task_count=config.task_count)
    if why:
        raise ConfigError(
            f"the config of job {shown(job)} is not valid",
            why=f"{FIELD}: {why}",
            fix="name for each partition, in order, the task that reads it, each task at least once; "
            "or leave it out: then partitions are dealt evenly",
        )
