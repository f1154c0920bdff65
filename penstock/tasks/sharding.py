"""Which shard a task belongs to (Turbine IV-A1). Pure: every container computes the same answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from penstock.tasks.shard_load import Vector, add, reserved_load
from penstock.tasks.specs import TaskSpec

SHARD_COUNT = 64  # embedded; a change is a new generation for every job


def shard_of(task_id: str, shards: int) -> int:
    """Spread by MD5: the paper's choice, the same in every process and language."""
    return int(hashlib.md5(task_id.encode(), usedforsecurity=False).hexdigest(), 16) % shards


def reserved_loads(specs: Iterable[TaskSpec], shards: int) -> dict[int, tuple[int, Vector]]:
    """How many tasks each shard has, and what they reserve; shards without tasks are absent."""
    loads: dict[int, tuple[int, Vector]] = {}
    for spec in specs:
        shard, load = shard_of(spec.task_id, shards), reserved_load(spec.config)
        count, total = loads.get(shard, (0, (0.0,) * len(load)))
        loads[shard] = (count + 1, add(total, load))
    return loads
