"""The machine's clocks, sleeps and time limits. Apart from the loops: Spark's processes import less."""

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
        # time.monotonic() stops during suspend; a lease must not.
        clock_id = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        return int(time.clock_gettime(clock_id) * 1000)


@cache
def boot_id() -> str:
    """The id of this boot of the machine; "" if the machine has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def sleep_ms(duration_ms: Millis) -> None:
    """Block this thread; for code outside of loops."""
    time.sleep(duration_ms / 1000)


class TookTooLong(BaseException):
    """Raised in code that exceeded its time limit. `except Exception` does not catch it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt user code after a timeout: Python code in any thread, blocking calls only in the main one."""
    is_main = threading.current_thread() is threading.main_thread()
    # An alarm that other code has set is not replaced.
    if is_main and signal.getitimer(signal.ITIMER_REAL)[0] == 0:
        before = signal.signal(signal.SIGALRM, _too_long)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return
    thread, lock, is_done = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not is_done:
                raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
                raise_in(ctypes.c_ulong(thread), ctypes.py_object(TookTooLong))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_done = True
        timer.cancel()


def _too_long(number: int, frame: object) -> None:
    raise TookTooLong
