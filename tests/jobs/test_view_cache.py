"""Claims about kept views: a read sees every write before it, on every store, and from every instance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.db.database import Database
from penstock.jobs import job_store
from penstock.jobs.job_reads import view_of
from penstock.jobs.job_service import JobService
from penstock.jobs.job_store import JobStore
from tests.builders import ADMIN, a_body, a_job


def asked(**changes: Any) -> Any:
    return {"actor": ADMIN, "reason": "a test", "idempotency_key": None, "now_ms": 5, **changes}


@pytest.fixture
def database(place: Path | str | None) -> Any:
    found = Database(place)
    yield found
    found.close()


def fresh(database: Database, name: str) -> dict[str, Any]:
    """The view made anew."""
    with database.reading() as connection:
        record = job_store.find_record(connection, name)
    assert record is not None
    return view_of(record).to_json()


def test_a_view_is_made_once_and_made_anew_after_each_write(database: Database):
    service = JobService(JobStore(database))
    job = a_job(service, partitions=8)
    first = service.view(job)
    assert service.view(job) is first
    assert service.views().items[0] is first
    service.patch_layer(job, "oncall", {"priority": 3}, **asked())
    assert service.view(job).config.priority == 3
    assert service.view(job).to_json() == fresh(database, job)
    service.remove(job, **asked())
    assert service.view(job, removed=True).removed
    service.restore(job, **asked())
    assert service.view(job).to_json() == fresh(database, job)


def test_what_another_instance_wrote_is_seen(place: Path | str | None):
    if place is None:
        pytest.skip("memory has one instance")
    one, two = Database(place), Database(place)
    here, there = JobService(JobStore(one)), JobService(JobStore(two))
    job = a_job(here)
    assert there.view(job).config.priority == 0
    here.patch_layer(job, "oncall", {"priority": 4}, **asked())
    assert there.view(job).config.priority == 4
    assert next(iter(there.views())).config.priority == 4
    one.close()
    two.close()


@given(
    st.lists(
        st.sampled_from(["patch", "clear", "apply", "remove", "restore", "pause", "look", "list"]),
        max_size=12,
    )
)
def test_whatever_was_done_a_kept_view_is_as_one_made_anew(steps: list[str]):
    database = Database(None)
    service, name = JobService(JobStore(database)), "demo.count"
    a_job(service, name)
    for number, step in enumerate(steps):
        gone = service.view(name, removed=True).removed
        if step == "patch" and not gone:
            service.patch_layer(name, "oncall", {"priority": number}, **asked())
        elif step == "clear" and not gone:
            service.clear(name, "oncall", **asked())
        elif step == "apply":
            body = a_body(name, task_count=1 + number % 4)
            service.apply(name, body, expected_version=None, birth=f"b{number}", **asked())
        elif step == "remove" and not gone:
            service.remove(name, **asked())
        elif step == "restore" and gone:
            service.restore(name, **asked())
        elif step == "pause" and not gone:
            service.set_state(name, "paused", **asked())
        elif step == "list":
            service.views(removed=True)
        assert service.view(name, removed=True).to_json() == fresh(database, name)
    database.close()


def test_views_of_one_and_of_many_are_the_same(database: Database):
    service = JobService(JobStore(database))
    names = [a_job(service, f"demo.j{number}") for number in range(8)]
    many = service.views_of([*names, "demo.nobody"])
    assert list(many) == names and many == {name: service.view(name) for name in names}
    assert service.views_of(["demo.nobody"]) == {}
    for name in names:
        service.patch_layer(name, "oncall", {"priority": 2}, **asked())
    assert all(view.config["priority"] == 2 for view in service.views_of(names).values())
