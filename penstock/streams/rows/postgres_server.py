"""Connections to a PostgreSQL server with rows: pool, session timeouts, tables.

Connections are opened after fork, and one is kept: a worker of Spark never needs a second.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from penstock.core.errors import CorruptData, EnvironmentProblem
from penstock.db.server_checks import require_durable_server, translate_postgres

# Increased when the tables change; databases of another format are refused.
FORMAT = 1

SCHEMA = "penstock_rows"
PLACE = f"{SCHEMA}.place"
INTERVALS, STATES = f"{SCHEMA}.intervals", f"{SCHEMA}.states"
TIMERS, OUTBOX = f"{SCHEMA}.timers", f"{SCHEMA}.outbox"

# A low fillfactor leaves room for updates on the same page, so that no index changes (HOT updates).
TABLES = (
    f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}",
    f"CREATE TABLE {PLACE} (format INTEGER NOT NULL, identity TEXT NOT NULL)",
    f"""CREATE TABLE {INTERVALS} (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job_birth TEXT NOT NULL,
        partition BIGINT NOT NULL, birth TEXT NOT NULL, generation BIGINT NOT NULL,
        shard_epoch BIGINT NOT NULL, token BIGINT NOT NULL, version BIGINT NOT NULL, offsets TEXT NOT NULL,
        input_low BIGINT NOT NULL, output_low BIGINT NOT NULL, event_time_max TEXT NOT NULL,
        next_seq TEXT NOT NULL, intent TEXT NOT NULL, counters TEXT NOT NULL, crc BIGINT NOT NULL,
        UNIQUE (job_birth, partition, birth)) WITH (fillfactor = 40)""",
    f"""CREATE TABLE {STATES} (
        interval BIGINT NOT NULL, key BYTEA NOT NULL, value BYTEA NOT NULL, crc BIGINT NOT NULL,
        PRIMARY KEY (interval, key)) WITH (fillfactor = 70)""",
    f"""CREATE TABLE {TIMERS} (
        interval BIGINT NOT NULL, key BYTEA NOT NULL, tag BYTEA NOT NULL, at_ms BIGINT NOT NULL,
        hold_ms BIGINT NOT NULL, late BIGINT NOT NULL, wall BIGINT NOT NULL, crc BIGINT NOT NULL,
        PRIMARY KEY (interval, key, tag))""",
    f"CREATE INDEX timers_due ON {TIMERS} (interval, at_ms, key, tag) WHERE wall = 0",
    f"CREATE INDEX timers_wall ON {TIMERS} (interval, at_ms, key, tag) WHERE wall = 1",
    f"CREATE INDEX timers_hold ON {TIMERS} (interval, hold_ms) WHERE late = 0 AND wall = 0",
    # One sequence for all intervals: with a reused id a slow twin could mark the wrong row as delivered. The
    # lock of the interval's row keeps its ids in order.
    f"""CREATE TABLE {OUTBOX} (
        interval BIGINT NOT NULL, id BIGINT GENERATED ALWAYS AS IDENTITY, category TEXT NOT NULL,
        category_birth TEXT NOT NULL, partition BIGINT NOT NULL, first_seq BIGINT NOT NULL,
        count BIGINT NOT NULL, ts_min BIGINT NOT NULL, payload BYTEA NOT NULL, crc BIGINT NOT NULL,
        PRIMARY KEY (interval, id))""",
)

_ROW = (
    "birth, generation, shard_epoch, token, version, offsets, input_low, output_low, event_time_max, "
    "next_seq, intent, counters, crc"
)
_WHICH = "job_birth = %s AND partition = %s AND birth = %s"
_ID = f"(SELECT id FROM {INTERVALS} WHERE {_WHICH})"

READ_ROW = f"SELECT id, {_ROW} FROM {INTERVALS} WHERE {_WHICH}"
# With a plain SELECT a zombie could commit: its successor's write could come between its read and its write.
LOCK_ROW = f"{READ_ROW} FOR UPDATE"
NEW_ROW = (
    f"INSERT INTO {INTERVALS} (job_birth, partition, {_ROW}) "
    "VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) "
    "ON CONFLICT (job_birth, partition, birth) DO NOTHING RETURNING id"
)
WRITE_ROW = (
    f"UPDATE {INTERVALS} SET birth = %s, generation = %s, shard_epoch = %s, token = %s, version = %s, "
    "offsets = %s, input_low = %s, output_low = %s, event_time_max = %s, next_seq = %s, intent = %s, "
    "counters = %s, crc = %s WHERE id = %s"
)

_DUE = f"FROM {TIMERS} WHERE interval = {_ID} AND wall = {{wall}} AND at_ms <= %s"
READ_TIMERS = tuple(
    f"SELECT key, tag, at_ms, hold_ms, late, wall, crc {_DUE.format(wall=wall)} ORDER BY at_ms, key, tag"
    for wall in (0, 1)
)
READ_STATES_OF_TIMERS = tuple(
    f"SELECT key, value, crc FROM (SELECT DISTINCT interval, key {_DUE.format(wall=wall)}) AS due "
    f"JOIN {STATES} USING (interval, key)"
    for wall in (0, 1)
)
READ_STATES = f"SELECT key, value, crc FROM {STATES} WHERE interval = {_ID} AND key = ANY(%b::bytea[])"
READ_OUTBOX = (
    "SELECT id, category, category_birth, partition, first_seq, count, ts_min, payload, crc "
    f"FROM {OUTBOX} WHERE interval = {_ID} ORDER BY id"
)

# Values up to the size of a page, however many rows were requested; at least one.
SCAN_STATES = (
    "SELECT key, value, crc FROM (SELECT key, value, crc, octet_length(value) AS size, "
    "sum(octet_length(value)) OVER (ORDER BY key) AS total FROM "
    f"(SELECT key, value, crc FROM {STATES} WHERE interval = {_ID} AND key >= %b ORDER BY key LIMIT %s) "
    "AS page) AS counted WHERE total - size < %s ORDER BY key"
)
SCAN_TIMERS = (
    f"SELECT key, tag, at_ms, hold_ms, late, wall, crc FROM {TIMERS} WHERE interval = {_ID} "
    "AND (key, tag) >= (%b, %b) ORDER BY key, tag LIMIT %s"
)

_SIZE = "count(*), coalesce(sum(octet_length(key) + octet_length(value)), 0)::int8"
SIZE_STATES = f"SELECT {_SIZE} FROM {STATES} WHERE interval = %s AND key = ANY(%b::bytea[])"
# All states, page by page, without rows of record ids.
PAGE_END = f"SELECT key FROM {STATES} WHERE interval = %s AND key >= %b ORDER BY key OFFSET %s LIMIT 1"
COUNT_PAGE = (
    f"SELECT {_SIZE} FROM {STATES} WHERE interval = %s AND key >= %b AND (%b::bytea IS NULL OR key < %b) "
    "AND (key < %b OR key >= %b)"
)

WRITE_STATES = (
    f"INSERT INTO {STATES} (interval, key, value, crc) "
    "SELECT %s, new.* FROM unnest(%b::bytea[], %b::bytea[], %b::int8[]) AS new "
    "ON CONFLICT (interval, key) DO UPDATE SET value = excluded.value, crc = excluded.crc"
)
DELETE_STATES = f"DELETE FROM {STATES} WHERE interval = %s AND key = ANY(%b::bytea[])"
# An unchanged timer is not written again.
WRITE_TIMERS = (
    f"INSERT INTO {TIMERS} AS old (interval, key, tag, at_ms, hold_ms, late, wall, crc) "
    "SELECT %s, new.* FROM unnest(%b::bytea[], %b::bytea[], %b::int8[], %b::int8[], %b::int8[], %b::int8[], "
    "%b::int8[]) AS new ON CONFLICT (interval, key, tag) DO UPDATE "
    "SET at_ms = excluded.at_ms, hold_ms = excluded.hold_ms, late = excluded.late, wall = excluded.wall, "
    "crc = excluded.crc WHERE (old.at_ms, old.hold_ms, old.late, old.wall) <> "
    "(excluded.at_ms, excluded.hold_ms, excluded.late, excluded.wall)"
)
DELETE_TIMERS = (
    f"DELETE FROM {TIMERS} AS old USING unnest(%b::bytea[], %b::bytea[]) AS gone (key, tag) "
    "WHERE old.interval = %s AND old.key = gone.key AND old.tag = gone.tag"
)
WRITE_OUTBOX = (
    f"INSERT INTO {OUTBOX} (interval, category, category_birth, partition, first_seq, count, ts_min, "
    "payload, crc) VALUES (%s, %s, %s, %s, %s, %s, %s, %b, %s)"
)
DELETE_OUTBOX = f"DELETE FROM {OUTBOX} WHERE interval = %s AND id = ANY(%b::int8[])"
OLDEST_WORK = (
    f"SELECT (SELECT min(hold_ms) FROM {TIMERS} WHERE interval = %s AND late = 0 AND wall = 0), "
    f"(SELECT min(ts_min) FROM {OUTBOX} WHERE interval = %s)"
)


Connection = psycopg.Connection[tuple[Any, ...]]

# The transaction of a worker that hangs ends before its successor's timeout.
_SESSION = "-c idle_in_transaction_session_timeout=4s -c lock_timeout=8s -c statement_timeout=20s"
_TRANSPORT = {
    "connect_timeout": 5,
    "keepalives_idle": 3,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 8_000,
}
_IDLE_MAX = 4
_TABLES_LOCK = 0x726F7773  # "rows"

# A child must neither use nor close connections inherited through a fork, so they are referenced for ever.
_INHERITED: list[object] = []


@dataclass(slots=True)
class PooledConnection:
    """One connection, and the identity of its database: None while there are no tables."""

    connection: Connection
    identity: str | None


class PostgresConnections:
    """A connection pool with a few idle connections. Thread-safe, and safe to fork."""

    def __init__(self, place: str) -> None:
        self._conninfo = conninfo_of(place)
        self._pid, self._idle = os.getpid(), deque[PooledConnection]()
        self._closing = weakref.finalize(self, _close, self._pid, self._idle)

    @contextmanager
    def take(self) -> Iterator[PooledConnection]:
        """A connection without a transaction; a transaction left open by the block is rolled back."""
        try:
            pooled = self._idle_here().pop()
        except IndexError:
            pooled = self._open()
        try:
            yield pooled
        finally:
            self._give_back(pooled)

    def close_idle(self) -> None:
        """Close idle connections, which are probably as broken as the one that just failed."""
        _close(os.getpid(), self._idle_here())

    def make_tables(self, pooled: PooledConnection) -> None:
        """Create the tables if they do not exist."""
        connection = pooled.connection
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_TABLES_LOCK,))
            if _identity(connection) is None:
                for statement in TABLES:
                    connection.execute(statement)
                connection.execute(f"INSERT INTO {PLACE} VALUES (%s, %s)", (FORMAT, secrets.token_hex(16)))
        pooled.identity = _identity(connection)

    def _open(self) -> PooledConnection:
        connection: Connection = psycopg.connect(self._conninfo, autocommit=True)
        with ExitStack() as undo:
            undo.callback(connection.close)
            require_durable_server(connection)
            pooled = PooledConnection(connection, _identity(connection))
            undo.pop_all()
        return pooled

    def _give_back(self, pooled: PooledConnection) -> None:
        connection = pooled.connection
        if not connection.closed and connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            with suppress(psycopg.Error):  # the original error is raised
                connection.execute("ROLLBACK")
        is_clean = (
            not connection.closed
            and connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
            and pooled.identity is not None
        )
        idle = self._idle_here()
        if is_clean and len(idle) < _IDLE_MAX:
            idle.append(pooled)
        else:
            with suppress(psycopg.Error):
                connection.close()

    def _idle_here(self) -> deque[PooledConnection]:
        if self._pid != os.getpid():
            _INHERITED.append(self._idle)
            self._pid, self._idle = os.getpid(), deque()
            self._closing = weakref.finalize(self, _close, self._pid, self._idle)
        return self._idle


def _close(pid: int, idle: deque[PooledConnection]) -> None:
    while idle and pid == os.getpid():
        with suppress(IndexError, psycopg.Error):
            idle.pop().connection.close()


def conninfo_of(place: str) -> str:
    """The libpq connection string of a place, with our timeouts; errors contain no password."""
    try:
        if not place.startswith(("postgresql://", "postgres://")):
            raise psycopg.ProgrammingError("not a URL of PostgreSQL")
        given = conninfo_to_dict(place)
        options = f"{_SESSION} {given.pop('options', '') or ''}".strip()
        return make_conninfo("", **{**_TRANSPORT, **given, "options": options})
    except psycopg.ProgrammingError as error:
        raise EnvironmentProblem(
            "this is not the URL of a PostgreSQL database",
            why="it does not have the form postgresql://user:password@host:port/database",
            fix="correct it, or omit it to store rows on this machine's disk",
        ) from error


def identify_database(place: str, *, make: bool) -> str:
    """The identity of the rows at a place, independent of its address; "" without tables and `make`."""
    links = PostgresConnections(place)
    try:
        with links.take() as pooled:
            if pooled.identity is None and make:
                links.make_tables(pooled)
            return pooled.identity or ""
    except psycopg.Error as error:
        raise translate_postgres(error, str(error).strip(), committing=False) from error
    finally:
        links.close_idle()


def _identity(connection: Connection) -> str | None:
    # Not to_regclass(), which may cache that the table did not exist.
    found = connection.execute(
        "SELECT FROM pg_catalog.pg_tables WHERE schemaname || '.' || tablename = %s", (PLACE,)
    ).fetchone()
    if found is None:
        return None
    stored = connection.execute(f"SELECT format, identity FROM {PLACE}").fetchone()
    if stored is None or stored[0] != FORMAT:
        raise CorruptData(
            "the rows in this database have a format that this version does not support",
            why=f"their format is {None if stored is None else stored[0]}, this version supports {FORMAT}",
            fix="use the version of Penstock that wrote them",
        )
    return f"postgresql:{stored[1]}"
