"""Routes about alarms: what fires, who looks after it, what is silent; and what the cluster has left."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from penstock.alarms.decide import ID_LENGTH, Alarm, Silence
from penstock.db.tokens import Caller
from penstock.scaling.scaler.observation import is_short_of_room
from penstock.server import bodies
from penstock.server.answers import answer
from penstock.server.bodies import Key, NameQuery, WhyQuery
from penstock.server.pools import LONG, WRITES
from penstock.server.replies import WRITING, Responses, problems
from penstock.server.routes import alarm_replies
from penstock.server.security import Guard
from penstock.server.services import Ask, Control

AlarmId = Annotated[str, Path(pattern=f"^[0-9a-f]{{{ID_LENGTH}}}$")]
All = Annotated[bool, Query(description="Also those that are over.")]


def add_alarm_reads(router: APIRouter, plane: Control, guard: Guard) -> None:
    """What is wrong."""

    @router.get("/alarms", response_model=alarm_replies.Alarms, responses=problems())
    @LONG
    def list_alarms(
        caller: Caller = guard.allow("alarm.read"), job: NameQuery = None, all: All = False
    ) -> Response:
        """Alarms that fire, the worst first."""
        silences = plane.alarms.store.silences(plane.clock.now_ms())
        found = plane.alarms.alarms(job=job, everything=all)
        lines = [_alarm(alarm, silences, plane.clock.now_ms()) for alarm in found]
        return answer({"alarms": lines, "routes": list(plane.alarms.route_names)})

    @router.get("/alarms/{alarm_id}", response_model=alarm_replies.Alarm, responses=problems(404))
    @LONG
    def get_alarm(alarm_id: AlarmId, caller: Caller = guard.allow("alarm.read")) -> Response:
        """One alarm."""
        silences, now_ms = plane.alarms.store.silences(plane.clock.now_ms()), plane.clock.now_ms()
        return answer(_alarm(plane.alarms.store.alarm(alarm_id), silences, now_ms))

    @router.get("/silences", response_model=alarm_replies.Silences, responses=problems())
    @LONG
    def list_silences(caller: Caller = guard.allow("alarm.read")) -> Response:
        """The silences that hold."""
        found = plane.alarms.store.silences(plane.clock.now_ms())
        return answer({"silences": [_silence(silence) for silence in found]})

    @router.get("/capacity", response_model=alarm_replies.Capacity, responses=problems())
    @LONG
    def get_capacity(caller: Caller = guard.allow("status.read")) -> Response:
        """What the cluster has, and how much of it is reserved and used."""
        refused = [job for job, said in sorted(plane.scaler.decisions.items()) if is_short_of_room(said)]
        return answer({**plane.capacity.to_json(), "refused": refused, **plane.lending.summary()})


def add_alarm_writes(router: APIRouter, plane: Control, guard: Guard) -> None:
    """What people do about it."""
    ask = Ask(plane)
    created: Responses = {201: {"model": alarm_replies.Silence, "description": "It holds now"}}

    @router.post(
        "/alarms/{alarm_id}/acknowledge", response_model=alarm_replies.Alarm, responses=problems(*WRITING)
    )
    @WRITES
    def acknowledge_alarm(
        alarm_id: AlarmId,
        body: bodies.Because,
        caller: Caller = guard.allow("alarm.write"),
        idempotency_key: Key = None,
    ) -> Response:
        """Say that somebody looks after it: no more reminders until it is over or gets worse."""
        alarm = plane.alarms.acknowledge(alarm_id, **ask(caller, body.why, idempotency_key))
        now_ms = plane.clock.now_ms()
        return answer(_alarm(alarm, plane.alarms.store.silences(now_ms), now_ms))

    @router.post(
        "/silences",
        status_code=201,
        response_model=alarm_replies.Silence,
        responses=created | problems(*WRITING),
    )
    @WRITES
    def add_silence(
        body: bodies.NewSilence,
        caller: Caller = guard.allow("alarm.write"),
        idempotency_key: Key = None,
    ) -> Response:
        """Tell nobody of some alarms for a while; what still fires then is told."""
        silence = plane.alarms.silence(
            job=body.job,
            key=body.kind,
            severity_max=body.severity,
            for_ms=body.for_s * 1000,
            **ask(caller, body.why, idempotency_key),
        )
        return answer(_silence(silence), status=201)

    @router.delete(
        "/silences/{silence_id}", response_model=alarm_replies.Silence, responses=problems(*WRITING)
    )
    @WRITES
    def end_silence(
        silence_id: AlarmId,
        caller: Caller = guard.allow("alarm.write"),
        why: WhyQuery = "",
        idempotency_key: Key = None,
    ) -> Response:
        """End a silence before its time."""
        return answer(_silence(plane.alarms.unsilence(silence_id, **ask(caller, why, idempotency_key))))

    @router.post(
        "/alarm-routes/test", response_model=alarm_replies.RouteAnswers, responses=problems(*WRITING)
    )
    @LONG
    def test_routes(body: bodies.Because, caller: Caller = guard.allow("alarm.write")) -> Response:
        """Send a notice through each route, and say what each answered."""
        answers = plane.alarms.test(**ask(caller, body.why, None))
        lines = [{"route": name, "is_taken": not said, "answer": said} for name, said in answers.items()]
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
