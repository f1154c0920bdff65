from __future__ import annotations

import pytest

from penstock.fleet.shard_load import reserved_loads, shard_of
from penstock.jobs.tasks import TaskSpec, needs_restart, task_specs
from tests.fleet.harness import Running, a_spec


def test_each_task_reads_the_partitions_that_the_mapping_gives_it():
    specs = task_specs(Running(job="a", mapping=(0, 1, 0, 1, 1), generation=7, restart_version=9))
    assert [(s.task_id, s.partitions, s.generation, s.running_version) for s in specs] == [
        ("a/0", (0, 2), 7, 9),
        ("a/1", (1, 3, 4), 7, 9),
    ]


@pytest.mark.parametrize(
    ("row", "count"),
    [
        (Running(generation=3, hold_generation=2), 1),  # an old hold
        (Running(generation=3, hold_generation=3), 0),
        (Running(generation=3, hold_generation=4), 0),
        (Running(state="stopped"), 0),
        (Running(state="removed"), 0),
        (Running(mapping=()), 0),
    ],
)
def test_a_job_that_is_held_stopped_or_removed_has_no_tasks(row, count):
    assert len(task_specs(row)) == count


@pytest.mark.parametrize(
    ("change", "restarts"),
    [
        ({"config": {"slo": {"lag_s": 5}}, "running_version": 2}, False),
        ({"config": {"labels": {"x": "y"}, "priority": 1}, "running_version": 2}, False),
        ({"config": {"threads": 2}, "running_version": 2}, True),
        ({"generation": 2}, True),
        ({"partitions": (0, 1)}, True),
        ({"birth": "b2"}, True),
        ({}, False),
    ],
)
def test_only_what_a_task_reads_restarts_it(change, restarts):
    assert needs_restart(a_spec(), a_spec(**change)) is restarts


def test_a_spec_survives_the_wire():
    spec = a_spec("a/3", partitions=(1, 2), config={"threads": 2})
    assert TaskSpec.from_json(spec.to_json()) == spec


def test_the_shard_of_a_task_never_changes():
    # Another hash would move every task of every running installation.
    assert [shard_of(f"zeitgeist.count/{n}", 64) for n in range(4)] == [43, 41, 15, 10]
    assert {shard_of(f"job/{n}", 8) for n in range(200)} == set(range(8))


def test_the_load_of_a_shard_is_the_cpu_its_tasks_reserve():
    jobs = [((3, 5), (2.5, 100.0)), ((), (9.0, 9.0)), ((5,), (1.0, 50.0))]
    assert reserved_loads(jobs) == {3: (1, (2.5, 100.0)), 5: (2, (3.5, 150.0))}
    assert reserved_loads([]) == {}
