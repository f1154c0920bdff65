"""How long a container may go on without being heard: counted from the sending of the last acknowledged beat.

A passive machine on the boot clock of the container's own host; it never sees a time of another machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.clock import Millis
from penstock.core.machine import Step
from penstock.tasks.messages import HeartbeatReply, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
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

    def on_sent(self, sequence: int, now_ms: Millis) -> Step[Stop]:
        """A beat leaves. Requires: called before it is sent."""
        self._sent_ms[sequence] = now_ms
        return self.on_time(now_ms)

    def on_ack(self, reply: HeartbeatReply, now_ms: Millis) -> Step[Stop]:
        """A reply arrived. Only `ok` to a beat we sent, from the newest Shard Manager, extends the lease."""
        step = self.on_time(now_ms)
        if self._over or reply.term < self._term or reply.sequence not in self._sent_ms:
            return step
        self._term = reply.term
        if reply.verdict is Verdict.REBOOT:
            return self._end(reply.reason or "the Shard Manager ended this incarnation")
        if reply.verdict is Verdict.OK:
            self._extend(self._sent_ms[reply.sequence])
        return self.on_time(now_ms)

    def on_renewed(self, sent_ms: Millis, now_ms: Millis) -> Step[Stop]:
        """The lease row was renewed in the store by a write begun at `sent_ms`."""
        step = self.on_time(now_ms)
        if self._over:
            return step
        self._extend(sent_ms)
        return self.on_time(now_ms)

    def on_time(self, now_ms: Millis) -> Step[Stop]:
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

    def _end(self, reason: str) -> Step[Stop]:
        self._over = reason
        return Step(actions=(Stop(reason=reason),))
