"""Limits of a request: size of headers and body; depth and size of JSON, which must also be unambiguous."""

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
# A larger body is checked in a thread, not on the event loop.
INLINE_CHECK_BYTES_MAX = 16 * 1024

JSON_DEPTH_MAX = 32
JSON_KEYS_MAX = 10_000
JSON_VALUES_MAX = 100_000
INT_BITS = 64

_MARKS = b'[]{}":,'
_NO_MARKS = bytes(byte for byte in range(256) if byte not in _MARKS)
_STEPS = np.zeros(256, dtype=np.int32)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
# Possibly a number or a character that no store holds; a body without a match needs no further check.
_SUSPECT = re.compile(rb"\\u(?:[dD][89a-fA-F]|0000)|NaN|Infinity|[0-9]{19}|[eE][+-]?[0-9]{3}")


class LimitBodies:
    """ASGI middleware: reads a JSON body up to its limit, checks it, and passes it on as one message.

    Routes under `streamed` read their bodies with `limited`, after the check of the caller. Incomplete bodies
    are refused. Heartbeats are checked by their route.
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
                check = not scope["path"].endswith(BEAT_END)
                receive = replay(await _read_body(scope, receive, check=check), receive)
        except PenstockError as error:
            await problem_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _read_body(scope: Scope, receive: Receive, *, check: bool) -> bytes:
    body = b"".join([chunk async for chunk in limited(_chunks(receive), BODY_BYTES_MAX, scope)])
    if check:
        await check_body(body)
    return body


async def check_body(body: bytes) -> None:
    """Refuse harmful JSON; a large body is checked in a thread."""
    if len(body) > INLINE_CHECK_BYTES_MAX:
        await LONG.run(check_json, body)
    elif body:
        check_json(body)


def check_headers(scope: Scope) -> None:
    """Refuse too many or too large headers."""
    headers = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers)
    size += len(scope["path"]) + len(scope.get("query_string", b""))
    if len(headers) > HEADERS_MAX or size > HEADER_BYTES_MAX:
        raise HeadersTooLarge(
            "the request's headers are too large",
            why=f"the limits are {HEADERS_MAX} headers and {HEADER_BYTES_MAX} bytes, with path and query",
            fix="send fewer or shorter headers",
        )


async def limited(
    chunks: AsyncIterator[bytes], limit: int, scope: Scope | None = None
) -> AsyncIterator[bytes]:
    """The chunks; TooLarge past the limit, at once if the content length is too large."""
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
    return TooLarge("the request is too large", why=f"the limit is {limit} bytes", fix="send a smaller body")


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ConfigError(
                "the request is incomplete", why="the caller closed the connection", fix="send it again"
            )
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body once, then the following messages (the disconnect)."""
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
    """Depth and size of a JSON text, counted without parsing it."""

    depth: int
    keys: int
    values: int


def check_json(body: bytes) -> None:
    """Refuse JSON that could overload a parser, that no store holds, or that is ambiguous."""
    shape = measure_json(body)
    if shape.depth > JSON_DEPTH_MAX:
        raise ConfigError(
            "the JSON is nested too deep", why=f"the limit is {JSON_DEPTH_MAX} levels", fix="use fewer levels"
        )
    if shape.keys > JSON_KEYS_MAX or shape.values > JSON_VALUES_MAX:
        raise ConfigError(
            "the JSON is too large",
            why=f"the limits are {JSON_KEYS_MAX} keys and {JSON_VALUES_MAX} values",
            fix="split it into several requests",
        )
    try:
        # Decoded here: `json.loads` also accepts UTF-16 and UTF-32 bytes, which were not checked.
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
        return  # not JSON: the route refuses it
    if is_suspect:
        _check_text(value)


def measure_json(body: bytes) -> BodyShape:
    """Depth of lists and maps, number of keys, number of values; outside strings only."""
    # Escaped backslashes first, so that the remaining quotes begin and end strings.
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
            why="one of the two values would be lost silently",
            fix="send the key once",
        )
    return found


def _constant(name: str) -> Any:
    raise ConfigError(
        f"the JSON has {name}", why="it is not a JSON number", fix="send a finite number, or null"
    )


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
        why=f"integers have at most {INT_BITS} bits, other numbers are at most 1.8e308",
        fix="send a smaller number",
    )


def _check_text(value: Any) -> None:
    """Refuse single surrogates and NUL, which no store holds."""
    if isinstance(value, str):
        if "\0" in value:
            raise ConfigError("the JSON has a NUL character", why="no store can hold it", fix="remove it")
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ConfigError(
                "the JSON has text that is not valid Unicode",
                why="it has one half of a surrogate pair (\\ud800 to \\udfff)",
                fix="send UTF-8, or both halves",
            )
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_text(key)
            _check_text(item)
    elif isinstance(value, list):
        for item in value:
            _check_text(item)
