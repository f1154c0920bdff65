"""Claims about one look at a job: the sum of its tasks, or why there is none."""

from __future__ import annotations

import pytest

from penstock.fleet.messages import TaskReport
from penstock.scaling.metrics.frames import NEEDED, Incomplete, JobLoad, add_up


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
        ([a_report(0), a_report(0)], "1 of 2"),
        ([a_report(0), a_report(1), a_report(1)], "more than once: j/1"),
        ([a_report(0), a_report(1, state="starting")], "j/1"),
        ([a_report(0), a_report(1, metrics={})], "no metrics"),
    ],
)
def test_a_missing_task_makes_the_load_incomplete(reports: list[TaskReport], reason: str) -> None:
    load = add_up(reports, task_count=2, generation=1, at_ms=7)
    assert isinstance(load, Incomplete) and reason in load.reason


@pytest.mark.parametrize("wrong", [None, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", NEEDED)
def test_a_number_that_is_left_out_or_cannot_be_makes_it_incomplete(name: str, wrong: float | None) -> None:
    metrics = {key: value for key, value in a_report(0).metrics.items() if key != name}
    if wrong is not None:
        metrics[name] = wrong
    load = add_up([a_report(0, metrics=metrics)], task_count=1, generation=1, at_ms=7)
    assert load == Incomplete(reason=f"j/0 does not report {name}")
