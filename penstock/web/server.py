"""Serving the API on this machine: a bound loopback port, and a thread that answers on it.

There is no way to listen beyond loopback: that needs TLS, which this version does not have.
"""

from __future__ import annotations

import socket
import threading

import uvicorn
from fastapi import FastAPI

from penstock.core.errors import EnvironmentProblem

HOST = "127.0.0.1"


def bind(port: int) -> socket.socket:
    """A listening socket on loopback (0: any free port), before anything else is started."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise EnvironmentProblem(
            f"cannot listen on port {port}",
            why=f"{error.strerror or error}: another program may hold it",
            fix="stop what listens there, or take another with --port (0: any free one)",
        ) from error
    return listener


class ApiServer:
    """Answers requests in a thread of its own, from `start` to `stop`."""

    def __init__(self, api: FastAPI, listener: socket.socket) -> None:
        self._listener = listener
        # Whoever starts the server also takes the signals; a thread cannot.
        config = uvicorn.Config(api, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{HOST}:{self._listener.getsockname()[1]}"

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
