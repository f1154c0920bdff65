"""Tasks: what one needs to know to run (Turbine IV), how a run of it stands, and what runs them. Pure.

Containers and streams share these types: a `TaskSpec` goes from the Task Service to the worker as it is, a
`RunStatus` comes back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from penstock.core.errors import ConfigError
from penstock.jobs.config import JobConfig
from penstock.jobs.layers import LayerRow, is_same
from penstock.jobs.text_rules import shown


def interval_birth(job_birth: str, kind: str, lineage: int, partition: int) -> str:
    """An interval is born with its job, with each reset of its state (`lineage`) and each change of kind."""
    return hashlib.sha256(f"{job_birth}/{kind}/{lineage}/{partition}".encode()).hexdigest()[:16]


def stateless_producer(job_birth: str, input_birth: str, partition: int) -> str:
    """Named after the input partition: a stateless step's sequences are input offsets."""
    return f"{job_birth}:{input_birth}:{partition}"


def producer_of(*, job_birth: str, kind: str, lineage: int, input_birth: str, partition: int) -> str:
    """The producer id under which an interval of this job publishes."""
    if kind == "stateful":
        return interval_birth(job_birth, kind, lineage, partition)
    # A stateless job that is reset reads its input again: to the bus it must be somebody else.
    life = f"{job_birth}+{lineage}" if lineage else job_birth
    return stateless_producer(life, input_birth, partition)


PARTITION_TASKS = "partition_tasks"
# A layer above that says one of these decides whether the deal fits.
_SIZE_FIELDS = frozenset(
    {PARTITION_TASKS, "partitions", "task_count", "task_count_max", "privileged", "kind"}
)
# What a plan or a decision says of them fits a line.
_TASKS_SHOWN_MAX, _PARTITIONS_SHOWN_MAX = 6, 8

PartitionMapping = tuple[int, ...]


def map_partitions(partitions: int, task_count: int) -> PartitionMapping:
    """Partition -> task index: contiguous runs whose sizes differ by at most one."""
    assert 1 <= task_count <= partitions, "a task without a partition would have nothing to do"
    return tuple(partition * task_count // partitions for partition in range(partitions))


def mapping_problem(asked: Sequence[int], *, partitions: int, task_count: int) -> str:
    """Why a deal cannot be: not all partitions, or not all tasks and only those; "" if it can."""
    if len(asked) != partitions:
        return f"it has {len(asked)} entries, the job has {partitions} partitions"
    beyond = sorted({index for index in asked if index >= task_count})
    if beyond:
        return f"it names task {beyond[0]}, the job has {task_count} tasks, from 0 on"
    idle = sorted(set(range(task_count)) - set(asked))
    return f"task {idle[0]} of {task_count} would have no partition" if idle else ""


def requested_mapping(config: JobConfig) -> PartitionMapping | None:
    """The deal that a config asks for; None: it asks for none that fits."""
    asked = config.partition_tasks
    if not asked or mapping_problem(asked, partitions=config.partitions, task_count=config.task_count):
        return None
    return asked


def ignored_mapping_reason(config: JobConfig) -> str:
    """Why the deal that a config asks for does not count; "" if it does, or if there is none."""
    asked = config.partition_tasks
    return mapping_problem(asked, partitions=config.partitions, task_count=config.task_count) if asked else ""


def describe_moves(before: Sequence[int], after: Sequence[int]) -> str:
    """Which partitions change their task, in words; "" if none does, or if they are others."""
    moves: dict[tuple[int, int], list[int]] = {}
    for partition, (old, new) in enumerate(zip(before, after, strict=False)):
        if old != new:
            moves.setdefault((old, new), []).append(partition)
    if len(before) != len(after) or not moves:
        return ""
    said = [
        f"partition{'s' * (len(some) > 1)} {_list_partitions(some)} from task {old} to {new}"
        for (old, new), some in sorted(moves.items())[:_TASKS_SHOWN_MAX]
    ]
    rest = sum(len(some) for _, some in sorted(moves.items())[_TASKS_SHOWN_MAX:])
    return ", ".join(said) + (f" and {rest} more" if rest else "")


def _list_partitions(partitions: Sequence[int]) -> str:
    rest = len(partitions) - _PARTITIONS_SHOWN_MAX
    shown = ", ".join(map(str, partitions[:_PARTITIONS_SHOWN_MAX]))
    return f"{shown} and {rest} more" if rest > 0 else shown


def check_partition_tasks(
    job: str, before: LayerRow | None, row: LayerRow, others: Sequence[LayerRow], config: JobConfig
) -> None:
    """Refuse a write of a deal that does not fit the job as this layer and those below make it."""
    asked = row.body.get(PARTITION_TASKS)
    if not asked or (before is not None and is_same(before.body.get(PARTITION_TASKS), asked)):
        return
    above = (other for other in others if other.precedence > row.precedence)
    if any(_SIZE_FIELDS & other.body.keys() for other in above):
        return  # a layer above decides; where the deal does not fit it is ignored, and said to be
    why = mapping_problem(asked, partitions=config.partitions, task_count=config.task_count)
    if why:
        raise ConfigError(
            f"the config of job {shown(job)} is not valid",
            why=f"{PARTITION_TASKS}: {why}",
            fix="name for each partition, in order, the task that reads it, each task at least once; "
            "or leave it out: then partitions are dealt evenly",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """Everything a container needs to run one task."""

    task_id: str  # "<job>/<index>"
    job: str
    birth: str  # of the job
    index: int
    generation: int
    partitions: tuple[int, ...]
    config: Mapping[str, Any]  # the job's running config, entire
    running_version: int  # a larger one with the same generation is a simple change: restart in place

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> TaskSpec:
        return TaskSpec(**{**data, "partitions": tuple(data["partitions"])})


class RunningJob(Protocol):
    """One job's running row, as far as tasks follow from it."""

    @property
    def job(self) -> str:
        """Its name."""

    @property
    def birth(self) -> str:
        """What tells two lives of the name apart."""

    @property
    def version(self) -> int:
        """From the one counter that task lists are paged by."""

    @property
    def restart_version(self) -> int:
        """Grows only with changes that tasks must restart for."""

    @property
    def config_json(self) -> str:
        """The whole running config, as JSON text."""

    @property
    def state(self) -> str:
        """`running`, `stopped` or `removed`."""

    @property
    def generation(self) -> int:
        """Of the mapping."""

    @property
    def mapping(self) -> tuple[int, ...]:
        """Partition -> task index: written by the plan, never computed here."""

    @property
    def hold_generation(self) -> int:
        """Tasks of generations up to this one must not run."""


def has_tasks(running: RunningJob) -> bool:
    """Whether a job has tasks now: none while it is stopped, removed or held."""
    is_held = running.hold_generation >= running.generation
    return running.state == "running" and not is_held and bool(running.mapping)


def partitions_of(running: RunningJob) -> dict[int, list[int]]:
    """Task index -> its partitions, as the plan mapped them."""
    partitions: dict[int, list[int]] = {}
    for partition, index in enumerate(running.mapping):
        partitions.setdefault(index, []).append(partition)
    return partitions


def task_specs(running: RunningJob) -> tuple[TaskSpec, ...]:
    """The tasks of one job."""
    if not has_tasks(running):
        return ()
    partitions, config = partitions_of(running), json.loads(running.config_json)
    return tuple(
        TaskSpec(
            task_id=f"{running.job}/{index}",
            job=running.job,
            birth=running.birth,
            index=index,
            generation=running.generation,
            partitions=tuple(partitions[index]),
            config=config,
            running_version=running.restart_version,
        )
        for index in sorted(partitions)
    )


def single_task(job: str, birth: str, config: Mapping[str, Any], *, generation: int = 1) -> TaskSpec:
    """A job as one task that reads all its partitions: for runs without a Task Service."""
    return TaskSpec(
        task_id=f"{job}/0",
        job=job,
        birth=birth,
        index=0,
        generation=generation,
        partitions=tuple(range(config["partitions"])),
        config=config,
        running_version=1,
    )


def needs_restart(old: TaskSpec, new: TaskSpec) -> bool:
    """Whether a run of `old` must end before `new` is what runs."""
    if old is new:
        return False
    if (old.task_id, old.birth, old.generation, old.partitions) != (
        new.task_id,
        new.birth,
        new.generation,
        new.partitions,
    ):
        return True
    if old.running_version == new.running_version:
        return False
    return _restarting(old.config) != _restarting(new.config)


def _restarting(config: Mapping[str, Any]) -> dict[str, Any]:
    from penstock.jobs.config import LIVE_FIELDS  # Spark's workers import this module, and need no pydantic

    return {key: value for key, value in config.items() if key not in LIVE_FIELDS}


class RunState(StrEnum):
    """Where one run of a task stands. The last three are final: nothing of it is alive."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    FENCED = "fenced"


FINAL = frozenset({RunState.STOPPED, RunState.FAILED, RunState.FENCED})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run as the runner sees it."""

    task_id: str
    state: RunState
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


class Runner(Protocol):
    """Runs tasks. No call blocks; at most one run per task id at a time."""

    def start(self, spec: TaskSpec, *, shard_epoch: int) -> None:
        """Begin a run. Requires: the last run of this task id is forgotten."""

    def stop(self, task_id: str) -> None:
        """Ask a run to end. May be repeated."""

    def kill(self, task_id: str) -> None:
        """End a run that did not stop in time, whatever it takes."""

    def poll(self) -> tuple[RunStatus, ...]:
        """Every run not yet forgotten, final ones included."""

    def forget(self, task_id: str) -> None:
        """Drop a final run from the list."""
