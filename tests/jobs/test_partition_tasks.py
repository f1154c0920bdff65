"""Which task reads which partition, as a layer asks for it: what is refused, what is ignored, what a plan does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError, Refused
from penstock.jobs.config import JobConfig, validate_config
from penstock.jobs.job_service import Actor
from penstock.jobs.provision import plan_change
from penstock.jobs.running_store import RunningRow
from penstock.jobs.syncer.sync_plan import (
    ComplexSync,
    InSync,
    RunningView,
    SimpleSync,
    plan_mapping,
    plan_sync,
)
from penstock.jobs.tasks import (
    describe_moves,
    ignored_mapping_reason,
    map_partitions,
    mapping_problem,
    requested_mapping,
    task_specs,
)
from tests.builders import ADMIN, DEVELOPER, ONCALL, SCALER, a_body, a_config, a_job, a_process
from tests.jobs.world import World

JOB = "demo.count"
EVEN = (0, 0, 0, 0, 1, 1, 1, 1)
OTHER = (0, 1, 1, 0, 1, 1, 1, 0)


# --- what fits


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ((0, 1, 1, 0), ""),
        ((0, 1, 1), "3 entries, and the job has 4 partitions"),
        ((0, 1, 2, 0), "task 2, and the job has tasks 0 to 1"),
        ((1, 1, 1, 1), "task 0 of 2 would have no partition"),
    ],
)
def test_a_deal_fits_where_every_partition_and_every_task_is_in_it(asked: tuple[int, ...], why: str):
    found = mapping_problem(asked, partitions=4, task_count=2)
    assert why in found and bool(found) == bool(why)


@given(st.integers(1, 40), st.data())
def test_the_ordinary_deal_always_fits(partitions: int, data: st.DataObject):
    tasks = data.draw(st.integers(1, partitions))
    assert mapping_problem(map_partitions(partitions, tasks), partitions=partitions, task_count=tasks) == ""


@pytest.mark.parametrize(
    "bad", [[-1] * 8, [0.0] * 8, ["0"] * 8, [True] * 8, 3, {"0": 1}, [0] * 5000, [10**9] * 8]
)
def test_what_is_no_list_of_tasks_is_refused_by_path(bad: Any):
    with pytest.raises(ConfigError) as caught:
        validate_config(JOB, a_body(partition_tasks=bad))
    assert "partition_tasks" in caught.value.why and caught.value.fix


def test_it_is_left_out_of_the_stored_form_where_nobody_asks():
    assert "partition_tasks" not in a_config().to_json()
    config = a_config(task_count=2, partition_tasks=[*OTHER])
    assert config.to_json()["partition_tasks"] == [*OTHER]
    assert JobConfig.from_stored(config.to_json()) == config
    assert requested_mapping(config) == OTHER and ignored_mapping_reason(config) == ""


def test_moves_are_told_shortly():
    assert describe_moves(EVEN, EVEN) == ""
    assert (
        describe_moves((0, 0, 1, 1), (1, 0, 1, 0))
        == "partition 0 from task 0 to 1, partition 3 from task 1 to 0"
    )
    assert describe_moves((0, 0, 1), (0, 1)) == ""
    many = describe_moves(tuple(range(64)), (*range(1, 64), 0))
    assert len(many) < 500 and many.endswith("and 58 more")
    half = describe_moves((0,) * 1000 + (1,), (0,) + (1,) * 1000)
    assert half == "partitions 1, 2, 3, 4, 5, 6, 7, 8 and 991 more from task 0 to 1"


# --- what a plan makes of it


def running(config: JobConfig, mapping: tuple[int, ...] | None = None) -> RunningView:
    return RunningView(config=config, generation=1, mapping=mapping or plan_mapping(config, None))


def test_another_deal_is_a_plan_and_nothing_else_changes():
    before, after = a_config(task_count=2), a_config(task_count=2, partition_tasks=[*OTHER])
    sync = plan_sync(after, running(before))
    assert isinstance(sync, ComplexSync) and sync.mapping == OTHER
    assert "partitions 1, 2 from task 0 to 1" in sync.reason
    change = plan_change(JOB, after, running(before))
    assert change.change == "complex" and change.state_kept and change.restarts == (f"{JOB}/0", f"{JOB}/1")
    assert isinstance(plan_sync(after, running(after)), InSync)
    back = plan_sync(before, running(after))
    assert isinstance(back, ComplexSync) and back.mapping == EVEN


def test_a_job_starts_with_the_deal_that_is_asked_for():
    first = plan_sync(a_config(task_count=2, partition_tasks=[*OTHER]), None)
    assert isinstance(first, ComplexSync) and first.mapping == OTHER


@pytest.mark.parametrize(
    ("changes", "mapping"),
    [
        ({"task_count": 3}, (0, 0, 0, 1, 1, 1, 2, 2)),
        ({"task_count": 1}, (0,) * 8),
        ({"partitions": 4}, (0, 0, 1, 1)),
    ],
)
def test_a_deal_that_no_longer_fits_is_ignored_and_said_to_be(changes: Any, mapping: tuple[int, ...]):
    asked = {"task_count": 2, "partition_tasks": [*OTHER]}
    sync = plan_sync(a_config(**{**asked, **changes}), running(a_config(**asked)))
    assert isinstance(sync, ComplexSync) and sync.mapping == mapping
    assert "partition_tasks is ignored: it" in sync.reason or "would have no partition" in sync.reason


def test_other_plans_keep_the_deal():
    asked = {"task_count": 2, "partition_tasks": [*OTHER]}
    sync = plan_sync(a_config(**asked, lineage=1), running(a_config(**asked)))
    assert isinstance(sync, ComplexSync) and sync.mapping == OTHER and "from task" not in sync.reason
    assert isinstance(plan_sync(a_config(**asked, threads=2), running(a_config(**asked))), SimpleSync)


def test_an_ignored_deal_does_not_disturb_a_mapping_that_stands():
    odd = (1, 1, 0, 0, 2, 2, 0, 0)
    asked = {"task_count": 3, "partition_tasks": [*OTHER]}
    sync = plan_sync(a_config(**asked, lineage=1), running(a_config(**asked), odd))
    assert isinstance(sync, ComplexSync) and sync.mapping == odd


# --- who may ask, and what layers make of it


@pytest.fixture
def world(place: Path | str | None) -> Iterator[World]:
    world = World(place)
    a_job(world.service, task_count=2)
    world.settle()
    yield world
    world.database.close()


def row_of(world: World) -> RunningRow:
    row = world.store.running.row(JOB)
    assert row is not None
    return row


def write(world: World, actor: Actor, layer: str, **changes: Any) -> int:
    return world.service.patch_layer(
        JOB, layer, changes, actor=actor, reason="test", idempotency_key=None, now_ms=world.now_ms
    )


@pytest.mark.parametrize(
    ("actor", "layer"),
    [(SCALER, "scaler"), (ONCALL, "oncall"), (DEVELOPER, "provisioner"), (ADMIN, "base")],
)
def test_whoever_may_write_a_layer_may_ask_for_a_deal_there(world: World, actor: Actor, layer: str):
    before = row_of(world)
    write(world, actor, layer, partition_tasks=[*OTHER])
    world.settle()
    after = row_of(world)
    assert (after.mapping, after.generation) == (OTHER, before.generation + 1)
    assert [spec.partitions for spec in task_specs(after)] == [(0, 3, 7), (1, 2, 4, 5, 6)]
    assert world.data.fenced == {}, "it was stopped, confirmed and started, and nobody was shut out"
    write(world, actor, layer, partition_tasks=None)
    world.settle()
    assert row_of(world).mapping == EVEN


def test_the_scaler_may_not_ask_elsewhere_and_others_not_in_its_layer(world: World):
    for actor, layer in ((SCALER, "oncall"), (SCALER, "provisioner"), (DEVELOPER, "scaler")):
        with pytest.raises(Refused):
            write(world, actor, layer, partition_tasks=[*OTHER])
    assert row_of(world).mapping == EVEN


@pytest.mark.parametrize("bad", [[0, 1], [0] * 8, [0, 1, 2, 0, 1, 2, 0, 1]])
def test_who_asks_for_what_does_not_fit_is_told(world: World, bad: list[int]):
    version = world.service.view(JOB).expected_version
    for actor, layer in ((SCALER, "scaler"), (ONCALL, "oncall"), (DEVELOPER, "provisioner")):
        with pytest.raises(ConfigError) as caught:
            write(world, actor, layer, partition_tasks=bad)
        assert (
            caught.value.why.startswith("partition_tasks: ") and "each task at least once" in caught.value.fix
        )
    assert world.service.view(JOB).expected_version == version
    # With the number of tasks it is for, in one write, it fits.
    write(world, ONCALL, "oncall", task_count=3, partition_tasks=[0, 1, 2, 0, 1, 2, 0, 1])
    world.settle()
    assert row_of(world).mapping == (0, 1, 2, 0, 1, 2, 0, 1)


def test_a_plan_refuses_what_a_write_would(world: World):
    with pytest.raises(ConfigError) as caught:
        world.service.create(
            "demo.other",
            a_body("demo.other", task_count=2, partition_tasks=[0, 1]),
            birth="b",
            actor=DEVELOPER,
            reason="new",
            idempotency_key=None,
            now_ms=0,
        )
    assert "2 entries, and the job has 8 partitions" in caught.value.why


def test_nobody_is_stopped_by_the_scalers_deal(world: World):
    """Plan: oncall and the provisioner change tasks and partitions under it; it is back when it fits again."""
    write(world, SCALER, "scaler", partition_tasks=[*OTHER])
    world.settle()
    write(world, ONCALL, "oncall", task_count=4)
    world.settle()
    assert row_of(world).mapping == (0, 0, 1, 1, 2, 2, 3, 3)
    view = world.service.view(JOB)
    assert (view.problem, view.state) == ("", "running")
    assert ignored_mapping_reason(view.config) == "task 2 of 4 would have no partition"
    write(world, ONCALL, "oncall", task_count=None)
    world.settle()
    assert row_of(world).mapping == OTHER
    write(world, DEVELOPER, "provisioner", partitions=6)
    world.settle()
    assert row_of(world).mapping == (0, 0, 0, 1, 1, 1)
    write(world, DEVELOPER, "provisioner", task_count=3)
    world.settle()
    assert row_of(world).mapping == (0, 0, 1, 1, 2, 2)


def test_a_deal_below_somebody_elses_number_of_tasks_waits_for_it(world: World):
    """Plan: oncall holds three tasks. The provisioner's deal for two is written, and counts when they let go."""
    write(world, ONCALL, "oncall", task_count=3)
    write(world, DEVELOPER, "provisioner", partition_tasks=[*OTHER])
    world.settle()
    assert row_of(world).mapping == (0, 0, 0, 1, 1, 1, 2, 2)
    write(world, ONCALL, "oncall", task_count=None)
    world.settle()
    assert row_of(world).mapping == OTHER


def test_a_crash_at_any_point_of_a_new_deal_ends_as_if_there_was_none():
    """Plan: crash at each point in turn; the same is durable as without a crash."""
    world = World()
    a_job(world.service, task_count=2)
    world.settle()
    write(world, SCALER, "scaler", partition_tasks=[*OTHER])
    restore = world.save()
    world.fail_at(0)
    world.settle()
    wanted, points = row_of(world), world.points
    assert wanted.mapping == OTHER and points > 5
    for number in range(1, points + 1):
        restore()
        world.fail_at(number)
        world.settle()
        world.fail_at(0)
        found = row_of(world)
        assert (found.mapping, found.config, found.is_served) == (wanted.mapping, wanted.config, True), number
        assert found.generation >= wanted.generation
    world.database.close()


def test_a_process_may_have_a_deal_too():
    body = a_process(task_count=2, partitions=5, partition_tasks=[1, 1, 0, 1, 1])
    sync = plan_sync(validate_config("demo.tick", body), None)
    assert isinstance(sync, ComplexSync) and sync.mapping == (1, 1, 0, 1, 1)
