"""Claims about a job's minute: rates from totals, sums of all tasks or none, whatever reports and clocks do."""

from __future__ import annotations

from math import isnan, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.fleet.messages import TaskReport
from penstock.scaling.metrics.frames import METRICS
from penstock.scaling.metrics.minutes import Minute, MinuteAggregator

START = 28_000_000 * 60_000  # the beginning of a minute
ONE = {"a": (1, 1)}


def a_report(index: int = 0, *, generation: int = 1, state: str = "running", **more: Any) -> TaskReport:
    fields = {name: more.pop(name) for name in ("restarts", "failures") if name in more}
    return TaskReport(
        task_id=f"a/{index}", job="a", generation=generation, shard=0, state=state, metrics=more, **fields
    )


def totals(
    at_s: float, *, rate: float = 100.0, life: float = 1.0, lag: float = 0.0, **more: float
) -> dict[str, float]:
    """What a task says that has read so many records a second since second 0, half of its time busy."""
    told = {"read_total": rate * at_s, "written_total": rate * at_s / 2, "busy_ms_total": at_s * 500}
    return {"at_ms": at_s * 1000, "started_ms": life, "lag_records": lag, **told, **more}


def value(minute: Minute | None, metric: str, job: str = "a") -> float:
    assert minute is not None
    return float(minute.values[minute.jobs.index(job), list(METRICS).index(metric)])


def a_minute(
    *looks: tuple[float, list[TaskReport]], counts: dict[str, tuple[int, int]] | None = None
) -> Minute:
    """The first minute after these looks, each at a second of it."""
    book = MinuteAggregator()
    for at_s, reports in looks:
        assert book.observe(START + int(at_s * 1000), counts or ONE, {"a": reports}) is None
    ended = book.observe(START + 60_000, counts or ONE, {})
    assert ended is not None and ended.minute == START // 60_000
    return ended


def test_rates_are_differences_of_totals():
    found = a_minute(*((at, [a_report(**totals(at))]) for at in range(0, 60, 5)))
    assert value(found, "processed_rate") == pytest.approx(100)
    assert value(found, "output_rate") == pytest.approx(50)
    assert value(found, "busy") == pytest.approx(0.5)
    assert value(found, "busy_mean") == pytest.approx(0.5)
    assert value(found, "ingest_rate") == pytest.approx(100)
    assert value(found, "task_count") == 1


def test_what_arrives_is_what_is_read_and_what_waits_more():
    """It reads 100 a second, and each second 40 more wait."""
    found = a_minute(*((at, [a_report(**totals(at, lag=40 * at))]) for at in range(0, 60, 5)))
    assert value(found, "processed_rate") == pytest.approx(100)
    assert value(found, "ingest_rate") == pytest.approx(140)
    assert value(found, "lag_records") == 40 * 55


def test_sums_are_of_all_tasks_or_unknown():
    both, two = [a_report(0, **totals(30)), a_report(1, **totals(30))], {"a": (1, 2)}
    first = [a_report(0, **totals(0)), a_report(1, **totals(0, lag=30))]
    assert value(a_minute((0, first), (30, both), counts=two), "processed_rate") == pytest.approx(200)
    for silent in (both[:1], [both[0], a_report(1, state="backoff")]):
        found = a_minute((0, first[:1]), (30, silent), counts=two)
        assert isnan(value(found, "processed_rate")) and isnan(value(found, "lag_records"))
        assert value(found, "task_count") == 2  # what is known stays known


def test_maxima_and_the_spread_of_lag():
    looks = [
        [a_report(0, **totals(at, lag=100, lag_s=3, memory_mb=50)), a_report(1, **totals(at, lag=300, lag_s=9, memory_mb=70 - at))]
        for at in (0, 30)
    ]  # fmt: skip
    found = a_minute((0, looks[0]), (30, looks[1]), counts={"a": (1, 2)})
    assert value(found, "lag_records") == 400 and value(found, "lag_s") == 9
    assert value(found, "lag_spread") == pytest.approx(0.5)
    assert value(found, "memory_mb") == 120 and value(found, "memory_task_mb") == 70  # the most in the minute


def test_a_restart_begins_anew_and_costs_only_the_step_over_it():
    looks = [(at, [a_report(**totals(at))]) for at in (0, 10, 20)]
    looks += [(at, [a_report(**totals(at - 25, life=2.0))]) for at in (30, 40, 50)]
    found = a_minute(*looks)
    assert value(found, "processed_rate") == pytest.approx(100)


def test_a_total_that_goes_back_in_one_life_is_no_negative_rate():
    found = a_minute(
        (0, [a_report(**totals(10))]), (10, [a_report(**totals(20) | {"read_total": 5.0})]), (30, [a_report(**totals(40) | {"read_total": 205.0})])
    )  # fmt: skip
    assert value(found, "processed_rate") == pytest.approx(10)


def test_a_report_heard_again_adds_nothing():
    report = [a_report(**totals(30))]
    found = a_minute((0, [a_report(**totals(0))]), (30, report), (40, report), (50, report))
    assert value(found, "processed_rate") == pytest.approx(100)


def test_a_total_that_is_not_told_makes_no_rate():
    """A plain process knows its cpu and its memory."""
    looks = [
        (at, [a_report(cpu_at_ms=at * 1000.0, cpu_started_ms=1.0, cpu_ms_total=at * 250.0, memory_mb=9.0)])
        for at in (0, 30, 50)
    ]
    found = a_minute(*looks)
    known = {name for name in METRICS if not isnan(value(found, name))}
    assert known == {"cpu", "memory_mb", "memory_task_mb", "restarts", "oom", "exceptions", "task_count"}
    assert value(found, "cpu") == pytest.approx(0.25)


def test_after_a_gap_nothing_is_guessed():
    """Two minutes of silence: the mean over them is not the rate of the minute that ends them."""
    book = MinuteAggregator()
    book.observe(START, ONE, {"a": [a_report(**totals(0))]})
    book.observe(START + 120_000, ONE, {"a": [a_report(**totals(120, rate=7))]})
    found = book.observe(START + 180_000, ONE, {})
    assert isnan(value(found, "processed_rate"))


def test_a_few_seconds_are_no_minute():
    found = a_minute((50, [a_report(**totals(50))]), (55, [a_report(**totals(55))]))
    assert isnan(value(found, "processed_rate")) and value(found, "lag_records") == 0


def test_another_generation_is_another_job():
    book = MinuteAggregator()
    book.observe(START, ONE, {"a": [a_report(**totals(0))]})
    two = {"a": (2, 1)}
    for at in (20, 40):
        book.observe(
            START + at * 1000,
            two,
            {"a": [a_report(**totals(at, rate=9)), a_report(generation=2, **totals(at))]},
        )
    assert value(book.observe(START + 60_000, two, {}), "processed_rate") == pytest.approx(100)


def test_failures_are_those_of_the_minute():
    book = MinuteAggregator()
    book.observe(START, ONE, {"a": [a_report(restarts=5, failures={"Other": 5})]})
    looks = [
        a_report(state="backoff", restarts=6, failures={"Other": 5, "OutOfMemory": 1}),
        a_report(state="running", restarts=6, failures={"Other": 5, "OutOfMemory": 1}),
        a_report(restarts=1, failures={"Other": 1}),  # in another container it is counted anew
    ]
    for at, report in enumerate(looks, 1):
        book.observe(START + at * 10_000, ONE, {"a": [report]})
    first = book.observe(START + 60_000, ONE, {"a": [looks[2]]})
    assert [value(first, name) for name in ("restarts", "oom", "exceptions")] == [2, 1, 2]
    second = book.observe(START + 120_000, ONE, {})
    assert [value(second, name) for name in ("restarts", "oom", "exceptions")] == [0, 0, 0]


def test_jobs_that_are_gone_have_no_minute():
    book = MinuteAggregator()
    book.observe(START, ONE, {"a": [a_report(**totals(0))]})
    book.observe(START + 1000, {}, {})
    assert book.observe(START + 60_000, {}, {}) is None


def test_a_clock_set_back_loses_the_open_minute_and_no_more():
    book = MinuteAggregator()
    for at in (0, 30):
        book.observe(START + at * 1000, ONE, {"a": [a_report(**totals(at))]})
    assert book.observe(START - 3_600_000, ONE, {"a": [a_report(**totals(40))]}) is None
    book.observe(START - 3_600_000 + 30_000, ONE, {"a": [a_report(**totals(70))]})
    found = book.observe(START - 3_600_000 + 60_000, ONE, {})
    assert found is not None and found.minute == START // 60_000 - 60
    assert value(found, "processed_rate") == pytest.approx(100)


def test_a_clock_set_forward_leaves_a_gap():
    book = MinuteAggregator()
    for at in (0, 30):
        book.observe(START + at * 1000, ONE, {"a": [a_report(**totals(at))]})
    found = book.observe(START + 86_400_000, ONE, {"a": [a_report(**totals(31))]})
    assert found is not None and found.minute == START // 60_000


numbers = st.one_of(st.floats(-1e12, 1e12), st.sampled_from([nan, float("inf"), -float("inf"), 0.0, -1.0]))
metrics = st.dictionaries(
    st.sampled_from(["at_ms", "started_ms", "read_total", "written_total", "busy_ms_total", "cpu_ms_total", "cpu_at_ms", "cpu_started_ms",
                     "lag_records", "lag_s", "lag_bytes", "memory_mb", "watermark_lag_s"]), numbers)  # fmt: skip


@given(
    st.lists(
        st.tuples(
            st.integers(-200_000, 400_000),
            st.lists(
                st.tuples(st.integers(0, 2), st.integers(1, 2), st.sampled_from(["running", "backoff"]), metrics, st.integers(0, 9)), max_size=4
            ),
        ),
        max_size=12,
    )
)  # fmt: skip
@settings(max_examples=40)
def test_whatever_is_reported_no_number_is_negative_or_infinite(looks):
    """Gaps, repeats, clocks that jump both ways, and nonsense in every field."""
    book = MinuteAggregator()
    for after_ms, told in looks:
        reports = [
            a_report(
                index, generation=generation, state=state, restarts=count, failures={"Other": count}, **said
            )
            for index, generation, state, said, count in told
        ]
        found = book.observe(START + after_ms, {"a": (1, 2)}, {"a": reports})
        if found is not None:
            known = found.values[~np.isnan(found.values)]
            assert np.isfinite(known).all() and (known >= 0).all()
            assert not value(found, "busy") > 1


@settings(max_examples=30)
@given(st.lists(st.floats(0.5, 20), min_size=12, max_size=40), st.floats(0, 1e6), st.integers(0, 5))
def test_a_steady_rate_is_found_however_it_is_looked_at(steps, rate, repeats):
    book, at, found = MinuteAggregator(), 0.0, []
    for step in steps:
        for _ in range(1 + repeats):
            found.append(
                book.observe(START + int(at * 1000), ONE, {"a": [a_report(**totals(at, rate=rate))]})
            )
        at += step
    rates = [value(minute, "processed_rate") for minute in found if minute is not None]
    assert all(isnan(seen) or seen == pytest.approx(rate, rel=1e-6, abs=1e-6) for seen in rates)
