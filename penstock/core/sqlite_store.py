"""SQLite as the control plane's database: one connection writes, others read the last committed moment."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import QueuePool, StaticPool

from penstock.core.errors import EnvironmentProblem, PenstockError
from penstock.core.json_text import JSON_TEXT
from penstock.core.migrate_store import upgrade_tables
from penstock.core.peek_store import Peek, PeekConnections
from penstock.core.quick_store import Ask
from penstock.core.sql_store import METADATA
from penstock.core.sqlite_errors import translate_sqlite

BUSY_MS = 10_000
READERS_MAX = 16
# Readers look at the file where the system has it in memory: every commit voids what they keep themselves.
MAPPED_BYTES = 2**30
# What an acknowledged write rests on; some builds of SQLite have other defaults, or ignore a setting.
DURABLE = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": BUSY_MS}

# Room for what a release touches: fewer pages are read and written twice.
_ROOMY = {"cache_size": -262144, "wal_autocheckpoint": 8000}


class SqliteBackend:
    """A file, or memory."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._peeks = path, PeekConnections(self._connect)
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self.read_lock: AbstractContextManager[Any] = nullcontext()
        arguments = {"check_same_thread": False, "isolation_level": None, "timeout": BUSY_MS / 1000}
        options: dict[str, Any] = {"connect_args": arguments, **JSON_TEXT}
        if path is None:
            self.writing = sa.create_engine("sqlite://", poolclass=StaticPool, **options)
            # Memory has one connection, which reads take their turn on.
            self.reading, self.read_lock = self.writing, self.lock
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            url = sa.URL.create("sqlite", database=str(path))
            self.writing = sa.create_engine(url, poolclass=StaticPool, **options)
            self.reading = sa.create_engine(
                url, poolclass=QueuePool, pool_size=READERS_MAX, max_overflow=0, **options
            )
            sa.event.listen(self.writing, "connect", _make_durable)
            sa.event.listen(self.reading, "connect", _make_read_only)
            sa.event.listen(self.reading, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
        # SQLAlchemy's own BEGIN is deferred; a write transaction must take the lock at its first statement.
        sa.event.listen(
            self.writing, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE")
        )

    def peek(self, peek: Peek, name: str) -> Sequence[tuple[Any, ...]]:
        try:
            if self._path is None:
                with self.lock, self.writing.connect() as connection:
                    return [tuple(row) for row in connection.exec_driver_sql(peek.sqlite, (name,))]
            return self._peeks.rows(peek.sqlite, (name,))
        except sqlite3.Error as error:
            raise translate_sqlite(error, str(error)) from error

    def look(self, asked: Sequence[Ask]) -> None:
        return None  # here a transaction costs nothing

    def close(self) -> None:
        self._peeks.close()
        self.writing.dispose()
        self.reading.dispose()

    def _connect(self) -> sqlite3.Connection:
        assert self._path is not None
        connection = sqlite3.connect(
            self._path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False
        )
        _make_read_only(connection, None)
        return connection

    def prepare(self) -> None:
        if self._path is None:
            METADATA.create_all(self.writing, checkfirst=False)  # it is new
            return
        with self.writing.begin() as connection:
            upgrade_tables(connection)

    def translate(self, error: sa.exc.DBAPIError, *, committing: bool) -> PenstockError:
        return translate_sqlite(error.orig, str(error.orig))


def _make_durable(connection: sqlite3.Connection, _record: object) -> None:
    for name, wanted in DURABLE.items():
        connection.execute(f"PRAGMA {name}={wanted}")
        found = connection.execute(f"PRAGMA {name}").fetchone()[0]
        if found != wanted:
            raise EnvironmentProblem(
                "this SQLite cannot keep what it acknowledges",
                why=f"{name} is {found!r} where it must be {wanted!r}",
                fix="keep the folder on a local disk, or use PostgreSQL with --database",
            )

    for name, value in _ROOMY.items():
        connection.execute(f"PRAGMA {name}={value}")


def _make_read_only(connection: sqlite3.Connection, _record: object) -> None:
    connection.execute(f"PRAGMA busy_timeout={BUSY_MS}")
    connection.execute("PRAGMA query_only=ON")
    connection.execute(f"PRAGMA mmap_size={MAPPED_BYTES}")
