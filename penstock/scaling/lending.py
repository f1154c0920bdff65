"""Lending of containers between clusters: one round, from the clusters' state to a plan. Pure.

Each round reads all state again, so it continues after a crash of any process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.clock import Millis
from penstock.scaling.capacity import Amount

SHORT = 0.05  # a cluster with a smaller free share of any kind borrows
SPARE = 0.3  # a cluster lends, returns or releases containers only if this share of every kind stays free
RECLAIM_AFTER_MS: Millis = 24 * 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LendableContainer:
    """A container that may move to another cluster."""

    name: str
    size: Amount
    owner: str  # the cluster that owns it
    can_move: bool = True  # its host is reachable, and it is not moving already


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRoom:
    """A cluster's containers, and how much of them is reserved."""

    name: str
    rooms: tuple[LendableContainer, ...]  # containers that work for it now, including borrowed ones
    reserved: Amount
    is_short: bool = False  # the scaler was refused something


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Move a container to another cluster."""

    container: str
    source: str
    target: str
    reason: str
    is_return: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """Containers that a cluster does not need any more."""

    cluster: str
    containers: tuple[str, ...]
    reason: str


def decide_transfers(clusters: Sequence[ClusterRoom]) -> tuple[Transfer, ...]:
    """Containers to lend and return; at most one loan for each cluster that is short.

    A container is returned when its owner is short, or when the borrower has enough without it.
    """
    state = {cluster.name: cluster for cluster in clusters}
    moves: list[Transfer] = []
    for name in sorted(state):
        _give_back(state, name, moves)
    for name in sorted(state):
        if is_short(state[name]):
            _borrow(state, name, moves)
    return tuple(moves)


def decide_reclaim(
    cluster: ClusterRoom, *, spare_since_ms: Millis | None, now_ms: Millis, keep: int = 1
) -> Reclaim | None:
    """The cluster's own containers that have been spare for long enough."""
    if (
        spare_since_ms is None
        or not now_ms - spare_since_ms >= 0
        or now_ms - spare_since_ms < RECLAIM_AFTER_MS
    ):
        return None
    rooms, gone = list(cluster.rooms), list[str]()
    for room in sorted(cluster.rooms, key=lambda room: (_weight(room, cluster), room.name), reverse=True):
        rest = [other for other in rooms if other is not room]
        if room.owner == cluster.name and len(rest) >= keep and least_free(rest, cluster.reserved) >= SPARE:
            rooms, gone = rest, [*gone, room.name]
    if not gone:
        return None
    hours = (now_ms - spare_since_ms) / 3_600_000
    reason = f"spare for {hours:.0f} hours; {least_free(rooms, cluster.reserved):.0%} stay free without them"
    return Reclaim(cluster=cluster.name, containers=tuple(gone), reason=reason)


def has_spare(cluster: ClusterRoom) -> bool:
    """Whether the cluster could release a container of its own; the caller stores since when."""
    return any(
        room.owner == cluster.name
        and len(cluster.rooms) > 1
        and least_free([other for other in cluster.rooms if other is not room], cluster.reserved) >= SPARE
        for room in cluster.rooms
    )


def is_short(cluster: ClusterRoom) -> bool:
    """Whether the cluster needs more containers."""
    return cluster.is_short or least_free(cluster.rooms, cluster.reserved) < SHORT


def least_free(rooms: Sequence[LendableContainer], reserved: Amount) -> float:
    """The free share of the scarcest kind; below 0 if more is reserved than exists."""
    kinds = {kind for room in rooms for kind in room.size} | {kind for kind in reserved if reserved[kind] > 0}
    shares = []
    for kind in kinds:
        total = sum(room.size.get(kind, 0.0) for room in rooms)
        if total > 0:
            shares.append(1 - reserved.get(kind, 0.0) / total)
        elif reserved.get(kind, 0.0) > 0:
            shares.append(-1.0)
    return min(shares, default=0.0)


def _give_back(state: dict[str, ClusterRoom], name: str, moves: list[Transfer]) -> None:
    borrower = state[name]
    for room in sorted(borrower.rooms, key=lambda room: room.name):
        if room.owner == name or room.owner not in state or not room.can_move:
            continue
        rest = [other for other in state[name].rooms if other is not room]
        # The owner's need comes first, unless the borrower has reserved the container's resources.
        wanted = is_short(state[room.owner]) and least_free(rest, borrower.reserved) >= 0
        unneeded = not borrower.is_short and least_free(rest, borrower.reserved) >= SPARE
        if wanted or unneeded:
            reason = (
                f"{room.owner} is short of capacity" if wanted else f"{name} has enough capacity without it"
            )
            _move(state, moves, room, name, room.owner, reason, is_return=True)


def _borrow(state: dict[str, ClusterRoom], name: str, moves: list[Transfer]) -> None:
    best: tuple[float, str, LendableContainer] | None = None
    for donor in sorted(state):
        if donor == name or is_short(state[donor]):
            continue
        for room in state[donor].rooms:
            rest = [other for other in state[donor].rooms if other is not room]
            free = least_free(rest, state[donor].reserved)
            # Borrowed containers are not lent to others.
            if (
                room.owner == donor
                and room.can_move
                and rest
                and free >= SPARE
                and (best is None or free > best[0])
            ):
                best = free, donor, room
    if best is not None:
        free, donor, room = best
        _move(
            state, moves, room, donor, name, f"{name} is short of capacity, and {donor} keeps {free:.0%} free"
        )


def _move(
    state: dict[str, ClusterRoom],
    moves: list[Transfer],
    room: LendableContainer,
    source: str,
    target: str,
    reason: str,
    *,
    is_return: bool = False,
) -> None:
    for cluster, rooms in (
        (source, tuple(other for other in state[source].rooms if other is not room)),
        (target, (*state[target].rooms, room)),
    ):
        old = state[cluster]
        short = old.is_short and cluster == source  # the target may have enough now
        state[cluster] = ClusterRoom(name=cluster, rooms=rooms, reserved=old.reserved, is_short=short)
    moves.append(
        Transfer(container=room.name, source=source, target=target, reason=reason, is_return=is_return)
    )


def _weight(room: LendableContainer, cluster: ClusterRoom) -> float:
    """The container's largest share of the cluster's total of any kind."""
    totals: Mapping[str, float] = {
        kind: sum(other.size.get(kind, 0.0) for other in cluster.rooms) for kind in room.size
    }
    return max((room.size[kind] / total for kind, total in totals.items() if total > 0), default=0.0)


LEAVING = frozenset({"asked", "draining", "ordered"})
# Timeout of each step; after it the container stays where it is.
STEP_S: Mapping[str, float] = {"asked": 60.0, "draining": 900.0, "ordered": 120.0}
ARRIVE_S = 180.0  # timeout for the arrival of a container in the target cluster
REFUSED_S = 3600.0  # after a refused move the container is not asked again for this time
SETTLE_S = 180.0  # after an arrival no other container is borrowed for this time
STAYS_S = 600.0  # a borrowed container stays at least this time


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedContainer:
    """A container as its cluster reports it."""

    name: str
    is_live: bool
    takes_shards: bool
    size: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class LoanStatus:
    """A loan record of a cluster."""

    container: str
    state: str
    owner: str
    peer: str
    refused_by: str
    age_s: float
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The state of a cluster as its API returned it."""

    name: str
    url: str
    containers: tuple[ListedContainer, ...]
    loans: Mapping[str, LoanStatus]
    reserved: Amount
    is_short: bool
    boundless: tuple[str, ...] = ()  # containers that declare no capacity

    def is_live(self, container: str) -> bool:
        """Whether this container is live in this cluster."""
        return any(found.name == container and found.is_live for found in self.containers)


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelMove:
    """Cancel the move of a container that took too long."""

    cluster: str
    container: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropLoan:
    """Delete the loan record of a container that is not in this cluster."""

    cluster: str
    container: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingPlan:
    """The actions of a round, and what was left out, with the reason."""

    cancels: tuple[CancelMove, ...] = ()
    drops: tuple[DropLoan, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)  # by cluster or container


def read_cluster(
    name: str,
    url: str,
    *,
    containers: Sequence[Mapping[str, Any]],
    loans: Sequence[Mapping[str, Any]],
    capacity: Mapping[str, Any],
) -> ClusterStatus:
    """Build a cluster's state from its API's responses."""
    return ClusterStatus(
        name=name,
        url=url,
        containers=tuple(
            ListedContainer(
                name=row["name"],
                is_live=row["state"] == "live",
                takes_shards=not (row["cordoned"] or row["draining"]),
                size={kind: amount for kind, amount in row["capacity"].items() if amount > 0},
            )
            for row in containers
        ),
        loans={
            row["container"]: LoanStatus(**{field: row[field] for field in LoanStatus.__slots__})
            for row in loans
        },
        reserved={row["kind"]: row["reserved"] for row in capacity["kinds"] if row["reserved"] > 0},
        is_short=bool(capacity["short_of"] or capacity["refused"] or capacity["stopped"]),
        boundless=tuple(capacity["boundless"]),
    )


def plan_lending(clusters: Sequence[ClusterStatus]) -> LendingPlan:
    """The actions of this round."""
    seen = {cluster.name: cluster for cluster in clusters}
    cancels, drops, left_out = _overdue(seen), _stale(seen), dict[str, str]()
    rooms, moving = _rooms(seen), _moving(seen)
    names = [room.name for found in rooms.values() for room in found]
    limited: list[ClusterRoom] = []
    for name, cluster in seen.items():
        if cluster.boundless:
            left_out[name] = (
                f"the cluster is not limited, since containers declare no capacity: "
                f"{', '.join(cluster.boundless)}"
            )
            continue
        there = [_unless_twice(room, names, left_out) for room in (*rooms[name], *moving.get(name, ()))]
        reserved = _limited(cluster.reserved, there, seen.values())
        is_short = cluster.is_short and name not in moving and not _just_got(cluster)
        if there or reserved:
            limited.append(ClusterRoom(name=name, rooms=tuple(there), reserved=reserved, is_short=is_short))
        else:
            left_out[name] = "it has no containers and needs none"
    return LendingPlan(cancels=cancels, drops=drops, transfers=decide_transfers(limited), left_out=left_out)


def cluster_room(cluster: ClusterStatus) -> ClusterRoom:
    """A cluster with the containers that stay in it; none if it is not limited."""
    rooms = [] if cluster.boundless else _rooms({cluster.name: cluster})[cluster.name]
    reserved = _limited(cluster.reserved, rooms, [cluster])
    return ClusterRoom(name=cluster.name, rooms=tuple(rooms), reserved=reserved, is_short=cluster.is_short)


def _just_got(cluster: ClusterStatus) -> bool:
    return any(
        loan.state == "here" and loan.owner and loan.age_s < SETTLE_S for loan in cluster.loans.values()
    )


def _overdue(seen: Mapping[str, ClusterStatus]) -> tuple[CancelMove, ...]:
    return tuple(
        CancelMove(
            cluster=name,
            container=loan.container,
            version=loan.version,
            reason=f"its move to {loan.peer} timed out: {loan.state} for {loan.age_s:.0f} s",
        )
        for name, cluster in seen.items()
        for loan in cluster.loans.values()
        if loan.age_s >= STEP_S.get(loan.state, float("inf"))
    )


def _stale(seen: Mapping[str, ClusterStatus]) -> tuple[DropLoan, ...]:
    found = []
    for name, cluster in seen.items():
        for loan in cluster.loans.values():
            reason = ""
            if loan.state == "expected" and loan.age_s >= ARRIVE_S and not _comes(seen, loan, name):
                reason = f"it did not arrive from {loan.peer} within {ARRIVE_S:.0f} s"
            elif loan.state == "here" and loan.owner and not cluster.is_live(loan.container):
                owner = seen.get(loan.owner)
                if owner is not None and owner.is_live(loan.container):
                    reason = f"it works for {loan.owner} again"
            if reason:
                drop = DropLoan(cluster=name, container=loan.container, version=loan.version, reason=reason)
                found.append(drop)
    return tuple(found)


def _comes(seen: Mapping[str, ClusterStatus], loan: LoanStatus, target: str) -> bool:
    """Whether the lender is still moving it here; assumed if the lender does not answer."""
    lender = seen.get(loan.peer)
    if lender is None:
        return True
    theirs = lender.loans.get(loan.container)
    return theirs is not None and theirs.state in LEAVING and theirs.peer == target


def _rooms(seen: Mapping[str, ClusterStatus]) -> dict[str, list[LendableContainer]]:
    """By cluster: the containers that stay in it."""
    found: dict[str, list[LendableContainer]] = {name: [] for name in seen}
    for name, cluster in seen.items():
        for container in cluster.containers:
            loan = cluster.loans.get(container.name)
            if not container.is_live or not container.takes_shards or not container.size:
                continue
            if loan is not None and loan.state in LEAVING and loan.peer in seen:
                continue
            was_refused = loan is not None and bool(loan.refused_by) and loan.age_s < REFUSED_S
            is_new = loan is not None and bool(loan.owner) and loan.age_s < STAYS_S
            can_move = loan is not None and loan.state == "here" and not was_refused and not is_new
            owner = name if loan is None else loan.owner or name
            found[name].append(
                LendableContainer(name=container.name, size=container.size, owner=owner, can_move=can_move)
            )
    return found


def _moving(seen: Mapping[str, ClusterStatus]) -> dict[str, list[LendableContainer]]:
    """By cluster: the containers that are moving to it, so that they are not borrowed twice."""
    found: dict[str, list[LendableContainer]] = {}
    for name, cluster in seen.items():
        sizes = {container.name: container.size for container in cluster.containers}
        for loan in cluster.loans.values():
            target = seen.get(loan.peer)
            if target is None or target.is_live(loan.container):
                continue
            theirs = target.loans.get(loan.container)
            is_coming = theirs is not None and theirs.state == "expected" and theirs.age_s < ARRIVE_S
            if loan.state in LEAVING or (loan.state == "gone" and is_coming):
                size = sizes.get(loan.container, {})
                room = LendableContainer(
                    name=loan.container, size=size, owner=loan.owner or name, can_move=False
                )
                found.setdefault(loan.peer, []).append(room)
    return found


def _unless_twice(
    room: LendableContainer, names: Sequence[str], left_out: dict[str, str]
) -> LendableContainer:
    if names.count(room.name) < 2:
        return room
    left_out[room.name] = "several clusters have a container of this name, so it is not moved"
    return LendableContainer(name=room.name, size=room.size, owner=room.owner, can_move=False)


def _limited(
    reserved: Amount, rooms: Sequence[LendableContainer], clusters: Iterable[ClusterStatus]
) -> dict[str, float]:
    """The reservations of kinds that any container declares; other kinds are not limited."""
    kinds = {kind for room in rooms for kind in room.size} or {
        kind for cluster in clusters for found in cluster.containers for kind in found.size
    }
    return {kind: amount for kind, amount in reserved.items() if kind in kinds}
