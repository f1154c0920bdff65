"""The stateless step: promise a range, publish what Spark made of it, commit the range (MillWheel 6.1.3).

It publishes before it commits, so a repeat must be the same: an intent with range, plan and package is made
durable first, and a successor replays exactly that before anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import IntentStands, IntervalError, PoisonRecord, VersionMoved
from penstock.streams.bus.log import ARROW_TYPES, LOW_MIN, Log
from penstock.streams.interval import COMMIT_ATTEMPTS
from penstock.streams.keys import partitions_of
from penstock.streams.rows.row_changes import name_of
from penstock.streams.rows.row_store import Changes, Intent, IntervalRef, IntervalRow, RowStore
from penstock.streams.step import INDEX_BITS, InputRange, OutputSpec, StepReport, check_start, report_low
from penstock.streams.watermark import Ints, event_time_low, low_at_end

DEAD_STREAM = "dead"


def pending_intent(row: IntervalRow) -> Intent | None:
    """What a predecessor promised and did not finish: to be replayed, with its own plan, before all else."""
    return row.intent


class StatelessStep:
    """Runs the steps of one interval under one token and plan. One input: its offsets are the sequences.

    `lateness` maps the births of event-time inputs to their lateness; all other inputs follow their marks.
    """

    def __init__(
        self,
        *,
        ref: IntervalRef,
        token: int,
        producer: str,
        rows: RowStore,
        log: Log,
        outputs: Sequence[OutputSpec],
        plan: Mapping[str, Any],
        plan_hash: str,
        package: str,
        lateness: Mapping[str, Millis] | None = None,
        stops_at_poison: bool = False,
    ) -> None:
        self._ref, self._token, self._producer, self._rows, self._log = ref, token, producer, rows, log
        self._outputs, self._plan, self._plan_hash, self._package = tuple(outputs), plan, plan_hash, package
        self._lateness, self._stops_at_poison = lateness or {}, stops_at_poison
        self._range: InputRange | None = None
        self._start = 0  # committed when the step began: rows below it were published before

    def begin(self, ranges: Sequence[InputRange]) -> bool:
        """Promise the range. False: a twin has committed it already, there is nothing to do."""
        assert len(ranges) == 1, "a stateless step reads one input: its offsets are the sequences"
        (asked,) = ranges
        for attempt in range(COMMIT_ATTEMPTS):
            row = self._row()
            check_start(self._ref, row, ranges)
            self._range, self._start = asked, row.offsets[asked.birth]
            if self._start > asked.end or (self._start == asked.end and asked.start < asked.end):
                return False
            wanted = self._intent(row, asked)
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
        now_ms: Millis,
    ) -> StepReport:
        """Publish what the plan made of the range, then commit it. Requires: `begin` returned True.

        Rows have `_offset`, `_ts`, `_key`, `_late`, the outputs' columns, and for records that did not parse
        `_bad` (why) and `_raw`. Rows made of one record are in order. `event_time_max`: the running maximum
        after the range, over all records read.
        """
        assert self._range is not None, "begin comes first"
        table = self._fresh(batches)
        counters = {"records": self._range.end - self._start, **self._publish(table)}
        row, committed = self._commit(self._range, event_time_max or {}, counters)
        report_low(row, producer=self._producer, log=self._log, outputs=self._outputs, now_ms=now_ms)
        return StepReport.of(row, counters if committed else None)

    def already_done(self, *, now_ms: Millis) -> StepReport:
        """What a worker reports whose `begin` returned False: the lows alone."""
        row = self._row()
        report_low(row, producer=self._producer, log=self._log, outputs=self._outputs, now_ms=now_ms)
        return StepReport.of(row, None)

    def _row(self) -> IntervalRow:
        return self._rows.snapshot(self._ref, token=self._token, keys=(), timers_up_to=LOW_MIN).row

    def _intent(self, row: IntervalRow, asked: InputRange) -> Intent | None:
        start = row.offsets[asked.birth]
        if start >= asked.end:
            return None
        ranges = {asked.birth: (start, asked.end)}
        return Intent(ranges=ranges, package=self._package, plan=self._plan, plan_hash=self._plan_hash)

    def _other_intent(self, intent: Intent) -> IntentStands:
        return IntentStands(
            f"interval {name_of(self._ref)} has promised another step",
            why=f"{dict(intent.ranges)} with plan {intent.plan_hash} and package {intent.package} may be "
            f"published in part, asked for was {self._range} with plan {self._plan_hash} and package "
            f"{self._package}",
            fix="restart the task: it replays the promised step first",
        )

    def _fresh(self, batches: Iterable[pa.RecordBatch]) -> pa.Table | None:
        """The rows of the range that are not committed, in order."""
        assert self._range is not None
        found = [batch for batch in batches if batch.num_rows]
        if not found:
            return None
        table = pa.Table.from_batches(found)
        offsets = _offsets(table)
        if (np.diff(offsets) < 0).any():  # a source may put what does not parse before the rest
            order = np.argsort(offsets, kind="stable")
            table, offsets = table.take(pa.array(order)), offsets[order]
        if offsets[0] < self._range.start or offsets[-1] >= self._range.end:
            raise IntervalError(
                f"interval {name_of(self._ref)} was given rows that its range does not hold",
                why=f"their offsets are {offsets[0]} to {offsets[-1]}, the range is {self._range}",
                fix="report it: source and step disagree about the range",
            )
        return table.filter(pa.array(offsets >= self._start))

    def _publish(self, table: pa.Table | None) -> dict[str, int]:
        """One publish per output. What a predecessor or twin sent is trimmed by the bus."""
        counters = {"late": 0, "bad": 0, "productions": 0}
        if table is None or not table.num_rows:
            return counters
        table = table.append_column("_seq", pa.array(self._sequences(_offsets(table))))
        bad = np.zeros(table.num_rows, dtype=np.bool_)
        if "_bad" in table.column_names:
            bad = np.asarray(table.column("_bad").is_valid().to_numpy(), dtype=np.bool_)
        good, dead = table.filter(pa.array(~bad)), table.filter(pa.array(bad))
        if dead.num_rows and (self._stops_at_poison or not self._has_dead_letters()):
            raise self._poison(dead)
        for output in self._outputs:
            own = dead if output.stream == DEAD_STREAM else good
            if not own.num_rows:
                continue
            batch = self._dead_letters(own, output) if output.stream == DEAD_STREAM else _fitted(own, output)
            batches = self._by_partition(batch, output)
            self._log.publish(
                output.category, producer=self._producer, epoch=self._token, batches=batches, gapless=False
            )
            counters["productions"] += 0 if output.stream == DEAD_STREAM else own.num_rows
        counters["late"] = int(np.count_nonzero(good.column("_late").to_numpy()))
        counters["bad"] = dead.num_rows
        return counters

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

    def _has_dead_letters(self) -> bool:
        return any(output.stream == DEAD_STREAM for output in self._outputs)

    def _poison(self, dead: pa.Table) -> PoisonRecord:
        offset, reason = dead.column("_offset")[0].as_py(), dead.column("_bad")[0].as_py()
        assert self._range is not None
        return PoisonRecord(
            f"job {self._ref.job}: a record of {self._range.category!r} cannot be worked on",
            why=f"partition {self._ref.partition}, offset {offset}: {reason}",
            fix="set `poison: dead_letter` to put such records aside, or correct the plan; nothing of this "
            "step was published"
            if self._has_dead_letters()
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

    def _is_keyed(self) -> bool:
        return bool(self._plan.get("plan", {}).get("key"))

    def _by_partition(self, batch: pa.RecordBatch, output: OutputSpec) -> dict[int, pa.RecordBatch]:
        keys = batch.column("_key")
        # Unkeyed records stay together. A null that the plan's key gave is the empty key, whoever it is with.
        if keys.null_count == len(keys) and not self._is_keyed():
            return {self._ref.partition % output.partitions: batch}
        targets = partitions_of(keys, output.partitions)
        return {
            partition: batch.take(pa.array(np.flatnonzero(targets == partition)))
            for partition in np.unique(targets).tolist()
        }

    def _commit(
        self, asked: InputRange, event_time_max: Mapping[str, Millis], counters: Mapping[str, int]
    ) -> tuple[IntervalRow, bool]:
        for attempt in range(COMMIT_ATTEMPTS):
            row = self._row()
            committed = row.offsets[asked.birth]
            if committed > asked.end or (committed == asked.end and self._start < asked.end):
                return row, False  # a twin was faster; it published the same
            low = self._low_after(row, asked, event_time_max)
            if committed == asked.end and low <= row.input_low:
                return row, False
            changes = Changes(
                offsets={asked.birth: asked.end},
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


def _offsets(table: pa.Table) -> Ints:
    return np.asarray(table.column("_offset").to_numpy(), dtype=np.int64)
