"""Sessions as tables, of many keys at once, and as the state rows of their keys. Pure.

A session is a row of partial results: its cell is the session's start, and a column has its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.core.errors import StateMismatch
from penstock.streams.operators.aggregates import CELL, KEY, Aggregates, Partials
from penstock.streams.operators.windowed import times_of
from penstock.streams.watermark import Ints

_END = "end.max"  # merged by max


class KeyRow(msgspec.Struct, array_like=True):
    """What a key has: sessions as rows under these names, and the long rows of some values."""

    names: list[str]
    rows: list[list[Any]]
    long: dict[str, list[list[Any]]]

    @property
    def end_min(self) -> int:
        """The first of their ends."""
        place = self.names.index(_END)
        return int(min(values[place] for values in self.rows))


def lifted_sessions(aggregates: Aggregates, rows: pa.Table, gap: int) -> Partials:
    """Each record as a session of its own; not merged."""
    stamps = times_of(rows)
    lifted = aggregates.lift(rows, stamps)
    return Partials(main=lifted.main.append_column(_END, pa.array(stamps + gap)), long=lifted.long)


def joined(aggregates: Aggregates, tables: Sequence[Partials]) -> list[Partials]:
    """The same tables, sessions of a key that overlap as one: also those of two tables."""
    starts, ends = (
        np.concatenate(found) for found in zip(*((t.cells, ends_of(t)) for t in tables), strict=True)
    )
    names = pa.chunked_array([chunk for t in tables for chunk in t.main.column(KEY).chunks], pa.string())
    keys = names.combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    first, last = _bounds(keys, starts, ends)
    if (first == starts).all() and (last == ends).all():
        return list(tables)
    made, at = [], 0
    for table in tables:
        mine = slice(at, at + table.main.num_rows)
        made.append(
            aggregates.merge([_placed(table, first[mine], last[mine])]) if table.main.num_rows else table
        )
        at += table.main.num_rows
    return made


def _bounds(keys: Ints, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Start and end of the session that each row is a part of."""
    count = len(keys)
    if not count:
        return starts, ends
    order = np.lexsort((starts, keys))
    start, key, end = starts[order], keys[order], ends[order]
    # The greatest end so far of the same key: ranks instead of times, so that keys do not mix.
    times, rank = np.unique(end, return_inverse=True)
    reached = np.maximum.accumulate(key * count + rank.reshape(-1))
    before = times[reached[:-1] % count]
    is_first = np.ones(count, dtype=np.bool_)
    is_first[1:] = (key[1:] != key[:-1]) | (start[1:] >= before)
    places, number = np.flatnonzero(is_first), np.cumsum(is_first) - 1
    first, last = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    first[order] = start[places][number]
    last[order] = np.maximum.reduceat(end, places)[number]
    return first, last


def _placed(table: Partials, first: Ints, last: Ints) -> Partials:
    main = table.main
    renamed = pa.table({CELL: main.column(CELL), KEY: main.column(KEY), "_to": first})
    main = main.set_column(main.column_names.index(CELL), CELL, pa.array(first))
    main = main.set_column(main.column_names.index(_END), _END, pa.array(last))
    return Partials(main=main, long={name: _moved(rows, renamed) for name, rows in table.long.items()})


def ends_of(sessions: Partials) -> Ints:
    """The end of each session."""
    return np.asarray(sessions.main.column(_END).to_numpy(), dtype=np.int64)


def _moved(table: pa.Table, renamed: pa.Table) -> pa.Table:
    joined = table.join(renamed, keys=[CELL, KEY], join_type="inner", use_threads=False)
    return pa.table({CELL: joined.column("_to"), **{n: joined.column(n) for n in table.column_names[1:]}})


def parted(sessions: Partials, chosen: Any) -> tuple[Partials, Partials]:
    """Those chosen, and the others."""
    halves = []
    for mask in (chosen, ~chosen):
        main = sessions.main.filter(pa.array(mask))
        groups = main.select([CELL, KEY])
        long = {
            name: table.join(groups, keys=[CELL, KEY], join_type="left semi", use_threads=False)
            for name, table in sessions.long.items()
        }
        halves.append(Partials(main=main, long=long))
    return halves[0], halves[1]


def decoded(rows: Mapping[str, KeyRow], aggregates: Aggregates, job: str) -> Partials | None:
    """The sessions of all these keys; None if there are none. StateMismatch: another plan wrote them."""
    names: dict[str, None] = {}
    found: list[dict[str, Any]] = []
    long: dict[str, list[list[Any]]] = {}
    try:
        for key, row in rows.items():
            names |= dict.fromkeys(row.names)
            found += [{KEY: key, **dict(zip(row.names, values, strict=True))} for values in row.rows]
            for name, more in row.long.items():
                long.setdefault(name, []).extend([cell, key, bucket, number] for cell, bucket, number in more)
        if not found:
            return None
        ordered = [CELL, KEY, *(name for name in names if name != CELL)]
        main = {n: pa.array([row.get(n) for row in found], _type_of(aggregates, n)) for n in ordered}
        tables = {name: _long_table(lines) for name, lines in long.items()}
    except (pa.ArrowException, ValueError, TypeError, IndexError) as error:
        raise mismatch(job, error) from error
    return Partials(main=pa.table(main), long=tables)


def _type_of(aggregates: Aggregates, name: str) -> pa.DataType:
    # Never from the values: as long as all of them are null they say nothing.
    if name == KEY:
        return pa.string()
    return pa.int64() if name in (CELL, _END) else aggregates.type_of(name)


def _long_table(lines: Sequence[Sequence[Any]]) -> pa.Table:
    cells, keys, buckets, numbers = zip(*lines, strict=True)
    columns = {CELL: cells, KEY: keys, "bucket": buckets, "number": numbers}
    return pa.table(
        {name: pa.array(c, pa.string() if name == KEY else pa.int64()) for name, c in columns.items()}
    )


def encoded(held: Partials | None) -> dict[str, KeyRow]:
    """The sessions of each key that has some."""
    if held is None:
        return {}
    main = held.main.sort_by([(KEY, "ascending"), (CELL, "ascending")])
    names = [name for name in main.column_names if name != KEY]
    found: dict[str, KeyRow] = {}
    columns = [main.column(name).to_pylist() for name in names]
    for key, *values in zip(main.column(KEY).to_pylist(), *columns, strict=True):
        found.setdefault(key, KeyRow(names=names, rows=[], long={})).rows.append(values)
    for name, table in held.long.items():
        ordered = table.sort_by([(KEY, "ascending"), (CELL, "ascending"), ("bucket", "ascending")])
        parts = (ordered.column(n).to_pylist() for n in (KEY, CELL, "bucket", "number"))
        for key, *values in zip(*parts, strict=True):
            found[key].long.setdefault(name, []).append(values)
    return found


def mismatch(job: str, error: Exception) -> StateMismatch:
    """State that another kind of step wrote."""
    return StateMismatch(
        f"the state of job {job!r} is not that of session windows",
        why=str(error),
        fix="reset the job's state: another kind of step wrote it",
    )
