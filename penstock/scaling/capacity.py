"""A cluster's capacity: how much is left, and which jobs are stopped as a last resort (Turbine V-F). Pure.

The capacity manager decides between jobs. How much a single job needs is decided by the scaler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Amount by resource kind: cpu, memory_mb, disk_mb, network_mbps.
Amount = Mapping[str, float]

HEADROOM = 0.1  # share of each kind that stays free for failures and moves
RUNNING_OUT = 1.0  # reserved share of the total above which jobs are stopped
BACK_MARGIN = 0.05  # share of the total that must stay free beyond a stopped job's needs when it returns


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A job's claim on capacity: what it reserves, or would reserve if it ran."""

    job: str
    reserved: Amount
    used: Amount | None = None  # None: not known
    priority: int = 0
    privileged: bool = False
    is_stopped: bool = False  # by the capacity manager; a job that a user stopped has no claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """A cluster's capacity by kind: total, reserved, used, and what may still be reserved."""

    total: Amount
    reserved: Amount
    used: Amount
    remaining: Amount

    @property
    def short_of(self) -> tuple[str, ...]:
        """The kinds of which nothing more may be reserved."""
        return tuple(sorted(kind for kind, left in self.remaining.items() if left <= 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopJob:
    """Stop a job so that others can run."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BringBack:
    """Let a stopped job run again."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfRoom:
    """No job is left that may be stopped: containers must be added."""

    reason: str


def take_stock(total: Amount, claims: Iterable[Claim], *, headroom: float = HEADROOM) -> Stock:
    """Add up a cluster. If a job's usage is not known its reservation is used."""
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
    """Jobs to stop because more is reserved than available, or to bring back because capacity is free again.

    The lowest priorities stop first, among equals the largest jobs, and no job whose stop is not needed.
    Privileged jobs are never stopped. The highest priority comes back first, and no job before it.
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
                reason=f"{stock.reserved[kind]:.1f} {kind} are reserved and only {total[kind]:.1f} exist; "
                f"its priority {claim.priority} is the lowest whose stop helps",
            )
        )
    left = _over(_without(chosen, stock.reserved), total)
    if left:
        text = ", ".join(f"{amount:.1f} {kind}" for kind, amount in sorted(left.items()))
        stops.append(OutOfRoom(reason=f"{text} are missing, and only privileged jobs are left"))
    return tuple(stops)


def _enough(plain: Sequence[Claim], reserved: Amount, total: Amount) -> list[Claim]:
    """The lowest priorities whose stop is enough, largest first; if none is enough all whose stop helps."""
    chosen: list[Claim] = []
    for priority in sorted({claim.priority for claim in plain}):
        level = [claim for claim in plain if claim.priority == priority]
        while level:
            over = _over(_without(chosen, reserved), total)
            largest = min(level, key=lambda claim: (-_relief(claim, over, total), claim.job))
            if not _relief(largest, over, total):
                break  # no other job of this priority helps
            chosen.append(largest)
            level.remove(largest)
    return chosen


def _needed(chosen: Sequence[Claim], reserved: Amount, total: Amount) -> list[Claim]:
    """Remove jobs whose stop is not needed because others stop: high priorities and small jobs first."""
    missing = _over(_without(chosen, reserved), total)
    needed = [*chosen]
    for claim in sorted(chosen, key=lambda claim: (-claim.priority, sum(claim.reserved.values()), claim.job)):
        rest = [other for other in needed if other is not claim]
        if _over(_without(rest, reserved), total).keys() <= missing.keys() and not any(
            claim.reserved.get(kind, 0.0) > 0 for kind in missing
        ):
            needed = rest
    return needed


def _without(stopped: Iterable[Claim], reserved: Amount) -> dict[str, float]:
    """What stays reserved without these jobs."""
    left = dict(reserved)
    for claim in stopped:
        for kind, amount in claim.reserved.items():
            if kind in left:
                left[kind] -= amount
    return left


def _relief(claim: Claim, over: Amount, total: Amount) -> float:
    """How much of the shortage a job's stop would cover, in shares of the total."""
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
            break  # later ones wait too, or small jobs could keep this one stopped forever
        for kind, amount in claim.reserved.items():
            if kind in left:
                left[kind] -= amount
        back.append(
            BringBack(
                job=claim.job, reason=f"capacity is free again, and {headroom:.0%} stay free with this job"
            )
        )
    return tuple(back)


def _over(reserved: Amount, total: Amount) -> dict[str, float]:
    """By how much the reservations of each kind exceed the total, apart from rounding errors."""
    return {
        kind: reserved[kind] - most * RUNNING_OUT
        for kind, most in total.items()
        if reserved[kind] > most * RUNNING_OUT * (1 + 1e-9)
    }
