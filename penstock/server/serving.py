"""Serving the API: a bound port, a thread that answers on it, and the limits of a connection.

Beyond loopback only with TLS: a token that crosses a network in the clear is everybody's.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
from asyncio import TimerHandle, Transport
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.core.errors import ConfigError, EnvironmentProblem
from penstock.server.limits import HEADER_BYTES_MAX

HOST = "127.0.0.1"
PREFIX = "/api/v1"
OPEN_ROUTES = frozenset({f"{PREFIX}/health"})  # for which no token is asked
STREAMED = f"{PREFIX}/packages/"  # bodies that are read in pieces, by their route
# Each container keeps one; the paper's fleets have thousands.
CONNECTIONS_MAX = 8_000
# A client that keeps a connection is spared a handshake; one that only holds it is not.
KEEP_ALIVE_S = 20
BACKLOG = 512
HEAD_S = 10.0  # a request's head is here by then, from its first byte or from the connection's start
STALL_S = 30.0  # the next piece of a body is here by then
HEAD_BYTES_MAX = 4 * HEADER_BYTES_MAX  # a head that is a little too large gets an answer that says so


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """A certificate and its key, in PEM files."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where to listen: an address that is loopback, or any with TLS; `name` is what callers call it."""

    host: str = HOST
    port: int = 0
    tls: Tls | None = None
    name: str = ""

    def check(self) -> None:
        """Refuse what would show tokens to a network, before anything is started."""
        if not _is_loopback(self.host) and self.tls is None:
            raise ConfigError(
                f"will not listen on {self.host}",
                why="other machines can reach it, and without TLS everybody in between could read tokens",
                fix="give --tls-cert and --tls-key, or listen on 127.0.0.1",
            )
        if self.tls is not None:
            tls_context(self.tls)

    def url(self, port: int) -> str:
        """How this machine reaches it."""
        host = self.name or ("localhost" if ipaddress.ip_address(self.host).is_unspecified else self.host)
        return f"{'http' if self.tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"


def tls_context(tls: Tls) -> ssl.SSLContext:
    """What the server shows: TLS 1.2 or newer, with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise EnvironmentProblem(
            "cannot use this certificate",
            why=f"{tls.cert} with {tls.key}: {error}",
            fix="give a certificate and its own key, unencrypted, as PEM files",
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def bind(listening: Listening) -> socket.socket:
    """A listening socket (port 0: any free one), before anything else is started."""
    listening.check()
    family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
    # Named as TCP, else asyncio leaves Nagle's delay on, which costs 40 ms per answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((listening.host, listening.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise EnvironmentProblem(
            f"cannot listen on port {listening.port} of {listening.host}",
            why=f"{error.strerror or error}: another program may hold it",
            fix="stop what listens there, or take another with --port (0: any free one)",
        ) from error
    return listener


class BoundedHttp(HttpToolsProtocol):
    """One connection. A caller that sends slowly, or a head without end, is not waited for.

    What is cut off has not begun to be handled, or is a body that never came whole.
    """

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


class Server(uvicorn.Server):
    """Lets go of those who wait for events or task lists when it ends; other requests are answered."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for waited_for in self.config.app.state.waited_for:  # type: ignore[union-attr]
            waited_for.close()
        await super().shutdown(sockets)


def server_config(app: FastAPI, tls: Tls | None) -> uvicorn.Config:
    """How every server of ours runs. Whoever starts it also takes the signals; a thread cannot."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedHttp,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=KEEP_ALIVE_S,
        limit_concurrency=CONNECTIONS_MAX,
        proxy_headers=False,
        ssl_context_factory=None if tls is None else lambda _config, _default: tls_context(tls),
    )


class ApiServer:
    """Answers requests in a thread of its own, from `start` to `stop`."""

    def __init__(self, api: FastAPI, listener: socket.socket, listening: Listening | None = None) -> None:
        self.api, self._listener, self._listening = api, listener, listening or Listening()
        self._server = Server(server_config(api, self._listening.tls))
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)

    @property
    def port(self) -> int:
        """The number of its port."""
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        """Where it answers."""
        return self._listening.url(self.port)

    @property
    def is_serving(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> ApiServer:
        """Begin to answer; what was asked before waits in the socket's queue."""
        self._thread.start()
        return self

    def stop(self, timeout_s: float = 5) -> None:
        """Answer what is under way, then end."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise ConfigError(
            f"{host!r} is not an address to listen on",
            why="it must be an IP address of this machine, or 0.0.0.0 for all of them",
            fix="e.g. --host 127.0.0.1",
        ) from error
