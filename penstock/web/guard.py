"""Who may call which route: each route names one verb, and a route that names none is not served."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import structlog
from fastapi import Depends, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.core.clock import Clock, Millis
from penstock.core.errors import ConfigError, PenstockError, Refused
from penstock.core.token_store import Caller, TokenStore
from penstock.jobs.config import NAME_PATTERN
from penstock.web.answers import problem_response
from penstock.web.auth import VERBS, require
from penstock.web.limits import RateLimit, StrangerLimit
from penstock.web.pools import BEATS, STRANGERS
from penstock.web.problems import TooMany, Unauthorised
from penstock.web.server import OPEN_ROUTES

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
        caller = self._tokens.believed(token, now_ms=now_ms)
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
        believed = self._tokens.believed(token.strip(), now_ms=now_ms)
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
