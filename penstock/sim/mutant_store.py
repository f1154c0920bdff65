"""Planted bugs of the stores: what `mutants.py` puts in place of `ShardStore` and `PlanStore`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.jobs.job_store import JobRecord
from penstock.jobs.plan_store import PlanStore
from penstock.jobs.running_store import PLANS
from penstock.jobs.sync_plan import PlanStep
from penstock.tasks.container_store import ContainerRow, read_container
from penstock.tasks.messages import Heartbeat, Verdict
from penstock.tasks.placement import Move
from penstock.tasks.shard_rows_store import SHARDS, Assignment
from penstock.tasks.shard_store import BeatOutcome, FailedOver, Renewed, ShardStore


class NoHold(PlanStore):
    """Takes note of the hold in the plan, but not as a level: the list goes on to serve the old tasks."""

    def take_hold(self, record: JobRecord, now_ms: Millis) -> None:
        with self._leader.writing("hold") as connection:
            connection.execute(
                sa.update(PLANS).where(PLANS.c.job == record.job.name).values(step=str(PlanStep.COMMIT))
            )


class AddBeforeDrop(ShardStore):
    """Gives a shard to its next container without waiting for the last one."""

    def _apply(self, connection: sa.Connection, moves: Iterable[Move]) -> None:
        moves = list(moves)
        for move in moves:
            orphan = sa.update(SHARDS).where(SHARDS.c.shard == move.shard).values(container=None)
            connection.execute(orphan)
        super()._apply(connection, [replace(move, source=None) for move in moves])


class _Reading(ShardStore):
    def _row(self, name: str) -> ContainerRow | None:
        with self._database.reading() as connection:
            return read_container(connection, name)


class LeaseUnread(_Reading):
    """Fails over whom it does not hear, though the lease was renewed in the store."""

    def fail_over(
        self, name: str, incarnation: str, *, renewals: int | None, **how: Any
    ) -> FailedOver | Renewed | None:
        found = self._row(name)
        seen = found.renewals if found is not None and renewals is not None else renewals
        return super().fail_over(name, incarnation, renewals=seen, **how)


class WithheldIsFine(ShardStore):
    """Extends a lease that is to run out."""

    def _beat(self, connection: sa.Connection, beat: Heartbeat, at_ms: Millis) -> BeatOutcome:
        outcome = super()._beat(connection, beat, at_ms)
        return replace(outcome, verdict=Verdict.OK) if outcome.verdict is Verdict.WITHHELD else outcome


class AnyIdentity(_Reading):
    """Takes whoever registers under a name for the one that was there, and lets both beat."""

    def register(
        self, name: str, incarnation: str, *, folder_id: str, **how: Any
    ) -> tuple[ContainerRow, Assignment]:
        found = self._row(name)
        known = found.folder_id if found is not None else folder_id
        return super().register(name, incarnation, folder_id=known, **how)


class BeatsOfAnyLife(_Reading):
    """Does not look at the incarnation of a beat or of a renewal."""

    def _beat(self, connection: sa.Connection, beat: Heartbeat, at_ms: Millis) -> BeatOutcome:
        found = read_container(connection, beat.container)
        known = found.incarnation if found is not None else beat.incarnation
        return super()._beat(connection, replace(beat, incarnation=known), at_ms)

    def renew(self, name: str, incarnation: str) -> Assignment | None:
        found = self._row(name)
        return super().renew(name, incarnation if found is None else found.incarnation)


class AnyTerm(ShardStore):
    """Writes without looking whether another Shard Manager has taken over."""

    @contextmanager
    def _writing(self, term: int) -> Iterator[sa.Connection]:
        with self._database.transaction() as connection:
            yield connection
