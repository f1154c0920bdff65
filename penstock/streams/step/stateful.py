"""The stateful step: one interval, one micro-batch, exactly once (MillWheel 6.1, 6.2).

Snapshot, user code outside any transaction, one short fenced write, then the outbox in order. It may be cut
off between any two lines, repeated, and run by two workers at once: what is committed and sent is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.clock import Millis
from penstock.core.errors import ComputationFailed, ConfigError, VersionMoved
from penstock.streams.bus.log import LOW_MIN, Log
from penstock.streams.dsl.computation import Computation
from penstock.streams.rows.row_store import Changes, IntervalRef, IntervalRow, RowStore, Snapshot
from penstock.streams.step.keyed_work import TIMERS_PER_STEP_MAX, KeyedLogic, StepInput, StepLogic, StepResult
from penstock.streams.step.outbox import (
    Sending,
    Sequences,
    check_outputs,
    pack_productions,
    pack_table,
    publish_outbox,
    publish_weakly,
)
from penstock.streams.step.state_cache import KnownStates, StateCache
from penstock.streams.step.step import (
    InputRange,
    OutputSpec,
    StepReport,
    check_start,
    open_interval,
    report_low,
)
from penstock.streams.step.watermark import Cut, Ints, cut_at_marks, order_at_marks

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
        computation: Computation | StepLogic,
        timers_per_step_max: int = TIMERS_PER_STEP_MAX,
        sending: Sending | None = None,
        cache: StateCache | None = None,
    ) -> None:
        self._sending = sending or Sending()
        self._ref, self._token, self._rows, self._log = ref, token, rows, log
        self._cache, self._known = cache, KnownStates()
        self._outputs = {output.stream: output for output in outputs}
        self._logic: StepLogic = (
            KeyedLogic(computation, timers_max=timers_per_step_max)
            if isinstance(computation, Computation)
            else computation
        )
        for stream, columns in self._logic.outputs.items():
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
        # Taken out, and given back at the end: a step that fails, wherever, leaves nothing behind.
        self._known = KnownStates() if self._cache is None else self._cache.take(self._ref)
        row, has_wall = self._send_outbox(now_ms)
        rows = _Rows.of(_table_of(batches))
        assert all(number < len(ranges) for number in np.unique(rows.inputs)), "an input that was not planned"
        counters: dict[str, int] | None = None
        for attempt in range(COMMIT_ATTEMPTS):
            try:
                counters, row, has_outbox = self._attempt(ranges, rows, row, now_ms, has_wall)
            except VersionMoved:
                if attempt == COMMIT_ATTEMPTS - 1:
                    raise
                snapshot = self._rows.snapshot(
                    self._ref, token=self._token, keys=(), timers_up_to=LOW_MIN, wall_up_to=now_ms
                )
                row, has_wall = snapshot.row, bool(snapshot.timers)
                continue
            if has_outbox:
                row, _ = self._send_outbox(now_ms)
            break
        if self._cache is not None:
            self._cache.give(self._ref, self._known)
        report_low(
            row, producer=self._ref.birth, log=self._log, outputs=list(self._outputs.values()), now_ms=now_ms
        )
        return StepReport.of(row, counters)

    def _attempt(
        self, ranges: Sequence[InputRange], rows: _Rows, row: IntervalRow, now_ms: Millis, has_wall: bool
    ) -> tuple[dict[str, int] | None, IntervalRow, bool]:
        """Decide on what `row` says and commit; no counters if a twin did it, VersionMoved if one was
        faster.
        """
        check_start(self._ref, row, ranges)
        fresh, bad = rows.from_offsets([row.offsets[asked.birth] for asked in ranges]).readable()
        fresh, cuts = self._cuts(ranges, fresh, row)
        ends = {asked.birth: asked.end for asked in ranges if asked.end > row.offsets[asked.birth]}
        if not ends and not cuts and not has_wall:
            return None, row, False
        low = cuts[-1].low if cuts else row.input_low
        table = _with_keys(fresh.table)
        wanted = list(self._logic.wanted(table))
        snapshot = self._snapshot(row, wanted, low, wall_up_to=now_ms)
        # How large each state was that this step has read: what it changes then needs no second look.
        before: dict[str, int | None] = {}
        _note(before, [*wanted, *(timer.key for timer in snapshot.timers)], snapshot.states)

        def read(names: Iterable[str]) -> Mapping[str, bytes]:
            more = list(names)
            found = self._read_more(row, more)
            _note(before, more, found)
            return found

        given = StepInput(
            job=self._ref.job,
            version=row.version,
            low=row.input_low,
            table=table,
            cuts=cuts,
            states=snapshot.states,
            timers=snapshot.timers,
            read=read,
            now_ms=now_ms,
            keys=None if row.kept is None else row.kept.keys,
        )
        try:
            result = self._logic.run(given)
        except ComputationFailed as error:
            error.what += self._record_of(error, ranges, table)
            raise
        counters = {**result.counters, "bad": bad}
        _note(before, result.made, {})
        changes = replace(self._changes(result, row, ends, low, counters), before=before)
        if self._sending.weak:
            check_outputs(self._log, changes.outbox)
            left = publish_weakly(
                changes.outbox,
                log=self._log,
                birth=self._ref.birth,
                token=self._token,
                version=row.version,
                sending=self._sending,
            )
            changes = replace(changes, outbox=tuple(left))
        new = self._rows.commit(self._ref, token=self._token, version=row.version, changes=changes)
        self._known.committed(row, new, changes.states)
        return counters, new, bool(changes.outbox)

    def _record_of(self, error: ComputationFailed, ranges: Sequence[InputRange], table: pa.Table) -> str:
        """Where the record lies at which user code failed, as far as that is known."""
        partition = f", partition {self._ref.partition}"
        if error.offset is None:
            return partition
        inputs = table.column("_input").filter(pc.equal(table.column("_offset"), error.offset)).unique()
        # With several inputs two may have a record of that offset.
        found = [ranges[number].category for number in inputs.to_pylist()]
        return partition if len(found) != 1 else f" of {found[0]!r}{partition}"

    def _snapshot(
        self, row: IntervalRow, names: Iterable[str], timers_up_to: Millis, wall_up_to: Millis = LOW_MIN
    ) -> Snapshot:
        """What `row` says, or VersionMoved. States that are known as of its version are not read again."""
        self._known.fits(row)
        known, missing = self._known.split(names)
        found = self._rows.snapshot(
            self._ref, token=self._token, keys=missing, timers_up_to=timers_up_to, wall_up_to=wall_up_to
        )
        if found.row.version != row.version:
            raise VersionMoved("a twin wrote between two reads of a step")
        if self._cache is not None:
            self._known.learn(found.row, missing, found.states)
        return replace(found, states={**known, **found.states}) if known else found

    def _read_more(self, row: IntervalRow, names: Iterable[str]) -> Mapping[str, bytes]:
        """More states of the same version; if all are known, the commit will tell whether it still stands."""
        wanted = list(names)
        known, missing = self._known.split(wanted) if self._known.fits(row) else ({}, wanted)
        return self._snapshot(row, wanted, LOW_MIN).states if missing else known

    def _cuts(
        self, ranges: Sequence[InputRange], fresh: _Rows, row: IntervalRow
    ) -> tuple[_Rows, tuple[Cut, ...]]:
        marks = [
            self._log.marks(
                asked.category,
                self._ref.partition,
                above=row.input_low,
                up_to=max(asked.end, row.offsets[asked.birth]),
            )
            for asked in ranges
        ]
        order = order_at_marks(fresh.inputs, fresh.offsets, marks, low=row.input_low)
        if order is not None:
            fresh = _Rows.of(fresh.table.take(pa.array(order)))
        return fresh, cut_at_marks(fresh.inputs, fresh.offsets, marks, low=row.input_low)

    def _changes(
        self,
        result: StepResult,
        row: IntervalRow,
        ends: dict[str, int],
        low: Millis,
        counters: dict[str, int],
    ) -> Changes:
        sequences = Sequences(next=row.next_seq, in_life=not self._sending.dedup)
        outbox = [
            out
            for stream, produced in result.produced.items()
            for out in (
                pack_table(produced, self._outputs[stream], sequences)
                if isinstance(produced, pa.Table)
                else pack_productions(produced, self._outputs[stream], sequences, job=self._ref.job)
            )
        ]
        return Changes(
            offsets=ends,  # the planned end, not the last row seen: rows may have been filtered out
            input_low=low,
            states=result.states,
            timers_set=result.timers_set,
            timers_deleted=result.timers_deleted,
            outbox=tuple(outbox),
            counters={name: count for name, count in counters.items() if count},
            keys=result.keys,
        )

    def _send_outbox(self, now_ms: Millis) -> tuple[IntervalRow, bool]:
        """Publish whatever is undelivered, oldest first, and only then forget it. Are wall timers due?"""
        snapshot = self._rows.snapshot(
            self._ref, token=self._token, keys=(), timers_up_to=LOW_MIN, wall_up_to=now_ms
        )
        if not snapshot.outbox:
            return snapshot.row, bool(snapshot.timers)
        sent = publish_outbox(snapshot.outbox, log=self._log, birth=self._ref.birth, token=self._token)
        row = self._rows.delivered(self._ref, token=self._token, ids=sent)
        self._known.committed(snapshot.row, row, {})
        return row, bool(snapshot.timers)


def _note(before: dict[str, int | None], names: Iterable[str], states: Mapping[str, bytes]) -> None:
    """These were read, and some of them found."""
    before.update(dict.fromkeys(names))
    before.update(zip(states, map(len, states.values()), strict=True))


def _with_keys(table: pa.Table) -> pa.Table:
    """A missing key is the empty one."""
    keys = table.column("_key")
    if not keys.null_count:
        return table
    return table.set_column(table.column_names.index("_key"), "_key", pc.fill_null(keys, ""))


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
