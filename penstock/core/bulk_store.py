"""Thousands of rows at once: the same tables, without paying for a statement per row.

On PostgreSQL rows go in through COPY, which takes a fifth of the time of INSERT; on SQLite as plain tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import sqlalchemy as sa

from penstock.core import json_text

Row = tuple[Any, ...]


def insert_rows(
    connection: sa.Connection, table: sa.Table, columns: Sequence[str], rows: Sequence[Row]
) -> None:
    """Insert rows, values in the order of `columns`. Requires: JSON values are JSON text already."""
    if connection.dialect.name == "postgresql":
        _copy(connection, table, columns, rows)
    else:
        _insert(connection, "INSERT", table, columns, rows)


def replace_rows(
    connection: sa.Connection, table: sa.Table, columns: Sequence[str], rows: Sequence[Row]
) -> None:
    """The same, in the place of rows with the same key. Requires: every column is given, the key first."""
    if connection.dialect.name == "postgresql":
        key = table.c[columns[0]]
        names = [str(row[0]) for row in rows]
        connection.execute(sa.delete(table).where(is_one_of(connection, key, names)))
        _copy(connection, table, columns, rows)
    else:
        _insert(connection, "REPLACE", table, columns, rows)


def is_one_of(
    connection: sa.Connection, column: sa.ColumnElement[str], names: Sequence[str]
) -> sa.ColumnElement[bool]:
    """`column IN names`, with all names in one parameter: the statement is the same for any number."""
    text = sa.bindparam(None, json_text.dumps(list(names)), type_=sa.Text)
    if connection.dialect.name == "postgresql":
        elements = sa.select(sa.func.json_array_elements_text(sa.cast(text, sa.JSON))).scalar_subquery()
        # An array, not a join: it is looked up in the index whatever the planner believes of its size.
        return column == sa.any_(sa.func.array(elements, type_=sa.ARRAY(sa.Text)))
    return column.in_(sa.select(sa.func.json_each(text).table_valued("value").c.value))


def _insert(
    connection: sa.Connection, verb: str, table: sa.Table, columns: Sequence[str], rows: Sequence[Row]
) -> None:
    if rows:
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        connection.exec_driver_sql(f"{verb} INTO {table.name} ({names}) VALUES ({marks})", list(rows))


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
