"""The HTTP API, `/api/v1`: thin. Each route names its verb, calls one service, answers JSON or problem+json.

Routes are plain functions, which FastAPI runs beside its event loop; only uploads and event streams are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from penstock.app import ControlPlane
from penstock.web.admin_routes import add_layer_kind_routes, add_token_routes
from penstock.web.alarm_routes import add_alarm_reads, add_alarm_writes
from penstock.web.answers import answer_problems
from penstock.web.beat_lane import BeatLane
from penstock.web.container_routes import add_container_routes
from penstock.web.dashboard import Dashboard
from penstock.web.doctor import add_doctor_routes
from penstock.web.events import EventHub
from penstock.web.fast_lane import FastLane
from penstock.web.fleet import Fleet
from penstock.web.fleet_routes import add_fleet_orders, add_fleet_reads
from penstock.web.guard import Guard, TurnAwayStrangers
from penstock.web.job_routes import add_job_ends, add_job_reads, add_job_writes
from penstock.web.kept_routes import add_kept_routes
from penstock.web.layer_routes import add_layer_reads, add_layer_returns, add_layer_writes
from penstock.web.lending_routes import add_lending_routes
from penstock.web.limits import LimitBodies, RateLimit
from penstock.web.list_watch import ListWatch
from penstock.web.metric_routes import add_metric_routes
from penstock.web.origin import CheckOrigin
from penstock.web.overview import Overview
from penstock.web.patch_lane import PatchLane
from penstock.web.policy_routes import add_policy_routes
from penstock.web.replies import describe_problems
from penstock.web.server import OPEN_ROUTES, PREFIX, STREAMED
from penstock.web.state_routes import add_event_route, add_state_routes
from penstock.web.stream_routes import add_pipeline_routes, add_stream_routes
from penstock.web.watermarks import add_watermark_routes


class _Api(FastAPI):
    """FastAPI's application, whose routes name the one form of all refusals instead of carrying it."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            describe_problems(super().openapi())
        assert self.openapi_schema is not None
        return self.openapi_schema


def build_api(
    plane: ControlPlane,
    *,
    rate: RateLimit | None = None,
    hub: EventHub | None = None,
    names: Iterable[str] = (),
    any_address: bool = False,
    front_secret: str = "",
) -> FastAPI:
    """The application over one control plane; `names` are what callers may call its host besides loopback."""
    app = _Api(
        title="Penstock",
        version="1",
        openapi_url=None,  # our own route, behind a verb
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    guard = Guard(plane.tokens, plane.clock, rate or RateLimit())
    app.state.events = hub or EventHub(plane.journal)
    router = app.router
    router.prefix = PREFIX
    overview = Overview(plane)
    add_state_routes(app, router, plane, guard, overview)
    add_event_route(router, app.state.events, guard)
    add_job_reads(router, plane, guard, overview)
    add_job_writes(router, plane, guard, PREFIX)
    add_job_ends(router, plane, guard)
    add_layer_reads(router, plane, guard)
    add_layer_writes(router, plane, guard)
    add_layer_returns(router, plane, guard)
    add_pipeline_routes(router, plane, guard)
    add_stream_routes(router, plane, guard, PREFIX)
    add_watermark_routes(router, plane, guard)
    add_doctor_routes(router, plane, guard)
    add_metric_routes(router, plane, guard)
    add_policy_routes(router, plane, guard)
    add_kept_routes(router, plane, guard)
    app.state.lists = ListWatch(plane.task_service.version)
    add_container_routes(router, plane, guard, app.state.lists)
    fleet = Fleet(plane)
    add_fleet_reads(router, fleet, guard)
    add_fleet_orders(router, plane, fleet, guard)
    add_lending_routes(router, plane, guard)
    add_alarm_reads(router, plane, guard)
    add_alarm_writes(router, plane, guard)
    add_layer_kind_routes(router, plane, guard)
    add_token_routes(router, plane, guard)
    for route in router.routes:
        # Deny by default: forgetting the verb is found when the program starts, not by a stranger.
        assert isinstance(route, APIRoute)
        assert guard.verb_of(route) or route.path in OPEN_ROUTES, f"{route.path} names no verb"
    is_local = not plane.database.is_shared
    app.add_middleware(FastLane, prefix=PREFIX, guard=guard, pages=overview, local=is_local)
    app.add_middleware(BeatLane, prefix=PREFIX, guard=guard, plane=plane)
    app.add_middleware(PatchLane, prefix=PREFIX, guard=guard, desk=plane)
    app.add_middleware(LimitBodies, streamed=STREAMED, front_secret=front_secret)
    app.add_middleware(TurnAwayStrangers, prefix=PREFIX, tokens=plane.tokens, clock=plane.clock)
    app.add_middleware(Dashboard)
    app.add_middleware(CheckOrigin, names=tuple(names), any_address=any_address)
    answer_problems(app)
    return app
