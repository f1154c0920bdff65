"""Tasks: what one needs to know to run (Turbine IV), how a run of it stands, and what runs them. Pure.

Containers and streams share these types: a `TaskSpec` goes from the Task Service to the worker as it is, a
`RunStatus` comes back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Protocol


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
