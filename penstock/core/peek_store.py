"""One SELECT by itself: the cheapest look at a database there is.

A transaction around a single statement adds nothing, since a statement sees one moment anyway; opening and
ending one takes five times as long as the look. Each thread keeps a connection of its own for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite


class Peek:
    """A SELECT, made once, whose one parameter is called `name`. Values come as the driver gives them."""

    def __init__(self, statement: sa.Select[Any]) -> None:
        self._statement = statement

    @cached_property
    def sqlite(self) -> str:
        return str(self._statement.compile(dialect=sqlite.dialect()))

    @cached_property
    def postgresql(self) -> str:
        dialect: Any = postgresql.psycopg.dialect()  # type: ignore[no-untyped-call]
        return str(self._statement.compile(dialect=dialect))


class OwnConnections:
    """A connection per thread, opened when it is needed and again after it broke. Thread-safe."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect, self._local = connect, threading.local()
        self._lock, self._open = threading.Lock(), list[Any]()

    def rows(self, text: str, values: Any) -> Sequence[tuple[Any, ...]]:
        """All rows; the statement is over then."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
            with self._lock:
                self._open.append(connection)
        rows: Sequence[tuple[Any, ...]] = connection.execute(text, values).fetchall()
        return rows

    def drop(self) -> None:
        """Forget this thread's connection, so that the next look opens a new one."""
        connection, self._local.connection = getattr(self._local, "connection", None), None
        if connection is not None:
            with self._lock:
                self._open.remove(connection)
            connection.close()

    def close(self) -> None:
        """Close the connections of all threads. Requires: none of them looks any more."""
        with self._lock:
            for connection in self._open:
                connection.close()
            self._open.clear()
        self._local = threading.local()
