"""The writes of a plan after it is opened: replace, hold, commit, give up. Each is a compare-and-set.

`batches.py` opens plans, many in one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sqlalchemy as sa

from penstock.core import text as json_text
from penstock.core.clock import Millis
from penstock.core.errors import VersionConflict
from penstock.db.database import next_value, next_values, upsert
from penstock.jobs.config import JobConfig
from penstock.jobs.job_store import JOBS, JobRecord
from penstock.jobs.running_store import (
    PLANS,
    QUARANTINE,
    RETIREMENTS,
    RUNNING,
    TASKS_COUNTER,
    PlanRow,
    Retirement,
    RunningRow,
    read_running,
)
from penstock.jobs.syncer.batches import LeaderStore, generation_counter, new_plans, version_of
from penstock.jobs.syncer.sync_plan import ComplexSync, PlanStep, is_active

_OF_JOB = sa.bindparam("of_job", type_=PLANS.c.job.type)
_PLAN = sa.select(PLANS.c.id, PLANS.c.step).where(PLANS.c.job == _OF_JOB)
_DELETE_PLAN = sa.delete(PLANS).where(PLANS.c.job == _OF_JOB)
_INSERT_RETIREMENT = sa.insert(RETIREMENTS)
_EXPECTED = sa.select(JOBS.c.birth, JOBS.c.expected_version, JOBS.c.deleted).where(JOBS.c.name == _OF_JOB)


class PlanStore:
    """Writes running rows, plans, quarantine and retirements of single jobs. Thread-safe."""

    def __init__(self, leader: LeaderStore) -> None:
        self._leader = leader

    def replace_plan(self, record: JobRecord, sync: ComplexSync, why: str, now_ms: Millis) -> None:
        """Replace an open plan by one with a newer target. The hold stays; prepared targets are retired."""
        old = record.plan
        assert old is not None
        with self._leader.writing("replace") as connection:
            self._check_plan(connection, old)
            self._check_version(old.job, version_of(record), _running(connection, old.job))
            plan = new_plans(connection, [(record, sync)], now_ms)[0]
            plan = replace(plan, held_ms=old.held_ms, abandoned=_maybe_prepared(old))
            _put_plan(connection, plan)
            data = {"plan": plan.id, "generation": plan.generation, "replaces": old.id}
            self._leader.record(connection, "plan.replaced", plan.job, why, now_ms, data)

    def drop_plan(self, plan: PlanRow, why: str, now_ms: Millis) -> None:
        """Delete a plan that has no hold yet, so that the old tasks run on."""
        with self._leader.writing("drop") as connection:
            self._check_plan(connection, plan)
            _retire(connection, plan, _maybe_prepared(plan))
            connection.execute(_DELETE_PLAN, {"of_job": plan.job})
            self._leader.record(connection, "plan.dropped", plan.job, why, now_ms, {"plan": plan.id})

    def take_hold(self, record: JobRecord, now_ms: Millis) -> JobRecord | None:
        """Hold the running generation: the next task list has no tasks of it. The next step is CONFIRM.

        Returns the new record, or None if the expected config changed meanwhile.
        """
        plan = record.plan
        assert plan is not None
        with self._leader.writing("hold") as connection:
            self._check_plan(connection, plan)
            row = _running(connection, plan.job)
            assert row is not None, "a plan without old tasks has no hold"
            held_ms = plan.held_ms if row.is_held and plan.held_ms is not None else now_ms
            if not row.is_held:
                version = next_value(connection, TASKS_COUNTER)
                row = replace(row, hold_generation=row.generation, version=version, updated_ms=now_ms)
                _put_running(connection, row)
            held = replace(
                plan,
                step=PlanStep.CONFIRM,
                attempts=0,
                error="",
                running_version=row.version,
                held_ms=held_ms,
                updated_ms=now_ms,
            )
            _put_plan(connection, held)
            data = {"plan": plan.id, "hold_generation": row.hold_generation, "list_version": row.version}
            self._leader.record(connection, "plan.held", plan.job, plan.reason, now_ms, data, kind=None)
            return _if_expected(connection, replace(record, plan=held, running=row))

    def commit_plan(self, record: JobRecord, now_ms: Millis, *, proof: str) -> JobRecord | None:
        """In one transaction: the target becomes the running config, the hold ends, the plan is deleted.

        `proof`: why no task of the old generation can write any more. Returns the new record, or None if the
        expected config changed meanwhile.
        """
        plan = record.plan
        assert plan is not None
        with self._leader.writing("commit") as connection:
            self._check_plan(connection, plan)
            old = _running(connection, plan.job)
            self._check_version(plan.job, plan.running_version, old)
            row = _target_row(plan, old, next_value(connection, TASKS_COUNTER), now_ms)
            _put_running(connection, row)
            same_life = old is not None and old.birth == plan.birth and old.state != "removed"
            gone = ([old.config] if old is not None and same_life else []) + list(plan.abandoned)
            retirements = _retire(connection, plan, gone)
            connection.execute(_DELETE_PLAN, {"of_job": plan.job})
            data = {
                "plan": plan.id,
                "generation": plan.generation,
                "version": row.version,
                "state": row.state,
                "proof": proof,
            }
            self._leader.record(connection, "plan.committed", plan.job, plan.reason, now_ms, data)
            retirements = (*record.retirements, *retirements)
            return _if_expected(connection, replace(record, plan=None, running=row, retirements=retirements))

    def finish_retirements(self, done: Sequence[Retirement], now_ms: Millis) -> None:
        """Delete these retirements: their producers are unregistered."""
        with self._leader.writing("retired") as connection:
            numbers = [item.id for item in done]
            connection.execute(sa.delete(RETIREMENTS).where(RETIREMENTS.c.id.in_(numbers)))
            for item in done:
                data = {"retirement": item.id}
                self._leader.record(
                    connection, "plan.retired", item.job, "not in use any more", now_ms, data, kind=None
                )

    def note_failure(self, plan: PlanRow, error: str, now_ms: Millis, *, counts: bool) -> None:
        """Store a failed attempt; `counts`: it counts towards `attempts_max`."""
        if not counts and error == plan.error:
            return  # the same transient error is recorded once, not every round
        failed = replace(plan, attempts=plan.attempts + counts, error=error, updated_ms=now_ms)
        with self._leader.writing("failed") as connection:
            self._check_plan(connection, plan)
            _put_plan(connection, failed)
            data = {"plan": plan.id, "step": str(plan.step), "attempts": failed.attempts}
            self._leader.record(connection, "plan.failed", plan.job, error, now_ms, data)

    def give_up(self, plan: PlanRow, error: str, now_ms: Millis) -> None:
        """Quarantine the job, with an alert. A held old config runs again under a new generation."""
        with self._leader.writing("give_up") as connection:
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
            connection.execute(_DELETE_PLAN, {"of_job": plan.job})
            values = {"expected_version": plan.expected_version, "reason": error, "since_ms": now_ms}
            upsert(connection, QUARANTINE, [{"job": plan.job, **values}], replace=list(values))
            data = {"plan": plan.id, "step": str(plan.step), "recommitted_generation": generation}
            self._leader.record(connection, "job.quarantined", plan.job, error, now_ms, data, kind="alert")

    def lift_quarantine(self, job: str, why: str, now_ms: Millis) -> None:
        """End the quarantine of a job."""
        with self._leader.writing("lift") as connection:
            connection.execute(sa.delete(QUARANTINE).where(QUARANTINE.c.job == job))
            self._leader.record(connection, "job.released", job, why, now_ms, {})

    def _check_plan(self, connection: sa.Connection, plan: PlanRow) -> None:
        found = connection.execute(_PLAN, {"of_job": plan.job}).first()
        if found is None or tuple(found) != (plan.id, str(plan.step)):
            actual = 0 if found is None else found.id
            raise VersionConflict(f"the plan of job {plan.job!r}", expected=plan.id, actual=actual)

    def _check_version(self, job: str, version: int, row: RunningRow | None) -> None:
        actual = 0 if row is None else row.version
        if actual != version:
            raise VersionConflict(f"the running config of job {job!r}", expected=version, actual=actual)


def _target_row(plan: PlanRow, old: RunningRow | None, version: int, now_ms: Millis) -> RunningRow:
    # A removed job keeps its last config, for display.
    if plan.target is None:
        assert old is not None, "only a job that ran is removed by a plan"
        config_json = old.config_json
    else:
        config_json = json_text.dumps(plan.target.to_json())
    return RunningRow(
        job=plan.job,
        birth=plan.birth,
        version=version,
        restart_version=version,
        expected_version=plan.expected_version,
        config_json=config_json,
        generation=plan.generation,
        mapping=plan.mapping,
        hold_generation=0,
        state="removed" if plan.target is None else plan.target.state,
        updated_ms=now_ms,
    )


def _maybe_prepared(plan: PlanRow) -> tuple[JobConfig, ...]:
    # A crash may have interrupted the prepare step, so any target with such a step counts.
    mine = (plan.target,) if plan.target is not None and is_active(plan.target) else ()
    return (*plan.abandoned, *mine)


def _retire(connection: sa.Connection, plan: PlanRow, configs: Sequence[JobConfig]) -> tuple[Retirement, ...]:
    if not configs:
        return ()
    numbers = next_values(connection, "retirements", len(configs))
    items = tuple(
        Retirement(id=number, job=plan.job, birth=plan.birth, config=config)
        for number, config in zip(numbers, configs, strict=True)
    )
    connection.execute(_INSERT_RETIREMENT, [item.to_json() for item in items])
    return items


def _if_expected(connection: sa.Connection, record: JobRecord) -> JobRecord | None:
    """The record; None if the expected config changed since it was read."""
    found = connection.execute(_EXPECTED, {"of_job": record.job.name}).one()
    is_same = tuple(found) == (record.job.birth, record.job.expected_version, record.job.deleted)
    return record if is_same else None


def _running(connection: sa.Connection, job: str) -> RunningRow | None:
    return read_running(connection, [job]).get(job)


def _put_running(connection: sa.Connection, row: RunningRow) -> None:
    values = row.to_json()
    upsert(connection, RUNNING, [values], replace=[name for name in values if name != "job"])


def _put_plan(connection: sa.Connection, plan: PlanRow) -> None:
    values = plan.to_json()
    upsert(connection, PLANS, [values], replace=[name for name in values if name != "job"])
