"""Thread pools that answer requests beside the event loop, one pool for each kind of request.

Separate pools, so that a flood of one kind delays only that kind: heartbeats must always get through. Few
threads, because of Python's GIL. A hand-over to a thread takes longer than a read of a local file, so such
reads run on the event loop as long as they are fast.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, Generic, ParamSpec, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")
Item = TypeVar("Item")
Result = TypeVar("Result")


class Pool:
    """A thread pool, and a decorator for the routes that run in it."""

    def __init__(self, name: str, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"api {name}")

    def __call__(self, route: Callable[Given, Found]) -> Callable[Given, Any]:
        """The route as an async function for FastAPI."""

        @wraps(route)
        async def answer(*args: Given.args, **kwargs: Given.kwargs) -> Found:
            return await self.run(route, *args, **kwargs)

        return answer

    async def run(self, call: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs) -> Found:
        """Run a call in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, partial(call, *args, **kwargs)
        )


class Reads:
    """A decorator for read-only routes: on the event loop if the store is `local` and fast, else in READS."""

    def __init__(self, *, local: bool) -> None:
        self._local, self._slow_until = local, 0.0

    def __call__(self, route: Callable[Given, Found]) -> Callable[Given, Any]:
        """The route as an async function for FastAPI."""

        @wraps(route)
        async def answer(*args: Given.args, **kwargs: Given.kwargs) -> Found:
            began = time.monotonic()
            if not self._local or began < self._slow_until:
                return await READS.run(route, *args, **kwargs)
            try:
                return route(*args, **kwargs)
            finally:
                # A slow disk must not block the event loop.
                if (ended := time.monotonic()) - began > SLOW_S:
                    self._slow_until = ended + SLOW_FOR_S

        return answer


class RequestBatcher(Generic[Item, Result]):
    """Batches requests: those that arrive while a batch runs form the next one.

    `call` processes a batch in one of the pool's threads and returns a result or an error for each item.
    """

    def __init__(
        self, pool: Pool, call: Callable[[list[Item]], Sequence[Result | BaseException]], *, batch_max: int
    ) -> None:
        self._pool, self._call, self._batch_max = pool, call, batch_max
        self._queue: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def ask(self, item: Item) -> Result:
        """The item's result, or its error; an error of the whole batch is raised for each of its items."""
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queue.append((item, result))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._run_batches())
        return await result

    async def _run_batches(self) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(self._batch_max, len(self._queue)))]
            running = self._pool.run(self._call, [item for item, _ in batch])
            (found,) = await asyncio.gather(running, return_exceptions=True)
            results = [found] * len(batch) if isinstance(found, BaseException) else list(found)
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # its caller has disconnected
                    continue
                if isinstance(result, BaseException):
                    future.set_exception(result)
                else:
                    future.set_result(result)


# After a read on the event loop that took longer than this, reads use threads for a while.
SLOW_S = 0.05
SLOW_FOR_S = 5.0
READS = Pool("reads", 4)
WRITES = Pool("writes", 16)
PATCHES = Pool("patches", 1)
HEARTBEATS = Pool("beats", 2)
# Lookups of tokens that were never valid here: a flood of them delays only itself.
TOKEN_LOOKUPS = Pool("strangers", 1)
# Long requests: whole lists, files, checks of large bodies.
LONG = Pool("long", 4)
