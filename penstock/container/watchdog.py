"""Decides what a warden does next: send a heartbeat, renew in the store, or kill its engine (Turbine IV-C).

Passive machines: `Watchdog` follows one engine process, `Contact` whether a Shard Manager answers. The
warden's threads and the simulator drive them; they use no clock, process or network.
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
    """Stop all tasks and register again."""

    reason: str


@dataclass(slots=True)
class Lease:
    """The lease of one incarnation. Tasks may start only while it is held and must stop before it expires."""

    deadline_ms: Millis  # how long it lasts after the last acknowledged heartbeat was sent
    _sent_ms: dict[int, Millis] = field(default_factory=dict)
    _held_until_ms: Millis | None = None
    _term: int = 0
    _end_reason: str = ""  # set once it has ended

    def on_sent(self, sequence: int, now_ms: Millis) -> Step[StopTasks]:
        """A heartbeat is about to be sent. Requires: called before the sending."""
        self._sent_ms[sequence] = now_ms
        return self.on_time(now_ms)

    def on_ack(self, reply: HeartbeatReply, now_ms: Millis) -> Step[StopTasks]:
        """A reply arrived. Only `ok` from the newest Shard Manager, for a heartbeat we sent, extends the
        lease.
        """
        step = self.on_time(now_ms)
        if self._end_reason or reply.term < self._term or reply.sequence not in self._sent_ms:
            return step
        self._term = reply.term
        if reply.verdict is HeartbeatVerdict.REBOOT:
            return self._end(reply.reason or "the Shard Manager ended this incarnation")
        if reply.verdict is HeartbeatVerdict.OK:
            self._extend(self._sent_ms[reply.sequence])
        return self.on_time(now_ms)

    def on_renewed(self, sent_ms: Millis, now_ms: Millis) -> Step[StopTasks]:
        """The lease row was renewed in the store by a write that began at `sent_ms`."""
        step = self.on_time(now_ms)
        if self._end_reason:
            return step
        self._extend(sent_ms)
        return self.on_time(now_ms)

    def on_time(self, now_ms: Millis) -> Step[StopTasks]:
        """Stop once the deadline has passed; repeated at every later call."""
        if self._end_reason:
            return self._end(self._end_reason)
        if self._held_until_ms is None:
            return Step()
        if now_ms >= self._held_until_ms:
            return self._end(f"no heartbeat sent in the last {self.deadline_ms} ms was acknowledged")
        return Step(wake_at_ms=self._held_until_ms)

    def is_held(self, now_ms: Millis) -> bool:
        """Whether tasks may run now."""
        return not self._end_reason and self._held_until_ms is not None and now_ms < self._held_until_ms

    def _extend(self, sent_ms: Millis) -> None:
        self._held_until_ms = max(self._held_until_ms or 0, sent_ms + self.deadline_ms)
        # Older heartbeats cannot extend it any further; their late replies are ignored.
        self._sent_ms = {sequence: sent for sequence, sent in self._sent_ms.items() if sent >= sent_ms}

    def _end(self, reason: str) -> Step[StopTasks]:
        self._end_reason = reason
        return Step(actions=(StopTasks(reason=reason),))


# Maximum time to the first sign of life of a new engine process, on a loaded machine.
ENGINE_START_MS: Millis = 60_000
MISSED_HEARTBEATS = 2  # in a row: then the lease is renewed in the store
EARLY_SHARE = 5  # an early heartbeat comes at least this fraction (1/5) of the interval after the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """The assignment that the store returns when a container renews its lease row."""

    assignment_version: int
    shards: tuple[ShardEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendHeartbeat:
    """Send this heartbeat, and call `on_sent` before sending it."""

    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEngine:
    """Kill the engine and all its processes, then register again. Repeated until that is done."""

    reason: str


@dataclass(slots=True, kw_only=True)
class Watchdog:
    """The rules for one engine process: signs of life and replies in, heartbeats and its end out."""

    container: str
    incarnation: str
    profile: Profile
    started_ms: Millis
    lease: Lease
    pid: int = 0
    _sequence: int = 0
    _sign_ms: Millis | None = None
    _report: Heartbeat | None = None  # the engine's last report, without a sequence number
    _beat_due_ms: Millis = 0
    _early_ms: Millis = 0  # no early heartbeat before this time
    _listed_ms: Millis = 0  # no early heartbeat for a newer list before this time: lists change often
    _last_sent: Heartbeat | None = None  # None also when an early heartbeat is due
    _assignment_version: int = 0  # the newest assignment received before the engine was ready
    _released: tuple[ShardEntry, ...] = ()  # the shards to drop in that assignment

    @property
    def _is_ready(self) -> bool:
        """Whether the engine has a Task Manager; without one it accepts no shard."""
        return self._report is not None and self._report.engine_ready

    def on_sign(self, at_ms: Millis, report: Heartbeat) -> None:
        """The engine sent a sign of life at `at_ms`, with its report."""
        is_first = self._report is None
        self._sign_ms, self._report = at_ms, report
        if self._last_sent is None:
            return
        is_ready_now = report.engine_ready and not self._last_sent.engine_ready
        if is_first or is_ready_now or _has_released(self._last_sent, report):
            self._schedule_early_heartbeat()
        elif report.list_version > self._last_sent.list_version:
            # A plan waits until every container has applied the list, also those without tasks to stop.
            self._beat_due_ms = min(self._beat_due_ms, self._listed_ms)

    def _schedule_early_heartbeat(self) -> None:
        """Send the next heartbeat early, because a plan or a move waits for it."""
        self._beat_due_ms, self._last_sent = self._early_ms, None

    def on_sent(self, heartbeat: Heartbeat, now_ms: Millis) -> None:
        """A heartbeat is about to be sent. Requires: `now_ms` is not after the sending."""
        self.lease.on_sent(heartbeat.sequence, now_ms)

    def on_reply(self, reply: HeartbeatReply, now_ms: Millis) -> bool:
        """A reply arrived. Returns whether to pass it to the engine."""
        self.lease.on_ack(reply, now_ms)
        return reply.verdict is HeartbeatVerdict.OK and self._is_for_engine(reply)

    def on_renewed(self, reply: HeartbeatReply, sent_ms: Millis, now_ms: Millis) -> bool:
        """The store answered instead of a Shard Manager, to a renewal begun at `sent_ms`."""
        if reply.verdict is not HeartbeatVerdict.OK:
            return self.on_reply(reply, now_ms)
        self.lease.on_renewed(sent_ms, now_ms)
        return self._is_for_engine(reply)

    def _is_for_engine(self, reply: HeartbeatReply) -> bool:
        """Whether to pass a reply to the engine. Not before it is ready: it may not read its pipe yet, and a
        full pipe would block the warden. Such an engine runs no tasks, so the warden itself releases shards
        to drop.
        """
        if reply.assignment_version < self._assignment_version:
            return False  # it may still list shards as owned that were released since
        if self._is_ready:
            return True
        self._assignment_version = reply.assignment_version
        self._released = tuple(entry for entry in reply.shards if entry.state is ShardState.DROPPING)
        if self._last_sent is not None and not set(self._released) <= set(self._last_sent.acked):
            self._schedule_early_heartbeat()
        return False

    def check(self, now_ms: Millis) -> Step[SendHeartbeat | EndEngine]:
        """What to do now. Requires: all pending signs of life and replies were processed."""
        ended = self.lease.on_time(now_ms).actions
        if ended:
            return Step(actions=(EndEngine(reason=ended[0].reason),))
        age_ms = now_ms - (self.started_ms if self._sign_ms is None else self._sign_ms)
        limit_ms = ENGINE_START_MS if self._sign_ms is None else self.profile.engine_stale_ms
        if age_ms > limit_ms:
            return Step(actions=(EndEngine(reason=f"no sign of life from the engine for {age_ms} ms"),))
        if now_ms < self._beat_due_ms:
            return Step()
        soon_ms = self.profile.heartbeat_ms // EARLY_SHARE
        # After an early heartbeat the Shard Manager or a plan soon decides: the next one comes early too.
        is_early = self._sequence > 0 and self._last_sent is None
        self._beat_due_ms = now_ms + (2 * soon_ms if is_early else self.profile.heartbeat_ms)
        self._early_ms, self._listed_ms = now_ms + soon_ms, now_ms + 2 * soon_ms
        self._sequence += 1
        # Heartbeats are sent before the engine's first report too: otherwise a container whose engine starts
        # slowly would be failed over, and start another engine just as slowly.
        empty = Heartbeat(container=self.container, incarnation=self.incarnation, sequence=0)
        heartbeat = replace(
            self._report or empty,
            container=self.container,
            incarnation=self.incarnation,
            sequence=self._sequence,
            pid=self.pid,
        )
        if not self._is_ready:
            heartbeat = replace(heartbeat, acked=self._released)
        self._last_sent = heartbeat
        return Step(actions=(SendHeartbeat(heartbeat=heartbeat),))


def _has_released(last_sent: Heartbeat, report: Heartbeat) -> bool:
    """Whether tasks or shards ended that the last heartbeat still listed."""
    tasks = {(task.task_id, task.generation) for task in report.tasks}
    if any((task.task_id, task.generation) not in tasks for task in last_sent.tasks):
        return True
    known = set(last_sent.acked)
    return any(entry.state is ShardState.DROPPING and entry not in known for entry in report.acked)


@dataclass(slots=True)
class Contact:
    """Tracks whether a Shard Manager answers, and builds replies from the store while none does."""

    missed: int = 0
    _last_reply: HeartbeatReply | None = None

    @property
    def is_made(self) -> bool:
        """Whether a reply was ever received: from then on the store can be used instead."""
        return self._last_reply is not None

    def on_answer(self, reply: HeartbeatReply) -> None:
        """A heartbeat was answered."""
        self.missed, self._last_reply = 0, reply

    def on_silence(self) -> bool:
        """A heartbeat was not answered. Returns whether to renew the lease row in the store."""
        self.missed += 1
        # Without any reply so far no tasks run, and the number of shards is unknown.
        return self.missed >= MISSED_HEARTBEATS and self.is_made

    def reply_from_store(self, heartbeat: Heartbeat, renewal: Renewal | None) -> HeartbeatReply:
        """The store's answer as a reply. Requires: `on_silence` returned True."""
        assert self._last_reply is not None, "the store is used only after a reply"
        return HeartbeatReply(
            verdict=HeartbeatVerdict.REBOOT if renewal is None else HeartbeatVerdict.OK,
            term=self._last_reply.term,
            sequence=heartbeat.sequence,
            assignment_version=0 if renewal is None else renewal.assignment_version,
            shards=() if renewal is None else renewal.shards,
            shard_count=self._last_reply.shard_count,
            list_version=0,
            reason="its lease has ended in the store" if renewal is None else "",
        )
