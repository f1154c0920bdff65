"""Serves the API: the listening socket, the server thread, and the limits of a connection.

Beyond loopback TLS is required, because requests carry tokens.
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
OPEN_ROUTES = frozenset({f"{PREFIX}/health"})  # without a token
STREAMED = f"{PREFIX}/packages/"  # bodies that the route reads in chunks
# Each container keeps one connection; the paper's fleets have thousands.
CONNECTIONS_MAX = 8_000
# Longer than the interval of heartbeats; an idle connection is closed after it.
KEEP_ALIVE_S = 20
BACKLOG = 512
HEAD_S = 10.0  # timeout of a request's head, from its first byte or from the connection's start
STALL_S = 30.0  # timeout between two pieces of a body
HEAD_BYTES_MAX = 4 * HEADER_BYTES_MAX  # a head between the two limits gets an error response


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """A certificate and its key, in PEM files."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where to listen: a loopback address, or any address with TLS; `name` is the host name in its URL."""

    host: str = HOST
    port: int = 0
    tls: Tls | None = None
    name: str = ""

    def check(self) -> None:
        """Refuse an address beyond loopback without TLS, and a certificate that cannot be loaded."""
        if not _is_loopback(self.host) and self.tls is None:
            raise ConfigError(
                f"cannot listen on {self.host} without TLS",
                why="other machines can reach this address, and tokens would cross the network unencrypted",
                fix="give --tls-cert and --tls-key, or listen on 127.0.0.1",
            )
        if self.tls is not None:
            tls_context(self.tls)

    def url(self, port: int) -> str:
        """The URL under which this machine reaches the listener."""
        host = self.name or ("localhost" if ipaddress.ip_address(self.host).is_unspecified else self.host)
        return f"{'http' if self.tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"


def tls_context(tls: Tls) -> ssl.SSLContext:
    """The server's TLS context: version 1.2 or newer, with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise EnvironmentProblem(
            "cannot use this certificate",
            why=f"{tls.cert} with {tls.key}: {error}",
            fix="give a certificate and its own unencrypted key, as PEM files",
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def bind(listening: Listening) -> socket.socket:
    """A listening socket (port 0: any free one), before anything else is started."""
    listening.check()
    family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
    # Named as TCP, else asyncio does not set TCP_NODELAY, which costs 40 ms per response.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((listening.host, listening.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise EnvironmentProblem(
            f"cannot listen on port {listening.port} of {listening.host}",
            why=f"{error.strerror or error}: another program may be using it",
            fix="stop that program, or choose another port with --port (0: any free one)",
        ) from error
    return listener


class BoundedHttp(HttpToolsProtocol):
    """One connection, with timeouts for the head and the body and a limit for the head.

    A connection is closed only before its request is handled: its head or its body is incomplete.
    """

    head_s, stall_s = HEAD_S, STALL_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: TimerHandle | None = None
        self._reads_head, self._reads_body = True, False
        self._head_bytes = 0

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timeout(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timeout(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._reads_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.transport.close()
        elif self._reads_body:
            self._set_timeout(self.stall_s)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reads_head, self._head_bytes = True, 0
        if self._timer is None:
            self._set_timeout(self.head_s)

    def on_headers_complete(self) -> None:
        self._reads_head, self._reads_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._reads_body = False
        self._set_timeout(None)
        super().on_message_complete()

    def _set_timeout(self, seconds: float | None) -> None:
        """Start the timeout that closes the connection; None stops it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and not self.transport.is_closing():
            self._timer = self.loop.call_later(seconds, self.transport.close)


class Server(uvicorn.Server):
    """Ends event streams and long polls of the task list at shutdown; other requests are completed."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for waiters in self.config.app.state.long_polls:  # type: ignore[union-attr]
            waiters.close()
        await super().shutdown(sockets)


def server_config(app: FastAPI, tls: Tls | None) -> uvicorn.Config:
    """The configuration of every API server. In a thread the server does not handle signals."""
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
    """The API in a thread of this process, from `start` to `stop`."""

    def __init__(self, api: FastAPI, listener: socket.socket, listening: Listening | None = None) -> None:
        self.api, self._listener, self._listening = api, listener, listening or Listening()
        self._server = Server(server_config(api, self._listening.tls))
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)

    @property
    def port(self) -> int:
        """The port number."""
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        """The URL of the API."""
        return self._listening.url(self.port)

    @property
    def is_serving(self) -> bool:
        """Whether the server thread runs."""
        return self._thread.is_alive()

    def start(self) -> ApiServer:
        """Start the server thread; earlier connections wait in the socket's backlog."""
        self._thread.start()
        return self

    def stop(self, timeout_s: float = 5) -> None:
        """Complete the requests in progress, then end."""
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
