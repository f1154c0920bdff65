"""The SQLite files of intervals: tables, and connections that are durable, one per process and thread."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from penstock.core.disk import make_folder
from penstock.core.errors import CorruptData
from penstock.core.sqlite_errors import translate_sqlite

# Rises when the tables change. Older files are brought up to it when they are opened; newer ones are refused.
FORMAT = 2
BUSY_MS = 10_000
_OPEN_MAX = 32  # per thread; status pages look at many intervals, each once

# Connections inherited through a fork must neither be used nor closed in the child: they are kept for ever.
_INHERITED: list[object] = []

_TIMER_INDEXES = (
    "CREATE INDEX timers_due ON timers (at_ms, key, tag) WHERE wall = 0",
    "CREATE INDEX timers_wall ON timers (at_ms, key, tag) WHERE wall = 1",
    "CREATE INDEX timers_hold ON timers (hold_ms) WHERE late = 0 AND wall = 0",
)
_FROM_1_TO_2 = (
    "ALTER TABLE timers ADD COLUMN wall INTEGER NOT NULL DEFAULT 0",
    "DROP INDEX timers_due",
    "DROP INDEX timers_hold",
    *_TIMER_INDEXES,
)

TABLES = (
    """CREATE TABLE interval (
        only INTEGER PRIMARY KEY CHECK (only = 1), birth TEXT NOT NULL, generation INTEGER NOT NULL,
        shard_epoch INTEGER NOT NULL, token INTEGER NOT NULL, version INTEGER NOT NULL, offsets TEXT NOT NULL,
        input_low INTEGER NOT NULL, output_low INTEGER NOT NULL, event_time_max TEXT NOT NULL,
        next_seq TEXT NOT NULL, intent TEXT NOT NULL, counters TEXT NOT NULL, crc INTEGER NOT NULL) STRICT""",
    """CREATE TABLE states (
        key TEXT PRIMARY KEY, value BLOB NOT NULL, crc INTEGER NOT NULL) STRICT, WITHOUT ROWID""",
    """CREATE TABLE timers (
        key TEXT NOT NULL, tag TEXT NOT NULL, at_ms INTEGER NOT NULL, hold_ms INTEGER NOT NULL,
        late INTEGER NOT NULL, crc INTEGER NOT NULL, wall INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (key, tag)) STRICT, WITHOUT ROWID""",
    *_TIMER_INDEXES,
    # AUTOINCREMENT: an id that came twice would let a slow twin mark the wrong row as delivered.
    """CREATE TABLE outbox (
        id INTEGER PRIMARY KEY AUTOINCREMENT, category TEXT NOT NULL, category_birth TEXT NOT NULL,
        partition INTEGER NOT NULL, first_seq INTEGER NOT NULL, count INTEGER NOT NULL,
        ts_min INTEGER NOT NULL, payload BLOB NOT NULL, crc INTEGER NOT NULL) STRICT""",
)


class SqliteFiles:
    """Keeps connections. Files are touched through SQLite alone: any other open and close drops its locks."""

    def __init__(self) -> None:
        self._local = threading.local()

    def open(self, path: Path) -> sqlite3.Connection | None:
        """A connection of this process and thread; None if there is no complete file."""
        kept = self._kept()
        inode = _inode(path)
        found = kept.get(path)
        if found is not None:
            if found[0] == inode:
                kept.move_to_end(path)
                return found[1]
            self.discard(path)  # the file was removed or replaced under us
        connection = None if inode is None else self.open_apart(path)
        if connection is None or inode is None:
            return None
        kept[path] = (inode, connection)
        if len(kept) > _OPEN_MAX:
            kept.popitem(last=False)[1][1].close()
        return connection

    def open_apart(self, path: Path) -> sqlite3.Connection | None:
        """A connection for the caller alone, who closes it; None if there is no complete file."""
        if _inode(path) is None:
            return None
        connection = _connect(path, "rw")
        try:
            complete = format_of(connection) != 0
            if complete and format_of(connection) != FORMAT:
                connection.execute("BEGIN IMMEDIATE")
                bring_up(connection)
                connection.execute("COMMIT")
        except (sqlite3.Error, CorruptData):
            connection.close()
            raise
        if not complete:
            connection.close()  # its creation was cut off before the commit
            return None
        return connection

    def discard(self, path: Path) -> None:
        """Close and forget: after an error a connection's state is not known."""
        found = self._kept().pop(path, None)
        if found is not None:
            with suppress(sqlite3.Error):
                found[1].close()

    def _kept(self) -> OrderedDict[Path, tuple[int, sqlite3.Connection]]:
        if getattr(self._local, "pid", None) != os.getpid():
            _INHERITED.append(getattr(self._local, "kept", None))
            self._local.pid, self._local.kept = os.getpid(), OrderedDict()
        kept: OrderedDict[Path, tuple[int, sqlite3.Connection]] = self._local.kept
        return kept


@contextmanager
def creating(path: Path) -> Iterator[sqlite3.Connection]:
    """One transaction in which the file may be new: until it commits the file counts as absent."""
    try:
        make_folder(path.parent)
        connection = _connect(path, "rwc")
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise translate_sqlite(error, f"{path.name}: {error}") from error


def format_of(connection: sqlite3.Connection) -> int:
    """Which tables the file has; 0: none yet."""
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return found


def bring_up(connection: sqlite3.Connection) -> None:
    """Bring the tables to this format, inside the transaction that the caller has begun for writing."""
    found = format_of(connection)
    if not 1 <= found <= FORMAT:
        raise CorruptData(
            "the rows of an interval have a format that this version does not know",
            why=f"the file says {found}, known are 1 to {FORMAT}",
            fix="start the version of penstock that wrote it",
        )
    if found == 1:
        for statement in _FROM_1_TO_2:
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version={FORMAT}")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    address = f"file:{quote(str(path.absolute()))}?mode={mode}"
    connection = sqlite3.connect(address, uri=True, isolation_level=None, timeout=BUSY_MS / 1000)
    try:
        journal = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        connection.execute("PRAGMA synchronous=FULL")
        assert journal == "wal" and connection.execute("PRAGMA synchronous").fetchone()[0] == 2, (
            "an acknowledged write must be on disk"
        )
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _inode(path: Path) -> int | None:
    # stat() opens nothing, so it drops no locks.
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
