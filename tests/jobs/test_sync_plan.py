from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.jobs.config import SYNC_OF, JobConfig, Sync
from penstock.jobs.layers import LayerRow
from penstock.jobs.syncer.sync_plan import (
    ComplexSync,
    InSync,
    PlanStep,
    RunningView,
    SimpleSync,
    diff_json,
    plan_batch,
    plan_sync,
    steps_of,
    why_replace,
)
from penstock.jobs.tasks import map_partitions
from tests.builders import a_config, an_output

CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "state": st.sampled_from(["running", "paused", "stopped"]),
    "task_count": st.integers(1, 6),
    "partitions": st.sampled_from([6, 8]),
    "lineage": st.integers(0, 1),
    "outputs": st.sampled_from([[], [an_output()], [an_output(category="other")]]),
    "package": st.sampled_from([{"name": "demo", "version": v, "hash": "aa", "entry": "demo"} for v in "12"]),
    "arguments": st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(["1", "2"])),
    "labels": st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(["1", "2"])),
    "threads": st.integers(1, 2),
    "priority": st.integers(0, 1),
    "resources": st.sampled_from([{}, {"cpu": 2}, {"memory_mb": 64}]),
    "slo": st.sampled_from([{}, {"lag_s": 5}]),
}
configs = st.fixed_dictionaries({}, optional=CHANGES).map(lambda changes: a_config(**changes))


def view(config: JobConfig) -> RunningView:
    mapping = map_partitions(config.partitions, config.task_count)
    return RunningView(config=config, generation=1, mapping=mapping)


def running(**changes: Any) -> RunningView:
    return view(a_config(**changes))


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


@pytest.mark.parametrize(("old", "new"), [(1, True), (0, False), (1, 1.0), ([1], [True])])
def test_values_that_only_python_takes_for_the_same_differ(old: Any, new: Any) -> None:
    changed = diff_json({"policies": {"a": {"b": old}}}, {"policies": {"a": {"b": new}}})
    assert [change.path for change in changed] == ["policies.a.b"]


@pytest.mark.parametrize(
    "changes",
    [
        {"task_count": 2},
        {"partitions": 4},
        {"inputs": [{"category": "b"}]},
        {"outputs": [an_output(category="c")]},
        {"lineage": 1},
        {"state": "stopped"},
        {"state": "paused"},
    ],
)
def test_a_change_of_who_owns_what_needs_a_plan(changes: dict) -> None:
    sync = plan_sync(a_config(**changes, arguments={"also": "simple"}), running())
    assert isinstance(sync, ComplexSync)
    assert sync.target == a_config(**changes, arguments={"also": "simple"})
    assert {change.path for change in sync.changed} >= {next(iter(changes)), "arguments.also"}


def test_a_job_that_never_ran_starts_unless_it_is_stopped() -> None:
    first = plan_sync(a_config(task_count=2), None)
    assert isinstance(first, ComplexSync) and first.mapping == (0, 0, 0, 0, 1, 1, 1, 1)
    for state in ("stopped", "paused"):
        assert plan_sync(a_config(state=state), None) == InSync(reason=f"{state}, and never started")


def test_a_removed_job_is_planned_to_nothing() -> None:
    sync = plan_sync(None, running())
    assert isinstance(sync, ComplexSync) and sync.target is None
    assert isinstance(plan_sync(None, None), InSync)


@pytest.mark.parametrize("state", ["stopped", "paused"])
def test_a_stop_keeps_the_mapping(state: str) -> None:
    odd = RunningView(config=a_config(task_count=2), generation=1, mapping=(1, 0, 1, 0, 1, 0, 1, 0))
    sync = plan_sync(a_config(task_count=2, state=state), odd)
    assert isinstance(sync, ComplexSync) and sync.mapping == odd.mapping


@pytest.mark.parametrize("state", ["stopped", "paused"])
def test_the_steps_are_those_the_case_needs(state: str) -> None:
    runs, stops = a_config(), a_config(state=state)
    prepare, hold, confirm, commit = PlanStep
    assert steps_of(runs, has_old=True) == (prepare, hold, confirm, commit)
    assert steps_of(runs, has_old=False) == (prepare, commit)
    assert steps_of(stops, has_old=True) == steps_of(None, has_old=True) == (hold, confirm, commit)


def test_only_a_stop_a_removal_or_an_oncall_replaces_an_open_plan() -> None:
    target = a_config(task_count=2)
    old, new = (
        LayerRow(layer="oncall", precedence=30, body={}, version=version, actor="olga") for version in (4, 6)
    )
    newer = a_config(task_count=3)
    assert why_replace(target, 5, newer, [old]) is None
    assert why_replace(target, 5, a_config(task_count=2), [new]) is None
    assert why_replace(target, 5, newer, [new]) == "olga changed the oncall layer"
    assert why_replace(target, 5, a_config(state="stopped"), [old]) == "the job must stop"
    assert why_replace(target, 5, a_config(state="paused"), [old]) == "the job must pause"
    assert why_replace(target, 5, None, [old]) == "the job is removed"
    assert why_replace(None, 5, None, [new]) is None


def test_a_stop_replaces_a_pause_but_a_pause_waits_for_a_stop() -> None:
    paused, stopped = a_config(state="paused"), a_config(state="stopped")
    assert why_replace(paused, 5, stopped, []) == "the job must stop"
    assert why_replace(stopped, 5, paused, []) is None


@given(configs, configs)
def test_a_decision_settles(before: JobConfig, after: JobConfig) -> None:
    """Whatever ran and whatever is expected: once that is done, there is nothing to do."""
    sync = plan_sync(after, view(before))
    match sync:
        case InSync():
            assert before == after
        case SimpleSync(target=target):
            done = RunningView(config=target, generation=1, mapping=view(before).mapping)
            assert isinstance(plan_sync(after, done), InSync)
        case ComplexSync(target=target, mapping=mapping):
            assert target is not None
            done = RunningView(config=target, generation=2, mapping=mapping)
            assert isinstance(plan_sync(after, done), InSync)
            assert len(mapping) == after.partitions
            assert sorted(set(mapping)) == list(range(after.task_count)), "every task has something to do"


@given(configs, configs)
def test_a_plan_is_needed_exactly_when_a_complex_field_differs(before: JobConfig, after: JobConfig) -> None:
    complex_fields = [name for name, sync in SYNC_OF.items() if sync is Sync.COMPLEX]
    differs = any(getattr(before, name) != getattr(after, name) for name in complex_fields)
    assert isinstance(plan_sync(after, view(before)), ComplexSync) is differs


@given(configs, configs)
def test_a_simple_change_keeps_every_complex_field_and_names_what_differs(
    before: JobConfig, after: JobConfig
) -> None:
    sync = plan_sync(after, view(before))
    if isinstance(sync, SimpleSync):
        old, new = before.to_json(), after.to_json()
        named = {change.path.split(".")[0] for change in sync.changed}
        assert named == {name for name in new if old[name] != new[name]}
        assert sync.restarts is any(SYNC_OF[name] is Sync.RESTART for name in named)
        assert all(name in sync.reason for name in named)


@given(
    jobs=st.integers(1, 5000),
    part=st.floats(0, 1),
    took_ms=st.integers(0, 10_000),
    aim_ms=st.integers(1, 1000),
    jobs_max=st.integers(1, 5000),
)
def test_a_batch_follows_the_time_the_last_one_took(
    jobs: int, part: float, took_ms: int, aim_ms: int, jobs_max: int
) -> None:
    """One that took too long is followed by a smaller one, and none grows to more than twice its size."""
    written = max(1, int(jobs * part))
    following = plan_batch(jobs, written=written, took_ms=took_ms, aim_ms=aim_ms, jobs_max=jobs_max)
    assert 1 <= following <= min(jobs_max, 2 * jobs)
    if took_ms > aim_ms:
        assert following <= max(1, written * aim_ms // took_ms)
