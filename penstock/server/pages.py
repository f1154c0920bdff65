"""JSON views of jobs and containers, composed of the data of several services.

Unchanged job views are encoded once. Task reports change with every heartbeat; they are cached for 0.1 s or
ten times as long as reading them took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query

from penstock.container.sessions import last_failure
from penstock.core.clock import Millis
from penstock.db.tokens import Caller
from penstock.fleet.container_store import ContainerState
from penstock.fleet.messages import TaskReport, summarize_error
from penstock.jobs.job_reads import JobView
from penstock.jobs.running_store import RunningRow
from penstock.server import replies
from penstock.server.bodies import Subject
from penstock.server.pools import LONG
from penstock.server.replies import problems
from penstock.server.security import Guard
from penstock.server.services import Control, Services
from penstock.streams.inspect.watermark_view import JobToInspect

REPORTS_MS: Millis = 100
ENCODED_MAX = 10_000

Reports = dict[str, list[tuple[str, TaskReport]]]
_encode = msgspec.json.encode


class JobPages:
    """Jobs as JSON; writes nothing. Thread-safe: one assignment per entry."""

    def __init__(self, services: Services) -> None:
        self._service, self._fleet, self._clock = services.jobs, services.fleet, services.clock
        self._scaling = services.scaling
        self._jobs, self._job_lines = _Encoded(_job_start), _Encoded(_line_start)
        self._reports: tuple[Millis, Reports] = (0, {})  # cached until this time

    def job(self, name: str) -> tuple[int, bytes]:
        """One whole job as JSON, and its expected version."""
        return self._job(self._service.view(name), self._task_reports())

    def several(self, names: Sequence[str]) -> list[tuple[int, bytes] | None]:
        """The same for several jobs with one read of the store; None for jobs that do not exist."""
        views, reports = self._service.views_of(names), self._task_reports()
        return [self._job(views[name], reports) if name in views else None for name in names]

    def _job(self, view: JobView, reports: Reports) -> tuple[int, bytes]:
        own = reports.get(view.name, ())
        found = {"load": self._scaling.load_of(view.name), "counts": _counts(own), "tasks": _tasks(own)}
        return view.expected_version, _joined(self._jobs.of(view), found)

    def jobs(
        self,
        *,
        labels: Mapping[str, str],
        state: str | None,
        pipeline: str | None,
        removed: bool,
        after: str,
        limit: int,
    ) -> bytes:
        """A page of job lines as JSON."""
        page = self._service.views(
            labels=labels, state=state, pipeline=pipeline, removed=removed, after=after, limit=limit
        )
        return b'{"jobs":%s,"next":%s}' % (self.lines(page.items), _encode(page.next))

    def lines(self, views: Iterable[JobView]) -> bytes:
        """Job lines as JSON."""
        reports, lines = self._task_reports(), []
        for view in views:
            own = reports.get(view.name, ())
            found = {
                "scaler": self._scaling.reason_of(view.name),
                "load": self._scaling.load_of(view.name),
                "counts": _counts(own),
                "tasks": _tasks(own),
            }
            lines.append(_joined(self._job_lines.of(view), found))
        return b"[%s]" % b",".join(lines)

    def _task_reports(self) -> Reports:
        began_ms = self._clock.boot_ms()
        until_ms, reports = self._reports
        if began_ms < until_ms:
            return reports
        found: Reports = {}
        for container, task in self._fleet.task_reports():
            found.setdefault(task.job, []).append((container, task))
        took_ms = self._clock.boot_ms() - began_ms
        self._reports = began_ms + max(REPORTS_MS, 10 * took_ms), found
        return found


def status_of(plane: Control) -> bytes:
    """The cluster's status for `penstock status` and the dashboard, as JSON."""
    folder = plane.settings.folder / "containers"
    owned: dict[str, int] = {}
    for shard in plane.fleet.shards():
        if shard.container:
            owned[shard.container] = owned.get(shard.container, 0) + 1
    containers = [
        {
            "name": row.name,
            "state": "dead" if row.known_dead else row.state.value,
            "ready": row.engine_ready,
            "seen_ms": row.seen_ms,
            "shards": owned.get(row.name, 0),
            "tasks": len(row.tasks),
            "pid": row.pid,
            # Only for containers on this machine; other hosts have it in their logs.
            "error": "" if row.engine_ready else last_failure(folder / row.name),
        }
        for row in plane.fleet.containers()
        if row.state is not ContainerState.GONE or row.known_dead
    ]
    rest = {
        "now_ms": plane.clock.now_ms(),
        "is_active": plane.is_active,
        "advice_only": plane.settings.advice_only,
        "rescales_max": plane.settings.rescales_max,
        "containers": containers,
        "loops": plane.loop_counts(),
    }
    return b'{"jobs":%s,%s' % (JobPages(plane).lines(plane.jobs.every_view()), _encode(rest)[1:])


class _Encoded:
    """A cache of the first part of jobs' JSON maps; an entry is valid until the job's view changes."""

    def __init__(self, make: Any) -> None:
        self._make, self._cache = make, dict[str, tuple[JobView, bytes]]()

    def of(self, view: JobView) -> bytes:
        cached = self._cache.get(view.name)
        if cached is not None and cached[0] is view:
            return cached[1]
        if len(self._cache) >= ENCODED_MAX:
            self._cache.clear()
        start = _encode(self._make(view))[:-1]
        self._cache[view.name] = view, start
        return start


def _joined(start: bytes, rest: dict[str, Any]) -> bytes:
    """One JSON map: an encoded map without its closing brace, and the entries of `rest`."""
    return b"%s,%s" % (start, _encode(rest)[1:])


def _job_start(view: JobView) -> dict[str, Any]:
    return view.to_json()


def _line_start(view: JobView) -> dict[str, Any]:
    config, running = view.merged, view.running
    return {
        "name": view.name,
        "pipeline": view.pipeline,
        "kind": config.get("kind", ""),
        "owner": config.get("owner", ""),
        "labels": config.get("labels", {}),
        "priority": config.get("priority", 0),
        "state": view.state,
        "wanted": config.get("state", ""),
        "removed": view.removed,
        "expected_version": view.expected_version,
        "generation": running.generation if running else 0,
        "task_count": config.get("task_count", 0),
        "running_task_count": running.config.task_count if running else 0,
        "package": _package(view),
        "plan": view.plan.step if view.plan else "",
        "problem": view.problem or (view.quarantine.reason if view.quarantine else ""),
        "guarantees": view.guarantees,
    }


def _package(view: JobView) -> Any:
    """The running package, or the expected one if nothing runs."""
    if view.running is None:
        return view.merged.get("package") or {}
    package = view.running.config.package
    return {} if package is None else package.model_dump(mode="json")


def _tasks(reports: Sequence[tuple[str, TaskReport]]) -> list[dict[str, Any]]:
    return [{"container": name, **asdict(report)} for name, report in reports]


# Field of the API, and the metric of tasks that it sums (docs/metrics.md).
_COUNTS = {
    "records": "records",
    "late": "late",
    "dropped": "dropped",
    "dead_letters": "bad",
    "waiting": "lag_records",
}


def _counts(reports: Sequence[tuple[str, TaskReport]]) -> dict[str, int] | None:
    """Record counts of a job, summed over its tasks; None: no task has reported them."""
    known = [report.metrics for _, report in reports if "records" in report.metrics]
    if not known:
        return None
    return {name: sum(int(task.get(metric, 0)) for task in known) for name, metric in _COUNTS.items()}


def add_watermark_routes(router: APIRouter, plane: Services, guard: Guard) -> None:
    """The route about watermarks."""

    @router.get("/watermarks", responses=problems(404))
    @LONG
    def get_watermarks(
        subject: Subject = None,
        percent: Annotated[int | None, Query(ge=1, le=100)] = None,
        caller: Caller = guard.allow("category.read"),
    ) -> replies.Watermarks:
        """Watermarks of a category, or of the outputs of a job or a pipeline, and what holds each back. With
        `percent` also the low that producers of so many per cent of its records have reached.
        """
        return replies.Watermarks(**watermarks_of(plane, subject or "", percent))


def watermarks_of(plane: Services, subject: str, percent: int | None) -> dict[str, Any]:
    """Watermarks of a category, or of the outputs of a job or a pipeline, and what holds each back."""
    reports = {task.task_id: task for _, task in plane.fleet.task_reports()}
    jobs = [
        JobToInspect(
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
    """By partition, why its task does not run; partitions with a running task are left out."""
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
            error = f": {summarize_error(task.error)}" if task.error else ""
            found[partition] = f"its task {running.job}/{index} is {task.state}{error}"
    return found
