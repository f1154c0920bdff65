"""What the scaler remembers of a job between rounds, in the same record as other policies. Pure.

It lies in the store: a control plane that takes over knows what was done and what was expected of it.
"""

from __future__ import annotations

from dataclasses import replace as with_changes

import msgspec

from penstock.core.clock import Millis
from penstock.resources.frames import MINUTE_MS
from penstock.resources.scaler.observation import Action, Footprint, Learnt

PAST_MAX = 20
RESTARTS_MAX = 3
RESTART_S = 30.0  # until one was measured
# A learnt rate that differs by less than this is the same.
SAME_RATE = 0.01


class ScalerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The scaler's part of a job's record."""

    birth: str = ""  # of the job: one of the same name that came later is another
    thread_rate: float | None = None  # P
    thread_rate_minute: int | None = None
    past: tuple[Action, ...] = ()  # oldest first
    restarts_s: tuple[float, ...] = ()  # as measured, newest last
    said: str = ""  # what the journal last heard, as a key: the same is not told twice

    @property
    def footprint(self) -> Footprint:
        """What decisions know of the job beyond its metrics."""
        return Footprint(thread_rate=self.thread_rate, thread_rate_minute=self.thread_rate_minute)

    @property
    def restart_s(self) -> float:
        """For how long a change stops the job: the longest of the last few."""
        return max(self.restarts_s, default=RESTART_S)

    @property
    def pending(self) -> Action | None:
        """What was done and is not judged yet."""
        return self.past[-1] if self.past and self.past[-1].outcome == "pending" else None

    def learning(self, learnt: Learnt, now_ms: Millis) -> ScalerMemory:
        """With what a decision found out."""
        memory = self
        if learnt.judged is not None and self.past:
            memory = _with(memory, past=(*self.past[:-1], learnt.judged))
        rate = learnt.thread_rate
        if rate is not None and not _is_same(rate, self.thread_rate):
            memory = _with(memory, thread_rate=rate, thread_rate_minute=now_ms // MINUTE_MS)
        return memory

    def acting(self, action: Action) -> ScalerMemory:
        """With something that is done now. What was still watched is overruled by it."""
        past = self.past
        if self.pending is not None:
            past = (*past[:-1], with_changes(past[-1], outcome="overruled", judged_minute=action.at_minute))
        return _with(self, past=(*past, action)[-PAST_MAX:])

    def without_last(self) -> ScalerMemory:
        """What was to be done was not done after all, and will be told when it is."""
        return _with(self, past=self.past[:-1], said="")

    def restarted(self, seconds: float) -> ScalerMemory:
        """With one more measured restart."""
        return _with(self, restarts_s=(*self.restarts_s, round(seconds, 1))[-RESTARTS_MAX:])

    def telling(self, said: str) -> ScalerMemory:
        """With what the journal hears now."""
        return self if said == self.said else _with(self, said=said)


def _with(memory: ScalerMemory, **news: object) -> ScalerMemory:
    return msgspec.structs.replace(memory, **news)


def _is_same(rate: float, known: float | None) -> bool:
    return known is not None and abs(rate - known) <= SAME_RATE * known
