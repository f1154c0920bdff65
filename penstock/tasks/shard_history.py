"""Why a shard is where it is: the journal's entries that name it, and what placement would do next. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.core.clock import Millis
from penstock.core.journal import Entry
from penstock.tasks.placement import Move, Refusal

KINDS = ("placement", "failover")  # of journal entries that name shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One decision about a shard."""

    at_ms: Millis
    actor: str
    decision: str
    reason: str


def history_of(shard: int, entries: Iterable[Entry]) -> tuple[Moved, ...]:
    """Every decision about one shard, oldest first."""
    found = []
    for entry in sorted(entries, key=lambda entry: entry.id):
        decision = _decision(shard, entry)
        if decision:
            found.append(Moved(at_ms=entry.at_ms, actor=entry.actor, decision=decision, reason=entry.reason))
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


def say_outlook(decision: Move | Refusal | None) -> str:
    """What the next look at placement would do with a shard, in a line."""
    match decision:
        case Move(target=target, reason=reason):
            return f"would go to {target}: {reason}"
        case Refusal(reason=reason):
            return f"should move and cannot: {reason}"
        case _:
            return "stays: nothing is gained by moving it"
