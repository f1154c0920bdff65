"""The threads of the control plane: `Loop` runs rounds, `WorkerThreads` runs calls that may hang."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic

import structlog

from penstock.core.clock import Clock, Millis
from penstock.core.errors import PenstockError
from penstock.core.workers import Finished, Now, Result, Stuck

log = structlog.get_logger(__name__)

TRACE_FRAMES = 5  # of an unexpected error


def _trace(error: BaseException) -> str:
    """The last frames of the traceback. `exc_info` would print local variables too, and take seconds."""
    return "".join(traceback.format_exception(error, limit=-TRACE_FRAMES))


@dataclass(slots=True)
class Loop:
    """Runs a round at an interval, or at once after `poke`, until it is stopped.

    A round that raises is logged, counted and retried with exponential backoff; the loop continues.
    """

    name: str
    round_: Callable[[], None]
    every_ms: Millis
    gap_ms: Millis = 0  # at least this long between the starts of two rounds, since pokes come in bursts
    share_max: float = 1.0  # largest share of the time that rounds may take, so that other loops get CPU
    rest_max_ms: Millis = 60_000  # limit of the pause that follows from `share_max`
    failures: int = 0
    streak: int = 0  # failures since the last successful round
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
        """Run the next round after this pause instead of `every_ms`."""
        self._next_pause_ms = pause_ms

    def stop(self, timeout_ms: Millis = 5000) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_ms / 1000)

    def run(self) -> None:
        """Run rounds in this thread until `stop`."""
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self.round_()
                self.streak = 0
                self.rounds += 1
            except Exception as error:
                # A bug in one round must not end the service.
                self.streak += 1
                self.failures += 1
                self.last_error = f"{type(error).__name__}: {error}"
                is_new = self.streak == 1 and not isinstance(error, PenstockError)
                more = {"trace": _trace(error)} if is_new else {}
                log.error("round failed", loop=self.name, error=self.last_error, streak=self.streak, **more)
            ended = time.monotonic()
            pause_ms = min(self.every_ms * (2 ** min(self.streak, 4)), max(self.every_ms, 10_000))
            if self._next_pause_ms is not None and not self.streak:
                pause_ms, self._next_pause_ms = self._next_pause_ms, None
            self._wake.wait(pause_ms / 1000)
            took_s = ended - began
            rest_s = min(took_s / self.share_max - took_s, self.rest_max_ms / 1000)
            next_s = max(began + self.gap_ms / 1000, ended + rest_s)
            self._stop.wait(max(0.0, next_s - time.monotonic()))
            self._wake.clear()


class ThreadExecutor:
    """A `BackgroundExecutor` with a fixed number of threads."""

    def __init__(self, name: str, *, threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)

    def start(self, work: Callable[[], Result]) -> Callable[[], Result]:
        return self._threads.submit(work).result

    def stop(self) -> None:
        self._threads.shutdown(wait=False)


@dataclass(slots=True)
class _WorkItem(Generic[Result]):
    work: Callable[[Now], Result]
    began_ms: Millis | None = None  # of the boot clock; None: it is queued
    is_stuck: bool = False


class WorkerThreads(Generic[Result]):
    """`Workers` with up to `size` threads. A call that hangs blocks its own key only.

    A thread cannot be killed. When a call takes longer than `stuck_after_ms`, its thread is no longer counted
    in `size` and another thread replaces it, up to `threads_max`. If the call returns later, its result is
    delivered as usual.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        *,
        size: int = 32,
        threads_max: int = 128,
        stuck_after_ms: Millis = 60_000,
    ) -> None:
        assert 0 < size <= threads_max, (size, threads_max)
        self._name, self._clock = name, clock
        self._size, self._threads_max, self._stuck_after_ms = size, threads_max, stuck_after_ms
        self._items: dict[str, _WorkItem[Result]] = {}
        self._queue: deque[str] = deque()
        self._finished: list[Finished[Result]] = []
        self._threads, self._idle, self._stuck_count = 0, 0, 0
        self._is_stopped = False
        self._changed = threading.Condition()

    def start(self, key: str, work: Callable[[Now], Result], now_ms: Millis) -> None:
        with self._changed:
            assert key not in self._items, key
            self._items[key] = _WorkItem(work)
            self._queue.append(key)
            self._mark_stuck()
            self._start_threads()
            self._changed.notify()

    def busy(self) -> frozenset[str]:
        with self._changed:
            return frozenset(self._items)

    def take_finished(self) -> tuple[Finished[Result], ...]:
        with self._changed:
            finished, self._finished = tuple(self._finished), []
            return finished

    def stuck(self) -> tuple[Stuck, ...]:
        with self._changed:
            self._mark_stuck()
            self._start_threads()
            now_ms = self._clock.boot_ms()
            return tuple(
                Stuck(key=key, for_ms=now_ms - (item.began_ms or 0))
                for key, item in self._items.items()
                if item.is_stuck
            )

    def stop(self, timeout_ms: Millis = 5000) -> None:
        """Start no more calls, and wait up to `timeout_ms` for running ones that are not stuck."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._threads == self._stuck_count, timeout_ms / 1000)

    def _mark_stuck(self) -> None:
        limit_ms = self._clock.boot_ms() - self._stuck_after_ms
        for item in self._items.values():
            if item.began_ms is not None and item.began_ms <= limit_ms and not item.is_stuck:
                item.is_stuck = True
                self._stuck_count += 1

    def _start_threads(self) -> None:
        """Start threads for the queued items, within the limits."""
        while (
            self._idle < len(self._queue)
            and self._threads - self._stuck_count < self._size
            and self._threads < self._threads_max
            and not self._is_stopped
        ):
            threading.Thread(target=self._run, name=f"{self._name} worker", daemon=True).start()
            self._threads += 1
            self._idle += 1

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            key, item = taken
            result, problem = None, None
            try:
                result = item.work(self._clock.now_ms)
            except Exception as error:
                # A bug in one call must not end the thread; the caller gets the error.
                problem = error
                log.error("work failed", workers=self._name, key=key, trace=_trace(error))
            with self._changed:
                del self._items[key]
                self._finished.append(Finished(key=key, work=item.work, result=result, error=problem))
                self._idle += 1
                if item.is_stuck:
                    self._stuck_count -= 1

    def _take(self) -> tuple[str, _WorkItem[Result]] | None:
        """The next queued item; None: this thread must end."""
        with self._changed:
            while not self._queue and not self._is_stopped:
                # A stuck thread may come back after it was replaced: then there is one too many.
                if self._threads - self._stuck_count > self._size:
                    break
                self._changed.wait()
            self._idle -= 1
            if self._is_stopped or self._threads - self._stuck_count > self._size:
                self._threads -= 1
                self._changed.notify_all()
                return None
            key = self._queue.popleft()
            item = self._items[key]
            item.began_ms = self._clock.boot_ms()
            return key, item
