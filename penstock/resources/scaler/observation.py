"""What the scaler decides on, and what it may answer. Pure.

An answer carries its reason, formula, inputs and the bounds that held as data: the journal keeps them and
`penstock explain` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from penstock.core.clock import Millis
from penstock.resources.frames import Frame, NoFrame
from penstock.resources.scaler.settings import DEFAULTS, Settings
from penstock.resources.scaler.shapes import UNLIMITED, Room, Shape, TaskResources

Inputs = Mapping[str, float]
State = Literal["none", "aggregation", "join", "other"]
Outcome = Literal["pending", "worked", "ineffective", "broke_slo", "overruled", "inconclusive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinFacts:
    """A join as its plan and its config have it."""

    window_s: float  # for how long a record waits for others, at most
    created_ms: Millis = 0  # before this nothing was kept
    batch_rows_max: int = 50_000
    trigger_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Within which a job's shape must stay."""

    task_count_min: int = 1
    task_count_max: int = 32
    threads_max: int = 1  # 1: the engine gives a task one thread whatever it asks for
    container: Room = UNLIMITED  # what one container has
    set_by: str = ""  # the layer that set `task_count_max`, where it is a person's


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What is known of a job beyond its last minutes; None: not known."""

    thread_rate: float | None = None  # P, records per second one thread can sustain
    thread_rate_minute: int | None = None  # when that was learnt: an update since then makes it void
    memory_fixed_mb: float | None = None  # what a task uses however little it does


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """A job as it is set up now."""

    name: str
    shape: Shape
    limits: Limits = Limits()
    partitions: int = 0  # 0: the input is split at will
    priority: int = 0
    is_privileged: bool = False
    slo_lag_s: float = 90.0
    state: State = "none"
    join: JoinFacts | None = None
    restart_s: float = 30.0  # r, for how long a change stops it, as measured
    changed_minute: int = 0  # its tasks were last started or changed then
    updated_minute: int | None = None  # its owner last changed code or settings then
    is_changing: bool = False  # a plan is under way
    can_rebalance: bool = False  # more partitions than tasks, and the load of each partition is known


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLoads:
    """What each partition brings, in their order."""

    rates: tuple[float, ...]  # records per second that arrive
    lags: tuple[float, ...]  # records that wait

    def within(self, recovery_s: float) -> tuple[float, ...]:
        """X + B/t of each."""
        return tuple(x + b / recovery_s for x, b in zip(self.rates, self.lags, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """What the capacity manager has left for this job, quota included."""

    room: Room = UNLIMITED
    privileged_only: bool = False  # short: only privileged jobs may grow


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the rest of a pipeline says about a job's input."""

    input_rate: float = 0.0  # what the jobs above it will send once their plans are carried out
    useful_rate: float = float("inf")  # above this the jobs below it cannot follow
    bottleneck: str = ""  # the job below that sets it


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the scaler did to a job, as it was applied, and what came of it."""

    at_minute: int
    before: Shape
    after: Shape
    input_rate: float  # X at the time
    rate_before: float  # processed
    rate_expected: float  # of the shape as applied
    parallel_before: float
    outcome: Outcome = "pending"
    judged_minute: int | None = None
    rate_after: float | None = None  # processed when it was judged; None: not judged, or by an older version

    @property
    def is_rebalance(self) -> bool:
        """Whether it dealt the partitions anew, and nothing else."""
        return (self.before.task_count, self.before.task) == (
            self.after.task_count,
            self.after.task,
        ) and self.before.mapping != self.after.mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All that one decision gets."""

    job: JobFacts
    frame: Frame | NoFrame
    now_ms: Millis
    footprint: Footprint = Footprint()
    remaining: Remaining = Remaining()
    past: tuple[Action, ...] = ()  # oldest first
    demand: Demand | None = None
    settings: Settings = DEFAULTS
    by_partition: PartitionLoads | None = None  # None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What a decision found out; whoever asked keeps it."""

    thread_rate: float | None = None  # P from now on
    judged: Action | None = None  # the last action, with its outcome
    alert: str = ""


NOTHING_LEARNT = Learnt()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Nothing to do, and why; `bound` names what held it."""

    reason: str
    bound: str = ""
    formula: str = ""
    inputs: Inputs = field(default_factory=dict)
    learnt: Learnt = NOTHING_LEARNT


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Another shape, and why; `bounds` are those that kept it from what was wanted."""

    shape: Shape
    reason: str
    direction: Literal["up", "down", "undo"]
    formula: str = ""
    inputs: Inputs = field(default_factory=dict)
    bounds: tuple[str, ...] = ()
    rate_expected: float = 0.0
    learnt: Learnt = NOTHING_LEARNT

    @property
    def task_count(self) -> int:
        """How many tasks there shall be."""
        return self.shape.task_count

    @property
    def task(self) -> TaskResources:
        """What each shall get."""
        return self.shape.task


@dataclass(frozen=True, slots=True, kw_only=True)
class Untriaged:
    """A symptom whose cause more resources would not cure: an alert, never a resize."""

    reason: str
    ruled_out: tuple[str, ...]
    formula: str = ""
    inputs: Inputs = field(default_factory=dict)
    learnt: Learnt = NOTHING_LEARNT


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """Spread the partitions over the tasks anew: by partition, the task that shall read it."""

    mapping: tuple[int, ...]
    reason: str
    direction: Literal["rebalance", "undo"] = "rebalance"
    formula: str = ""
    inputs: Inputs = field(default_factory=dict)
    bounds: tuple[str, ...] = ()
    rate_expected: float = 0.0
    learnt: Learnt = NOTHING_LEARNT


Step = Resize | Rebalance
Decision = Hold | Resize | Untriaged | Rebalance


def to_data(decision: Decision) -> dict[str, Any]:
    """A decision as JSON values, for the journal."""
    data: dict[str, Any] = {
        "decision": type(decision).__name__.lower(),
        "reason": decision.reason,
        "formula": decision.formula,
        "inputs": {
            name: (value if isfinite(value) else str(value)) for name, value in decision.inputs.items()
        },
    }
    match decision:
        case Hold():
            data["bound"] = decision.bound
        case Resize():
            data["direction"] = decision.direction
            data["shape"] = decision.shape.to_data()
            data["bounds"] = list(decision.bounds)
            data["rate_expected"] = decision.rate_expected
        case Untriaged():
            data["ruled_out"] = list(decision.ruled_out)
        case Rebalance():
            data["direction"] = decision.direction
            data["partition_tasks"] = list(decision.mapping)
            data["rate_expected"] = decision.rate_expected
    if decision.learnt.thread_rate is not None:
        data["thread_rate"] = decision.learnt.thread_rate
    if decision.learnt.judged is not None:
        data["outcome_of_last"] = decision.learnt.judged.outcome
    if decision.learnt.alert:
        data["alert"] = decision.learnt.alert
    return data


def is_short_of_room(decision: Decision) -> bool:
    """Whether it would have been more if more were left in the cluster."""
    match decision:
        case Hold(bound=bound):
            return bound.startswith("capacity")
        case Resize(bounds=bounds):
            return any(bound.startswith("capacity") for bound in bounds)
    return False
