"""Routes about pipelines, categories of the bus, packages, and the state of jobs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from penstock.core.errors import ConfigError, NotFound
from penstock.db.tokens import Caller
from penstock.server import bodies, replies
from penstock.server.answers import set_created
from penstock.server.bodies import INT_MAX, Key, Limit, Name
from penstock.server.limits import limited
from penstock.server.pools import LONG
from penstock.server.replies import WRITING, problems
from penstock.server.security import Guard
from penstock.server.services import Services, actor_of
from penstock.streams.bus.log import CategorySpec
from penstock.streams.inspect.state_view import StatefulJob
from penstock.streams.package_store import PACKAGE_BYTES_MAX

ZIP = "application/zip"
ANY_BYTES: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}


def add_pipeline_routes(router: APIRouter, plane: Services, guard: Guard) -> None:
    """Routes to plan and submit compiled pipelines."""

    @router.post("/pipelines/plan", responses=problems())
    @LONG
    def plan_pipeline(
        body: bodies.PlanBody, caller: Caller = guard.allow("pipeline.plan")
    ) -> replies.Planned:
        """What submitting would change. Writes nothing."""
        changes, replaces = plane.jobs.plan_submit(body.compiled)
        return replies.Planned(
            changes=[replies.JobChangeReply.of(change) for change in changes], replaces=replaces
        )

    @router.post("/pipelines", responses=problems(*WRITING))
    @LONG
    def submit_pipeline(
        body: bodies.SubmitBody, caller: Caller = guard.allow("pipeline.submit"), idempotency_key: Key = None
    ) -> replies.SubmittedReply:
        """Write a compiled pipeline into the expected config of its jobs."""
        done = plane.submit_pipeline(
            body.compiled, actor=actor_of(caller), reason=body.why, idempotency_key=idempotency_key
        )
        return replies.SubmittedReply(jobs=dict(done.jobs), done=dict(done.done))


def add_stream_routes(router: APIRouter, plane: Services, guard: Guard, prefix: str) -> None:
    """Routes about categories and packages."""
    category_created: replies.Responses = {201: {"model": replies.CategoryReply, "description": "Created"}}
    package_created: replies.Responses = {201: {"model": replies.PackageHash, "description": "Created"}}

    @router.get("/categories", responses=problems())
    @LONG
    def list_categories(caller: Caller = guard.allow("category.read")) -> replies.Categories:
        """Every category of the bus; `unreadable`: those that cannot be read, with the error."""
        return plane.category_views()

    @router.get("/categories/{name}", responses=problems(404))
    @LONG
    def get_category(name: Name, caller: Caller = guard.allow("category.read")) -> replies.CategoryReply:
        """One category: spec, birth, end offsets and watermark."""
        return plane.category_view(name)

    @router.post("/categories", responses=category_created | problems(*WRITING))
    @LONG
    def create_category(
        body: bodies.NewCategoryBody, response: Response, caller: Caller = guard.allow("category.create")
    ) -> replies.CategoryReply:
        """Create a category for external records; may be repeated."""
        spec = CategorySpec(**{**body.model_dump(), "columns": tuple(body.columns)})
        if plane.create_category(spec, actor=caller.name):
            set_created(response, f"{prefix}/categories/{spec.name}")
        return plane.category_view(spec.name)

    @router.put(
        "/packages/{hash_}",
        responses=package_created | problems(*WRITING),
        openapi_extra={"requestBody": {"required": True, "content": {ZIP: ANY_BYTES}}},
    )
    async def put_package(
        hash_: Name, request: Request, response: Response, caller: Caller = guard.allow("package.write")
    ) -> replies.PackageHash:
        """Store a package under the hash of its content; may be repeated."""
        chunks = limited(request.stream(), PACKAGE_BYTES_MAX, request.scope)
        try:
            data = b"".join([chunk async for chunk in chunks])
        except ClientDisconnect as error:
            raise ConfigError(
                "the upload is incomplete", why="the caller closed the connection", fix="send it again"
            ) from error

        def put() -> bool:
            is_new = not plane.packages.has(hash_)
            plane.packages.put(hash_, data)
            return is_new

        if await LONG.run(put):
            set_created(response)
        return replies.PackageHash(hash=hash_)

    @router.get(
        "/packages/{hash_}",
        response_class=Response,
        responses={200: {"description": "The package", "content": {ZIP: ANY_BYTES}}, **problems(404)},
    )
    @LONG
    def get_package(hash_: Name, caller: Caller = guard.allow("package.read")) -> Response:
        """A package by its hash."""
        return Response(plane.packages.get(hash_), media_type=ZIP)


# A key is any text that fits into a URL, percent-encoded; a page position has a key and a tag.
KEY_MAX, PLACE_MAX = 1000, 2500
KeptKey = Annotated[str, Query(max_length=KEY_MAX, description="A key; several columns: a JSON list.")]
Prefix = Annotated[str, Query(max_length=KEY_MAX)]
After = Annotated[str, Query(max_length=PLACE_MAX, description="The `next` of the previous page.")]
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
    """Routes to read the state and the timers of a job."""

    @router.get("/jobs/{name}/states", responses=problems(404))
    @LONG
    def scan_states(
        name: Name,
        caller: Caller = guard.allow("state.read"),
        prefix: Prefix = "",
        after: After = "",
        limit: Limit = 100,
    ) -> replies.KeptStates:
        """State of a job by interval and key, a page at a time."""
        found = plane.states.scan(kept_job(plane, name), prefix=prefix, after=after, limit=limit)
        return replies.KeptStates(**found)

    @router.get("/jobs/{name}/states/of", responses=problems(404))
    @LONG
    def get_state(name: Name, key: KeptKey, caller: Caller = guard.allow("state.read")) -> replies.KeptState:
        """State and timers of one key of a job."""
        return replies.KeptState(**plane.states.get(kept_job(plane, name), key))

    @router.get("/jobs/{name}/timers", responses=problems(404))
    @LONG
    def scan_timers(
        name: Name,
        caller: Caller = guard.allow("state.read"),
        key: KeptKey = "",
        after: After = "",
        limit: Limit = 100,
    ) -> replies.KeptTimers:
        """Pending timers of a job, for all keys or for one, a page at a time."""
        found = plane.states.timers(kept_job(plane, name), key=key, after=after, limit=limit)
        return replies.KeptTimers(**found)

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
        """All state of one interval at one version."""
        # Read completely before the first byte is sent: a slow caller must not hold the read transaction.
        with ExitStack() as undo:
            spool = undo.enter_context(tempfile.SpooledTemporaryFile(IN_MEMORY_MAX))
            for line in plane.states.export(kept_job(plane, name), partition):
                spool.write(msgspec.json.encode(line) + b"\n")
            size = spool.tell()
            spool.seek(0)
            undo.pop_all()
        return StreamingResponse(_chunks(spool), media_type=LINES, headers={"Content-Length": str(size)})


def kept_job(plane: Services, name: str) -> StatefulJob:
    """The job whose state is read; NotFound if it does not exist or never ran."""
    view = plane.jobs.view(name)
    if view.running is None:
        raise NotFound(
            f"job {name!r} has no state yet",
            why="it has never run: its first plan creates the rows of its state",
            fix="wait until it runs; `penstock status` shows its plan",
        )
    return StatefulJob(name=view.name, birth=view.running.birth, config=view.running.config)


def _chunks(spool: IO[bytes]) -> Iterator[bytes]:
    with spool:
        while chunk := spool.read(CHUNK):
            yield chunk
