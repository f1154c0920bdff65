"""One publish to the embedded log: read the index, write a segment of new records, make it visible in one
transaction.

What is new is decided twice: before the segment is written, to write little, and inside the transaction,
where it counts. The second answer may be smaller; it is a suffix of the first, so the segment stays as it is.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError, StoreUnavailable
from penstock.streams.bus import admission
from penstock.streams.bus.embedded import index as log_index
from penstock.streams.bus.embedded.index import (
    Encoded,
    LogIndex,
    SegmentEntry,
    Times,
    encode,
    segment_path,
    write_segment,
)
from penstock.streams.bus.log import Published

# Up to this size a segment is stored in the index itself, which saves a transaction and two syncs.
INLINE_BYTES_MAX = 16 * 1024


class SegmentCleaned(StoreUnavailable):
    """The cleaner removed the file before its commit: publish again."""

    def __init__(self, category: str, segment: int) -> None:
        super().__init__(
            f"segment {segment} of {category!r} was removed before it was published",
            why="the cleaner considered its publisher dead; nothing became visible",
            fix="publish again; if it happens often, let the cleaner wait longer",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """A producer's request to append batches in the category's schema."""

    category: str
    producer: str
    epoch: int
    batches: Mapping[int, pa.RecordBatch]
    gapless: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Admitted:
    trimmed: Mapping[int, int]  # per partition, records at the front that are already there
    is_newer: bool  # the epoch is above all that were seen

    def published(self, publish: Publish) -> Published:
        appended = {p: batch.num_rows - self.trimmed[p] for p, batch in publish.batches.items()}
        return Published(appended=appended, trimmed=dict(self.trimmed))


def publish_once(
    index: LogIndex, publish: Publish, fault: Callable[[str], None], now_ms: Millis
) -> Published:
    """Append new records, all partitions or none. SegmentCleaned: nothing was written, try again."""
    with index.reading() as connection:
        before = _admit(connection, publish)
    fresh = {
        partition: batch.slice(before.trimmed[partition])
        for partition, batch in publish.batches.items()
        if batch.num_rows > before.trimmed[partition]
    }
    if not fresh:
        if before.is_newer:
            with index.writing("epoch") as connection:
                _admit(connection, publish)
                log_index.raise_epoch(connection, publish.producer, publish.epoch)
        return before.published(publish)
    encoded = encode(next(iter(fresh.values())).schema, fresh)
    if encoded.bytes <= INLINE_BYTES_MAX:
        return _commit(index, publish, before, encoded, segment=None, now_ms=now_ms)
    with index.writing("register") as connection:
        segment = log_index.register_segment(connection, encoded.bytes)
    try:
        write_segment(segment_path(index.folder, segment), encoded, fault)
        published = _commit(index, publish, before, encoded, segment=segment, now_ms=now_ms)
    except PenstockError:
        # The file is removed only with its pending row: after a successful commit it stays.
        with suppress(PenstockError):  # then the cleaner removes it
            give_up(index, segment)
        raise
    if not any(published.appended.values()):
        remove_file(index, segment)
    return published


def give_up(index: LogIndex, segment: int) -> bool:
    """Remove a file that is not visible; False if it is visible or removed already."""
    with index.writing("give_up") as connection:
        is_mine = log_index.drop_segment(connection, segment)
    if is_mine:
        remove_file(index, segment)
    return is_mine


def remove_file(index: LogIndex, segment: int) -> None:
    """Remove a segment's file; on failure the next cleaning does. Requires: the segment has no row."""
    with suppress(OSError):
        segment_path(index.folder, segment).unlink()


def _admit(connection: sqlite3.Connection, publish: Publish) -> _Admitted:
    highest = log_index.load_epoch(connection, publish.producer)
    admission.check_epoch(publish.category, publish.producer, epoch=publish.epoch, highest=highest)
    marks = log_index.load_sequences(connection, publish.producer)
    if publish.gapless:
        for partition, batch in publish.batches.items():
            admission.check_gapless(publish.category, partition, batch, marks.get(partition))
    return _Admitted(
        trimmed={p: admission.decide_trim(batch, marks.get(p)) for p, batch in publish.batches.items()},
        is_newer=highest is None or publish.epoch > highest,
    )


def _commit(
    index: LogIndex,
    publish: Publish,
    before: _Admitted,
    encoded: Encoded,
    *,
    segment: int | None,
    now_ms: Millis,
) -> Published:
    with index.writing("publish") as connection:
        now = _admit(connection, publish)
        published = now.published(publish)
        if now.is_newer:
            log_index.raise_epoch(connection, publish.producer, publish.epoch)
        new = [partition for partition, count in published.appended.items() if count]
        if segment is None:
            if not new:
                return published
            segment = log_index.insert_inline(connection, b"".join(encoded.buffers))
        elif not (log_index.show_segment if new else log_index.drop_segment)(connection, segment):
            raise SegmentCleaned(publish.category, segment)
        ends = log_index.load_ends(connection)
        for partition in new:
            batch = publish.batches[partition].slice(now.trimmed[partition])
            times = pc.min_max(batch.column("_ts")).as_py()
            entry = SegmentEntry(
                partition=partition,
                first=ends[partition],
                rows=batch.num_rows,
                segment=segment,
                place=encoded.places[partition],
                skip=now.trimmed[partition] - before.trimmed[partition],
            )
            log_index.append(
                connection,
                entry,
                times=Times(min=times["min"], max=times["max"], at_ms=now_ms),
                producer=publish.producer,
                last=int(admission.sequences(batch)[-1]),
            )
    return published
