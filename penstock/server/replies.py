"""Reply models of the API: what its routes return, and its OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from penstock.core.journal import Entry
from penstock.db.journal_store import AuditRow
from penstock.db.tokens import TokenRow
from penstock.jobs.config import Sync
from penstock.jobs.layers import Layer, LayerRow
from penstock.jobs.provision import JobChange, SubmitAction
from penstock.jobs.syncer.sync_plan import FieldChange
from penstock.server.answers import PROBLEM
from penstock.server.bodies import JobState

# A sum that may be a whole number: 0 is sent as 0, not as 0.0.
Number = float | int


class Reply(BaseModel):
    """What a route returns. Its values are checked when it is built, and not again when it is sent."""

    model_config = ConfigDict(extra="forbid")


class ProblemReply(BaseModel):
    """An error: what failed (`title`), why (`detail`), and what to do (`fix`); RFC 9457."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(pattern="^urn:penstock:")
    title: str
    status: int
    detail: str
    fix: str


class Health(Reply):
    """The server answers."""

    status: Literal["ok"]


class LoadReply(Reply):
    """The load of a job, as the scaler measured it."""

    model_config = ConfigDict(extra="allow")


class Counts(Reply):
    """Records of a job since its state was created: read, late, late and dropped, dead letters; and records
    that wait to be read.
    """

    records: int
    late: int
    dropped: int
    dead_letters: int
    waiting: int


class TaskLine(Reply):
    """One task as its container last reported it."""

    model_config = ConfigDict(extra="allow")

    container: str
    task_id: str
    state: str


class JobLine(Reply):
    """Summary of one job."""

    name: str
    pipeline: str
    kind: str
    owner: str
    labels: dict[str, str]
    priority: int
    state: JobState
    wanted: str
    removed: bool
    expected_version: int
    generation: int
    task_count: int
    running_task_count: int
    package: dict[str, Any]
    plan: str
    problem: str
    guarantees: list[str]
    scaler: str
    load: LoadReply | None
    counts: Counts | None
    tasks: list[TaskLine]


class JobPage(Reply):
    """A page of jobs by name; `next` is the `after` of the next page."""

    jobs: list[JobLine]
    next: str | None


class LayerReply(Reply):
    """One layer of one job as written."""

    layer: str
    precedence: int
    body: dict[str, Any]
    version: int
    actor: str
    reason: str
    at_ms: int

    @classmethod
    def of(cls, row: LayerRow) -> Self:
        return cls(
            layer=row.layer,
            precedence=row.precedence,
            body=dict(row.body),
            version=row.version,
            actor=row.actor,
            reason=row.reason,
            at_ms=row.at_ms,
        )


class ProvenanceReply(Reply):
    """The layer that sets one field, by whom and why."""

    layer: str
    actor: str
    at_ms: int
    reason: str
    version: int


class Job(Reply):
    """One job with layers, merged config, load and tasks."""

    model_config = ConfigDict(extra="allow")

    name: str
    birth: str
    pipeline: str
    created_ms: int
    removed: bool
    state: JobState
    expected_version: int
    layers: list[LayerReply]
    config: dict[str, Any]
    guarantees: list[str]
    problem: str
    provenance: dict[str, ProvenanceReply]
    is_in_sync: bool
    load: LoadReply | None
    counts: Counts | None
    tasks: list[TaskLine]


class Written(Reply):
    """The job's expected version now."""

    version: int


class AppliedReply(Reply):
    """The job's expected version now, and whether it is new."""

    version: int
    created: bool


class StateReply(Reply):
    """The layer that was written, and the state in the merge of all layers."""

    version: int
    layer: str
    effective: str


class ChangedReply(Reply):
    """One path whose value differs, and how the change is synchronized."""

    path: str
    old: Any
    new: Any
    sync: Sync

    @classmethod
    def of(cls, change: FieldChange) -> Self:
        return cls(path=change.path, old=change.old, new=change.new, sync=change.sync)


class JobChangeReply(Reply):
    """What a change would do to one job; `conflict`: why it would be refused ("": it would not)."""

    job: str
    change: str
    changed: list[ChangedReply]
    restarts: list[str]
    tasks_after: int
    state_kept: bool
    reason: str
    conflict: str

    @classmethod
    def of(cls, change: JobChange) -> Self:
        return cls(
            job=change.job,
            change=change.change,
            changed=[ChangedReply.of(field) for field in change.changed],
            restarts=list(change.restarts),
            tasks_after=change.tasks_after,
            state_kept=change.state_kept,
            reason=change.reason,
            conflict=change.conflict,
        )


class Planned(Reply):
    """What would change, and the file of the other pipeline that would be replaced ("": none)."""

    changes: list[JobChangeReply]
    replaces: str


class SubmittedReply(Reply):
    """The expected version of every written job, and what was done."""

    jobs: dict[str, int]
    done: dict[str, SubmitAction]


class Layers(Reply):
    """The layers of a job at one version, lowest first."""

    version: int
    layers: list[LayerReply]


class HistoryPage(Reply):
    """Writes of layers, newest first; `next` is the `before` of the next page."""

    history: list[LayerReply]
    next: int | None


class Diff(Reply):
    """Differences of two configs."""

    changes: list[ChangedReply]


class AuditEntry(Reply):
    """Who changed what, when and why."""

    id: int
    at_ms: int
    actor: str
    role: str
    action: str
    subject: str
    reason: str
    data: dict[str, Any]

    @classmethod
    def of(cls, row: AuditRow) -> Self:
        return cls(
            id=row.id,
            at_ms=row.at_ms,
            actor=row.actor,
            role=row.role,
            action=row.action,
            subject=row.subject,
            reason=row.reason,
            data=dict(row.data),
        )


class AuditPage(Reply):
    """Changes, newest first; `next` is the `before` of the next page."""

    entries: list[AuditEntry]
    next: int | None


class LayerKind(Reply):
    """One kind of layer of the expected config."""

    name: str
    precedence: int
    writers: list[str]
    replaces_plan: bool
    fields: list[str]

    @classmethod
    def of(cls, kind: Layer) -> Self:
        return cls(
            name=kind.name,
            precedence=kind.precedence,
            writers=sorted(kind.writers),
            replaces_plan=kind.replaces_plan,
            fields=sorted(kind.fields),
        )


class LayerKinds(Reply):
    """Every kind of layer, lowest first."""

    layers: list[LayerKind]


class Token(Reply):
    """A token's metadata, without its secret."""

    id: str
    name: str
    role: str
    expires_ms: int
    issued_ms: int
    issued_by: str
    revoked_ms: int
    container: str = Field(description='The container for which it is valid; "": none, or not used yet.')

    @classmethod
    def of(cls, row: TokenRow) -> Token:
        return Token(
            id=row.id,
            name=row.name,
            role=row.role,
            expires_ms=row.expires_ms,
            issued_ms=row.issued_ms,
            issued_by=row.issued_by,
            revoked_ms=row.revoked_ms,
            container=row.container,
        )


class Tokens(Reply):
    """Every token ever issued."""

    tokens: list[Token]


class IssuedToken(Token):
    """A new token. The secret is shown only once: a repeat of the request gets null."""

    token: str | None


class JournalEntry(Reply):
    """One decision."""

    id: int
    at_ms: int
    actor: str
    kind: str
    subject: str
    decision: str
    reason: str
    data: dict[str, Any]

    @classmethod
    def of(cls, entry: Entry) -> Self:
        return cls(
            id=entry.id,
            at_ms=entry.at_ms,
            actor=entry.actor,
            kind=entry.kind,
            subject=entry.subject,
            decision=entry.decision,
            reason=entry.reason,
            data=dict(entry.data),
        )


class JournalReply(Reply):
    """Decisions, oldest first."""

    entries: list[JournalEntry]


class Status(Reply):
    """Status of all jobs, containers and loops."""

    model_config = ConfigDict(extra="allow")

    now_ms: int
    jobs: list[JobLine]
    containers: list[dict[str, Any]]
    loops: dict[str, Any]


class CategoryReply(Reply):
    """One category of the bus."""

    spec: dict[str, Any]
    birth: str
    end_offsets: list[int]
    watermark: int


class Categories(Reply):
    """Every category of the bus; `unreadable`: those that cannot be read, with the error."""

    categories: list[CategoryReply]
    unreadable: dict[str, str] = Field(default={}, exclude_if=lambda found: not found)


class Watermarks(Reply):
    """Watermarks, and what holds each back."""

    subject: str
    held_back: list[dict[str, Any]]
    categories: list[dict[str, Any]]
    intervals: list[dict[str, Any]]


class ExaminationReply(Reply):
    """The doctor's findings, the worst first; causes that were ruled out, and facts that were unavailable."""

    job: str
    is_well: bool
    findings: list[dict[str, Any]]
    ruled_out: list[str]
    not_known: list[dict[str, Any]]


class KeptStates(Reply):
    """A page of a job's state; `versions`: the version of each interval that was read."""

    job: str
    states: list[dict[str, Any]]
    versions: dict[str, int]
    next: str | None


class KeptTimers(Reply):
    """A page of a job's timers."""

    job: str
    timers: list[dict[str, Any]]
    versions: dict[str, int]
    next: str | None


class KeptState(Reply):
    """State and timers of one key."""

    job: str
    key: str
    partition: int
    version: int
    states: list[dict[str, Any]]
    timers: list[dict[str, Any]]


class PackageHash(Reply):
    """A stored package."""

    hash: str


class RegisteredReply(Reply):
    """A registered container."""

    container: str


class TaskListReply(Reply):
    """The task list, or its changes since a version."""

    model_config = ConfigDict(extra="allow")


class BeatReply(Reply):
    """The reply to a heartbeat: verdict, shards and orders."""

    model_config = ConfigDict(extra="allow")

    verdict: str
    sequence: int


class MetricLine(Reply):
    """One metric: a value per minute, null where it is unknown."""

    unit: str
    values: list[float | None]


class JobMetrics(Reply):
    """Metrics of a job by minute, oldest first."""

    job: str
    first_ms: int
    minutes: int
    metrics: dict[str, MetricLine]


class LogText(Reply):
    """The end of a container's log."""

    text: str


Responses = dict[int | str, dict[str, Any]]


# A reference: with the model in each route, building the API takes twice as long. See `describe_problems`.
_A_PROBLEM = {"$ref": f"#/components/schemas/{ProblemReply.__name__}"}


def describe_problems(description: dict[str, Any]) -> None:
    """Add the schema of problems to the OpenAPI description."""
    description["components"]["schemas"][ProblemReply.__name__] = ProblemReply.model_json_schema()


def problems(*statuses: int) -> Responses:
    """The OpenAPI description of a route's errors: those of every route, and `statuses`."""
    return {
        status: {"content": {PROBLEM: {"schema": _A_PROBLEM}}, "description": DESCRIPTIONS[status]}
        for status in sorted({*EVERY_ROUTE, *statuses})
    }


DESCRIPTIONS = {
    400: "The request has no valid Host header",
    401: "No token, or an invalid one",
    403: "The role may not do this, or the current state forbids it",
    404: "Not found",
    409: "Based on another version; the current one is in the body and in ETag",
    413: "The body is too large",
    422: "The input is not valid; nothing was changed",
    428: "If-Match is required",
    429: "Too many requests with this token",
    431: "The headers are too large",
    500: "Internal error",
    503: "The store does not answer: retry with the same Idempotency-Key",
    507: "The disk is full; nothing was written",
}
EVERY_ROUTE = (400, 401, 403, 413, 422, 429, 431, 503)
WRITING = (404, 409, 507)
