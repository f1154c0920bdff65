"""Where a request says it comes from and goes to: no page of a browser may use this API behind a user's back.

A name that an attacker's page resolves to this machine (DNS rebinding) shows in `Host`, a page elsewhere in
`Origin`. Browsers never write here at all: what changes something comes from a program with a token.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.core.errors import PenstockError, Refused, UserError
from penstock.web.answers import problem_response

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
READING = frozenset({"GET", "HEAD"})
KNOWN_MAX = 100
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]{1,5})?")


class CheckOrigin:
    """ASGI middleware: lets only requests through that are meant for this server, and writes of no browser.

    `names` are what callers may call it besides loopback; `any_address`: they may also use its IP address.
    """

    def __init__(self, app: ASGIApp, *, names: Iterable[str] = (), any_address: bool = False) -> None:
        self._app, self._any_address = app, any_address
        self._names = LOOPBACK | {name.lower() for name in names}
        self._known: set[bytes] = set()  # Host headers that were looked at and are ours

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self.check(scope)
            except PenstockError as error:
                await problem_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Refused unless `Host` is a name of ours and, from a browser, it is our own page that reads."""
        hosts, origins, is_of_a_page = [], [], False
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origins.append(value)
                is_of_a_page = True
            elif name == b"sec-fetch-site":
                is_of_a_page = True
        if len(hosts) != 1 or hosts[0] not in self._known:
            self._check_host(hosts)
        if is_of_a_page and scope["method"] not in READING:
            raise Refused(
                "no page of a browser may write here",
                why="the request has an Origin or Sec-Fetch-Site header",
                fix="use the `penstock` command or the Python client",
            )
        if any(origin.partition(b"://")[2] != hosts[0] for origin in origins):
            raise Refused(
                "no other page may read here",
                why="the request's Origin is not this server",
                fix="use the `penstock` command or the Python client",
            )

    def _check_host(self, hosts: list[bytes]) -> None:
        found = _HOST.fullmatch(hosts[0].decode("latin-1")) if len(hosts) == 1 else None
        if found is None:
            raise UserError(
                "the request does not say which host it is for",
                why=f"it has {len(hosts)} Host headers, or one that is no host",
                fix="send one Host header",
            )
        if not self._is_ours(found[1]):
            raise Refused(
                f"this server is not {found[1]!r}",
                why="a request for another name may come from a page that wants to use your access",
                fix="call it by its own name; `penstock up --name` adds one",
            )
        if len(self._known) < KNOWN_MAX:
            self._known.add(hosts[0])

    def _is_ours(self, host: str) -> bool:
        if host.lower() in self._names:
            return True
        return self._any_address and _is_address(host.strip("[]"))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
