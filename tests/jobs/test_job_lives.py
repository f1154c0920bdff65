"""How a job comes, pauses, stops, goes and comes back: apply, set_state, remove, restore."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import ConfigError, NotFound, Refused, VersionConflict
from penstock.db.database import Database
from penstock.jobs.job_service import Applied, JobService, StateSet
from tests.builders import ADMIN, DEVELOPER, ONCALL, SCALER, a_body, a_job
from tests.jobs.asking import asked, everything
from tests.jobs.world import World


def apply(service: JobService, version: int | None = None, key: str | None = None, **changes: Any) -> Applied:
    return service.apply(
        "demo.count",
        a_body("demo.count", **changes),
        expected_version=version,
        birth="first",
        **asked(DEVELOPER, key),
    )


def test_apply_creates_what_is_not_there_and_replaces_what_is(any_service: JobService) -> None:
    service = any_service
    assert apply(service) == Applied(version=1, created=True)
    assert service.view("demo.count").birth == "first"
    assert apply(service, threads=2) == Applied(version=2, created=False)
    assert apply(service, version=2, task_count=2) == Applied(version=3, created=False)
    view = service.view("demo.count")
    # Replaced, not merged into: the threads are gone with the layer that said so.
    assert (view.config.threads, view.config.task_count) == (1, 2)


def test_apply_on_a_version_that_is_not_the_current_one_is_refused(
    any_service: JobService, database: Database
) -> None:
    service = any_service
    with pytest.raises(VersionConflict) as caught:
        apply(service, version=4)
    assert (caught.value.expected, caught.value.actual) == (4, 0)
    assert apply(service, version=0).created
    before = everything(database)
    for version in (0, 2):  # 0: there must be no such job
        with pytest.raises(VersionConflict) as caught:
            apply(service, version=version)
        assert caught.value.actual == 1
    assert everything(database) == before


def test_a_repeated_apply_gets_the_first_answer(any_service: JobService, database: Database) -> None:
    first = apply(any_service, key="k")
    before = everything(database)
    assert apply(any_service, key="k") == first == Applied(version=1, created=True)
    assert everything(database) == before


def test_a_plan_of_one_job_says_what_apply_would_do_and_writes_nothing(
    any_service: JobService, database: Database
) -> None:
    service = any_service
    before = everything(database)
    assert service.plan_job("demo.count", a_body("demo.count")).change == "new"
    for body in ({"task_cout": 1}, a_body("demo.other"), [1], a_body(threads=float("nan"))):
        with pytest.raises(ConfigError):
            service.plan_job("demo.count", body)  # type: ignore[arg-type]
    assert everything(database) == before
    apply(service)
    with pytest.raises(Refused, match="another pipeline"):
        service.plan_job("demo.count", a_body("demo.count", pipeline="other"))


def test_a_plan_of_one_job_compares_with_what_runs_under_all_layers() -> None:
    world = World()
    job = a_job(world.service)
    world.settle()
    world.write("oncall", threads=4)
    world.settle()
    before = world.outcome()
    change = world.service.plan_job(job, a_body(job, threads=2, task_count=3))
    # The oncall's word stands above the plan's.
    assert change.change == "complex" and [item.path for item in change.changed] == ["task_count"]
    assert world.service.plan_job(job, a_body(job, threads=2)).change == "unchanged"
    assert world.outcome() == before


@pytest.mark.parametrize(
    ("actor", "layer"), [(ONCALL, "oncall"), (ADMIN, "oncall"), (DEVELOPER, "provisioner")]
)
@pytest.mark.parametrize("state", ["paused", "stopped"])
def test_a_state_is_set_in_the_layer_of_whoever_asks_and_taken_back(
    any_service: JobService, actor: Any, layer: str, state: str
) -> None:
    service, job = any_service, a_job(any_service)
    assert service.set_state(job, state, **asked(actor)) == StateSet(version=2, layer=layer, effective=state)
    assert service.view(job).config.state == state
    done = service.set_state(job, "running", expected_version=2, **asked(actor))
    assert done == StateSet(version=3, layer=layer, effective="running")
    # Nothing is left behind that would have to be taken back later.
    assert "state" not in {row.layer: row.body for row in service.view(job).layers}[layer]


def test_running_is_said_aloud_only_where_something_below_says_otherwise(any_service: JobService) -> None:
    service, job = any_service, a_job(any_service)
    service.set_state(job, "stopped", **asked(DEVELOPER))
    done = service.set_state(job, "running", **asked(ONCALL))
    assert (done.layer, done.effective) == ("oncall", "running")
    assert {row.layer: row.body.get("state") for row in service.view(job).layers} == {
        "base": None,
        "provisioner": "stopped",
        "oncall": "running",
    }
    service.set_state(job, "running", **asked(DEVELOPER))
    service.set_state(job, "running", **asked(ONCALL))
    assert {row.layer: row.body.get("state") for row in service.view(job).layers} == {
        "base": None,
        "provisioner": None,
        "oncall": None,
    }


def test_a_higher_layer_is_not_talked_over_and_the_answer_says_so(any_service: JobService) -> None:
    service, job = any_service, a_job(any_service)
    service.set_state(job, "paused", **asked(ONCALL))
    done = service.set_state(job, "running", **asked(DEVELOPER))
    assert (done.layer, done.effective) == ("provisioner", "paused")
    assert "state" not in {row.layer: row.body for row in service.view(job).layers}["provisioner"]


def test_a_state_may_be_set_in_a_named_layer_by_its_writers_only(
    any_service: JobService, database: Database
) -> None:
    service, job = any_service, a_job(any_service)
    assert service.set_state(job, "paused", layer="scaler", **asked(SCALER)).layer == "scaler"
    before = everything(database)
    with pytest.raises(Refused, match="may not write the oncall layer"):
        service.set_state(job, "stopped", **asked(SCALER))
    with pytest.raises(Refused, match="may not write the oncall layer"):
        service.set_state(job, "stopped", layer="oncall", **asked(DEVELOPER))
    with pytest.raises(NotFound, match="no layer 'nope'"):
        service.set_state(job, "stopped", layer="nope", **asked(ADMIN))
    with pytest.raises(ConfigError, match="'asleep' is not a state"):
        service.set_state(job, "asleep", **asked(ONCALL))
    with pytest.raises(VersionConflict):
        service.set_state(job, "stopped", expected_version=1, **asked(ONCALL))
    assert everything(database) == before


def test_a_repeated_state_gets_the_first_answer(any_service: JobService, database: Database) -> None:
    service, job = any_service, a_job(any_service)
    first = service.set_state(job, "paused", **asked(ONCALL, "k"))
    service.set_state(job, "running", **asked(ONCALL))
    before = everything(database)
    assert service.set_state(job, "paused", **asked(ONCALL, "k")) == first
    assert everything(database) == before


def test_a_removed_job_is_a_state_not_a_loss(any_service: JobService) -> None:
    service = any_service
    job = a_job(service, threads=2, labels={"team": "search"})
    service.patch_layer(job, "oncall", {"threads": 3}, **asked(ONCALL))
    kept = service.history(job), service.layers_at(job, 2)
    with pytest.raises(VersionConflict):
        service.remove(job, expected_version=1, **asked(DEVELOPER))
    assert service.remove(job, expected_version=2, **asked(DEVELOPER, why="not needed")) == 3
    for attempt in (
        lambda: service.view(job),
        lambda: service.clear(job, "oncall", **asked(ONCALL)),
        lambda: service.set_state(job, "running", **asked(ONCALL)),
        lambda: service.remove(job, **asked(DEVELOPER)),
    ):
        with pytest.raises(NotFound, match="no job") as caught:
            attempt()
        assert caught.value.why == "it was removed" and "restore" in caught.value.fix
    assert (service.history(job), service.layers_at(job, 2)) == kept
    assert service.audit(subject=job)[0].reason == "not needed"
    view = service.view(job, removed=True)
    assert (view.state, view.removed, view.config.threads) == ("removed", True, 3)
    assert service.diff(job, old=1, new=2)[0].path == "threads"
    # And back, as it was, under its old birth.
    assert service.restore(job, expected_version=3, **asked(DEVELOPER)) == 4
    view = service.view(job)
    assert (view.birth, view.config.threads, view.state) == (f"birth-{job}", 3, "new")
    assert [item.name for item in service.views(labels={"team": "search"})] == [job]


def test_only_what_was_removed_can_be_restored(any_service: JobService, database: Database) -> None:
    service, job = any_service, a_job(any_service)
    before = everything(database)
    with pytest.raises(NotFound) as caught:
        service.restore(job, **asked(DEVELOPER))
    assert caught.value.why == "the job exists and is not removed"
    for name in ("demo.never", "../x", "a\x00b", ""):
        with pytest.raises((NotFound, ConfigError)):
            service.restore(name, **asked(DEVELOPER))
    assert everything(database) == before
    service.remove(job, **asked(DEVELOPER))
    before = everything(database)
    with pytest.raises(Refused, match="may not write the provisioner layer"):
        service.restore(job, **asked(ONCALL))
    with pytest.raises(VersionConflict):
        service.restore(job, expected_version=1, **asked(DEVELOPER))
    assert everything(database) == before


def test_what_is_still_being_removed_comes_back_only_when_it_is_gone() -> None:
    """Plan: a running job is removed; at each step of its removal a restore is refused, in the end it works."""
    world = World()
    job = a_job(world.service)
    world.settle()
    refusals = 0
    world.service.remove(job, **asked(DEVELOPER))
    for _ in range(10):
        try:
            world.service.restore(job, **asked(DEVELOPER))
            break
        except Refused as error:
            assert "still being removed" in error.what
            refusals += 1
            world.round()
    assert refusals > 1
    assert world.data.registered == set()
    world.settle()
    view = world.service.view(job)
    assert view.state == "running" and view.running is not None
    # The same life: the same birth, so the same rows; under a generation that was never used.
    assert (view.birth, view.running.birth, view.running.generation) == (f"birth-{job}", f"birth-{job}", 3)
    assert world.data.registered


def test_every_state_has_one_word() -> None:
    """Plan: one job goes through new, running, behind, changing, paused, stopped, quarantined and removed."""
    world = World()
    job = a_job(world.service)
    seen = [world.service.view(job).state]

    def look(expect: str) -> None:
        assert world.service.view(job).state == expect
        assert [view.name for view in world.service.views(state=expect)] == [job]
        seen.append(expect)

    world.settle()
    look("running")
    world.write("oncall", threads=2)
    look("behind")
    world.settle()
    world.tasks.stuck.add(job)
    world.write("oncall", state="paused")
    world.round()
    look("changing")
    world.tasks.stuck.clear()
    world.settle()
    look("paused")
    world.write("oncall", state="stopped")
    world.settle()
    look("stopped")
    world.data.refuse = lambda call, job, config: ConfigError("no") if call == "prepare" else None
    world.write("oncall", state="running")
    world.settle()
    look("quarantined")
    world.service.remove(job, **asked(DEVELOPER))
    assert world.service.views().items == ()
    assert [view.state for view in world.service.views(state="removed")] == ["removed"]
    assert seen[0] == "new"


def test_a_job_that_is_to_rest_from_the_start_is_in_that_state_at_once() -> None:
    world = World()
    for state in ("paused", "stopped"):
        job = a_job(world.service, f"demo.{state}", state=state)
        assert (world.service.view(job).state, world.service.view(job).is_in_sync) == (state, True)
        assert [view.name for view in world.service.views(state=state)] == [job]
    world.settle()
    assert [view.state for view in world.service.every_view()] == ["paused", "stopped"]
