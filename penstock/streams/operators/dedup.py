"""Keeps the first record of each key within a span of event time, and drops the others.

Pure. The first record is the one with the earliest event time; for equal times the order of its columns as
bytes decides, so that the result does not depend on the order of arrival or on cuts of the log. A record is
emitted when the low watermark has passed its time, because no earlier one can come. The end of a key's span
is stored until the low watermark passes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.core.errors import StateMismatch
from penstock.streams.bus.log import ARROW_TYPES, LOW_MIN
from penstock.streams.operators.windowed import STREAM, Lateness, keyed_result, times_of
from penstock.streams.rows.row_store import TimerRow
from penstock.streams.step.keyed_work import StepInput, StepResult
from penstock.streams.step.watermark import Ints

_TAG = "dedup"


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupSpec:
    """A dedup's plan as values: a span of `within_ms` after the emitted record, or its window."""

    columns: tuple[tuple[str, str], ...]
    within_ms: int = 0
    size_ms: int = 0

    @staticmethod
    def of(plan: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> DedupSpec:
        """From a job's plan and the columns of its output."""
        within, window = plan.get("within") or {}, plan.get("window") or {}
        return DedupSpec(
            columns=tuple((name, kind) for name, kind in columns),
            within_ms=within.get("within_ms", 0),
            size_ms=window.get("size_ms", 0),
        )

    def until(self, stamps: Ints) -> Ints:
        """The end of the spans of records that are emitted at these times."""
        if self.size_ms:
            return stamps - stamps % self.size_ms + self.size_ms
        return stamps + self.within_ms


class Dedup:
    """The step logic: a state row per key, with the end of its span and the waiting records."""

    def __init__(self, spec: DedupSpec) -> None:
        self._spec = spec
        self._schema = pa.schema(
            [
                ("_key", pa.string()),
                ("_ts", pa.int64()),
                *((name, ARROW_TYPES[kind]) for name, kind in spec.columns),
            ]
        )

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return {STREAM: dict(self._spec.columns)}

    def needed_states(self, table: pa.Table) -> Iterable[str]:
        found: list[str] = table.column("_key").unique().to_pylist()
        return found

    def run(self, given: StepInput) -> StepResult:
        flags = Lateness.of(given)
        untils, held = self._decoded(given.states, given.job)
        fresh = given.table.filter(pa.array(~flags.late & ~flags.behind))
        if fresh.num_rows:
            held = pa.concat_tables([held, fresh.select(self._schema.names).cast(self._schema)])
        # For records on time only the low matters, so the whole range can be processed at once.
        made, waiting, untils = self._parted(held.combine_chunks(), untils, given.low_after)
        keys = {*self.needed_states(given.table), *(timer.key for timer in given.timers)}
        states, timers = self._encoded(waiting, untils, keys, given.low_after)
        return keyed_result(
            given,
            states,
            timers,
            [made] if made.num_rows else [],
            counters=flags.counters(len(given.timers), given.table.num_rows - fresh.num_rows),
            tag=_TAG,
        )

    def _parted(
        self, rows: pa.Table, untils: Mapping[str, int], low: int
    ) -> tuple[pa.Table, pa.Table, dict[str, int]]:
        """The records to emit, those that wait, and the end of each key's span."""
        encoded = rows.column("_key").combine_chunks().dictionary_encode()
        names = encoded.dictionary.to_pylist()
        codes = np.asarray(encoded.indices.to_numpy(), dtype=np.int64)
        order = np.lexsort((self._ties(rows, codes), times_of(rows), codes))
        codes, stamps = codes[order], times_of(rows)[order]
        until = np.array([untils.get(name, LOW_MIN) for name in names], dtype=np.int64)
        decided, given = stamps < low, np.zeros(len(order), dtype=np.bool_)
        alive = decided.copy()
        while True:
            alive &= stamps >= until[codes]
            left = np.flatnonzero(alive)
            if not len(left):
                break
            firsts = left[np.diff(codes[left], prepend=-1) != 0]
            given[firsts], alive[firsts] = True, False
            until[codes[firsts]] = self._spec.until(stamps[firsts])
        waits = ~decided & (stamps >= until[codes])
        # Of records with the same time only the first can be emitted.
        waits[1:] &= (codes[1:] != codes[:-1]) | (stamps[1:] != stamps[:-1])
        made = rows.take(pa.array(order[given])).sort_by([("_ts", "ascending"), ("_key", "ascending")])
        made = made.append_column("_late", pa.array(np.zeros(made.num_rows, dtype=np.bool_)))
        found = dict(untils) | {name: int(end) for name, end in zip(names, until, strict=True)}
        return made, rows.take(pa.array(order[waits])), found

    def _ties(self, rows: pa.Table, codes: Ints) -> Ints:
        """Ranks by content of rows with the same key and time; 0 for all other rows."""
        ranks, stamps = np.zeros(rows.num_rows, dtype=np.int64), times_of(rows)
        order = np.lexsort((stamps, codes))
        same = (np.diff(codes[order]) == 0) & (np.diff(stamps[order]) == 0)
        tied = np.union1d(order[:-1][same], order[1:][same])
        if len(tied):
            encode = msgspec.msgpack.Encoder().encode
            own = rows.select([name for name, _ in self._spec.columns]).take(pa.array(tied))
            contents = [encode(values) for values in _values(own)]
            rank_of = {content: number for number, content in enumerate(sorted(set(contents)))}
            ranks[tied] = [rank_of[content] for content in contents]
        return ranks

    def _decoded(self, states: Mapping[str, bytes], job: str) -> tuple[dict[str, int], pa.Table]:
        names = self._schema.names
        untils: dict[str, int] = {}
        rows: list[tuple[Any, ...]] = []
        for key, data in sorted(states.items()):
            try:
                until, waiting = msgspec.msgpack.decode(data, type=tuple[int, list[list[Any]]])
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise _mismatch(key, job, str(error)) from error
            if any(len(row) != len(names) - 1 for row in waiting):
                raise _mismatch(key, job, "it has other columns")
            untils[key] = until
            rows += [(key, *row) for row in waiting]
        columns: Iterable[Sequence[Any]] = zip(*rows, strict=True) if rows else [()] * len(names)
        try:
            arrays = [pa.array(column, self._schema.field(n).type) for n, column in enumerate(columns)]
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise _mismatch(next(iter(states)), job, str(error)) from error
        return untils, pa.Table.from_arrays(arrays, schema=self._schema)

    def _encoded(
        self, waiting: pa.Table, untils: Mapping[str, int], keys: Iterable[str], low: int
    ) -> tuple[dict[str, bytes | None], tuple[TimerRow, ...]]:
        """State and timer of each key; None if its span has ended and no record waits."""
        held: dict[str, list[Any]] = {}
        for key, *values in _values(waiting):
            held.setdefault(key, []).append(values)
        states: dict[str, bytes | None] = dict.fromkeys(keys)
        timers, encode = [], msgspec.msgpack.Encoder().encode
        for key in states:
            until, rows = untils.get(key, LOW_MIN), held.get(key, [])
            if until <= low:
                until = LOW_MIN  # the span has ended
            if rows:
                at = rows[0][0] + 1  # in the order of event times
                timers.append(TimerRow(key=key, tag=_TAG, at_ms=at, hold_ms=at - 1))
            elif until > LOW_MIN:
                timers.append(TimerRow(key=key, tag=_TAG, at_ms=until, hold_ms=until - 1))
            else:
                continue
            states[key] = encode((until, rows))
        return states, tuple(timers)


def _values(rows: pa.Table) -> Iterable[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in rows.columns), strict=True)


def _mismatch(key: str, job: str, why: str) -> StateMismatch:
    return StateMismatch(
        f"the state of key {key!r} of job {job!r} does not match its dedup",
        why=why,
        fix="reset the job's state: another plan wrote it",
    )
