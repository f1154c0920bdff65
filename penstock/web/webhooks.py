"""Alarms to a webhook: one POST of JSON for each notice. Its address is a secret, and is never told."""

from __future__ import annotations

import base64
from urllib.parse import unquote, urlsplit

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
        self._url, self._host, self._authorization = _parts(url)
        self._timeout = {kind: timeout_s for kind in ("connect", "read", "write", "pool")}
        # The bare transport: a client of httpx would log every address that it asks.
        self._transport = httpx.HTTPTransport(trust_env=False)

    def send(self, notice: Notice, notice_id: int) -> None:
        """Any 2xx is a yes."""
        headers = {
            "content-type": "application/json",
            "idempotency-key": str(notice_id),
            "user-agent": "penstock",
            **self._authorization,
        }
        body = msgspec.json.encode({"id": notice_id, **msgspec.to_builtins(notice)})
        request = httpx.Request(
            "POST", self._url, content=body, headers=headers, extensions={"timeout": self._timeout}
        )
        try:
            answer = self._transport.handle_request(request)
            answer.close()
        except httpx.HTTPError as error:
            # Not the error's own text: it may have the address in it.
            raise self._refused(type(error).__name__) from None
        if not answer.is_success:
            raise self._refused(f"it answered {answer.status_code}")

    def close(self) -> None:
        """Let its connections go."""
        self._transport.close()

    def _refused(self, why: str) -> PenstockError:
        return PenstockError(
            f"the webhook at {self._host} did not take a notice ({why})",
            why=why,
            fix="see whether it is up; the notice is sent again",
        )


def _parts(url: str) -> tuple[httpx.URL, str, dict[str, str]]:
    """The address without a password, its host, and the header that has the password."""
    try:
        parts, address = urlsplit(url), httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        raise _no_address("it cannot be read") from None
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not host:
        raise _no_address("it does not begin with https:// and a host")
    if parts.scheme == "http" and host not in LOOPBACK:
        raise ConfigError(
            f"the webhook at {host} is not encrypted",
            why="notices name jobs and their troubles, and the address is often a secret itself",
            fix="give an address that begins with https://",
        )
    if not parts.username:
        return address, host, {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    header = {"authorization": f"Basic {base64.b64encode(pair).decode()}"}
    return address.copy_with(username=None, password=None), host, header


def _no_address(why: str) -> ConfigError:
    # Not even its beginning is shown: it may be a token that somebody put there by mistake.
    return ConfigError(
        "the webhook's address is none", why=why, fix="give a whole address: https://host/path"
    )
