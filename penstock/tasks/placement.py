"""Which container each shard goes to (Turbine IV-B), by name and with a reason for every move. Pure.

The decision is array code, `placement_solver`; here names become numbers and back. The number of shards
counts as one more kind of load, so that shards without tasks are spread too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.tasks.placement_problem import (
    NOBODY,
    Floats,
    Mode,
    Problem,
    Rules,
    Shortage,
    Solution,
    Stays,
    Why,
    problem,
)
from penstock.tasks.placement_solver import solve

__all__ = ["Mode", "Move", "Placement", "Refusal", "Rules", "place_shards"]

# Where nobody says how much a container has, only being alike counts.
_BOUNDLESS = 1e9


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
    """What to move now, what had to stay, and what no placement can do."""

    moves: tuple[Move, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    shortages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is known of containers and shards beyond their names; everything may be left out."""

    kinds: tuple[str, ...] = ("load",)  # of load, in the order of the vectors
    capacities: Mapping[str, Sequence[float]] | None = None
    regions: Mapping[str, str] | None = None
    allowed: Mapping[int, frozenset[str]] | None = None  # shard -> regions; absent: anywhere
    costs: Mapping[int, float] | None = None
    jobs: Mapping[int, frozenset[str]] | None = None  # shard -> jobs with a task in it
    excluded: frozenset[tuple[str, str]] = frozenset()  # (job, container)


def place_shards(
    shards: Iterable[int],
    containers: Iterable[str],
    current: Mapping[int, str],
    *,
    loads: Mapping[int, float | Sequence[float]],
    mode: Mode,
    leaving: frozenset[str] = frozenset(),
    in_motion: Mapping[int, str] | frozenset[int] = frozenset(),
    moves_max: int = 8,
    fleet: Fleet | None = None,
    rules: Rules | None = None,
) -> Placement:
    """Decide the moves of one round.

    `containers` may receive shards; `leaving` must lose theirs; shards elsewhere stay where they are.
    `current` names the owner, or for a shard `in_motion` where it is going: it is counted there (and where it
    comes from, if that is told), and not moved.
    """
    desk = _Desk(fleet or Fleet(), sorted(set(containers) - leaving), leaving)
    asked = sorted({*shards, *current})
    asked = [shard for shard in asked if current.get(shard) is None or current[shard] in desk.number]
    if not asked:
        return Placement()
    rules = rules or Rules(moves_max=moves_max)
    posed = desk.pose(asked, current, loads, in_motion)
    return desk.read(asked, posed, solve(posed, rules, mode), rules)


class _Desk:
    """Names to numbers and back."""

    def __init__(self, fleet: Fleet, takers: list[str], leaving: frozenset[str]) -> None:
        self._fleet = fleet
        self.names = [*takers, *sorted(leaving)]
        self.number = {name: number for number, name in enumerate(self.names)}
        self._leaving = np.array([name in leaving for name in self.names], bool)
        self._kinds = (*fleet.kinds, "shards")

    def pose(
        self,
        shards: Sequence[int],
        current: Mapping[int, str],
        loads: Mapping[int, float | Sequence[float]],
        in_motion: Mapping[int, str] | frozenset[int],
    ) -> Problem:
        fleet, place = self._fleet, {shard: row for row, shard in enumerate(shards)}
        sources = in_motion if isinstance(in_motion, Mapping) else {}
        jobs = fleet.jobs or {}
        pairs = [(place[shard], job) for shard in shards for job in sorted(jobs.get(shard, ()))]
        job_number = {job: number for number, job in enumerate(sorted({job for _, job in pairs}))}
        regions = fleet.regions or {}
        region_number = {name: number for number, name in enumerate(sorted(set(regions.values()) | {""}))}
        return problem(
            self._loads(shards, loads),
            self._capacities(),
            owners=_numbers([self.number.get(current.get(shard, ""), NOBODY) for shard in shards]),
            regions=_numbers([region_number[regions.get(name, "")] for name in self.names]),
            allowed=self._allowed(shards, region_number),
            receiving=~self._leaving,
            leaving=self._leaving,
            fixed=np.array([shard in in_motion for shard in shards], bool),
            from_=_numbers([self.number.get(sources.get(shard, ""), NOBODY) for shard in shards]),
            costs=np.array([(fleet.costs or {}).get(shard, 1.0) for shard in shards], np.float32),
            job_shards=_numbers([shard for shard, _ in pairs]),
            job_ids=_numbers([job_number[job] for _, job in pairs]),
            excluded=tuple(
                (job_number[job], self.number[name])
                for job, name in sorted(fleet.excluded)
                if job in job_number and name in self.number
            ),
        )

    def _loads(self, shards: Sequence[int], loads: Mapping[int, float | Sequence[float]]) -> Floats:
        rows = np.zeros((len(shards), len(self._kinds)), np.float32)
        rows[:, -1] = 1
        for row, shard in enumerate(shards):
            if shard in loads:
                rows[row, :-1] = loads[shard]
        return np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)

    def _capacities(self) -> Floats:
        rows = np.full((len(self.names), len(self._kinds)), _BOUNDLESS, np.float32)
        for name, capacity in (self._fleet.capacities or {}).items():
            if name in self.number:
                rows[self.number[name], :-1] = capacity
        # Twice as large is twice as many shards: anything else would contradict an even load.
        known = np.isin(self.names, list(self._fleet.capacities or {}))
        sizes = rows[known, :-1].astype(np.float64)
        mean = sizes.mean(axis=0) if known.any() else sizes[:0]
        rows[known, -1] *= (sizes[:, mean > 0] / mean[mean > 0]).mean(axis=1) if (mean > 0).any() else 1
        return rows

    def _allowed(self, shards: Sequence[int], regions: Mapping[str, int]) -> np.ndarray:
        allowed = np.full(len(shards), 2**64 - 1, np.uint64)
        for row, shard in enumerate(shards):
            named = (self._fleet.allowed or {}).get(shard)
            if named is not None:
                allowed[row] = sum(1 << regions[name] for name in named if name in regions)
        return allowed

    def read(self, shards: Sequence[int], posed: Problem, found: Solution, rules: Rules) -> Placement:
        """The solution in names, with reasons."""
        moves = []
        for row in found.moved.tolist():
            source, target = int(posed.owners[row]), int(found.owners[row])
            if target == NOBODY:
                continue
            moves.append(
                Move(
                    shard=shards[row],
                    source=None if source == NOBODY else self.names[source],
                    target=self.names[target],
                    reason=self._reason(Why(int(found.why[row])), source, target, posed, found),
                )
            )
        refusals = tuple(
            Refusal(shard=shards[row], reason=self._refusal(row, Stays(why), posed, found, rules))
            for row, why in zip(found.refused.tolist(), found.reasons.tolist(), strict=True)
        )
        shortages = tuple(self._shortage(item, shards) for item in found.shortages)
        return Placement(moves=tuple(moves), refusals=refusals, shortages=shortages)

    def _reason(self, why: Why, source: int, target: int, posed: Problem, found: Solution) -> str:
        match why:
            case Why.ORPHAN:
                return "nobody owns it"
            case Why.DRAIN:
                return f"{self.names[source]} is drained"
            case Why.REGION:
                return f"it may not be on {self.names[source]}"
            case Why.FILL:
                return f"{self.names[target]} is nearly empty"
            case Why.APART:
                return f"{self.names[source]} has another task of one of its jobs"
            case Why.CAP:
                return f"{self.names[source]} is above what it may carry"
        before = _sums(posed)
        share = np.maximum(found.targets, 1e-9)
        off = before[[source, target]] / share[[source, target]]
        kind = int(np.argmax(np.abs(off[0] - off[1])))
        return (
            f"{self._kinds[kind]}: {self.names[source]} has {off[0, kind]:.2f} of its share, "
            f"{self.names[target]} has {off[1, kind]:.2f}"
        )

    def _refusal(self, row: int, why: Stays, posed: Problem, found: Solution, rules: Rules) -> str:
        match why:
            case Stays.BUDGET if rules.moves_max == 0:
                return "nothing that has an owner may move now: a later round takes it"
            case Stays.BUDGET:
                return f"{rules.moves_max} moves a round are enough: the next one takes it"
            case Stays.DRAINED:
                return "the containers that could take it are drained, too"
            case Stays.REGION:
                return "no other container of the regions that it may be in takes shards"
            case Stays.EXCLUDED:
                return "it should not be on any container that could take it"
            case Stays.NO_CONTAINER:
                other = "" if found.owners[row] == NOBODY else "other "
                return f"no {other}container may take shards"
            case Stays.ROOM:
                return (
                    f"no container that it may use has room for it{self._missing(row, posed, found, rules)}"
                )

    def _missing(self, row: int, posed: Problem, found: Solution, rules: Rules) -> str:
        """What there is too little of, for a shard that fits nowhere."""
        bits = np.uint64(1) << posed.regions.astype(np.uint64)
        takers = posed.receiving & ((posed.allowed[row] & bits) != 0)
        if found.owners[row] != NOBODY:
            takers[found.owners[row]] = False
        free = (posed.capacities * np.float32(1 - rules.headroom) - found.used)[takers].max(axis=0).clip(0)
        need = posed.loads[row]
        lacking = np.flatnonzero(need > free)
        if not lacking.size:
            return ": none has enough of everything at once"
        kind = int(lacking[0])
        return f": it needs {need[kind]:.4g} {self._kinds[kind]}, at most {free[kind]:.4g} is free"

    def _shortage(self, item: Shortage, shards: Sequence[int]) -> str:
        what = f"shard {shards[item.shard]} needs" if item.shard != NOBODY else "all together need"
        return f"{what} {item.demand:.4g} {self._kinds[item.dimension]}, {item.available:.4g} can be used"


def _sums(posed: Problem) -> Floats:
    sums = np.zeros_like(posed.capacities)
    owned = posed.owners >= 0
    np.add.at(sums, posed.owners[owned], posed.loads[owned])
    return sums


def _numbers(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)
