"""Batches of the State Syncer: simple changes of thousands of jobs, and plans opened for hundreds, at once.

A batch compares each job with what was decided on; those that have moved are left to the next round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from penstock.core import text as json_text
from penstock.core.clock import Millis
from penstock.db.bulk import ByName, insert_rows, update_rows, update_rows_if
from penstock.db.database import COUNTERS, Database, next_values, upsert
from penstock.jobs.job_store import JOBS, JobRecord
from penstock.jobs.layer_store import LAYERS
from penstock.jobs.running_store import PLANS, QUARANTINE, RETIREMENTS, RUNNING, TASKS_COUNTER, PlanRow
from penstock.jobs.syncer.leader_store import LeaderStore
from penstock.jobs.syncer.quick_look import Quick
from penstock.jobs.syncer.sync_plan import ComplexSync, InSync, SimpleSync, explain, steps_of

_BODY = sa.cast(LAYERS.c.body, sa.Text)
_RUNS = sa.and_(
    RUNNING.c.birth == JOBS.c.birth,
    RUNNING.c.state != "removed",
    RUNNING.c.hold_generation < RUNNING.c.generation,
    ~JOBS.c.deleted,
)
_GLANCES = ByName(
    sa.select(
        JOBS.c.name,
        JOBS.c.expected_version,
        RUNNING.c.version,
        RUNNING.c.restart_version,
        RUNNING.c.expected_version.label("synced_version"),
        sa.cast(RUNNING.c.config, sa.Text).label("config"),
        LAYERS.c.precedence,
        _BODY,
    )
    .select_from(
        JOBS.join(RUNNING, RUNNING.c.job == JOBS.c.name).outerjoin(
            LAYERS, sa.and_(LAYERS.c.job == JOBS.c.name, _BODY != "{}")
        )
    )
    .where(_RUNS),
    JOBS.c.name,
)

_OCCUPIED = sa.union_all(*(sa.select(table.c.job) for table in (PLANS, QUARANTINE, RETIREMENTS)))


Bodies = list[tuple[int, str]]  # of a job's layers: precedence, JSON text


class Glance(NamedTuple):
    """A job that exists and has a running row without a hold, its JSON as it is stored."""

    job: str
    expected_version: int
    version: int
    restart_version: int
    synced_version: int  # the expected version that the row was last in sync with
    config: str


class SyncStore:
    """Reads for the rounds of the State Syncer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def occupied(self) -> frozenset[str]:
        """The jobs with a plan, in quarantine, or with something to retire."""
        with self._database.reading() as connection:
            return frozenset(name for (name,) in connection.execute(_OCCUPIED))

    def glance(self, names: Sequence[str]) -> list[tuple[Glance, Bodies]]:
        """Those of these jobs that exist and run without a hold, and their layers (precedence, body)."""
        with self._database.reading() as connection:
            rows = _GLANCES.rows(connection, names)
        found: dict[str, tuple[Glance, Bodies]] = {}
        for job, *facts, precedence, body in rows:
            if job not in found:
                found[job] = (Glance(job, *facts), [])
            if body is not None:
                found[job][1].append((precedence, body))
        return list(found.values())


_SIMPLE_COLUMNS = ("job", "version", "restart_version", "expected_version", "config", "updated_ms")
_COUNTERS = ByName(sa.select(COUNTERS.c.name, COUNTERS.c.value), COUNTERS.c.name)
_PLAN_COLUMNS = tuple(column.name for column in PLANS.columns)


class SimpleCommit(NamedTuple):
    """One simple change of the running row as it was read; small, because thousands wait for their batch."""

    job: str
    expected_version: int
    is_change: bool  # not: only the version is noted
    restarts: bool
    version: int  # of the running row
    restart_version: int
    config: str  # as JSON text
    reason: str
    data: str  # of its audit entry, as JSON text


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What a batch wrote, and for how long it kept others from writing."""

    versions: Mapping[str, int]  # of the running rows, by job; jobs that had moved are not in it
    took_ms: Millis


def simple_commit(record: JobRecord, sync: SimpleSync | InSync) -> SimpleCommit:
    """The change that a decision means. Requires: the job has a running row, without a hold."""
    row = record.old
    assert row is not None and not row.is_held, (
        "only a plan holds, and a job with a plan gets no simple change"
    )
    config, restarts = row.config_json, False
    paths: tuple[str, ...] = ()
    if isinstance(sync, SimpleSync):
        config, restarts = json_text.dumps(sync.target.to_json()), sync.restarts
        paths = tuple(change.path for change in sync.changed)
    return SimpleCommit(
        job=row.job,
        expected_version=record.job.expected_version,
        is_change=isinstance(sync, SimpleSync),
        restarts=restarts,
        version=row.version,
        restart_version=row.restart_version,
        config=config,
        reason=sync.reason,
        data=_data(record.job.expected_version, paths),
    )


def quick_commit(glance: Glance, quick: Quick) -> SimpleCommit:
    """The change that a quick look means."""
    found = quick.difference
    return SimpleCommit(
        job=glance.job,
        expected_version=glance.expected_version,
        is_change=found is not None,
        restarts=found is not None and found.restarts,
        version=glance.version,
        restart_version=glance.restart_version,
        config=quick.target,
        reason=explain(()) if found is None else found.reason,
        data=_data(glance.expected_version, () if found is None else found.paths),
    )


def _data(expected_version: int, paths: tuple[str, ...]) -> str:
    return f'{{"expected_version":{expected_version},"paths":{_paths(paths)}}}'


@lru_cache(maxsize=1000)
def _paths(paths: tuple[str, ...]) -> str:
    return json_text.dumps(paths)


def commit_simple(leader: LeaderStore, batch: Sequence[SimpleCommit], now_ms: Millis) -> BatchResult:
    """Commit simple changes. A job whose row moved (a hold moves it too) or that has a plan is left out."""
    with leader.writing("simple") as connection:
        began_ms = leader.measure_ms()
        changes = sum(item.is_change for item in batch)
        numbers = iter(next_values(connection, TASKS_COUNTER, changes) if changes else ())
        rows = [
            _values_after(item, next(numbers) if item.is_change else item.version, now_ms) for item in batch
        ]
        written = _update_unmoved(leader, connection, batch, rows)
        items = [item for item in batch if item.job in written]
        done = {job: version for job, version, *_ in rows if job in written}
        recorded = [
            ("sync.simple" if item.is_change else "sync.noted", item.job, item.reason, item.data)
            for item in items
        ]
        leader.record_all(connection, recorded, now_ms, silent="sync.noted")
    return BatchResult(versions=done, took_ms=leader.measure_ms() - began_ms)


def _update_unmoved(
    leader: LeaderStore,
    connection: sa.Connection,
    batch: Sequence[SimpleCommit],
    rows: Sequence[tuple[Any, ...]],
) -> set[str]:
    """Write the rows of jobs that have not moved; returns these jobs. Numbers of the others are left out."""
    if connection.dialect.name == "postgresql":
        versions = [item.version for item in batch]
        return update_rows_if(
            connection, RUNNING, _SIMPLE_COLUMNS, rows, at=("version", versions), unless_in=PLANS
        )
    unmoved = leader.unmoved(connection, {item.job: item.version for item in batch})
    update_rows(connection, RUNNING, _SIMPLE_COLUMNS, [row for row in rows if row[0] in unmoved])
    return unmoved


def open_plans(
    leader: LeaderStore, decided: Sequence[tuple[JobRecord, ComplexSync]], now_ms: Millis
) -> BatchResult:
    """Make decisions durable: each a plan with a generation of its own, on the running row as it was read."""
    with leader.writing("open") as connection:
        began_ms = leader.measure_ms()
        unmoved = leader.unmoved(connection, {record.job.name: version_of(record) for record, _ in decided})
        items = [(record, sync) for record, sync in decided if record.job.name in unmoved]
        plans = new_plans(connection, items, now_ms)
        insert_rows(connection, PLANS, _PLAN_COLUMNS, [_plan_values(plan) for plan in plans])
        recorded = [
            (
                "plan.opened",
                plan.job,
                plan.reason,
                json_text.dumps(
                    {"generation": plan.generation, "had_old": record.old is not None, "plan": plan.id}
                ),
            )
            for (record, _), plan in zip(items, plans, strict=True)
        ]
        leader.record_all(connection, recorded, now_ms)
    opened = {plan.job: plan.running_version for plan in plans}
    return BatchResult(versions=opened, took_ms=leader.measure_ms() - began_ms)


def new_plans(
    connection: sa.Connection, items: Sequence[tuple[JobRecord, ComplexSync]], now_ms: Millis
) -> list[PlanRow]:
    """Plans with numbers and generations taken in this transaction; nothing else is written."""
    if not items:
        return []
    numbers = next_values(connection, "plans", len(items))
    generations = _next_generations(connection, [record.job.name for record, _ in items])
    return [
        PlanRow(
            job=record.job.name,
            id=number,
            birth=record.job.birth,
            generation=generations[record.job.name],
            target=sync.target,
            mapping=sync.mapping,
            expected_version=record.job.expected_version,
            running_version=version_of(record),
            step=steps_of(sync.target, has_old=record.old is not None)[0],
            attempts=0,
            error="",
            reason=sync.reason,
            abandoned=(),
            held_ms=None,
            started_ms=now_ms,
            updated_ms=now_ms,
        )
        for number, (record, sync) in zip(numbers, items, strict=True)
    ]


def version_of(record: JobRecord) -> int:
    """Of the running row, 0 if there is none."""
    return 0 if record.running is None else record.running.version


def generation_counter(job: str) -> str:
    """The counter of a job's generations: shared by all lives of the name, so no number comes twice."""
    return f"generation/{job}"


def _next_generations(connection: sa.Connection, jobs: Sequence[str]) -> dict[str, int]:
    # Nobody else writes meanwhile, so reading and writing need not be one statement.
    names = [generation_counter(job) for job in jobs]
    last: dict[str, int] = {name: value for name, value in _COUNTERS.rows(connection, names)}
    following = {job: last.get(name, 0) + 1 for job, name in zip(jobs, names, strict=True)}
    rows = [{"name": generation_counter(job), "value": value} for job, value in following.items()]
    upsert(connection, COUNTERS, rows, replace=("value",))
    return following


def _values_after(item: SimpleCommit, version: int, now_ms: Millis) -> tuple[Any, ...]:
    restart_version = version if item.restarts else item.restart_version
    return (item.job, version, restart_version, item.expected_version, item.config, now_ms)


def _plan_values(plan: PlanRow) -> tuple[Any, ...]:
    values = plan.to_json()
    for name in ("target", "mapping", "abandoned"):
        values[name] = None if values[name] is None else json_text.dumps(values[name])
    return tuple(values[name] for name in _PLAN_COLUMNS)
