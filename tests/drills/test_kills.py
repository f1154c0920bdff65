"""kill -9 of a container's parts (Turbine IV-C): all of it, with and without who would clear up, warden, engine."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.drills.conftest import Stopwatch
from tests.drills.fleet import DrillFleet, kill_all

pytestmark = [pytest.mark.drill, pytest.mark.timeout(120)]


def test_kill_container(fleet: DrillFleet, stopwatch: Stopwatch) -> None:
    """Warden, engine and tasks die; its host is alive, sees it, and says so: nobody waits for a lease."""
    fleet.run_jobs()
    victim = fleet.busiest()
    lost = fleet.tasks_on(victim)
    fault = kill_all(fleet.processes_of(victim))
    took_s = fleet.await_recovery(lost, fault)
    assert all(fleet.current()[task].place != victim for task in lost)
    fleet.await_ready(victim)
    fleet.assert_well()
    stopwatch.took(took_s, limit_s=10, note="its exit was observed")


def test_kill_container_and_host(joined: DrillFleet, stopwatch: Stopwatch) -> None:
    """The machine is gone: nobody says so. The fail-over interval must pass."""
    joined.run_jobs()
    victim = joined.busiest()
    lost = joined.tasks_on(victim)
    fault = kill_all(joined.processes_of(victim, with_host=True))
    took_s = joined.await_recovery(lost, fault)
    joined.assert_well()
    assert took_s > 10, "it was failed over before its lease could be over"
    stopwatch.took(took_s, limit_s=20, note="nobody saw it: 12 s of silence first")


@pytest.mark.slow
def test_kill_warden(fleet: DrillFleet, stopwatch: Stopwatch) -> None:
    """The engine and its tasks are orphans: they end before anything of them runs elsewhere."""
    fleet.run_jobs()
    victim = fleet.busiest()
    lost = fleet.tasks_on(victim)
    os.kill(fleet.warden_pid(victim), signal.SIGKILL)
    fault = time.monotonic()
    took_s = fleet.await_recovery(lost, fault)
    assert all(fleet.current()[task].place != victim for task in lost)
    fleet.assert_well()
    stopwatch.took(took_s, limit_s=10, note="the engine ends with its warden")


def test_kill_engine(fleet: DrillFleet, stopwatch: Stopwatch) -> None:
    """The warden ends what the engine left, and starts another: an engine without Spark is back so soon that its
    container keeps its shards; where it is not, others have them.
    """
    fleet.run_jobs()
    victim = fleet.busiest()
    lost = fleet.tasks_on(victim)
    os.kill(fleet.engine_pid(victim), signal.SIGKILL)
    took_s = fleet.await_recovery(lost, time.monotonic())
    note = "the shards stayed" if fleet.tasks_on(victim) == lost else "others took shards"
    fleet.assert_well()
    stopwatch.took(took_s, limit_s=10, note=note)
