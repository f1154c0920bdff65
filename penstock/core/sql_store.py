"""What every control-plane store stands on: one database, short transactions, counters, terms.

Each `*_store.py` declares its tables on `METADATA` and runs its SQL through `Database.transaction()`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from penstock.core.errors import Fenced
from penstock.core.sqlite_errors import translate_sqlite

METADATA = sa.MetaData()

COUNTERS = sa.Table(
    "counters",
    METADATA,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("value", sa.BigInteger, nullable=False),
)
TERMS = sa.Table(
    "terms",
    METADATA,
    sa.Column("role", sa.String, primary_key=True),
    sa.Column("term", sa.BigInteger, nullable=False),
    sa.Column("holder", sa.String, nullable=False),
)


class Database:
    """A transactional database. Thread-safe: transactions of one process run one after another.

    `fault(point)` is called at "begin", "commit" and "committed"; the simulator raises there.
    """

    def __init__(self, path: Path | None, *, fault: Callable[[str], None] | None = None) -> None:
        self._path, self._fault, self._lock = path, fault or (lambda point: None), threading.RLock()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._engine = sa.create_engine(
            f"sqlite:///{path}" if path is not None else "sqlite://",
            poolclass=StaticPool,
            connect_args={"check_same_thread": False, "isolation_level": None, "timeout": 10},
        )
        sa.event.listen(self._engine, "connect", _prepare_connection)
        # SQLAlchemy's own BEGIN is deferred; a write transaction must take the lock at its first statement.
        sa.event.listen(
            self._engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE")
        )
        with self._translated():
            METADATA.create_all(self._engine)

    def on_statement(self, hear: Callable[[str], None]) -> None:
        """Call `hear` with every statement before it runs: how the simulator knows what is written."""
        sa.event.listen(
            self._engine, "before_cursor_execute", lambda _c, _k, statement, *_rest: hear(statement)
        )

    @property
    def path(self) -> Path | None:
        return self._path

    def close(self) -> None:
        with self._lock:
            self._engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Everything inside is written, or nothing."""
        with self._lock, self._translated():
            self._fault("begin")
            with self._engine.begin() as connection:
                yield connection
                self._fault("commit")
            self._fault("committed")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.DBAPIError as error:
            raise translate_sqlite(
                error.orig if isinstance(error.orig, sqlite3.Error) else None, str(error)
            ) from error


def _prepare_connection(connection: sqlite3.Connection, _record: object) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")
    assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2, (
        "an acknowledged write must be on disk"
    )


def next_value(connection: sa.Connection, counter: str) -> int:
    """The next number of a counter: only grows, never skips under concurrency, dies with its transaction."""
    row = connection.execute(sa.select(COUNTERS.c.value).where(COUNTERS.c.name == counter)).first()
    if row is None:
        connection.execute(sa.insert(COUNTERS).values(name=counter, value=1))
        return 1
    value = int(row.value) + 1
    connection.execute(sa.update(COUNTERS).where(COUNTERS.c.name == counter).values(value=value))
    return value


def current_value(connection: sa.Connection, counter: str) -> int:
    """The last number given out, 0 if none."""
    row = connection.execute(sa.select(COUNTERS.c.value).where(COUNTERS.c.name == counter)).first()
    return 0 if row is None else int(row.value)


def take_term(database: Database, role: str, holder: str) -> int:
    """Become the active instance of a role: every smaller term is fenced from now on."""
    with database.transaction() as connection:
        row = connection.execute(sa.select(TERMS.c.term).where(TERMS.c.role == role)).first()
        term = 1 if row is None else int(row.term) + 1
        if row is None:
            connection.execute(sa.insert(TERMS).values(role=role, term=term, holder=holder))
        else:
            connection.execute(sa.update(TERMS).where(TERMS.c.role == role).values(term=term, holder=holder))
        return term


def check_term(connection: sa.Connection, role: str, term: int) -> None:
    """Requires: inside the transaction that writes as this role."""
    row = connection.execute(sa.select(TERMS.c.term, TERMS.c.holder).where(TERMS.c.role == role)).first()
    if row is None or int(row.term) != term:
        raise Fenced(
            f"this {role} is no longer the active one",
            why=f"it holds term {term}, the store has {None if row is None else int(row.term)}",
            fix="nothing: the active instance goes on",
        )
