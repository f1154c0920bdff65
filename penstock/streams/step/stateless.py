"""The stateless step: store an intent, publish the output of a range, commit the range (MillWheel 6.1.3).

It publishes before it commits, so a retry must publish the same records: an intent with range, plan and
package is stored first, and a successor replays it before any other step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import IntentStands, IntervalError, PoisonRecord, VersionMoved
from penstock.streams.bus.log import ARROW_TYPES, LOW_MIN, Log, partitions_of
from penstock.streams.rows.row_store import Changes, Intent, IntervalRef, IntervalRow, RowStore, name_of
from penstock.streams.step.stateful import COMMIT_ATTEMPTS
from penstock.streams.step.step import (
    INDEX_BITS,
    InputRange,
    OutputSpec,
    StepReport,
    check_start,
    dead_stream,
    is_dead,
    report_low,
)
from penstock.streams.step.watermark import Ints, event_time_low, low_at_end


def pending_intent(row: IntervalRow) -> Intent | None:
    """The unfinished intent of a predecessor, which must be replayed first, with its own plan."""
    return row.intent


class StatelessStep:
    """Runs the steps of one interval under one token and plan.

    Sequences come from the offsets of an input, so each input birth has its own producer in `producers`.

    `lateness`: birth -> lateness of event-time inputs; all other inputs follow their marks. `followed`:
    births of inputs whose idle partitions follow this one: the step reports its low to them.
    """

    def __init__(
        self,
        *,
        ref: IntervalRef,
        token: int,
        producers: Mapping[str, str],
        rows: RowStore,
        log: Log,
        outputs: Sequence[OutputSpec],
        plan: Mapping[str, Any],
        plan_hash: str,
        package: str,
        lateness: Mapping[str, Millis] | None = None,
        followed: Collection[str] = (),
        stops_at_poison: bool = False,
    ) -> None:
        self._ref, self._token, self._producers, self._rows, self._log = ref, token, producers, rows, log
        self._outputs, self._plan, self._plan_hash, self._package = tuple(outputs), plan, plan_hash, package
        self._lateness, self._stops_at_poison = lateness or {}, stops_at_poison
        self._followed = frozenset(followed)
        self._ranges: tuple[InputRange, ...] = ()
        # Birth -> committed offset when the step began: rows below it were published before.
        self._starts: Mapping[str, int] = {}

    def begin(self, ranges: Sequence[InputRange]) -> bool:
        """Store an intent for the ranges. False: a twin has committed them already."""
        self._ranges = tuple(ranges)
        asked_from = {asked.birth: asked.start for asked in ranges}
        for attempt in range(COMMIT_ATTEMPTS):
            row = self._row()
            check_start(self._ref, row, ranges)
            self._starts = {asked.birth: row.offsets[asked.birth] for asked in ranges}
            if self._is_done(row, asked_from):
                return False
            wanted = self._intent(row)
            if row.intent == wanted or (row.intent is not None and _is_same(row.intent, wanted)):
                return True  # a replay, or a twin stored the same intent
            if row.intent is not None:
                raise self._other_intent(row.intent)
            if wanted is None:
                return True  # nothing will be published, so no intent is needed
            try:
                self._rows.commit(
                    self._ref, token=self._token, version=row.version, changes=Changes(intent=wanted)
                )
                return True
            except VersionMoved:
                if attempt == COMMIT_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def finish(
        self,
        batches: Iterable[pa.RecordBatch],
        *,
        event_time_max: Mapping[str, Millis] | None = None,
        now_ms: Millis | None,
    ) -> StepReport:
        """Publish the output of the ranges, then commit them. Requires: `begin` returned True.

        Rows have `_offset`, `_ts`, `_key`, `_late`, the outputs' columns, and for records that did not parse
        `_bad` (the reason) and `_raw`. Rows made of one record are in order. `event_time_max`: the running
        maximum after the range, over all records read. `now_ms` None: do not report the low.
        """
        assert self._ranges, "begin comes first"
        table = self._fresh(batches)
        records = sum(asked.end - self._starts[asked.birth] for asked in self._ranges)
        counters = {"records": records, **self._publish(table)}
        row, committed = self._commit(event_time_max or {}, counters)
        self._report_low(row, now_ms)
        return StepReport.of(row, counters if committed else None)

    def already_done(self, *, now_ms: Millis | None) -> StepReport:
        """The report of a worker whose `begin` returned False: only the lows."""
        row = self._row()
        self._report_low(row, now_ms)
        return StepReport.of(row, None)

    def _report_low(self, row: IntervalRow, now_ms: Millis | None) -> None:
        for producer in self._producers.values() if now_ms is not None else ():
            assert now_ms is not None
            report_low(row, producer=producer, log=self._log, outputs=self._outputs, now_ms=now_ms)
        for asked in self._ranges if now_ms is not None else ():
            if asked.birth in self._followed:
                assert now_ms is not None
                seen = row.event_time_max.get(asked.birth, LOW_MIN)
                self._log.observe(
                    asked.category,
                    partition=self._ref.partition,
                    low=event_time_low(seen, self._lateness[asked.birth]),
                    now_ms=now_ms,
                )

    def _is_done(self, row: IntervalRow, before: Mapping[str, int]) -> bool:
        """True if the ranges were committed after the offsets `before`, by this worker or a twin."""
        committed = [(row.offsets[asked.birth], asked) for asked in self._ranges]
        if any(offset > asked.end for offset, asked in committed):
            return True
        had_some = any(before[asked.birth] < asked.end for asked in self._ranges)
        return had_some and all(offset == asked.end for offset, asked in committed)

    def _row(self) -> IntervalRow:
        return self._rows.snapshot(self._ref, token=self._token, keys=(), timers_up_to=LOW_MIN).row

    def _intent(self, row: IntervalRow) -> Intent | None:
        ranges = {
            asked.birth: (row.offsets[asked.birth], asked.end)
            for asked in self._ranges
            if row.offsets[asked.birth] < asked.end
        }
        if not ranges:
            return None
        return Intent(ranges=ranges, package=self._package, plan=self._plan, plan_hash=self._plan_hash)

    def _other_intent(self, intent: Intent) -> IntentStands:
        return IntentStands(
            f"interval {name_of(self._ref)} has an unfinished intent for another step",
            why=f"{dict(intent.ranges)} with plan {intent.plan_hash} and package {intent.package} may be "
            f"published in part; this step is {self._ranges} with plan {self._plan_hash} and package "
            f"{self._package}",
            fix="restart the task: it replays the intent first",
        )

    def _fresh(self, batches: Iterable[pa.RecordBatch]) -> pa.Table | None:
        """The uncommitted rows of the ranges, input by input, in order."""
        found = [batch for batch in batches if batch.num_rows]
        if not found:
            return None
        table = pa.Table.from_batches(found)
        inputs, offsets = _inputs(table), _offsets(table)
        if (np.diff(inputs) < 0).any() or (np.diff(offsets)[np.diff(inputs) == 0] < 0).any():
            order = np.lexsort((offsets, inputs))  # a source may put unreadable records before the others
            table, inputs, offsets = table.take(pa.array(order)), inputs[order], offsets[order]
        fresh = np.zeros(len(offsets), dtype=np.bool_)
        strange = np.ones(len(offsets), dtype=np.bool_)
        for asked in self._ranges:
            mine = inputs == asked.number
            strange &= ~(mine & (offsets >= asked.start) & (offsets < asked.end))
            fresh |= mine & (offsets >= self._starts[asked.birth])
        if strange.any():
            raise IntervalError(
                f"interval {name_of(self._ref)} got rows outside of its ranges",
                why=f"their offsets are {offsets[strange].min()} to {offsets[strange].max()}, "
                f"the ranges are {self._ranges}",
                fix="report a bug: source and step disagree about the range",
            )
        return table.filter(pa.array(fresh))

    def _publish(self, table: pa.Table | None) -> dict[str, int]:
        """One publish per input and output. The bus trims what a predecessor or twin has published."""
        counters = {"late": 0, "bad": 0, "productions": 0}
        if table is None or not table.num_rows:
            return counters
        inputs = _inputs(table)
        for asked in self._ranges:
            mine = table if len(self._ranges) == 1 else table.filter(pa.array(inputs == asked.number))
            if mine.num_rows:
                self._publish_input(mine, asked, counters)
        return counters

    def _publish_input(self, table: pa.Table, asked: InputRange, counters: dict[str, int]) -> None:
        table = table.append_column("_seq", pa.array(self._sequences(_offsets(table))))
        bad = np.zeros(table.num_rows, dtype=np.bool_)
        if "_bad" in table.column_names:
            bad = np.asarray(table.column("_bad").is_valid().to_numpy(), dtype=np.bool_)
        good, dead = table.filter(pa.array(~bad)), table.filter(pa.array(bad))
        if dead.num_rows and (self._stops_at_poison or not self._has_dead_letters(asked)):
            raise self._poison(dead, asked)
        for output in self._outputs:
            for_dead = is_dead(output.stream)
            if for_dead and output.stream != dead_stream(asked.number):
                continue  # dead letters of another input
            own = dead if for_dead else good
            if not own.num_rows:
                continue
            batch = self._dead_letters(own, output) if for_dead else _fitted(own, output)
            batches = self._by_partition(batch, output)
            producer = self._producers[asked.birth]
            self._log.publish(
                output.category, producer=producer, epoch=self._token, batches=batches, gapless=False
            )
            counters["productions"] += 0 if for_dead else own.num_rows
        counters["late"] += int(np.count_nonzero(good.column("_late").to_numpy()))
        counters["bad"] += dead.num_rows

    def _sequences(self, offsets: Ints) -> Ints:
        """((offset + 1) << 16) | index, the index among the rows made of one input record."""
        firsts = np.flatnonzero(np.diff(offsets, prepend=-1))
        counts = np.diff(np.append(firsts, len(offsets)))
        if counts.max() > 1 << INDEX_BITS:
            raise IntervalError(
                f"interval {name_of(self._ref)} makes too many records of one input record",
                why=f"{int(counts.max())} of one record; the limit is {1 << INDEX_BITS}",
                fix="split the flat_map into two steps",
            )
        places = np.arange(len(offsets), dtype=np.int64) - np.repeat(firsts, counts)
        return ((offsets + 1) << INDEX_BITS) | places

    def _has_dead_letters(self, asked: InputRange) -> bool:
        return any(output.stream == dead_stream(asked.number) for output in self._outputs)

    def _poison(self, dead: pa.Table, asked: InputRange) -> PoisonRecord:
        offset, reason = dead.column("_offset")[0].as_py(), dead.column("_bad")[0].as_py()
        return PoisonRecord(
            f"job {self._ref.job}: a record of {asked.category!r} cannot be processed",
            why=f"partition {self._ref.partition}, offset {offset}: {reason}",
            fix="set `poison: dead_letter` to write such records to the dead letters, or correct the plan; "
            "nothing of this step was published"
            if self._has_dead_letters(asked)
            else "correct the plan: this job has no dead-letter category; nothing of this step was published",
            job=self._ref.job,
            offset=offset,
        )

    def _dead_letters(self, table: pa.Table, output: OutputSpec) -> pa.RecordBatch:
        rows = table.num_rows
        stamps = table.column("_ts").fill_null(0)
        raw = table.column("_raw") if "_raw" in table.column_names else pa.nulls(rows, pa.binary())
        columns = {
            "_seq": table.column("_seq"),
            "_ts": stamps,
            "_key": pa.nulls(rows, pa.string()),
            "_late": pa.array(np.zeros(rows, dtype=np.bool_)),
            "reason": table.column("_bad"),
            "value": raw,
            "source_partition": pa.array(np.full(rows, self._ref.partition, dtype=np.int32)),
            "source_offset": table.column("_offset"),
        }
        return _fitted(pa.table(columns), output)

    def _by_partition(self, batch: pa.RecordBatch, output: OutputSpec) -> dict[int, pa.RecordBatch]:
        keys = batch.column("_key")
        if keys.null_count == len(keys):  # records without keys stay in one partition
            return {self._ref.partition % output.partitions: batch}
        targets = partitions_of(keys, output.partitions)
        if (self._plan.get("plan") or {}).get("spread"):
            # By the offset of the input record, so that a retry chooses the same partition.
            offsets = np.asarray(batch.column("_seq").to_numpy(), dtype=np.int64) >> INDEX_BITS
            targets = (targets + offsets) % output.partitions
        return {
            partition: batch.take(pa.array(np.flatnonzero(targets == partition)))
            for partition in np.unique(targets).tolist()
        }

    def _commit(
        self, event_time_max: Mapping[str, Millis], counters: Mapping[str, int]
    ) -> tuple[IntervalRow, bool]:
        for attempt in range(COMMIT_ATTEMPTS):
            row = self._row()
            if self._is_done(row, self._starts):
                return row, False  # a twin has published and committed the same
            # The low of each input counts, also of inputs without new records.
            low = min(self._low_after(row, asked, event_time_max) for asked in self._ranges)
            nothing_new = all(row.offsets[asked.birth] == asked.end for asked in self._ranges)
            if nothing_new and low <= row.input_low:
                return row, False
            changes = Changes(
                offsets={asked.birth: asked.end for asked in self._ranges},
                input_low=low,
                event_time_max={
                    birth: max(seen, row.event_time_max.get(birth, LOW_MIN))
                    for birth, seen in event_time_max.items()
                },
                clear_intent=True,
                counters={name: count for name, count in counters.items() if count},
            )
            try:
                return (
                    self._rows.commit(self._ref, token=self._token, version=row.version, changes=changes),
                    True,
                )
            except VersionMoved:
                if attempt == COMMIT_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _low_after(self, row: IntervalRow, asked: InputRange, event_time_max: Mapping[str, Millis]) -> Millis:
        marks = self._log.marks(asked.category, self._ref.partition, above=row.input_low, up_to=asked.end)
        lateness = self._lateness.get(asked.birth)
        if lateness is None:
            return low_at_end(marks, before=row.input_low, event_time=None)
        seen = max(event_time_max.get(asked.birth, LOW_MIN), row.event_time_max.get(asked.birth, LOW_MIN))
        return low_at_end(marks, before=row.input_low, event_time=event_time_low(seen, lateness))


def _is_same(one: Intent, other: Intent | None) -> bool:
    """Compare plans by hash: their text may have changed in JSON."""
    return other is not None and (dict(one.ranges), one.package, one.plan_hash) == (
        dict(other.ranges),
        other.package,
        other.plan_hash,
    )


def _fitted(table: pa.Table, output: OutputSpec) -> pa.RecordBatch:
    """The rows with exactly the output's columns."""
    kinds = {"_seq": pa.int64(), "_ts": pa.int64(), "_key": pa.string(), "_late": pa.bool_()}
    kinds |= {name: ARROW_TYPES[kind] for name, kind in output.columns}
    missing = [name for name in kinds if name not in table.column_names]
    if missing:
        raise IntervalError(
            f"the rows for {output.category!r} lack columns {missing}",
            why=f"the output declares {list(kinds)}, the plan made {table.column_names}",
            fix="submit the pipeline again, so that its plan fits its outputs",
        )
    arrays = [table.column(name).cast(kind).combine_chunks() for name, kind in kinds.items()]
    return pa.RecordBatch.from_arrays(arrays, schema=output.schema())


def _inputs(table: pa.Table) -> Ints:
    if "_input" not in table.column_names:
        return np.zeros(table.num_rows, dtype=np.int64)
    return np.asarray(table.column("_input").to_numpy(), dtype=np.int64)


def _offsets(table: pa.Table) -> Ints:
    return np.asarray(table.column("_offset").to_numpy(), dtype=np.int64)
