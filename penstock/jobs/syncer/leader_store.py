"""How the State Syncer writes: as the leader it is, with an audit row per change, past named failpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.journal import Entry
from penstock.db.bulk import ByName
from penstock.db.database import Database, check_term
from penstock.db.journal_store import JournalStore
from penstock.jobs.audit_store import AuditRow, append_audit, append_audits
from penstock.jobs.running_store import PLANS, RUNNING

ROLE = "syncer"
ACTOR = "state_syncer"

# Where tests crash the syncer. "before": the write is done but not committed; "after": it is committed.
WRITES = ("simple", "open", "hold", "commit", "retired", "replace", "drop", "failed", "give_up", "lift")
CALLS = ("prepare", "is_stopped", "fence", "retire")
FAILPOINTS = tuple(f"{name}.{side}" for name in (*WRITES, *CALLS) for side in ("before", "after"))

_VERSIONS = ByName(sa.select(RUNNING.c.job, RUNNING.c.version), RUNNING.c.job)
_PLANNED = ByName(sa.select(PLANS.c.job), PLANS.c.job)


def pass_failpoint(point: str) -> None:
    """What production does at each of `FAILPOINTS`: nothing."""


class LeaderStore:
    """Transactions of the syncer that holds `term`: each checks that it still does. Thread-safe.

    `reach(point)` is called at the failpoints of `WRITES`; `measure_ms` is a clock for durations.
    """

    def __init__(
        self,
        database: Database,
        *,
        term: int,
        reach: Callable[[str], None] = pass_failpoint,
        measure_ms: Callable[[], Millis] = lambda: 0,
    ) -> None:
        self.database, self.term, self._journal = database, term, JournalStore(database)
        self.reach, self.measure_ms = reach, measure_ms
        # Writers wait for each other anyway. Waiting here, they do not hold a connection each.
        self._turn = threading.Lock()

    def check(self) -> None:
        """Raise Fenced unless this syncer is still the active one."""
        with self.database.reading() as connection:
            self.check_term(connection)

    @contextmanager
    def writing(self, write: str) -> Iterator[sa.Connection]:
        """One of `WRITES`, as one transaction."""
        with self._turn, self.database.transaction() as connection:
            self.check_term(connection)
            yield connection
            self.reach(f"{write}.before")
        self.reach(f"{write}.after")

    def check_term(self, connection: sa.Connection) -> None:
        """Raise Fenced when a successor has taken over."""
        check_term(connection, ROLE, self.term)

    def unmoved(self, connection: sa.Connection, versions: Mapping[str, int]) -> set[str]:
        """Those of these jobs whose running row has this version (0: there is none), without a plan."""
        names = list(versions)
        found: dict[str, int] = {job: version for job, version in _VERSIONS.rows(connection, names)}
        same = {job for job, version in versions.items() if found.get(job, 0) == version}
        return same.difference(job for (job,) in _PLANNED.rows(connection, names))

    def record(
        self,
        connection: sa.Connection,
        action: str,
        job: str,
        reason: str,
        now_ms: Millis,
        data: Mapping[str, Any],
        *,
        kind: str | None = "sync",
    ) -> None:
        """Audit a change in its transaction, and journal it unless `kind` is None."""
        append_audit(connection, _audit(action, job, reason, now_ms, data))
        if kind is not None:
            self._journal.append(connection, _entry(action, job, reason, now_ms, data, kind))

    def record_all(
        self,
        connection: sa.Connection,
        changes: Sequence[tuple[str, str, str, str]],
        now_ms: Millis,
        *,
        silent: str = "",
    ) -> None:
        """Audit many changes, as (action, job, reason, data as JSON text), in their transaction.

        Those of other actions than `silent` are journalled too.
        """
        append_audits(connection, changes, at_ms=now_ms, actor=ACTOR, role=ROLE)
        told = [change for change in changes if change[0] != silent]
        self._journal.append_all(connection, told, at_ms=now_ms, actor=ACTOR, kind="sync")

    def alert(self, job: str, decision: str, problem: str, now_ms: Millis) -> None:
        """Journal an alert for people to act on; nothing of the job changes."""
        with self._turn, self.database.transaction() as connection:
            self.check_term(connection)
            self._journal.append(connection, _entry(decision, job, problem, now_ms, {}, "alert"))


def _audit(action: str, job: str, reason: str, now_ms: Millis, data: Mapping[str, Any]) -> AuditRow:
    return AuditRow(
        at_ms=now_ms, actor=ACTOR, role=ROLE, action=action, subject=job, reason=reason, data=data
    )


def _entry(action: str, job: str, reason: str, now_ms: Millis, data: Mapping[str, Any], kind: str) -> Entry:
    return Entry(at_ms=now_ms, actor=ACTOR, kind=kind, subject=job, decision=action, reason=reason, data=data)
