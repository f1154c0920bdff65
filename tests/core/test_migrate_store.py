"""Every database comes to the same tables, however old it is; one that is newer than the code is left alone."""

from __future__ import annotations

import importlib
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from penstock.core.errors import EnvironmentProblem, StoreUnavailable
from penstock.db import database as migrate_store
from penstock.db.database import FIRST, METADATA, Database, current_value, known_steps, next_value
from tests.tidy_rules import package_sources

# A table is known once its module is imported.
for _source in package_sources().values():
    if "penstock.db.database.METADATA" in _source.imports:
        importlib.import_module(_source.module)


def differences(database: Database) -> list[object]:
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, METADATA))


@pytest.fixture
def file_or_server(place):
    if place is None:
        pytest.skip("memory is made new each time")
    # A file that is not there yet: `place` has its tables already.
    return place.with_name("new.db") if isinstance(place, Path) else place


def test_a_new_database_has_exactly_the_tables_of_this_version(file_or_server):
    database = Database(file_or_server)
    assert differences(database) == []
    database.close()


def test_a_database_from_before_there_were_steps_keeps_its_rows_and_gets_the_rest(tmp_path):
    """Plan: make the first version's tables by its step alone, without the note that Alembic leaves."""
    path = tmp_path / "old.db"
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        _run_steps(connection, FIRST)
        connection.exec_driver_sql("DROP TABLE alembic_version")
        connection.exec_driver_sql("INSERT INTO counters VALUES ('journal', 41)")
        connection.exec_driver_sql("INSERT INTO terms VALUES ('syncer', 7, 'somebody')")
    engine.dispose()
    database = Database(path)
    assert differences(database) == []
    with database.transaction() as connection:
        assert next_value(connection, "journal") == 42
        assert connection.exec_driver_sql("SELECT term, expires_ms FROM terms").fetchall() == [(7, 0)]
    database.close()


def test_opening_again_changes_nothing(file_or_server):
    first = Database(file_or_server)
    with first.transaction() as connection:
        next_value(connection, "a")
    first.close()
    second = Database(file_or_server)
    with second.reading() as connection:
        assert current_value(connection, "a") == 1
        assert (
            connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
            == known_steps()[-1]
        )
    second.close()


def test_a_database_of_a_newer_version_is_refused_and_left_alone(file_or_server):
    database = Database(file_or_server)
    with database.transaction() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    with pytest.raises(EnvironmentProblem) as caught:
        Database(file_or_server)
    assert "9999" in caught.value.why and known_steps()[-1] in caught.value.why


def test_a_step_that_fails_leaves_the_tables_as_they_were(tmp_path):
    """Plan: the next step finds a column there that it wants to add, so it breaks off."""
    path = tmp_path / "old.db"
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        _run_steps(connection, FIRST)
        # The next step adds this column, and finds it there.
        connection.exec_driver_sql("ALTER TABLE terms ADD COLUMN expires_ms BIGINT")
    engine.dispose()
    before = _schema(path)
    with pytest.raises(StoreUnavailable):
        Database(path)
    assert _schema(path) == before


def test_steps_follow_one_another():
    steps = known_steps()
    assert [int(step) for step in steps] == list(range(1, len(steps) + 1))


def _run_steps(connection: sa.Connection, upto: str) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrate_store._FOLDER))
    config.attributes["connection"] = connection
    command.upgrade(config, upto)


def _schema(path) -> list[tuple[str, ...]]:
    with sqlite3.connect(path) as connection:
        found = connection.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
    connection.close()
    return found
