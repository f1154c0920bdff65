"""Marks of the embedded log, and what event-time categories keep beside them. SQL of the index.

Functions that take a connection run inside the caller's transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from penstock.core.clock import Millis
from penstock.streams.bus.log import LOW_MIN, CategorySpec, Mark, Seen


def load_marks(
    connection: sqlite3.Connection, partition: int, *, above: Millis, up_to: int
) -> tuple[Mark, ...]:
    """Marks of one partition, by low."""
    found = [*_marks(connection, "marks", partition, above, up_to)]
    idle = [*_marks(connection, "idle_marks", partition, above, up_to)]
    return tuple(sorted([*found, *idle], key=lambda mark: mark.low) if idle else found)


def _marks(
    connection: sqlite3.Connection, table: str, partition: int, above: Millis, up_to: int
) -> Iterator[Mark]:
    """Ends ascend with lows, so the first beyond `up_to` ends the look."""
    rows = connection.execute(
        f"SELECT low, next FROM {table} WHERE partition = ? AND low > ? ORDER BY low", (partition, above)
    )
    for low, following in rows:
        if following > up_to:
            return
        yield Mark(low=low, end=following, idle=table == "idle_marks")


def load_seen(connection: sqlite3.Connection, spec: CategorySpec) -> tuple[Seen, ...]:
    """What was noted of each partition."""
    rows = connection.execute("SELECT partition, low, next, since_ms, noted_ms, follows FROM seen")
    found = {
        partition: Seen(low=low, end=end, since_ms=since_ms, noted_ms=noted_ms, follows=follows)
        for partition, low, end, since_ms, noted_ms, follows in rows
    }
    return tuple(found.get(partition, Seen()) for partition in range(spec.partitions))


def note_seen(connection: sqlite3.Connection, noted: Mapping[int, Seen], marks: Mapping[int, Millis]) -> None:
    """Note partitions, and append the idle marks that are due, at the ends as they are in this
    transaction.
    """
    connection.executemany(
        "INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?, ?, ?)",
        (
            (partition, one.low, one.end, one.since_ms, one.noted_ms, one.follows)
            for partition, one in noted.items()
        ),
    )
    connection.executemany(
        "INSERT INTO idle_marks SELECT partition, ?, next FROM partitions WHERE partition = ?",
        ((low, partition) for partition, low in marks.items()),
    )


def load_appends(
    connection: sqlite3.Connection, partition: int, start: int, end: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """From which offsets on records of [start, end) were appended at which times."""
    rows = connection.execute(
        "SELECT first, at_ms FROM appends WHERE partition = :p AND first < :end AND first >= coalesce("
        "(SELECT max(first) FROM appends WHERE partition = :p AND first <= :start), 0) ORDER BY first",
        {"p": partition, "start": start, "end": end},
    ).fetchall()
    found = np.array(rows or [(0, 0)], dtype=np.int64)
    return found[:, 0], found[:, 1]


def forget_passed(connection: sqlite3.Connection, partition: int, before: int) -> None:
    """Let marks and times below an offset go. The last one that is passed stays: it tells W at the start."""
    where = {"partition": partition, "before": before}
    for table in ("marks", "idle_marks"):
        connection.execute(
            f"DELETE FROM {table} WHERE partition = :partition AND low <"
            f" (SELECT max(low) FROM {table} WHERE partition = :partition AND next <= :before)",
            where,
        )
    connection.execute(
        "DELETE FROM appends WHERE partition = :partition AND first <"
        " (SELECT max(first) FROM appends WHERE partition = :partition AND first <= :before)",
        where,
    )


def load_percentile(connection: sqlite3.Connection, percent: int) -> Millis:
    """What is kept of a percentile."""
    row = connection.execute("SELECT low FROM percentiles WHERE percent = ?", (percent,)).fetchone()
    return LOW_MIN if row is None else int(row[0])


def keep_percentile(connection: sqlite3.Connection, percent: int, low: Millis) -> None:
    """Keep it from now on."""
    connection.execute("INSERT OR REPLACE INTO percentiles VALUES (?, ?)", (percent, low))
