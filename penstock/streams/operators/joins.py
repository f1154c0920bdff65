"""Joins records of two streams with equal keys that are near in time or in the same window.

Pure. A record waits in its key's state row until the low watermark shows that no record on time can match it.
A pair is emitted when its second record comes, with the later timestamp; a record without a match, in outer
joins, when its wait has ended. A key that contains NULL never matches, so its record does not wait. The pairs
depend only on the log and its marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.clock import Millis
from penstock.streams.bus.log import ARROW_TYPES, has_null_part
from penstock.streams.operators.blocks import decode_rows
from penstock.streams.operators.windowed import STREAM, Lateness, Stretch, keyed_result, times_of
from penstock.streams.rows.row_store import TimerRow
from penstock.streams.step.keyed_work import StepInput, StepResult
from penstock.streams.step.watermark import Ints

LEFT, RIGHT = 0, 1
SIDE = "side"  # the column with the side of a row
_MATCHED, _TAG = "_matched", "join"


def side_column(side: int, place: int) -> str:
    """The name of a column of one side, between the stages and the join."""
    return f"{'lr'[side]}{place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSpec:
    """A join's plan as values. `size_ms` 0: by distance in time; else by window with this size and slide."""

    how: str
    keys: tuple[tuple[str, ...], tuple[str, ...]]
    columns: tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]
    before_ms: int = 0
    after_ms: int = 0
    size_ms: int = 0
    slide_ms: int = 0

    @staticmethod
    def of(plan: Mapping[str, Any]) -> JoinSpec:
        """From a job's plan."""
        left, right = (tuple((name, kind) for name, kind in side) for side in plan["columns"])
        near, window = plan.get("within") or {}, plan.get("window") or {}
        size = window.get("size_ms", 0)
        return JoinSpec(
            how=plan["how"],
            keys=(tuple(plan["keys"][LEFT]), tuple(plan["keys"][RIGHT])),
            columns=(left, right),
            before_ms=near.get("before_ms", 0),
            after_ms=near.get("after_ms", 0),
            size_ms=size,
            slide_ms=window.get("slide_ms", size),
        )

    def out_columns(self) -> list[tuple[str, str, str, str | None]]:
        """For each result column: name, type, source column, and the source if there is no left record."""
        once = dict(zip(self.keys[RIGHT], self.keys[LEFT], strict=True))
        places = {name: side_column(RIGHT, place) for place, (name, _) in enumerate(self.columns[RIGHT])}
        found: list[tuple[str, str, str, str | None]] = []
        for place, (name, kind) in enumerate(self.columns[LEFT]):
            other = places.get(name) if once.get(name) == name else None
            found.append((name, kind, side_column(LEFT, place), other))
        for name, kind in self.columns[RIGHT]:
            if once.get(name) != name:
                found.append((name, kind, places[name], None))
        return found

    def bounds(self, stamps: Ints) -> tuple[Ints, Ints]:
        """For each left record the minimum and maximum time of a right one."""
        if not self.size_ms:
            return stamps - self.before_ms, stamps + self.after_ms
        cells = stamps - stamps % self.slide_ms
        return cells - self.size_ms + self.slide_ms, cells + self.size_ms - 1

    def waits_until(self, stamps: Ints, sides: Ints) -> Ints:
        """The low at which no record on time can match any more, and an unmatched one is emitted."""
        if self.size_ms:
            return stamps - stamps % self.slide_ms + self.size_ms
        return stamps + np.where(sides == LEFT, self.after_ms, self.before_ms) + 1

    def times(self, left: Ints, right: Ints) -> Ints:
        """How often each pair is emitted: once for each window that contains both."""
        if not self.size_ms:
            return np.ones(len(left), dtype=np.int64)
        apart = np.abs((left - left % self.slide_ms) - (right - right % self.slide_ms))
        return (self.size_ms - apart) // self.slide_ms


class StreamJoin:
    """The step logic of joins. Rows have `side` and all columns; those of the other side are null."""

    def __init__(self, spec: JoinSpec) -> None:
        self._spec, self._out = spec, spec.out_columns()
        own = [
            (side_column(side, place), ARROW_TYPES[kind])
            for side in (LEFT, RIGHT)
            for place, (_, kind) in enumerate(spec.columns[side])
        ]
        self._schema = pa.schema(
            [
                ("_key", pa.string()),
                ("_ts", pa.int64()),
                (SIDE, pa.int64()),
                (_MATCHED, pa.bool_()),
                *own,
            ]
        )

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return {STREAM: {name: kind for name, kind, _, _ in self._out}}

    def needed_states(self, table: pa.Table) -> Iterable[str]:
        found: list[str] = table.column("_key").unique().to_pylist()
        return found

    def run(self, given: StepInput) -> StepResult:
        flags = Lateness.of(given)
        held = decode_rows(given.states, self._schema, job=given.job, operator="join")
        made: list[pa.Table] = []
        dropped = 0
        for stretch in flags.stretches(given, apart=bool(flags.behind.any())):
            fresh = self._fresh(stretch)
            dropped += stretch.rows.num_rows - fresh.num_rows
            fresh, unequal = self._without_null_keys(fresh)
            held, pairs = self._paired(held, fresh)
            held, alone = self._expired(held, stretch.low_after)
            made += [table for table in (unequal, pairs, alone) if table.num_rows]
        keys = {*self.needed_states(given.table), *(timer.key for timer in given.timers)}
        states, timers = self._encoded(held, keys)
        counters = flags.counters(len(given.timers), dropped)
        return keyed_result(given, states, timers, made, counters=counters, tag=_TAG)

    def _fresh(self, stretch: Stretch) -> pa.Table:
        rows = stretch.rows
        if SIDE not in rows.column_names:
            return self._schema.empty_table()
        sides = np.asarray(rows.column(SIDE).to_numpy(), dtype=np.int64)
        flagged = np.asarray(rows.column("_late").to_numpy(), dtype=np.bool_)
        waits = self._spec.waits_until(times_of(rows), sides) > stretch.low
        chosen = rows.filter(pa.array(~flagged & (~stretch.late | waits)))
        blank = pa.array(np.zeros(chosen.num_rows, dtype=np.bool_))
        return chosen.append_column(_MATCHED, blank).select(self._schema.names).cast(self._schema)

    def _without_null_keys(self, fresh: pa.Table) -> tuple[pa.Table, pa.Table]:
        """The rows that can match, and the results of those that cannot."""
        keys = fresh.column("_key").combine_chunks()
        nulls = has_null_part(keys, len(self._spec.keys[LEFT]))
        if not nulls.any():
            return fresh, self._results(fresh, _NONE, _NONE, _NONE)
        return fresh.filter(pa.array(~nulls)), self._unmatched_results(fresh, nulls)

    def _paired(self, held: pa.Table, fresh: pa.Table) -> tuple[pa.Table, pa.Table]:
        """All waiting rows, and the pairs with at least one new row."""
        rows = pa.concat_tables([held, fresh]).combine_chunks()
        sides, stamps = _ints(rows, SIDE), times_of(rows)
        is_fresh = np.arange(rows.num_rows) >= held.num_rows
        codes = rows.column("_key").combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
        left, right = np.flatnonzero(sides == LEFT), np.flatnonzero(sides == RIGHT)
        lows, highs = self._spec.bounds(stamps[left])
        one, other = _matches(codes[left], lows, highs, codes[right], stamps[right])
        one, other = left[one], right[other]
        new = is_fresh[one] | is_fresh[other]
        one, other = one[new], other[new]
        matched = np.asarray(rows.column(_MATCHED).to_numpy(), dtype=np.bool_).copy()
        matched[one] = matched[other] = True
        rows = rows.set_column(rows.column_names.index(_MATCHED), _MATCHED, pa.array(matched))
        often = self._spec.times(stamps[one], stamps[other])
        one, other = np.repeat(one, often), np.repeat(other, often)
        later = np.maximum(stamps[one], stamps[other])
        return rows, self._results(rows, one, other, later)

    def _expired(self, rows: pa.Table, low: Millis) -> tuple[pa.Table, pa.Table]:
        """The rows that still wait, and the results of unmatched rows whose wait has ended."""
        sides = _ints(rows, SIDE)
        until = self._spec.waits_until(times_of(rows), sides)
        ended = until <= low
        if not ended.any():
            return rows, self._results(rows, _NONE, _NONE, _NONE)
        matched = np.asarray(rows.column(_MATCHED).to_numpy(), dtype=np.bool_)
        return rows.filter(pa.array(~ended)), self._unmatched_results(rows, ended & ~matched)

    def _unmatched_results(self, rows: pa.Table, chosen: npt.NDArray[np.bool_]) -> pa.Table:
        """Results of rows without a match, for the sides that the kind of join includes."""
        sides = _ints(rows, SIDE)
        until = self._spec.waits_until(times_of(rows), sides)
        sides_included = {"inner": (), "left": (LEFT,), "outer": (LEFT, RIGHT)}[self._spec.how]
        alone = np.flatnonzero(chosen & np.isin(sides, sides_included))
        keys = rows.column("_key").take(pa.array(alone)).to_pylist()
        order = sorted(range(len(alone)), key=lambda n: (until[alone[n]], keys[n], n))
        alone = alone[np.array(order, dtype=np.int64)]
        is_left = sides[alone] == LEFT
        return self._results(
            rows, np.where(is_left, alone, -1), np.where(is_left, -1, alone), until[alone] - 1
        )

    def _results(self, rows: pa.Table, left: Ints, right: Ints, stamps: Ints) -> pa.Table:
        """Result rows; -1 means no record on that side."""
        ours, theirs = (pa.array(np.maximum(side, 0), mask=side < 0) for side in (left, right))
        has_left = pa.array(left >= 0)
        either = pa.array(np.where(left >= 0, left, right))
        columns: dict[str, Any] = {
            "_ts": pa.array(stamps),
            "_key": rows.column("_key").take(either),
            "_late": pa.array(np.zeros(len(left), dtype=np.bool_)),
        }
        for name, kind, source, otherwise in self._out:
            found = rows.column(source).take(ours if source[0] == "l" else theirs)
            if otherwise is not None:
                found = pc.if_else(has_left, found, rows.column(otherwise).take(theirs))
            columns[name] = found.cast(ARROW_TYPES[kind])
        return pa.table(columns)

    def _encoded(
        self, rows: pa.Table, keys: Iterable[str]
    ) -> tuple[dict[str, bytes | None], tuple[TimerRow, ...]]:
        """State and timer of each key; None if no record waits."""
        waiting: dict[str, list[Any]] = {}
        ends: dict[str, int] = {}
        until = self._spec.waits_until(times_of(rows), _ints(rows, SIDE)).tolist()
        columns = [rows.column(name).to_pylist() for name in self._schema.names]
        for end, key, *values in zip(until, *columns, strict=True):
            waiting.setdefault(key, []).append(values)
            ends[key] = min(end, ends.get(key, end))
        states: dict[str, bytes | None] = dict.fromkeys(keys)
        encode = msgspec.msgpack.Encoder().encode
        states |= {key: encode(values) for key, values in waiting.items()}
        timers = tuple(TimerRow(key=key, tag=_TAG, at_ms=at, hold_ms=at - 1) for key, at in ends.items())
        return states, timers


_NONE = np.empty(0, dtype=np.int64)


def _matches(
    left: Ints, lows: Ints, highs: Ints, right: Ints, stamps: Ints
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Indices of all pairs with the same code and the right time within the left bounds.

    Ordered by left row, then by the time of the right row.
    """
    if not len(left) or not len(right):
        return _NONE, _NONE
    times = np.unique(stamps)
    size = len(times) + 1
    names = right * size + np.searchsorted(times, stamps)
    order = np.argsort(names, kind="stable")
    ordered = names[order]
    first = np.searchsorted(ordered, left * size + np.searchsorted(times, lows, side="left"), side="left")
    last = np.searchsorted(ordered, left * size + np.searchsorted(times, highs, side="right"), side="left")
    counts = np.maximum(last - first, 0)
    one = np.repeat(np.arange(len(left), dtype=np.int64), counts)
    within = np.arange(len(one), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return one, order[np.repeat(first, counts) + within].astype(np.int64)


def _ints(rows: pa.Table, name: str) -> Ints:
    return np.asarray(rows.column(name).to_numpy(), dtype=np.int64)
