"""The HTTP API, `/api/v1`: thin. Each route names its verb, calls one service, answers JSON or problem+json.

Routes are plain functions, which FastAPI runs beside its event loop; only the upload of a package streams.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Query, Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from penstock.app import ControlPlane
from penstock.core.errors import ConfigError
from penstock.core.token_store import Caller
from penstock.jobs.job_service import Actor
from penstock.streams.bus.log import CategorySpec
from penstock.streams.package_shelf import PACKAGE_BYTES_MAX
from penstock.web.answers import answer_problems
from penstock.web.bodies import (
    INT_MAX,
    Name,
    NewCategory,
    PatchLayer,
    Plan,
    Register,
    Submit,
    read_heartbeat,
)
from penstock.web.guard import Guard
from penstock.web.limits import LimitBodies, RateLimit, limited

PREFIX = "/api/v1"
OPEN_ROUTES = frozenset({f"{PREFIX}/health"})

Key = Annotated[str | None, Header(max_length=200)]
Version = Annotated[int, Query(ge=0, le=INT_MAX)]


def build_api(plane: ControlPlane, *, rate: RateLimit | None = None) -> FastAPI:
    """The application over one control plane."""
    app = FastAPI(
        title="Penstock",
        version="1",
        openapi_url=None,  # our own route, behind a verb
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    guard = Guard(plane.tokens, plane.clock, rate or RateLimit())
    router = APIRouter()
    _state_routes(app, router, plane, guard)
    _job_routes(router, plane, guard)
    _stream_routes(router, plane, guard)
    _container_routes(router, plane, guard)
    for route in router.routes:
        # Deny by default: forgetting the verb is found when the program starts, not by a stranger.
        assert isinstance(route, APIRoute)
        assert guard.verb_of(route) or PREFIX + route.path in OPEN_ROUTES, f"{route.path} names no verb"
    app.include_router(router, prefix=PREFIX)
    app.add_middleware(LimitBodies, streamed=f"{PREFIX}/packages/")
    answer_problems(app)
    return app


def _state_routes(app: FastAPI, router: APIRouter, plane: ControlPlane, guard: Guard) -> None:
    @router.get("/health")
    def health() -> dict[str, str]:
        """Open to everybody: says only that something answers."""
        return {"status": "ok"}

    @router.get("/openapi.json", include_in_schema=False)
    def openapi(caller: Caller = guard.allow("schema.read")) -> dict[str, Any]:
        return app.openapi()

    @router.get("/status")
    def status(caller: Caller = guard.allow("status.read")) -> dict[str, Any]:
        return plane.status()

    @router.get("/journal")
    def journal(
        caller: Caller = guard.allow("journal.read"),
        subject: Annotated[str | None, Query(max_length=500)] = None,
        since: Version = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, Any]:
        found = plane.journal.entries(subject=subject, since=since, limit=limit)
        return {"entries": [asdict(entry) for entry in found]}


def _job_routes(router: APIRouter, plane: ControlPlane, guard: Guard) -> None:
    @router.get("/jobs")
    def jobs(caller: Caller = guard.allow("job.read")) -> dict[str, Any]:
        return {"jobs": plane.job_views()}

    @router.get("/jobs/{name}")
    def job(name: Name, response: Response, caller: Caller = guard.allow("job.read")) -> dict[str, Any]:
        view = plane.job_view(name)
        response.headers["ETag"] = _etag(view["expected_version"])
        return view

    @router.patch("/jobs/{name}/layers/{layer}")
    def patch_layer(
        name: Name,
        layer: Name,
        body: PatchLayer,
        response: Response,
        caller: Caller = guard.allow("job.write"),
        idempotency_key: Key = None,
        if_match: Annotated[str | None, Header(max_length=200)] = None,
    ) -> dict[str, Any]:
        version = plane.patch_layer(
            name,
            layer,
            body.changes,
            expected_version=_version(if_match),
            actor=_actor(caller),
            reason=body.why,
            idempotency_key=idempotency_key,
        )
        response.headers["ETag"] = _etag(version)
        return {"version": version}

    @router.post("/pipelines/plan")
    def plan(body: Plan, caller: Caller = guard.allow("pipeline.plan")) -> dict[str, Any]:
        return {"changes": plane.plan_pipeline(body.compiled)}

    @router.post("/pipelines")
    def submit(
        body: Submit, caller: Caller = guard.allow("pipeline.submit"), idempotency_key: Key = None
    ) -> dict[str, Any]:
        return plane.submit_pipeline(
            body.compiled, actor=_actor(caller), reason=body.why, idempotency_key=idempotency_key
        )


def _stream_routes(router: APIRouter, plane: ControlPlane, guard: Guard) -> None:
    @router.get("/categories")
    def categories(caller: Caller = guard.allow("category.read")) -> dict[str, Any]:
        return {"categories": [plane.category_view(item.spec.name) for item in plane.log.categories()]}

    @router.get("/categories/{name}")
    def category(name: Name, caller: Caller = guard.allow("category.read")) -> dict[str, Any]:
        return plane.category_view(name)

    @router.post("/categories", responses={201: {"description": "It was not there before"}})
    def create_category(
        body: NewCategory, response: Response, caller: Caller = guard.allow("category.create")
    ) -> dict[str, Any]:
        spec = CategorySpec(**{**body.model_dump(), "columns": tuple(body.columns)})
        if plane.create_category(spec, actor=caller.name):
            response.status_code = 201
            response.headers["Location"] = f"{PREFIX}/categories/{spec.name}"
        return plane.category_view(spec.name)

    @router.put("/packages/{hash_}", responses={201: {"description": "It was not there before"}})
    async def put_package(
        hash_: Name, request: Request, response: Response, caller: Caller = guard.allow("package.write")
    ) -> dict[str, Any]:
        chunks = limited(request.stream(), PACKAGE_BYTES_MAX, request.scope)
        try:
            data = b"".join([chunk async for chunk in chunks])
        except ClientDisconnect as error:
            raise ConfigError(
                "the upload broke off", why="the caller hung up", fix="send it again"
            ) from error

        def put() -> bool:
            is_new = not plane.packages.has(hash_)
            plane.packages.put(hash_, data)
            return is_new

        response.status_code = 201 if await run_in_threadpool(put) else 200
        return {"hash": hash_}

    @router.get("/packages/{hash_}")
    def package(hash_: Name, caller: Caller = guard.allow("package.read")) -> Response:
        return Response(plane.packages.get(hash_), media_type="application/zip")


def _container_routes(router: APIRouter, plane: ControlPlane, guard: Guard) -> None:
    @router.post("/containers/{name}/register")
    def register(
        name: Name, body: Register, caller: Caller = guard.allow("container.beat")
    ) -> dict[str, Any]:
        plane.register_container(name, body.incarnation, folder_id=body.folder_id)
        return {"container": name}

    @router.post("/containers/{name}/beat")
    def beat(
        name: Name, body: dict[str, Any], caller: Caller = guard.allow("container.beat")
    ) -> dict[str, Any]:
        heartbeat = read_heartbeat(body)
        if heartbeat.container != name:
            raise ConfigError(
                f"this is not a heartbeat of {name!r}",
                why=f"it says that it is of {heartbeat.container!r}",
                fix="send it to its own address",
            )
        return plane.on_heartbeat(heartbeat).to_json()

    @router.get("/tasks")
    def tasks(caller: Caller = guard.allow("task.read"), since: Version | None = None) -> dict[str, Any]:
        return plane.task_list(since)

    @router.get("/containers/{name}/log")
    def log(
        name: Name,
        caller: Caller = guard.allow("log.read"),
        lines: Annotated[int, Query(ge=1, le=10_000)] = 100,
    ) -> dict[str, Any]:
        return {"text": plane.container_log(name, lines=lines)}


def _actor(caller: Caller) -> Actor:
    return Actor(name=caller.name, role=caller.role)


def _etag(version: int) -> str:
    return f'"{version}"'


def _version(if_match: str | None) -> int | None:
    """The version that a strong ETag names; None: whatever there is."""
    if if_match is None or if_match.strip() == "*":
        return None
    text = if_match.strip().removeprefix('"').removesuffix('"')
    if text.isascii() and text.isdigit() and len(text) <= 19:
        return int(text)
    raise ConfigError(
        f"If-Match is not a version: {if_match!r}",
        why="it must be one ETag that this API gave, not a weak one and not a list",
        fix="read the job again and use its ETag",
    )
