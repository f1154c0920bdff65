"""A control plane behind a real socket on loopback, for what needs connections: streams, TLS, broken requests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.app import ControlPlane
from penstock.client import Client
from penstock.db.tokens import ROLES
from penstock.server.api import build_api
from penstock.server.events import EventHub
from penstock.server.security import RateLimit
from penstock.server.serving import ApiServer, Listening, bind
from penstock.settings import Settings
from tests.builders import CODE, PACKAGE, a_body
from tests.ready import ready_folder
from tests.waiting import LIMIT_S


class ContainerTokens:
    """What has a control plane and a token of every role; that of the role container speaks for c1."""

    plane: ControlPlane
    tokens: dict[str, str]

    def token_of(self, container: str) -> str:
        """The token that speaks for one container."""
        kept = "container" if container == "c1" else f"container {container}"
        if kept not in self.tokens:
            now_ms = self.plane.clock.now_ms()
            self.tokens[kept] = self.plane.tokens.issue(
                container, "container", now_ms=now_ms, container=container
            )
        return self.tokens[kept]


@dataclass
class Served(ContainerTokens):
    """The control plane, its server, and a token of every role."""

    plane: ControlPlane
    server: ApiServer
    tokens: dict[str, str]
    hub: EventHub
    clients: list[Client] = field(default_factory=list)

    def client(self, role: str = "admin", *, token: str = "", container: str = "", **kwargs: Any) -> Client:
        """A client as the holder of a role's token, or of a container's, closed at the end."""
        token = self.token_of(container) if container else token or self.tokens[role]
        given = {"timeout_s": LIMIT_S, **kwargs}
        self.clients.append(Client(self.server.url, token, **given))
        return self.clients[-1]

    def apply(self, name: str = "demo.count", **changes: Any) -> int:
        with self.client() as client:
            return int(
                client.apply_job(name, a_body(name, **changes), why="a test", key=f"k-{name}")["version"]
            )

    def patch(self, priority: int, name: str = "demo.count") -> int:
        with self.client("oncall") as client:
            return client.patch_layer(
                name, "oncall", {"priority": priority}, why=f"p{priority}", key=f"p{priority}"
            )

    def connect(self) -> socket.socket:
        """A bare connection."""
        host, port = self.server.url.removeprefix("http://").rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout=LIMIT_S)


@contextmanager
def served(
    folder: Path,
    *,
    database: str = "",
    listening: Listening | None = None,
    heartbeat_s: float = 15.0,
    watchers_max: int = 10,
    names: tuple[str, ...] = (),
    rows: str = "",
) -> Iterator[Served]:
    """Serve a new control plane, without loops and containers."""
    listening = listening or Listening()
    with bind(listening) as listener:
        if not database:
            ready_folder(folder)
        plane = ControlPlane(Settings(folder=folder, database=database, rows=rows))
        plane.packages.put(PACKAGE, CODE)
        now_ms = plane.clock.now_ms()
        roles = ROLES - {"container"}
        tokens = {role: plane.tokens.issue(f"a-{role}", role, now_ms=now_ms) for role in roles}
        tokens["container"] = plane.tokens.issue("c1", "container", now_ms=now_ms, container="c1")
        hub = EventHub(plane.journal, heartbeat_s=heartbeat_s, watchers_max=watchers_max)
        api = build_api(plane, rate=RateLimit(100_000), hub=hub, names=names)
        server = ApiServer(api, listener, listening).start()
        try:
            world = Served(plane=plane, server=server, tokens=tokens, hub=hub)
            yield world
        finally:
            server.stop()
            plane.stop()
            for client in world.clients:
                client.close()
