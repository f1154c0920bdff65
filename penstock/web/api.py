"""The HTTP API, `/api/v1`: thin. Each route names its verb, calls one service, and answers JSON or problem+json."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from penstock.app import ControlPlane
from penstock.core.errors import ConfigError, PenstockError, Refused
from penstock.jobs.job_service import Actor
from penstock.streams.bus.log import CategorySpec
from penstock.streams.package_shelf import PACKAGE_BYTES_MAX
from penstock.tasks.messages import Heartbeat
from penstock.web.auth import require
from penstock.web.problems import status_of, to_problem
from penstock.core.token_store import Caller

BODY_BYTES_MAX = 1024 * 1024
JSON_DEPTH_MAX = 32


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Submit(_Body):
    """A compiled pipeline and why it is submitted."""

    compiled: dict[str, Any]
    why: str = ""


class Plan(_Body):
    """A compiled pipeline to compare with what runs."""

    compiled: dict[str, Any]


class PatchLayer(_Body):
    """Dotted paths to set in one layer; null removes one."""

    changes: dict[str, Any]
    why: str = ""


class NewCategory(_Body):
    """A category to create."""

    name: str
    partitions: int = Field(ge=1, le=4096)
    columns: list[tuple[str, str]]
    format: str = "json"
    watermark: str = "event_time"
    lateness_ms: int = Field(default=0, ge=0)
    ts_column: str = ""


class Register(_Body):
    """A container's new life."""

    incarnation: str
    folder_id: str


def build_api(plane: ControlPlane) -> FastAPI:
    """The application over one control plane."""
    app = FastAPI(title="Penstock", version="1", openapi_url="/api/v1/openapi.json", docs_url=None, redoc_url=None)
    app.include_router(_routes(plane), prefix="/api/v1")
    app.middleware("http")(_limit_bodies)
    app.exception_handler(PenstockError)(_answer_problem)
    app.exception_handler(RequestValidationError)(_answer_invalid)
    return app


def _routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter()

    def allow(verb: str) -> Any:
        def check(authorization: Annotated[str, Header()] = "") -> Caller:
            scheme, _, token = authorization.partition(" ")
            if scheme.lower() != "bearer" or not token:
                raise Unauthorised()
            try:
                caller = plane.tokens.caller(token.strip(), now_ms=plane.clock.now_ms())
            except Refused as error:
                raise Unauthorised(error) from error
            require(caller.role, verb)
            return caller

        check.__name__ = f"allow:{verb}"
        return Depends(check)

    _job_routes(router, plane, allow)
    _stream_routes(router, plane, allow)
    _container_routes(router, plane, allow)

    @router.get("/health")
    def health() -> dict[str, str]:
        """Open to everybody: says only that something answers."""
        return {"status": "ok"}

    @router.get("/status")
    def status(caller: Caller = allow("status.read")) -> dict[str, Any]:
        return plane.status()

    @router.get("/journal")
    def journal(
        caller: Caller = allow("journal.read"),
        subject: str | None = None,
        since: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, Any]:
        found = plane.journal.entries(subject=subject, since=since, limit=limit)
        return {"entries": [asdict(entry) for entry in found]}

    return router


def _job_routes(router: APIRouter, plane: ControlPlane, allow: Callable[[str], Any]) -> None:
    @router.get("/jobs")
    def jobs(caller: Caller = allow("job.read")) -> dict[str, Any]:
        return {"jobs": plane.job_views()}

    @router.get("/jobs/{name}")
    def job(name: str, response: Response, caller: Caller = allow("job.read")) -> dict[str, Any]:
        view = plane.job_view(name)
        response.headers["ETag"] = f'"{view["expected_version"]}"'
        return view

    @router.patch("/jobs/{name}/layers/{layer}")
    def patch_layer(
        name: str,
        layer: str,
        body: PatchLayer,
        response: Response,
        caller: Caller = allow("job.write"),
        idempotency_key: Annotated[str | None, Header()] = None,
        if_match: Annotated[str | None, Header()] = None,
    ) -> dict[str, Any]:
        version = plane.patch_layer(
            name,
            layer,
            body.changes,
            expected_version=_version(if_match),
            actor=Actor(name=caller.name, role=caller.role),
            reason=body.why,
            idempotency_key=idempotency_key,
        )
        response.headers["ETag"] = f'"{version}"'
        return {"version": version}

    @router.post("/pipelines/plan")
    def plan(body: Plan, caller: Caller = allow("pipeline.plan")) -> dict[str, Any]:
        return {"changes": plane.plan_pipeline(body.compiled)}

    @router.post("/pipelines")
    def submit(
        body: Submit,
        caller: Caller = allow("pipeline.submit"),
        idempotency_key: Annotated[str | None, Header()] = None,
    ) -> dict[str, Any]:
        actor = Actor(name=caller.name, role=caller.role)
        return plane.submit_pipeline(body.compiled, actor=actor, reason=body.why, idempotency_key=idempotency_key)


def _stream_routes(router: APIRouter, plane: ControlPlane, allow: Callable[[str], Any]) -> None:
    @router.get("/categories")
    def categories(caller: Caller = allow("category.read")) -> dict[str, Any]:
        return {"categories": [plane.category_view(item.spec.name) for item in plane.log.categories()]}

    @router.get("/categories/{name}")
    def category(name: str, caller: Caller = allow("category.read")) -> dict[str, Any]:
        return plane.category_view(name)

    @router.post("/categories")
    def create_category(body: NewCategory, caller: Caller = allow("category.create")) -> dict[str, Any]:
        spec = CategorySpec(**{**body.model_dump(), "columns": tuple((name, kind) for name, kind in body.columns)})
        plane.create_category(spec, actor=caller.name)
        return plane.category_view(spec.name)

    @router.put("/packages/{hash_}")
    async def put_package(
        hash_: str, request: Request, caller: Caller = allow("package.write")
    ) -> dict[str, Any]:
        plane.packages.put(hash_, await request.body())
        return {"hash": hash_}

    @router.get("/packages/{hash_}")
    def package(hash_: str, caller: Caller = allow("package.read")) -> Response:
        return Response(plane.packages.get(hash_), media_type="application/zip")


def _container_routes(router: APIRouter, plane: ControlPlane, allow: Callable[[str], Any]) -> None:
    @router.post("/containers/{name}/register")
    def register(name: str, body: Register, caller: Caller = allow("container.beat")) -> dict[str, Any]:
        plane.register_container(name, body.incarnation, folder_id=body.folder_id)
        return {"container": name}

    @router.post("/containers/{name}/beat")
    def beat(name: str, body: dict[str, Any], caller: Caller = allow("container.beat")) -> dict[str, Any]:
        try:
            heartbeat = Heartbeat.from_json(dict(body))
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigError("not a heartbeat", why=str(error), fix="run the same version on both sides") from error
        if heartbeat.container != name:
            raise ConfigError("not this container's heartbeat", why=f"it is of {heartbeat.container!r}", fix="")
        return plane.on_heartbeat(heartbeat).to_json()

    @router.get("/tasks")
    def tasks(caller: Caller = allow("task.read"), since: int | None = None) -> dict[str, Any]:
        return plane.task_list(since)

    @router.get("/containers/{name}/log")
    def log(
        name: str,
        caller: Caller = allow("log.read"),
        lines: Annotated[int, Query(ge=1, le=10_000)] = 100,
    ) -> dict[str, Any]:
        return {"text": plane.container_log(name, lines=lines)}


class Unauthorised(Refused):
    """No token, or a bad one."""

    def __init__(self, cause: Refused | None = None) -> None:
        super().__init__(
            cause.what if cause else "this needs a token",
            why=cause.why if cause else "the request has no `Authorization: Bearer <token>` header",
            fix=cause.fix if cause else "use the token that `penstock up` wrote into its folder",
        )


def _version(if_match: str | None) -> int | None:
    if if_match is None or if_match == "*":
        return None
    try:
        return int(if_match.strip().removeprefix("W/").strip('"'))
    except ValueError as error:
        raise ConfigError(
            f"If-Match is not a version: {if_match!r}", why="it must be an ETag of this API", fix="read the job again"
        ) from error


async def _limit_bodies(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    is_package = request.url.path.startswith("/api/v1/packages/")
    limit = PACKAGE_BYTES_MAX if is_package else BODY_BYTES_MAX
    if request.method in ("POST", "PUT", "PATCH"):
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                return _problem(
                    ConfigError("the request is too large", why=f"the limit is {limit} bytes", fix="send less"), 413
                )
        request._body = body
        if not is_package and _depth(body) > JSON_DEPTH_MAX:
            return _problem(
                ConfigError("the JSON is nested too deep", why=f"the limit is {JSON_DEPTH_MAX}", fix="send less"), 422
            )
    return await call_next(request)


def _depth(body: bytes) -> int:
    deepest = depth = 0
    in_string = escaped = False
    for byte in body:
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


async def _answer_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    return _problem(error, 401 if isinstance(error, Unauthorised) else None)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first.get("loc", ()))
    return _problem(
        ConfigError(f"the request is not valid at {place!r}", why=str(first.get("msg", "")), fix="see the API's schema"),
        422,
    )


def _problem(error: PenstockError, status: int | None) -> JSONResponse:
    problem = to_problem(error, status if status is not None else status_of(error))
    return JSONResponse(json.loads(json.dumps(problem)), status_code=problem["status"], media_type="application/problem+json")
