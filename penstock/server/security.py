"""Access checks of the API: tokens, roles, rate limits, and the host and origin of requests.

Deny by default: each route names one verb, a route without a verb is not served, and no role may use a verb
that is not in the table. Rights to write layers are checked by the Job Service.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import structlog
from fastapi import Depends, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.client.problems import TooMany, Unauthorised
from penstock.core.clock import Clock, Millis
from penstock.core.errors import ConfigError, PenstockError, Refused, UserError
from penstock.db.tokens import Caller, TokenStore
from penstock.jobs.config import NAME_PATTERN
from penstock.server.answers import problem_response
from penstock.server.pools import HEARTBEATS, TOKEN_LOOKUPS
from penstock.server.serving import OPEN_ROUTES

ALL_USERS = frozenset({"reader", "developer", "oncall", "scaler", "admin"})
VERBS: dict[str, frozenset[str]] = {
    "schema.read": ALL_USERS | {"container"},
    "status.read": ALL_USERS,
    "journal.read": ALL_USERS,
    "event.read": ALL_USERS,
    "audit.read": frozenset({"developer", "oncall", "admin"}),
    "job.read": ALL_USERS,
    "job.plan": frozenset({"developer", "oncall", "admin"}),
    "job.apply": frozenset({"developer", "admin"}),
    "job.remove": frozenset({"developer", "admin"}),
    "job.state": frozenset({"developer", "oncall", "admin"}),
    "job.manage": frozenset({"developer", "oncall", "admin"}),
    "job.write": frozenset({"developer", "oncall", "scaler", "admin"}),
    "layer.read": ALL_USERS,
    "layer.create": frozenset({"admin"}),
    "pipeline.plan": frozenset({"developer", "admin"}),
    "pipeline.submit": frozenset({"developer", "admin"}),
    "category.read": ALL_USERS | {"container"},
    "category.create": frozenset({"developer", "admin"}),
    "package.read": frozenset({"developer", "container", "admin"}),
    "package.write": frozenset({"developer", "admin"}),
    "log.read": frozenset({"developer", "oncall", "admin"}),
    "state.read": frozenset({"developer", "oncall", "admin"}),
    "task.read": ALL_USERS | {"container"},
    "task.restart": frozenset({"developer", "oncall", "admin"}),
    "container.beat": frozenset({"container", "admin"}),
    "container.read": ALL_USERS,
    "container.write": frozenset({"oncall", "admin"}),
    "container.lend": frozenset({"admin"}),
    "shard.read": ALL_USERS,
    "shard.write": frozenset({"oncall", "admin"}),
    "alarm.read": ALL_USERS,
    "alarm.write": frozenset({"oncall", "admin"}),
    "token.read": frozenset({"admin"}),
    "token.write": frozenset({"admin"}),
}


def require(role: str, verb: str) -> None:
    """Refused unless the table allows the role this verb."""
    allowed = VERBS.get(verb, frozenset())
    if role not in allowed:
        raise Refused(
            f"the role {role!r} may not {verb}",
            why=f"that needs one of these roles: {', '.join(sorted(allowed)) or 'none'}",
            fix="use a token of one of these roles",
        )


REQUESTS_MAX = 200  # per token and window
WINDOW_MS: Millis = 1_000
UNKNOWN_MAX = 10  # unknown tokens, per address and window
LOOKUPS_MAX = 64  # new tokens of one address at the same time
ADDRESSES_MAX = 10_000


class RateLimit:
    """Counts requests per caller in fixed windows. Thread-safe."""

    def __init__(self, requests_max: int = REQUESTS_MAX) -> None:
        self._requests_max, self._lock = requests_max, threading.Lock()
        self._window, self._counts = 0, dict[str, int]()

    def count(self, caller: str, now_ms: Millis) -> None:
        """Count one request; TooMany past the limit."""
        with self._lock:
            window = now_ms // WINDOW_MS
            if window != self._window:
                self._window, self._counts = window, {}
            self._counts[caller] = self._counts.get(caller, 0) + 1
            if self._counts[caller] > self._requests_max:
                raise TooMany(
                    "too many requests",
                    why=f"the limit of a token is {self._requests_max * 1000 // WINDOW_MS} per second",
                    fix="wait a second, and send fewer requests",
                )


class UnknownTokenLimit:
    """Limits lookups of unknown tokens per client address, before the store is asked. Thread-safe.

    Valid tokens do not count, so many new callers may share one address. An IPv6 /64 network counts as one
    address. Memory is bounded: the least recently seen addresses are forgotten.
    """

    def __init__(
        self,
        *,
        unknown_max: int = UNKNOWN_MAX,
        at_once_max: int = LOOKUPS_MAX,
        addresses_max: int = ADDRESSES_MAX,
    ) -> None:
        self._unknown_max, self._at_once_max = unknown_max, at_once_max
        self._addresses_max, self._lock = addresses_max, threading.Lock()
        self._windows: OrderedDict[str, tuple[int, int]] = OrderedDict()  # window, unknown tokens in it
        self._under_way: dict[str, int] = {}
        self.rejected = 0

    def begin(self, address: str, now_ms: Millis) -> None:
        """Begin a lookup; TooMany if the address is over its limit."""
        network = _network_of(address)
        with self._lock:
            window, unknown = self._windows.get(network, (0, 0))
            under_way = self._under_way.get(network, 0)
            is_full = network not in self._under_way and len(self._under_way) >= self._addresses_max
            if window == now_ms // WINDOW_MS and unknown >= self._unknown_max:
                why = f"the limit is {self._unknown_max} unknown tokens per second and address"
            elif under_way >= self._at_once_max or is_full:
                why = f"{under_way} lookups of this address are in progress"
            else:
                self._under_way[network] = under_way + 1
                return
            self.rejected += 1
        raise TooMany(
            "too many unknown tokens",
            why=why,
            fix="wait a second, and use a valid token: tokens that were accepted before are not limited",
        )

    def end(self, address: str, now_ms: Millis, *, is_unknown: bool) -> None:
        """End a lookup; an unknown token counts against its address."""
        network, now = _network_of(address), now_ms // WINDOW_MS
        with self._lock:
            self._under_way[network] -= 1
            if not self._under_way[network]:
                del self._under_way[network]
            if is_unknown:
                window, unknown = self._windows.pop(network, (now, 0))
                self._windows[network] = (now, unknown + 1 if window == now else 1)
                if len(self._windows) > self._addresses_max:
                    self._windows.popitem(last=False)


def _network_of(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))


LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
READING = frozenset({"GET", "HEAD"})
KNOWN_MAX = 100
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]{1,5})?")


class CheckOrigin:
    """ASGI middleware: refuses requests for other host names, and writes from browsers.

    `names` are the allowed host names besides loopback; `any_address` allows every IP address too.
    """

    def __init__(self, app: ASGIApp, *, names: Iterable[str] = (), any_address: bool = False) -> None:
        self._app, self._any_address = app, any_address
        self._names = LOOPBACK | {name.lower() for name in names}
        self._known: set[bytes] = set()  # cache of accepted Host headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self.check(scope)
            except PenstockError as error:
                await problem_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Refused unless `Host` is a name of this server; browsers may only read, from the server's pages."""
        hosts, origins, is_from_browser = [], [], False
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origins.append(value)
                is_from_browser = True
            elif name == b"sec-fetch-site":
                is_from_browser = True
        if len(hosts) != 1 or hosts[0] not in self._known:
            self._check_host(hosts)
        if is_from_browser and scope["method"] not in READING:
            raise Refused(
                "browsers may not write",
                why="the request has an Origin or Sec-Fetch-Site header, which only browsers send",
                fix="use the `penstock` command or the Python client",
            )
        if any(origin.partition(b"://")[2] != hosts[0] for origin in origins):
            raise Refused(
                "pages of other sites may not read",
                why="the request's Origin is not this server",
                fix="use the `penstock` command or the Python client",
            )

    def _check_host(self, hosts: list[bytes]) -> None:
        found = _HOST.fullmatch(hosts[0].decode("latin-1")) if len(hosts) == 1 else None
        if found is None:
            raise UserError(
                "the request has no valid Host header",
                why=f"it has {len(hosts)} Host headers, or one that is not a host name",
                fix="send one Host header with the server's name",
            )
        if not self._is_ours(found[1]):
            raise Refused(
                f"this server is not {found[1]!r}",
                why="a request for an unknown host name may be a DNS rebinding attack",
                fix="use one of its names; `penstock up --name` adds one",
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


# Verbs without a rate limit: a container whose heartbeats are refused loses its tasks.
UNLIMITED_VERBS = frozenset({"container.beat"})
REPEATED = frozenset({"label"})
LOG_EVERY_MS: Millis = 10_000
log = structlog.get_logger(__name__)
_NAME = re.compile(NAME_PATTERN)
_BEARER = HTTPBearer(auto_error=False, description="A token of `penstock token new`, or of `penstock up`.")


def check_query(request: Request) -> None:
    """Refuse unknown and repeated parameters: a misspelt filter would be ignored silently."""
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"this route has no parameter {name[:100]!r}",
                why=f"its parameters are: {', '.join(known) or 'none'}",
                fix=f"did you mean `{near[0]}`?" if near else "remove it",
            )
        if name not in REPEATED and given.count(name) > 1:
            raise ConfigError(
                f"the parameter {name!r} is given twice", why="it takes one value", fix="give it once"
            )


class Guard:
    """Makes the check of each route: token, then role, then rate limit."""

    def __init__(self, tokens: TokenStore, clock: Clock, rate: RateLimit) -> None:
        self._tokens, self._clock, self._rate = tokens, clock, rate
        self._checks: dict[Callable[..., Any], str] = {}

    def allow(self, verb: str) -> Any:
        """A dependency that checks that the caller may use `verb`, and returns the caller."""
        assert verb in VERBS, f"{verb} is not in the table"

        async def check(request: Request, _shown: Annotated[object, Depends(_BEARER)] = None) -> Caller:
            caller = await self.caller(request)
            require(caller.role, verb)
            if verb == "container.beat" and "name" in request.path_params:
                await self._check_speaks_for(caller, request.path_params["name"])
            if verb not in UNLIMITED_VERBS:
                self._rate.count(caller.token_id, self._clock.boot_ms())
            if request.scope["query_string"]:
                check_query(request)
            return caller

        self._checks[check] = verb
        return Depends(check)

    def verb_of(self, route: APIRoute) -> str | None:
        """The verb of a route; None: it has no check."""
        found = (self._checks.get(part.call) for part in route.dependant.dependencies if part.call)
        return next((verb for verb in found if verb), None)

    async def knows(self, headers: Iterable[tuple[bytes, bytes]], verb: str) -> bool:
        """True if the request's token is valid and may use `verb`; counts it then. TooMany past the limit."""
        return await self.known(headers, verb) is not None

    async def known(self, headers: Iterable[tuple[bytes, bytes]], verb: str) -> Caller | None:
        """The caller if the request's token is valid and may use `verb`; None: the ordinary checks decide."""
        shown = [value for name, value in headers if name == b"authorization"]
        if len(shown) != 1 or shown[0][:7].lower() != b"bearer ":
            return None
        token, now_ms = shown[0][7:].decode("latin-1").strip(), self._clock.now_ms()
        caller = self._tokens.cached_caller(token, now_ms=now_ms)
        if caller is None and not self._tokens.can_be_token(token):
            return None
        if caller is None:
            caller = await HEARTBEATS.run(self._tokens.caller, token, now_ms=now_ms)
        if caller.role not in VERBS[verb]:
            return None
        if verb not in UNLIMITED_VERBS:
            self._rate.count(caller.token_id, self._clock.boot_ms())
        return caller

    async def _check_speaks_for(self, caller: Caller, container: str) -> None:
        """Refused if a container's token is used for another container. Admins may act for all containers."""
        if caller.role == "admin" or caller.container == container:
            return
        bound = caller.container
        if not bound and _NAME.fullmatch(container):
            # Issued by an older version, without a container: bound to the first container that uses it.
            bound = await HEARTBEATS.run(self._tokens.bind, caller.token_id, container)
        if bound and bound != container:
            raise Refused(
                f"this token is not valid for the container {container[:200]!r}",
                why=f"it belongs to {bound!r}; each container has its own token",
                fix=f"issue one with `penstock token new {container[:200]} --role container --why …`",
            )

    async def caller(self, request: Request) -> Caller:
        """The caller whose token the request has; Unauthorised without a valid token."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthorised(
                "the request has no token",
                why="there is no `Authorization: Bearer <token>` header",
                fix="name the folder of your `penstock up` with --folder, or set PENSTOCK_TOKEN",
            )
        now_ms = self._clock.now_ms()
        believed = self._tokens.cached_caller(token.strip(), now_ms=now_ms)
        if believed is not None:
            return believed
        try:
            if not self._tokens.can_be_token(token.strip()):
                return self._tokens.caller(token.strip(), now_ms=now_ms)  # refuses without the store
            return await HEARTBEATS.run(self._tokens.caller, token.strip(), now_ms=now_ms)
        except Refused as error:
            raise Unauthorised(error.what, why=error.why, fix=error.fix) from error


class RejectUnknownTokens:
    """ASGI middleware: refuses requests with unknown tokens before their bodies are read.

    A token that was never valid here is looked up in a thread of its own kind, and only so many per client
    address; known tokens pass at once. So a flood of guessed tokens does not delay callers with known ones.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        prefix: str,
        tokens: TokenStore,
        clock: Clock,
        limit: UnknownTokenLimit | None = None,
    ) -> None:
        self._app, self._prefix, self._tokens, self._clock = app, f"{prefix}/", tokens, clock
        self._limit, self._logged_ms, self._logged = limit or UnknownTokenLimit(), -LOG_EVERY_MS, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._check(scope)
        except PenstockError as error:
            await problem_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _check(self, scope: Scope) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(self._prefix):
            return
        shown = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = shown.decode("latin-1").partition(" ")
        token, is_open = token.strip(), scope["path"] in OPEN_ROUTES
        if is_open or scheme.lower() != "bearer" or not token or self._tokens.is_familiar(token):
            return
        if not self._tokens.can_be_token(token):
            return  # the route's guard refuses it without a lookup
        address = scope["client"][0] if scope.get("client") else ""
        try:
            self._limit.begin(address, self._clock.boot_ms())
        except TooMany:
            self._log_rejected(address)
            raise
        is_unknown = False
        try:
            await TOKEN_LOOKUPS.run(self._tokens.caller, token, now_ms=self._clock.now_ms())
        except Refused as error:
            is_unknown = True
            raise Unauthorised(error.what, why=error.why, fix=error.fix) from error
        finally:
            self._limit.end(address, self._clock.boot_ms(), is_unknown=is_unknown)

    def _log_rejected(self, address: str) -> None:
        """Log the number of rejected requests, at most every `LOG_EVERY_MS`."""
        now_ms, count = self._clock.boot_ms(), self._limit.rejected
        if now_ms - self._logged_ms >= LOG_EVERY_MS:
            log.warning("unknown tokens are rejected", address=address, requests=count - self._logged)
            self._logged_ms, self._logged = now_ms, count
