"""What a Task Manager needs of whatever runs tasks: the `Runner` protocol. Its twin is `fake_runner.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from penstock.tasks.specs import TaskSpec


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
