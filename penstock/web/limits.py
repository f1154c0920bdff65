"""How much a caller may send, and how often: header and body size, the shape of JSON, requests per second."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, PenstockError
from penstock.web.answers import problem_response
from penstock.web.json_check import check_json
from penstock.web.pools import LONG
from penstock.web.problems import HeadersTooLarge, TooLarge, TooMany

FRONT_HEADER = b"x-penstock-front"  # only the front sends it; what callers send under this name is dropped
BEAT_END = "/beat"
BODY_BYTES_MAX = 1024 * 1024
HEADER_BYTES_MAX = 16 * 1024
HEADERS_MAX = 100
# Looking at more than this takes long enough for others to notice: it is done beside the event loop.
LOOK_BYTES_MAX = 16 * 1024
REQUESTS_MAX = 200  # per token and window
WINDOW_MS: Millis = 1_000


class RateLimit:
    """Counts requests per caller in fixed windows. Thread-safe."""

    def __init__(self, requests_max: int = REQUESTS_MAX) -> None:
        self._requests_max, self._lock = requests_max, threading.Lock()
        self._window, self._counts = 0, dict[str, int]()

    def count(self, caller: str, now_ms: Millis) -> None:
        """One more request; TooMany past the limit."""
        with self._lock:
            window = now_ms // WINDOW_MS
            if window != self._window:
                self._window, self._counts = window, {}
            self._counts[caller] = self._counts.get(caller, 0) + 1
            if self._counts[caller] > self._requests_max:
                raise TooMany(
                    "too many requests",
                    why=f"one token may make {self._requests_max * 1000 // WINDOW_MS} of them per second",
                    fix="wait a second, and ask less often",
                )


class LimitBodies:
    """ASGI middleware: reads a JSON body up to its limit, looks at it, and hands it on whole.

    Paths under `streamed` are left alone: their routes read with `limited`, after they know who calls.
    A body that breaks off is no body: nothing is done with it. What the front has looked at, and says so by
    the secret that it was given, is not looked at again. Heartbeats are looked at by `beat_lane`, as what
    they are.
    """

    def __init__(self, app: ASGIApp, *, streamed: str, front_secret: str = "") -> None:
        self._app, self._streamed = app, streamed
        self._mark = (FRONT_HEADER, front_secret.encode()) if front_secret else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            check_headers(scope)
            if not scope["path"].startswith(self._streamed):
                is_looked_at = self._mark is not None and self._mark in scope["headers"]
                look = not is_looked_at and not scope["path"].endswith(BEAT_END)
                receive = replay(await _read_body(scope, receive, look=look), receive)
        except PenstockError as error:
            await problem_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _read_body(scope: Scope, receive: Receive, *, look: bool) -> bytes:
    body = b"".join([chunk async for chunk in limited(_chunks(receive), BODY_BYTES_MAX, scope)])
    if look:
        await look_at(body)
    return body


async def look_at(body: bytes) -> None:
    """Refuse JSON that would hurt somebody; beside the event loop if there is much of it."""
    if len(body) > LOOK_BYTES_MAX:
        await LONG.run(check_json, body)
    elif body:
        check_json(body)


def check_headers(scope: Scope) -> None:
    """Refuse more headers than any caller of ours sends."""
    headers = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers)
    size += len(scope["path"]) + len(scope.get("query_string", b""))
    if len(headers) > HEADERS_MAX or size > HEADER_BYTES_MAX:
        raise HeadersTooLarge(
            "the request's headers are too large",
            why=f"the limits are {HEADERS_MAX} headers and {HEADER_BYTES_MAX} bytes, with path and query",
            fix="send less",
        )


async def limited(
    chunks: AsyncIterator[bytes], limit: int, scope: Scope | None = None
) -> AsyncIterator[bytes]:
    """The chunks, until they are too many; at once if the length is announced."""
    announced = dict(scope["headers"]).get(b"content-length", b"") if scope is not None else b""
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    total = 0
    async for chunk in chunks:
        total += len(chunk)
        if total > limit:
            raise _too_large(limit)
        yield chunk


def _too_large(limit: int) -> TooLarge:
    return TooLarge("the request is too large", why=f"the limit is {limit} bytes", fix="send less")


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ConfigError("the request broke off", why="the caller hung up", fix="send it again")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, then whatever else comes (the end of the connection)."""
    is_given = False

    async def given() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return given
