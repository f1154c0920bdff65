"""Places shards without an owner, and fills containers that are nearly empty. Greedy array code,
no search.
"""

from __future__ import annotations

import numpy as np

from penstock.fleet.placement.problem import NO_OWNER, Budget, Floats, Indices, MoveReason, Rules
from penstock.fleet.placement.repair import ROUNDING, PlacementState, repair, shards_to_relieve
from penstock.fleet.placement.shares import distribute, largest_first, row_max

CHOICES = 48  # sampled containers per shard
BATCH = 512
NEARLY_EMPTY = 0.7  # of its share
FILL_ROUNDS = 4


def place(state: PlacementState, shards: Indices, why: MoveReason, *, one_by_one: bool = False) -> Indices:
    """Give each of these shards a permitted owner; returns those that found none and stay.

    Many shards are distributed at once, which may exceed limits, unless `one_by_one` is set.
    """
    model = state.model
    owned = shards[state.owners[shards] != NO_OWNER]
    np.subtract.at(state.used, state.owners[owned], np.take(model.loads, owned, axis=0))
    state.owners[shards] = NO_OWNER
    lost: list[Indices] = []
    # Shards with the fewest permitted regions first: the others can still use the remaining room.
    for number in sorted(range(len(model.masks)), key=lambda n: (model.masks[n].bit_count(), n)):
        mine = shards[model.which[shards] == number]
        open_ = np.flatnonzero(model.may_use(model.masks[number])).astype(np.int32)
        is_bulk = not one_by_one and open_.size > 2 and mine.size > open_.size // 2
        if mine.size and is_bulk and not model.forbidden.size:
            _distribute(state, mine, open_)
        elif mine.size:
            lost.append(_fit(state, mine, open_))
    stuck = np.concatenate(lost) if lost else shards[:0]
    state.why[shards] = why
    state.owners[stuck], state.why[stuck] = model.problem.owners[stuck], MoveReason.STAYS
    owned = stuck[state.owners[stuck] != NO_OWNER]
    np.add.at(state.used, state.owners[owned], np.take(model.loads, owned, axis=0))
    return stuck


def place_some(state: PlacementState, shards: Indices, why: MoveReason) -> None:
    """Give as many of these shards as the budget allows another owner. Containers with few shards come first,
    so that drains complete one after another.
    """
    if not state.budget.is_limited:
        place(state, shards, why)
        return
    count = np.bincount(state.owners[shards], minlength=state.used.shape[0])
    waiting = shards[np.lexsort((shards, state.owners[shards], count[state.owners[shards]]))]
    size = state.budget.left or 1
    while waiting.size and not state.budget.is_spent:
        batch, waiting = waiting[:size], waiting[size:]
        place(state, batch, why, one_by_one=True)
        _count_moves(state, batch)
        size *= 2  # earlier shards found no room, or exceeded another budget


def _count_moves(state: PlacementState, shards: Indices) -> None:
    """Count the moves of these shards, and undo those that exceed a budget."""
    homes = state.model.problem.owners
    moved = shards[state.owners[shards] != homes[shards]]
    if state.budget.is_limited:
        over = [
            shard for shard in moved.tolist() if not state.budget.take([(shard, int(state.owners[shard]))])
        ]
        _undo_moves(state, np.array(over, np.int32))


def _undo_moves(state: PlacementState, shards: Indices) -> None:
    """Return these shards to their owners."""
    loads, homes = state.model.loads, state.model.problem.owners[shards]
    owned = state.owners[shards] != NO_OWNER
    np.subtract.at(state.used, state.owners[shards][owned], loads[shards][owned])
    state.owners[shards], state.why[shards] = homes, MoveReason.STAYS
    owned = homes != NO_OWNER
    np.add.at(state.used, homes[owned], loads[shards][owned])


def make_room(state: PlacementState, shards: Indices, why: MoveReason) -> Indices:
    """Place shards that fit nowhere where they exceed limits least, then move others until no limit is
    exceeded.

    Shards for which this fails stay without an owner. So do shards that need more moves than the budget
    allows: some moves happen now, the next rounds do the rest. Returns the latter.
    """
    model = state.model
    budget, homes = state.budget, model.problem.owners
    state.budget = Budget(model.problem, Rules())
    for shard in largest_first(model.loads, shards):
        open_ = np.flatnonzero(model.may_use(model.masks[model.which[shard]])).astype(np.int32)
        open_ = open_[~model.is_forbidden(np.full(open_.size, shard), open_)]
        if not open_.size:
            continue
        after = np.take(state.used, open_, axis=0) + model.loads[shard]
        target = open_[np.argmin(row_max(after - np.take(model.limits, open_, axis=0)))]
        state.owners[shard], state.why[shard] = target, why
        state.used[target] += model.loads[shard]
    repair(state, only_limits=True)
    state.budget = budget
    broken = np.append(state.above_limit(), False)
    undone = shards[(state.owners[shards] >= 0) & broken[state.owners[shards]]]
    _undo_moves(state, undone)
    moved = np.flatnonzero((state.owners != homes) & (homes != NO_OWNER)).astype(np.int32)
    if undone.size:
        moved = _without_useless(state, moved)
    placed = shards[state.owners[shards] != NO_OWNER]
    if state.budget.take([(int(shard), int(state.owners[shard])) for shard in moved]):
        return np.asarray(placed[:0])
    _undo_moves(state, placed)
    _count_moves(state, moved)
    return np.asarray(placed)


def _without_useless(state: PlacementState, moved: Indices) -> Indices:
    """Undo the moves that turned out to be unnecessary; returns the others."""
    limits, homes = state.model.limits, state.model.problem.owners
    for shard in moved.tolist():
        if (state.used[homes[shard]] + state.model.loads[shard] <= limits[homes[shard]]).all():
            _undo_moves(state, np.array([shard], np.int32))
    return np.asarray(moved[state.owners[moved] != homes[moved]])


def withdraw(state: PlacementState, before: Floats) -> None:
    """Undo moves that left containers above a limit, by more than `before`: a distribution in bulk can do
    that, and exchanges cannot always repair it.
    """
    homes = state.model.problem.owners
    while (broken := np.flatnonzero(state.worsened(before))).size:
        came = np.flatnonzero((state.owners != homes) & np.isin(state.owners, broken)).astype(np.int32)
        over = state.used - np.maximum(state.model.limits, before)
        to_undo = [
            shard
            for container in broken.tolist()
            for shard in shards_to_relieve(state, came[state.owners[came] == container], over[container])
        ]
        if not to_undo:
            return
        returned = np.array(to_undo, np.int32)
        wanted = state.why[returned]
        _undo_moves(state, returned)
        for why in (MoveReason.ORPHAN, MoveReason.REGION, MoveReason.DRAIN):
            place(state, returned[wanted == why], why, one_by_one=True)


def _distribute(state: PlacementState, shards: Indices, open_: Indices) -> None:
    room = state.model.shares - state.used
    distribute(state.model.loads, shards, room, open_, state.owners)
    state.used[open_] = state.model.shares[open_] - room[open_]


def _fit(state: PlacementState, shards: Indices, open_: Indices) -> Indices:
    """Place large shards first, each in the best of some sampled containers; returns those that
    fit nowhere.
    """
    loads, lost = state.model.loads, []
    waiting = largest_first(loads, shards)
    while waiting.size:
        batch, rest = waiting[:BATCH], waiting[BATCH:]
        target, fits = _best(state, batch, open_)
        # One shard per container and pass, because each placement changes the container's load.
        first = np.flatnonzero(fits)
        first = first[np.unique(target[first], return_index=True)[1]]
        state.used[target[first]] += np.take(loads, batch[first], axis=0)
        state.owners[batch[first]] = target[first]
        again = fits.copy()
        again[first] = False
        lost += [shard for shard in batch[~fits] if not _fit_one(state, shard, open_)]
        waiting = np.concatenate([batch[again], rest])
    return np.array(lost, np.int32)


def _best(state: PlacementState, batch: Indices, open_: Indices) -> tuple[Indices, np.ndarray]:
    """For each shard the best of its sampled containers, and whether it fits there."""
    if open_.size <= CHOICES:
        choices = np.broadcast_to(open_, (batch.size, open_.size))
    else:
        choices = open_[state.rng.integers(0, open_.size, (batch.size, CHOICES))]
    if not open_.size:
        return batch, np.zeros(batch.size, bool)
    cost = _cost(state, batch, choices)
    best = np.argmin(cost, axis=1)
    rows = np.arange(batch.size)
    return choices[rows, best], np.isfinite(cost[rows, best])


def _fit_one(state: PlacementState, shard: int, open_: Indices) -> bool:
    """Place a shard after trying all containers, not only a sample; returns whether it fits."""
    if not open_.size:
        return False
    cost = _cost(state, np.array([shard], np.int32), open_[None, :])[0]
    best = int(np.argmin(cost))
    if not np.isfinite(cost[best]):
        return False
    state.used[open_[best]] += state.model.loads[shard]
    state.owners[shard] = open_[best]
    return True


def _cost(state: PlacementState, shards: Indices, choices: Indices) -> Floats:
    """(shards, choices) the cost: load added above the share, then the fill level; infinite above a limit."""
    model = state.model
    needs = np.take(model.loads, shards, axis=0)[:, None, :]
    before = np.take(state.used, choices, axis=0) - np.take(model.shares, choices, axis=0)
    after = before + needs
    above, was = np.maximum(after, 0), np.maximum(before, 0)
    cost = (np.einsum("pqd,pqd->pq", above, above) - np.einsum("pqd,pqd->pq", was, was)) * np.float32(100)
    # Only kinds of load that the shard has: one without tasks can go to a busy container.
    cost += np.where(needs > 0, after, 0).sum(axis=2)
    room = np.take(model.limits - model.shares, choices, axis=0)
    cost[((after > room + ROUNDING) & (needs > 0)).any(axis=2)] = np.inf
    cost[model.is_forbidden(shards[:, None], choices)] = np.inf
    return np.asarray(cost, np.float32)


def fill(state: PlacementState) -> None:
    """Fill nearly empty containers up to their share, with the largest shards that others can spare.

    Nothing moves between the other containers; they stay inside the band.
    """
    model, goal = state.model, np.float32(state.model.rules.goal)
    receiving = model.problem.receiving
    level = _level(state)
    empty = np.flatnonzero(receiving & (level < NEARLY_EMPTY) & (model.shares.max(axis=1) > 0))
    if not empty.size or empty.size == int(receiving.sum()):
        return
    is_donor = receiving.copy()
    is_donor[empty] = False
    for _ in range(FILL_ROUNDS):
        receivers = empty[_level(state)[empty] < 1 - goal / 2].astype(np.int32)
        if not receivers.size:
            return
        spare = _spare(state, is_donor, receivers)
        if not spare.size or state.budget.is_spent:
            return
        spare = spare[: state.budget.left]
        _give(state, spare, receivers)
        _count_moves(state, spare)


def _level(state: PlacementState) -> Floats:
    """(K,) how full each container is, as the mean of its kinds of load."""
    shares = state.model.shares
    ratio = np.divide(state.used, shares, out=np.ones_like(state.used), where=shares > 0)
    return np.asarray(ratio.mean(axis=1), np.float32)


def _spare(state: PlacementState, is_donor: np.ndarray, receivers: Indices) -> Indices:
    """The largest shard that each donor can give while it stays inside the band, fullest donors first."""
    model = state.model
    mask = int(np.bitwise_or.reduce(model.bits[receivers]))
    ok = state.movable & (state.owners >= 0) & ((model.problem.allowed & np.uint64(mask)) != 0)
    ok &= model.problem.owners == state.owners
    if model.forbidden.size:
        # Shards are distributed in bulk, so one that may not use some receiver goes to none.
        barred, where = np.divmod(model.forbidden, model.problem.container_count)
        ok[barred[np.isin(where, receivers)]] = False
    shards = np.flatnonzero(ok & is_donor[state.owners]).astype(np.int32)
    owner = state.owners[shards]
    left = np.take(state.used, owner, axis=0) - np.take(model.loads, shards, axis=0)
    minimum = np.take(model.shares, owner, axis=0) * np.float32(1 - model.rules.goal)
    stays_inside = (left >= minimum).all(axis=1)
    shards, owner = shards[stays_inside], owner[stays_inside]
    if not shards.size:
        return shards
    # Prefer shards that bring their donor inside the band; of these the largest in the kinds of load that are
    # needed most, with balanced kinds: a shard large in one kind would fill a container with that kind only.
    need = np.maximum((model.shares[receivers] - state.used[receivers]).sum(axis=0), 1e-6)
    shape = need / need.mean()
    loads = np.take(model.loads, shards, axis=0)
    size = -row_max(-loads / np.maximum(shape, 0.05)) + (loads @ shape) / (4 * shape.size)
    size /= model.problem.costs[shards].clip(0.1)
    inside = np.take(model.shares, owner, axis=0) * np.float32(1 + model.rules.goal)
    over = np.maximum(left[stays_inside] - inside, 0).sum(axis=1)
    order = np.lexsort((shards, over * 100 - size, owner))
    shards, owner = shards[order], owner[order]
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    shards, owner = shards[first], owner[first]
    above = np.take(state.used, owner, axis=0) - np.take(model.shares, owner, axis=0)
    shards = shards[np.argsort(-row_max(above), kind="stable")]
    given = np.cumsum(np.take(model.loads, shards, axis=0), axis=0)
    enough = int((row_max(given / need) < 1).sum())
    return shards[: max(1, min(enough, shards.size // 3))]


def _give(state: PlacementState, shards: Indices, receivers: Indices) -> None:
    model = state.model
    for number in sorted(range(len(model.masks)), key=lambda n: (model.masks[n].bit_count(), n)):
        mine = shards[model.which[shards] == number]
        open_ = receivers[(model.bits[receivers] & np.uint64(model.masks[number])) != 0]
        if not mine.size or not open_.size:
            continue
        owner = state.owners[mine]
        np.subtract.at(state.used, owner, np.take(model.loads, mine, axis=0))
        _distribute(state, mine, open_)
        state.why[mine] = MoveReason.FILL
