"""What the embedded log lets go or moves, and what is asked of ranges without reading them. SQL of the index.

Functions that take a connection run inside the caller's transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.core.clock import Millis
from penstock.streams.bus.embedded.index import Entry, entry_of
from penstock.streams.bus.embedded.marks import forget_passed
from penstock.streams.bus.embedded.segments import Place
from penstock.streams.bus.log import Lag
from penstock.streams.bus.retention_age import Reading

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
    """Let runs that lie wholly below the offsets go; returns the segments that nothing points to any more."""
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
    """Forget those segments that no run points to any more; returns them."""
    span = (min(touched, default=0), max(touched, default=-1))
    kept = connection.execute("SELECT DISTINCT segment FROM batches WHERE segment BETWEEN ? AND ?", span)
    gone = sorted(touched - {row[0] for row in kept})
    connection.executemany("DELETE FROM segments WHERE id = ?", ((segment,) for segment in gone))
    return gone


def load_inline(connection: sqlite3.Connection) -> list[Entry]:
    """Runs whose bytes lie in the index, by partition and offset."""
    rows = connection.execute(
        "SELECT b.partition, b.first, b.rows, b.segment, b.position, b.length, b.crc, b.skip, s.payload"
        " FROM batches b JOIN segments s ON s.id = b.segment WHERE s.payload IS NOT NULL"
        " ORDER BY b.partition, b.first"
    )
    return [entry_of(*row) for row in rows]


def has_runs(connection: sqlite3.Connection, entries: Sequence[Entry]) -> bool:
    """Whether all of these runs, which follow each other, are still as they were."""
    found = connection.execute(
        "SELECT first, segment FROM batches WHERE partition = ? AND first BETWEEN ? AND ? ORDER BY first",
        (entries[0].partition, entries[0].first, entries[-1].first),
    )
    return found.fetchall() == [(entry.first, entry.segment) for entry in entries]


def replace_runs(
    connection: sqlite3.Connection, entries: Sequence[Entry], segment: int, place: Place
) -> None:
    """One run in another segment instead of several; it is as old as the newest of them."""
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
    """The last reading that was noted; None if there is none."""
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'readings'").fetchone() is None:
        return None
    found = connection.execute("SELECT boot_id, boot_ms, counted_ms FROM readings").fetchone()
    return None if found is None else Reading(boot_id=found[0], boot_ms=found[1], counted_ms=found[2])


def note_ends(connection: sqlite3.Connection, now: Reading) -> None:
    """Note this reading, and how long the partitions are that grew since the note before."""
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
    """What lies at and beyond a position; of a run that is cut, the bytes in proportion."""
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
    """The runs that reach into [start, end): first offset, rows, bytes."""
    return connection.execute(
        f"SELECT first, rows, length FROM batches WHERE {_FROM} AND first < :end ORDER BY first",
        {"partition": partition, "start": start, "end": end},
    )


@dataclass(frozen=True, slots=True)
class RangeTimes:
    """Event times of the runs that lie wholly in a range, and the ranges of the rest, which must be read."""

    whole: list[tuple[Millis, Millis]]
    cut: list[tuple[int, int]]


def load_times(connection: sqlite3.Connection, partition: int, start: int, end: int) -> RangeTimes:
    """What the index knows of [start, end)."""
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
