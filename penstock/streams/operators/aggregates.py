"""Aggregate functions with partial results that can be merged in any order: lift, merge, finish.

Pure: a record is lifted to a partial result, partial results of a group are merged, and the value is computed
at the end. The value does not depend on batches, on the order of records, or on where they were merged.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.streams.bus.log import ARROW_TYPES
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
    """Splitmix64: every bit of the value changes every bit of the hash."""
    mixed = bits + _HALF
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def registers_of(hashes: npt.NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """The register of each hash, and its rank there."""
    rest = hashes & np.uint64((1 << _RANKS) - 1)
    _, length = np.frexp(rest.astype(np.float64))  # below 2**53: exact
    return (hashes >> np.uint64(_RANKS)).astype(np.int64), (_RANKS - length + 1).astype(np.int64)


def distinct(groups: Ints, ranks: Ints, count: int) -> Ints:
    """The number of distinct values of `count` groups. Input: one row per group and used register."""
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


_LIMB = 32
_MASK = (1 << _LIMB) - 1
_UNIT = 1074  # the smallest double is 2**-1074
NAN, PLUS, MINUS = "nan", "inf", "-inf"
Doubles = npt.NDArray[np.float64]


def limbs_of(values: Doubles) -> dict[str, Ints]:
    """Each value as limbs, by limb number as text, and counts of NaN and infinities."""
    finite = np.isfinite(values)
    mantissas, exponents = np.frexp(np.where(finite, values, 0.0))
    whole = np.ldexp(mantissas, 53).astype(np.int64)
    # Subnormal doubles have fewer bits; the rest of `whole` is zeros.
    position = exponents.astype(np.int64) - 53 + _UNIT
    small = position < 0
    whole = np.where(small, whole >> np.where(small, -position, 0), whole)
    position = np.where(small, 0, position)
    number, shift = position // _LIMB, position % _LIMB
    sign, size = np.sign(whole), np.abs(whole)
    rest = _LIMB - shift
    pieces = (
        (size & ((1 << rest) - 1)) << shift,
        (size >> rest) & _MASK,
        size >> rest >> _LIMB,
    )
    found: dict[str, Ints] = {}
    for first in np.unique(number[whole != 0]).tolist():
        mine = number == first
        for above, piece in enumerate(pieces):
            part = np.where(mine, sign * piece, 0)
            if part.any():
                name = str(first + above)
                found[name] = part if name not in found else found[name] + part
    for name, is_it in ((NAN, np.isnan(values)), (PLUS, values == np.inf), (MINUS, values == -np.inf)):
        if is_it.any():
            found[name] = is_it.astype(np.int64)
    return found


def total(limbs: Mapping[str, Ints], count: int) -> Doubles:
    """The nearest double of each of `count` sums."""
    numbers = sorted(int(name) for name in limbs if name not in (NAN, PLUS, MINUS))
    sums = [0] * count
    for number in numbers:
        shift = number * _LIMB
        sums = [
            before + (limb << shift) for before, limb in zip(sums, limbs[str(number)].tolist(), strict=True)
        ]
    unit = 1 << _UNIT
    found = np.array([_rounded(whole, unit) for whole in sums], dtype=np.float64)
    none = np.zeros(count, dtype=np.int64)
    up, down, nan = (limbs.get(name, none) > 0 for name in (PLUS, MINUS, NAN))
    found[up], found[down] = np.inf, -np.inf
    found[nan | (up & down)] = np.nan
    return found


def _rounded(whole: int, unit: int) -> float:
    try:
        return whole / unit
    except OverflowError:  # beyond the largest double
        return float("inf") if whole > 0 else float("-inf")


CELL, KEY = "_cell", "_key"
_BUCKET, _NUMBER = "bucket", "number"
_ALL_BUT_SIGN = np.int64(2**63 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateValue:
    """One value of a group. `column`: of the records, None for count(*)."""

    name: str
    function: str
    column: str | None
    parameter: float | None
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Partials:
    """Partial results, one row per group (cell, key); `long`: by value, several rows (bucket, number)."""

    main: pa.Table
    long: Mapping[str, pa.Table]

    @property
    def cells(self) -> Ints:
        """The cell of each row."""
        return np.asarray(self.main.column(CELL).to_numpy(), dtype=np.int64)

    def where(self, cells: Iterable[int]) -> Partials:
        """Only the rows of some cells."""
        wanted = pa.array(list(cells), pa.int64())
        return self._filtered(lambda table: pc.is_in(table.column(CELL), value_set=wanted))

    def of_keys(self, keys: pa.Array) -> Partials:
        """Only the rows of some keys."""
        return self._filtered(lambda table: pc.is_in(table.column(KEY), value_set=keys))

    def in_cell(self, cell: int) -> Partials:
        """The same rows, all in one cell."""
        return Partials(
            main=_with_cell(self.main, cell),
            long={name: _with_cell(table, cell) for name, table in self.long.items()},
        )

    def rows(self, chosen: Ints) -> Partials:
        """Some rows. Requires: nothing is long, or rows were not merged yet (`lift`)."""
        mine = pa.array(chosen)
        return Partials(
            main=self.main.take(mine), long={name: table.take(mine) for name, table in self.long.items()}
        )

    def _filtered(self, mask: Any) -> Partials:
        return Partials(
            main=self.main.filter(mask(self.main)),
            long={name: table.filter(mask(table)) for name, table in self.long.items()},
        )


class Aggregates:
    """The values of an aggregate, in order."""

    def __init__(self, values: Sequence[AggregateValue]) -> None:
        self._values = tuple(values)

    def lift(self, table: pa.Table, cells: Ints) -> Partials:
        """Each record as a partial result in its cell. `table` has `_key` and the columns."""
        main = {CELL: pa.array(cells), KEY: table.column(KEY)}
        long: dict[str, pa.Table] = {}
        for place, value in enumerate(self._values):
            column = None if value.column is None else _whole(table.column(value.column))
            for suffix, array in _lifted(value, column, table.num_rows).items():
                main[f"{place}.{suffix}"] = array
            if value.function in ("approx_count_distinct", "approx_percentile"):
                assert column is not None
                long[str(place)] = _lifted_long(value, column, main)
        return Partials(main=pa.table(main), long=long)

    def type_of(self, column: str) -> pa.DataType:
        """The type of a column of partial results."""
        place, suffix = column.split(".", 1)
        value = self._values[int(place)]
        if suffix in ("min", "max") and value.function in ("min", "max"):
            kind = ARROW_TYPES[value.type]
            return kind if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)) else pa.int64()
        return pa.int64()

    def merge(self, parts: Sequence[Partials]) -> Partials:
        """One row for each group."""
        main = _grouped([part.main for part in parts], (CELL, KEY))
        names = {name for part in parts for name in part.long}
        long = {
            name: _grouped(
                [part.long[name] for part in parts if name in part.long],
                (CELL, KEY, _BUCKET),
                how="max" if self._values[int(name)].function == "approx_count_distinct" else "sum",
            )
            for name in sorted(names)
        }
        return Partials(main=main, long=long)

    def finish(self, merged: Partials) -> dict[str, pa.Array]:
        """The value of each group, by name. Requires: merged."""
        columns = {name: _whole(merged.main.column(name)) for name in merged.main.column_names}
        count = merged.main.num_rows
        found = {}
        for place, value in enumerate(self._values):
            mine = {
                name.split(".", 1)[1]: column
                for name, column in columns.items()
                if name.startswith(f"{place}.")
            }
            if str(place) in merged.long:
                made = _finished_long(value, mine, _group_numbers(merged, str(place)), count)
            else:
                made = _finished(value, mine, count)
            found[value.name] = made.cast(ARROW_TYPES[value.type], safe=False)
        return found


def _lifted(value: AggregateValue, column: pa.Array | None, count: int) -> dict[str, pa.Array]:
    if column is None:
        return {"sum": pa.array(np.ones(count, dtype=np.int64))}
    known = pc.is_valid(column).cast(pa.int64())
    if value.function == "count":
        return {"sum": known}
    if value.function in ("sum", "avg"):
        if pa.types.is_integer(column.type):
            return {"sum": column.cast(pa.int64()), "sum.n": known}
        limbs = limbs_of(_doubles(column))
        return {"sum.n": known, **{f"sum.{name}": pa.array(limb) for name, limb in limbs.items()}}
    if value.function in ("min", "max"):
        return {value.function: in_order(column)}
    if value.function == "approx_percentile":
        ordered = in_order(column.cast(pa.float64()))
        return {"min": ordered, "max": ordered}
    return {}


def _lifted_long(value: AggregateValue, column: pa.Array, main: Mapping[str, pa.Array]) -> pa.Table:
    """One row per record; the number is null if the value is null, so that nulls are not counted."""
    if value.function == "approx_count_distinct":
        there = np.flatnonzero(np.asarray(column.is_valid()))
        buckets, numbers = np.zeros((2, len(column)), dtype=np.int64)
        buckets[there], numbers[there] = registers_of(hashes_of(column.take(pa.array(there))))
    else:
        buckets = buckets_of(_doubles(column))
        numbers = np.ones(len(column), dtype=np.int64)
    mask = np.asarray(column.is_null())
    return pa.table(
        {
            CELL: main[CELL],
            KEY: main[KEY],
            _BUCKET: pa.array(buckets),
            _NUMBER: pa.array(numbers, mask=mask),
        }
    )


def _finished(value: AggregateValue, mine: Mapping[str, pa.Array], count: int) -> pa.Array:
    if value.function == "count":
        return mine["sum"]
    if value.function in ("min", "max"):
        return _unordered(mine[value.function], value.type)
    known = _ints(mine["sum.n"])
    if "sum" in mine:
        sums = _ints(mine["sum"])
        if value.function == "sum":
            return pa.array(sums, mask=known == 0)
        whole = sums.astype(np.float64)
    else:
        limbs = {name.removeprefix("sum."): _ints(column) for name, column in mine.items() if name != "sum.n"}
        whole = total(limbs, count)
    return pa.array(whole / np.maximum(known, 1) if value.function == "avg" else whole, mask=known == 0)


def _finished_long(
    value: AggregateValue, mine: Mapping[str, pa.Array], rows: tuple[Ints, Ints, Ints], count: int
) -> pa.Array:
    groups, buckets, numbers = rows
    there = numbers > 0
    groups, buckets, numbers = groups[there], buckets[there], numbers[there]
    if value.function == "approx_count_distinct":
        return pa.array(distinct(groups, numbers, count))
    assert value.parameter is not None
    used, dense = np.unique(groups, return_inverse=True)
    found = np.zeros(count, dtype=np.float64)
    middle = values_of(quantile(dense, buckets, numbers, value.parameter, len(used)))
    least, most = (_doubles(_unordered(mine[name].take(pa.array(used)), "double")) for name in ("min", "max"))
    found[used] = np.where(np.isnan(middle), middle, np.fmin(np.fmax(middle, least), most))
    if value.type in ("int", "bigint"):
        found = np.rint(found)
    return pa.array(found, mask=~np.isin(np.arange(count), used))


def _group_numbers(merged: Partials, name: str) -> tuple[Ints, Ints, Ints]:
    """For each long row: its row in `main`, its bucket and its number."""
    numbered = merged.main.select([CELL, KEY]).append_column(
        "_place", pa.array(np.arange(merged.main.num_rows, dtype=np.int64))
    )
    joined = merged.long[name].join(numbered, keys=[CELL, KEY], join_type="inner", use_threads=False)
    place, bucket = (_ints(_whole(joined.column(one))) for one in ("_place", _BUCKET))
    return place, bucket, _ints(_whole(joined.column(_NUMBER)))


def _grouped(tables: Sequence[pa.Table], by: Sequence[str], how: str = "") -> pa.Table:
    """Merge rows with the same `by`; the suffix of a column's name, or `how`, is the function."""
    table = pa.concat_tables(tables, promote_options="default") if len(tables) > 1 else tables[0]
    if not table.num_rows:
        return table
    # Grouping by one number is much faster than by texts.
    keys = _whole(table.column(KEY)).dictionary_encode()
    cells, cell = np.unique(table.column(CELL).to_numpy(), return_inverse=True)
    codes = keys.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    size = len(keys.dictionary)
    group = cell.astype(np.int64) * size + codes
    names = [name for name in table.column_names if name not in by]
    rest = [name for name in by if name not in (CELL, KEY)]
    plain = table.select([*rest, *names]).append_column("_group", pa.array(group))
    asked: list[tuple[str, str]] = [
        (name, how or ("sum" if ".sum" in name else name.rsplit(".", 1)[1])) for name in names
    ]
    made = plain.group_by(["_group", *rest], use_threads=False).aggregate(asked)
    groups = made.column("_group").to_numpy()
    columns = {CELL: pa.array(cells[groups // size]), KEY: keys.dictionary.take(pa.array(groups % size))}
    columns |= {name: made.column(name) for name in rest}
    columns |= {name: made.column(f"{name}_{function}") for name, function in asked}
    return pa.table(columns)


def in_order(column: pa.Array) -> pa.Array:
    """Values for `min` and `max`: doubles as integers in Spark's order, NaN is the largest."""
    if pa.types.is_integer(column.type):
        return column.cast(pa.int64())
    if not pa.types.is_floating(column.type):
        return column
    numbers = _doubles(column)
    numbers = np.where(np.isnan(numbers), np.nan, numbers + 0.0)
    bits = numbers.view(np.int64)
    return pa.array(bits ^ ((bits >> 63) & _ALL_BUT_SIGN), mask=np.asarray(column.is_null()))


def _unordered(column: pa.Array, kind: str) -> pa.Array:
    if kind not in ("double", "float") or not pa.types.is_integer(column.type):
        return column
    bits = _ints(column)
    bits = bits ^ ((bits >> 63) & _ALL_BUT_SIGN)
    return pa.array(bits.view(np.float64), mask=np.asarray(column.is_null()))


def _doubles(column: pa.Array) -> Doubles:
    filled = pc.fill_null(column.cast(pa.float64()), 0.0)
    return np.asarray(filled.to_numpy(zero_copy_only=False), dtype=np.float64)


def _ints(column: pa.Array) -> Ints:
    filled = pc.fill_null(column.cast(pa.int64()), 0)
    return np.asarray(filled.to_numpy(zero_copy_only=False), dtype=np.int64)


def _whole(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _with_cell(table: pa.Table, cell: int) -> pa.Table:
    cells = pa.array(np.full(table.num_rows, cell, dtype=np.int64))
    return table.set_column(table.column_names.index(CELL), CELL, cells)
