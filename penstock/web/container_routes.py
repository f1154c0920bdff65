"""Routes that containers use, and what people ask about containers."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import WithJsonSchema

from penstock.app import ControlPlane
from penstock.core.errors import ConfigError, NotFound
from penstock.core.token_store import Caller
from penstock.web import bodies, fleet_replies, replies
from penstock.web.answers import answer
from penstock.web.bodies import HEARTBEAT, IfOther, Name, Version, read_heartbeat
from penstock.web.guard import Guard
from penstock.web.list_watch import WAIT_MAX_S, ListWatch
from penstock.web.pools import BEATS, LONG
from penstock.web.replies import problems

UNCHANGED: replies.Responses = {304: {"description": "The list has the version that was named"}}


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    """A schema with what it refers to in place, since only whole models may have names in the API's."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
        return {key: _inlined(value, parts) for key, value in schema.items() if key != "$defs"}
    return [_inlined(item, parts) for item in schema] if isinstance(schema, list) else schema


_SCHEMA = HEARTBEAT.model_json_schema()
Beat = Annotated[dict[str, Any], WithJsonSchema(_inlined(_SCHEMA, _SCHEMA.get("$defs", {})))]


def add_container_routes(router: APIRouter, plane: ControlPlane, guard: Guard, lists: ListWatch) -> None:
    """Registration, heartbeats, the task list, logs."""

    @router.post(
        "/containers/{name}/register", response_model=replies.Registered, responses=problems(409, 507)
    )
    @BEATS
    def register_container(
        name: Name, body: bodies.Register, caller: Caller = guard.allow("container.beat")
    ) -> Response:
        """Announce a container's new life."""
        plane.register_container(name, body.incarnation, folder_id=body.folder_id)
        return answer({"container": name})

    @router.post(
        "/containers/{name}/beat", response_model=replies.BeatReply, responses=problems(404, 409, 507)
    )
    @BEATS
    def beat(name: Name, body: Beat, caller: Caller = guard.allow("container.beat")) -> Response:
        """A heartbeat, answered with what the container should know and do."""
        heartbeat = read_heartbeat(body)
        if heartbeat.container != name:
            raise ConfigError(
                f"this is not a heartbeat of {name!r}",
                why=f"it says that it is of {heartbeat.container!r}",
                fix="send it to its own address",
            )
        return answer(plane.on_heartbeat(heartbeat).to_json())

    @router.post("/containers/{name}/dead", response_model=fleet_replies.Buried, responses=problems(507))
    @BEATS
    def container_dead(
        name: Name, body: bodies.Dead, caller: Caller = guard.allow("container.beat")
    ) -> Response:
        """Its host saw it end and has cleared up: its shards move at once."""
        return answer({"is_news": plane.on_container_dead(name, body.folder_id)})

    @router.get("/installation", response_model=fleet_replies.Installation, responses=problems())
    @BEATS
    def installation(caller: Caller = guard.allow("container.beat")) -> Response:
        """What a container must know to join: heartbeat times, and where streams, state and store are."""
        return answer(plane.installation() | {"container": caller.container})

    @router.get("/tasks", response_model=replies.TaskList, responses=UNCHANGED | problems())
    async def task_list(
        caller: Caller = guard.allow("task.read"),
        since: Version = None,
        if_none_match: IfOther = None,
        wait_s: Annotated[float, Query(ge=0, le=WAIT_MAX_S)] = 0,
    ) -> Response:
        """The task list, or what changed in it since a version; its version is its ETag. With `wait_s` one
        that has not changed is answered when it does, or after so long.
        """
        if if_none_match is not None:
            known = if_none_match.strip('"')
            version = await BEATS.run(plane.task_service.version)
            if known == str(version) and wait_s:
                await lists.newer_than(version, wait_s)
                version = await BEATS.run(plane.task_service.version)
            if known == str(version):
                return Response(status_code=304, headers={"ETag": if_none_match})
        version, found = await BEATS.run(plane.task_list, since)
        return answer(found, version=version)

    @router.get("/containers/{name}/log", response_model=replies.LogText, responses=problems(404))
    @LONG
    def container_log(
        name: Name,
        caller: Caller = guard.allow("log.read"),
        lines: Annotated[int, Query(ge=1, le=10_000)] = 100,
    ) -> Response:
        """The end of a container's log."""
        return answer({"text": _log_of(plane, name, lines)})


def _log_of(plane: ControlPlane, name: str, lines: int) -> str:
    """The end of a container's log, if it runs on this host."""
    known = {row.name for row in plane.fleet.containers()}
    path = plane.settings.folder / "containers" / name / "engine.log"
    if name not in known or not path.exists():
        raise NotFound(
            f"no log of a container {name!r} here",
            why=f"containers known: {', '.join(sorted(known)) or 'none'}",
            fix="look at `penstock status` for their names",
        )
    with path.open("rb") as file:
        with contextlib.suppress(OSError):
            file.seek(-512 * 1024, 2)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
