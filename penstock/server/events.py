"""The event stream: new journal entries, to all watchers, as server-sent events.

One task polls the journal for all watchers, so entries of other instances are streamed too. A watcher that is
slow, or resumes with an old id, reads the journal itself until it has caught up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import structlog
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.client.problems import TooMany
from penstock.core.errors import PenstockError
from penstock.core.journal import Entry
from penstock.db.journal_store import JournalStore
from penstock.server.pools import READS

WATCHERS_MAX = 100
PAGE = 500
TAIL = 2_000
POLL_S = 0.2
CHECK_S = 1.0  # how often a watcher's token is checked again
HEARTBEAT_S = 15.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The request of one watcher."""

    since: int | None  # None: only new entries
    subject: str | None
    count_max: int | None  # the stream ends after so many events
    wait_s: float  # and after this time
    is_welcome: Callable[[], Awaitable[bool]]  # whether the watcher's token is still valid


class EventHub:
    """Streams new journal entries to watchers. Everything but `close` runs on the server's event loop."""

    def __init__(
        self, journal: JournalStore, *, watchers_max: int = WATCHERS_MAX, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self._journal, self._watchers_max, self._heartbeat_s = journal, watchers_max, heartbeat_s
        self._tail: deque[Entry] = deque(maxlen=TAIL)
        self._first = self._last = 0  # the tail has every entry with first < id <= last
        self._watchers = 0
        self._has_new = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def response(self, watch: Watch) -> StreamingResponse:
        """The stream of one watcher; TooMany past the limit of watchers.

        Once it has begun, the watcher misses no later entry.
        """
        if self._watchers >= self._watchers_max:
            raise TooMany(
                "too many event streams",
                why=f"the limit of a server process is {self._watchers_max}",
                fix="try again later, or poll with `penstock journal` instead",
            )
        self._watchers += 1
        with ExitStack() as undo:
            undo.callback(self._leave)
            cursor = watch.since if watch.since is not None else await READS.run(self._journal.last_id)
            undo.pop_all()
        return _EventStream(self._events(watch, cursor), self._leave)

    def close(self) -> None:
        """End every stream; may be called from any thread."""
        self._is_closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._notify)

    def _leave(self) -> None:
        self._watchers -= 1

    def _notify(self) -> None:
        has_new, self._has_new = self._has_new, asyncio.Event()
        has_new.set()

    async def _events(self, watch: Watch, cursor: int) -> AsyncIterator[bytes]:
        self._loop = asyncio.get_running_loop()
        clock = self._loop.time
        yield b"retry: 1000\n\n"
        end, checked, sent, left = clock() + watch.wait_s, clock(), clock(), watch.count_max
        while not self._is_closed:
            if clock() - checked >= CHECK_S:
                if not await watch.is_welcome():
                    return
                checked = clock()
            has_new, found = self._has_new, await self._after(cursor)
            for entry in found:
                cursor = entry.id
                if watch.subject in (None, entry.subject):
                    yield _event(entry)
                    sent, left = clock(), None if left is None else left - 1
                    if left == 0:
                        return
            # With `wait_s` 0 all existing entries are sent before the stream ends.
            if clock() >= end and not (found and watch.wait_s == 0):
                return
            if found:
                continue
            self._keep_polling()
            pause_s = min(CHECK_S, self._heartbeat_s, end - clock())
            if not await _is_set(has_new, pause_s) and clock() - sent >= self._heartbeat_s:
                # A comment as keep-alive, for both sides and for proxies.
                yield b": still here\n\n"
                sent = clock()

    async def _after(self, cursor: int) -> list[Entry]:
        if self._is_polling and cursor >= self._first:
            return [entry for entry in self._tail if entry.id > cursor] if cursor < self._last else []
        try:
            found = await READS.run(self._journal.after, cursor, limit=PAGE)
        except PenstockError as error:
            log.warning("the journal could not be read for a watcher", error=error.what)
            return []
        return list(found)

    @property
    def _is_polling(self) -> bool:
        return self._poller is not None and not self._poller.done()

    def _keep_polling(self) -> None:
        if not self._is_polling:
            self._poller = asyncio.get_running_loop().create_task(self._poll())

    async def _poll(self) -> None:
        """Read new entries as long as there are watchers."""
        self._tail.clear()
        self._first = self._last = 0
        while self._watchers and not self._is_closed:
            try:
                if not self._last:
                    self._first = self._last = await READS.run(self._journal.last_id)
                    self._notify()
                found = await READS.run(self._journal.after, self._last)
            except PenstockError as error:
                log.warning("the journal could not be read for watchers", error=error.what)
                found = ()
            if found:
                dropped = len(self._tail) + len(found) - TAIL
                if dropped > 0:
                    self._first = [*self._tail, *found][dropped - 1].id
                self._tail.extend(found)
                self._last = found[-1].id
                self._notify()
            await asyncio.sleep(POLL_S)


class _EventStream(StreamingResponse):
    """A streaming response that calls `leave` when it ends, also after an error."""

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


async def _is_set(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), max(0.0, seconds))
    except TimeoutError:
        return False
    return True


def _event(entry: Entry) -> bytes:
    # Other characters are removed: a line break would begin another field.
    kind = "".join(letter for letter in entry.kind if letter.isalnum() or letter in "._-")
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (
        entry.id,
        kind.encode("ascii", "replace"),
        msgspec.json.encode(entry.to_json()),
    )
