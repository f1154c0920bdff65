"""PostgreSQL as the control plane's database.

Writes take one lock of the database for the length of their transaction. So they run one after another, as on
SQLite: a job's layers are validated and written by nobody else meanwhile, and numbers that others page by
appear in their order. Reads take no lock and see one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import psycopg
import sqlalchemy as sa

from penstock.core.durable_store import refuse_what_is_not_durable, translate_postgres
from penstock.core.errors import EnvironmentProblem, PenstockError
from penstock.core.json_text import JSON_TEXT
from penstock.core.migrate_store import upgrade_tables
from penstock.core.peek_store import Peek, PeekConnections
from penstock.core.quick_store import NOT_REMEMBERED, Ask, look_once

Found = TypeVar("Found")
WRITE_LOCK = 0x70656E73746F636B  # "penstock"
# A control plane that stops in the middle of a transaction must not keep the lock from the others.
_SESSION = (
    "-c lock_timeout=10s -c statement_timeout=60s -c idle_in_transaction_session_timeout=15s -c timezone=UTC"
)
_TRANSPORT = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "tcp_user_timeout": 20_000,
}


# Sent by hand, as one text, when a connection is taken from its pool: to look whether it is still open, to
# begin and to take the lock would be three ways to the server and back. Ended by SQLAlchemy.
_WRITE = f"BEGIN ISOLATION LEVEL READ COMMITTED; SELECT pg_advisory_xact_lock({WRITE_LOCK})"
_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ"
_POOL: dict[str, Any] = {
    "pool_size": 4,
    "max_overflow": 12,
    "pool_timeout": 10,
    "isolation_level": "AUTOCOMMIT",
}
# Which statements the server is to remember is decided here, not by the driver; see `QuickConnection`.
_NOT_PREPARED = {"prepare_threshold": None}


class PostgresBackend:
    """A server at a URL."""

    def __init__(self, url: str) -> None:
        self.lock: AbstractContextManager[Any] = nullcontext()
        self.read_lock: AbstractContextManager[Any] = nullcontext()
        parsed = _parsed(url)
        options = f"{_SESSION} {parsed.query.get('options', '')}".strip()
        self.writing = sa.create_engine(
            parsed,
            **_POOL,
            connect_args={**_TRANSPORT, **_NOT_PREPARED, "options": options},
            **JSON_TEXT,
        )
        read_only = {**_TRANSPORT, "options": f"{options} -c default_transaction_read_only=on"}
        self.reading = sa.create_engine(
            parsed,
            **_POOL,
            connect_args={**read_only, **_NOT_PREPARED},
            **JSON_TEXT,
        )
        _, where = self.reading.dialect.create_connect_args(parsed)
        where = {**where, **read_only}
        self._peeks = PeekConnections(lambda: psycopg.connect(**where, autocommit=True))
        sa.event.listen(
            self.writing, "connect", lambda connection, _record: refuse_what_is_not_durable(connection)
        )
        sa.event.listen(self.writing, "checkout", partial(_begin, self.writing, _WRITE))
        sa.event.listen(self.reading, "checkout", partial(_begin, self.reading, _READ))

    def peek(self, peek: Peek, name: str) -> Sequence[tuple[Any, ...]]:
        def rows(raw: psycopg.Connection[Any]) -> Sequence[tuple[Any, ...]]:
            return raw.execute(peek.postgresql, {"name": name}).fetchall()

        return self._look(rows)

    def look(self, asked: Sequence[Ask]) -> list[Any]:
        return self._look(lambda raw: look_once(self.reading.dialect, raw, asked))

    def _look(self, use: Callable[[psycopg.Connection[Any]], Found]) -> Found:
        try:
            return self._peeks.use(use)
        except (psycopg.OperationalError, *NOT_REMEMBERED):
            pass  # closed long ago, or no longer the one we prepared: a look can be repeated
        self._peeks.close_idle()
        try:
            return self._peeks.use(use)
        except psycopg.Error as error:
            raise translate_postgres(error, str(error).strip(), committing=False) from error

    def close(self) -> None:
        self._peeks.close()
        self.writing.dispose()
        self.reading.dispose()

    def prepare(self) -> None:
        with self.writing.begin() as connection:
            upgrade_tables(connection)

    def translate(self, error: sa.exc.DBAPIError, *, committing: bool) -> PenstockError:
        # Not SQLAlchemy's own text, which repeats the statement and its values.
        return translate_postgres(error.orig, str(error.orig).strip(), committing=committing)


def _parsed(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        parsed = None
    if parsed is None or parsed.get_backend_name() not in ("postgresql", "postgres"):
        # Not with the URL in it: it may carry a password.
        raise EnvironmentProblem(
            "this is not the URL of a PostgreSQL database",
            why="it does not have the form postgresql://user:password@host:port/database",
            fix="correct it, or leave it out to use a SQLite file",
        )
    return parsed.set(drivername="postgresql+psycopg")


def _begin(engine: sa.Engine, text: str, connection: Any, _record: object, _proxy: object) -> None:
    """Begin the transaction that a connection is taken for; one that was closed meanwhile is replaced."""
    try:
        connection.execute(text)
    except psycopg.Error as error:
        if connection.closed:
            raise sa.exc.InvalidatePoolError from error
        raise sa.exc.DBAPIError.instance(text, None, error, psycopg.Error, dialect=engine.dialect) from error
