"""The reads that are asked most, a job and a page of jobs, without the machinery that other routes need.

Whatever is unusual about a request (a token that is not good, a role that may not, no such job, a filter)
goes the ordinary way and is answered there: this only knows how to say yes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.core.errors import PenstockError
from penstock.jobs.config import NAME_PATTERN
from penstock.jobs.job_reads import PAGE_MAX
from penstock.web.guard import Guard
from penstock.web.overview import JobPages
from penstock.web.pools import READS, Together

Found = tuple[int | None, bytes]
Read = Callable[[], Awaitable[Found | None]]
AT_ONCE = 64
LIMIT = 100  # of the ordinary way
_NAME = re.compile(NAME_PATTERN)
_PAGE = re.compile(rb"(?:limit=([0-9]{1,4}))?(?:(?:^|&)after=([A-Za-z0-9_.-]{1,200}))?")


class FastLane:
    """ASGI middleware, inside those that check origins and sizes."""

    def __init__(self, app: ASGIApp, *, prefix: str, guard: Guard, pages: JobPages, local: bool) -> None:
        self._app, self._prefix, self._guard = app, f"{prefix}/jobs", guard
        self._pages, self._local = pages, local
        # A look at a server costs more than what is looked at: what comes meanwhile is asked together.
        self._jobs = Together(READS, pages.several, at_once=AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._answer(scope)
        if answer is None:
            await self._app(scope, receive, send)
            return
        version, body = answer
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if version is not None:
            headers.append((b"etag", b'"%d"' % version))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope) -> Found | None:
        if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].startswith(self._prefix):
            return None
        read = self._read(scope["path"][len(self._prefix) :], scope["query_string"])
        if read is None:
            return None
        try:
            if not await self._guard.knows(scope["headers"], "job.read"):
                return None
            return await read()
        except PenstockError:
            return None

    def _read(self, rest: str, query: bytes) -> Read | None:
        """What a path asks for, if it is one of the two."""
        if rest.startswith("/") and not query and _NAME.fullmatch(rest[1:]):
            return partial(self._job, rest[1:])
        found = None if rest else _PAGE.fullmatch(query)
        limit = 0 if found is None else int(found[1] or LIMIT)
        if found is None or not 1 <= limit <= PAGE_MAX:
            return None
        return partial(self._page, (found[2] or b"").decode(), limit)

    async def _job(self, name: str) -> Found | None:
        return self._pages.job(name) if self._local else await self._jobs.ask(name)

    async def _page(self, after: str, limit: int) -> Found:
        read = partial(
            self._pages.jobs,
            labels={},
            state=None,
            pipeline=None,
            removed=False,
            after=after,
            limit=limit,
        )
        return None, read() if self._local else await READS.run(read)
