"""Who may call which route: each route names one verb, and a route that names none is not served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, Header
from fastapi.routing import APIRoute

from penstock.core.clock import Clock
from penstock.core.errors import Refused
from penstock.core.token_store import Caller, TokenStore
from penstock.web.auth import VERBS, require
from penstock.web.limits import RateLimit
from penstock.web.problems import Unauthorised

# A beat that is turned away costs a container its tasks.
UNLIMITED_VERBS = frozenset({"container.beat"})


class Guard:
    """Makes the check in front of each route: token, then role, then rate."""

    def __init__(self, tokens: TokenStore, clock: Clock, rate: RateLimit) -> None:
        self._tokens, self._clock, self._rate = tokens, clock, rate
        self._checks: dict[Callable[..., Any], str] = {}

    def allow(self, verb: str) -> Any:
        """The default of a route's `caller`: whoever may do `verb`."""
        assert verb in VERBS, f"{verb} is in no row of the table"

        def check(authorization: Annotated[str, Header()] = "") -> Caller:
            caller = self._caller(authorization)
            require(caller.role, verb)
            if verb not in UNLIMITED_VERBS:
                self._rate.count(caller.token_id, self._clock.boot_ms())
            return caller

        self._checks[check] = verb
        return Depends(check)

    def verb_of(self, route: APIRoute) -> str | None:
        """What a route asks of its caller; None: it asks nothing."""
        found = (self._checks.get(part.call) for part in route.dependant.dependencies if part.call)
        return next((verb for verb in found if verb), None)

    def _caller(self, authorization: str) -> Caller:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthorised(
                "this needs a token",
                why="the request has no `Authorization: Bearer <token>` header",
                fix="use the token that `penstock up` wrote into its folder",
            )
        try:
            return self._tokens.caller(token.strip(), now_ms=self._clock.now_ms())
        except Refused as error:
            raise Unauthorised(error.what, why=error.why, fix=error.fix) from error
