"""A job as the doctor's patient, gathered from what the control plane has; and the doctor's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Response

from penstock.app import ControlPlane
from penstock.core.errors import NotFound, PenstockError
from penstock.core.token_store import Caller
from penstock.jobs.config import JobConfig
from penstock.jobs.job_view import JobView
from penstock.resources.frames import Frame, NoFrame
from penstock.resources.policies.doctor.examine import examine
from penstock.resources.policies.doctor.now_frame import frame_of_now
from penstock.resources.policies.doctor.patient import (
    METRICS,
    MINUTES,
    InputFacts,
    Patient,
    WatermarkFacts,
)
from penstock.resources.policies.facts import TaskFacts, task_facts
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
# (job, metrics, minutes): the history of a job. Without one the doctor has what tasks say now.
Frames = Callable[[str, tuple[str, ...], int], Frame | NoFrame]


def add_doctor_routes(
    router: APIRouter, plane: ControlPlane, guard: Guard, frames: Frames | None = None
) -> None:
    """What is wrong with a job."""

    @router.get("/jobs/{name}/doctor", response_model=replies.Examination, responses=problems(404))
    @LONG
    def get_doctor(name: Name, caller: Caller = guard.allow("job.read")) -> Response:
        """What is wrong with a job, why, how sure that is, and what to do; what was ruled out."""
        return answer(examine(gather_patient(plane, name, frames)).to_json())


def gather_patient(plane: ControlPlane, name: str, frames: Frames | None = None) -> Patient:
    """All that is known of a job. What does not answer is left out: the doctor says so."""
    view, now_ms = plane.jobs.view(name), plane.clock.now_ms()
    running = view.running
    config = running.config if running is not None else _whole(view)
    hosts = {row.name: row.host for row in plane.fleet.containers()}
    tasks = task_facts(plane.fleet.task_reports(name), hosts)
    starved = tuple(one for one in starved_tasks(plane.fleet.task_reports()) if one.job == name)
    writes = plane.jobs.history(name, layer="provisioner", limit=2)
    streaming = config["kind"] in ("stateless", "stateful")
    package = config.get("package") or {}
    return Patient(
        job=name,
        at_ms=now_ms,
        config=config,
        state=view.state,
        problem=view.quarantine.reason if view.quarantine is not None else view.problem,
        task_count=0 if running is None else len(set(running.mapping)),
        tasks=tasks,
        starved=starved,
        frame=_frame(name, tasks, now_ms, frames),
        journal=plane.journal.entries(subject=name, limit=JOURNAL_MAX),
        watermarks=_watermarks(plane, name) if streaming and running is not None else (),
        inputs=tuple(_input(plane, source["category"]) for source in config["inputs"]),
        is_package_there=not package or plane.packages.has(str(package["hash"])),
        container_memory_mb=_smallest(plane),
        user_update_ms=writes[0].at_ms if writes else None,
        last_good_version=writes[1].version if len(writes) > 1 else None,
    )


def _frame(name: str, tasks: tuple[TaskFacts, ...], now_ms: int, frames: Frames | None) -> Frame | NoFrame:
    found = None if frames is None else frames(name, METRICS, MINUTES)
    return found if isinstance(found, Frame) else frame_of_now(name, tasks, now_ms=now_ms)


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
        return InputFacts(category=category)  # the bus does not answer, which is not the job's fault
    return InputFacts(category=category, retention_ms=spec.retention_ms, lateness_ms=spec.lateness_ms)


def _watermarks(plane: ControlPlane, name: str) -> tuple[WatermarkFacts, ...]:
    try:
        held = watermarks_of(plane, name, None)["held_back"]
    except PenstockError:
        return ()
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
