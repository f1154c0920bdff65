"""HTTP as it arrives: a caller that sends its request slowly, or a head without end, is not waited for."""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.web.limits import HEADER_BYTES_MAX

HEAD_S = 10.0  # a request's head is here by then, from its first byte or from the connection's start
STALL_S = 30.0  # the next piece of a body is here by then
HEAD_BYTES_MAX = 4 * HEADER_BYTES_MAX  # a head that is a little too large gets an answer that says so


class BoundedHttp(HttpToolsProtocol):
    """One connection. What it cuts off has not begun to be handled, or is a body that never came whole."""

    head_s, stall_s = HEAD_S, STALL_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: TimerHandle | None = None
        self._reads_head, self._reads_body = True, False
        self._head_bytes = 0

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._reads_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.transport.close()
        elif self._reads_body:
            self._wait(self.stall_s)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reads_head, self._head_bytes = True, 0
        if self._timer is None:
            self._wait(self.head_s)

    def on_headers_complete(self) -> None:
        self._reads_head, self._reads_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._reads_body = False
        self._wait(None)
        super().on_message_complete()

    def _wait(self, seconds: float | None) -> None:
        """Cut the connection off after this time; None: however long it takes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and not self.transport.is_closing():
            self._timer = self.loop.call_later(seconds, self.transport.close)
