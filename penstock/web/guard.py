"""Who may call which route: each route names one verb, and a route that names none is not served."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from penstock.core.clock import Clock
from penstock.core.errors import ConfigError, Refused
from penstock.core.token_store import Caller, TokenStore
from penstock.web.auth import VERBS, require
from penstock.web.limits import RateLimit
from penstock.web.pools import BEATS
from penstock.web.problems import Unauthorised

# A beat that is turned away costs a container its tasks.
UNLIMITED_VERBS = frozenset({"container.beat"})
REPEATED = frozenset({"label"})
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
        if caller is None:
            caller = await BEATS.run(self._tokens.caller, token, now_ms=now_ms)
        if caller.role not in VERBS[verb]:
            return None
        if verb not in UNLIMITED_VERBS:
            self._rate.count(caller.token_id, self._clock.boot_ms())
        return caller

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
            return await BEATS.run(self._tokens.caller, token.strip(), now_ms=now_ms)
        except Refused as error:
            raise Unauthorised(error.what, why=error.why, fix=error.fix) from error
