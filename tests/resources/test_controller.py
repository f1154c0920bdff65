"""Claims about the resource loop: what it writes, and everything that makes it hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.app import ControlPlane
from penstock.core.errors import PenstockError, StoreUnavailable, VersionConflict
from penstock.resources.autoscaler import STALE_MS, Hold, Rescale
from penstock.resources.controller import TURN_MAX, ResourceController, ScalableJob
from penstock.resources.metrics import Incomplete, JobLoad
from penstock.settings import Settings
from penstock.tasks.messages import Heartbeat, TaskReport

CALM = {"input_rate": 100.0, "processed_rate": 100.0, "busy": 0.5, "lag_records": 10.0, "lag_s": 0.1}
BEHIND = {"input_rate": 200.0, "processed_rate": 100.0, "busy": 1.0, "lag_records": 3000.0, "lag_s": 30.0}
CONFIG: dict[str, Any] = {
    "scaler": {"enabled": True, "quiet_s": 60, "settle_s": 0, "task_count_min": 1},
    "slo": {"lag_s": 5},
    "task_count_max": 32,
    "partitions": 8,
}


def a_job(name: str = "a", **changes: Any) -> ScalableJob:
    values: dict[str, Any] = {
        "expected_version": 7,
        "task_count": 1,
        "generation": 1,
        "is_settled": True,
        "oncall_task_count": None,
        "config": CONFIG,
        **changes,
    }
    return ScalableJob(name=name, **values)


@dataclass
class Jobs:
    """The job layer in memory: applies what is written at the next round, as the syncer would."""

    jobs: dict[str, ScalableJob] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)  # task ids that do not report
    written: list[tuple[str, int, int, str]] = field(default_factory=list)
    failing: dict[str, PenstockError] = field(default_factory=dict)
    turns: list[tuple[str, ...]] = field(default_factory=list)  # whom each round looked at

    def add(self, job: ScalableJob, metrics: dict[str, float]) -> None:
        self.jobs[job.name], self.metrics[job.name] = job, metrics

    def task_reports(self) -> dict[str, Sequence[TaskReport]]:
        return {name: self.reports(name) for name in self.jobs}

    def scalable_jobs(self, names: Sequence[str]) -> tuple[ScalableJob, ...]:
        self.turns.append(tuple(names))
        return tuple(self.jobs[name] for name in names)

    def write_task_count(self, job: str, task_count: int, *, expected_version: int, reason: str) -> None:
        if job in self.failing:
            raise self.failing[job]
        self.written.append((job, task_count, expected_version, reason))
        self.jobs[job] = replace(
            self.jobs[job],
            expected_version=expected_version + 1,
            task_count=task_count,
            generation=self.jobs[job].generation + 1,
        )

    def reports(self, name: str) -> tuple[TaskReport, ...]:
        job = self.jobs[name]
        return tuple(
            TaskReport(
                task_id=f"{name}/{index}",
                job=name,
                generation=job.generation,
                shard=index,
                state="running",
                metrics=self.metrics[name],
            )
            for index in range(job.task_count)
            if f"{name}/{index}" not in self.silent
        )


@dataclass
class Loop:
    """A controller over jobs in memory, and the time."""

    jobs: Jobs
    controller: ResourceController
    now_ms: int = 0

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.now_ms += 1000
            self.controller.tick(self.now_ms)

    def decision(self, name: str = "a") -> str:
        return self.controller.decisions[name].reason


@pytest.fixture
def loop() -> Loop:
    jobs = Jobs()
    return Loop(jobs, ResourceController(jobs))


def test_lag_is_answered_once_with_the_reason(loop: Loop):
    loop.jobs.add(a_job(), BEHIND)
    loop.run(3)
    ((job, task_count, version, reason),) = loop.jobs.written
    assert (job, task_count, version) == ("a", 3, 7)  # (200 + 3000 / 30) / 100
    assert reason.startswith("lag 30.0 s over the SLO of 5 s") and reason.endswith("1 -> 3 tasks")
    assert loop.controller.decisions["a"] == Rescale(task_count=3, reason=reason)
    loop.jobs.metrics["a"] = CALM
    loop.run(20)
    assert len(loop.jobs.written) == 1


def test_in_a_large_fleet_all_jobs_get_their_turns(loop: Loop):
    """Plan: more jobs than one round looks at; one of them leaves before the second round."""
    names = [f"j{number:05d}" for number in range(TURN_MAX + 500)]
    for name in names:
        loop.jobs.add(a_job(name=name), CALM)
    loop.run(1)
    assert loop.jobs.turns[-1] == tuple(names[:TURN_MAX])
    del loop.jobs.jobs[names[0]]
    loop.run(2)
    assert loop.jobs.turns[-2] == (*names[TURN_MAX:], *names[1:501])
    assert loop.jobs.turns[-1] == (*names[501:], names[1])
    assert set(loop.controller.loads) == set(names[1:])


def test_one_look_or_two_decide_nothing(loop: Loop):
    loop.jobs.add(a_job(), BEHIND)
    loop.run(2)
    assert loop.jobs.written == []


def test_a_calm_job_is_left_alone(loop: Loop):
    loop.jobs.add(a_job(), CALM)
    loop.run(100)
    assert loop.jobs.written == [] and loop.decision() == "within the SLO"


def test_a_quiet_job_gives_tasks_back_one_by_one(loop: Loop):
    loop.jobs.add(a_job(task_count=3), {**CALM, "busy": 0.1})
    loop.run(61)
    assert [count for _, count, _, _ in loop.jobs.written] == [2]
    loop.run(61)
    assert [count for _, count, _, _ in loop.jobs.written] == [2, 1]
    loop.run(200)
    assert len(loop.jobs.written) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_settled": False}, "a change is under way"),
        ({"oncall_task_count": 1}, "oncall set 1 tasks"),
        ({"config": {**CONFIG, "scaler": {**CONFIG["scaler"], "enabled": False}}}, "switched off"),
        ({"config": {**CONFIG, "task_count_max": 1}}, "1 tasks is the limit"),
        ({"config": {**CONFIG, "partitions": 1}}, "1 tasks is the limit"),
    ],
)
def test_it_holds_and_says_why(loop: Loop, changes: dict[str, Any], reason: str):
    loop.jobs.add(a_job(**changes), BEHIND)
    loop.run(20)
    assert loop.jobs.written == [] and reason in loop.decision()
    assert isinstance(loop.controller.decisions["a"], Hold)


def test_it_goes_on_when_the_hold_is_over(loop: Loop):
    loop.jobs.add(a_job(oncall_task_count=1), BEHIND)
    loop.run(20)
    loop.jobs.jobs["a"] = a_job(expected_version=8)
    loop.run(1)
    assert [version for _, _, version, _ in loop.jobs.written] == [8]


def test_a_job_with_a_silent_task_has_no_load(loop: Loop):
    loop.jobs.add(a_job(task_count=2), BEHIND)
    loop.jobs.silent = {"a/1"}
    loop.run(20)
    assert loop.jobs.written == [] and loop.decision() == "1 of 2 tasks report"
    assert isinstance(loop.controller.loads["a"], Incomplete)
    loop.jobs.silent = set()
    loop.run(3)
    assert len(loop.jobs.written) == 1


def test_a_job_without_metrics_has_no_load(loop: Loop):
    loop.jobs.add(a_job(), {})
    loop.run(20)
    assert loop.jobs.written == [] and loop.decision() == "no metrics yet: a/0"


@pytest.mark.parametrize("wrong", [None, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", sorted(CALM))
def test_a_job_that_leaves_a_number_out_or_reports_nonsense_has_no_load_and_holds_up_nobody(
    loop: Loop, name: str, wrong: float | None
):
    loop.jobs.add(a_job("odd"), {key: value for key, value in CALM.items() if key != name})
    if wrong is not None:
        loop.jobs.metrics["odd"][name] = wrong
    loop.jobs.add(a_job("other"), CALM)
    loop.run(1)
    load = loop.controller.loads["odd"]
    assert isinstance(load, Incomplete) and load.reason == f"odd/0 does not report {name}"
    assert isinstance(loop.controller.loads["other"], JobLoad)


def test_looks_of_an_older_generation_are_forgotten(loop: Loop):
    loop.jobs.add(a_job(), BEHIND)
    loop.run(2)
    loop.jobs.jobs["a"] = a_job(generation=2, task_count=2)
    loop.run(2)
    assert loop.jobs.written == []  # two looks of each generation: not three of one
    loop.run(1)
    assert len(loop.jobs.written) == 1


def test_the_change_it_asked_for_is_not_judged_by_what_came_before(loop: Loop):
    """Plan: after a write, the job is still behind; three looks at the new tasks come before the next write."""
    loop.jobs.add(a_job(), BEHIND)
    loop.run(3)
    assert len(loop.jobs.written) == 1
    loop.run(2)
    assert len(loop.jobs.written) == 1
    loop.run(1)
    assert len(loop.jobs.written) == 2


@pytest.mark.parametrize(
    "error",
    [VersionConflict("job 'b'", expected=7, actual=8), StoreUnavailable("the database is busy")],
)
def test_one_failing_job_does_not_stop_the_others(loop: Loop, error: PenstockError):
    for name in ("a", "b", "c"):
        loop.jobs.add(a_job(name), BEHIND)
    loop.jobs.failing = {"b": error}
    loop.run(3)
    assert [job for job, *_ in loop.jobs.written] == ["a", "c"]
    assert loop.decision("b") == f"the last decision was not written: {error.what}"
    loop.jobs.failing = {}
    loop.run(1)
    assert [job for job, *_ in loop.jobs.written] == ["a", "c", "b"]


def test_a_job_that_is_gone_leaves_nothing(loop: Loop):
    loop.jobs.add(a_job(), CALM)
    loop.run(1)
    assert isinstance(loop.controller.loads["a"], JobLoad)
    loop.jobs.jobs.clear()
    loop.run(1)
    assert loop.controller.loads == {} and loop.controller.decisions == {}


def test_the_last_words_of_a_silent_container_are_no_load(tmp_path: Path):
    """Plan: a real control plane; a container reports, then the clock goes on without a beat."""
    plane = ControlPlane(Settings(folder=tmp_path))
    report = TaskReport(task_id="a/0", job="a", generation=1, shard=0, state="running", metrics=BEHIND)
    beat = Heartbeat(container="c1", incarnation="i", sequence=1, tasks=(report,), engine_ready=True)
    plane.register_container("c1", "i", folder_id="f")
    plane.on_heartbeat(beat)
    assert plane.task_reports() == {"a": [report]}
    (row,) = plane.shard_manager.containers()
    plane.clock = LateClock(row.seen_ms + STALE_MS)  # type: ignore[assignment]
    assert plane.task_reports() == {"a": [report]}
    plane.clock = LateClock(row.seen_ms + STALE_MS + 1)  # type: ignore[assignment]
    assert plane.task_reports() == {}
    plane.stop()


@dataclass
class LateClock:
    at_ms: int

    def now_ms(self) -> int:
        return self.at_ms

    def boot_ms(self) -> int:
        return self.at_ms
