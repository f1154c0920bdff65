"""Changes of a layer's paths, the write that is asked most, without the machinery that other routes need.

On a database server the front takes them, whose threads have less to wait for; on a file, the control plane.

It reads the same models and calls the same function as the route. Whatever is unusual about a request goes
the ordinary way and is refused there: this only knows how to say yes, or what the Job Service says.
"""

from __future__ import annotations

import json
import re

from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.core.errors import PenstockError
from penstock.core.group_store import AT_ONCE
from penstock.jobs.config import NAME_PATTERN
from penstock.jobs.job_service import Patch
from penstock.web.answers import problem_response
from penstock.web.asking import Ask, Desk, version_of
from penstock.web.bodies import ETAG_PATTERN, KEY_LENGTH_MAX, KEY_PATTERN, PatchLayer
from penstock.web.guard import Guard
from penstock.web.layer_routes import write_patches
from penstock.web.limits import replay
from penstock.web.pools import PATCHES, Together
from penstock.web.problems import status_of

JSON_TYPE = (b"content-type", b"application/json")
_NAME = NAME_PATTERN.strip("^$")
_KEY, _ETAG = re.compile(KEY_PATTERN), re.compile(ETAG_PATTERN)


def layer_path(prefix: str) -> re.Pattern[str]:
    """The path of one layer of one job, with both names."""
    return re.compile(f"{re.escape(prefix)}/jobs/({_NAME})/layers/({_NAME})")


class PatchLane:
    """ASGI middleware, inside those that check origins and sizes."""

    def __init__(self, app: ASGIApp, *, prefix: str, guard: Guard, desk: Desk) -> None:
        self._app, self._guard, self._ask = app, guard, Ask(desk)
        # One thread writes what came meanwhile: threads that wait for each other only take turns.
        self._patches: Together[Patch, Response] = Together(
            PATCHES, lambda asked: write_patches(desk, asked), at_once=AT_ONCE
        )
        self._path = layer_path(prefix)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http" and scope["method"] == "PATCH" and JSON_TYPE in scope["headers"]:
            found = self._path.fullmatch(scope["path"])
        headers = None if found is None or scope["query_string"] else _headers(scope)
        if found is None or headers is None:
            await self._app(scope, receive, send)
            return
        body = (await receive()).get("body", b"")
        read = _read(body)
        try:
            caller = None if read is None else await self._guard.known(scope["headers"], "job.write")
        except PenstockError:
            caller = None
        if read is None or caller is None:
            await self._app(scope, replay(body, receive), send)
            return
        patch = Patch(
            job=found[1],
            layer=found[2],
            changes=read.changes,
            expected_version=version_of(headers[1]),
            asked=self._ask(caller, read.why, headers[0]),
        )
        try:
            answer = await self._patches.ask(patch)
        except PenstockError as error:
            if status_of(error) == 500:
                raise
            answer = problem_response(error)
        await answer(scope, receive, send)


def _headers(scope: Scope) -> tuple[str | None, str | None] | None:
    """Idempotency key and ETag, if both are plain or not there."""
    found: dict[bytes, str] = {}
    for name, value in scope["headers"]:
        if name in (b"idempotency-key", b"if-match"):
            if name in found:
                return None
            found[name] = value.decode("latin-1")
    key, etag = found.get(b"idempotency-key"), found.get(b"if-match")
    if key is not None and (len(key) > KEY_LENGTH_MAX or _KEY.fullmatch(key) is None):
        return None
    return None if etag is not None and _ETAG.fullmatch(etag) is None else (key, etag)


def _read(body: bytes) -> PatchLayer | None:
    try:
        return PatchLayer.model_validate(json.loads(body))
    except (ValueError, ValidationError, RecursionError):
        return None
