"""The messages between containers and the Shard Manager. Each message carries the full state, not a change.

Pure: values only, with their JSON form. Unknown fields are ignored when a message is read, because the sender
may be newer. A missing field, or one of a wrong type, raises ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from penstock.core.clock import Millis
from penstock.core.text import make_known

OUT_OF_MEMORY = "OutOfMemory"
OTHER = "Other"
CLASSES_MAX = 16  # of one task: every heartbeat carries the report

_MEMORY = re.compile(r"\b(?:out of memory|OutOfMemoryError|MemoryError|oom[- ]kill)", re.IGNORECASE)
_SPARK = re.compile(r"\[([A-Z][A-Z0-9_.]{2,79})\]")
_NAMED = re.compile(
    r"\b([A-Z]\w{2,60}(?:Error|Exception|Expired|Problem|Failed|Lost|Conflict|Unavailable))\b"
)
_SIGNAL = re.compile(r"\bended by (SIG[A-Z0-9]+)")
_WHY = "Why: "  # how our own errors begin their reason
_CODE = re.compile(r"\bended with code (\d+)")


def failure_class(error: str) -> str:
    """The class of an error: `OutOfMemory`, a Spark error class, an exception, a signal, or `Other`."""
    if _MEMORY.search(error):
        return OUT_OF_MEMORY
    for pattern in (_SPARK, _NAMED, _SIGNAL):
        if found := pattern.search(error):
            return found.group(1)
    found = _CODE.search(error)
    return f"ExitCode{found.group(1)}" if found else OTHER


def summarize_error(error: str, *, length_max: int = 300) -> str:
    """An error as one line: its first line, and the reason if a later line gives one."""
    lines = [line.strip() for line in error.strip().splitlines()]
    if not lines:
        return ""
    why = next((line for line in lines[1:] if line.startswith(_WHY)), "")
    return " ".join(filter(None, (lines[0], why)))[:length_max]


def count_failure(counts: Mapping[str, int], error: str) -> dict[str, int]:
    """The counts with this failure added; classes beyond the maximum are counted as `Other`."""
    name = failure_class(error)
    if name not in counts and len(counts) >= CLASSES_MAX:
        name = OTHER
    return {**counts, name: counts.get(name, 0) + 1}


MessageType = TypeVar("MessageType")


class ShardState(StrEnum):
    """`owned`: run its tasks. `dropping`: stop them, reap them, acknowledge."""

    OWNED = "owned"
    DROPPING = "dropping"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard of a container's assignment. The container applies it only if its epoch is larger than
    before.
    """

    shard: int
    epoch: int
    state: ShardState = ShardState.OWNED


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """One task as its container reports it: state, metrics and failures."""

    task_id: str
    job: str
    generation: int
    shard: int
    state: str  # starting | running | backoff | fenced | stopping
    running_version: int = 0  # of the spec it runs: distinguishes new code from old
    error: str = ""
    restarts: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # their names: docs/metrics.md
    # Failed runs in this container, by `failure_class`
    failures: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartOrder:
    """Stop a task and start it again. The container executes an order only if its number is larger than
    before.
    """

    task_id: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLoad:
    """What the tasks of one shard use, in the kinds of `shard_load.KINDS`."""

    shard: int
    tasks: int  # the number of tasks measured: with another number the load is out of date
    load: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What a warden sends every `heartbeat_ms`."""

    container: str
    incarnation: str
    sequence: int  # grows with every heartbeat of this incarnation; a reply repeats it
    acked: tuple[ShardEntry, ...] = ()  # owned: recorded at this epoch; dropping: reaped at this epoch
    assignment_version: int = 0  # the newest assignment applied
    list_version: int = 0  # the newest task list applied; tasks that are not on it have stopped
    tasks: tuple[TaskReport, ...] = ()
    loads: tuple[ShardLoad, ...] = ()  # the last averages
    capacity: tuple[float, ...] = ()  # in the same kinds; empty: not limited
    region: str = ""
    order: int = 0  # the newest restart order executed
    engine_ready: bool = False
    host: str = ""
    pid: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Heartbeat:
        return read_message(data, Heartbeat)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterReply:
    """The reply to a registration. Tasks may start only after the first acknowledged heartbeat."""

    term: int
    assignment_version: int
    kept: tuple[int, ...] = ()  # shards that stayed with a container that returned in time

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> RegisterReply:
        return read_message(data, RegisterReply)


class HeartbeatVerdict(StrEnum):
    """What a heartbeat did to the container's lease."""

    OK = "ok"  # the lease is extended, counted from when the heartbeat was sent
    # This incarnation has ended (failed over or replaced): stop all tasks and register again
    REBOOT = "reboot"
    WITHHELD = "withheld"  # received, but the lease is not extended


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    """The reply to a heartbeat: the container's full assignment at one store version."""

    verdict: HeartbeatVerdict
    term: int
    sequence: int  # of the heartbeat it answers
    assignment_version: int  # the store version this set was read at; older sets are ignored
    shards: tuple[ShardEntry, ...] = ()
    shard_count: int = 0
    list_version: int = 0  # of the newest task list; the container fetches it if its own is older
    restarts: tuple[RestartOrder, ...] = ()  # the orders that this container has not yet reported as executed
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> HeartbeatReply:
        return read_message(data, HeartbeatReply)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationInfo:
    """What a container needs to know to join."""

    profile: str
    bus: str
    rows: str
    rows_identity: str
    store: str
    host: str
    container: str = ""  # the container that the token belongs to; "": any


def read_message(data: Any, kind: type[MessageType]) -> MessageType:
    """Read a message of this kind from its JSON form; ValueError if it does not match."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The times of the heartbeat protocol. A container stops before the Shard Manager moves its shards."""

    heartbeat_ms: Millis
    deadline_ms: (
        Millis  # the container stops itself: counted from when its last acknowledged heartbeat was sent
    )
    failover_ms: Millis  # the Shard Manager fails it over: counted from when it received the last heartbeat
    engine_stale_ms: Millis = 2_000  # maximum age of the engine's sign of life
    sign_of_life_ms: Millis = 500


PAPER = Profile(heartbeat_ms=10_000, deadline_ms=40_000, failover_ms=60_000)
FAST = Profile(heartbeat_ms=1_000, deadline_ms=8_000, failover_ms=12_000)
PROFILES = {"paper": PAPER, "fast": FAST}


make_known(Heartbeat, RegisterReply, HeartbeatReply, InstallationInfo)
