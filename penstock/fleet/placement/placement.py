"""Decides which container each shard goes to (Turbine IV-B), with a reason for every move. Pure.

`solve` decides on arrays; `place_shards` converts names to indices and back. The number of shards is one more
kind of load, so that shards without tasks are spread too.
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


def crowded(state: PlacementState) -> Indices:
    """Shards in containers that have more shards of one job than an even spread would."""
    problem = state.model.problem
    if not problem.job_shards.size:
        return np.zeros(0, np.int32)
    owners = state.owners[problem.job_shards]
    placed = owners >= 0
    shards, jobs, owners = problem.job_shards[placed], problem.job_ids[placed], owners[placed]
    takers = max(1, int(problem.receiving.sum()))
    fair = -(-np.bincount(jobs) // takers)
    order = np.lexsort((shards, owners, jobs))
    jobs, owners, shards = jobs[order], owners[order], shards[order]
    starts = np.flatnonzero((np.diff(jobs, prepend=-1) != 0) | (np.diff(owners, prepend=-1) != 0))
    rank = np.arange(jobs.size) - np.repeat(starts, np.diff(np.append(starts, jobs.size)))
    return np.unique(shards[rank >= fair[jobs]]).astype(np.int32)


def spread_jobs(state: PlacementState) -> None:
    """Swap crowded shards with shards of similar load in other containers, until there is no more
    progress.
    """
    for _ in range(ROUNDS):
        movable = crowded(state)
        movable = movable[state.movable[movable]]
        if not movable.size or not _swap_some(state, movable):
            return


def _swap_some(state: PlacementState, shards: Indices) -> bool:
    model, problem = state.model, state.model.problem
    pool = np.flatnonzero(state.movable & (state.owners >= 0)).astype(np.int32)
    pool = pool[problem.receiving[state.owners[pool]]]
    if not pool.size:
        return False
    partners = pool[state.rng.integers(0, pool.size, (shards.size, CHOICES))]
    mine, theirs = state.owners[shards][:, None], state.owners[partners]
    flow = np.take(model.loads, shards, axis=0)[:, None, :] - np.take(model.loads, partners, axis=0)
    ok = (mine != theirs) & (np.take(problem.receiving, mine))
    ok &= (problem.allowed[shards][:, None] & model.bits[theirs]) != 0
    ok &= (problem.allowed[partners] & np.take(model.bits, mine)) != 0
    ok &= ~model.is_forbidden(shards[:, None], theirs) & ~model.is_forbidden(partners, mine)
    ok &= _stays_inside(state, np.broadcast_to(mine, theirs.shape), -flow) & _stays_inside(
        state, theirs, flow
    )
    ok &= ~_meets(state, np.broadcast_to(shards[:, None], theirs.shape), theirs)
    ok &= ~_meets(state, partners, np.broadcast_to(mine, theirs.shape))
    best = np.argmax(ok, axis=1)
    used: set[int] = set()
    swapped = False
    for row in np.flatnonzero(ok.any(axis=1)):
        shard, partner = int(shards[row]), int(partners[row, best[row]])
        one, other = int(state.owners[shard]), int(state.owners[partner])
        if used & {one, other}:
            continue  # loads there have changed: left for the next round
        if not state.budget.take([(shard, other), (partner, one)]):
            continue
        used |= {one, other}
        state.used[one] -= flow[row, best[row]]
        state.used[other] += flow[row, best[row]]
        for moved, to in ((shard, other), (partner, one)):
            state.owners[moved] = to
            if state.why[moved] == MoveReason.STAYS:
                state.why[moved] = MoveReason.APART
        swapped = True
    return swapped


def _stays_inside(state: PlacementState, who: Indices, change: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Whether containers stay within goal and limits after a change."""
    model = state.model
    after = np.take(state.used, who, axis=0) + change
    shares = np.take(model.shares, who, axis=0)
    inside = np.abs(after - shares) <= np.float32(model.rules.goal) * shares + np.float32(1e-6)
    return np.asarray((inside & (after <= np.take(model.limits, who, axis=0))).all(axis=-1))


def _meets(state: PlacementState, shards: Indices, containers: Indices) -> NDArray[np.bool_]:
    """Whether a container already has another shard of one of the shard's jobs."""
    problem = state.model.problem
    size = problem.container_count + 1
    there = np.unique(problem.job_ids.astype(np.int64) * size + state.owners[problem.job_shards])
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
    state: PlacementState, should_move: Flags, needs_moves: Indices
) -> tuple[Indices, NDArray[np.int8]]:
    """The shards that should move but do not, and why each stays.

    These are `should_move`, and for each container above a limit the shards that would have to leave it.
    `needs_moves` get room after moves of others, for which there was no budget.
    """
    refused = np.flatnonzero(should_move | _too_many(state)).astype(np.int32)
    reasons = np.zeros(refused.size, np.int8)
    reasons[np.isin(refused, needs_moves) | _fit_into_emptiest(state, refused)] = StayReason.BUDGET
    for number in np.flatnonzero(reasons == 0).tolist():
        reasons[number] = _why_one_stays(state, int(refused[number]))
    return refused, reasons


def _fit_into_emptiest(state: PlacementState, shards: Indices) -> Flags:
    """Which of these shards fit into the container with the most room: a fast test that mostly succeeds."""
    model, found = state.model, np.zeros(shards.size, bool)
    room = model.limits - state.used
    for number in np.unique(model.which[shards]).tolist():
        takers = np.flatnonzero(model.may_use(model.masks[number]))
        if takers.size:
            best = takers[np.argmin(row_max(-room[takers]))]
            mine = np.flatnonzero(model.which[shards] == number)
            fits = (model.loads[shards[mine]] <= room[best]).all(axis=1) & (
                state.owners[shards[mine]] != best
            )
            found[mine] = fits & ~model.is_forbidden(shards[mine], int(best))
    return found


def _too_many(state: PlacementState) -> Flags:
    """(N,) a few shards whose departure would bring their containers below their limits."""
    model, found = state.model, np.zeros(state.owners.size, bool)
    coming = np.flatnonzero(model.problem.from_ >= 0)
    used = state.used.copy()
    # Shards that are leaving do not count.
    np.subtract.at(used, model.problem.from_[coming], model.loads[coming])
    above = used - model.limits * np.float32(1.0001)
    for container in np.flatnonzero((row_max(above) > 0) & model.problem.receiving).tolist():
        mine = np.flatnonzero((state.owners == container) & state.movable).astype(np.int32)
        found[shards_to_relieve(state, mine, above[container])] = True
    return found


def _why_one_stays(state: PlacementState, shard: int) -> StayReason:
    model, home = state.model, int(state.owners[shard])
    problem = model.problem
    in_region = (problem.allowed[shard] & model.bits) != 0
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
    roomy = takers[fits(state, shard, takers)]
    barred = model.is_forbidden(shard, roomy if roomy.size else takers)
    if barred.all():
        return StayReason.EXCLUDED
    return StayReason.BUDGET if roomy.size else StayReason.ROOM


def fits(state: PlacementState, shard: int, containers: NDArray[np.intp]) -> Flags:
    """Which of these containers have room for a shard, in the kinds of load that it has."""
    model, need = state.model, state.model.loads[shard]
    room = model.limits[containers] - state.used[containers]
    return np.asarray(((need <= room + ROUNDING) | (need <= 0)).all(axis=1))


def solve(problem: Problem, rules: Rules, mode: Mode) -> Solution:
    """Decide the moves of one round."""
    model = build_model(problem, rules)
    state = start(model)
    before = state.used.copy()
    unplaced = place(state, _indices(problem.owners == NO_OWNER), MoveReason.ORPHAN)
    needs_moves = make_room(state, unplaced, MoveReason.ORPHAN) if unplaced.size else unplaced
    repair(state, only_limits=True)
    if mode is Mode.PERIODIC:
        place_some(state, _indices(misplaced(state) & state.movable), MoveReason.REGION)
        place_some(state, _indices(leaving(state) & state.movable), MoveReason.DRAIN)
        fill(state)
        repair(state)
        spread_jobs(state)
        repair(state, only_limits=True)
    withdraw(state, before)
    should_move = state.owners == NO_OWNER
    if mode is Mode.PERIODIC:
        should_move |= (misplaced(state) | leaving(state)) & state.movable
    refused, reasons = explain(state, should_move, needs_moves)
    return Solution(
        owners=state.owners,
        why=state.why,
        moved=_indices(state.owners != problem.owners),
        refused=refused,
        reasons=reasons,
        shortages=model.shortages,
        used=state.used * model.scale,
        targets=model.shares * model.scale,
        deviations=state.deviations(),
        exempt=state.exempt(),
    )


def start(model: PlacementModel) -> PlacementState:
    """The initial state: current owners; a moving shard counts in both containers."""
    problem = model.problem
    used = np.empty_like(model.shares)
    owners, also = problem.owners, np.flatnonzero(problem.from_ >= 0)
    for dimension in range(used.shape[1]):
        column = np.ascontiguousarray(model.loads[:, dimension])
        # One more bin, for shards without an owner.
        sums = np.bincount(owners + 1, weights=column, minlength=problem.container_count + 1)[1:]
        if also.size:
            sums += np.bincount(problem.from_[also], weights=column[also], minlength=problem.container_count)
        used[:, dimension] = sums
    return PlacementState(
        model=model,
        owners=owners.copy(),
        used=used,
        why=np.zeros(problem.shard_count, np.int8),
        movable=~problem.fixed,
        rng=np.random.default_rng(model.rules.seed),
        budget=Budget(problem, model.rules),
    )


def misplaced(state: PlacementState) -> np.ndarray:
    """(N,) shards in a region or container that they may not use."""
    model = state.model
    bits = np.append(model.bits, np.uint64(0))[state.owners]
    owned = state.owners != NO_OWNER
    wrong = owned & ((model.problem.allowed & bits) == 0)
    if model.forbidden.size:
        wrong |= model.is_forbidden(np.arange(owned.size), state.owners) & owned
    return np.asarray(wrong)


def leaving(state: PlacementState) -> np.ndarray:
    """(N,) shards in draining containers."""
    return np.asarray(np.append(state.model.problem.leaving, False)[state.owners])


def _indices(flags: np.ndarray) -> Indices:
    return np.flatnonzero(flags).astype(np.int32)


__all__ = ["Mode", "Move", "Placement", "Refusal", "Rules", "place_shards"]

# The capacity of containers that report none: only an even spread counts then.
_BOUNDLESS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Move `shard` to `target`; `source` is None if it has no owner."""

    shard: int
    source: str | None
    target: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A shard that should move but cannot."""

    shard: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The moves, the refusals, and the shortages that no placement can solve."""

    moves: tuple[Move, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    shortages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Optional properties of containers and shards."""

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

    `containers` may get shards; `leaving` must lose theirs; shards on other containers stay.
    `current` gives the owner, or the target of a shard `in_motion`: it counts there (and at its source, if
    that is given), and is not moved.
    """
    index = _NameIndex(fleet or Fleet(), sorted(set(containers) - leaving), leaving)
    asked = sorted({*shards, *current})
    asked = [shard for shard in asked if current.get(shard) is None or current[shard] in index.number]
    if not asked:
        return Placement()
    rules = rules or Rules(moves_max=moves_max)
    problem_ = index.to_problem(asked, current, loads, in_motion)
    return index.to_placement(asked, problem_, solve(problem_, rules, mode), rules)


class _NameIndex:
    """Converts names to indices and back."""

    def __init__(self, fleet: Fleet, takers: list[str], leaving: frozenset[str]) -> None:
        self._fleet = fleet
        self.names = [*takers, *sorted(leaving)]
        self.number = {name: number for number, name in enumerate(self.names)}
        self._leaving = np.array([name in leaving for name in self.names], bool)
        self._kinds = (*fleet.kinds, "shards")

    def to_problem(
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
        # Containers get shards in proportion to their size, in accordance with an even load.
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

    def to_placement(
        self, shards: Sequence[int], problem_: Problem, found: Solution, rules: Rules
    ) -> Placement:
        """The solution with names and reasons."""
        moves = []
        for row in found.moved.tolist():
            source, target = int(problem_.owners[row]), int(found.owners[row])
            if target == NO_OWNER:
                continue
            moves.append(
                Move(
                    shard=shards[row],
                    source=None if source == NO_OWNER else self.names[source],
                    target=self.names[target],
                    reason=self._reason(MoveReason(int(found.why[row])), source, target, problem_, found),
                )
            )
        refusals = tuple(
            Refusal(shard=shards[row], reason=self._refusal(row, StayReason(why), problem_, found, rules))
            for row, why in zip(found.refused.tolist(), found.reasons.tolist(), strict=True)
        )
        shortages = tuple(self._shortage(item, shards) for item in found.shortages)
        return Placement(moves=tuple(moves), refusals=refusals, shortages=shortages)

    def _reason(self, why: MoveReason, source: int, target: int, problem_: Problem, found: Solution) -> str:
        match why:
            case MoveReason.ORPHAN:
                return "it has no owner"
            case MoveReason.DRAIN:
                return f"{self.names[source]} is draining"
            case MoveReason.REGION:
                return f"it may not be on {self.names[source]}"
            case MoveReason.FILL:
                return f"{self.names[target]} is nearly empty"
            case MoveReason.APART:
                return f"{self.names[source]} has another task of one of its jobs"
            case MoveReason.CAP:
                return f"{self.names[source]} is above its capacity limit"
        before = _sums(problem_)
        share = np.maximum(found.targets, 1e-9)
        off = before[[source, target]] / share[[source, target]]
        kind = int(np.argmax(np.abs(off[0] - off[1])))
        return (
            f"{self._kinds[kind]}: {self.names[source]} has {off[0, kind]:.2f} of its share, "
            f"{self.names[target]} has {off[1, kind]:.2f}"
        )

    def _refusal(self, row: int, why: StayReason, problem_: Problem, found: Solution, rules: Rules) -> str:
        match why:
            case StayReason.BUDGET if rules.moves_max == 0:
                return "shards with an owner may not move now: a later round moves it"
            case StayReason.BUDGET:
                return f"the limit of {rules.moves_max} moves per round is reached: a later round moves it"
            case StayReason.DRAINED:
                return "the containers that could take it are draining too"
            case StayReason.REGION:
                return "no other container in its permitted regions accepts shards"
            case StayReason.EXCLUDED:
                return "it is excluded from all containers that could take it"
            case StayReason.NO_CONTAINER:
                other = "" if found.owners[row] == NO_OWNER else "other "
                return f"no {other}container accepts shards"
            case StayReason.ROOM:
                missing = self._missing(row, problem_, found, rules)
                return f"no container that it may use has room for it{missing}"

    def _missing(self, row: int, problem_: Problem, found: Solution, rules: Rules) -> str:
        """The resource that is missing, for a shard that fits nowhere."""
        bits = np.uint64(1) << problem_.regions.astype(np.uint64)
        takers = problem_.receiving & ((problem_.allowed[row] & bits) != 0)
        if found.owners[row] != NO_OWNER:
            takers[found.owners[row]] = False
        free = (problem_.capacities * np.float32(1 - rules.headroom) - found.used)[takers].max(axis=0).clip(0)
        need = problem_.loads[row]
        lacking = np.flatnonzero(need > free)
        if not lacking.size:
            return ": none has enough of all resources at once"
        kind = int(lacking[0])
        return f": it needs {need[kind]:.4g} {self._kinds[kind]}, at most {free[kind]:.4g} are free"

    def _shortage(self, item: Shortage, shards: Sequence[int]) -> str:
        what = f"shard {shards[item.shard]} needs" if item.shard != NO_OWNER else "all shards together need"
        return f"{what} {item.demand:.4g} {self._kinds[item.dimension]}, {item.available:.4g} are available"


def _sums(problem_: Problem) -> Floats:
    sums = np.zeros_like(problem_.capacities)
    owned = problem_.owners >= 0
    np.add.at(sums, problem_.owners[owned], problem_.loads[owned])
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
    """What the next placement round would do with a shard, as one line."""
    match decision:
        case Move(target=target, reason=reason):
            return f"would move to {target}: {reason}"
        case Refusal(reason=reason):
            return f"should move but cannot: {reason}"
        case _:
            return "stays: a move would bring no gain"
