"""Sends notices of alarms: each route by itself, in order, again with a growing pause, not for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError
from penstock.core.workers import Now, Workers
from penstock.resources.alarm_store import AlarmStore, OwedNotice
from penstock.resources.alarms import Notice

log = structlog.get_logger(__name__)

FIRST_PAUSE_MS: Millis = 2_000
PAUSE_MAX_MS: Millis = 600_000
TRIES_MAX = 20  # some two hours

Refusal = PenstockError | None  # why a route did not take a notice; None: it did


class Route(Protocol):
    """A way to somebody: a log, a webhook, a channel."""

    @property
    def name(self) -> str:
        """As settings call it."""

    def send(self, notice: Notice, notice_id: int) -> None:
        """Hand it over, or raise. It may come twice after a crash: the id is then the same."""


class LogRoute:
    """To the log of the control plane."""

    name = "log"

    def send(self, notice: Notice, notice_id: int) -> None:
        alarm = notice.alarm
        say = log.info if notice.kind == "resolved" or alarm.severity == "info" else log.warning
        say(
            f"alarm {notice.kind}",
            job=alarm.job,
            alarm=f"{alarm.source}/{alarm.key}",
            severity=alarm.severity,
            text=alarm.text,
            what_to_do=alarm.what_to_do,
        )


class AlarmSender:
    """One notice a route at a time; a route that does not answer costs nobody but itself."""

    def __init__(self, store: AlarmStore, routes: Sequence[Route], workers: Workers[Refusal]) -> None:
        self._store, self._workers = store, workers
        self._routes = {route.name: route for route in routes}
        self._sent: dict[str, OwedNotice] = {}

    def tick(self, now_ms: Millis) -> bool:
        """Take what came back, send what is due; whether to look again soon, because something is sent."""
        for done in self._workers.take_finished():
            owed = self._sent.pop(done.key)
            error = done.error or done.result
            if error is None:
                self._store.settle(owed.id)
            else:
                self._failed(owed, error, now_ms)
        busy = self._workers.busy()
        for owed in self._store.owed():
            if owed.next_ms > now_ms or owed.route in self._sent or owed.route in busy:
                continue  # what follows waits too: an end must not come before its beginning
            route = self._routes.get(owed.route)
            if route is None:
                self._store.settle(owed.id)  # the route is no longer wanted
                continue
            self._sent[owed.route] = owed
            self._workers.start(owed.route, _sending(route, owed), now_ms)
        return bool(self._sent)

    def _failed(self, owed: OwedNotice, error: Exception, now_ms: Millis) -> None:
        tries = owed.tries + 1
        given_up = tries >= TRIES_MAX
        why = said(error)
        log.warning(
            "a notice was not taken",
            route=owed.route,
            alarm=owed.notice.alarm.name,
            tries=tries,
            given_up=given_up,
            error=why,
        )
        if given_up:
            self._store.give_up(owed, f"it was not taken {tries} times, at last: {why}", now_ms)
        else:
            self._store.postpone(owed.id, tries=tries, next_ms=now_ms + pause_ms(tries))


def said(error: Exception) -> str:
    """What a route said. Only our own errors are repeated: a library's may have an address in them."""
    return error.what if isinstance(error, PenstockError) else type(error).__name__


def pause_ms(tries: int) -> Millis:
    """How long after so many failures."""
    return int(min(PAUSE_MAX_MS, FIRST_PAUSE_MS * 2 ** min(tries - 1, 20)))


def _sending(route: Route, owed: OwedNotice) -> Callable[[Now], Refusal]:
    def send(now: Now) -> Refusal:
        try:
            route.send(owed.notice, owed.id)
        except PenstockError as error:
            return error  # expected: no trace of it in the log
        return None

    return send
