"""The stores' SQLite in memory, with no price per transaction either: a seed has hundreds of thousands.

`tests/sim/test_quick_store.py` compares it with the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import sqlalchemy as sa

from penstock.core.json_text import JSON_TEXT
from penstock.core.peek_store import Peek
from penstock.core.quick_store import Hear, QuickConnection
from penstock.core.sql_store import METADATA, Database


class QuickDatabase(Database):
    """A `Database` in memory for one thread: transactions inside transactions are refused."""

    def __init__(self, *, fault: Callable[[str], None] | None = None) -> None:
        super().__init__(None, fault=fault)
        arguments = {"check_same_thread": False, "isolation_level": None}
        # An engine without the rule that begins transactions: here they begin by hand.
        options: dict[str, Any] = {"connect_args": arguments, **JSON_TEXT}
        self._engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool, **options)
        METADATA.create_all(self._engine)
        self._kept = self._engine.raw_connection()
        self._raw: Any = self._kept.driver_connection

    def on_statement(self, hear: Hear) -> None:
        self._hear = hear
        sa.event.listen(
            self._engine, "before_cursor_execute", lambda _c, _k, statement, *_rest: hear(statement)
        )

    def close(self) -> None:
        super().close()
        if hasattr(self, "_engine"):
            self._engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        self._fault("begin")
        connection = _Turn(self._engine, self._raw, self._hear)
        self._raw.execute("BEGIN IMMEDIATE")
        how = "ROLLBACK"
        try:
            yield cast(sa.Connection, connection)
            self._fault("commit")
            how = "COMMIT"
        except sa.exc.DBAPIError as error:
            raise self._backend.translate(error, committing=False) from error
        finally:
            connection.end(how)
        self._fault("committed")

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        self._fault("begin")
        connection = _Turn(self._engine, self._raw, self._hear)
        # One thread: nobody writes in between, so no transaction is needed to see one moment.
        try:
            yield cast(sa.Connection, connection)
        finally:
            connection.end("ROLLBACK")

    def peek(self, peek: Peek, name: str) -> Sequence[tuple[Any, ...]]:
        self._fault("begin")
        rows: Sequence[tuple[Any, ...]] = self._raw.execute(peek.sqlite, (name,)).fetchall()
        return rows


class _Turn(QuickConnection):
    """One transaction; SQLAlchemy's connection is taken only when a statement needs it."""

    def __init__(self, engine: sa.Engine, raw: Any, hear: Hear | None) -> None:
        super().__init__(engine.dialect, raw, self._through_sqlalchemy, hear)
        self._engine = engine
        self._taken: sa.Connection | None = None

    def end(self, how: str) -> None:
        """Commit or roll back."""
        if self._raw.in_transaction:
            self._raw.execute(how)
        if self._taken is not None:
            self._taken.close()

    def _through_sqlalchemy(self) -> sa.Connection:
        if self._taken is None:
            self._taken = self._engine.connect()
        return self._taken
