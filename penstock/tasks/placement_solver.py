"""Which container each shard goes to (Turbine IV-B), as array code: equal problems, equal answers. Pure.

Starts from where the shards are. Emergency: homes for orphans, and nothing above a hard limit. Periodic: also
drains, regions, new containers and the band around the mean, within budgets of moves.
"""

from __future__ import annotations

import numpy as np

from penstock.tasks.placement_apart import spread_jobs
from penstock.tasks.placement_budget import within_budget
from penstock.tasks.placement_fit import fill, make_room, place
from penstock.tasks.placement_problem import NOBODY, Indices, Mode, Problem, Rules, Solution, Why
from penstock.tasks.placement_repair import Floor, repair
from penstock.tasks.placement_shares import Ground, survey


def solve(problem: Problem, rules: Rules, mode: Mode) -> Solution:
    """Decide the moves of one round."""
    ground = survey(problem, rules)
    floor = start(ground)
    homeless = place(floor, _indices(problem.owners == NOBODY), Why.ORPHAN)
    stuck = [make_room(floor, homeless, Why.ORPHAN) if homeless.size else homeless]
    if mode is Mode.PERIODIC:
        stuck.append(place(floor, _indices(_misplaced(ground) & floor.movable), Why.REGION))
        leaving = np.append(problem.leaving, False)[floor.owners] & floor.movable
        stuck.append(place(floor, _indices(leaving), Why.DRAIN))
        fill(floor)
        repair(floor)
        spread_jobs(floor)
    repair(floor, only_limits=True)
    held_back = within_budget(floor)
    return Solution(
        owners=floor.owners,
        why=floor.why,
        moved=_indices(floor.owners != problem.owners),
        refused=np.unique(np.concatenate([*stuck, held_back])).astype(np.int32),
        shortages=ground.shortages,
        used=floor.used * ground.scale,
        targets=ground.shares * ground.scale,
        deviations=floor.deviations(),
        exempt=floor.exempt(),
    )


def start(ground: Ground) -> Floor:
    """Everything where it is now; a shard on its way counts on both sides."""
    problem = ground.problem
    used = np.empty_like(ground.shares)
    owners, also = problem.owners, np.flatnonzero(problem.from_ >= 0)
    for dimension in range(used.shape[1]):
        column = np.ascontiguousarray(ground.loads[:, dimension])
        # One place more, for shards that nobody owns.
        sums = np.bincount(owners + 1, weights=column, minlength=problem.container_count + 1)[1:]
        if also.size:
            sums += np.bincount(problem.from_[also], weights=column[also], minlength=problem.container_count)
        used[:, dimension] = sums
    return Floor(
        ground=ground,
        owners=owners.copy(),
        used=used,
        why=np.zeros(problem.shard_count, np.int8),
        movable=~problem.fixed,
        rng=np.random.default_rng(ground.rules.seed),
    )


def _misplaced(ground: Ground) -> np.ndarray:
    problem = ground.problem
    bits = np.append(ground.bits, np.uint64(0))[problem.owners]
    wrong = (problem.owners >= 0) & ((problem.allowed & bits) == 0)
    if ground.forbidden.size:
        wrong |= ground.is_forbidden(np.arange(problem.shard_count), problem.owners) & (problem.owners >= 0)
    return np.asarray(wrong)


def _indices(flags: np.ndarray) -> Indices:
    return np.flatnonzero(flags).astype(np.int32)
