"""A cable that can be cut: a TCP proxy in this process. A cut keeps every socket open and lets nothing through."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from types import TracebackType


class Proxy:
    """Forwards connections to a port of this machine, or to a socket file, until it is cut."""

    def __init__(self, upstream: int | Path) -> None:
        self._upstream = upstream
        self._requests, self._answers = threading.Event(), threading.Event()  # set: they pass
        self._sockets: list[socket.socket] = []
        self._is_closed = False
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self.heal()

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        self.heal()
        for sock in (self._server, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def cut(self, *, requests: bool = True, answers: bool = True) -> None:
        """Let nothing through in these directions."""
        if requests:
            self._requests.clear()
        if answers:
            self._answers.clear()

    def heal(self) -> None:
        """Let everything through, also what was held."""
        self._requests.set()
        self._answers.set()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                near, _ = self._server.accept()
                far = self._connect()
            except OSError:
                continue  # closed, or nobody is there: the caller finds out
            self._sockets += [near, far]
            for source, sink, passes in ((near, far, self._requests), (far, near, self._answers)):
                threading.Thread(target=self._pump, args=(source, sink, passes), daemon=True).start()

    def _connect(self) -> socket.socket:
        if isinstance(self._upstream, int):
            return socket.create_connection(("127.0.0.1", self._upstream), timeout=None)
        far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        far.connect(str(self._upstream))
        return far

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, passes: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                passes.wait()
                sink.sendall(data)
            passes.wait()
            sink.shutdown(socket.SHUT_WR)
