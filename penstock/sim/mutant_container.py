"""Planted bugs of containers: what `mutants.py` puts in place of lease, watchdog and Task Manager."""

from __future__ import annotations

from dataclasses import replace

from penstock.core.clock import Millis
from penstock.core.machine import Step
from penstock.sim.fleet import Container, Engine
from penstock.tasks.lease import Lease, Stop
from penstock.tasks.messages import HeartbeatReply, ShardEntry, ShardState
from penstock.tasks.task_manager import Report, TaskManager
from penstock.tasks.task_service import TaskList
from penstock.tasks.watchdog import Beat, End, Watchdog


class LeaseFromReceipt(Lease):
    """Counts from the arrival of the acknowledgement: a late reply then eats the margin."""

    def on_ack(self, reply: HeartbeatReply, now_ms: Millis) -> Step[Stop]:
        self.on_sent(reply.sequence, now_ms)
        return super().on_ack(reply, now_ms)


class OutlivesItsLease(Container):
    """Notices that the lease is over, and lets the engine go on."""

    def _end(self, engine: Engine, reason: str) -> None:
        if not reason.startswith("no beat sent"):
            super()._end(engine, reason)


class AcknowledgesDropAtOnce(TaskManager):
    """Says "reaped" when it has only asked for the stop."""

    def report(self) -> Report:
        honest = super().report()
        return replace(honest, acked=tuple(entry for _, entry in sorted(self._shards.items())))


class ObeysAnyAssignment(TaskManager):
    """Applies a late reply too: it undoes a DROP."""

    def on_reply(self, reply: HeartbeatReply, now_ms: Millis) -> None:
        self._assignment_version = 0
        self._shards = {shard: replace(entry, epoch=-1) for shard, entry in self._shards.items()}
        super().on_reply(reply, now_ms)


class TrustsItsDisk(TaskManager):
    """After a restart the list on its disk is good enough."""

    _is_from_disk = False

    def on_task_list(self, news: TaskList, now_ms: Millis, *, cached: bool = False) -> bool:
        if self._is_from_disk:
            return True
        self._is_from_disk = cached
        return super().on_task_list(news, now_ms, cached=cached)


class GivesBackForAnyEngine(Watchdog):
    """Gives back what is to be dropped without its engine, also when that one is ready and runs it."""

    _to_drop: tuple[ShardEntry, ...] = ()

    def _is_for_engine(self, reply: HeartbeatReply) -> bool:
        self._to_drop = tuple(entry for entry in reply.shards if entry.state is ShardState.DROPPING)
        return super()._is_for_engine(reply)

    def look(self, now_ms: Millis) -> Step[Beat | End]:
        step = super().look(now_ms)
        beats = [action.heartbeat for action in step.actions if isinstance(action, Beat)]
        if not beats:
            return step
        said = beats[0]
        owned = tuple(entry for entry in said.acked if entry.state is ShardState.OWNED)
        return Step(actions=(Beat(heartbeat=replace(said, acked=owned + self._to_drop)),))
