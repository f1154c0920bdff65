"""Looks at what may be wrong: jobs, tasks, shards, loops, and what the journal says of the fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
from penstock.core.clock import Millis
from penstock.core.pace import Rest, no_rest
from penstock.db.journal_store import JournalStore
from penstock.fleet.fleet_view import FleetView
from penstock.jobs.job_reads import JobReads
from penstock.jobs.job_view import JobView
from penstock.scaling.policies.balance import starved_tasks

EVERY_JOB_MS: Millis = (
    60_000  # how often all jobs are looked at; those that are told apart by the store, always
)
EVENT_KINDS = frozenset({"alert", "failover"})
FIRST_LOOK_MAX = 1000


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
            page = self._jobs.views(state=state, after=after, limit=FIRST_LOOK_MAX)
            yield from page.items
            after = page.next

    def _read_journal(self, now_ms: Millis) -> None:
        """Each entry is read once; the first look takes the newest ones, as far as an answer goes."""
        entries = (
            self._journal.entries(limit=FIRST_LOOK_MAX)
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
