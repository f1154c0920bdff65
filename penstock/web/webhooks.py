"""Alarms to a webhook: one POST of JSON for each notice. Its address is a secret, and is never told."""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx
import msgspec

from penstock.core.errors import ConfigError, PenstockError
from penstock.resources.alarms import Notice

TIMEOUT_S = 10.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class WebhookRoute:
    """A `Route` of alarms. Redirects are not followed: they would take the notice elsewhere."""

    name = "webhook"

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._url, self._host = url, _host_of(url)
        self._client = httpx.Client(timeout=timeout_s, follow_redirects=False, trust_env=False)

    def send(self, notice: Notice, notice_id: int) -> None:
        """Any 2xx is a yes."""
        headers = {"content-type": "application/json", "idempotency-key": str(notice_id)}
        body = msgspec.json.encode({"id": notice_id, **msgspec.to_builtins(notice)})
        try:
            answer = self._client.post(self._url, content=body, headers=headers)
        except httpx.HTTPError as error:
            # Not the error's own text: it may have the address in it.
            raise self._refused(type(error).__name__) from None
        if not answer.is_success:
            raise self._refused(f"it answered {answer.status_code}")

    def close(self) -> None:
        """Let its connections go."""
        self._client.close()

    def _refused(self, why: str) -> PenstockError:
        return PenstockError(
            f"the webhook at {self._host} did not take a notice ({why})",
            why=why,
            fix="see whether it is up; the notice is sent again",
        )


def _host_of(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(
            "the webhook's address is none",
            why=f"it begins with {url[:8]!r}",
            fix="give a whole address: https://host/path",
        )
    if parts.scheme == "http" and host not in LOOPBACK:
        raise ConfigError(
            f"the webhook at {host} is not encrypted",
            why="notices name jobs and their troubles, and the address is often a secret itself",
            fix="give an address that begins with https://",
        )
    return host
