"""Tasks: their specs (Turbine IV), the status of their runs, and the protocol of a runner. Pure.

Containers and streams share these types: the Task Service sends a `TaskSpec` to the worker unchanged, and a
`RunStatus` comes back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol

from penstock.core import text as json_text
from penstock.core.errors import ConfigError
from penstock.jobs.config import LIVE_FIELDS, JobConfig
from penstock.jobs.layers import LayerRow, is_same
from penstock.jobs.text_rules import shown


def interval_birth(job_birth: str, kind: str, lineage: int, partition: int) -> str:
    """The birth id of an interval: new for each life of the job, reset of state (`lineage`) and kind."""
    return hashlib.sha256(f"{job_birth}/{kind}/{lineage}/{partition}".encode()).hexdigest()[:16]


def stateless_producer(job_birth: str, input_birth: str, partition: int) -> str:
    """The producer id of a stateless step, one per input partition: its sequences are input offsets."""
    return f"{job_birth}:{input_birth}:{partition}"


def producer_of(*, job_birth: str, kind: str, lineage: int, input_birth: str, partition: int) -> str:
    """The producer id under which an interval of this job publishes."""
    if kind == "stateful":
        return interval_birth(job_birth, kind, lineage, partition)
    # A reset stateless job reads its input again: as a new producer, or the bus would drop duplicates.
    life = f"{job_birth}+{lineage}" if lineage else job_birth
    return stateless_producer(life, input_birth, partition)


PARTITION_TASKS = "partition_tasks"
# Fields that decide whether `partition_tasks` fits.
_SIZE_FIELDS = frozenset(
    {PARTITION_TASKS, "partitions", "task_count", "task_count_max", "privileged", "kind"}
)
# Limits of `describe_moves`, so that the text fits a line.
_TASKS_SHOWN_MAX, _PARTITIONS_SHOWN_MAX = 6, 8

PartitionMapping = tuple[int, ...]


def map_partitions(partitions: int, task_count: int) -> PartitionMapping:
    """The even mapping partition -> task index: contiguous ranges whose sizes differ by at most one."""
    assert 1 <= task_count <= partitions, "a task without a partition would have nothing to do"
    return tuple(partition * task_count // partitions for partition in range(partitions))


def mapping_problem(requested: Sequence[int], *, partitions: int, task_count: int) -> str:
    """Why a mapping is invalid: it must have all partitions, and exactly the job's tasks; "" if valid."""
    if len(requested) != partitions:
        return f"it has {len(requested)} entries, and the job has {partitions} partitions"
    beyond = sorted({index for index in requested if index >= task_count})
    if beyond:
        return f"it names task {beyond[0]}, and the job has tasks 0 to {task_count - 1}"
    idle = sorted(set(range(task_count)) - set(requested))
    return f"task {idle[0]} of {task_count} would have no partition" if idle else ""


def requested_mapping(config: JobConfig) -> PartitionMapping | None:
    """The mapping that a config requests; None: it requests none, or an invalid one."""
    requested = config.partition_tasks
    if not requested or mapping_problem(
        requested, partitions=config.partitions, task_count=config.task_count
    ):
        return None
    return requested


def ignored_mapping_reason(config: JobConfig) -> str:
    """Why the mapping that a config requests is ignored; "" if it is used, or if there is none."""
    requested = config.partition_tasks
    return (
        mapping_problem(requested, partitions=config.partitions, task_count=config.task_count)
        if requested
        else ""
    )


def describe_moves(before: Sequence[int], after: Sequence[int]) -> str:
    """A text about the partitions that change their task; "" if none does, or if their number changes."""
    moves: dict[tuple[int, int], list[int]] = {}
    for partition, (old, new) in enumerate(zip(before, after, strict=False)):
        if old != new:
            moves.setdefault((old, new), []).append(partition)
    if len(before) != len(after) or not moves:
        return ""
    texts = [
        f"partition{'s' * (len(moved) > 1)} {_list_partitions(moved)} from task {old} to {new}"
        for (old, new), moved in sorted(moves.items())[:_TASKS_SHOWN_MAX]
    ]
    rest = sum(len(moved) for _, moved in sorted(moves.items())[_TASKS_SHOWN_MAX:])
    return ", ".join(texts) + (f" and {rest} more" if rest else "")


def _list_partitions(partitions: Sequence[int]) -> str:
    rest = len(partitions) - _PARTITIONS_SHOWN_MAX
    shown = ", ".join(map(str, partitions[:_PARTITIONS_SHOWN_MAX]))
    return f"{shown} and {rest} more" if rest > 0 else shown


def check_partition_tasks(
    job: str, before: LayerRow | None, row: LayerRow, others: Sequence[LayerRow], config: JobConfig
) -> None:
    """Refuse a write of `partition_tasks` that is invalid with this layer and those below."""
    requested = row.body.get(PARTITION_TASKS)
    if not requested or (before is not None and is_same(before.body.get(PARTITION_TASKS), requested)):
        return
    above = (other for other in others if other.precedence > row.precedence)
    if any(_SIZE_FIELDS & other.body.keys() for other in above):
        return  # a layer above decides; an invalid mapping is then ignored and reported
    why = mapping_problem(requested, partitions=config.partitions, task_count=config.task_count)
    if why:
        raise ConfigError(
            f"the config of job {shown(job)} is not valid",
            why=f"{PARTITION_TASKS}: {why}",
            fix="list the task of each partition, in order, and each task at least once; "
            "or leave it out: then partitions are assigned evenly",
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
    config_json: str  # the job's whole running config, as it is stored
    running_version: int  # a larger one with the same generation is a simple change: restart in place
    _config: JobConfig | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def config(self) -> JobConfig:
        """The running config. A list holds the tasks of all jobs: it is parsed for those that run here."""
        if self._config is None:
            object.__setattr__(self, "_config", JobConfig.from_stored(self.config_json, job=self.job))
            assert self._config is not None
        return self._config

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SPEC_FIELDS}

    @staticmethod
    def from_json(data: dict[str, Any]) -> TaskSpec:
        return TaskSpec(**{**data, "partitions": tuple(data["partitions"])})


_SPEC_FIELDS = tuple(item.name for item in fields(TaskSpec) if item.init)


class RunningJob(Protocol):
    """The fields of a job's running row that its tasks depend on."""

    @property
    def job(self) -> str:
        """The name of the job."""

    @property
    def birth(self) -> str:
        """The birth id of this life of the name."""

    @property
    def version(self) -> int:
        """From the counter that task lists are paged by."""

    @property
    def restart_version(self) -> int:
        """Grows only with changes for which tasks must restart."""

    @property
    def config_json(self) -> str:
        """The whole running config, as JSON text."""

    @property
    def state(self) -> str:
        """`running`, `stopped` or `removed`."""

    @property
    def generation(self) -> int:
        """The generation of the mapping."""

    @property
    def mapping(self) -> tuple[int, ...]:
        """Partition -> task index, as the plan stored it; never computed here."""

    @property
    def hold_generation(self) -> int:
        """Tasks of this and smaller generations must not run."""


def has_tasks(running: RunningJob) -> bool:
    """Whether a job has tasks now: not while it is stopped, removed or held."""
    is_held = running.hold_generation >= running.generation
    return running.state == "running" and not is_held and bool(running.mapping)


def partitions_of(running: RunningJob) -> dict[int, list[int]]:
    """Task index -> its partitions, from the stored mapping."""
    partitions: dict[int, list[int]] = {}
    for partition, index in enumerate(running.mapping):
        partitions.setdefault(index, []).append(partition)
    return partitions


def task_specs(running: RunningJob) -> tuple[TaskSpec, ...]:
    """The tasks of one job."""
    if not has_tasks(running):
        return ()
    partitions = partitions_of(running)
    return tuple(
        TaskSpec(
            task_id=f"{running.job}/{index}",
            job=running.job,
            birth=running.birth,
            index=index,
            generation=running.generation,
            partitions=tuple(partitions[index]),
            config_json=running.config_json,
            running_version=running.restart_version,
        )
        for index in sorted(partitions)
    )


def single_task(job: str, birth: str, config: JobConfig, *, generation: int = 1) -> TaskSpec:
    """A job as one task that reads all its partitions: for runs without a Task Service."""
    return TaskSpec(
        task_id=f"{job}/0",
        job=job,
        birth=birth,
        index=0,
        generation=generation,
        partitions=tuple(range(config.partitions)),
        config_json=json_text.dumps(config.to_json()),
        running_version=1,
    )


def needs_restart(old: TaskSpec, new: TaskSpec) -> bool:
    """Whether a run of `old` must end before `new` can start."""
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
    if old.config_json == new.config_json:
        return False
    return _restarting(old.config) != _restarting(new.config)


def _restarting(config: JobConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_json().items() if name not in LIVE_FIELDS}


class RunState(StrEnum):
    """The state of one run of a task. The last three are final: no process or thread of it is alive."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    FENCED = "fenced"


FINAL = frozenset({RunState.STOPPED, RunState.FAILED, RunState.FENCED})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of one run, reported by the runner."""

    task_id: str
    state: RunState
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


class Runner(Protocol):
    """Runs tasks. No call blocks; at most one run per task id at a time."""

    def start(self, spec: TaskSpec, *, shard_epoch: int) -> None:
        """Start a run. Requires: the previous run of this task id was forgotten."""

    def stop(self, task_id: str) -> None:
        """Request a run to stop. Idempotent."""

    def kill(self, task_id: str) -> None:
        """Kill a run that did not stop in time."""

    def poll(self) -> tuple[RunStatus, ...]:
        """Every run that was not forgotten, final ones included."""

    def forget(self, task_id: str) -> None:
        """Remove a final run from the list."""
