"""What a warden does next: beat, ask the store, or end its engine (Turbine IV-C). Passive machines.

`Watchdog` follows one life of an engine, `Contact` whether a Shard Manager answers. The warden's threads and
the simulator call them; neither sees a clock, a process or a wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.core.clock import Millis, Step
from penstock.fleet.messages import (
    Heartbeat,
    HeartbeatReply,
    HeartbeatVerdict,
    Profile,
    ShardEntry,
    ShardState,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTasks:
    """Stop every task and register anew."""

    reason: str


@dataclass(slots=True)
class Lease:
    """The lease of one incarnation. Nothing may start before it is held, nothing may run after it is over."""

    deadline_ms: Millis  # the allowed silence
    _sent_ms: dict[int, Millis] = field(default_factory=dict)
    _held_until_ms: Millis | None = None
    _term: int = 0
    _over: str = ""  # why, once it is

    def on_sent(self, sequence: int, now_ms: Millis) -> Step[StopTasks]:
        """A beat leaves. Requires: called before it is sent."""
        self._sent_ms[sequence] = now_ms
        return self.on_time(now_ms)

    def on_ack(self, reply: HeartbeatReply, now_ms: Millis) -> Step[StopTasks]:
        """A reply arrived. Only `ok` to a beat we sent, from the newest Shard Manager, extends the lease."""
        step = self.on_time(now_ms)
        if self._over or reply.term < self._term or reply.sequence not in self._sent_ms:
            return step
        self._term = reply.term
        if reply.verdict is HeartbeatVerdict.REBOOT:
            return self._end(reply.reason or "the Shard Manager ended this incarnation")
        if reply.verdict is HeartbeatVerdict.OK:
            self._extend(self._sent_ms[reply.sequence])
        return self.on_time(now_ms)

    def on_renewed(self, sent_ms: Millis, now_ms: Millis) -> Step[StopTasks]:
        """The lease row was renewed in the store by a write begun at `sent_ms`."""
        step = self.on_time(now_ms)
        if self._over:
            return step
        self._extend(sent_ms)
        return self.on_time(now_ms)

    def on_time(self, now_ms: Millis) -> Step[StopTasks]:
        """Stop when the deadline has passed; say so again at every call after that."""
        if self._over:
            return self._end(self._over)
        if self._held_until_ms is None:
            return Step()
        if now_ms >= self._held_until_ms:
            return self._end(f"no beat sent in the last {self.deadline_ms} ms was acknowledged")
        return Step(wake_at_ms=self._held_until_ms)

    def is_held(self, now_ms: Millis) -> bool:
        """Whether tasks may run now."""
        return not self._over and self._held_until_ms is not None and now_ms < self._held_until_ms

    def _extend(self, sent_ms: Millis) -> None:
        self._held_until_ms = max(self._held_until_ms or 0, sent_ms + self.deadline_ms)
        # Older beats could not extend it any further; their late answers are then unknown and ignored.
        self._sent_ms = {sequence: sent for sequence, sent in self._sent_ms.items() if sent >= sent_ms}

    def _end(self, reason: str) -> Step[StopTasks]:
        self._over = reason
        return Step(actions=(StopTasks(reason=reason),))


# A fresh interpreter needs this long for its first sign of life on a loaded machine.
ENGINE_START_MS: Millis = 60_000
MISSED_BEATS = 2  # in a row: then the store is asked
EARLY_SHARE = 5  # a fifth of a heartbeat interval lies at least between a beat and one that has news


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """What the store says when a container renews its row there."""

    assignment_version: int
    shards: tuple[ShardEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendHeartbeat:
    """Send this; then tell `on_sent`, or nothing if it could not leave."""

    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEngine:
    """Kill the engine and all it started, then register anew. Repeated until that is done."""

    reason: str


@dataclass(slots=True, kw_only=True)
class Watchdog:
    """The rules for one life of an engine: signs and replies come in, beats and the end come out."""

    container: str
    incarnation: str
    profile: Profile
    started_ms: Millis
    lease: Lease
    pid: int = 0
    _sequence: int = 0
    _signed_ms: Millis | None = None
    _said: Heartbeat | None = None  # without a number yet
    _beat_due_ms: Millis = 0
    _early_ms: Millis = 0  # not before that a beat for news
    _listed_ms: Millis = 0  # not before that a beat for a newer list: a large fleet has one all the time
    _told: Heartbeat | None = None  # the last one sent
    _answered: int = 0  # the newest assignment seen before the engine was ready: it is told of none before
    _given_back: tuple[ShardEntry, ...] = ()  # what that assignment says to drop

    @property
    def _is_ready(self) -> bool:
        """Whether the engine has a Task Manager. Before that it takes no shard."""
        return self._said is not None and self._said.engine_ready

    def on_sign(self, at_ms: Millis, said: Heartbeat) -> None:
        """The engine said at `at_ms` that it lives, and what is so."""
        is_first = self._said is None
        self._signed_ms, self._said = at_ms, said
        if self._told is None:
            return
        is_ready_now = said.engine_ready and not self._told.engine_ready
        if is_first or is_ready_now or _has_let_go(self._told, said):
            self._beat_soon()
        elif said.list_version > self._told.list_version:
            # A plan waits until every container has obeyed its list, also those that had nothing to end.
            self._beat_due_ms = min(self._beat_due_ms, self._listed_ms)

    def _beat_soon(self) -> None:
        """A plan or a move waits for just that: it is told soon, not with the next regular beat."""
        self._beat_due_ms, self._told = self._early_ms, None

    def on_sent(self, beat: Heartbeat, now_ms: Millis) -> None:
        """Requires: `now_ms` is not after the sending."""
        self.lease.on_sent(beat.sequence, now_ms)

    def on_reply(self, reply: HeartbeatReply, now_ms: Millis) -> bool:
        """An answer arrived. Whether the engine is to be told of it."""
        self.lease.on_ack(reply, now_ms)
        return reply.verdict is HeartbeatVerdict.OK and self._is_for_engine(reply)

    def on_renewed(self, reply: HeartbeatReply, sent_ms: Millis, now_ms: Millis) -> bool:
        """The store answered in place of a Shard Manager, to a renewal begun at `sent_ms`."""
        if reply.verdict is not HeartbeatVerdict.OK:
            return self.on_reply(reply, now_ms)
        self.lease.on_renewed(sent_ms, now_ms)
        return self._is_for_engine(reply)

    def _is_for_engine(self, reply: HeartbeatReply) -> bool:
        """Whether the engine is told. Until it is ready it is not: it may not read yet, and a full pipe would
        stop its warden. So it runs nothing, and what is to be dropped is given back without it.
        """
        if reply.assignment_version < self._answered:
            return False  # it may still name, as owned, what was given back since
        if self._is_ready:
            return True
        self._answered = reply.assignment_version
        self._given_back = tuple(entry for entry in reply.shards if entry.state is ShardState.DROPPING)
        if self._told is not None and not set(self._given_back) <= set(self._told.acked):
            self._beat_soon()
        return False

    def look(self, now_ms: Millis) -> Step[SendHeartbeat | EndEngine]:
        """Requires: what lay in the pipe and on the wire is in."""
        lost = self.lease.on_time(now_ms).actions
        if lost:
            return Step(actions=(EndEngine(reason=lost[0].reason),))
        age_ms = now_ms - (self.started_ms if self._signed_ms is None else self._signed_ms)
        limit_ms = ENGINE_START_MS if self._signed_ms is None else self.profile.engine_stale_ms
        if age_ms > limit_ms:
            return Step(actions=(EndEngine(reason=f"no sign of life from the engine for {age_ms} ms"),))
        if now_ms < self._beat_due_ms:
            return Step()
        soon_ms = self.profile.heartbeat_ms // EARLY_SHARE
        # What waited for news is decided shortly after it: the next beat asks for that.
        is_early = self._sequence > 0 and self._told is None
        self._beat_due_ms = now_ms + (2 * soon_ms if is_early else self.profile.heartbeat_ms)
        self._early_ms, self._listed_ms = now_ms + soon_ms, now_ms + 2 * soon_ms
        self._sequence += 1
        # Before its first word an engine runs nothing. That is worth a beat too: a container whose engine
        # starts slowly would fail over, and start another one, just as slowly.
        nothing = Heartbeat(container=self.container, incarnation=self.incarnation, sequence=0)
        beat = replace(
            self._said or nothing,
            container=self.container,
            incarnation=self.incarnation,
            sequence=self._sequence,
            pid=self.pid,
        )
        if not self._is_ready:
            beat = replace(beat, acked=self._given_back)
        self._told = beat
        return Step(actions=(SendHeartbeat(heartbeat=beat),))


def _has_let_go(told: Heartbeat, said: Heartbeat) -> bool:
    """Whether tasks or shards ended here that the Shard Manager still believes in."""
    tasks = {(task.task_id, task.generation) for task in said.tasks}
    if any((task.task_id, task.generation) not in tasks for task in told.tasks):
        return True
    known = set(told.acked)
    return any(entry.state is ShardState.DROPPING and entry not in known for entry in said.acked)


@dataclass(slots=True)
class Contact:
    """Whether a Shard Manager answers, and what stands for its answer while it does not."""

    missed: int = 0
    _known: HeartbeatReply | None = None  # the last answer

    @property
    def is_made(self) -> bool:
        """Whether an answer ever came: from then on the store can stand in."""
        return self._known is not None

    def on_answer(self, reply: HeartbeatReply) -> None:
        """A beat was answered."""
        self.missed, self._known = 0, reply

    def on_silence(self) -> bool:
        """A beat was not answered. Whether to renew the lease row in the store."""
        self.missed += 1
        # Nothing was ever acknowledged: nothing runs, and nobody said how many shards there are.
        return self.missed >= MISSED_BEATS and self.is_made

    def read(self, beat: Heartbeat, renewal: Renewal | None) -> HeartbeatReply:
        """What the store said, as an answer. Requires: `on_silence` said to ask."""
        assert self._known is not None, "the store is asked only after an answer"
        return HeartbeatReply(
            verdict=HeartbeatVerdict.REBOOT if renewal is None else HeartbeatVerdict.OK,
            term=self._known.term,
            sequence=beat.sequence,
            assignment_version=0 if renewal is None else renewal.assignment_version,
            shards=() if renewal is None else renewal.shards,
            shard_count=self._known.shard_count,
            list_version=0,
            reason="its lease is over in the store" if renewal is None else "",
        )
