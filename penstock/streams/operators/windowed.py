"""Aggregates per key and window of event time, tumbling and sliding.

Pure. A window's result is emitted when the low watermark passes its end, with a timestamp one millisecond
before the end. Late records are dropped and counted; results depend only on the log and its marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.clock import Millis
from penstock.streams.bus.log import ARROW_TYPES, LOW_COLUMN, LOW_MAX, LOW_MIN, key_parts, key_values
from penstock.streams.dsl.windows import PARTIAL, WINDOW_END, WINDOW_START, Firing, Spans
from penstock.streams.operators.aggregates import CELL, KEY, Aggregates, AggregateValue, Partials
from penstock.streams.operators.blocks import INDEX, Blocks
from penstock.streams.rows.row_store import TimerRow
from penstock.streams.step.keyed_work import StepInput, StepResult
from penstock.streams.step.watermark import Cut, Ints


def key_columns_of(keys: pa.Array, columns: Sequence[tuple[str, str]]) -> dict[str, pa.Array]:
    """The columns of the key, with the declared names and types."""
    if len(columns) == 1:
        (name, kind) = columns[0]
        keys = key_values(keys)
        if kind != "string":
            keys = pc.if_else(pc.equal(keys, ""), pa.scalar(None, pa.string()), keys)
        return {name: keys.cast(ARROW_TYPES[kind])}
    parts = [key_parts(key, len(columns)) for key in keys.to_pylist()]
    return {
        name: pa.array([part[place] for part in parts], pa.string()).cast(ARROW_TYPES[kind])
        for place, (name, kind) in enumerate(columns)
    }


STREAM = "out"
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """An aggregate's plan as values. `columns`: of the results, in order."""

    keys: tuple[str, ...]
    spans: Spans
    firing: Firing
    values: tuple[AggregateValue, ...]
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
                AggregateValue(
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
    """Records between two cuts, the low while they are read, and the low after them."""

    rows: pa.Table
    late: Flags  # also records behind the low without the late flag
    low: Millis
    low_after: Millis
    reached: Ints  # per record: the low that decides whether it is beyond the lateness


class WindowedAggregate:
    """The step logic of tumbling and sliding windows with one result each.

    A cell is as long as the slide, so that a record is added once, independent of its number of windows.
    """

    def __init__(self, spec: WindowSpec) -> None:
        self._spec, self._aggregates = spec, Aggregates(spec.values)
        self._size = spec.spans.size_ms
        self._slide = spec.spans.slide_ms or spec.spans.size_ms

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return {STREAM: dict(self._spec.columns)}

    def needed_states(self, table: pa.Table) -> Iterable[str]:
        return (INDEX,)

    def run(self, given: StepInput) -> StepResult:
        blocks = Blocks(self._aggregates, given)
        flags = Lateness.of(given)
        made: list[pa.Table] = []
        fired = dropped = 0
        # A record on time is in no window that an earlier cut of this step closes, so the whole range can be
        # processed at once; not so if records are behind the low.
        for stretch in flags.stretches(given, apart=bool(flags.behind.any())):
            dropped += self._add(blocks, stretch)
            result, windows = self._fire(blocks, stretch.low, stretch.low_after)
            fired += windows
            if result is not None:
                made.append(result)
        return blocks_result(blocks, made, flags.counters(fired, dropped))

    def _add(self, blocks: Blocks, stretch: Stretch) -> int:
        """Add records to their windows; returns the number of late records that are in none."""
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
        found += blocks.read(single)
        remaining = blocks.take(cells - closed - single)
        if remaining:
            merged = self._aggregates.merge(remaining)
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
    """For each record of a step: the low when it is read, and whether it is late."""

    lows: Ints
    late: Flags
    behind: Flags  # behind the low without the late flag
    reached: Ints  # for records that are late at the source the low there, at least `lows`; else `lows`

    @staticmethod
    def of(given: StepInput) -> Lateness:
        positions = np.array([cut.position for cut in given.cuts], dtype=np.int64)
        lows = np.array([given.low, *(cut.low for cut in given.cuts)], dtype=np.int64)
        at = lows[np.searchsorted(positions, np.arange(given.table.num_rows), side="right")]
        late = np.asarray(given.table.column("_late").to_numpy(), dtype=np.bool_)
        name, reached = LOW_COLUMN[0], at
        source_lows = given.table.column(name) if name in given.table.column_names else None
        if source_lows is not None and source_lows.null_count < len(source_lows):
            source = np.asarray(source_lows.fill_null(LOW_MIN).to_numpy(), dtype=np.int64)
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
        """The counters of a step. `dropped`: late records that are in no result."""
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
    """Results of windows, one row per key, ordered by end and key. Cells of `merged` are window starts.

    `stamps`: the timestamp of each row; default: one millisecond before the end.
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
    """The step result for produced tables."""
    produced = {STREAM: pa.concat_tables(made)} if made else {}
    count = sum(table.num_rows for table in made)
    return StepResult(states=states, produced=produced, counters={**counters, "productions": count})


def blocks_result(blocks: Blocks, made: Sequence[pa.Table], counters: Mapping[str, int]) -> StepResult:
    """The step result of an operator whose rows are blocks of many keys."""
    result = step_result(blocks.changes(), made, counters)
    return replace(result, made=blocks.made, keys=blocks.keys)


def keyed_result(
    given: StepInput,
    states: Mapping[str, bytes | None],
    timers: tuple[TimerRow, ...],
    made: Sequence[pa.Table],
    *,
    counters: Mapping[str, int],
    tag: str,
) -> StepResult:
    """The step result of an operator with a state and one timer per key; None: no state."""
    changed = {key: row for key, row in states.items() if given.states.get(key) != row}
    return replace(
        step_result(changed, made, counters),
        timers_set=timers,
        timers_deleted=tuple((key, tag) for key, row in states.items() if row is None),
    )


def times_of(table: pa.Table) -> Ints:
    """Event times."""
    return np.asarray(table.column("_ts").to_numpy(), dtype=np.int64)


_NEW, _GIVEN = 0, 1


class FiringAggregate:
    """The step logic of windows with early results or late updates; processes each cut separately."""

    def __init__(self, spec: WindowSpec) -> None:
        self._spec, self._aggregates = spec, Aggregates(spec.values)
        self._size = spec.spans.size_ms
        self._slide = spec.spans.slide_ms or spec.spans.size_ms
        self._firing = spec.firing
        self._accumulates = spec.firing.mode == "accumulating"
        self._lateness_ms = spec.firing.lateness_ms if spec.firing.late == "update" else 0

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return {STREAM: dict(self._spec.columns)}

    def needed_states(self, table: pa.Table) -> Iterable[str]:
        return (INDEX,)

    def run(self, given: StepInput) -> StepResult:
        blocks = Blocks(self._aggregates, given)
        flags = Lateness.of(given)
        made: list[pa.Table] = []
        fired = dropped = 0
        for stretch in flags.stretches(given, apart=True):
            results, beyond = self._add(blocks, stretch)
            made += results
            dropped += beyond
            results = self._fire(blocks, stretch.low, stretch.low_after)
            made += results
            fired += len(results)
        return blocks_result(blocks, made, flags.counters(fired, dropped))

    def _add(self, blocks: Blocks, stretch: Stretch) -> tuple[list[pa.Table], int]:
        """Add records to their windows. Returns the updates of windows that have fired, and the number of
        late records that are in no window.
        """
        rows, late, reached = stretch.rows, stretch.late, stretch.reached
        if self._firing.late == "drop":
            flagged = np.asarray(rows.column("_late").to_numpy(), dtype=np.bool_)
            rows, late, reached = rows.filter(pa.array(~flagged)), late[~flagged], reached[~flagged]
        places, cells = self._expanded(times_of(rows))
        ends = cells + self._size
        # The low at the source decides what is too late, so that it does not depend on when this step runs.
        counts = ~late[places] | (ends + self._lateness_ms > reached[places])
        is_open = counts & (~late[places] | (ends > stretch.low))
        if is_open.any():
            open_rows = rows.take(pa.array(places[is_open]))
            blocks.add(self._aggregates.merge([self._aggregates.lift(open_rows, cells[is_open])]))
        dropped = stretch.rows.num_rows - len(np.unique(places[counts]))
        is_update = counts & ~is_open
        if not is_update.any():
            return [], dropped
        updates = self._aggregates.lift(rows.take(pa.array(places[is_update])), cells[is_update])
        return self._updated(blocks, updates, places[is_update]), dropped

    def _expanded(self, stamps: Ints) -> tuple[Ints, Ints]:
        """For each record and each of its windows: the record's index and the window's start."""
        last = stamps - stamps % self._slide
        steps = np.arange(self._size // self._slide, dtype=np.int64)[::-1] * self._slide
        places = np.repeat(np.arange(len(stamps), dtype=np.int64), len(steps))
        return places, (last[:, None] - steps[None, :]).reshape(-1)

    def _updated(self, blocks: Blocks, lifted: Partials, places: Ints) -> list[pa.Table]:
        """The result after each of these records, in order."""
        held: list[Partials] = []
        if self._accumulates:
            held = blocks.take(np.unique(lifted.cells).tolist(), _GIVEN)
        made = []
        for chosen in _without_duplicates(lifted):
            mine = lifted.rows(chosen)
            result = self._aggregates.merge([mine])
            if self._accumulates:
                whole = self._aggregates.merge([*held, result])
                held = [whole]
                result = _same_groups(self._aggregates, whole, result)
            ends = result.cells + self._size
            rows = window_rows(self._spec, result, self._aggregates, ends=ends, late=True)
            made.append(_with_place(rows, mine, places[chosen]))
        for part in held:
            blocks.add(part, _GIVEN)
        whole_table = pa.concat_tables(made).sort_by([("_place", "ascending"), ("window_end", "ascending")])
        return [whole_table.drop_columns(["_place"])]

    def _fire(self, blocks: Blocks, low: Millis, low_after: Millis) -> list[pa.Table]:
        if low_after <= low:
            return []
        new, given = blocks.cells(_NEW), blocks.cells(_GIVEN)
        due: dict[int, Millis] = {}  # window -> when its result is due
        for cell in new | given:
            end = cell + self._size
            if low < end <= low_after:
                due[cell] = end
            elif cell in new and end > low_after:
                early = self._early(cell, low, low_after)
                if early is not None:
                    due[cell] = early
        made = []
        for cell, at in sorted(due.items(), key=lambda item: (item[1], item[0])):
            result = self._result(blocks, cell, on_time=at == cell + self._size)
            if result is not None:
                ends = result.cells + self._size
                stamps = np.full(len(ends), at - 1, dtype=np.int64)
                made.append(window_rows(self._spec, result, self._aggregates, ends=ends, stamps=stamps))
        gone = [
            cell
            for cell in blocks.cells(_NEW) | blocks.cells(_GIVEN)
            if cell + self._size + self._lateness_ms <= low_after
        ]
        blocks.drop(gone)
        return made

    def _early(self, cell: int, low: Millis, low_after: Millis) -> Millis | None:
        early = self._firing.early_ms
        if early is None or low_after >= LOW_MAX:
            return None
        at = cell + (low_after - cell) // early * early
        return at if at > max(low, cell) else None

    def _result(self, blocks: Blocks, cell: int, *, on_time: bool) -> Partials | None:
        """The result of a window now; it is stored as long as updates are possible."""
        fresh = blocks.take([cell], _NEW)
        if not self._accumulates:
            return self._aggregates.merge(fresh) if fresh else None
        whole = self._aggregates.merge([*fresh, *blocks.take([cell], _GIVEN)])
        blocks.add(whole, _GIVEN)
        if on_time:
            return whole
        return _same_groups(self._aggregates, whole, self._aggregates.merge(fresh))


def _same_groups(aggregates: Aggregates, whole: Partials, wanted: Partials) -> Partials:
    """The groups of `whole` that are also in `wanted`."""
    found = [
        whole.where([cell]).of_keys(wanted.where([cell]).main.column(KEY).combine_chunks())
        for cell in np.unique(wanted.cells).tolist()
    ]
    return aggregates.merge(found)


def _without_duplicates(lifted: Partials) -> Sequence[Ints]:
    """Rounds of rows in which no group occurs twice; the rows of a group stay in order."""
    keys = lifted.main.column(KEY).combine_chunks().dictionary_encode().indices.to_numpy()
    groups = np.unique(np.stack((lifted.cells, keys)), axis=1, return_inverse=True)[1].reshape(-1)
    order = np.argsort(groups, kind="stable")
    firsts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    lengths = np.diff(np.append(firsts, len(order)))
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order)) - np.repeat(firsts, lengths)
    return [np.flatnonzero(number == turn) for turn in range(int(number.max()) + 1)]


def _with_place(rows: pa.Table, lifted: Partials, places: Ints) -> pa.Table:
    """Results with the index of the record that caused each."""
    made_by = pa.table(
        {
            "window_start": lifted.main.column(CELL),
            "_key": lifted.main.column(KEY),
            "_place": pa.array(places),
        }
    )
    return rows.join(made_by, keys=["window_start", "_key"], join_type="inner", use_threads=False)


_BUCKET, _NUMBER = "bucket", "number"


_Line = tuple[int, str, int, int | None]  # cell, key, bucket, number
_Counts = tuple[list[int], list[int | None]]


class _Part(msgspec.Struct, array_like=True):
    """The partial results of one key and cell: columns by name, and buckets and numbers of some values."""

    main: dict[str, Any]
    long: dict[str, _Counts]


class PartialAggregate(WindowedAggregate):
    """The first phase: cells as long as the slide, each emitted once as partial results."""

    def __init__(self, spec: WindowSpec) -> None:
        step = spec.spans.slide_ms or spec.spans.size_ms
        super().__init__(replace(spec, spans=Spans(kind="tumbling", size_ms=step)))

    def _results(self, merged: Partials) -> pa.Table:
        rows = pa.table(
            {
                "_ts": pa.array(merged.cells + self._size - 1),
                "_key": merged.main.column(KEY),
                "_late": pa.array(np.zeros(merged.main.num_rows, dtype=np.bool_)),
                WINDOW_START: merged.main.column(CELL),
                PARTIAL: pa.array(_encoded(merged), pa.binary()),
            }
        )
        return rows.sort_by([("_ts", "ascending"), ("_key", "ascending")])


class CombinedAggregate(WindowedAggregate):
    """The second phase: its records are partial results."""

    def _lifted(self, rows: pa.Table, cells: Ints) -> Partials:
        decode = msgspec.msgpack.Decoder(_Part).decode
        keys = rows.column(KEY).to_pylist()
        parts = [decode(part) for part in rows.column(PARTIAL).to_pylist()]
        names = list(dict.fromkeys(name for part in parts for name in part.main))
        main = {CELL: pa.array(cells), KEY: rows.column(KEY)}
        for name in names:
            column = [part.main.get(name) for part in parts]
            main[name] = pa.array(column, self._aggregates.type_of(name))
        found: dict[str, list[_Line]] = {}
        for cell, key, part in zip(cells.tolist(), keys, parts, strict=True):
            for name, (buckets, numbers) in part.long.items():
                found.setdefault(name, []).extend(
                    (cell, key, bucket, number) for bucket, number in zip(buckets, numbers, strict=True)
                )
        return Partials(main=pa.table(main), long={name: _long(lines) for name, lines in found.items()})


def _encoded(merged: Partials) -> Iterator[bytes]:
    """Each row with its long values."""
    long: dict[tuple[int, str], dict[str, _Counts]] = {}
    for name, table in merged.long.items():
        ordered = table.sort_by([(CELL, "ascending"), (KEY, "ascending"), (_BUCKET, "ascending")])
        columns = (ordered.column(part).to_pylist() for part in (CELL, KEY, _BUCKET, _NUMBER))
        for cell, key, bucket, number in zip(*columns, strict=True):
            buckets, numbers = long.setdefault((cell, key), {}).setdefault(name, ([], []))
            buckets.append(bucket)
            numbers.append(number)
    names = [name for name in merged.main.column_names if name not in (CELL, KEY)]
    rows = zip(*(merged.main.column(name).to_pylist() for name in (CELL, KEY, *names)), strict=True)
    encode = msgspec.msgpack.Encoder().encode
    for cell, key, *values in rows:
        main = dict(zip(names, values, strict=True))
        yield encode(_Part(main=main, long=long.get((cell, key), {})))


def _long(lines: list[_Line]) -> pa.Table:
    cells, keys, buckets, numbers = zip(*lines, strict=True)
    columns: Mapping[str, Any] = {CELL: cells, _BUCKET: buckets, _NUMBER: numbers}
    made = {name: pa.array(column, pa.int64()) for name, column in columns.items()}
    return pa.table({CELL: made[CELL], KEY: pa.array(keys, pa.string()), **made})
