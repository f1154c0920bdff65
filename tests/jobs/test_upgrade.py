"""A database of the first version: its jobs, layers and history are there after the upgrade, and can be searched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from penstock.db.database import FIRST, Database
from penstock.jobs.job_service import JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.layers import DEFAULT_LAYERS
from tests.builders import ONCALL, a_body
from tests.core.test_migrate_store import _run_steps
from tests.jobs.asking import asked


@pytest.fixture
def old_place(place: Path | str | None, request: pytest.FixtureRequest) -> Path | str:
    """A place with the tables of the first version and two jobs, written as that version wrote them."""
    if place is None:
        pytest.skip("memory is made new each time")
    if isinstance(place, str):
        # Empty: the tables of the template are of this version.
        place = request.getfixturevalue("postgres").url("penstock_old")
        request.getfixturevalue("postgres").execute("DROP DATABASE IF EXISTS penstock_old")
        request.getfixturevalue("postgres").execute("CREATE DATABASE penstock_old")
        url = sa.make_url(place).set(drivername="postgresql+psycopg")
    else:
        place = place.with_name("old.db")  # `place` has the tables of this version
        url = sa.URL.create("sqlite", database=str(place))
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        _run_steps(connection, FIRST)
        for name, layers in {
            "demo.a": [(10, "provisioner", a_body("demo.a", labels={"team": "search", "tier": "1"}))],
            "demo.b": [
                (10, "provisioner", a_body("demo.b", labels={"team": "ads"})),
                (30, "oncall", {"state": "stopped", "labels": {"team": "search"}}),
            ],
        }.items():
            _insert(connection, "jobs", name=name, birth=f"birth-{name}", pipeline="demo", created_ms=1)
            for version, (precedence, layer, body) in enumerate(layers, start=1):
                row = {"job": name, "layer": layer, "precedence": precedence, "body": json.dumps(body)}
                row |= {"version": version, "actor": "dana", "reason": "new", "at_ms": version}
                _insert(connection, "layers", **row)
                _insert(connection, "layer_history", **row)
    engine.dispose()
    return place


def _insert(connection: sa.Connection, table: str, **values: Any) -> None:
    if table == "jobs":
        values |= {"deleted": False, "expected_version": 2 if values["name"] == "demo.b" else 1}
    columns = ", ".join(values)
    marks = ", ".join(f":{name}" for name in values)
    connection.execute(sa.text(f"INSERT INTO {table} ({columns}) VALUES ({marks})"), values)


def test_an_old_database_has_its_jobs_and_they_are_found_by_label_and_state(old_place: Path | str) -> None:
    database = Database(old_place)
    service = JobService(JobStore(database))
    assert service.layer_kinds() == DEFAULT_LAYERS
    assert [view.name for view in service.views(labels={"team": "search"})] == ["demo.a", "demo.b"]
    assert [view.name for view in service.views(labels={"team": "search", "tier": "1"})] == ["demo.a"]
    assert [view.name for view in service.views(state="stopped")] == ["demo.b"]
    assert [view.name for view in service.views(state="new")] == ["demo.a"]
    view = service.view("demo.b")
    # Which write changed what was not kept then: the layer's own write stands for all its values.
    assert (view.provenance["state"].version, view.provenance["state"].actor) == (2, "dana")
    assert [row.layer for row in service.layers_at("demo.b", 1)] == ["provisioner"]
    assert service.changed_since(0).jobs == ("demo.a", "demo.b")
    seen = service.changed_since(0).version
    assert service.rollback("demo.b", "oncall", to_version=1, expected_version=2, **asked(ONCALL)) == 3
    assert [view.name for view in service.views(labels={"team": "ads"})] == ["demo.b"]
    assert service.changed_since(seen).jobs == ("demo.b",)
    database.close()
