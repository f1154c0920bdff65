"""Giving homes to shards that have none, and filling containers that are nearly empty. Arrays, no search."""

from __future__ import annotations

import numpy as np

from penstock.fleet.placement.problem import NO_OWNER, Budget, Floats, Indices, MoveReason, Rules
from penstock.fleet.placement.repair import ROUNDING, PlacementState, repair, shards_to_relieve
from penstock.fleet.placement.shares import distribute, largest_first, row_max

CHOICES = 48  # containers that one shard looks at
BATCH = 512
NEARLY_EMPTY = 0.7  # of its share
FILL_ROUNDS = 4


def place(floor: PlacementState, shards: Indices, why: MoveReason, *, one_by_one: bool = False) -> Indices:
    """Give each of these shards an owner that may have it; returns those that found none and stay.

    Many are dealt out at once, which may break limits, unless they are to go one by one.
    """
    ground = floor.ground
    owned = shards[floor.owners[shards] != NO_OWNER]
    np.subtract.at(floor.used, floor.owners[owned], np.take(ground.loads, owned, axis=0))
    floor.owners[shards] = NO_OWNER
    lost: list[Indices] = []
    # Fewest choices first: free shards can still go round what the pinned ones took.
    for number in sorted(range(len(ground.masks)), key=lambda n: (ground.masks[n].bit_count(), n)):
        mine = shards[ground.which[shards] == number]
        open_ = np.flatnonzero(ground.may_use(ground.masks[number])).astype(np.int32)
        is_deal = not one_by_one and open_.size > 2 and mine.size > open_.size // 2
        if mine.size and is_deal and not ground.forbidden.size:
            _deal_out(floor, mine, open_)
        elif mine.size:
            lost.append(_fit(floor, mine, open_))
    stuck = np.concatenate(lost) if lost else shards[:0]
    floor.why[shards] = why
    floor.owners[stuck], floor.why[stuck] = ground.problem.owners[stuck], MoveReason.STAYS
    owned = stuck[floor.owners[stuck] != NO_OWNER]
    np.add.at(floor.used, floor.owners[owned], np.take(ground.loads, owned, axis=0))
    return stuck


def place_some(floor: PlacementState, shards: Indices, why: MoveReason) -> None:
    """Give as many of these as the budget allows another owner; containers that are nearly empty go first,
    so that drains end one by one.
    """
    if not floor.budget.is_limited:
        place(floor, shards, why)
        return
    count = np.bincount(floor.owners[shards], minlength=floor.used.shape[0])
    waiting = shards[np.lexsort((shards, floor.owners[shards], count[floor.owners[shards]]))]
    size = floor.budget.left or 1
    while waiting.size and not floor.budget.is_spent:
        batch, waiting = waiting[:size], waiting[size:]
        place(floor, batch, why, one_by_one=True)
        _book(floor, batch)
        size *= 2  # those before it found no room, or had no budget of their own


def _book(floor: PlacementState, shards: Indices) -> None:
    """Count the moves of these shards; those that no budget allows go home again."""
    homes = floor.ground.problem.owners
    moved = shards[floor.owners[shards] != homes[shards]]
    if floor.budget.is_limited:
        over = [
            shard for shard in moved.tolist() if not floor.budget.take([(shard, int(floor.owners[shard]))])
        ]
        _go_home(floor, np.array(over, np.int32))


def _go_home(floor: PlacementState, shards: Indices) -> None:
    """Take moves back."""
    loads, homes = floor.ground.loads, floor.ground.problem.owners[shards]
    owned = floor.owners[shards] != NO_OWNER
    np.subtract.at(floor.used, floor.owners[shards][owned], loads[shards][owned])
    floor.owners[shards], floor.why[shards] = homes, MoveReason.STAYS
    owned = homes != NO_OWNER
    np.add.at(floor.used, homes[owned], loads[shards][owned])


def make_room(floor: PlacementState, shards: Indices, why: MoveReason) -> Indices:
    """Put shards that fit nowhere where they do the least harm, and move others until no limit is broken.

    Those for which that does not work stay without an owner. So do those for which more must move than the
    budget allows: what it allows moves now, the next rounds do the rest. Returns the latter.
    """
    ground = floor.ground
    budget, homes = floor.budget, ground.problem.owners
    floor.budget = Budget(ground.problem, Rules())
    for shard in largest_first(ground.loads, shards):
        open_ = np.flatnonzero(ground.may_use(ground.masks[ground.which[shard]])).astype(np.int32)
        open_ = open_[~ground.is_forbidden(np.full(open_.size, shard), open_)]
        if not open_.size:
            continue
        after = np.take(floor.used, open_, axis=0) + ground.loads[shard]
        target = open_[np.argmin(row_max(after - np.take(ground.limits, open_, axis=0)))]
        floor.owners[shard], floor.why[shard] = target, why
        floor.used[target] += ground.loads[shard]
    repair(floor, only_limits=True)
    floor.budget = budget
    broken = np.append(floor.above_limit(), False)
    undone = shards[(floor.owners[shards] >= 0) & broken[floor.owners[shards]]]
    _go_home(floor, undone)
    moved = np.flatnonzero((floor.owners != homes) & (homes != NO_OWNER)).astype(np.int32)
    if undone.size:
        moved = _without_useless(floor, moved)
    placed = shards[floor.owners[shards] != NO_OWNER]
    if floor.budget.take([(int(shard), int(floor.owners[shard])) for shard in moved]):
        return np.asarray(placed[:0])
    _go_home(floor, placed)
    _book(floor, moved)
    return np.asarray(placed)


def _without_useless(floor: PlacementState, moved: Indices) -> Indices:
    """Take back the moves that made room for nobody; returns the others."""
    limits, homes = floor.ground.limits, floor.ground.problem.owners
    for shard in moved.tolist():
        if (floor.used[homes[shard]] + floor.ground.loads[shard] <= limits[homes[shard]]).all():
            _go_home(floor, np.array([shard], np.int32))
    return np.asarray(moved[floor.owners[moved] != homes[moved]])


def withdraw(floor: PlacementState, before: Floats) -> None:
    """Take back what put containers above a limit, or further above it than `before`: of shards that were
    dealt out many at once, and that nobody could exchange since.
    """
    homes = floor.ground.problem.owners
    while (broken := np.flatnonzero(floor.worsened(before))).size:
        came = np.flatnonzero((floor.owners != homes) & np.isin(floor.owners, broken)).astype(np.int32)
        over = floor.used - np.maximum(floor.ground.limits, before)
        back = [
            shard
            for container in broken.tolist()
            for shard in shards_to_relieve(floor, came[floor.owners[came] == container], over[container])
        ]
        if not back:
            return
        returned = np.array(back, np.int32)
        wanted = floor.why[returned]
        _go_home(floor, returned)
        for why in (MoveReason.ORPHAN, MoveReason.REGION, MoveReason.DRAIN):
            place(floor, returned[wanted == why], why, one_by_one=True)


def _deal_out(floor: PlacementState, shards: Indices, open_: Indices) -> None:
    room = floor.ground.shares - floor.used
    distribute(floor.ground.loads, shards, room, open_, floor.owners)
    floor.used[open_] = floor.ground.shares[open_] - room[open_]


def _fit(floor: PlacementState, shards: Indices, open_: Indices) -> Indices:
    """Large ones first, each to the best of some containers; returns those that fit into none."""
    loads, lost = floor.ground.loads, []
    waiting = largest_first(loads, shards)
    while waiting.size:
        batch, rest = waiting[:BATCH], waiting[BATCH:]
        target, fits = _best(floor, batch, open_)
        # One shard per container and pass: the next pass sees what this one took.
        first = np.flatnonzero(fits)
        first = first[np.unique(target[first], return_index=True)[1]]
        floor.used[target[first]] += np.take(loads, batch[first], axis=0)
        floor.owners[batch[first]] = target[first]
        again = fits.copy()
        again[first] = False
        lost += [shard for shard in batch[~fits] if not _fit_one(floor, shard, open_)]
        waiting = np.concatenate([batch[again], rest])
    return np.array(lost, np.int32)


def _best(floor: PlacementState, batch: Indices, open_: Indices) -> tuple[Indices, np.ndarray]:
    """For each shard the best of the containers it looks at, and whether it fits there at all."""
    if open_.size <= CHOICES:
        choices = np.broadcast_to(open_, (batch.size, open_.size))
    else:
        choices = open_[floor.rng.integers(0, open_.size, (batch.size, CHOICES))]
    if not open_.size:
        return batch, np.zeros(batch.size, bool)
    cost = _cost(floor, batch, choices)
    best = np.argmin(cost, axis=1)
    rows = np.arange(batch.size)
    return choices[rows, best], np.isfinite(cost[rows, best])


def _fit_one(floor: PlacementState, shard: int, open_: Indices) -> bool:
    """Look at every container: bad luck with a sample is not yet a lack of room."""
    if not open_.size:
        return False
    cost = _cost(floor, np.array([shard], np.int32), open_[None, :])[0]
    best = int(np.argmin(cost))
    if not np.isfinite(cost[best]):
        return False
    floor.used[open_[best]] += floor.ground.loads[shard]
    floor.owners[shard] = open_[best]
    return True


def _cost(floor: PlacementState, shards: Indices, choices: Indices) -> Floats:
    """(shards, choices) what it adds above the share, then how full it gets; infinite above a limit."""
    ground = floor.ground
    needs = np.take(ground.loads, shards, axis=0)[:, None, :]
    before = np.take(floor.used, choices, axis=0) - np.take(ground.shares, choices, axis=0)
    after = before + needs
    above, was = np.maximum(after, 0), np.maximum(before, 0)
    cost = (np.einsum("pqd,pqd->pq", above, above) - np.einsum("pqd,pqd->pq", was, was)) * np.float32(100)
    # Only what it brings counts: a shard without tasks does not care how busy a container is.
    cost += np.where(needs > 0, after, 0).sum(axis=2)
    room = np.take(ground.limits - ground.shares, choices, axis=0)
    cost[((after > room + ROUNDING) & (needs > 0)).any(axis=2)] = np.inf
    cost[ground.is_forbidden(shards[:, None], choices)] = np.inf
    return np.asarray(cost, np.float32)


def fill(floor: PlacementState) -> None:
    """Bring containers that are nearly empty up to their share, with the largest shards others can spare.

    The others are only kept inside the band: nothing moves between them.
    """
    ground, goal = floor.ground, np.float32(floor.ground.rules.goal)
    receiving = ground.problem.receiving
    level = _level(floor)
    empty = np.flatnonzero(receiving & (level < NEARLY_EMPTY) & (ground.shares.max(axis=1) > 0))
    if not empty.size or empty.size == int(receiving.sum()):
        return
    is_donor = receiving.copy()
    is_donor[empty] = False
    for _ in range(FILL_ROUNDS):
        hungry = empty[_level(floor)[empty] < 1 - goal / 2].astype(np.int32)
        if not hungry.size:
            return
        spare = _spare(floor, is_donor, hungry)
        if not spare.size or floor.budget.is_spent:
            return
        spare = spare[: floor.budget.left]
        _give(floor, spare, hungry)
        _book(floor, spare)


def _level(floor: PlacementState) -> Floats:
    """(K,) how full each container is, as the mean of its kinds of load."""
    shares = floor.ground.shares
    ratio = np.divide(floor.used, shares, out=np.ones_like(floor.used), where=shares > 0)
    return np.asarray(ratio.mean(axis=1), np.float32)


def _spare(floor: PlacementState, is_donor: np.ndarray, hungry: Indices) -> Indices:
    """The largest shard of each donor that it can give and stay inside, the fullest donors first."""
    ground = floor.ground
    mask = int(np.bitwise_or.reduce(ground.bits[hungry]))
    ok = floor.movable & (floor.owners >= 0) & ((ground.problem.allowed & np.uint64(mask)) != 0)
    ok &= ground.problem.owners == floor.owners
    if ground.forbidden.size:
        # Dealt out all at once, so whoever may not go to one of them goes to none.
        barred, where = np.divmod(ground.forbidden, ground.problem.container_count)
        ok[barred[np.isin(where, hungry)]] = False
    shards = np.flatnonzero(ok & is_donor[floor.owners]).astype(np.int32)
    owner = floor.owners[shards]
    left = np.take(floor.used, owner, axis=0) - np.take(ground.loads, shards, axis=0)
    floor_ = np.take(ground.shares, owner, axis=0) * np.float32(1 - ground.rules.goal)
    stays_inside = (left >= floor_).all(axis=1)
    shards, owner = shards[stays_inside], owner[stays_inside]
    if not shards.size:
        return shards
    # What brings its donor inside; of that the largest in the kinds of load that are still needed most, and
    # even among them: large in one kind alone would fill a container with that.
    need = np.maximum((ground.shares[hungry] - floor.used[hungry]).sum(axis=0), 1e-6)
    shape = need / need.mean()
    loads = np.take(ground.loads, shards, axis=0)
    size = -row_max(-loads / np.maximum(shape, 0.05)) + (loads @ shape) / (4 * shape.size)
    size /= ground.problem.costs[shards].clip(0.1)
    inside = np.take(ground.shares, owner, axis=0) * np.float32(1 + ground.rules.goal)
    over = np.maximum(left[stays_inside] - inside, 0).sum(axis=1)
    order = np.lexsort((shards, over * 100 - size, owner))
    shards, owner = shards[order], owner[order]
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    shards, owner = shards[first], owner[first]
    above = np.take(floor.used, owner, axis=0) - np.take(ground.shares, owner, axis=0)
    shards = shards[np.argsort(-row_max(above), kind="stable")]
    given = np.cumsum(np.take(ground.loads, shards, axis=0), axis=0)
    enough = int((row_max(given / need) < 1).sum())
    return shards[: max(1, min(enough, shards.size // 3))]


def _give(floor: PlacementState, shards: Indices, hungry: Indices) -> None:
    ground = floor.ground
    for number in sorted(range(len(ground.masks)), key=lambda n: (ground.masks[n].bit_count(), n)):
        mine = shards[ground.which[shards] == number]
        open_ = hungry[(ground.bits[hungry] & np.uint64(ground.masks[number])) != 0]
        if not mine.size or not open_.size:
            continue
        owner = floor.owners[mine]
        np.subtract.at(floor.used, owner, np.take(ground.loads, mine, axis=0))
        _deal_out(floor, mine, open_)
        floor.why[mine] = MoveReason.FILL
