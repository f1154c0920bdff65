"""A job as the doctor's patient, gathered from what the control plane has; and the doctor's answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Response

from penstock.app import ControlPlane
from penstock.core.errors import NotFound, PenstockError
from penstock.core.token_store import Caller
from penstock.jobs.config import JobConfig
from penstock.jobs.job_view import JobView
from penstock.resources.frames import NoFrame
from penstock.resources.policies.doctor.doctor_policy import patient_of
from penstock.resources.policies.doctor.examine import examine
from penstock.resources.policies.doctor.patient import (
    METRICS,
    MINUTES,
    InputFacts,
    Patient,
    WatermarkFacts,
)
from penstock.resources.policies.starving import starved_tasks
from penstock.tasks.shard_load import KINDS
from penstock.web import replies
from penstock.web.answers import answer
from penstock.web.bodies import Name
from penstock.web.guard import Guard
from penstock.web.pools import LONG
from penstock.web.replies import problems
from penstock.web.watermarks import watermarks_of

JOURNAL_MAX = 50


def add_doctor_routes(router: APIRouter, plane: ControlPlane, guard: Guard) -> None:
    """What is wrong with a job."""

    @router.get("/jobs/{name}/doctor", response_model=replies.Examination, responses=problems(404))
    @LONG
    def get_doctor(name: Name, caller: Caller = guard.allow("job.read")) -> Response:
        """What is wrong with a job, why, how sure that is, and what to do; what was ruled out."""
        return answer(examine(gather_patient(plane, name)).to_json())


def gather_patient(plane: ControlPlane, name: str) -> Patient:
    """All that is known of a job: what its policies are shown, and what only the control plane has.

    What does not answer is left out: the doctor says so.
    """
    view = plane.jobs.view(name)
    patient = _shown_to_policies(plane, view)
    streaming = patient.config["kind"] in ("stateless", "stateful")
    writes = plane.jobs.history(name, layer="provisioner", limit=2)
    package = patient.config.get("package") or {}
    return replace(
        patient,
        state=view.state,
        problem=view.quarantine.reason if view.quarantine is not None else view.problem,
        starved=tuple(one for one in starved_tasks(plane.fleet.task_reports()) if one.job == name),
        journal=plane.journal.entries(subject=name, limit=JOURNAL_MAX),
        watermarks=_watermarks(plane, name) if streaming and view.running is not None else (),
        inputs=tuple(_input(plane, source["category"]) for source in patient.config["inputs"]),
        is_package_there=not package or plane.packages.has(str(package["hash"])),
        container_memory_mb=_smallest(plane),
        user_update_ms=writes[0].at_ms if writes else None,
        last_good_version=writes[1].version if len(writes) > 1 else None,
    )


def _shown_to_policies(plane: ControlPlane, view: JobView) -> Patient:
    """The hour of minutes that is kept, and what its tasks say now."""
    try:
        facts = plane.policies.jobs.facts_now(view.name, METRICS, MINUTES)
    except PenstockError:
        facts = plane.policies.jobs.facts_now(view.name, (), MINUTES)  # what is kept cannot be read
    if not isinstance(facts, NoFrame):
        return patient_of(facts)
    config = _whole(view) if view.running is None else view.running.config
    return Patient(job=view.name, at_ms=plane.clock.now_ms(), config=config, frame=facts)


def _whole(view: JobView) -> Mapping[str, Any]:
    """The merge; where it is not valid, what a job has that says nothing."""
    if not view.problem:
        return view.config
    empty = JobConfig.model_construct(name=view.name, pipeline=view.pipeline, kind="stateless")
    return empty.model_dump(mode="json")


def _input(plane: ControlPlane, category: str) -> InputFacts:
    try:
        spec = plane.log.describe(category).spec
    except NotFound:
        return InputFacts(category=category, exists=False)
    except PenstockError:
        return InputFacts(category=category, is_known=False)  # which is not the job's fault
    return InputFacts(category=category, retention_ms=spec.retention_ms, lateness_ms=spec.lateness_ms)


def _watermarks(plane: ControlPlane, name: str) -> tuple[WatermarkFacts, ...] | None:
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


def _smallest(plane: ControlPlane) -> float | None:
    place = KINDS.index("memory_mb")
    sizes = [row.capacity[place] for row in plane.fleet.containers() if row.may_run and row.capacity]
    return min(sizes) if sizes and min(sizes) > 0 else None
