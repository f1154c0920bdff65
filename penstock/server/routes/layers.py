"""Routes that read and write the layers of a job's expected config, the kinds of layers, and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Response

from penstock.client.problems import NeedsVersion
from penstock.core.errors import PenstockError
from penstock.db.tokens import Caller
from penstock.jobs.job_service import LayerPatch
from penstock.jobs.layers import LayerRow
from penstock.server import bodies, replies
from penstock.server.answers import set_version
from penstock.server.bodies import IfMatch, IfVersion, Key, Limit, Name, NameQuery, TokenId, WhyQuery
from penstock.server.pools import PATCHES, WRITES, Reads, RequestBatcher
from penstock.server.replies import WRITING, problems
from penstock.server.security import Guard
from penstock.server.services import Services, WriteArguments, check_package, version_of

BATCH_MAX = 16  # patches in one transaction
LAYER = "/jobs/{name}/layers/{layer}"


def add_layer_routes(router: APIRouter, plane: Services, guard: Guard) -> None:
    """Routes to read, write, clear and roll back layers."""
    _add_reads(router, plane, guard)
    _add_writes(router, plane, guard)
    _add_returns(router, plane, guard)


def _add_reads(router: APIRouter, plane: Services, guard: Guard) -> None:
    reads = Reads(local=not plane.database.is_shared)

    @router.get("/jobs/{name}/layers", responses=problems(404))
    @reads
    def get_layers(
        name: Name,
        response: Response,
        caller: Caller = guard.allow("job.read"),
        version: bodies.Version = None,
    ) -> replies.Layers:
        """The layers now, or at a version."""
        if version is not None:
            return replies.Layers(version=version, layers=_rows(plane.jobs.layers_at(name, version)))
        view = plane.jobs.view(name)
        set_version(response, view.expected_version)
        return replies.Layers(version=view.expected_version, layers=_rows(view.layers))

    @router.get("/jobs/{name}/history", responses=problems(404))
    @reads
    def history(
        name: Name,
        caller: Caller = guard.allow("job.read"),
        layer: NameQuery = None,
        before: bodies.Before = None,
        limit: Limit = 100,
    ) -> replies.HistoryPage:
        """Every write of every layer, newest first; also of a removed job."""
        rows = plane.jobs.history(name, layer=layer, before=before, limit=limit)
        return replies.HistoryPage(history=_rows(rows), next=rows[-1].version if len(rows) == limit else None)

    @router.get("/jobs/{name}/diff", responses=problems(404))
    @reads
    def diff(
        name: Name,
        caller: Caller = guard.allow("job.read"),
        old: Annotated[bodies.Version, Query(description="Default: the running config.")] = None,
        new: Annotated[bodies.Version, Query(description="Default: the expected config now.")] = None,
    ) -> replies.Diff:
        """Differences of two versions of the merged config, and how each would be synchronized."""
        changes = plane.jobs.diff(name, old=old, new=new)
        return replies.Diff(changes=[replies.ChangedReply.of(change) for change in changes])


def _add_writes(router: APIRouter, plane: Services, guard: Guard) -> None:
    arguments = WriteArguments(plane)
    # One thread writes a batch in one transaction: several threads would wait for each other's locks.
    patches = RequestBatcher(PATCHES, partial(write_patches, plane), batch_max=BATCH_MAX)

    @router.put(LAYER, responses=problems(428, *WRITING))
    @WRITES
    def put_layer(
        name: Name,
        layer: Name,
        body: bodies.PutLayerBody,
        response: Response,
        caller: Caller = guard.allow("job.write"),
        idempotency_key: Key = None,
        if_match: IfVersion = None,
    ) -> replies.Written:
        """Replace one layer. Requires If-Match, so that no write of another caller is lost."""
        expected = version_of(if_match)
        if expected is None:
            raise NeedsVersion(
                "replacing a layer needs If-Match",
                why="without it, changes that others wrote meanwhile would be lost silently",
                fix="read the job and send its ETag as If-Match, or change single paths with PATCH",
            )
        given = arguments(caller, body.why, idempotency_key)
        check_package(plane, name, body.body)
        version = plane.jobs.write_layer(name, layer, body.body, expected_version=expected, **given)
        plane.wake_syncer()
        set_version(response, version)
        return replies.Written(version=version)

    @router.patch(LAYER, responses=problems(*WRITING))
    async def patch_layer(
        name: Name,
        layer: Name,
        body: bodies.PatchLayerBody,
        response: Response,
        caller: Caller = guard.allow("job.write"),
        idempotency_key: Key = None,
        if_match: IfMatch = None,
    ) -> replies.Written:
        """Set paths of one layer; null removes one."""
        patch = LayerPatch(
            job=name,
            layer=layer,
            changes=body.changes,
            expected_version=version_of(if_match),
            options=arguments(caller, body.why, idempotency_key),
        )
        version = await patches.ask(patch)
        set_version(response, version)
        return replies.Written(version=version)


def write_patches(services: Services, patches: Sequence[LayerPatch]) -> list[int | Exception]:
    """Write a batch of patches; returns the new version or an error for each."""
    found: dict[int, int | Exception] = {}
    for number, patch in enumerate(patches):
        try:
            check_package(services, patch.job, patch.changes)
        except PenstockError as error:
            found[number] = error
    ready = [number for number in range(len(patches)) if number not in found]
    found.update(zip(ready, services.jobs.patch_layers([patches[number] for number in ready]), strict=True))
    if any(isinstance(version, int) for version in found.values()):
        services.wake_syncer()
    return [found[number] for number in range(len(patches))]


def _add_returns(router: APIRouter, plane: Services, guard: Guard) -> None:
    arguments = WriteArguments(plane)

    @router.delete(LAYER, responses=problems(*WRITING))
    @WRITES
    def clear_layer(
        name: Name,
        layer: Name,
        response: Response,
        caller: Caller = guard.allow("job.write"),
        why: WhyQuery = "",
        idempotency_key: Key = None,
        if_match: IfMatch = None,
    ) -> replies.Written:
        """Clear a layer: remove every value that it sets."""
        given = arguments(caller, why, idempotency_key)
        version = plane.jobs.clear(name, layer, expected_version=version_of(if_match), **given)
        plane.wake_syncer()
        set_version(response, version)
        return replies.Written(version=version)

    @router.post(LAYER + "/rollback", responses=problems(*WRITING))
    @WRITES
    def rollback_layer(
        name: Name,
        layer: Name,
        body: bodies.RollbackBody,
        response: Response,
        caller: Caller = guard.allow("job.write"),
        idempotency_key: Key = None,
        if_match: IfMatch = None,
    ) -> replies.Written:
        """Write a layer as it was at an earlier version."""
        version = plane.jobs.rollback(
            name,
            layer,
            to_version=body.to_version,
            expected_version=version_of(if_match),
            **arguments(caller, body.why, idempotency_key),
        )
        plane.wake_syncer()
        set_version(response, version)
        return replies.Written(version=version)


def _rows(rows: Sequence[LayerRow]) -> list[replies.LayerReply]:
    return [replies.LayerReply.of(row) for row in rows]


DAY_MS = 24 * 3_600_000


def add_layer_kind_routes(router: APIRouter, plane: Services, guard: Guard) -> None:
    """Routes about the kinds of layers."""
    arguments, reads = WriteArguments(plane), Reads(local=not plane.database.is_shared)
    created: replies.Responses = {201: {"description": "Created"}}

    @router.get("/layers", responses=problems())
    @reads
    def list_layers(caller: Caller = guard.allow("layer.read")) -> replies.LayerKinds:
        """Every kind of layer, lowest first."""
        return _kinds(plane)

    @router.post("/layers", status_code=201, responses=created | problems(*WRITING))
    @WRITES
    def add_layer(
        body: bodies.NewLayerBody, caller: Caller = guard.allow("layer.create"), idempotency_key: Key = None
    ) -> replies.LayerKinds:
        """Add a kind of layer for a component of the user's own."""
        plane.jobs.add_layer_kind(
            body.name,
            body.precedence,
            body.writers,
            replaces_plan=body.replaces_plan,
            fields=body.fields,
            **arguments(caller, body.why, idempotency_key),
        )
        return _kinds(plane)


def _kinds(plane: Services) -> replies.LayerKinds:
    return replies.LayerKinds(layers=[replies.LayerKind.of(kind) for kind in plane.jobs.layer_kinds()])


def add_token_routes(router: APIRouter, plane: Services, guard: Guard) -> None:
    """Routes about tokens."""
    arguments, reads = WriteArguments(plane), Reads(local=not plane.database.is_shared)
    created: replies.Responses = {201: {"description": "The token is shown only once"}}

    @router.get("/tokens", responses=problems())
    @reads
    def list_tokens(caller: Caller = guard.allow("token.read")) -> replies.Tokens:
        """Every token ever issued, without its secret."""
        return replies.Tokens(tokens=[replies.Token.of(row) for row in plane.tokens.rows()])

    @router.post("/tokens", status_code=201, responses=created | problems(*WRITING))
    @WRITES
    def issue_token(
        body: bodies.NewTokenBody, caller: Caller = guard.allow("token.write"), idempotency_key: Key = None
    ) -> replies.IssuedToken:
        """Issue a token. A repeat of the request gets everything but the secret."""
        row, token = plane.token_service.issue(
            body.name,
            body.role,
            lifetime_ms=body.days * DAY_MS,
            **arguments(caller, body.why, idempotency_key),
        )
        return replies.IssuedToken(**dict(replies.Token.of(row)), token=token)

    @router.delete("/tokens/{token_id}", responses=problems(*WRITING))
    @WRITES
    def revoke_token(
        token_id: TokenId,
        caller: Caller = guard.allow("token.write"),
        why: WhyQuery = "",
        idempotency_key: Key = None,
    ) -> replies.Token:
        """Revoke a token: at once on this instance, within a second on others."""
        row = plane.token_service.revoke(token_id, **arguments(caller, why, idempotency_key))
        return replies.Token.of(row)
