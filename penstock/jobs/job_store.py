"""The Job Store: jobs, their expected versions, pipelines, idempotency keys (Turbine III).

Writers pass the connection of their transaction, so that several writes are one. Reads return frozen values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from penstock.core.bulk_store import ByName
from penstock.core.clock import Millis
from penstock.core.errors import NotFound, VersionConflict
from penstock.core.quick_store import MADE_ONCE, Ask, ask_all, insert_all, keep_ahead, later, taken_ahead
from penstock.core.sql_store import METADATA, NAME, Database, counted, current_value, next_value
from penstock.jobs import running_store as running_tables
from penstock.jobs.audit_store import AuditRow, read_audit
from penstock.jobs.key_store import ask_answers, keep_answers
from penstock.jobs.layer_store import (
    KINDS_QUERY,
    LAYERS,
    delete_layers,
    keep_kinds,
    layer_rows,
    read_history,
    read_kinds,
    read_layers,
)
from penstock.jobs.layers import Layer, LayerRow
from penstock.jobs.running_store import PlanRow, QuarantineRow, Retirement, RunningRow, RunningStore
from penstock.jobs.text_rules import shown

# Grows with every write of what is expected of any job: who has seen its value has seen everything.
EXPECTED_COUNTER = "expected"
FEW = 20
_RECORD = "record"  # what is read ahead

JOBS = sa.Table(
    "jobs",
    METADATA,
    sa.Column("name", NAME, primary_key=True),
    sa.Column("birth", sa.String, nullable=False),
    sa.Column("pipeline", sa.String, nullable=False, index=True),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("deleted", sa.Boolean, nullable=False),
    sa.Column("expected_version", sa.BigInteger, nullable=False),
    # The state that the merge asks for, kept here to be searched.
    sa.Column("desired", sa.String, nullable=False, server_default="running"),
    sa.Column("changed", sa.BigInteger, nullable=False, server_default="0", index=True),
    sa.Index("jobs_by_desired", "desired", "name"),
)
PIPELINES = sa.Table(
    "pipelines",
    METADATA,
    sa.Column("name", NAME, primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("graph", sa.JSON, nullable=False),
    sa.Column("package", sa.JSON, nullable=False),
    sa.Column("submitted_ms", sa.BigInteger, nullable=False),
)

# Built once: to build a statement takes longer than to run it, and these run with every request.
_THIS: sa.BindParameter[str] = sa.bindparam("this")
# One look instead of three; what is said once per job comes with each of its few layers.
_RECORDS = ByName(
    sa.select(
        JOBS,
        sa.exists().where(running_tables.PLANS.c.job == JOBS.c.name).label("has_plan"),
        sa.exists().where(running_tables.QUARANTINE.c.job == JOBS.c.name).label("has_quarantine"),
        sa.exists().where(running_tables.RETIREMENTS.c.job == JOBS.c.name).label("has_retirements"),
        running_tables.RUNNING,
        LAYERS,
    )
    .select_from(
        JOBS.outerjoin(running_tables.RUNNING, running_tables.RUNNING.c.job == JOBS.c.name).outerjoin(
            LAYERS, LAYERS.c.job == JOBS.c.name
        )
    )
    .order_by(JOBS.c.name, LAYERS.c.precedence),
    JOBS.c.name,
)
_OF_JOB = slice(0, len(JOBS.c))
_FLAGS = slice(_OF_JOB.stop, _OF_JOB.stop + 3)
_OF_RUNNING = slice(_FLAGS.stop, _FLAGS.stop + len(running_tables.RUNNING.c))
_OF_LAYER = slice(_OF_RUNNING.stop, None)
_BUMPED = ("deleted", "desired", "changed", "expected_version")


def _bump(**given: Any) -> Any:
    values = {name: sa.bindparam(f"new_{name}") for name in _BUMPED} | given
    is_seen = sa.and_(JOBS.c.name == _THIS, JOBS.c.expected_version == sa.bindparam("seen"))
    return sa.update(JOBS).where(is_seen).values(values).execution_options(**MADE_ONCE)


_BUMP, _COUNT_AND_BUMP = _bump(), _bump(changed=counted(EXPECTED_COUNTER))
_CHANGED = sa.select(JOBS.c.name).where(JOBS.c.changed > sa.bindparam("since", type_=sa.BigInteger))
_CHANGED = _CHANGED.execution_options(**MADE_ONCE)
_NEW_JOB = insert_all(JOBS)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One life of a job's name. `expected_version` counts the writes of all its layers, over all lives."""

    name: str
    birth: str
    pipeline: str
    created_ms: Millis
    deleted: bool
    expected_version: int
    desired: str = "running"
    changed: int = 0  # the value of the counter `expected` that the last write took


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """Everything the store knows of one job, read at one moment."""

    job: JobRow
    layers: tuple[LayerRow, ...]
    running: RunningRow | None
    plan: PlanRow | None
    quarantine: QuarantineRow | None
    retirements: tuple[Retirement, ...]

    @property
    def old(self) -> RunningRow | None:
        """What runs of this life of the job; a removed predecessor of the same name is not part of it."""
        row = self.running
        return row if row is not None and row.birth == self.job.birth and row.state != "removed" else None


class JobOverview(NamedTuple):
    """The little that tells whether a job needs a closer look."""

    name: str
    expected_version: int
    running_version: int  # 0: never started
    has_work: bool  # an open plan, or something to retire


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """Jobs of which something else is expected than before, and the version that this was read at."""

    version: int
    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    """A pipeline as last submitted."""

    name: str
    version: int
    graph: Mapping[str, Any]
    package: Mapping[str, Any]
    submitted_ms: Millis


class JobStore:
    """The expected side of every job, and whole records of jobs."""

    def __init__(self, database: Database) -> None:
        self.database, self.running = database, RunningStore(database)

    def transaction(self) -> AbstractContextManager[sa.Connection]:
        """Everything inside is written, or nothing; nobody else writes meanwhile."""
        return self.database.transaction()

    def reading(self) -> AbstractContextManager[sa.Connection]:
        """Everything inside is seen as it was at one moment."""
        return self.database.reading()

    def overview(self) -> tuple[JobOverview, ...]:
        """Every job, removed ones included, by name."""
        running = running_tables.RUNNING
        with self.reading() as connection:
            # Two plain lists, put together here: a join of 100,000 rows takes three times as long.
            versions = dict(connection.execute(sa.select(running.c.job, running.c.version)).all())
            busy: set[str] = set()
            for table in (running_tables.PLANS, running_tables.RETIREMENTS):
                busy.update(connection.execute(sa.select(table.c.job)).scalars())
            query = sa.select(JOBS.c.name, JOBS.c.expected_version).order_by(JOBS.c.name)
            return tuple(
                JobOverview(name, version, versions.get(name, 0), name in busy)
                for name, version in connection.execute(query).all()
            )

    def load(self, names: Sequence[str]) -> dict[str, JobRecord]:
        """The records of these jobs, removed ones included; unknown names are left out."""
        with self.reading() as connection:
            return load_records(connection, names)

    def layer_kinds(self) -> tuple[Layer, ...]:
        """The layers there are, lowest first."""
        with self.reading() as connection:
            return read_kinds(connection)

    def changed_since(self, version: int) -> Changed:
        """The jobs whose expected side was written after `version` of the counter, removed ones included."""
        with self.reading() as connection:
            now = current_value(connection, EXPECTED_COUNTER)
            if now == version:
                return Changed(version=now, jobs=())
            # Sorted here: asked for an order, SQLite would walk all names instead of the few that changed.
            found = connection.execute(_CHANGED, {"since": version})
            return Changed(version=now, jobs=tuple(sorted(name for (name,) in found)))

    def history(
        self, job: str, *, layer: str | None = None, before: int | None = None, limit: int = 1000
    ) -> tuple[LayerRow, ...]:
        """Writes of a job's layers, newest first."""
        with self.reading() as connection:
            return read_history(connection, job, layer=layer, before=before, limit=limit)

    def audit(
        self, job: str | None = None, *, before: int | None = None, limit: int = 1000
    ) -> tuple[AuditRow, ...]:
        """Who changed what, the newest `limit` rows, oldest first."""
        with self.reading() as connection:
            return read_audit(connection, subject=job, before=before, limit=limit)

    def pipelines(self) -> tuple[PipelineRow, ...]:
        """Every pipeline ever submitted, by name."""
        with self.reading() as connection:
            rows = connection.execute(sa.select(PIPELINES).order_by(PIPELINES.c.name))
            return tuple(PipelineRow(**row._mapping) for row in rows)


def load_records(connection: sa.Connection, names: Sequence[str]) -> dict[str, JobRecord]:
    """The records of these jobs at this moment; unknown names are left out."""
    if len(names) > FEW:
        return _load_many(connection, names)
    return _records(connection, _by_job(_RECORDS.rows(connection, names))) if names else {}


def ask_records(database: Database, names: Sequence[str]) -> Ask:
    """What `plain_records` is made of. Requires: few names."""
    assert 0 < len(names) <= FEW, len(names)
    return _RECORDS.ask(database, names)


def plain_records(rows: Iterable[Sequence[Any]]) -> dict[str, JobRecord] | None:
    """The records in the answer to `ask_records`; None: some have more than that, and must be loaded."""
    found = _by_job(rows)
    return None if any(any(rows[0][_FLAGS]) for rows in found.values()) else _records(None, found)


def _by_job(rows: Iterable[Sequence[Any]]) -> dict[str, list[Sequence[Any]]]:
    found: dict[str, list[Sequence[Any]]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(row)
    return found


def _records(
    connection: sa.Connection | None, found: Mapping[str, list[Sequence[Any]]]
) -> dict[str, JobRecord]:
    plans, quarantine, retirements = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    has = [[name for name, rows in found.items() if rows[0][_FLAGS][place]] for place in range(3)]
    if connection is not None and any(has):
        plans = running_tables.read_plans(connection, has[0]) if has[0] else plans
        quarantine = running_tables.read_quarantine(connection, has[1]) if has[1] else quarantine
        retirements = running_tables.read_retirements(connection, has[2]) if has[2] else retirements
    return {
        name: JobRecord(
            job=JobRow(**dict(zip(JOBS.columns.keys(), rows[0][_OF_JOB], strict=True))),
            layers=layer_rows(row[_OF_LAYER] for row in rows),
            running=_running(rows[0][_OF_RUNNING]),
            plan=plans.get(name),
            quarantine=quarantine.get(name),
            retirements=retirements.get(name, ()),
        )
        for name, rows in found.items()
    }


def _load_many(connection: sa.Connection, names: Sequence[str]) -> dict[str, JobRecord]:
    """A statement per table: of many jobs none is worth reading once per layer."""
    jobs = connection.execute(sa.select(JOBS).where(JOBS.c.name.in_(names)))
    layers = read_layers(connection, names)
    running = running_tables.read_running(connection, names)
    plans = running_tables.read_plans(connection, names)
    quarantine = running_tables.read_quarantine(connection, names)
    retirements = running_tables.read_retirements(connection, names)
    return {
        row.name: JobRecord(
            job=JobRow(**row._mapping),
            layers=layers.get(row.name, ()),
            running=running.get(row.name),
            plan=plans.get(row.name),
            quarantine=quarantine.get(row.name),
            retirements=retirements.get(row.name, ()),
        )
        for row in jobs
    }


def find_record(connection: sa.Connection, job: str) -> JobRecord | None:
    """The record of one job, removed or not; None if there is none."""
    ahead = taken_ahead(connection, (_RECORD, job))
    found: JobRecord | None = load_records(connection, [job]).get(job) if ahead is None else ahead[0]
    return found


class Wanted(NamedTuple):
    """What a write looks at first: a job, and the answer kept under a key of its actor."""

    job: str | None
    actor: str
    key: str | None


def read_ahead(connection: sa.Connection, wanted: Sequence[Wanted]) -> None:
    """Read at once what the writes of one transaction will look at one by one. For servers only."""
    if connection.dialect.name != "postgresql":
        return
    names = [(asked.actor, asked.key) for asked in wanted if asked.key is not None]
    jobs = sorted({asked.job for asked in wanted if asked.job is not None})
    asks = [(KINDS_QUERY, {}), ask_answers(names)] + [_RECORDS.ask(connection, jobs)] * bool(jobs)
    kinds, answers, *records = ask_all(connection, asks)
    keep_kinds(connection, kinds)
    keep_answers(connection, names, answers)
    found = _records(connection, _by_job(records[0])) if jobs else {}
    for job in jobs:
        keep_ahead(connection, (_RECORD, job), found.get(job))


def _running(row: Sequence[Any]) -> RunningRow | None:
    values = dict(zip(running_tables.RUNNING.columns.keys(), row, strict=True))
    if values["job"] is None:
        return None
    return RunningRow(**{**values, "mapping": tuple(values["mapping"])})


def load_record(connection: sa.Connection, job: str) -> JobRecord:
    """The record of a job that is not removed; NotFound otherwise."""
    record = find_record(connection, job)
    if record is None or record.job.deleted:
        raise no_job(job, was_removed=record is not None)
    return record


def no_job(job: object, *, was_removed: bool = False) -> NotFound:
    """What to say of a name that no job has, or none any more."""
    return NotFound(
        f"there is no job {shown(job)}",
        why="it was removed" if was_removed else "none of that name was ever submitted",
        fix="restore it, or submit it anew"
        if was_removed
        else "look at the list of jobs; check the spelling",
    )


def jobs_of_pipeline(connection: sa.Connection, pipeline: str) -> tuple[str, ...]:
    """The jobs a pipeline has, by name."""
    query = sa.select(JOBS.c.name).where(JOBS.c.pipeline == pipeline, ~JOBS.c.deleted).order_by(JOBS.c.name)
    return tuple(connection.execute(query).scalars())


def insert_job(connection: sa.Connection, *, name: str, birth: str, pipeline: str, now_ms: Millis) -> JobRow:
    """Begin a life of a name. Requires: no job of that name, or a removed one of which nothing runs."""
    previous = connection.execute(sa.select(JOBS.c.expected_version).where(JOBS.c.name == name)).scalar()
    # Versions of a former life must not fit this one, so the count goes on.
    row = JobRow(
        name=name,
        birth=birth,
        pipeline=pipeline,
        created_ms=now_ms,
        deleted=False,
        expected_version=0 if previous is None else int(previous) + 1,
        changed=next_value(connection, EXPECTED_COUNTER),
    )
    taken_ahead(connection, (_RECORD, name))
    connection.execute(sa.delete(JOBS).where(JOBS.c.name == name))
    delete_layers(connection, name)
    values = {column: getattr(row, column) for column in JobRow.__slots__}
    connection.execute(_NEW_JOB, values)
    return row


def bump_version(connection: sa.Connection, row: JobRow, *, desired: str, deleted: bool) -> int:
    """Compare-and-set: take the next expected version, or lose with VersionConflict and change nothing.

    On a server it may be lost at the end of the transaction, which is then undone.
    """
    version, bump = row.expected_version + 1, _COUNT_AND_BUMP
    values: dict[str, Any] = {"deleted": deleted, "desired": desired, "expected_version": version}
    if connection.dialect.name != "postgresql":
        bump, values["changed"] = _BUMP, next_value(connection, EXPECTED_COUNTER)
    values = {f"new_{name}": value for name, value in values.items()}
    taken_ahead(connection, (_RECORD, row.name))

    def lost() -> VersionConflict:
        query = sa.select(JOBS.c.expected_version).where(JOBS.c.name == row.name)
        actual = int(connection.execute(query).scalar() or 0)
        return VersionConflict(f"job {row.name!r}", expected=row.expected_version, actual=actual)

    later(connection, bump, {"this": row.name, "seen": row.expected_version, **values}, otherwise=lost)
    return version


def pipeline_package(connection: sa.Connection, name: str) -> dict[str, Any] | None:
    """What the last submit of a pipeline said of its package and its file; None: there was none."""
    row = connection.execute(sa.select(PIPELINES.c.package).where(PIPELINES.c.name == name)).first()
    return None if row is None else dict(row.package)


def put_pipeline(
    connection: sa.Connection,
    *,
    name: str,
    graph: Mapping[str, Any],
    package: Mapping[str, Any],
    now_ms: Millis,
) -> int:
    """Record a pipeline as submitted; returns its version."""
    previous = connection.execute(sa.select(PIPELINES.c.version).where(PIPELINES.c.name == name)).scalar()
    version = int(previous or 0) + 1
    connection.execute(sa.delete(PIPELINES).where(PIPELINES.c.name == name))
    connection.execute(
        sa.insert(PIPELINES).values(
            name=name, version=version, graph=dict(graph), package=dict(package), submitted_ms=now_ms
        )
    )
    return version
