"""Handing requests on to another server on this machine, and its answers back, as they come."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send

from penstock.core.errors import OutcomeUnknown, PenstockError, StoreUnavailable
from penstock.web.answers import problem_response
from penstock.web.limits import FRONT_HEADER

# Shorter than the other side keeps one: a connection that it is about to close is not used.
IDLE_S = 5.0
IDLE_MAX = 64
ANSWER_S = 120.0
CHUNK = 64 * 1024
READING = frozenset({"GET", "HEAD"})
# Of one connection, not of the request; and what only the front may say.
_HOP = b"connection keep-alive transfer-encoding content-length expect upgrade"
DROPPED = frozenset({*_HOP.split(), FRONT_HEADER})
ANSWER_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date"})


class Forward:
    """An ASGI application that answers with what the server at `host` and `port` says.

    `secret` tells that server that the request was looked at here.
    """

    def __init__(self, host: str, port: int, secret: str = "") -> None:
        self._place, self._mark = (host, port), b"%s: %s" % (FRONT_HEADER, secret.encode())
        self._idle: deque[_Wire] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await receive()
        if first["type"] != "http.request":
            return
        try:
            wire = await self._ask(scope, first, receive)
        except PenstockError as error:
            await problem_response(error)(scope, receive, send)
            return
        is_whole = False
        try:
            is_whole = await _relay(wire, receive, send, has_body=scope["method"] != "HEAD")
        finally:
            await self._give_back(wire, is_whole=is_whole)

    async def close(self) -> None:
        """Close the connections that nobody uses now."""
        while self._idle:
            await self._idle.pop().close()

    async def _ask(self, scope: Scope, first: Message, receive: Receive) -> _Wire:
        """Send the request and wait for the beginning of the answer."""
        head, is_whole = _head(scope, first, self._mark), not first.get("more_body", False)
        for is_kept in (True, False):
            wire = self._kept() if is_kept else None
            if is_kept and wire is None:
                continue
            wire = wire or await self._connect()
            is_answered = False
            try:
                if is_whole:
                    wire.writer.write(head + first.get("body", b""))
                    await asyncio.wait_for(wire.fill(until_head=True), ANSWER_S)
                else:
                    is_kept = False  # what was read of the body is gone: it cannot be sent again
                    wire.writer.write(head)
                    await _send_pieces(wire, scope, first, receive)
                is_answered = True
                return wire
            except (OSError, asyncio.IncompleteReadError, httptools.HttpParserError, TimeoutError) as error:
                # A reader may ask again; whoever writes has to know that it may have been done.
                if not (is_kept and scope["method"] in READING):
                    raise _no_answer(scope["method"], error) from error
            finally:
                if not is_answered:
                    await wire.close()
        raise AssertionError("the last of the two either answers or raises")

    async def _connect(self) -> _Wire:
        try:
            reader, writer = await asyncio.open_connection(*self._place, limit=CHUNK)
        except OSError as error:
            raise StoreUnavailable(
                "the control plane does not answer",
                why=f"it may be starting or ending: {error.strerror or error}",
                fix="try again in a moment",
            ) from error
        return _Wire(reader, writer)

    def _kept(self) -> _Wire | None:
        while self._idle:
            wire = self._idle.pop()
            if time.monotonic() - wire.idle_since < IDLE_S and not wire.reader.at_eof():
                return wire
            wire.writer.close()
        return None

    async def _give_back(self, wire: _Wire, *, is_whole: bool) -> None:
        if is_whole and wire.may_stay and len(self._idle) < IDLE_MAX:
            wire.rest(time.monotonic())
            self._idle.append(wire)
        else:
            await wire.close()


@dataclass
class _Wire:
    """One connection, and what came of the answer under way."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float = 0.0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    has_head: bool = False
    is_over: bool = False
    may_stay: bool = False
    _parser: Any = None

    def __post_init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        self.is_over = True
        self.may_stay = self._parser.should_keep_alive()

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    @property
    def has_length(self) -> bool:
        return any(name == b"content-length" for name, _ in self.headers)

    async def fill(self, *, until_head: bool = False) -> None:
        """Read what there is: at least something, or with `until_head` the whole head."""
        while True:
            data = await self.reader.read(CHUNK)
            if not data:
                raise asyncio.IncompleteReadError(b"", None)
            self._parser.feed_data(data)
            if self.has_head or not until_head:
                return

    async def close(self) -> None:
        """Hang up, and wait until that is done."""
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    def rest(self, now: float) -> None:
        """Ready for the next request."""
        self.idle_since, self.headers, self.pieces = now, [], []
        self.has_head = self.is_over = self.may_stay = False
        self._parser = httptools.HttpResponseParser(self)


async def _relay(wire: _Wire, receive: Receive, send: Send, *, has_body: bool) -> bool:
    """Pass the answer on; False: it broke off, or the caller did."""
    headers = [(name, value) for name, value in wire.headers if name not in ANSWER_HOP]
    await send({"type": "http.response.start", "status": wire.status, "headers": headers})
    # An answer of known length ends soon; one without may go on for hours after the caller has left.
    gone = None if wire.has_length else asyncio.ensure_future(_until_gone(receive))
    try:
        while has_body and not wire.is_over:
            await _pass_pieces(wire, send)
            if not await _filled(wire, gone):
                return False
        await send({"type": "http.response.body", "body": b"".join(wire.pieces), "more_body": False})
        return wire.is_over
    finally:
        if gone is not None:
            gone.cancel()


async def _pass_pieces(wire: _Wire, send: Send) -> None:
    if wire.pieces:
        body, wire.pieces = b"".join(wire.pieces), []
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _filled(wire: _Wire, gone: asyncio.Future[None] | None) -> bool:
    filling = asyncio.ensure_future(wire.fill())
    try:
        await asyncio.wait({filling, gone} if gone is not None else {filling}, return_when="FIRST_COMPLETED")
        if not filling.done():
            return False
        filling.result()
    except (OSError, asyncio.IncompleteReadError, httptools.HttpParserError):
        return False  # cut off in the middle: the caller sees that, since the end is missing
    finally:
        filling.cancel()
    return True


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_pieces(wire: _Wire, scope: Scope, first: Message, receive: Receive) -> None:
    """A body that comes in pieces, until it ends or the answer begins: it may be a refusal."""
    filling = asyncio.ensure_future(asyncio.wait_for(wire.fill(until_head=True), ANSWER_S))
    sending = asyncio.ensure_future(_send_body(wire, scope, first, receive))
    # How sending ended is of no interest once there is an answer.
    sending.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait({filling, sending}, return_when="FIRST_COMPLETED")
        if not filling.done() and isinstance(sending.exception(), _CallerLeft):
            raise ConnectionResetError("the caller hung up")
        await filling
    finally:
        filling.cancel()
        sending.cancel()


class _CallerLeft(Exception):
    pass


async def _send_body(wire: _Wire, scope: Scope, first: Message, receive: Receive) -> None:
    is_chunked = not any(name == b"content-length" for name, _ in scope["headers"])
    message = first
    while True:
        if message["type"] != "http.request":
            raise _CallerLeft
        piece = message.get("body", b"")
        if piece:
            wire.writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
            await wire.writer.drain()
        if not message.get("more_body", False):
            break
        message = await receive()
    if is_chunked:
        wire.writer.write(b"0\r\n\r\n")


def _head(scope: Scope, first: Message, mark: bytes) -> bytes:
    path, query = scope.get("raw_path") or scope["path"].encode(), scope["query_string"]
    lines = [b"%s %s%s HTTP/1.1" % (scope["method"].encode(), path, b"?" + query if query else b"")]
    lines += [b"%s: %s" % (name, value) for name, value in scope["headers"] if name not in DROPPED]
    lines.append(mark)
    if not first.get("more_body", False):
        lines.append(b"content-length: %d" % len(first.get("body", b"")))
    else:
        lines.append(_announced(scope["headers"]))
    return b"\r\n".join([*lines, b"", b""])


def _announced(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    lengths = [value for name, value in headers if name == b"content-length"]
    return b"content-length: " + lengths[0] if lengths else b"transfer-encoding: chunked"


def _no_answer(method: str, error: Exception) -> PenstockError:
    why = f"it hung up, or took longer than {ANSWER_S:.0f} s: {type(error).__name__}"
    if method in READING:
        return StoreUnavailable("the control plane did not answer", why=why, fix="try again in a moment")
    return OutcomeUnknown(
        "the control plane did not say whether it has done this",
        why=why,
        fix="repeat the request with the same idempotency key: what was done is not done twice",
    )
