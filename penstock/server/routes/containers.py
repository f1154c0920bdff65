"""Routes that containers call: registration, heartbeats, the task list; and the log of a container."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import structlog
from fastapi import APIRouter, Query, Request, Response

from penstock.core.errors import ConfigError, NotFound, PenstockError, VersionConflict
from penstock.db.tokens import Caller
from penstock.fleet.messages import Heartbeat, HeartbeatReply
from penstock.server import bodies, replies
from penstock.server.answers import encoded
from penstock.server.bodies import INT_MAX, LINE_MAX, IfOther, Name, Version
from penstock.server.limits import check_json
from penstock.server.pools import HEARTBEATS, LONG, RequestBatcher
from penstock.server.replies import problems
from penstock.server.routes import fleet as fleet_routes
from penstock.server.security import Guard
from penstock.server.services import Control

JSON = "application/json"
BATCH_MAX = 64  # heartbeats in one transaction
NUL = b"\\u0000"  # escaped
UNCHANGED: replies.Responses = {304: {"description": "The list still has this version"}}


def add_container_routes(router: APIRouter, plane: Control, guard: Guard, lists: TaskListWatch) -> None:
    """Registration, heartbeats, the task list, logs."""
    # A fleet of 2,000 containers sends 200 heartbeats a second: a batch of them shares a transaction.
    beats = RequestBatcher(HEARTBEATS, partial(answer_beats, plane), batch_max=BATCH_MAX)

    @router.post("/containers/{name}/register", responses=problems(409, 507))
    @HEARTBEATS
    def register_container(
        name: Name, body: bodies.RegisterBody, caller: Caller = guard.allow("container.beat")
    ) -> replies.RegisteredReply:
        """Register a container's new incarnation."""
        plane.register_container(name, body.incarnation, folder_id=body.folder_id)
        return replies.RegisteredReply(container=name)

    # Encoded without a model: 2,000 containers ask 200 times a second. Takes 4 µs, as a model 160 µs.
    @router.post(
        "/containers/{name}/beat",
        response_model=replies.BeatReply,
        responses=problems(404, 409, 507),
        openapi_extra={"requestBody": {"required": True, "content": {JSON: {"schema": BEAT_SCHEMA}}}},
    )
    async def beat(name: Name, request: Request, caller: Caller = guard.allow("container.beat")) -> Response:
        """A heartbeat; the reply has the verdict, the owned shards and orders."""
        heartbeat = read_heartbeat(await request.body(), request.headers.get("content-type", ""))
        if heartbeat.container != name:
            raise ConfigError(
                f"this is not a heartbeat of {name!r}",
                why=f"it names the container {heartbeat.container!r}",
                fix="send it to the route of its own container",
            )
        plane.on_beat_arrival(heartbeat)
        return encoded(msgspec.json.encode(await beats.ask(heartbeat)))

    @router.post("/containers/{name}/dead", responses=problems(507))
    @HEARTBEATS
    def container_dead(
        name: Name, body: bodies.DeadBody, caller: Caller = guard.allow("container.beat")
    ) -> fleet_routes.Buried:
        """Report from its host that a container and its tasks have ended: its shards move at once."""
        return fleet_routes.Buried(is_news=plane.on_container_dead(name, body.folder_id))

    @router.get("/installation", responses=problems())
    @HEARTBEATS
    def installation(caller: Caller = guard.allow("container.beat")) -> fleet_routes.InstallationReply:
        """The settings that a container needs to join: heartbeat times, and places of bus, rows and store."""
        return fleet_routes.InstallationReply(**plane.installation(), container=caller.container)

    # Bytes: the Task Service encodes the tasks of a job once, when they change, for all containers.
    @router.get("/tasks", response_model=replies.TaskListReply, responses=UNCHANGED | problems())
    async def task_list(
        caller: Caller = guard.allow("task.read"),
        since: Version = None,
        if_none_match: IfOther = None,
        wait_s: Annotated[float, Query(ge=0, le=WAIT_MAX_S)] = 0,
    ) -> Response:
        """The task list, or its changes since a version; its version is the ETag. With `wait_s` the request
        is a long poll: it is answered when the list changes, or after that time.
        """
        if if_none_match is not None:
            known = if_none_match.strip('"')
            version = await HEARTBEATS.run(plane.task_service.version)
            if known == str(version) and wait_s:
                await lists.newer_than(version, wait_s)
                version = await HEARTBEATS.run(plane.task_service.version)
            if known == str(version):
                return Response(status_code=304, headers={"ETag": if_none_match})
        version, found = await HEARTBEATS.run(plane.task_list, since)
        return encoded(found, version=version)

    @router.get("/containers/{name}/log", responses=problems(404))
    @LONG
    def container_log(
        name: Name,
        caller: Caller = guard.allow("log.read"),
        lines: Annotated[int, Query(ge=1, le=10_000)] = 100,
    ) -> replies.LogText:
        """The end of a container's log."""
        return replies.LogText(text=_log_of(plane, name, lines))


def _log_of(plane: Control, name: str, lines: int) -> str:
    """The end of a container's log, if it runs on this host."""
    known = {row.name for row in plane.fleet.containers()}
    path = plane.settings.folder / "containers" / name / "engine.log"
    if name not in known or not path.exists():
        raise NotFound(
            f"no log of a container {name!r} here",
            why=f"containers known: {', '.join(sorted(known)) or 'none'}",
            fix="`penstock container ls` lists the containers",
        )
    with path.open("rb") as file:
        with contextlib.suppress(OSError):
            file.seek(-512 * 1024, 2)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def answer_beats(plane: Control, beats: Sequence[Heartbeat]) -> list[HeartbeatReply]:
    """The replies to a batch of heartbeats."""
    try:
        return plane.answer_beats(beats)
    except VersionConflict:
        # One heartbeat has a conflict: process them one by one, so that the others get their replies.
        return [reply for beat in beats for reply in plane.answer_beats([beat])]


def read_heartbeat(body: bytes, content_type: str) -> Heartbeat:
    """Decode a heartbeat strictly: unknown or missing fields are refused."""
    try:
        if content_type.partition(";")[0].strip().lower() != JSON:
            raise ValueError(f"its content type is {content_type[:100]!r}, not {JSON}")
        if NUL in body:
            raise ValueError("it has a NUL character, which no store can hold")
        return msgspec.convert(_decode(body), Heartbeat, from_attributes=True)
    except (ValueError, msgspec.DecodeError) as error:
        check_json(body)  # raises the same errors for bad JSON as all other routes
        raise ConfigError(
            "this is not a valid heartbeat",
            why=str(error),
            fix="run the same version of Penstock in the container and in the control plane",
        ) from None


def _strict(kind: type) -> Any:
    """A msgspec struct with the fields of a dataclass, which refuses all others."""
    hints, declared = get_type_hints(kind), list[Any]()
    for item in fields(kind):
        hint = _bounded(hints[item.name])
        if item.default_factory is not MISSING:
            declared.append((item.name, hint, msgspec.field(default_factory=item.default_factory)))
        elif item.default is not MISSING:
            declared.append((item.name, hint, item.default))
        else:
            declared.append((item.name, hint))
    return msgspec.defstruct(f"{kind.__name__}Body", declared, kw_only=True, forbid_unknown_fields=True)


def _bounded(hint: Any) -> Any:
    if get_origin(hint) is tuple:
        return tuple[_bounded(get_args(hint)[0]), ...]  # type: ignore[misc]
    if isinstance(hint, type) and is_dataclass(hint):
        return _strict(hint)
    return {int: BoundedInt, str: BoundedText}.get(hint, hint)


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    """A schema with its references replaced by what they refer to: OpenAPI has no `$defs`."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
        return {key: _inlined(value, parts) for key, value in schema.items() if key != "$defs"}
    return [_inlined(item, parts) for item in schema] if isinstance(schema, list) else schema


BoundedInt = Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)]
BoundedText = Annotated[str, msgspec.Meta(max_length=LINE_MAX)]
_BODY = _strict(Heartbeat)
_decode = msgspec.json.Decoder(_BODY).decode
_SCHEMA = msgspec.json.schema(_BODY)
BEAT_SCHEMA = _inlined(_SCHEMA, _SCHEMA["$defs"])


POLL_S = 0.1
WAIT_MAX_S = 30.0

log = structlog.get_logger(__name__)


class TaskListWatch:
    """Wakes long polls when the task list changes. Everything but `close` runs on the server's event loop."""

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version
        self._seen = 0
        self._waiting = 0
        self._changed = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def newer_than(self, version: int, wait_s: float) -> None:
        """Return when the list is newer than this version, after `wait_s`, or when the server ends."""
        self._loop = asyncio.get_running_loop()
        end = self._loop.time() + wait_s
        self._waiting += 1
        try:
            while not self._is_closed and self._seen <= version and (left_s := end - self._loop.time()) > 0:
                if self._poller is None or self._poller.done():
                    self._poller = self._loop.create_task(self._poll())
                try:
                    await asyncio.wait_for(self._changed.wait(), left_s)
                except TimeoutError:
                    return
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End all waits; may be called from any thread."""
        self._is_closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _poll(self) -> None:
        """Poll the list's version as long as there are waiters."""
        self._seen = 0  # the last seen version may be older than the waiters' versions
        is_logged = False
        while self._waiting and not self._is_closed:
            try:
                seen = await HEARTBEATS.run(self._version)
                is_logged = False
                if seen != self._seen:
                    self._seen = seen
                    self._notify()
            except PenstockError as error:
                if not is_logged:
                    log.warning("the task list's version could not be read", error=error.what)
                is_logged = True
            await asyncio.sleep(POLL_S)
