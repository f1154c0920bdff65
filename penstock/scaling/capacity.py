"""What a cluster has and what may still be given, who stops as a last resort (Turbine V-F). Pure.

The capacity manager decides between jobs, never about one: how much a job needs is the scaler's to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# cpu, memory_mb, disk_mb, network_mbps: as much of each.
Amount = Mapping[str, float]

HEADROOM = 0.1  # of each kind is kept for failures and moves
RUNNING_OUT = 1.0  # reserved beyond all there is: then jobs are stopped
BACK_MARGIN = 0.05  # a stopped job comes back only when so much more than it needs is free


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A job, as capacity sees it: what it has reserved, or would if it ran."""

    job: str
    reserved: Amount
    used: Amount | None = None  # None: not known
    priority: int = 0
    privileged: bool = False
    is_stopped: bool = False  # by the capacity manager; one that a person stopped claims nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """What a cluster has of each kind, how much is reserved and used, how much may still be given."""

    total: Amount
    reserved: Amount
    used: Amount
    remaining: Amount

    @property
    def short_of(self) -> tuple[str, ...]:
        """The kinds of which nothing may be given any more."""
        return tuple(sorted(kind for kind, left in self.remaining.items() if left <= 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopJob:
    """It stops so that others can run."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BringBack:
    """It runs again."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfRoom:
    """Nobody is left who could be stopped: somebody has to add containers."""

    reason: str


def take_stock(total: Amount, claims: Iterable[Claim], *, headroom: float = HEADROOM) -> Stock:
    """Add up a cluster. What is not known to be used counts as reserved."""
    running = [claim for claim in claims if not claim.is_stopped]
    reserved = {kind: sum(claim.reserved.get(kind, 0.0) for claim in running) for kind in total}
    used = {
        kind: sum((claim.reserved if claim.used is None else claim.used).get(kind, 0.0) for claim in running)
        for kind in total
    }
    remaining = {kind: max(0.0, most * (1 - headroom) - reserved[kind]) for kind, most in total.items()}
    return Stock(total=dict(total), reserved=reserved, used=used, remaining=remaining)


def decide_stops(
    total: Amount, claims: Sequence[Claim], *, headroom: float = HEADROOM
) -> tuple[StopJob | BringBack | OutOfRoom, ...]:
    """Who stops because more is reserved than there is, or who comes back because there is room again.

    The lowest priorities stop, of the same priority the largest, and nobody whose stop is not needed.
    Privileged jobs are never stopped.
    The highest priority comes back first, and nobody before it.
    """
    stock = take_stock(total, claims, headroom=headroom)
    over = _over(stock.reserved, total)
    if over:
        return _stops(total, claims, stock, over)
    return _returns(total, claims, stock, headroom)


def _stops(
    total: Amount, claims: Sequence[Claim], stock: Stock, over: Mapping[str, float]
) -> tuple[StopJob | OutOfRoom, ...]:
    plain = [claim for claim in claims if not claim.is_stopped and not claim.privileged]
    chosen = _needed(_enough(plain, stock.reserved, total), stock.reserved, total)
    stops: list[StopJob | OutOfRoom] = []
    for claim in chosen:
        kind = next(kind for kind in sorted(over) if claim.reserved.get(kind, 0.0) > 0)
        stops.append(
            StopJob(
                job=claim.job,
                reason=f"{stock.reserved[kind]:.1f} {kind} are reserved and {total[kind]:.1f} are there; "
                f"its priority {claim.priority} is the lowest that helps",
            )
        )
    left = _over(_without(chosen, stock.reserved), total)
    if left:
        text = ", ".join(f"{amount:.1f} {kind}" for kind, amount in sorted(left.items()))
        stops.append(OutOfRoom(reason=f"{text} are missing, and only privileged jobs are left"))
    return tuple(stops)


def _enough(plain: Sequence[Claim], reserved: Amount, total: Amount) -> list[Claim]:
    """The lowest priorities whose stop is enough, of each the largest first; all that help if none is."""
    chosen: list[Claim] = []
    for priority in sorted({claim.priority for claim in plain}):
        level = [claim for claim in plain if claim.priority == priority]
        while level:
            over = _over(_without(chosen, reserved), total)
            largest = min(level, key=lambda claim: (-_relief(claim, over, total), claim.job))
            if not _relief(largest, over, total):
                break  # nobody else of this priority helps
            chosen.append(largest)
            level.remove(largest)
    return chosen


def _needed(chosen: Sequence[Claim], reserved: Amount, total: Amount) -> list[Claim]:
    """Those whose stop is needed although the others stop: the important and the small are spared first."""
    missing = _over(_without(chosen, reserved), total)
    kept = [*chosen]
    for claim in sorted(chosen, key=lambda claim: (-claim.priority, sum(claim.reserved.values()), claim.job)):
        rest = [other for other in kept if other is not claim]
        if _over(_without(rest, reserved), total).keys() <= missing.keys() and not any(
            claim.reserved.get(kind, 0.0) > 0 for kind in missing
        ):
            kept = rest
    return kept


def _without(stopped: Iterable[Claim], reserved: Amount) -> dict[str, float]:
    """What stays reserved."""
    left = dict(reserved)
    for claim in stopped:
        for kind, amount in claim.reserved.items():
            if kind in left:
                left[kind] -= amount
    return left


def _relief(claim: Claim, over: Amount, total: Amount) -> float:
    """How much of what is missing its stop would give, in shares of what there is."""
    return sum(min(claim.reserved.get(kind, 0.0), much) / total[kind] for kind, much in over.items())


def _returns(total: Amount, claims: Sequence[Claim], stock: Stock, headroom: float) -> tuple[BringBack, ...]:
    left = dict(stock.remaining)
    back: list[BringBack] = []
    stopped = [claim for claim in claims if claim.is_stopped]
    for claim in sorted(stopped, key=lambda claim: (-claim.priority, claim.job)):
        short = [
            kind
            for kind, amount in claim.reserved.items()
            if kind in left and amount > 0 and amount > left[kind] - BACK_MARGIN * total[kind]
        ]
        if short:
            break  # whoever is behind it waits too: else small jobs would keep it out for ever
        for kind, amount in claim.reserved.items():
            if kind in left:
                left[kind] -= amount
        back.append(
            BringBack(job=claim.job, reason=f"there is room again, and {headroom:.0%} stay free beyond it")
        )
    return tuple(back)


def _over(reserved: Amount, total: Amount) -> dict[str, float]:
    """By how much each kind is reserved beyond what is there; sums may be off by their last digit."""
    return {
        kind: reserved[kind] - most * RUNNING_OUT
        for kind, most in total.items()
        if reserved[kind] > most * RUNNING_OUT * (1 + 1e-9)
    }
