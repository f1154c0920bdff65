"""Which container each shard goes to (Turbine IV-B), by name and with a reason for every move. Pure.

The decision is array code (`solve`); `place_shards` turns names into numbers and back. The number of shards
counts as one more kind of load, so that shards without tasks are spread too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.clock import Millis
from penstock.core.journal import Entry
from penstock.fleet.placement.fit import fill, make_room, place, place_some, withdraw
from penstock.fleet.placement.problem import (
    NO_OWNER,
    Budget,
    Flags,
    Floats,
    Indices,
    Mode,
    MoveReason,
    Problem,
    Rules,
    Shortage,
    Solution,
    StayReason,
    problem,
)
from penstock.fleet.placement.repair import ROUNDING, PlacementState, repair, shards_to_relieve
from penstock.fleet.placement.shares import PlacementModel, build_model, row_max

ROUNDS = 8
CHOICES = 16


def crowded(floor: PlacementState) -> Indices:
    """Shards that share a container with more of one of their jobs than an even spread would put there."""
    problem = floor.ground.problem
    if not problem.job_shards.size:
        return np.zeros(0, np.int32)
    owners = floor.owners[problem.job_shards]
    placed = owners >= 0
    shards, jobs, owners = problem.job_shards[placed], problem.job_ids[placed], owners[placed]
    takers = max(1, int(problem.receiving.sum()))
    fair = -(-np.bincount(jobs) // takers)
    order = np.lexsort((shards, owners, jobs))
    jobs, owners, shards = jobs[order], owners[order], shards[order]
    starts = np.flatnonzero((np.diff(jobs, prepend=-1) != 0) | (np.diff(owners, prepend=-1) != 0))
    rank = np.arange(jobs.size) - np.repeat(starts, np.diff(np.append(starts, jobs.size)))
    return np.unique(shards[rank >= fair[jobs]]).astype(np.int32)


def spread_jobs(floor: PlacementState) -> None:
    """Swap crowded shards with others of nearly their size elsewhere; stops when that helps no more."""
    for _ in range(ROUNDS):
        movable = crowded(floor)
        movable = movable[floor.movable[movable]]
        if not movable.size or not _swap_some(floor, movable):
            return


def _swap_some(floor: PlacementState, shards: Indices) -> bool:
    ground, problem = floor.ground, floor.ground.problem
    pool = np.flatnonzero(floor.movable & (floor.owners >= 0)).astype(np.int32)
    pool = pool[problem.receiving[floor.owners[pool]]]
    if not pool.size:
        return False
    partners = pool[floor.rng.integers(0, pool.size, (shards.size, CHOICES))]
    mine, theirs = floor.owners[shards][:, None], floor.owners[partners]
    flow = np.take(ground.loads, shards, axis=0)[:, None, :] - np.take(ground.loads, partners, axis=0)
    ok = (mine != theirs) & (np.take(problem.receiving, mine))
    ok &= (problem.allowed[shards][:, None] & ground.bits[theirs]) != 0
    ok &= (problem.allowed[partners] & np.take(ground.bits, mine)) != 0
    ok &= ~ground.is_forbidden(shards[:, None], theirs) & ~ground.is_forbidden(partners, mine)
    ok &= _stays_good(floor, np.broadcast_to(mine, theirs.shape), -flow) & _stays_good(floor, theirs, flow)
    ok &= ~_meets(floor, np.broadcast_to(shards[:, None], theirs.shape), theirs)
    ok &= ~_meets(floor, partners, np.broadcast_to(mine, theirs.shape))
    best = np.argmax(ok, axis=1)
    used: set[int] = set()
    swapped = False
    for row in np.flatnonzero(ok.any(axis=1)):
        shard, partner = int(shards[row]), int(partners[row, best[row]])
        one, other = int(floor.owners[shard]), int(floor.owners[partner])
        if used & {one, other}:
            continue  # sums have changed there: the next round looks again
        if not floor.budget.take([(shard, other), (partner, one)]):
            continue
        used |= {one, other}
        floor.used[one] -= flow[row, best[row]]
        floor.used[other] += flow[row, best[row]]
        for moved, to in ((shard, other), (partner, one)):
            floor.owners[moved] = to
            if floor.why[moved] == MoveReason.STAYS:
                floor.why[moved] = MoveReason.APART
        swapped = True
    return swapped


def _stays_good(floor: PlacementState, who: Indices, change: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Inside the goal and every limit afterwards."""
    ground = floor.ground
    after = np.take(floor.used, who, axis=0) + change
    shares = np.take(ground.shares, who, axis=0)
    inside = np.abs(after - shares) <= np.float32(ground.rules.goal) * shares + np.float32(1e-6)
    return np.asarray((inside & (after <= np.take(ground.limits, who, axis=0))).all(axis=-1))


def _meets(floor: PlacementState, shards: Indices, containers: Indices) -> NDArray[np.bool_]:
    """Whether a job of the shard has another shard there already."""
    problem = floor.ground.problem
    size = problem.container_count + 1
    there = np.unique(problem.job_ids.astype(np.int64) * size + floor.owners[problem.job_shards])
    order = np.argsort(problem.job_shards, kind="stable")
    sorted_shards, jobs = problem.job_shards[order], problem.job_ids[order]
    first = np.searchsorted(sorted_shards, shards)
    last = np.searchsorted(sorted_shards, shards, side="right")
    found = np.zeros(shards.shape, bool)
    for offset in range(int((last - first).max()) if shards.size else 0):
        at = first + offset
        has = at < last
        keys = jobs[np.minimum(at, jobs.size - 1)].astype(np.int64) * size + containers
        place = np.minimum(np.searchsorted(there, keys), there.size - 1)
        found |= has & (there[place] == keys)
    return found


def explain(
    floor: PlacementState, should_move: Flags, needs_moves: Indices
) -> tuple[Indices, NDArray[np.int8]]:
    """The shards that should move and do not, and why each stays.

    Those of `should_move`, and of each container that ends above a limit what would have to leave it.
    `needs_moves` find room when others have moved, for which there was no budget.
    """
    refused = np.flatnonzero(should_move | _too_many(floor)).astype(np.int32)
    reasons = np.zeros(refused.size, np.int8)
    reasons[np.isin(refused, needs_moves) | _fit_into_the_roomiest(floor, refused)] = StayReason.BUDGET
    for number in np.flatnonzero(reasons == 0).tolist():
        reasons[number] = _why_one_stays(floor, int(refused[number]))
    return refused, reasons


def _fit_into_the_roomiest(floor: PlacementState, shards: Indices) -> Flags:
    """Which of these the roomiest container takes: found without a search, and mostly all that wait."""
    ground, found = floor.ground, np.zeros(shards.size, bool)
    room = ground.limits - floor.used
    for number in np.unique(ground.which[shards]).tolist():
        takers = np.flatnonzero(ground.may_use(ground.masks[number]))
        if takers.size:
            best = takers[np.argmin(row_max(-room[takers]))]
            mine = np.flatnonzero(ground.which[shards] == number)
            fits = (ground.loads[shards[mine]] <= room[best]).all(axis=1) & (
                floor.owners[shards[mine]] != best
            )
            found[mine] = fits & ~ground.is_forbidden(shards[mine], int(best))
    return found


def _too_many(floor: PlacementState) -> Flags:
    """(N,) the fewest shards whose departure would bring their containers below their limits."""
    ground, found = floor.ground, np.zeros(floor.owners.size, bool)
    coming = np.flatnonzero(ground.problem.from_ >= 0)
    used = floor.used.copy()
    # A shard that is on its way out has left soon.
    np.subtract.at(used, ground.problem.from_[coming], ground.loads[coming])
    above = used - ground.limits * np.float32(1.0001)
    for container in np.flatnonzero((row_max(above) > 0) & ground.problem.receiving).tolist():
        mine = np.flatnonzero((floor.owners == container) & floor.movable).astype(np.int32)
        found[shards_to_relieve(floor, mine, above[container])] = True
    return found


def _why_one_stays(floor: PlacementState, shard: int) -> StayReason:
    ground, home = floor.ground, int(floor.owners[shard])
    problem = ground.problem
    in_region = (problem.allowed[shard] & ground.bits) != 0
    if home != NO_OWNER:
        in_region[home] = False
    takers = np.flatnonzero(problem.receiving & in_region)
    if not takers.size:
        if (problem.leaving & in_region).any() or (problem.leaving.any() and not problem.receiving.any()):
            return StayReason.DRAINED
        others = problem.receiving.copy()
        if home != NO_OWNER:
            others[home] = False
        return StayReason.REGION if others.any() else StayReason.NO_CONTAINER
    roomy = takers[fits(floor, shard, takers)]
    barred = ground.is_forbidden(shard, roomy if roomy.size else takers)
    if barred.all():
        return StayReason.EXCLUDED
    return StayReason.BUDGET if roomy.size else StayReason.ROOM


def fits(floor: PlacementState, shard: int, containers: NDArray[np.intp]) -> Flags:
    """Which of these have room for a shard, as far as it needs anything."""
    ground, need = floor.ground, floor.ground.loads[shard]
    room = ground.limits[containers] - floor.used[containers]
    return np.asarray(((need <= room + ROUNDING) | (need <= 0)).all(axis=1))


def solve(problem: Problem, rules: Rules, mode: Mode) -> Solution:
    """Decide the moves of one round."""
    ground = build_model(problem, rules)
    floor = start(ground)
    before = floor.used.copy()
    homeless = place(floor, _indices(problem.owners == NO_OWNER), MoveReason.ORPHAN)
    needs_moves = make_room(floor, homeless, MoveReason.ORPHAN) if homeless.size else homeless
    repair(floor, only_limits=True)
    if mode is Mode.PERIODIC:
        place_some(floor, _indices(misplaced(floor) & floor.movable), MoveReason.REGION)
        place_some(floor, _indices(leaving(floor) & floor.movable), MoveReason.DRAIN)
        fill(floor)
        repair(floor)
        spread_jobs(floor)
        repair(floor, only_limits=True)
    withdraw(floor, before)
    should_move = floor.owners == NO_OWNER
    if mode is Mode.PERIODIC:
        should_move |= (misplaced(floor) | leaving(floor)) & floor.movable
    refused, reasons = explain(floor, should_move, needs_moves)
    return Solution(
        owners=floor.owners,
        why=floor.why,
        moved=_indices(floor.owners != problem.owners),
        refused=refused,
        reasons=reasons,
        shortages=ground.shortages,
        used=floor.used * ground.scale,
        targets=ground.shares * ground.scale,
        deviations=floor.deviations(),
        exempt=floor.exempt(),
    )


def start(ground: PlacementModel) -> PlacementState:
    """Everything where it is now; a shard on its way counts on both sides."""
    problem = ground.problem
    used = np.empty_like(ground.shares)
    owners, also = problem.owners, np.flatnonzero(problem.from_ >= 0)
    for dimension in range(used.shape[1]):
        column = np.ascontiguousarray(ground.loads[:, dimension])
        # One place more, for shards that nobody owns.
        sums = np.bincount(owners + 1, weights=column, minlength=problem.container_count + 1)[1:]
        if also.size:
            sums += np.bincount(problem.from_[also], weights=column[also], minlength=problem.container_count)
        used[:, dimension] = sums
    return PlacementState(
        ground=ground,
        owners=owners.copy(),
        used=used,
        why=np.zeros(problem.shard_count, np.int8),
        movable=~problem.fixed,
        rng=np.random.default_rng(ground.rules.seed),
        budget=Budget(problem, ground.rules),
    )


def misplaced(floor: PlacementState) -> np.ndarray:
    """(N,) shards in a region or a container that they may not use."""
    ground = floor.ground
    bits = np.append(ground.bits, np.uint64(0))[floor.owners]
    owned = floor.owners != NO_OWNER
    wrong = owned & ((ground.problem.allowed & bits) == 0)
    if ground.forbidden.size:
        wrong |= ground.is_forbidden(np.arange(owned.size), floor.owners) & owned
    return np.asarray(wrong)


def leaving(floor: PlacementState) -> np.ndarray:
    """(N,) shards in containers that are to be emptied."""
    return np.asarray(np.append(floor.ground.problem.leaving, False)[floor.owners])


def _indices(flags: np.ndarray) -> Indices:
    return np.flatnonzero(flags).astype(np.int32)


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
            owners=_numbers([self.number.get(current.get(shard, ""), NO_OWNER) for shard in shards]),
            regions=_numbers([region_number[regions.get(name, "")] for name in self.names]),
            allowed=self._allowed(shards, region_number),
            receiving=~self._leaving,
            leaving=self._leaving,
            fixed=np.array([shard in in_motion for shard in shards], bool),
            from_=_numbers([self.number.get(sources.get(shard, ""), NO_OWNER) for shard in shards]),
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
            if target == NO_OWNER:
                continue
            moves.append(
                Move(
                    shard=shards[row],
                    source=None if source == NO_OWNER else self.names[source],
                    target=self.names[target],
                    reason=self._reason(MoveReason(int(found.why[row])), source, target, posed, found),
                )
            )
        refusals = tuple(
            Refusal(shard=shards[row], reason=self._refusal(row, StayReason(why), posed, found, rules))
            for row, why in zip(found.refused.tolist(), found.reasons.tolist(), strict=True)
        )
        shortages = tuple(self._shortage(item, shards) for item in found.shortages)
        return Placement(moves=tuple(moves), refusals=refusals, shortages=shortages)

    def _reason(self, why: MoveReason, source: int, target: int, posed: Problem, found: Solution) -> str:
        match why:
            case MoveReason.ORPHAN:
                return "nobody owns it"
            case MoveReason.DRAIN:
                return f"{self.names[source]} is drained"
            case MoveReason.REGION:
                return f"it may not be on {self.names[source]}"
            case MoveReason.FILL:
                return f"{self.names[target]} is nearly empty"
            case MoveReason.APART:
                return f"{self.names[source]} has another task of one of its jobs"
            case MoveReason.CAP:
                return f"{self.names[source]} is above what it may carry"
        before = _sums(posed)
        share = np.maximum(found.targets, 1e-9)
        off = before[[source, target]] / share[[source, target]]
        kind = int(np.argmax(np.abs(off[0] - off[1])))
        return (
            f"{self._kinds[kind]}: {self.names[source]} has {off[0, kind]:.2f} of its share, "
            f"{self.names[target]} has {off[1, kind]:.2f}"
        )

    def _refusal(self, row: int, why: StayReason, posed: Problem, found: Solution, rules: Rules) -> str:
        match why:
            case StayReason.BUDGET if rules.moves_max == 0:
                return "nothing that has an owner may move now: a later round takes it"
            case StayReason.BUDGET:
                return f"{rules.moves_max} moves a round are enough: the next one takes it"
            case StayReason.DRAINED:
                return "the containers that could take it are drained, too"
            case StayReason.REGION:
                return "no other container of the regions that it may be in takes shards"
            case StayReason.EXCLUDED:
                return "it should not be on any container that could take it"
            case StayReason.NO_CONTAINER:
                other = "" if found.owners[row] == NO_OWNER else "other "
                return f"no {other}container may take shards"
            case StayReason.ROOM:
                return (
                    f"no container that it may use has room for it{self._missing(row, posed, found, rules)}"
                )

    def _missing(self, row: int, posed: Problem, found: Solution, rules: Rules) -> str:
        """What there is too little of, for a shard that fits nowhere."""
        bits = np.uint64(1) << posed.regions.astype(np.uint64)
        takers = posed.receiving & ((posed.allowed[row] & bits) != 0)
        if found.owners[row] != NO_OWNER:
            takers[found.owners[row]] = False
        free = (posed.capacities * np.float32(1 - rules.headroom) - found.used)[takers].max(axis=0).clip(0)
        need = posed.loads[row]
        lacking = np.flatnonzero(need > free)
        if not lacking.size:
            return ": none has enough of everything at once"
        kind = int(lacking[0])
        return f": it needs {need[kind]:.4g} {self._kinds[kind]}, at most {free[kind]:.4g} is free"

    def _shortage(self, item: Shortage, shards: Sequence[int]) -> str:
        what = f"shard {shards[item.shard]} needs" if item.shard != NO_OWNER else "all together need"
        return f"{what} {item.demand:.4g} {self._kinds[item.dimension]}, {item.available:.4g} can be used"


def _sums(posed: Problem) -> Floats:
    sums = np.zeros_like(posed.capacities)
    owned = posed.owners >= 0
    np.add.at(sums, posed.owners[owned], posed.loads[owned])
    return sums


def _numbers(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


KINDS = ("placement", "failover")  # of journal entries that name shards


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDecision:
    """One decision about a shard."""

    at_ms: Millis
    actor: str
    decision: str
    reason: str


def history_of(shard: int, entries: Iterable[Entry]) -> tuple[ShardDecision, ...]:
    """Every decision about one shard, oldest first."""
    found = []
    for entry in sorted(entries, key=lambda entry: entry.id):
        decision = _decision(shard, entry)
        if decision:
            found.append(
                ShardDecision(at_ms=entry.at_ms, actor=entry.actor, decision=decision, reason=entry.reason)
            )
    return tuple(found)


def _decision(shard: int, entry: Entry) -> str:
    if entry.subject == f"shard {shard}":
        return entry.decision
    moves = entry.data.get("moves", {})
    if str(shard) in moves:
        source, target = moves[str(shard)]
        return f"{source} → {target}" if source else f"given to {target}"
    given = entry.data.get("shards", {})
    return f"{entry.subject} failed over, given to {given[str(shard)]}" if str(shard) in given else ""


def describe_outlook(decision: Move | Refusal | None) -> str:
    """What the next look at placement would do with a shard, in a line."""
    match decision:
        case Move(target=target, reason=reason):
            return f"would go to {target}: {reason}"
        case Refusal(reason=reason):
            return f"should move and cannot: {reason}"
        case _:
            return "stays: nothing is gained by moving it"
