"""The alarm service: collects facts, runs the alarm rounds, and lets operators acknowledge, silence and test.

Each change by an operator is one transaction with its audit entry, idempotent by key.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Unpack, get_args

import msgspec

from penstock.alarms.checks import (
    EVENT_MS,
    BehindLow,
    CategoryTrouble,
    FleetEvent,
    JobTrouble,
    LoopTrouble,
    Observed,
    ShardTrouble,
    TaskTrouble,
)
from penstock.alarms.decide import Alarm, Notice, Silence, acknowledge
from penstock.alarms.delivery import AlarmSender, Route, error_text
from penstock.alarms.store import AlarmStore, drop_silence, find_alarm, put_alarm, put_silence
from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, PenstockError, Refused
from penstock.core.workers import Rest, no_rest
from penstock.db.journal_store import JournalStore
from penstock.fleet.shard_store import FleetView
from penstock.jobs.job_reads import JobReads, JobView
from penstock.jobs.job_store import JobStore
from penstock.jobs.layer_writer import Call, CallOptions, IdempotentWriter, LayerWriter
from penstock.jobs.text_rules import check_line, shown
from penstock.scaling.policies.balance import starved_tasks
from penstock.scaling.policies.policy import FLEET, Levels, RaiseAlert, Severity

# How often all jobs are checked. Jobs in states that the store can select are checked in every round.
ALL_JOBS_MS: Millis = 60_000
EVENT_KINDS = frozenset({"alert", "failover"})
FIRST_READ_MAX = 1000


class AlarmFacts:
    """Collects the facts for alarms. Remembers how far it has read the journal."""

    def __init__(
        self,
        jobs: JobReads,
        fleet: FleetView,
        journal: JournalStore,
        loops: Callable[[], tuple[LoopTrouble, ...]],
        behind: BehindLow,
        *,
        categories: Callable[[], tuple[CategoryTrouble, ...]] = tuple,
        rest: Rest = no_rest,
    ) -> None:
        """`rest` is called regularly while all jobs are checked, to give way to other threads."""
        self._rest = rest
        self._jobs, self._fleet, self._journal, self._loops = jobs, fleet, journal, loops
        self._behind, self._categories = behind, categories
        self._read_to: int | None = None  # the id of the newest journal entry that was read
        self._events: tuple[FleetEvent, ...] = ()
        self._invalid: tuple[JobTrouble, ...] = ()
        self._all_jobs_ms: Millis | None = None

    def observe(self, now_ms: Millis) -> Observed:
        """Collect everything that is wrong now."""
        self._read_journal(now_ms)
        if self._all_jobs_ms is None or not 0 <= now_ms - self._all_jobs_ms < ALL_JOBS_MS:
            # The store cannot select jobs with invalid configs, and there are few.
            self._invalid = tuple(
                _trouble(view) for view in self._jobs.every_view(self._rest) if view.state == "invalid"
            )
            self._all_jobs_ms = now_ms
        found = (_trouble(view) for state in ("quarantined", "changing") for view in self._in(state))
        reports = self._fleet.task_reports()
        return Observed(
            jobs=(*found, *self._invalid),
            tasks=tuple(
                TaskTrouble(
                    job=task.job,
                    task_id=task.task_id,
                    container=container,
                    state=task.state,
                    restarts=task.restarts,
                    error=task.error,
                )
                for container, task in reports
                if task.restarts
            ),
            behind=self._behind.observe((task for _, task in reports), now_ms),
            starved=starved_tasks(reports),
            shards=tuple(
                ShardTrouble(shard=row.shard, blame=row.blame)
                for row in self._fleet.shards()
                if row.is_quarantined
            ),
            loops=self._loops(),
            categories=self._categories(),
            events=self._events,
        )

    def _in(self, state: str) -> Iterator[JobView]:
        after: str | None = ""
        while after is not None:
            page = self._jobs.views(state=state, after=after, limit=FIRST_READ_MAX)
            yield from page.items
            after = page.next

    def _read_journal(self, now_ms: Millis) -> None:
        """Read the new journal entries; the first call reads the newest `FIRST_READ_MAX` entries."""
        entries = (
            self._journal.entries(limit=FIRST_READ_MAX)
            if self._read_to is None
            else self._journal.after(self._read_to)
        )
        self._read_to = entries[-1].id if entries else self._read_to or 0
        new_events = (
            FleetEvent(
                kind=entry.kind,
                subject=entry.subject,
                decision=entry.decision,
                reason=entry.reason,
                at_ms=entry.at_ms,
            )
            for entry in entries
            if entry.kind in EVENT_KINDS
        )
        self._events = tuple(
            event for event in (*self._events, *new_events) if abs(now_ms - event.at_ms) < EVENT_MS
        )


def _trouble(view: JobView) -> JobTrouble:
    if view.quarantine is not None:
        reason, since_ms = view.quarantine.reason, view.quarantine.since_ms
        return JobTrouble(job=view.name, state="quarantined", reason=reason, since_ms=since_ms)
    if view.problem or view.plan is None:
        return JobTrouble(job=view.name, state=view.state, reason=view.problem)
    return JobTrouble(
        job=view.name,
        state=view.state,
        reason=view.plan.error,
        since_ms=view.plan.started_ms,
        step=str(view.plan.step),
        attempts=view.plan.attempts,
    )


SILENCE_MS_MAX: Millis = 30 * 86_400_000
PATTERN_MAX = 200


class AlarmService:
    """The operators' interface to alarms, silences and notification routes."""

    def __init__(self, jobs: JobStore, store: AlarmStore, routes: Sequence[Route]) -> None:
        self._desk, self.store, self._routes = IdempotentWriter(jobs), store, tuple(routes)

    @property
    def route_names(self) -> tuple[str, ...]:
        """The names of the routes, the log first."""
        return tuple(route.name for route in self._routes)

    def alarms(self, *, job: str | None = None, everything: bool = False) -> tuple[Alarm, ...]:
        """The firing alarms, by severity and then newest first; `everything`: also the resolved ones."""
        found = [alarm for alarm in self.store.alarms(job) if alarm.is_firing or everything]
        return tuple(sorted(found, key=_by_weight))

    def acknowledge(self, alarm_id: str, **asked: Unpack[CallOptions]) -> Alarm:
        """Acknowledge an alarm: no reminders until it resolves or escalates."""

        def write(writer: LayerWriter) -> dict[str, Any]:
            alarm = find_alarm(writer.connection, alarm_id)
            if not alarm.is_firing:
                raise Refused(
                    f"the alarm {alarm_id} is already resolved",
                    why=f"{alarm.name} no longer fires",
                    fix="there is nothing to acknowledge",
                )
            acked = acknowledge(alarm, by=writer.call.actor.name, now_ms=writer.call.now_ms)
            put_alarm(writer.connection, acked)
            data = {"id": acked.id, "alarm": acked.name, "severity": acked.severity}
            writer.record("alarm.acknowledged", acked.job, data, kind="alarm")
            return dict(msgspec.to_builtins(acked))

        answer = self._desk.once(asked, {"acknowledge": alarm_id}, write)
        return msgspec.convert(answer, Alarm)

    def silence(
        self, *, job: str, key: str, severity_max: str, for_ms: Millis, **asked: Unpack[CallOptions]
    ) -> Silence:
        """Suppress notices of matching alarms for a time; alarms that still fire afterwards are sent."""
        check_line("the jobs of a silence", job, length_max=PATTERN_MAX)
        check_line("the kinds of a silence", key, length_max=PATTERN_MAX)
        if severity_max not in get_args(Severity):
            raise ConfigError(
                f"unknown severity {shown(severity_max)}",
                why=f"known severities: {', '.join(get_args(Severity))}",
                fix="name the highest severity to silence",
            )
        if not 0 < for_ms <= SILENCE_MS_MAX:
            raise ConfigError(
                "the duration of a silence is out of range",
                why=f"{for_ms / 1000:g} s was given, the maximum is {SILENCE_MS_MAX // 1000} s",
                fix="give a duration from a second to 30 days, e.g. 2h",
            )

        def write(writer: LayerWriter) -> dict[str, Any]:
            silence = Silence(
                id=secrets.token_hex(6),
                job=job,
                key=key,
                severity_max=severity_max,  # type: ignore[arg-type]
                until_ms=writer.call.now_ms + for_ms,
                by=writer.call.actor.name,
                why=writer.call.reason,
            )
            put_silence(writer.connection, silence)
            writer.record("alarm.silenced", job, _about(silence), kind="alarm")
            return dict(msgspec.to_builtins(silence))

        request = {"silence": job, "key": key, "severity": severity_max, "for_ms": for_ms}
        return msgspec.convert(self._desk.once(asked, request, write), Silence)

    def unsilence(self, silence_id: str, **asked: Unpack[CallOptions]) -> Silence:
        """End a silence; alarms that still fire are sent in the next round."""

        def write(writer: LayerWriter) -> dict[str, Any]:
            silence = drop_silence(writer.connection, silence_id, writer.call.now_ms)
            writer.record("alarm.unsilenced", silence.job, _about(silence), kind="alarm")
            return dict(msgspec.to_builtins(silence))

        return msgspec.convert(self._desk.once(asked, {"unsilence": silence_id}, write), Silence)

    def test(self, **asked: Unpack[CallOptions]) -> dict[str, str]:
        """Send a test notice through each route now; returns each route's error, "" if it was delivered."""
        call = Call(**asked)
        call.check()
        alarm = Alarm(
            job=FLEET,
            source="test",
            key="test",
            severity="info",
            text=f"test of the alarm routes by {call.actor.name}: {call.reason}",
            what_to_do="nothing",
            first_ms=call.now_ms,
            last_ms=call.now_ms,
        )
        # A negative id belongs to no stored notice; a random one, so that no receiver takes it for a
        # duplicate.
        notice, number = Notice(kind="test", alarm=alarm, at_ms=call.now_ms), -secrets.randbelow(2**53)
        errors = {route.name: _test_route(route, notice, number) for route in self._routes}

        def write(writer: LayerWriter) -> dict[str, str]:
            writer.record("alarm.tested", FLEET, {"answers": errors}, kind="alarm")
            return errors

        return self._desk.once(asked, {"test": list(errors)}, write)


def _test_route(route: Route, notice: Notice, number: int) -> str:
    try:
        route.send(notice, number)
    except PenstockError as error:
        return error_text(error)
    return ""


def _about(silence: Silence) -> dict[str, Any]:
    return {
        "id": silence.id,
        "kinds": silence.key,
        "severity_max": silence.severity_max,
        "until_ms": silence.until_ms,
    }


def _by_weight(alarm: Alarm) -> tuple[bool, int, int, str]:
    return (not alarm.is_firing, -get_args(Severity).index(alarm.severity), -alarm.first_ms, alarm.name)


CHECK_MS: Millis = 5_000
SWEEP_MS: Millis = 15_000
# An unchanged report is written again this often, so that its alarm does not resolve
REPEAT_MS: Millis = 60_000

# What a source reports for all jobs now.
AlarmSource = Callable[[Millis], Levels]
# Which of these jobs are paused, stopped or removed: job -> one of the three states.
AtRest = Callable[[Sequence[str]], Mapping[str, str]]
ReportedAlerts = Mapping[str, tuple[RaiseAlert, ...]]  # of one job, by source


class AlarmWatch:
    """Runs the alarm rounds. Only the active instance may run them: reports of two would undo each other."""

    def __init__(
        self,
        store: AlarmStore,
        sender: AlarmSender,
        sources: Mapping[str, AlarmSource],
        at_rest: AtRest,
        lasting: Collection[str] = (),
    ) -> None:
        """`lasting`: the sources that also report on stopped jobs."""
        self._store, self._sender, self._sources = store, sender, sources
        self._at_rest, self._lasting = at_rest, frozenset(lasting)
        self._checked_ms: Millis | None = None
        self._swept_ms: Millis | None = None
        self._reported: dict[str, tuple[ReportedAlerts, Millis]] = {}  # by job: the last report, and when

    def tick(self, now_ms: Millis) -> bool:
        """One round; returns whether a notice is being sent, so that the next round should come soon."""
        # First send pending notices: a failing check must not delay them.
        is_sending = self._sender.tick(now_ms)
        if _is_time(self._checked_ms, now_ms, CHECK_MS):
            self._checked_ms = now_ms
            self._check(now_ms)
        if _is_time(self._swept_ms, now_ms, SWEEP_MS):
            self._swept_ms = now_ms
            self._store.sweep(now_ms)
        return is_sending

    def _check(self, now_ms: Millis) -> None:
        current = {source: report(now_ms) for source, report in self._sources.items()}
        firing = [alarm for alarm in self._store.alarms() if alarm.is_firing]
        jobs = {alarm.job for alarm in firing}.union(*(levels.keys() for levels in current.values()))
        at_rest = self._at_rest(sorted(jobs - {FLEET}))
        for job in sorted(jobs):
            state = at_rest.get(job)
            reported = {
                source: levels.get(job, ()) if self._may_report(source, state) else ()
                for source, levels in current.items()
            }
            last, at_ms = self._reported.get(job, (None, 0))
            if state is not None and any(
                alarm.job == job and not _is_reported(alarm, reported) for alarm in firing
            ):
                self._store.rest(job, reported, now_ms)
            elif reported != last or not 0 <= now_ms - at_ms < REPEAT_MS:
                self._store.report(job, reported, now_ms)
            else:
                continue
            self._reported[job] = reported, now_ms
        self._reported = {job: last for job, last in self._reported.items() if job in jobs}

    def _may_report(self, source: str, state: str | None) -> bool:
        """Whether a source may report on a job: `state` is paused, stopped or removed, None if it runs."""
        return state is None or (state != "removed" and source in self._lasting)


def _is_reported(alarm: Alarm, reported: ReportedAlerts) -> bool:
    return any(alert.key == alarm.key for alert in reported.get(alarm.source, ()))


def _is_time(last_ms: Millis | None, now_ms: Millis, every_ms: Millis) -> bool:
    """Whether the interval has passed, or the clock was set back."""
    return last_ms is None or not 0 <= now_ms - last_ms < every_ms
