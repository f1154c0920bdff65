"""A paused job: no tasks, everything else in its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.errors import CorruptData
from penstock.jobs.running_store import RunningRow
from penstock.jobs.tasks import task_specs
from tests.builders import DEVELOPER, a_job, an_output
from tests.jobs.world import World, producers_of


@pytest.fixture
def world(place: Path | str | None) -> Iterator[World]:
    world = World(place)
    a_job(world.service, task_count=2)
    world.settle()
    yield world
    world.database.close()


def running(world: World) -> RunningRow:
    row = world.store.running.row("demo.count")
    assert row is not None
    return row


def test_a_paused_job_has_no_tasks_and_keeps_mapping_and_producers(world: World) -> None:
    before, registered = running(world), set(world.data.registered)
    world.write("oncall", state="paused")
    world.round()
    held = running(world)
    assert held.state == "running" and held.is_held, "the tasks are held before the job counts as paused"
    world.settle()
    row = running(world)
    assert (row.state, row.is_served, task_specs(row)) == ("paused", False, ())
    assert row.mapping == before.mapping and world.data.registered == registered
    assert [call for call, _ in world.data.calls].count("prepare") == 1, "nothing new is prepared for a pause"
    assert world.service.view("demo.count").is_in_sync


def test_a_resumed_job_goes_on_under_a_new_generation(world: World) -> None:
    before, registered = running(world), set(world.data.registered)
    world.write("oncall", state="paused")
    world.settle()
    paused = running(world)
    world.write("oncall", state=None)
    world.settle()
    row = running(world)
    assert row.is_served and row.generation > paused.generation > before.generation
    assert row.mapping == before.mapping and world.data.registered == registered


def test_a_pause_is_never_given_up_and_its_tasks_stay_held(world: World) -> None:
    world.tasks.stuck.add("demo.count")
    world.data.refuse = lambda call, job, config: CorruptData("no") if call == "fence" else None
    world.write("oncall", state="paused")
    for _ in range(10):
        world.round()
        assert not running(world).is_served
    assert world.service.view("demo.count").quarantine is None
    world.tasks.stuck.clear()
    world.settle()
    assert running(world).state == "paused"


def test_a_paused_job_can_be_changed_and_comes_back_changed(world: World) -> None:
    world.write("oncall", state="paused")
    world.settle()
    world.write("provisioner", task_count=4, **{"package.version": "2"})
    world.settle()
    row = running(world)
    assert (row.state, row.config.task_count, row.config.package.version) == ("paused", 4, "2")
    world.write("oncall", state=None)
    world.settle()
    row = running(world)
    assert row.is_served and sorted(set(row.mapping)) == [0, 1, 2, 3]


def test_a_paused_job_can_be_stopped_and_removed(world: World) -> None:
    world.write("oncall", state="paused")
    world.settle()
    world.write("oncall", state="stopped")
    world.settle()
    assert running(world).state == "stopped"
    world.write("oncall", state="paused")
    world.settle()
    world.service.remove("demo.count", actor=DEVELOPER, reason="gone", idempotency_key=None, now_ms=0)
    world.settle()
    assert running(world).state == "removed" and world.data.registered == set()


def test_a_job_that_is_born_paused_starts_when_it_is_resumed(world: World) -> None:
    job = a_job(world.service, "demo.later", state="paused")
    world.settle()
    assert world.store.running.row(job) is None and world.service.view(job).is_in_sync
    world.write("provisioner", job=job, state="running")
    world.settle()
    row = world.store.running.row(job)
    assert row is not None and row.is_served


def test_a_pause_replaces_an_open_plan_and_what_it_prepared_is_retired(world: World) -> None:
    world.tasks.stuck.add("demo.count")
    world.write("provisioner", outputs=[an_output(category="other")])
    world.round()
    world.write("provisioner", state="paused", outputs=[an_output()])
    world.tasks.stuck.clear()
    world.settle()
    row = running(world)
    assert row.state == "paused" and world.data.registered == producers_of(row.birth, row.config)


def test_the_plan_says_what_a_pause_means(world: World) -> None:
    world.tasks.stuck.add("demo.count")
    world.write("oncall", state="paused")
    world.round()
    plan = world.service.view("demo.count").plan
    assert plan is not None
    assert plan.reason.startswith("state changed (running to paused: its tasks stop; partitions, state and")
