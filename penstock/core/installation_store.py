"""What control planes on one shared database must agree on: where the data lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import sqlalchemy as sa

from penstock.core.errors import EnvironmentProblem
from penstock.core.sql_store import METADATA, Database

INSTALLATION = sa.Table(
    "installation",
    METADATA,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("value", sa.String, nullable=False),
)


def claim_places(database: Database, places: Mapping[str, str]) -> None:
    """Record the places of the first control plane; refuse any other that has different ones."""
    with database.transaction() as connection:
        known = {row.name: row.value for row in connection.execute(sa.select(INSTALLATION))}
        for name, place in places.items():
            if name not in known:
                connection.execute(sa.insert(INSTALLATION).values(name=name, value=place))
            elif known[name] != place:
                raise EnvironmentProblem(
                    "this database belongs to another installation",
                    why=f"its {name} is at {known[name]}, here it would be at {place}",
                    fix="use the same --folder as the others, or a database of its own",
                )


def open_database(place: Path | str, places: Callable[[], Mapping[str, str]]) -> Database:
    """Open a database; one that several control planes share belongs to those with the same places."""
    database = Database(place)
    if database.is_shared:
        with ExitStack() as undo:
            undo.callback(database.close)
            claim_places(database, places())
            undo.pop_all()
    return database
