"""One SELECT by itself: the cheapest look at a database there is.

A transaction around a single statement adds nothing, since a statement sees one moment anyway; opening and
ending one takes five times as long as the look. A few connections are kept for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

Found = TypeVar("Found")
IDLE_MAX = 8


class Peek:
    """A SELECT, made once, whose one parameter is called `name`. Values come as the driver gives them.

    Where it is not the same on each kind of database, it is given for each.
    """

    def __init__(self, statement: sa.Select[Any] | Mapping[str, sa.Select[Any]]) -> None:
        names = ("sqlite", "postgresql")
        self._made = {name: statement for name in names} if isinstance(statement, sa.Select) else statement

    @cached_property
    def sqlite(self) -> str:
        return str(self._made["sqlite"].compile(dialect=sqlite.dialect()))

    @cached_property
    def postgresql(self) -> str:
        dialect: Any = postgresql.psycopg.dialect()  # type: ignore[no-untyped-call]
        return str(self._made["postgresql"].compile(dialect=dialect))


class PeekConnections:
    """A few connections for looks, opened when they are needed, closed when they break. Thread-safe."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect, self._idle = connect, deque[Any]()
        self._is_closed = False

    def rows(self, text: str, values: Any) -> Sequence[tuple[Any, ...]]:
        """All rows; the statement is over then."""
        return self.use(lambda connection: connection.execute(text, values).fetchall())

    def use(self, look: Callable[[Any], Found]) -> Found:
        """What a look at a connection finds; one at which it fails is not used again."""
        connection, is_kept = self._take(), False
        try:
            found = look(connection)
            is_kept = not self._is_closed and len(self._idle) < IDLE_MAX
        finally:
            if is_kept:
                self._idle.append(connection)
            else:
                connection.close()
        return found

    def _take(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    def close(self) -> None:
        """Close those that nobody uses now; the others close after their look."""
        self._is_closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close those that nobody uses now."""
        while self._idle:
            self._idle.pop().close()
