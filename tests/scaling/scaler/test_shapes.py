"""Tasks, threads and partitions: as how many threads a job works, and the fewest tasks that do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scaling.scaler.observation import (
    align,
    next_below,
    parallel,
    share_of_busiest,
    tasks_for,
    threads_for,
)

counts = st.integers(1, 64)
partition_counts = st.integers(0, 200)
wants = st.floats(0.01, 300)


@pytest.mark.parametrize(
    ("tasks", "threads", "partitions", "works_as"),
    [
        (4, 1, 8, 4),
        (5, 1, 8, 4),  # one of them has two of the eight, like each of four
        (3, 1, 8, 8 / 3),
        (8, 1, 8, 8),
        (2, 4, 8, 8),
        (1, 3, 8, 8 / 3),
        (4, 4, 4, 4),  # a partition has one thread
        (5, 2, 0, 10),  # split at will
    ],
)
def test_the_busiest_thread_decides(tasks: int, threads: int, partitions: int, works_as: float):
    assert parallel(tasks, threads, partitions) == pytest.approx(works_as)


@given(counts, st.integers(1, 8), partition_counts)
def test_a_job_never_works_as_more_threads_than_it_has(tasks: int, threads: int, partitions: int):
    assert 0 < parallel(tasks, threads, partitions) <= tasks * threads + 1e-9
    assert share_of_busiest(tasks, partitions) >= 1 / tasks or tasks > partitions > 0


@given(wants, st.integers(1, 8), st.integers(1, 200))
def test_the_tasks_found_are_enough_and_one_fewer_is_not(wanted: float, threads: int, partitions: int):
    tasks = tasks_for(wanted, threads=threads, partitions=partitions)
    if tasks is None:
        assert parallel(partitions, threads, partitions) < wanted
        return
    assert tasks <= partitions
    assert parallel(tasks, threads, partitions) >= wanted - 1e-6
    assert tasks == 1 or parallel(tasks - 1, threads, partitions) < wanted + 1e-6


@given(wants, counts, partition_counts)
def test_the_threads_found_are_enough_and_one_fewer_is_not(wanted: float, tasks: int, partitions: int):
    threads = threads_for(wanted, task_count=tasks, partitions=partitions)
    if threads is None:
        assert parallel(tasks, 10_000, partitions) < wanted
        return
    assert parallel(tasks, threads, partitions) >= wanted - 1e-6
    assert threads == 1 or parallel(tasks, threads - 1, partitions) < wanted + 1e-6


@given(counts, st.integers(1, 200))
def test_aligned_tasks_are_the_fewest_with_the_same_busiest(tasks: int, partitions: int):
    aligned = align(tasks, partitions)
    assert aligned <= min(tasks, partitions)
    assert -(-partitions // aligned) == -(-partitions // min(tasks, partitions))
    assert aligned == 1 or -(-partitions // (aligned - 1)) > -(-partitions // aligned)
    below = next_below(aligned, partitions)
    assert below < aligned and (below == 0 or align(below, partitions) == below)
