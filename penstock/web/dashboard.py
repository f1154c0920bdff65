"""The dashboard: files for a browser, which reads the API with its visitor's token. They hold no data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

from starlette.types import ASGIApp, Receive, Scope, Send

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/dashboard/style.css": ("style.css", "text/css; charset=utf-8"),
}
# Its own script, style and API; nothing from elsewhere, nothing written into the page, no frame around it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFE = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Dashboard:
    """ASGI middleware: answers reads of the dashboard's few paths, and hands everything else on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._files = app, dict(_read())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._files.get(scope["path"]) if scope["type"] == "http" else None
        if found is None or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": found.headers})
        body = b"" if scope["method"] == "HEAD" else found.body
        await send({"type": "http.response.body", "body": body})


def _read() -> Iterator[tuple[str, _File]]:
    folder = files("penstock.web") / "pages"
    for path, (name, kind) in FILES.items():
        body = (folder / name).read_bytes()
        headers = {"content-type": kind, "content-length": str(len(body)), **SAFE}
        yield path, _File([(key.encode(), value.encode()) for key, value in headers.items()], body)
