"""Response models of the API, for its OpenAPI description. Tests compare them with real responses."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.server.answers import PROBLEM
from penstock.server.bodies import JobState


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ProblemReply(BaseModel):
    """An error: what failed (`title`), why (`detail`), and what to do (`fix`); RFC 9457."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(pattern="^urn:penstock:")
    title: str
    status: int
    detail: str
    fix: str


class Health(_Reply):
    """The server answers."""

    status: Literal["ok"]


class LoadReply(_Reply):
    """The load of a job, as the scaler measured it."""

    model_config = ConfigDict(extra="allow")


class Counts(_Reply):
    """Records of a job since its state was created: read, late, late and dropped, dead letters; and records
    that wait to be read.
    """

    records: int
    late: int
    dropped: int
    dead_letters: int
    waiting: int


class TaskLine(_Reply):
    """One task as its container last reported it."""

    model_config = ConfigDict(extra="allow")

    container: str
    task_id: str
    state: str


class JobLine(_Reply):
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


class JobPage(_Reply):
    """A page of jobs by name; `next` is the `after` of the next page."""

    jobs: list[JobLine]
    next: str | None


class LayerReply(_Reply):
    """One layer of one job as written."""

    layer: str
    precedence: int
    body: dict[str, Any]
    version: int
    actor: str
    reason: str
    at_ms: int


class ProvenanceReply(_Reply):
    """The layer that sets one field, by whom and why."""

    layer: str
    actor: str
    at_ms: int
    reason: str
    version: int


class Job(_Reply):
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


class Written(_Reply):
    """The job's expected version now."""

    version: int


class AppliedReply(_Reply):
    """The job's expected version now, and whether it is new."""

    version: int
    created: bool


class StateReply(_Reply):
    """The layer that was written, and the state in the merge of all layers."""

    version: int
    layer: str
    effective: str


class ChangedReply(_Reply):
    """One path whose value differs, and how the change is synchronized."""

    path: str
    old: Any
    new: Any
    sync: Literal["complex", "restart", "live"]


class JobChangeReply(_Reply):
    """What a change would do to one job."""

    model_config = ConfigDict(extra="allow")

    job: str
    change: str
    changed: list[ChangedReply]
    restarts: list[str]
    tasks_after: int
    state_kept: bool
    reason: str


class Planned(_Reply):
    """What would change, and the file of the other pipeline that would be replaced ("": none)."""

    changes: list[JobChangeReply]
    replaces: str


class SubmittedReply(_Reply):
    """The expected version of every written job, and what was done."""

    jobs: dict[str, int]
    done: dict[str, Literal["created", "updated", "unchanged", "reset", "stopped"]]


class Layers(_Reply):
    """The layers of a job at one version, lowest first."""

    version: int
    layers: list[LayerReply]


class HistoryPage(_Reply):
    """Writes of layers, newest first; `next` is the `before` of the next page."""

    history: list[LayerReply]
    next: int | None


class Diff(_Reply):
    """Differences of two configs."""

    changes: list[ChangedReply]


class AuditEntry(_Reply):
    """Who changed what, when and why."""

    id: int
    at_ms: int
    actor: str
    role: str
    action: str
    subject: str
    reason: str
    data: dict[str, Any]


class AuditPage(_Reply):
    """Changes, newest first; `next` is the `before` of the next page."""

    entries: list[AuditEntry]
    next: int | None


class LayerKind(_Reply):
    """One kind of layer of the expected config."""

    name: str
    precedence: int
    writers: list[str]
    replaces_plan: bool
    fields: list[str]


class LayerKinds(_Reply):
    """Every kind of layer, lowest first."""

    layers: list[LayerKind]


class Token(_Reply):
    """A token's metadata, without its secret."""

    id: str
    name: str
    role: str
    expires_ms: int
    issued_ms: int
    issued_by: str
    revoked_ms: int
    container: str = Field(description='The container for which it is valid; "": none, or not used yet.')


class Tokens(_Reply):
    """Every token ever issued."""

    tokens: list[Token]


class IssuedToken(Token):
    """A new token. The secret is shown only once: a repeat of the request gets null."""

    token: str | None


class JournalEntry(_Reply):
    """One decision."""

    id: int
    at_ms: int
    actor: str
    kind: str
    subject: str
    decision: str
    reason: str
    data: dict[str, Any]


class JournalReply(_Reply):
    """Decisions, oldest first."""

    entries: list[JournalEntry]


class Status(_Reply):
    """Status of all jobs, containers and loops."""

    model_config = ConfigDict(extra="allow")

    now_ms: int
    jobs: list[JobLine]
    containers: list[dict[str, Any]]
    loops: dict[str, Any]


class CategoryReply(_Reply):
    """One category of the bus."""

    spec: dict[str, Any]
    birth: str
    end_offsets: list[int]
    watermark: int


class Categories(_Reply):
    """Every category of the bus; `unreadable`: those that cannot be read, with the error."""

    categories: list[CategoryReply]
    unreadable: dict[str, str] = {}


class Watermarks(_Reply):
    """Watermarks, and what holds each back."""

    subject: str
    held_back: list[dict[str, Any]]
    categories: list[dict[str, Any]]
    intervals: list[dict[str, Any]]


class ExaminationReply(_Reply):
    """The doctor's findings, the worst first; causes that were ruled out, and facts that were unavailable."""

    job: str
    is_well: bool
    findings: list[dict[str, Any]]
    ruled_out: list[str]
    not_known: list[dict[str, Any]]


class KeptStates(_Reply):
    """A page of a job's state; `versions`: the version of each interval that was read."""

    job: str
    states: list[dict[str, Any]]
    versions: dict[str, int]
    next: str | None


class KeptTimers(_Reply):
    """A page of a job's timers."""

    job: str
    timers: list[dict[str, Any]]
    versions: dict[str, int]
    next: str | None


class KeptState(_Reply):
    """State and timers of one key."""

    job: str
    key: str
    partition: int
    version: int
    states: list[dict[str, Any]]
    timers: list[dict[str, Any]]


class PackageHash(_Reply):
    """A stored package."""

    hash: str


class RegisteredReply(_Reply):
    """A registered container."""

    container: str


class TaskListReply(_Reply):
    """The task list, or its changes since a version."""

    model_config = ConfigDict(extra="allow")


class BeatReply(_Reply):
    """The reply to a heartbeat: verdict, shards and orders."""

    model_config = ConfigDict(extra="allow")

    verdict: str
    sequence: int


class MetricLine(_Reply):
    """One metric: a value per minute, null where it is unknown."""

    unit: str
    values: list[float | None]


class JobMetrics(_Reply):
    """Metrics of a job by minute, oldest first."""

    job: str
    first_ms: int
    minutes: int
    metrics: dict[str, MetricLine]


class LogText(_Reply):
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
