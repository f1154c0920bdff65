"""Who may call which route, how often, and from where: tokens, roles, rates, and where a request comes from.

Deny by default: each route names one verb, a route that names none is not served, and a verb that is not in
the table is nobody's. Layers have a table of their own, which the Job Service checks.
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
from penstock.server.pools import BEATS, STRANGERS
from penstock.server.serving import OPEN_ROUTES

EVERYBODY = frozenset({"reader", "developer", "oncall", "scaler", "admin"})
VERBS: dict[str, frozenset[str]] = {
    "schema.read": EVERYBODY | {"container"},
    "status.read": EVERYBODY,
    "journal.read": EVERYBODY,
    "event.read": EVERYBODY,
    "audit.read": frozenset({"developer", "oncall", "admin"}),
    "job.read": EVERYBODY,
    "job.plan": frozenset({"developer", "oncall", "admin"}),
    "job.apply": frozenset({"developer", "admin"}),
    "job.remove": frozenset({"developer", "admin"}),
    "job.state": frozenset({"developer", "oncall", "admin"}),
    "job.manage": frozenset({"developer", "oncall", "admin"}),
    "job.write": frozenset({"developer", "oncall", "scaler", "admin"}),
    "layer.read": EVERYBODY,
    "layer.create": frozenset({"admin"}),
    "pipeline.plan": frozenset({"developer", "admin"}),
    "pipeline.submit": frozenset({"developer", "admin"}),
    "category.read": EVERYBODY | {"container"},
    "category.create": frozenset({"developer", "admin"}),
    "package.read": frozenset({"developer", "container", "admin"}),
    "package.write": frozenset({"developer", "admin"}),
    "log.read": frozenset({"developer", "oncall", "admin"}),
    "state.read": frozenset({"developer", "oncall", "admin"}),
    "task.read": EVERYBODY | {"container"},
    "task.restart": frozenset({"developer", "oncall", "admin"}),
    "container.beat": frozenset({"container", "admin"}),
    "container.read": EVERYBODY,
    "container.write": frozenset({"oncall", "admin"}),
    "container.lend": frozenset({"admin"}),
    "shard.read": EVERYBODY,
    "shard.write": frozenset({"oncall", "admin"}),
    "alarm.read": EVERYBODY,
    "alarm.write": frozenset({"oncall", "admin"}),
    "token.read": frozenset({"admin"}),
    "token.write": frozenset({"admin"}),
}


def require(role: str, verb: str) -> None:
    """Refused unless the table says yes."""
    allowed = VERBS.get(verb, frozenset())
    if role not in allowed:
        raise Refused(
            f"the role {role!r} may not {verb}",
            why=f"that needs one of: {', '.join(sorted(allowed)) or 'nobody'}",
            fix="use a token of such a role",
        )


REQUESTS_MAX = 200  # per token and window
WINDOW_MS: Millis = 1_000
UNKNOWN_MAX = 10  # tokens that nobody knows, per address and window
LOOKED_UP_MAX = 64  # new tokens of one address at the same time
ADDRESSES_MAX = 10_000


class RateLimit:
    """Counts requests per caller in fixed windows. Thread-safe."""

    def __init__(self, requests_max: int = REQUESTS_MAX) -> None:
        self._requests_max, self._lock = requests_max, threading.Lock()
        self._window, self._counts = 0, dict[str, int]()

    def count(self, caller: str, now_ms: Millis) -> None:
        """One more request; TooMany past the limit."""
        with self._lock:
            window = now_ms // WINDOW_MS
            if window != self._window:
                self._window, self._counts = window, {}
            self._counts[caller] = self._counts.get(caller, 0) + 1
            if self._counts[caller] > self._requests_max:
                raise TooMany(
                    "too many requests",
                    why=f"one token may make {self._requests_max * 1000 // WINDOW_MS} of them per second",
                    fix="wait a second, and ask less often",
                )


class StrangerLimit:
    """How many tokens that nobody knows may come from one address, counted before they are looked up.

    Good ones do not count, so that many callers behind one address may all be new. Bounded in memory: the
    addresses that were heard last count. An IPv6 network, of which one caller may have every address, is one.
    """

    def __init__(
        self,
        *,
        unknown_max: int = UNKNOWN_MAX,
        at_once_max: int = LOOKED_UP_MAX,
        addresses_max: int = ADDRESSES_MAX,
    ) -> None:
        self._unknown_max, self._at_once_max = unknown_max, at_once_max
        self._addresses_max, self._lock = addresses_max, threading.Lock()
        self._windows: OrderedDict[str, tuple[int, int]] = OrderedDict()  # window, unknown tokens in it
        self._under_way: dict[str, int] = {}
        self.turned_away = 0

    def begin(self, address: str, now_ms: Millis) -> None:
        """A look-up is about to begin; TooMany if it must not."""
        network = _network(address)
        with self._lock:
            window, unknown = self._windows.get(network, (0, 0))
            under_way = self._under_way.get(network, 0)
            is_full = network not in self._under_way and len(self._under_way) >= self._addresses_max
            if window == now_ms // WINDOW_MS and unknown >= self._unknown_max:
                why = f"of one address {self._unknown_max} are looked up per second"
            elif under_way >= self._at_once_max or is_full:
                why = f"{under_way} new ones of this address are being looked up"
            else:
                self._under_way[network] = under_way + 1
                return
            self.turned_away += 1
        raise TooMany(
            "too many unknown tokens",
            why=why,
            fix="wait a second, and use a good token: one that was good here before is not held up by this",
        )

    def end(self, address: str, now_ms: Millis, *, is_unknown: bool) -> None:
        """It is over."""
        network, now = _network(address), now_ms // WINDOW_MS
        with self._lock:
            self._under_way[network] -= 1
            if not self._under_way[network]:
                del self._under_way[network]
            if is_unknown:
                window, unknown = self._windows.pop(network, (now, 0))
                self._windows[network] = (now, unknown + 1 if window == now else 1)
                if len(self._windows) > self._addresses_max:
                    self._windows.popitem(last=False)


def _network(address: str) -> str:
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


# A beat that is turned away costs a container its tasks.
UNLIMITED_VERBS = frozenset({"container.beat"})
REPEATED = frozenset({"label"})
TELL_MS: Millis = 10_000
log = structlog.get_logger(__name__)
_NAME = re.compile(NAME_PATTERN)
_BEARER = HTTPBearer(auto_error=False, description="A token of `penstock token new`, or of `penstock up`.")


def check_query(request: Request) -> None:
    """Refuse parameters that the route does not have, or has once: a misspelt filter would filter nothing."""
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"there is no parameter {name[:100]!r} here",
                why=f"there is {', '.join(known) or 'none'}",
                fix=f"did you mean `{near[0]}`?" if near else "leave it out",
            )
        if name not in REPEATED and given.count(name) > 1:
            raise ConfigError(
                f"the parameter {name!r} is there twice", why="it has one value", fix="give it once"
            )


class Guard:
    """Makes the check in front of each route: token, then role, then rate."""

    def __init__(self, tokens: TokenStore, clock: Clock, rate: RateLimit) -> None:
        self._tokens, self._clock, self._rate = tokens, clock, rate
        self._checks: dict[Callable[..., Any], str] = {}

    def allow(self, verb: str) -> Any:
        """The default of a route's `caller`: whoever may do `verb`."""
        assert verb in VERBS, f"{verb} is in no row of the table"

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
        """What a route asks of its caller; None: it asks nothing."""
        found = (self._checks.get(part.call) for part in route.dependant.dependencies if part.call)
        return next((verb for verb in found if verb), None)

    async def knows(self, headers: Iterable[tuple[bytes, bytes]], verb: str) -> bool:
        """Whether a request shows a good token that may do `verb`; counts it then. TooMany past the limit."""
        return await self.known(headers, verb) is not None

    async def known(self, headers: Iterable[tuple[bytes, bytes]], verb: str) -> Caller | None:
        """Whose good token that may do `verb` a request shows; None: it goes the ordinary way."""
        shown = [value for name, value in headers if name == b"authorization"]
        if len(shown) != 1 or shown[0][:7].lower() != b"bearer ":
            return None
        token, now_ms = shown[0][7:].decode("latin-1").strip(), self._clock.now_ms()
        caller = self._tokens.cached_caller(token, now_ms=now_ms)
        if caller is None and not self._tokens.can_be_token(token):
            return None
        if caller is None:
            caller = await BEATS.run(self._tokens.caller, token, now_ms=now_ms)
        if caller.role not in VERBS[verb]:
            return None
        if verb not in UNLIMITED_VERBS:
            self._rate.count(caller.token_id, self._clock.boot_ms())
        return caller

    async def _check_speaks_for(self, caller: Caller, container: str) -> None:
        """Refused if a container's token is used for another one. Admins speak for all of them."""
        if caller.role == "admin" or caller.container == container:
            return
        bound = caller.container
        if not bound and _NAME.fullmatch(container):
            # Issued by a version whose tokens named no container: it speaks for the first that uses it.
            bound = await BEATS.run(self._tokens.bind, caller.token_id, container)
        if bound and bound != container:
            raise Refused(
                f"this token does not speak for the container {container[:200]!r}",
                why=f"it is that of {bound!r}; each container has one of its own",
                fix=f"issue one with `penstock token new {container[:200]} --role container --why …`",
            )

    async def caller(self, request: Request) -> Caller:
        """Whose token a request shows; Unauthorised if nobody's."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthorised(
                "this needs a token",
                why="the request has no `Authorization: Bearer <token>` header",
                fix="name the folder of your `penstock up` with --folder, or set PENSTOCK_TOKEN",
            )
        now_ms = self._clock.now_ms()
        believed = self._tokens.cached_caller(token.strip(), now_ms=now_ms)
        if believed is not None:
            return believed
        try:
            if not self._tokens.can_be_token(token.strip()):
                return self._tokens.caller(token.strip(), now_ms=now_ms)  # refuses, and asks no store
            return await BEATS.run(self._tokens.caller, token.strip(), now_ms=now_ms)
        except Refused as error:
            raise Unauthorised(error.what, why=error.why, fix=error.fix) from error


class TurnAwayStrangers:
    """ASGI middleware: a request with a token that nobody knows ends here, before anything is read of it.

    A token that was never good here is looked up in a thread for such alone, and of one address only so many;
    all others go on at once. So a flood of guesses delays nobody whose token is known.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        prefix: str,
        tokens: TokenStore,
        clock: Clock,
        limit: StrangerLimit | None = None,
    ) -> None:
        self._app, self._prefix, self._tokens, self._clock = app, f"{prefix}/", tokens, clock
        self._limit, self._told_ms, self._told = limit or StrangerLimit(), -TELL_MS, 0

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
            return  # refused without a look-up, by whoever asks for a token
        address = scope["client"][0] if scope.get("client") else ""
        try:
            self._limit.begin(address, self._clock.boot_ms())
        except TooMany:
            self._tell(address)
            raise
        is_unknown = False
        try:
            await STRANGERS.run(self._tokens.caller, token, now_ms=self._clock.now_ms())
        except Refused as error:
            is_unknown = True
            raise Unauthorised(error.what, why=error.why, fix=error.fix) from error
        finally:
            self._limit.end(address, self._clock.boot_ms(), is_unknown=is_unknown)

    def _tell(self, address: str) -> None:
        """In the log, once in a while: what is turned away is counted, and not dropped in silence."""
        now_ms, count = self._clock.boot_ms(), self._limit.turned_away
        if now_ms - self._told_ms >= TELL_MS:
            log.warning("unknown tokens are turned away", address=address, requests=count - self._told)
            self._told_ms, self._told = now_ms, count
