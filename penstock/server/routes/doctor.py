"""A job as the doctor's patient, gathered from what the control plane has; and the doctor's answer."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Response

from penstock.core.errors import NotFound, PenstockError
from penstock.db.tokens import Caller
from penstock.fleet.shard_load import KINDS
from penstock.jobs.config import JobConfig, StreamJob
from penstock.jobs.job_view import JobView
from penstock.scaling.doctor.doctor import examine, patient_of
from penstock.scaling.doctor.patient import METRICS, MINUTES, InputFacts, Patient, WatermarkFacts
from penstock.scaling.metrics.frames import NoFrame
from penstock.scaling.policies.balance import starved_tasks
from penstock.server import replies
from penstock.server.answers import answer
from penstock.server.bodies import Name
from penstock.server.pages import watermarks_of
from penstock.server.pools import LONG
from penstock.server.replies import problems
from penstock.server.security import Guard
from penstock.server.services import Control

JOURNAL_MAX = 50


def add_doctor_routes(router: APIRouter, plane: Control, guard: Guard) -> None:
    """What is wrong with a job."""

    @router.get("/jobs/{name}/doctor", response_model=replies.Examination, responses=problems(404))
    @LONG
    def get_doctor(name: Name, caller: Caller = guard.allow("job.read")) -> Response:
        """What is wrong with a job, why, how sure that is, and what to do; what was ruled out."""
        return answer(examine(gather_patient(plane, name)).to_json())


def gather_patient(plane: Control, name: str) -> Patient:
    """All that is known of a job: what its policies are shown, and what only the control plane has.

    What does not answer is left out: the doctor says so.
    """
    view = plane.jobs.view(name)
    patient = _shown_to_policies(plane, view)
    streaming = isinstance(patient.config, StreamJob)
    writes = plane.jobs.history(name, layer="provisioner", limit=2)
    package = patient.config.package
    return replace(
        patient,
        state=view.state,
        problem=view.quarantine.reason if view.quarantine is not None else view.problem,
        starved=tuple(one for one in starved_tasks(plane.fleet.task_reports()) if one.job == name),
        journal=plane.journal.entries(subject=name, limit=JOURNAL_MAX),
        watermarks=_watermarks(plane, name) if streaming and view.running is not None else (),
        inputs=tuple(_input(plane, source.category) for source in patient.config.inputs),
        is_package_there=package is None or plane.packages.has(package.hash),
        container_memory_mb=_smallest(plane),
        user_update_ms=writes[0].at_ms if writes else None,
        last_good_version=writes[1].version if len(writes) > 1 else None,
    )


def _shown_to_policies(plane: Control, view: JobView) -> Patient:
    """The hour of minutes that is kept, and what its tasks say now."""
    try:
        facts = plane.policies.jobs.facts_now(view.name, METRICS, MINUTES)
    except PenstockError:
        facts = plane.policies.jobs.facts_now(view.name, (), MINUTES)  # what is kept cannot be read
    if not isinstance(facts, NoFrame):
        return patient_of(facts)
    config = _whole(view) if view.running is None else view.running.config
    return Patient(job=view.name, at_ms=plane.clock.now_ms(), config=config, frame=facts)


def _whole(view: JobView) -> JobConfig:
    """The merge; where it is not valid, what a job has that says nothing."""
    empty = {"name": view.name, "pipeline": view.pipeline, "kind": "stateless"}
    return JobConfig.from_stored(empty) if view.expected is None else view.expected


def _input(plane: Control, category: str) -> InputFacts:
    try:
        spec = plane.log.describe(category).spec
    except NotFound:
        return InputFacts(category=category, exists=False)
    except PenstockError:
        return InputFacts(category=category, is_known=False)  # which is not the job's fault
    return InputFacts(category=category, retention_ms=spec.retention_ms, lateness_ms=spec.lateness_ms)


def _watermarks(plane: Control, name: str) -> tuple[WatermarkFacts, ...] | None:
    try:
        held = watermarks_of(plane, name, None)["held_back"]
    except PenstockError:
        return None
    return tuple(
        WatermarkFacts(
            category=item["category"],
            age_s=None if item["age_ms"] is None else item["age_ms"] / 1000,
            who=item["who"],
            because=item["because"],
        )
        for item in held
    )


def _smallest(plane: Control) -> float | None:
    place = KINDS.index("memory_mb")
    sizes = [row.capacity[place] for row in plane.fleet.containers() if row.may_run and row.capacity]
    return min(sizes) if sizes and min(sizes) > 0 else None
