"""Passing a request on to the process that holds the leases, for the few routes that need its memory."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.client.link import CONTROL_HEADER
from penstock.core.errors import OutcomeUnknown, PenstockError, StoreUnavailable
from penstock.server.answers import problem_response

ANSWER_S = 120.0
IDLE_S = 5.0  # less than the other side keeps a connection: one that it is about to close is not used
# Of one connection, not of the request.
HOP = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect", b"upgrade"}
)
REPLY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date"})
READING = frozenset({"GET", "HEAD"})


class PassOn:
    """ASGI application: answers with what the control plane's own listener answers.

    The answer also names that listener, as `named` says: a port of the same host (`:7338`) or a URL.
    Containers send their next heartbeat there.
    """

    def __init__(self, url: str, *, trust: ssl.SSLContext | None, named: str) -> None:
        self._url, self._named = httpx.URL(url), (CONTROL_HEADER.lower().encode(), named.encode())
        self._http = httpx.AsyncClient(
            verify=trust or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),  # without TLS nobody is asked for one
            timeout=ANSWER_S,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S),
            trust_env=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, query = scope.get("raw_path") or scope["path"].encode(), scope["query_string"]
        asked = self._http.build_request(
            scope["method"],
            self._url.copy_with(raw_path=path + b"?" + query if query else path),
            headers=[item for item in scope["headers"] if item[0] not in HOP],
            content=await Request(scope, receive).body(),
        )
        try:
            found = await self._http.send(asked, stream=True)
        except httpx.HTTPError as error:
            await problem_response(_no_answer(scope["method"], error))(scope, receive, send)
            return
        try:
            reply = StreamingResponse(_pieces(found), found.status_code)
            kept = [(name.lower(), value) for name, value in found.headers.raw]
            reply.raw_headers = [self._named, *(item for item in kept if item[0] not in REPLY_HOP)]
            await reply(scope, receive, send)
        finally:
            await found.aclose()


async def _pieces(found: httpx.Response) -> AsyncIterator[bytes]:
    async for piece in found.aiter_raw():
        yield piece


def _no_answer(method: str, error: httpx.HTTPError) -> PenstockError:
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return StoreUnavailable(
            "the control plane does not answer",
            why=f"it may be starting or ending: {why}",
            fix="try again in a moment",
        )
    if method in READING:
        return StoreUnavailable("the control plane did not answer", why=why, fix="try again in a moment")
    return OutcomeUnknown(
        "the control plane did not say whether it has done this",
        why=why,
        fix="repeat the request with the same idempotency key: what was done is not done twice",
    )


def passing_on(pass_on: ASGIApp) -> type[APIRoute]:
    """A class of routes that are described here and served by `pass_on`."""

    class PassedOn(APIRoute):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.app = pass_on

    return PassedOn
