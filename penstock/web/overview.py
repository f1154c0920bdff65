"""What people see of jobs and containers: rows of several services put together, a line or a page each.

Views that did not change are not encoded again; what tasks report changes with heartbeats and is read at most
ten times a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from penstock.core.clock import Clock, Millis
from penstock.jobs.job_service import JobService
from penstock.jobs.job_view import JobView
from penstock.resources.metrics import JobLoad
from penstock.tasks.container_store import ContainerState
from penstock.tasks.engine_failure import last_failure
from penstock.tasks.fleet_view import FleetView
from penstock.tasks.messages import TaskReport

if TYPE_CHECKING:
    from penstock.app import ControlPlane  # the front reads pages, and starts sooner without the rest

REPORTS_MS: Millis = 100
ENCODED_MAX = 10_000

Reports = dict[str, list[tuple[str, TaskReport]]]
_encode = msgspec.json.encode


class Scaling(Protocol):
    """What the auto scaler last saw and said, which no store has."""

    def load_of(self, job: str) -> dict[str, Any] | None:
        """The load of a job; None: not known."""

    def reason_of(self, job: str) -> str:
        """Why it has the tasks it has, "" if nothing was decided."""


class ScalingHere:
    """Of the scaler in this process."""

    def __init__(self, plane: ControlPlane) -> None:
        self._scaler = plane.scaler

    def load_of(self, job: str) -> dict[str, Any] | None:
        load = self._scaler.loads.get(job)
        return asdict(load) if isinstance(load, JobLoad) else None

    def reason_of(self, job: str) -> str:
        decision = self._scaler.decisions.get(job)
        return decision.reason if decision else ""

    def all(self) -> dict[str, tuple[dict[str, Any] | None, str]]:
        """Every job of which something is known."""
        jobs = {*list(self._scaler.loads), *list(self._scaler.decisions)}  # others add to them
        return {job: (self.load_of(job), self.reason_of(job)) for job in sorted(jobs)}


class JobPages:
    """Jobs as JSON; writes nothing. Thread-safe: one assignment per entry."""

    def __init__(self, jobs: JobService, fleet: FleetView, clock: Clock, scaling: Scaling) -> None:
        self._service, self._fleet, self._clock, self._scaling = jobs, fleet, clock, scaling
        self._jobs, self._job_lines = _Encoded(_job_start), _Encoded(_line_start)
        self._reports: tuple[Millis, Reports] = (-REPORTS_MS, {})

    def job(self, name: str) -> tuple[int, bytes]:
        """One job, whole, as JSON, and its expected version."""
        return self._job(self._service.view(name), self._task_reports())

    def several(self, names: Sequence[str]) -> list[tuple[int, bytes] | None]:
        """The same for several jobs, with one look at the store; None for those that there are not."""
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
        """A page of jobs, a line each, as JSON."""
        page = self._service.views(
            labels=labels, state=state, pipeline=pipeline, removed=removed, after=after, limit=limit
        )
        return b'{"jobs":%s,"next":%s}' % (self.lines(page.items), _encode(page.next))

    def lines(self, views: Iterable[JobView]) -> bytes:
        """Jobs as JSON, a line each."""
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
        now_ms = self._clock.boot_ms()
        read_ms, reports = self._reports
        if now_ms - read_ms < REPORTS_MS:
            return reports
        found: Reports = {}
        for container, task in self._fleet.task_reports():
            found.setdefault(task.job, []).append((container, task))
        self._reports = now_ms, found
        return found


class Overview(JobPages):
    """What one control plane knows."""

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(plane.jobs, plane.fleet, plane.clock, ScalingHere(plane))
        self._plane = plane

    def status(self) -> bytes:
        """Everything the live table shows, as JSON."""
        plane = self._plane
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
                # Known of containers on this machine; the others' hosts have it in their logs.
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
        return b'{"jobs":%s,%s' % (self.lines(plane.jobs.every_view()), _encode(rest)[1:])


class _Encoded:
    """The beginning of a map as JSON, kept as long as the view it was made of is the newest."""

    def __init__(self, make: Any) -> None:
        self._make, self._kept = make, dict[str, tuple[JobView, bytes]]()

    def of(self, view: JobView) -> bytes:
        kept = self._kept.get(view.name)
        if kept is not None and kept[0] is view:
            return kept[1]
        if len(self._kept) >= ENCODED_MAX:
            self._kept.clear()
        start = _encode(self._make(view))[:-1]
        self._kept[view.name] = view, start
        return start


def _joined(start: bytes, rest: dict[str, Any]) -> bytes:
    """One map of two: the first without its end, the second without its beginning."""
    return b"%s,%s" % (start, _encode(rest)[1:])


def _job_start(view: JobView) -> dict[str, Any]:
    return view.to_json()


def _line_start(view: JobView) -> dict[str, Any]:
    config, running = view.config, view.running
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
        "running_task_count": running.config["task_count"] if running else 0,
        "package": (running.config if running else config).get("package") or {},
        "plan": view.plan.step if view.plan else "",
        "problem": view.problem or (view.quarantine.reason if view.quarantine else ""),
        "guarantees": view.guarantees,
    }


def _tasks(reports: Sequence[tuple[str, TaskReport]]) -> list[dict[str, Any]]:
    return [{"container": name, **asdict(report)} for name, report in reports]


# What people call them, and what tasks report (docs/architecture.md, Metrics).
_COUNTS = {
    "records": "records",
    "late": "late",
    "dropped": "dropped",
    "dead_letters": "bad",
    "waiting": "lag_records",
}


def _counts(reports: Sequence[tuple[str, TaskReport]]) -> dict[str, int] | None:
    """Records of a job, and what became of those that count nowhere yet or never; None: no task knows."""
    known = [report.metrics for _, report in reports if "records" in report.metrics]
    if not known:
        return None
    return {name: sum(int(task.get(said, 0)) for task in known) for name, said in _COUNTS.items()}
