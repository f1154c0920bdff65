"""Routes about tokens and the kinds of layers: what an installation is made of."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Response

from penstock.db.tokens import Caller
from penstock.server import bodies, replies
from penstock.server.answers import answer
from penstock.server.bodies import Key, TokenId, WhyQuery
from penstock.server.pools import WRITES, Reads
from penstock.server.replies import WRITING, problems
from penstock.server.security import Guard
from penstock.server.services import Ask, Services

DAY_MS = 24 * 3_600_000


def add_layer_kind_routes(router: APIRouter, plane: Services, guard: Guard) -> None:
    """The levels of the expected config."""
    ask, reads = Ask(plane), Reads(local=not plane.database.is_shared)
    created: replies.Responses = {201: {"model": replies.LayerKinds, "description": "It is there now"}}

    @router.get("/layers", response_model=replies.LayerKinds, responses=problems())
    @reads
    def list_layers(caller: Caller = guard.allow("layer.read")) -> Response:
        """Every layer there is, lowest first."""
        return answer(_kinds(plane))

    @router.post(
        "/layers", status_code=201, response_model=replies.LayerKinds, responses=created | problems(*WRITING)
    )
    @WRITES
    def add_layer(
        body: bodies.NewLayer, caller: Caller = guard.allow("layer.create"), idempotency_key: Key = None
    ) -> Response:
        """Add a layer for a component of its own."""
        plane.jobs.add_layer_kind(
            body.name,
            body.precedence,
            body.writers,
            replaces_plan=body.replaces_plan,
            fields=body.fields,
            **ask(caller, body.why, idempotency_key),
        )
        return answer(_kinds(plane), status=201)


def _kinds(plane: Services) -> dict[str, object]:
    kinds = plane.jobs.layer_kinds()
    sets = ("writers", "fields")
    return {"layers": [asdict(kind) | {name: sorted(getattr(kind, name)) for name in sets} for kind in kinds]}


def add_token_routes(router: APIRouter, plane: Services, guard: Guard) -> None:
    """Who may call."""
    ask, reads = Ask(plane), Reads(local=not plane.database.is_shared)
    created: replies.Responses = {201: {"model": replies.IssuedToken, "description": "It is seen this once"}}

    @router.get("/tokens", response_model=replies.Tokens, responses=problems())
    @reads
    def list_tokens(caller: Caller = guard.allow("token.read")) -> Response:
        """Every token ever issued, without the tokens themselves."""
        return answer({"tokens": plane.tokens.rows()})

    @router.post(
        "/tokens", status_code=201, response_model=replies.IssuedToken, responses=created | problems(*WRITING)
    )
    @WRITES
    def issue_token(
        body: bodies.NewToken, caller: Caller = guard.allow("token.write"), idempotency_key: Key = None
    ) -> Response:
        """Issue a token. A repeat of the request gets everything but the token itself."""
        row, token = plane.token_service.issue(
            body.name,
            body.role,
            lifetime_ms=body.days * DAY_MS,
            **ask(caller, body.why, idempotency_key),
        )
        return answer({**asdict(row), "token": token}, status=201)

    @router.delete("/tokens/{token_id}", response_model=replies.Token, responses=problems(*WRITING))
    @WRITES
    def revoke_token(
        token_id: TokenId,
        caller: Caller = guard.allow("token.write"),
        why: WhyQuery = "",
        idempotency_key: Key = None,
    ) -> Response:
        """Take a token back: at once here, within a second on other instances."""
        return answer(plane.token_service.revoke(token_id, **ask(caller, why, idempotency_key)))
