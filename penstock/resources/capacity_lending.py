"""Containers between clusters: lent to one that is short, returned when it is over, reclaimed after savings
(Turbine V-F, VI-B). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.core.clock import Millis
from penstock.resources.capacity import Amount

SHORT = 0.05  # a cluster with less than this share free of some kind borrows
SPARE = 0.3  # one lends, gives back or gives up only what leaves so much free of every kind
RECLAIM_AFTER_MS: Millis = 24 * 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A container that may change clusters: it is empty, or can be emptied."""

    name: str
    size: Amount
    owner: str  # the cluster it belongs to, wherever it is now
    can_move: bool = True  # its host listens, and it is not on its way already


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRoom:
    """One cluster: where its containers are, and how much of them is reserved."""

    name: str
    rooms: tuple[Room, ...]  # those that work for it now, borrowed ones too
    reserved: Amount
    is_short: bool = False  # the scaler was refused something


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A container works for another cluster from now on."""

    container: str
    source: str
    target: str
    reason: str
    is_return: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """Containers that nobody needs any more may be taken away."""

    cluster: str
    containers: tuple[str, ...]
    reason: str


def decide_transfers(clusters: Sequence[ClusterRoom]) -> tuple[Transfer, ...]:
    """One round of lending and returning; at most one container for each cluster that is short.

    What is lent goes back when its owner is short, or when the borrower does well without it.
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
    """Which of its own containers a cluster can do without, once it could for long enough."""
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
    """Whether some container of its own could go: whoever calls remembers since when."""
    return any(
        room.owner == cluster.name
        and len(cluster.rooms) > 1
        and least_free([other for other in cluster.rooms if other is not room], cluster.reserved) >= SPARE
        for room in cluster.rooms
    )


def is_short(cluster: ClusterRoom) -> bool:
    """Whether it needs more than it has."""
    return cluster.is_short or least_free(cluster.rooms, cluster.reserved) < SHORT


def least_free(rooms: Sequence[Room], reserved: Amount) -> float:
    """The share that is free of the scarcest kind; below 0: more is reserved than there is."""
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
        # An owner in need comes first, but not at the price of what is reserved here.
        wanted = is_short(state[room.owner]) and least_free(rest, borrower.reserved) >= 0
        unneeded = not borrower.is_short and least_free(rest, borrower.reserved) >= SPARE
        if wanted or unneeded:
            reason = f"{room.owner} is short itself" if wanted else f"{name} does well without it"
            _move(state, moves, room, name, room.owner, reason, is_return=True)


def _borrow(state: dict[str, ClusterRoom], name: str, moves: list[Transfer]) -> None:
    best: tuple[float, str, Room] | None = None
    for donor in sorted(state):
        if donor == name or is_short(state[donor]):
            continue
        for room in state[donor].rooms:
            rest = [other for other in state[donor].rooms if other is not room]
            free = least_free(rest, state[donor].reserved)
            # Only its own: what is borrowed is not lent on.
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
        _move(state, moves, room, donor, name, f"{name} is short, and {donor} keeps {free:.0%} free")


def _move(
    state: dict[str, ClusterRoom],
    moves: list[Transfer],
    room: Room,
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
        short = old.is_short and cluster == source  # what it got may be enough
        state[cluster] = ClusterRoom(name=cluster, rooms=rooms, reserved=old.reserved, is_short=short)
    moves.append(
        Transfer(container=room.name, source=source, target=target, reason=reason, is_return=is_return)
    )


def _weight(room: Room, cluster: ClusterRoom) -> float:
    """How much of the cluster a container is, of the kind it has most of."""
    totals: Mapping[str, float] = {
        kind: sum(other.size.get(kind, 0.0) for other in cluster.rooms) for kind in room.size
    }
    return max((room.size[kind] / total for kind, total in totals.items() if total > 0), default=0.0)
