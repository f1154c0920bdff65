"""Which shard a task belongs to (Turbine IV-A1). Pure: every container computes the same answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from penstock.tasks.specs import TaskSpec

SHARD_COUNT = 64  # embedded; a change is a new generation for every job


def shard_of(task_id: str, shards: int) -> int:
    """Spread by MD5: the paper's choice, the same in every process and language."""
    return int(hashlib.md5(task_id.encode(), usedforsecurity=False).hexdigest(), 16) % shards


def shard_loads(specs: Iterable[TaskSpec], shards: int) -> dict[int, float]:
    """The cpu that the tasks of each shard reserve; shards without tasks are absent."""
    loads: dict[int, float] = {}
    for spec in specs:
        shard = shard_of(spec.task_id, shards)
        loads[shard] = loads.get(shard, 0.0) + float(spec.config.get("resources", {}).get("cpu", 1.0))
    return loads
