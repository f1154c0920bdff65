"""How much a caller may send, and how often: body size, JSON depth, requests per second."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, PenstockError
from penstock.web.answers import problem_response
from penstock.web.problems import TooLarge, TooMany

BODY_BYTES_MAX = 1024 * 1024
JSON_DEPTH_MAX = 32
REQUESTS_MAX = 200  # per token and window
WINDOW_MS: Millis = 1_000

_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_STEPS = np.zeros(256, dtype=np.int32)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


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
    """

    def __init__(self, app: ASGIApp, *, streamed: str) -> None:
        self._app, self._streamed = app, streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(self._streamed):
            await self._app(scope, receive, send)
            return
        try:
            body = b"".join([chunk async for chunk in limited(_chunks(receive), BODY_BYTES_MAX, scope)])
            check_json(body)
        except PenstockError as error:
            await problem_response(error)(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)


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
            return  # the caller hung up
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, then whatever else comes (the end of the connection)."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def check_json(body: bytes) -> None:
    """Refuse what would hurt a parser or a store; whether it is JSON at all is the parser's to say."""
    if is_deeper_than(body, JSON_DEPTH_MAX):
        raise ConfigError(
            "the JSON is nested too deep", why=f"the limit is {JSON_DEPTH_MAX} levels", fix="send it flatter"
        )
    if _has_lone_surrogate(body):
        raise ConfigError(
            "the JSON has text that is no text",
            why="half of a surrogate pair (\\ud800 to \\udfff) stands alone",
            fix="send UTF-8, or both halves",
        )


def is_deeper_than(body: bytes, limit: int) -> bool:
    """Whether lists and maps nest deeper than `limit`; an array at a time, since a byte at a time is slow."""
    # Escaped backslashes first, so that the quotes left are those that begin and end strings.
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    array = np.frombuffer(marks, dtype=np.uint8)
    is_outside = np.cumsum(array == ord('"'), dtype=np.int32) % 2 == 0
    depths = np.cumsum(_STEPS[array] * is_outside, dtype=np.int32)
    return bool(depths.size and depths.max() > limit)


def _has_lone_surrogate(body: bytes) -> bool:
    if _SURROGATE.search(body) is None:
        return False
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except ValueError:
        return False
    return False
