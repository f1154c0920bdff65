"""Waiting for a newer task list: containers that ask for one hear of it at once, not when they ask next.

One task looks, for all who wait; what another instance wrote into the same database is seen too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from penstock.core.errors import PenstockError
from penstock.web.pools import BEATS

LOOK_S = 0.1
WAIT_MAX_S = 30.0

log = structlog.get_logger(__name__)


class ListWatch:
    """Tells who waits that the list is newer. All of it runs on the server's event loop but `close`."""

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version
        self._seen = 0
        self._waiting = 0
        self._news = asyncio.Event()
        self._looker: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def newer_than(self, version: int, wait_s: float) -> None:
        """Return when the list is newer than this, after so long, or when the server ends."""
        self._loop = asyncio.get_running_loop()
        end = self._loop.time() + wait_s
        self._waiting += 1
        try:
            while not self._is_closed and self._seen <= version and (left_s := end - self._loop.time()) > 0:
                if self._looker is None or self._looker.done():
                    self._looker = self._loop.create_task(self._look())
                try:
                    await asyncio.wait_for(self._news.wait(), left_s)
                except TimeoutError:
                    return
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Let everybody go; from any thread."""
        self._is_closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _look(self) -> None:
        """Until nobody waits any more."""
        self._seen = 0  # whoever waits knows better than what was seen long ago
        is_silent = False
        while self._waiting and not self._is_closed:
            try:
                seen = await BEATS.run(self._version)
                is_silent = False
                if seen != self._seen:
                    self._seen = seen
                    self._tell()
            except PenstockError as error:
                if not is_silent:
                    log.warning("the task list's version could not be read", error=error.what)
                is_silent = True
            await asyncio.sleep(LOOK_S)
