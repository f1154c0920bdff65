"""The scaler's input (`Observation`) and its possible decisions. Pure.

A decision carries its reason, formula, inputs and bounds as data: they are journaled, and `penstock explain`
shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from dataclasses import replace as with_changes
from math import ceil, inf, isfinite
from typing import Any, Literal

import msgspec

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError
from penstock.jobs.tasks import map_partitions
from penstock.scaling.metrics.frames import MINUTE_MS, Frame, NoFrame

Generation = Literal["reactive", "proactive", "preactive"]

DAY_MIN = 1440
# Smallest and largest value of each setting.
RANGES = {
    "window_min": (1, 60),
    "settle_min": (0, 60),
    "stale_min": (1, 60),
    "recovery_s": (1, 30 * 86_400),
    "target": (0.05, 0.95),
    "up_at": (0.1, 1.0),
    "down_after_min": (1, 14 * DAY_MIN),
    "reactive_quiet_min": (1, 14 * DAY_MIN),
    "reactive_step": (0.01, 10),
    "saving_min": (0.01, 0.9),
    "resource_saving_min": (0.01, 0.9),
    "imbalance_at": (0.05, 10),
    "memory_soft": (0.3, 0.99),
    "headroom": (1.0, 3.0),
    "oom_factor": (1.05, 4.0),
    "vertical_share": (0.01, 1.0),
    "update_recent_min": (0, 14 * DAY_MIN),
    "slower_at": (0.05, 0.95),
    "history_hours": (0.25, 24),
    "history_days_min": (1, 14),
    "unlike_at": (0.01, 5),
    "judge_after_min": (1, 240),
    "observe_min": (1, 14 * DAY_MIN),
    "effective_at": (0.0, 0.9),
    "remember_min": (1, 30 * DAY_MIN),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionSettings:
    """Parameters of decisions about a job. Minutes end in `_min`; shares are from 0 to 1."""

    generation: Generation = "preactive"
    window_min: int = 5  # the newest minutes, which decisions are based on
    settle_min: int = 1  # minutes ignored after a change of the tasks
    stale_min: int = 3  # older metrics are not used
    recovery_s: float = 1800.0  # t, the time within which a backlog should be processed
    target: float = 0.7  # a new shape is used to at most this share
    up_at: float = 0.85  # above this share a job is scaled up
    down_after_min: int = 60  # how long a smaller shape must have been enough before scaling down
    reactive_quiet_min: int = DAY_MIN  # minutes without lag and OOM before going down (Algorithm 2, line 10)
    reactive_step: float = 0.5
    saving_min: float = 0.1  # share of the threads: a smaller saving is not worth a restart
    resource_saving_min: float = 0.3  # the same for cpu or memory alone
    imbalance_at: float = 0.5  # standard deviation over mean
    memory_soft: float = 0.9  # share of the reserved memory above which more is reserved
    headroom: float = 1.2  # reserved over estimated
    oom_factor: float = 1.5
    vertical_share: float = 0.2  # of a container: no task is larger (Turbine V-E)
    update_recent_min: int = 60
    slower_at: float = 0.5  # a thread below this share of P has a problem other than load
    history_hours: float = (
        4.0  # x, the hours ahead for which a smaller shape must have been enough in the past
    )
    history_days_min: int = 3  # fewer known days are no pattern
    unlike_at: float = 0.2  # if the last 30 minutes differ by more from past days, these are not used
    judge_after_min: int = 5  # minutes before the effect of a step up is judged
    observe_min: int = 60  # an SLO breach within this time after a step down is attributed to it
    effective_at: float = 0.1  # below this share of the expected gain a step up did not help
    remember_min: int = 360  # for how long a bad outcome prevents the same step

    def __post_init__(self) -> None:
        if self.generation not in ("reactive", "proactive", "preactive"):
            raise _refused("generation", self.generation, "reactive, proactive or preactive")
        for part in fields(self):
            if part.name in RANGES:
                low, high = RANGES[part.name]
                value = getattr(self, part.name)
                if not (isinstance(value, int | float) and isfinite(value) and low <= value <= high):
                    raise _refused(part.name, value, f"a number from {low:g} to {high:g}")
        if self.target >= self.up_at:
            raise _refused("target", self.target, f"below up_at, which is {self.up_at:g}")
        if self.memory_soft * self.headroom < 1:
            raise _refused("headroom", self.headroom, f"at least {1 / self.memory_soft:.2f}, 1 / memory_soft")


def _refused(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(
        f"the scaler setting {name} is {value!r}",
        why=f"it must be {wanted}",
        fix=f"set {name} to {wanted}",
    )


DEFAULTS = DecisionSettings()


KINDS = ("cpu", "memory_mb", "disk_mb", "network_mbps")
# Tolerance for rounding errors.
TINY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResources:
    """Threads and resources of each task of a job."""

    threads: int = 1  # k
    cpu: float = 1.0
    memory_mb: float = 512.0
    disk_mb: float = 0.0  # 0: none is reserved
    network_mbps: float = 0.0  # megabits per second; 0: none is reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """A number of tasks, the resources of each, and the partition mapping."""

    task_count: int  # n
    task: TaskResources
    mapping: tuple[int, ...] | None = None  # by partition, the task that reads it; None: spread evenly

    def total(self, kind: str) -> float:
        """The amount of one resource that all tasks together reserve."""
        amount: float = getattr(self.task, kind)
        return self.task_count * amount

    def to_data(self) -> dict[str, float]:
        """For the journal."""
        return {
            "task_count": self.task_count,
            "threads": self.task.threads,
            "cpu": self.task.cpu,
            "memory_mb": self.task.memory_mb,
            "disk_mb": self.task.disk_mb,
            "network_mbps": self.task.network_mbps,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableResources:
    """The amount of each resource that is available; infinite if it is not limited."""

    cpu: float = inf
    memory_mb: float = inf
    disk_mb: float = inf
    network_mbps: float = inf


UNLIMITED = AvailableResources()


def mapping_of(shape: JobShape, partitions: int) -> tuple[int, ...]:
    """By partition, the task that reads it."""
    return shape.mapping if shape.mapping is not None else map_partitions(partitions, shape.task_count)


def with_mapping(shape: JobShape, mapping: tuple[int, ...]) -> JobShape:
    """The shape with this mapping; an even mapping is stored as None."""
    is_even = mapping == map_partitions(len(mapping), shape.task_count)
    return replace(shape, mapping=None if is_even else mapping)


def busiest_partitions(task_count: int, partitions: int) -> int:
    """The number of partitions of the task with most of them."""
    return -(-partitions // task_count)


def share_of_busiest(task_count: int, partitions: int) -> float:
    """The share of the work of the task with most partitions. Partitions 0: work can be split freely."""
    if partitions <= 0:
        return 1.0 / task_count
    return busiest_partitions(task_count, partitions) / partitions


def parallel(task_count: int, threads: int, partitions: int) -> float:
    """The effective number of threads of a job, n * k at most."""
    if partitions <= 0:
        return float(task_count * threads)
    rounds = -(-busiest_partitions(task_count, partitions) // threads)
    return partitions / rounds


def at_work(task_count: int, threads: int, partitions: int) -> float:
    """The mean number of threads that work while all tasks are busy: not every round of a task fills all."""
    if threads == 1 or partitions <= 0:
        return float(task_count * threads)
    held, more = divmod(partitions, task_count)
    rounds = more * -(-(held + 1) // threads) + (task_count - more) * -(-held // threads)
    return task_count * partitions / rounds


def rounds_for(wanted: float, partitions: int) -> int:
    """How many partitions per thread give `wanted` effective threads at least; 0: not possible."""
    if wanted <= 0 or not isfinite(partitions / wanted):
        return partitions
    return min(partitions, int(partitions / wanted + TINY))


def threads_for(wanted: float, *, task_count: int, partitions: int) -> int | None:
    """The fewest threads per task that give `wanted` effective threads; None if no number does."""
    if partitions <= 0:
        return max(1, ceil(wanted / task_count - TINY))
    rounds = rounds_for(wanted, partitions)
    return -(-busiest_partitions(task_count, partitions) // rounds) if rounds else None


def tasks_for(wanted: float, *, threads: int, partitions: int) -> int | None:
    """The fewest tasks that give `wanted` effective threads; None if no number does."""
    if partitions <= 0:
        return max(1, ceil(wanted / threads - TINY))
    rounds = rounds_for(wanted, partitions)
    return max(1, -(-partitions // (rounds * threads))) if rounds else None


def align(task_count: int, partitions: int) -> int:
    """The fewest tasks with the same largest number of partitions per task as `task_count` has."""
    if partitions <= 0:
        return task_count
    return -(-partitions // busiest_partitions(min(task_count, partitions), partitions))


def next_below(task_count: int, partitions: int) -> int:
    """The next smaller aligned number of tasks; 0 if there is none."""
    if partitions <= 0 or task_count <= 1:
        return task_count - 1
    return min(task_count - 1, -(-partitions // (busiest_partitions(task_count, partitions) + 1)))


Inputs = Mapping[str, float]
State = Literal["none", "aggregation", "join", "other"]
Outcome = Literal["pending", "worked", "ineffective", "broke_slo", "overruled", "inconclusive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinFacts:
    """A join's parameters from its plan and config."""

    window_s: float  # the longest time for which a record is stored to be joined
    created_ms: Millis = 0  # before this the join had no state
    batch_rows_max: int = 50_000
    trigger_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeLimits:
    """Limits of a job's shape."""

    task_count_min: int = 1
    task_count_max: int = 32
    threads_max: int = 1  # 1: the engine ignores `threads`
    container: AvailableResources = UNLIMITED  # resources of one container
    set_by: str = ""  # "oncall" if that layer sets `task_count_max`


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Measured properties of a job that do not come from its last minutes; None: not known."""

    thread_rate: float | None = None  # P, records per second one thread can sustain
    thread_rate_minute: int | None = None  # minute of the measurement; an update since then invalidates it
    memory_fixed_mb: float | None = None  # memory of a task without load


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerJobFacts:
    """A job's setup now, as the scaler needs it."""

    name: str
    shape: JobShape
    limits: ShapeLimits = ShapeLimits()
    partitions: int = 0  # 0: the input can be split freely
    priority: int = 0
    is_privileged: bool = False
    slo_lag_s: float = 90.0
    state: State = "none"
    join: JoinFacts | None = None
    restart_s: float = 30.0  # r, measured downtime of a change
    changed_minute: int = 0  # minute of the last start or change of its tasks
    updated_minute: int | None = None  # minute of its owner's last change of code or settings
    is_changing: bool = False  # a plan is in progress
    can_rebalance: bool = False  # more partitions than tasks, and the load of each partition is known


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLoads:
    """The load of each partition, in order."""

    rates: tuple[float, ...]  # arriving records per second
    lags: tuple[float, ...]  # unread records

    def within(self, recovery_s: float) -> tuple[float, ...]:
        """X + B/t of each."""
        return tuple(x + b / recovery_s for x, b in zip(self.rates, self.lags, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """The capacity that is left for this job, quota included."""

    room: AvailableResources = UNLIMITED
    privileged_only: bool = False  # capacity is short: only privileged jobs may grow


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand of the rest of a pipeline on a job."""

    input_rate: float = 0.0  # what upstream jobs will send after their own decisions
    useful_rate: float = float("inf")  # the largest rate that downstream jobs can process
    bottleneck: str = ""  # the downstream job that limits it


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingAction:
    """An applied change of a job's shape, and its outcome."""

    at_minute: int
    before: JobShape
    after: JobShape
    input_rate: float  # X at the time
    rate_before: float  # processed
    rate_expected: float  # of the shape as applied
    parallel_before: float
    outcome: Outcome = "pending"
    judged_minute: int | None = None
    rate_after: float | None = None  # processed when it was judged; None: not judged, or by an old version

    @property
    def is_rebalance(self) -> bool:
        """Whether it changed only the partition mapping."""
        return (self.before.task_count, self.before.task) == (
            self.after.task_count,
            self.after.task,
        ) and self.before.mapping != self.after.mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The input of one decision."""

    job: ScalerJobFacts
    frame: Frame | NoFrame
    now_ms: Millis
    footprint: Footprint = Footprint()
    remaining: Remaining = Remaining()
    past: tuple[ScalingAction, ...] = ()  # oldest first
    demand: Demand | None = None
    settings: DecisionSettings = DEFAULTS
    by_partition: PartitionLoads | None = None  # None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What a decision learnt; the caller stores it."""

    thread_rate: float | None = None  # P from now on
    judged: ScalingAction | None = None  # the last action, with its outcome
    alert: str = ""


NOTHING_LEARNT = Learnt()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """No change, and the reason; `bound` names the rule or limit."""

    reason: str
    bound: str = ""
    formula: str = ""
    inputs: Inputs = field(default_factory=dict)
    learnt: Learnt = NOTHING_LEARNT


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Another shape, and the reason; `bounds` are the limits that made it smaller than wanted."""

    shape: JobShape
    reason: str
    direction: Literal["up", "down", "undo"]
    formula: str = ""
    inputs: Inputs = field(default_factory=dict)
    bounds: tuple[str, ...] = ()
    rate_expected: float = 0.0
    learnt: Learnt = NOTHING_LEARNT

    @property
    def task_count(self) -> int:
        """The new number of tasks."""
        return self.shape.task_count

    @property
    def task(self) -> TaskResources:
        """The new resources of each task."""
        return self.shape.task


@dataclass(frozen=True, slots=True, kw_only=True)
class Untriaged:
    """A symptom that more resources would not cure: an alert, never a resize."""

    reason: str
    ruled_out: tuple[str, ...]
    formula: str = ""
    inputs: Inputs = field(default_factory=dict)
    learnt: Learnt = NOTHING_LEARNT


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """Another partition mapping: by partition, the task that shall read it."""

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
    """A decision as JSON values for the journal."""
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
    """Whether the cluster's capacity made the step smaller."""
    match decision:
        case Hold(bound=bound):
            return bound.startswith("capacity")
        case Resize(bounds=bounds):
            return any(bound.startswith("capacity") for bound in bounds)
    return False


PAST_MAX = 20
RESTARTS_MAX = 3
RESTART_S = 30.0  # used until a restart was measured
# A measured rate that differs by less than this share counts as unchanged.
SAME_RATE = 0.01


class ScalerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The scaler's part of a job's policy record."""

    birth: str = ""  # birth id of the job: a later job of the same name has another
    thread_rate: float | None = None  # P
    thread_rate_minute: int | None = None
    past: tuple[ScalingAction, ...] = ()  # oldest first
    restarts_s: tuple[float, ...] = ()  # as measured, newest last
    said: str = ""  # key of the last journaled decision, so that repeats are not journaled

    @property
    def footprint(self) -> Footprint:
        """The measured properties that decisions use."""
        return Footprint(thread_rate=self.thread_rate, thread_rate_minute=self.thread_rate_minute)

    @property
    def restart_s(self) -> float:
        """Expected downtime of a change: the longest of the last measured ones."""
        return max(self.restarts_s, default=RESTART_S)

    @property
    def pending(self) -> ScalingAction | None:
        """The last action, if it is not judged yet."""
        return self.past[-1] if self.past and self.past[-1].outcome == "pending" else None

    def with_learnt(self, learnt: Learnt, now_ms: Millis) -> ScalerMemory:
        """The memory with what a decision learnt."""
        memory = self
        if learnt.judged is not None and self.past:
            memory = _with(memory, past=(*self.past[:-1], learnt.judged))
        rate = learnt.thread_rate
        if rate is not None and not _is_same(rate, self.thread_rate):
            memory = _with(memory, thread_rate=rate, thread_rate_minute=now_ms // MINUTE_MS)
        return memory

    def with_action(self, action: ScalingAction) -> ScalerMemory:
        """The memory with an action that is applied now; it overrules a pending one."""
        past = self.past
        if self.pending is not None:
            past = (*past[:-1], with_changes(past[-1], outcome="overruled", judged_minute=action.at_minute))
        return _with(self, past=(*past, action)[-PAST_MAX:])

    def without_last(self) -> ScalerMemory:
        """The memory without the last action, whose write was refused; the next one is journaled again."""
        return _with(self, past=self.past[:-1], said="")

    def with_restart(self, seconds: float) -> ScalerMemory:
        """The memory with one more measured restart."""
        return _with(self, restarts_s=(*self.restarts_s, round(seconds, 1))[-RESTARTS_MAX:])

    def with_journal_key(self, key: str) -> ScalerMemory:
        """The memory with the key of a decision that is journaled now."""
        return self if key == self.said else _with(self, said=key)


def _with(memory: ScalerMemory, **news: object) -> ScalerMemory:
    return msgspec.structs.replace(memory, **news)


def _is_same(rate: float, known: float | None) -> bool:
    return known is not None and abs(rate - known) <= SAME_RATE * known
