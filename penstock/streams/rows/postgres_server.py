"""Connections to a PostgreSQL server that keeps rows: where it is, sessions that end by themselves, tables.

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
from penstock.db.server_checks import refuse_what_is_not_durable, translate_postgres

# Rises when the tables change: another format is refused, never guessed at.
FORMAT = 1

SCHEMA = "penstock_rows"
PLACE = f"{SCHEMA}.place"
INTERVALS, STATES = f"{SCHEMA}.intervals", f"{SCHEMA}.states"
TIMERS, OUTBOX = f"{SCHEMA}.timers", f"{SCHEMA}.outbox"

# Rows that every step writes find room on their own page, so that no index changes with them.
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
    # One counter for all intervals: an id that came twice would let a slow twin mark the wrong row as
    # delivered. A row's lock keeps the ids of one interval in order.
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
# A plain SELECT would let a zombie commit: its successor's write would come between the look and the write.
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

# No more of the values than a page may have, however many rows were asked for; the first one always.
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
# All of them, page by page; rows about ids of records left out.
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
# A timer set again as it was costs no write.
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

# A worker that stops inside a transaction loses it before its successor loses patience.
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

# Connections inherited through a fork must neither be used nor closed in the child: they are kept for ever.
_INHERITED: list[object] = []


@dataclass(slots=True)
class PooledConnection:
    """One connection, and which rows it leads to: None while there are no tables."""

    connection: Connection
    identity: str | None


class PostgresLinks:
    """Opens connections when they are needed and keeps a few that are idle. Thread-safe, and safe to fork."""

    def __init__(self, place: str) -> None:
        self._conninfo = conninfo_of(place)
        self._pid, self._idle = os.getpid(), deque[PooledConnection]()
        self._closing = weakref.finalize(self, _close, self._pid, self._idle)

    @contextmanager
    def take(self) -> Iterator[PooledConnection]:
        """A connection with no transaction; whatever is still open after the block is rolled back."""
        try:
            link = self._kept().pop()
        except IndexError:
            link = self._open()
        try:
            yield link
        finally:
            self._give_back(link)

    def close_idle(self) -> None:
        """Close those that nobody uses: they are probably as dead as the one that just failed."""
        _close(os.getpid(), self._kept())

    def make_tables(self, link: PooledConnection) -> None:
        """Make the tables, unless somebody did."""
        connection = link.connection
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_TABLES_LOCK,))
            if _identity(connection) is None:
                for statement in TABLES:
                    connection.execute(statement)
                connection.execute(f"INSERT INTO {PLACE} VALUES (%s, %s)", (FORMAT, secrets.token_hex(16)))
        link.identity = _identity(connection)

    def _open(self) -> PooledConnection:
        connection: Connection = psycopg.connect(self._conninfo, autocommit=True)
        with ExitStack() as undo:
            undo.callback(connection.close)
            refuse_what_is_not_durable(connection)
            link = PooledConnection(connection, _identity(connection))
            undo.pop_all()
        return link

    def _give_back(self, link: PooledConnection) -> None:
        connection = link.connection
        if not connection.closed and connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            with suppress(psycopg.Error):  # whatever brought us here is the news
                connection.execute("ROLLBACK")
        is_clean = (
            not connection.closed
            and connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
            and link.identity is not None
        )
        kept = self._kept()
        if is_clean and len(kept) < _IDLE_MAX:
            kept.append(link)
        else:
            with suppress(psycopg.Error):
                connection.close()

    def _kept(self) -> deque[PooledConnection]:
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
    """How libpq is told of a place, with our limits; nobody's password is in the error."""
    try:
        if not place.startswith(("postgresql://", "postgres://")):
            raise psycopg.ProgrammingError("not a URL of PostgreSQL")
        asked = conninfo_to_dict(place)
        options = f"{_SESSION} {asked.pop('options', '') or ''}".strip()
        return make_conninfo("", **{**_TRANSPORT, **asked, "options": options})
    except psycopg.ProgrammingError as error:
        raise EnvironmentProblem(
            "this is not the URL of a PostgreSQL database",
            why="it does not have the form postgresql://user:password@host:port/database",
            fix="correct it, or leave it out to keep rows on this machine's disk",
        ) from error


def identify_database(place: str, *, make: bool) -> str:
    """What the rows at a place are, whatever its address; "" if there are none and none are to be made."""
    links = PostgresLinks(place)
    try:
        with links.take() as link:
            if link.identity is None and make:
                links.make_tables(link)
            return link.identity or ""
    except psycopg.Error as error:
        raise translate_postgres(error, str(error).strip(), committing=False) from error
    finally:
        links.close_idle()


def _identity(connection: Connection) -> str | None:
    # Not to_regclass(), which may remember that there was none.
    found = connection.execute(
        "SELECT FROM pg_catalog.pg_tables WHERE schemaname || '.' || tablename = %s", (PLACE,)
    ).fetchone()
    if found is None:
        return None
    said = connection.execute(f"SELECT format, identity FROM {PLACE}").fetchone()
    if said is None or said[0] != FORMAT:
        raise CorruptData(
            "the rows in this database have a format that this version does not know",
            why=f"they say {None if said is None else said[0]}, known is {FORMAT}",
            fix="start the version of penstock that wrote them",
        )
    return f"postgresql:{said[1]}"
