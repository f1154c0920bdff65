"""Sends notices of alarms. Routes are independent; each sends in order and retries with backoff, up to a
limit.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import httpx
import msgspec
import structlog

from penstock.alarms.channels import ChannelRoute, scheme_of
from penstock.alarms.decide import Notice
from penstock.alarms.store import AlarmStore, PendingNotice
from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.workers import Now, Workers

log = structlog.get_logger(__name__)

BACKOFF_MS: Millis = 2_000
BACKOFF_MAX_MS: Millis = 600_000
TRIES_MAX = 20  # about two hours

SendError = PenstockError | None  # why a route did not accept a notice; None: it did


class Route(Protocol):
    """A destination of notices: the log, a webhook or a channel."""

    @property
    def name(self) -> str:
        """Its name in the settings."""

    def send(self, notice: Notice, notice_id: int) -> None:
        """Deliver a notice, or raise. After a crash it may be sent twice, with the same id."""


class LogRoute:
    """Writes notices to the control plane's log."""

    name = "log"

    def send(self, notice: Notice, notice_id: int) -> None:
        alarm = notice.alarm
        write = log.info if notice.kind == "resolved" or alarm.severity == "info" else log.warning
        write(
            f"alarm {notice.kind}",
            job=alarm.job,
            alarm=f"{alarm.source}/{alarm.key}",
            severity=alarm.severity,
            text=alarm.text,
            what_to_do=alarm.what_to_do,
        )


class AlarmSender:
    """Sends one notice per route at a time; a route that does not answer delays no other route."""

    def __init__(self, store: AlarmStore, routes: Sequence[Route], workers: Workers[SendError]) -> None:
        self._store, self._workers = store, workers
        self._routes = {route.name: route for route in routes}
        self._sent: dict[str, PendingNotice] = {}

    def tick(self, now_ms: Millis) -> bool:
        """Process finished sends and start those that are due; returns whether a send is in progress."""
        for done in self._workers.take_finished():
            pending = self._sent.pop(done.key)
            error = done.error or done.result
            if error is None:
                self._store.remove_notice(pending.id)
            else:
                self._failed(pending, error, now_ms)
        busy = self._workers.busy()
        for pending in self._store.pending():
            if pending.next_ms > now_ms or pending.route in self._sent or pending.route in busy:
                continue  # later notices of the route wait, to keep their order
            route = self._routes.get(pending.route)
            if route is None:
                self._store.remove_notice(pending.id)  # the route is no longer configured
                continue
            self._sent[pending.route] = pending
            self._workers.start(pending.route, _sending(route, pending), now_ms)
        return bool(self._sent)

    def _failed(self, pending: PendingNotice, error: Exception, now_ms: Millis) -> None:
        tries = pending.tries + 1
        is_last = tries >= TRIES_MAX
        why = error_text(error)
        log.warning(
            "a notice was not delivered",
            route=pending.route,
            alarm=pending.notice.alarm.name,
            tries=tries,
            given_up=is_last,
            error=why,
        )
        if is_last:
            self._store.give_up(pending, f"{tries} attempts failed, the last one: {why}", now_ms)
        else:
            self._store.postpone(pending.id, tries=tries, next_ms=now_ms + backoff_ms(tries))


def error_text(error: Exception) -> str:
    """The text of a route's error. Of library errors only the type: their text may contain an address."""
    return error.what if isinstance(error, PenstockError) else type(error).__name__


def backoff_ms(tries: int) -> Millis:
    """The backoff after a number of failures."""
    return int(min(BACKOFF_MAX_MS, BACKOFF_MS * 2 ** min(tries - 1, 20)))


def _sending(route: Route, pending: PendingNotice) -> Callable[[Now], SendError]:
    def send(now: Now) -> SendError:
        try:
            route.send(pending.notice, pending.id)
        except PenstockError as error:
            return error  # expected, so no stack trace in the log
        return None

    return send


TIMEOUT_S = 10.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class WebhookRoute:
    """A `Route` that posts notices to a URL. Redirects are not followed, because they lead to
    another server.
    """

    name = "webhook"

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._url, self._host, self._authorization = _parts(url)
        self._timeout = {kind: timeout_s for kind in ("connect", "read", "write", "pool")}
        # The transport alone: an httpx client would log every address.
        self._transport = httpx.HTTPTransport(trust_env=False)

    def send(self, notice: Notice, notice_id: int) -> None:
        """Post a notice; any 2xx status means delivered."""
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
            response = self._transport.handle_request(request)
            response.close()
        except httpx.HTTPError as error:
            # Not the error's text: it may contain the address.
            raise self._refused(type(error).__name__) from None
        if not response.is_success:
            raise self._refused(f"it returned status {response.status_code}")

    def close(self) -> None:
        """Close its connections."""
        self._transport.close()

    def _refused(self, why: str) -> PenstockError:
        return PenstockError(
            f"the webhook at {self._host} did not accept a notice ({why})",
            why=why,
            fix="check whether it is up; the notice will be sent again",
        )


def _parts(url: str) -> tuple[httpx.URL, str, dict[str, str]]:
    """The address without credentials, its host, and the header with the credentials."""
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
            why="notices contain job names and errors, and the address itself is often a secret",
            fix="use an https:// address",
        )
    if not parts.username:
        return address, host, {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    header = {"authorization": f"Basic {base64.b64encode(pair).decode()}"}
    return address.copy_with(username=None, password=None), host, header


def _no_address(why: str) -> ConfigError:
    # No part of it is shown: it may be a token that was given by mistake.
    return ConfigError(
        "the webhook's address is not valid", why=why, fix="give a full address: https://host/path"
    )


FILE_PREFIX = "file:"
SECRET_LENGTH_MAX = 100_000
CHANNELS_MAX = 20


def routes_of(*, webhook: str, channels: str) -> tuple[Route, ...]:
    """The routes of the settings: the log, the webhook, and one route per channel."""
    routes: list[Route] = [LogRoute()]
    if webhook:
        routes.append(WebhookRoute(read_secret("the webhook's address", webhook).strip()))
    urls = _lines(read_secret("the channels' addresses", channels)) if channels else []
    if len(urls) > CHANNELS_MAX:
        raise ConfigError(
            f"{len(urls)} channels are too many",
            why=f"alarms are sent to at most {CHANNELS_MAX} channels",
            fix="remove some of them",
        )
    taken = {route.name for route in routes}
    for url in urls:
        name = _free_name(scheme_of(url), taken)
        taken.add(name)
        routes.append(ChannelRoute(url, name))
    return tuple(routes)


def read_secret(what: str, value: str) -> str:
    """A secret given as text, or read from the file in `file:<path>`."""
    if not value.startswith(FILE_PREFIX):
        return value
    path = Path(value.removeprefix(FILE_PREFIX))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read {what}", why=f"{path}: {why}", fix="name a text file") from None
    if not text.strip() or len(text) > SECRET_LENGTH_MAX:
        raise ConfigError(
            f"cannot read {what}", why=f"{path} is empty or too long", fix="write only the secret to it"
        )
    return text


def _lines(text: str) -> list[str]:
    """Split addresses at white space; lines that begin with # are comments."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return [part for line in lines for part in line.split()]


def _free_name(scheme: str, taken: set[str]) -> str:
    numbers = (f"{scheme}{number}" for number in range(2, CHANNELS_MAX + 2))
    return scheme if scheme not in taken else next(name for name in numbers if name not in taken)
