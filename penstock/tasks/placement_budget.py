"""How many wanted moves happen now: budgets per round, container and job, the most needed first. Pure."""

from __future__ import annotations

from collections import Counter

import numpy as np

from penstock.tasks.placement_problem import NOBODY, Indices, Why
from penstock.tasks.placement_repair import Floor

# What cannot wait comes first; comfort comes last.
_ORDER = (Why.CAP, Why.REGION, Why.DRAIN, Why.FILL, Why.BAND, Why.APART)


def within_budget(floor: Floor) -> Indices:
    """Take back the moves beyond the budgets; returns those that ought to happen and have to wait."""
    rules, problem = floor.ground.rules, floor.ground.problem
    moved = np.flatnonzero((floor.owners != problem.owners) & (problem.owners != NOBODY)).astype(np.int32)
    if not moved.size or (
        rules.moves_max is None and rules.container_moves_max is None and rules.job_moves_max is None
    ):
        return moved[:0]
    kept = _Budget(floor)
    waiting: list[int] = []
    for unit in _units(floor, moved):
        if not kept.take(unit):
            _take_back(floor, unit)
            waiting += [shard for shard in unit if floor.why[shard] in (Why.REGION, Why.DRAIN, Why.CAP)]
            floor.why[list(unit)] = Why.STAYS
    return np.array(waiting, np.int32)


def _units(floor: Floor, moved: Indices) -> list[tuple[int, ...]]:
    """Moves that belong together (shards that two containers exchange), the most needed first."""
    groups: dict[tuple[object, ...], list[int]] = {}
    sources, targets = floor.ground.problem.owners[moved], floor.owners[moved]
    for shard, source, target in zip(moved.tolist(), sources.tolist(), targets.tolist(), strict=True):
        why = Why(int(floor.why[shard]))
        key: tuple[object, ...] = (why, shard)
        if why in (Why.BAND, Why.CAP, Why.APART):
            key = (why, min(source, target), max(source, target))
        groups.setdefault(key, []).append(shard)
    rank = {why: number for number, why in enumerate(_ORDER)}
    far = floor.deviations()

    def urgency(unit: list[int]) -> tuple[float, ...]:
        # Of equal need the one that touches the container furthest from its share as it would end without.
        worst = max(float(far[floor.ground.problem.owners[shard]]) for shard in unit)
        return rank[Why(int(floor.why[unit[0]]))], -worst, unit[0]

    return [tuple(unit) for unit in sorted(groups.values(), key=urgency)]


class _Budget:
    def __init__(self, floor: Floor) -> None:
        self._floor, self._rules = floor, floor.ground.rules
        self._total, self._containers, self._jobs = 0, Counter[int](), Counter[int]()
        self._jobs_of: dict[int, list[int]] = {}
        problem = floor.ground.problem
        if self._rules.job_moves_max is not None:
            for shard, job in zip(problem.job_shards.tolist(), problem.job_ids.tolist(), strict=True):
                self._jobs_of.setdefault(shard, []).append(job)

    def take(self, unit: tuple[int, ...]) -> bool:
        """Count these moves, all or none of them."""
        rules, homes = self._rules, self._floor.ground.problem.owners
        touched = Counter(int(end) for shard in unit for end in (homes[shard], self._floor.owners[shard]))
        jobs = Counter(job for shard in unit for job in self._jobs_of.get(shard, ()))
        if rules.moves_max is not None and self._total + len(unit) > rules.moves_max:
            return False
        if _exceeds(self._containers, touched, rules.container_moves_max):
            return False
        if _exceeds(self._jobs, jobs, rules.job_moves_max):
            return False
        self._total += len(unit)
        self._containers.update(touched)
        self._jobs.update(jobs)
        return True


def _exceeds(counted: Counter[int], more: Counter[int], limit: int | None) -> bool:
    return limit is not None and any(counted[key] + count > limit for key, count in more.items())


def _take_back(floor: Floor, unit: tuple[int, ...]) -> None:
    for shard in unit:
        load = floor.ground.loads[shard]
        floor.used[floor.owners[shard]] -= load
        floor.owners[shard] = floor.ground.problem.owners[shard]
        floor.used[floor.owners[shard]] += load
