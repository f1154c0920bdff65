from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from penstock.container.task_manager import ShardTaskIndex
from penstock.db.database import Database
from penstock.fleet.shard_load import shard_of
from penstock.fleet.task_service import RunningSource, TaskList, TaskService, merge_list
from penstock.jobs.running_store import RunningStore
from tests.fleet.harness import MemoryJobs, a_list, a_spec


def test_a_delta_holds_the_jobs_that_changed_and_those_that_lost_their_tasks():
    jobs = MemoryJobs()
    service = TaskService(jobs)
    for job in ("a", "b", "c"):
        jobs.put(job)
    since = service.snapshot().version
    jobs.put("b", mapping=(0, 1), generation=2)
    jobs.put("c", hold_generation=1)
    delta = service.snapshot(since)
    assert (delta.full, delta.version, sorted(delta.jobs), delta.removed) == (False, 5, ["b"], ("c",))


def test_an_unknown_version_gets_the_whole_list():
    jobs = MemoryJobs()
    jobs.put("a")
    service = TaskService(jobs)
    for since in (None, 0, 99):
        assert service.snapshot(since).full
        assert sorted(service.snapshot(since).jobs) == ["a"]
    assert not service.snapshot(1).full


def test_a_list_of_another_life_of_the_store_is_replaced_though_its_version_is_larger():
    jobs = MemoryJobs()
    jobs.put("new")
    merged = merge_list(a_list(99, a_spec("old/0")), TaskService(jobs).snapshot(99))
    assert merged is not None and (merged.version, sorted(merged.jobs)) == (1, ["new"])


def test_a_late_answer_does_not_undo_a_newer_list():
    have = a_list(5, a_spec("a/0"))
    assert merge_list(have, a_list(4, a_spec("b/0"))) is have
    assert merge_list(have, TaskList(version=4, full=False, since=3, removed=("a",))) is have


def test_a_delta_that_starts_after_our_version_is_refused():
    assert merge_list(a_list(5), TaskList(version=9, full=False, since=6)) is None
    assert merge_list(None, TaskList(version=9, full=False, since=6)) is None


def test_the_list_survives_the_disk():
    task_list = a_list(5, a_spec("a/0", config={"threads": 2}), a_spec("b/1"))
    assert TaskList.from_json(json.loads(json.dumps(task_list.to_json()))) == task_list


def test_the_loads_follow_the_list():
    jobs = MemoryJobs()
    service = TaskService(jobs)
    assert (service.version(), service.reserved_loads(8)) == (0, {})
    jobs.put("a", mapping=(0, 1, 2))
    assert sum(count for count, _ in service.reserved_loads(8).values()) == 3
    jobs.put("a", mapping=(0, 1, 2), config={"resources": {"cpu": 2.5}})
    loads = service.reserved_loads(8)
    assert sum(load[0] for _, load in loads.values()) == 7.5
    assert sorted(loads) == sorted({shard_of(f"a/{index}", 8) for index in range(3)})
    assert sum(count for count, _ in service.reserved_loads(3).values()) == 3
    jobs.put("a", mapping=(0, 0, 0, 3))
    assert sorted(service.reserved_loads(64)) == sorted(shard_of(f"a/{index}", 64) for index in (0, 3))
    jobs.put("a", state="stopped")
    assert (service.version(), service.reserved_loads(8)) == (4, {})


def test_the_counts_follow_the_list():
    jobs = MemoryJobs()
    service = TaskService(jobs)
    assert service.task_counts() == {}
    jobs.put("a", mapping=(0, 1, 1, 2))
    jobs.put("b", mapping=(0,))
    assert {job: count for job, (_, count) in service.task_counts().items()} == {"a": 3, "b": 1}
    jobs.put("a", state="stopped")
    assert list(service.task_counts()) == ["b"]


def test_the_job_store_fits():
    source: RunningSource = RunningStore(Database(None))
    assert TaskService(source).snapshot() == TaskList(version=0, full=True)


changes = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(1, 3),  # tasks
        st.booleans(),  # held
        st.sampled_from(["running", "running", "stopped", "removed"]),
        st.booleans(),  # somebody fetches now
    ),
    max_size=20,
)


@given(changes, st.integers(0, 25))
def test_what_is_kept_encoded_is_what_is_so(changes, since):
    jobs = MemoryJobs()
    service, fresh = TaskService(jobs), TaskService(jobs)
    for generation, (job, tasks, is_held, state, fetches) in enumerate(changes, start=1):
        hold = generation if is_held else 0
        jobs.put(job, mapping=tuple(range(tasks)), generation=generation, hold_generation=hold, state=state)
        if fetches:
            service.encoded(since)
    for version in (None, since, jobs.version):
        told = TaskList.from_json(json.loads(service.encoded(version)))
        assert told == service.snapshot(version) == fresh.snapshot(version)


@given(changes, st.lists(st.integers(0, 7), max_size=4), st.sampled_from([1, 3, 8]))
def test_the_index_by_shard_follows_the_list(changes, mine, shards):
    jobs, index = MemoryJobs(), ShardTaskIndex()
    service = TaskService(jobs)
    for generation, (job, tasks, is_held, state, fetches) in enumerate(changes, start=1):
        hold = generation if is_held else 0
        jobs.put(job, mapping=tuple(range(tasks)), generation=generation, hold_generation=hold, state=state)
        if fetches:
            assert index.apply(service.snapshot(index.full_list.version if index.full_list else None))
            own = {(shard, spec.task_id) for shard, spec in index.tasks_of(set(mine), shards)}
            assert own <= {(shard, spec.task_id) for shard, spec in index.tasks_of(range(8), shards)}
    index.apply(service.snapshot(index.full_list.version if index.full_list else None))
    assert index.full_list is not None
    wanted = {
        (shard_of(spec.task_id, shards), spec.task_id, spec.generation) for spec in index.full_list.specs()
    }
    found = [(shard, spec.task_id, spec.generation) for shard, spec in index.tasks_of(range(shards), shards)]
    assert len(found) == len(set(found)) and set(found) == wanted


def test_several_instances_say_the_same_and_follow_a_store_that_was_replaced():
    jobs = MemoryJobs()
    one, other = TaskService(jobs), TaskService(jobs)
    jobs.put("a")
    one.snapshot()
    jobs.put("b")
    assert one.snapshot() == other.snapshot()
    jobs.rows, jobs.version = {}, 0
    jobs.put("c")
    assert sorted(one.snapshot(2).jobs) == ["c"] and one.snapshot(2).full
    assert one.version() == 1


@given(changes, st.integers(0, 25))
def test_deltas_add_up_to_the_whole_list(changes, late):
    """A reader that follows by deltas, and one that applies an overlapping delta, both end at the full list."""
    jobs, have = MemoryJobs(), None
    service = TaskService(jobs)
    for generation, (job, tasks, is_held, state, fetches) in enumerate(changes, start=1):
        hold = generation if is_held else 0
        jobs.put(job, mapping=tuple(range(tasks)), generation=generation, hold_generation=hold, state=state)
        if fetches:
            have = merge_list(have, service.snapshot(have.version if have else None))
    full = service.snapshot()
    followed = merge_list(have, service.snapshot(have.version if have else None))
    assert followed is not None and (followed.version, followed.jobs) == (full.version, full.jobs)
    if have is not None:
        overlapping = merge_list(have, service.snapshot(min(late, have.version)))
        assert overlapping is not None and overlapping.jobs == full.jobs
