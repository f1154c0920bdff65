"""What people may ask of shards, and what the solver is told of containers."""

from __future__ import annotations

from penstock.core.errors import NotFound, Refused
from penstock.tasks.container_store import ContainerRow
from penstock.tasks.messages import ShardState
from penstock.tasks.placement import Fleet
from penstock.tasks.shard_load import KINDS
from penstock.tasks.shard_store import ShardRow


def no_shard(shard: int) -> NotFound:
    """The error for a number that no shard has."""
    return NotFound(
        f"there is no shard {shard}", why="shards are numbered from 0", fix="`penstock shard ls` lists them"
    )


def check_move(row: ShardRow | None, shard: int, target: str, accepting: tuple[str, ...]) -> None:
    """Refuse to move a shard that is unknown, on its way, or asked to go where it cannot."""
    if row is None:
        raise no_shard(shard)
    if row.state is ShardState.DROPPING:
        raise Refused(
            f"shard {shard} is on its way already",
            why=f"{row.container} drops it for {row.target or 'nobody'}",
            fix="wait until it has arrived",
        )
    if row.is_quarantined:
        raise Refused(
            f"shard {shard} is quarantined",
            why=f"it cost {row.blame} containers",
            fix=f"look at its tasks, then `penstock shard release {shard}` and move it",
        )
    if target not in accepting:
        raise Refused(
            f"{target} cannot take a shard now",
            why=f"those that can: {', '.join(accepting) or 'none'}",
            fix="choose one of them, or uncordon it",
        )


def fleet_of(containers: tuple[ContainerRow, ...]) -> Fleet:
    """What containers said of their size and place."""
    return Fleet(
        kinds=KINDS,
        capacities={row.name: row.capacity for row in containers if len(row.capacity) == len(KINDS)},
        regions={row.name: row.region for row in containers if row.region},
    )
