"""The outbox: productions are packed into rows with gapless sequences, and sent oldest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import CorruptData, ProductionRefused, StoreUnavailable
from penstock.jobs.config import JobConfig
from penstock.streams.bus.log import ARROW_TYPES, LOW_MAX, LOW_MIN, Log, partitions_of
from penstock.streams.rows.row_store import (
    IntervalRef,
    OutboxRow,
    RowStore,
    Snapshot,
    counter_name,
    first_sequence,
)
from penstock.streams.step.step import OutputSpec, check_category

WEAK_INDEX_BITS = 24  # index of a production within one step and output partition
# (timestamp, key, is late, values in the order of the stream's columns)
Production = tuple[Millis, str, bool, tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The sequence counters of an interval. `in_life`: use the counters of this token only."""

    next: Mapping[str, int]
    in_life: bool = False

    def first(self, category_birth: str, partition: int) -> int:
        """The next sequence of an output partition."""
        name = counter_name(category_birth, partition, in_life=self.in_life)
        return self.next.get(name, first_sequence(in_life=self.in_life))


def pack_productions(
    produced: Sequence[Production], output: OutputSpec, sequences: Sequences, *, job: str
) -> list[OutboxRow]:
    """One outbox row per output partition; within a partition in the order of production."""
    if not produced:
        return []
    stamps, keys, lates, values = zip(*produced, strict=True)
    columns = list(zip(*values, strict=True)) if output.columns else []
    arrays = [
        _array(column, name, kind, output, keys, job)
        for column, (name, kind) in zip(columns, output.columns, strict=True)
    ]
    key_array = pa.array(keys, pa.string())
    times, flags = np.array(stamps, dtype=np.int64), np.array(lates, dtype=np.bool_)
    return _packed(times, flags, key_array, arrays, output, sequences)


def pack_table(produced: pa.Table, output: OutputSpec, sequences: Sequences) -> list[OutboxRow]:
    """Like `pack_productions`, for a table with `_ts`, `_key`, `_late` and the output's columns."""
    if not produced.num_rows:
        return []
    whole = produced.combine_chunks()
    arrays = [
        whole.column(name).cast(ARROW_TYPES[kind]).combine_chunks()
        for name, kind in (("_key", "string"), *output.columns)
    ]
    times = np.asarray(whole.column("_ts").to_numpy(), dtype=np.int64)
    flags = np.asarray(whole.column("_late").to_numpy(), dtype=np.bool_)
    return _packed(times, flags, arrays[0], arrays[1:], output, sequences)


def _packed(
    times: npt.NDArray[np.int64],
    flags: npt.NDArray[np.bool_],
    key_array: pa.Array,
    arrays: Sequence[pa.Array],
    output: OutputSpec,
    sequences: Sequences,
) -> list[OutboxRow]:
    targets = partitions_of(key_array, output.partitions)
    rows = []
    for partition in np.unique(targets).tolist():
        chosen = np.flatnonzero(targets == partition)
        first = sequences.first(output.birth, partition)
        numbers = np.arange(first, first + len(chosen), dtype=np.int64)
        own = [array.take(pa.array(chosen)) for array in (key_array, pa.array(flags), *arrays)]
        batch = pa.RecordBatch.from_arrays(
            [pa.array(numbers), pa.array(times[chosen]), *own], schema=output.schema()
        )
        on_time = times[chosen][~flags[chosen]]
        rows.append(
            OutboxRow(
                id=0,
                category=output.category,
                category_birth=output.birth,
                partition=partition,
                first_seq=first,
                count=len(chosen),
                ts_min=int(on_time.min()) if len(on_time) else LOW_MAX,
                payload=_payload_of(batch),
            )
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """How a job sends its productions. `clock` is only used for weak productions."""

    weak: bool = False
    dedup: bool = True
    straggler_ms: Millis = 1000
    clock: Callable[[], Millis] = lambda: 0

    @staticmethod
    def of(config: JobConfig, clock: Callable[[], Millis]) -> Sending:
        """From the job's config; the defaults are strong and deduplicated."""
        return Sending(
            weak=config.productions == "weak",
            dedup=config.dedup == "on",
            straggler_ms=config.straggler_ms,
            clock=clock,
        )


def producer_in_life(birth: str, token: int) -> str:
    """The producer name of an interval without deduplication across tokens."""
    return f"{birth}~{token}"


def publish_weakly(
    outbox: Sequence[OutboxRow], *, log: Log, birth: str, token: int, version: int, sending: Sending
) -> list[OutboxRow]:
    """Send productions before they are checkpointed; returns the stragglers, which must be checkpointed.

    Stragglers are rows that were not sent in time, that the bus could not accept, or that it trimmed as
    duplicates, because a twin of this worker sent other records under the same sequences.
    """
    began, left = sending.clock(), []
    for row in outbox:
        if sending.clock() - began > sending.straggler_ms:
            left.append(row)
            continue
        batch = _batch_of(row)
        # Steps under one token have different versions, so their sequences never overlap.
        first = (version << WEAK_INDEX_BITS) + 1
        sequences = pa.array(np.arange(first, first + row.count, dtype=np.int64))
        batch = batch.set_column(batch.schema.get_field_index("_seq"), batch.schema.field("_seq"), sequences)
        try:
            done = log.publish(
                row.category,
                producer=f"{producer_in_life(birth, token)}~weak",  # checkpointed rows have other sequences
                epoch=token,
                batches={row.partition: batch},
                gapless=False,
            )
        except StoreUnavailable:
            left.append(row)
            continue
        if done.trimmed.get(row.partition):
            left.append(row)
    return left


def publish_outbox(outbox: Iterable[OutboxRow], *, log: Log, birth: str, token: int) -> list[int]:
    """Send the rows in order, one publish at a time, and return their ids. The bus trims duplicates.

    The producer name is that of the time when the row was packed, even if the job's config has changed.
    """
    rows, sent = list(outbox), []
    check_outputs(log, rows)
    for group in _groups(rows):
        category, in_life = group[0].category, group[0].in_life
        producer = producer_in_life(birth, token) if in_life else birth
        batches = {row.partition: _batch_of(row) for row in group}
        log.publish(category, producer=producer, epoch=token, batches=batches, gapless=not in_life)
        sent += [row.id for row in group]
    return sent


def check_outputs(log: Log, outbox: Iterable[OutboxRow]) -> None:
    """Check that the categories of these rows are those of the plan."""
    for category, birth in {(row.category, row.category_birth): None for row in outbox}:
        check_category(log, category, birth)


def _groups(outbox: Iterable[OutboxRow]) -> Iterable[list[OutboxRow]]:
    """Consecutive rows that can share a publish: same category and producer, each partition once."""
    group: list[OutboxRow] = []
    for row in outbox:
        is_same = not group or (row.category, row.category_birth, row.in_life) == (
            group[0].category,
            group[0].category_birth,
            group[0].in_life,
        )
        if group and (not is_same or row.partition in {other.partition for other in group}):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _payload_of(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def _batch_of(row: OutboxRow) -> pa.RecordBatch:
    with pa.ipc.open_stream(row.payload) as reader:
        batch = reader.read_next_batch()
    if batch.num_rows != row.count or batch.column("_seq")[0].as_py() != row.first_seq:
        raise CorruptData(
            f"outbox row {row.id} for {row.category!r} partition {row.partition} is damaged",
            why=f"it should have {row.count} records from sequence "
            f"{row.first_seq} on, it has {batch.num_rows}",
            fix="restore the interval's rows from a backup; this row was not sent",
        )
    return batch


def _array(
    column: Sequence[object], name: str, kind: str, output: OutputSpec, keys: Sequence[str], job: str
) -> pa.Array:
    array = _converted(column, kind)
    if array is not None:
        return array
    bad = next(index for index, value in enumerate(column) if _converted([value], kind) is None)
    raise ProductionRefused(
        f"a production of job {job!r} for stream {output.stream!r} has a value "
        f"of a wrong type, key {keys[bad]!r}",
        why=f"column {name!r} is declared {kind!r}, the value was {column[bad]!r}",
        fix="convert the value before you produce it, or declare the column with another type",
        job=job,
        key=keys[bad],
    )


def fits(value: object, kind: str) -> bool:
    """Whether a column of this type can hold the value."""
    return _converted([value], kind) is not None


def _converted(column: Sequence[object], kind: str) -> pa.Array | None:
    target = ARROW_TYPES[kind]
    # pyarrow would silently truncate 1.5 to 1.
    if pa.types.is_integer(target) and not all(
        value is None or isinstance(value, int | np.integer) for value in column
    ):
        return None
    try:
        return pa.array(column, target)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return None


# --- an unsent outbox of a job that ended ----------------------------------------------------------------


def unsent_categories(ref: IntervalRef, *, rows: RowStore) -> set[str]:
    """Categories with unsent records in the outbox, or in the intent of a stateless step."""
    found = _stored_snapshot(ref, rows)
    categories = {row.category for row in found.outbox}
    if found.row.intent is not None:
        categories |= {output["category"] for output in found.row.intent.plan.get("outputs", ())}
    return categories


def send_unsent(ref: IntervalRef, *, rows: RowStore, log: Log) -> None:
    """Send the outbox of an interval without a running task. Requires: its tasks ended or are fenced.

    An intent is not replayed: its range was never committed, so its records are not processed yet.
    """
    found = _stored_snapshot(ref, rows)
    if not found.outbox:
        return
    token = found.row.token
    rows.delivered(ref, token=token, ids=publish_outbox(found.outbox, log=log, birth=ref.birth, token=token))


def _stored_snapshot(ref: IntervalRef, rows: RowStore) -> Snapshot:
    """A snapshot of the interval; Fenced if a task acquires it at the same time: then retry."""
    return rows.snapshot(ref, token=rows.peek(ref).token, keys=(), timers_up_to=LOW_MIN)
