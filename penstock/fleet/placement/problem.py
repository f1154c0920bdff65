"""A placement problem and its solution as arrays, and the budget of moves. Pure data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Indices = NDArray[np.int32]
Flags = NDArray[np.bool_]

NO_OWNER = -1
EVERYWHERE = np.uint64(2**64 - 1)


class Mode(StrEnum):
    """`emergency`: place shards without an owner and repair broken limits. `periodic`: also drain and
    balance.
    """

    EMERGENCY = "emergency"
    PERIODIC = "periodic"


class MoveReason(IntEnum):
    """Why a shard moves."""

    STAYS = 0
    ORPHAN = 1  # it has no owner
    DRAIN = 2  # its container is draining
    REGION = 3  # it may not be on its container
    CAP = 4  # its container is above a hard limit
    BAND = 5  # its container, or the target, is outside the band
    FILL = 6  # it goes to a container that is nearly empty
    APART = 7  # its container has another task of one of its jobs


class StayReason(IntEnum):
    """Why a shard that should move does not."""

    BUDGET = 1  # it can move in a later round
    ROOM = 2  # no permitted container has room for it
    REGION = 3  # no other container in its regions accepts shards
    EXCLUDED = 4  # it is excluded from all containers that could take it
    DRAINED = 5  # the containers that could take it are draining too
    NO_CONTAINER = 6  # no other container accepts shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The parameters of a placement."""

    band: float = 0.10  # rebalance containers that deviate more than this from their share
    goal: float = 0.09  # until they deviate less than this (hysteresis)
    headroom: float = 0.10  # the part of every capacity that stays free, except for moving shards
    moves_max: int | None = None  # in one round; shards without an owner do not count
    container_moves_max: int | None = None  # into or out of one container in one round
    job_moves_max: int | None = None  # of one job's shards in one round
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """N shards with D kinds of load, K containers with D capacities."""

    loads: Floats  # (N, D)
    capacities: Floats  # (K, D)
    owners: Indices  # (N,) a container, or NO_OWNER
    regions: Indices  # (K,) below 64
    allowed: NDArray[np.uint64]  # (N,) a bit per region
    receiving: Flags  # (K,) may take shards
    leaving: Flags  # (K,) must lose them
    fixed: Flags  # (N,) not to be moved now: already moving
    from_: Indices  # (N,) the container that it is leaving, or NO_OWNER
    costs: Floats  # (N,) cost of a move; 1 is the normal cost
    job_shards: Indices = field(default_factory=lambda: np.zeros(0, np.int32))  # pairs: this shard has
    job_ids: Indices = field(default_factory=lambda: np.zeros(0, np.int32))  # a task of this job
    excluded: tuple[tuple[int, int], ...] = ()  # (job, container): no task of it there

    @property
    def shard_count(self) -> int:
        return int(self.loads.shape[0])

    @property
    def container_count(self) -> int:
        return int(self.capacities.shape[0])


def problem(
    loads: Floats,
    capacities: Floats,
    *,
    owners: Indices | None = None,
    regions: Indices | None = None,
    allowed: NDArray[np.uint64] | None = None,
    receiving: Flags | None = None,
    leaving: Flags | None = None,
    fixed: Flags | None = None,
    from_: Indices | None = None,
    costs: Floats | None = None,
    job_shards: Indices | None = None,
    job_ids: Indices | None = None,
    excluded: tuple[tuple[int, int], ...] = (),
) -> Problem:
    """Create a problem with defaults: no owners, one region, all containers accept shards."""
    shards, containers = loads.shape[0], capacities.shape[0]
    leaving = np.zeros(containers, bool) if leaving is None else leaving
    receiving = np.ones(containers, bool) if receiving is None else receiving
    none = np.zeros(0, np.int32)
    return Problem(
        loads=np.maximum(np.ascontiguousarray(loads, np.float32), 0),
        capacities=np.ascontiguousarray(capacities, np.float32),
        owners=np.full(shards, NO_OWNER, np.int32) if owners is None else owners.astype(np.int32),
        regions=np.zeros(containers, np.int32) if regions is None else regions.astype(np.int32),
        allowed=np.full(shards, EVERYWHERE, np.uint64) if allowed is None else allowed.astype(np.uint64),
        receiving=receiving & ~leaving,
        leaving=leaving,
        fixed=np.zeros(shards, bool) if fixed is None else fixed,
        from_=np.full(shards, NO_OWNER, np.int32) if from_ is None else from_.astype(np.int32),
        costs=np.ones(shards, np.float32) if costs is None else np.ascontiguousarray(costs, np.float32),
        job_shards=none if job_shards is None else job_shards.astype(np.int32),
        job_ids=none if job_ids is None else job_ids.astype(np.int32),
        excluded=excluded,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Demand that no placement can satisfy, found before the search: it becomes a capacity request."""

    dimension: int
    regions: tuple[int, ...]  # the permitted regions; empty: none
    shard: int  # the shard that is larger than any container, or NO_OWNER for a sum
    demand: float
    available: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The new owner of every shard, with the reasons of moves and refusals."""

    owners: Indices  # (N,) NO_OWNER: it could not be placed
    why: NDArray[np.int8]  # (N,) of Why
    moved: Indices  # shards whose owner changes, in the order of the moves
    refused: Indices  # shards that should move but cannot now
    reasons: NDArray[np.int8]  # of Stays, one for each of `refused`
    shortages: tuple[Shortage, ...]
    used: Floats  # (K, D) loads after the moves
    targets: Floats  # (K, D) each container's share, the centre of the band
    deviations: Floats  # (K,) the largest relative distance from the share after the moves
    exempt: Flags  # (K,) has a shard larger than its share: only its limit counts

    def in_band(self, band: float) -> float:
        """The fraction of containers inside the band; exempt ones and those without a share do not count."""
        counted = ~self.exempt & (self.targets.max(axis=1) > 0)
        return float((self.deviations[counted] <= band).mean()) if counted.any() else 1.0


BudgetStep = tuple[int, int]  # (shard, the container it goes to)


class Budget:
    """Limits the moves of a round. Placing a shard without an owner and undoing a move cost nothing."""

    def __init__(self, problem: Problem, rules: Rules) -> None:
        self._homes, self._rules = problem.owners, rules
        self._moved: dict[int, int] = {}
        self._containers, self._jobs = Counter[int](), Counter[int]()
        self._jobs_of: dict[int, list[int]] = {}
        limits = (rules.moves_max, rules.container_moves_max, rules.job_moves_max)
        self.is_limited = any(limit is not None for limit in limits)
        if rules.job_moves_max is not None:
            for shard, job in zip(problem.job_shards.tolist(), problem.job_ids.tolist(), strict=True):
                self._jobs_of.setdefault(shard, []).append(job)

    @property
    def left(self) -> int | None:
        """How many more moves this round may make; None: any number."""
        most = self._rules.moves_max
        return None if most is None else max(0, most - len(self._moved))

    @property
    def is_spent(self) -> bool:
        """Whether nothing more may move."""
        return self.left == 0

    def take(self, steps: Sequence[BudgetStep]) -> bool:
        """Spend the budget for all these steps, or for none if one exceeds it; returns whether it
        was spent.
        """
        if not self.is_limited:
            return True
        total, containers, jobs = 0, Counter[int](), Counter[int]()
        for shard, target in steps:
            home, before = int(self._homes[shard]), self._moved.get(shard)
            if home == NO_OWNER:
                continue
            for end, change in ((before, -1), (target if target != home else None, 1)):
                if end is not None:
                    total += change
                    containers[home] += change
                    containers[end] += change
                    jobs.update(dict.fromkeys(self._jobs_of.get(shard, ()), change))
        if total > 0 and self._rules.moves_max is not None and total > (self.left or 0):
            return False
        if _exceeds(self._containers, containers, self._rules.container_moves_max):
            return False
        if _exceeds(self._jobs, jobs, self._rules.job_moves_max):
            return False
        self._containers.update(containers)
        self._jobs.update(jobs)
        for shard, target in steps:
            home = int(self._homes[shard])
            if target == home:
                self._moved.pop(shard, None)
            elif home != NO_OWNER:
                self._moved[shard] = target
        return True


def _exceeds(counted: Counter[int], more: Counter[int], limit: int | None) -> bool:
    return limit is not None and any(
        change > 0 and counted[key] + change > limit for key, change in more.items()
    )
