"""The fixed input of a placement: permitted regions, each container's fair share, and shortages. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.fleet.placement.problem import NO_OWNER, Flags, Floats, Indices, Problem, Rules, Shortage

_ROUNDING = 1.0001  # sums of many small floats
_FEW = 32
Float64s = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementModel:
    """What stays constant during a placement. Loads are scaled: 1 is the mean share of a container."""

    problem: Problem
    rules: Rules
    masks: tuple[int, ...]  # the distinct sets of permitted regions
    which: NDArray[np.int32]  # (N,) the index of each shard's set in `masks`
    bits: NDArray[np.uint64]  # (K,) each container's region as a bit set
    loads: Floats  # (N, D)
    shares: Floats  # (K, D)
    limits: Floats  # (K, D) maximum loads
    hard: Floats  # (K, D) full capacities: only for moving shards
    scale: Floats  # (D,)
    shortages: tuple[Shortage, ...]
    coarse: Indices  # shards larger than the smallest share's band
    forbidden: NDArray[np.int64]  # sorted: shard * K + container, for jobs that are excluded somewhere

    def may_use(self, mask: int) -> Flags:
        """(K,) the containers that accept shards with this set of regions."""
        return np.asarray(self.problem.receiving & ((self.bits & np.uint64(mask)) != 0))

    def is_forbidden(self, shards: NDArray[Any] | int, containers: NDArray[Any] | int) -> Flags:
        """Whether a shard has a job that is excluded from a container; the arguments are broadcast."""
        keys = np.asarray(shards, np.int64) * self.problem.container_count + containers
        if not self.forbidden.size:
            return np.zeros(keys.shape, bool)
        at = np.minimum(np.searchsorted(self.forbidden, keys), self.forbidden.size - 1)
        return np.asarray(self.forbidden[at] == keys)


def build_model(problem: Problem, rules: Rules) -> PlacementModel:
    """Derive the constant values from the problem."""
    bits = np.uint64(1) << problem.regions.astype(np.uint64)
    here = int(np.bitwise_or.reduce(bits[problem.receiving])) if problem.receiving.any() else 0
    masks, which = _sets(problem.allowed & np.uint64(here))
    # Column by column, because operations over short rows are many times slower.
    columns = np.ascontiguousarray(problem.loads.T)
    sums = [np.bincount(which, weights=column, minlength=len(masks)) for column in columns]
    demand: Float64s = np.asarray(np.stack(sums, axis=1), np.float64)
    shares = _fair_shares(problem, masks, bits, demand)
    takers = shares[problem.receiving]
    scale = takers.mean(axis=0) if takers.size else np.zeros(shares.shape[1], np.float32)
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    loads = np.multiply(problem.loads, 1 / scale)
    scaled = shares / scale
    peaks = columns.max(axis=1) if problem.shard_count else np.zeros(scale.size, np.float32)
    takers = scaled[problem.receiving]
    smallest: Floats = takers.min(axis=0) if takers.size else np.ones(scale.size, np.float32)
    limits = problem.capacities * np.float32(1 - rules.headroom)
    return PlacementModel(
        problem=problem,
        rules=rules,
        masks=masks,
        which=which,
        bits=bits,
        loads=loads,
        shares=scaled,
        limits=limits / scale,
        hard=problem.capacities / scale,
        scale=scale,
        shortages=(
            *_sums_too_large(problem, masks, bits, demand, limits),
            *_shards_too_large(problem, masks, which, bits, limits, peaks),
        ),
        forbidden=_forbidden(problem),
        coarse=_indices(_any_above(loads, peaks / scale, smallest * np.float32(1 + rules.band))),
    )


def _indices(flags: Flags) -> Indices:
    return np.flatnonzero(flags).astype(np.int32)


def _sets(allowed: NDArray[np.uint64]) -> tuple[tuple[int, ...], NDArray[np.int32]]:
    """The distinct values, and the index of each element's value. Faster than sorting when there are few."""
    which = np.zeros(allowed.size, np.int32)
    found: list[int] = []
    left = np.arange(0)
    if allowed.size:
        found.append(int(allowed[0]))
        left = np.flatnonzero(allowed != allowed[0])
    while left.size and len(found) < _FEW:
        value = allowed[left[0]]
        same = allowed[left] == value
        which[left[same]] = len(found)
        found.append(int(value))
        left = left[~same]
    if left.size:
        values, inverse = np.unique(allowed[left], return_inverse=True)
        which[left] = inverse.astype(np.int32) + len(found)
        found += [int(value) for value in values]
    return tuple(found), which


def _forbidden(problem: Problem) -> NDArray[np.int64]:
    parts = [
        problem.job_shards[problem.job_ids == job].astype(np.int64) * problem.container_count + container
        for job, container in problem.excluded
    ]
    return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)


def _any_above(values: Floats, peaks: Floats, bounds: Floats) -> Flags:
    """Rows with a value above its bound. The column maxima (`peaks`) show quickly that there are none."""
    if not (peaks > bounds).any():
        return np.zeros(values.shape[0], bool)
    return np.asarray((values > bounds).any(axis=1))


def _fair_shares(
    problem: Problem, masks: tuple[int, ...], bits: NDArray[np.uint64], demand: Float64s
) -> Floats:
    """The load that each container should have so that all are equally used, as far as regions allow it.

    Sets with the fewest regions come first; the load of each set is divided evenly among its regions. A
    region whose own load is above the mean keeps it.
    """
    regions = np.unique(bits[problem.receiving])
    groups = [np.flatnonzero(problem.receiving & (bits == region)) for region in regions]
    capacity = np.array([problem.capacities[group].sum(axis=0, dtype=np.float64) for group in groups])
    shares = np.zeros_like(problem.capacities)
    if not groups:
        return shares
    filled = np.zeros_like(capacity)
    for number in sorted(range(len(masks)), key=lambda number: (masks[number].bit_count(), number)):
        open_ = np.flatnonzero((regions & np.uint64(masks[number])) != 0)
        for dimension in range(demand.shape[1]) if open_.size else ():
            filled[open_, dimension] += _fill_level(
                demand[number, dimension], filled[open_, dimension], capacity[open_, dimension]
            )
    level = np.divide(filled, capacity, out=np.zeros_like(filled), where=capacity > 0)
    for group, height in zip(groups, level, strict=True):
        shares[group] = problem.capacities[group] * height.astype(np.float32)
    return shares


def _fill_level(amount: float, present: Float64s, capacity: Float64s) -> Float64s:
    """Divide an amount among regions so that those that get some end at the same fill level."""
    height = np.divide(present, capacity, out=np.full_like(present, np.inf), where=capacity > 0)
    order = np.argsort(height, kind="stable")
    level = 0.0
    for count in range(1, order.size + 1):
        room = capacity[order[:count]].sum()
        if room <= 0:
            break
        level = (amount + present[order[:count]].sum()) / room
        if count == order.size or level <= height[order[count]]:
            break
    return np.where(capacity > 0, np.maximum(level * capacity - present, 0.0), 0.0)


def _sums_too_large(
    problem: Problem, masks: tuple[int, ...], bits: NDArray[np.uint64], demand: Float64s, limits: Floats
) -> list[Shortage]:
    # Checks every set and their union: sufficient for nested sets.
    whole = 0
    for mask in masks:
        whole |= mask
    found = []
    for union in dict.fromkeys([*masks, whole]):
        needed = demand[[number for number, mask in enumerate(masks) if mask & ~union == 0]].sum(axis=0)
        there = problem.receiving & ((bits & np.uint64(union)) != 0)
        available = limits[there].sum(axis=0, dtype=np.float64)
        for dimension in np.flatnonzero(needed > available * _ROUNDING):
            found.append(
                Shortage(
                    dimension=int(dimension),
                    regions=_regions(problem, there),
                    shard=NO_OWNER,
                    demand=float(needed[dimension]),
                    available=float(available[dimension]),
                )
            )
    return found


def _shards_too_large(
    problem: Problem,
    masks: tuple[int, ...],
    which: NDArray[np.int32],
    bits: NDArray[np.uint64],
    limits: Floats,
    peaks: Floats,
) -> list[Shortage]:
    found = []
    for number, mask in enumerate(masks):
        there = problem.receiving & ((bits & np.uint64(mask)) != 0)
        largest = limits[there].max(axis=0) if there.any() else np.zeros(limits.shape[1], np.float32)
        suspects = np.flatnonzero(_any_above(problem.loads, peaks, largest * np.float32(_ROUNDING)))
        for shard in suspects[which[suspects] == number]:
            dimension = int(np.argmax(problem.loads[shard] - largest))
            found.append(
                Shortage(
                    dimension=dimension,
                    regions=_regions(problem, there),
                    shard=int(shard),
                    demand=float(problem.loads[shard, dimension]),
                    available=float(largest[dimension]),
                )
            )
    return found


def _regions(problem: Problem, there: Flags) -> tuple[int, ...]:
    return tuple(int(region) for region in np.unique(problem.regions[there]))


SINGLES = 8  # per container: this many of the largest and smallest shards are distributed one by one
_ALIKE = 1e-9
BUNDLES = 12  # per container: many shards of medium size are distributed in bundles


def largest_first(loads: Floats, shards: Indices) -> Indices:
    """Sort shards by their largest load. A 16-bit key is precise enough and can be radix-sorted."""
    keys = row_max(np.take(loads, shards, axis=0)).view(np.uint32) >> np.uint32(16)
    return shards[np.argsort(np.uint16(0xFFFF) - keys.astype(np.uint16), kind="stable")]


def row_max(values: Floats) -> Floats:
    """The maximum of each row, computed by columns because rows are short."""
    result = values[:, 0].copy()
    for column in range(1, values.shape[1]):
        np.maximum(result, values[:, column], out=result)
    return result


def distribute(loads: Floats, shards: Indices, room: Floats, containers: Indices, owners: Indices) -> None:
    """Give every shard an owner among `containers`; reduces `room` (K, D) accordingly."""
    if not shards.size or not containers.size:
        return
    order = largest_first(loads, shards)
    free = np.ascontiguousarray(room[containers])
    first, middle, last = _ends(order, containers.size)
    owners[first] = containers[_distribute_rows(np.take(loads, first, axis=0), free)]
    if middle.size:
        size = -(-middle.size // (BUNDLES * containers.size))
        starts = np.arange(0, middle.size, size)
        bundles = np.add.reduceat(np.take(loads, middle, axis=0), starts, axis=0)
        # The bundles are nearly sorted by their largest load.
        owners[middle] = containers[np.repeat(_distribute_rows(bundles, free), size)[: middle.size]]
    owners[last] = containers[_distribute_rows(np.take(loads, last, axis=0), free)]
    room[containers] = free


def _ends(order: Indices, containers: int) -> tuple[Indices, Indices, Indices]:
    end = SINGLES * containers
    if order.size <= 2 * end + BUNDLES * containers:
        return order, order[:0], order[:0]
    return order[:end], order[end:-end], order[-end:]


def _distribute_rows(needs: Floats, free: Floats) -> NDArray[np.intp]:
    """The container for each row of needs, in this order; reduces `free` accordingly."""
    chosen = np.empty(needs.shape[0], np.intp)
    ones = np.ones(free.shape[1], np.float32)
    half = max(1, free.shape[0] // 2)
    for start in range(0, needs.shape[0], half):
        batch = needs[start : start + half]
        unneeded = free.shape[0] - batch.shape[0]
        room = free @ ones
        needy = np.argpartition(room, unneeded)[unneeded:] if unneeded else np.arange(room.size)
        theirs = np.take(free, needy, axis=0)
        axes = _axes(theirs, batch)
        order, given = _ranked(theirs @ axes), _ranked(batch @ axes)
        takers = needy[order]
        chosen[start + given] = takers
        free[takers] = np.take(theirs, order, axis=0) - np.take(batch, given, axis=0)
    return chosen


def _axes(room: Floats, needs: Floats) -> Floats:
    if room.shape[1] == 1 or room.shape[0] < 3:
        return np.eye(room.shape[1], min(2, room.shape[1]), dtype=np.float32)
    one, other = _covariance(room), _covariance(needs)
    _, vectors = np.linalg.eigh(one @ other + other @ one)
    return np.ascontiguousarray(vectors[:, -1:-3:-1], np.float32)


def _covariance(rows: Floats) -> NDArray[np.float64]:
    means = np.full(rows.shape[0], 1 / rows.shape[0], np.float32) @ rows
    spread = np.asarray(rows.T @ rows, np.float64) / rows.shape[0]
    return np.asarray(spread - np.outer(means, means))


def _ranked(points: Floats) -> NDArray[np.intp]:
    """The order of rows: in blocks by the first axis, inside a block by the second."""
    order = np.argsort(_in_steps(points[:, 0], 0xFFFF), kind="stable")
    if points.shape[1] == 1:
        return order
    blocks = min(60, max(1, int(np.sqrt(order.size))))
    block = (np.arange(order.size) * blocks // order.size).astype(np.uint16)
    inner = _in_steps(points[:, 1], 1023)
    return order[np.argsort(block * np.uint16(1024) + inner[order], kind="stable")]


def _in_steps(values: Floats, steps: int) -> NDArray[np.uint16]:
    """Values as small integers, which can be radix-sorted."""
    low, high = float(values.min()), float(values.max())
    if high - low < _ALIKE:
        return np.zeros(values.size, np.uint16)
    return np.asarray((values - np.float32(low)) * np.float32(steps / (high - low)), np.uint16)
