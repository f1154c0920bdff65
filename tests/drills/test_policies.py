"""What the scaler and the policies do to real jobs on Spark: each trouble is made on purpose and looked at the
way a user would. Nothing is modelled; `make policies` runs these alone.

All share one installation with two containers, one job after the other. Every drill ends with each call compared
with what was sent: none is lost, none is twice.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from penstock.streams.bus.embedded.index import INDEX
from tests.drills.calling import KEYS, Calling
from tests.e2e.platform import Platform

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]
# Minutes are recorded when they are over, and a decision needs two of them after the last change.
MINUTES_S = 300.0
SLO_S = 6
NUMBERS = count(1)
QUICK = {"slo.lag_s": SLO_S, "scaler.settle_s": 0, "scaler.quiet_s": 60, "policies.doctor.every_s": 5}


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """`penstock up` with two containers of Spark."""
    found = Platform(tmp_path_factory.mktemp("policies") / "penstock", containers=2)
    try:
        found.launch()
        found.wait("containers", lambda: len(found.ready()) == 2, seconds=300)
        yield found
        assert found.stop() == []
    finally:
        found.kill()


@pytest.fixture
def calling(platform: Platform, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Calling]:
    """A pipeline of this drill's own; whatever happens, its tasks are gone afterwards."""
    found = Calling(platform, f"drill{next(NUMBERS)}", tmp_path)
    began = time.monotonic()
    yield found
    found.remove()
    print(f"\n  {request.node.name}: {time.monotonic() - began:.0f} s", flush=True)


def say(text: str) -> None:
    """One line of what is seen."""
    print(f"\n    {text}", end="", flush=True)


def test_a_backlog_gets_more_tasks_and_gives_them_back(platform: Platform, calling: Calling):
    """Plan: more comes than one task can do. The scaler gives more, the backlog goes, then little comes."""
    calling.says(call_ms=4)
    calling.start({**QUICK, "task_count_max": 3})
    calling.rate = 450
    platform.wait("more tasks", lambda: calling.layer("scaler").get("task_count", 1) > 1, seconds=MINUTES_S)
    more = calling.task_count()  # how many one sees depends on how much the machine does meanwhile
    assert 2 <= more <= 3
    up = calling.decisions("autoscaler")[0]
    say(f"up: {up['reason']}")
    assert f"1 -> {more} tasks" in calling.explained()
    platform.wait("more tasks run", lambda: len(platform.running(calling.job)) == calling.task_count())
    recovered_s = platform.wait("no lag", lambda: calling.lag_s() < SLO_S, seconds=240)
    say(f"recovered {recovered_s:.0f} s after {calling.task_count()} tasks ran")
    more, calling.rate = calling.task_count(), 60
    platform.wait("fewer tasks", lambda: calling.task_count() == 1, seconds=2 * MINUTES_S)
    down = calling.decisions("autoscaler")[0]
    say(f"down: {down['reason']}")
    assert down["decision"] == "down" and f"{more} -> 1 tasks" in calling.explained()
    platform.wait("one task", lambda: len(platform.running(calling.job)) == 1)
    calling.finish()


def test_a_failing_dependency_raises_an_alarm_and_is_not_scaled(platform: Platform, calling: Calling):
    """Plan: the service refuses connections, so every task fails and the job lags. It recovers by itself."""
    calling.start({**QUICK, "task_count_max": 3})
    calling.rate = 200
    platform.wait("calls", lambda: sum(platform.log.end_offsets(calling.sink)) > 0)
    calling.says(away=True)
    platform.wait("the scaler's alarm", lambda: "not_scaled" in calling.alarms(), seconds=MINUTES_S)
    for kind, text in calling.alarms().items():
        say(f"alarm {kind}: {text[:200]}")
    assert "ConnectionRefusedError" in str(calling.alarms())
    assert "not_scaled" in calling.told("alarm", "ls", "--output", "json")
    assert calling.task_count() == 1 and calling.layer("scaler") == {}
    assert "failed" in calling.explained()
    calling.finish()
    assert calling.layer("scaler") == {}


def test_a_failing_sink_raises_an_alarm_and_is_not_scaled(platform: Platform, calling: Calling):
    """Plan: somebody else holds the sink for minutes, so that nothing can be written to it; then it lets go."""
    calling.start({**QUICK, "task_count_max": 3})
    calling.rate = 200
    platform.wait("calls", lambda: sum(platform.log.end_offsets(calling.sink)) > 0)
    with closing(
        sqlite3.connect(platform.folder / "bus" / calling.sink / INDEX, isolation_level=None)
    ) as sink:
        platform.wait("the sink held", lambda: _took(sink))
        reached = platform.log.end_offsets(calling.sink)
        platform.wait("the scaler's alarm", lambda: "not_scaled" in calling.alarms(), seconds=MINUTES_S)
        for kind, text in calling.alarms().items():
            say(f"alarm {kind}: {text[:200]}")
        assert calling.sink in str(calling.alarms())
        told = calling.told("doctor", calling.job)
        assert "does not answer" in told and "its dependency is down" in told, told
        assert calling.task_count() == 1 and calling.layer("scaler") == {}
        assert "failed" in calling.explained()
        assert platform.log.end_offsets(calling.sink) == reached
    calling.finish()
    assert calling.layer("scaler") == {}


def _took(sink: sqlite3.Connection) -> bool:
    try:
        sink.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    return True


def test_what_oncall_sets_the_scaler_keeps_to(platform: Platform, calling: Calling):
    """Plan: oncall holds the number of tasks, then only limits it; the scaler says both times what holds it."""
    calling.says(call_ms=4)
    calling.start({**QUICK, "task_count_max": 6})
    calling.told("oncall", "set", calling.job, "task_count=1", "--why", "the service is small")
    calling.rate = 450
    platform.wait(
        "a held step", lambda: "oncall layer sets task_count" in calling.explained(), seconds=MINUTES_S
    )
    say(f"held: {calling.decisions('autoscaler')[0]['reason']}")
    assert calling.layer("scaler") == {} and len(platform.running(calling.job)) == 1
    calling.told("oncall", "clear", calling.job, "task_count", "--why", "it is larger")
    calling.told("oncall", "set", calling.job, "task_count_max=2", "--why", "but not much")
    platform.wait("two tasks", lambda: len(platform.running(calling.job)) == 2, seconds=MINUTES_S)
    said = "oncall limit of 2 tasks"
    platform.wait("the limit to be named", lambda: said in calling.explained(), seconds=MINUTES_S)
    say(f"limited: {next(e['reason'] for e in calling.decisions('autoscaler') if said in str(e))}")
    layers = calling.told("config", "show", calling.job, "--layers", "--output", "json")
    assert '"task_count_max": 2' in layers and calling.layer("scaler")["task_count"] == 2
    assert calling.layer("oncall") == {"task_count_max": 2}
    calling.finish()


def test_a_hot_key_is_told_as_skew_and_not_scaled(platform: Platform, calling: Calling):
    """Plan: one key has more calls than one task can make. More tasks would not divide it, so none are given."""
    calling.says(call_ms=4)
    calling.start({**QUICK, "task_count": 3, "task_count_max": 6})
    calling.rate = 30
    platform.wait("calls", lambda: sum(platform.log.end_offsets(calling.sink)) > 0)
    calling.hot_rate = 350
    platform.wait("lag", lambda: calling.lag_s() > SLO_S, seconds=120)
    platform.wait("the doctor", lambda: "skew" in calling.told("doctor", calling.job), seconds=120)
    platform.wait("the doctor's alarm", lambda: "skew" in str(calling.alarms()), seconds=120)
    platform.wait("the scaler's word", lambda: "skewed input" in calling.explained(), seconds=MINUTES_S)
    say(f"scaler: {next(e['reason'] for e in calling.decisions('autoscaler') if 'skewed' in e['reason'])}")
    for kind, text in calling.alarms().items():
        say(f"alarm {kind}: {text[:200]}")
    assert "straggler" not in calling.alarms(), "a hot key is no slow place"
    assert calling.task_count() == 3 and calling.layer("scaler") == {}
    calling.hot_rate = 0
    calling.finish()


def test_a_task_above_its_memory_gets_more(platform: Platform, calling: Calling):
    """Plan: a task in a process of its own needs more than it may have, and is ended. With more it runs."""
    calling.start({**QUICK, "isolation": "process", "resources.memory_mb": 1024, "task_count_max": 1})
    calling.rate = 30
    platform.wait("calls", lambda: sum(platform.log.end_offsets(calling.sink)) > 0, seconds=240)
    calling.says(memory_mb=700)
    platform.wait("its end", lambda: "out of memory" in str(platform.line(calling.job)).lower(), seconds=240)
    platform.wait("more memory", lambda: "resources" in calling.layer("scaler"), seconds=2 * MINUTES_S)
    say(f"up: {calling.decisions('autoscaler')[0]['reason']}")
    assert calling.layer("scaler")["resources"]["memory_mb"] >= 1536
    assert "ran out of memory" in calling.explained()
    # Each of its workers keeps as much: one step is enough for one of them, two for both.
    recovered_s = platform.wait("no lag", lambda: calling.lag_s() < SLO_S, seconds=2 * MINUTES_S)
    memory_mb = calling.layer("scaler")["resources"]["memory_mb"]
    say(f"recovered {recovered_s:.0f} s later, with {memory_mb} MB")
    assert len(platform.running(calling.job)) == 1
    calling.finish()


def test_a_task_in_a_slow_place_is_moved_away(platform: Platform, calling: Calling):
    """Plan: calls from one container take ten times as long. Its one task of the job is run elsewhere."""
    stragglers = {"policies.stragglers.every_s": 5, "policies.stragglers.minutes": 1}
    calling.says(call_ms=2)
    calling.start({**QUICK, **stragglers, "task_count": 3, "task_count_max": 6})
    slow = _leave_one_alone(platform, calling)
    calling.rate = 150
    platform.wait("calls", lambda: sum(platform.log.end_offsets(calling.sink)) > len(KEYS))
    calling.says(call_ms=2, slow_ms=40, slow_in=slow)
    platform.wait("the detector", lambda: f"away from {slow}" in calling.explained(), seconds=MINUTES_S)
    say(f"stragglers: {calling.decisions('policy stragglers')[0]['reason']}")
    platform.wait(
        "the task elsewhere",
        lambda: (
            slow not in {t["container"] for t in platform.running(calling.job)}
            and len(platform.running(calling.job)) == 3
        ),
    )
    recovered_s = platform.wait("no lag", lambda: calling.lag_s() < SLO_S, seconds=240)
    say(f"recovered {recovered_s:.0f} s after it ran elsewhere")
    assert calling.task_count() == 3 and calling.layer("scaler") == {}
    calling.finish()


def _leave_one_alone(platform: Platform, calling: Calling) -> str:
    """Move shards until one container has one task of the job; returns its name."""

    def homes() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {name: [] for name in platform.ready()}
        for task in platform.running(calling.job):
            found[task["container"]].append(task["shard"])
        return found

    platform.wait("all tasks", lambda: sum(map(len, homes().values())) == 3)
    fewest = min(homes(), key=lambda name: len(homes()[name]))
    if not homes()[fewest]:
        other = next(name for name in homes() if name != fewest)
        platform.client.move_shard(homes()[other][0], fewest, why="one task each side")
    platform.wait(
        "one task alone", lambda: len(homes()[fewest]) == 1 and sum(map(len, homes().values())) == 3
    )
    return fewest
