"""Routes about jobs and the layers of their expected configs."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Response

from penstock.app import ControlPlane
from penstock.core.errors import ConfigError
from penstock.core.token_store import Caller
from penstock.web import bodies, replies
from penstock.web.answers import answer
from penstock.web.asking import Ask, check_package, version_of
from penstock.web.bodies import (
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
from penstock.web.guard import Guard
from penstock.web.overview import Overview
from penstock.web.pools import LONG, WRITES, Reads
from penstock.web.replies import WRITING, problems

CREATED: replies.Responses = {201: {"model": replies.AppliedReply, "description": "It was not there before"}}


def add_job_reads(router: APIRouter, plane: ControlPlane, guard: Guard, overview: Overview) -> None:
    """Jobs as they are, and as they would be."""
    reads = Reads(local=not plane.database.is_shared)

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
                "one label was asked for twice", why="no job has two values of it", fix="give it once"
            )
        found = overview.jobs(
            labels=labels, state=state, pipeline=pipeline, removed=removed, after=after or "", limit=limit
        )
        return answer(found)

    @router.get("/jobs/{name}", response_model=replies.Job, responses=problems(404))
    @reads
    def get_job(name: Name, caller: Caller = guard.allow("job.read")) -> Response:
        """One job: layers, provenance, merged config, what runs, what is on its way."""
        version, found = overview.job(name)
        return answer(found, version=version)

    @router.post("/jobs/{name}/plan", response_model=replies.JobChange, responses=problems(404))
    @LONG
    def plan_job(name: Name, body: bodies.PlanJob, caller: Caller = guard.allow("job.plan")) -> Response:
        """What applying this would change. Writes nothing."""
        return answer(plane.jobs.plan_job(name, body.config))


def add_job_writes(router: APIRouter, plane: ControlPlane, guard: Guard, prefix: str) -> None:
    """What a job should be and do."""
    ask = Ask(plane)

    @router.put("/jobs/{name}", response_model=replies.AppliedReply, responses=CREATED | problems(*WRITING))
    @WRITES
    def apply_job(
        name: Name,
        body: bodies.Apply,
        caller: Caller = guard.allow("job.apply"),
        idempotency_key: Key = None,
        if_match: IfVersion = None,
        if_none_match: IfNew = None,
    ) -> Response:
        """Make this the job's provisioner layer; without one of that name, create it."""
        if if_match is not None and if_none_match is not None:
            raise ConfigError(
                "If-Match and If-None-Match exclude each other",
                why="one wants the job to be there, the other wants it not to be",
                fix="send one of the two",
            )
        check_package(plane, name, body.config)
        done = plane.jobs.apply(
            name,
            body.config,
            expected_version=0 if if_none_match is not None else version_of(if_match),
            birth=secrets.token_hex(8),
            **ask(caller, body.why, idempotency_key),
        )
        plane.wake_syncer()
        status, location = (201, f"{prefix}/jobs/{name}") if done.created else (200, "")
        return answer(done, status=status, version=done.version, location=location)

    @router.post("/jobs/{name}/state", response_model=replies.StateReply, responses=problems(*WRITING))
    @WRITES
    def set_state(
        name: Name,
        body: bodies.SetState,
        caller: Caller = guard.allow("job.state"),
        idempotency_key: Key = None,
        if_match: IfMatch = None,
    ) -> Response:
        """Ask the job to run, to pause or to stop."""
        done = plane.jobs.set_state(
            name,
            body.state,
            layer=body.layer,
            expected_version=version_of(if_match),
            **ask(caller, body.why, idempotency_key),
        )
        plane.wake_syncer()
        return answer(done, version=done.version)


def add_job_ends(router: APIRouter, plane: ControlPlane, guard: Guard) -> None:
    """Removing jobs, and bringing them back."""
    ask = Ask(plane)

    @router.delete("/jobs/{name}", response_model=replies.Written, responses=problems(*WRITING))
    @WRITES
    def remove_job(
        name: Name,
        caller: Caller = guard.allow("job.remove"),
        why: WhyQuery = "",
        idempotency_key: Key = None,
        if_match: IfMatch = None,
    ) -> Response:
        """End the job's life; nothing of it is forgotten, and `restore` brings it back."""
        version = plane.jobs.remove(
            name, expected_version=version_of(if_match), **ask(caller, why, idempotency_key)
        )
        plane.wake_syncer()
        return answer({"version": version}, version=version)

    @router.post("/jobs/{name}/restore", response_model=replies.Written, responses=problems(*WRITING))
    @WRITES
    def restore_job(
        name: Name,
        body: bodies.Because,
        caller: Caller = guard.allow("job.remove"),
        idempotency_key: Key = None,
        if_match: IfMatch = None,
    ) -> Response:
        """Bring a removed job back, with its layers."""
        version = plane.jobs.restore(
            name, expected_version=version_of(if_match), **ask(caller, body.why, idempotency_key)
        )
        plane.wake_syncer()
        return answer({"version": version}, version=version)
