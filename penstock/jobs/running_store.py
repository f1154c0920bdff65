"""Tables and reads of running configs, open plans, quarantined jobs and retirements.

Only `jobs/syncer` writes them. The version of a running row comes from one counter, so paging by version
skips no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from penstock.core import text as json_text
from penstock.core.clock import Millis
from penstock.db.bulk import ByName
from penstock.db.database import METADATA, NAME, Database, current_value, values_of
from penstock.jobs.config import JobConfig
from penstock.jobs.syncer.sync_plan import PlanStep, RunningView

TASKS_COUNTER = "tasks"

RUNNING = sa.Table(
    "running",
    METADATA,
    sa.Column("job", NAME, primary_key=True),
    sa.Column("birth", sa.String, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False, index=True),
    sa.Column("restart_version", sa.BigInteger, nullable=False),
    sa.Column("expected_version", sa.BigInteger, nullable=False),
    sa.Column("config", sa.JSON, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("mapping", sa.JSON, nullable=False),
    sa.Column("hold_generation", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("updated_ms", sa.BigInteger, nullable=False),
)
PLANS = sa.Table(
    "plans",
    METADATA,
    sa.Column("job", NAME, primary_key=True),
    sa.Column("id", sa.BigInteger, nullable=False),
    sa.Column("birth", sa.String, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("target", sa.JSON(none_as_null=True)),
    sa.Column("mapping", sa.JSON, nullable=False),
    sa.Column("expected_version", sa.BigInteger, nullable=False),
    sa.Column("running_version", sa.BigInteger, nullable=False),
    sa.Column("step", sa.String, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("error", sa.String, nullable=False),
    sa.Column("reason", sa.String, nullable=False),
    sa.Column("abandoned", sa.JSON, nullable=False),
    sa.Column("held_ms", sa.BigInteger),
    sa.Column("started_ms", sa.BigInteger, nullable=False),
    sa.Column("updated_ms", sa.BigInteger, nullable=False),
)
QUARANTINE = sa.Table(
    "quarantine",
    METADATA,
    sa.Column("job", sa.String, primary_key=True),
    sa.Column("expected_version", sa.BigInteger, nullable=False),
    sa.Column("reason", sa.String, nullable=False),
    sa.Column("since_ms", sa.BigInteger, nullable=False),
)
RETIREMENTS = sa.Table(
    "retirements",
    METADATA,
    sa.Column("id", sa.BigInteger, primary_key=True),
    sa.Column("job", sa.String, nullable=False, index=True),
    sa.Column("birth", sa.String, nullable=False),
    sa.Column("config", sa.JSON, nullable=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRow:
    """The running config of one job, with the mapping partition -> task index and its generation."""

    job: str
    birth: str
    version: int  # grows with every change of the row; readers page by it
    restart_version: int  # grows only with changes for which tasks must restart
    expected_version: int  # the newest expected version this row is in sync with
    config_json: str  # the config as stored; `config` decodes it on first use
    generation: int
    mapping: tuple[int, ...]
    hold_generation: int  # tasks of this and smaller generations must not run; 0: no hold
    state: str  # running | paused | stopped | removed
    updated_ms: Millis
    _config: JobConfig | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def config(self) -> JobConfig:
        """The decoded config. CorruptData if it cannot be decoded."""
        if self._config is None:
            object.__setattr__(self, "_config", JobConfig.from_stored(self.config_json, job=self.job))
            assert self._config is not None
        return self._config

    @property
    def is_held(self) -> bool:
        return self.hold_generation >= self.generation

    @property
    def is_served(self) -> bool:
        """Whether the Task Service may list tasks of this row."""
        return self.state == "running" and not self.is_held

    def view(self) -> RunningView:
        return RunningView(config=self.config, generation=self.generation, mapping=self.mapping)

    def to_json(self) -> dict[str, Any]:
        """The row as it is stored and shown."""
        stored = {"config": json_text.loads(self.config_json), "mapping": list(self.mapping)}
        names = [column.name for column in RUNNING.columns]
        return {name: stored[name] if name in stored else getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSnapshot:
    """Rows that changed since a version, and the version of the snapshot."""

    version: int
    rows: tuple[RunningRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """An open plan: the whole target, and its next step."""

    job: str
    id: int
    birth: str
    generation: int  # of the target; never used twice
    target: JobConfig | None  # None: the job is removed
    mapping: tuple[int, ...]
    expected_version: int
    running_version: int  # of the running row as the plan last read or wrote it; 0: no row
    step: PlanStep
    attempts: int
    error: str
    reason: str
    abandoned: tuple[JobConfig, ...]  # targets of replaced plans that may have been prepared
    held_ms: Millis | None
    started_ms: Millis
    updated_ms: Millis

    def to_json(self) -> dict[str, Any]:
        """The row as it is stored and shown."""
        return values_of(self) | {
            "target": None if self.target is None else self.target.to_json(),
            "mapping": list(self.mapping),
            "abandoned": [config.to_json() for config in self.abandoned],
            "step": str(self.step),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRow:
    """A job whose plan was given up. A newer expected version lifts the quarantine."""

    job: str
    expected_version: int
    reason: str
    since_ms: Millis


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    """A config whose producers must be unregistered, unless the running config has them too."""

    id: int
    job: str
    birth: str
    config: JobConfig

    def to_json(self) -> dict[str, Any]:
        """The row as it is stored."""
        return values_of(self) | {"config": self.config.to_json()}


# JSON as text, decoded here: drivers and SQLAlchemy take several times as long.
RUNNING_COLUMNS = tuple(
    sa.cast(column, sa.Text).label(column.name) if isinstance(column.type, sa.JSON) else column
    for column in RUNNING.columns
)
_RUNNING = ByName(sa.select(*RUNNING_COLUMNS), RUNNING.c.job)
_LIST = (
    sa.select(*RUNNING_COLUMNS)
    .where(RUNNING.c.version > sa.bindparam("since", type_=sa.BigInteger))
    .order_by(RUNNING.c.version)
)
_PLANS = ByName(sa.select(PLANS), PLANS.c.job)
_QUARANTINE = ByName(sa.select(QUARANTINE), QUARANTINE.c.job)
_RETIREMENTS = ByName(sa.select(RETIREMENTS).order_by(RETIREMENTS.c.id), RETIREMENTS.c.job)


class RunningStore:
    """Reads of running rows."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def snapshot(self, *, since: int = 0) -> RunningSnapshot:
        """Rows with a version above `since`, removed jobs included, and the version of the list."""
        with self._database.reading() as connection:
            version = current_value(connection, TASKS_COUNTER)
            if version == since:
                return RunningSnapshot(version=version, rows=())
            rows = connection.execute(_LIST, {"since": since}).all()
        return RunningSnapshot(version=version, rows=tuple(map(running_row, rows)))

    def changing(self) -> frozenset[str]:
        """Running jobs with an open plan."""
        running = sa.select(RUNNING.c.job).where(RUNNING.c.state == "running")
        with self._database.reading() as connection:
            found = connection.execute(sa.select(PLANS.c.job).where(PLANS.c.job.in_(running)))
            return frozenset(row[0] for row in found)

    def changed_rows(self, since: int) -> tuple[int, tuple[RunningRow, ...]]:
        """The version of the list, and the rows with a version above `since`."""
        with self._database.reading() as connection:
            rows = connection.execute(_LIST, {"since": since}).all()
            return current_value(connection, TASKS_COUNTER), tuple(map(running_row, rows))

    def row(self, job: str) -> RunningRow | None:
        """The running row of one job; None if it never started."""
        with self._database.reading() as connection:
            return read_running(connection, [job]).get(job)


def read_running(connection: sa.Connection, jobs: Sequence[str]) -> dict[str, RunningRow]:
    """The running rows of these jobs."""
    return {row[0]: running_row(row) for row in _RUNNING.rows(connection, jobs)}


def read_plans(connection: sa.Connection, jobs: Sequence[str]) -> dict[str, PlanRow]:
    """The open plans of these jobs."""
    return {row.job: row for row in map(_plan_row, _PLANS.rows(connection, jobs))}


def read_quarantine(connection: sa.Connection, jobs: Sequence[str]) -> dict[str, QuarantineRow]:
    """The quarantine rows of these jobs."""
    rows = (_named(QUARANTINE, row) for row in _QUARANTINE.rows(connection, jobs))
    return {row["job"]: QuarantineRow(**row) for row in rows}


def read_retirements(connection: sa.Connection, jobs: Sequence[str]) -> dict[str, tuple[Retirement, ...]]:
    """The open retirements of these jobs, oldest first."""
    found: dict[str, tuple[Retirement, ...]] = {}
    for values in _RETIREMENTS.rows(connection, jobs):
        named = _named(RETIREMENTS, values)
        row = Retirement(**{**named, "config": JobConfig.from_stored(named["config"])})
        found[row.job] = (*found.get(row.job, ()), row)
    return found


def _named(table: sa.Table, values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(table.columns.keys(), values, strict=True))


def running_row(row: Sequence[Any]) -> RunningRow:
    """The RunningRow of a result row of `RUNNING_COLUMNS`."""
    job, birth, version, restart_version, expected_version, config, generation, mapping, hold, state, ms = row
    return RunningRow(
        job=job,
        birth=birth,
        version=version,
        restart_version=restart_version,
        expected_version=expected_version,
        config_json=config,
        generation=generation,
        mapping=tuple(json_text.loads(mapping)),
        hold_generation=hold,
        state=state,
        updated_ms=ms,
    )


def _plan_row(values: Sequence[Any]) -> PlanRow:
    row = _named(PLANS, values)
    target = row["target"]
    typed = {
        "target": None if target is None else JobConfig.from_stored(target),
        "mapping": tuple(row["mapping"]),
        "abandoned": tuple(map(JobConfig.from_stored, row["abandoned"])),
        "step": PlanStep(row["step"]),
    }
    return PlanRow(**{**row, **typed})
