"""The loop of alarms: sends what is owed, looks at what is wrong, and sees to what only time changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from penstock.core.clock import Millis
from penstock.resources.alarm_sender import AlarmSender
from penstock.resources.alarm_store import AlarmStore
from penstock.resources.alarms import FLEET, Alarm
from penstock.resources.levels import Levels
from penstock.resources.policies.policy import RaiseAlert

LOOK_MS: Millis = 5_000
SWEEP_MS: Millis = 15_000
AGAIN_MS: Millis = 60_000  # a level that stays is written again so often: an alarm ends five minutes after

# What a source sees of all jobs now.
Look = Callable[[Millis], Levels]
# Which of these jobs are paused, stopped or removed, and which of the three.
AtRest = Callable[[Sequence[str]], Mapping[str, str]]
Told = Mapping[str, tuple[RaiseAlert, ...]]  # of one job, by source


class AlarmWatch:
    """One round at a time. Only the active instance may run it: levels of two would undo each other."""

    def __init__(
        self,
        store: AlarmStore,
        sender: AlarmSender,
        sources: Mapping[str, Look],
        at_rest: AtRest,
        lasting: Collection[str] = (),
    ) -> None:
        """`lasting`: the sources that also speak of jobs which are stopped."""
        self._store, self._sender, self._sources = store, sender, sources
        self._at_rest, self._lasting = at_rest, frozenset(lasting)
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
        firing = [alarm for alarm in self._store.alarms() if alarm.is_firing]
        jobs = {alarm.job for alarm in firing}.union(*(levels.keys() for levels in seen.values()))
        at_rest = self._at_rest(sorted(jobs - {FLEET}))
        for job in sorted(jobs):
            state = at_rest.get(job)
            told = {
                source: levels.get(job, ()) if self._may_speak(source, state) else ()
                for source, levels in seen.items()
            }
            last, at_ms = self._told.get(job, (None, 0))
            if state is not None and any(alarm.job == job and not _is_told(alarm, told) for alarm in firing):
                self._store.rest(job, told, now_ms)
            elif told != last or not 0 <= now_ms - at_ms < AGAIN_MS:
                self._store.report(job, told, now_ms)
            else:
                continue
            self._told[job] = told, now_ms
        self._told = {job: said for job, said in self._told.items() if job in jobs}

    def _may_speak(self, source: str, state: str | None) -> bool:
        """Whether a source is asked about a job: `state` is how it rests, None if it does not."""
        return state is None or (state != "removed" and source in self._lasting)


def _is_told(alarm: Alarm, told: Told) -> bool:
    return any(alert.key == alarm.key for alert in told.get(alarm.source, ()))


def _is_time(last_ms: Millis | None, now_ms: Millis, every_ms: Millis) -> bool:
    """A clock that was set back does not keep anything waiting."""
    return last_ms is None or not 0 <= now_ms - last_ms < every_ms
