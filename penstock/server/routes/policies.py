"""Routes about policies and the doctor: evaluate and diagnose a job, list decisions, end exclusions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter

from penstock.core.errors import NotFound, PenstockError
from penstock.core.journal import ENTRIES_MAX, Entry
from penstock.db.tokens import Caller
from penstock.fleet.shard_load import KINDS, shard_of
from penstock.jobs.config import JobConfig, StreamJob
from penstock.jobs.job_reads import JobView
from penstock.jobs.layer_writer import REASON_MAX
from penstock.jobs.text_rules import check_line
from penstock.scaling.doctor.doctor import examine, patient_of
from penstock.scaling.doctor.patient import METRICS, MINUTES, InputFacts, Patient, WatermarkFacts
from penstock.scaling.metrics.frames import NoFrame
from penstock.scaling.policies.balance import starved_tasks
from penstock.server import bodies, replies
from penstock.server.bodies import Before, Limit, Name
from penstock.server.pages import watermarks_of
from penstock.server.pools import LONG, WRITES
from penstock.server.replies import JournalEntry, Reply, problems
from penstock.server.security import Guard
from penstock.server.services import Control, Services

PAGES_MAX = 5  # of the journal per request: most placement entries are about other jobs' shards
TASKS_MAX = 1000


def decisions_of(plane: Services, job: str, *, before: int | None, limit: int) -> Decisions:
    """A page of decisions, newest first. `next` is set if there may be more, even if the page is not full."""
    view = plane.jobs.view(job)
    indices = sorted({*view.running.mapping})[:TASKS_MAX] if view.running is not None else []
    tasks = [f"{job}/{index}" for index in indices]
    shards = {str(shard_of(task, plane.settings.shards)) for task in tasks}
    places = {"shards", *(row.name for row in plane.fleet.containers())} if shards else set()
    subjects = {job, *tasks, *(f"shard {shard}" for shard in shards), *places}
    found: list[Entry] = []
    for _ in range(PAGES_MAX):
        page = plane.journal.about(subjects, before=before)
        mine = (_mine(entry, shards) if entry.subject in places else entry for entry in page)
        for entry in filter(None, mine):
            if len(found) == limit:
                return _page(job, found, found[-1].id)
            found.append(entry)
        if len(page) < ENTRIES_MAX:
            return _page(job, found, None)
        before = page[-1].id
    return _page(job, found, before)


def _page(job: str, found: list[Entry], next_: int | None) -> Decisions:
    return Decisions(job=job, decisions=[Decision.of(entry) for entry in found], next=next_)


def _mine(entry: Entry, shards: set[str]) -> Entry | None:
    """The part of a placement decision that is about these shards; None: no part."""
    named = "moves" if "moves" in entry.data else "shards"
    moved = {shard: to for shard, to in entry.data.get(named, {}).items() if shard in shards}
    return replace(entry, data={named: moved}) if moved else None


class PolicySaid(Reply):
    """One policy's answer, what became of it, and the numbers behind it."""

    policy: str
    outcome: str
    reason: str
    symptom: str
    cause: str
    confidence: float | None
    inputs: dict[str, Any]
    formula: str
    bound: str


class PolicyChange(Reply):
    """The one change of a round."""

    policy: str
    what: str
    why: str
    outcome: Literal["done", "not done", "would be done"]
    refused: str


class PolicyAlert(Reply):
    """An alert that a policy raised."""

    policy: str
    key: str
    severity: str
    text: str
    what_to_do: str


class ManagedJobReply(Reply):
    """The result of evaluating a job's policies."""

    job: str
    at_ms: int
    is_dry: bool
    change: PolicyChange | None
    said: list[PolicySaid]
    alerts: list[PolicyAlert]


class Decision(JournalEntry):
    """One decision about a job: actor, decision, reason; a decision of policies has the answer of each."""


class Decisions(Reply):
    """Decisions about a job, newest first; `next` is the `before` of the next page."""

    job: str
    decisions: list[Decision]
    next: int | None


class Readmitted(Reply):
    """The number of exclusions that were ended."""

    job: str
    lifted: int


def add_policy_routes(router: APIRouter, plane: Control, guard: Guard) -> None:
    """Routes to evaluate policies and to end exclusions."""

    @router.post("/jobs/{name}/manage", responses=problems(404, 507))
    @LONG
    def manage_job(
        name: Name, body: bodies.ManageBody, caller: Caller = guard.allow("job.manage")
    ) -> ManagedJobReply:
        """Evaluate a job's policies now; returns every answer, the change made, and changes refused."""
        plane.jobs.view(name)  # NotFound if the job does not exist
        done = plane.policies.manage(name, policy=body.policy, is_dry=body.dry_run, asked_by=caller.name)
        return ManagedJobReply(**done)

    @router.post("/jobs/{name}/readmit", responses=problems(404, 507))
    @WRITES
    def readmit_job(
        name: Name, body: bodies.ReasonBody, caller: Caller = guard.allow("job.manage")
    ) -> Readmitted:
        """End all exclusions of a job from containers. May be repeated."""
        check_line("the reason", body.why, length_max=REASON_MAX)
        plane.jobs.view(name)
        lifted = plane.policies.jobs.readmit(name, by=caller.name, why=body.why)
        plane.wake_shard_manager()
        return Readmitted(job=name, lifted=lifted)


def add_decision_routes(router: APIRouter, plane: Services, guard: Guard) -> None:
    """The route about decisions."""

    @router.get("/jobs/{name}/decisions", responses=problems(404))
    @LONG
    def list_decisions(
        name: Name, caller: Caller = guard.allow("job.read"), before: Before = None, limit: Limit = 50
    ) -> Decisions:
        """Decisions about a job with reasons, newest first: policies, scaler, layers, syncer, placement."""
        return decisions_of(plane, name, before=before, limit=limit)


JOURNAL_MAX = 50


def add_doctor_routes(router: APIRouter, plane: Control, guard: Guard) -> None:
    """The route of the doctor."""

    @router.get("/jobs/{name}/doctor", responses=problems(404))
    @LONG
    def get_doctor(name: Name, caller: Caller = guard.allow("job.read")) -> replies.ExaminationReply:
        """Diagnose a job: findings with cause, confidence and commands; causes that were ruled out."""
        return replies.ExaminationReply(**examine(gather_patient(plane, name)).to_json())


def gather_patient(plane: Control, name: str) -> Patient:
    """All facts about a job: those that its policies get, and those that only the control plane has.

    Facts of a store or bus that does not answer are left out; the doctor lists them as unknown.
    """
    view = plane.jobs.view(name)
    patient = _shown_to_policies(plane, view)
    streaming = isinstance(patient.config, StreamJob)
    writes = plane.jobs.history(name, layer="provisioner", limit=2)
    package = patient.config.package
    return replace(
        patient,
        state=view.state,
        problem=view.quarantine.reason if view.quarantine is not None else view.problem,
        starved=tuple(one for one in starved_tasks(plane.fleet.task_reports()) if one.job == name),
        journal=plane.journal.entries(subject=name, limit=JOURNAL_MAX),
        watermarks=_watermarks(plane, name) if streaming and view.running is not None else (),
        inputs=tuple(_input(plane, source.category) for source in patient.config.inputs),
        is_package_there=package is None or plane.packages.has(package.hash),
        container_memory_mb=_smallest(plane),
        user_update_ms=writes[0].at_ms if writes else None,
        last_good_version=writes[1].version if len(writes) > 1 else None,
    )


def _shown_to_policies(plane: Control, view: JobView) -> Patient:
    """The stored metrics of the last hour, and the tasks' current reports."""
    try:
        facts = plane.policies.jobs.facts_now(view.name, METRICS, MINUTES)
    except PenstockError:
        facts = plane.policies.jobs.facts_now(view.name, (), MINUTES)  # the stored metrics cannot be read
    if not isinstance(facts, NoFrame):
        return patient_of(facts)
    config = _whole(view) if view.running is None else view.running.config
    return Patient(job=view.name, at_ms=plane.clock.now_ms(), config=config, frame=facts)


def _whole(view: JobView) -> JobConfig:
    """The expected config; if the merge is not valid, a config of defaults."""
    empty = {"name": view.name, "pipeline": view.pipeline, "kind": "stateless"}
    return JobConfig.from_stored(empty) if view.expected is None else view.expected


def _input(plane: Control, category: str) -> InputFacts:
    try:
        spec = plane.log.describe(category).spec
    except NotFound:
        return InputFacts(category=category, exists=False)
    except PenstockError:
        return InputFacts(category=category, is_known=False)  # the bus does not answer
    return InputFacts(category=category, retention_ms=spec.retention_ms, lateness_ms=spec.lateness_ms)


def _watermarks(plane: Control, name: str) -> tuple[WatermarkFacts, ...] | None:
    try:
        held = watermarks_of(plane, name, None)["held_back"]
    except PenstockError:
        return None
    return tuple(
        WatermarkFacts(
            category=item["category"],
            age_s=None if item["age_ms"] is None else item["age_ms"] / 1000,
            who=item["who"],
            because=item["because"],
        )
        for item in held
    )


def _smallest(plane: Control) -> float | None:
    place = KINDS.index("memory_mb")
    sizes = [row.capacity[place] for row in plane.fleet.containers() if row.may_run and row.capacity]
    return min(sizes) if sizes and min(sizes) > 0 else None
