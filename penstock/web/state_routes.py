"""Routes about the whole: health, status, what was decided, who changed what, and the event stream."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Query, Request, Response

from penstock.app import ControlPlane
from penstock.core.errors import PenstockError
from penstock.core.token_store import Caller
from penstock.web import replies
from penstock.web.answers import answer
from penstock.web.bodies import INT_MAX, Before, Limit, Since, Subject
from penstock.web.events import EventHub, Watch
from penstock.web.guard import Guard
from penstock.web.overview import Overview
from penstock.web.pools import LONG, Reads
from penstock.web.replies import problems

WATCH_S_MAX = 3600
# One event, as programs that know server-sent events see it.
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


def add_state_routes(
    app: FastAPI, router: APIRouter, plane: ControlPlane, guard: Guard, overview: Overview
) -> None:
    """What there is to see."""
    reads = Reads(local=not plane.database.is_shared)

    @router.get("/health", response_model=replies.Health, responses=problems())
    async def health() -> Response:
        """Open to everybody: says only that something answers."""
        return answer({"status": "ok"})

    @router.get("/openapi.json", include_in_schema=False)
    @LONG
    def openapi(caller: Caller = guard.allow("schema.read")) -> dict[str, Any]:
        return app.openapi()

    @router.get("/status", response_model=replies.Status, responses=problems())
    @LONG
    def status(caller: Caller = guard.allow("status.read")) -> Response:
        """Everything the live table shows."""
        return answer(overview.status())

    @router.get("/journal", response_model=replies.Journal, responses=problems())
    @reads
    def journal(
        caller: Caller = guard.allow("journal.read"),
        subject: Subject = None,
        since: Since = 0,
        limit: Limit = 100,
    ) -> Response:
        """What was decided and why: after `since`, or the newest; oldest first."""
        return answer({"entries": plane.journal.entries(subject=subject, since=since, limit=limit)})

    @router.get("/audit", response_model=replies.AuditPage, responses=problems())
    @reads
    def audit(
        caller: Caller = guard.allow("audit.read"),
        subject: Subject = None,
        before: Before = None,
        limit: Limit = 100,
    ) -> Response:
        """Who changed what, newest first."""
        rows = plane.jobs.audit(subject=subject, before=before, limit=limit)
        return answer({"entries": rows, "next": rows[-1].id if len(rows) == limit else None})


def add_event_route(router: APIRouter, hub: EventHub, guard: Guard) -> None:
    """News as they happen."""

    @router.get("/events", response_class=Response, responses=EVENT_STREAM | problems())
    async def events(
        request: Request,
        caller: Caller = guard.allow("event.read"),
        since: Annotated[
            int | None, Query(ge=0, le=INT_MAX, description="Go on after this id; 0: from the beginning.")
        ] = None,
        subject: Subject = None,
        limit: Annotated[int | None, Query(ge=1, le=1000, description="End after so many.")] = None,
        wait_s: Annotated[int, Query(ge=0, le=WATCH_S_MAX, description="End after so long.")] = WATCH_S_MAX,
        last_event_id: Annotated[str | None, Header(pattern="^[0-9]{1,18}$", max_length=18)] = None,
    ) -> Response:
        """What is decided from now on, or since an id, also by other instances; resumes by Last-Event-ID."""

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
