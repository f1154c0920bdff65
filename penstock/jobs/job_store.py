"""The Job Store: jobs, their expected versions, pipelines, idempotency keys (Turbine III).

Write functions take the connection of the caller's transaction. Reads return frozen values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.errors import KeyReused, NotFound, VersionConflict
from penstock.db.bulk import ByName
from penstock.db.database import METADATA, NAME, Database, current_value, next_value
from penstock.db.journal_store import AuditRow, read_audit
from penstock.jobs import running_store as running_tables
from penstock.jobs.layer_store import delete_layers, read_history, read_kinds, read_layers
from penstock.jobs.layers import Layer, LayerRow
from penstock.jobs.running_store import (
    PLANS,
    QUARANTINE,
    RUNNING,
    PlanRow,
    QuarantineRow,
    Retirement,
    RunningRow,
    RunningStore,
)
from penstock.jobs.text_rules import shown

# Incremented with every change of an expected config: readers page through changes by it.
EXPECTED_COUNTER = "expected"

JOBS = sa.Table(
    "jobs",
    METADATA,
    sa.Column("name", NAME, primary_key=True),
    sa.Column("birth", sa.String, nullable=False),
    sa.Column("pipeline", sa.String, nullable=False, index=True),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("deleted", sa.Boolean, nullable=False),
    sa.Column("expected_version", sa.BigInteger, nullable=False),
    # The desired state of the merged config, stored here for queries.
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

# Built once: building a statement takes longer than running it, and these run with every request.
# The EXISTS columns avoid reads of tables in which most jobs have no row.
_JOBS = ByName(
    sa.select(
        JOBS,
        *(
            sa.exists().where(table.c.job == JOBS.c.name)
            for table in (running_tables.PLANS, running_tables.QUARANTINE, running_tables.RETIREMENTS)
        ),
    ),
    JOBS.c.name,
)
_CHANGED = sa.select(JOBS.c.name).where(JOBS.c.changed > sa.bindparam("since", type_=sa.BigInteger))
_INSERT = sa.insert(JOBS)
# Compare-and-set of a job row.
_UPDATE_SEEN = sa.update(JOBS).where(
    JOBS.c.name == sa.bindparam("this"), JOBS.c.expected_version == sa.bindparam("seen")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One life of a job name. `expected_version` counts the writes of its layers, over all lives."""

    name: str
    birth: str
    pipeline: str
    created_ms: Millis
    deleted: bool
    expected_version: int
    desired: str = "running"
    changed: int = 0  # value of the counter `expected` at the last write


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """All rows of one job, read from one snapshot."""

    job: JobRow
    layers: tuple[LayerRow, ...]
    running: RunningRow | None
    plan: PlanRow | None
    quarantine: QuarantineRow | None
    retirements: tuple[Retirement, ...]

    @property
    def old(self) -> RunningRow | None:
        """The running row of this life of the job; not that of a removed job of the same name."""
        row = self.running
        return row if row is not None and row.birth == self.job.birth and row.state != "removed" else None


class JobOverview(NamedTuple):
    """The versions that show whether a job must be synced."""

    name: str
    expected_version: int
    running_version: int  # 0: never started
    has_work: bool  # an open plan, or something to retire


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedJobs:
    """Jobs whose expected config changed, and the version of the list."""

    version: int
    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    """The last submit of a pipeline."""

    name: str
    version: int
    graph: Mapping[str, Any]
    package: Mapping[str, Any]
    submitted_ms: Millis


class JobStore:
    """Reads of jobs, their expected configs and whole records."""

    def __init__(self, database: Database) -> None:
        self.database, self.running = database, RunningStore(database)

    def transaction(self) -> AbstractContextManager[sa.Connection]:
        """A write transaction: atomic, and serialized with all other writes."""
        return self.database.transaction()

    def reading(self) -> AbstractContextManager[sa.Connection]:
        """A read-only transaction on one snapshot."""
        return self.database.reading()

    def overview(self) -> tuple[JobOverview, ...]:
        """Every job, removed ones included, by name."""
        running = running_tables.RUNNING
        with self.reading() as connection:
            # Two queries, joined here: a SQL join of 100,000 rows takes three times as long.
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
        """The kinds of layers, lowest precedence first."""
        with self.reading() as connection:
            return read_kinds(connection)

    def changed_since(self, version: int) -> ChangedJobs:
        """The jobs whose expected config changed after `version` of the counter, removed ones included."""
        with self.reading() as connection:
            now = current_value(connection, EXPECTED_COUNTER)
            if now == version:
                return ChangedJobs(version=now, jobs=())
            # Sorted here: with ORDER BY, SQLite would scan all names instead of the few that changed.
            found = connection.execute(_CHANGED, {"since": version})
            return ChangedJobs(version=now, jobs=tuple(sorted(name for (name,) in found)))

    def history(
        self, job: str, *, layer: str | None = None, before: int | None = None, limit: int = 1000
    ) -> tuple[LayerRow, ...]:
        """Writes of a job's layers, newest first."""
        with self.reading() as connection:
            return read_history(connection, job, layer=layer, before=before, limit=limit)

    def audit(
        self, job: str | None = None, *, before: int | None = None, limit: int = 1000
    ) -> tuple[AuditRow, ...]:
        """The newest `limit` rows of the audit, oldest first."""
        with self.reading() as connection:
            return read_audit(connection, subject=job, before=before, limit=limit)

    def pipelines(self) -> tuple[PipelineRow, ...]:
        """Every pipeline ever submitted, by name."""
        with self.reading() as connection:
            rows = connection.execute(sa.select(PIPELINES).order_by(PIPELINES.c.name))
            return tuple(PipelineRow(**row._mapping) for row in rows)


def load_records(connection: sa.Connection, names: Sequence[str]) -> dict[str, JobRecord]:
    """The records of these jobs; unknown names are left out."""
    rows = {row[0]: row for row in _JOBS.rows(connection, names)}
    found = list(rows)
    layers = read_layers(connection, found)
    running = running_tables.read_running(connection, found)
    planned, quarantined, retiring = ([name for name in found if rows[name][-place]] for place in (3, 2, 1))
    plans = running_tables.read_plans(connection, planned)
    quarantine = running_tables.read_quarantine(connection, quarantined)
    retirements = running_tables.read_retirements(connection, retiring)
    return {
        name: JobRecord(
            job=_job_row(row),
            layers=layers.get(name, ()),
            running=running.get(name),
            plan=plans.get(name),
            quarantine=quarantine.get(name),
            retirements=retirements.get(name, ()),
        )
        for name, row in rows.items()
    }


def _job_row(row: Sequence[Any]) -> JobRow:
    name, birth, pipeline, created_ms, deleted, expected_version, desired, changed, *_ = row
    return JobRow(
        name=name,
        birth=birth,
        pipeline=pipeline,
        created_ms=created_ms,
        deleted=deleted,
        expected_version=expected_version,
        desired=desired,
        changed=changed,
    )


def find_record(connection: sa.Connection, job: str) -> JobRecord | None:
    """The record of one job, removed or not; None if the name is unknown."""
    return load_records(connection, [job]).get(job)


def load_record(connection: sa.Connection, job: str) -> JobRecord:
    """The record of a job that is not removed; NotFound otherwise."""
    record = find_record(connection, job)
    if record is None or record.job.deleted:
        raise job_not_found(job, was_removed=record is not None)
    return record


def job_not_found(job: object, *, was_removed: bool = False) -> NotFound:
    """The error for a name without a job."""
    return NotFound(
        f"there is no job {shown(job)}",
        why="it was removed" if was_removed else "no job of that name was ever submitted",
        fix="restore it, or submit it again" if was_removed else "check the name in the list of jobs",
    )


def jobs_of_pipeline(connection: sa.Connection, pipeline: str) -> tuple[str, ...]:
    """The jobs of a pipeline, by name."""
    query = sa.select(JOBS.c.name).where(JOBS.c.pipeline == pipeline, ~JOBS.c.deleted).order_by(JOBS.c.name)
    return tuple(connection.execute(query).scalars())


def insert_job(connection: sa.Connection, *, name: str, birth: str, pipeline: str, now_ms: Millis) -> JobRow:
    """Begin a new life of a name. Requires: no job of that name, or a removed one without tasks."""
    previous = connection.execute(sa.select(JOBS.c.expected_version).where(JOBS.c.name == name)).scalar()
    # Versions of a former life must not match this one, so the count continues.
    row = JobRow(
        name=name,
        birth=birth,
        pipeline=pipeline,
        created_ms=now_ms,
        deleted=False,
        expected_version=0 if previous is None else int(previous) + 1,
        changed=next_value(connection, EXPECTED_COUNTER),
    )
    connection.execute(sa.delete(JOBS).where(JOBS.c.name == name))
    delete_layers(connection, name)
    values = {column: getattr(row, column) for column in JobRow.__slots__}
    connection.execute(_INSERT, values)
    return row


def bump_version(connection: sa.Connection, row: JobRow, *, desired: str, deleted: bool) -> int:
    """Compare-and-set: take the next expected version; VersionConflict, and no change, if it moved."""
    version = row.expected_version + 1
    values = {
        "deleted": deleted,
        "desired": desired,
        "expected_version": version,
        "changed": next_value(connection, EXPECTED_COUNTER),
    }
    done = connection.execute(_UPDATE_SEEN, {"this": row.name, "seen": row.expected_version, **values})
    if done.rowcount != 1:
        query = sa.select(JOBS.c.expected_version).where(JOBS.c.name == row.name)
        actual = int(connection.execute(query).scalar() or 0)
        raise VersionConflict(f"job {row.name!r}", expected=row.expected_version, actual=actual)
    return version


def pipeline_package(connection: sa.Connection, name: str) -> dict[str, Any] | None:
    """The package and the file of a pipeline's last submit; None: it was never submitted."""
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
    """Store a submitted pipeline; returns its version."""
    previous = connection.execute(sa.select(PIPELINES.c.version).where(PIPELINES.c.name == name)).scalar()
    version = int(previous or 0) + 1
    connection.execute(sa.delete(PIPELINES).where(PIPELINES.c.name == name))
    connection.execute(
        sa.insert(PIPELINES).values(
            name=name, version=version, graph=dict(graph), package=dict(package), submitted_ms=now_ms
        )
    )
    return version


KEY_RETENTION_MS = 7 * 24 * 3600 * 1000

KEYS = sa.Table(
    "idempotency_keys",
    METADATA,
    sa.Column("actor", sa.String, primary_key=True),
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("request", sa.String, nullable=False),
    sa.Column("answer", sa.JSON, nullable=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False, index=True),
)

_IS_KEY = sa.and_(KEYS.c.actor == sa.bindparam("of"), KEYS.c.key == sa.bindparam("called"))
_READ = sa.select(KEYS.c.request, KEYS.c.answer, KEYS.c.at_ms).where(_IS_KEY)
_DELETE = sa.delete(KEYS).where(_IS_KEY)
_DELETE_OLD = sa.delete(KEYS).where(KEYS.c.at_ms < sa.bindparam("before_ms"))
_INSERT_KEY_STORE = sa.insert(KEYS)


def find_response(
    connection: sa.Connection, *, actor: str, key: str, request: str, now_ms: Millis
) -> Any | None:
    """The stored response of a request; None: it is new. KeyReused if the key has another request."""
    row = connection.execute(_READ, {"of": actor, "called": key}).first()
    if row is None:
        return None
    stored_request, response, at_ms = row
    if at_ms < now_ms - KEY_RETENTION_MS:
        connection.execute(_DELETE, {"of": actor, "called": key})
        return None
    if stored_request != request:
        raise KeyReused(
            f"the idempotency key {key!r} was used for another request",
            why="a key identifies one request, so that a retry is safe",
            fix="use a new key for a new request",
        )
    return response


def store_response(
    connection: sa.Connection, *, actor: str, key: str, request: str, response: Any, now_ms: Millis
) -> None:
    """Store the response, in the transaction of the change."""
    values = {"actor": actor, "key": key, "request": request, "answer": response, "at_ms": now_ms}
    connection.execute(_INSERT_KEY_STORE, values)


def delete_old_responses(connection: sa.Connection, *, now_ms: Millis) -> None:
    """Delete responses whose keys have expired."""
    connection.execute(_DELETE_OLD, {"before_ms": now_ms - KEY_RETENTION_MS})


# The labels of each job's merged config, written with its layers.
JOB_LABELS = sa.Table(
    "job_labels",
    METADATA,
    sa.Column("job", NAME, primary_key=True),
    sa.Column("key", NAME, primary_key=True),
    sa.Column("value", NAME, nullable=False),
    sa.Index("job_labels_by_value", "key", "value", "job"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Conditions on jobs; all of them must hold."""

    labels: Mapping[str, str] = field(default_factory=dict)
    state: str | None = None  # as `JobView.state`
    pipeline: str | None = None
    removed: bool = False  # removed jobs too
    after: str = ""  # only names after this one


def put_labels(connection: sa.Connection, job: str, labels: Mapping[str, str]) -> None:
    """Replace the labels of a job."""
    connection.execute(sa.delete(JOB_LABELS).where(JOB_LABELS.c.job == job))
    if labels:
        rows = [{"job": job, "key": key, "value": value} for key, value in labels.items()]
        connection.execute(sa.insert(JOB_LABELS), rows)


def list_names(connection: sa.Connection, wanted: JobFilter, *, limit: int) -> tuple[str, ...]:
    """The first `limit` matching names, sorted.

    Whether a merge is valid is not stored: for state `invalid`, the result has every candidate.
    """
    source: sa.FromClause = JOBS.outerjoin(
        RUNNING,
        sa.and_(RUNNING.c.job == JOBS.c.name, RUNNING.c.birth == JOBS.c.birth, RUNNING.c.state != "removed"),
    )
    name: sa.ColumnElement[str] = JOBS.c.name
    conditions = []
    for number, (key, value) in enumerate(sorted(wanted.labels.items())):
        label = JOB_LABELS.alias(f"label{number}")
        source = source.join(label, label.c.job == JOBS.c.name)
        conditions += [label.c.key == key, label.c.value == value]
        if number == 0:
            # The index of labels has this order: no sort, and no more rows are read than needed.
            name = label.c.job
    conditions.append(name > wanted.after)
    if wanted.pipeline is not None:
        conditions.append(JOBS.c.pipeline == wanted.pipeline)
    if wanted.state is not None:
        conditions += _is_in(wanted.state)
    elif not wanted.removed:
        conditions.append(~JOBS.c.deleted)
    query = sa.select(name).select_from(source).where(*conditions).order_by(name).limit(limit)
    return tuple(connection.execute(query).scalars())


def _is_in(state: str) -> list[sa.ColumnElement[bool]]:
    """The conditions of a state: the same cases as `JobView.state`, in the same order."""
    if state == "removed":
        return [JOBS.c.deleted]
    quarantined = JOBS.c.name.in_(sa.select(QUARANTINE.c.job))
    alive = [~JOBS.c.deleted]
    if state == "invalid":
        return [*alive, ~quarantined]
    if state == "quarantined":
        return [*alive, quarantined]
    changing = JOBS.c.name.in_(sa.select(PLANS.c.job))
    if state == "changing":
        return [*alive, ~quarantined, changing]
    settled = [*alive, ~quarantined, ~changing]
    runs = RUNNING.c.job.is_not(None)
    current = RUNNING.c.expected_version == JOBS.c.expected_version
    if state == "behind":
        return [*settled, runs, ~current]
    if state == "new":
        return [*settled, ~runs, JOBS.c.desired == "running"]
    # A job in sync is in its desired state, which has an index.
    here = sa.and_(runs, current, RUNNING.c.state == state)
    return [*settled, JOBS.c.desired == state, here if state == "running" else sa.or_(here, ~runs)]
