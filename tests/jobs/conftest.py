"""What tests of the Job Service share: a store that is ready at once, and the service on it.

To make the tables anew for each of some hundred tests would take most of their time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from penstock.db.database import METADATA, Database
from penstock.jobs.job_service import JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.layer_store import LAYER_KINDS, insert_kind
from penstock.jobs.layers import DEFAULT_LAYERS
from tests.ready import ready_file


@pytest.fixture(scope="session")
def shared_url(request: pytest.FixtureRequest) -> str:
    """One PostgreSQL database for all tests that empty it first."""
    return str(request.getfixturevalue("postgres").new_database())


@pytest.fixture
def emptied_url(shared_url: str) -> str:
    """The shared PostgreSQL database, as if it were new."""
    database = Database(shared_url)
    with database.transaction() as connection:
        for table in METADATA.tables.values():
            connection.execute(sa.delete(table))
        for layer in DEFAULT_LAYERS:
            insert_kind(connection, layer)
        assert len(connection.execute(sa.select(LAYER_KINDS)).all()) == len(DEFAULT_LAYERS)
    database.close()
    return shared_url


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def ready_place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str | None:
    """What `Database` takes, on each store, with all tables and no rows."""
    if request.param == "memory":
        return None
    if request.param == "sqlite":
        return ready_file(tmp_path / "store.db")
    return str(request.getfixturevalue("emptied_url"))


@pytest.fixture
def database(ready_place: Path | str | None) -> Iterator[Database]:
    """A database without rows, on each store."""
    database = Database(ready_place)
    yield database
    database.close()


@pytest.fixture
def any_service(database: Database) -> JobService:
    """The Job Service, on each store."""
    return JobService(JobStore(database))
