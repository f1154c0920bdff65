"""Routes about jobs and the layers of their expected configs."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Response

from penstock.core.errors import ConfigError
from penstock.db.tokens import Caller
from penstock.server import bodies, replies
from penstock.server.answers import encoded, set_created, set_version
from penstock.server.bodies import (
    IfMatch,
    IfNew,
    IfVersion,
    JobState,
    Key,
    Labels,
    Limit,
    Name,
    NameQuery,
    WhyQuery,
)
from penstock.server.pages import JobPages
from penstock.server.pools import LONG, READS, WRITES, Reads, RequestBatcher
from penstock.server.replies import WRITING, problems
from penstock.server.security import Guard
from penstock.server.services import Services, WriteArguments, check_package, version_of

BATCH_MAX = 64  # jobs in one read
CREATED: replies.Responses = {201: {"model": replies.AppliedReply, "description": "Created"}}


def add_job_routes(router: APIRouter, plane: Services, guard: Guard, prefix: str) -> None:
    """Routes to read, change and remove jobs."""
    _add_reads(router, plane, guard, JobPages(plane))
    _add_writes(router, plane, guard, prefix)
    _add_ends(router, plane, guard)


def _add_reads(router: APIRouter, plane: Services, guard: Guard, pages: JobPages) -> None:
    reads = Reads(local=not plane.database.is_shared)
    # A database read costs more per call than per job: requests that arrive meanwhile are read in one batch.
    jobs: RequestBatcher[str, tuple[int, bytes] | None] = RequestBatcher(
        READS, pages.several, batch_max=BATCH_MAX
    )

    # Bytes: jobs are encoded once, when they change. A page of 100 takes 0.09 ms, as models 0.5 ms.
    @router.get("/jobs", response_model=replies.JobPage, responses=problems())
    @reads
    def list_jobs(
        caller: Caller = guard.allow("job.read"),
        label: Labels = None,
        state: JobState | None = None,
        pipeline: NameQuery = None,
        removed: bool = False,
        after: NameQuery = None,
        limit: Limit = 100,
    ) -> Response:
        """Jobs by name, a page at a time."""
        labels = dict(text.split("=", 1) for text in label or [])
        if len(labels) < len(label or []):
            raise ConfigError(
                "the same label is given twice", why="a job has one value for each label", fix="give it once"
            )
        found = pages.jobs(
            labels=labels, state=state, pipeline=pipeline, removed=removed, after=after or "", limit=limit
        )
        return encoded(found)

    # Bytes, for the same reason: 1 µs a job, as a model 40 µs.
    @router.get("/jobs/{name}", response_model=replies.Job, responses=problems(404))
    async def get_job(name: Name, caller: Caller = guard.allow("job.read")) -> Response:
        """One job: layers, provenance, merged config, running config, plan."""
        found = await jobs.ask(name)
        version, body = found if found is not None else await READS.run(pages.job, name)
        return encoded(body, version=version)

    @router.post("/jobs/{name}/plan", responses=problems(404))
    @LONG
    def plan_job(
        name: Name, body: bodies.PlanJobBody, caller: Caller = guard.allow("job.plan")
    ) -> replies.JobChangeReply:
        """What applying this layer would change. Writes nothing."""
        return replies.JobChangeReply.of(plane.jobs.plan_job(name, body.config))


def _add_writes(router: APIRouter, plane: Services, guard: Guard, prefix: str) -> None:
    arguments = WriteArguments(plane)

    @router.put("/jobs/{name}", responses=CREATED | problems(*WRITING))
    @WRITES
    def apply_job(
        name: Name,
        body: bodies.ApplyBody,
        response: Response,
        caller: Caller = guard.allow("job.apply"),
        idempotency_key: Key = None,
        if_match: IfVersion = None,
        if_none_match: IfNew = None,
    ) -> replies.AppliedReply:
        """Write the job's provisioner layer; create the job if it does not exist."""
        if if_match is not None and if_none_match is not None:
            raise ConfigError(
                "If-Match and If-None-Match exclude each other",
                why="If-Match requires the job to exist, If-None-Match requires that it does not",
                fix="send one of the two",
            )
        check_package(plane, name, body.config)
        done = plane.jobs.apply(
            name,
            body.config,
            expected_version=0 if if_none_match is not None else version_of(if_match),
            birth=secrets.token_hex(8),
            **arguments(caller, body.why, idempotency_key),
        )
        plane.wake_syncer()
        set_version(response, done.version)
        if done.created:
            set_created(response, f"{prefix}/jobs/{name}")
        return replies.AppliedReply(version=done.version, created=done.created)

    @router.post("/jobs/{name}/state", responses=problems(*WRITING))
    @WRITES
    def set_state(
        name: Name,
        body: bodies.SetStateBody,
        response: Response,
        caller: Caller = guard.allow("job.state"),
        idempotency_key: Key = None,
        if_match: IfMatch = None,
    ) -> replies.StateReply:
        """Set the state that a job should have: running, paused or stopped."""
        done = plane.jobs.set_state(
            name,
            body.state,
            layer=body.layer,
            expected_version=version_of(if_match),
            **arguments(caller, body.why, idempotency_key),
        )
        plane.wake_syncer()
        set_version(response, done.version)
        return replies.StateReply(version=done.version, layer=done.layer, effective=done.effective)


def _add_ends(router: APIRouter, plane: Services, guard: Guard) -> None:
    arguments = WriteArguments(plane)

    @router.delete("/jobs/{name}", responses=problems(*WRITING))
    @WRITES
    def remove_job(
        name: Name,
        response: Response,
        caller: Caller = guard.allow("job.remove"),
        why: WhyQuery = "",
        idempotency_key: Key = None,
        if_match: IfMatch = None,
    ) -> replies.Written:
        """Remove a job; its layers and history stay, and `restore` brings it back."""
        version = plane.jobs.remove(
            name, expected_version=version_of(if_match), **arguments(caller, why, idempotency_key)
        )
        plane.wake_syncer()
        set_version(response, version)
        return replies.Written(version=version)

    @router.post("/jobs/{name}/restore", responses=problems(*WRITING))
    @WRITES
    def restore_job(
        name: Name,
        body: bodies.ReasonBody,
        response: Response,
        caller: Caller = guard.allow("job.remove"),
        idempotency_key: Key = None,
        if_match: IfMatch = None,
    ) -> replies.Written:
        """Restore a removed job with its layers."""
        version = plane.jobs.restore(
            name, expected_version=version_of(if_match), **arguments(caller, body.why, idempotency_key)
        )
        plane.wake_syncer()
        set_version(response, version)
        return replies.Written(version=version)
