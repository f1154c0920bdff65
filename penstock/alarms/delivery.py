"""Sends notices of alarms: each route by itself, in order, again with a growing pause, not for ever."""

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
TRIES_MAX = 20  # some two hours

SendError = PenstockError | None  # why a route did not take a notice; None: it did


class Route(Protocol):
    """A way to somebody: a log, a webhook, a channel."""

    @property
    def name(self) -> str:
        """As settings call it."""

    def send(self, notice: Notice, notice_id: int) -> None:
        """Hand it over, or raise. It may come twice after a crash: the id is then the same."""


class LogRoute:
    """To the log of the control plane."""

    name = "log"

    def send(self, notice: Notice, notice_id: int) -> None:
        alarm = notice.alarm
        say = log.info if notice.kind == "resolved" or alarm.severity == "info" else log.warning
        say(
            f"alarm {notice.kind}",
            job=alarm.job,
            alarm=f"{alarm.source}/{alarm.key}",
            severity=alarm.severity,
            text=alarm.text,
            what_to_do=alarm.what_to_do,
        )


class AlarmSender:
    """One notice a route at a time; a route that does not answer costs nobody but itself."""

    def __init__(self, store: AlarmStore, routes: Sequence[Route], workers: Workers[SendError]) -> None:
        self._store, self._workers = store, workers
        self._routes = {route.name: route for route in routes}
        self._sent: dict[str, PendingNotice] = {}

    def tick(self, now_ms: Millis) -> bool:
        """Take what came back, send what is due; whether to look again soon, because something is sent."""
        for done in self._workers.take_finished():
            owed = self._sent.pop(done.key)
            error = done.error or done.result
            if error is None:
                self._store.settle(owed.id)
            else:
                self._failed(owed, error, now_ms)
        busy = self._workers.busy()
        for owed in self._store.owed():
            if owed.next_ms > now_ms or owed.route in self._sent or owed.route in busy:
                continue  # what follows waits too: an end must not come before its beginning
            route = self._routes.get(owed.route)
            if route is None:
                self._store.settle(owed.id)  # the route is no longer wanted
                continue
            self._sent[owed.route] = owed
            self._workers.start(owed.route, _sending(route, owed), now_ms)
        return bool(self._sent)

    def _failed(self, owed: PendingNotice, error: Exception, now_ms: Millis) -> None:
        tries = owed.tries + 1
        given_up = tries >= TRIES_MAX
        why = error_text(error)
        log.warning(
            "a notice was not taken",
            route=owed.route,
            alarm=owed.notice.alarm.name,
            tries=tries,
            given_up=given_up,
            error=why,
        )
        if given_up:
            self._store.give_up(owed, f"it was not taken {tries} times, at last: {why}", now_ms)
        else:
            self._store.postpone(owed.id, tries=tries, next_ms=now_ms + backoff_ms(tries))


def error_text(error: Exception) -> str:
    """What a route said. Only our own errors are repeated: a library's may have an address in them."""
    return error.what if isinstance(error, PenstockError) else type(error).__name__


def backoff_ms(tries: int) -> Millis:
    """How long after so many failures."""
    return int(min(BACKOFF_MAX_MS, BACKOFF_MS * 2 ** min(tries - 1, 20)))


def _sending(route: Route, owed: PendingNotice) -> Callable[[Now], SendError]:
    def send(now: Now) -> SendError:
        try:
            route.send(owed.notice, owed.id)
        except PenstockError as error:
            return error  # expected: no trace of it in the log
        return None

    return send


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


FILE_PREFIX = "file:"
SECRET_LENGTH_MAX = 100_000
CHANNELS_MAX = 20


def routes_of(*, webhook: str, channels: str) -> tuple[Route, ...]:
    """The log, and what else is set. Each channel is a route of its own: one that is away costs no other."""
    routes: list[Route] = [LogRoute()]
    if webhook:
        routes.append(WebhookRoute(read_secret("the webhook's address", webhook).strip()))
    urls = _lines(read_secret("the channels' addresses", channels)) if channels else []
    if len(urls) > CHANNELS_MAX:
        raise ConfigError(
            f"{len(urls)} channels are too many",
            why=f"up to {CHANNELS_MAX} are told of alarms",
            fix="leave some out",
        )
    taken = {route.name for route in routes}
    for url in urls:
        name = _free_name(scheme_of(url), taken)
        taken.add(name)
        routes.append(ChannelRoute(url, name))
    return tuple(routes)


def read_secret(what: str, value: str) -> str:
    """A secret as it is given, or what is in the file that `file:<path>` names."""
    if not value.startswith(FILE_PREFIX):
        return value
    path = Path(value.removeprefix(FILE_PREFIX))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read {what}", why=f"{path}: {why}", fix="name a file of text") from None
    if not text.strip() or len(text) > SECRET_LENGTH_MAX:
        raise ConfigError(f"cannot read {what}", why=f"{path} is empty or too long", fix="write it there")
    return text


def _lines(text: str) -> list[str]:
    """Addresses with white space between; a line that begins with # is a remark."""
    kept = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return [part for line in kept for part in line.split()]


def _free_name(scheme: str, taken: set[str]) -> str:
    numbers = (f"{scheme}{number}" for number in range(2, CHANNELS_MAX + 2))
    return scheme if scheme not in taken else next(name for name in numbers if name not in taken)
