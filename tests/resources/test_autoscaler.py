"""Claims about the reactive scaler."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.resources.autoscaler import Hold, Rescale, ScalerLimits, decide_task_count
from penstock.resources.metrics import Incomplete, JobLoad, add_up
from penstock.tasks.messages import TaskReport

LIMITS = ScalerLimits(lag_slo_s=5, quiet_s=60, settle_s=0, task_count_min=1, task_count_max=8)


def a_load(at_ms: int = 0, **changes: float) -> JobLoad:
    values = {
        "task_count": 1,
        "input_rate": 100.0,
        "processed_rate": 100.0,
        "busy": 0.5,
        "lag_records": 100.0,
        "lag_s": 1.0,
        **changes,
    }
    return JobLoad(at_ms=at_ms, **values)  # type: ignore[arg-type]


def looks(count: int, every_ms: int = 1000, **changes: float) -> list[JobLoad]:
    return [a_load(at_ms=n * every_ms, **changes) for n in range(count)]


@pytest.mark.parametrize(
    ("loads", "task_count"),
    [
        (looks(3, lag_s=10, input_rate=250, processed_rate=100, lag_records=1500), 3),  # X + B/t over P
        (
            looks(3, lag_s=10, input_rate=100, processed_rate=100, lag_records=0),
            2,
        ),  # always at least one more
        (looks(3, lag_s=10, input_rate=1e9, processed_rate=100), 8),  # stops at the limit
        (looks(3, lag_s=10, processed_rate=0), 2),  # no rate estimate: one more
    ],
)
def test_lag_over_the_slo_adds_tasks(loads: list[JobLoad], task_count: int) -> None:
    decision = decide_task_count(loads, LIMITS, now_ms=loads[-1].at_ms)
    assert isinstance(decision, Rescale) and decision.task_count == task_count, decision
    assert "SLO" in decision.reason


@pytest.mark.parametrize(
    ("loads", "now_ms", "reason"),
    [
        ([], 0, "no metrics"),
        (looks(3, lag_s=10), 60_000, "old"),
        (looks(2, lag_s=10), 1000, "within"),
        (looks(3, lag_s=10, task_count=8), 2000, "limit"),
        (looks(30, lag_s=1, task_count=3), 29_000, "quiet for long enough"),
        (looks(70, lag_s=3, task_count=3), 69_000, "half of the SLO"),
        (looks(70, lag_s=1, task_count=2, busy=0.6), 69_000, "busy"),
        (
            [*looks(69, lag_s=1, task_count=2, busy=0.1), a_load(69_000, task_count=2, lag_records=900)],
            69_000,
            "grows",
        ),
    ],
)
def test_holds_with_a_reason(loads: list[JobLoad], now_ms: int, reason: str) -> None:
    decision = decide_task_count(loads, LIMITS, now_ms=now_ms)
    assert isinstance(decision, Hold) and reason in decision.reason, decision


def test_what_a_job_does_right_after_its_start_decides_nothing() -> None:
    limits = replace(LIMITS, settle_s=10)
    loads = looks(30, lag_s=10)
    assert isinstance(decide_task_count(loads[:10], limits, now_ms=9_000), Hold)
    assert isinstance(decide_task_count(loads[:12], limits, now_ms=11_000), Hold)  # not three looks yet
    assert isinstance(decide_task_count(loads[:13], limits, now_ms=12_000), Rescale)


def test_a_quiet_job_loses_one_task_at_a_time() -> None:
    decision = decide_task_count(looks(70, task_count=4, busy=0.1), LIMITS, now_ms=69_000)
    assert isinstance(decision, Rescale) and decision.task_count == 3


rates = st.floats(0, 1e9, allow_nan=False)


@given(
    st.lists(
        st.builds(
            JobLoad,
            at_ms=st.integers(0, 100_000),
            task_count=st.just(3),
            input_rate=rates,
            processed_rate=rates,
            busy=st.floats(0, 1),
            lag_records=rates,
            lag_s=rates,
        ),
        max_size=80,
    ),
    st.integers(0, 200_000),
)
def test_a_decision_stays_within_its_limits(loads: list[JobLoad], now_ms: int) -> None:
    decision = decide_task_count(loads, LIMITS, now_ms=now_ms)
    if isinstance(decision, Rescale):
        assert 1 <= decision.task_count <= 8 and decision.task_count != 3


def a_report(index: int, **changes: object) -> TaskReport:
    metrics = {
        "input_rate": 10.0,
        "processed_rate": 5.0,
        "busy": 0.2 * index,
        "lag_records": 20.0,
        "lag_s": 4.0,
    }
    values: dict[str, object] = {"state": "running", "generation": 1, "metrics": metrics, **changes}
    return TaskReport(task_id=f"j/{index}", job="j", shard=index, **values)  # type: ignore[arg-type]


def test_a_job_is_the_sum_of_its_tasks() -> None:
    load = add_up([a_report(0), a_report(1)], task_count=2, generation=1, at_ms=7)
    assert load == JobLoad(
        at_ms=7, task_count=2, input_rate=20, processed_rate=10, busy=0.2, lag_records=40, lag_s=4
    )


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        ([a_report(0)], "1 of 2"),
        ([a_report(0), a_report(1, generation=2)], "1 of 2"),
        ([a_report(0), a_report(1, state="starting")], "j/1"),
        ([a_report(0), a_report(1, metrics={})], "no metrics"),
    ],
)
def test_a_missing_task_makes_the_load_incomplete(reports: list[TaskReport], reason: str) -> None:
    load = add_up(reports, task_count=2, generation=1, at_ms=7)
    assert isinstance(load, Incomplete) and reason in load.reason
