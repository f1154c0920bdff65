"""What people ask about alarms and do with them: acknowledge, silence, try the routes.

Each change is one transaction with its audit, once per key, as every other change is.
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
from penstock.jobs.layer_writer import Asked, Call, LayerWriter, WriteDesk
from penstock.jobs.text_rules import check_line, shown
from penstock.scaling.policies.balance import starved_tasks
from penstock.scaling.policies.policy import FLEET, Levels, RaiseAlert, Severity

EVERY_JOB_MS: Millis = (
    60_000  # how often all jobs are looked at; those that are told apart by the store, always
)
EVENT_KINDS = frozenset({"alert", "failover"})
FIRST_READ_MAX = 1000


class AlarmFacts:
    """What one control plane sees. It remembers how far it has read the journal."""

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
        """`rest` is called now and then in a look at all jobs, for whoever waits meanwhile."""
        self._rest = rest
        self._jobs, self._fleet, self._journal, self._loops = jobs, fleet, journal, loops
        self._behind, self._categories = behind, categories
        self._read_to: int | None = None  # the journal's newest entry that was read
        self._events: tuple[FleetEvent, ...] = ()
        self._invalid: tuple[JobTrouble, ...] = ()
        self._every_job_ms: Millis | None = None

    def observe(self, now_ms: Millis) -> Observed:
        """Everything that is wrong now."""
        self._read_journal(now_ms)
        if self._every_job_ms is None or not 0 <= now_ms - self._every_job_ms < EVERY_JOB_MS:
            # The store cannot tell which merges are not valid, and few ever are.
            self._invalid = tuple(
                _trouble(view) for view in self._jobs.every_view(self._rest) if view.state == "invalid"
            )
            self._every_job_ms = now_ms
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
        """Each entry is read once; the first look takes the newest ones, as far as an answer goes."""
        entries = (
            self._journal.entries(limit=FIRST_READ_MAX)
            if self._read_to is None
            else self._journal.after(self._read_to)
        )
        self._read_to = entries[-1].id if entries else self._read_to or 0
        news = (
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
            event for event in (*self._events, *news) if abs(now_ms - event.at_ms) < EVENT_MS
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
    """The alarms of one control plane, and the routes by which it tells of them."""

    def __init__(self, jobs: JobStore, store: AlarmStore, routes: Sequence[Route]) -> None:
        self._desk, self.store, self._routes = WriteDesk(jobs), store, tuple(routes)

    @property
    def route_names(self) -> tuple[str, ...]:
        """As settings call them, the log first."""
        return tuple(route.name for route in self._routes)

    def alarms(self, *, job: str | None = None, everything: bool = False) -> tuple[Alarm, ...]:
        """Those that fire, the worst and then the newest first; `everything`: also those that are over."""
        found = [alarm for alarm in self.store.alarms(job) if alarm.is_firing or everything]
        return tuple(sorted(found, key=_by_weight))

    def acknowledge(self, alarm_id: str, **asked: Unpack[Asked]) -> Alarm:
        """Somebody looks after it: no more reminders until it is over or gets worse."""

        def write(writer: LayerWriter) -> dict[str, Any]:
            alarm = find_alarm(writer.connection, alarm_id)
            if not alarm.is_firing:
                raise Refused(
                    f"the alarm {alarm_id} is over",
                    why=f"{alarm.name} does not fire any more",
                    fix="there is nothing to acknowledge",
                )
            seen = acknowledge(alarm, by=writer.call.actor.name, now_ms=writer.call.now_ms)
            put_alarm(writer.connection, seen)
            data = {"id": seen.id, "alarm": seen.name, "severity": seen.severity}
            writer.record("alarm.acknowledged", seen.job, data, kind="alarm")
            return dict(msgspec.to_builtins(seen))

        answer = self._desk.once(asked, {"acknowledge": alarm_id}, write)
        return msgspec.convert(answer, Alarm)

    def silence(
        self, *, job: str, key: str, severity_max: str, for_ms: Millis, **asked: Unpack[Asked]
    ) -> Silence:
        """Nobody is told of such alarms for so long; what still fires then is told."""
        check_line("the jobs of a silence", job, length_max=PATTERN_MAX)
        check_line("the kinds of a silence", key, length_max=PATTERN_MAX)
        if severity_max not in get_args(Severity):
            raise ConfigError(
                f"there is no severity {shown(severity_max)}",
                why=f"there are {', '.join(get_args(Severity))}",
                fix="name the worst that is to be silent",
            )
        if not 0 < for_ms <= SILENCE_MS_MAX:
            raise ConfigError(
                "a silence cannot last so long",
                why=f"it would be {for_ms / 1000:g} s, where up to {SILENCE_MS_MAX // 1000} s are allowed",
                fix="name a time from a second to 30 days, e.g. 2h",
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

    def unsilence(self, silence_id: str, **asked: Unpack[Asked]) -> Silence:
        """End a silence; what fires is told at the next look."""

        def write(writer: LayerWriter) -> dict[str, Any]:
            silence = drop_silence(writer.connection, silence_id, writer.call.now_ms)
            writer.record("alarm.unsilenced", silence.job, _about(silence), kind="alarm")
            return dict(msgspec.to_builtins(silence))

        return msgspec.convert(self._desk.once(asked, {"unsilence": silence_id}, write), Silence)

    def test(self, **asked: Unpack[Asked]) -> dict[str, str]:
        """Send a notice through each route, now; what each said, "" if it took it."""
        call = Call(**asked)
        call.check()
        alarm = Alarm(
            job=FLEET,
            source="test",
            key="test",
            severity="info",
            text=f"a test of the routes by {call.actor.name}: {call.reason}",
            what_to_do="nothing",
            first_ms=call.now_ms,
            last_ms=call.now_ms,
        )
        # Its id is of no notice that is kept; it is new each time, so that no receiver takes it for a repeat.
        notice, number = Notice(kind="test", alarm=alarm, at_ms=call.now_ms), -secrets.randbelow(2**53)
        answers = {route.name: _answer_of(route, notice, number) for route in self._routes}

        def write(writer: LayerWriter) -> dict[str, str]:
            writer.record("alarm.tested", FLEET, {"answers": answers}, kind="alarm")
            return answers

        return self._desk.once(asked, {"test": list(answers)}, write)


def _answer_of(route: Route, notice: Notice, number: int) -> str:
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
REPEAT_MS: Millis = 60_000  # a level that stays is written again so often: an alarm ends five minutes after

# What a source sees of all jobs now.
AlarmSource = Callable[[Millis], Levels]
# Which of these jobs are paused, stopped or removed, and which of the three.
AtRest = Callable[[Sequence[str]], Mapping[str, str]]
ReportedAlerts = Mapping[str, tuple[RaiseAlert, ...]]  # of one job, by source


class AlarmWatch:
    """One round at a time. Only the active instance may run it: levels of two would undo each other."""

    def __init__(
        self,
        store: AlarmStore,
        sender: AlarmSender,
        sources: Mapping[str, AlarmSource],
        at_rest: AtRest,
        lasting: Collection[str] = (),
    ) -> None:
        """`lasting`: the sources that also speak of jobs which are stopped."""
        self._store, self._sender, self._sources = store, sender, sources
        self._at_rest, self._lasting = at_rest, frozenset(lasting)
        self._looked_ms: Millis | None = None
        self._swept_ms: Millis | None = None
        self._told: dict[str, tuple[ReportedAlerts, Millis]] = {}  # by job: what was reported last, and when

    def tick(self, now_ms: Millis) -> bool:
        """Whether to come again soon, because something is being sent."""
        # First what is owed: a look that fails must not keep anybody from being told.
        is_sending = self._sender.tick(now_ms)
        if _is_time(self._looked_ms, now_ms, CHECK_MS):
            self._looked_ms = now_ms
            self._look(now_ms)
        if _is_time(self._swept_ms, now_ms, SWEEP_MS):
            self._swept_ms = now_ms
            self._store.sweep(now_ms)
        return is_sending

    def _look(self, now_ms: Millis) -> None:
        seen = {source: look(now_ms) for source, look in self._sources.items()}
        firing = [alarm for alarm in self._store.alarms() if alarm.is_firing]
        jobs = {alarm.job for alarm in firing}.union(*(levels.keys() for levels in seen.values()))
        at_rest = self._at_rest(sorted(jobs - {FLEET}))
        for job in sorted(jobs):
            state = at_rest.get(job)
            told = {
                source: levels.get(job, ()) if self._may_speak(source, state) else ()
                for source, levels in seen.items()
            }
            last, at_ms = self._told.get(job, (None, 0))
            if state is not None and any(alarm.job == job and not _is_told(alarm, told) for alarm in firing):
                self._store.rest(job, told, now_ms)
            elif told != last or not 0 <= now_ms - at_ms < REPEAT_MS:
                self._store.report(job, told, now_ms)
            else:
                continue
            self._told[job] = told, now_ms
        self._told = {job: reported for job, reported in self._told.items() if job in jobs}

    def _may_speak(self, source: str, state: str | None) -> bool:
        """Whether a source is asked about a job: `state` is how it rests, None if it does not."""
        return state is None or (state != "removed" and source in self._lasting)


def _is_told(alarm: Alarm, told: ReportedAlerts) -> bool:
    return any(alert.key == alarm.key for alert in told.get(alarm.source, ()))


def _is_time(last_ms: Millis | None, now_ms: Millis, every_ms: Millis) -> bool:
    """A clock that was set back does not keep anything waiting."""
    return last_ms is None or not 0 <= now_ms - last_ms < every_ms
