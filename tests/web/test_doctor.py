"""The doctor over HTTP: the patient is gathered from a real control plane."""

from __future__ import annotations

from dataclasses import replace

from penstock.resources.frames import NoFrame
from penstock.resources.policies.doctor.examine import examine
from penstock.resources.policies.doctor.now_frame import frame_of_now
from penstock.web.doctor import _whole, gather_patient
from tests.resources.policies.kit import NOW_MS, a_frame, a_task
from tests.web.world import JOB, World


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
        world.plane.jobs.view(JOB), running=None, problem="they do not fit", config={"resources": 3}
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


def test_a_history_is_used_where_there_is_one(world: World):
    world.submit()
    frame = a_frame(60, job=JOB, lag_s=500.0, busy_mean=0.2, lag_records=1e6)
    patient = gather_patient(world.plane, JOB, lambda job, metrics, minutes: frame)
    assert patient.frame is frame
    assert "lag_waiting" in {finding.name for finding in examine(patient).findings}
    nothing = gather_patient(world.plane, JOB, lambda job, metrics, minutes: NoFrame(job=job, reason="gap"))
    assert isinstance(nothing.frame, NoFrame)


def test_a_minute_of_now_knows_only_what_all_tasks_say():
    frame = frame_of_now("a", [a_task(0, busy=0.2), a_task(1, busy=0.6, rate=None)], now_ms=NOW_MS)
    assert not isinstance(frame, NoFrame)
    assert frame.last("busy") == 0.6 and frame.last("busy_mean") == 0.4
    assert frame.last("processed_rate") != frame.last("processed_rate"), "not known"
    assert isinstance(frame_of_now("a", [], now_ms=NOW_MS), NoFrame)
