"""Reads one interval's range of the bus as rows for Spark: decoded, with event times and late flags, between
a begin and an end row.

Runs in Spark's Python workers and in tests; it does not depend on Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.clock import Millis
from penstock.streams.bus.decode import decode_values
from penstock.streams.bus.log import ARROW_TYPES, LOW_COLUMN, LOW_MIN, Log
from penstock.streams.rows.row_store import RowStore
from penstock.streams.step.step import BAD, BEGIN, DATA, END, InputSpec, OwnedInterval, TaskDescriptor
from penstock.streams.step.watermark import event_time_lows, lows_by_marks, marks_of_event_time

_SYSTEM_TYPES = {
    "_kind": pa.int8(),
    "_meta": pa.string(),
    "_input": pa.int8(),
    "_offset": pa.int64(),
    "_ts": pa.int64(),
    "_key": pa.string(),
    "_late": pa.bool_(),
    "_low": pa.int64(),
    "_bad": pa.string(),
    "_raw": pa.binary(),
}


def row_schema(task: TaskDescriptor) -> pa.Schema:
    """Arrow schema of the rows between source and step."""
    return schema_of(
        (task.column(number, name), kind)
        for number, source in enumerate(task.inputs)
        for name, kind in source.columns
    )


def schema_of(columns: Iterable[tuple[str, str]]) -> pa.Schema:
    """The schema of the system columns and these columns."""
    system = [pa.field(name, kind) for name, kind in _SYSTEM_TYPES.items()]
    return pa.schema([*system, *(pa.field(name, ARROW_TYPES[kind]) for name, kind in columns)])


def read_ranges(
    *,
    task: TaskDescriptor,
    interval: OwnedInterval,
    spans: Mapping[str, tuple[int, int]],
    log: Log,
    rows: RowStore,
) -> Iterator[pa.RecordBatch]:
    """Rows [start, end) of the interval's partition of each input, by birth, one input after the other.

    The first row has the ranges, the last row the maximum event times and the number of records. Records that
    the task has marked as poison are treated as unreadable.
    """
    schema, partition = row_schema(task), interval.ref.partition
    ranges = {birth: [start, end] for birth, (start, end) in spans.items()}
    yield control_row(schema, BEGIN, {"partition": partition, "ranges": ranges})
    row = rows.peek(interval.ref)
    seen, read = {}, 0
    poisoned = task.poisoned.get(str(partition), {})
    for number, source in enumerate(task.inputs):
        if source.birth not in spans:
            continue
        start, end = spans[source.birth]
        before = row.event_time_max.get(source.birth, LOW_MIN)
        lateness = _Lateness(source, log, partition, row.input_low, before, end)
        names = {name: task.column(number, name) for name, _ in source.columns}
        poison = {int(offset): why for offset, why in poisoned.get(source.birth, {}).items()}
        for offsets, appended, batch in scan_runs(log, source, partition, start, end):
            if batch.num_rows:
                found = _rows(batch, offsets, appended, schema, source, lateness, number, names)
                yield _set_aside(found, batch, offsets, schema, poison, number) if poison else found
            read += batch.num_rows
        if source.watermark == "event_time":
            seen[source.birth] = lateness.event_time_max
    yield control_row(schema, END, {"partition": partition, "event_time_max": seen, "read": read})


def scan_runs(
    log: Log, source: InputSpec, partition: int, start: int, end: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None, pa.RecordBatch]]:
    """Batches of records; with their append times if the input limits event times in the future."""
    if source.watermark == "event_time" and source.ahead_max_ms:
        yield from log.scan_timed(source.category, partition, start, end)
    else:
        yield from (
            (offsets, None, batch) for offsets, batch in log.scan(source.category, partition, start, end)
        )


class _Lateness:
    """Decides once, at the source, whether a record is late; internal categories contain the flag."""

    def __init__(
        self, source: InputSpec, log: Log, partition: int, input_low: Millis, event_time_max: Millis, end: int
    ) -> None:
        self._source, self._low = source, input_low
        self.event_time_max = event_time_max
        marks = (
            log.marks(source.category, partition, above=input_low, up_to=end)
            if source.watermark in ("event_time", "injector")
            else ()
        )
        self._marks = marks_of_event_time(marks) if source.watermark == "event_time" else marks

    def lows(self, ts: npt.NDArray[np.int64], offset: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """The low watermark at which each record is read; None: the records contain the late flag."""
        if self._source.watermark == "producers":
            return None
        lows = lows_by_marks(offset, self._marks, low=self._low)
        if self._source.watermark == "event_time":
            # Lows that the interval followed while its partition was idle are in its own low.
            own, self.event_time_max = event_time_lows(ts, self.event_time_max, self._source.lateness_ms)
            lows = np.maximum(lows, own)
        return lows


def _rows(
    batch: pa.RecordBatch,
    offsets: npt.NDArray[np.int64],
    appended: npt.NDArray[np.int64] | None,
    schema: pa.Schema,
    source: InputSpec,
    lateness: _Lateness | _OnTime,
    number: int,
    names: Mapping[str, str],
) -> pa.RecordBatch:
    ts = batch.column("_ts")
    bad: dict[int, str] = {}
    if source.format != "typed":
        decoded = decode_values(source.format, batch.column("_value"), source.columns)
        columns = {name: decoded.table.column(name).combine_chunks() for name, _ in source.columns}
        bad = dict(decoded.bad)
        good = None if decoded.rows is None else np.array(decoded.rows, dtype=np.int64)
        if source.ts_column:
            stamps = columns[source.ts_column]
            ts, good, columns, unstamped = _event_times(stamps, good, columns)
            bad.update(
                dict.fromkeys(unstamped, f"no event time: column {source.ts_column!r} is missing or null")
            )
        elif good is not None:
            ts = ts.take(pa.array(good))
    else:
        columns, good = {name: batch.column(name) for name, _ in source.columns}, None
    if appended is not None:
        ts, good, columns, ahead = _without_ahead(ts, good, columns, appended, source.ahead_max_ms)
        bad.update(ahead)
    picked = offsets if good is None else offsets[good]
    readable = batch if good is None else batch.take(pa.array(good))
    stamps_np = ts.to_numpy(zero_copy_only=False).astype(np.int64)
    system = {
        "_kind": _constant(DATA, len(picked), pa.int8()),
        "_input": _constant(number, len(picked), pa.int8()),
        "_offset": pa.array(picked),
        "_ts": ts.cast(pa.int64()),
        "_key": readable.column("_key"),
        **_late_columns(stamps_np, lateness.lows(stamps_np, picked), readable),
    }
    own = {names[name]: column for name, column in columns.items()}
    rows = _assemble(schema, len(picked), {**system, **own})
    return rows if not bad else _in_order(rows, _bad_rows(batch, offsets, schema, bad, number))


def _late_columns(
    ts: npt.NDArray[np.int64], lows: npt.NDArray[np.int64] | None, carried: pa.RecordBatch
) -> dict[str, pa.Array]:
    """The late flags, and for late records the low watermark at which their source read them."""
    if lows is None:
        name = LOW_COLUMN[0]
        found = {name: carried.column(name)} if name in carried.schema.names else {}
        return {"_late": carried.column("_late"), **found}
    late = ts < lows
    if not late.any():
        return {"_late": pa.array(late, pa.bool_())}
    return {"_late": pa.array(late, pa.bool_()), LOW_COLUMN[0]: pa.array(lows, pa.int64(), mask=~late)}


def _set_aside(
    rows: pa.RecordBatch,
    batch: pa.RecordBatch,
    offsets: npt.NDArray[np.int64],
    schema: pa.Schema,
    poisoned: Mapping[int, str],
    number: int,
) -> pa.RecordBatch:
    there = rows.column("_offset").to_numpy()
    is_good = ~np.isin(there, list(poisoned)) | (rows.column("_kind").to_numpy() != DATA)
    if is_good.all():
        return rows
    places = np.searchsorted(offsets, there[~is_good])
    bad = {int(place): poisoned[int(offsets[place])] for place in places}
    return _in_order(rows.filter(pa.array(is_good)), _bad_rows(batch, offsets, schema, bad, number))


def _in_order(good: pa.RecordBatch, bad: pa.RecordBatch) -> pa.RecordBatch:
    both = pa.Table.from_batches([good, bad])
    (whole,) = both.sort_by("_offset").combine_chunks().to_batches()
    return whole


def _event_times(
    stamps: pa.Array, good: npt.NDArray[np.int64] | None, columns: dict[str, pa.Array]
) -> tuple[pa.Array, npt.NDArray[np.int64] | None, dict[str, pa.Array], tuple[int, ...]]:
    """Event times of the decoded rows, without rows that have none; their positions are the last value."""
    if not stamps.null_count:
        return stamps, good, columns, ()
    positions = np.arange(len(stamps), dtype=np.int64) if good is None else good
    has = pc.is_valid(stamps)
    mask = has.to_numpy(zero_copy_only=False)
    kept = {name: column.filter(has) for name, column in columns.items()}
    return stamps.filter(has), positions[mask], kept, tuple(int(position) for position in positions[~mask])


def _without_ahead(
    ts: pa.Array,
    good: npt.NDArray[np.int64] | None,
    columns: dict[str, pa.Array],
    appended: npt.NDArray[np.int64],
    ahead_max_ms: Millis,
) -> tuple[pa.Array, npt.NDArray[np.int64] | None, dict[str, pa.Array], dict[int, str]]:
    """The rows without those whose event time is too far after their append time, with the reason for each.

    These must not move the watermark: a single one would make all other records late.
    """
    positions = np.arange(len(ts), dtype=np.int64) if good is None else good
    at = appended[positions]
    ahead = ts.to_numpy(zero_copy_only=False).astype(np.int64) - at
    is_ahead = (ahead > ahead_max_ms) & (at > 0)
    if not is_ahead.any():
        return ts, good, columns, {}
    kept = pa.array(~is_ahead)
    why = {
        int(
            position
        ): f"from the future: its event time is {over} ms after its append time, at most {ahead_max_ms} ms "
        "are allowed"
        for position, over in zip(positions[is_ahead], ahead[is_ahead], strict=True)
    }
    left = {name: column.filter(kept) for name, column in columns.items()}
    return ts.filter(kept), positions[~is_ahead], left, why


def _bad_rows(
    batch: pa.RecordBatch,
    offsets: npt.NDArray[np.int64],
    schema: pa.Schema,
    bad: Mapping[int, str],
    number: int,
) -> pa.RecordBatch:
    places = sorted(bad)
    taken = batch.take(pa.array(places, pa.int64()))
    return _assemble(
        schema,
        len(places),
        {
            "_kind": _constant(BAD, len(places), pa.int8()),
            "_input": _constant(number, len(places), pa.int8()),
            "_offset": pa.array(offsets[places]),
            "_ts": taken.column("_ts"),
            "_key": taken.column("_key"),
            "_late": _constant(False, len(places), pa.bool_()),
            "_bad": pa.array([bad[place] for place in places], pa.string()),
            "_raw": taken.column("_value")
            if "_value" in taken.schema.names
            else pa.nulls(len(places), pa.binary()),
        },
    )


def control_row(schema: pa.Schema, kind: int, meta: Mapping[str, object]) -> pa.RecordBatch:
    """A control row: metadata about the rows around it."""
    return _assemble(
        schema, 1, {"_kind": pa.array([kind], pa.int8()), "_meta": pa.array([json.dumps(meta)], pa.string())}
    )


def _assemble(schema: pa.Schema, length: int, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    arrays = [columns[f.name] if f.name in columns else pa.nulls(length, f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _constant(value: object, length: int, kind: pa.DataType) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), length)


class _OnTime:
    """Flags no record as late: for reads outside of a task."""

    def lows(self, ts: npt.NDArray[np.int64], offset: npt.NDArray[np.int64]) -> None:
        return None


def rows_alone(
    batch: pa.RecordBatch,
    offsets: npt.NDArray[np.int64],
    source: InputSpec,
    appended: npt.NDArray[np.int64] | None = None,
) -> pa.RecordBatch:
    """A batch of the bus as rows, outside of an interval: no control rows, late flags as stored."""
    names = {name: name for name, _ in source.columns}
    return _rows(batch, offsets, appended, schema_of(source.columns), source, _OnTime(), 0, names)
