"""A server on loopback that answers as it is told: as a control plane would, or with what no one should send."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler], None]


def sends(status: int, body: bytes, **headers: str) -> Answer:
    """An answer of known length."""

    def write(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return write


def _raw(data: bytes) -> Answer:
    def write(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(data)
        handler.close_connection = True

    return write


def _endless(piece: bytes, pause_s: float) -> Answer:
    """Pieces until the other side has enough."""

    def write(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.close_connection = True
        with contextlib.suppress(OSError):
            while True:
                handler.wfile.write(piece)
                threading.Event().wait(pause_s)

    return write


HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
GARBAGE: dict[str, Answer] = {
    "bytes that are no HTTP": _raw(b"\x00\xff\x16\x03\x01 garbage \x00"),
    "nothing": _raw(b""),
    "bytes that are no JSON": sends(200, b"\xff\xfe\x00\x80"),
    "an empty body": sends(200, b""),
    "a page": sends(200, HTML, Content_Type="text/html"),
    "an error page": sends(502, HTML, Content_Type="text/html"),
    "a bug": sends(500, b"Internal Server Error"),
    "a problem of other types": sends(500, b'{"title": [1], "detail": {"a": 1}, "type": 7, "status": "x"}'),
    "a redirect": sends(302, b"", Location="http://127.0.0.1:1/elsewhere"),
    "a wait of centuries": sends(503, b"{}", Retry_After="9" * 5000),
    "half of a JSON": sends(200, b'{"verdict": "ok", "term": 1, "seq'),
    "a body that is cut off": _raw(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"),
    "a list": sends(200, b"[1, 2]"),
    "null": sends(200, b"null"),
    "an empty map": sends(200, b"{}"),
    "other types": sends(
        200,
        b'{"verdict": 1, "term": "x", "sequence": [], "shards": 5, "version": "new", "full": "yes", "jobs": 3,'
        b' "removed": 1, "since": {}, "state": 7, "order": "go", "profile": 1}',
    ),
    "depth": sends(200, b"[" * 200_000),
    "a verdict of the future": sends(
        200, b'{"verdict": "dance", "term": 1, "sequence": 1, "assignment_version": 1}'
    ),
    "bad gzip": sends(200, b"this is not gzip", Content_Encoding="gzip"),
    "a bomb": sends(200, gzip.compress(b" " * (64 * 2**20)), Content_Encoding="gzip"),
    "a body without end": _endless(b"x" * 2**20, 0),
    "a body that drips": _endless(b" ", 0.02),
}


@dataclass
class StrangeServer:
    """Answers by `now` if it is set, else by `sane(path, body)`."""

    sane: Callable[[str, Any], dict[str, Any]]
    url: str = ""
    now: Answer | None = None
    asked: list[tuple[str, Any]] = field(default_factory=list)  # while it was sane
    strange: int = 0  # requests that it answered otherwise


@contextmanager
def strange_server(sane: Callable[[str, Any], dict[str, Any]]) -> Iterator[StrangeServer]:
    """Serve until the block ends."""
    found = StrangeServer(sane)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            answer = found.now
            with contextlib.suppress(OSError):  # the other side had enough
                if answer is not None:
                    found.strange += 1
                    answer(self)
                    return
                said = json.loads(body) if body else None
                sends(200, json.dumps(found.sane(self.path, said)).encode())(self)
                found.asked.append((self.path, said))

        do_GET = do_POST

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # a connection that the other side gave up

    with Server(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
