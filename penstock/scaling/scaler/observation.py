"""What the scaler decides on, and what it may answer. Pure.

An answer carries its reason, formula, inputs and the bounds that held as data: the journal keeps them and
`penstock explain` shows them.
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
# Between which each number must lie.
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
    """How the scaler treats a job. Minutes are `_min`, shares are of one."""

    generation: Generation = "preactive"
    window_min: int = 5  # what "now" is
    settle_min: int = 1  # first minutes of changed tasks say nothing about what they can do
    stale_min: int = 3
    recovery_s: float = 1800.0  # t, within which a backlog should be gone
    target: float = 0.7  # a new shape is used to at most this share
    up_at: float = 0.85  # above this share a job is short
    down_after_min: int = 60  # for how long less must have been enough
    reactive_quiet_min: int = DAY_MIN  # no lag and no OOM for so long (Algorithm 2, line 10)
    reactive_step: float = 0.5
    saving_min: float = 0.1  # of the threads: less is not worth a restart
    resource_saving_min: float = 0.3  # of cpu or memory, where the number of threads stays
    imbalance_at: float = 0.5  # standard deviation over mean
    memory_soft: float = 0.9  # of what is reserved: above, more is reserved before it runs out
    headroom: float = 1.2  # reserved over estimated
    oom_factor: float = 1.5
    vertical_share: float = 0.2  # of a container: no task is larger (Turbine V-E)
    update_recent_min: int = 60
    slower_at: float = 0.5  # a thread that gives less than this share of P has another problem than load
    history_hours: float = 4.0  # x, for which a smaller shape must have been enough in the past
    history_days_min: int = 3  # fewer known days are no pattern
    unlike_at: float = 0.2  # last 30 minutes that differ by more from those of the past are unlike it
    judge_after_min: int = 5
    observe_min: int = 60  # a breach of the SLO so soon after going down was its doing
    effective_at: float = 0.1  # less of the expected gain: it did not help
    remember_min: int = 360

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
        f"the scaler's setting {name} is {value!r}",
        why=f"it must be {wanted}",
        fix=f"set {name} to {wanted}",
    )


DEFAULTS = DecisionSettings()


KINDS = ("cpu", "memory_mb", "disk_mb", "network_mbps")
# What rounding may leave of a whole number.
TINY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResources:
    """What each task of a job gets."""

    threads: int = 1  # k
    cpu: float = 1.0
    memory_mb: float = 512.0
    disk_mb: float = 0.0  # 0: none is reserved
    network_mbps: float = 0.0  # megabits per second; 0: none is reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """A number of tasks and what each gets."""

    task_count: int  # n
    task: TaskResources
    mapping: tuple[int, ...] | None = None  # by partition, the task that reads it; None: dealt evenly

    def total(self, kind: str) -> float:
        """What all tasks together reserve of one resource."""
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
    """How much of each resource there is; infinite where nobody set a limit."""

    cpu: float = inf
    memory_mb: float = inf
    disk_mb: float = inf
    network_mbps: float = inf


UNLIMITED = AvailableResources()


def mapping_of(shape: JobShape, partitions: int) -> tuple[int, ...]:
    """By partition, the task that reads it."""
    return shape.mapping if shape.mapping is not None else map_partitions(partitions, shape.task_count)


def with_mapping(shape: JobShape, mapping: tuple[int, ...]) -> JobShape:
    """The same tasks with their partitions dealt so; the even deal has no name of its own."""
    is_even = mapping == map_partitions(len(mapping), shape.task_count)
    return replace(shape, mapping=None if is_even else mapping)


def busiest_partitions(task_count: int, partitions: int) -> int:
    """How many partitions the busiest task has."""
    return -(-partitions // task_count)


def share_of_busiest(task_count: int, partitions: int) -> float:
    """Which part of the work the busiest task has. Partitions 0: work that is split at will."""
    if partitions <= 0:
        return 1.0 / task_count
    return busiest_partitions(task_count, partitions) / partitions


def parallel(task_count: int, threads: int, partitions: int) -> float:
    """As how many threads a job works, n * k at most."""
    if partitions <= 0:
        return float(task_count * threads)
    rounds = -(-busiest_partitions(task_count, partitions) // threads)
    return partitions / rounds


def at_work(task_count: int, threads: int, partitions: int) -> float:
    """How many threads work at a time while every task is busy: a task's last round may leave some idle."""
    if threads == 1 or partitions <= 0:
        return float(task_count * threads)
    held, more = divmod(partitions, task_count)
    rounds = more * -(-(held + 1) // threads) + (task_count - more) * -(-held // threads)
    return task_count * partitions / rounds


def rounds_for(wanted: float, partitions: int) -> int:
    """How many partitions a thread may carry so that the job works as `wanted` threads; 0: it cannot."""
    if wanted <= 0 or not isfinite(partitions / wanted):
        return partitions
    return min(partitions, int(partitions / wanted + TINY))


def threads_for(wanted: float, *, task_count: int, partitions: int) -> int | None:
    """The fewest threads per task with which so many tasks work as `wanted` threads; None: no number does."""
    if partitions <= 0:
        return max(1, ceil(wanted / task_count - TINY))
    rounds = rounds_for(wanted, partitions)
    return -(-busiest_partitions(task_count, partitions) // rounds) if rounds else None


def tasks_for(wanted: float, *, threads: int, partitions: int) -> int | None:
    """The fewest tasks of so many threads that work as `wanted` threads; None: no number does."""
    if partitions <= 0:
        return max(1, ceil(wanted / threads - TINY))
    rounds = rounds_for(wanted, partitions)
    return max(1, -(-partitions // (rounds * threads))) if rounds else None


def align(task_count: int, partitions: int) -> int:
    """The fewest tasks whose busiest has no more partitions than with `task_count`."""
    if partitions <= 0:
        return task_count
    return -(-partitions // busiest_partitions(min(task_count, partitions), partitions))


def next_below(task_count: int, partitions: int) -> int:
    """The next smaller number of tasks that is aligned; 0 below one."""
    if partitions <= 0 or task_count <= 1:
        return task_count - 1
    return min(task_count - 1, -(-partitions // (busiest_partitions(task_count, partitions) + 1)))


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
class ShapeLimits:
    """Within which a job's shape must stay."""

    task_count_min: int = 1
    task_count_max: int = 32
    threads_max: int = 1  # 1: the engine gives a task one thread whatever it asks for
    container: AvailableResources = UNLIMITED  # what one container has
    set_by: str = ""  # the layer that set `task_count_max`, where it is a person's


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What is known of a job beyond its last minutes; None: not known."""

    thread_rate: float | None = None  # P, records per second one thread can sustain
    thread_rate_minute: int | None = None  # when that was learnt: an update since then makes it void
    memory_fixed_mb: float | None = None  # what a task uses however little it does


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerJobFacts:
    """A job as it is set up now."""

    name: str
    shape: JobShape
    limits: ShapeLimits = ShapeLimits()
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

    room: AvailableResources = UNLIMITED
    privileged_only: bool = False  # short: only privileged jobs may grow


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the rest of a pipeline says about a job's input."""

    input_rate: float = 0.0  # what the jobs above it will send once their plans are carried out
    useful_rate: float = float("inf")  # above this the jobs below it cannot follow
    bottleneck: str = ""  # the job below that sets it


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingAction:
    """What the scaler did to a job, as it was applied, and what came of it."""

    at_minute: int
    before: JobShape
    after: JobShape
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
    """What a decision found out; whoever asked keeps it."""

    thread_rate: float | None = None  # P from now on
    judged: ScalingAction | None = None  # the last action, with its outcome
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


PAST_MAX = 20
RESTARTS_MAX = 3
RESTART_S = 30.0  # until one was measured
# A learnt rate that differs by less than this is the same.
SAME_RATE = 0.01


class ScalerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The scaler's part of a job's record."""

    birth: str = ""  # of the job: one of the same name that came later is another
    thread_rate: float | None = None  # P
    thread_rate_minute: int | None = None
    past: tuple[ScalingAction, ...] = ()  # oldest first
    restarts_s: tuple[float, ...] = ()  # as measured, newest last
    said: str = ""  # what the journal last heard, as a key: the same is not told twice

    @property
    def footprint(self) -> Footprint:
        """What decisions know of the job beyond its metrics."""
        return Footprint(thread_rate=self.thread_rate, thread_rate_minute=self.thread_rate_minute)

    @property
    def restart_s(self) -> float:
        """For how long a change stops the job: the longest of the last few."""
        return max(self.restarts_s, default=RESTART_S)

    @property
    def pending(self) -> ScalingAction | None:
        """What was done and is not judged yet."""
        return self.past[-1] if self.past and self.past[-1].outcome == "pending" else None

    def with_learnt(self, learnt: Learnt, now_ms: Millis) -> ScalerMemory:
        """With what a decision found out."""
        memory = self
        if learnt.judged is not None and self.past:
            memory = _with(memory, past=(*self.past[:-1], learnt.judged))
        rate = learnt.thread_rate
        if rate is not None and not _is_same(rate, self.thread_rate):
            memory = _with(memory, thread_rate=rate, thread_rate_minute=now_ms // MINUTE_MS)
        return memory

    def with_action(self, action: ScalingAction) -> ScalerMemory:
        """With something that is done now. What was still watched is overruled by it."""
        past = self.past
        if self.pending is not None:
            past = (*past[:-1], with_changes(past[-1], outcome="overruled", judged_minute=action.at_minute))
        return _with(self, past=(*past, action)[-PAST_MAX:])

    def without_last(self) -> ScalerMemory:
        """What was to be done was not done after all, and will be told when it is."""
        return _with(self, past=self.past[:-1], said="")

    def with_restart(self, seconds: float) -> ScalerMemory:
        """With one more measured restart."""
        return _with(self, restarts_s=(*self.restarts_s, round(seconds, 1))[-RESTARTS_MAX:])

    def with_journal_key(self, said: str) -> ScalerMemory:
        """With what the journal hears now."""
        return self if said == self.said else _with(self, said=said)


def _with(memory: ScalerMemory, **news: object) -> ScalerMemory:
    return msgspec.structs.replace(memory, **news)


def _is_same(rate: float, known: float | None) -> bool:
    return known is not None and abs(rate - known) <= SAME_RATE * known
