"""A real control plane in a temporary folder, without loops and containers, and a client of its API."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa
from fastapi import FastAPI

from penstock.app import ControlPlane
from penstock.client import Client
from penstock.db.database import METADATA, Database
from penstock.db.tokens import ROLES
from penstock.server.api import PREFIX, build_api
from penstock.server.security import RateLimit
from penstock.settings import Settings
from tests.builders import CODE, PACKAGE, a_body, a_pipeline
from tests.ready import ready_folder
from tests.server.served import ContainerTokens

JOB = "demo.count"


@dataclass
class World(ContainerTokens):
    """The control plane, its API, and a token of every role."""

    plane: ControlPlane
    http: httpx.Client
    api: FastAPI
    tokens: dict[str, str]
    folder: Path

    def ask(
        self, method: str, path: str, *, role: str | None = "admin", raw: bool = False, **kwargs: Any
    ) -> httpx.Response:
        """One request as the holder of a role's token; `raw`: the path as it is, else under the prefix.

        As a container: the one that the path names.
        """
        headers = {**kwargs.pop("headers", {})}
        named = re.match(r"/containers/([A-Za-z0-9_][A-Za-z0-9_.-]*)/", path) if role == "container" else None
        if role is not None:
            token = self.tokens[role] if named is None else self.token_of(named[1])
            headers["Authorization"] = f"Bearer {token}"
        return self.http.request(method, path if raw else PREFIX + path, headers=headers, **kwargs)

    def submit(self, *bodies: dict[str, Any], role: str = "developer", **headers: str) -> httpx.Response:
        """Submit the pipeline `demo` of these jobs, whose package is there."""
        package = self.package(b"the code")
        compiled = a_pipeline(*(bodies or (a_body(JOB),)))
        compiled["package"] = {**compiled["package"], "hash": package}
        for body in compiled["jobs"]:
            body["package"] = compiled["package"]
        return self.ask(
            "POST", "/pipelines", role=role, json={"compiled": compiled, "why": "new"}, headers=headers
        )

    def package(self, data: bytes) -> str:
        """A package that was put; returns its hash."""
        hash_ = hashlib.sha256(data).hexdigest()
        self.plane.packages.put(hash_, data)
        return hash_

    def version(self, job: str = JOB) -> int:
        return self.plane.jobs.view(job).expected_version

    def everything(self) -> dict[str, Any]:
        """All that a refused request must leave as it was."""
        return {
            "tables": tables_of(self.plane.database),
            "categories": self.plane.log.categories(),
            "files": self.files(),
        }

    def files(self) -> list[str]:
        """Every file, but for those SQLite makes while it works."""
        found = (path.relative_to(self.folder).as_posix() for path in self.folder.parent.rglob("*"))
        return sorted(name for name in found if not name.endswith(("-wal", "-shm")))


def tables_of(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table but the leases, which their holders renew."""
    with database.reading() as connection:
        return {
            name: sorted((tuple(row) for row in connection.execute(sa.select(table))), key=repr)
            for name, table in METADATA.tables.items()
            if name != "terms"
        }


@contextmanager
def a_world(folder: Path, *, requests_max: int = 100_000) -> Iterator[World]:
    """Generous with requests, unless the test is about their number."""
    plane = ControlPlane(Settings(folder=ready_folder(folder)))
    plane.packages.put(PACKAGE, CODE)
    now_ms = plane.clock.now_ms()
    tokens = {role: plane.tokens.issue(f"a-{role}", role, now_ms=now_ms) for role in ROLES - {"container"}}
    tokens["container"] = plane.tokens.issue("c1", "container", now_ms=now_ms, container="c1")
    api = build_api(plane, rate=RateLimit(requests_max))
    with httpx.Client(transport=InProcess(api), base_url="http://localhost") as http:
        try:
            yield World(plane=plane, http=http, api=api, tokens=tokens, folder=folder)
        finally:
            plane.stop()


class InProcess(httpx.BaseTransport):
    """Requests go straight to an application, in an event loop of their own."""

    def __init__(self, api: FastAPI) -> None:
        # What the application raises after it answered is in its log; the answer is what a caller sees.
        self._asgi = httpx.ASGITransport(api, raise_app_exceptions=False)
        self._runner = asyncio.Runner()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._runner.run(self._handle(request))

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        answer = await self._asgi.handle_async_request(request)
        content = await answer.aread()
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)

    def close(self) -> None:
        self._runner.close()


@contextmanager
def a_client(world: World, role: str = "admin", *, container: str = "") -> Iterator[Client]:
    """The real client, as a role or a container, whose requests go to a world's API without a socket."""
    token = world.token_of(container) if container else world.tokens[role]
    client = Client("http://localhost", token, transport=InProcess(world.api))
    try:
        yield client
    finally:
        client.close()
