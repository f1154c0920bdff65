"""Routes about the layers of a job's expected config: now, formerly, and changing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Response

from penstock.core.errors import PenstockError
from penstock.core.token_store import Caller
from penstock.jobs.job_service import Patch
from penstock.jobs.layer_writer import Asked
from penstock.jobs.layers import LayerRow
from penstock.web import bodies, replies
from penstock.web.answers import answer
from penstock.web.asking import Ask, Desk, check_package, version_of
from penstock.web.bodies import (
    IfMatch,
    IfVersion,
    Key,
    Limit,
    Name,
    NameQuery,
    WhyQuery,
)
from penstock.web.guard import Guard
from penstock.web.pools import WRITES, Reads
from penstock.web.problems import NeedsVersion
from penstock.web.replies import WRITING, problems

if TYPE_CHECKING:
    from penstock.app import ControlPlane  # the scribe writes layers, and starts sooner without the rest

LAYER = "/jobs/{name}/layers/{layer}"


def add_layer_reads(router: APIRouter, plane: ControlPlane, guard: Guard) -> None:
    """Layers now and formerly, and what differs."""
    reads = Reads(local=not plane.database.is_shared)

    @router.get("/jobs/{name}/layers", response_model=replies.Layers, responses=problems(404))
    @reads
    def get_layers(
        name: Name, caller: Caller = guard.allow("job.read"), version: bodies.Version = None
    ) -> Response:
        """The layers as they stand, or as they stood at a version."""
        if version is not None:
            return answer({"version": version, "layers": _rows(plane.jobs.layers_at(name, version))})
        view = plane.jobs.view(name)
        found = {"version": view.expected_version, "layers": _rows(view.layers)}
        return answer(found, version=view.expected_version)

    @router.get("/jobs/{name}/history", response_model=replies.HistoryPage, responses=problems(404))
    @reads
    def history(
        name: Name,
        caller: Caller = guard.allow("job.read"),
        layer: NameQuery = None,
        before: bodies.Before = None,
        limit: Limit = 100,
    ) -> Response:
        """Every write of every layer, newest first; of a removed job too."""
        rows = plane.jobs.history(name, layer=layer, before=before, limit=limit)
        return answer({"history": _rows(rows), "next": rows[-1].version if len(rows) == limit else None})

    @router.get("/jobs/{name}/diff", response_model=replies.Diff, responses=problems(404))
    @reads
    def diff(
        name: Name,
        caller: Caller = guard.allow("job.read"),
        old: Annotated[bodies.Version, Query(description="Without it: what runs.")] = None,
        new: Annotated[bodies.Version, Query(description="Without it: what is expected now.")] = None,
    ) -> Response:
        """What differs between two versions of the merged config, and what each difference costs."""
        changes: Any = plane.jobs.diff(name, old=old, new=new)
        return answer({"changes": changes})


def add_layer_writes(router: APIRouter, plane: ControlPlane, guard: Guard) -> None:
    """Replacing a layer, and changing paths of it."""
    ask = Ask(plane)

    @router.put(LAYER, response_model=replies.Written, responses=problems(428, *WRITING))
    @WRITES
    def put_layer(
        name: Name,
        layer: Name,
        body: bodies.PutLayer,
        caller: Caller = guard.allow("job.write"),
        idempotency_key: Key = None,
        if_match: IfVersion = None,
    ) -> Response:
        """Replace one layer. Whoever replaces must say what they have seen: If-Match is needed."""
        expected = version_of(if_match)
        if expected is None:
            raise NeedsVersion(
                "replacing a layer needs If-Match",
                why="what others wrote into it meanwhile would be lost without a word",
                fix="read the job and send its ETag as If-Match, or change single paths with PATCH",
            )
        asked = ask(caller, body.why, idempotency_key)
        check_package(plane, name, body.body)
        version = plane.jobs.write_layer(name, layer, body.body, expected_version=expected, **asked)
        plane.wake_syncer()
        return answer({"version": version}, version=version)

    @router.patch(LAYER, response_model=replies.Written, responses=problems(*WRITING))
    @WRITES
    def patch_layer(
        name: Name,
        layer: Name,
        body: bodies.PatchLayer,
        caller: Caller = guard.allow("job.write"),
        idempotency_key: Key = None,
        if_match: IfMatch = None,
    ) -> Response:
        """Set paths of one layer; null takes one back."""
        asked = ask(caller, body.why, idempotency_key)
        return write_patch(plane, name, layer, body.changes, asked, if_match)


def write_patch(
    desk: Desk, name: str, layer: str, changes: Mapping[str, Any], asked: Asked, if_match: str | None
) -> Response:
    """Set paths of a layer, and say its new version."""
    patch = Patch(job=name, layer=layer, changes=changes, expected_version=version_of(if_match), asked=asked)
    (written,) = write_patches(desk, [patch])
    if isinstance(written, Exception):
        raise written
    return written


def write_patches(desk: Desk, patches: Sequence[Patch]) -> list[Response | Exception]:
    """Set paths of layers for several callers: for each an answer with its version, or an error."""
    found: dict[int, int | Exception] = {}
    for number, patch in enumerate(patches):
        try:
            check_package(desk, patch.job, patch.changes)
        except PenstockError as error:
            found[number] = error
    ready = [number for number in range(len(patches)) if number not in found]
    found.update(zip(ready, desk.jobs.patch_layers([patches[number] for number in ready]), strict=True))
    if any(isinstance(version, int) for version in found.values()):
        desk.wake_syncer()
    versions = (found[number] for number in range(len(patches)))
    return [
        answer({"version": version}, version=version) if isinstance(version, int) else version
        for version in versions
    ]


def add_layer_returns(router: APIRouter, plane: ControlPlane, guard: Guard) -> None:
    """Taking a layer back, and bringing a former one back."""
    ask = Ask(plane)

    @router.delete(LAYER, response_model=replies.Written, responses=problems(*WRITING))
    @WRITES
    def clear_layer(
        name: Name,
        layer: Name,
        caller: Caller = guard.allow("job.write"),
        why: WhyQuery = "",
        idempotency_key: Key = None,
        if_match: IfMatch = None,
    ) -> Response:
        """Take back everything a layer says."""
        asked = ask(caller, why, idempotency_key)
        version = plane.jobs.clear(name, layer, expected_version=version_of(if_match), **asked)
        plane.wake_syncer()
        return answer({"version": version}, version=version)

    @router.post(LAYER + "/rollback", response_model=replies.Written, responses=problems(*WRITING))
    @WRITES
    def rollback_layer(
        name: Name,
        layer: Name,
        body: bodies.Rollback,
        caller: Caller = guard.allow("job.write"),
        idempotency_key: Key = None,
        if_match: IfMatch = None,
    ) -> Response:
        """Write a layer again as it was at a version."""
        version = plane.jobs.rollback(
            name,
            layer,
            to_version=body.to_version,
            expected_version=version_of(if_match),
            **ask(caller, body.why, idempotency_key),
        )
        plane.wake_syncer()
        return answer({"version": version}, version=version)


def _rows(rows: Sequence[LayerRow]) -> list[dict[str, Any]]:
    return [row.to_json() for row in rows]
