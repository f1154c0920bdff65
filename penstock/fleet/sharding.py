"""Which shard a task belongs to (Turbine IV-A1). Pure: every container computes the same answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from penstock.fleet.shard_load import Vector

SHARD_COUNT = 64  # embedded; a change is a new generation for every job


def shard_of(task_id: str, shards: int) -> int:
    """Spread by MD5: the paper's choice, the same in every process and language."""
    return int(hashlib.md5(task_id.encode(), usedforsecurity=False).hexdigest(), 16) % shards


def reserved_loads(jobs: Iterable[tuple[Sequence[int], Vector]]) -> dict[int, tuple[int, Vector]]:
    """How many tasks each shard has, and what they reserve; shards without tasks are absent.

    A job is the shards of its tasks and what each of them reserves. On arrays: a fleet has 100,000 tasks.
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
