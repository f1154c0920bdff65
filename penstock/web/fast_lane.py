"""The read that is asked most, `GET /jobs/{name}`, without the machinery that every other route needs.

Whatever is unusual about a request (a token that must be looked up, a role that may not, no such job, a
query) goes the ordinary way and is answered there: this only knows how to say yes.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.core.errors import PenstockError
from penstock.jobs.config import NAME_PATTERN
from penstock.web.guard import Guard
from penstock.web.overview import Overview
from penstock.web.pools import READS

_NAME = re.compile(NAME_PATTERN)


class FastLane:
    """ASGI middleware, inside those that check origins and sizes."""

    def __init__(self, app: ASGIApp, *, prefix: str, guard: Guard, overview: Overview, local: bool) -> None:
        self._app, self._prefix, self._guard = app, f"{prefix}/jobs/", guard
        self._overview, self._local = overview, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._answer(scope)
        if answer is None:
            await self._app(scope, receive, send)
            return
        version, body = answer
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"etag", b'"%d"' % version),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope) -> tuple[int, bytes] | None:
        if scope["type"] != "http" or scope["method"] != "GET" or scope["query_string"]:
            return None
        path: str = scope["path"]
        name = path[len(self._prefix) :]
        if not path.startswith(self._prefix) or _NAME.fullmatch(name) is None:
            return None
        try:
            if not self._guard.knows(scope["headers"], "job.read"):
                return None
            if self._local:
                return self._overview.job(name)
            return await READS.run(self._overview.job, name)
        except PenstockError:
            return None
