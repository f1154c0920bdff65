"""Keeping tasks of one job apart where possible: swaps that leave both containers as good as before. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.tasks.placement_problem import Indices, Why
from penstock.tasks.placement_repair import Floor

ROUNDS = 8
CHOICES = 16


def crowded(floor: Floor) -> Indices:
    """Shards that share a container with more of one of their jobs than an even spread would put there."""
    problem = floor.ground.problem
    if not problem.job_shards.size:
        return np.zeros(0, np.int32)
    owners = floor.owners[problem.job_shards]
    placed = owners >= 0
    shards, jobs, owners = problem.job_shards[placed], problem.job_ids[placed], owners[placed]
    takers = max(1, int(problem.receiving.sum()))
    fair = -(-np.bincount(jobs) // takers)
    order = np.lexsort((shards, owners, jobs))
    jobs, owners, shards = jobs[order], owners[order], shards[order]
    starts = np.flatnonzero((np.diff(jobs, prepend=-1) != 0) | (np.diff(owners, prepend=-1) != 0))
    rank = np.arange(jobs.size) - np.repeat(starts, np.diff(np.append(starts, jobs.size)))
    return np.unique(shards[rank >= fair[jobs]]).astype(np.int32)


def spread_jobs(floor: Floor) -> None:
    """Swap crowded shards with others of nearly their size elsewhere; stops when that helps no more."""
    for _ in range(ROUNDS):
        movable = crowded(floor)
        movable = movable[floor.movable[movable]]
        if not movable.size or not _swap_some(floor, movable):
            return


def _swap_some(floor: Floor, shards: Indices) -> bool:
    ground, problem = floor.ground, floor.ground.problem
    pool = np.flatnonzero(floor.movable & (floor.owners >= 0)).astype(np.int32)
    pool = pool[problem.receiving[floor.owners[pool]]]
    if not pool.size:
        return False
    partners = pool[floor.rng.integers(0, pool.size, (shards.size, CHOICES))]
    mine, theirs = floor.owners[shards][:, None], floor.owners[partners]
    flow = np.take(ground.loads, shards, axis=0)[:, None, :] - np.take(ground.loads, partners, axis=0)
    ok = (mine != theirs) & (np.take(problem.receiving, mine))
    ok &= (problem.allowed[shards][:, None] & ground.bits[theirs]) != 0
    ok &= (problem.allowed[partners] & np.take(ground.bits, mine)) != 0
    ok &= ~ground.is_forbidden(shards[:, None], theirs) & ~ground.is_forbidden(partners, mine)
    ok &= _stays_good(floor, np.broadcast_to(mine, theirs.shape), -flow) & _stays_good(floor, theirs, flow)
    ok &= ~_meets(floor, np.broadcast_to(shards[:, None], theirs.shape), theirs)
    ok &= ~_meets(floor, partners, np.broadcast_to(mine, theirs.shape))
    best = np.argmax(ok, axis=1)
    used: set[int] = set()
    swapped = False
    for row in np.flatnonzero(ok.any(axis=1)):
        shard, partner = int(shards[row]), int(partners[row, best[row]])
        one, other = int(floor.owners[shard]), int(floor.owners[partner])
        if used & {one, other}:
            continue  # sums have changed there: the next round looks again
        if not floor.budget.take([(shard, other), (partner, one)]):
            continue
        used |= {one, other}
        floor.used[one] -= flow[row, best[row]]
        floor.used[other] += flow[row, best[row]]
        for moved, to in ((shard, other), (partner, one)):
            floor.owners[moved] = to
            if floor.why[moved] == Why.STAYS:
                floor.why[moved] = Why.APART
        swapped = True
    return swapped


def _stays_good(floor: Floor, who: Indices, change: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Inside the goal and every limit afterwards."""
    ground = floor.ground
    after = np.take(floor.used, who, axis=0) + change
    shares = np.take(ground.shares, who, axis=0)
    inside = np.abs(after - shares) <= np.float32(ground.rules.goal) * shares + np.float32(1e-6)
    return np.asarray((inside & (after <= np.take(ground.limits, who, axis=0))).all(axis=-1))


def _meets(floor: Floor, shards: Indices, containers: Indices) -> NDArray[np.bool_]:
    """Whether a job of the shard has another shard there already."""
    problem = floor.ground.problem
    size = problem.container_count + 1
    there = np.unique(problem.job_ids.astype(np.int64) * size + floor.owners[problem.job_shards])
    order = np.argsort(problem.job_shards, kind="stable")
    sorted_shards, jobs = problem.job_shards[order], problem.job_ids[order]
    first = np.searchsorted(sorted_shards, shards)
    last = np.searchsorted(sorted_shards, shards, side="right")
    found = np.zeros(shards.shape, bool)
    for offset in range(int((last - first).max()) if shards.size else 0):
        at = first + offset
        has = at < last
        keys = jobs[np.minimum(at, jobs.size - 1)].astype(np.int64) * size + containers
        place = np.minimum(np.searchsorted(there, keys), there.size - 1)
        found |= has & (there[place] == keys)
    return found
