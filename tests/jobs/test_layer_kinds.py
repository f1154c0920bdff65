"""A component gets a layer of its own, at any level, by configuration; and nobody else writes it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import ConfigError, NotFound, PenstockError, Refused
from penstock.core.sql_store import Database
from penstock.jobs.job_service import JobService
from penstock.jobs.job_store import EXPECTED_COUNTER, JobStore
from penstock.jobs.layers import DEFAULT_LAYERS
from tests.builders import ADMIN, DEVELOPER, ONCALL, SCALER, a_job
from tests.jobs.asking import asked, everything
from tests.jobs.world import World


def test_every_store_begins_with_the_four_layers_of_the_paper(any_service: JobService) -> None:
    assert any_service.layer_kinds() == DEFAULT_LAYERS
    assert [kind.name for kind in any_service.layer_kinds()] == ["base", "provisioner", "scaler", "oncall"]


def test_a_layer_in_between_and_one_on_top_work_end_to_end(any_service: JobService) -> None:
    """Plan: `doctor` between provisioner and scaler, `freeze` above oncall; each wins over what is below it."""
    service, job = any_service, a_job(any_service, task_count=2, partitions=32)
    service.add_layer_kind("doctor", 15, ["scaler"], **asked(ADMIN))
    service.add_layer_kind("freeze", 99, ["admin"], replaces_plan=True, **asked(ADMIN))
    names = ["base", "provisioner", "doctor", "scaler", "oncall", "freeze"]
    assert [kind.name for kind in service.layer_kinds()] == names
    expected = 2
    for layer, actor, task_count in (
        ("doctor", SCALER, 3),
        ("scaler", SCALER, 4),
        ("oncall", ONCALL, 5),
        ("freeze", ADMIN, 6),
    ):
        assert service.view(job).config["task_count"] == expected
        service.patch_layer(job, layer, {"task_count": task_count}, **asked(actor))
        expected = task_count
        view = service.view(job)
        assert (view.config["task_count"], view.provenance["task_count"].layer) == (expected, layer)
    assert [row.layer for row in service.view(job).layers] == names
    # Taken back from the top, each lets the next one through; what is below does not reach over it.
    service.patch_layer(job, "doctor", {"task_count": 30}, **asked(SCALER))
    for layer, actor, left in (
        ("freeze", ADMIN, 5),
        ("oncall", ONCALL, 4),
        ("scaler", SCALER, 30),
        ("doctor", SCALER, 2),
    ):
        service.clear(job, layer, **asked(actor))
        assert service.view(job).config["task_count"] == left


def test_only_the_roles_of_a_new_layer_may_write_it(any_service: JobService) -> None:
    service, job = any_service, a_job(any_service)
    service.add_layer_kind("doctor", 15, ["scaler"], **asked(ADMIN))
    for actor in (DEVELOPER, ONCALL, ADMIN):
        with pytest.raises(Refused, match="may not write the doctor layer"):
            service.patch_layer(job, "doctor", {"threads": 2}, **asked(actor))
    assert service.set_state(job, "paused", layer="doctor", **asked(SCALER)).effective == "paused"


def test_a_second_process_knows_a_new_layer_at_once(tmp_path: Any) -> None:
    one, two = Database(tmp_path / "store.db"), Database(tmp_path / "store.db")
    first, second = JobService(JobStore(one)), JobService(JobStore(two))
    job = a_job(first)
    second.patch_layer(job, "scaler", {"threads": 3}, **asked(SCALER))
    with pytest.raises(NotFound, match="no layer 'doctor'"):
        second.patch_layer(job, "doctor", {"threads": 2}, **asked(SCALER))
    first.add_layer_kind("doctor", 15, ["scaler"], **asked(ADMIN))
    second.patch_layer(job, "doctor", {"threads": 2}, **asked(SCALER))
    assert first.view(job).config["threads"] == 3
    one.close()
    two.close()


def test_adding_a_layer_is_audited_bumps_the_store_and_is_done_once_per_key(
    any_service: JobService, database: Database
) -> None:
    service = any_service
    before = service.changed_since(0).version
    service.add_layer_kind("doctor", 15, ["scaler"], **asked(ADMIN, "k", now_ms=5, why="we have one now"))
    after = everything(database)
    service.add_layer_kind("doctor", 15, ["scaler"], **asked(ADMIN, "k", now_ms=6, why="we have one now"))
    assert everything(database) == after
    (row,) = service.audit(subject="doctor")
    assert (row.action, row.actor, row.role, row.at_ms, row.reason) == (
        "layer_kind.added",
        "root",
        "admin",
        5,
        "we have one now",
    )
    assert row.data == {"precedence": 15, "writers": ["scaler"], "replaces_plan": False}
    assert service.changed_since(0).version == before + 1, EXPECTED_COUNTER


@pytest.mark.parametrize(
    ("kind", "actor", "error"),
    [
        (("doctor", 15, ["scaler"]), ONCALL, Refused),
        (("doctor", 15, ["scaler"]), DEVELOPER, Refused),
        (("oncall", 15, ["scaler"]), ADMIN, Refused),
        (("doctor", 20, ["scaler"]), ADMIN, Refused),
        (("doctor", -1_000_001, ["scaler"]), ADMIN, ConfigError),
        (("doctor", 10**30, ["scaler"]), ADMIN, ConfigError),
        (("doctor", 1.5, ["scaler"]), ADMIN, ConfigError),
        (("doctor", True, ["scaler"]), ADMIN, ConfigError),
        (("default", 15, ["scaler"]), ADMIN, ConfigError),
        (("../etc", 15, ["scaler"]), ADMIN, ConfigError),
        (("x" * 51, 15, ["scaler"]), ADMIN, ConfigError),
        (("döctor", 15, ["scaler"]), ADMIN, ConfigError),
        (("", 15, ["scaler"]), ADMIN, ConfigError),
        (("doctor", 15, []), ADMIN, ConfigError),
        (("doctor", 15, ["everybody"]), ADMIN, ConfigError),
        (("doctor", 15, "scaler"), ADMIN, ConfigError),
    ],
)
def test_a_layer_that_cannot_be_is_refused_and_nothing_changes(
    any_service: JobService, database: Database, kind: tuple[Any, ...], actor: Any, error: type[PenstockError]
) -> None:
    before = everything(database)
    with pytest.raises(error) as caught:
        any_service.add_layer_kind(*kind, **asked(actor))
    assert caught.value.what and caught.value.why and caught.value.fix
    assert everything(database) == before


def test_a_new_layer_that_replaces_plans_does_so() -> None:
    """A rescale is held and waits for its old tasks; then `freeze` asks for something else, and is not kept waiting."""
    world = World()
    world.service.add_layer_kind("freeze", 99, ["admin"], replaces_plan=True, **asked(ADMIN))
    world.service.add_layer_kind("doctor", 15, ["scaler"], **asked(ADMIN))
    job = a_job(world.service)
    world.settle()
    world.tasks.stuck.add(job)
    world.write("provisioner", task_count=3)
    world.round()
    plan = world.store.load([job])[job].plan
    assert plan is not None and plan.target is not None and plan.target["task_count"] == 3
    world.service.patch_layer(job, "doctor", {"task_count": 4}, **asked(SCALER))
    world.round_ms = 0
    world.round()
    waiting = world.store.load([job])[job].plan
    assert waiting is not None and waiting.id == plan.id
    world.service.patch_layer(job, "freeze", {"task_count": 5}, **asked(ADMIN))
    world.round()
    replaced = world.store.load([job])[job].plan
    assert replaced is not None and replaced.target is not None
    assert replaced.id != plan.id and replaced.target["task_count"] == 5


def test_a_layer_may_lie_below_all_others(any_service: JobService) -> None:
    service, job = any_service, a_job(any_service)
    service.add_layer_kind("house", -10, ["admin"], **asked(ADMIN))
    service.patch_layer(job, "house", {"threads": 3, "priority": 5}, **asked(ADMIN))
    service.patch_layer(job, "base", {"threads": 2}, **asked(ADMIN))
    view = service.view(job)
    assert (view.config["threads"], view.config["priority"]) == (2, 5)
    assert view.provenance["priority"].layer == "house"
