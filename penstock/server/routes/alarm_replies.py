"""How answers about alarms and capacity look: what the API describes of them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

SeverityName = Literal["info", "warning", "critical"]


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Alarm(_Reply):
    """One trouble, from when it was first seen until it is over."""

    id: str
    name: str
    job: str
    source: str
    kind: str
    severity: SeverityName
    text: str
    what_to_do: str
    evidence: dict[str, float | int | str]
    is_firing: bool
    is_silenced: bool
    first_ms: int
    last_ms: int
    count: int
    told_ms: int | None
    acked_by: str
    acked_ms: int | None
    resolved_ms: int | None


class Alarms(_Reply):
    """Alarms, those that fire first, the worst first; and the routes by which people are told."""

    alarms: list[Alarm]
    routes: list[str]


class Silence(_Reply):
    """Nobody is told of these until then."""

    id: str
    job: str
    kind: str
    severity: SeverityName
    until_ms: int
    by: str
    why: str


class Silences(_Reply):
    """Those that hold."""

    silences: list[Silence]


class RouteAnswer(_Reply):
    """What a route said to a test."""

    route: str
    is_taken: bool
    answer: str


class RouteAnswers(_Reply):
    """What each route said to a test."""

    routes: list[RouteAnswer]


class CapacityKind(_Reply):
    """One resource of the cluster; null: that is not limited."""

    kind: str
    total: float | None
    reserved: float
    used: float
    remaining: float | None


class StoppedJob(_Reply):
    """A job that the capacity manager stopped, and what it would need."""

    job: str
    priority: int
    reason: str
    reserved: dict[str, float]


class Capacity(_Reply):
    """What the cluster has, what is reserved and used of it, and who was stopped for it."""

    is_limited: bool
    containers: int
    boundless: list[str]
    kinds: list[CapacityKind]
    short_of: list[str]
    refused: list[str]
    lent: list[str]
    borrowed: list[str]
    jobs: int
    stopped: list[StoppedJob]
