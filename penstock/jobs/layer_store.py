"""Tables of layers: the kinds of layers, the layers of each job, and the history of their writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from penstock.core import text as json_text
from penstock.db.bulk import ByName
from penstock.db.database import METADATA, NAME, ROW_ID, upsert
from penstock.jobs.layers import DEFAULT_LAYERS, Layer, LayerRow, Origin

LAYER_KINDS = sa.Table(
    "layer_kinds",
    METADATA,
    sa.Column("name", NAME, primary_key=True),
    sa.Column("precedence", sa.Integer, nullable=False),
    sa.Column("writers", sa.JSON, nullable=False),
    sa.Column("replaces_plan", sa.Boolean, nullable=False),
    sa.Column("fields", sa.JSON, nullable=False, server_default="[]"),
    sa.Index("layer_kinds_by_precedence", "precedence", unique=True),
)
_COLUMNS = (
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
    *(sa.Column(name, kind, nullable=False) for name, kind in _COLUMNS),
    sa.Column("origins", sa.JSON, nullable=False, server_default="[]"),
)
LAYER_HISTORY = sa.Table(
    "layer_history",
    METADATA,
    sa.Column("id", ROW_ID, primary_key=True, autoincrement=True),
    sa.Column("job", sa.String, nullable=False),
    sa.Column("layer", sa.String, nullable=False),
    *(sa.Column(name, kind, nullable=False) for name, kind in _COLUMNS),
    sa.Column("birth", sa.String, nullable=False, server_default=""),
    sa.Index("layer_history_by_version", "job", "version"),
)

_REPLACED = (*(name for name, _ in _COLUMNS), "origins")
# Built once: building a statement takes longer than running it, and these run with every write.
_KINDS = sa.select(LAYER_KINDS).order_by(LAYER_KINDS.c.precedence)
# JSON as text, decoded here: SQLAlchemy takes twice as long, and the syncer reads thousands of records.
_LAYERS = ByName(
    sa.select(
        LAYERS.c.job,
        LAYERS.c.layer,
        *(LAYERS.c[name] if name != "body" else sa.cast(LAYERS.c.body, sa.Text) for name, _ in _COLUMNS),
        sa.cast(LAYERS.c.origins, sa.Text),
    ).order_by(LAYERS.c.precedence),
    LAYERS.c.job,
)
_INSERT_HISTORY = sa.insert(LAYER_HISTORY).inline()


@sa.event.listens_for(LAYER_KINDS, "after_create")
def _seed_kinds(table: sa.Table, connection: sa.Connection, **_: Any) -> None:
    """Insert the default layers into a database in memory; other databases get them by a migration."""
    connection.execute(sa.insert(LAYER_KINDS), [_kind_values(layer) for layer in DEFAULT_LAYERS])


def read_kinds(connection: sa.Connection) -> tuple[Layer, ...]:
    """The kinds of layers, lowest precedence first."""
    return tuple(
        Layer(**{**row, "writers": frozenset(row["writers"]), "fields": frozenset(row["fields"])})
        for row in connection.execute(_KINDS).mappings()
    )


def insert_kind(connection: sa.Connection, layer: Layer) -> None:
    """Add a kind of layer. Requires: its name and its precedence are free."""
    connection.execute(sa.insert(LAYER_KINDS).values(_kind_values(layer)))


def read_layers(connection: sa.Connection, jobs: Sequence[str]) -> dict[str, tuple[LayerRow, ...]]:
    """The current layers of these jobs, lowest first."""
    found: dict[str, list[LayerRow]] = {}
    rows = _LAYERS.rows(connection, jobs)
    for job, layer, precedence, body, version, actor, reason, at_ms, origins in rows:
        row = LayerRow(
            layer=layer,
            precedence=precedence,
            body=json_text.loads(body),
            version=version,
            actor=actor,
            reason=reason,
            at_ms=at_ms,
            origins=tuple([_unpack(item) for item in json_text.loads(origins)]),
        )
        found.setdefault(job, []).append(row)
    return {job: tuple(rows) for job, rows in found.items()}


def put_layer(connection: sa.Connection, job: str, row: LayerRow, *, birth: str) -> None:
    """Write one layer and its history row. Requires: `row.version` was taken in this transaction."""
    values = {name: getattr(row, name) for name, _ in _COLUMNS} | {"job": job, "layer": row.layer}
    current = {**values, "origins": [_pack(item) for item in row.origins]}
    upsert(connection, LAYERS, [current], replace=_REPLACED)
    connection.execute(_INSERT_HISTORY, {**values, "birth": birth})


def delete_layers(connection: sa.Connection, job: str) -> None:
    """Delete the layers of a former life; the history keeps them."""
    connection.execute(sa.delete(LAYERS).where(LAYERS.c.job == job))


def read_history(
    connection: sa.Connection, job: str, *, layer: str | None, before: int | None, limit: int
) -> tuple[LayerRow, ...]:
    """Writes of a job's layers, newest first; `before`: only with smaller versions."""
    query = sa.select(LAYER_HISTORY).where(LAYER_HISTORY.c.job == job)
    if layer is not None:
        query = query.where(LAYER_HISTORY.c.layer == layer)
    if before is not None:
        query = query.where(LAYER_HISTORY.c.version < before)
    query = query.order_by(LAYER_HISTORY.c.version.desc(), LAYER_HISTORY.c.id.desc()).limit(limit)
    return tuple(_past_row(row) for row in connection.execute(query))


def read_layers_at(connection: sa.Connection, job: str, version: int) -> tuple[str, tuple[LayerRow, ...]]:
    """The birth id of the life with an expected version ("" if none), and its layers then, lowest first."""
    table = LAYER_HISTORY
    life = connection.execute(
        sa.select(table.c.birth)
        .where(table.c.job == job, table.c.version <= version)
        .order_by(table.c.version.desc(), table.c.id.desc())
        .limit(1)
    ).scalar()
    if life is None:
        return "", ()
    newest = (
        sa.select(sa.func.max(table.c.id))
        .where(table.c.job == job, table.c.version <= version, table.c.birth == life)
        .group_by(table.c.layer)
    )
    rows = connection.execute(sa.select(table).where(table.c.id.in_(newest)).order_by(table.c.precedence))
    return str(life), tuple(_past_row(row) for row in rows)


def _past_row(row: sa.Row[Any]) -> LayerRow:
    """A row of the history, which has no origins."""
    return LayerRow(layer=row.layer, **{name: row._mapping[name] for name, _ in _COLUMNS})


def _kind_values(layer: Layer) -> dict[str, Any]:
    return asdict(layer) | {"writers": sorted(layer.writers), "fields": sorted(layer.fields)}


def _pack(origin: Origin) -> list[Any]:
    return [origin.version, origin.actor, origin.at_ms, origin.reason, list(origin.paths)]


def _unpack(packed: Sequence[Any]) -> Origin:
    version, actor, at_ms, reason, paths = packed
    return Origin(version=version, actor=actor, at_ms=at_ms, reason=reason, paths=tuple(paths))
