"""Routes about alarms, their acknowledgement and silences; and about the cluster's capacity."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict

from penstock.alarms.decide import ID_LENGTH, Alarm, Silence
from penstock.db.tokens import Caller
from penstock.scaling.scaler.observation import is_short_of_room
from penstock.server import bodies
from penstock.server.answers import answer
from penstock.server.bodies import Key, NameQuery, WhyQuery
from penstock.server.pools import LONG, WRITES
from penstock.server.replies import WRITING, Responses, problems
from penstock.server.security import Guard
from penstock.server.services import Control, WriteArguments

SeverityName = Literal["info", "warning", "critical"]


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AlarmReply(_Reply):
    """One alarm, from its first detection until it is resolved."""

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
    """Alarms, firing ones first, then by severity; and the routes by which notices are sent."""

    alarms: list[AlarmReply]
    routes: list[str]


class SilenceReply(_Reply):
    """A silence: no notices for these alarms until `until_ms`."""

    id: str
    job: str
    kind: str
    severity: SeverityName
    until_ms: int
    by: str
    why: str


class Silences(_Reply):
    """The active silences."""

    silences: list[SilenceReply]


class RouteAnswer(_Reply):
    """The result of a test notice on one route."""

    route: str
    is_taken: bool
    answer: str


class RouteAnswers(_Reply):
    """The results of a test notice on each route."""

    routes: list[RouteAnswer]


class CapacityKind(_Reply):
    """One resource of the cluster; null: unlimited."""

    kind: str
    total: float | None
    reserved: float
    used: float
    remaining: float | None


class StoppedJob(_Reply):
    """A job that the capacity manager stopped, and the resources that it needs."""

    job: str
    priority: int
    reason: str
    reserved: dict[str, float]


class CapacityReply(_Reply):
    """The cluster's resources: total, reserved and used; and the jobs that were stopped for lack of them."""

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


AlarmId = Annotated[str, Path(pattern=f"^[0-9a-f]{{{ID_LENGTH}}}$")]
All = Annotated[bool, Query(description="Also resolved alarms.")]


def add_alarm_reads(router: APIRouter, plane: Control, guard: Guard) -> None:
    """Routes to read alarms, silences and capacity."""

    @router.get("/alarms", response_model=Alarms, responses=problems())
    @LONG
    def list_alarms(
        caller: Caller = guard.allow("alarm.read"), job: NameQuery = None, all: All = False
    ) -> Response:
        """Firing alarms, the worst first."""
        silences = plane.alarms.store.silences(plane.clock.now_ms())
        found = plane.alarms.alarms(job=job, everything=all)
        lines = [_alarm(alarm, silences, plane.clock.now_ms()) for alarm in found]
        return answer({"alarms": lines, "routes": list(plane.alarms.route_names)})

    @router.get("/alarms/{alarm_id}", response_model=AlarmReply, responses=problems(404))
    @LONG
    def get_alarm(alarm_id: AlarmId, caller: Caller = guard.allow("alarm.read")) -> Response:
        """One alarm."""
        silences, now_ms = plane.alarms.store.silences(plane.clock.now_ms()), plane.clock.now_ms()
        return answer(_alarm(plane.alarms.store.alarm(alarm_id), silences, now_ms))

    @router.get("/silences", response_model=Silences, responses=problems())
    @LONG
    def list_silences(caller: Caller = guard.allow("alarm.read")) -> Response:
        """The active silences."""
        found = plane.alarms.store.silences(plane.clock.now_ms())
        return answer({"silences": [_silence(silence) for silence in found]})

    @router.get("/capacity", response_model=CapacityReply, responses=problems())
    @LONG
    def get_capacity(caller: Caller = guard.allow("status.read")) -> Response:
        """The cluster's resources: total, reserved and used."""
        decisions = sorted(plane.scaler.decisions.items())
        refused = [job for job, decision in decisions if is_short_of_room(decision)]
        return answer({**plane.capacity.to_json(), "refused": refused, **plane.lending.summary()})


def add_alarm_writes(router: APIRouter, plane: Control, guard: Guard) -> None:
    """Routes to acknowledge and silence alarms, and to test routes."""
    arguments = WriteArguments(plane)
    created: Responses = {201: {"model": SilenceReply, "description": "Created"}}

    @router.post("/alarms/{alarm_id}/acknowledge", response_model=AlarmReply, responses=problems(*WRITING))
    @WRITES
    def acknowledge_alarm(
        alarm_id: AlarmId,
        body: bodies.ReasonBody,
        caller: Caller = guard.allow("alarm.write"),
        idempotency_key: Key = None,
    ) -> Response:
        """Acknowledge an alarm: no more reminders until it is resolved or becomes worse."""
        alarm = plane.alarms.acknowledge(alarm_id, **arguments(caller, body.why, idempotency_key))
        now_ms = plane.clock.now_ms()
        return answer(_alarm(alarm, plane.alarms.store.silences(now_ms), now_ms))

    @router.post(
        "/silences",
        status_code=201,
        response_model=SilenceReply,
        responses=created | problems(*WRITING),
    )
    @WRITES
    def add_silence(
        body: bodies.NewSilenceBody,
        caller: Caller = guard.allow("alarm.write"),
        idempotency_key: Key = None,
    ) -> Response:
        """Silence some alarms for a while; a notice is sent for those that still fire afterwards."""
        silence = plane.alarms.silence(
            job=body.job,
            key=body.kind,
            severity_max=body.severity,
            for_ms=body.for_s * 1000,
            **arguments(caller, body.why, idempotency_key),
        )
        return answer(_silence(silence), status=201)

    @router.delete("/silences/{silence_id}", response_model=SilenceReply, responses=problems(*WRITING))
    @WRITES
    def end_silence(
        silence_id: AlarmId,
        caller: Caller = guard.allow("alarm.write"),
        why: WhyQuery = "",
        idempotency_key: Key = None,
    ) -> Response:
        """End a silence early."""
        return answer(_silence(plane.alarms.unsilence(silence_id, **arguments(caller, why, idempotency_key))))

    @router.post("/alarm-routes/test", response_model=RouteAnswers, responses=problems(*WRITING))
    @LONG
    def test_routes(body: bodies.ReasonBody, caller: Caller = guard.allow("alarm.write")) -> Response:
        """Send a test notice through each route, and return each result."""
        answers = plane.alarms.test(**arguments(caller, body.why, None))
        lines = [{"route": name, "is_taken": not error, "answer": error} for name, error in answers.items()]
        return answer({"routes": lines})


def _alarm(alarm: Alarm, silences: tuple[Silence, ...], now_ms: int) -> dict[str, Any]:
    names = ("job", "source", "severity", "text", "what_to_do", "is_firing", "first_ms", "last_ms", "count")
    more = ("told_ms", "acked_by", "acked_ms", "resolved_ms")
    return {
        "id": alarm.id,
        "name": alarm.name,
        "kind": alarm.key,
        "evidence": dict(alarm.evidence),
        "is_silenced": any(silence.covers(alarm, now_ms) for silence in silences),
        **{name: getattr(alarm, name) for name in (*names, *more)},
    }


def _silence(silence: Silence) -> dict[str, Any]:
    return {
        "id": silence.id,
        "job": silence.job,
        "kind": silence.key,
        "severity": silence.severity_max,
        "until_ms": silence.until_ms,
        "by": silence.by,
        "why": silence.why,
    }
