"""The loop of alarms: sends what is owed, looks at what is wrong, and sees to what only time changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.core.clock import Millis
from penstock.resources.alarm_sender import AlarmSender
from penstock.resources.alarm_store import AlarmStore
from penstock.resources.levels import Levels
from penstock.resources.policies.policy import RaiseAlert

LOOK_MS: Millis = 5_000
SWEEP_MS: Millis = 15_000
AGAIN_MS: Millis = 60_000  # a level that stays is written again so often: an alarm ends five minutes after

# What a source sees of all jobs now.
Look = Callable[[Millis], Levels]
Told = Mapping[str, tuple[RaiseAlert, ...]]  # of one job, by source


class AlarmWatch:
    """One round at a time. Only the active instance may run it: levels of two would undo each other."""

    def __init__(self, store: AlarmStore, sender: AlarmSender, sources: Mapping[str, Look]) -> None:
        self._store, self._sender, self._sources = store, sender, sources
        self._looked_ms: Millis | None = None
        self._swept_ms: Millis | None = None
        self._told: dict[str, tuple[Told, Millis]] = {}  # by job: what was reported last, and when

    def tick(self, now_ms: Millis) -> bool:
        """Whether to come again soon, because something is being sent."""
        # First what is owed: a look that fails must not keep anybody from being told.
        is_sending = self._sender.tick(now_ms)
        if _is_time(self._looked_ms, now_ms, LOOK_MS):
            self._looked_ms = now_ms
            self._look(now_ms)
        if _is_time(self._swept_ms, now_ms, SWEEP_MS):
            self._swept_ms = now_ms
            self._store.sweep(now_ms)
        return is_sending

    def _look(self, now_ms: Millis) -> None:
        seen = {source: look(now_ms) for source, look in self._sources.items()}
        firing = {
            alarm.job for alarm in self._store.alarms() if alarm.is_firing and alarm.source in self._sources
        }
        jobs = firing.union(*(levels.keys() for levels in seen.values()))
        for job in sorted(jobs):
            told = {source: levels.get(job, ()) for source, levels in seen.items()}
            last, at_ms = self._told.get(job, (None, 0))
            if told != last or not 0 <= now_ms - at_ms < AGAIN_MS:
                self._store.report(job, told, now_ms)
                self._told[job] = told, now_ms
        self._told = {job: said for job, said in self._told.items() if job in jobs}


def _is_time(last_ms: Millis | None, now_ms: Millis, every_ms: Millis) -> bool:
    """A clock that was set back does not keep anything waiting."""
    return last_ms is None or not 0 <= now_ms - last_ms < every_ms
