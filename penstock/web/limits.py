"""How much a caller may send, and how often: header and body size, the shape of JSON, requests per second."""

from __future__ import annotations

import ipaddress
import threading
from collections import OrderedDict
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
UNKNOWN_MAX = 10  # tokens that nobody knows, per address and window
LOOKED_UP_MAX = 64  # new tokens of one address at the same time
ADDRESSES_MAX = 10_000


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


class StrangerLimit:
    """How many tokens that nobody knows may come from one address, counted before they are looked up.

    Good ones do not count, so that many callers behind one address may all be new. Bounded in memory: the
    addresses that were heard last count. An IPv6 network, of which one caller may have every address, is one.
    """

    def __init__(
        self,
        *,
        unknown_max: int = UNKNOWN_MAX,
        at_once_max: int = LOOKED_UP_MAX,
        addresses_max: int = ADDRESSES_MAX,
    ) -> None:
        self._unknown_max, self._at_once_max = unknown_max, at_once_max
        self._addresses_max, self._lock = addresses_max, threading.Lock()
        self._windows: OrderedDict[str, tuple[int, int]] = OrderedDict()  # window, unknown tokens in it
        self._under_way: dict[str, int] = {}
        self.turned_away = 0

    def begin(self, address: str, now_ms: Millis) -> None:
        """A look-up is about to begin; TooMany if it must not."""
        network = _network(address)
        with self._lock:
            window, unknown = self._windows.get(network, (0, 0))
            under_way = self._under_way.get(network, 0)
            is_full = network not in self._under_way and len(self._under_way) >= self._addresses_max
            if window == now_ms // WINDOW_MS and unknown >= self._unknown_max:
                why = f"of one address {self._unknown_max} are looked up per second"
            elif under_way >= self._at_once_max or is_full:
                why = f"{under_way} new ones of this address are being looked up"
            else:
                self._under_way[network] = under_way + 1
                return
            self.turned_away += 1
        raise TooMany(
            "too many unknown tokens",
            why=why,
            fix="wait a second, and use a good token: one that was good here before is not held up by this",
        )

    def end(self, address: str, now_ms: Millis, *, is_unknown: bool) -> None:
        """It is over."""
        network, now = _network(address), now_ms // WINDOW_MS
        with self._lock:
            self._under_way[network] -= 1
            if not self._under_way[network]:
                del self._under_way[network]
            if is_unknown:
                window, unknown = self._windows.pop(network, (now, 0))
                self._windows[network] = (now, unknown + 1 if window == now else 1)
                if len(self._windows) > self._addresses_max:
                    self._windows.popitem(last=False)


def _network(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))


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
