"""The stateless step: promise a range, publish what Spark made of it, commit the range (MillWheel 6.1.3).

It publishes before it commits, so a repeat must be the same: an intent with range, plan and package is made
durable first, and a successor replays exactly that before anything else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import IntentStands, IntervalError, PoisonRecord, VersionMoved
from penstock.streams.bus.log import ARROW_TYPES, LOW_MIN, Log
from penstock.streams.keys import partitions_of
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
    """What a predecessor promised and did not finish: to be replayed, with its own plan, before all else."""
    return row.intent


class StatelessStep:
    """Runs the steps of one interval under one token and plan.

    An input's offsets are the sequences of what is made of it, so each has its own producer: `producers`, by
    the birth of the input.

    `lateness` maps the births of event-time inputs to their lateness; all other inputs follow their marks.
    `followed`: births of those whose idle partitions follow this one: they are told how far it is.
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
        # By birth, committed when the step began: rows below it were published before.
        self._starts: Mapping[str, int] = {}

    def begin(self, ranges: Sequence[InputRange]) -> bool:
        """Promise the ranges of all inputs. False: a twin has committed them, there is nothing to do."""
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
                return True  # a replay, or a twin promised the same
            if row.intent is not None:
                raise self._other_intent(row.intent)
            if wanted is None:
                return True  # nothing will be published, so there is nothing to promise
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
        """Publish what the plan made of the range, then commit it. Requires: `begin` returned True.

        Rows have `_offset`, `_ts`, `_key`, `_late`, the outputs' columns, and for records that did not parse
        `_bad` (why) and `_raw`. Rows made of one record are in order. `event_time_max`: the running maximum
        after the range, over all records read. `now_ms` None: the low is not reported.
        """
        assert self._ranges, "begin comes first"
        table = self._fresh(batches)
        records = sum(asked.end - self._starts[asked.birth] for asked in self._ranges)
        counters = {"records": records, **self._publish(table)}
        row, committed = self._commit(event_time_max or {}, counters)
        self._report_low(row, now_ms)
        return StepReport.of(row, counters if committed else None)

    def already_done(self, *, now_ms: Millis | None) -> StepReport:
        """What a worker reports whose `begin` returned False: the lows alone."""
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
        """True if somebody committed these ranges since offsets were `before`: all inputs, or none."""
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
            f"interval {name_of(self._ref)} has promised another step",
            why=f"{dict(intent.ranges)} with plan {intent.plan_hash} and package {intent.package} may be "
            f"published in part, asked for was {self._ranges} with plan {self._plan_hash} and package "
            f"{self._package}",
            fix="restart the task: it replays the promised step first",
        )

    def _fresh(self, batches: Iterable[pa.RecordBatch]) -> pa.Table | None:
        """The rows of the ranges that are not committed, input by input, in order."""
        found = [batch for batch in batches if batch.num_rows]
        if not found:
            return None
        table = pa.Table.from_batches(found)
        inputs, offsets = _inputs(table), _offsets(table)
        if (np.diff(inputs) < 0).any() or (np.diff(offsets)[np.diff(inputs) == 0] < 0).any():
            order = np.lexsort((offsets, inputs))  # a source may put what does not parse before the rest
            table, inputs, offsets = table.take(pa.array(order)), inputs[order], offsets[order]
        fresh = np.zeros(len(offsets), dtype=np.bool_)
        strange = np.ones(len(offsets), dtype=np.bool_)
        for asked in self._ranges:
            mine = inputs == asked.number
            strange &= ~(mine & (offsets >= asked.start) & (offsets < asked.end))
            fresh |= mine & (offsets >= self._starts[asked.birth])
        if strange.any():
            raise IntervalError(
                f"interval {name_of(self._ref)} was given rows that its range does not hold",
                why=f"their offsets are {offsets[strange].min()} to {offsets[strange].max()}, "
                f"the ranges are {self._ranges}",
                fix="report it: source and step disagree about the range",
            )
        return table.filter(pa.array(fresh))

    def _publish(self, table: pa.Table | None) -> dict[str, int]:
        """One publish per input and output. What a predecessor or twin sent is trimmed by the bus."""
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
                continue  # what could not be read of another input
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
                f"interval {name_of(self._ref)} makes too many records of one",
                why=f"{int(counts.max())} of one input record, at most {1 << INDEX_BITS} can be told apart",
                fix="split the work over two steps",
            )
        places = np.arange(len(offsets), dtype=np.int64) - np.repeat(firsts, counts)
        return ((offsets + 1) << INDEX_BITS) | places

    def _has_dead_letters(self, asked: InputRange) -> bool:
        return any(output.stream == dead_stream(asked.number) for output in self._outputs)

    def _poison(self, dead: pa.Table, asked: InputRange) -> PoisonRecord:
        offset, reason = dead.column("_offset")[0].as_py(), dead.column("_bad")[0].as_py()
        return PoisonRecord(
            f"job {self._ref.job}: a record of {asked.category!r} cannot be worked on",
            why=f"partition {self._ref.partition}, offset {offset}: {reason}",
            fix="set `poison: dead_letter` to put such records aside, or correct the plan; nothing of this "
            "step was published"
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
        if keys.null_count == len(keys):  # unkeyed: stay together; a key that is missing is the empty one
            return {self._ref.partition % output.partitions: batch}
        targets = partitions_of(keys, output.partitions)
        if (self._plan.get("plan") or {}).get("spread"):
            # By the offset of the record it was made of: the same again when the step is repeated.
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
                return row, False  # a twin was faster; it published the same
            # Each input's low counts, also of one with nothing new.
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
    """Plans are compared by hash: the text may have been through JSON."""
    return other is not None and (dict(one.ranges), one.package, one.plan_hash) == (
        dict(other.ranges),
        other.package,
        other.plan_hash,
    )


def _fitted(table: pa.Table, output: OutputSpec) -> pa.RecordBatch:
    """The rows in exactly the output's columns."""
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
