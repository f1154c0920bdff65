"""What runs, as the watermarks' view needs it: which job, which config, and what keeps its tasks from going
on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from penstock.app import ControlPlane
from penstock.core.token_store import Caller
from penstock.jobs.running_store import RunningRow
from penstock.streams.watermark_view import RunningJob
from penstock.tasks.failures import shortly
from penstock.tasks.messages import TaskReport
from penstock.web import replies
from penstock.web.answers import answer
from penstock.web.bodies import Subject
from penstock.web.guard import Guard
from penstock.web.pools import LONG
from penstock.web.replies import problems


def add_watermark_routes(router: APIRouter, plane: ControlPlane, guard: Guard) -> None:
    """How far the streams are."""

    @router.get("/watermarks", response_model=replies.Watermarks, responses=problems(404))
    @LONG
    def get_watermarks(
        subject: Subject = None,
        percent: Annotated[int | None, Query(ge=1, le=100)] = None,
        caller: Caller = guard.allow("category.read"),
    ) -> Response:
        """Watermarks of a category, or of what a job or a pipeline writes, and who holds each back; with
        `percent` also the low that so many per cent of its producers have reached, each by its records.
        """
        return answer(watermarks_of(plane, subject or "", percent))


def watermarks_of(plane: ControlPlane, subject: str, percent: int | None) -> dict[str, Any]:
    """How far a category is, or what a job or a pipeline writes; and who holds it back."""
    reports = {task.task_id: task for _, task in plane.fleet.task_reports()}
    jobs = [
        RunningJob(
            name=view.name,
            birth=view.running.birth,
            config=view.running.config,
            pipeline=view.pipeline,
            trouble=find_trouble(view.running, reports),
        )
        for view in plane.jobs.every_view()
        if view.running is not None and view.running.state != "removed"
    ]
    return plane.watermarks.explain(jobs, subject, plane.clock.now_ms(), percent)


def find_trouble(running: RunningRow, reports: Mapping[str, TaskReport]) -> dict[int, str]:
    """By partition, why its task does not go on; partitions whose task runs are not there."""
    found = {}
    for partition, index in enumerate(running.mapping):
        task = reports.get(f"{running.job}/{index}")
        if running.state != "running":
            found[partition] = f"the job is {running.state}"
        elif running.is_held:
            found[partition] = "the job is held while its plan changes it"
        elif task is None:
            found[partition] = f"no container runs its task {running.job}/{index}"
        elif task.state != "running":
            error = f": {shortly(task.error)}" if task.error else ""
            found[partition] = f"its task {running.job}/{index} is {task.state}{error}"
    return found
