"""What every control-plane store stands on: one database, short transactions, counters, terms.

Each `*_store.py` declares its tables on `METADATA`, writes in `Database.transaction()` and reads in
`Database.reading()`. A database is a SQLite file, PostgreSQL, or memory, with the same rules on each: writes
run one after another, reads see one moment and wait for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from penstock.core.errors import Fenced, PenstockError
from penstock.core.peek_store import Peek
from penstock.core.quick_store import MADE_ONCE, Ask, Hear, QuickConnection, ask_all, flush

METADATA = sa.MetaData()

# Names compare by their bytes everywhere, so that a list is sorted alike on every store.
NAME = sa.String().with_variant(sa.String(collation="C"), "postgresql")
# SQLite numbers rows by itself only in a column of exactly this type.
ROW_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")

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
    sa.Column("expires_ms", sa.BigInteger, nullable=False, server_default="0"),
)


class Backend(Protocol):
    """One kind of database."""

    writing: sa.Engine  # a transaction of it excludes all others that write
    reading: sa.Engine  # a transaction of it sees one moment
    lock: AbstractContextManager[Any]  # held by this process around a write
    read_lock: AbstractContextManager[Any]

    def peek(self, peek: Peek, name: str) -> Sequence[tuple[Any, ...]]:
        """The rows of a single SELECT."""

    def look(self, asked: Sequence[Ask]) -> list[Any] | None:
        """The results of SELECTs as of one moment, in one go; None: there is no such way."""

    def close(self) -> None:
        """Close every connection."""

    def prepare(self) -> None:
        """Refuse what is not durable; then make the tables what this version needs."""

    def translate(self, error: sa.exc.DBAPIError, *, committing: bool) -> PenstockError:
        """What a failure means to us. `committing`: the commit had been asked for, so its outcome is open."""


class Database:
    """A transactional database. Thread-safe.

    `place` is a file, a PostgreSQL URL, or None for memory. `fault(point)` is called at "begin", "commit" and
    "committed" of a write and at "begin" of a read; the simulator raises there.
    """

    def __init__(self, place: Path | str | None, *, fault: Callable[[str], None] | None = None) -> None:
        self._fault = fault or (lambda point: None)
        self._hear: Hear | None = None
        self._backend = _backend(place)
        with ExitStack() as undo:
            undo.callback(self.close)
            with self._translated(_Progress()):
                self._backend.prepare()
            undo.pop_all()

    @property
    def is_shared(self) -> bool:
        """Whether control planes on other machines can reach it too."""
        return self._backend.writing.dialect.name == "postgresql"

    def on_statement(self, hear: Hear) -> None:
        """Call `hear` with every statement before it runs: how the simulator knows what is written."""
        self._hear = hear
        sa.event.listen(
            self._backend.writing, "before_cursor_execute", lambda _c, _k, statement, *_rest: hear(statement)
        )

    def close(self) -> None:
        with self._backend.lock:
            self._backend.close()

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Everything inside is written, or nothing; nobody else writes meanwhile."""
        progress = _Progress()
        with self._backend.lock, self._translated(progress):
            self._fault("begin")
            with self._backend.writing.begin() as connection:
                quick = self._quick(connection)
                yield quick
                flush(quick)
                self._fault("commit")
                progress.is_committing = True
            progress.is_committing = False
            self._fault("committed")

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Everything inside is seen as it was at one moment. Writes are refused."""
        with self._backend.read_lock, self._translated(_Progress()):
            self._fault("begin")
            with self._backend.reading.begin() as connection:
                yield self._quick(connection)

    def peek(self, peek: Peek, name: str) -> Sequence[tuple[Any, ...]]:
        """The rows of a single SELECT, as they were at one moment."""
        self._fault("begin")
        return self._backend.peek(peek, name)

    @property
    def dialect(self) -> sa.Dialect:
        """Whose SQL it speaks."""
        return self._backend.reading.dialect

    def look(self, asked: Sequence[Ask]) -> list[Any]:
        """The results of SELECTs that are made once, all as of one moment: on a server in one round trip."""
        self._fault("begin")
        found = self._backend.look(asked)
        if found is None:
            with self.reading() as connection:
                found = ask_all(connection, asked)
        return found

    def _quick(self, connection: sa.Connection) -> sa.Connection:
        raw = connection.connection.driver_connection
        quick = QuickConnection(connection.dialect, raw, lambda: connection, self._hear)
        return cast(sa.Connection, quick)  # as much of one as stores use

    @contextmanager
    def _translated(self, progress: _Progress) -> Iterator[None]:
        try:
            yield
        except sa.exc.DBAPIError as error:
            raise self._backend.translate(error, committing=progress.is_committing) from error


class _Progress:
    is_committing = False


def _backend(place: Path | str | None) -> Backend:
    if isinstance(place, str):
        from penstock.core.postgres_store import PostgresBackend

        return PostgresBackend(place)
    from penstock.core.sqlite_store import SqliteBackend

    return SqliteBackend(place)


def upsert(
    connection: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]], *, replace: Sequence[str]
) -> None:
    """Insert rows, many at a time; where the primary key is there already, replace these columns."""
    if not rows:
        return
    statement = _upsert(connection.dialect.name, table, tuple(replace))
    connection.execute(statement, rows[0] if len(rows) == 1 else list(rows))


@cache
def _upsert(dialect: str, table: sa.Table, replace: tuple[str, ...]) -> Any:
    insert: Any = (postgresql if dialect == "postgresql" else sqlite).insert(table)
    key = [column.name for column in table.primary_key]
    return insert.on_conflict_do_update(
        index_elements=key, set_={name: insert.excluded[name] for name in replace}
    )


def values_of(row: Any) -> dict[str, Any]:
    """The fields of a dataclass with slots, by name, as they are: `asdict` copies whatever is in them."""
    return {name: getattr(row, name) for name in row.__slots__}


def next_value(connection: sa.Connection, counter: str) -> int:
    """The next number of a counter: only grows, never skips under concurrency, dies with its transaction."""
    return next_values(connection, counter, 1)[0]


def next_values(connection: sa.Connection, counter: str, count: int) -> range:
    """The next `count` numbers of a counter."""
    assert count > 0, count
    statement = _COUNT[connection.dialect.name]
    last = int(connection.execute(statement, {"counter": counter, "step": count}).scalar_one())
    return range(last - count + 1, last + 1)


def counted(counter: str) -> Any:
    """The next number of a counter, inside a statement that writes it down. On PostgreSQL only."""
    counting = _counting(postgresql.insert(COUNTERS), sa.literal(counter), sa.literal(1, sa.BigInteger))
    return sa.select(counting.cte(f"next_{counter}").c.value).scalar_subquery()


def _counting(insert: Any, counter: Any, step: Any) -> Any:
    return (
        insert.values(name=counter, value=step)
        .on_conflict_do_update(index_elements=["name"], set_={"value": COUNTERS.c.value + step})
        .returning(COUNTERS.c.value)
    )


def _count(insert: Any) -> Any:
    """Made once: every write counts several times, and making the statement takes longer than running it."""
    step = sa.bindparam("step", type_=sa.BigInteger)
    return _counting(insert, sa.bindparam("counter"), step).execution_options(**MADE_ONCE)


_VALUE = (
    sa.select(COUNTERS.c.value)
    .where(COUNTERS.c.name == sa.bindparam("counter"))
    .execution_options(**MADE_ONCE)
)
_TERM = sa.select(TERMS.c.term).where(TERMS.c.role == sa.bindparam("of_role")).execution_options(**MADE_ONCE)
_COUNT = {"postgresql": _count(postgresql.insert(COUNTERS)), "sqlite": _count(sqlite.insert(COUNTERS))}


def current_value(connection: sa.Connection, counter: str) -> int:
    """The last number given out, 0 if none."""
    row = connection.execute(_VALUE, {"counter": counter}).first()
    return 0 if row is None else int(row[0])


def take_term(database: Database, role: str, holder: str) -> int:
    """Become the active instance of a role, whoever was: every smaller term is fenced from now on."""
    with database.transaction() as connection:
        row = connection.execute(sa.select(TERMS.c.term).where(TERMS.c.role == role)).first()
        term = 1 if row is None else int(row.term) + 1
        values = {"role": role, "term": term, "holder": holder, "expires_ms": 0}
        upsert(connection, TERMS, [values], replace=("term", "holder", "expires_ms"))
        return term


def check_term(connection: sa.Connection, role: str, term: int) -> None:
    """Requires: inside the transaction that writes as this role."""
    row = connection.execute(_TERM, {"of_role": role}).first()
    if row is None or int(row[0]) != term:
        raise Fenced(
            f"this {role} is no longer the active one",
            why=f"it holds term {term}, the store has {None if row is None else int(row[0])}",
            fix="nothing: the active instance goes on",
        )
