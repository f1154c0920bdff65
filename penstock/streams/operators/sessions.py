"""Aggregates per key and session: a window that ends when its key is silent for the length of the gap.

Pure. A record alone is a session from its time to that plus the gap; sessions that overlap are one. What a
key has open is one state row, with a timer at the first of their ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import StateMismatch
from penstock.streams.operators.aggregates import CELL, KEY, Aggregates, Partials
from penstock.streams.operators.windowed import (
    STREAM,
    Lateness,
    Stretch,
    WindowSpec,
    step_result,
    times_of,
    window_rows,
)
from penstock.streams.rows.row_store import TimerRow
from penstock.streams.step_logic import StepInput, StepResult
from penstock.streams.watermark import Ints

_END = "end.max"  # merged by max
_TAG = "session"


class _Row(msgspec.Struct, array_like=True):
    """What a key has: its open sessions as rows under these names, and the long rows of some values."""

    names: list[str]
    rows: list[list[Any]]
    long: dict[str, list[list[Any]]]


class SessionAggregate:
    """The step logic of session windows, with one result each."""

    def __init__(self, spec: WindowSpec) -> None:
        self._spec, self._aggregates, self._gap = spec, Aggregates(spec.values), spec.spans.size_ms

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return {STREAM: dict(self._spec.columns)}

    def wanted(self, table: pa.Table) -> Iterable[str]:
        found: list[str] = table.column(KEY).unique().to_pylist()
        return found

    def run(self, given: StepInput) -> StepResult:
        flags = Lateness.of(given)
        held = _decoded(given.states, given.job)
        made: list[pa.Table] = []
        for stretch in flags.stretches(given, apart=bool(flags.behind.any())):
            parts = [part for part in (held, self._lifted(stretch)) if part is not None]
            if not parts:
                continue
            held, result = self._fire(self._joined(parts), stretch.low_after)
            if result is not None:
                made.append(result)
        keys = {*self.wanted(given.table), *(timer.key for timer in given.timers)}
        states, timers = _encoded(held, keys)
        done = step_result(
            {key: row for key, row in states.items() if given.states.get(key) != row},
            made,
            flags.counters(sum(table.num_rows for table in made)),
        )
        return StepResult(
            states=done.states,
            timers_set=timers,
            timers_deleted=tuple((key, _TAG) for key, row in states.items() if row is None),
            produced=done.produced,
            counters=done.counters,
        )

    def _lifted(self, stretch: Stretch) -> Partials | None:
        stamps = times_of(stretch.rows)
        flagged = np.asarray(stretch.rows.column("_late").to_numpy(), dtype=np.bool_)
        chosen = ~flagged & (~stretch.late | (stamps + self._gap > stretch.low))
        if not chosen.any():
            return None
        lifted = self._aggregates.lift(stretch.rows.filter(pa.array(chosen)), stamps[chosen])
        main = lifted.main.append_column(_END, pa.array(stamps[chosen] + self._gap))
        return self._aggregates.merge([Partials(main=main, long=lifted.long)])

    def _joined(self, parts: list[Partials]) -> Partials:
        """Sessions that overlap as one."""
        whole = self._aggregates.merge(parts)
        keys = whole.main.column(KEY).combine_chunks().dictionary_encode().indices.to_numpy()
        ends = _ends(whole)
        order = np.lexsort((whole.cells, keys))
        starts, key, end = whole.cells[order], keys[order].astype(np.int64), ends[order]
        # The greatest end so far of the same key: ranks instead of times, so that keys do not mix.
        ranks = np.unique(end, return_inverse=True)
        reached = np.maximum.accumulate(key * len(order) + ranks[1].reshape(-1))
        before = ranks[0][reached[:-1] % len(order)]
        is_first = np.ones(len(order), dtype=np.bool_)
        is_first[1:] = (key[1:] != key[:-1]) | (starts[1:] >= before)
        first = starts[np.flatnonzero(is_first)[np.cumsum(is_first) - 1]]
        if (first == starts).all():
            return whole
        moved = np.empty(len(order), dtype=np.int64)
        moved[order] = first
        renamed = pa.table({CELL: whole.main.column(CELL), KEY: whole.main.column(KEY), "_to": moved})
        return self._aggregates.merge(
            [
                Partials(
                    main=whole.main.set_column(0, CELL, pa.array(moved)),
                    long={name: _moved(table, renamed) for name, table in whole.long.items()},
                )
            ]
        )

    def _fire(self, sessions: Partials, low_after: Millis) -> tuple[Partials | None, pa.Table | None]:
        ends = _ends(sessions)
        due = ends <= low_after
        if not due.any():
            return sessions, None
        result, left = _parted(sessions, due)
        rows = window_rows(self._spec, result, self._aggregates, ends=ends[due])
        return (left if left.main.num_rows else None), rows


def _ends(sessions: Partials) -> Ints:
    return np.asarray(sessions.main.column(_END).to_numpy(), dtype=np.int64)


def _moved(table: pa.Table, renamed: pa.Table) -> pa.Table:
    joined = table.join(renamed, keys=[CELL, KEY], join_type="inner")
    return pa.table({CELL: joined.column("_to"), **{n: joined.column(n) for n in table.column_names[1:]}})


def _parted(sessions: Partials, chosen: Any) -> tuple[Partials, Partials]:
    halves = []
    for mask in (chosen, ~chosen):
        main = sessions.main.filter(pa.array(mask))
        groups = main.select([CELL, KEY])
        long = {
            name: table.join(groups, keys=[CELL, KEY], join_type="left semi")
            for name, table in sessions.long.items()
        }
        halves.append(Partials(main=main, long=long))
    return halves[0], halves[1]


def _decoded(states: Mapping[str, bytes], job: str) -> Partials | None:
    names: dict[str, None] = {}
    rows: list[dict[str, Any]] = []
    long: dict[str, list[list[Any]]] = {}
    for key, data in states.items():
        try:
            row = msgspec.msgpack.decode(data, type=_Row)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise StateMismatch(
                f"the state of key {key!r} of job {job!r} is not that of session windows",
                why=str(error),
                fix="reset the job's state: another kind of step wrote it",
            ) from error
        names |= dict.fromkeys(row.names)
        rows += [{KEY: key, **dict(zip(row.names, values, strict=True))} for values in row.rows]
        for name, more in row.long.items():
            long.setdefault(name, []).extend([cell, key, bucket, number] for cell, bucket, number in more)
    if not rows:
        return None
    ordered = [CELL, KEY, *(name for name in names if name != CELL)]
    main = pa.table({name: pa.array([row.get(name) for row in rows]) for name in ordered})
    tables = {}
    for name, found in long.items():
        columns = zip(*found, strict=True)
        tables[name] = pa.table(
            {n: pa.array(c) for n, c in zip((CELL, KEY, "bucket", "number"), columns, strict=True)}
        )
    return Partials(main=main, long=tables)


def _encoded(
    held: Partials | None, keys: Iterable[str]
) -> tuple[dict[str, bytes | None], tuple[TimerRow, ...]]:
    """State and timer of each key; None for one that has no session open."""
    states: dict[str, bytes | None] = dict.fromkeys(keys)
    if held is None:
        return states, ()
    main = held.main.sort_by([(KEY, "ascending"), (CELL, "ascending")])
    names = [name for name in main.column_names if name != KEY]
    found: dict[str, _Row] = {}
    columns = [main.column(name).to_pylist() for name in names]
    for key, *values in zip(main.column(KEY).to_pylist(), *columns, strict=True):
        found.setdefault(key, _Row(names=names, rows=[], long={})).rows.append(values)
    for name, table in held.long.items():
        ordered = table.sort_by([(KEY, "ascending"), (CELL, "ascending"), ("bucket", "ascending")])
        parts = (ordered.column(n).to_pylist() for n in (KEY, CELL, "bucket", "number"))
        for key, *values in zip(*parts, strict=True):
            found[key].long.setdefault(name, []).append(values)
    encode, place = msgspec.msgpack.Encoder().encode, names.index(_END)
    timers = []
    for key, row in found.items():
        states[key] = encode(row)
        end = min(values[place] for values in row.rows)
        timers.append(TimerRow(key=key, tag=_TAG, at_ms=end, hold_ms=end - 1))
    return states, tuple(timers)
