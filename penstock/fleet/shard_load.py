"""The load of each shard: ten-minute averages of its tasks' usage, or their reservations (Turbine IV-B).
Pure.

A task in its own process counts with its reservation, because its memory limit is enforced. Any other task
counts with its measured usage, and with its reservation until there is a minute of measurements.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from penstock.core.clock import Millis
from penstock.fleet.messages import ShardLoad
from penstock.jobs.config import JobConfig, Resources

KINDS = ("cpu", "memory_mb", "disk_mb", "network_mbps")
Vector = tuple[float, ...]
MINUTE_MS: Millis = 60_000


def reserved_load(resources: Mapping[str, Any]) -> Vector:
    """What `resources` of a stored config reserves for each of its tasks."""
    return tuple(float(resources.get(kind, default)) for kind, default in _DEFAULTS)


def reserved_of(config: JobConfig) -> Vector:
    """The same for a parsed config."""
    return tuple(float(getattr(config.resources, kind)) for kind in KINDS)


def is_enforced(config: JobConfig) -> bool:
    """Whether a task cannot use more than it reserved."""
    return "process" in (config.kind, config.isolation)


_DEFAULTS = tuple((kind, getattr(Resources(), kind)) for kind in KINDS)


def measured_load(reserved: Vector, threads: float, metrics: Mapping[str, float]) -> Vector:
    """What a task uses now: measured, else estimated from its busy time, else reserved."""
    busy_cpu = metrics["busy"] * threads if "busy" in metrics else reserved[0]
    return (
        float(metrics.get("cpu", busy_cpu)),
        *(float(metrics.get(kind, amount)) for kind, amount in zip(KINDS[1:], reserved[1:], strict=True)),
    )


def add(one: Vector, other: Vector) -> Vector:
    """The sum of two loads."""
    return tuple(a + b for a, b in zip(one, other, strict=True))


@dataclass(slots=True)
class _Average:
    """The mean of the last minutes, a bucket per minute."""

    minutes: int
    _buckets: deque[tuple[int, int, Vector]] = field(default_factory=deque)  # minute, samples, sum

    def put(self, now_ms: Millis, load: Vector) -> None:
        minute = now_ms // MINUTE_MS
        if self._buckets and self._buckets[-1][0] == minute:
            _, count, total = self._buckets.pop()
            self._buckets.append((minute, count + 1, add(total, load)))
        else:
            self._buckets.append((minute, 1, load))
        while self._buckets[0][0] <= minute - self.minutes:
            self._buckets.popleft()

    def read(self) -> Vector:
        samples = sum(count for _, count, _ in self._buckets)
        sums = zip(*(total for _, _, total in self._buckets), strict=True)
        return tuple(sum(column) / samples for column in sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLoadSettings:
    """How often the usage of tasks is sampled and reported."""

    sample_ms: Millis = 10_000
    report_ms: Millis = 600_000
    minutes: int = 10
    trusted_after_ms: Millis = MINUTE_MS


@dataclass(slots=True)
class _MeasuredTask:
    average: _Average
    since_ms: Millis
    config: JobConfig
    shard: int


class ShardLoadTracker:
    """Measures the loads of one container's shards, for its Task Manager."""

    def __init__(self, settings: ShardLoadSettings | None = None) -> None:
        self._settings = settings or ShardLoadSettings()
        self._tasks: dict[tuple[str, int], _MeasuredTask] = {}  # a task under one generation
        self._sampled_ms: Millis | None = None
        self._reported_ms: Millis | None = None
        self._report: tuple[ShardLoad, ...] = ()

    @property
    def report(self) -> tuple[ShardLoad, ...]:
        """The last report: every heartbeat repeats it."""
        return self._report

    def observe(
        self,
        now_ms: Millis,
        tasks: Iterable[tuple[str, int, int, JobConfig, Mapping[str, float]]],
    ) -> None:
        """Sample (task, generation, shard, config, metrics) of every running task, if a sample is due."""
        if self._sampled_ms is not None and now_ms - self._sampled_ms < self._settings.sample_ms:
            return
        self._sampled_ms = now_ms
        alive = set()
        for task, generation, shard, config, metrics in tasks:
            key = (task, generation)
            alive.add(key)
            seen = self._tasks.get(key)
            if seen is None:
                seen = self._tasks[key] = _MeasuredTask(
                    _Average(self._settings.minutes), now_ms, config, shard
                )
            seen.config = config
            seen.average.put(now_ms, measured_load(reserved_of(config), float(config.threads), metrics))
        self._tasks = {key: seen for key, seen in self._tasks.items() if key in alive}
        if self._reported_ms is None or now_ms - self._reported_ms >= self._settings.report_ms:
            self._reported_ms = now_ms
            self._report = self._sums(now_ms)

    def _sums(self, now_ms: Millis) -> tuple[ShardLoad, ...]:
        sums: dict[int, tuple[int, Vector]] = {}
        for seen in self._tasks.values():
            is_new = now_ms - seen.since_ms < self._settings.trusted_after_ms
            load = reserved_of(seen.config) if is_new or is_enforced(seen.config) else seen.average.read()
            count, total = sums.get(seen.shard, (0, (0.0,) * len(KINDS)))
            sums[seen.shard] = (count + 1, add(total, load))
        return tuple(
            ShardLoad(shard=shard, tasks=count, load=total) for shard, (count, total) in sorted(sums.items())
        )


def combine_loads(
    reserved: Mapping[int, tuple[int, Vector]], measured: Mapping[int, ShardLoad]
) -> dict[int, Vector]:
    """The load of each shard with tasks: measured, if its number of tasks is still the same, else
    reserved.
    """
    loads = {}
    for shard, (count, amount) in reserved.items():
        seen = measured.get(shard)
        loads[shard] = seen.load if seen is not None and seen.tasks == count else amount
    return loads


SHARD_COUNT = 64  # embedded; a change is a new generation for every job


def shard_of(task_id: str, shards: int) -> int:
    """The shard of a task, by MD5 as in the paper: the same in every process and language."""
    return int(hashlib.md5(task_id.encode(), usedforsecurity=False).hexdigest(), 16) % shards


def reserved_loads(jobs: Iterable[tuple[Sequence[int], Vector]]) -> dict[int, tuple[int, Vector]]:
    """How many tasks each shard has, and what they reserve; shards without tasks are absent.

    Each job is given as (the shards of its tasks, what one task reserves). Uses arrays: a fleet has 100,000
    tasks.
    """
    found = [(shards, load) for shards, load in jobs if shards]
    if not found:
        return {}
    shards = np.fromiter(chain.from_iterable(shards for shards, _ in found), dtype=np.int64)
    counts = np.bincount(shards)
    loads = np.repeat(np.array([load for _, load in found]), [len(shards) for shards, _ in found], axis=0)
    sums = np.stack([np.bincount(shards, column) for column in loads.T], axis=1)
    used = np.flatnonzero(counts)
    return {
        shard: (count, tuple(load))
        for shard, count, load in zip(used.tolist(), counts[used].tolist(), sums[used].tolist(), strict=True)
    }
