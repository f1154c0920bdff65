"""What may come in over HTTP: every body and name, with its bounds. Anything else goes no further."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field

from penstock.jobs.config import NAME_PATTERN

# What a database column holds.
INT_MAX = 2**63 - 1

# A name in a path: it may become a file's name, so it can neither climb nor hide.
Name = Annotated[str, Path(pattern=NAME_PATTERN)]
Count = Annotated[int, Field(ge=0, le=INT_MAX)]
Word = Annotated[str, Field(max_length=200)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Submit(_Body):
    """A compiled pipeline and why it is submitted."""

    compiled: dict[str, Any]
    why: str = Field(default="", max_length=2000)


class Plan(_Body):
    """A compiled pipeline to compare with what runs."""

    compiled: dict[str, Any]


class PatchLayer(_Body):
    """Dotted paths to set in one layer; null removes one."""

    changes: dict[str, Any]
    why: str = Field(default="", max_length=2000)


class NewCategory(_Body):
    """A category to create."""

    name: Word
    partitions: int = Field(ge=1, le=4096)
    columns: list[tuple[Word, Word]] = Field(min_length=1, max_length=1000)
    format: Word = "json"
    watermark: Word = "event_time"
    lateness_ms: Count = 0
    ts_column: Word = ""


class Register(_Body):
    """A container's new life."""

    incarnation: Word
    folder_id: Word


class _Strict(_Body):
    # Containers are programs of the same version: what is not exactly right is a damaged or foreign message.
    model_config = ConfigDict(strict=True)


class BeatShard(_Strict):
    """A shard as a container acknowledges it."""

    shard: Count
    epoch: Count
    state: Literal["owned", "dropping"]


class BeatTask(_Strict):
    """A task as a container reports it."""

    task_id: str
    job: str
    generation: Count
    shard: Count
    state: Word
    error: str = ""
    restarts: Count = 0
    metrics: dict[str, float] = Field(default_factory=dict)


class Beat(_Strict):
    """A heartbeat."""

    container: Word
    incarnation: Word
    sequence: Count
    acked: list[BeatShard] = Field(default_factory=list)
    assignment_version: Count = 0
    list_version: Count = 0
    tasks: list[BeatTask] = Field(default_factory=list)
    engine_ready: bool = False
    host: str = ""
    pid: Count = 0
