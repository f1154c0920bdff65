"""Where requests are answered: in threads beside the event loop, a few for each sort, or in place.

Apart, so that a flood of one sort delays only itself: heartbeats must come through whatever else is asked.
Few, since Python runs one at a time: more of them only take turns. Handing a request to a thread and back
takes longer than a read of a local file, so such reads are answered in place, as long as they are quick.
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
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Pool:
    """A few threads, and a decorator for the routes they answer."""

    def __init__(self, name: str, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"api {name}")

    def __call__(self, route: Callable[Given, Found]) -> Callable[Given, Any]:
        """The route as FastAPI awaits it."""

        @wraps(route)
        async def answer(*args: Given.args, **kwargs: Given.kwargs) -> Found:
            return await self.run(route, *args, **kwargs)

        return answer

    async def run(self, call: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs) -> Found:
        """Call it in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, partial(call, *args, **kwargs)
        )


class Reads:
    """A decorator for routes that only read: in place if the store is `local` and quick, else in threads."""

    def __init__(self, *, local: bool) -> None:
        self._local, self._slow_until = local, 0.0

    def __call__(self, route: Callable[Given, Found]) -> Callable[Given, Any]:
        """The route as FastAPI awaits it."""

        @wraps(route)
        async def answer(*args: Given.args, **kwargs: Given.kwargs) -> Found:
            began = time.monotonic()
            if not self._local or began < self._slow_until:
                return await READS.run(route, *args, **kwargs)
            try:
                return route(*args, **kwargs)
            finally:
                # A disk that hesitates must not hold up those who ask for something else.
                if (ended := time.monotonic()) - began > SLOW_S:
                    self._slow_until = ended + SLOW_FOR_S

        return answer


class Together(Generic[Asked, Answer]):
    """Answers what is asked meanwhile together: `call` gets all of it, in one of a pool's threads.

    For each it returns an answer, or an error for who asked that.
    """

    def __init__(
        self, pool: Pool, call: Callable[[list[Asked]], Sequence[Answer | BaseException]], *, at_once: int
    ) -> None:
        self._pool, self._call, self._at_once = pool, call, at_once
        self._waiting: deque[tuple[Asked, asyncio.Future[Answer]]] = deque()
        self._answering: asyncio.Task[None] | None = None

    async def ask(self, item: Asked) -> Answer:
        """Its answer, or the error that all who were asked with it get."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if self._answering is None or self._answering.done():
            self._answering = asyncio.ensure_future(self._answer())
        return await answer

    async def _answer(self) -> None:
        while self._waiting:
            taken = [self._waiting.popleft() for _ in range(min(self._at_once, len(self._waiting)))]
            asked = self._pool.run(self._call, [item for item, _ in taken])
            (found,) = await asyncio.gather(asked, return_exceptions=True)
            answers = [found] * len(taken) if isinstance(found, BaseException) else list(found)
            for (_, future), answer in zip(taken, answers, strict=True):
                if future.done():  # who asked has left
                    continue
                if isinstance(answer, BaseException):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)


# A read in place that took so long is the last one for a while.
SLOW_S = 0.05
SLOW_FOR_S = 5.0
READS = Pool("reads", 4)
WRITES = Pool("writes", 16)
PATCHES = Pool("patches", 1)
BEATS = Pool("beats", 2)
# Looking up tokens that were never good here: a flood of them waits for itself alone.
STRANGERS = Pool("strangers", 1)
# Whatever may take long: whole lists, files, checks of large bodies.
LONG = Pool("long", 4)
