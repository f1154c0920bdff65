"""A component gets a layer of its own, at any level, by configuration; and nobody else writes it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import ConfigError, NotFound, PenstockError, Refused
from penstock.db.database import Database
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.job_store import EXPECTED_COUNTER, JobStore
from penstock.jobs.layers import DEFAULT_LAYERS
from tests.builders import ADMIN, DEVELOPER, ONCALL, SCALER, a_job, a_process
from tests.jobs.asking import asked, everything
from tests.jobs.world import World


@pytest.fixture
def service() -> JobService:
    return JobService(JobStore(Database(None)))


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
        assert service.view(job).config.task_count == expected
        service.patch_layer(job, layer, {"task_count": task_count}, **asked(actor))
        expected = task_count
        view = service.view(job)
        assert (view.config.task_count, view.provenance["task_count"].layer) == (expected, layer)
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
        assert service.view(job).config.task_count == left


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
    assert first.view(job).config.threads == 3
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
    assert plan is not None and plan.target is not None and plan.target.task_count == 3
    world.service.patch_layer(job, "doctor", {"task_count": 4}, **asked(SCALER))
    world.round_ms = 0
    world.round()
    waiting = world.store.load([job])[job].plan
    assert waiting is not None and waiting.id == plan.id
    world.service.patch_layer(job, "freeze", {"task_count": 5}, **asked(ADMIN))
    world.round()
    replaced = world.store.load([job])[job].plan
    assert replaced is not None and replaced.target is not None
    assert replaced.id != plan.id and replaced.target.task_count == 5


def test_a_layer_may_lie_below_all_others(any_service: JobService) -> None:
    service, job = any_service, a_job(any_service)
    service.add_layer_kind("house", -10, ["admin"], **asked(ADMIN))
    service.patch_layer(job, "house", {"threads": 3, "priority": 5}, **asked(ADMIN))
    service.patch_layer(job, "base", {"threads": 2}, **asked(ADMIN))
    view = service.view(job)
    assert (view.config.threads, view.config.priority) == (2, 5)
    assert view.provenance["priority"].layer == "house"


CODE_FIELDS: tuple[dict[str, Any], ...] = (
    {"command": ["sh", "-c", "id"]},
    {"package": {"name": "demo", "version": "2", "hash": "0" * 64, "entry": "other"}},
    {"package.entry": "os"},
    {"environment": {"LD_PRELOAD": "evil.so"}},
    {"environment.PATH": "bin"},
    {"arguments.script": "id"},
    {"plan.computation": {"class": "Other"}},
    {"policies.mine.code": f"{'0' * 64}/mine.py:Mine"},
    {"inputs": [{"category": "secrets"}]},
    {"lineage": 1},
)


@pytest.mark.parametrize(("layer", "actor"), [("oncall", ONCALL), ("scaler", SCALER)])
@pytest.mark.parametrize("kind", ["stateful", "process"])
@pytest.mark.parametrize("changes", CODE_FIELDS, ids=str)
def test_who_tunes_a_job_cannot_change_what_it_runs(
    service: JobService, layer: str, actor: Actor, kind: str, changes: dict[str, Any]
) -> None:
    """The fields that would run somebody's code are refused, and the error says who may write them."""
    if kind == "process":
        body = a_process("demo.tick", arguments={"script": "true"})
        service.apply("demo.tick", body, expected_version=None, birth="b", **asked(DEVELOPER))
        job = "demo.tick"
    else:
        job = a_job(service, kind="stateful", plan={"computation": {"class": "Count"}})
    before = everything(service._store.database)
    # What does not fit this kind of job is refused for that, whoever asks.
    with pytest.raises(PenstockError) as caught:
        service.patch_layer(job, layer, changes, **asked(actor))
    if not isinstance(caught.value, ConfigError):
        assert isinstance(caught.value, Refused) and "may not change" in caught.value.what
        assert "admin and developer" in caught.value.why and "developer" in caught.value.fix
    else:
        with pytest.raises(ConfigError):
            service.patch_layer(job, layer, changes, **asked(ADMIN))
    assert everything(service._store.database) == before


TUNED: tuple[dict[str, Any], ...] = (
    {"task_count": 3},
    {"resources.memory_mb": 2048},
    {"threads": 2},
    {"trigger_ms": 500},
    {"batch_rows_max": 10},
    {"state": "paused"},
)


@pytest.mark.parametrize("changes", TUNED, ids=str)
def test_what_scaler_and_oncall_need_they_may_still_write(
    service: JobService, changes: dict[str, Any]
) -> None:
    job = a_job(service)
    service.patch_layer(job, "scaler", changes, **asked(SCALER))
    service.patch_layer(job, "oncall", changes, **asked(ONCALL))


@pytest.mark.parametrize(
    "changes",
    [
        {"poison": "skip"},
        {"scaler.enabled": False},
        {"scaler.generation": "reactive"},
        {"policies.stragglers.z_min": 5},
        {"slo.lag_s": 30},
        {"task_count_max": 4},
        {"priority": 7},
        {"backlog": "leave"},
        {"isolation": "process", "resources.memory_mb": 2048},
    ],
    ids=str,
)
def test_oncall_overrides_what_the_documents_promise_and_the_scaler_does_not(
    service: JobService, changes: dict[str, Any]
) -> None:
    job = a_job(service)
    service.patch_layer(job, "oncall", changes, **asked(ONCALL))
    with pytest.raises(Refused, match="may not change"):
        service.patch_layer(job, "scaler", changes, **asked(SCALER))


def test_what_an_oncall_wrote_before_there_were_lists_can_be_taken_back(service: JobService) -> None:
    """Taking back is no way to run code: what holds then was set below. A rollback to it would be one."""
    job = a_job(service, kind="stateful", plan={"computation": {"class": "Count"}})
    at = service.patch_layer(
        job, "oncall", {"arguments.x": "1", "package.entry": "fixed", "threads": 2}, **asked(ADMIN)
    )
    service.patch_layer(job, "oncall", {"threads": 3}, **asked(ONCALL))  # what stays is not a change
    service.patch_layer(job, "oncall", {"arguments.x": None}, **asked(ONCALL))
    service.clear(job, "oncall", **asked(ONCALL))
    assert service.view(job).config.package.entry == "demo"
    with pytest.raises(Refused, match="may not change `arguments`"):
        service.rollback(job, "oncall", to_version=at, expected_version=None, **asked(ONCALL))
    service.rollback(job, "oncall", to_version=at, expected_version=None, **asked(ADMIN))


def test_a_layer_with_a_list_of_fields_takes_only_these(any_service: JobService) -> None:
    service, job = any_service, a_job(any_service)
    service.add_layer_kind("night", 25, ["oncall", "developer"], fields=["task_count"], **asked(ADMIN))
    (night,) = (kind for kind in service.layer_kinds() if kind.name == "night")
    assert night.fields == {"task_count"}
    service.patch_layer(job, "night", {"task_count": 1}, **asked(ONCALL))
    for actor, changes in ((ONCALL, {"threads": 2}), (DEVELOPER, {"package.entry": "other"})):
        with pytest.raises(Refused, match="the night layer may not contain") as caught:
            service.patch_layer(job, "night", changes, **asked(actor))
        assert "may only contain task_count" in caught.value.why


def test_a_layer_that_lists_no_fields_takes_those_of_its_writers(any_service: JobService) -> None:
    service, job = any_service, a_job(any_service)
    service.add_layer_kind("doctor", 15, ["scaler"], **asked(ADMIN))
    service.patch_layer(job, "doctor", {"threads": 2}, **asked(SCALER))
    with pytest.raises(Refused, match="scaler may not change `package`") as caught:
        service.patch_layer(job, "doctor", {"package.entry": "other"}, **asked(SCALER))
    assert caught.value.fix.startswith("leave it out; a developer changes the job itself")


@pytest.mark.parametrize(
    ("writers", "fields", "why"),
    [
        (["reader"], [], "the role reader may set no field"),
        (["container"], [], "the role container may set no field"),
        (["oncall"], ["task_cout"], "did you mean task_count?"),
        (["oncall", "scaler"], ["command"], "`command` may be set by admin, developer"),
    ],
)
def test_a_layer_that_nobody_could_use_is_refused(
    service: JobService, writers: list[str], fields: list[str], why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        service.add_layer_kind("odd", 15, writers, fields=fields, **asked(ADMIN))
    assert why in caught.value.why
