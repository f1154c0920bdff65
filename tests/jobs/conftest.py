"""What tests of the Job Service share: the service on each store, closed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.sql_store import Database
from penstock.jobs.job_service import JobService
from penstock.jobs.job_store import JobStore


@pytest.fixture
def database(place: Path | str | None) -> Iterator[Database]:
    """A new database, on each store."""
    database = Database(place)
    yield database
    database.close()


@pytest.fixture
def any_service(database: Database) -> JobService:
    """The Job Service, on each store."""
    return JobService(JobStore(database))
