"""Brings the tables of a database to what this version needs, one step (`migrations/versions`) at a time."""

from __future__ import annotations

import re
from pathlib import Path

import sqlalchemy as sa

from penstock.core.errors import EnvironmentProblem

_FOLDER = Path(__file__).parent / "migrations"
_STEP = re.compile(r"^(\d{4})_\w+\.py$")
# Databases made before there were steps have the tables of the first one, and no note of it.
FIRST = "0001"


def known_steps() -> tuple[str, ...]:
    """The numbers of all steps, oldest first."""
    found = (_STEP.match(path.name) for path in (_FOLDER / "versions").iterdir())
    return tuple(sorted(match.group(1) for match in found if match))


def upgrade_tables(connection: sa.Connection) -> None:
    """Run the steps that are missing, inside the caller's transaction. Refuses what a newer version made."""
    steps, current = known_steps(), _current(connection)
    if current == steps[-1]:
        return
    if current is not None and current not in steps:
        raise EnvironmentProblem(
            "this database is from a newer version of Penstock",
            why=f"it is at step {current}, this version knows {steps[-1]} at most",
            fix="use the newer version, or a copy of the database from before the upgrade",
        )
    # Imported only when there is something to do: the import takes longer than the check.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    if current is None and sa.inspect(connection).has_table("counters"):
        command.stamp(config, FIRST)
    command.upgrade(config, "head")


def _current(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    row = connection.execute(sa.text("SELECT version_num FROM alembic_version")).first()
    return None if row is None else str(row.version_num)
