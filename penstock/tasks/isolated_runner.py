"""A task in a process of its own that tells how it is in a file: asked to stop, ended above its memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.core.errors import PenstockError
from penstock.tasks.process_runner import ProcessRunner
from penstock.tasks.runner import FINAL, RunState, RunStatus
from penstock.tasks.specs import TaskSpec

# What the process and this runner say to each other, in the task's folder.
STATUS_FILE, STOP_FILE = "status.json", "stop"
Prepare = Callable[[TaskSpec, int, Path], list[str]]


class IsolatedRunner:
    """Runs stream tasks as commands. `prepare` writes what the process needs into a folder and names it."""

    def __init__(self, processes: ProcessRunner, folder: Path, prepare: Prepare) -> None:
        self._processes, self._folder, self._prepare = processes, folder, prepare
        self._refused: dict[str, RunStatus] = {}
        self._folders: dict[str, Path] = {}

    def start(self, spec: TaskSpec, *, shard_epoch: int) -> None:
        """Begin a run. What it needs and cannot get makes it a run that failed."""
        folder = self._folder / spec.task_id.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)
        for name in (STATUS_FILE, STOP_FILE):
            (folder / name).unlink(missing_ok=True)
        try:
            command = self._prepare(spec, shard_epoch, folder)
        except PenstockError as error:
            self._refused[spec.task_id] = RunStatus(
                task_id=spec.task_id, state=RunState.FAILED, error=str(error)
            )
            return
        self._folders[spec.task_id] = folder
        config = {**spec.config, "command": command, "environment": {}}
        self._processes.start(replace(spec, config=config), shard_epoch=shard_epoch)

    def stop(self, task_id: str) -> None:
        """Ask it; a signal would end its JVM in the middle of a batch."""
        if task_id in self._folders:
            (self._folders[task_id] / STOP_FILE).touch()

    def kill(self, task_id: str) -> None:
        """End it and all its kin."""
        if task_id in self._folders:
            (self._folders[task_id] / STOP_FILE).touch()
            self._processes.kill(task_id)

    def poll(self) -> tuple[RunStatus, ...]:
        """Every run not yet forgotten."""
        found = [self._told(status) for status in self._processes.poll() if status.task_id in self._folders]
        return (*self._refused.values(), *found)

    def _told(self, status: RunStatus) -> RunStatus:
        """What the process says of itself, unless its end says more."""
        folder = self._folders[status.task_id]
        said = _read(folder / STATUS_FILE)
        is_stopping = (folder / STOP_FILE).exists()
        metrics = {**said.get("metrics", {}), **status.metrics}
        if status.state not in FINAL:
            state = RunState.STOPPING if is_stopping else RunState(said.get("state", RunState.STARTING))
            # Its last word is no end as long as it lives.
            return replace(status, state=RunState.RUNNING if state in FINAL else state, metrics=metrics)
        if status.error.startswith("out of memory"):
            return replace(status, metrics=metrics)
        if said.get("state") in FINAL:
            error = str(said.get("error", ""))
            return replace(status, state=RunState(said["state"]), error=error, metrics=metrics)
        return replace(status, state=RunState.STOPPED if is_stopping else status.state, metrics=metrics)

    def forget(self, task_id: str) -> None:
        """Drop a final run."""
        if self._refused.pop(task_id, None) is None:
            self._processes.forget(task_id)
            self._folders.pop(task_id, None)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found
