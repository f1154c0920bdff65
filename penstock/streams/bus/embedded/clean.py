"""Cleaning of the embedded log: files of dead publishers, expired records, compaction."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError
from penstock.streams.bus.embedded import index as log_index
from penstock.streams.bus.embedded.index import (
    SUFFIX,
    LogIndex,
    SegmentEntry,
    SegmentPlace,
    encode,
    entry_of,
    forget_passed,
    read_batch,
    segment_path,
    translated,
    write_segment,
)
from penstock.streams.bus.idle import Reading, count_on, is_note_due
from penstock.streams.bus.log import CategorySpec, Lag

# Runs that lie wholly below an offset; runs from the one that holds an offset on. Both use the primary key.
_BELOW = "partition = :partition AND first < :before AND first + rows <= :before"
_FROM = (
    "partition = :partition AND first + rows > :start AND first >= coalesce("
    "(SELECT max(first) FROM batches WHERE partition = :partition AND first <= :start), 0)"
)

# Made when the first note is: an index of before has none, and is read by the version that wrote it.
_NOTES = (
    "CREATE TABLE IF NOT EXISTS readings (one INTEGER PRIMARY KEY CHECK (one = 1), boot_id TEXT NOT NULL,"
    " boot_ms INTEGER NOT NULL, counted_ms INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS noted_ends (partition INTEGER, next INTEGER, counted_ms INTEGER NOT NULL,"
    " PRIMARY KEY (partition, next)) WITHOUT ROWID",
)


def truncate(connection: sqlite3.Connection, before: Mapping[int, int]) -> list[int]:
    """Delete runs wholly below the offsets; returns the segments that are no longer referenced."""
    touched: set[int] = set()
    for partition, offset in before.items():
        where = {"partition": partition, "before": offset}
        connection.execute(
            "UPDATE partitions SET first = :before WHERE partition = :partition AND first < :before", where
        )
        found = connection.execute(f"SELECT segment FROM batches WHERE {_BELOW}", where)
        touched.update(row[0] for row in found)
        connection.execute(f"DELETE FROM batches WHERE {_BELOW}", where)
        forget_passed(connection, partition, offset)
    return _drop_unused(connection, touched)


def _drop_unused(connection: sqlite3.Connection, touched: set[int]) -> list[int]:
    """Delete the rows of segments that no run references; returns them."""
    span = (min(touched, default=0), max(touched, default=-1))
    kept = connection.execute("SELECT DISTINCT segment FROM batches WHERE segment BETWEEN ? AND ?", span)
    gone = sorted(touched - {row[0] for row in kept})
    connection.executemany("DELETE FROM segments WHERE id = ?", ((segment,) for segment in gone))
    return gone


def load_inline(connection: sqlite3.Connection) -> list[SegmentEntry]:
    """Runs whose bytes are stored in the index, by partition and offset."""
    rows = connection.execute(
        "SELECT b.partition, b.first, b.rows, b.segment, b.position, b.length, b.crc, b.skip, s.payload"
        " FROM batches b JOIN segments s ON s.id = b.segment WHERE s.payload IS NOT NULL"
        " ORDER BY b.partition, b.first"
    )
    return [entry_of(*row) for row in rows]


def has_runs(connection: sqlite3.Connection, entries: Sequence[SegmentEntry]) -> bool:
    """Whether all of these consecutive runs are unchanged."""
    found = connection.execute(
        "SELECT first, segment FROM batches WHERE partition = ? AND first BETWEEN ? AND ? ORDER BY first",
        (entries[0].partition, entries[0].first, entries[-1].first),
    )
    return found.fetchall() == [(entry.first, entry.segment) for entry in entries]


def replace_runs(
    connection: sqlite3.Connection, entries: Sequence[SegmentEntry], segment: int, place: SegmentPlace
) -> None:
    """Replace several runs by one in another segment, with the append time of the newest."""
    span = (entries[0].partition, entries[0].first, entries[-1].first)
    where = "WHERE partition = ? AND first BETWEEN ? AND ?"
    times = connection.execute(f"SELECT min(ts_min), max(ts_max), max(at_ms) FROM batches {where}", span)
    ts_min, ts_max, at_ms = times.fetchone()
    connection.execute(f"DELETE FROM batches {where}", span)
    connection.execute(
        "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?)",
        (
            *(entries[0].partition, entries[0].first, sum(entry.rows for entry in entries), segment),
            *(place.position, place.length, place.crc, ts_min, ts_max, at_ms),
        ),
    )
    _drop_unused(connection, {entry.segment for entry in entries})


def load_reading(connection: sqlite3.Connection) -> Reading | None:
    """The last recorded reading; None if there is none."""
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'readings'").fetchone() is None:
        return None
    found = connection.execute("SELECT boot_id, boot_ms, counted_ms FROM readings").fetchone()
    return None if found is None else Reading(boot_id=found[0], boot_ms=found[1], counted_ms=found[2])


def note_ends(connection: sqlite3.Connection, now: Reading) -> None:
    """Record this reading, and the ends of partitions that grew since the last one."""
    for table in _NOTES:
        connection.execute(table)
    connection.execute(
        "INSERT OR REPLACE INTO readings VALUES (1, ?, ?, ?)", (now.boot_id, now.boot_ms, now.counted_ms)
    )
    connection.execute(
        "DELETE FROM noted_ends WHERE next <= (SELECT p.first FROM partitions p"
        " WHERE p.partition = noted_ends.partition)"
    )
    connection.execute(
        "INSERT INTO noted_ends SELECT partition, next, ? FROM partitions p WHERE next > first AND next >"
        " coalesce((SELECT max(e.next) FROM noted_ends e WHERE e.partition = p.partition), 0)",
        (now.counted_ms,),
    )


def find_expired(connection: sqlite3.Connection, counted_ms: Millis) -> dict[int, int]:
    """Per partition, below which offset everything was there when so much time had been counted.

    Requires: a reading was noted.
    """
    rows = connection.execute(
        "SELECT e.partition, max(e.next), p.first FROM noted_ends e JOIN partitions p USING (partition)"
        " WHERE e.counted_ms <= ? GROUP BY e.partition",
        (counted_ms,),
    )
    return {partition: kept for partition, kept, first in rows if first < kept}


def load_lag(connection: sqlite3.Connection, partition: int, position: int, now_ms: Millis) -> Lag:
    """The lag from a position on; bytes of a partly read run count in proportion."""
    (first,) = connection.execute("SELECT first FROM partitions WHERE partition = ?", (partition,)).fetchone()
    rows, size, at_ms = connection.execute(
        "SELECT coalesce(sum(rows - max(0, :start - first)), 0),"
        " coalesce(sum(length * (rows - max(0, :start - first)) / rows), 0), min(at_ms)"
        f" FROM batches WHERE {_FROM}",
        {"partition": partition, "start": max(position, first)},
    ).fetchone()
    return Lag(records=rows, bytes=size, ms=max(0, now_ms - at_ms) if rows else 0)


def load_sizes(
    connection: sqlite3.Connection, partition: int, start: int, end: int
) -> Iterator[tuple[int, int, int]]:
    """The runs that overlap [start, end): first offset, rows, bytes."""
    return connection.execute(
        f"SELECT first, rows, length FROM batches WHERE {_FROM} AND first < :end ORDER BY first",
        {"partition": partition, "start": start, "end": end},
    )


@dataclass(frozen=True, slots=True)
class RangeTimes:
    """Event times of the runs wholly in a range, and the remaining ranges, which must be read."""

    whole: list[tuple[Millis, Millis]]
    cut: list[tuple[int, int]]


def load_times(connection: sqlite3.Connection, partition: int, start: int, end: int) -> RangeTimes:
    """The event times of [start, end) that are in the index."""
    rows = connection.execute(
        f"SELECT first, rows, ts_min, ts_max FROM batches WHERE {_FROM} AND first < :end ORDER BY first",
        {"partition": partition, "start": start, "end": end},
    )
    whole, cut = [], []
    for first, count, ts_min, ts_max in rows:
        if first >= start and first + count <= end:
            whole.append((ts_min, ts_max))
        else:
            cut.append((max(first, start), min(first + count, end)))
    return RangeTimes(whole, cut)


# Prefix of a category whose creation is not complete; no category's name starts with a dot.
UNFINISHED = ".new-"


def clean_category(index: LogIndex, *, now_ms: Millis, older_than_ms: Millis) -> int:
    """Remove pending files that were first seen `older_than_ms` ago, and files without a row."""
    with translated(index.folder):
        # Files are listed before the index is read: a file's row is written before the file, so a file
        # without a row will never get one.
        there = [int(path.stem) for path in index.folder.glob(f"*{SUFFIX}") if path.stem.isdigit()]
        with index.reading() as connection:
            found = log_index.load_pending(connection)
            known = log_index.known_segments(connection, there)
        pending = {one: now_ms if at is None else at for one, at in found.items()}
        if any(at is None or at > now_ms for at in found.values()):
            with index.writing("see") as connection:
                log_index.see_pending(connection, now_ms)
        removed = 0
        for segment, seen_ms in pending.items():
            if now_ms - seen_ms >= older_than_ms:
                removed += give_up(index, segment)
        for segment in there:
            if segment not in known:
                remove_file(index, segment)
                removed += 1
        return removed


def truncate_category(index: LogIndex, before: Mapping[int, int]) -> int:
    """Delete records below these offsets; returns the number of deleted segments."""
    with index.writing("truncate") as connection:
        gone = truncate(connection, before)
    for segment in gone:  # after the commit: the next cleaning removes a file that is left behind
        remove_file(index, segment)
    return len(gone)


def expire_category(index: LogIndex, spec: CategorySpec, *, boot_id: str, now_ms: Millis) -> int:
    """Delete records that are older than the category's retention."""
    if not spec.retention_ms:
        return 0
    with index.reading() as connection:
        last = load_reading(connection)
        now = count_on(last, boot_id=boot_id, boot_ms=now_ms)
        oldest_ms = now.counted_ms - spec.retention_ms
        before = {} if last is None else find_expired(connection, oldest_ms)
    gone = truncate_category(index, before) if before else 0
    if is_note_due(last, now, retention_ms=spec.retention_ms):
        with index.writing("note") as connection:
            last = load_reading(connection)  # another cleaner may have written one meanwhile
            now = count_on(last, boot_id=boot_id, boot_ms=now_ms)
            if is_note_due(last, now, retention_ms=spec.retention_ms):
                note_ends(connection, now)
    return gone


def clean_unfinished(folder: Path, seen: dict[str, Millis], *, now_ms: Millis, older_than_ms: Millis) -> int:
    """Remove categories that were never finished and that this cleaner saw `older_than_ms` ago.

    `seen`: what it knows of them, by their names, from one call to the next.
    """
    removed = 0
    with translated(folder):
        there = {path.name: path for path in folder.glob(f"{UNFINISHED}*")}
    for name in set(seen) - set(there):
        del seen[name]
    for name, path in there.items():
        if now_ms - seen.setdefault(name, now_ms) >= older_than_ms:
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
    return removed


COMPACT_FROM = 256  # fewer small runs are not worth a file
RUNS_MAX, ROWS_MAX = 2_000, 50_000  # of one partition in one file


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one partition that follow each other and all lie in the index."""

    entries: tuple[SegmentEntry, ...]

    @property
    def rows(self) -> int:
        """How many records they hold."""
        return sum(entry.rows for entry in self.entries)


def compact_category(index: LogIndex, schema: pa.Schema, fault: Callable[[str], None]) -> int:
    """Move runs from the index into one file per round, until few are left; returns how many were moved."""
    moved = 0
    while True:
        with index.reading() as connection:
            groups = find_groups(load_inline(connection))
        if sum(len(group.entries) for group in groups.values()) < COMPACT_FROM:
            return moved
        done = _compact(index, schema, groups, fault)
        if not done:
            return moved  # somebody truncated in between: the next round of the cleaner tries again
        moved += done


def find_groups(entries: list[SegmentEntry]) -> dict[int, Group]:
    """The first group of each partition that is worth it: at least two runs. `entries` ascend."""
    found: dict[int, list[SegmentEntry]] = {}
    done: dict[int, Group] = {}
    for entry in entries:
        runs = found.setdefault(entry.partition, [])
        if entry.partition in done:
            continue
        follows = bool(runs) and runs[-1].first + runs[-1].rows == entry.first
        is_full = len(runs) == RUNS_MAX or sum(run.rows for run in runs) + entry.rows > ROWS_MAX
        if runs and (not follows or is_full):
            if len(runs) > 1:
                done[entry.partition] = Group(tuple(runs))
                continue
            runs.clear()
        runs.append(entry)
    for partition, runs in found.items():
        if partition not in done and len(runs) > 1:
            done[partition] = Group(tuple(runs))
    return done


def _compact(
    index: LogIndex, schema: pa.Schema, groups: Mapping[int, Group], fault: Callable[[str], None]
) -> int:
    encoded = encode(schema, {partition: _whole(index, schema, group) for partition, group in groups.items()})
    with index.writing("register") as connection:
        segment = log_index.register_segment(connection, encoded.bytes)
    try:
        write_segment(segment_path(index.folder, segment), encoded, fault)
    except PenstockError:
        with suppress(PenstockError):  # then the cleaner does it
            give_up(index, segment)
        raise
    with index.writing("compact") as connection:
        is_same = all(has_runs(connection, group.entries) for group in groups.values())
        if is_same and log_index.show_segment(connection, segment):
            for partition, group in groups.items():
                replace_runs(connection, group.entries, segment, encoded.places[partition])
            return sum(len(group.entries) for group in groups.values())
    give_up(index, segment)
    return 0


def _whole(index: LogIndex, schema: pa.Schema, group: Group) -> pa.RecordBatch:
    batches = [
        read_batch(
            schema, entry.place, path=segment_path(index.folder, entry.segment), inline=entry.payload
        ).slice(entry.skip, entry.rows)
        for entry in group.entries
    ]
    (batch,) = pa.Table.from_batches(batches, schema=schema).combine_chunks().to_batches()
    return batch


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
