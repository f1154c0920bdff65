"""One shard (0) holds every task, unless a test says otherwise; `epochs` are those of its record."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.container.task_manager import ShardTaskIndex, TaskManager, TaskManagerSettings
from penstock.fleet.messages import HeartbeatVerdict
from penstock.fleet.shard_load import shard_of
from penstock.fleet.task_service import TaskList
from tests.fleet.fake_runner import FakeRunner
from tests.fleet.harness import a_list, a_reply, a_spec, dropping, owned

SETTINGS = TaskManagerSettings(
    stop_timeout_ms=2_000,
    backoff_ms=1_000,
    backoff_max_ms=8_000,
    restarts_max=5,
    exhausted_ms=60_000,
    healthy_ms=30_000,
)


class Engine:
    """A Task Manager on a fake runner, with time as a number."""

    def __init__(self) -> None:
        self.runner = FakeRunner()
        self.manager = TaskManager(self.runner, settings=SETTINGS)
        self.now_ms = 0

    def gets(self, *things: object) -> Engine:
        for thing in things:
            if hasattr(thing, "verdict"):
                self.manager.on_reply(thing, self.now_ms)
            else:
                assert self.manager.on_task_list(thing, self.now_ms)
        return self.at(self.now_ms)

    def at(self, now_ms: int) -> Engine:
        self.now_ms = now_ms
        self.manager.tick(now_ms)
        return self

    def alive(self) -> tuple[str, ...]:
        return self.runner.alive()

    def state_of(self, task_id: str) -> str:
        return next(task.state for task in self.manager.report().tasks if task.task_id == task_id)


def running(*task_ids: str) -> Engine:
    engine = Engine().gets(
        a_list(1, *map(a_spec, task_ids or ("a/0",))), a_reply(10, owned(0, 10), list_version=1)
    )
    assert engine.alive() == tuple(sorted(task_ids or ("a/0",)))
    return engine


def test_nothing_starts_from_a_list_alone():
    engine = Engine().gets(a_list(1, a_spec())).at(60_000)
    assert engine.alive() == ()


def test_it_runs_the_tasks_of_its_shards_and_no_others():
    specs = [a_spec(f"a/{n}") for n in range(12)]
    engine = Engine().gets(a_list(1, *specs), a_reply(10, owned(1, 9), owned(3, 10), shard_count=4))
    assert set(engine.alive()) == {spec.task_id for spec in specs if shard_of(spec.task_id, 4) in (1, 3)}
    assert set(engine.runner.epochs.values()) == {9, 10}


def test_a_shard_is_acknowledged_when_recorded_though_nothing_runs_yet():
    engine = Engine().gets(a_reply(10, owned(0, 10)))
    assert engine.manager.report().acked == (owned(0, 10),)


def test_a_drop_is_acknowledged_only_when_every_run_is_reaped():
    engine = running("a/0", "a/1")
    engine.runner.hanging.add("a/1")
    engine.gets(a_reply(11, dropping(0, 11)))
    assert engine.manager.report().acked == ()
    engine.at(1_000)
    assert engine.alive() == ("a/1",) and engine.manager.report().acked == ()
    engine.at(2_000)  # the stop timed out: kill
    assert engine.manager.report().acked == ()  # dead, but not yet seen to be
    engine.at(2_500)
    assert engine.alive() == () and engine.manager.report().acked == (dropping(0, 11),)
    assert [line for line in engine.runner.log if "a/1" in line] == [
        "start a/1",
        "stop a/1",
        "kill a/1",
        "forget a/1",
    ]


def test_what_does_not_die_is_killed_again_and_never_acknowledged():
    engine = running()
    engine.runner.immortal.add("a/0")
    engine.gets(a_reply(11, dropping(0, 11)))
    for now_ms in range(0, 9_000, 500):
        engine.at(now_ms)
    assert engine.runner.log.count("kill a/0") == 4
    assert engine.manager.report().acked == () and not engine.manager.all_stopped


def test_a_drop_of_an_unknown_shard_is_acknowledged():
    assert Engine().gets(a_reply(10, dropping(3, 10), shard_count=4)).manager.report().acked == (
        dropping(3, 10),
    )


@pytest.mark.parametrize(
    "late",
    [
        a_reply(10, owned(0, 10)),  # of an older version
        a_reply(12, owned(0, 10)),  # of a smaller epoch, whatever the version says
        a_reply(99, owned(0, 99), term=0),  # of a Shard Manager that is no more
        a_reply(99, owned(0, 99), verdict=HeartbeatVerdict.WITHHELD),
    ],
)
def test_a_late_reply_does_not_undo_a_drop(late):
    engine = running().gets(a_reply(11, dropping(0, 11)))
    engine.at(500)
    engine.gets(late).at(1_000)
    assert engine.alive() == () and engine.manager.report().acked == (dropping(0, 11),)


def test_a_late_reply_does_not_bring_back_a_shard_that_is_gone():
    engine = running().gets(a_reply(11, dropping(0, 11))).at(500).gets(a_reply(12))
    engine.gets(a_reply(10, owned(0, 10)), a_reply(11, dropping(0, 11))).at(1_000)
    assert engine.alive() == () and engine.manager.report().acked == ()


def test_doubled_messages_change_nothing():
    reply, task_list = a_reply(10, owned(0, 10)), a_list(1, a_spec())
    engine = Engine().gets(task_list, reply, reply, task_list, reply).at(1_000)
    assert engine.runner.log == ["start a/0"]


def test_a_shard_that_left_the_set_stops():
    engine = running().gets(a_reply(12)).at(500)
    assert engine.alive() == () and engine.manager.all_stopped


def test_a_shard_that_comes_back_runs_under_its_new_epoch():
    engine = running().gets(a_reply(11, dropping(0, 11))).at(500).gets(a_reply(13, owned(0, 13)))
    assert engine.alive() == ("a/0",) and engine.runner.epochs == {"a/0": 13}


def test_a_new_epoch_of_an_owned_shard_restarts_its_tasks():
    engine = running().gets(a_reply(11, owned(0, 11))).at(500)
    assert engine.runner.log == ["start a/0", "stop a/0", "forget a/0", "start a/0"]
    assert engine.runner.epochs == {"a/0": 11}


def test_a_reboot_verdict_stops_everything_for_good():
    engine = running().gets(a_reply(11, verdict=HeartbeatVerdict.REBOOT)).at(500)
    assert engine.manager.all_stopped
    engine.gets(a_reply(12, owned(0, 12)), a_list(2, a_spec())).at(60_000)
    assert engine.alive() == ()


def test_a_new_generation_waits_for_the_old_run_to_be_reaped():
    engine = running()
    engine.runner.hanging.add("a/0")
    engine.gets(a_list(2, a_spec(generation=2, running_version=2))).at(1_000)
    assert engine.runner.specs["a/0"].generation == 1 and engine.state_of("a/0") == "stopping"
    engine.at(2_000).at(2_500)
    assert engine.runner.specs["a/0"].generation == 2


def test_only_changes_that_tasks_read_restart_them():
    engine = running()
    engine.gets(a_list(2, a_spec(config={"slo": {"lag_s": 1}}, running_version=2))).at(500)
    assert engine.runner.log == ["start a/0"] and engine.manager.report().list_version == 2
    engine.gets(a_list(3, a_spec(config={"threads": 2}, running_version=3))).at(500).at(1_000)
    assert engine.runner.log == ["start a/0", "stop a/0", "forget a/0", "start a/0"]


def test_the_list_version_is_reported_only_when_everything_not_on_it_is_reaped():
    engine = running("a/0", "b/0")
    assert engine.manager.report().list_version == 1
    engine.runner.hanging.add("a/0")
    engine.manager.on_task_list(a_list(2, a_spec("b/0")), 0)
    assert engine.manager.report().list_version == 1  # even before the first tick
    engine.at(0).at(1_000)
    assert engine.manager.report().list_version == 1
    engine.at(2_000).at(2_500)
    assert engine.manager.report().list_version == 2 and engine.alive() == ("b/0",)


def test_a_cached_list_runs_tasks_but_is_not_acknowledged():
    engine = Engine()
    engine.manager.on_task_list(a_list(7, a_spec()), 0, cached=True)
    engine.gets(a_reply(10, owned(0, 10)))
    assert (
        engine.alive() == ("a/0",)
        and engine.manager.report().list_version == 0
        and engine.manager.is_list_stale
    )
    engine.gets(a_list(7, a_spec()))
    assert engine.manager.report().list_version == 7 and not engine.manager.is_list_stale


def test_starts_wait_a_moment_for_a_list_known_to_be_newer():
    engine = Engine()
    engine.manager.on_task_list(a_list(7, a_spec()), 0, cached=True)
    engine.gets(a_reply(10, owned(0, 10), list_version=8)).at(4_000)
    assert engine.alive() == ()
    engine.at(5_000)  # the Task Service does not answer: the cached list is better than nothing
    assert engine.alive() == ("a/0",)


def test_a_fenced_task_is_not_restarted_until_something_newer_arrives():
    engine = running()
    engine.runner.fence("a/0")
    engine.at(1_000).at(600_000)
    assert engine.alive() == () and engine.state_of("a/0") == "fenced"
    assert engine.manager.report().tasks[0].restarts == 0
    engine.gets(a_reply(11, owned(0, 10)), a_list(2, a_spec(), a_spec("b/0"))).at(601_000)
    assert engine.alive() == ("b/0",)  # a newer list and a newer set, but nothing newer about this task


@pytest.mark.parametrize(
    "news",
    [
        a_list(2, a_spec(generation=2)),
        a_list(2, a_spec(running_version=2)),
        a_reply(11, owned(0, 11)),
    ],
)
def test_a_newer_entry_or_epoch_lifts_the_fence(news):
    engine = running()
    engine.runner.fence("a/0")
    engine.at(1_000).gets(news)
    assert engine.alive() == ("a/0",)


def crash_times(engine: Engine, count: int, *, run_ms: int = 0) -> list[int]:
    """Crash the task `run_ms` after each start; returns how long each restart took."""
    waits = []
    for _ in range(count):
        engine.at(engine.now_ms + run_ms)
        engine.runner.crash("a/0", "boom")
        crashed_ms = engine.now_ms
        while engine.alive() != ("a/0",):
            engine.at(engine.now_ms + 500)
        waits.append(engine.now_ms - crashed_ms)
    return waits


def test_a_crashed_task_comes_back_later_each_time_and_rarely_once_its_budget_is_used_up():
    waits = crash_times(running(), 7)
    # Half a second to notice, then 1, 2, 4, 8, 8 s; then one try a minute.
    assert waits == [1_500, 2_500, 4_500, 8_500, 8_500, 60_500, 60_500]


def test_a_healthy_run_gives_the_budget_back():
    engine = running()
    crash_times(engine, 5)
    assert crash_times(engine, 2, run_ms=30_000) == [1_500, 1_500]


def test_a_new_version_gets_a_new_budget_at_once():
    engine = running()
    crash_times(engine, 5)
    engine.runner.crash("a/0", "boom")
    engine.at(engine.now_ms + 500)
    assert engine.state_of("a/0") == "backoff"
    engine.gets(a_list(2, a_spec(config={"arguments": {"release": "2"}}, running_version=2)))
    assert engine.alive() == ("a/0",)


def test_a_crash_is_reported_with_its_error_and_count():
    engine = running()
    engine.runner.crash("a/0", "boom")
    engine.at(500)
    (task,) = engine.manager.report().tasks
    assert (task.state, task.error, task.restarts, task.generation) == ("backoff", "boom", 1, 1)
    engine.at(1_500).at(2_000)
    (task,) = engine.manager.report().tasks
    assert (task.state, task.error, task.restarts) == ("running", "boom", 1)


def test_failures_are_counted_by_class_and_a_stop_is_none():
    engine = running()
    for error in ("out of memory: it used 9 MB", "[DIVIDE_BY_ZERO] x", "out of memory: it used 9 MB"):
        engine.runner.crash("a/0", error)
        engine.at(engine.now_ms + 500).at(engine.now_ms + 60_000)
        assert engine.state_of("a/0") == "running"
    assert engine.manager.report().tasks[0].failures == {"OutOfMemory": 2, "DIVIDE_BY_ZERO": 1}
    engine.gets(a_list(2, a_spec(config={"arguments": {"release": "2"}}, running_version=2)))
    engine.at(engine.now_ms + 1_000).at(engine.now_ms + 1_000)
    (task,) = engine.manager.report().tasks
    assert task.failures == {"OutOfMemory": 2, "DIVIDE_BY_ZERO": 1} and task.restarts == 3


def test_metrics_travel_with_the_report():
    engine = running()
    engine.runner.measure("a/0", input_rate=5.0)
    assert engine.at(500).manager.report().tasks[0].metrics == {"input_rate": 5.0}


def test_a_task_wanted_again_while_it_stops_starts_after_it_is_reaped():
    engine = running()
    engine.runner.hanging.add("a/0")
    engine.gets(a_list(2)).gets(a_list(3, a_spec())).at(1_000)
    assert engine.state_of("a/0") == "stopping"
    engine.at(2_000).at(2_500)
    assert engine.runner.log[-2:] == ["forget a/0", "start a/0"]


ORDER = """
from penstock.container.task_manager import ShardTaskIndex
from tests.fleet.harness import a_list, a_spec
index = ShardTaskIndex()
for version in (1, 2):
    index.apply(a_list(version, *(a_spec(f"job{n}/0", generation=version) for n in range(20))))
    print([spec.task_id for _, spec in index.tasks_of([0], 1)])
"""


def test_a_delta_changes_what_it_names():
    index = ShardTaskIndex()
    assert index.apply(a_list(1, a_spec("a/0"), a_spec("b/0")))
    assert {spec.task_id for _, spec in index.tasks_of([0], 1)} == {"a/0", "b/0"}
    changed = a_spec("b/0", generation=2)
    assert index.apply(TaskList(version=2, full=False, since=1, jobs={"b": (changed,)}, removed=("a",)))
    assert [spec for _, spec in index.tasks_of([0], 1)] == [changed]
    assert index.spec("b", "b/0") is changed and index.spec("a", "a/0") is None


def test_a_task_is_found_before_anybody_asked_for_shards():
    index, spec = ShardTaskIndex(), a_spec("a/0")
    assert index.spec("a", "a/0") is None
    index.apply(a_list(1, spec))
    assert index.spec("a", "a/0") is spec and index.spec("a", "a/1") is None


def test_tasks_come_in_the_same_order_in_every_process():
    """They are started in this order; sets of names are ordered by a secret of each process."""
    found = set()
    for secret in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": secret}
        done = subprocess.run(
            [sys.executable, "-c", ORDER], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1
