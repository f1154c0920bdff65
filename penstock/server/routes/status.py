"""Routes about the cluster: health, status, journal, audit, event stream, dashboard; and metrics of jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, FastAPI, Header, Query, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.core.errors import PenstockError
from penstock.db.tokens import Caller
from penstock.scaling.metrics.frames import METRICS, MINUTE_MS
from penstock.scaling.metrics.retriever import MINUTES_MAX, history
from penstock.server import replies
from penstock.server.answers import encoded
from penstock.server.bodies import INT_MAX, Before, Limit, Name, Since, Subject
from penstock.server.events import EventHub, Watch
from penstock.server.pages import status_of
from penstock.server.pools import LONG, Reads
from penstock.server.replies import problems
from penstock.server.security import Guard
from penstock.server.services import Control, Services

WATCH_S_MAX = 3600
# The OpenAPI schema of one server-sent event.
EVENT = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9]+$"},
        "event": {"type": "string"},
        "data": {"type": "string", "contentMediaType": "application/json"},
        "retry": {"type": "integer"},
    },
}
EVENT_STREAM: replies.Responses = {
    200: {
        "description": "Server-sent events: `id` is the journal's id, `event` its kind, `data` the entry.",
        "content": {"text/event-stream": {"schema": EVENT}},
    }
}


def add_state_routes(app: FastAPI, router: APIRouter, plane: Services, guard: Guard) -> None:
    """Routes to read health, the API's description, journal and audit."""
    reads = Reads(local=not plane.database.is_shared)

    @router.get("/health", responses=problems())
    async def health() -> replies.Health:
        """Liveness of the server; needs no token."""
        return replies.Health(status="ok")

    @router.get("/openapi.json", include_in_schema=False)
    @LONG
    def openapi(caller: Caller = guard.allow("schema.read")) -> dict[str, Any]:
        return app.openapi()

    @router.get("/journal", responses=problems())
    @reads
    def journal(
        caller: Caller = guard.allow("journal.read"),
        subject: Subject = None,
        since: Since = 0,
        limit: Limit = 100,
    ) -> replies.JournalReply:
        """Journal entries after `since`, or the newest; oldest first."""
        found = plane.journal.entries(subject=subject, since=since, limit=limit)
        return replies.JournalReply(entries=[replies.JournalEntry.of(entry) for entry in found])

    @router.get("/audit", responses=problems())
    @reads
    def audit(
        caller: Caller = guard.allow("audit.read"),
        subject: Subject = None,
        before: Before = None,
        limit: Limit = 100,
    ) -> replies.AuditPage:
        """Who changed what, newest first."""
        rows = plane.jobs.audit(subject=subject, before=before, limit=limit)
        return replies.AuditPage(
            entries=[replies.AuditEntry.of(row) for row in rows],
            next=rows[-1].id if len(rows) == limit else None,
        )


def add_status_route(router: APIRouter, control: Control, guard: Guard) -> None:
    """The route of the cluster's status."""

    # Bytes: it has a line for each job, and those are encoded once, when a job changes.
    @router.get("/status", response_model=replies.Status, responses=problems())
    @LONG
    def status(caller: Caller = guard.allow("status.read")) -> Response:
        """Status of all jobs, containers and loops."""
        return encoded(status_of(control))


def add_event_route(router: APIRouter, hub: EventHub, guard: Guard) -> None:
    """The event stream."""

    @router.get("/events", response_class=Response, responses=EVENT_STREAM | problems())
    async def events(
        request: Request,
        caller: Caller = guard.allow("event.read"),
        since: Annotated[
            int | None,
            Query(
                ge=0,
                le=INT_MAX,
                description="Entries after this id; 0: from the beginning. Default: only new ones.",
            ),
        ] = None,
        subject: Subject = None,
        limit: Annotated[int | None, Query(ge=1, le=1000, description="End after so many events.")] = None,
        wait_s: Annotated[
            int, Query(ge=0, le=WATCH_S_MAX, description="End after so many seconds.")
        ] = WATCH_S_MAX,
        last_event_id: Annotated[str | None, Header(pattern="^[0-9]{1,18}$", max_length=18)] = None,
    ) -> Response:
        """New journal entries of all instances, or all since an id; resumes by Last-Event-ID."""

        async def is_welcome() -> bool:
            try:
                return (await guard.caller(request)) == caller
            except PenstockError:
                return False

        return await hub.response(
            Watch(
                since=since if last_event_id is None else int(last_event_id),
                subject=subject,
                count_max=limit,
                wait_s=wait_s,
                is_welcome=is_welcome,
            )
        )


FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/dashboard/style.css": ("style.css", "text/css; charset=utf-8"),
}
# Only the server's own scripts, styles and API; no inline code, no frames.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFE = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Dashboard:
    """ASGI middleware: serves the dashboard's files, and passes all other requests on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._files = app, dict(_read())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._files.get(scope["path"]) if scope["type"] == "http" else None
        if found is None or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": found.headers})
        body = b"" if scope["method"] == "HEAD" else found.body
        await send({"type": "http.response.body", "body": body})


def _read() -> Iterator[tuple[str, _File]]:
    folder = files("penstock.server") / "dashboard"
    for path, (name, kind) in FILES.items():
        body = (folder / name).read_bytes()
        headers = {"content-type": kind, "content-length": str(len(body)), **SAFE}
        yield path, _File([(key.encode(), value.encode()) for key, value in headers.items()], body)


Metrics = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=1000,
        pattern=r"^[a-z_]+(,[a-z_]+)*$",
        description="Comma-separated names; default: all that have values.",
    ),
]
Minutes = Annotated[int, Query(ge=1, le=MINUTES_MAX, description="How many, up to the last complete one.")]


def add_metric_routes(router: APIRouter, plane: Services, guard: Guard) -> None:
    """The route of a job's metrics."""

    @router.get("/jobs/{name}/metrics", responses=problems(404))
    @LONG
    def get_job_metrics(
        name: Name,
        caller: Caller = guard.allow("job.read"),
        metrics: Metrics = None,
        minutes: Minutes = 60,
    ) -> replies.JobMetrics:
        """Metrics of a job in its last minutes: a value per metric and minute, null where it is unknown."""
        plane.jobs.view(name)  # NotFound if the job does not exist
        return metrics_of(plane, name, metrics.split(",") if metrics else None, minutes)


def metrics_of(plane: Services, job: str, metrics: list[str] | None, minutes: int) -> replies.JobMetrics:
    """Metrics of one job."""
    found = history(
        plane.metrics,
        job,
        list(METRICS) if metrics is None else metrics,
        minutes,
        now_ms=plane.clock.now_ms(),
    )
    return replies.JobMetrics(
        job=job,
        first_ms=found.first_minute * MINUTE_MS,
        minutes=minutes,
        metrics={
            name: replies.MetricLine(
                unit=METRICS[name].unit,
                values=[None if value != value else round(value, 6) for value in points.tolist()],
            )
            for name, points in found.values.items()
            if metrics is not None or not np.isnan(points).all()
        },
    )
