"""Running configs to task specs: what one task needs to know to run (Turbine IV). Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

# A change of these reaches the job without restarting its tasks: nobody inside a task reads them.
LIVE_FIELDS = frozenset({"slo", "scaler", "priority", "labels", "owner", "task_count_max"})


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
    def config(self) -> Mapping[str, Any]:
        """The whole running config."""

    @property
    def config_json(self) -> str:
        """The same, as JSON text."""

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
    partitions = partitions_of(running)
    return tuple(
        TaskSpec(
            task_id=f"{running.job}/{index}",
            job=running.job,
            birth=running.birth,
            index=index,
            generation=running.generation,
            partitions=tuple(partitions[index]),
            config=running.config,
            running_version=running.restart_version,
        )
        for index in sorted(partitions)
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
    return {key: value for key, value in config.items() if key not in LIVE_FIELDS}
