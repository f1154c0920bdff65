"""The records of shards: read, and written by compare-and-set on their epochs.

Every change takes the next number of one counter as its epoch, so the last one given out is also the version
of the whole assignment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from penstock.core.errors import VersionConflict
from penstock.core.quick_store import MADE_ONCE
from penstock.core.sql_store import METADATA, current_value, next_values
from penstock.tasks.messages import ShardEntry, ShardState

EPOCHS = "shard_epoch"

SHARDS = sa.Table(
    "shards",
    METADATA,
    sa.Column("shard", sa.Integer, primary_key=True),
    sa.Column("container", sa.String, nullable=True, index=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("target", sa.String, nullable=True),  # where it goes once `container` has dropped it
    sa.Column("blame", sa.Integer, nullable=False, server_default="0"),  # containers it cost
)
BLAME_MAX = 2  # a shard that cost this many containers goes to no other


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRow:
    """One shard's record."""

    shard: int
    container: str | None
    epoch: int
    state: ShardState
    target: str | None
    blame: int = 0

    @property
    def is_quarantined(self) -> bool:
        """Whether it may not be placed until somebody has looked at it."""
        return self.blame >= BLAME_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One container's whole set of shards at one version."""

    version: int
    shards: tuple[ShardEntry, ...]


class Put(NamedTuple):
    """A shard as it was read, and what becomes of it."""

    row: ShardRow
    container: str | None
    state: ShardState
    target: str | None = None


def put_shards(connection: sa.Connection, puts: Sequence[Put]) -> None:
    """The one place that changes shards' records: compare-and-set on the epochs, and new epochs."""
    if not puts:
        return
    epochs = next_values(connection, EPOCHS, len(puts))
    values = [
        {
            "of_shard": put.row.shard,
            "of_epoch": put.row.epoch,
            "container": put.container,
            "epoch": epoch,
            "state": str(put.state),
            "target": put.target,
        }
        for put, epoch in zip(puts, epochs, strict=True)
    ]
    changed = connection.execute(_PUT, values[0] if len(values) == 1 else values)
    if changed.rowcount != len(puts):
        first = puts[0].row
        raise VersionConflict(f"shard {first.shard} or one with it", expected=first.epoch, actual=epochs[0])


def read_shards(connection: sa.Connection) -> tuple[ShardRow, ...]:
    """Every shard's record, in order."""
    return _typed(connection.execute(_ALL))


def read_shards_of(connection: sa.Connection, container: str) -> tuple[ShardRow, ...]:
    """The records of the shards that a container has, in order."""
    return _typed(connection.execute(_ALL_OF, {"key": container}))


def _typed(rows: Iterable[Any]) -> tuple[ShardRow, ...]:
    return tuple(
        ShardRow(
            shard=shard, container=container, epoch=epoch, state=_STATES[state], target=target, blame=blame
        )
        for shard, container, epoch, state, target, blame in rows
    )


_STATES = {str(state): state for state in ShardState}
_ALL = (
    sa.select(
        SHARDS.c.shard, SHARDS.c.container, SHARDS.c.epoch, SHARDS.c.state, SHARDS.c.target, SHARDS.c.blame
    )
    .order_by(SHARDS.c.shard)
    .execution_options(**MADE_ONCE)
)
_ALL_OF = _ALL.where(SHARDS.c.container == sa.bindparam("key"))
_OF_CONTAINER = (
    sa.select(SHARDS.c.shard, SHARDS.c.epoch, SHARDS.c.state)
    .where(SHARDS.c.container == sa.bindparam("key"))
    .order_by(SHARDS.c.shard)
    .execution_options(**MADE_ONCE)
)
_PUT = (
    sa.update(SHARDS)
    .where(SHARDS.c.shard == sa.bindparam("of_shard"), SHARDS.c.epoch == sa.bindparam("of_epoch"))
    .values({name: sa.bindparam(name) for name in ("container", "epoch", "state", "target")})
    .execution_options(**MADE_ONCE)
)


def assignment_of(connection: sa.Connection, name: str) -> Assignment:
    """A container's shards, and the version of the whole assignment."""
    entries = tuple(
        ShardEntry(shard=shard, epoch=epoch, state=_STATES[state])
        for shard, epoch, state in connection.execute(_OF_CONTAINER, {"key": name})
    )
    return Assignment(version=current_value(connection, EPOCHS), shards=entries)
