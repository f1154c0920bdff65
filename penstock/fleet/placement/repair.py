"""Brings containers back into the band with few moves: pairs of containers swap shards, or one passes a shard
on.

Each container outside the band is paired with the best of some sampled partners, or with many of them when
few containers are left. All moves and swaps of a pair are evaluated at once, by gain relative to cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.fleet.placement.problem import NO_OWNER, Budget, Flags, Floats, Indices, MoveReason
from penstock.fleet.placement.shares import PlacementModel, row_max

PARTNERS = 12
SAMPLED_MAX = 192  # sampled partners when only a few containers are left
FEW = 16
HELD_MIN, HELD_MAX = 24, 128  # shards per container considered in an exchange: more when there are few pairs
EVALUATED_MAX = 200_000  # matrix entries that a round with few pairs may evaluate
BLOCK = 400_000  # matrix entries evaluated at once, to fit into the CPU cache
WORTH_MIN = 0.5  # with a budget, exchanges below this share of the best one's worth wait
STALE_ROUNDS = 40
ROUNDS_MAX = 200
CAP_WEIGHT = np.float32(100)
ROUNDING = np.float32(1e-5)  # of sums of loads, in shares
_GAIN_MIN = np.float32(1e-6)
_NOTHING = np.float32(0.02)  # the cost of moving a shard that moves anyway


@dataclass(slots=True)
class PlacementState:
    """The current owner of every shard during the search."""

    model: PlacementModel
    owners: Indices
    used: Floats  # (K, D) scaled; moving shards count in both containers
    why: NDArray[np.int8]
    movable: Flags  # (N,)
    rng: np.random.Generator
    budget: Budget

    def deviations(self) -> Floats:
        """(K,) the largest relative distance from the share; 0 where there is no share."""
        shares = self.model.shares
        far = np.abs(self.used - shares)
        return row_max(np.divide(far, shares, out=np.zeros_like(far), where=shares > 0))

    def above_limit(self) -> Flags:
        """(K,) containers above their usable capacity."""
        return row_max(self.used - self.model.limits * np.float32(1.0001)) > 0

    def exempt(self) -> Flags:
        """(K,) containers with a shard larger than their share's band: only their limit counts."""
        model, found = self.model, np.zeros(self.used.shape[0], bool)
        shards = model.coarse[self.owners[model.coarse] != NO_OWNER]
        homes = self.owners[shards]
        bounds = model.shares[homes] * np.float32(1 + model.rules.band)
        found[homes[(model.loads[shards] > bounds).any(axis=1)]] = True
        return found

    def outside(self, margin: float) -> Flags:
        """(K,) accepting containers that are outside the band or above a limit."""
        receiving = self.model.problem.receiving
        return receiving & (((self.deviations() > margin) & ~self.exempt()) | self.above_limit())

    def worsened(self, before: Floats) -> Flags:
        """(K,) containers above a limit in some kind of load, by more than before."""
        most = np.maximum(self.model.limits * np.float32(1.0001), before + ROUNDING)
        return row_max(self.used - most) > 0


def shards_to_relieve(state: PlacementState, shards: Indices, over: Floats) -> list[int]:
    """A few of these shards whose total load is at least the excess `over` in each kind."""
    loads, found = state.model.loads, list[int]()
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


def repair(state: PlacementState, *, only_limits: bool = False) -> None:
    """Exchange shards until no container is outside the band, or there is no more progress."""
    rules = state.model.rules
    bad = state.above_limit() & state.model.problem.receiving if only_limits else state.outside(rules.band)
    best, stale = int(bad.sum()), 0
    for _ in range(ROUNDS_MAX):
        if not bad.any() or stale >= STALE_ROUNDS or state.budget.is_spent:
            return
        gained, is_exhaustive = _exchange(
            state, np.flatnonzero(bad).astype(np.int32), only_limits=only_limits
        )
        if only_limits:
            bad = state.above_limit() & state.model.problem.receiving
        else:
            bad = bad & state.outside(rules.goal) | state.outside(rules.band)
        # Gains that do not reduce the number of bad containers get only some rounds.
        count = int(bad.sum())
        # A round without gain is the last if it evaluated all partners and shards; else samples may differ.
        step = 1 if gained else STALE_ROUNDS if is_exhaustive else STALE_ROUNDS // 10
        stale = 0 if count < best else stale + step
        best = min(best, count)


def _exchange(state: PlacementState, bad: Indices, *, only_limits: bool) -> tuple[bool, bool]:
    """One round of exchanges: (whether a shard moved, whether all partners and shards were evaluated)."""
    one, other = _pairs(state, bad) if bad.size > FEW else _many_pairs(state, bad)
    if not one.size:
        return False, False
    held_max = int(np.clip(np.sqrt(EVALUATED_MAX / (one.size * state.used.shape[1])), HELD_MIN, HELD_MAX))
    table = _Held.of(state, np.unique(np.concatenate([one, other])), held_max)
    is_exhaustive = (
        table.is_complete and bad.size <= FEW and state.model.problem.receiving.sum() <= 2 * PARTNERS
    )
    step = max(1, BLOCK // ((table.width + 1) ** 2 * state.used.shape[1]))
    found = [
        _evaluate(state, table, one[start : start + step], other[start : start + step], only_limits)
        for start in range(0, one.size, step)
    ]
    worth, given, taken = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(-worth, kind="stable")
    order = order[worth[order] > 0]
    if bad.size <= FEW:
        order = _disjoint(one, other, order)
    if state.budget.is_limited:
        order = order[worth[order] >= WORTH_MIN * worth[order[:1]].sum()]
        order = _affordable(state, one, other, given, taken, order)
    _apply(
        state,
        one[order],
        other[order],
        given[order],
        taken[order],
        MoveReason.CAP if only_limits else MoveReason.BAND,
    )
    return bool(order.size), is_exhaustive


def _disjoint(one: Indices, other: Indices, order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Pairs in order of worth, without those that share a container with a better pair."""
    taken: set[int] = set()
    kept = []
    for pair in order.tolist():
        ends = {int(one[pair]), int(other[pair])}
        if not taken & ends:
            taken |= ends
            kept.append(pair)
    return np.array(kept, np.intp)


def _affordable(
    state: PlacementState,
    one: Indices,
    other: Indices,
    given: Indices,
    taken: Indices,
    order: NDArray[np.intp],
) -> NDArray[np.intp]:
    """The exchanges within the budgets, in order of worth."""
    kept = []
    for pair in order.tolist():
        if state.budget.is_spent:
            break
        steps = ((int(given[pair]), int(other[pair])), (int(taken[pair]), int(one[pair])))
        if state.budget.take([step for step in steps if step[0] >= 0]):
            kept.append(pair)
    return np.array(kept, np.intp)


def _apply(
    state: PlacementState, one: Indices, other: Indices, given: Indices, taken: Indices, why: MoveReason
) -> None:
    loads = state.model.loads
    zero = np.float32(0)
    flow = np.where((given >= 0)[:, None], loads[given], zero)
    flow -= np.where((taken >= 0)[:, None], loads[taken], zero)
    state.used[one] -= flow
    state.used[other] += flow
    _set_owners(state, given, other, why)
    _set_owners(state, taken, one, why)


def _pairs(state: PlacementState, bad: Indices) -> tuple[Indices, Indices]:
    """Pair each bad container with the partner that best cancels its deviation; no container is
    in two pairs.
    """
    bad, sampled, cost = _candidates(state, bad, PARTNERS)
    if not bad.size:
        return bad, bad
    other = sampled[np.arange(bad.size), np.argmin(cost, axis=1)]
    rank = np.arange(bad.size, dtype=np.int32)
    first = np.full(state.used.shape[0], bad.size, np.int32)
    np.minimum.at(first, bad, rank)
    np.minimum.at(first, other, rank)
    kept = (first[bad] == rank) & (first[other] == rank) & (other != bad)
    return bad[kept], other[kept]


def _many_pairs(state: PlacementState, bad: Indices) -> tuple[Indices, Indices]:
    """Pair each of the last few bad containers with many partners, preferably containers that are not bad."""
    bad, sampled, cost = _candidates(state, bad, SAMPLED_MAX)
    if not bad.size:
        return bad, bad
    # The best partners and some random ones: the best may not have a suitable shard.
    order = np.argsort(cost, axis=1, kind="stable")
    order = np.concatenate([order[:, :PARTNERS], np.sort(order[:, PARTNERS:])[:, :PARTNERS]], axis=1)
    sampled, cost = np.take_along_axis(sampled, order, 1), np.take_along_axis(cost, order, 1)
    one, other = np.repeat(bad, sampled.shape[1]), sampled.ravel()
    usable = np.isfinite(cost).ravel() & (one != other)
    if state.model.problem.receiving.sum() > 2 * FEW:
        usable &= ~np.isin(other, bad)
    pair = one.astype(np.int64) * state.used.shape[0] + other
    kept = np.sort(np.unique(pair[usable], return_index=True)[1])
    return one[usable][kept], other[usable][kept]


def _candidates(state: PlacementState, bad: Indices, count: int) -> tuple[Indices, Indices, Floats]:
    """The bad containers, worst first, with partners and the joint deviation of each pair."""
    model = state.model
    takers = np.flatnonzero(model.problem.receiving).astype(np.int32)
    off = state.used - model.shares
    bad = bad[np.argsort(-row_max(np.abs(off[bad])), kind="stable")]
    if takers.size < 2:
        return bad[:0], np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
    if takers.size <= count:
        sampled = np.tile(state.rng.permutation(takers), (bad.size, 1))
        return bad, sampled, _together(off, bad, sampled)
    sampled = takers[state.rng.integers(0, takers.size, (bad.size, count))]
    # Half of the samples come from the containers with the opposite deviation.
    line = takers[np.argsort(off[takers].sum(axis=1), kind="stable")]
    tail = max(1, min(line.size // 2, max(8, line.size // 8)))
    picks = state.rng.integers(0, tail, (bad.size, count // 2))
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
    """The movable shards of some containers as rows; the last column stands for "no shard"."""

    row: Indices  # (K,) a container's row
    shards: Indices  # (rows, width + 1), NO_OWNER where there is none
    width: int
    is_complete: bool  # no shard is left out

    @classmethod
    def of(cls, state: PlacementState, containers: Indices, held_max: int) -> _Held:
        row = np.full(state.used.shape[0], NO_OWNER, np.int32)
        row[containers] = np.arange(containers.size, dtype=np.int32)
        rows = np.where(state.owners >= 0, row[state.owners], NO_OWNER)
        here = np.flatnonzero((rows >= 0) & state.movable).astype(np.int32)
        # The sample of shards changes from round to round.
        here = here[np.lexsort((state.rng.random(here.size), rows[here]))]
        mine = rows[here]
        starts = np.searchsorted(mine, np.arange(containers.size))
        place = np.arange(here.size) - starts[mine]
        most = int(place.max() + 1) if here.size else 0
        width = min(held_max, most)
        shards = np.full((containers.size, width + 1), NO_OWNER, np.int32)
        fits = place < width
        shards[mine[fits], place[fits]] = here[fits]
        return cls(row, shards, width, is_complete=most <= width)


def _evaluate(
    state: PlacementState, table: _Held, one: Indices, other: Indices, only_limits: bool
) -> tuple[Floats, Indices, Indices]:
    """The best exchange of each pair: its worth (-1: none helps), the shard `one` gives and the
    one it takes.
    """
    model, problem = state.model, state.model.problem
    mine, theirs = table.shards[table.row[one]], table.shards[table.row[other]]
    give = np.where((mine >= 0)[:, :, None], np.take(model.loads, mine, axis=0), np.float32(0))
    take = np.where((theirs >= 0)[:, :, None], np.take(model.loads, theirs, axis=0), np.float32(0))
    flow = give[:, :, None, :] - take[:, None, :, :]  # (pairs, mine, theirs, D) from one to other
    before = _penalty(state, one, state.used[one][:, None, None, :], only_limits)[:, 0, 0]
    before += _penalty(state, other, state.used[other][:, None, None, :], only_limits)[:, 0, 0]
    gain = -_penalty(state, one, state.used[one][:, None, None, :] - flow, only_limits)
    gain -= _penalty(state, other, state.used[other][:, None, None, :] + flow, only_limits)
    gain += before[:, None, None]
    may_give = (mine < 0) | ((problem.allowed[mine] & model.bits[other][:, None]) != 0)
    may_take = (theirs < 0) | ((problem.allowed[theirs] & model.bits[one][:, None]) != 0)
    # Padding columns are not valid choices; only the last column means "no shard".
    may_give[:, :-1] &= mine[:, :-1] >= 0
    may_take[:, :-1] &= theirs[:, :-1] >= 0
    if model.forbidden.size:
        may_give &= (mine < 0) | ~model.is_forbidden(mine, other[:, None])
        may_take &= (theirs < 0) | ~model.is_forbidden(theirs, one[:, None])
    price = _prices(state, mine)[:, :, None] + _prices(state, theirs)[:, None, :]
    worth = gain / (price + _NOTHING)
    worth[~(may_give[:, :, None] & may_take[:, None, :]) | (gain < _GAIN_MIN)] = -1
    _forbid_above_limits(state, other, flow, give, worth)
    _forbid_above_limits(state, one, np.negative(flow, out=flow), take, worth)
    flat = worth.reshape(one.size, -1)
    best = np.argmax(flat, axis=1)
    row, column = np.divmod(best, theirs.shape[1])
    pairs = np.arange(one.size)
    return flat[pairs, best], mine[pairs, row], theirs[pairs, column]


def _forbid_above_limits(
    state: PlacementState, who: Indices, flow: Floats, most: Floats, worth: Floats
) -> None:
    """Forbid exchanges that put a container above a limit, or further above it, in any kind of load. `flow`
    is what the container gets in each exchange, `most` (pairs, shards, D) has its maximum.
    """
    room = np.maximum(state.model.limits[who] - state.used[who], 0) + ROUNDING
    is_near = _largest(most) > room
    # Per kind of load, only the few pairs that can exceed its limit.
    for kind in np.flatnonzero(is_near.any(axis=0)).tolist():
        near = np.flatnonzero(is_near[:, kind])
        breaks = flow[near, :, :, kind] > room[near, kind][:, None, None]
        worth[near] = np.where(breaks, np.float32(-1), worth[near])


def _largest(loads: Floats) -> Floats:
    """(pairs, D) the maximum of each kind of load."""
    result = loads[:, 0].copy()
    for place in range(1, loads.shape[1]):
        np.maximum(result, loads[:, place], out=result)
    return result


def _set_owners(state: PlacementState, shards: Indices, to: Indices, why: MoveReason) -> None:
    real = shards >= 0
    shards, to = shards[real], to[real]
    state.owners[shards] = to
    # A shard that moved before keeps its reason; one that is back with its owner has none.
    unset = state.why[shards] == MoveReason.STAYS
    state.why[shards[unset]] = why
    home = state.model.problem.owners[shards] == to
    state.why[shards[home]] = MoveReason.STAYS


def _prices(state: PlacementState, shards: Indices) -> Floats:
    """The cost of moving each shard; 0 for one that moves anyway."""
    homes = state.model.problem.owners[shards]
    moves_anyway = (homes != state.owners[shards]) | (homes == NO_OWNER)
    price = np.where(moves_anyway, np.float32(0), state.model.problem.costs[shards])
    return np.where(shards >= 0, price, np.float32(0)).astype(np.float32)


def _penalty(state: PlacementState, who: Indices, used: Floats, only_limits: bool) -> Floats:
    """The penalty of loads: squared distance beyond the goal, with a far higher weight beyond a limit."""
    model = state.model
    result = np.zeros(used.shape[:-1], np.float32)
    for dimension in range(used.shape[-1]):
        column = used[..., dimension]
        above = column - model.limits[who, dimension][:, None, None]
        np.maximum(above, 0, out=above)
        above *= above
        above *= CAP_WEIGHT
        result += above
        if not only_limits:
            share = model.shares[who, dimension][:, None, None]
            beyond = np.abs(column - share)
            beyond -= np.float32(model.rules.goal) * share
            np.maximum(beyond, 0, out=beyond)
            beyond *= beyond
            result += beyond
    return result
