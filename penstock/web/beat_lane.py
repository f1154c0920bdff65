"""Heartbeats without the machinery that other routes need: read as what they are, answered many at a time.

A fleet of 2,000 containers sends 200 a second. Each alone took a pass through FastAPI, a check of its JSON, a
model, and a transaction with its own write to the disk. Whatever is unusual about one goes the ordinary way
and is refused there: this only knows how to say yes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.app import ControlPlane
from penstock.core.errors import PenstockError, VersionConflict
from penstock.jobs.config import NAME_PATTERN
from penstock.tasks.messages import Heartbeat
from penstock.web.answers import problem_response
from penstock.web.bodies import INT_MAX, LINE_MAX
from penstock.web.guard import Guard
from penstock.web.limits import BEAT_END, look_at, replay
from penstock.web.pools import BEATS, Together

AT_ONCE = 64
JSON_TYPE = (b"content-type", b"application/json")


class BeatLane:
    """ASGI middleware, inside those that check origins and sizes."""

    def __init__(self, app: ASGIApp, *, prefix: str, guard: Guard, plane: ControlPlane) -> None:
        self._app, self._guard, self._plane = app, guard, plane
        self._path = re.compile(f"{re.escape(prefix)}/containers/({NAME_PATTERN.strip('^$')}){BEAT_END}")
        self._answers = Together(BEATS, self._answered, at_once=AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(BEAT_END):
            await self._app(scope, receive, send)
            return
        body = (await receive()).get("body", b"")
        try:
            answer = await self._answer(scope, body)
            if answer is None:
                await look_at(body)
        except PenstockError as error:
            await problem_response(error)(scope, receive, send)
            return
        if answer is None:
            await self._app(scope, replay(body, receive), send)
            return
        headers = [JSON_TYPE, (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _answer(self, scope: Scope, body: bytes) -> bytes | None:
        found = self._path.fullmatch(scope["path"])
        is_plain = scope["method"] == "POST" and not scope["query_string"] and JSON_TYPE in scope["headers"]
        if found is None or not is_plain:
            return None
        try:
            caller = await self._guard.known(scope["headers"], "container.beat")
        except PenstockError:
            return None
        if caller is None or not (caller.role == "admin" or caller.container == found[1]):
            return None
        beat = read_beat(body)
        if beat is None or beat.container != found[1]:
            return None
        self._plane.on_beat_arrival(beat)
        return await self._answers.ask(beat)

    def _answered(self, beats: Sequence[Heartbeat]) -> list[bytes]:
        try:
            replies = self._plane.answer_beats(beats)
        except VersionConflict:
            # One of them says what does not fit: that is no reason to leave the others without an answer.
            replies = [reply for beat in beats for reply in self._plane.answer_beats([beat])]
        return [_encode(reply) for reply in replies]


def read_beat(body: bytes) -> Heartbeat | None:
    """A heartbeat, if the body is exactly one."""
    if NUL in body:
        return None
    try:
        return msgspec.convert(_decode(body), Heartbeat, from_attributes=True)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _mirror(kind: type) -> Any:
    """A struct with the fields of a message's class that refuses all others."""
    hints, declared = get_type_hints(kind), list[Any]()
    for item in fields(kind):
        hint = _at_the_edge(hints[item.name])
        if item.default_factory is not MISSING:
            declared.append((item.name, hint, msgspec.field(default_factory=item.default_factory)))
        elif item.default is not MISSING:
            declared.append((item.name, hint, item.default))
        else:
            declared.append((item.name, hint))
    return msgspec.defstruct(f"{kind.__name__}Beaten", declared, kw_only=True, forbid_unknown_fields=True)


def _at_the_edge(hint: Any) -> Any:
    if get_origin(hint) is tuple:
        return tuple[_at_the_edge(get_args(hint)[0]), ...]  # type: ignore[misc]
    if isinstance(hint, type) and is_dataclass(hint):
        return _mirror(hint)
    return {int: Count, str: Line}.get(hint, hint)


# An escaped NUL: no store holds it.
NUL = b"\\u0000"
Count = Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)]
Line = Annotated[str, msgspec.Meta(max_length=LINE_MAX)]
_decode = msgspec.json.Decoder(_mirror(Heartbeat)).decode
_encode = msgspec.json.Encoder().encode
