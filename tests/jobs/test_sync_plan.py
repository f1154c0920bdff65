from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from penstock.jobs.layers import LayerRow
from penstock.jobs.sync_plan import (
    ComplexSync,
    InSync,
    PlanStep,
    RunningView,
    SimpleSync,
    map_partitions,
    plan_sync,
    steps_of,
    why_replace,
)
from tests.builders import a_config, an_output


def running(**changes: Any) -> RunningView:
    config = a_config(**changes)
    mapping = map_partitions(config.partitions, config.task_count)
    return RunningView(config=config.to_json(), generation=1, mapping=mapping)


@pytest.mark.parametrize(("partitions", "tasks"), [(1, 1), (8, 3), (8, 8), (7, 2), (100, 7)])
def test_partitions_are_mapped_evenly_in_contiguous_runs(partitions: int, tasks: int) -> None:
    mapping = map_partitions(partitions, tasks)
    sizes = Counter(mapping)
    assert sorted(sizes) == list(range(tasks)) and len(mapping) == partitions
    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert list(mapping) == sorted(mapping)


def test_what_runs_as_expected_is_in_sync() -> None:
    assert isinstance(plan_sync(a_config(), running()), InSync)


@pytest.mark.parametrize(
    ("changes", "restarts"),
    [
        ({"arguments": {"a": "1"}}, True),
        ({"resources": {"cpu": 2}}, True),
        ({"slo": {"lag_s": 5}}, False),
        ({"labels": {"a": "b"}}, False),
    ],
)
def test_a_simple_change_says_whether_tasks_restart(changes: dict, restarts: bool) -> None:
    sync = plan_sync(a_config(**changes), running())
    assert isinstance(sync, SimpleSync) and sync.restarts is restarts
    assert sync.changed[0].path.startswith(next(iter(changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"task_count": 2},
        {"partitions": 4},
        {"inputs": [{"category": "b"}]},
        {"outputs": [an_output(category="c")]},
        {"lineage": 1},
        {"state": "stopped"},
    ],
)
def test_a_change_of_who_owns_what_needs_a_plan(changes: dict) -> None:
    sync = plan_sync(a_config(**changes, arguments={"also": "simple"}), running())
    assert isinstance(sync, ComplexSync)
    assert sync.target == a_config(**changes, arguments={"also": "simple"}).to_json()
    assert {change.path for change in sync.changed} >= {next(iter(changes)), "arguments.also"}


def test_a_job_that_never_ran_starts_unless_it_is_stopped() -> None:
    first = plan_sync(a_config(task_count=2), None)
    assert isinstance(first, ComplexSync) and first.mapping == (0, 0, 0, 0, 1, 1, 1, 1)
    assert isinstance(plan_sync(a_config(state="stopped"), None), InSync)


def test_a_removed_job_is_planned_to_nothing() -> None:
    sync = plan_sync(None, running())
    assert isinstance(sync, ComplexSync) and sync.target is None
    assert isinstance(plan_sync(None, None), InSync)


def test_a_stop_keeps_the_mapping() -> None:
    odd = RunningView(config=a_config(task_count=2).to_json(), generation=1, mapping=(1, 0, 1, 0, 1, 0, 1, 0))
    sync = plan_sync(a_config(task_count=2, state="stopped"), odd)
    assert isinstance(sync, ComplexSync) and sync.mapping == odd.mapping


def test_the_steps_are_those_the_case_needs() -> None:
    runs, stops = a_config().to_json(), a_config(state="stopped").to_json()
    prepare, hold, confirm, commit = PlanStep
    assert steps_of(runs, has_old=True) == (prepare, hold, confirm, commit)
    assert steps_of(runs, has_old=False) == (prepare, commit)
    assert steps_of(stops, has_old=True) == steps_of(None, has_old=True) == (hold, confirm, commit)


def test_only_a_stop_a_removal_or_an_oncall_replaces_an_open_plan() -> None:
    target = a_config(task_count=2).to_json()
    old, new = (
        LayerRow(layer="oncall", precedence=30, body={}, version=version, actor="olga") for version in (4, 6)
    )
    newer = a_config(task_count=3)
    assert why_replace(target, 5, newer, [old]) is None
    assert why_replace(target, 5, a_config(task_count=2), [new]) is None
    assert why_replace(target, 5, newer, [new]) == "olga changed the oncall layer"
    assert why_replace(target, 5, a_config(state="stopped"), [old]) == "the job is to stop"
    assert why_replace(target, 5, None, [old]) == "the job is removed"
    assert why_replace(None, 5, None, [new]) is None
