"""Why shards that should move stay: a budget, room, regions, exclusions, or drained containers. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.tasks.placement_deal import row_max
from penstock.tasks.placement_problem import NOBODY, Flags, Indices, Stays
from penstock.tasks.placement_repair import ROUNDING, Floor, fewest_that_relieve


def explain(floor: Floor, should_move: Flags, needs_moves: Indices) -> tuple[Indices, NDArray[np.int8]]:
    """The shards that should move and do not, and why each stays.

    Those of `should_move`, and of each container that ends above a limit what would have to leave it.
    `needs_moves` find room when others have moved, for which there was no budget.
    """
    refused = np.flatnonzero(should_move | _too_many(floor)).astype(np.int32)
    reasons = np.zeros(refused.size, np.int8)
    reasons[np.isin(refused, needs_moves) | _fit_into_the_roomiest(floor, refused)] = Stays.BUDGET
    for place in np.flatnonzero(reasons == 0).tolist():
        reasons[place] = _why_one_stays(floor, int(refused[place]))
    return refused, reasons


def _fit_into_the_roomiest(floor: Floor, shards: Indices) -> Flags:
    """Which of these the roomiest container takes: found without a search, and mostly all that wait."""
    ground, found = floor.ground, np.zeros(shards.size, bool)
    room = ground.limits - floor.used
    for number in np.unique(ground.which[shards]).tolist():
        takers = np.flatnonzero(ground.may_use(ground.masks[number]))
        if takers.size:
            best = takers[np.argmin(row_max(-room[takers]))]
            mine = np.flatnonzero(ground.which[shards] == number)
            fits = (ground.loads[shards[mine]] <= room[best]).all(axis=1) & (
                floor.owners[shards[mine]] != best
            )
            found[mine] = fits & ~ground.is_forbidden(shards[mine], int(best))
    return found


def _too_many(floor: Floor) -> Flags:
    """(N,) the fewest shards whose departure would bring their containers below their limits."""
    ground, found = floor.ground, np.zeros(floor.owners.size, bool)
    coming = np.flatnonzero(ground.problem.from_ >= 0)
    used = floor.used.copy()
    # A shard that is on its way out has left soon.
    np.subtract.at(used, ground.problem.from_[coming], ground.loads[coming])
    above = used - ground.limits * np.float32(1.0001)
    for container in np.flatnonzero((row_max(above) > 0) & ground.problem.receiving).tolist():
        mine = np.flatnonzero((floor.owners == container) & floor.movable).astype(np.int32)
        found[fewest_that_relieve(floor, mine, above[container])] = True
    return found


def _why_one_stays(floor: Floor, shard: int) -> Stays:
    ground, home = floor.ground, int(floor.owners[shard])
    problem = ground.problem
    in_region = (problem.allowed[shard] & ground.bits) != 0
    if home != NOBODY:
        in_region[home] = False
    takers = np.flatnonzero(problem.receiving & in_region)
    if not takers.size:
        if (problem.leaving & in_region).any() or (problem.leaving.any() and not problem.receiving.any()):
            return Stays.DRAINED
        others = problem.receiving.copy()
        if home != NOBODY:
            others[home] = False
        return Stays.REGION if others.any() else Stays.NO_CONTAINER
    roomy = takers[fits(floor, shard, takers)]
    barred = ground.is_forbidden(shard, roomy if roomy.size else takers)
    if barred.all():
        return Stays.EXCLUDED
    return Stays.BUDGET if roomy.size else Stays.ROOM


def fits(floor: Floor, shard: int, containers: NDArray[np.intp]) -> Flags:
    """Which of these have room for a shard, as far as it needs anything."""
    ground, need = floor.ground, floor.ground.loads[shard]
    room = ground.limits[containers] - floor.used[containers]
    return np.asarray(((need <= room + ROUNDING) | (need <= 0)).all(axis=1))
