"""Routes about what jobs keep: states and timers, read without touching whoever works on them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, Annotated

import msgspec
from fastapi import APIRouter, Query, Response
from starlette.responses import StreamingResponse

from penstock.core.errors import NotFound
from penstock.db.tokens import Caller
from penstock.server import replies
from penstock.server.answers import answer
from penstock.server.bodies import INT_MAX, Limit, Name
from penstock.server.pools import LONG
from penstock.server.replies import problems
from penstock.server.security import Guard
from penstock.server.services import Services
from penstock.streams.inspect.state_view import KeptJob

# A key is any text, but it must fit into a URL, percent signs and all; a place has one in it, and a tag.
KEY_MAX, PLACE_MAX = 1000, 2500
KeptKey = Annotated[str, Query(max_length=KEY_MAX, description="A key; several columns: a JSON list.")]
Prefix = Annotated[str, Query(max_length=KEY_MAX)]
After = Annotated[str, Query(max_length=PLACE_MAX, description="The `next` of an earlier page.")]
LINES = "application/x-ndjson"
LINES_OF_STATE: replies.Responses = {
    200: {
        "description": "A line of JSON for each state",
        "content": {LINES: {"schema": {"type": "string"}}},
    }
}
CHUNK = 256 * 1024
IN_MEMORY_MAX = 4 * 2**20


def add_kept_routes(router: APIRouter, plane: Services, guard: Guard) -> None:
    """States and timers."""

    @router.get("/jobs/{name}/states", response_model=replies.KeptStates, responses=problems(404))
    @LONG
    def scan_states(
        name: Name,
        caller: Caller = guard.allow("state.read"),
        prefix: Prefix = "",
        after: After = "",
        limit: Limit = 100,
    ) -> Response:
        """What a job keeps, by interval and key, a page at a time."""
        return answer(plane.states.scan(kept_job(plane, name), prefix=prefix, after=after, limit=limit))

    @router.get("/jobs/{name}/states/of", response_model=replies.KeptState, responses=problems(404))
    @LONG
    def get_state(name: Name, key: KeptKey, caller: Caller = guard.allow("state.read")) -> Response:
        """What a job keeps for one key, with its timers."""
        return answer(plane.states.get(kept_job(plane, name), key))

    @router.get("/jobs/{name}/timers", response_model=replies.KeptTimers, responses=problems(404))
    @LONG
    def scan_timers(
        name: Name,
        caller: Caller = guard.allow("state.read"),
        key: KeptKey = "",
        after: After = "",
        limit: Limit = 100,
    ) -> Response:
        """A job's pending timers, of all keys or of one, a page at a time."""
        return answer(plane.states.timers(kept_job(plane, name), key=key, after=after, limit=limit))

    @router.get(
        "/jobs/{name}/states/export",
        response_class=Response,
        responses=LINES_OF_STATE | problems(404),
    )
    @LONG
    def export_states(
        name: Name,
        partition: Annotated[int, Query(ge=0, le=INT_MAX)],
        caller: Caller = guard.allow("state.read"),
    ) -> Response:
        """All states of one interval at one version."""
        # Read to the end before the first byte goes out: a slow caller must not keep the moment open.
        with ExitStack() as undo:
            spool = undo.enter_context(tempfile.SpooledTemporaryFile(IN_MEMORY_MAX))
            for line in plane.states.export(kept_job(plane, name), partition):
                spool.write(msgspec.json.encode(line) + b"\n")
            size = spool.tell()
            spool.seek(0)
            undo.pop_all()
        return StreamingResponse(_chunks(spool), media_type=LINES, headers={"Content-Length": str(size)})


def kept_job(plane: Services, name: str) -> KeptJob:
    """A job whose state can be looked at; NotFound if there is none of that name, or it never ran."""
    view = plane.jobs.view(name)
    if view.running is None:
        raise NotFound(
            f"job {name!r} keeps nothing yet",
            why="nothing of it has run: its rows are made by its first plan",
            fix="`penstock status` shows how far it is",
        )
    return KeptJob(name=view.name, birth=view.running.birth, config=view.running.config)


def _chunks(spool: IO[bytes]) -> Iterator[bytes]:
    with spool:
        while chunk := spool.read(CHUNK):
            yield chunk
