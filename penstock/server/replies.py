"""What goes out over HTTP, for the API's description of itself. Tests compare it with the answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.server.answers import PROBLEM
from penstock.server.bodies import JobState


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ProblemReply(BaseModel):
    """What is wrong, why, and what to do about it (RFC 9457)."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(pattern="^urn:penstock:")
    title: str
    status: int
    detail: str
    fix: str


class Health(_Reply):
    """Something answers."""

    status: Literal["ok"]


class LoadReply(_Reply):
    """What a job was seen doing."""

    model_config = ConfigDict(extra="allow")


class Counts(_Reply):
    """Records of a job since its state began: read, flagged late, late and in no result, dead letters; and
    those that wait to be read.
    """

    records: int
    late: int
    dropped: int
    dead_letters: int
    waiting: int


class TaskLine(_Reply):
    """One task as its container last saw it."""

    model_config = ConfigDict(extra="allow")

    container: str
    task_id: str
    state: str


class JobLine(_Reply):
    """One job, shortly."""

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
    """Some jobs by name, and after which name the next page begins."""

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
    """Who decided one field."""

    layer: str
    actor: str
    at_ms: int
    reason: str
    version: int


class Job(_Reply):
    """One job, whole."""

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
    """Which layer asks for the state, and what the layers together ask for."""

    version: int
    layer: str
    effective: str


class ChangedReply(_Reply):
    """One path whose value differs, and what that costs."""

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
    """What would change, and the other file whose pipeline would be replaced ("": none)."""

    changes: list[JobChangeReply]
    replaces: str


class SubmittedReply(_Reply):
    """The expected version of every job written, and what was done to it."""

    jobs: dict[str, int]
    done: dict[str, Literal["created", "updated", "unchanged", "reset", "stopped"]]


class Layers(_Reply):
    """The layers of a job at one version, lowest first."""

    version: int
    layers: list[LayerReply]


class HistoryPage(_Reply):
    """Writes of layers, newest first, and before which version the next page begins."""

    history: list[LayerReply]
    next: int | None


class Diff(_Reply):
    """What differs."""

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
    """Changes, newest first, and before which id the next page begins."""

    entries: list[AuditEntry]
    next: int | None


class LayerKind(_Reply):
    """One level of the expected config."""

    name: str
    precedence: int
    writers: list[str]
    replaces_plan: bool
    fields: list[str]


class LayerKinds(_Reply):
    """Every layer there is, lowest first."""

    layers: list[LayerKind]


class Token(_Reply):
    """What is known of a token; not the token."""

    id: str
    name: str
    role: str
    expires_ms: int
    issued_ms: int
    issued_by: str
    revoked_ms: int
    container: str = Field(
        description="The only one that it speaks for; none: no container, or not used yet."
    )


class Tokens(_Reply):
    """Every token ever issued."""

    tokens: list[Token]


class IssuedToken(Token):
    """A new token. It is seen this once: a repeat of the request gets null in its place."""

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
    """Everything the live table shows."""

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
    """Every category of the bus; `unreadable`: those that cannot be read, and why."""

    categories: list[CategoryReply]
    unreadable: dict[str, str] = {}


class Watermarks(_Reply):
    """How far what runs is, and who holds it back."""

    subject: str
    held_back: list[dict[str, Any]]
    categories: list[dict[str, Any]]
    intervals: list[dict[str, Any]]


class ExaminationReply(_Reply):
    """What the doctor found, the worst first; what was ruled out, and what could not be looked at."""

    job: str
    is_well: bool
    findings: list[dict[str, Any]]
    ruled_out: list[str]
    not_known: list[dict[str, Any]]


class KeptStates(_Reply):
    """Some of what a job keeps; `versions`: of which version of each interval it is."""

    job: str
    states: list[dict[str, Any]]
    versions: dict[str, int]
    next: str | None


class KeptTimers(_Reply):
    """Some of a job's timers."""

    job: str
    timers: list[dict[str, Any]]
    versions: dict[str, int]
    next: str | None


class KeptState(_Reply):
    """What a job keeps for one key."""

    job: str
    key: str
    partition: int
    version: int
    states: list[dict[str, Any]]
    timers: list[dict[str, Any]]


class PackageHash(_Reply):
    """A package that is here."""

    hash: str


class RegisteredReply(_Reply):
    """A container that is known now."""

    container: str


class TaskListReply(_Reply):
    """The task list, or what changed in it."""

    model_config = ConfigDict(extra="allow")


class BeatReply(_Reply):
    """What a container should know and do."""

    model_config = ConfigDict(extra="allow")

    verdict: str
    sequence: int


class MetricLine(_Reply):
    """One metric: a number per minute, null where it is unknown."""

    unit: str
    values: list[float | None]


class JobMetrics(_Reply):
    """What a job did, minute by minute, oldest first."""

    job: str
    first_ms: int
    minutes: int
    metrics: dict[str, MetricLine]


class LogText(_Reply):
    """The end of a container's log."""

    text: str


Responses = dict[int | str, dict[str, Any]]


# By name: with a model in each, building the API takes twice as long. `describe_problems` says what it is.
_A_PROBLEM = {"$ref": f"#/components/schemas/{ProblemReply.__name__}"}


def describe_problems(description: dict[str, Any]) -> None:
    """Add what every refusal looks like to a description of the API."""
    description["components"]["schemas"][ProblemReply.__name__] = ProblemReply.model_json_schema()


def problems(*statuses: int) -> Responses:
    """How a route's refusals are described; each may refuse the token, the role, the input, the rate."""
    return {
        status: {"content": {PROBLEM: {"schema": _A_PROBLEM}}, "description": DESCRIPTIONS[status]}
        for status in sorted({*EVERY_ROUTE, *statuses})
    }


DESCRIPTIONS = {
    400: "The request does not say which host it is for",
    401: "No token, or a bad one",
    403: "The role may not do this, or the state of things forbids it",
    404: "Nothing of that name",
    409: "Decided on another version; the current one is inside and in ETag",
    413: "The body is too large",
    422: "The input is not valid; nothing was changed",
    428: "If-Match is needed here",
    429: "Too many requests of this token",
    431: "The headers are too large",
    500: "A bug",
    503: "The store does not answer: try again, with the same Idempotency-Key",
    507: "No room left; nothing was half-written",
}
EVERY_ROUTE = (400, 401, 403, 413, 422, 429, 431, 503)
WRITING = (404, 409, 507)
