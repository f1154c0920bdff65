"""Which container each shard goes to (Turbine IV-B), as array code: equal problems, equal answers. Pure.

Starts from where the shards are. Emergency: homes for orphans, and nothing above a hard limit. Periodic: also
drains, regions, new containers and the band around the mean. What cannot wait comes first, and each step only
moves what the budgets still allow: a round that may not do all does the most useful part, and each round
leaves the fleet better than it was.
"""

from __future__ import annotations

import numpy as np

from penstock.tasks.placement_apart import spread_jobs
from penstock.tasks.placement_budget import Budget
from penstock.tasks.placement_fit import fill, make_room, place, place_some, withdraw
from penstock.tasks.placement_problem import NOBODY, Indices, Mode, Problem, Rules, Solution, Why
from penstock.tasks.placement_refusals import explain
from penstock.tasks.placement_repair import Floor, repair
from penstock.tasks.placement_shares import Ground, survey


def solve(problem: Problem, rules: Rules, mode: Mode) -> Solution:
    """Decide the moves of one round."""
    ground = survey(problem, rules)
    floor = start(ground)
    before = floor.used.copy()
    homeless = place(floor, _indices(problem.owners == NOBODY), Why.ORPHAN)
    needs_moves = make_room(floor, homeless, Why.ORPHAN) if homeless.size else homeless
    repair(floor, only_limits=True)
    if mode is Mode.PERIODIC:
        place_some(floor, _indices(misplaced(floor) & floor.movable), Why.REGION)
        place_some(floor, _indices(leaving(floor) & floor.movable), Why.DRAIN)
        fill(floor)
        repair(floor)
        spread_jobs(floor)
        repair(floor, only_limits=True)
    withdraw(floor, before)
    should_move = floor.owners == NOBODY
    if mode is Mode.PERIODIC:
        should_move |= (misplaced(floor) | leaving(floor)) & floor.movable
    refused, reasons = explain(floor, should_move, needs_moves)
    return Solution(
        owners=floor.owners,
        why=floor.why,
        moved=_indices(floor.owners != problem.owners),
        refused=refused,
        reasons=reasons,
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
        budget=Budget(problem, ground.rules),
    )


def misplaced(floor: Floor) -> np.ndarray:
    """(N,) shards in a region or a container that they may not use."""
    ground = floor.ground
    bits = np.append(ground.bits, np.uint64(0))[floor.owners]
    owned = floor.owners != NOBODY
    wrong = owned & ((ground.problem.allowed & bits) == 0)
    if ground.forbidden.size:
        wrong |= ground.is_forbidden(np.arange(owned.size), floor.owners) & owned
    return np.asarray(wrong)


def leaving(floor: Floor) -> np.ndarray:
    """(N,) shards in containers that are to be emptied."""
    return np.asarray(np.append(floor.ground.problem.leaving, False)[floor.owners])


def _indices(flags: np.ndarray) -> Indices:
    return np.flatnonzero(flags).astype(np.int32)
