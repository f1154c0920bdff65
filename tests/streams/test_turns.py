"""How much a batch may read, so that it ends soon: from what batches before it took."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.system_clock import SystemClock
from penstock.streams.spark.load import LoadMeter
from penstock.streams.spark.source import (
    GROWTH_MAX,
    ROWS_FIRST,
    TURN_MS,
    TurnFiles,
    Turns,
    next_limit,
    turn_of,
)
from tests.streams.test_load import a_task


def after_batches(row_ms: float, turn_ms: int, count: int, *, overhead_ms: int = 50) -> list[int]:
    """The limits of a task that always has a backlog and takes so long for a record."""
    limits = [ROWS_FIRST]
    for _ in range(count):
        took_ms = overhead_ms + round(limits[-1] * row_ms)
        limits.append(next_limit(limits[-1], rows=limits[-1], took_ms=took_ms, turn_ms=turn_ms))
    return limits


def test_slow_user_code_gets_batches_of_a_turn():
    """20 ms per record: the first batch takes some seconds, all later ones about a turn."""
    assert ROWS_FIRST * 20 <= 5_000
    limits = after_batches(20.0, 1250, 20)
    assert all(50 <= limit <= 70 for limit in limits[1:]), limits


def test_fast_code_reads_all_it_may_after_two_batches():
    assert after_batches(0.01, 1250, 2)[-1] >= 50_000


@pytest.mark.parametrize("row_ms", [0.0, 0.01, 0.3, 1.0, 7.0, 100.0, 5_000.0])
def test_a_batch_never_takes_much_more_than_the_one_before_made_likely(row_ms: float):
    """Whatever a record takes, no batch is longer than the first one, or four turns."""
    limits = after_batches(row_ms, TURN_MS, 30)
    assert all(limit >= 1 for limit in limits)
    longest = max(ROWS_FIRST * row_ms, 4 * TURN_MS, row_ms)
    assert all(limit * row_ms <= longest for limit in limits), limits


def test_few_records_change_nothing_and_code_that_gets_slow_is_noticed():
    assert next_limit(400, rows=0, took_ms=9_000, turn_ms=1000) == 400
    assert next_limit(400, rows=3, took_ms=20, turn_ms=1000) == 400, "they say little of many"
    assert next_limit(400, rows=3, took_ms=400, turn_ms=1000) == 10, "100 ms each"
    assert next_limit(400, rows=400, took_ms=0, turn_ms=1000) == 400 * GROWTH_MAX


def test_a_turn_is_shared_by_a_tasks_intervals_and_never_shorter_than_its_trigger():
    assert turn_of(trigger_ms=0, slots=2, intervals=1) == TURN_MS
    assert turn_of(trigger_ms=1000, slots=2, intervals=2) == 1250
    assert turn_of(trigger_ms=1000, slots=2, intervals=8) == 312, "all of them on two slots: a turn"
    assert turn_of(trigger_ms=60_000, slots=2, intervals=1) > 60_000, "else it could never catch up"
    assert turn_of(trigger_ms=0, slots=1, intervals=4096) > 0


def test_planner_workers_and_driver_tell_each_other(tmp_path: Path):
    files = TurnFiles(tmp_path)
    assert files.of(3) == Turns() and files.planned_ms() == 0
    files.plan(1_000)
    files.begin(3, 4_000)
    assert (files.of(3).waited_ms, files.of(3).held_ms(4_500)) == (3_000, 500)
    files.end(3, 6_000, rows=100, user_ms=1_900, turn_ms=1_000)
    found = files.of(3)
    assert (found.rows, found.work_ms, found.user_ms, found.held_ms(9_000)) == (100, 2_000, 1_900, 2_000)
    assert found.limit == 52
    gone = TurnFiles(tmp_path / "gone")  # the folder goes with the task
    gone.plan(1)
    gone.begin(3, 2)
    assert gone.of(3) == Turns()


def test_a_task_says_how_long_it_waits_for_a_slot_and_what_its_user_code_takes(tmp_path: Path):
    task, files, now_ms = a_task(tmp_path, offsets=(0, 0)), TurnFiles(tmp_path), SystemClock().now_ms()
    meter = LoadMeter(task, trigger_ms=1000, turns=lambda: files)
    assert "slot_wait_s" not in meter.measure(None, at_s=9.0, now_ms=now_ms), "nothing was planned yet"
    files.plan(10_000)
    assert meter.measure(None, at_s=45.0, now_ms=now_ms)["slot_wait_s"] == 35.0
    for partition in (0, 1):
        files.begin(partition, 46_000)
    for partition in (0, 1):
        files.end(partition, 48_000, rows=100, user_ms=1_800, turn_ms=1_000)
    files.plan(48_500)
    for partition in (0, 1):
        files.begin(partition, 49_500)
    found = meter.measure(None, at_s=50.0, now_ms=now_ms)
    assert found["slot_wait_s"] == 1.0, "its last batch waited so long"
    assert found["slots_held"] == pytest.approx((2 * 2_000 + 2 * 500) / 5_000)
    assert found["slots_user"] == pytest.approx(2 * 1_800 / 5_000)
    assert found["user_ms_per_record"] == 18.0
