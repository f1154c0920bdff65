"""Who may write an interval? A model of bus and row store: acquire, commit, fence, under tokens.

It keeps a ledger of every acquire and commit, which the invariants read: the checker never asks the checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.clock import Millis
from penstock.core.errors import Fenced, IntervalError, IntervalMissing
from penstock.jobs.births import interval_birth
from penstock.sim.simulation import Simulation


@dataclass(slots=True)
class Interval:
    """The one row of an interval that counts here."""

    birth: str
    generation: int = 0
    shard_epoch: int = 0
    token: int = 0
    commits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One successful acquire, fence or commit, in the order in which they happened."""

    kind: str  # acquire | fence | commit
    interval: tuple[str, int]  # (job birth, partition)
    token: int
    run: str  # who did it
    at_ms: Millis
    pair: tuple[int, int] = (0, 0)  # generation and shard epoch, of an acquire or a fence


@dataclass(slots=True)
class ModelDataPlane:
    """The `DataPlane` port over rows in memory. `fault(call, job)` may raise before or after the effect."""

    sim: Simulation
    fault: Callable[[str, str], None] = lambda call, job: None
    checks_tokens: bool = True
    checks_epochs: bool = True
    rows: dict[tuple[str, int], Interval] = field(default_factory=dict)
    unseen: list[Effect] = field(default_factory=list)  # the ledger, until the invariants have read it
    acquires: int = 0
    commits: int = 0
    refused: int = 0

    def prepare(self, job: str, birth: str, config: Mapping[str, Any]) -> None:
        """Create the intervals of this config; repeated, it does nothing."""
        self.fault("prepare", job)
        for partition in range(config["partitions"]):
            born = interval_birth(birth, config["kind"], config.get("lineage", 0), partition)
            row = self.rows.get((birth, partition))
            if row is None:
                self.rows[birth, partition] = Interval(birth=born)
            elif row.birth != born:
                # A new life of the interval: it keeps the token, which never goes back.
                row.birth, row.token = born, row.token + 1
        self.fault("prepared", job)

    def unread(
        self, job: str, birth: str, config: Mapping[str, Any], category: str, *, is_stopped: bool
    ) -> str:
        """Records are not modelled: whatever was written is read."""
        self.fault("unread", job)
        return ""

    def fence(self, job: str, birth: str, config: Mapping[str, Any], *, generation: int) -> None:
        """Raise every interval to (generation, 0) under a new token."""
        self.fault("fence", job)
        for partition in range(config["partitions"]):
            row = self.rows.get((birth, partition))
            if row is None:
                raise IntervalMissing(f"{job}/{partition} has no rows")
            if row.generation >= generation:
                continue
            row.generation, row.shard_epoch, row.token = generation, 0, row.token + 1
            self._write("fence", (birth, partition), row.token, "syncer", (generation, 0))
        self.fault("fenced", job)

    def retire(self, job: str, birth: str, old: Mapping[str, Any], new: Mapping[str, Any] | None) -> None:
        """Producers are not modelled: there is nothing to unregister."""
        self.fault("retire", job)

    def acquire(
        self, birth: str, partition: int, *, born: str, generation: int, shard_epoch: int, run: str
    ) -> int:
        """Take an interval: Fenced unless (generation, shard epoch) >= the stored pair. Returns the token."""
        row = self.rows.get((birth, partition))
        if row is None or row.birth != born:
            raise IntervalMissing(f"interval {birth}/{partition} is missing, or of another birth")
        if self.checks_epochs and (generation, shard_epoch) < (row.generation, row.shard_epoch):
            self.refused += 1
            raise Fenced(f"interval {birth}/{partition} belongs to a newer owner")
        row.generation, row.shard_epoch, row.token = generation, shard_epoch, row.token + 1
        self.acquires += 1
        self._write("acquire", (birth, partition), row.token, run, (generation, shard_epoch))
        return row.token

    def commit(self, birth: str, partition: int, *, token: int, run: str) -> None:
        """One step of an interval: Fenced unless the token is the stored one."""
        row = self.rows.get((birth, partition))
        if row is None:
            raise IntervalError(f"interval {birth}/{partition} vanished")
        if self.checks_tokens and row.token != token:
            self.refused += 1
            raise Fenced(f"interval {birth}/{partition} has a newer owner")
        row.commits += 1
        self.commits += 1
        self._write("commit", (birth, partition), token, run)

    def _write(
        self, kind: str, interval: tuple[str, int], token: int, run: str, pair: tuple[int, int] = (0, 0)
    ) -> None:
        self.unseen.append(
            Effect(kind=kind, interval=interval, token=token, run=run, at_ms=self.sim.now_ms, pair=pair)
        )
