"""How patient and how busy a Shard Manager is, and what it says of one round. Pure: values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.clock import Millis
from penstock.fleet.liveness import Alert
from penstock.fleet.placement.placement import Move


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How patient and how busy a Shard Manager is."""

    balance_ms: Millis = 30 * 60_000
    balance_soon_ms: Millis = (
        5_000  # after the task list or the set of containers changed, or with moves left to do
    )
    moves_max: int = 8  # under way at once; in a large fleet one for every ten containers
    add_timeout_ms: Millis = 15_000  # told, heard from, and yet not recorded: the shard is taken back
    drop_timeout_ms: Millis = 60_000  # told, heard from, and yet not reaped: the container's lease runs out
    engine_wait_ms: Millis = 60_000  # for engines that start together, before others take their shards
    engine_suspect_ms: Millis = 120_000  # a shard that left a lost engine stays with the next one so long

    def moves_of(self, containers: int) -> int:
        """How many shards of a fleet of that size may be on their way at once."""
        return max(self.moves_max, containers // 10)


@dataclass(slots=True)
class TickReport:
    """What one round did."""

    failed_over: list[str] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
