"""One interval's range of the bus as rows for Spark: decoded, stamped, late ones flagged, between a begin and
an end row.

Runs in Spark's Python workers and in tests; knows nothing of Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.clock import Millis
from penstock.streams.bus.decode import decode_json
from penstock.streams.bus.log import ARROW_TYPES, LOW_MIN, Log
from penstock.streams.rows.row_store import RowStore
from penstock.streams.task import BAD, BEGIN, DATA, END, Input, OwnedInterval
from penstock.streams.watermark import event_time_lows

_SYSTEM_TYPES = {
    "_kind": pa.int8(),
    "_meta": pa.string(),
    "_input": pa.int8(),
    "_offset": pa.int64(),
    "_ts": pa.int64(),
    "_key": pa.string(),
    "_late": pa.bool_(),
    "_bad": pa.string(),
    "_raw": pa.binary(),
}


def row_schema(source: Input) -> pa.Schema:
    """Arrow schema of the rows between source and step."""
    system = [pa.field(name, kind) for name, kind in _SYSTEM_TYPES.items()]
    return pa.schema([*system, *(pa.field(name, ARROW_TYPES[kind]) for name, kind in source.columns)])


def read_range(
    *,
    interval: OwnedInterval,
    source: Input,
    span: tuple[int, int],
    log: Log,
    rows: RowStore,
    poisoned: Mapping[int, str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Rows [start, end) of the interval's partition. The first row says which range it is, the last what
    was seen. `poisoned` records, by offset, count as such that cannot be read.
    """
    start, end = span
    schema = row_schema(source)
    yield _control(
        schema, BEGIN, {"partition": interval.ref.partition, "ranges": {source.birth: [start, end]}}
    )
    row = rows.peek(interval.ref)
    lateness = _Lateness(
        source, log, interval.ref.partition, row.input_low, row.event_time_max.get(source.birth, LOW_MIN), end
    )
    offset = start
    for batch in log.read(source.category, interval.ref.partition, start, end):
        if batch.num_rows:
            found = _rows(batch, offset, schema, source, lateness)
            yield _set_aside(found, batch, offset, schema, poisoned) if poisoned else found
        offset += batch.num_rows
    seen = {source.birth: lateness.event_time_max} if source.watermark == "event_time" else {}
    yield _control(
        schema, END, {"partition": interval.ref.partition, "event_time_max": seen, "read": offset - start}
    )


class _Lateness:
    """Decides once, at the source, whether a record is late; internal categories carry the decision
    already.
    """

    def __init__(
        self, source: Input, log: Log, partition: int, input_low: Millis, event_time_max: Millis, end: int
    ) -> None:
        self._source, self._low = source, input_low
        self.event_time_max = event_time_max
        self._marks = (
            log.marks(source.category, partition, above=input_low, up_to=end)
            if source.watermark == "injector"
            else ()
        )

    def flags(self, ts: npt.NDArray[np.int64], offset: npt.NDArray[np.int64], carried: pa.Array) -> pa.Array:
        if self._source.watermark == "event_time":
            late, self.event_time_max = event_time_lows(ts, self.event_time_max, self._source.lateness_ms)
            return pa.array(late, pa.bool_())
        if self._source.watermark == "injector":
            ends = np.array([mark.end for mark in self._marks], dtype=np.int64)
            lows = np.array([self._low, *(mark.low for mark in self._marks)], dtype=np.int64)
            # A record at `offset` comes after every mark whose end is <= offset.
            low_at = lows[np.searchsorted(ends, offset, side="right")]
            return pa.array(ts < low_at, pa.bool_())
        return carried


def _rows(
    batch: pa.RecordBatch, first: int, schema: pa.Schema, source: Input, lateness: _Lateness | _OnTime
) -> pa.RecordBatch:
    offsets = np.arange(first, first + batch.num_rows, dtype=np.int64)
    ts = batch.column("_ts")
    bad: dict[int, str] = {}
    if source.format == "json":
        decoded = decode_json(batch.column("_value"), source.columns)
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
    picked = offsets if good is None else offsets[good]
    kept = batch if good is None else batch.take(pa.array(good))
    stamps_np = ts.to_numpy(zero_copy_only=False).astype(np.int64)
    system = {
        "_kind": _constant(DATA, len(picked), pa.int8()),
        "_input": _constant(0, len(picked), pa.int8()),
        "_offset": pa.array(picked),
        "_ts": ts.cast(pa.int64()),
        "_key": kept.column("_key"),
        "_late": lateness.flags(stamps_np, picked, kept.column("_late")),
    }
    rows = _assemble(schema, len(picked), {**system, **columns})
    return rows if not bad else _in_order(rows, _bad_rows(batch, first, schema, bad))


def _set_aside(
    rows: pa.RecordBatch, batch: pa.RecordBatch, first: int, schema: pa.Schema, poisoned: Mapping[int, str]
) -> pa.RecordBatch:
    offsets = rows.column("_offset").to_numpy()
    is_good = ~np.isin(offsets, list(poisoned)) | (rows.column("_kind").to_numpy() != DATA)
    if is_good.all():
        return rows
    bad = {int(offset) - first: poisoned[int(offset)] for offset in offsets[~is_good]}
    return _in_order(rows.filter(pa.array(is_good)), _bad_rows(batch, first, schema, bad))


def _in_order(good: pa.RecordBatch, bad: pa.RecordBatch) -> pa.RecordBatch:
    both = pa.Table.from_batches([good, bad])
    (whole,) = both.sort_by("_offset").combine_chunks().to_batches()
    return whole


def _event_times(
    stamps: pa.Array, good: npt.NDArray[np.int64] | None, columns: dict[str, pa.Array]
) -> tuple[pa.Array, npt.NDArray[np.int64] | None, dict[str, pa.Array], tuple[int, ...]]:
    """Event times of the decoded rows; rows without one are set aside (their positions in the batch come
    last).
    """
    if not stamps.null_count:
        return stamps, good, columns, ()
    positions = np.arange(len(stamps), dtype=np.int64) if good is None else good
    has = pc.is_valid(stamps)
    mask = has.to_numpy(zero_copy_only=False)
    kept = {name: column.filter(has) for name, column in columns.items()}
    return stamps.filter(has), positions[mask], kept, tuple(int(position) for position in positions[~mask])


def _bad_rows(batch: pa.RecordBatch, first: int, schema: pa.Schema, bad: Mapping[int, str]) -> pa.RecordBatch:
    places = sorted(bad)
    taken = batch.take(pa.array(places, pa.int64()))
    return _assemble(
        schema,
        len(places),
        {
            "_kind": _constant(BAD, len(places), pa.int8()),
            "_input": _constant(0, len(places), pa.int8()),
            "_offset": pa.array([first + place for place in places], pa.int64()),
            "_ts": taken.column("_ts"),
            "_key": taken.column("_key"),
            "_late": _constant(False, len(places), pa.bool_()),
            "_bad": pa.array([bad[place] for place in places], pa.string()),
            "_raw": taken.column("_value")
            if "_value" in taken.schema.names
            else pa.nulls(len(places), pa.binary()),
        },
    )


def _control(schema: pa.Schema, kind: int, meta: Mapping[str, object]) -> pa.RecordBatch:
    return _assemble(
        schema, 1, {"_kind": pa.array([kind], pa.int8()), "_meta": pa.array([json.dumps(meta)], pa.string())}
    )


def _assemble(schema: pa.Schema, length: int, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    arrays = [columns[f.name] if f.name in columns else pa.nulls(length, f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _constant(value: object, length: int, kind: pa.DataType) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), length)


class _OnTime:
    """Nothing is late: for reading a range that nobody waits for."""

    def flags(self, ts: npt.NDArray[np.int64], offset: npt.NDArray[np.int64], carried: pa.Array) -> pa.Array:
        return carried


def rows_alone(batch: pa.RecordBatch, first: int, source: Input) -> pa.RecordBatch:
    """A batch of the bus as rows, without an interval: no begin, no end, lateness as the records carry it."""
    return _rows(batch, first, row_schema(source), source, _OnTime())
