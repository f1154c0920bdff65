"""Bringing containers back into the band with few moves: two exchange a shard, or one passes one on.

Only containers that are outside are looked at. Each meets the best of some sampled partners, or many of them
when few are left; every move and every swap of a pair is weighed at once, by what it gains for what it costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.fleet.placement.problem import NO_OWNER, Budget, Flags, Floats, Indices, MoveReason
from penstock.fleet.placement.shares import PlacementModel, row_max

PARTNERS = 12
SAMPLED_MAX = 192  # when only a few containers are left: the best of these are tried
FEW = 16
HELD_MIN, HELD_MAX = 24, 128  # shards of a container that one exchange looks at: the more, the fewer pairs
WEIGHED = 200_000  # numbers that a round with few pairs may weigh
BLOCK = 400_000  # numbers weighed at once: they stay in the processor's cache
WORTH_MIN = 0.5  # of the best exchange's worth: where moves are counted, less has to wait until that is done
STALE_ROUNDS = 40
ROUNDS_MAX = 200
CAP_WEIGHT = np.float32(100)
ROUNDING = np.float32(1e-5)  # of sums of loads, in shares
_GAIN_MIN = np.float32(1e-6)
_NOTHING = np.float32(0.02)  # what moving a shard costs that moves anyway


@dataclass(slots=True)
class PlacementState:
    """Where every shard is while the decision is being made."""

    ground: PlacementModel
    owners: Indices
    used: Floats  # (K, D) scaled, with shards on their way on both sides
    why: NDArray[np.int8]
    movable: Flags  # (N,)
    rng: np.random.Generator
    budget: Budget

    def deviations(self) -> Floats:
        """(K,) the largest relative distance from a share; 0 where there is none."""
        shares = self.ground.shares
        far = np.abs(self.used - shares)
        return row_max(np.divide(far, shares, out=np.zeros_like(far), where=shares > 0))

    def above_limit(self) -> Flags:
        """(K,) more than the usable capacity."""
        return row_max(self.used - self.ground.limits * np.float32(1.0001)) > 0

    def exempt(self) -> Flags:
        """(K,) containers with a shard larger than their own share's band: only their limit counts."""
        ground, found = self.ground, np.zeros(self.used.shape[0], bool)
        shards = ground.coarse[self.owners[ground.coarse] != NO_OWNER]
        homes = self.owners[shards]
        bounds = ground.shares[homes] * np.float32(1 + ground.rules.band)
        found[homes[(ground.loads[shards] > bounds).any(axis=1)]] = True
        return found

    def outside(self, margin: float) -> Flags:
        """(K,) containers that take part and are outside the band, or above a limit."""
        receiving = self.ground.problem.receiving
        return receiving & (((self.deviations() > margin) & ~self.exempt()) | self.above_limit())

    def worsened(self, before: Floats) -> Flags:
        """(K,) above a limit in some kind of load, and by more than before."""
        most = np.maximum(self.ground.limits * np.float32(1.0001), before + ROUNDING)
        return row_max(self.used - most) > 0


def shards_to_relieve(floor: PlacementState, shards: Indices, over: Floats) -> list[int]:
    """Few of these shards which together have at least so much load as is too much (`over`, by kind)."""
    loads, found = floor.ground.loads, list[int]()
    over = over.copy()
    while shards.size and over.max() > 0:
        relief = loads[shards, int(np.argmax(over))]
        best = int(np.argmax(relief))
        if relief[best] <= 0:
            break
        found.append(int(shards[best]))
        over -= loads[shards[best]]
        shards = np.delete(shards, best)
    return found


def repair(floor: PlacementState, *, only_limits: bool = False) -> None:
    """Exchange shards until no container is outside, or nothing helps any more."""
    rules = floor.ground.rules
    bad = floor.above_limit() & floor.ground.problem.receiving if only_limits else floor.outside(rules.band)
    best, stale = int(bad.sum()), 0
    for _ in range(ROUNDS_MAX):
        if not bad.any() or stale >= STALE_ROUNDS or floor.budget.is_spent:
            return
        gained, saw_all = _exchange(floor, np.flatnonzero(bad).astype(np.int32), only_limits=only_limits)
        if only_limits:
            bad = floor.above_limit() & floor.ground.problem.receiving
        else:
            bad = bad & floor.outside(rules.goal) | floor.outside(rules.band)
        # Getting better without getting done is worth some rounds, not all.
        count = int(bad.sum())
        # A round without gain is the last if it saw every partner and shard; it may have met the wrong ones.
        step = 1 if gained else STALE_ROUNDS if saw_all else STALE_ROUNDS // 10
        stale = 0 if count < best else stale + step
        best = min(best, count)


def _exchange(floor: PlacementState, bad: Indices, *, only_limits: bool) -> tuple[bool, bool]:
    """One round of pairs: whether anything moved, and whether every partner and every shard was looked at."""
    one, other = _pairs(floor, bad) if bad.size > FEW else _many_pairs(floor, bad)
    if not one.size:
        return False, False
    held_max = int(np.clip(np.sqrt(WEIGHED / (one.size * floor.used.shape[1])), HELD_MIN, HELD_MAX))
    table = _Held.of(floor, np.unique(np.concatenate([one, other])), held_max)
    saw_all = table.is_whole and bad.size <= FEW and floor.ground.problem.receiving.sum() <= 2 * PARTNERS
    step = max(1, BLOCK // ((table.width + 1) ** 2 * floor.used.shape[1]))
    found = [
        _weigh(floor, table, one[start : start + step], other[start : start + step], only_limits)
        for start in range(0, one.size, step)
    ]
    worth, given, taken = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(-worth, kind="stable")
    order = order[worth[order] > 0]
    if bad.size <= FEW:
        order = _disjoint(one, other, order)
    if floor.budget.is_limited:
        order = order[worth[order] >= WORTH_MIN * worth[order[:1]].sum()]
        order = _affordable(floor, one, other, given, taken, order)
    _apply(
        floor,
        one[order],
        other[order],
        given[order],
        taken[order],
        MoveReason.CAP if only_limits else MoveReason.BAND,
    )
    return bool(order.size), saw_all


def _disjoint(one: Indices, other: Indices, order: NDArray[np.intp]) -> NDArray[np.intp]:
    """The best pairs first, and no container in two of them."""
    taken: set[int] = set()
    kept = []
    for pair in order.tolist():
        ends = {int(one[pair]), int(other[pair])}
        if not taken & ends:
            taken |= ends
            kept.append(pair)
    return np.array(kept, np.intp)


def _affordable(
    floor: PlacementState,
    one: Indices,
    other: Indices,
    given: Indices,
    taken: Indices,
    order: NDArray[np.intp],
) -> NDArray[np.intp]:
    """Those of these exchanges that the budgets allow; the most useful ones ask first."""
    kept = []
    for pair in order.tolist():
        if floor.budget.is_spent:
            break
        steps = ((int(given[pair]), int(other[pair])), (int(taken[pair]), int(one[pair])))
        if floor.budget.take([step for step in steps if step[0] >= 0]):
            kept.append(pair)
    return np.array(kept, np.intp)


def _apply(
    floor: PlacementState, one: Indices, other: Indices, given: Indices, taken: Indices, why: MoveReason
) -> None:
    loads = floor.ground.loads
    zero = np.float32(0)
    flow = np.where((given >= 0)[:, None], loads[given], zero)
    flow -= np.where((taken >= 0)[:, None], loads[taken], zero)
    floor.used[one] -= flow
    floor.used[other] += flow
    _hand_over(floor, given, other, why)
    _hand_over(floor, taken, one, why)


def _pairs(floor: PlacementState, bad: Indices) -> tuple[Indices, Indices]:
    """Each bad container with the partner that cancels its deviation best; nobody is in two pairs."""
    bad, sampled, cost = _candidates(floor, bad, PARTNERS)
    if not bad.size:
        return bad, bad
    other = sampled[np.arange(bad.size), np.argmin(cost, axis=1)]
    rank = np.arange(bad.size, dtype=np.int32)
    first = np.full(floor.used.shape[0], bad.size, np.int32)
    np.minimum.at(first, bad, rank)
    np.minimum.at(first, other, rank)
    kept = (first[bad] == rank) & (first[other] == rank) & (other != bad)
    return bad[kept], other[kept]


def _many_pairs(floor: PlacementState, bad: Indices) -> tuple[Indices, Indices]:
    """Each of the last few bad containers with many partners, none of which is bad itself unless all are."""
    bad, sampled, cost = _candidates(floor, bad, SAMPLED_MAX)
    if not bad.size:
        return bad, bad
    # The best, and some at random: what cancels best is not always what has the shard that is needed.
    order = np.argsort(cost, axis=1, kind="stable")
    order = np.concatenate([order[:, :PARTNERS], np.sort(order[:, PARTNERS:])[:, :PARTNERS]], axis=1)
    sampled, cost = np.take_along_axis(sampled, order, 1), np.take_along_axis(cost, order, 1)
    one, other = np.repeat(bad, sampled.shape[1]), sampled.ravel()
    usable = np.isfinite(cost).ravel() & (one != other)
    if floor.ground.problem.receiving.sum() > 2 * FEW:
        usable &= ~np.isin(other, bad)
    pair = one.astype(np.int64) * floor.used.shape[0] + other
    kept = np.sort(np.unique(pair[usable], return_index=True)[1])
    return one[usable][kept], other[usable][kept]


def _candidates(floor: PlacementState, bad: Indices, count: int) -> tuple[Indices, Indices, Floats]:
    """The bad ones, worst first; for each some partners, and how far both together are from their shares."""
    ground = floor.ground
    takers = np.flatnonzero(ground.problem.receiving).astype(np.int32)
    off = floor.used - ground.shares
    bad = bad[np.argsort(-row_max(np.abs(off[bad])), kind="stable")]
    if takers.size < 2:
        return bad[:0], np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
    if takers.size <= count:
        sampled = np.tile(floor.rng.permutation(takers), (bad.size, 1))
        return bad, sampled, _together(off, bad, sampled)
    sampled = takers[floor.rng.integers(0, takers.size, (bad.size, count))]
    # Half of them from the end of the line that has what this one lacks.
    line = takers[np.argsort(off[takers].sum(axis=1), kind="stable")]
    tail = max(1, min(line.size // 2, max(8, line.size // 8)))
    picks = floor.rng.integers(0, tail, (bad.size, count // 2))
    is_hot = off[bad].sum(axis=1) > 0
    sampled[:, : count // 2] = np.where(is_hot[:, None], line[picks], line[::-1][picks])
    return bad, sampled, _together(off, bad, sampled)


def _together(off: Floats, bad: Indices, sampled: Indices) -> Floats:
    together = off[bad][:, None, :] + off[sampled]
    cost = np.einsum("pqd,pqd->pq", together, together)
    cost[sampled == bad[:, None]] = np.inf
    return np.asarray(cost, np.float32)


@dataclass(slots=True)
class _Held:
    """The movable shards of some containers as rows, one more column for "none of them"."""

    row: Indices  # (K,) a container's row
    shards: Indices  # (rows, width + 1), NOBODY where there is none
    width: int
    is_whole: bool  # none is left out

    @classmethod
    def of(cls, floor: PlacementState, containers: Indices, held_max: int) -> _Held:
        row = np.full(floor.used.shape[0], NO_OWNER, np.int32)
        row[containers] = np.arange(containers.size, dtype=np.int32)
        rows = np.where(floor.owners >= 0, row[floor.owners], NO_OWNER)
        here = np.flatnonzero((rows >= 0) & floor.movable).astype(np.int32)
        # Which of many are looked at changes from round to round.
        here = here[np.lexsort((floor.rng.random(here.size), rows[here]))]
        mine = rows[here]
        starts = np.searchsorted(mine, np.arange(containers.size))
        place = np.arange(here.size) - starts[mine]
        most = int(place.max() + 1) if here.size else 0
        width = min(held_max, most)
        shards = np.full((containers.size, width + 1), NO_OWNER, np.int32)
        fits = place < width
        shards[mine[fits], place[fits]] = here[fits]
        return cls(row, shards, width, is_whole=most <= width)


def _weigh(
    floor: PlacementState, table: _Held, one: Indices, other: Indices, only_limits: bool
) -> tuple[Floats, Indices, Indices]:
    """The best exchange of each pair: its worth (-1: none helps), what `one` gives and what it takes."""
    ground, problem = floor.ground, floor.ground.problem
    mine, theirs = table.shards[table.row[one]], table.shards[table.row[other]]
    give = np.where((mine >= 0)[:, :, None], np.take(ground.loads, mine, axis=0), np.float32(0))
    take = np.where((theirs >= 0)[:, :, None], np.take(ground.loads, theirs, axis=0), np.float32(0))
    flow = give[:, :, None, :] - take[:, None, :, :]  # (pairs, mine, theirs, D) from one to other
    before = _badness(floor, one, floor.used[one][:, None, None, :], only_limits)[:, 0, 0]
    before += _badness(floor, other, floor.used[other][:, None, None, :], only_limits)[:, 0, 0]
    gain = -_badness(floor, one, floor.used[one][:, None, None, :] - flow, only_limits)
    gain -= _badness(floor, other, floor.used[other][:, None, None, :] + flow, only_limits)
    gain += before[:, None, None]
    may_give = (mine < 0) | ((problem.allowed[mine] & ground.bits[other][:, None]) != 0)
    may_take = (theirs < 0) | ((problem.allowed[theirs] & ground.bits[one][:, None]) != 0)
    # Columns that are only padding must not stand for "nothing" a second time.
    may_give[:, :-1] &= mine[:, :-1] >= 0
    may_take[:, :-1] &= theirs[:, :-1] >= 0
    if ground.forbidden.size:
        may_give &= (mine < 0) | ~ground.is_forbidden(mine, other[:, None])
        may_take &= (theirs < 0) | ~ground.is_forbidden(theirs, one[:, None])
    price = _prices(floor, mine)[:, :, None] + _prices(floor, theirs)[:, None, :]
    worth = gain / (price + _NOTHING)
    worth[~(may_give[:, :, None] & may_take[:, None, :]) | (gain < _GAIN_MIN)] = -1
    _spare_limits(floor, other, flow, give, worth)
    _spare_limits(floor, one, np.negative(flow, out=flow), take, worth)
    flat = worth.reshape(one.size, -1)
    best = np.argmax(flat, axis=1)
    row, column = np.divmod(best, theirs.shape[1])
    pairs = np.arange(one.size)
    return flat[pairs, best], mine[pairs, row], theirs[pairs, column]


def _spare_limits(floor: PlacementState, who: Indices, flow: Floats, most: Floats, worth: Floats) -> None:
    """Leave out what would put a container above a limit, or further above: less of another kind of load is
    no excuse. `flow` is what it gets by each exchange, `most` (pairs, shards, D) has the largest of that.
    """
    room = np.maximum(floor.ground.limits[who] - floor.used[who], 0) + ROUNDING
    is_near = _largest(most) > room
    # A kind of load at a time, and only pairs that can break its limit: few do.
    for kind in np.flatnonzero(is_near.any(axis=0)).tolist():
        near = np.flatnonzero(is_near[:, kind])
        breaks = flow[near, :, :, kind] > room[near, kind][:, None, None]
        worth[near] = np.where(breaks, np.float32(-1), worth[near])


def _largest(loads: Floats) -> Floats:
    """(pairs, D) the largest of each kind of load."""
    result = loads[:, 0].copy()
    for place in range(1, loads.shape[1]):
        np.maximum(result, loads[:, place], out=result)
    return result


def _hand_over(floor: PlacementState, shards: Indices, to: Indices, why: MoveReason) -> None:
    real = shards >= 0
    shards, to = shards[real], to[real]
    floor.owners[shards] = to
    # A shard that moves anyway keeps its reason; one that went home again has none.
    unset = floor.why[shards] == MoveReason.STAYS
    floor.why[shards[unset]] = why
    home = floor.ground.problem.owners[shards] == to
    floor.why[shards[home]] = MoveReason.STAYS


def _prices(floor: PlacementState, shards: Indices) -> Floats:
    """What moving costs: nothing more for a shard that moves anyway."""
    homes = floor.ground.problem.owners[shards]
    moves_anyway = (homes != floor.owners[shards]) | (homes == NO_OWNER)
    price = np.where(moves_anyway, np.float32(0), floor.ground.problem.costs[shards])
    return np.where(shards >= 0, price, np.float32(0)).astype(np.float32)


def _badness(floor: PlacementState, who: Indices, used: Floats, only_limits: bool) -> Floats:
    """How far outside: squares of what is beyond the goal, and far more for what is beyond a limit."""
    ground = floor.ground
    result = np.zeros(used.shape[:-1], np.float32)
    for dimension in range(used.shape[-1]):
        column = used[..., dimension]
        above = column - ground.limits[who, dimension][:, None, None]
        np.maximum(above, 0, out=above)
        above *= above
        above *= CAP_WEIGHT
        result += above
        if not only_limits:
            share = ground.shares[who, dimension][:, None, None]
            beyond = np.abs(column - share)
            beyond -= np.float32(ground.rules.goal) * share
            np.maximum(beyond, 0, out=beyond)
            beyond *= beyond
            result += beyond
    return result
