"""Approximate answers that are functions of the values alone, not of their order or of merging.

Pure: a distinct count keeps the largest rank per register (HyperLogLog, estimated as by Ertl, 2017), a
quantile counts values per bucket of 2 % (a relative error of 1 %). Both are rows (bucket, number) per group,
merged by `max` and by `sum`.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.streams.step.watermark import Ints

_BITS = 12  # of a hash that choose the register: 4,096 of them, an error of 1.6 %
_RANKS = 64 - _BITS
_REGISTERS = 1 << _BITS
_GAMMA = 1.02
_ZERO_AT = 100_000  # buckets of positive values lie around it
_INFINITE, _NAN = 10**8, 10**9
_HALF = np.uint64(0x9E3779B97F4A7C15)


def hashes_of(column: pa.Array) -> npt.NDArray[np.uint64]:
    """64 bits of each value, the same on every machine. Requires: no nulls."""
    kind = column.type
    if pa.types.is_floating(kind):
        numbers = np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)
        numbers = np.where(np.isnan(numbers), np.nan, numbers + 0.0)  # one NaN, one zero
        return _mixed(numbers.view(np.uint64))
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        if pa.types.is_boolean(kind):
            column = column.cast(pa.int8())
        whole = np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.int64)
        return _mixed(whole.view(np.uint64))
    encoded = column.cast(pa.binary()).dictionary_encode()
    known = [
        int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little")
        for value in encoded.dictionary.to_pylist()
    ]
    found: npt.NDArray[np.uint64] = np.array(known, dtype=np.uint64)[
        encoded.indices.to_numpy(zero_copy_only=False)
    ]
    return found


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Splitmix64: every bit of the value moves every bit of the hash."""
    mixed = bits + _HALF
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def registers_of(hashes: npt.NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """The register of each hash, and the rank it would have there."""
    rest = hashes & np.uint64((1 << _RANKS) - 1)
    _, length = np.frexp(rest.astype(np.float64))  # below 2**53: exact
    return (hashes >> np.uint64(_RANKS)).astype(np.int64), (_RANKS - length + 1).astype(np.int64)


def distinct(groups: Ints, ranks: Ints, count: int) -> Ints:
    """How many different values each of `count` groups had. One row per group and register in use."""
    histogram = np.zeros((count, _RANKS + 2), dtype=np.int64)
    np.add.at(histogram, (groups, ranks), 1)
    histogram[:, 0] = _REGISTERS - histogram[:, 1:].sum(axis=1)
    found = np.zeros(count, dtype=np.int64)
    for group in range(count):
        counts = histogram[group].tolist()
        z = _REGISTERS * _tau(1 - counts[_RANKS + 1] / _REGISTERS)
        for rank in range(_RANKS, 0, -1):
            z = 0.5 * (z + counts[rank])
        z += _REGISTERS * _sigma(counts[0] / _REGISTERS)
        found[group] = 0 if math.isinf(z) else round(_REGISTERS**2 / (2 * math.log(2) * z))
    return found


def _sigma(x: float) -> float:
    if x == 1.0:
        return math.inf
    y, z, before = 1.0, x, -1.0
    while z != before:
        x, before = x * x, z
        z, y = z + x * y, y + y
    return z


def _tau(x: float) -> float:
    if x in (0.0, 1.0):
        return 0.0
    y, z, before = 1.0, 1 - x, -1.0
    while z != before:
        x, before, y = math.sqrt(x), z, 0.5 * y
        z -= (1 - x) ** 2 * y
    return z / 3


def buckets_of(values: npt.NDArray[np.float64]) -> Ints:
    """The bucket of each value; buckets ascend as values do, NaN last, as Spark orders it."""
    size = np.abs(values)
    ordinary = np.isfinite(values) & (size > 0)
    steps = np.ceil(np.log(np.where(ordinary, size, 1.0)) / math.log(_GAMMA)).astype(np.int64)
    found = np.where(ordinary, np.sign(np.where(ordinary, values, 0.0)).astype(np.int64), 0) * (
        _ZERO_AT + steps
    )
    found = np.where(np.isinf(values), np.where(values > 0, _INFINITE, -_INFINITE), found)
    return np.where(np.isnan(values), _NAN, found)


def values_of(buckets: Ints) -> npt.NDArray[np.float64]:
    """The middle of each bucket."""
    steps = (np.abs(buckets) - _ZERO_AT).astype(np.float64)
    special = (buckets == 0) | (np.abs(buckets) >= _INFINITE)
    size = 2 * np.power(_GAMMA, np.where(special, 0.0, steps)) / (1 + _GAMMA)
    found = np.where(buckets == 0, 0.0, np.sign(buckets) * size)
    found = np.where(np.abs(buckets) == _INFINITE, np.where(buckets < 0, -np.inf, np.inf), found)
    return np.where(buckets == _NAN, np.nan, found)


def quantile(groups: Ints, buckets: Ints, counts: Ints, part: float, count: int) -> Ints:
    """The bucket in which each group's quantile lies. Requires: every group has a value."""
    order = np.lexsort((buckets, groups))
    groups, buckets, counts = groups[order], buckets[order], counts[order]
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, groups, counts)
    before = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sums)))[groups]
    reached = np.cumsum(counts) - before
    wanted = np.maximum(1, np.ceil(part * sums).astype(np.int64))
    enough = np.flatnonzero(reached >= wanted[groups])
    _, first = np.unique(groups[enough], return_index=True)
    return buckets[enough[first]]
