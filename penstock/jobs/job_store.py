"""The Job Store: jobs, the layers of their expected configs, pipelines, idempotency keys (Turbine III).

Writers pass the connection of their transaction, so that several writes are one. Reads return frozen values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.errors import NotFound, Refused, VersionConflict
from penstock.core.sql_store import METADATA, NAME, ROW_ID, Database
from penstock.jobs import running_store as running_tables
from penstock.jobs.audit_store import AuditRow, read_audit
from penstock.jobs.layers import LayerRow
from penstock.jobs.running_store import PlanRow, QuarantineRow, Retirement, RunningRow, RunningStore

KEYS_KEPT_MS = 7 * 24 * 3600 * 1000

JOBS = sa.Table(
    "jobs",
    METADATA,
    sa.Column("name", NAME, primary_key=True),
    sa.Column("birth", sa.String, nullable=False),
    sa.Column("pipeline", sa.String, nullable=False, index=True),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("deleted", sa.Boolean, nullable=False),
    sa.Column("expected_version", sa.BigInteger, nullable=False),
)
_LAYER_COLUMNS = (
    ("precedence", sa.Integer),
    ("body", sa.JSON),
    ("version", sa.BigInteger),
    ("actor", sa.String),
    ("reason", sa.String),
    ("at_ms", sa.BigInteger),
)
LAYERS = sa.Table(
    "layers",
    METADATA,
    sa.Column("job", NAME, primary_key=True),
    sa.Column("layer", sa.String, primary_key=True),
    *(sa.Column(name, kind, nullable=False) for name, kind in _LAYER_COLUMNS),
)
LAYER_HISTORY = sa.Table(
    "layer_history",
    METADATA,
    sa.Column("id", ROW_ID, primary_key=True, autoincrement=True),
    sa.Column("job", sa.String, nullable=False, index=True),
    sa.Column("layer", sa.String, nullable=False),
    *(sa.Column(name, kind, nullable=False) for name, kind in _LAYER_COLUMNS),
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
KEYS = sa.Table(
    "idempotency_keys",
    METADATA,
    sa.Column("actor", sa.String, primary_key=True),
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("request", sa.String, nullable=False),
    sa.Column("answer", sa.JSON, nullable=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False, index=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One life of a job's name. `expected_version` counts the writes of all its layers, over all lives."""

    name: str
    birth: str
    pipeline: str
    created_ms: Millis
    deleted: bool
    expected_version: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOverview:
    """The little that tells whether a job needs a closer look."""

    name: str
    expected_version: int
    running_version: int  # 0: never started
    has_work: bool  # an open plan, or something to retire


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

    def overview(self) -> tuple[JobOverview, ...]:
        """Every job, removed ones included, by name."""
        running, plans, retirements = running_tables.RUNNING, running_tables.PLANS, running_tables.RETIREMENTS
        query = (
            sa.select(
                JOBS.c.name,
                JOBS.c.expected_version,
                sa.func.coalesce(running.c.version, 0).label("running_version"),
                sa.or_(
                    sa.exists().where(plans.c.job == JOBS.c.name),
                    sa.exists().where(retirements.c.job == JOBS.c.name),
                ).label("has_work"),
            )
            .select_from(JOBS.outerjoin(running, running.c.job == JOBS.c.name))
            .order_by(JOBS.c.name)
        )
        with self.transaction() as connection:
            return tuple(JobOverview(**row._mapping) for row in connection.execute(query))

    def load(self, names: Sequence[str]) -> dict[str, JobRecord]:
        """The records of these jobs, removed ones included; unknown names are left out."""
        with self.transaction() as connection:
            return load_records(connection, names)

    def names(self) -> tuple[str, ...]:
        """Every job that is not removed."""
        with self.transaction() as connection:
            query = sa.select(JOBS.c.name).where(~JOBS.c.deleted).order_by(JOBS.c.name)
            return tuple(connection.execute(query).scalars())

    def history(self, job: str) -> tuple[LayerRow, ...]:
        """Every write of every layer of a job, oldest first."""
        with self.transaction() as connection:
            rows = connection.execute(
                sa.select(LAYER_HISTORY).where(LAYER_HISTORY.c.job == job).order_by(LAYER_HISTORY.c.id)
            )
            return tuple(_layer_row(row) for row in rows)

    def audit(self, job: str | None = None, *, limit: int = 1000) -> tuple[AuditRow, ...]:
        """Who changed what, oldest first."""
        with self.transaction() as connection:
            return read_audit(connection, subject=job, limit=limit)

    def pipelines(self) -> tuple[PipelineRow, ...]:
        """Every pipeline ever submitted, by name."""
        with self.transaction() as connection:
            rows = connection.execute(sa.select(PIPELINES).order_by(PIPELINES.c.name))
            return tuple(PipelineRow(**row._mapping) for row in rows)


def load_records(connection: sa.Connection, names: Sequence[str]) -> dict[str, JobRecord]:
    """The records of these jobs at this moment; unknown names are left out."""
    jobs = connection.execute(sa.select(JOBS).where(JOBS.c.name.in_(names)))
    layers: dict[str, list[LayerRow]] = {}
    for row in connection.execute(
        sa.select(LAYERS).where(LAYERS.c.job.in_(names)).order_by(LAYERS.c.precedence)
    ):
        layers.setdefault(row.job, []).append(_layer_row(row))
    running = running_tables.read_running(connection, names)
    plans = running_tables.read_plans(connection, names)
    quarantine = running_tables.read_quarantine(connection, names)
    retirements = running_tables.read_retirements(connection, names)
    return {
        row.name: JobRecord(
            job=JobRow(**row._mapping),
            layers=tuple(layers.get(row.name, ())),
            running=running.get(row.name),
            plan=plans.get(row.name),
            quarantine=quarantine.get(row.name),
            retirements=retirements.get(row.name, ()),
        )
        for row in jobs
    }


def load_record(connection: sa.Connection, job: str) -> JobRecord:
    """The record of a job that is not removed; NotFound otherwise."""
    record = load_records(connection, [job]).get(job)
    if record is None or record.job.deleted:
        raise NotFound(
            f"there is no job {job!r}",
            why="it was never submitted, or it was removed" if record is None else "it was removed",
            fix="look at the list of jobs, and check the spelling",
        )
    return record


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
    )
    connection.execute(sa.delete(JOBS).where(JOBS.c.name == name))
    connection.execute(sa.delete(LAYERS).where(LAYERS.c.job == name))
    values = {column: getattr(row, column) for column in JobRow.__slots__}
    connection.execute(sa.insert(JOBS).values(**values))
    return row


def bump_version(connection: sa.Connection, job: str, *, expected_version: int, **values: Any) -> int:
    """Compare-and-set: take the next expected version, or lose with VersionConflict and change nothing."""
    updated = connection.execute(
        sa.update(JOBS)
        .where(JOBS.c.name == job, JOBS.c.expected_version == expected_version)
        .values(expected_version=expected_version + 1, **values)
    )
    if updated.rowcount != 1:
        actual = connection.execute(sa.select(JOBS.c.expected_version).where(JOBS.c.name == job)).scalar()
        raise VersionConflict(f"job {job!r}", expected=expected_version, actual=int(actual or 0))
    return expected_version + 1


def put_layer(connection: sa.Connection, job: str, row: LayerRow) -> None:
    """Write one layer and its history. Requires: `row.version` was taken in this transaction."""
    values = {name: getattr(row, name) for name, _ in _LAYER_COLUMNS} | {"job": job, "layer": row.layer}
    connection.execute(sa.delete(LAYERS).where(LAYERS.c.job == job, LAYERS.c.layer == row.layer))
    connection.execute(sa.insert(LAYERS).values(**values))
    connection.execute(sa.insert(LAYER_HISTORY).values(**values))


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


def recall_answer(connection: sa.Connection, *, actor: str, key: str, request: str) -> Any | None:
    """What this request was answered when it first came, None if it is new."""
    row = connection.execute(sa.select(KEYS).where(KEYS.c.actor == actor, KEYS.c.key == key)).first()
    if row is None:
        return None
    if row.request != request:
        raise Refused(
            f"the idempotency key {key!r} was used for another request",
            why="a key names one request, so that repeating it is safe",
            fix="take a new key for a new request",
        )
    return row.answer


def keep_answer(
    connection: sa.Connection, *, actor: str, key: str, request: str, answer: Any, now_ms: Millis
) -> None:
    """Remember the answer, in the transaction that made it true."""
    connection.execute(sa.delete(KEYS).where(KEYS.c.at_ms < now_ms - KEYS_KEPT_MS))
    connection.execute(
        sa.insert(KEYS).values(actor=actor, key=key, request=request, answer=answer, at_ms=now_ms)
    )


def _layer_row(row: sa.Row[Any]) -> LayerRow:
    return LayerRow(layer=row.layer, **{name: getattr(row, name) for name, _ in _LAYER_COLUMNS})
