"""Routes about alarms, their acknowledgement and silences; and about the cluster's capacity."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query

from penstock.alarms.decide import ID_LENGTH, Alarm, Silence
from penstock.db.tokens import Caller
from penstock.scaling.scaler.observation import is_short_of_room
from penstock.server import bodies
from penstock.server.bodies import Key, NameQuery, WhyQuery
from penstock.server.pools import LONG, WRITES
from penstock.server.replies import WRITING, Number, Reply, Responses, problems
from penstock.server.security import Guard
from penstock.server.services import Control, WriteArguments

SeverityName = Literal["info", "warning", "critical"]


class AlarmReply(Reply):
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

    @classmethod
    def of(cls, alarm: Alarm, silences: tuple[Silence, ...], now_ms: int) -> AlarmReply:
        return AlarmReply(
            id=alarm.id,
            name=alarm.name,
            job=alarm.job,
            source=alarm.source,
            kind=alarm.key,
            severity=alarm.severity,
            text=alarm.text,
            what_to_do=alarm.what_to_do,
            evidence=dict(alarm.evidence),
            is_firing=alarm.is_firing,
            is_silenced=any(silence.covers(alarm, now_ms) for silence in silences),
            first_ms=alarm.first_ms,
            last_ms=alarm.last_ms,
            count=alarm.count,
            told_ms=alarm.told_ms,
            acked_by=alarm.acked_by,
            acked_ms=alarm.acked_ms,
            resolved_ms=alarm.resolved_ms,
        )


class Alarms(Reply):
    """Alarms, firing ones first, then by severity; and the routes by which notices are sent."""

    alarms: list[AlarmReply]
    routes: list[str]


class SilenceReply(Reply):
    """A silence: no notices for these alarms until `until_ms`."""

    id: str
    job: str
    kind: str
    severity: SeverityName
    until_ms: int
    by: str
    why: str

    @classmethod
    def of(cls, silence: Silence) -> SilenceReply:
        return SilenceReply(
            id=silence.id,
            job=silence.job,
            kind=silence.key,
            severity=silence.severity_max,
            until_ms=silence.until_ms,
            by=silence.by,
            why=silence.why,
        )


class Silences(Reply):
    """The active silences."""

    silences: list[SilenceReply]


class RouteAnswer(Reply):
    """The result of a test notice on one route."""

    route: str
    is_taken: bool
    answer: str


class RouteAnswers(Reply):
    """The results of a test notice on each route."""

    routes: list[RouteAnswer]


class CapacityKind(Reply):
    """One resource of the cluster; null: unlimited."""

    kind: str
    total: Number | None
    reserved: Number
    used: Number
    remaining: Number | None


class StoppedJob(Reply):
    """A job that the capacity manager stopped, and the resources that it needs."""

    job: str
    priority: int
    reason: str
    reserved: dict[str, Number]


class CapacityReply(Reply):
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

    @router.get("/alarms", responses=problems())
    @LONG
    def list_alarms(
        caller: Caller = guard.allow("alarm.read"), job: NameQuery = None, all: All = False
    ) -> Alarms:
        """Firing alarms, the worst first."""
        silences = plane.alarms.store.silences(plane.clock.now_ms())
        found = plane.alarms.alarms(job=job, everything=all)
        lines = [AlarmReply.of(alarm, silences, plane.clock.now_ms()) for alarm in found]
        return Alarms(alarms=lines, routes=list(plane.alarms.route_names))

    @router.get("/alarms/{alarm_id}", responses=problems(404))
    @LONG
    def get_alarm(alarm_id: AlarmId, caller: Caller = guard.allow("alarm.read")) -> AlarmReply:
        """One alarm."""
        silences, now_ms = plane.alarms.store.silences(plane.clock.now_ms()), plane.clock.now_ms()
        return AlarmReply.of(plane.alarms.store.alarm(alarm_id), silences, now_ms)

    @router.get("/silences", responses=problems())
    @LONG
    def list_silences(caller: Caller = guard.allow("alarm.read")) -> Silences:
        """The active silences."""
        found = plane.alarms.store.silences(plane.clock.now_ms())
        return Silences(silences=[SilenceReply.of(silence) for silence in found])

    @router.get("/capacity", responses=problems())
    @LONG
    def get_capacity(caller: Caller = guard.allow("status.read")) -> CapacityReply:
        """The cluster's resources: total, reserved and used."""
        decisions = sorted(plane.scaler.decisions.items())
        refused = [job for job, decision in decisions if is_short_of_room(decision)]
        loans = plane.lending.summary()
        return CapacityReply(
            **plane.capacity.to_json(), refused=refused, lent=loans["lent"], borrowed=loans["borrowed"]
        )


def add_alarm_writes(router: APIRouter, plane: Control, guard: Guard) -> None:
    """Routes to acknowledge and silence alarms, and to test routes."""
    arguments = WriteArguments(plane)
    created: Responses = {201: {"description": "Created"}}

    @router.post("/alarms/{alarm_id}/acknowledge", responses=problems(*WRITING))
    @WRITES
    def acknowledge_alarm(
        alarm_id: AlarmId,
        body: bodies.ReasonBody,
        caller: Caller = guard.allow("alarm.write"),
        idempotency_key: Key = None,
    ) -> AlarmReply:
        """Acknowledge an alarm: no more reminders until it is resolved or becomes worse."""
        alarm = plane.alarms.acknowledge(alarm_id, **arguments(caller, body.why, idempotency_key))
        now_ms = plane.clock.now_ms()
        return AlarmReply.of(alarm, plane.alarms.store.silences(now_ms), now_ms)

    @router.post("/silences", status_code=201, responses=created | problems(*WRITING))
    @WRITES
    def add_silence(
        body: bodies.NewSilenceBody,
        caller: Caller = guard.allow("alarm.write"),
        idempotency_key: Key = None,
    ) -> SilenceReply:
        """Silence some alarms for a while; a notice is sent for those that still fire afterwards."""
        silence = plane.alarms.silence(
            job=body.job,
            key=body.kind,
            severity_max=body.severity,
            for_ms=body.for_s * 1000,
            **arguments(caller, body.why, idempotency_key),
        )
        return SilenceReply.of(silence)

    @router.delete("/silences/{silence_id}", responses=problems(*WRITING))
    @WRITES
    def end_silence(
        silence_id: AlarmId,
        caller: Caller = guard.allow("alarm.write"),
        why: WhyQuery = "",
        idempotency_key: Key = None,
    ) -> SilenceReply:
        """End a silence early."""
        ended = plane.alarms.unsilence(silence_id, **arguments(caller, why, idempotency_key))
        return SilenceReply.of(ended)

    @router.post("/alarm-routes/test", responses=problems(*WRITING))
    @LONG
    def test_routes(body: bodies.ReasonBody, caller: Caller = guard.allow("alarm.write")) -> RouteAnswers:
        """Send a test notice through each route, and return each result."""
        answers = plane.alarms.test(**arguments(caller, body.why, None))
        lines = [RouteAnswer(route=name, is_taken=not error, answer=error) for name, error in answers.items()]
        return RouteAnswers(routes=lines)
