"""Aggregates per key and window of event time, tumbling and sliding: state, results, when they are given.

Pure. A window's result is given when the low watermark passes its end, stamped one millisecond before it.
Records flagged late are dropped and counted; results depend on the log and its marks alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.streams.bus.log import LOW_COLUMN, LOW_MIN
from penstock.streams.operators.aggregates import KEY, Aggregates, Partials, Value
from penstock.streams.operators.blocks import INDEX, Blocks
from penstock.streams.operators.keys_back import key_columns_of
from penstock.streams.rows.row_store import TimerRow
from penstock.streams.step_logic import StepInput, StepResult
from penstock.streams.watermark import Cut, Ints
from penstock.streams.windows import WINDOW_END, WINDOW_START, Firing, Spans

STREAM = "out"
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """An aggregate's plan as values. `columns`: of the results, in order."""

    keys: tuple[str, ...]
    spans: Spans
    firing: Firing
    values: tuple[Value, ...]
    columns: tuple[tuple[str, str], ...]

    @property
    def key_columns(self) -> tuple[tuple[str, str], ...]:
        """Names and types of the key's columns."""
        kinds = dict(self.columns)
        return tuple((name, kinds[name]) for name in self.keys)

    @staticmethod
    def of(plan: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> WindowSpec:
        """From a job's plan and the columns of its output."""
        window = plan["window"]
        return WindowSpec(
            keys=tuple(plan["keys"]),
            spans=Spans(
                kind=window["kind"],
                size_ms=window.get("size_ms") or window["gap_ms"],
                slide_ms=window.get("slide_ms", 0),
            ),
            firing=Firing(**plan["firing"]),
            values=tuple(
                Value(
                    name=value["name"],
                    function=value["function"],
                    column=value["column"],
                    parameter=value["parameter"],
                    type=value["type"],
                )
                for value in plan["columns"]
            ),
            columns=tuple((name, kind) for name, kind in columns),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Records between two cuts: the low while they are read, and the low after them."""

    rows: pa.Table
    late: Flags  # or on time by the flag and yet behind the low
    low: Millis
    low_after: Millis
    reached: Ints  # of each record: the low that decides whether it is beyond the lateness


class WindowedAggregate:
    """The step logic of tumbling and sliding windows with one result each.

    A cell is as long as the step between windows, so that a record is added once however many windows it is
    in.
    """

    def __init__(self, spec: WindowSpec) -> None:
        self._spec, self._aggregates = spec, Aggregates(spec.values)
        self._size = spec.spans.size_ms
        self._slide = spec.spans.slide_ms or spec.spans.size_ms

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return {STREAM: dict(self._spec.columns)}

    def wanted(self, table: pa.Table) -> Iterable[str]:
        return (INDEX,)

    def run(self, given: StepInput) -> StepResult:
        blocks = Blocks(self._aggregates, given)
        flags = Lateness.of(given)
        made: list[pa.Table] = []
        fired = dropped = 0
        # A record that is on time is in no window that an earlier cut of this step closes: the whole range
        # at once gives the same results. One behind the low by somebody's mistake is not so.
        for stretch in flags.stretches(given, apart=bool(flags.behind.any())):
            dropped += self._add(blocks, stretch)
            result, windows = self._fire(blocks, stretch.low, stretch.low_after)
            fired += windows
            if result is not None:
                made.append(result)
        return blocks_result(blocks, made, flags.counters(fired, dropped))

    def _add(self, blocks: Blocks, stretch: Stretch) -> int:
        """Records into their windows; how many are in none, because they are late."""
        stamps = times_of(stretch.rows)
        cells = stamps - stamps % self._slide
        is_open = ~stretch.late | (cells + self._size > stretch.low)
        flagged = np.asarray(stretch.rows.column("_late").to_numpy(), dtype=np.bool_)
        chosen = is_open & ~flagged
        rows = stretch.rows if chosen.all() else stretch.rows.filter(pa.array(chosen))
        if rows.num_rows:
            blocks.add(self._aggregates.merge([self._lifted(rows, cells[chosen])]))
        return len(chosen) - int(np.count_nonzero(chosen))

    def _fire(self, blocks: Blocks, low: Millis, low_after: Millis) -> tuple[pa.Table | None, int]:
        due: dict[int, list[int]] = {}  # end of a window -> its cells
        for cell in blocks.cells(0):
            # Ends are multiples of the slide, as cells are: only those that the low passes now.
            first = max(cell + self._slide, low - low % self._slide + self._slide)
            for end in range(first, min(cell + self._size, low_after) + 1, self._slide):
                due.setdefault(end, []).append(cell)
        if not due:
            return None, 0
        cells = {cell for group in due.values() for cell in group}
        closed = {cell for cell in cells if cell + self._size <= low_after}
        found = blocks.take(closed)
        single = {cell for cell in cells - closed if blocks.is_one_block(cell)}
        found += blocks.look(single)
        kept = blocks.take(cells - closed - single)
        if kept:
            merged = self._aggregates.merge(kept)
            blocks.add(merged)
            found.append(merged)
        if self._slide != self._size:
            held = self._aggregates.merge(found)
            found = [held.where(group).in_cell(end - self._size) for end, group in sorted(due.items())]
        return self._results(self._aggregates.merge(found)), len(due)

    def _lifted(self, rows: pa.Table, cells: Ints) -> Partials:
        return self._aggregates.lift(rows, cells)

    def _results(self, merged: Partials) -> pa.Table:
        return window_rows(self._spec, merged, self._aggregates, ends=merged.cells + self._size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """For each record of a step: the low when it is read, and what follows from it."""

    lows: Ints
    late: Flags
    behind: Flags  # on time by their flag, and yet behind the low
    reached: Ints  # the low at its source of a record that is late there, never below `lows`; else `lows`

    @staticmethod
    def of(given: StepInput) -> Lateness:
        positions = np.array([cut.position for cut in given.cuts], dtype=np.int64)
        lows = np.array([given.low, *(cut.low for cut in given.cuts)], dtype=np.int64)
        at = lows[np.searchsorted(positions, np.arange(given.table.num_rows), side="right")]
        late = np.asarray(given.table.column("_late").to_numpy(), dtype=np.bool_)
        name, reached = LOW_COLUMN[0], at
        said = given.table.column(name) if name in given.table.column_names else None
        if said is not None and said.null_count < len(said):
            source = np.asarray(said.fill_null(LOW_MIN).to_numpy(), dtype=np.int64)
            reached = np.where(late, np.maximum(at, source), at)
        behind = ~late & (times_of(given.table) < at)
        return Lateness(lows=at, late=late, behind=behind, reached=reached)

    def stretches(self, given: StepInput, *, apart: bool) -> Iterator[Stretch]:
        """The step's records, all at once or from cut to cut."""
        late = self.late | self.behind
        last = Cut(position=given.table.num_rows, low=given.low_after)
        cuts = [*given.cuts, last] if apart else [last]
        done, low = 0, given.low
        for cut in cuts:
            here = slice(done, cut.position)
            yield Stretch(
                rows=given.table.slice(done, cut.position - done),
                late=late[here],
                low=low,
                low_after=cut.low,
                reached=self.reached[here],
            )
            done, low = cut.position, cut.low

    def counters(self, fired: int, dropped: int) -> dict[str, int]:
        """As every step counts. `dropped`: late records that count in no result."""
        return {
            "records": len(self.late),
            "late": int(np.count_nonzero(self.late)),
            "dropped": dropped,
            "behind_low": int(np.count_nonzero(self.behind)),
            "timers": fired,
        }


def window_rows(
    spec: WindowSpec,
    merged: Partials,
    aggregates: Aggregates,
    *,
    ends: Ints,
    stamps: Ints | None = None,
    late: bool = False,
) -> pa.Table:
    """Results of windows, a row per key: by end, then by key. Cells of `merged` are the windows' starts.

    `stamps`: of each row; otherwise one millisecond before the end.
    """
    columns = aggregates.finish(merged)
    starts = merged.cells
    times = ends - 1 if stamps is None else stamps
    keys = merged.main.column(KEY).combine_chunks()
    rows = pa.table(
        {
            "_ts": pa.array(times, pa.int64()),
            "_key": keys,
            "_late": pa.array(np.full(len(starts), late)),
            **key_columns_of(keys, spec.key_columns),
            WINDOW_START: pa.array(starts),
            WINDOW_END: pa.array(ends),
            **columns,
        }
    )
    return rows.sort_by([("_ts", "ascending"), (WINDOW_START, "ascending"), ("_key", "ascending")])


def step_result(
    states: Mapping[str, bytes | None], made: Sequence[pa.Table], counters: Mapping[str, int]
) -> StepResult:
    """What a step over tables gives back."""
    produced = {STREAM: pa.concat_tables(made)} if made else {}
    count = sum(table.num_rows for table in made)
    return StepResult(states=states, produced=produced, counters={**counters, "productions": count})


def blocks_result(blocks: Blocks, made: Sequence[pa.Table], counters: Mapping[str, int]) -> StepResult:
    """The same of an operator whose rows are blocks of many keys."""
    result = step_result(blocks.changes(), made, counters)
    return replace(result, made=blocks.made, keys=blocks.keys)


def kept_result(
    given: StepInput,
    states: Mapping[str, bytes | None],
    timers: tuple[TimerRow, ...],
    made: Sequence[pa.Table],
    *,
    counters: Mapping[str, int],
    tag: str,
) -> StepResult:
    """The same of an operator with a state and one timer per key; None: of that key nothing is kept."""
    changed = {key: row for key, row in states.items() if given.states.get(key) != row}
    return replace(
        step_result(changed, made, counters),
        timers_set=timers,
        timers_deleted=tuple((key, tag) for key, row in states.items() if row is None),
    )


def times_of(table: pa.Table) -> Ints:
    """Event times."""
    return np.asarray(table.column("_ts").to_numpy(), dtype=np.int64)
