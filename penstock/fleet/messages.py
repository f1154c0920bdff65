"""What containers and the Shard Manager say to each other. Levels, not edges: each message is whole.

Pure: values only, with their JSON form for the wire. Reading it back, fields that are not known are left out:
the other side may be newer. A field of another type, or one that is missing, is a ValueError.
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
CLASSES_MAX = 16  # of one task: a report goes out with every beat

_MEMORY = re.compile(r"\b(?:out of memory|OutOfMemoryError|MemoryError|oom[- ]kill)", re.IGNORECASE)
_SPARK = re.compile(r"\[([A-Z][A-Z0-9_.]{2,79})\]")
_NAMED = re.compile(
    r"\b([A-Z]\w{2,60}(?:Error|Exception|Expired|Problem|Failed|Lost|Conflict|Unavailable))\b"
)
_SIGNAL = re.compile(r"\bended by (SIG[A-Z0-9]+)")
_WHY = "Why: "  # how our own errors begin their reason
_CODE = re.compile(r"\bended with code (\d+)")


def failure_class(error: str) -> str:
    """A name for people and rules: our own for memory, Spark's, an exception's, a signal's; else `Other`."""
    if _MEMORY.search(error):
        return OUT_OF_MEMORY
    for pattern in (_SPARK, _NAMED, _SIGNAL):
        if found := pattern.search(error):
            return found.group(1)
    found = _CODE.search(error)
    return f"ExitCode{found.group(1)}" if found else OTHER


def summarize_error(error: str, *, length_max: int = 300) -> str:
    """One line of an error: its first, and the reason where it names one below."""
    lines = [line.strip() for line in error.strip().splitlines()]
    if not lines:
        return ""
    why = next((line for line in lines[1:] if line.startswith(_WHY)), "")
    return " ".join(filter(None, (lines[0], why)))[:length_max]


def count_failure(counts: Mapping[str, int], error: str) -> dict[str, int]:
    """The counts with one more; what there is no room for is `Other`."""
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
    """One shard as its container is told of it. Only larger epochs are obeyed."""

    shard: int
    epoch: int
    state: ShardState = ShardState.OWNED


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """One task as its container sees it: its state and what it was seen doing."""

    task_id: str
    job: str
    generation: int
    shard: int
    state: str  # starting | running | backoff | fenced | stopping
    running_version: int = 0  # of the spec it runs: tells new code from old
    error: str = ""
    restarts: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # their names: docs/metrics.md
    failures: dict[str, int] = field(default_factory=dict)  # ended runs of it here, by class (`failures.py`)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartOrder:
    """Somebody wants this task ended and started again. Only larger numbers are obeyed."""

    task_id: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLoad:
    """What the tasks of one shard use, in the kinds of `shard_load.KINDS`."""

    shard: int
    tasks: int  # how many there were: with another number it is out of date
    load: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What a warden sends every `heartbeat_ms`."""

    container: str
    incarnation: str
    sequence: int  # grows with every beat of this incarnation; replies name the beat they answer
    acked: tuple[ShardEntry, ...] = ()  # owned: recorded at this epoch; dropping: reaped at this epoch
    assignment_version: int = 0  # the newest assignment applied
    list_version: int = 0  # the newest task list applied, everything not on it reaped
    tasks: tuple[TaskReport, ...] = ()
    loads: tuple[ShardLoad, ...] = ()  # as last averaged
    capacity: tuple[float, ...] = ()  # in the same kinds; empty: not limited
    region: str = ""
    order: int = 0  # the newest restart order obeyed
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
    """The answer to a registration. Nothing may start before the first acknowledged beat all the same."""

    term: int
    assignment_version: int
    kept: tuple[int, ...] = ()  # shards that stayed with a container that returned in time

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> RegisterReply:
        return read_message(data, RegisterReply)


class HeartbeatVerdict(StrEnum):
    """What the Shard Manager makes of a beat."""

    OK = "ok"  # the lease is extended, counted from the beat's sending
    REBOOT = "reboot"  # this incarnation is over (failed over or replaced): stop everything, register anew
    WITHHELD = "withheld"  # heard, but the lease is not extended


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    """The Shard Manager's answer: the full assignment of this container at one store version."""

    verdict: HeartbeatVerdict
    term: int
    sequence: int  # of the beat it answers
    assignment_version: int  # the store version this set was read at; older sets are ignored
    shards: tuple[ShardEntry, ...] = ()
    shard_count: int = 0
    list_version: int = 0  # the newest task list there is: fetch it if yours is older
    restarts: tuple[RestartOrder, ...] = ()  # all that this container has not said to have obeyed
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> HeartbeatReply:
        return read_message(data, HeartbeatReply)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationReply:
    """What a container must know to join."""

    profile: str
    bus: str
    rows: str
    rows_identity: str
    store: str
    host: str
    container: str = ""  # the only one that its token speaks for; "": any


def read_message(data: Any, kind: type[MessageType]) -> MessageType:
    """A message from its JSON form; ValueError if it is none of this kind."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The times of the heartbeat protocol. A container stops before the Shard Manager moves its shards."""

    heartbeat_ms: Millis
    deadline_ms: Millis  # the container stops itself: counted from the sending of the last acknowledged beat
    failover_ms: Millis  # the Shard Manager fails it over: counted from the receipt of the last beat
    engine_stale_ms: Millis = 2_000  # the engine's sign of life may be this old
    sign_of_life_ms: Millis = 500


PAPER = Profile(heartbeat_ms=10_000, deadline_ms=40_000, failover_ms=60_000)
FAST = Profile(heartbeat_ms=1_000, deadline_ms=8_000, failover_ms=12_000)
PROFILES = {"paper": PAPER, "fast": FAST}


make_known(Heartbeat, RegisterReply, HeartbeatReply, InstallationReply)
