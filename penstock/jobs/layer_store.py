"""Layers as rows: which kinds there are and who may write them, the layers of jobs, each write of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from penstock.core.quick_store import MADE_ONCE, insert_all, later
from penstock.core.sql_store import METADATA, NAME, ROW_ID
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

# Built once: to build a statement takes longer than to run it, and these run with every write.
KINDS_QUERY = sa.select(LAYER_KINDS).order_by(LAYER_KINDS.c.precedence).execution_options(**MADE_ONCE)
_KEPT = "layer kinds"
_REMEMBER = insert_all(LAYER_HISTORY, without=("id",))


def _replace(insert: Any) -> Any:
    values = {column.name: insert.excluded[column.name] for column in LAYERS.c if not column.primary_key}
    return insert_all(LAYERS, insert.on_conflict_do_update(index_elements=["job", "layer"], set_=values))


_REPLACE = {
    "sqlite": _replace(sqlite.insert(LAYERS)),
    "postgresql": _replace(postgresql.insert(LAYERS)),
}


@sa.event.listens_for(LAYER_KINDS, "after_create")
def _seed_kinds(table: sa.Table, connection: sa.Connection, **_: Any) -> None:
    """A database in memory is made from the tables alone; a migration seeds every other."""
    connection.execute(sa.insert(LAYER_KINDS), [_kind_values(layer) for layer in DEFAULT_LAYERS])


def read_kinds(connection: sa.Connection) -> tuple[Layer, ...]:
    """The layers there are, lowest first."""
    return _kinds(connection.execute(KINDS_QUERY))


def _kinds(rows: Iterable[Sequence[Any]]) -> tuple[Layer, ...]:
    names = LAYER_KINDS.columns.keys()
    kinds = (dict(zip(names, row, strict=True)) for row in rows)
    sets = ("writers", "fields")
    return tuple(Layer(**kind | {name: frozenset(kind[name]) for name in sets}) for kind in kinds)


def keep_kinds(connection: sa.Connection, rows: Iterable[Sequence[Any]]) -> None:
    """The answer to KINDS_QUERY, read under the lock, for `kept_kinds`."""
    connection.memory[_KEPT] = _kinds(rows)  # type: ignore[attr-defined]


def kept_kinds(connection: sa.Connection) -> tuple[Layer, ...]:
    """The same, read once in a transaction that writes: nobody else changes them meanwhile."""
    memory: dict[str, Any] = connection.memory  # type: ignore[attr-defined]
    if _KEPT not in memory:
        memory[_KEPT] = read_kinds(connection)
    found: tuple[Layer, ...] = memory[_KEPT]
    return found


def insert_kind(connection: sa.Connection, layer: Layer) -> None:
    """Requires: neither its name nor its precedence is taken."""
    connection.execute(sa.insert(LAYER_KINDS).values(_kind_values(layer)))
    connection.memory.pop(_KEPT, None)  # type: ignore[attr-defined]


def read_layers(connection: sa.Connection, jobs: Sequence[str]) -> dict[str, tuple[LayerRow, ...]]:
    """The layers of these jobs as they stand, lowest first."""
    query = sa.select(LAYERS).where(LAYERS.c.job.in_(jobs)).order_by(LAYERS.c.precedence)
    found: dict[str, list[LayerRow]] = {}
    for row in connection.execute(query):
        found.setdefault(row.job, []).append(layer_row(row))
    return {job: tuple(rows) for job, rows in found.items()}


def layer_rows(rows: Iterable[Sequence[Any]]) -> tuple[LayerRow, ...]:
    """Rows of all columns of LAYERS, typed; those of nobody, which an outer join makes, left out."""
    names = LAYERS.columns.keys()
    return tuple([_layer_row(dict(zip(names, row, strict=True))) for row in rows if row[0] is not None])


def put_layer(connection: sa.Connection, job: str, row: LayerRow, *, birth: str) -> None:
    """Write one layer and its history. Requires: `row.version` was taken in this transaction."""
    values = {name: getattr(row, name) for name, _ in _COLUMNS} | {"job": job, "layer": row.layer}
    replace = _REPLACE[connection.dialect.name]
    later(connection, replace, {**values, "origins": [_pack(item) for item in row.origins]})
    later(connection, _REMEMBER, {**values, "birth": birth})


def delete_layers(connection: sa.Connection, job: str) -> None:
    """Take the layers of a former life away; the history keeps them."""
    connection.execute(sa.delete(LAYERS).where(LAYERS.c.job == job))


def read_history(
    connection: sa.Connection, job: str, *, layer: str | None, before: int | None, limit: int
) -> tuple[LayerRow, ...]:
    """Writes of a job's layers, newest first, those with a version below `before` if it is given."""
    query = sa.select(LAYER_HISTORY).where(LAYER_HISTORY.c.job == job)
    if layer is not None:
        query = query.where(LAYER_HISTORY.c.layer == layer)
    if before is not None:
        query = query.where(LAYER_HISTORY.c.version < before)
    query = query.order_by(LAYER_HISTORY.c.version.desc(), LAYER_HISTORY.c.id.desc()).limit(limit)
    return tuple(layer_row(row) for row in connection.execute(query))


def read_layers_at(connection: sa.Connection, job: str, version: int) -> tuple[str, tuple[LayerRow, ...]]:
    """The life that an expected version belongs to ("" if to none), and its layers then, lowest first."""
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
    return str(life), tuple(layer_row(row) for row in rows)


def layer_row(row: sa.Row[Any]) -> LayerRow:
    """A row of either table, typed."""
    return _layer_row(dict(row._mapping))


def _layer_row(values: Mapping[str, Any]) -> LayerRow:
    origins = tuple([_unpack(item) for item in values.get("origins", ())])
    return LayerRow(layer=values["layer"], origins=origins, **{name: values[name] for name, _ in _COLUMNS})


def _kind_values(layer: Layer) -> dict[str, Any]:
    return asdict(layer) | {"writers": sorted(layer.writers), "fields": sorted(layer.fields)}


def _pack(origin: Origin) -> list[Any]:
    return [origin.version, origin.actor, origin.at_ms, origin.reason, list(origin.paths)]


def _unpack(packed: Sequence[Any]) -> Origin:
    version, actor, at_ms, reason, paths = packed
    return Origin(version=version, actor=actor, at_ms=at_ms, reason=reason, paths=tuple(paths))
