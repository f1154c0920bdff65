"""The machine's clocks, sleeps and time limits, apart from the loops: processes of Spark need no more."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from penstock.core.clock import Millis


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> Millis:
        return time.time_ns() // 1_000_000

    def boot_ms(self) -> Millis:
        # time.monotonic() stands still while the host sleeps; a lease must not.
        clock_id = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        return int(time.clock_gettime(clock_id) * 1000)


@cache
def boot_id() -> str:
    """Tells one start of this machine from another; "" where the machine does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def sleep_ms(duration_ms: Millis) -> None:
    """Wait, outside any loop."""
    time.sleep(duration_ms / 1000)


class TookTooLong(BaseException):
    """Raised in the middle of code that ran into its time limit; no `except Exception` swallows it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Break off code that is not ours after so long: loops in any thread, waits in the main one too."""
    is_main = threading.current_thread() is threading.main_thread()
    # Somebody else's alarm stays theirs.
    if is_main and signal.getitimer(signal.ITIMER_REAL)[0] == 0:
        before = signal.signal(signal.SIGALRM, _too_long)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return
    thread, lock, is_over = threading.get_ident(), threading.Lock(), False

    def break_off() -> None:
        with lock:
            if not is_over:
                raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
                raise_in(ctypes.c_ulong(thread), ctypes.py_object(TookTooLong))

    timer = threading.Timer(seconds, break_off)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        timer.cancel()


def _too_long(number: int, frame: object) -> None:
    raise TookTooLong
