"""Claims about jobs that are looked at in seconds."""

from __future__ import annotations

import pytest

from penstock.fleet.messages import TaskReport
from penstock.scaling.metrics.frames import Frame, NoFrame
from penstock.scaling.scaler.observe import STEPS, SecondsAggregator

START = 1_790_000_000_000


def a_report(at_s: int, *, generation: int = 1, told_s: int | None = None) -> TaskReport:
    """A task that reads 100 records a second and falls back by 50 a second."""
    at = at_s if told_s is None else told_s
    metrics = {
        "at_ms": at * 1000.0,
        "started_ms": 1.0,
        "read_total": at * 100.0,
        "busy_ms_total": at * 800.0,
        "lag_records": at * 50.0,
        "lag_s": 7.0,
    }
    return TaskReport(
        task_id="a/0", job="a", generation=generation, shard=0, state="running", metrics=metrics
    )


def look(book: SecondsAggregator, at_s: int, report: TaskReport, *, generation: int = 1) -> None:
    book.observe(START + at_s * 1000, {"a": (generation, 1)}, {"a": [report]})


def test_rates_come_from_totals_in_steps_of_two_heartbeats():
    book = SecondsAggregator(1000)
    for at_s in range(30):
        look(book, at_s, a_report(at_s))
    frame = book.frame("a")
    assert isinstance(frame, Frame) and (frame.step_ms, frame.minutes) == (2000, STEPS)
    assert frame.first_minute + frame.minutes == (START + 28_000) // 2000
    assert frame.last("processed_rate") == pytest.approx(100) and frame.last("ingest_rate") == pytest.approx(
        150
    )
    assert frame.last("busy_mean") == pytest.approx(0.8) and frame.last("lag_s") == 7


def test_steps_without_news_are_left_out_and_a_gap_begins_anew():
    book = SecondsAggregator(1000)
    for at_s in range(12):
        look(book, at_s, a_report(at_s))
    before = book.frame("a")
    for at_s in range(12, 16):  # its container beats, and says nothing new
        look(book, at_s, a_report(at_s, told_s=11))
    after = book.frame("a")
    assert isinstance(before, Frame) and isinstance(after, Frame) and after.minutes <= before.minutes + 1
    for at_s in range(60, 66):
        look(book, at_s, a_report(at_s))
    late = book.frame("a")
    assert isinstance(late, Frame) and late.minutes <= 3


def test_a_batch_that_is_under_way_is_no_sign_of_a_slow_task():
    """Plan: batches of eight seconds, 100 records a second. What is read is told when a batch is over."""
    book = SecondsAggregator(1000)
    seen = []
    for at_s in range(60):
        report = a_report(at_s)
        report.metrics.update(read_total=at_s // 8 * 800.0, busy_ms_total=at_s * 1000.0, lag_records=0.0)
        look(book, at_s, report)
        frame = book.frame("a")
        seen += [frame.last("processed_rate")] if isinstance(frame, Frame) else []
    assert seen and seen[2:] == pytest.approx([100.0] * len(seen[2:]))


def test_a_task_that_waits_for_records_is_known_all_the_same():
    book = SecondsAggregator(1000)
    for at_s in range(20):
        report = a_report(at_s)
        report.metrics.update(read_total=500.0, busy_ms_total=at_s * 100.0, lag_records=0.0)
        look(book, at_s, report)
    frame = book.frame("a")
    assert isinstance(frame, Frame) and frame.last("processed_rate") == 0


def test_another_generation_and_a_job_that_is_not_watched_are_unknown():
    book = SecondsAggregator(1000)
    for at_s in range(12):
        look(book, at_s, a_report(at_s))
    look(book, 12, a_report(12, generation=2), generation=2)
    assert isinstance(book.frame("a"), NoFrame)
    book.observe(START + 13_000, {}, {})
    assert isinstance(book.frame("a"), NoFrame)
