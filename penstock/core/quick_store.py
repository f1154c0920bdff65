"""Statements without SQLAlchemy's price: what a store marks `made_once` is compiled once, for the driver.

All others go through SQLAlchemy, on the same connection and in the same transaction. SQLAlchemy takes about
100 µs for a statement that SQLite executes in 10, and a write of one layer has a dozen of them.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import psycopg
import sqlalchemy as sa

Hear = Callable[[str], None]
Otherwise = Callable[[], Exception]
Ask = tuple[Any, Mapping[str, Any]]  # a statement and its values
DRIVER_ERRORS = (sqlite3.Error, psycopg.Error)
NOT_REMEMBERED = (psycopg.errors.InvalidSqlStatementName, psycopg.errors.DuplicatePreparedStatement)

# Of a statement that is made once, at import, and whose rows are read by position: it may be kept compiled.
MADE_ONCE = {"made_once": True}


def insert_all(table: sa.Table, insert: Any = None, *, without: Sequence[str] = (), **given: Any) -> Any:
    """An INSERT of one row, made once, with a parameter for each column but those `without` and `given`."""
    names = [column.name for column in table.c if column.name not in (*without, *given)]
    made = (sa.insert(table) if insert is None else insert).inline()
    return made.values({name: sa.bindparam(name) for name in names} | given).execution_options(**MADE_ONCE)


class QuickConnection:
    """As much of a connection as stores use, around one of SQLAlchemy's."""

    # Behind a pooler, which gives another server connection to every transaction, nothing is remembered.
    prepares: ClassVar[bool] = True

    def __init__(
        self, dialect: sa.Dialect, raw: Any, slow: Callable[[], sa.Connection], hear: Hear | None = None
    ) -> None:
        self.dialect, self._raw, self._slow, self._hear = dialect, raw, slow, hear
        self._is_server = dialect.name == "postgresql"
        self.writes = 0  # statements that may have changed something
        self.memory: dict[Any, Any] = {}  # what was read under the lock and nobody changes meanwhile
        self._later: list[tuple[str, Otherwise | None]] = []
        # One for all statements: psycopg takes as long to make one as to run a small statement.
        self._cursor: Any = None
        self._writer: Any = None  # a cursor that puts values into a statement's text

    @property
    def connection(self) -> Any:
        """SQLAlchemy's own handle of the driver's connection."""
        self.flush()
        self.writes += 1
        return self._slow().connection

    @property
    def whole(self) -> sa.Connection:
        """SQLAlchemy's connection, for what stores do not use."""
        self.flush()
        self.writes += 1
        return self._slow()

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        """Run a statement; its rows are there when this returns."""
        self.flush()
        self.writes += not getattr(statement, "is_select", False)
        quick = None if isinstance(parameters, list) else _compiled(statement, self.dialect)
        if quick is None:
            return self._slow().execute(statement, parameters)
        if self._hear is not None:
            self._hear(quick.text)
        try:
            if self._cursor is None:
                self._cursor = self._raw.cursor()
            if self._is_server:
                cursor = self._cursor.execute(self._written(quick, parameters or {}))
            else:
                cursor = self._cursor.execute(quick.text, quick.bound(parameters or {}))
            return QuickResult(quick, cursor)
        except DRIVER_ERRORS as error:
            raise self._wrapped(quick.text, error) from error

    def ask_all(self, asked: Sequence[Ask]) -> list[Any]:
        """Run SELECTs that are made once, each with its values: on a server all of them in one go."""
        if not self._is_server:
            return [self.execute(statement, parameters) for statement, parameters in asked]
        self.flush()
        try:
            return self._ask_server(asked)
        except DRIVER_ERRORS as error:
            raise self._wrapped("several SELECTs", error) from error

    def _ask_server(self, asked: Sequence[Ask], *, begin: str = "", end: str = "") -> list[QuickResult]:
        made = [(_known(statement, self.dialect), parameters) for statement, parameters in asked]
        texts = [self._written(quick, parameters) for quick, parameters in made]
        cursor, found = (
            self._raw.execute(";\n".join([*filter(None, [begin]), *texts, *filter(None, [end])])),
            [],
        )
        if begin:
            cursor.nextset()
        for quick, _ in made:
            found.append(QuickResult(quick, cursor))
            cursor.nextset()
        return found

    def _written(self, quick: _Compiled, parameters: Mapping[str, Any]) -> str:
        """A call of the statement with its values in it. The server planned it when it first heard of it."""
        if self._writer is None:
            self._writer = psycopg.ClientCursor(self._raw)
        # Not by the driver, which calls one statement at a time, and forgets all when one is undone.
        if not self.prepares:
            whole: str = self._writer.mogrify(quick.text, quick.bound(parameters))
            return whole
        prepared = _PREPARED.setdefault(self._raw, set())
        if quick.name not in prepared:
            self._raw.execute(quick.prepare)
            prepared.add(quick.name)
        text: str = self._writer.mogrify(quick.call, quick.bound(parameters))
        return text

    def later(
        self, statement: Any, parameters: Mapping[str, Any], *, otherwise: Otherwise | None = None
    ) -> None:
        """Run a statement before anything else is asked, or with the commit: on a server several in one go.

        For writes whose outcome nobody looks at; what goes wrong with them is told then. With `otherwise`:
        unless it changes exactly one row, the error that this makes is raised.
        """
        quick = _compiled(statement, self.dialect) if self._is_server else None
        if quick is None:
            if self.execute(statement, parameters).rowcount != 1 and otherwise is not None:
                raise otherwise()
            return
        self.writes += 1
        try:
            self._later.append((self._written(quick, parameters), otherwise))
        except DRIVER_ERRORS as error:
            raise self._wrapped(quick.text, error) from error

    def flush(self) -> None:
        """Run what was left for later."""
        if not self._later:
            return
        left, self._later = self._later, []
        text = ";\n".join([written for written, _ in left])
        try:
            found = self._raw.execute(text)
        except DRIVER_ERRORS as error:
            raise self._wrapped(text, error) from error
        for _, otherwise in left:
            if otherwise is not None and found.rowcount != 1:
                self.writes += 1  # whoever asks now may be another than the one whose write this was
                raise otherwise()
            found.nextset()

    def exec_driver_sql(self, text: str, parameters: Any = None) -> Any:
        """Run text as it is, through SQLAlchemy."""
        self.flush()
        self.writes += 1
        return self._slow().exec_driver_sql(text, parameters)

    def _wrapped(self, text: str, error: Exception) -> Exception:
        """As if SQLAlchemy had run it: whoever translates knows one kind of error."""
        if isinstance(error, NOT_REMEMBERED):
            QuickConnection.prepares = False
        base: Any = psycopg.Error if isinstance(error, psycopg.Error) else sqlite3.Error
        return sa.exc.DBAPIError.instance(text, None, error, base, hide_parameters=True, dialect=self.dialect)


def look_once(dialect: sa.Dialect, raw: Any, asked: Sequence[Ask]) -> list[Any]:
    """SELECTs as of one moment on a connection of a server that is in no transaction: one round trip.

    Errors are the driver's; the connection is not to be used again then.
    """

    def no_other_way() -> sa.Connection:
        raise AssertionError("a look has only statements that are made once")

    quick = QuickConnection(dialect, raw, no_other_way)
    try:
        return quick._ask_server(asked, begin="BEGIN ISOLATION LEVEL REPEATABLE READ", end="COMMIT")
    except NOT_REMEMBERED:
        QuickConnection.prepares = False
        raise


def writes_of(connection: Any) -> int:
    """How many statements of this transaction may have changed something."""
    return int(connection.writes)


def later(
    connection: Any, statement: Any, parameters: Mapping[str, Any], *, otherwise: Otherwise | None = None
) -> None:
    """Run a write whose outcome nobody waits for with others; see `QuickConnection.later`."""
    connection.later(statement, parameters, otherwise=otherwise)


def ask_all(connection: Any, asked: Sequence[Ask]) -> list[Any]:
    """The results of SELECTs that are made once; see `QuickConnection.ask_all`."""
    found: list[Any] = connection.ask_all(asked)
    return found


def keep_ahead(connection: Any, name: tuple[str, ...], found: Any) -> None:
    """Keep what was read under the lock for the first who asks; whoever changes it takes it away."""
    connection.memory[name] = (found,)


def taken_ahead(connection: Any, name: tuple[str, ...]) -> tuple[Any] | None:
    """What was read ahead, once, in a tuple; None: nothing was."""
    found: tuple[Any] | None = connection.memory.pop(name, None)
    return found


def flush(connection: Any) -> None:
    """Run what was left for later."""
    connection.flush()


_NUMBERS = itertools.count(1)
_VALUE = re.compile(r"%\((\w+)\)s|%%")


class _Compiled:
    """A statement's text, and how its values go in and come out."""

    def __init__(self, statement: Any, dialect: sa.Dialect) -> None:
        self.statement = statement  # kept, so that no other gets its id
        compiled = statement.compile(dialect=dialect)
        self.text: str = str(compiled)
        self._names: Sequence[str] | None = compiled.positiontup if compiled.positional else None
        self._fixed: Mapping[str, Any] = compiled.params
        into = {name: bind.type.dialect_impl(dialect) for name, bind in compiled.binds.items()}
        processors = {name: kind.bind_processor(dialect) for name, kind in into.items()}
        self._into = {name: process for name, process in processors.items() if process is not None}
        columns: tuple[Any, ...] = tuple(getattr(statement, "selected_columns", ()))
        columns = columns or tuple(getattr(statement, "_returning", ()))
        self.has_rows = bool(columns)
        out = [column.type.dialect_impl(dialect).result_processor(dialect, None) for column in columns]
        self.out = tuple((place, process) for place, process in enumerate(out) if process is not None)

    @cached_property
    def name(self) -> str:
        """What a server knows it by."""
        return f"penstock_{next(_NUMBERS)}"

    @cached_property
    def _values(self) -> list[str]:
        return list(dict.fromkeys(found for found in _VALUE.findall(self.text) if found))

    @cached_property
    def prepare(self) -> str:
        """What tells a server about it."""
        places = {name: f"${number}" for number, name in enumerate(self._values, 1)}
        text = _VALUE.sub(lambda found: places[found[1]] if found[1] else "%", self.text)
        return f"PREPARE {self.name} AS {text}"

    @cached_property
    def call(self) -> str:
        """What runs it, once a server knows it."""
        values = ", ".join(f"%({name})s" for name in self._values)
        return f"EXECUTE {self.name} ({values})" if values else f"EXECUTE {self.name}"

    def bound(self, given: Mapping[str, Any]) -> Any:
        values = {**self._fixed, **given}
        for name, process in self._into.items():
            values[name] = process(values[name])
        return values if self._names is None else tuple([values[name] for name in self._names])

    def row(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.out:
            return values
        row = list(values)
        for place, process in self.out:
            row[place] = process(row[place])
        return tuple(row)


# By dialect and statement: those made once live as long as the process.
_KNOWN: dict[tuple[str, int], _Compiled] = {}
# Which statements a server has heard of, by connection.
_PREPARED: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def _known(statement: Any, dialect: sa.Dialect) -> _Compiled:
    known = _compiled(statement, dialect)
    assert known is not None, f"not made once: {statement}"
    return known


def _compiled(statement: Any, dialect: sa.Dialect) -> _Compiled | None:
    key = dialect.name, id(statement)
    known = _KNOWN.get(key)
    if known is None and statement.get_execution_options().get("made_once"):
        known = _KNOWN[key] = _Compiled(statement, dialect)
    return known


class QuickResult:
    """As much of a result as stores use."""

    def __init__(self, compiled: _Compiled, cursor: Any) -> None:
        self.rowcount: int = cursor.rowcount
        # RETURNING rows must be read before the transaction ends.
        found = cursor.fetchall() if compiled.has_rows else []
        self._rows = [compiled.row(values) for values in found] if compiled.out else found

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._rows)

    def all(self) -> list[tuple[Any, ...]]:
        """Every row."""
        return self._rows

    def first(self) -> tuple[Any, ...] | None:
        """The first row, if there is one."""
        return self._rows[0] if self._rows else None

    def scalar(self) -> Any:
        """The first value of the first row; None if there is none."""
        return self._rows[0][0] if self._rows else None

    def scalar_one(self) -> Any:
        """The one value there is."""
        (row,) = self._rows
        return row[0]
