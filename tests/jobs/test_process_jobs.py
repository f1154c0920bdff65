"""Claims about jobs of kind `process`: what they need, what they may not have, and that nothing fences them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import ConfigError, TaskActionFailed
from penstock.jobs.config import SYNC_OF, JobConfig, Sync, validate_config
from penstock.jobs.provision import plan_change
from penstock.jobs.syncer.sync_plan import ComplexSync, RunningView, SimpleSync, plan_sync
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.data_plane import StreamDataPlane
from penstock.streams.rows.memory import MemoryRows
from tests.builders import DEVELOPER, a_body, a_config, a_process
from tests.jobs.world import World


def a_process_config(**changes: Any) -> JobConfig:
    return validate_config("demo.tick", a_process(**changes))


def running(config: JobConfig) -> RunningView:
    return RunningView(config=config, generation=1, mapping=tuple(range(config.task_count)))


def test_a_command_is_all_it_needs():
    config = a_process_config()
    assert (config.partitions, config.task_count, config.inputs, config.package) == (1, 1, (), None)
    assert config.to_json()["command"] == ["sh", "-c", "echo {task}; sleep 600"]


@pytest.mark.parametrize(
    ("changes", "tasks", "partitions"),
    [
        ({"task_count": 5}, 5, 5),
        ({"task_count": 50}, 32, 32),
        ({"task_count": 5, "task_count_max": 3}, 3, 3),
        ({"task_count": 5, "partitions": 10}, 5, 10),
        ({"task_count": 5, "partitions": 2}, 2, 2),
    ],
)
def test_it_has_a_partition_per_task_unless_it_says_otherwise(
    changes: dict[str, Any], tasks: int, partitions: int
):
    config = a_process_config(**changes)
    assert (config.task_count, config.partitions) == (tasks, partitions)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"command": []}, "command: a process needs a program to run"),
        ({"command": [""]}, "command: a process needs a program to run"),
        ({"command": "sleep 1"}, "command: Input should be a list"),
        ({"command": ["sleep", 1]}, "command[1]"),
        ({"command": ["a\x00b"]}, "it contains a NUL character"),
        ({"command": ["echo", "{tsk}"]}, "command[1]: {tsk} is not one of "),
        ({"command": ["echo", "{tsk}"]}, "did you mean {task}?"),
        ({"command": ["{arguments.word}"]}, "{arguments.word} is not one of"),
        ({"environment": {"1X": "a"}}, "a variable name has only letters"),
        (
            {"environment": {"PENSTOCK_TASK": "a"}},
            "environment.PENSTOCK_TASK: names that start with PENSTOCK_",
        ),
        ({"environment": {"A": "two\nlines"}}, "environment.A"),
        ({"inputs": [{"category": "queries"}]}, "inputs: a job of kind `process` has no such field"),
        ({"plan": {"key": "query"}}, "plan: a job of kind `process` has no such field"),
        ({"package": a_body()["package"]}, "package: a job of kind `process` has no such field"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes: dict[str, Any], why: str):
    with pytest.raises(ConfigError) as caught:
        a_process_config(**changes)
    assert why in caught.value.why


@pytest.mark.parametrize("field", ["package", "partitions", "inputs", "outputs", "plan"])
def test_work_on_streams_still_needs_what_it_needed(field: str):
    body = a_body()
    del body[field]
    with pytest.raises(ConfigError, match="the config of job") as caught:
        validate_config("demo.count", body)
    assert f"{field}: Field required" in caught.value.why


def test_work_on_streams_has_no_command():
    with pytest.raises(ConfigError) as caught:
        a_config(command=["true"], environment={"A": "b"})
    assert "command: only a job of kind `process`" in caught.value.why
    assert "environment: only a job of kind `process`" in caught.value.why
    assert not {"command", "environment"} & set(a_config().to_json())


def test_a_new_command_is_a_simple_change_and_more_tasks_are_a_complex_one():
    assert SYNC_OF["command"] is SYNC_OF["environment"] is Sync.RESTART
    old = running(a_process_config())
    simple = plan_sync(a_process_config(command=["true"], environment={"A": "b"}), old)
    assert isinstance(simple, SimpleSync) and simple.restarts
    more = a_process_config(task_count=3)
    assert isinstance(plan_sync(more, old), ComplexSync)
    assert plan_change("demo.tick", more, old).state_kept, "a process has no state that could be lost"


def test_the_data_plane_makes_nothing_for_it_and_does_not_pretend_to_fence_it():
    log = MemoryLog()
    plane, config = StreamDataPlane(log, MemoryRows()), a_process_config()
    plane.prepare("demo.tick", "b", config)
    plane.retire("demo.tick", "b", config, None)
    plane.retire("demo.tick", "b", config, config)
    assert log.categories() == ()
    with pytest.raises(TaskActionFailed) as caught:
        plane.fence("demo.tick", "b", config, generation=2)
    assert "cannot be fenced" in caught.value.what and "containers confirm" in caught.value.fix


def test_a_plan_for_it_waits_for_the_containers_and_is_never_given_up():
    """Plan: tasks that do not stop, long past the patience; the plan stays open until they have."""
    world = World()
    fence = StreamDataPlane(MemoryLog(), MemoryRows()).fence
    world.tasks.fence = fence  # type: ignore[method-assign]
    world.service.create(
        "demo.tick",
        a_process(),
        birth="b",
        actor=DEVELOPER,
        reason="new",
        idempotency_key=None,
        now_ms=0,
    )
    world.settle()
    world.tasks.stuck.add("demo.tick")
    world.write("provisioner", "demo.tick", task_count=2)
    for _ in range(10):
        world.round()
    record = world.store.load(["demo.tick"])["demo.tick"]
    assert record.plan is not None and "cannot be fenced" in record.plan.error
    assert record.quarantine is None and record.old is not None and record.old.is_held
    world.tasks.stuck.clear()
    world.settle()
    assert world.store.load(["demo.tick"])["demo.tick"].plan is None
