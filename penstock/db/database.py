"""The database under every store of the control plane: transactions, counters, terms, migrations.

Each `*_store.py` declares its tables on `METADATA`, writes in `Database.transaction()` and reads in
`Database.reading()`. Statements are SQLAlchemy Core's; those that run often are built once, at import. A
database is a SQLite file, PostgreSQL, or memory. Everywhere writes are serialized, and a read sees a snapshot
without waiting for writes.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import psycopg
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.pool import QueuePool, StaticPool

from penstock.core.errors import EnvironmentProblem, Fenced, PenstockError, translate_sqlite
from penstock.core.text import JSON_TEXT
from penstock.db.server_checks import require_durable_server, translate_postgres

_FOLDER = Path(__file__).parent / "migrations"
_STEP = re.compile(r"^(\d{4})_\w+\.py$")
# Databases from before there were migrations have the tables of the first one, and no version.
FIRST = "0001"


def known_steps() -> tuple[str, ...]:
    """The numbers of all migrations, oldest first."""
    found = (_STEP.match(path.name) for path in (_FOLDER / "versions").iterdir())
    return tuple(sorted(match.group(1) for match in found if match))


def upgrade_tables(connection: sa.Connection) -> None:
    """Run the missing migrations in the caller's transaction. Refuses a database of a newer version."""
    steps, current = known_steps(), _current(connection)
    if current == steps[-1]:
        return
    if current is not None and current not in steps:
        raise EnvironmentProblem(
            "this database is from a newer version of Penstock",
            why=f"its migration is {current}, the newest that this version has is {steps[-1]}",
            fix="use the newer version, or a backup of the database from before the upgrade",
        )
    # Imported only if a migration must run: the import takes longer than the check.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    if current is None and sa.inspect(connection).has_table("counters"):
        command.stamp(config, FIRST)
    command.upgrade(config, "head")


def _current(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    row = connection.execute(sa.text("SELECT version_num FROM alembic_version")).first()
    return None if row is None else str(row.version_num)


Result = TypeVar("Result")
BATCH_MAX = 16  # writes in one transaction of `GroupedWrites`
METADATA = sa.MetaData()

# Names are compared by bytes, so that lists have the same order on every store.
NAME = sa.String().with_variant(sa.String(collation="C"), "postgresql")
# SQLite auto-increments only a column of exactly this type.
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

    writing: sa.Engine  # its transactions are serialized
    reading: sa.Engine  # its transactions see a snapshot
    lock: AbstractContextManager[Any]  # held by this process during a write
    read_lock: AbstractContextManager[Any]

    def close(self) -> None:
        """Close every connection."""

    def prepare(self) -> None:
        """Refuse a database that is not durable; then migrate its tables to this version."""

    def translate(self, error: sa.exc.DBAPIError, *, committing: bool) -> PenstockError:
        """The PenstockError for a failure. `committing`: COMMIT was sent, so its outcome is unknown."""


class Database:
    """A transactional database. Thread-safe.

    `place` is a file, a PostgreSQL URL, or None for memory. `fault(point)` is called at "begin", "commit" and
    "committed" of a write and at "begin" of a read; the simulator raises there.
    """

    def __init__(self, place: Path | str | None, *, fault: Callable[[str], None] | None = None) -> None:
        self._fault = fault or (lambda point: None)
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

    def on_statement(self, call: Callable[[str], None]) -> None:
        """Call `call` with the text of every statement of a write before it runs."""
        sa.event.listen(
            self._backend.writing, "before_cursor_execute", lambda _c, _k, statement, *_rest: call(statement)
        )

    def close(self) -> None:
        with self._backend.lock:
            self._backend.close()

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """A write transaction: atomic, and serialized with all other writes."""
        progress = _Progress()
        with self._backend.lock, self._translated(progress):
            self._fault("begin")
            with self._backend.writing.begin() as connection:
                yield connection
                self._fault("commit")
                progress.is_committing = True
            progress.is_committing = False
            self._fault("committed")

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A read-only transaction on one snapshot."""
        with self._backend.read_lock, self._translated(_Progress()):
            self._fault("begin")
            with self._backend.reading.begin() as connection:
                yield connection

    def translate(self, error: sa.exc.DBAPIError) -> PenstockError:
        """The PenstockError for a failed statement."""
        return self._backend.translate(error, committing=False)

    @contextmanager
    def _translated(self, progress: _Progress) -> Iterator[None]:
        try:
            yield
        except sa.exc.DBAPIError as error:
            raise self._backend.translate(error, committing=progress.is_committing) from error


class _Progress:
    is_committing = False


class GroupedWrites:
    """Group commit: queued writes of several threads share one transaction.

    Each transaction costs the lock, an fsync, and round trips to a server. One thread at a time commits a
    batch of the queued writes; the other threads wait until their write is committed or it is their turn.
    Each write has a savepoint, so a failed one is rolled back alone.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: deque[_Write[Any]] = deque()
        self._changed, self._is_writing = threading.Condition(), False

    def run(self, work: Callable[[sa.Connection], Result]) -> Result:
        """Run `work` and commit; returns its result. It may run in another thread, and must not block."""
        own = _Write(work)
        with self._changed:
            self._waiting.append(own)
        while batch := self._next_batch(own):
            try:
                self._commit(batch)
            finally:
                with self._changed:
                    self._is_writing = False
                    for write in batch:
                        write.is_done = True
                    self._changed.notify_all()
        if isinstance(own.result, Exception):
            raise own.result
        return own.result

    def _next_batch(self, own: _Write[Any]) -> list[_Write[Any]]:
        """The batch that this thread must commit; empty when `own` is done."""
        with self._changed:
            self._changed.wait_for(lambda: own.is_done or not self._is_writing)
            if own.is_done:
                return []
            self._is_writing = True
            return [self._waiting.popleft() for _ in range(min(BATCH_MAX, len(self._waiting)))]

    def _commit(self, batch: Sequence[_Write[Any]]) -> None:
        try:
            with self._database.transaction() as connection:
                if len(batch) == 1:
                    batch[0].result = batch[0].work(connection)
                else:
                    for write in batch:
                        self._run_in_savepoint(connection, write)
        except Exception as error:
            # Also for writes that were refused: their decision was based on writes that are rolled back.
            for write in batch:
                write.result = error

    def _run_in_savepoint(self, connection: sa.Connection, write: _Write[Any]) -> None:
        savepoint = connection.begin_nested()
        try:
            write.result = write.work(connection)
        except Exception as error:
            if connection.invalidated:
                raise  # the connection is lost, and with it the whole transaction
            try:
                savepoint.rollback()
            except sa.exc.DBAPIError:
                raise error from None  # SQLite rolls the whole transaction back when the disk is full
            write.result = self._database.translate(error) if isinstance(error, sa.exc.DBAPIError) else error
        else:
            savepoint.commit()


class _Write(Generic[Result]):
    """One caller's write, and what it returned or raised."""

    def __init__(self, work: Callable[[sa.Connection], Result]) -> None:
        self.work, self.is_done = work, False
        self.result: Result | Exception = AssertionError("this write was interrupted")


def _backend(place: Path | str | None) -> Backend:
    return PostgresBackend(place) if isinstance(place, str) else SqliteBackend(place)


def upsert(
    connection: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]], *, replace: Sequence[str]
) -> None:
    """Insert rows; where the primary key exists already, replace these columns."""
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
    """The fields of a dataclass with slots, by name; the values are not copied, as `asdict` would."""
    return {name: getattr(row, name) for name in row.__slots__}


def next_value(connection: sa.Connection, counter: str) -> int:
    """The next number of a counter: gapless, and rolled back with its transaction."""
    return next_values(connection, counter, 1)[0]


def next_values(connection: sa.Connection, counter: str, count: int) -> range:
    """The next `count` numbers of a counter."""
    assert count > 0, count
    statement = _COUNT[connection.dialect.name]
    last = int(connection.execute(statement, {"counter": counter, "step": count}).scalar_one())
    return range(last - count + 1, last + 1)


def _count(insert: Any) -> Any:
    return (
        insert.values(name=sa.bindparam("counter"), value=sa.bindparam("step"))
        .on_conflict_do_update(
            index_elements=["name"], set_={"value": COUNTERS.c.value + sa.bindparam("step")}
        )
        .returning(COUNTERS.c.value)
    )


# Built once: building a statement takes longer than running it.
_COUNT = {"postgresql": _count(postgresql.insert(COUNTERS)), "sqlite": _count(sqlite.insert(COUNTERS))}
_VALUE = sa.select(COUNTERS.c.value).where(COUNTERS.c.name == sa.bindparam("counter"))
_TERM = sa.select(TERMS.c.term).where(TERMS.c.role == sa.bindparam("of_role"))


def current_value(connection: sa.Connection, counter: str) -> int:
    """The last number of a counter, 0 if there was none."""
    row = connection.execute(_VALUE, {"counter": counter}).first()
    return 0 if row is None else int(row[0])


def take_term(database: Database, role: str, holder: str) -> int:
    """Become the active instance of a role; all smaller terms are fenced."""
    with database.transaction() as connection:
        row = connection.execute(sa.select(TERMS.c.term).where(TERMS.c.role == role)).first()
        term = 1 if row is None else int(row.term) + 1
        values = {"role": role, "term": term, "holder": holder, "expires_ms": 0}
        upsert(connection, TERMS, [values], replace=("term", "holder", "expires_ms"))
        return term


def check_term(connection: sa.Connection, role: str, term: int) -> None:
    """Raise Fenced if a newer term exists. Requires: inside the transaction that writes as this role."""
    row = connection.execute(_TERM, {"of_role": role}).first()
    if row is None or int(row[0]) != term:
        raise Fenced(
            f"this {role} is no longer the active instance",
            why=f"its term is {term}, the current term is {None if row is None else int(row[0])}",
            fix="nothing: the active instance continues the work",
        )


BUSY_MS = 10_000
READERS_MAX = 16
# Readers use mmap: every commit invalidates their page cache.
MAPPED_BYTES = 2**30
# Required for durable commits. Some builds of SQLite have other defaults, or ignore a setting.
DURABLE = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": BUSY_MS}

# A cache that holds the pages of a release of many jobs, so that fewer are read and written twice.
_LARGE_CACHE = {"cache_size": -262144, "wal_autocheckpoint": 8000}


class SqliteBackend:
    """A SQLite file, or a database in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self.read_lock: AbstractContextManager[Any] = nullcontext()
        arguments = {"check_same_thread": False, "isolation_level": None, "timeout": BUSY_MS / 1000}
        options: dict[str, Any] = {"connect_args": arguments, **JSON_TEXT}
        if path is None:
            self.writing = sa.create_engine("sqlite://", poolclass=StaticPool, **options)
            # A database in memory has one connection, which reads and writes share.
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

    def close(self) -> None:
        self.writing.dispose()
        self.reading.dispose()

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
                "this SQLite database may lose committed data",
                why=f"PRAGMA {name} is {found!r}, and must be {wanted!r}",
                fix="put the folder on a local disk, or use PostgreSQL with --database",
            )

    for name, value in _LARGE_CACHE.items():
        connection.execute(f"PRAGMA {name}={value}")


def _make_read_only(connection: sqlite3.Connection, _record: object) -> None:
    connection.execute(f"PRAGMA busy_timeout={BUSY_MS}")
    connection.execute("PRAGMA query_only=ON")
    connection.execute(f"PRAGMA mmap_size={MAPPED_BYTES}")


WRITE_LOCK = 0x70656E73746F636B  # "penstock"
# A control plane that hangs in a transaction must release the lock.
_SESSION = (
    "-c lock_timeout=10s -c statement_timeout=60s -c idle_in_transaction_session_timeout=15s -c timezone=UTC"
)
_TRANSPORT = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "tcp_user_timeout": 20_000,
}


# Sent as one text when a connection is checked out: a ping, BEGIN and the lock would be three round trips.
# SQLAlchemy sends COMMIT and ROLLBACK.
_WRITE = f"BEGIN ISOLATION LEVEL READ COMMITTED; SELECT pg_advisory_xact_lock({WRITE_LOCK})"
_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ"
_POOL: dict[str, Any] = {
    "pool_size": 4,
    "max_overflow": 12,
    "pool_timeout": 10,
    "isolation_level": "AUTOCOMMIT",
}
# Without prepared statements: behind a pooler, each transaction may use another server connection.
_NOT_PREPARED = {"prepare_threshold": None}


class PostgresBackend:
    """A PostgreSQL server."""

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
        sa.event.listen(
            self.writing, "connect", lambda connection, _record: require_durable_server(connection)
        )
        sa.event.listen(self.writing, "checkout", partial(_begin, self.writing, _WRITE))
        sa.event.listen(self.reading, "checkout", partial(_begin, self.reading, _READ))

    def close(self) -> None:
        self.writing.dispose()
        self.reading.dispose()

    def prepare(self) -> None:
        with self.writing.begin() as connection:
            upgrade_tables(connection)

    def translate(self, error: sa.exc.DBAPIError, *, committing: bool) -> PenstockError:
        # Not SQLAlchemy's message, which contains the statement and its values.
        return translate_postgres(error.orig, str(error.orig).strip(), committing=committing)


def _parsed(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        parsed = None
    if parsed is None or parsed.get_backend_name() not in ("postgresql", "postgres"):
        # The URL is not shown: it may contain a password.
        raise EnvironmentProblem(
            "this is not the URL of a PostgreSQL database",
            why="the form is postgresql://user:password@host:port/database",
            fix="correct it, or leave it out to use a SQLite file",
        )
    return parsed.set(drivername="postgresql+psycopg")


def _begin(engine: sa.Engine, text: str, connection: Any, _record: object, _proxy: object) -> None:
    """Begin a transaction when a connection is checked out; a closed connection is replaced."""
    try:
        connection.execute(text)
    except psycopg.Error as error:
        if connection.closed:
            raise sa.exc.InvalidatePoolError from error
        raise sa.exc.DBAPIError.instance(text, None, error, psycopg.Error, dialect=engine.dialect) from error


INSTALLATION = sa.Table(
    "installation",
    METADATA,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("value", sa.String, nullable=False),
)


def claim_places(database: Database, places: Mapping[str, str]) -> None:
    """Store the places (bus, rows, ...) of the first control plane; refuse one with different places."""
    with database.transaction() as connection:
        known = {row.name: row.value for row in connection.execute(sa.select(INSTALLATION))}
        for name, place in places.items():
            if name not in known:
                connection.execute(sa.insert(INSTALLATION).values(name=name, value=place))
            elif known[name] != place:
                raise EnvironmentProblem(
                    "this database belongs to another installation",
                    why=f"its {name} is {known[name]}, and this control plane uses {place}",
                    fix="use the same --folder as the other control planes, or another database",
                )


def open_database(place: Path | str, places: Callable[[], Mapping[str, str]]) -> Database:
    """Open a database. Control planes can share one only if they use the same places."""
    database = Database(place)
    if database.is_shared:
        with ExitStack() as undo:
            undo.callback(database.close)
            claim_places(database, places())
            undo.pop_all()
    return database
