"""What goes out over HTTP about containers, shards and tasks. Tests compare it with the answers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.web.replies import TaskLine


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ContainerLine(_Reply):
    """One container as last heard."""

    name: str
    state: Literal["live", "withheld", "gone", "dead"]
    ready: bool
    cordoned: bool
    draining: bool
    shards: int
    tasks: int
    capacity: dict[str, float]
    region: str
    host: str
    pid: int
    incarnation: str
    registered_ms: int
    seen_ms: int
    list_version: int
    lending: str


class Containers(_Reply):
    """Every container ever heard of."""

    containers: list[ContainerLine]


class ShardLine(_Reply):
    """One shard's record, and how many tasks fall into it."""

    shard: int
    container: str | None
    state: Literal["owned", "dropping", "unowned"]
    target: str | None
    epoch: int
    tasks: int
    blame: int
    quarantined: bool


class Shards(_Reply):
    """Shards by their numbers."""

    shards: list[ShardLine]


class ShardMoved(_Reply):
    """One decision about a shard."""

    at_ms: int
    actor: str
    decision: str
    reason: str


class ShardPage(ShardLine):
    """One shard, and why it is where it is; `outlook`: what the next look at placement would do with it."""

    task_ids: list[str]
    load: dict[str, float]
    history: list[ShardMoved]
    outlook: str


class TaskReportLine(TaskLine):
    """One task, wherever it is; `unreported`: it should be there, and nobody says anything of it."""

    job: str
    index: int
    generation: int
    shard: int
    error: str
    restarts: int
    metrics: dict[str, float]


class TaskReports(_Reply):
    """Tasks by job and index."""

    tasks: list[TaskReportLine]


class TaskLog(_Reply):
    """Some of what a task printed; `place` is where it ends, `is_gap`: what came before is gone."""

    task_id: str
    container: str
    text: str
    place: str
    is_gap: bool


class Restarting(_Reply):
    """A task that was asked to restart, and where."""

    task_id: str
    container: str


class Buried(_Reply):
    """Whether a container was taken for alive until now."""

    is_news: bool


class Installation(_Reply):
    """What a container must know to join."""

    profile: str
    bus: str
    rows: str
    rows_identity: str
    store: str
    host: str
    container: str = Field(description="The only one that the caller's token speaks for; none: any.")
