"""The clerk: a process that writes changes of layers where a server has the database.

All writes of an installation go one after another. Whoever holds the lock of the database should not wait for
other threads of its process meanwhile, of which the control plane and the front have many: here are two. On a
SQLite file, where a second process would only wait for the first, the control plane writes itself.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from starlette.middleware.errors import ServerErrorMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.core.system_clock import SystemClock
from penstock.jobs.job_service import JobService
from penstock.streams.package_shelf import PackageShelf
from penstock.web.answers import on_bug
from penstock.web.guard import Guard
from penstock.web.limits import LimitBodies
from penstock.web.patch_lane import PatchLane, layer_path


@dataclass(frozen=True, slots=True, kw_only=True)
class ClerkDesk:
    """Takes changes of layers, and rings for the State Syncer."""

    clock: SystemClock
    jobs: JobService
    packages: PackageShelf
    bell: int  # a pipe to the control plane

    def wake_syncer(self) -> None:
        """Say that something else is expected of a job."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it was rung for often enough, or ends
            os.write(self.bell, b"\n")


def clerk_app(
    rest: ASGIApp, desk: ClerkDesk, guard: Guard, *, prefix: str, streamed: str, secret: str
) -> ASGIApp:
    """What a clerk answers; whatever is unusual about a request goes to `rest`, the control plane."""
    lane = PatchLane(rest, prefix=prefix, guard=guard, desk=desk)
    return LimitBodies(ServerErrorMiddleware(lane, handler=on_bug), streamed=streamed, front_secret=secret)


class ToClerk:
    """ASGI middleware of the front: changes of layers go to the clerk, all else to `app`."""

    def __init__(self, app: ASGIApp, clerk: ASGIApp, *, prefix: str) -> None:
        self._app, self._clerk = app, clerk
        self._path = layer_path(prefix)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_change = scope["type"] == "http" and scope["method"] == "PATCH"
        app = self._clerk if is_change and self._path.fullmatch(scope["path"]) else self._app
        await app(scope, receive, send)
