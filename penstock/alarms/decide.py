"""Decides when an alarm fires, escalates, is repeated and is resolved: one notice each, not one per report.

A source reports levels: everything that is wrong now, not changes. Pure: no clock, no I/O.
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

RESOLVE_AFTER_MS: Millis = 5 * 60_000  # an alarm resolves when its source did not report it for this time
STALE_MS: Millis = 3_600_000  # or when it got no report at all for this time
REMIND_MS: Mapping[str, Millis] = {"info": 0, "warning": 12 * 3_600_000, "critical": 3_600_000}  # 0: never
RETENTION_MS: Millis = 14 * 86_400_000  # how long resolved alarms are stored

SKEW_MS: Millis = 60_000  # how far timestamps of concurrent writers may be out of order
ID_LENGTH = 12

NoticeKind = Literal["fired", "escalated", "reminded", "resolved", "test"]


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of one job, from its first report until it is resolved."""

    job: str
    source: str  # what reported it, e.g. a policy
    key: str
    severity: Severity
    text: str
    what_to_do: str = ""
    evidence: Mapping[str, float | int | str] = {}
    is_firing: bool = True
    first_ms: Millis
    last_ms: Millis
    count: int = 1  # how often it has fired
    told_ms: Millis | None = None  # when the last notice was sent; None: none was
    acked_by: str = ""
    acked_ms: Millis | None = None
    resolved_ms: Millis | None = None

    @property
    def name(self) -> str:
        """Its unique name."""
        return f"{self.job}/{self.source}/{self.key}"

    @property
    def id(self) -> str:
        """Its short id, for commands."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:ID_LENGTH]


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Suppresses notices of matching alarms until a time. `job` and `key` may contain `*`."""

    id: str
    job: str = "*"
    key: str = "*"
    severity_max: Severity = "critical"  # notices of higher severities are still sent
    until_ms: Millis
    by: str
    why: str

    def covers(self, alarm: Alarm, now_ms: Millis) -> bool:
        """Whether it suppresses the notices of an alarm now."""
        return (
            now_ms < self.until_ms
            and fnmatchcase(alarm.job, self.job)
            and fnmatchcase(alarm.key, self.key)
            and SEVERITIES.index(alarm.severity) <= SEVERITIES.index(self.severity_max)
        )


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A message about an alarm, for the notification routes."""

    kind: NoticeKind
    alarm: Alarm
    at_ms: Millis


class AlarmChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The alarms that changed, and the notices to send."""

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
    """Update a job's alarms from the current reports of these sources. `known` are the job's alarms.

    `at_rest`: the job was stopped or removed. Then all alarms that are not reported now resolve at once,
    because nothing checks such a job again.
    """
    before = {alarm.name: alarm for alarm in known}
    after = dict(before)
    reported_names: set[str] = set()
    for source, alerts in reported.items():
        seen: set[str] = set()
        for alert in sorted(alerts, key=lambda alert: SEVERITIES.index(alert.severity)):
            alarm = _seen(before.get(f"{job}/{source}/{alert.key}"), job, source, alert, now_ms)
            after[alarm.name] = alarm
            seen.add(alarm.name)
        reported_names |= seen
        for alarm in known:
            is_gone = alarm.source == source and alarm.name not in seen and alarm.is_firing
            if is_gone and not -SKEW_MS <= now_ms - alarm.last_ms < RESOLVE_AFTER_MS:
                after[alarm.name] = _with(alarm, is_firing=False, resolved_ms=now_ms)
    for alarm in known:
        if at_rest and alarm.is_firing and alarm.name not in reported_names:
            after[alarm.name] = _with(alarm, is_firing=False, resolved_ms=now_ms)
    return _add_notices(before, after, silences, now_ms)


def sweep_alarms(known: Sequence[Alarm], silences: Sequence[Silence], *, now_ms: Millis) -> AlarmChanges:
    """Update alarms by time alone: reminders, ended silences, alarms without recent reports."""
    before = {alarm.name: alarm for alarm in known}
    after = {
        name: _with(alarm, is_firing=False, resolved_ms=now_ms)
        if alarm.is_firing and now_ms - alarm.last_ms > STALE_MS
        else alarm
        for name, alarm in before.items()
    }
    return _add_notices(before, after, silences, now_ms)


def acknowledge(alarm: Alarm, *, by: str, now_ms: Millis) -> Alarm:
    """Acknowledge an alarm: no reminders until it resolves or escalates."""
    return _with(alarm, acked_by=by, acked_ms=now_ms) if alarm.is_firing else alarm


def is_expired(alarm: Alarm, now_ms: Millis) -> bool:
    """Whether it was resolved so long ago that it can be deleted."""
    return not alarm.is_firing and now_ms - (alarm.resolved_ms or alarm.last_ms) > RETENTION_MS


def _seen(alarm: Alarm | None, job: str, source: str, alert: RaiseAlert, now_ms: Millis) -> Alarm:
    values: dict[str, Any] = {
        "severity": alert.severity,
        "text": alert.text,
        "what_to_do": alert.what_to_do,
        "evidence": alert.evidence,
        "last_ms": now_ms,
    }
    if alarm is None:
        return Alarm(job=job, source=source, key=alert.key, first_ms=now_ms, **values)
    if not alarm.is_firing:
        again = {"is_firing": True, "first_ms": now_ms, "resolved_ms": None, "count": alarm.count + 1}
        return _with(alarm, **values, **again, acked_by="", acked_ms=None, told_ms=None)
    if _is_worse(alert.severity, alarm.severity):
        return _with(alarm, **values, acked_by="", acked_ms=None)
    return _with(alarm, **values)


def _add_notices(
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
    """The kind of notice that is due for an alarm, if any. After a silence, a suppressed alarm fires."""
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


def _with(alarm: Alarm, **changes: Any) -> Alarm:
    return msgspec.structs.replace(alarm, **changes)


make_known(Alarm, Silence, Notice)
