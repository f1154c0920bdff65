"""Commands that run until Ctrl-C: how they stop, and how they refresh their output.

They stop cleanly with exit code 0, also if they were started with SIGINT ignored, as a shell does for
background jobs of a script.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live

from penstock.cli.output import Form, out, show_line
from penstock.cli.tables import text
from penstock.client.client import Client
from penstock.core.clock import Millis
from penstock.core.errors import PenstockError, StoreUnavailable
from penstock.core.system_clock import sleep_ms

# Events come in bursts: one refresh for all of them.
SETTLE_MS: Millis = 200
EVENTS_MAX = 1000


class ChangeWait:
    """Waits for the next journal entry about a subject, or for the interval."""

    def __init__(
        self,
        client: Client,
        *,
        subject: str | None = None,
        every_s: float = 1.0,
        pause: Callable[[Millis], None] = sleep_ms,
    ) -> None:
        self._client, self._subject, self._every_s, self._pause = client, subject, every_s, pause
        self._since: int | None = None

    def wait(self) -> None:
        """Return after the next journal entry, or after `every_s` at the latest."""
        try:
            if self._since is None:
                newest = self._client.journal(limit=1)
                self._since = newest[-1]["id"] if newest else 0
            if self._drain(limit=1, wait_s=math.ceil(self._every_s)):
                self._pause(SETTLE_MS)
                self._drain(limit=EVENTS_MAX, wait_s=0)
        except PenstockError:
            self._pause(int(self._every_s * 1000))  # without events: by the clock

    def _drain(self, *, limit: int, wait_s: int) -> bool:
        found = False
        for event in self._client.events(
            since=self._since, subject=self._subject, limit=limit, wait_s=wait_s
        ):
            self._since, found = event["id"], True
        return found


def watch(
    read: Callable[[], Any],
    render: Callable[[Any], RenderableType],
    wait: Callable[[], None],
    *,
    form: Form,
) -> None:
    """Read and show again after each `wait`, until interrupted; retries without a control plane."""
    last: Any = None
    with Live(console=out, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            problem = ""
            try:
                last = read()
            except StoreUnavailable as error:
                if last is None:
                    raise
                problem = error.what
            if form is Form.TABLE:
                note = [text(f"{problem}; showing the last known state", "bold red")] if problem else []
                live.update(Group(render(last), *note), refresh=True)
            elif not problem:
                show_line(last, form)
            wait()


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set from now on."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


@contextlib.contextmanager
def until_ctrl_c() -> Iterator[None]:
    """SIGINT ends the block without an error."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        # Python raises no KeyboardInterrupt if SIGINT was ignored at its start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
