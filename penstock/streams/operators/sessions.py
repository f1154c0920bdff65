"""Aggregates per key and session: a window that ends when its key has no records for the length of the gap.

Pure. A record is a session from its time to its time plus the gap; overlapping sessions are merged. The open
sessions of a key are one state row, with a timer at their first end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import StateMismatch
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.operators.aggregates import CELL, KEY, Aggregates, Partials
from penstock.streams.operators.windowed import (
    STREAM,
    Flags,
    Lateness,
    Stretch,
    WindowSpec,
    step_result,
    times_of,
    window_rows,
)
from penstock.streams.rows.row_store import TimerRow
from penstock.streams.step.keyed_work import StepInput, StepResult
from penstock.streams.step.watermark import Ints

_END = "end.max"  # merged with max


class KeyRow(msgspec.Struct, array_like=True):
    """The sessions of a key: rows with these column names, and the long rows of some values."""

    names: list[str]
    rows: list[list[Any]]
    long: dict[str, list[list[Any]]]

    @property
    def end_min(self) -> int:
        """The earliest end of the sessions."""
        place = self.names.index(_END)
        return int(min(values[place] for values in self.rows))


def lifted_sessions(aggregates: Aggregates, rows: pa.Table, gap: int) -> Partials:
    """Each record as a separate session, not merged."""
    stamps = times_of(rows)
    lifted = aggregates.lift(rows, stamps)
    return Partials(main=lifted.main.append_column(_END, pa.array(stamps + gap)), long=lifted.long)


def joined(aggregates: Aggregates, tables: Sequence[Partials]) -> list[Partials]:
    """The tables with overlapping sessions of a key merged, also across tables."""
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
            aggregates.merge([_with_bounds(table, first[mine], last[mine])]) if table.main.num_rows else table
        )
        at += table.main.num_rows
    return made


def _bounds(keys: Ints, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """The start and end of the merged session of each row."""
    count = len(keys)
    if not count:
        return starts, ends
    order = np.lexsort((starts, keys))
    start, key, end = starts[order], keys[order], ends[order]
    # The running maximum of ends per key; ranks instead of times, so that keys do not mix.
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


def _with_bounds(table: Partials, first: Ints, last: Ints) -> Partials:
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
    """The chosen sessions, and the others."""
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
    """The sessions of these keys; None if there are none. StateMismatch: another plan wrote them."""
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
    # Not inferred from the values, because all of them may be null.
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
    """The sessions of each key that has any."""
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


_TAG = "session"


class SessionAggregate:
    """The step logic of session windows, with one result each."""

    def __init__(self, spec: WindowSpec) -> None:
        self._spec, self._aggregates, self._gap = spec, Aggregates(spec.values), spec.spans.size_ms

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return {STREAM: dict(self._spec.columns)}

    def needed_states(self, table: pa.Table) -> Iterable[str]:
        found: list[str] = table.column(KEY).unique().to_pylist()
        return found

    def run(self, given: StepInput) -> StepResult:
        flags = Lateness.of(given)
        held = decoded(_rows_of(given.states, given.job), self._aggregates, given.job)
        made: list[pa.Table] = []
        dropped = 0
        for stretch in flags.stretches(given, apart=bool(flags.behind.any())):
            fresh, beyond = self._lifted(stretch)
            dropped += beyond
            parts = [part for part in (held, fresh) if part is not None]
            if not parts:
                continue
            (whole,) = joined(self._aggregates, [self._aggregates.merge(parts)])
            held, result = self._fire(whole, stretch.low_after)
            if result is not None:
                made.append(result)
        keys = {*self.needed_states(given.table), *(timer.key for timer in given.timers)}
        found = encoded(held)
        states = {key: msgspec.msgpack.encode(found[key]) if key in found else None for key in keys}
        timers = tuple(
            TimerRow(key=key, tag=_TAG, at_ms=row.end_min, hold_ms=row.end_min - 1)
            for key, row in found.items()
        )
        done = step_result(
            {key: row for key, row in states.items() if given.states.get(key) != row},
            made,
            flags.counters(sum(table.num_rows for table in made), dropped),
        )
        return StepResult(
            states=done.states,
            timers_set=timers,
            timers_deleted=tuple((key, _TAG) for key, row in states.items() if row is None),
            produced=done.produced,
            counters=done.counters,
        )

    def _lifted(self, stretch: Stretch) -> tuple[Partials | None, int]:
        """Records as sessions, and the number of late records that are dropped."""
        stamps = times_of(stretch.rows)
        flagged = np.asarray(stretch.rows.column("_late").to_numpy(), dtype=np.bool_)
        chosen = ~flagged & (~stretch.late | (stamps + self._gap > stretch.low))
        dropped = int(np.count_nonzero(~chosen))
        if not chosen.any():
            return None, dropped
        rows = stretch.rows.filter(pa.array(chosen))
        return self._aggregates.merge([lifted_sessions(self._aggregates, rows, self._gap)]), dropped

    def _fire(self, sessions: Partials, low_after: Millis) -> tuple[Partials | None, pa.Table | None]:
        ends = ends_of(sessions)
        due = ends <= low_after
        if not due.any():
            return sessions, None
        result, left = parted(sessions, due)
        rows = window_rows(self._spec, result, self._aggregates, ends=ends[due])
        return (left if left.main.num_rows else None), rows


def _rows_of(states: Mapping[str, bytes], job: str) -> dict[str, KeyRow]:
    try:
        return {key: msgspec.msgpack.decode(data, type=KeyRow) for key, data in states.items()}
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise mismatch(job, error) from error


@dataclass(slots=True, kw_only=True)
class _Held:
    """All sessions of some keys. `new`: not emitted yet; `given`: emitted, may be updated."""

    new: Partials | None
    given: Partials | None


class SessionFirings:
    """The step logic of sessions with early results or late updates; processes each cut separately."""

    def __init__(self, spec: WindowSpec) -> None:
        self._spec, self._aggregates, self._gap = spec, Aggregates(spec.values), spec.spans.size_ms
        self._early = spec.firing.early_ms
        self._updates = spec.firing.late == "update"
        self._accumulates = spec.firing.mode == "accumulating"
        self._lateness_ms = spec.firing.lateness_ms if self._updates else 0
        self._retention_ms = self._lateness_ms + self._gap if self._updates else 0  # after a session's end

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return {STREAM: dict(self._spec.columns)}

    def needed_states(self, table: pa.Table) -> Iterable[str]:
        found: list[str] = table.column(KEY).unique().to_pylist()
        return found

    def run(self, given: StepInput) -> StepResult:
        flags = Lateness.of(given)
        held = _decoded(given.states, self._aggregates, given.job)
        made: list[pa.Table] = []
        fired = dropped = 0
        for stretch in flags.stretches(given, apart=True):
            beyond = self._beyond(stretch)
            self._add(held, stretch, beyond)
            made += self._add_late(held, stretch, beyond)
            dropped += int(np.count_nonzero(beyond))
            results = self._fire(held, stretch.low, stretch.low_after)
            fired += sum(table.num_rows for table in results)
            made += results
        keys = {*self.needed_states(given.table), *(timer.key for timer in given.timers)}
        states, timers = self._encoded(held, keys, given.low_after)
        done = step_result(
            {key: row for key, row in states.items() if given.states.get(key) != row},
            made,
            flags.counters(fired, dropped),
        )
        return StepResult(
            states=done.states,
            timers_set=timers,
            timers_deleted=tuple((key, _TAG) for key, row in states.items() if row is None),
            produced=done.produced,
            counters=done.counters,
        )

    def _beyond(self, stretch: Stretch) -> Flags:
        """Records that are dropped because they are too late."""
        expired = times_of(stretch.rows) + self._gap + self._lateness_ms <= stretch.reached
        if not self._updates:
            # A record behind the low without the late flag counts if its own session is still open.
            expired |= np.asarray(stretch.rows.column("_late").to_numpy(), dtype=np.bool_)
        return np.asarray(stretch.late & expired, dtype=np.bool_)

    def _add(self, held: _Held, stretch: Stretch, beyond: Flags) -> None:
        """Add records that open or extend sessions."""
        chosen = ~stretch.late if self._updates else ~beyond
        if chosen.any():
            rows = stretch.rows.filter(pa.array(chosen))
            self._merge_new(
                held, self._aggregates.merge([lifted_sessions(self._aggregates, rows, self._gap)])
            )

    def _merge_new(self, held: _Held, fresh: Partials) -> None:
        held.new = self._together(held.new, fresh)
        self._join(held)

    def _join(self, held: _Held) -> None:
        assert held.new is not None
        if held.given is None:
            (held.new,) = joined(self._aggregates, [held.new])
        else:
            held.new, held.given = joined(self._aggregates, [held.new, held.given])

    def _add_late(self, held: _Held, stretch: Stretch, beyond: Flags) -> list[pa.Table]:
        """Add late records in order, one per key at a time, because each may change the key's sessions."""
        chosen = stretch.late & ~beyond
        if not self._updates or not chosen.any():
            return []
        rows = stretch.rows.filter(pa.array(chosen))
        made = [
            table
            for chosen in _one_per_key(rows.column(KEY))
            for table in self._one_each(held, rows.take(pa.array(chosen)), chosen, stretch.low)
        ]
        if not made:
            return []
        return [pa.concat_tables(made).sort_by([("_place", "ascending")]).drop_columns(["_place"])]

    def _one_each(self, held: _Held, rows: pa.Table, places: Ints, low: Millis) -> Iterable[pa.Table]:
        fresh = lifted_sessions(self._aggregates, rows, self._gap)
        is_open = self._ends_with(held, fresh) > low
        is_update = ~is_open
        if is_open.any():
            self._merge_new(held, self._aggregates.merge([fresh.rows(np.flatnonzero(is_open))]))
        if not is_update.any():
            return
        chosen = np.flatnonzero(is_update)
        late = self._aggregates.merge([fresh.rows(chosen)])
        if held.given is not None:  # it may extend a session or merge two sessions
            late, held.given = joined(self._aggregates, [late, held.given])
        else:
            (late,) = joined(self._aggregates, [late])
        given = held.given = self._aggregates.merge([late, *([held.given] if held.given else [])])
        result = _same_sessions(given, late.main.select([CELL, KEY])) if self._accumulates else late
        shown = window_rows(self._spec, result, self._aggregates, ends=ends_of(result), late=True)
        by_key = dict(zip(rows.column(KEY).take(pa.array(chosen)).to_pylist(), places[chosen], strict=True))
        order = [by_key[key] for key in shown.column("_key").to_pylist()]
        yield shown.append_column("_place", pa.array(order, pa.int64()))

    def _ends_with(self, held: _Held, fresh: Partials) -> Ints:
        """The end of the session that would contain each record. Requires: each key once."""
        tables = [fresh, *(table for table in (held.new, held.given) if table is not None)]
        whole = joined(self._aggregates, tables)[0]
        found = dict(zip(whole.main.column(KEY).to_pylist(), ends_of(whole).tolist(), strict=True))
        return np.array([found[key] for key in fresh.main.column(KEY).to_pylist()], dtype=np.int64)

    def _fire(self, held: _Held, low: Millis, low_after: Millis) -> list[pa.Table]:
        if low_after <= low:
            return []
        made: list[pa.Table] = []
        fresh: Partials | None = None
        if held.new is not None and (due := self._due(held.new, low, low_after)).any():
            fresh, left = parted(held.new, due)
            held.new = left if left.main.num_rows else None
            held.given = self._together(held.given, fresh)
        result = fresh
        if self._accumulates and held.given is not None:
            # At its end a session is emitted as a whole, even if nothing is new.
            ended = held.given.main.filter(pa.array(_passed(held.given, low, low_after)))
            wanted = [table.select([CELL, KEY]) for table in (ended, *([fresh.main] if fresh else []))]
            result = _same_sessions(held.given, pa.concat_tables(wanted))
        if result is not None and result.main.num_rows:
            ends = ends_of(result)
            stamps = np.where(ends <= low_after, ends, self._passed_by(result.cells, low_after)) - 1
            made.append(window_rows(self._spec, result, self._aggregates, ends=ends, stamps=stamps))
        if held.given is not None:
            remaining = parted(held.given, ends_of(held.given) + self._retention_ms > low_after)[0]
            held.given = remaining if remaining.main.num_rows else None
        return made

    def _due(self, new: Partials, low: Millis, low_after: Millis) -> Flags:
        over = ends_of(new) <= low_after
        if self._early is None or low_after >= LOW_MAX:
            return over
        return over | (self._passed_by(new.cells, low_after) > np.maximum(low, new.cells))

    def _passed_by(self, starts: Ints, low: Millis) -> Ints:
        """The time of the last early result up to this low; at or before the start if there is none."""
        step = self._early or 1
        return starts + (np.maximum(low, starts) - starts) // step * step

    def _together(self, *parts: Partials | None) -> Partials | None:
        found = [part for part in parts if part is not None and part.main.num_rows]
        return self._aggregates.merge(found) if found else None

    def _encoded(
        self, held: _Held, keys: Iterable[str], low: Millis
    ) -> tuple[dict[str, bytes | None], tuple[TimerRow, ...]]:
        new, given = encoded(held.new), encoded(held.given)
        states: dict[str, bytes | None] = dict.fromkeys(keys)
        blank = KeyRow(names=[], rows=[], long={})
        for key in {*new, *given}:
            states[key] = msgspec.msgpack.encode((new.get(key, blank), given.get(key, blank)))
        timers: dict[str, int] = {}
        for sessions, is_new in ((held.new, True), (held.given, False)):
            if sessions is None:
                continue
            ends, starts = ends_of(sessions), sessions.cells
            at = np.where(ends > low, ends, ends + self._retention_ms)
            if is_new and self._early is not None:
                at = np.minimum(at, self._passed_by(starts, low) + self._early)
            for key, time in zip(sessions.main.column(KEY).to_pylist(), at.tolist(), strict=True):
                timers[key] = min(time, timers.get(key, time))
        rows = (TimerRow(key=key, tag=_TAG, at_ms=at, hold_ms=at - 1) for key, at in timers.items())
        return states, tuple(rows)


def _passed(sessions: Partials, low: Millis, low_after: Millis) -> Flags:
    """Sessions whose end the low passes now."""
    ends = ends_of(sessions)
    return np.asarray((low < ends) & (ends <= low_after), dtype=np.bool_)


def _same_sessions(whole: Partials, groups: pa.Table) -> Partials:
    """The sessions of `whole` with these starts and keys."""
    tables = {"": whole.main, **whole.long}
    found = {
        name: rows.join(groups, keys=[CELL, KEY], join_type="left semi", use_threads=False)
        for name, rows in tables.items()
    }
    return Partials(main=found.pop(""), long=found)


def _one_per_key(keys: pa.ChunkedArray) -> Sequence[Ints]:
    """Rounds of indices in which no key occurs twice; the indices of a key stay in order."""
    codes = np.asarray(keys.combine_chunks().dictionary_encode().indices.to_numpy(), dtype=np.int64)
    order = np.argsort(codes, kind="stable")
    firsts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    turn = np.empty(len(order), dtype=np.int64)
    turn[order] = np.arange(len(order)) - np.repeat(firsts, np.diff(np.append(firsts, len(order))))
    return [np.flatnonzero(turn == number) for number in range(int(turn.max(initial=-1)) + 1)]


def _decoded(states: Mapping[str, bytes], aggregates: Aggregates, job: str) -> _Held:
    try:
        rows = {key: msgspec.msgpack.decode(data, type=tuple[KeyRow, KeyRow]) for key, data in states.items()}
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise mismatch(job, error) from error
    return _Held(
        new=decoded({key: new for key, (new, _) in rows.items()}, aggregates, job),
        given=decoded({key: given for key, (_, given) in rows.items()}, aggregates, job),
    )
