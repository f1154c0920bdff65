"""When somebody is told of a trouble, and when no more: once, not again while it lasts, once when it is over.

What is reported are levels: all that is wrong now, as one source sees it. Pure: no clock, no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from penstock.core.clock import Millis
from penstock.core.text import make_known
from penstock.scaling.policies.policy import SEVERITIES, RaiseAlert, Severity

RESOLVE_AFTER_MS: Millis = 5 * 60_000  # it is over when it was not seen for so long
STALE_MS: Millis = 3_600_000  # or when nobody looks any more
REMIND_MS: Mapping[str, Millis] = {"info": 0, "warning": 12 * 3_600_000, "critical": 3_600_000}  # 0: never
RETENTION_MS: Millis = 14 * 86_400_000  # so long one that is over is kept

SKEW_MS: Millis = 60_000  # by so much a writer's time may be behind another's: they read their clocks before
ID_LENGTH = 12

NoticeKind = Literal["fired", "escalated", "reminded", "resolved", "test"]


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """One trouble of one job, from when it was first seen until it is over."""

    job: str
    source: str  # the policy that sees it
    key: str
    severity: Severity
    text: str
    what_to_do: str = ""
    evidence: Mapping[str, float | int | str] = {}
    is_firing: bool = True
    first_ms: Millis
    last_ms: Millis
    count: int = 1  # how often it began
    told_ms: Millis | None = None  # when somebody was last told; None: nobody was
    acked_by: str = ""
    acked_ms: Millis | None = None
    resolved_ms: Millis | None = None

    @property
    def name(self) -> str:
        """Tells it from all others."""
        return f"{self.job}/{self.source}/{self.key}"

    @property
    def id(self) -> str:
        """The same, short: what people type."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:ID_LENGTH]


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody is told of these until then. `job` and `key` may have `*`."""

    id: str
    job: str = "*"
    key: str = "*"
    severity_max: Severity = "critical"  # worse ones are told all the same
    until_ms: Millis
    by: str
    why: str

    def covers(self, alarm: Alarm, now_ms: Millis) -> bool:
        """Whether it holds for an alarm now."""
        return (
            now_ms < self.until_ms
            and fnmatchcase(alarm.job, self.job)
            and fnmatchcase(alarm.key, self.key)
            and SEVERITIES.index(alarm.severity) <= SEVERITIES.index(self.severity_max)
        )


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody is told."""

    kind: NoticeKind
    alarm: Alarm
    at_ms: Millis


class AlarmChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What a look at alarms changed."""

    changed: tuple[Alarm, ...]
    notices: tuple[Notice, ...]


def decide_alarms(
    known: Sequence[Alarm],
    job: str,
    reported: Mapping[str, Iterable[RaiseAlert]],
    silences: Sequence[Silence],
    *,
    now_ms: Millis,
    at_rest: bool = False,
) -> AlarmChanges:
    """What follows from all that these sources see of a job now. `known` are the job's alarms.

    `at_rest`: the job was stopped or removed. Then everything else is over at once, whoever saw it: nobody
    looks at such a job again.
    """
    before = {alarm.name: alarm for alarm in known}
    after = dict(before)
    told: set[str] = set()
    for source, alerts in reported.items():
        seen: set[str] = set()
        for alert in sorted(alerts, key=lambda alert: SEVERITIES.index(alert.severity)):
            alarm = _seen(before.get(f"{job}/{source}/{alert.key}"), job, source, alert, now_ms)
            after[alarm.name] = alarm
            seen.add(alarm.name)
        told |= seen
        for alarm in known:
            is_gone = alarm.source == source and alarm.name not in seen and alarm.is_firing
            if is_gone and not -SKEW_MS <= now_ms - alarm.last_ms < RESOLVE_AFTER_MS:
                after[alarm.name] = _with(alarm, is_firing=False, resolved_ms=now_ms)
    for alarm in known:
        if at_rest and alarm.is_firing and alarm.name not in told:
            after[alarm.name] = _with(alarm, is_firing=False, resolved_ms=now_ms)
    return _tell(before, after, silences, now_ms)


def sweep_alarms(known: Sequence[Alarm], silences: Sequence[Silence], *, now_ms: Millis) -> AlarmChanges:
    """What follows from the time alone: reminders, ends of silences, alarms that nobody looks after."""
    before = {alarm.name: alarm for alarm in known}
    after = {
        name: _with(alarm, is_firing=False, resolved_ms=now_ms)
        if alarm.is_firing and now_ms - alarm.last_ms > STALE_MS
        else alarm
        for name, alarm in before.items()
    }
    return _tell(before, after, silences, now_ms)


def acknowledge(alarm: Alarm, *, by: str, now_ms: Millis) -> Alarm:
    """Somebody looks after it: no more reminders until it is over or gets worse."""
    return _with(alarm, acked_by=by, acked_ms=now_ms) if alarm.is_firing else alarm


def is_expired(alarm: Alarm, now_ms: Millis) -> bool:
    """Whether it has been over for so long that nobody asks."""
    return not alarm.is_firing and now_ms - (alarm.resolved_ms or alarm.last_ms) > RETENTION_MS


def _seen(alarm: Alarm | None, job: str, source: str, alert: RaiseAlert, now_ms: Millis) -> Alarm:
    told: dict[str, Any] = {
        "severity": alert.severity,
        "text": alert.text,
        "what_to_do": alert.what_to_do,
        "evidence": alert.evidence,
        "last_ms": now_ms,
    }
    if alarm is None:
        return Alarm(job=job, source=source, key=alert.key, first_ms=now_ms, **told)
    if not alarm.is_firing:
        again = {"is_firing": True, "first_ms": now_ms, "resolved_ms": None, "count": alarm.count + 1}
        return _with(alarm, **told, **again, acked_by="", acked_ms=None, told_ms=None)
    if _is_worse(alert.severity, alarm.severity):
        return _with(alarm, **told, acked_by="", acked_ms=None)
    return _with(alarm, **told)


def _tell(
    before: Mapping[str, Alarm], after: Mapping[str, Alarm], silences: Sequence[Silence], now_ms: Millis
) -> AlarmChanges:
    changed: list[Alarm] = []
    notices: list[Notice] = []
    for name, alarm in after.items():
        kind = _kind(before.get(name), alarm, now_ms)
        if kind is not None and any(silence.covers(alarm, now_ms) for silence in silences):
            kind = None
        if kind is not None:
            alarm = _with(alarm, told_ms=now_ms)
            notices.append(Notice(kind=kind, alarm=alarm, at_ms=now_ms))
        if alarm != before.get(name):
            changed.append(alarm)
    return AlarmChanges(changed=tuple(changed), notices=tuple(notices))


def _kind(was: Alarm | None, now: Alarm, now_ms: Millis) -> NoticeKind | None:
    """What of an alarm is news. One that nobody was told of, because of a silence, is news when that ends."""
    if not now.is_firing:
        return "resolved" if was is not None and was.is_firing and was.told_ms is not None else None
    if now.told_ms is None:
        return "fired"
    if was is not None and _is_worse(now.severity, was.severity):
        return "escalated"
    every_ms = REMIND_MS[now.severity]
    is_time = every_ms > 0 and not -SKEW_MS <= now_ms - now.told_ms < every_ms
    return "reminded" if is_time and now.acked_ms is None else None


def _is_worse(one: str, other: str) -> bool:
    return SEVERITIES.index(one) > SEVERITIES.index(other)


def _with(alarm: Alarm, **news: Any) -> Alarm:
    return msgspec.structs.replace(alarm, **news)


make_known(Alarm, Silence, Notice)
