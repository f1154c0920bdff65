"""The tables of alarms, silences and pending notices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa

from penstock.alarms.decide import (
    RETENTION_MS,
    Alarm,
    AlarmChanges,
    Notice,
    Silence,
    decide_alarms,
    is_expired,
    sweep_alarms,
)
from penstock.core.clock import Millis
from penstock.core.errors import NotFound
from penstock.core.journal import Entry
from penstock.db.bulk import ByName
from penstock.db.database import METADATA, NAME, Database, next_value, upsert
from penstock.db.journal_store import JournalStore
from penstock.scaling.policies.policy import RaiseAlert

ALARMS = sa.Table(
    "alarms",
    METADATA,
    sa.Column("name", NAME, primary_key=True),
    sa.Column("job", NAME, nullable=False, index=True),
    sa.Column("body", sa.Text, nullable=False),
)
SILENCES = sa.Table(
    "silences",
    METADATA,
    sa.Column("id", NAME, primary_key=True),
    sa.Column("until_ms", sa.BigInteger, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)
NOTICES = sa.Table(
    "notices",
    METADATA,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("route", NAME, nullable=False),
    sa.Column("next_ms", sa.BigInteger, nullable=False),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)
ACTOR = "alarms"
_JOBS = ByName(sa.select(ALARMS.c.job).distinct(), ALARMS.c.job)


class PendingNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A notice that a route has not delivered yet."""

    id: int
    route: str
    tries: int
    next_ms: Millis
    notice: Notice


class AlarmStore:
    """Writes changed alarms, their notices and journal entries in one transaction, so that no
    notice is lost.
    """

    def __init__(self, database: Database, journal: JournalStore, routes: Sequence[str]) -> None:
        self._database, self._journal, self._routes = database, journal, tuple(routes)

    def report(self, job: str, alerts: Mapping[str, tuple[RaiseAlert, ...]], now_ms: Millis) -> None:
        """Update a job's alarms from the current reports of these sources."""
        self.report_all({job: alerts}, now_ms)

    def rest(self, job: str, alerts: Mapping[str, tuple[RaiseAlert, ...]], now_ms: Millis) -> None:
        """The job was stopped or removed: resolve all its alarms except those reported now."""
        with self._database.transaction() as connection:
            known, silences = _alarms(connection, job), _silences(connection, now_ms)
            changes = decide_alarms(known, job, alerts, silences, now_ms=now_ms, at_rest=True)
            self._write(connection, changes)

    def report_all(self, seen: Mapping[str, Mapping[str, tuple[RaiseAlert, ...]]], now_ms: Millis) -> None:
        """The same as `report` for many jobs, in one transaction."""
        if not seen:
            return
        with self._database.reading() as connection:
            known_jobs = {row[0] for row in _JOBS.rows(connection, list(seen))}
        seen = {job: alerts for job, alerts in seen.items() if job in known_jobs or any(alerts.values())}
        if not seen:
            return  # the usual case
        with self._database.transaction() as connection:
            silences = _silences(connection, now_ms)
            for job, alerts in seen.items():
                known = _alarms(connection, job)
                self._write(connection, decide_alarms(known, job, alerts, silences, now_ms=now_ms))

    def sweep(self, now_ms: Millis) -> None:
        """Update alarms by time alone, and delete expired alarms and silences."""
        with self._database.transaction() as connection:
            known = _alarms(connection)
            self._write(connection, sweep_alarms(known, _silences(connection, now_ms), now_ms=now_ms))
            expired = [alarm.name for alarm in known if is_expired(alarm, now_ms)]
            if expired:
                connection.execute(sa.delete(ALARMS).where(ALARMS.c.name.in_(expired)))
            connection.execute(sa.delete(SILENCES).where(SILENCES.c.until_ms <= now_ms))

    def alarms(self, job: str | None = None) -> tuple[Alarm, ...]:
        """The alarms of a job, or all; resolved ones are included while they are stored."""
        with self._database.reading() as connection:
            return _alarms(connection, job)

    def alarm(self, alarm_id: str) -> Alarm:
        """The alarm with this id; NotFound if there is none."""
        with self._database.reading() as connection:
            return find_alarm(connection, alarm_id)

    def silences(self, now_ms: Millis) -> tuple[Silence, ...]:
        """The silences in force."""
        with self._database.reading() as connection:
            return _silences(connection, now_ms)

    # -- pending notices --------------------------------------------------------------------------------

    def pending(self) -> tuple[PendingNotice, ...]:
        """The oldest pending notice of each route; the others wait for it."""
        first = sa.select(sa.func.min(NOTICES.c.id)).group_by(NOTICES.c.route)
        query = sa.select(NOTICES).where(NOTICES.c.id.in_(first)).order_by(NOTICES.c.id)
        with self._database.reading() as connection:
            return tuple(
                PendingNotice(
                    id=int(row.id),
                    route=str(row.route),
                    tries=int(row.tries),
                    next_ms=int(row.next_ms),
                    notice=msgspec.json.decode(row.body, type=Notice),
                )
                for row in connection.execute(query)
            )

    def remove_notice(self, notice_id: int) -> None:
        """Remove a notice that was delivered, or whose route no longer exists."""
        with self._database.transaction() as connection:
            connection.execute(sa.delete(NOTICES).where(NOTICES.c.id == notice_id))

    def give_up(self, pending: PendingNotice, why: str, now_ms: Millis) -> None:
        """Remove a notice that could not be delivered, with a journal entry."""
        with self._database.transaction() as connection:
            connection.execute(sa.delete(NOTICES).where(NOTICES.c.id == pending.id))
            alarm = pending.notice.alarm
            entry = Entry(
                at_ms=now_ms,
                actor=ACTOR,
                kind="alarm",
                subject=alarm.job,
                decision=f"{alarm.source}/{alarm.key}: not delivered by route {pending.route}",
                reason=why,
                data={"tries": pending.tries + 1, "notice": pending.id, "kind": pending.notice.kind},
            )
            self._journal.append(connection, entry)

    def postpone(self, notice_id: int, *, tries: int, next_ms: Millis) -> None:
        """Schedule the next attempt."""
        with self._database.transaction() as connection:
            connection.execute(
                sa.update(NOTICES).where(NOTICES.c.id == notice_id).values(tries=tries, next_ms=next_ms)
            )

    def _write(self, connection: sa.Connection, changes: AlarmChanges) -> None:
        rows = [
            {"name": alarm.name, "job": alarm.job, "body": msgspec.json.encode(alarm).decode()}
            for alarm in changes.changed
        ]
        upsert(connection, ALARMS, rows, replace=("body",))
        for notice in changes.notices:
            body = msgspec.json.encode(notice).decode()
            for route in self._routes:
                values = {"id": next_value(connection, "notices"), "route": route, "next_ms": 0, "tries": 0}
                connection.execute(sa.insert(NOTICES).values(**values, body=body))
            self._note(connection, notice)

    def _note(self, connection: sa.Connection, notice: Notice) -> None:
        alarm = notice.alarm
        self._journal.append(
            connection,
            Entry(
                at_ms=notice.at_ms,
                actor=ACTOR,
                kind="alarm",
                subject=alarm.job,
                decision=f"{alarm.source}/{alarm.key} {notice.kind}",
                reason=alarm.text,
                data={"id": alarm.id, "severity": alarm.severity, "evidence": dict(alarm.evidence)},
            ),
        )


# -- changes by operators, inside the caller's transaction ----------------------------------------------


def find_alarm(connection: sa.Connection, alarm_id: str) -> Alarm:
    """The alarm with this id; NotFound if there is none."""
    found = next((alarm for alarm in _alarms(connection) if alarm.id == alarm_id), None)
    if found is None:
        raise NotFound(
            f"there is no alarm {alarm_id[:100]!r}",
            why=f"it never existed, or was resolved more than {RETENTION_MS // 86_400_000} days ago",
            fix="`penstock alarm ls --all` lists all stored alarms",
        )
    return found


def put_alarm(connection: sa.Connection, alarm: Alarm) -> None:
    """Write an alarm."""
    values = {"name": alarm.name, "job": alarm.job, "body": msgspec.json.encode(alarm).decode()}
    upsert(connection, ALARMS, [values], replace=("body",))


def put_silence(connection: sa.Connection, silence: Silence) -> None:
    """Write a silence."""
    body = msgspec.json.encode(silence).decode()
    values = {"id": silence.id, "until_ms": silence.until_ms, "body": body}
    upsert(connection, SILENCES, [values], replace=("until_ms", "body"))


def drop_silence(connection: sa.Connection, silence_id: str, now_ms: Millis) -> Silence:
    """Delete a silence in force; NotFound if there is none."""
    found = next((item for item in _silences(connection, now_ms) if item.id == silence_id), None)
    if found is None:
        raise NotFound(
            f"there is no silence {silence_id[:100]!r}",
            why="it never existed, or it has expired",
            fix="`penstock alarm silences` lists the silences in force",
        )
    connection.execute(sa.delete(SILENCES).where(SILENCES.c.id == silence_id))
    return found


def _alarms(connection: sa.Connection, job: str | None = None) -> tuple[Alarm, ...]:
    query = sa.select(ALARMS.c.body).order_by(ALARMS.c.name)
    if job is not None:
        query = query.where(ALARMS.c.job == job)
    return tuple(msgspec.json.decode(row.body, type=Alarm) for row in connection.execute(query))


def _silences(connection: sa.Connection, now_ms: Millis) -> tuple[Silence, ...]:
    query = sa.select(SILENCES.c.body).where(SILENCES.c.until_ms > now_ms).order_by(SILENCES.c.id)
    return tuple(msgspec.json.decode(row.body, type=Silence) for row in connection.execute(query))
