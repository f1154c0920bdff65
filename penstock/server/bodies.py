"""Request models of the API: bodies, path names, parameters and headers, each with its limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Header, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from penstock.db.tokens import ID_LENGTH
from penstock.jobs.config import NAME_PATTERN
from penstock.jobs.job_reads import STATES
from penstock.jobs.layer_writer import REASON_MAX
from penstock.jobs.text_rules import LINE_PATTERN
from penstock.streams.bus.log import AHEAD_MAX_MS, LATENESS_MS

# The limit of an integer column.
INT_MAX = 2**63 - 1
DAYS_MAX = 3650
SILENCE_S_MAX = 30 * 86_400
LINE_MAX = 100_000
PAGE_MAX = 1000

# name=value, both plain text.
LABEL_PATTERN = f"^{LINE_PATTERN.strip('^*$').replace('[^', '[^=')}+={LINE_PATTERN.strip('^$')}$"
VERSION_PATTERN = '^"(0|[1-9][0-9]{0,17})"$'
ETAG_PATTERN = f"^(\\*|{VERSION_PATTERN.strip('^$')})$"
KEY_PATTERN, KEY_LENGTH_MAX = "^[!-~]+$", 200

# A name in a path. It may become a file name, so it has no slash and no leading dot.
Name = Annotated[str, Path(pattern=NAME_PATTERN)]
TokenId = Annotated[str, Path(pattern=f"^[0-9a-f]{{{ID_LENGTH}}}$")]
Count = Annotated[int, Field(ge=0, le=INT_MAX)]
Word = Annotated[str, Field(max_length=200, pattern=LINE_PATTERN)]
Line = Annotated[str, Field(max_length=LINE_MAX)]
Reason = Annotated[str, Field(max_length=REASON_MAX, pattern=LINE_PATTERN)]
NameText = Annotated[str, Field(pattern=NAME_PATTERN)]
NamePattern = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_.*?\-]{1,200}$", description="A name; `*` and `?` are wildcards."),
]

# Headers.
Key = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=KEY_LENGTH_MAX,
        pattern=KEY_PATTERN,
        description="Idempotency key: a repeated request gets the first response and changes nothing.",
    ),
]
IfMatch = Annotated[
    str | None,
    Header(
        max_length=200,
        pattern=ETAG_PATTERN,
        description="The ETag that the change is based on; without it, or with `*`, any version.",
    ),
]
IfVersion = Annotated[
    str | None,
    Header(alias="If-Match", max_length=200, pattern=VERSION_PATTERN, description="The ETag it is based on."),
]
IfNew = Annotated[
    str | None,
    Header(alias="If-None-Match", max_length=10, pattern=r"^\*$", description="Only if it does not exist."),
]
IfOther = Annotated[
    str | None,
    Header(
        alias="If-None-Match",
        max_length=200,
        pattern=VERSION_PATTERN,
        description="The ETag that the caller has: answer only if it has changed.",
    ),
]

# Parameters.
Since = Annotated[int, Query(ge=0, le=INT_MAX)]
Before = Annotated[int | None, Query(ge=1, le=INT_MAX)]
Version = Annotated[int | None, Query(ge=0, le=INT_MAX)]
Limit = Annotated[int, Query(ge=1, le=PAGE_MAX)]
Subject = Annotated[str | None, Query(min_length=1, max_length=500, pattern=LINE_PATTERN)]
NameQuery = Annotated[str | None, Query(pattern=NAME_PATTERN)]
WhyQuery = Annotated[str, Query(max_length=REASON_MAX, pattern=LINE_PATTERN, description="The reason.")]
Labels = Annotated[
    list[Annotated[str, Field(max_length=500, pattern=LABEL_PATTERN)]] | None,
    Query(max_length=20, description="name=value; repeat it for several"),
]
DesiredState = Literal["running", "paused", "stopped"]
JobState = Literal[STATES]  # type: ignore[valid-type]
Role = Literal["admin", "container", "developer", "oncall", "reader", "scaler"]


class _RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class SubmitBody(_RequestBody):
    """A compiled pipeline and why it is submitted."""

    compiled: dict[str, Any]
    why: Reason = ""


class PlanBody(_RequestBody):
    """A compiled pipeline to compare with what runs."""

    compiled: dict[str, Any]


class ApplyBody(_RequestBody):
    """The whole provisioner layer of one job."""

    config: dict[str, Any]
    why: Reason = ""


class PlanJobBody(_RequestBody):
    """A provisioner layer to compare with what runs."""

    config: dict[str, Any]


class SetStateBody(_RequestBody):
    """The state that a job should have."""

    state: DesiredState
    layer: NameText | None = Field(
        default=None, description="The layer to write; default: the caller's own layer."
    )
    why: Reason = ""


class ReasonBody(_RequestBody):
    """The reason of a change."""

    why: Reason = ""


class ManageBody(_RequestBody):
    """Which policy is evaluated, and whether it may change anything."""

    policy: NameText | None = Field(default=None, description="Default: every policy of the job.")
    dry_run: Annotated[bool, Field(strict=True)] = False


class MoveShardBody(_RequestBody):
    """The container to which a shard is moved."""

    container: NameText
    why: Reason = ""


class PutLayerBody(_RequestBody):
    """One whole layer."""

    body: dict[str, Any]
    why: Reason = ""


class PatchLayerBody(_RequestBody):
    """Dotted paths to set in one layer; null removes one."""

    changes: dict[str, Any]
    why: Reason = ""


class RollbackBody(_RequestBody):
    """The version of the job whose layer is restored."""

    to_version: Annotated[int, Field(ge=0, le=INT_MAX, strict=True)]
    why: Reason = ""


class NewLayerBody(_RequestBody):
    """A kind of layer for a component of the user's own."""

    name: NameText
    precedence: Annotated[int, Field(ge=-1_000_000, le=1_000_000, strict=True)]
    writers: list[Role] = Field(min_length=1, max_length=6)
    replaces_plan: Annotated[bool, Field(strict=True)] = False
    fields: list[NameText] = Field(
        default=[], max_length=100, description="Default: every field that its writers may set."
    )
    why: Reason = ""


class NewSilenceBody(_RequestBody):
    """A silence: the alarms for which no notice is sent, for how long, and why."""

    job: NamePattern
    kind: NamePattern = "*"
    severity: Literal["info", "warning", "critical"] = Field(
        default="critical",
        description="The worst severity that is silenced; worse alarms send notices.",
    )
    for_s: Annotated[int, Field(ge=1, le=SILENCE_S_MAX, strict=True)]
    why: Reason = ""


class NewTokenBody(_RequestBody):
    """A token to issue."""

    name: NameText
    role: Role
    days: Annotated[int, Field(ge=1, le=DAYS_MAX, strict=True)] = 365
    why: Reason = ""


class NewCategoryBody(_RequestBody):
    """A category to create."""

    name: Word
    partitions: Annotated[int, Field(ge=1, le=4096, strict=True)]
    columns: list[tuple[Word, Word]] = Field(min_length=1, max_length=1000)
    format: Word = "json"
    watermark: Word = "event_time"
    lateness_ms: Annotated[Count, Field(strict=True)] = LATENESS_MS
    retention_ms: Annotated[Count, Field(strict=True)] = 0
    ts_column: Word = ""
    headers: Annotated[bool, Field(strict=True)] = False
    idle_after_ms: Annotated[Count, Field(strict=True)] = 0
    ahead_max_ms: Annotated[Count, Field(strict=True)] = AHEAD_MAX_MS


class RegisterBody(_RequestBody):
    """A new incarnation of a container."""

    incarnation: Word
    folder_id: Word


class DeadBody(_RequestBody):
    """The folder id of a container that ended; only its host knows it."""

    folder_id: Word
