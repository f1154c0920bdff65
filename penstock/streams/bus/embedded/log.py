"""The bus on one machine's disk: a folder per category with Arrow segments and the SQLite index over them.

Which records of a publish are new is decided twice: before the segment is written, to write little, and in
the transaction that makes it visible. The second answer may be smaller, never larger.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.clock import Millis
from penstock.core.disk import make_durable_folder, sync_folder
from penstock.core.errors import CorruptData, PenstockError, StoreUnavailable
from penstock.core.system_clock import SystemClock
from penstock.core.system_clock import boot_id as this_boot
from penstock.streams.bus import idle
from penstock.streams.bus import log as contract
from penstock.streams.bus.embedded import index as log_index
from penstock.streams.bus.embedded.clean import (
    UNFINISHED,
    clean_category,
    clean_unfinished,
    compact_category,
    expire_category,
    give_up,
    load_lag,
    load_sizes,
    load_times,
    remove_file,
    truncate_category,
)
from penstock.streams.bus.embedded.index import (
    Encoded,
    LogIndex,
    SegmentEntry,
    Times,
    encode,
    read_batch,
    segment_path,
    translated,
    write_segment,
)
from penstock.streams.bus.log import Category, CategorySpec, Lag, Mark, Published, Run, Seen, TimedRun

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


def _admit(connection: sqlite3.Connection, publish: Publish) -> _Admitted:
    highest = log_index.load_epoch(connection, publish.producer)
    contract.check_epoch(publish.category, publish.producer, epoch=publish.epoch, highest=highest)
    marks = log_index.load_sequences(connection, publish.producer)
    if publish.gapless:
        for partition, batch in publish.batches.items():
            contract.check_gapless(publish.category, partition, batch, marks.get(partition))
    return _Admitted(
        trimmed={p: contract.decide_trim(batch, marks.get(p)) for p, batch in publish.batches.items()},
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
                last=int(contract.sequences(batch)[-1]),
            )
    return published


# Retries of a publish whose file was removed by the cleaner.
PUBLISH_TRIES = 5
_CLOCK = SystemClock()


class EmbeddedLog:
    """The `Log` protocol on a folder, shared by any number of handles, threads and processes of one host.

    `fault(point)` is called around every effect ("publish:before", "publish:after", "write:before", ...):
    tests crash there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fault: Callable[[str], None] | None = None,
        new_birth: Callable[[], str] = lambda: secrets.token_hex(8),
        now_ms: Callable[[], Millis] = _CLOCK.now_ms,
        boot_id: str | None = None,
    ) -> None:
        self._folder = folder.absolute()
        self._fault, self._new_birth, self._now_ms = fault or (lambda point: None), new_birth, now_ms
        self._boot_id = this_boot() if boot_id is None else boot_id
        self._unfinished: dict[str, Millis] = {}  # incomplete categories: when each was first seen
        self._opened: dict[str, tuple[int, LogIndex, Category]] = {}  # with the index file's inode

    def __reduce__(self) -> tuple[object, ...]:
        # Handles are pickled for Spark's workers, without connections and hooks.
        return EmbeddedLog, (self._folder,)

    def close(self) -> None:
        """Close this process's idle connections; the handle may be used again."""
        for _, index, _ in self._opened.values():
            index.close()

    def create(self, spec: CategorySpec) -> Category:
        """Create, or return the existing category if its spec is the same. The first creator wins."""
        contract.check_spec(spec)
        with translated(self._folder / spec.name):
            if not (self._folder / spec.name / log_index.INDEX).exists():
                self._build(spec)
            sync_folder(self._folder)  # also if another process created it, whose sync may not be done yet
        self._fault("create:after")
        category = self.describe(spec.name)
        contract.check_same(category, spec)
        return category

    def describe(self, name: str) -> Category:
        """NotFound if there is none."""
        return self._of(name)[1]

    def categories(self) -> tuple[Category, ...]:
        """All categories, by name."""
        return tuple(self.describe(name) for name in self.names())

    def names(self) -> tuple[str, ...]:
        """The names of all categories, also of those that cannot be read."""
        found = (path.parent.name for path in self._folder.glob(f"*/{log_index.INDEX}"))
        return tuple(sorted(name for name in found if not name.startswith(".")))

    def publish(
        self,
        category: str,
        *,
        producer: str,
        epoch: int,
        batches: Mapping[int, pa.RecordBatch],
        gapless: bool,
    ) -> Published:
        """Append the new records of each batch, all partitions or none; on disk when it returns."""
        index, described = self._of(category)
        arranged = contract.arrange(described.spec, batches)
        publish = Publish(
            category=category, producer=producer, epoch=epoch, batches=arranged, gapless=gapless
        )
        for _ in range(PUBLISH_TRIES - 1):
            try:
                return publish_once(index, publish, self._fault, self._now_ms())
            except SegmentCleaned:
                continue
        return publish_once(index, publish, self._fault, self._now_ms())

    def start_offsets(self, category: str) -> tuple[int, ...]:
        """The first existing offset of each partition."""
        with self._of(category)[0].reading() as connection:
            return log_index.load_starts(connection)

    def truncate(self, category: str, before: Mapping[int, int]) -> None:
        """Delete the records below these offsets; a file is deleted with its last record."""
        index, described = self._of(category)
        with index.reading() as connection:
            contract.check_truncate(described.spec, before, log_index.load_ends(connection))
        truncate_category(index, before)

    def end_offsets(self, category: str) -> tuple[int, ...]:
        """One past the last record of each partition."""
        with self._of(category)[0].reading() as connection:
            return log_index.load_ends(connection)

    def read(self, category: str, partition: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Records [start, end) in offset order. The index is read at once, segments lazily."""
        assert start >= 0, "offsets count from 0"
        index, described = self._of(category)
        contract.check_partition(described.spec, partition)
        if end <= start:
            return iter(())
        with index.reading() as connection:
            contract.check_range(described.spec, partition, end, log_index.load_ends(connection)[partition])
            contract.check_start(category, partition, start, log_index.load_starts(connection)[partition])
            entries = log_index.load_entries(connection, partition, start, end)
        _check_whole(index.folder, entries, start, end)
        return _batches(index, described.spec.schema(), entries, start, end)

    def scan(self, category: str, partition: int, start: int, end: int) -> Iterator[Run]:
        """As `read`, each batch with the offsets of its rows."""
        return contract.count_offsets(start, self.read(category, partition, start, end))

    def scan_timed(self, category: str, partition: int, start: int, end: int) -> Iterator[TimedRun]:
        """As `scan`, with the time at which each row was appended."""
        runs = self.scan(category, partition, start, end)
        with self._of(category)[0].reading() as connection:
            firsts, times = log_index.load_appends(connection, partition, start, end)
        for offsets, batch in runs:
            places = np.searchsorted(firsts, offsets, side="right") - 1
            yield offsets, times[np.maximum(places, 0)], batch

    def times(self, category: str, partition: int, start: int, end: int) -> tuple[Millis, Millis] | None:
        """The smallest and the largest `_ts` in [start, end): from the index, but at the edges."""
        self.read(category, partition, start, end)  # checks the arguments
        with self._of(category)[0].reading() as connection:
            found = load_times(connection, partition, start, max(start, end))
        edges = (contract.times_of(self.read(category, partition, *cut)) for cut in found.cut)
        times = [*found.whole, *(edge for edge in edges if edge is not None)]
        return (min(low for low, _ in times), max(high for _, high in times)) if times else None

    def lag(self, category: str, positions: Mapping[int, int], *, now_ms: Millis) -> Lag:
        """The lag of a reader at these positions."""
        index, described = self._of(category)
        for partition in positions:
            contract.check_partition(described.spec, partition)
        with index.reading() as connection:
            return contract.sum_lags(
                load_lag(connection, partition, position, now_ms) for partition, position in positions.items()
            )

    def within(self, category: str, partition: int, start: int, end: int, bytes_max: int) -> int:
        """The end of the range from `start` with about `bytes_max` bytes."""
        index, described = self._of(category)
        contract.check_partition(described.spec, partition)
        with index.reading() as connection:
            sizes = load_sizes(connection, partition, start, end)
            return contract.fit_bytes(sizes, start, end, bytes_max)

    def published_to(self, category: str, producer: str) -> Mapping[int, int]:
        """The highest sequence this producer ever appended, per partition."""
        with self._of(category)[0].reading() as connection:
            return log_index.load_sequences(connection, producer)

    def fence(self, category: str, producer: str, epoch: int, *, is_new_life: bool = False) -> None:
        """Refuse every smaller epoch of this producer from now on."""
        with self._of(category)[0].writing("fence") as connection:
            if is_new_life:
                highest = log_index.load_epoch(connection, producer)
                contract.check_new_epoch(category, producer, epoch=epoch, highest=highest)
            log_index.raise_epoch(connection, producer, epoch)

    def register_producer(self, category: str, producer: str) -> None:
        """Add this producer to the category's watermark, from the current W. May be repeated."""
        with self._of(category)[0].writing("register_producer") as connection:
            if producer not in log_index.load_lows(connection):
                log_index.set_low(connection, producer, log_index.load_watermark(connection)[0])

    def unregister_producer(self, category: str, producer: str) -> None:
        """Remove it from the watermark; W rises with the next report of another producer."""
        with self._of(category)[0].writing("unregister_producer") as connection:
            if producer in log_index.load_lows(connection):
                log_index.set_low(connection, producer, None)

    def producers(self, category: str) -> Mapping[str, Millis]:
        """Registered producers and their output lows."""
        with self._of(category)[0].reading() as connection:
            return log_index.load_lows(connection)

    def report_low(self, category: str, *, producer: str, epoch: int, low: Millis, now_ms: Millis) -> None:
        """Raise the producer's output low, append a mark if one is due; writes only what changes."""
        index, _ = self._of(category)
        with index.reading() as connection:
            change = _decide_report(connection, category, producer, epoch, low, now_ms)
        if change == _LowChange():
            return
        with index.writing("report_low") as connection:
            change = _decide_report(connection, category, producer, epoch, low, now_ms)
            if change.epoch is not None:
                log_index.raise_epoch(connection, producer, change.epoch)
            if change.low is not None:
                log_index.set_low(connection, producer, change.low)
            if change.mark is not None:
                log_index.append_mark(connection, change.mark, now_ms)

    def advance(self, category: str, *, now_ms: Millis) -> None:
        """Append the marks that are due, if any."""
        index, described = self._of(category)
        with index.reading() as connection:
            is_due = _decide_advance(connection, now_ms) is not None
        if is_due:
            with index.writing("advance") as connection:
                due = _decide_advance(connection, now_ms)
                if due is not None:
                    log_index.append_mark(connection, due, now_ms)
        self._note(index, described.spec, {}, now_ms)

    def observe(self, category: str, *, partition: int, low: Millis, now_ms: Millis) -> None:
        """Report that a reader has reached this low; idle partitions follow."""
        index, described = self._of(category)
        contract.check_partition(described.spec, partition)
        self._note(index, described.spec, {partition: low}, now_ms)

    def observed(self, category: str) -> tuple[Seen, ...]:
        """The recorded progress of each partition."""
        index, described = self._of(category)
        if not described.spec.idle_after_ms:
            return ()
        with index.reading() as connection:
            return log_index.load_seen(connection, described.spec)

    def _note(
        self, index: LogIndex, spec: CategorySpec, observed: Mapping[int, Millis], now_ms: Millis
    ) -> None:
        if not spec.idle_after_ms:
            return
        with index.reading() as connection:
            if not _decide_idle(connection, spec, observed, now_ms)[0]:
                return
        with index.writing("observe") as connection:
            log_index.note_seen(connection, *_decide_idle(connection, spec, observed, now_ms))

    def marks(self, category: str, partition: int, *, above: Millis, up_to: int) -> tuple[Mark, ...]:
        """Marks of one partition with low > `above` and end <= `up_to`, in order."""
        index, described = self._of(category)
        contract.check_partition(described.spec, partition)
        with index.reading() as connection:
            return log_index.load_marks(connection, partition, above=above, up_to=up_to)

    def watermark(self, category: str) -> Millis:
        """W of the last mark, LOW_MIN if none."""
        with self._of(category)[0].reading() as connection:
            return log_index.load_watermark(connection)[0]

    def raise_percentile(self, category: str, *, percent: int, low: Millis) -> Millis:
        """Store the low that so many percent have reached, if it is higher."""
        index, _ = self._of(category)
        with index.reading() as connection:
            kept = log_index.load_percentile(connection, percent)
        if low <= kept:
            return kept
        with index.writing("raise_percentile") as connection:
            kept = max(low, log_index.load_percentile(connection, percent))
            log_index.keep_percentile(connection, percent, kept)
        return kept

    def clean(self, *, now_ms: Millis, older_than_ms: Millis) -> int:
        """Remove what dead publishers and creators left, and what is past its retention; move small publishes
        from the index into files. Returns how many files and folders went.

        A category that cannot be cleaned does not keep the others from it. `now_ms` is of the clock that runs
        since the machine's start. A pending file's age counts from the first `clean` that saw it. A live
        publisher whose file is taken publishes again, so `older_than_ms` only has to be longer than most
        publishes.
        """
        removed, failed = 0, dict[str, PenstockError]()
        for name in self.names():
            try:
                index, category = self._of(name)
                removed += clean_category(index, now_ms=now_ms, older_than_ms=older_than_ms)
                removed += expire_category(index, category.spec, boot_id=self._boot_id, now_ms=now_ms)
            except PenstockError as error:
                failed[name] = error
        removed += clean_unfinished(
            self._folder, self._unfinished, now_ms=now_ms, older_than_ms=older_than_ms
        )
        for name in self.names():  # last: it needs disk space, which the other steps free
            if name not in failed:
                try:
                    index, category = self._of(name)
                    compact_category(index, category.spec.schema(), self._fault)
                except PenstockError as error:
                    failed[name] = error
        if failed:
            raise contract.NotAllCleaned(failed)
        return removed

    def _of(self, name: str) -> tuple[LogIndex, Category]:
        contract.check_name(name)
        try:
            # The open index of a category that was removed or created again must not be used.
            inode = os.stat(self._folder / name / log_index.INDEX).st_ino
        except FileNotFoundError:
            raise contract.missing(name) from None
        found = self._opened.get(name)
        if found is None or found[0] != inode:
            index = LogIndex(self._folder / name, self._fault)
            with index.reading() as connection:
                is_old = log_index.is_old(connection)
            if is_old:
                with index.writing("upgrade") as connection:
                    log_index.upgrade(connection)
            with index.reading() as connection:
                found = (inode, index, log_index.load_category(connection))
            self._opened[name] = found
        return found[1], found[2]

    def _build(self, spec: CategorySpec) -> None:
        """Create it in a temporary folder and rename it, so that it appears complete."""
        unfinished = self._folder / f"{UNFINISHED}{secrets.token_hex(8)}"
        try:
            make_durable_folder(unfinished)
            log_index.build(unfinished, Category(spec=spec, birth=self._new_birth()))
            sync_folder(unfinished)
            self._fault("create:before")
            unfinished.rename(self._folder / spec.name)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another process has created it
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LowChange:
    """The changes of a report; None: unchanged."""

    epoch: int | None = None
    low: Millis | None = None
    mark: Millis | None = None


def _decide_report(
    connection: sqlite3.Connection, category: str, producer: str, epoch: int, low: Millis, now_ms: Millis
) -> _LowChange:
    highest = log_index.load_epoch(connection, producer)
    contract.check_epoch(category, producer, epoch=epoch, highest=highest)
    lows = log_index.load_lows(connection)
    if producer not in lows:
        raise contract.not_registered(category, producer)
    raised = low if low > lows[producer] else None
    lows[producer] = max(low, lows[producer])
    last, last_ms = log_index.load_watermark(connection)
    return _LowChange(
        epoch=epoch if highest is None or epoch > highest else None,
        low=raised,
        mark=contract.decide_mark(lows, last=last, last_ms=last_ms, now_ms=now_ms),
    )


def _decide_advance(connection: sqlite3.Connection, now_ms: Millis) -> Millis | None:
    last, last_ms = log_index.load_watermark(connection)
    return contract.decide_mark(log_index.load_lows(connection), last=last, last_ms=last_ms, now_ms=now_ms)


def _decide_idle(
    connection: sqlite3.Connection, spec: CategorySpec, observed: Mapping[int, Millis], now_ms: Millis
) -> tuple[dict[int, Seen], dict[int, Millis]]:
    seen = log_index.load_seen(connection, spec)
    noted = idle.decide_idle(
        seen,
        log_index.load_ends(connection),
        observed=observed,
        idle_after_ms=spec.idle_after_ms,
        now_ms=now_ms,
        last=log_index.load_watermark(connection)[0],
    )
    return noted, idle.due_marks(seen, noted)


def _check_whole(folder: Path, entries: list[SegmentEntry], start: int, end: int) -> None:
    position = entries[0].first if entries else end
    is_whole = position <= start
    for entry in entries:
        is_whole = is_whole and entry.first == position
        position = entry.first + entry.rows
    if not is_whole or position < end:
        raise CorruptData(
            f"the index of category {folder.name!r} has a hole between offsets {start} and {end}",
            why="offsets have no gaps, so rows of the index were lost or changed",
            fix=f"restore {folder / log_index.INDEX} from a backup",
        )


def _batches(
    index: LogIndex, schema: pa.Schema, entries: list[SegmentEntry], start: int, end: int
) -> Iterator[pa.RecordBatch]:
    for entry in entries:
        path = segment_path(index.folder, entry.segment)
        try:
            batch = read_batch(schema, entry.place, path=path, inline=entry.payload)
        except CorruptData:
            with index.reading() as connection:
                first = log_index.load_starts(connection)[entry.partition]
            contract.check_start(index.folder.name, entry.partition, max(start, entry.first), first)
            raise
        first, last = max(start, entry.first), min(end, entry.first + entry.rows)
        yield batch.slice(entry.skip + first - entry.first, last - first)
