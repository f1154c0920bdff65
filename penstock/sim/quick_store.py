"""The stores' SQLite in memory, without SQLAlchemy's price per statement: a seed executes a million of them.

Statements that a store marks `made_once` are compiled once and go straight to SQLite; all others go through
SQLAlchemy, on the same connection and in the same transaction. `tests/sim/test_quick_store.py` compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import sqlalchemy as sa

from penstock.core.json_text import JSON_TEXT
from penstock.core.peek_store import Peek
from penstock.core.sql_store import METADATA, Database

Hear = Callable[[str], None]


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
        self._compiled: dict[int, _Compiled] = {}
        self._hear: Hear = lambda statement: None

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
        connection = _QuickConnection(self._engine, self._raw, self._compiled, self._hear)
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
        connection = _QuickConnection(self._engine, self._raw, self._compiled, self._hear)
        # One thread: nobody writes in between, so no transaction is needed to see one moment.
        try:
            yield cast(sa.Connection, connection)
        finally:
            connection.end("ROLLBACK")

    def peek(self, peek: Peek, name: str) -> Sequence[tuple[Any, ...]]:
        self._fault("begin")
        rows: Sequence[tuple[Any, ...]] = self._raw.execute(peek.sqlite, (name,)).fetchall()
        return rows


class _QuickConnection:
    """As much of a connection as stores use."""

    def __init__(self, engine: sa.Engine, raw: Any, compiled: dict[int, _Compiled], hear: Hear) -> None:
        self._engine, self._raw, self._compiled, self._hear = engine, raw, compiled, hear
        self._slow: sa.Connection | None = None
        self.dialect = engine.dialect

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        quick = self._compiled.get(id(statement))
        if quick is None and statement.get_execution_options().get("made_once"):
            quick = self._compiled[id(statement)] = _Compiled(statement, self.dialect)
        if quick is None or isinstance(parameters, list):
            return self._through_sqlalchemy().execute(statement, parameters)
        self._hear(quick.text)
        return _QuickResult(quick, self._raw.execute(quick.text, quick.bound(parameters or {})))

    def exec_driver_sql(self, text: str, parameters: Any = None) -> Any:
        return self._through_sqlalchemy().exec_driver_sql(text, parameters)

    def end(self, how: str) -> None:
        if self._raw.in_transaction:
            self._raw.execute(how)
        if self._slow is not None:
            self._slow.close()

    def _through_sqlalchemy(self) -> sa.Connection:
        if self._slow is None:
            self._slow = self._engine.connect()
        return self._slow


class _Compiled:
    """A statement's text, and how its values go in and come out."""

    def __init__(self, statement: Any, dialect: sa.Dialect) -> None:
        self.statement = statement  # kept, so that no other gets its id
        compiled = statement.compile(dialect=dialect)
        self.text: str = str(compiled)
        self._names: Sequence[str] = compiled.positiontup or ()
        self._fixed: Mapping[str, Any] = compiled.params
        into = {name: bind.type.dialect_impl(dialect) for name, bind in compiled.binds.items()}
        processors = {name: kind.bind_processor(dialect) for name, kind in into.items()}
        self._into = {name: process for name, process in processors.items() if process is not None}
        columns: tuple[Any, ...] = tuple(getattr(statement, "selected_columns", ()))
        columns = columns or tuple(getattr(statement, "_returning", ()))
        self.keys = tuple(column.name for column in columns)
        out = [column.type.dialect_impl(dialect).result_processor(dialect, None) for column in columns]
        self.out = tuple((place, process) for place, process in enumerate(out) if process is not None)

    def bound(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        values = {**self._fixed, **given}
        if self._into:
            for name, process in self._into.items():
                values[name] = process(values[name])
        return tuple(values[name] for name in self._names)

    def row(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.out:
            return values
        row = list(values)
        for place, process in self.out:
            row[place] = process(row[place])
        return tuple(row)


class _QuickResult:
    """As much of a result as stores use."""

    def __init__(self, compiled: _Compiled, cursor: Any) -> None:
        self._compiled, self._cursor = compiled, cursor
        self.rowcount: int = cursor.rowcount
        # RETURNING rows must be read before the transaction ends.
        self._rows = [compiled.row(values) for values in cursor.fetchall()] if compiled.keys else []

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._rows)

    def all(self) -> list[tuple[Any, ...]]:
        return self._rows

    def first(self) -> tuple[Any, ...] | None:
        return self._rows[0] if self._rows else None

    def scalar(self) -> Any:
        return self._rows[0][0] if self._rows else None

    def scalar_one(self) -> Any:
        (row,) = self._rows
        return row[0]
