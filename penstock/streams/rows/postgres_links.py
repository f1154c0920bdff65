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

from penstock.core.durable_store import refuse_what_is_not_durable, translate_postgres
from penstock.core.errors import CorruptData, EnvironmentProblem
from penstock.streams.rows.postgres_tables import FORMAT, PLACE, TABLES

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
class Link:
    """One connection, and which rows it leads to: None while there are no tables."""

    connection: Connection
    identity: str | None


class PostgresLinks:
    """Opens connections when they are needed and keeps a few that are idle. Thread-safe, and safe to fork."""

    def __init__(self, place: str) -> None:
        self._conninfo = conninfo_of(place)
        self._pid, self._idle = os.getpid(), deque[Link]()
        self._closing = weakref.finalize(self, _close, self._pid, self._idle)

    @contextmanager
    def take(self) -> Iterator[Link]:
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

    def make_tables(self, link: Link) -> None:
        """Make the tables, unless somebody did."""
        connection = link.connection
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_TABLES_LOCK,))
            if _identity(connection) is None:
                for statement in TABLES:
                    connection.execute(statement)
                connection.execute(f"INSERT INTO {PLACE} VALUES (%s, %s)", (FORMAT, secrets.token_hex(16)))
        link.identity = _identity(connection)

    def _open(self) -> Link:
        connection: Connection = psycopg.connect(self._conninfo, autocommit=True)
        with ExitStack() as undo:
            undo.callback(connection.close)
            refuse_what_is_not_durable(connection)
            link = Link(connection, _identity(connection))
            undo.pop_all()
        return link

    def _give_back(self, link: Link) -> None:
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

    def _kept(self) -> deque[Link]:
        if self._pid != os.getpid():
            _INHERITED.append(self._idle)
            self._pid, self._idle = os.getpid(), deque()
            self._closing = weakref.finalize(self, _close, self._pid, self._idle)
        return self._idle


def _close(pid: int, idle: deque[Link]) -> None:
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
