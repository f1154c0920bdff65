"""What the scaler and the policies do to real jobs on Spark: each trouble is made on purpose and looked at the
way a user would. Nothing is modelled; `make policies` runs these alone.

All share one installation with two containers, one job after the other. Every drill ends with each call compared
with what was sent: none is lost, none is twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.drills.calling import Calling
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


def test_what_oncall_sets_the_scaler_keeps_to(platform: Platform, calling: Calling):
    """Plan: oncall holds the number of tasks, then only limits it; the scaler says both times what holds it."""
    calling.says(call_ms=4)
    calling.start({**QUICK, "task_count_max": 6})
    calling.told("oncall", "set", calling.job, "task_count=1", "--why", "the service is small")
    calling.rate = 450
    platform.wait("a held step", lambda: "oncall set task_count" in calling.explained(), seconds=MINUTES_S)
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
