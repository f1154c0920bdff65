"""The HTTP API, `/api/v1`. Each route names its verb, calls one service, and returns its reply model; errors
are problem+json.

Most routes are plain functions, which run in thread pools beside the event loop. Every API process has all
routes; the server workers forward those of `add_control_routes` to the control plane process.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

import httpx
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.client.link import CONTROL_HEADER
from penstock.core.errors import OutcomeUnknown, PenstockError, StoreUnavailable
from penstock.server.answers import answer_problems, problem_response
from penstock.server.events import EventHub
from penstock.server.limits import LimitBodies
from penstock.server.pages import add_watermark_routes
from penstock.server.replies import describe_problems
from penstock.server.routes.alarms import add_alarm_reads, add_alarm_writes
from penstock.server.routes.containers import TaskListWatch, add_container_routes
from penstock.server.routes.fleet import FleetReader, add_fleet_orders, add_fleet_reads
from penstock.server.routes.jobs import add_job_routes
from penstock.server.routes.layers import add_layer_kind_routes, add_layer_routes, add_token_routes
from penstock.server.routes.lending import add_lending_routes
from penstock.server.routes.policies import add_decision_routes, add_doctor_routes, add_policy_routes
from penstock.server.routes.status import (
    Dashboard,
    add_event_route,
    add_metric_routes,
    add_state_routes,
    add_status_route,
)
from penstock.server.routes.streams import add_kept_routes, add_pipeline_routes, add_stream_routes
from penstock.server.security import CheckOrigin, Guard, RateLimit, RejectUnknownTokens
from penstock.server.services import Control, Services
from penstock.server.serving import OPEN_ROUTES, PREFIX, STREAMED

ANSWER_S = 120.0
IDLE_S = 5.0  # less than the server's keep-alive, so that no connection is used while the server closes it
# Hop-by-hop headers, which are not forwarded.
HOP = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect", b"upgrade"}
)
REPLY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date"})
READING = frozenset({"GET", "HEAD"})


class ControlProxy:
    """ASGI application that forwards requests to the control plane's own listener.

    A header of the response names that listener: `named` is a port of the same host (`:7338`) or a URL.
    Containers send their next heartbeat there.
    """

    def __init__(self, url: str, *, trust: ssl.SSLContext | None, named: str) -> None:
        self._url, self._named = httpx.URL(url), (CONTROL_HEADER.lower().encode(), named.encode())
        self._http = httpx.AsyncClient(
            verify=trust or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),  # not used without TLS
            timeout=ANSWER_S,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S),
            trust_env=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, query = scope.get("raw_path") or scope["path"].encode(), scope["query_string"]
        request = self._http.build_request(
            scope["method"],
            self._url.copy_with(raw_path=path + b"?" + query if query else path),
            headers=[item for item in scope["headers"] if item[0] not in HOP],
            content=await Request(scope, receive).body(),
        )
        try:
            response = await self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            await problem_response(_proxy_error(scope["method"], error))(scope, receive, send)
            return
        try:
            reply = StreamingResponse(_chunks(response), response.status_code)
            headers = [(name.lower(), value) for name, value in response.headers.raw]
            reply.raw_headers = [self._named, *(item for item in headers if item[0] not in REPLY_HOP)]
            await reply(scope, receive, send)
        finally:
            await response.aclose()


async def _chunks(response: httpx.Response) -> AsyncIterator[bytes]:
    async for chunk in response.aiter_raw():
        yield chunk


def _proxy_error(method: str, error: httpx.HTTPError) -> PenstockError:
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return StoreUnavailable(
            "the control plane does not answer",
            why=f"it may be starting or stopping: {why}",
            fix="try again in a few seconds",
        )
    if method in READING:
        return StoreUnavailable("the control plane did not answer", why=why, fix="try again in a few seconds")
    return OutcomeUnknown(
        "the control plane did not report whether the request was carried out",
        why=why,
        fix="repeat the request with the same idempotency key: it is carried out at most once",
    )


def proxied_routes(pass_on: ASGIApp) -> type[APIRoute]:
    """A class of routes that are described in this process and served by `pass_on`."""

    class ProxiedRoute(APIRoute):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.app = pass_on

    return ProxiedRoute


class _Api(FastAPI):
    """FastAPI's application; its OpenAPI description has the schema of problems once, not in each route."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            describe_problems(super().openapi())
        assert self.openapi_schema is not None
        return self.openapi_schema


def build_api(
    services: Services,
    *,
    pass_on: ASGIApp | None = None,
    rate: RateLimit | None = None,
    hub: EventHub | None = None,
    names: Iterable[str] = (),
    any_address: bool = False,
) -> FastAPI:
    """The API of one process; `names` are host names that requests may use besides loopback.

    `pass_on` serves the routes that need the memory of the control plane process. Requires without it:
    `services` is a `Control`.
    """
    app = _Api(
        title="Penstock",
        version="1",
        openapi_url=None,  # a route of our own checks the caller's role
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    guard = Guard(services.tokens, services.clock, rate or RateLimit())
    hub = hub or EventHub(services.journal)
    app.state.events, app.state.long_polls = hub, [hub]
    router = app.router
    router.prefix = PREFIX
    add_job_routes(router, services, guard, PREFIX)
    add_layer_routes(router, services, guard)
    add_state_routes(app, router, services, guard)
    add_event_route(router, hub, guard)
    add_pipeline_routes(router, services, guard)
    add_stream_routes(router, services, guard, PREFIX)
    add_watermark_routes(router, services, guard)
    add_metric_routes(router, services, guard)
    add_kept_routes(router, services, guard)
    add_decision_routes(router, services, guard)
    add_layer_kind_routes(router, services, guard)
    add_token_routes(router, services, guard)
    control = APIRouter(prefix=PREFIX, route_class=APIRoute if pass_on is None else proxied_routes(pass_on))
    app.state.long_polls.append(add_control_routes(control, cast(Control, services), guard))
    router.routes += control.routes
    for route in router.routes:
        # Deny by default: a route without a verb stops the program at its start.
        assert isinstance(route, APIRoute)
        assert guard.verb_of(route) or route.path in OPEN_ROUTES, f"{route.path} names no verb"
    app.add_middleware(LimitBodies, streamed=STREAMED)
    app.add_middleware(RejectUnknownTokens, prefix=PREFIX, tokens=services.tokens, clock=services.clock)
    app.add_middleware(Dashboard)
    app.add_middleware(CheckOrigin, names=tuple(names), any_address=any_address)
    answer_problems(app)
    return app


def add_control_routes(router: APIRouter, control: Control, guard: Guard) -> TaskListWatch:
    """Add the routes that need the Shard Manager, the task list, the scaler, policies or alarms.

    `control` is used only when a route is called; a server worker forwards them instead.
    """
    lists = TaskListWatch(lambda: control.task_service.version())
    add_container_routes(router, control, guard, lists)
    fleet = FleetReader(control)
    add_fleet_reads(router, fleet, guard)
    add_fleet_orders(router, control, fleet, guard)
    add_lending_routes(router, control, guard)
    add_status_route(router, control, guard)
    add_alarm_reads(router, control, guard)
    add_alarm_writes(router, control, guard)
    add_policy_routes(router, control, guard)
    add_doctor_routes(router, control, guard)
    return lists
