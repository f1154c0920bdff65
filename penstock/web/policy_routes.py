"""Routes about policies: a look at a job now, what was decided about it and why, an end of its exclusions."""

from __future__ import annotations

from fastapi import APIRouter, Response

from penstock.app import ControlPlane
from penstock.core.token_store import Caller
from penstock.jobs.layer_writer import REASON_MAX
from penstock.jobs.text_rules import check_line
from penstock.web import bodies, policy_replies
from penstock.web.answers import answer
from penstock.web.bodies import Before, Limit, Name
from penstock.web.decisions import decisions_of
from penstock.web.guard import Guard
from penstock.web.pools import LONG, WRITES
from penstock.web.replies import problems


def add_policy_routes(router: APIRouter, plane: ControlPlane, guard: Guard) -> None:
    """What policies decide."""

    @router.post(
        "/jobs/{name}/manage", response_model=policy_replies.ManagedJob, responses=problems(404, 507)
    )
    @LONG
    def manage_job(name: Name, body: bodies.Manage, caller: Caller = guard.allow("job.manage")) -> Response:
        """Let policies look at a job now: every answer, what was done, and why not more."""
        plane.jobs.view(name)  # who asks about nobody is told so
        return answer(
            plane.policies.manage(name, policy=body.policy, is_dry=body.dry_run, asked_by=caller.name)
        )

    @router.post(
        "/jobs/{name}/readmit", response_model=policy_replies.Readmitted, responses=problems(404, 507)
    )
    @WRITES
    def readmit_job(name: Name, body: bodies.Because, caller: Caller = guard.allow("job.manage")) -> Response:
        """End what keeps a job away from containers. May be repeated."""
        check_line("the reason", body.why, length_max=REASON_MAX)
        plane.jobs.view(name)
        lifted = plane.policies.jobs.readmit(name, by=caller.name, why=body.why)
        plane.wake_shard_manager()
        return answer({"job": name, "lifted": lifted})

    @router.get("/jobs/{name}/decisions", response_model=policy_replies.Decisions, responses=problems(404))
    @LONG
    def list_decisions(
        name: Name, caller: Caller = guard.allow("job.read"), before: Before = None, limit: Limit = 50
    ) -> Response:
        """What was decided about a job and why, newest first: policies, scaler, layers, syncer, placement."""
        return answer(decisions_of(plane, name, before=before, limit=limit))
