"""Which container each shard goes to (Turbine IV-B). Pure: equal inputs, equal moves, a reason with each.

Load comes first, the number of shards second: with few tasks over many shards an even count alone can put
every task on one container. Starts from where the shards are and moves little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

BAND = 0.10  # containers within this fraction of the mean load are left alone
_TINY = 1e-9


class Mode(StrEnum):
    """`emergency`: only shards without an owner, all of them. `periodic`: also balance, within a budget."""

    EMERGENCY = "emergency"
    PERIODIC = "periodic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Give `shard` to `target`; `source` is None when nobody has it."""

    shard: int
    source: str | None
    target: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A shard that should move and cannot."""

    shard: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What to move now, and what had to stay."""

    moves: tuple[Move, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def place_shards(
    shards: Iterable[int],
    containers: Iterable[str],
    current: Mapping[int, str],
    *,
    loads: Mapping[int, float],
    mode: Mode,
    leaving: frozenset[str] = frozenset(),
    in_motion: frozenset[int] = frozenset(),
    moves_max: int = 8,
) -> Placement:
    """Decide the moves of one round.

    `containers` may receive shards; `leaving` must lose theirs; shards elsewhere stay where they are.
    `current` names the owner, or for a shard `in_motion` where it is going: it is counted, not moved.
    """
    floor = _Floor(tuple(sorted(set(containers) - leaving)), loads, current, in_motion)
    orphans = floor.heaviest_first(shard for shard in shards if shard not in current)
    leavers = floor.heaviest_first(s for s in current if current[s] in leaving and s not in in_motion)
    if not floor.names:
        stuck = orphans + (leavers if mode is Mode.PERIODIC else [])
        return Placement(
            refusals=tuple(Refusal(shard=s, reason="no container may take shards") for s in stuck)
        )
    for shard in orphans:
        floor.move(shard, floor.best_target(shard), "nobody owns it")
    refusals: list[Refusal] = []
    if mode is Mode.PERIODIC:
        budget_end = len(floor.moves) + moves_max
        for shard in leavers:
            if len(floor.moves) < budget_end:
                floor.move(shard, floor.best_target(shard), f"{current[shard]} is drained")
            else:
                refusals.append(
                    Refusal(
                        shard=shard, reason=f"{moves_max} moves a round are enough: the next one takes it"
                    )
                )
        while len(floor.moves) < budget_end and (floor.level_load() or floor.level_count()):
            pass
    return Placement(moves=tuple(floor.moves), refusals=tuple(refusals))


@dataclass(slots=True)
class _Floor:
    """The containers as the moves decided so far leave them."""

    names: tuple[str, ...]
    loads: Mapping[int, float]
    current: Mapping[int, str]
    in_motion: frozenset[int]
    moves: list[Move] = field(default_factory=list)
    load: dict[str, float] = field(default_factory=dict)
    held: dict[str, set[int]] = field(default_factory=dict)
    movable: dict[str, set[int]] = field(default_factory=dict)  # not in motion, not moved in this round

    def __post_init__(self) -> None:
        self.load = dict.fromkeys(self.names, 0.0)
        self.held = {name: set() for name in self.names}
        self.movable = {name: set() for name in self.names}
        for shard, name in sorted(self.current.items()):
            if name in self.held:
                self.held[name].add(shard)
                self.load[name] += self.load_of(shard)
                if shard not in self.in_motion:
                    self.movable[name].add(shard)

    def load_of(self, shard: int) -> float:
        return max(0.0, self.loads.get(shard, 0.0))

    def heaviest_first(self, shards: Iterable[int]) -> list[int]:
        return sorted(shards, key=lambda shard: (-self.load_of(shard), shard))

    def best_target(self, shard: int) -> str:
        if self.load_of(shard) > 0:
            return min(self.names, key=lambda name: (self.load[name], len(self.held[name]), name))
        return min(self.names, key=lambda name: (len(self.held[name]), self.load[name], name))

    def move(self, shard: int, target: str, reason: str) -> None:
        source = self.current.get(shard)
        if source in self.held:
            self.held[source].discard(shard)
            self.movable[source].discard(shard)
            self.load[source] -= self.load_of(shard)
        self.held[target].add(shard)
        self.load[target] += self.load_of(shard)
        self.moves.append(Move(shard=shard, source=source, target=target, reason=reason))

    def level_load(self) -> bool:
        """Move one loaded shard from a hot container to the coldest; False when none would help."""
        mean = sum(self.load.values()) / len(self.names)
        cold = min(self.names, key=lambda name: (self.load[name], len(self.held[name]), name))
        for hot in sorted(self.names, key=lambda name: (-self.load[name], name)):
            if self.load[hot] <= mean * (1 + BAND) and self.load[cold] >= mean * (1 - BAND):
                return False
            gap = self.load[hot] - self.load[cold]
            # Smaller than the gap: the pair ends closer together than it was, so rounds cannot go in circles.
            helpful = [s for s in self.movable[hot] if _TINY < self.load_of(s) < gap * (1 - _TINY)]
            if helpful:
                shard = min(helpful, key=lambda s: (abs(gap - 2 * self.load_of(s)), s))
                self.move(
                    shard, cold, f"load: {hot} has {self.load[hot]:.3g}, {cold} has {self.load[cold]:.3g}"
                )
                return True
        return False

    def level_count(self) -> bool:
        """Move one shard without load from the fullest container that has one; False when none would help."""
        few = min(self.names, key=lambda name: (len(self.held[name]), name))
        for many in sorted(self.names, key=lambda name: (-len(self.held[name]), name)):
            if len(self.held[many]) - len(self.held[few]) <= 1:
                return False
            idle = [s for s in self.movable[many] if self.load_of(s) <= _TINY]
            if idle:
                counts = f"{many} has {len(self.held[many])}, {few} has {len(self.held[few])}"
                self.move(min(idle), few, f"count: {counts}")
                return True
        return False
