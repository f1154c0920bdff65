"""Who asks for a change, why, under which key, on which version: a request's parts as services take them."""

from __future__ import annotations

from penstock.app import ControlPlane
from penstock.core.token_store import Caller
from penstock.jobs.job_service import Actor
from penstock.jobs.layer_writer import Asked


class Ask:
    """Makes what every change is asked with, at this moment."""

    def __init__(self, plane: ControlPlane) -> None:
        self._clock = plane.clock

    def __call__(self, caller: Caller, why: str, key: str | None) -> Asked:
        return Asked(actor=actor_of(caller), reason=why, idempotency_key=key, now_ms=self._clock.now_ms())


def actor_of(caller: Caller) -> Actor:
    """Whoever holds the token, as the services know them."""
    return Actor(name=caller.name, role=caller.role)


def version_of(if_match: str | None) -> int | None:
    """The version that an ETag names; None: whatever there is. Requires: the header's pattern was checked."""
    return None if if_match is None or if_match == "*" else int(if_match.strip('"'))
