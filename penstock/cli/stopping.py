"""How commands that run until Ctrl-C end: in order, with exit code 0.

They do so also when they were started with SIGINT ignored, as a shell does with what a script starts in
the background: whoever sends the signal to such a command means it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


def stop_on_signals() -> threading.Event:
    """What SIGTERM and SIGINT set from now on."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


@contextlib.contextmanager
def until_ctrl_c() -> Iterator[None]:
    """SIGINT ends the block: it is how one stops looking, not a failure."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        # Python makes no KeyboardInterrupt of a signal that was ignored when it started.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
