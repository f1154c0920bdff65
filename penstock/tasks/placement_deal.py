"""Dealing many shards to many containers, an array at a time: the largest first, to whoever has most room.

Each round deals one shard to each of the needier half. Who gets which is decided by two axes: the directions
in which matching the shards' needs to the containers' room removes most of the differences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.tasks.placement_problem import Floats, Indices

SINGLES = 8  # per container: dealt one by one at both ends, the large ones first, the small ones last
_ALIKE = 1e-9
BUNDLES = 12  # per container: what lies between goes in bundles when there is much of it


def largest_first(loads: Floats, shards: Indices) -> Indices:
    """By the largest need. Sixteen bits of it are enough, and can be sorted without comparing."""
    keys = row_max(np.take(loads, shards, axis=0)).view(np.uint32) >> np.uint32(16)
    return shards[np.argsort(np.uint16(0xFFFF) - keys.astype(np.uint16), kind="stable")]


def row_max(values: Floats) -> Floats:
    """The largest of each row: column by column, since rows are short."""
    result = values[:, 0].copy()
    for column in range(1, values.shape[1]):
        np.maximum(result, values[:, column], out=result)
    return result


def deal(loads: Floats, shards: Indices, room: Floats, containers: Indices, owners: Indices) -> None:
    """Give every shard an owner among `containers`; `room` (K, D) shrinks by what they get."""
    if not shards.size or not containers.size:
        return
    order = largest_first(loads, shards)
    free = np.ascontiguousarray(room[containers])
    first, middle, last = _ends(order, containers.size)
    owners[first] = containers[_deal_rows(np.take(loads, first, axis=0), free)]
    if middle.size:
        size = -(-middle.size // (BUNDLES * containers.size))
        starts = np.arange(0, middle.size, size)
        bundles = np.add.reduceat(np.take(loads, middle, axis=0), starts, axis=0)
        # Sums of neighbours are no longer sorted by their largest need, but nearly so.
        owners[middle] = containers[np.repeat(_deal_rows(bundles, free), size)[: middle.size]]
    owners[last] = containers[_deal_rows(np.take(loads, last, axis=0), free)]
    room[containers] = free


def _ends(order: Indices, containers: int) -> tuple[Indices, Indices, Indices]:
    end = SINGLES * containers
    if order.size <= 2 * end + BUNDLES * containers:
        return order, order[:0], order[:0]
    return order[:end], order[end:-end], order[-end:]


def _deal_rows(needs: Floats, free: Floats) -> NDArray[np.intp]:
    """For each row of needs, in this order, who gets it; `free` shrinks."""
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
    """Rows by the first axis in blocks, inside a block by the second."""
    order = np.argsort(_in_steps(points[:, 0], 0xFFFF), kind="stable")
    if points.shape[1] == 1:
        return order
    blocks = min(60, max(1, int(np.sqrt(order.size))))
    block = (np.arange(order.size) * blocks // order.size).astype(np.uint16)
    inner = _in_steps(points[:, 1], 1023)
    return order[np.argsort(block * np.uint16(1024) + inner[order], kind="stable")]


def _in_steps(values: Floats, steps: int) -> NDArray[np.uint16]:
    """Values as numbers that can be sorted without comparing."""
    low, high = float(values.min()), float(values.max())
    if high - low < _ALIKE:
        return np.zeros(values.size, np.uint16)
    return np.asarray((values - np.float32(low)) * np.float32(steps / (high - low)), np.uint16)
