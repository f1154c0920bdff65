"""What a job needs: equations 2 and 3, and state that is split over its tasks."""

from __future__ import annotations

from math import isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scaling.metrics.frames import Frame
from penstock.scaling.scaler.estimators import (
    MB,
    aggregation_state_mb,
    cpu_units,
    cpu_units_with_backlog,
    estimate_needs,
    measured_thread_rate,
    task_resources,
)
from penstock.scaling.scaler.observation import Footprint, Hold, Observation, ScalerJobFacts, TaskResources
from penstock.scaling.scaler.window import LoadWindow, read_window
from tests.scaling.scaler.jobs import PROACTIVE, a_job, an_observation


def seen(observation: Observation) -> tuple[LoadWindow, Frame]:
    window = read_window(observation)
    assert not isinstance(window, Hold) and isinstance(observation.frame, Frame)
    return window, observation.frame


def test_equations_2_and_3():
    assert cpu_units(300, p=100, k=2, n=3) == pytest.approx(0.5)
    assert cpu_units_with_backlog(300, b=18_000, t=60, p=100, k=2, n=3) == pytest.approx(1.0)
    assert cpu_units(1, p=0, k=1, n=1) == float("inf")


def test_p_is_what_a_busy_thread_does():
    job = a_job(4)
    window, _ = seen(an_observation(job, processed_rate=200.0, busy_mean=0.5))
    assert measured_thread_rate(window, job) == pytest.approx(100)
    window, _ = seen(an_observation(job, processed_rate=2.0, busy_mean=0.01))
    assert measured_thread_rate(window, job) is None


def test_p_does_not_depend_on_how_evenly_partitions_divide():
    """Plan: three tasks with 3, 3 and 2 of 8 partitions, a thread can do 100: the mean of busy says so."""
    job = a_job(3, partitions=8)
    window, _ = seen(an_observation(job, processed_rate=160.0, busy_mean=(0.6 + 0.6 + 0.4) / 3))
    assert measured_thread_rate(window, job) == pytest.approx(100)


def test_memory_of_an_aggregation_follows_its_keys():
    assert aggregation_state_mb(1000, MB) == 1000
    job = a_job(4, state="aggregation", task=TaskResources(memory_mb=1500))
    observation = an_observation(
        job, key_count=1000.0, state_bytes=4000.0 * MB, memory_task_mb=1300.0, cpu=2.0
    )
    window, frame = seen(observation)
    needs = estimate_needs(window, frame, job, Footprint(), rate=200)
    assert needs.memory_split_mb == pytest.approx(4000)
    assert needs.memory_fixed_mb == pytest.approx(300)  # measured less a task's quarter of the state

    def memory(tasks: int) -> float:
        given = task_resources(needs, job, PROACTIVE, task_count=tasks, threads=1, may_shrink=False)
        return given.memory_mb

    assert memory(4) == pytest.approx(1300 * 1.2, abs=16)
    assert memory(8) == pytest.approx(800 * 1.2, abs=16)  # more tasks, less memory each
    assert memory(2) == pytest.approx(2300 * 1.2, abs=16)


def test_an_aggregation_is_estimated_by_the_minute_with_most_keys():
    """Plan: windows that close take their keys along, and the newest minute is the one after; memory was largest
    while the keys were there.
    """
    job = a_job(4, state="aggregation", task=TaskResources(memory_mb=1500))
    saw = np.resize([1000.0, 600.0, 10.0], 90)
    observation = an_observation(
        job, key_count=saw, state_bytes=saw * 4 * MB, memory_task_mb=300.0 + saw, cpu=2.0
    )
    window, frame = seen(observation)
    assert frame.last("key_count") == 10
    needs = estimate_needs(window, frame, job, Footprint(), rate=200)
    assert (needs.memory_split_mb, needs.memory_fixed_mb) == (4000, 300)


@pytest.mark.parametrize("unknown", ["key_count", "state_bytes"])
def test_keys_or_bytes_that_are_not_known_are_not_zero(unknown: str):
    job = a_job(4, state="aggregation")
    told = {"key_count": 1000.0, "state_bytes": 4000.0 * MB, "memory_task_mb": 1300.0, unknown: np.nan}
    window, frame = seen(an_observation(job, **told))
    needs = estimate_needs(window, frame, job, Footprint(), rate=200)
    by_bytes = (4000.0, 300.0) if unknown == "key_count" else (0.0, 1300.0)
    assert (needs.memory_split_mb, needs.memory_fixed_mb) == by_bytes


def test_memory_of_a_join_whose_window_is_not_known_follows_the_rate():
    job = a_job(4, state="join")
    window, frame = seen(an_observation(job, state_bytes=100.0 * MB, memory_task_mb=200.0))
    needs = estimate_needs(window, frame, job, Footprint(), rate=400)
    assert needs.memory_split_mb == pytest.approx(200)  # twice the rate, twice the records kept


def test_cpu_and_network_follow_the_rate_and_disk_the_state():
    job = a_job(4, task=TaskResources(disk_mb=100, network_mbps=10))
    observation = an_observation(job, cpu=2.0, network_mb_s=10.0, disk_mb=300.0)
    window, frame = seen(observation)
    needs = estimate_needs(window, frame, job, Footprint(), rate=400)
    assert needs.cores == pytest.approx(4) and needs.network_mbps == pytest.approx(160)
    assert needs.disk_mb == pytest.approx(300)
    given = task_resources(needs, job, PROACTIVE, task_count=4, threads=1, may_shrink=True)
    assert given.cpu == pytest.approx(1.2) and given.network_mbps == pytest.approx(48)
    assert given.disk_mb == pytest.approx(90)


def test_what_is_not_measured_stays_as_it_is():
    job = a_job(4, task=TaskResources(cpu=2, memory_mb=700, disk_mb=5, network_mbps=3))
    window, frame = seen(an_observation(job))
    needs = estimate_needs(window, frame, job, Footprint(), rate=1000)
    assert isnan(needs.cores)
    given = task_resources(needs, job, PROACTIVE, task_count=8, threads=2, may_shrink=True)
    assert given == TaskResources(threads=2, cpu=4, memory_mb=700, disk_mb=5, network_mbps=3)


@given(st.floats(0.1, 1e6), st.integers(1, 32), st.integers(1, 32))
def test_a_task_of_more_tasks_never_needs_more(state_mb: float, tasks: int, more: int):
    job: ScalerJobFacts = a_job(4, state="aggregation")
    window, frame = seen(an_observation(job, state_bytes=state_mb * MB, key_count=10.0, memory_task_mb=500.0))
    needs = estimate_needs(window, frame, job, Footprint(), rate=200)
    few = task_resources(needs, job, PROACTIVE, task_count=tasks, threads=1, may_shrink=True)
    many = task_resources(needs, job, PROACTIVE, task_count=tasks + more, threads=1, may_shrink=True)
    assert many.memory_mb <= few.memory_mb
