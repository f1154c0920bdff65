"""Who asks for a change, why, under which key, on which version: a request's parts as services take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from penstock.core.clock import Clock
from penstock.core.errors import NotFound
from penstock.core.token_store import Caller
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.layer_writer import Asked
from penstock.jobs.layers import merge_layers
from penstock.jobs.text_rules import shown
from penstock.streams.package_shelf import PackageShelf


class Desk(Protocol):
    """Where changes of jobs are taken: the control plane, or a front that writes to the same database."""

    @property
    def clock(self) -> Clock: ...

    @property
    def jobs(self) -> JobService: ...

    @property
    def packages(self) -> PackageShelf: ...

    def wake_syncer(self) -> None:
        """Something else is expected of a job."""


class Ask:
    """Makes what every change is asked with, at this moment."""

    def __init__(self, desk: Desk) -> None:
        self._clock = desk.clock

    def __call__(self, caller: Caller, why: str, key: str | None) -> Asked:
        return Asked(actor=actor_of(caller), reason=why, idempotency_key=key, now_ms=self._clock.now_ms())


def actor_of(caller: Caller) -> Actor:
    """Whoever holds the token, as the services know them."""
    return Actor(name=caller.name, role=caller.role)


def check_package(desk: Desk, job: str, config: Mapping[str, Any]) -> None:
    """NotFound if this names a package that nobody put here, and that the job does not name already."""
    package = config.get("package")
    hash_ = package.get("hash") if isinstance(package, Mapping) else config.get("package.hash")
    if not isinstance(hash_, str) or desk.packages.may_have(hash_):
        return
    try:
        merged = merge_layers(desk.jobs.view(job).layers)
    except NotFound:
        merged = {}
    if (merged.get("package") or {}).get("hash") != hash_:
        raise NotFound(
            f"there is no package {hash_[:12]!r}",
            why=f"job {shown(job)} would name code that nobody put here, and its tasks could not start",
            fix="put the package first (`penstock submit` does), or correct its hash",
        )


def version_of(if_match: str | None) -> int | None:
    """The version that an ETag names; None: whatever there is. Requires: the header's pattern was checked."""
    return None if if_match is None or if_match == "*" else int(if_match.strip('"'))
