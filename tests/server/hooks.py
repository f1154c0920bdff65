"""A receiver of webhooks on loopback, which answers as it is told and remembers what it got."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

SECRET = "canary-s3cr3t"


@dataclass
class Hook:
    """`answers` come first, then 204; `got` are (answer, body)."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    always: int = 204
    got: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    @property
    def taken(self) -> list[dict[str, Any]]:
        return [body for status, body in self.got if status < 300]


@contextmanager
def a_hook() -> Iterator[Hook]:
    """Serve until the block ends."""
    hook = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = msgspec.json.decode(self.rfile.read(int(self.headers["content-length"])))
            status = hook.answers.pop(0) if hook.answers else hook.always
            hook.got.append((status, {**body, "key": self.headers["idempotency-key"]}))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hook.url = f"http://127.0.0.1:{server.server_port}/{SECRET}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hook
        finally:
            server.shutdown()
            thread.join()
