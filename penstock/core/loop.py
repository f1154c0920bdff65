"""The only threads of the control plane: calls services' `tick(now_ms)` in rounds.

Calls that may hang are made by `WorkerThreads`, beside the rounds.
"""

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

TRACE_FRAMES = 5  # of an error that nobody expected


def _trace(error: BaseException) -> str:
    """Where it came from. Not `exc_info`: a log takes seconds to print that, and prints variables too."""
    return "".join(traceback.format_exception(error, limit=-TRACE_FRAMES))


@dataclass(slots=True)
class Loop:
    """Calls one round again and again, at an interval or at once when poked, until stopped.

    A round that raises is logged, counted and repeated with a growing pause: it never ends the loop.
    """

    name: str
    round_: Callable[[], None]
    every_ms: Millis
    gap_ms: Millis = 0  # rounds begin at least so far apart, however often it is poked: pokes come in bursts
    share_max: float = 1.0  # of the time: a round that grows with the fleet leaves room for the others
    rest_max_ms: Millis = 60_000  # but nobody waits longer than this for the next one
    failures: int = 0
    streak: int = 0  # failures since the last round that did not
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
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self.round_()
                self.streak = 0
                self.rounds += 1
            except Exception as error:
                # The one place that may catch everything: a bug in one round must not end the service.
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


class AsideThreads:
    """`Aside` in as many threads as there may be things under way."""

    def __init__(self, name: str, *, threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)

    def start(self, work: Callable[[], Result]) -> Callable[[], Result]:
        return self._threads.submit(work).result

    def stop(self) -> None:
        self._threads.shutdown(wait=False)


@dataclass(slots=True)
class _Piece(Generic[Result]):
    work: Callable[[Now], Result]
    began_ms: Millis | None = None  # of the boot clock; None: it waits
    is_written_off: bool = False


class WorkerThreads(Generic[Result]):
    """`Workers` in up to `size` threads at a time. A piece that hangs costs its key, and nobody else.

    A thread cannot be ended from outside. One whose piece has taken longer than `stuck_after_ms` no longer
    counts, and another takes its place, until there are `threads_max` of them. When the piece does come back,
    its result is given out as if nothing had been.
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
        self._pieces: dict[str, _Piece[Result]] = {}
        self._waiting: deque[str] = deque()
        self._finished: list[Finished[Result]] = []
        self._threads, self._idle, self._written_off = 0, 0, 0
        self._is_stopped = False
        self._changed = threading.Condition()

    def start(self, key: str, work: Callable[[Now], Result], now_ms: Millis) -> None:
        with self._changed:
            assert key not in self._pieces, key
            self._pieces[key] = _Piece(work)
            self._waiting.append(key)
            self._write_off()
            self._staff()
            self._changed.notify()

    def busy(self) -> frozenset[str]:
        with self._changed:
            return frozenset(self._pieces)

    def take_finished(self) -> tuple[Finished[Result], ...]:
        with self._changed:
            finished, self._finished = tuple(self._finished), []
            return finished

    def stuck(self) -> tuple[Stuck, ...]:
        with self._changed:
            self._write_off()
            self._staff()
            now_ms = self._clock.boot_ms()
            return tuple(
                Stuck(key=key, for_ms=now_ms - (piece.began_ms or 0))
                for key, piece in self._pieces.items()
                if piece.is_written_off
            )

    def stop(self, timeout_ms: Millis = 5000) -> None:
        """Begin nothing new, and wait for what is under way, but not for ever."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._threads == self._written_off, timeout_ms / 1000)

    def _write_off(self) -> None:
        limit_ms = self._clock.boot_ms() - self._stuck_after_ms
        for piece in self._pieces.values():
            if piece.began_ms is not None and piece.began_ms <= limit_ms and not piece.is_written_off:
                piece.is_written_off = True
                self._written_off += 1

    def _staff(self) -> None:
        """Let there be threads enough for what waits."""
        while (
            self._idle < len(self._waiting)
            and self._threads - self._written_off < self._size
            and self._threads < self._threads_max
            and not self._is_stopped
        ):
            threading.Thread(target=self._run, name=f"{self._name} worker", daemon=True).start()
            self._threads += 1
            self._idle += 1

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            key, piece = taken
            result, problem = None, None
            try:
                result = piece.work(self._clock.now_ms)
            except Exception as error:
                # A bug in one piece must not cost a worker; whoever asked for it is told.
                problem = error
                log.error("work failed", workers=self._name, key=key, trace=_trace(error))
            with self._changed:
                del self._pieces[key]
                self._finished.append(Finished(key=key, work=piece.work, result=result, error=problem))
                self._idle += 1
                if piece.is_written_off:
                    self._written_off -= 1

    def _take(self) -> tuple[str, _Piece[Result]] | None:
        """The next piece; None when this thread is to end."""
        with self._changed:
            while not self._waiting and not self._is_stopped:
                # One that was written off may come back when its place is taken.
                if self._threads - self._written_off > self._size:
                    break
                self._changed.wait()
            self._idle -= 1
            if self._is_stopped or self._threads - self._written_off > self._size:
                self._threads -= 1
                self._changed.notify_all()
                return None
            key = self._waiting.popleft()
            piece = self._pieces[key]
            piece.began_ms = self._clock.boot_ms()
            return key, piece
