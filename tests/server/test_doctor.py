"""The doctor over HTTP: the patient is gathered from a real control plane."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pytest import approx

from penstock.fleet.messages import OUT_OF_MEMORY, Heartbeat, TaskReport
from penstock.scaling.doctor.doctor import examine, patient_of, with_now
from penstock.scaling.doctor.patient import METRICS, MINUTES
from penstock.scaling.metrics.frames import MINUTE_MS, Frame, NoFrame
from penstock.scaling.policies.facts import JobFacts, TaskFacts
from penstock.server.routes.policies import _whole, gather_patient
from penstock.streams.bus.log import CategorySpec
from tests.builders import a_body
from tests.scaling.policies.kit import NOW_MS, a_task
from tests.server.test_fleet import settle
from tests.server.world import JOB, World


def test_a_job_that_was_just_submitted_is_examined(world: World):
    assert world.submit().status_code == 200
    found = world.ask("GET", f"/jobs/{JOB}/doctor", role="reader")
    assert found.status_code == 200
    body = found.json()
    assert body["job"] == JOB and {"findings", "ruled_out", "not_known", "is_well"} <= body.keys()
    # Its input is on no bus yet, and nobody has reported anything.
    assert any(finding["name"] == "missing_category" for finding in body["findings"])
    assert any(item["rule"] == "lag" for item in body["not_known"])
    assert "missing package" in body["ruled_out"]


def test_a_job_whose_layers_do_not_fit_together_is_examined_too(world: World):
    world.submit()
    view = replace(
        world.plane.jobs.view(JOB),
        running=None,
        problem="they do not fit",
        expected=None,
        merged={"resources": 3},
    )
    patient = replace(
        gather_patient(world.plane, JOB), config=_whole(view), state=view.state, problem=view.problem
    )
    assert "change_refused" in {finding.name for finding in examine(patient).findings}


def test_no_such_job_is_not_found(world: World):
    assert world.ask("GET", "/jobs/nope/doctor").status_code == 404


def test_a_job_that_a_task_fails_shows_its_error_and_the_way_back(world: World):
    world.submit()
    patient = gather_patient(world.plane, JOB)
    assert patient.user_update_ms is not None and patient.is_package_there
    assert isinstance(patient.frame, NoFrame)
    assert examine(patient).job == JOB


class HandClock:
    """A clock that stands until a test moves it; on the hour, as containers' clocks are."""

    def __init__(self, at_ms: int) -> None:
        self.at_ms = at_ms

    def now_ms(self) -> int:
        return self.at_ms

    def boot_ms(self) -> int:
        return self.at_ms


class Ward:
    """A job of two tasks in one container whose beats say what a test says; every minute is recorded."""

    def __init__(self, world: World, **config: object) -> None:
        self.world, plane = world, world.plane
        columns = (("query", "string"), ("ts", "bigint"))
        plane.log.create(CategorySpec(name="queries", partitions=8, columns=columns, ts_column="ts"))
        assert world.submit(a_body(JOB, task_count=2, **config)).status_code == 200
        settle(world)
        self.generation, self.tasks = plane.task_service.task_counts()[JOB]
        clock = HandClock(plane.clock.now_ms() // MINUTE_MS * MINUTE_MS)
        plane.clock = plane.policies.jobs._clock = self.clock = clock  # type: ignore[assignment]
        plane.register_container("c1", "i", folder_id="f")
        self.read = self.lag = self.busy_ms = 0.0
        self.sequence = self.killed = 0

    def live(
        self,
        minutes: float,
        *,
        arrives: float,
        reads: float,
        busy: float = 0.5,
        silent: int = -1,
        **more: float,
    ) -> None:
        """So many records a second arrive for each task and are read, for so long, with a beat each 5 s."""
        for _ in range(int(minutes * 12)):
            self.sequence += 1
            self.clock.at_ms += 5_000
            self.read += reads * 5
            self.lag += (arrives - reads) * 5
            self.busy_ms += busy * 5_000
            metrics = {
                "at_ms": float(self.clock.at_ms),
                "started_ms": 1.0,
                "read_total": self.read,
                "busy_ms_total": self.busy_ms,
                "busy": busy,
                "input_rate": arrives,
                "processed_rate": reads,
                "lag_records": self.lag,
                "lag_s": self.lag / max(reads, 1),
                **more,
            }
            tasks = tuple(
                TaskReport(
                    task_id=f"{JOB}/{index}", job=JOB, generation=self.generation, shard=0, state="running",
                    metrics=metrics, failures={OUT_OF_MEMORY: self.killed} if self.killed else {},
                )
                for index in range(self.tasks)
                if index != silent
            )  # fmt: skip
            self.world.plane.on_heartbeat(
                Heartbeat(container="c1", incarnation="i", sequence=self.sequence, tasks=tasks)
            )
            self.world.plane._record()

    def examine(self) -> dict[str, Any]:
        answer = self.world.ask("GET", f"/jobs/{JOB}/doctor", role="reader")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        found["names"] = {finding["name"] for finding in found["findings"]}
        found["unknown"] = {item["rule"]: item["why"] for item in found["not_known"]}
        return found


def test_what_arrives_and_is_not_read_is_backpressure_on_demand(world: World):
    """Plan: from the beats of a container: 100 records a second arrive for each of two tasks, 60 are read."""
    ward = Ward(world)
    ward.live(8, arrives=100, reads=60, busy=0.95)
    found = ward.examine()
    (finding,) = [each for each in found["findings"] if each["name"] == "backpressure"]
    assert finding["evidence"]["ingest_rate"] == approx(200, rel=0.02)
    assert finding["evidence"]["processed_rate"] == approx(120, rel=0.02)
    assert "backpressure" not in found["unknown"] and "memory kills" not in found["unknown"]
    assert "memory kills" in found["ruled_out"]


def test_a_lag_that_grows_is_said_to_grow_and_by_how_much(world: World):
    ward = Ward(world)
    ward.live(12, arrives=100, reads=50, busy=0.97)
    (finding,) = [each for each in ward.examine()["findings"] if each["name"] == "lag_overload"]
    assert finding["severity"] == "critical" and finding["symptom"].endswith("and grows")
    # Two tasks, 50 records a second more each, over the last minutes of ten.
    assert finding["evidence"]["growth_records"] >= 100 * 60 * 7


def test_ends_above_the_memory_reserved_are_known_from_the_minutes_on_demand(world: World):
    """Plan: tasks ended three times and run again, without an error now: only the minutes know."""
    ward = Ward(world)
    ward.live(3, arrives=10, reads=10)
    ward.killed = 3
    ward.live(3, arrives=10, reads=10)
    found = ward.examine()
    assert "oom" in found["names"] and "memory kills" not in found["unknown"]


@pytest.mark.parametrize("busy", [0.5, 0.7, 0.89])
def test_a_lag_over_its_slo_between_half_and_nearly_all_busy_is_never_ruled_out(world: World, busy: float):
    ward = Ward(world, slo={"lag_s": 90})
    ward.lag = 40_000.0
    ward.live(5, arrives=100, reads=100, busy=busy)
    found = ward.examine()
    (finding,) = [each for each in found["findings"] if each["name"] == "lag_unexplained"]
    assert f"{busy:.0%} busy" in finding["cause"] and finding["evidence"]["lag_s"] == 400
    assert "lag" not in found["ruled_out"]


def test_a_lag_that_shrinks_is_told_as_catching_up(world: World):
    ward = Ward(world, slo={"lag_s": 90})
    ward.lag = 60_000.0
    ward.live(5, arrives=80, reads=100, busy=0.8)
    found = ward.examine()
    assert "lag_catching_up" in found["names"] and "lag" not in found["ruled_out"]


def test_the_newest_reports_count_beside_the_minutes(world: World):
    """Plan: well for minutes, and far behind since the last beat, in a minute that is not over."""
    ward = Ward(world, slo={"lag_s": 90})
    ward.live(6, arrives=100, reads=100)
    ward.lag = 50_000.0
    ward.live(0.25, arrives=100, reads=100)
    found = ward.examine()
    assert any(each["evidence"].get("lag_s") == 500 for each in found["findings"])


def test_a_silent_task_makes_sums_unknown_and_old_numbers_no_news(world: World):
    ward = Ward(world)
    ward.live(6, arrives=100, reads=100)
    ward.live(5, arrives=100, reads=100, silent=1)
    found = ward.examine()
    assert "it was not reported in the last 3 minutes" in found["unknown"]["lag"]
    assert "lag" not in found["ruled_out"]


def test_what_only_minutes_know_is_not_known_while_there_are_few(world: World):
    ward = Ward(world)
    ward.live(0.25, arrives=100, reads=10)
    unknown = ward.examine()["unknown"]
    assert "5 are needed" in unknown["backpressure"]
    assert "oom is not known" in unknown["memory kills"]


def test_slow_user_code_is_no_reason_for_a_trigger_of_half_a_minute(world: World):
    """Plan: 20 ms a record, 200 records a second, four tasks' worth: batches of 32 s every second. The doctor
    advised `trigger_ms=32136`.
    """
    ward = Ward(world, trigger_ms=1000)
    ward.live(6, arrives=50, reads=50, busy=0.97, batch_ms=32_136.0)
    found = ward.examine()
    commands = [advice["command"] for finding in found["findings"] for advice in finding["todo"]]
    assert not any("trigger_ms" in command for command in commands)
    assert "trigger" in found["ruled_out"]


def test_the_policy_and_who_asks_see_the_same_minutes(world: World):
    ward = Ward(world)
    ward.live(8, arrives=100, reads=60, busy=0.95)
    jobs = world.plane.policies.jobs
    jobs.names()
    facts = jobs.facts(JOB, (), MINUTES, METRICS)
    assert isinstance(facts, JobFacts)
    shown, asked = patient_of(facts).frame, gather_patient(world.plane, JOB).frame
    assert isinstance(shown, Frame) and isinstance(asked, Frame)
    assert shown.first_minute == asked.first_minute and shown.minutes == MINUTES + 1
    for metric in METRICS:
        assert np.array_equal(shown.values[metric], asked.values[metric], equal_nan=True), metric
    assert {finding.name for finding in examine(patient_of(facts)).findings} <= ward.examine()["names"]


def test_a_minute_of_now_knows_only_what_all_tasks_say():
    def now(*tasks: TaskFacts, task_count: int = 2) -> Frame | NoFrame:
        nothing = NoFrame(job="a", reason="nothing was recorded")
        return with_now(nothing, "a", tasks, task_count=task_count, now_ms=NOW_MS)

    frame = now(a_task(0, busy=0.2), a_task(1, busy=0.6, rate=None))
    assert isinstance(frame, Frame)
    assert frame.last("busy") == 0.6 and frame.last("busy_mean") == 0.4
    assert frame.last("processed_rate") != frame.last("processed_rate"), "not known"
    assert isinstance(now(), NoFrame)
    assert isinstance(now(a_task(0)), NoFrame), "one of two is silent"
