"""Windows that give more than one result: early ones, updates by late records, accumulating or discarding.

Pure. A cell is a window; what is new in it and what was given already are kept apart. Early results come when
the low watermark passes a multiple of `early_ms` after the window's start. A late record counts unless the
low at its source was `lateness_ms` beyond the window's end when it was read there: in the window while that
is open here, later as an update. So which records count does not depend on when this step heard of that low.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.operators.aggregates import CELL, KEY, Aggregates, Partials
from penstock.streams.operators.blocks import INDEX, Blocks
from penstock.streams.operators.windowed import (
    STREAM,
    Lateness,
    Stretch,
    WindowSpec,
    blocks_result,
    times_of,
    window_rows,
)
from penstock.streams.step_logic import StepInput, StepResult
from penstock.streams.watermark import Ints

_NEW, _GIVEN = 0, 1


class FiringAggregate:
    """The step logic of windows with early results or late updates: from cut to cut."""

    def __init__(self, spec: WindowSpec) -> None:
        self._spec, self._aggregates = spec, Aggregates(spec.values)
        self._size = spec.spans.size_ms
        self._slide = spec.spans.slide_ms or spec.spans.size_ms
        self._firing = spec.firing
        self._accumulates = spec.firing.mode == "accumulating"
        self._patience = spec.firing.lateness_ms if spec.firing.late == "update" else 0

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
        for stretch in flags.stretches(given, apart=True):
            results, beyond = self._add(blocks, stretch)
            made += results
            dropped += beyond
            results = self._fire(blocks, stretch.low, stretch.low_after)
            made += results
            fired += len(results)
        return blocks_result(blocks, made, flags.counters(fired, dropped))

    def _add(self, blocks: Blocks, stretch: Stretch) -> tuple[list[pa.Table], int]:
        """Records into their windows; an update for each that comes after the result, and how many are in no
        window, because they are late.
        """
        rows, late, reached = stretch.rows, stretch.late, stretch.reached
        if self._firing.late == "drop":
            flagged = np.asarray(rows.column("_late").to_numpy(), dtype=np.bool_)
            rows, late, reached = rows.filter(pa.array(~flagged)), late[~flagged], reached[~flagged]
        places, cells = self._expanded(times_of(rows))
        ends = cells + self._size
        # What is too late is too late by the low at its source: whatever has been heard of that low here.
        counts = ~late[places] | (ends + self._patience > reached[places])
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
        """For each record and each window it is in: the record's place and the window's start."""
        last = stamps - stamps % self._slide
        steps = np.arange(self._size // self._slide, dtype=np.int64)[::-1] * self._slide
        places = np.repeat(np.arange(len(stamps), dtype=np.int64), len(steps))
        return places, (last[:, None] - steps[None, :]).reshape(-1)

    def _updated(self, blocks: Blocks, lifted: Partials, places: Ints) -> list[pa.Table]:
        """Results after each of these records, in their order."""
        held: list[Partials] = []
        if self._accumulates:
            held = blocks.take(np.unique(lifted.cells).tolist(), _GIVEN)
        made = []
        for chosen in _rounds(lifted):
            mine = lifted.rows(chosen)
            result = self._aggregates.merge([mine])
            if self._accumulates:
                whole = self._aggregates.merge([*held, result])
                held = [whole]
                result = _same_groups(self._aggregates, whole, result)
            ends = result.cells + self._size
            rows = window_rows(self._spec, result, self._aggregates, ends=ends, late=True)
            made.append(_placed(rows, mine, places[chosen]))
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
            if cell + self._size + self._patience <= low_after
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
        """What a window gives now; what it gave is kept as long as something may follow."""
        fresh = blocks.take([cell], _NEW)
        if not self._accumulates:
            return self._aggregates.merge(fresh) if fresh else None
        whole = self._aggregates.merge([*fresh, *blocks.take([cell], _GIVEN)])
        blocks.add(whole, _GIVEN)
        if on_time:
            return whole
        return _same_groups(self._aggregates, whole, self._aggregates.merge(fresh))


def _same_groups(aggregates: Aggregates, whole: Partials, wanted: Partials) -> Partials:
    """Those groups of `whole` that are in `wanted`, too."""
    found = [
        whole.where([cell]).of_keys(wanted.where([cell]).main.column(KEY).combine_chunks())
        for cell in np.unique(wanted.cells).tolist()
    ]
    return aggregates.merge(found)


def _rounds(lifted: Partials) -> Sequence[Ints]:
    """Rows such that no group comes twice in a round, and each group's rows come in order."""
    keys = lifted.main.column(KEY).combine_chunks().dictionary_encode().indices.to_numpy()
    groups = np.unique(np.stack((lifted.cells, keys)), axis=1, return_inverse=True)[1].reshape(-1)
    order = np.argsort(groups, kind="stable")
    firsts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    lengths = np.diff(np.append(firsts, len(order)))
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order)) - np.repeat(firsts, lengths)
    return [np.flatnonzero(number == turn) for turn in range(int(number.max()) + 1)]


def _placed(rows: pa.Table, lifted: Partials, places: Ints) -> pa.Table:
    """Results with the place of the record that made each."""
    made_by = pa.table(
        {
            "window_start": lifted.main.column(CELL),
            "_key": lifted.main.column(KEY),
            "_place": pa.array(places),
        }
    )
    return rows.join(made_by, keys=["window_start", "_key"], join_type="inner", use_threads=False)
