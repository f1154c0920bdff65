"""Alarms put together: their store and routes, what is looked at, and the loop's round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.clock import Millis
from penstock.core.loop import Loop, WorkerThreads
from penstock.core.pace import REST_MS
from penstock.core.system_clock import sleep_ms
from penstock.jobs.job_store import JobStore
from penstock.resources import capacity_manager, levels
from penstock.resources.alarm_facts import AlarmFacts
from penstock.resources.alarm_sender import AlarmSender, Refusal
from penstock.resources.alarm_service import AlarmService
from penstock.resources.alarm_store import AlarmStore
from penstock.resources.alarm_watch import AlarmWatch
from penstock.resources.behind_low import BehindLow
from penstock.resources.levels import CategoryTrouble, LoopTrouble
from penstock.streams.bus_care import FailingCategory
from penstock.web.notifying import routes_of

if TYPE_CHECKING:
    from penstock.app import ControlPlane


class Alarming:
    """What one control plane does about alarms."""

    def __init__(
        self,
        plane: ControlPlane,
        jobs: JobStore,
        loops: Callable[[], Iterable[Loop]],
        categories: Callable[[], Iterable[FailingCategory]],
    ) -> None:
        settings = plane.settings
        routes = routes_of(webhook=settings.alarm_webhook, channels=settings.alarm_channels)
        store = AlarmStore(plane.database, plane.journal, [route.name for route in routes])
        self.service = AlarmService(jobs, store, routes)
        self._workers: WorkerThreads[Refusal] = WorkerThreads("alarms", plane.clock)
        facts = AlarmFacts(
            plane.jobs,
            plane.fleet,
            plane.journal,
            lambda: _troubles(loops()),
            BehindLow(store.alarms),
            categories=lambda: _troubled(categories()),
            rest=partial(sleep_ms, REST_MS),
        )
        sources = {
            levels.SOURCE: lambda now_ms: levels.decide_levels(facts.observe(now_ms), now_ms),
            capacity_manager.SOURCE: plane.capacity.levels,
        }
        self._watch = AlarmWatch(
            store,
            AlarmSender(store, routes, self._workers),
            sources,
            plane.jobs.at_rest,
            (capacity_manager.SOURCE,),
        )

    def tick(self, now_ms: Millis) -> bool:
        """One round; whether the next should come soon, because something is being sent."""
        return self._watch.tick(now_ms)

    def stop(self) -> None:
        """Begin to send nothing more. What is under way may be sent again by the next life."""
        self._workers.stop()


def _troubles(loops: Iterable[Loop]) -> tuple[LoopTrouble, ...]:
    return tuple(
        LoopTrouble(name=loop.name, streak=loop.streak, error=loop.last_error)
        for loop in loops
        if loop.streak
    )


def _troubled(categories: Iterable[FailingCategory]) -> tuple[CategoryTrouble, ...]:
    return tuple(
        CategoryTrouble(
            name=found.name, streak=found.streak, error=str(found.error.what), why=found.error.why
        )
        for found in categories
    )
