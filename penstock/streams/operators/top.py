"""The first `count` results of each window, ordered by one of their values.

Pure. A key is a window with the values of the `per` columns. Its state row is the current list; the list is
emitted when the low watermark passes the window's end. NULL is the smallest value. Results with equal values
are ordered by their columns, so that the list does not depend on the order of arrival or on cuts of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.streams.bus.log import ARROW_TYPES
from penstock.streams.dsl.windows import RANK, WINDOW_END
from penstock.streams.operators.aggregates import in_order
from penstock.streams.operators.blocks import decode_rows
from penstock.streams.operators.windowed import STREAM, Lateness, keyed_result
from penstock.streams.rows.row_store import TimerRow
from penstock.streams.step.keyed_work import StepInput, StepResult
from penstock.streams.step.watermark import Ints

_TAG = "top"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopSpec:
    """The plan of a top as values. `columns`: of the results, without the rank."""

    count: int
    by: str
    lowest: bool
    columns: tuple[tuple[str, str], ...]

    @staticmethod
    def of(plan: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> TopSpec:
        """From a job's plan and the columns of its output."""
        return TopSpec(
            count=plan["count"],
            by=plan["by"],
            lowest=plan["lowest"],
            columns=tuple((name, kind) for name, kind in columns if name != RANK),
        )


class TopOfWindow:
    """The step logic: a state row and a timer per window."""

    def __init__(self, spec: TopSpec) -> None:
        self._spec = spec
        self._schema = pa.schema(
            [("_key", pa.string()), *((name, ARROW_TYPES[kind]) for name, kind in spec.columns)]
        )

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return {STREAM: {**dict(self._spec.columns), RANK: "int"}}

    def needed_states(self, table: pa.Table) -> Iterable[str]:
        found: list[str] = table.column("_key").unique().to_pylist()
        return found

    def run(self, given: StepInput) -> StepResult:
        flags = Lateness.of(given)
        rows, dropped = decode_rows(given.states, self._schema, job=given.job, operator="top"), 0
        if given.table.num_rows:
            # The window of a result on time is not closed by an earlier cut of this step.
            chosen = ~flags.late & (_ends(given.table) > flags.lows)
            fresh = given.table.filter(pa.array(chosen)).select(self._schema.names)
            dropped = given.table.num_rows - fresh.num_rows
            rows = pa.concat_tables([rows, fresh.cast(self._schema)])
        rows, ranks = self._first(rows.combine_chunks())
        ended = _ends(rows) <= given.low_after
        made = _results(rows.filter(pa.array(ended)), ranks[ended])
        keys = {*self.needed_states(given.table), *(timer.key for timer in given.timers)}
        states, timers = _encoded(rows.filter(pa.array(~ended)), keys)
        return keyed_result(
            given,
            states,
            timers,
            [made] if made.num_rows else [],
            counters=flags.counters(len(given.timers), dropped),
            tag=_TAG,
        )

    def _first(self, rows: pa.Table) -> tuple[pa.Table, Ints]:
        """The first rows of each key, in order, with their ranks."""
        if not rows.num_rows:
            return rows, np.empty(0, dtype=np.int64)
        keys, value = _codes(rows.column("_key")), _codes(rows.column(self._spec.by))
        ties = [_codes(rows.column(name)) for name, _ in reversed(self._spec.columns)]
        order = np.lexsort((*ties, value if self._spec.lowest else -value, keys))
        firsts = np.flatnonzero(np.diff(keys[order], prepend=-1))
        places = np.arange(len(order)) - np.repeat(firsts, np.diff(np.append(firsts, len(order))))
        chosen = places < self._spec.count
        return rows.take(pa.array(order[chosen])), places[chosen] + 1


def _results(rows: pa.Table, ranks: Ints) -> pa.Table:
    """The lists of ended windows, ordered by window end and key."""
    made = rows.append_column(RANK, pa.array(ranks, pa.int32()))
    made = made.append_column("_ts", pa.array(_ends(rows) - 1))
    made = made.append_column("_late", pa.array(np.zeros(len(ranks), dtype=np.bool_)))
    return made.sort_by([("_ts", "ascending"), ("_key", "ascending"), (RANK, "ascending")])


def _encoded(rows: pa.Table, keys: Iterable[str]) -> tuple[dict[str, bytes | None], tuple[TimerRow, ...]]:
    """State and timer of each key; None if its window has ended."""
    held: dict[str, list[Any]] = {}
    ends: dict[str, int] = {}
    columns = [column.to_pylist() for column in rows.columns]
    for end, key, *values in zip(_ends(rows).tolist(), *columns, strict=True):
        held.setdefault(key, []).append(values)
        ends[key] = end
    states: dict[str, bytes | None] = dict.fromkeys(keys)
    encode = msgspec.msgpack.Encoder().encode
    states |= {key: encode(values) for key, values in held.items()}
    timers = tuple(TimerRow(key=key, tag=_TAG, at_ms=at, hold_ms=at - 1) for key, at in ends.items())
    return states, timers


def _ends(rows: pa.Table) -> Ints:
    return np.asarray(rows.column(WINDOW_END).to_numpy(), dtype=np.int64)


def _codes(column: pa.ChunkedArray) -> Ints:
    """Ranks of the values; NULL is the smallest."""
    whole = column.combine_chunks()
    if pa.types.is_list(whole.type):
        encode = msgspec.msgpack.Encoder().encode
        whole = pa.array(
            [None if value is None else encode(value) for value in whole.to_pylist()], pa.binary()
        )
    elif pa.types.is_boolean(whole.type):
        whole = whole.cast(pa.int8())
    else:
        whole = in_order(whole)
    ranks = np.asarray(pc.rank(whole, "ascending", tiebreaker="dense").to_numpy(), dtype=np.int64)
    return np.where(np.asarray(whole.is_null()), 0, ranks)
