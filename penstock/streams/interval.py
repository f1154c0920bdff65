"""The stateful step: one interval, one micro-batch, exactly once (MillWheel 6.1, 6.2).

Snapshot, user code outside any transaction, one short fenced write, then the outbox in order. It may be cut
off between any two lines, repeated, and run by two workers at once: what is committed and sent is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, VersionMoved
from penstock.streams.bus.log import LOW_MIN, Log
from penstock.streams.computation import Computation, record_type
from penstock.streams.keyed_work import TIMERS_PER_STEP_MAX, KeyedWork
from penstock.streams.outbox import pack_productions, publish_outbox
from penstock.streams.rows.row_store import Changes, IntervalRef, IntervalRow, RowStore
from penstock.streams.step import InputRange, OutputSpec, StepReport, check_start, open_interval, report_low
from penstock.streams.watermark import Cut, Ints, cut_at_marks

__all__ = ["InputRange", "OutputSpec", "StatefulStep", "StepReport", "open_interval"]

# Twins of one worker rarely meet even once.
COMMIT_ATTEMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The records of a step that were not committed before."""

    inputs: Ints
    offsets: Ints
    table: pa.Table

    @staticmethod
    def of(table: pa.Table) -> _Rows:
        return _Rows(inputs=_ints(table, "_input"), offsets=_ints(table, "_offset"), table=table)

    def from_offsets(self, committed: Sequence[int]) -> _Rows:
        """Only those at or above the committed offset of their input."""
        fresh = self.offsets >= np.array(committed, dtype=np.int64)[self.inputs]
        return self if fresh.all() else _Rows.of(self.table.filter(pa.array(fresh)))

    def readable(self) -> tuple[_Rows, int]:
        """Those that could be parsed, and the number of the others."""
        if "_bad" not in self.table.column_names:
            return self, 0
        good = self.table.filter(self.table.column("_bad").is_null())
        return _Rows.of(good), self.table.num_rows - good.num_rows


class StatefulStep:
    """Runs the steps of one interval under one token."""

    def __init__(
        self,
        *,
        ref: IntervalRef,
        token: int,
        rows: RowStore,
        log: Log,
        outputs: Sequence[OutputSpec],
        computation: Computation,
        timers_per_step_max: int = TIMERS_PER_STEP_MAX,
    ) -> None:
        self._ref, self._token, self._rows, self._log = ref, token, rows, log
        self._outputs = {output.stream: output for output in outputs}
        self._computation, self._timers_max = computation, timers_per_step_max
        for stream, columns in computation.outputs.items():
            output = self._outputs.get(stream)
            if output is None or dict(output.columns) != dict(columns):
                raise ConfigError(
                    f"job {ref.job!r} has no output for stream {stream!r} of its computation",
                    why=f"the computation declares {dict(columns)}, the job's outputs are {list(outputs)}",
                    fix="submit the pipeline again, so that its plan fits the computation",
                )

    def run(
        self, ranges: Sequence[InputRange], batches: Iterable[pa.RecordBatch], *, now_ms: Millis
    ) -> StepReport:
        """Do one step. Without records it still sends leftovers, fires timers and raises lows.

        Rows of `batches` are in order and have `_input` (index into `ranges`), `_offset`, `_ts`, `_key`,
        `_late`. Other columns that start with an underscore are not the user's. Rows with `_bad` are counted
        and passed over.
        """
        row, has_wall = self._send_outbox(now_ms)
        rows = _Rows.of(_table_of(batches))
        assert all(number < len(ranges) for number in np.unique(rows.inputs)), "an input that was not planned"
        counters = None
        for attempt in range(COMMIT_ATTEMPTS):
            try:
                work, row, has_outbox = self._attempt(ranges, rows, row, now_ms, has_wall)
            except VersionMoved:
                if attempt == COMMIT_ATTEMPTS - 1:
                    raise
                snapshot = self._rows.snapshot(
                    self._ref, token=self._token, keys=(), timers_up_to=LOW_MIN, wall_up_to=now_ms
                )
                row, has_wall = snapshot.row, bool(snapshot.timers)
                continue
            counters = None if work is None else work.counters
            if has_outbox:
                row, _ = self._send_outbox(now_ms)
            break
        report_low(
            row, producer=self._ref.birth, log=self._log, outputs=list(self._outputs.values()), now_ms=now_ms
        )
        return StepReport.of(row, counters)

    def _attempt(
        self, ranges: Sequence[InputRange], rows: _Rows, row: IntervalRow, now_ms: Millis, has_wall: bool
    ) -> tuple[KeyedWork | None, IntervalRow, bool]:
        """Decide on what `row` says and commit; no work if a twin did it, VersionMoved if one was faster."""
        check_start(self._ref, row, ranges)
        fresh, bad = rows.from_offsets([row.offsets[asked.birth] for asked in ranges]).readable()
        cuts = self._cuts(ranges, fresh, row)
        ends = {asked.birth: asked.end for asked in ranges if asked.end > row.offsets[asked.birth]}
        if not ends and not cuts and not has_wall:
            return None, row, False
        low = cuts[-1].low if cuts else row.input_low
        keys = pc.fill_null(fresh.table.column("_key"), "")
        snapshot = self._rows.snapshot(
            self._ref,
            token=self._token,
            keys=pc.unique(keys).to_pylist(),
            timers_up_to=low,
            wall_up_to=now_ms,
        )
        if snapshot.row.version != row.version:
            raise VersionMoved("a twin wrote between two reads of a step")
        work = KeyedWork(
            self._computation,
            job=self._ref.job,
            low=row.input_low,
            now_ms=now_ms,
            states=snapshot.states,
            timers=snapshot.timers,
            timers_max=self._timers_max,
        )
        _run_hooks(work, fresh, keys, cuts)
        work.counters["bad"] = bad
        changes = self._changes(work, row, ends, low)
        new = self._rows.commit(self._ref, token=self._token, version=row.version, changes=changes)
        return work, new, bool(changes.outbox)

    def _cuts(self, ranges: Sequence[InputRange], fresh: _Rows, row: IntervalRow) -> tuple[Cut, ...]:
        marks = [
            self._log.marks(
                asked.category,
                self._ref.partition,
                above=row.input_low,
                up_to=max(asked.end, row.offsets[asked.birth]),
            )
            for asked in ranges
        ]
        return cut_at_marks(fresh.inputs, fresh.offsets, marks, low=row.input_low)

    def _changes(self, work: KeyedWork, row: IntervalRow, ends: dict[str, int], low: Millis) -> Changes:
        timers_set, timers_deleted = work.timer_changes()
        outbox = [
            out
            for stream, produced in work.produced.items()
            for out in pack_productions(produced, self._outputs[stream], row.next_seq, job=self._ref.job)
        ]
        return Changes(
            offsets=ends,  # the planned end, not the last row seen: rows may have been filtered out
            input_low=low,
            states=work.state_changes(),
            timers_set=timers_set,
            timers_deleted=timers_deleted,
            outbox=tuple(outbox),
            counters={name: count for name, count in work.counters.items() if count},
        )

    def _send_outbox(self, now_ms: Millis) -> tuple[IntervalRow, bool]:
        """Publish whatever is undelivered, oldest first, and only then forget it. Are wall timers due?"""
        snapshot = self._rows.snapshot(
            self._ref, token=self._token, keys=(), timers_up_to=LOW_MIN, wall_up_to=now_ms
        )
        if not snapshot.outbox:
            return snapshot.row, bool(snapshot.timers)
        sent = publish_outbox(snapshot.outbox, log=self._log, producer=self._ref.birth, token=self._token)
        row = self._rows.delivered(self._ref, token=self._token, ids=sent)
        return row, bool(snapshot.timers)


def _run_hooks(work: KeyedWork, rows: _Rows, keys: pa.ChunkedArray, cuts: Sequence[Cut]) -> None:
    own = tuple(name for name in rows.table.column_names if not name.startswith("_"))
    columns = [rows.table.column(name).to_pylist() for name in own]
    values = zip(*columns, strict=True) if columns else [()] * rows.table.num_rows
    stamps, lates = rows.table.column("_ts").to_pylist(), rows.table.column("_late").to_pylist()
    records = list(map(record_type(own), keys.to_pylist(), stamps, lates, values))
    work.run(records, rows.offsets.tolist(), cuts)


def _table_of(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    found = list(batches)
    if found:
        return pa.Table.from_batches(found)
    kinds = {
        "_input": pa.int8(),
        "_offset": pa.int64(),
        "_ts": pa.int64(),
        "_key": pa.string(),
        "_late": pa.bool_(),
    }
    return pa.table({name: pa.array([], kind) for name, kind in kinds.items()})


def _ints(table: pa.Table, name: str) -> Ints:
    return np.asarray(table.column(name).to_numpy(), dtype=np.int64)
