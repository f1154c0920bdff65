"""HTTP over kept connections, with as little work per answer as there can be: the load of benches."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

TIMEOUT_S = 60.0

Done = Callable[[int, bytes], None]


@dataclass(slots=True)
class Kind:
    """One kind of request: how long each took from when it was due, and what went wrong."""

    name: str
    times_ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        ordered = sorted(self.times_ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


@dataclass(frozen=True, slots=True)
class Request:
    """Bytes to send, when they were due, and what to do with the answer."""

    kind: Kind
    due: float
    data: bytes
    done: Done | None = None


class Connection(asyncio.Protocol):
    """One kept connection with one request under way: as little work per answer as there can be."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._buffer = pool, b""
        self._request: Request | None = None
        self._transport: asyncio.Transport | None = None
        self.used = time.perf_counter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: Request) -> None:
        assert self._transport is not None
        self._request, self.used = request, time.perf_counter()
        self._transport.write(request.data)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        lower = head.lower()
        start = lower.index(b"content-length:") + 15
        length = int(lower[start : lower.find(b"\r\n", start) if b"\r\n" in lower[start:] else None])
        if len(body) < length:
            return
        request, self._request, self._buffer = self._request, None, b""
        assert request is not None
        self._pool.answered(self, request, int(head[9:12]), body)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._request is not None:
            self._request.kind.errors.append(f"connection lost: {exc}")
        self._pool.lost(self, was_busy=self._request is not None)


class Pool:
    """Connections that requests wait for, in the order they were due."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        # In turn: a connection that nobody uses is closed by the server.
        self._idle, self._waiting = deque[Connection](), deque[Request]()
        self.is_closing, self.under_way = False, 0

    async def open(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(count):
            _, connection = await loop.create_connection(lambda: Connection(self), self._host, self._port)
            self._idle.append(connection)

    def send(self, request: Request) -> None:
        self.under_way += 1
        if self._idle:
            self._idle.popleft().send(request)
        else:
            self._waiting.append(request)

    def answered(self, connection: Connection, request: Request, status: int, body: bytes) -> None:
        self.under_way -= 1
        request.kind.times_ms.append((time.perf_counter() - request.due) * 1000)
        if status != 200:
            request.kind.errors.append(f"{status}: {body[:200].decode(errors='replace')}")
        elif request.done is not None:
            request.done(status, body)
        if self._waiting:
            connection.send(self._waiting.popleft())
        else:
            self._idle.append(connection)

    @property
    def is_connected(self) -> bool:
        """Whether a request could be sent, or is under way."""
        return bool(self._idle) or self.under_way > 0

    def hang_up(self, *, idle_s: float) -> None:
        """Close connections before the server does, which might be just when a request is sent."""
        since = time.perf_counter() - idle_s
        for connection in [item for item in self._idle if item.used < since]:
            self._idle.remove(connection)
            connection.close()

    def lost(self, connection: Connection, *, was_busy: bool) -> None:
        if was_busy and not self.is_closing:
            raise SystemExit("the server closed a connection with a request under way")
        if connection in self._idle:  # nobody used it for long
            self._idle.remove(connection)


async def drive(pool: Pool, rate: float, seconds: float, make: Callable[[float], Request], seed: int) -> None:
    """Send requests at random moments (a Poisson process), however long answers take."""
    draw, due = random.Random(seed), time.perf_counter()
    end = due + seconds
    while True:
        due += draw.expovariate(rate)
        if due > end:
            return
        pause = due - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        pool.send(make(due))


async def settle(pools: dict[str, Pool]) -> None:
    deadline = time.perf_counter() + TIMEOUT_S
    while any(pool.under_way for pool in pools.values()):
        if time.perf_counter() > deadline:
            raise SystemExit("requests were not answered within a minute")
        await asyncio.sleep(0.02)
