"""How much a caller may send: header and body size, and JSON of a bounded shape that means one thing only."""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.client.problems import HeadersTooLarge, TooLarge
from penstock.core.errors import ConfigError, PenstockError
from penstock.server.answers import problem_response
from penstock.server.pools import LONG

BEAT_END = "/beat"
BODY_BYTES_MAX = 1024 * 1024
HEADER_BYTES_MAX = 16 * 1024
HEADERS_MAX = 100
# Looking at more than this takes long enough for others to notice: it is done beside the event loop.
LOOK_BYTES_MAX = 16 * 1024

JSON_DEPTH_MAX = 32
JSON_KEYS_MAX = 10_000
JSON_VALUES_MAX = 100_000
INT_BITS = 64

_MARKS = b'[]{}":,'
_NO_MARKS = bytes(byte for byte in range(256) if byte not in _MARKS)
_STEPS = np.zeros(256, dtype=np.int32)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
# Whatever may be a number or a letter that no store holds; most requests have none and need no closer look.
_SUSPECT = re.compile(rb"\\u(?:[dD][89a-fA-F]|0000)|NaN|Infinity|[0-9]{19}|[eE][+-]?[0-9]{3}")


class LimitBodies:
    """ASGI middleware: reads a JSON body up to its limit, looks at it, and hands it on whole.

    Paths under `streamed` are left alone: their routes read with `limited`, after they know who calls.
    A body that breaks off is no body: nothing is done with it. Heartbeats are checked by their route, as what
    they are.
    """

    def __init__(self, app: ASGIApp, *, streamed: str) -> None:
        self._app, self._streamed = app, streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            check_headers(scope)
            if not scope["path"].startswith(self._streamed):
                look = not scope["path"].endswith(BEAT_END)
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


@dataclass(frozen=True, slots=True)
class BodyShape:
    """How large some JSON is, counted without parsing it."""

    depth: int
    keys: int
    values: int


def check_json(body: bytes) -> None:
    """Refuse what would hurt a parser or a store, or could be read in two ways."""
    shape = shape_of(body)
    if shape.depth > JSON_DEPTH_MAX:
        raise ConfigError(
            "the JSON is nested too deep", why=f"the limit is {JSON_DEPTH_MAX} levels", fix="send it flatter"
        )
    if shape.keys > JSON_KEYS_MAX or shape.values > JSON_VALUES_MAX:
        raise ConfigError(
            "the JSON is too large",
            why=f"the limits are {JSON_KEYS_MAX} keys and {JSON_VALUES_MAX} values",
            fix="send less at a time",
        )
    try:
        # Not as bytes: Python would read UTF-16 and UTF-32 too, which nothing here has looked at.
        text = body.decode()
    except UnicodeDecodeError as error:
        raise ConfigError("the JSON is not in UTF-8", why=str(error), fix="send it in UTF-8") from error
    is_suspect = _SUSPECT.search(body) is not None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_pairs,
            parse_constant=_constant,
            parse_int=_integer if is_suspect else None,
            parse_float=_number if is_suspect else None,
        )
    except ValueError:
        return  # no JSON
    if is_suspect:
        _check_text(value)


def shape_of(body: bytes) -> BodyShape:
    """Depth of lists and maps, number of keys, number of values; outside strings only."""
    # Escaped backslashes first, so that the quotes left are those that begin and end strings.
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    array = np.frombuffer(marks, dtype=np.uint8)
    if not array.size:
        return BodyShape(0, 0, 1)
    is_outside = np.cumsum(array == ord('"'), dtype=np.int32) % 2 == 0
    depths = np.cumsum(_STEPS[array] * is_outside, dtype=np.int32)
    keys = int(np.count_nonzero((array == ord(":")) & is_outside))
    commas = int(np.count_nonzero((array == ord(",")) & is_outside))
    return BodyShape(max(0, int(depths.max())), keys, commas + 1)


def _pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise ConfigError(
            f"the JSON has the key {twice[:100]!r} twice",
            why="one of the two would be lost without a word",
            fix="say it once",
        )
    return found


def _constant(name: str) -> Any:
    raise ConfigError(f"the JSON has {name}", why="it is no number", fix="send a finite number, or null")


def _integer(text: str) -> int:
    if len(text) > 20 or not -(1 << INT_BITS - 1) <= int(text) < 1 << INT_BITS - 1:
        raise _too_big(text)
    return int(text)


def _number(text: str) -> float:
    if math.isinf(float(text)):
        raise _too_big(text)
    return float(text)


def _too_big(text: str) -> ConfigError:
    return ConfigError(
        f"the number {text[:40]}{'…' * (len(text) > 40)} is too large",
        why=f"whole numbers have {INT_BITS} bits, others are at most 1.8e308",
        fix="send a smaller one",
    )


def _check_text(value: Any) -> None:
    """Refuse halves of letters and NUL, which no store takes."""
    if isinstance(value, str):
        if "\0" in value:
            raise ConfigError("the JSON has a NUL character", why="no store holds it", fix="leave it out")
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ConfigError(
                "the JSON has text that is no text",
                why="half of a surrogate pair (\\ud800 to \\udfff) stands alone",
                fix="send UTF-8, or both halves",
            )
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_text(key)
            _check_text(item)
    elif isinstance(value, list):
        for item in value:
            _check_text(item)
