"""What may come in over HTTP: every body, name, parameter and header, with its bounds; nothing else does."""

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

# What a database column holds.
INT_MAX = 2**63 - 1
DAYS_MAX = 3650
SILENCE_S_MAX = 30 * 86_400
LINE_MAX = 100_000
PAGE_MAX = 1000

# A line of plain text around an equals sign.
LABEL_PATTERN = f"^{LINE_PATTERN.strip('^*$').replace('[^', '[^=')}+={LINE_PATTERN.strip('^$')}$"
VERSION_PATTERN = '^"(0|[1-9][0-9]{0,17})"$'
ETAG_PATTERN = f"^(\\*|{VERSION_PATTERN.strip('^$')})$"
KEY_PATTERN, KEY_LENGTH_MAX = "^[!-~]+$", 200

# A name in a path: it may become a file's name, so it can neither climb nor hide.
Name = Annotated[str, Path(pattern=NAME_PATTERN)]
TokenId = Annotated[str, Path(pattern=f"^[0-9a-f]{{{ID_LENGTH}}}$")]
Count = Annotated[int, Field(ge=0, le=INT_MAX)]
Word = Annotated[str, Field(max_length=200, pattern=LINE_PATTERN)]
Line = Annotated[str, Field(max_length=LINE_MAX)]
Reason = Annotated[str, Field(max_length=REASON_MAX, pattern=LINE_PATTERN)]
NameText = Annotated[str, Field(pattern=NAME_PATTERN)]
NamePattern = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_.*?\-]{1,200}$", description="A name; `*` and `?` stand for any letters."),
]

# Headers.
Key = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=KEY_LENGTH_MAX,
        pattern=KEY_PATTERN,
        description="Names this request: a repeat of it gets the first answer and changes nothing.",
    ),
]
IfMatch = Annotated[
    str | None,
    Header(
        max_length=200,
        pattern=ETAG_PATTERN,
        description="The ETag that the change was decided on; without it, or with `*`, whatever there is.",
    ),
]
IfVersion = Annotated[
    str | None,
    Header(
        alias="If-Match", max_length=200, pattern=VERSION_PATTERN, description="The ETag it was decided on."
    ),
]
IfNew = Annotated[
    str | None,
    Header(alias="If-None-Match", max_length=10, pattern=r"^\*$", description="Only if there is none yet."),
]
IfOther = Annotated[
    str | None,
    Header(
        alias="If-None-Match",
        max_length=200,
        pattern=VERSION_PATTERN,
        description="The ETag of what is known: only if it is another now.",
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


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class SubmitBody(_Body):
    """A compiled pipeline and why it is submitted."""

    compiled: dict[str, Any]
    why: Reason = ""


class PlanBody(_Body):
    """A compiled pipeline to compare with what runs."""

    compiled: dict[str, Any]


class ApplyBody(_Body):
    """The provisioner layer of one job, whole."""

    config: dict[str, Any]
    why: Reason = ""


class PlanJobBody(_Body):
    """A provisioner layer to compare with what runs."""

    config: dict[str, Any]


class SetStateBody(_Body):
    """What a job should do."""

    state: DesiredState
    layer: NameText | None = Field(default=None, description="By whose word; none: the caller's own layer.")
    why: Reason = ""


class ReasonBody(_Body):
    """Why."""

    why: Reason = ""


class ManageBody(_Body):
    """Which policy looks, and whether it may do anything."""

    policy: NameText | None = Field(default=None, description="None: every policy of the job.")
    dry_run: Annotated[bool, Field(strict=True)] = False


class MoveShardBody(_Body):
    """Where a shard should go."""

    container: NameText
    why: Reason = ""


class PutLayerBody(_Body):
    """One layer, whole."""

    body: dict[str, Any]
    why: Reason = ""


class PatchLayerBody(_Body):
    """Dotted paths to set in one layer; null removes one."""

    changes: dict[str, Any]
    why: Reason = ""


class RollbackBody(_Body):
    """The version of the job at which the layer was as it should be again."""

    to_version: Annotated[int, Field(ge=0, le=INT_MAX, strict=True)]
    why: Reason = ""


class NewLayerBody(_Body):
    """A layer for a component of its own."""

    name: NameText
    precedence: Annotated[int, Field(ge=-1_000_000, le=1_000_000, strict=True)]
    writers: list[Role] = Field(min_length=1, max_length=6)
    replaces_plan: Annotated[bool, Field(strict=True)] = False
    fields: list[NameText] = Field(
        default=[], max_length=100, description="None: every field that its writers may set."
    )
    why: Reason = ""


class NewSilenceBody(_Body):
    """Which alarms nobody is told of, for how long, and why."""

    job: NamePattern
    kind: NamePattern = "*"
    severity: Literal["info", "warning", "critical"] = Field(
        default="critical", description="Worse ones are told all the same."
    )
    for_s: Annotated[int, Field(ge=1, le=SILENCE_S_MAX, strict=True)]
    why: Reason = ""


class NewTokenBody(_Body):
    """A token to issue."""

    name: NameText
    role: Role
    days: Annotated[int, Field(ge=1, le=DAYS_MAX, strict=True)] = 365
    why: Reason = ""


class NewCategoryBody(_Body):
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


class RegisterBody(_Body):
    """A container's new life."""

    incarnation: Word
    folder_id: Word


class DeadBody(_Body):
    """The folder of a container that ended: only its host knows the id."""

    folder_id: Word
