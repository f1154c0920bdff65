"""The only threads, sleeps and wall clock of the control plane: calls services' `tick(now_ms)` in rounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from penstock.core.clock import Millis

log = structlog.get_logger(__name__)


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> Millis:
        return time.time_ns() // 1_000_000

    def boot_ms(self) -> Millis:
        # time.monotonic() stands still while the host sleeps; a lease must not.
        clock_id = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        return int(time.clock_gettime(clock_id) * 1000)


def sleep_ms(duration_ms: Millis) -> None:
    """Wait, outside any loop."""
    time.sleep(duration_ms / 1000)


@dataclass(slots=True)
class Loop:
    """Calls one round again and again, at an interval or at once when poked, until stopped.

    A round that raises is logged, counted and repeated with a growing pause: it never ends the loop.
    """

    name: str
    round_: Callable[[], None]
    every_ms: Millis
    failures: int = 0
    rounds: int = 0
    last_error: str = ""
    _wake: threading.Event = field(default_factory=threading.Event)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _next_pause_ms: Millis | None = None

    def start(self) -> Loop:
        self._thread = threading.Thread(target=self.run, name=self.name, daemon=True)
        self._thread.start()
        return self

    def poke(self) -> None:
        """Run the next round now."""
        self._wake.set()

    def poke_after(self, pause_ms: Millis) -> None:
        """Run the next round after a pause shorter than the usual one."""
        self._next_pause_ms = pause_ms

    def stop(self, timeout_ms: Millis = 5000) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_ms / 1000)

    def run(self) -> None:
        """Run rounds in this thread until `stop`."""
        streak = 0
        while not self._stop.is_set():
            try:
                self.round_()
                streak = 0
                self.rounds += 1
            except Exception as error:
                # The one place that may catch everything: a bug in one round must not end the service.
                streak += 1
                self.failures += 1
                self.last_error = f"{type(error).__name__}: {error}"
                log.error(
                    "round failed", loop=self.name, error=self.last_error, streak=streak, exc_info=streak == 1
                )
            pause_ms = min(self.every_ms * (2 ** min(streak, 4)), max(self.every_ms, 10_000))
            if self._next_pause_ms is not None and not streak:
                pause_ms, self._next_pause_ms = self._next_pause_ms, None
            self._wake.wait(pause_ms / 1000)
            self._wake.clear()
