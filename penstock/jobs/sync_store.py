"""What the State Syncer reads: records of many jobs at a time, and nothing that only people need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from penstock.core import json_text
from penstock.core.bulk_store import ByName
from penstock.core.quick_store import MADE_ONCE
from penstock.core.sql_store import Database
from penstock.jobs.job_store import JOBS, JobRecord, JobRow
from penstock.jobs.layer_store import LAYERS, read_kinds
from penstock.jobs.layers import LayerRow
from penstock.jobs.running_store import (
    PLANS,
    QUARANTINE,
    RETIREMENTS,
    RUNNING,
    read_plans,
    read_quarantine,
    read_retirements,
    read_running,
)

_JOBS = ByName(
    sa.select(
        JOBS.c.name,
        JOBS.c.birth,
        JOBS.c.pipeline,
        JOBS.c.created_ms,
        JOBS.c.deleted,
        JOBS.c.expected_version,
    ),
    JOBS.c.name,
)
_BODY = sa.cast(LAYERS.c.body, sa.Text)
_LAYERS = ByName(
    sa.select(LAYERS.c.job, LAYERS.c.layer, LAYERS.c.precedence, _BODY, LAYERS.c.version, LAYERS.c.actor),
    LAYERS.c.job,
)
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
_OCCUPIED = _OCCUPIED.execution_options(**MADE_ONCE)


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
    """Reads for rounds and plans. Layers come without reasons and origins."""

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

    def load(self, names: Sequence[str]) -> dict[str, JobRecord]:
        """The records of these jobs at one moment, removed ones included; unknown names are left out."""
        with self._database.reading() as connection:
            layers = _read_layers(connection, names)
            running = read_running(connection, names)
            plans = read_plans(connection, names)
            quarantine = read_quarantine(connection, names)
            retirements = read_retirements(connection, names)
            return {
                name: JobRecord(
                    job=JobRow(
                        name=name,
                        birth=birth,
                        pipeline=pipeline,
                        created_ms=created_ms,
                        deleted=deleted,
                        expected_version=expected_version,
                    ),
                    layers=tuple(layers.get(name, ())),
                    running=running.get(name),
                    plan=plans.get(name),
                    quarantine=quarantine.get(name),
                    retirements=retirements.get(name, ()),
                )
                for name, birth, pipeline, created_ms, deleted, expected_version in _JOBS.rows(
                    connection, names
                )
            }

    def urgent_layers(self) -> frozenset[str]:
        """The layers whose changes do not wait for an open plan."""
        with self._database.reading() as connection:
            return frozenset(layer.name for layer in read_kinds(connection) if layer.replaces_plan)


def _read_layers(connection: sa.Connection, names: Sequence[str]) -> dict[str, list[LayerRow]]:
    found: dict[str, list[LayerRow]] = {}
    for job, layer, precedence, body, version, actor in _LAYERS.rows(connection, names):
        row = LayerRow(
            layer=layer, precedence=precedence, body=json_text.loads(body), version=version, actor=actor
        )
        found.setdefault(job, []).append(row)
    return found
