"""Choosing a larger shape: vertical first, then horizontal, within limits and the capacity left. Pure.

All constraints are applied here, so the result is always legal. A step that does not fit the capacity left is
tried in smaller sizes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from penstock.scaling.scaler.estimators import Needs, task_resources, vertical_limit
from penstock.scaling.scaler.observation import (
    KINDS,
    TINY,
    DecisionSettings,
    JobShape,
    Remaining,
    ScalerJobFacts,
    align,
    next_below,
    parallel,
    share_of_busiest,
    tasks_for,
    threads_for,
)


def task_range(job: ScalerJobFacts) -> tuple[int, int]:
    """The fewest and the most tasks the job may have; never more than partitions."""
    most = job.limits.task_count_max
    if job.partitions > 0:
        most = min(most, job.partitions)
    return min(max(1, job.limits.task_count_min), most), most


def threads_limit(job: ScalerJobFacts, settings: DecisionSettings) -> int:
    """The most threads a task may have: as many as a fifth of a container has cores for."""
    now = job.shape.task
    cores = (
        vertical_limit(job.limits.container, settings).cpu / (now.cpu / now.threads) if now.cpu > 0 else inf
    )
    return max(now.threads, int(min(job.limits.threads_max, cores + TINY)))


def grown(job: ScalerJobFacts, settings: DecisionSettings, wanted: float) -> tuple[int, int, tuple[str, ...]]:
    """Tasks and threads that give `wanted` effective threads, and the bounds that made them fewer."""
    n, k, partitions = job.shape.task_count, job.shape.task.threads, job.partitions
    most_threads = threads_limit(job, settings)
    _, most_tasks = task_range(job)
    threads = threads_for(wanted, task_count=n, partitions=partitions)
    if threads is not None and threads <= most_threads:
        return n, max(k, threads), ()
    tasks = tasks_for(wanted, threads=most_threads, partitions=partitions) if wanted < inf else None
    bounds: tuple[str, ...] = ("vertical limit",) if job.limits.threads_max > most_threads else ()
    if tasks is None or tasks > most_tasks:
        bounds += (bound_of_tasks(job),)
        tasks = max(n, align(most_tasks, partitions))
    threads = threads_for(wanted, task_count=tasks, partitions=partitions) if wanted < inf else None
    return tasks, max(k, min(most_threads, threads or most_threads)), bounds


def bound_of_tasks(job: ScalerJobFacts) -> str:
    """What limits the number of tasks."""
    limits = job.limits
    if 0 < job.partitions <= limits.task_count_max:
        return f"{job.partitions} partitions"
    return f"{limits.set_by + ' ' if limits.set_by else ''}limit of {limits.task_count_max} tasks"


def tasks_for_memory(
    needs: Needs, job: ScalerJobFacts, settings: DecisionSettings, at_least: int
) -> int | None:
    """The fewest tasks, at least `at_least`, whose share of the state fits a task; None if no number does."""
    limit = max(vertical_limit(job.limits.container, settings).memory_mb, job.shape.task.memory_mb)
    room = limit / settings.headroom - needs.memory_fixed_mb
    share = share_of_busiest(at_least, job.partitions)
    if not needs.memory_split_mb * share > room:  # NaN (not known) compares false
        return at_least
    if room <= 0:
        return None
    tasks = tasks_for(needs.memory_split_mb / room, threads=1, partitions=job.partitions)
    return None if tasks is None or tasks > task_range(job)[1] else max(tasks, at_least)


def fits(job: ScalerJobFacts, shape: JobShape, remaining: Remaining) -> str:
    """The resource that is too scarce for a shape; "" if it fits."""
    for kind in KINDS:
        more = shape.total(kind) - job.shape.total(kind)
        if more > 0 and not more <= getattr(remaining.room, kind) + TINY:  # NaN counts as none left
            return kind
    return ""


def with_memory_floor(
    shape: JobShape, job: ScalerJobFacts, settings: DecisionSettings, floor_mb: float
) -> JobShape:
    """The shape with at least this memory per task, up to the vertical limit."""
    limit = max(vertical_limit(job.limits.container, settings).memory_mb, job.shape.task.memory_mb)
    memory = max(shape.task.memory_mb, min(floor_mb, limit))
    return (
        shape
        if memory == shape.task.memory_mb
        else replace(shape, task=replace(shape.task, memory_mb=memory))
    )


def fitting_step(
    job: ScalerJobFacts,
    settings: DecisionSettings,
    needs: Needs,
    remaining: Remaining,
    *,
    tasks: int,
    threads: int,
    memory_floor_mb: float = 0.0,
) -> tuple[JobShape | None, str]:
    """The largest step towards these tasks and threads that fits what is left, and the scarce resource."""
    now = parallel(job.shape.task_count, job.shape.task.threads, job.partitions)
    short = ""
    best: JobShape | None = None
    best_slots = now
    for n, k in _steps(job, tasks, threads):
        slots = parallel(n, k, job.partitions)
        if slots <= best_slots:
            continue
        given = task_resources(needs, job, settings, task_count=n, threads=k, may_shrink=False)
        shape = with_memory_floor(JobShape(task_count=n, task=given), job, settings, memory_floor_mb)
        missing = fits(job, shape, remaining)
        if not missing:
            best, best_slots = shape, slots
            if not short:
                break  # the wanted step fits
        elif not short:
            short = missing
    return best, short


def _steps(job: ScalerJobFacts, tasks: int, threads: int) -> Iterator[tuple[int, int]]:
    """The wanted step first, then smaller: fewer tasks of that size, of the current size, fewer threads."""
    now = job.shape
    for k in dict.fromkeys((threads, now.task.threads)):
        n = tasks
        while n > now.task_count:
            yield n, k
            n = next_below(n, job.partitions)
    for k in range(threads, now.task.threads, -1):
        yield now.task_count, k
