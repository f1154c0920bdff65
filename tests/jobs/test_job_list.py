"""Which jobs there are: pages by name, by label, pipeline and state, as the store itself can tell."""

from __future__ import annotations

import itertools

import pytest
import sqlalchemy as sa

from penstock.core.errors import ConfigError
from penstock.db.database import Database
from penstock.jobs.job_reads import STATES
from penstock.jobs.job_service import JobService
from penstock.jobs.job_store import JOB_LABELS, JOBS
from penstock.jobs.layer_store import put_layer
from penstock.jobs.layers import LayerRow
from penstock.jobs.running_store import PLANS, QUARANTINE, RUNNING
from tests.builders import DEVELOPER, ONCALL, a_body, a_config, a_job, a_pipeline
from tests.jobs.asking import asked


def names(service: JobService, **wanted: object) -> list[str]:
    """All pages together, whatever the size of one."""
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = service.views(after=after, limit=2, **wanted)  # type: ignore[arg-type]
        assert len(page.items) <= 2
        found += [view.name for view in page]
        after = page.next
    return found


def test_pages_follow_one_another_by_name_without_gap_or_repeat(any_service: JobService) -> None:
    service = any_service
    for name in ("demo.b", "demo.a", "demo.C", "demo.d-1", "demo.d.1", "demo.e"):
        a_job(service, name)
    ordered = ["demo.C", "demo.a", "demo.b", "demo.d-1", "demo.d.1", "demo.e"]  # by bytes, on every store
    assert names(service) == ordered == [view.name for view in service.every_view()]
    page = service.views(limit=4)
    assert page.next == "demo.d-1" and service.views(limit=6).next is None
    assert [view.name for view in service.views(after="demo.d-1")] == ordered[4:]
    assert service.views(after="zzz").items == ()
    assert len(service.views(limit=0).items) == 1 and len(service.views(limit=10**9).items) == 6


def test_jobs_are_found_by_the_labels_of_their_merge(any_service: JobService) -> None:
    """Plan: labels come and go in several layers; the top one counts, and a removed job keeps its own."""
    service = any_service
    a_job(service, "demo.a", labels={"team": "search", "tier": "1"})
    a_job(service, "demo.b", labels={"team": "search", "tier": "2"})
    a_job(service, "demo.c", labels={"team": "ads"})
    assert names(service, labels={"team": "search"}) == ["demo.a", "demo.b"]
    assert names(service, labels={"team": "search", "tier": "2"}) == ["demo.b"]
    assert names(service, labels={"team": "search", "tier": "3"}) == []
    service.patch_layer("demo.a", "oncall", {"labels.team": "ads", "labels.on_fire": "yes"}, **asked(ONCALL))
    assert names(service, labels={"team": "ads"}) == ["demo.a", "demo.c"]
    assert names(service, labels={"on_fire": "yes"}) == ["demo.a"]
    service.clear("demo.a", "oncall", **asked(ONCALL))
    assert names(service, labels={"team": "search"}) == ["demo.a", "demo.b"]
    assert names(service, labels={"on_fire": "yes"}) == []
    service.apply("demo.b", a_body("demo.b"), expected_version=None, birth="unused", **asked(DEVELOPER))
    assert names(service, labels={"team": "search"}) == ["demo.a"]
    service.remove("demo.a", **asked(DEVELOPER))
    assert names(service, labels={"team": "search"}) == []
    assert names(service, labels={"team": "search"}, removed=True) == ["demo.a"]
    service.create("demo.a", a_body("demo.a"), birth="second", **asked(DEVELOPER))
    assert names(service, labels={"team": "search"}, removed=True) == []


def test_a_write_of_something_else_leaves_the_labels_alone(
    any_service: JobService, database: Database
) -> None:
    job = a_job(any_service, labels={"team": "search"})
    any_service.patch_layer(job, "oncall", {"threads": 2}, **asked(ONCALL))
    with database.reading() as connection:
        assert connection.execute(sa.select(JOB_LABELS)).all() == [(job, "team", "search")]


def test_jobs_are_found_by_pipeline_and_by_being_removed(any_service: JobService) -> None:
    service = any_service
    for name in ("demo.a", "demo.b", "shop.a"):
        a_job(service, name)
    service.remove("demo.a", **asked(DEVELOPER))
    assert names(service, pipeline="demo") == ["demo.b"]
    assert names(service, pipeline="demo", removed=True) == ["demo.a", "demo.b"]
    assert names(service, state="removed") == ["demo.a"]
    assert names(service) == ["demo.b", "shop.a"]


@pytest.mark.parametrize(
    "wanted",
    [
        {"labels": {"a\x00": "b"}},
        {"labels": {"a": "\ud800"}},
        {"labels": {"a": "'; DROP TABLE jobs; --"}},
        {"pipeline": "a\x00b"},
        {"after": "\x00"},
        {"labels": {"a": "x" * 200_000}},
    ],
)
def test_what_no_job_can_have_finds_nothing(any_service: JobService, wanted: dict[str, object]) -> None:
    a_job(any_service)
    assert any_service.views(**wanted).items == ()  # type: ignore[arg-type]
    assert names(any_service) == ["demo.count"]


def test_a_state_that_does_not_exist_is_refused_with_those_that_do(any_service: JobService) -> None:
    with pytest.raises(ConfigError) as caught:
        any_service.views(state="runing")
    assert "runing" in caught.value.what and "running" in caught.value.why and caught.value.fix


def test_the_store_and_the_view_agree_on_every_state(any_service: JobService, database: Database) -> None:
    """Plan: every combination of removed, quarantined, invalid, planned, desired and running, one job each."""
    service = any_service
    flags = itertools.product([False, True], repeat=4)
    runs = (None, "running", "removed", "other birth", "behind")
    cases = {
        f"demo.j{number:03}": case
        for number, case in enumerate(itertools.product(flags, ("running", "paused", "stopped"), runs))
    }
    bodies = [a_body(job, state=desired) for job, (_, desired, _) in cases.items()]
    service.submit_pipeline(a_pipeline(*bodies), new_birth=lambda: "b", **asked(DEVELOPER))
    with database.transaction() as connection:
        for job, ((removed, quarantined, invalid, planned), desired, running) in cases.items():
            if removed:
                connection.execute(sa.update(JOBS).where(JOBS.c.name == job).values(deleted=True))
            if invalid:
                row = LayerRow(layer="base", precedence=0, body={"nonsense": 1})
                put_layer(connection, job, row, birth="b")
            if quarantined:
                values = {"job": job, "expected_version": 1, "reason": "r", "since_ms": 0}
                connection.execute(sa.insert(QUARANTINE).values(**values))
            if planned:
                _plan(connection, job)
            if running is not None:
                birth = "former" if running == "other birth" else "b"
                state = "removed" if running == "removed" else desired
                version = 0 if running == "behind" else 1
                _running(connection, job, {"birth": birth, "state": state, "expected_version": version})
    views = list(service.views(removed=True, limit=1000))
    assert len(views) == len(cases) == 240
    by_state: dict[str, list[str]] = {state: [] for state in STATES}
    for view in views:
        by_state[view.state].append(view.name)
    assert all(by_state.values()), "every state occurs"
    for state in STATES:
        found = service.views(state=state, limit=1000)
        assert [view.name for view in found] == by_state[state], state


def _running(connection: sa.Connection, job: str, values: dict[str, object]) -> None:
    row = {
        "job": job,
        "version": 1,
        "restart_version": 1,
        "config": a_config(job).to_json(),
        "generation": 1,
        "mapping": [0] * 8,
        "hold_generation": 0,
        "updated_ms": 0,
    }
    connection.execute(sa.insert(RUNNING).values(**row, **values))


def _plan(connection: sa.Connection, job: str) -> None:
    row = {
        "job": job,
        "id": 1,
        "birth": "b",
        "generation": 2,
        "target": None,
        "mapping": [],
        "expected_version": 1,
        "running_version": 0,
        "step": "commit",
        "attempts": 0,
        "error": "",
        "reason": "r",
        "abandoned": [],
        "held_ms": None,
        "started_ms": 0,
        "updated_ms": 0,
    }
    connection.execute(sa.insert(PLANS).values(**row))


def test_what_changed_since_a_version_is_named_once_and_never_missed(any_service: JobService) -> None:
    service = any_service
    seen = service.changed_since(0)
    assert seen.jobs == ()
    for name in ("demo.a", "demo.b", "demo.c"):
        a_job(service, name)
    first = service.changed_since(seen.version)
    assert first.jobs == ("demo.a", "demo.b", "demo.c") and first.version > seen.version
    assert service.changed_since(first.version).jobs == ()
    service.patch_layer("demo.b", "oncall", {"threads": 2}, **asked(ONCALL))
    service.remove("demo.c", **asked(DEVELOPER))
    second = service.changed_since(first.version)
    assert second.jobs == ("demo.b", "demo.c")
    service.restore("demo.c", **asked(DEVELOPER))
    assert service.changed_since(second.version).jobs == ("demo.c",)
