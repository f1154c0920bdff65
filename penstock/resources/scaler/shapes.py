"""What a job's tasks look like: how many, how large, and how much of the work the busiest has. Pure.

A partition is read by one thread of one task at a time, so the busiest thread carries
ceil(ceil(partitions / n) / k) of them, and a job of n tasks with k threads each works like
partitions / that many threads. Where partitions divide evenly this is the paper's k * n.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf, isfinite

from penstock.jobs.partition_tasks import map_partitions

KINDS = ("cpu", "memory_mb", "disk_mb", "network_mbps")
# What rounding may leave of a whole number.
TINY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResources:
    """What each task of a job gets."""

    threads: int = 1  # k
    cpu: float = 1.0
    memory_mb: float = 512.0
    disk_mb: float = 0.0  # 0: none is reserved
    network_mbps: float = 0.0  # megabits per second; 0: none is reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A number of tasks and what each gets."""

    task_count: int  # n
    task: TaskResources
    mapping: tuple[int, ...] | None = None  # by partition, the task that reads it; None: dealt evenly

    def total(self, kind: str) -> float:
        """What all tasks together reserve of one resource."""
        amount: float = getattr(self.task, kind)
        return self.task_count * amount

    def to_data(self) -> dict[str, float]:
        """For the journal."""
        return {
            "task_count": self.task_count,
            "threads": self.task.threads,
            "cpu": self.task.cpu,
            "memory_mb": self.task.memory_mb,
            "disk_mb": self.task.disk_mb,
            "network_mbps": self.task.network_mbps,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much of each resource there is; infinite where nobody set a limit."""

    cpu: float = inf
    memory_mb: float = inf
    disk_mb: float = inf
    network_mbps: float = inf


UNLIMITED = Room()


def mapping_of(shape: Shape, partitions: int) -> tuple[int, ...]:
    """By partition, the task that reads it."""
    return shape.mapping if shape.mapping is not None else map_partitions(partitions, shape.task_count)


def with_mapping(shape: Shape, mapping: tuple[int, ...]) -> Shape:
    """The same tasks with their partitions dealt so; the even deal has no name of its own."""
    is_even = mapping == map_partitions(len(mapping), shape.task_count)
    return replace(shape, mapping=None if is_even else mapping)


def busiest_partitions(task_count: int, partitions: int) -> int:
    """How many partitions the busiest task has."""
    return -(-partitions // task_count)


def share_of_busiest(task_count: int, partitions: int) -> float:
    """Which part of the work the busiest task has. Partitions 0: work that is split at will."""
    if partitions <= 0:
        return 1.0 / task_count
    return busiest_partitions(task_count, partitions) / partitions


def parallel(task_count: int, threads: int, partitions: int) -> float:
    """As how many threads a job works, n * k at most."""
    if partitions <= 0:
        return float(task_count * threads)
    rounds = -(-busiest_partitions(task_count, partitions) // threads)
    return partitions / rounds


def at_work(task_count: int, threads: int, partitions: int) -> float:
    """How many threads work at a time while every task is busy: a task's last round may leave some idle."""
    if threads == 1 or partitions <= 0:
        return float(task_count * threads)
    held, more = divmod(partitions, task_count)
    rounds = more * -(-(held + 1) // threads) + (task_count - more) * -(-held // threads)
    return task_count * partitions / rounds


def rounds_for(wanted: float, partitions: int) -> int:
    """How many partitions a thread may carry so that the job works as `wanted` threads; 0: it cannot."""
    if wanted <= 0 or not isfinite(partitions / wanted):
        return partitions
    return min(partitions, int(partitions / wanted + TINY))


def threads_for(wanted: float, *, task_count: int, partitions: int) -> int | None:
    """The fewest threads per task with which so many tasks work as `wanted` threads; None: no number does."""
    if partitions <= 0:
        return max(1, ceil(wanted / task_count - TINY))
    rounds = rounds_for(wanted, partitions)
    return -(-busiest_partitions(task_count, partitions) // rounds) if rounds else None


def tasks_for(wanted: float, *, threads: int, partitions: int) -> int | None:
    """The fewest tasks of so many threads that work as `wanted` threads; None: no number does."""
    if partitions <= 0:
        return max(1, ceil(wanted / threads - TINY))
    rounds = rounds_for(wanted, partitions)
    return max(1, -(-partitions // (rounds * threads))) if rounds else None


def align(task_count: int, partitions: int) -> int:
    """The fewest tasks whose busiest has no more partitions than with `task_count`."""
    if partitions <= 0:
        return task_count
    return -(-partitions // busiest_partitions(min(task_count, partitions), partitions))


def next_below(task_count: int, partitions: int) -> int:
    """The next smaller number of tasks that is aligned; 0 below one."""
    if partitions <= 0 or task_count <= 1:
        return task_count - 1
    return min(task_count - 1, -(-partitions // (busiest_partitions(task_count, partitions) + 1)))
