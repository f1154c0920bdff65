"""The front: a process that takes all requests, answers the reads that are asked most, and hands the rest on.

Python runs one thread at a time. In the process of the loops every answer waited for its turn between them;
here reads have a processor of their own, and a flood of them leaves heartbeats and the State Syncer alone.
On a database server a second such process takes changes of layers (`web/clerk.py`).
It holds nothing: it ends with the control plane, and another takes its place when it dies.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp

from penstock.core.journal_store import JournalStore
from penstock.core.sql_store import Database
from penstock.core.system_clock import SystemClock
from penstock.core.token_store import TokenStore
from penstock.core.tuning import tune_process
from penstock.jobs.job_service import JobService
from penstock.jobs.job_store import JobStore
from penstock.streams.package_shelf import PackageShelf
from penstock.tasks.fleet_view import FleetView
from penstock.tasks.shard_store import ShardStore
from penstock.web.clerk import ClerkDesk, ToClerk, clerk_app
from penstock.web.fast_lane import FastLane
from penstock.web.forward import Forward
from penstock.web.guard import Guard, TurnAwayStrangers
from penstock.web.limits import LimitBodies, RateLimit
from penstock.web.origin import CheckOrigin
from penstock.web.overview import JobPages
from penstock.web.server import HOST, PREFIX, STREAMED, Tls, server_config


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """What a front is told when it starts."""

    listener: int  # the inherited socket's number
    bell: int  # the inherited pipe in which a clerk says that it changed something
    port: int  # where the control plane itself answers, on loopback
    clerk_port: int = 0  # where changes of layers are taken; 0: by the control plane
    is_clerk: bool = False  # whether it is the clerk itself
    secret: str  # what it knows the front by
    database: str  # a URL, or ""
    folder: str  # of the control plane
    names: tuple[str, ...] = ()
    any_address: bool = False
    cert: str = ""
    key: str = ""

    @property
    def tls(self) -> Tls | None:
        return Tls(cert=Path(self.cert), key=Path(self.key)) if self.cert else None


class ScalingTold:
    """What the control plane says about its scaler, a line whenever it changes."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[dict[str, Any] | None, str]] = {}

    def tell(self, line: str) -> None:
        """Replace everything."""
        self._told = {job: (load, reason) for job, (load, reason) in json.loads(line).items()}

    def load_of(self, job: str) -> dict[str, Any] | None:
        return self._told.get(job, (None, ""))[0]

    def reason_of(self, job: str) -> str:
        return self._told.get(job, (None, ""))[1]


def serve(settings: FrontSettings) -> None:
    """Answer until standard input ends, or SIGTERM, which lets it answer what is under way."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    scaling = ScalingTold()
    threading.Thread(target=_listen, args=(scaling,), name="control plane", daemon=True).start()
    database = Database(settings.database or Path(settings.folder) / "store.db")
    tokens, clock = TokenStore(database), SystemClock()
    guard = Guard(tokens, clock, RateLimit())
    app = (
        _clerk(settings, database, guard) if settings.is_clerk else _front(settings, database, guard, scaling)
    )
    app = TurnAwayStrangers(app, prefix=PREFIX, tokens=tokens, clock=clock)
    app = CheckOrigin(app, names=settings.names, any_address=settings.any_address)
    tune_process(serving=True)
    uvicorn.Server(server_config(app, settings.tls)).run(sockets=[socket.socket(fileno=settings.listener)])


def _front(settings: FrontSettings, database: Database, guard: Guard, scaling: ScalingTold) -> ASGIApp:
    fleet = FleetView(ShardStore(database, JournalStore(database)))
    pages = JobPages(JobService(JobStore(database)), fleet, SystemClock(), scaling)
    rest: ASGIApp = Forward(HOST, settings.port, settings.secret)
    if settings.clerk_port:
        rest = ToClerk(rest, Forward(HOST, settings.clerk_port, settings.secret), prefix=PREFIX)
    lane = FastLane(rest, prefix=PREFIX, guard=guard, pages=pages, local=not database.is_shared)
    return LimitBodies(lane, streamed=STREAMED)


def _clerk(settings: FrontSettings, database: Database, guard: Guard) -> ASGIApp:
    os.set_blocking(settings.bell, False)
    desk = ClerkDesk(
        clock=SystemClock(),
        jobs=JobService(JobStore(database)),
        packages=PackageShelf(Path(settings.folder) / "packages"),
        bell=settings.bell,
    )
    rest, secret = Forward(HOST, settings.port, settings.secret), settings.secret
    return clerk_app(rest, desk, guard, prefix=PREFIX, streamed=STREAMED, secret=secret)


def _listen(scaling: ScalingTold) -> None:
    try:
        for line in sys.stdin:
            scaling.tell(line)
    finally:  # also when the last line is half a line
        # Without the control plane there is nothing to answer, and the next one needs the port.
        os._exit(0)


if __name__ == "__main__":
    serve(FrontSettings(**json.loads(os.environ["PENSTOCK_FRONT"])))
