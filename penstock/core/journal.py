"""The journal of decisions: what was decided, by whom and why. Pure: the entry and the protocol.

`db/journal_store.py` stores it. Each change writes one entry in its own transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.core.clock import Millis

ENTRIES_MAX = 1000  # of one response


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One decision. The journal assigns `id` when it writes the entry, in commit order."""

    at_ms: Millis
    actor: str  # a person's token name, or a service: "state_syncer", "autoscaler"
    kind: str  # "layer", "sync", "rescale", "failover"
    subject: str  # what it is about: a job, a container, a shard
    decision: str
    reason: str
    data: Mapping[str, Any] = field(default_factory=dict)  # the facts behind it; JSON values only
    id: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "at_ms": self.at_ms,
            "actor": self.actor,
            "kind": self.kind,
            "subject": self.subject,
            "decision": self.decision,
            "reason": self.reason,
            "data": dict(self.data),
        }


class Journal(Protocol):
    """Stores decisions. `connection` is the caller's open transaction; None: a transaction of its own."""

    def append(self, connection: Any | None, entry: Entry) -> None:
        """Write one entry with the next id. It is committed or rolled back with the caller's transaction."""

    def entries(
        self, subject: str | None = None, since: int = 0, limit: int = 100, *, kind: str | None = None
    ) -> tuple[Entry, ...]:
        """Up to `limit` entries with id > `since`, oldest first; without `since` the newest, oldest first."""
