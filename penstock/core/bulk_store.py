"""Thousands of rows at once: the same tables, without paying for a statement per row.

On PostgreSQL new rows go in through COPY, changed ones as an array per column; on SQLite as plain tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psycopg
import sqlalchemy as sa

from penstock.core import json_text
from penstock.core.peek_store import Peek
from penstock.core.quick_store import MADE_ONCE, Ask

if TYPE_CHECKING:
    from penstock.core.sql_store import Database

Row = tuple[Any, ...]


def insert_rows(
    connection: sa.Connection, table: sa.Table, columns: Sequence[str], rows: Sequence[Row]
) -> None:
    """Insert rows, values in the order of `columns`. Requires: JSON values are JSON text already."""
    if not rows:
        return
    if connection.dialect.name == "postgresql":
        _copy(connection, table, columns, rows)
    else:
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        statement = f"INSERT INTO {table.name} ({names}) VALUES ({marks})"
        connection.exec_driver_sql(statement, list(rows))


def update_rows(
    connection: sa.Connection, table: sa.Table, columns: Sequence[str], rows: Sequence[Row]
) -> None:
    """Set these columns in rows that are there. Requires: the first column is the key, and is not changed."""
    if not rows:
        return
    key, *others = columns
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(*_update_arrays(connection, table, columns, rows))
    else:
        changes = ", ".join(f"{name} = ?" for name in others)
        statement = f"UPDATE {table.name} SET {changes} WHERE {key} = ?"
        connection.exec_driver_sql(statement, [(*row[1:], row[0]) for row in rows])


def update_rows_if(
    connection: sa.Connection,
    table: sa.Table,
    columns: Sequence[str],
    rows: Sequence[Row],
    *,
    at: tuple[str, Sequence[int]],
    unless_in: sa.Table,
) -> set[str]:
    """On PostgreSQL: like `update_rows`, of rows that still have this number in this column and whose key is
    not in another table, looked at in the same statement. Returns the keys of those that it changed."""
    if not rows:
        return set()
    key, (column, numbers) = columns[0], at
    statement, values = _update_arrays(connection, table, columns, rows, beside=column)
    guards = (
        f" AND {table.name}.{column} = given.had"
        f" AND NOT EXISTS (SELECT 1 FROM {unless_in.name} WHERE {unless_in.name}.{key} = given.{key})"
        f" RETURNING {table.name}.{key}"
    )
    return {name for (name,) in connection.exec_driver_sql(statement + guards, (*values, list(numbers)))}


def _update_arrays(
    connection: sa.Connection,
    table: sa.Table,
    columns: Sequence[str],
    rows: Sequence[Row],
    *,
    beside: str | None = None,
) -> tuple[str, Row]:
    """The UPDATE from an array per column; with `beside` also one of numbers as in that column, as `had`."""
    key, *others = columns
    kinds = {name: table.c[name].type.compile(connection.dialect) for name in columns}
    texts = {name for name in columns if isinstance(table.c[name].type, sa.String | sa.JSON)}
    given = [f"%b::{'TEXT' if name in texts else kind}[]" for name, kind in kinds.items()]
    names = list(columns)
    if beside is not None:
        given.append(f"%b::{kinds[beside]}[]")
        names.append("had")
    changes = ", ".join(f"{name} = given.{name}::{kinds[name]}" for name in others)
    statement = (
        f"UPDATE {table.name} SET {changes} FROM unnest({', '.join(given)}) AS given ({', '.join(names)}) "
        f"WHERE {table.name}.{key} = given.{key}"
    )
    return statement, tuple(map(list, zip(*rows, strict=True)))


def is_one_of(
    connection: sa.Connection, column: sa.ColumnElement[str], names: Sequence[str]
) -> sa.ColumnElement[bool]:
    """`column IN names`, with all names in one parameter: the statement is the same for any number."""
    text = sa.bindparam(None, json_text.dumps(list(names)), type_=sa.Text)
    return _is_in(connection.dialect.name, column, text)


class ByName:
    """A query for the rows of some names, made once: to make a statement takes longer than to run it."""

    def __init__(self, query: sa.Select[Any], column: sa.ColumnElement[str]) -> None:
        query = query.execution_options(**MADE_ONCE)
        text = sa.bindparam("name", type_=sa.Text)
        self._one = query.where(column == sa.bindparam("name", type_=column.type))
        self._some = {
            dialect: query.where(_is_in(dialect, column, text)) for dialect in ("sqlite", "postgresql")
        }
        self._peek_one, self._peek_some = Peek(self._one), Peek(self._some)

    def rows(self, connection: sa.Connection, names: Sequence[str]) -> Sequence[Any]:
        """The rows of those of these names that there are."""
        return connection.execute(*self.ask(connection, names)).all()

    def ask(self, asked: sa.Connection | Database, names: Sequence[str]) -> Ask:
        """The statement for these names, and its values."""
        if len(names) == 1:
            return self._one, {"name": names[0]}
        return self._some[asked.dialect.name], {"name": json_text.dumps(list(names))}

    def peek(self, database: Database, names: Sequence[str]) -> Sequence[Row]:
        """The same in a look of its own, outside any transaction; values come as the driver gives them."""
        if len(names) == 1:
            return database.peek(self._peek_one, names[0])
        return database.peek(self._peek_some, json_text.dumps(list(names)))


def _is_in(
    dialect: str, column: sa.ColumnElement[str], names: sa.BindParameter[str]
) -> sa.ColumnElement[bool]:
    if dialect == "postgresql":
        elements = sa.select(sa.func.json_array_elements_text(sa.cast(names, sa.JSON))).scalar_subquery()
        # An array, not a join: it is looked up in the index whatever the planner believes of its size.
        return column == sa.any_(sa.func.array(elements, type_=sa.ARRAY(sa.Text)))
    return column.in_(sa.select(sa.func.json_each(names).table_valued("value").c.value))


def _copy(connection: sa.Connection, table: sa.Table, columns: Sequence[str], rows: Sequence[Row]) -> None:
    statement = f"COPY {table.name} ({', '.join(columns)}) FROM STDIN"
    driver: Any = connection.connection.driver_connection
    try:
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            for row in rows:
                copy.write_row(row)
    except psycopg.Error as error:
        # SQLAlchemy did not see this statement, so it is wrapped here for whoever translates.
        raise sa.exc.OperationalError(statement, None, error) from error
