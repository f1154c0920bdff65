"""Algorithm 2, line by line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.scaling.scaler.decide import decide
from penstock.scaling.scaler.observation import (
    AvailableResources,
    Decision,
    DecisionSettings,
    Hold,
    Remaining,
    Resize,
    ScalerJobFacts,
    ShapeLimits,
    TaskResources,
    Untriaged,
)
from tests.scaling.scaler.jobs import CONTAINER, START, a_job, an_observation

REACTIVE = DecisionSettings(generation="reactive")
LAG = {"lag_records": 40_000.0, "lag_s": 200.0, "processed_rate": 200.0}


def react(job: ScalerJobFacts | None = None, **changes: Any) -> Decision:
    return decide(an_observation(job, **{"settings": REACTIVE, **changes}))


def test_lag_over_the_slo_adds_tasks():
    """Line 6, and equation 1: 40,000 records at 200/s are 200 s."""
    decision = react(**LAG)
    assert isinstance(decision, Resize) and decision.task_count == 6
    assert decision.inputs["time_lagged"] == 200 and "200 s" in decision.reason


@pytest.mark.parametrize(("partitions", "task_count"), [(0, 6), (32, 6), (8, 8), (4, 4), (5, 5)])
def test_more_tasks_always_make_the_busiest_part_smaller(partitions: int, task_count: int):
    decision = react(a_job(4, partitions=partitions), **LAG)
    if task_count == 4:
        assert isinstance(decision, Hold) and decision.bound == "4 partitions"
    else:
        assert isinstance(decision, Resize) and decision.task_count == task_count


def test_a_trickle_is_not_lag():
    """Plan: one record waits at a hundredth per second: 100 s by equation 1, one second by the clock."""
    decision = react(lag_records=1.0, processed_rate=0.01, ingest_rate=0.01, lag_s=1.0)
    assert isinstance(decision, Hold)


def test_an_oom_adds_memory_up_to_a_fifth_of_a_container():
    """Line 9."""
    oom = {"oom": [*[0.0] * 89, 2.0]}
    decision = react(**oom)
    assert isinstance(decision, Resize) and decision.task.memory_mb == 768
    full = react(a_job(task=TaskResources(memory_mb=CONTAINER.memory_mb / 5)), **oom)
    assert isinstance(full, Untriaged)
    short = react(remaining=Remaining(room=AvailableResources(memory_mb=100)), **oom)
    assert isinstance(short, Hold) and short.bound == "capacity: memory_mb"


def test_after_a_quiet_day_it_tries_with_less():
    """Line 11: not after less than a day, nor if there was lag, OOM or a gap in it."""
    quiet = react(minutes=1441)
    assert isinstance(quiet, Resize) and (quiet.task_count, quiet.direction) == (3, "down")
    assert isinstance(react(minutes=1400), Hold)
    assert isinstance(react(a_job(changed_minute=START - 100), minutes=1441), Hold)
    for name, value in (("lag_s", 100.0), ("lag_s", np.nan), ("oom", 1.0)):
        points = np.zeros(1441)
        points[700] = value
        assert isinstance(react(minutes=1441, **{name: points}), Hold), name
    assert isinstance(react(minutes=1441, lag_records=np.arange(1441.0) * 1000), Hold)
    assert isinstance(react(a_job(4, limits=ShapeLimits(task_count_min=4)), minutes=1441), Hold)


def test_what_is_left_binds_it_too():
    decision = react(a_job(8), remaining=Remaining(room=AvailableResources(cpu=3.0)), **LAG)
    assert isinstance(decision, Resize) and decision.task_count == 11
    held = react(a_job(8), remaining=Remaining(privileged_only=True), **LAG)
    assert isinstance(held, Hold) and held.bound == "capacity"
