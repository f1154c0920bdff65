"""Idle and crazy sources through the real reader, step, bus and rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.system_clock import SystemClock
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.log import LOW_MAX, LOW_MIN
from penstock.streams.dsl.injector import Injector
from tests.streams.idle_world import Copier, Source

T = 1_000_000  # some moment, in milliseconds


def live(source: Source, job: Copier) -> None:
    """Partition 1 has one record and falls silent; partition 0 goes on; then partition 1 speaks again."""
    source.publish(1, 10)
    source.publish(0, 20)
    for turn, ts in enumerate((100, 200, 300)):
        for partition in (0, 1):
            job.step(partition, now_ms=T + turn * 600)
        source.publish(0, ts)
    for partition in (0, 1, 0, 1):
        job.step(partition, now_ms=T + 2000)
    source.publish(1, 150, 250, 400)
    for partition in (0, 1):
        job.step(partition, now_ms=T + 2300)


def test_an_idle_partition_does_not_hold_the_watermark(tmp_path: Path):
    source = Source(tmp_path).build()
    job = Copier(source, "a")
    source.publish(1, 10)
    source.publish(0, 20)
    for turn, ts in enumerate((100, 200, 300)):
        for partition in (0, 1):
            job.step(partition, now_ms=T + turn * 600)
        if turn < 2:
            assert job.low(1) == 10
        source.publish(0, ts)
    job.step(0, now_ms=T + 2000)
    job.step(1, now_ms=T + 2000)
    assert job.low(0) == 300 and job.low(1) in (200, 300)
    job.step(0, now_ms=T + 2300)
    assert source.log.watermark("a") >= 200


def test_without_idle_after_it_holds(tmp_path: Path):
    source = Source(tmp_path, idle_after_ms=0).build()
    job = Copier(source, "a")
    live(source, job)
    assert all(not late for _, late in job.copied())
    assert [mark.low for mark in source.log.marks("a", 0, above=LOW_MIN, up_to=2**40)] == [10, 300]


def test_who_speaks_again_is_late_by_the_watermark_as_it_then_stands(tmp_path: Path):
    source = Source(tmp_path).build()
    job = Copier(source, "a")
    live(source, job)
    followed = max(mark.low for mark in source.log.marks("in", 1, above=LOW_MIN, up_to=2**40))
    assert 200 <= followed <= 300
    late = {ts for ts, is_late in job.copied() if is_late}
    assert late == {ts for ts in (150, 250) if ts < followed}


@pytest.mark.parametrize("most", [1, 2, 3, 10])
@pytest.mark.parametrize("others_first", [True, False])
def test_who_reads_the_same_log_later_in_other_batches_gets_the_same(
    tmp_path: Path, most: int, others_first: bool
):
    source = Source(tmp_path).build()
    first = Copier(source, "a")
    live(source, first)
    second = Copier(source, "b")
    for turn in range(8):
        for partition in (1, 0) if others_first else (0, 1):
            second.step(partition, now_ms=T + 2400 + turn, most=most)
    assert second.copied() == first.copied()
    assert [second.low(p) for p in (0, 1)] == [first.low(p) for p in (0, 1)]


def test_a_low_never_goes_back_over_restarts(tmp_path: Path):
    source = Source(tmp_path).build()
    job, lows = Copier(source, "a"), {0: LOW_MIN, 1: LOW_MIN}
    for turn in range(12):
        source.publish(turn % 3 == 0, turn * 50)
        for partition in (0, 1):
            job.step(partition, now_ms=T + turn * 700)
            assert job.low(partition) >= lows[partition]
            lows[partition] = job.low(partition)


def test_a_crazy_record_becomes_a_dead_letter_and_moves_nothing(tmp_path: Path):
    source = Source(tmp_path, ahead_max_ms=3_600_000).build()
    job, now_ms = Copier(source, "a"), SystemClock().now_ms()
    source.publish(0, now_ms, now_ms + 7_200_000, now_ms + 1000)
    job.step(0, now_ms=T, most=2)
    job.step(0, now_ms=T + 500)
    assert job.copied() == [(now_ms, False), (now_ms + 1000, False)]
    (why,) = job.dead()
    assert "from the future" in why and job.low(0) == now_ms + 1000


def test_a_bounded_source_ends_with_everything(tmp_path: Path):
    source = Source(tmp_path).build()
    job = Copier(source, "a")
    source.publish(0, 20)
    Injector(source.log, "in", "me", epoch=2).close(now_ms=T)
    for partition in (0, 1):
        job.step(partition, now_ms=T)
    assert [job.low(p) for p in (0, 1)] == [LOW_MAX, LOW_MAX] and source.log.watermark("a") == LOW_MAX


@pytest.mark.parametrize("point", ["observe:before", "observe:after"])
def test_a_crash_around_the_note_leaves_all_of_it_or_nothing_and_is_made_up_for(tmp_path: Path, point: str):
    def fault(found: str) -> None:
        if found == point:
            raise InterruptedError

    source = Source(tmp_path).build()
    source.publish(0, 10)
    log, dying = source.log, EmbeddedLog(tmp_path / "bus", fault=fault)
    log.observe("in", partition=0, low=10, now_ms=T)
    source.publish(0, 20)
    with pytest.raises(InterruptedError):
        dying.observe("in", partition=0, low=20, now_ms=T + 1000)
    dying.close()
    marks = log.marks("in", 1, above=LOW_MIN, up_to=0)
    assert len(marks) == (point == "observe:after") and (log.observed("in")[1].follows == 20) == bool(marks)
    log.observe("in", partition=0, low=20, now_ms=T + 1300)
    assert [(mark.low, mark.end) for mark in log.marks("in", 1, above=LOW_MIN, up_to=0)] == [(20, 0)]
