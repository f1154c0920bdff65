"""Every write of the State Syncer: one short transaction each, refused unless its leader's term stands.

A plan's way is written here line by line (open, move, hold, commit, give up); each write compares and sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.errors import VersionConflict
from penstock.core.journal import Entry
from penstock.core.journal_store import JournalStore
from penstock.core.sql_store import Database, check_term, next_value
from penstock.jobs.audit_store import AuditRow, append_audit
from penstock.jobs.job_store import JobRecord
from penstock.jobs.running_store import (
    PLANS,
    QUARANTINE,
    RETIREMENTS,
    RUNNING,
    TASKS_COUNTER,
    PlanRow,
    Retirement,
    RunningRow,
    plan_row,
    running_row,
)
from penstock.jobs.sync_plan import ComplexSync, PlanStep, steps_of

ROLE = "syncer"
ACTOR = "state_syncer"
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleCommit:
    """One simple change, decided on `running_version` of the row. `config` None: only note the version."""

    job: str
    running_version: int
    expected_version: int
    config: Json | None
    restarts: bool
    reason: str
    paths: tuple[str, ...] = field(default=())


class PlanStore:
    """Writes running rows, plans, quarantine and retirements for the syncer that holds `term`."""

    def __init__(self, database: Database, *, term: int) -> None:
        self._database, self._term, self._journal = database, term, JournalStore(database)

    def check_leader(self) -> None:
        """Raise Fenced unless this syncer is still the active one."""
        with self._leading():
            pass

    def commit_simple(self, batch: Sequence[SimpleCommit], now_ms: Millis) -> tuple[str, ...]:
        """Commit one batch; returns the jobs done. A job whose row moved is left to the next round."""
        done = []
        with self._leading() as connection:
            for item in batch:
                if _plan(connection, item.job) is None and self._commit_one(connection, item, now_ms):
                    done.append(item.job)
        return tuple(done)

    def _commit_one(self, connection: sa.Connection, item: SimpleCommit, now_ms: Millis) -> bool:
        row = _running(connection, item.job)
        if row is None or row.version != item.running_version or row.is_held:
            return False
        row = replace(row, expected_version=item.expected_version, updated_ms=now_ms)
        if item.config is not None:
            version = next_value(connection, TASKS_COUNTER)
            restart_version = version if item.restarts else row.restart_version
            row = replace(row, config=item.config, version=version, restart_version=restart_version)
        _put_running(connection, row)
        action = "sync.noted" if item.config is None else "sync.simple"
        data = {"expected_version": item.expected_version, "paths": list(item.paths)}
        self._record(connection, action, item.job, item.reason, now_ms, data, journal=item.config is not None)
        return True

    def open_plan(self, record: JobRecord, sync: ComplexSync, now_ms: Millis) -> PlanRow:
        """Make the decision durable: a plan with a generation of its own, on the running row as read."""
        old = record.old
        with self._leading() as connection:
            if _plan(connection, record.job.name) is not None:
                raise VersionConflict(f"the plan of job {record.job.name!r}", expected=0, actual=1)
            self._check_running(connection, record)
            plan = self._new_plan(connection, record, sync, now_ms, held_ms=None)
            _put_plan(connection, plan)
            data = {"plan": plan.id, "generation": plan.generation, "had_old": old is not None}
            self._record(connection, "plan.opened", plan.job, sync.reason, now_ms, data)
        return plan

    def replace_plan(self, record: JobRecord, sync: ComplexSync, why: str, now_ms: Millis) -> PlanRow:
        """Put a newer target in an open plan's place. The hold stays; what was prepared will be retired."""
        assert record.plan is not None
        with self._leading() as connection:
            self._check_plan(connection, record.plan)
            self._check_running(connection, record)
            plan = self._new_plan(connection, record, sync, now_ms, held_ms=record.plan.held_ms)
            plan = replace(plan, abandoned=_maybe_prepared(record.plan))
            _put_plan(connection, plan)
            data = {"plan": plan.id, "generation": plan.generation, "replaces": record.plan.id}
            self._record(connection, "plan.replaced", plan.job, why, now_ms, data)
        return plan

    def drop_plan(self, plan: PlanRow, why: str, now_ms: Millis) -> None:
        """Forget a plan whose hold was never taken: the old tasks never noticed it."""
        with self._leading() as connection:
            self._check_plan(connection, plan)
            _retire(connection, plan, _maybe_prepared(plan))
            connection.execute(sa.delete(PLANS).where(PLANS.c.job == plan.job))
            self._record(connection, "plan.dropped", plan.job, why, now_ms, {"plan": plan.id})

    def move_plan(self, plan: PlanRow, step: PlanStep, now_ms: Millis, *, note: str) -> PlanRow:
        """Say that the plan's step is done and `step` is next."""
        with self._leading() as connection:
            self._check_plan(connection, plan)
            moved = replace(plan, step=step, attempts=0, error="", updated_ms=now_ms)
            _put_plan(connection, moved)
            data = {"plan": plan.id, "done": str(plan.step), "next": str(step)}
            self._record(connection, "plan.moved", plan.job, note, now_ms, data, journal=False)
        return moved

    def take_hold(self, plan: PlanRow, now_ms: Millis) -> PlanRow:
        """No tasks of the running generation from now on: a level that the next task list carries."""
        with self._leading() as connection:
            self._check_plan(connection, plan)
            row = _running(connection, plan.job)
            assert row is not None, "a plan without old tasks has no hold"
            held_ms = plan.held_ms if row.is_held and plan.held_ms is not None else now_ms
            if not row.is_held:
                version = next_value(connection, TASKS_COUNTER)
                row = replace(row, hold_generation=row.generation, version=version, updated_ms=now_ms)
                _put_running(connection, row)
            held = replace(
                plan, step=PlanStep.CONFIRM, running_version=row.version, held_ms=held_ms, updated_ms=now_ms
            )
            _put_plan(connection, held)
            data = {"plan": plan.id, "hold_generation": row.hold_generation, "list_version": row.version}
            self._record(connection, "plan.held", plan.job, plan.reason, now_ms, data, journal=False)
        return held

    def commit_plan(self, plan: PlanRow, now_ms: Millis) -> None:
        """Running = target under the plan's generation, hold lifted, plan gone: all at once."""
        with self._leading() as connection:
            self._check_plan(connection, plan)
            old = _running(connection, plan.job)
            self._check_version(plan.job, plan.running_version, old)
            version = next_value(connection, TASKS_COUNTER)
            same_life = old is not None and old.birth == plan.birth and old.state != "removed"
            config = plan.target if plan.target is not None else (old.config if old is not None else {})
            state = "removed" if plan.target is None else str(plan.target["state"])
            _put_running(
                connection,
                RunningRow(
                    job=plan.job,
                    birth=plan.birth,
                    version=version,
                    restart_version=version,
                    expected_version=plan.expected_version,
                    config=config,
                    generation=plan.generation,
                    mapping=plan.mapping,
                    hold_generation=0,
                    state=state,
                    updated_ms=now_ms,
                ),
            )
            gone = ([old.config] if old is not None and same_life else []) + list(plan.abandoned)
            _retire(connection, plan, gone)
            connection.execute(sa.delete(PLANS).where(PLANS.c.job == plan.job))
            data = {"plan": plan.id, "generation": plan.generation, "version": version, "state": state}
            self._record(connection, "plan.committed", plan.job, plan.reason, now_ms, data)

    def note_failure(self, plan: PlanRow, error: str, now_ms: Millis, *, counts: bool) -> None:
        """Keep what went wrong, and count it if it is the plan's own fault."""
        if not counts and error == plan.error:
            return  # a store that is away for an hour is not news every round
        failed = replace(plan, attempts=plan.attempts + counts, error=error, updated_ms=now_ms)
        with self._leading() as connection:
            self._check_plan(connection, plan)
            _put_plan(connection, failed)
            data = {"plan": plan.id, "step": str(plan.step), "attempts": failed.attempts}
            self._record(connection, "plan.failed", plan.job, error, now_ms, data)

    def give_up(self, plan: PlanRow, error: str, now_ms: Millis) -> None:
        """Quarantine the job. If its tasks were held, the old config runs on under a further generation."""
        with self._leading() as connection:
            self._check_plan(connection, plan)
            row = _running(connection, plan.job)
            generation = 0
            if row is not None and row.birth == plan.birth and row.is_held:
                version = next_value(connection, TASKS_COUNTER)
                generation = next_value(connection, generation_counter(plan.job))
                row = replace(
                    row, version=version, restart_version=version, generation=generation, hold_generation=0
                )
                _put_running(connection, replace(row, updated_ms=now_ms))
            _retire(connection, plan, _maybe_prepared(plan))
            connection.execute(sa.delete(PLANS).where(PLANS.c.job == plan.job))
            connection.execute(sa.delete(QUARANTINE).where(QUARANTINE.c.job == plan.job))
            connection.execute(
                sa.insert(QUARANTINE).values(
                    job=plan.job, expected_version=plan.expected_version, reason=error, since_ms=now_ms
                )
            )
            data = {
                "plan": plan.id,
                "step": str(plan.step),
                "recommitted_generation": generation,
                "alert": True,
            }
            self._record(connection, "job.quarantined", plan.job, error, now_ms, data)

    def lift_quarantine(self, job: str, why: str, now_ms: Millis) -> None:
        """Let a job be planned again."""
        with self._leading() as connection:
            connection.execute(sa.delete(QUARANTINE).where(QUARANTINE.c.job == job))
            self._record(connection, "job.released", job, why, now_ms, {})

    def finish_retirement(self, retirement: Retirement, now_ms: Millis) -> None:
        """The producers of that config are gone."""
        with self._leading() as connection:
            connection.execute(sa.delete(RETIREMENTS).where(RETIREMENTS.c.id == retirement.id))
            data = {"retirement": retirement.id}
            self._record(
                connection, "plan.retired", retirement.job, "not in use any more", now_ms, data, journal=False
            )

    @contextmanager
    def _leading(self) -> Iterator[sa.Connection]:
        with self._database.transaction() as connection:
            check_term(connection, ROLE, self._term)
            yield connection

    def _new_plan(
        self,
        connection: sa.Connection,
        record: JobRecord,
        sync: ComplexSync,
        now_ms: Millis,
        *,
        held_ms: int | None,
    ) -> PlanRow:
        return PlanRow(
            job=record.job.name,
            id=next_value(connection, "plans"),
            birth=record.job.birth,
            generation=next_value(connection, generation_counter(record.job.name)),
            target=sync.target,
            mapping=sync.mapping,
            expected_version=record.job.expected_version,
            running_version=0 if record.running is None else record.running.version,
            step=steps_of(sync.target, has_old=record.old is not None)[0],
            attempts=0,
            error="",
            reason=sync.reason,
            abandoned=(),
            held_ms=held_ms,
            started_ms=now_ms,
            updated_ms=now_ms,
        )

    def _check_plan(self, connection: sa.Connection, plan: PlanRow) -> None:
        found = _plan(connection, plan.job)
        if found is None or (found.id, found.step) != (plan.id, plan.step):
            actual = 0 if found is None else found.id
            raise VersionConflict(f"the plan of job {plan.job!r}", expected=plan.id, actual=actual)

    def _check_running(self, connection: sa.Connection, record: JobRecord) -> None:
        version = 0 if record.running is None else record.running.version
        self._check_version(record.job.name, version, _running(connection, record.job.name))

    def _check_version(self, job: str, version: int, row: RunningRow | None) -> None:
        actual = 0 if row is None else row.version
        if actual != version:
            raise VersionConflict(f"the running config of job {job!r}", expected=version, actual=actual)

    def _record(
        self,
        connection: sa.Connection,
        action: str,
        job: str,
        reason: str,
        now_ms: Millis,
        data: dict[str, Any],
        *,
        journal: bool = True,
    ) -> None:
        row = AuditRow(
            at_ms=now_ms, actor=ACTOR, role=ROLE, action=action, subject=job, reason=reason, data=data
        )
        append_audit(connection, row)
        if journal:
            entry = Entry(
                at_ms=now_ms, actor=ACTOR, kind="sync", subject=job, decision=action, reason=reason, data=data
            )
            self._journal.append(connection, entry)


def generation_counter(job: str) -> str:
    """The counter of a job's generations: shared by all lives of the name, so no number comes twice."""
    return f"generation/{job}"


def _maybe_prepared(plan: PlanRow) -> tuple[Json, ...]:
    # A step may have been cut off half-way, so any target that had a prepare step counts.
    mine = (plan.target,) if plan.target is not None and plan.target["state"] == "running" else ()
    return (*plan.abandoned, *mine)


def _retire(connection: sa.Connection, plan: PlanRow, configs: Sequence[Json]) -> None:
    for config in configs:
        number = next_value(connection, "retirements")
        values = {"id": number, "job": plan.job, "birth": plan.birth, "config": dict(config)}
        connection.execute(sa.insert(RETIREMENTS).values(**values))


def _plan(connection: sa.Connection, job: str) -> PlanRow | None:
    row = connection.execute(sa.select(PLANS).where(PLANS.c.job == job)).first()
    return None if row is None else plan_row(row)


def _running(connection: sa.Connection, job: str) -> RunningRow | None:
    row = connection.execute(sa.select(RUNNING).where(RUNNING.c.job == job)).first()
    return None if row is None else running_row(row)


def _put_running(connection: sa.Connection, row: RunningRow) -> None:
    connection.execute(sa.delete(RUNNING).where(RUNNING.c.job == row.job))
    connection.execute(sa.insert(RUNNING).values(**(asdict(row) | {"mapping": list(row.mapping)})))


def _put_plan(connection: sa.Connection, plan: PlanRow) -> None:
    values = asdict(plan) | {
        "mapping": list(plan.mapping),
        "abandoned": list(plan.abandoned),
        "step": str(plan.step),
    }
    connection.execute(sa.delete(PLANS).where(PLANS.c.job == plan.job))
    connection.execute(sa.insert(PLANS).values(**values))
