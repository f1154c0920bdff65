"""What a shard is counted as: seen for ten minutes, or reserved; never something out of date."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.messages import ShardLoad
from penstock.fleet.shard_load import (
    KINDS,
    MINUTE_MS,
    ShardLoadSettings,
    ShardLoadTracker,
    combine_loads,
    measured_load,
    reserved_load,
)
from penstock.jobs.config import JobConfig
from tests.fleet.harness import stored_config

PACE = ShardLoadSettings(sample_ms=1_000, report_ms=10_000)


def a_task(
    shard: int = 3, *, task: str = "a/0", generation: int = 1, config: dict | None = None, **metrics: float
):
    whole = config or {"resources": {"cpu": 2.0, "memory_mb": 512}}
    return (task, generation, shard, JobConfig.from_stored(stored_config("a", whole)), metrics)


def run(book: ShardLoadTracker, minutes: float, *tasks, start_ms: int = 0) -> int:
    end_ms = start_ms + int(minutes * MINUTE_MS)
    for now_ms in range(start_ms, end_ms, 1_000):
        book.observe(now_ms, tasks)
    return end_ms


def test_a_new_task_counts_as_reserved_and_then_as_seen():
    book = ShardLoadTracker(PACE)
    now_ms = run(book, 0.5, a_task(cpu=0.25))
    assert book.report == (ShardLoad(shard=3, tasks=1, load=(2.0, 512.0, 0.0, 0.0)),)
    run(book, 1, a_task(cpu=0.25), start_ms=now_ms)
    assert book.report[0].load == (0.25, 512.0, 0.0, 0.0)


@pytest.mark.parametrize("kind", [{"kind": "process"}, {"kind": "stateless", "isolation": "process"}])
def test_a_task_whose_memory_is_enforced_counts_as_reserved_for_ever(kind: dict[str, str]):
    book = ShardLoadTracker(PACE)
    run(book, 5, a_task(config={**kind, "resources": {"cpu": 2.0}}, cpu=0.25))
    assert book.report[0].load[0] == 2.0


def test_it_is_the_mean_of_ten_minutes_and_no_longer():
    book = ShardLoadTracker(PACE)
    now_ms = run(book, 20, a_task(cpu=8.0))
    now_ms = run(book, 5, a_task(cpu=2.0), start_ms=now_ms)
    assert 4.9 < book.report[0].load[0] < 5.3
    run(book, 6, a_task(cpu=2.0), start_ms=now_ms)
    assert book.report[0].load[0] == 2.0


def test_a_report_stands_until_the_next_one():
    book = ShardLoadTracker(ShardLoadSettings(sample_ms=1_000, report_ms=10 * MINUTE_MS))
    run(book, 9, a_task(cpu=8.0))
    assert book.report[0].load[0] == 2.0  # as told first, when the task was new
    run(book, 2, a_task(cpu=8.0), start_ms=9 * MINUTE_MS)
    assert book.report[0].load[0] == 8.0


def test_tasks_of_a_shard_add_up_and_a_new_generation_begins_anew():
    book = ShardLoadTracker(PACE)
    now_ms = run(
        book, 3, a_task(task="a/0", cpu=1.0), a_task(task="b/0", cpu=0.5), a_task(4, task="c/0", cpu=0.25)
    )
    assert [(load.shard, load.tasks, load.load[0]) for load in book.report] == [(3, 2, 1.5), (4, 1, 0.25)]
    run(book, 0.5, a_task(task="a/0", generation=2, cpu=1.0), start_ms=now_ms)
    assert [(load.shard, load.tasks, load.load[0]) for load in book.report] == [(3, 1, 2.0)]


def test_without_a_measurement_how_busy_it_is_tells_the_cpu():
    reserved = reserved_load({"cpu": 2.0, "memory_mb": 512, "network_mbps": 3})
    assert measured_load(reserved, 4, {"busy": 0.5}) == (2.0, 512.0, 0.0, 3.0)
    assert measured_load(reserved, 4, {}) == (2.0, 512.0, 0.0, 3.0)
    assert measured_load(reserved, 4, {"busy": 0.5, "cpu": 0.7, "memory_mb": 100.0}) == (0.7, 100.0, 0.0, 3.0)


def test_what_was_measured_with_other_tasks_is_out_of_date():
    seen = ShardLoad(shard=1, tasks=2, load=(0.1,) * 4)
    reserved = {1: (2, (2.0,) * 4), 2: (1, (1.0,) * 4)}
    assert combine_loads(reserved, {1: seen}) == {1: (0.1,) * 4, 2: (1.0,) * 4}
    assert combine_loads({1: (3, (3.0,) * 4)}, {1: seen}) == {1: (3.0,) * 4}
    assert combine_loads({}, {1: seen}) == {}


@given(st.lists(st.tuples(st.integers(0, 5_000), st.floats(0, 100)), min_size=1, max_size=60))
def test_an_average_lies_between_what_was_seen(steps):
    book, now_ms, seen = ShardLoadTracker(PACE), 2 * MINUTE_MS, []
    book.observe(0, [a_task(cpu=50.0)])
    for wait_ms, cpu in steps:
        now_ms += 1_000 + wait_ms
        seen.append(cpu)
        book.observe(now_ms, [a_task(cpu=cpu)])
    for report in book.report:
        assert len(report.load) == len(KINDS) == len(reserved_load({}))
        assert min([*seen, 2.0, 50.0]) - 1e-6 <= report.load[0] <= max([*seen, 50.0]) + 1e-6
