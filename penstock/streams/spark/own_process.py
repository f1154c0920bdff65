"""A task in a process and JVM of its own: the runner in the engine, and the process itself.

`OwnProcessRunner` starts the process from a container's engine; `run` is its main function. They share a
folder: the process writes its status into one file, and stops when another file exists.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from penstock.core.errors import IntervalMissing, PenstockError
from penstock.core.system_clock import sleep_ms
from penstock.jobs.tasks import FINAL, Runner, RunState, RunStatus, TaskSpec
from penstock.streams.data_plane import interval_of
from penstock.streams.package_store import UnpackedPackages
from penstock.streams.places import open_rows
from penstock.streams.spark.run_errors import readable
from penstock.streams.spark.session import build_session
from penstock.streams.spark.tasks import SparkTasks

POLL_MS = 200
STATUS_FILE, STOP_FILE, WORK_FILE = "status.json", "stop", "work.json"
# Share of a task's memory; the rest is for Python and for the JVM's memory outside the heap.
HEAP_SHARE = 0.4
HEAP_MB_MIN = 512  # with less Spark does not start

# Writes the work file of a task into its folder; returns the command that starts its process.
Prepare = Callable[[TaskSpec, int, Path], list[str]]


class CommandRunner(Runner, Protocol):
    """Runs a task as a process, by the command of its job or by another one."""

    def start(self, spec: TaskSpec, *, shard_epoch: int, command: Sequence[str] | None = None) -> None:
        """Begin a run. `command`: in place of what the job's config names, in a bare environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWork:
    """The content of the work file. `packages` has unpacked packages by their hashes."""

    spec: TaskSpec
    shard_epoch: int
    bus: str
    rows: str
    packages: str
    folder: str
    heap_mb: int

    def to_json(self) -> str:
        """As the process reads it."""
        return json.dumps(
            {**{item.name: getattr(self, item.name) for item in fields(self)}, "spec": self.spec.to_json()}
        )

    @staticmethod
    def from_json(text: str) -> OwnWork:
        """From the file."""
        data = json.loads(text)
        return OwnWork(**{**data, "spec": TaskSpec.from_json(data["spec"])})


class OwnProcessRunner:
    """A `Runner` of stream tasks, each of them a command that `processes` runs."""

    def __init__(self, processes: CommandRunner, folder: Path, prepare: Prepare) -> None:
        self._processes, self._folder, self._prepare = processes, folder, prepare
        self._refused: dict[str, RunStatus] = {}
        self._folders: dict[str, Path] = {}

    def start(self, spec: TaskSpec, *, shard_epoch: int) -> None:
        """Start a run; if it cannot be prepared, it becomes a failed run."""
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
        self._processes.start(spec, shard_epoch=shard_epoch, command=command)

    def stop(self, task_id: str) -> None:
        """Request a stop with a file: a signal would end the JVM in the middle of a batch."""
        if task_id in self._folders:
            (self._folders[task_id] / STOP_FILE).touch()

    def kill(self, task_id: str) -> None:
        """Kill the process and all its descendants."""
        if task_id in self._folders:
            (self._folders[task_id] / STOP_FILE).touch()
            self._processes.kill(task_id)

    def poll(self) -> tuple[RunStatus, ...]:
        """The status of every run that is not forgotten."""
        found = [
            self._status_of(status) for status in self._processes.poll() if status.task_id in self._folders
        ]
        return (*self._refused.values(), *found)

    def _status_of(self, status: RunStatus) -> RunStatus:
        """The status that the process reported, unless its exit tells more."""
        folder = self._folders[status.task_id]
        reported = _read(folder / STATUS_FILE)
        is_stopping = (folder / STOP_FILE).exists()
        metrics = {**reported.get("metrics", {}), **status.metrics}
        if status.state not in FINAL:
            state = RunState.STOPPING if is_stopping else RunState(reported.get("state", RunState.STARTING))
            # The run has not ended while the process lives.
            return replace(status, state=RunState.RUNNING if state in FINAL else state, metrics=metrics)
        if status.error.startswith("out of memory"):
            return replace(status, metrics=metrics)
        if reported.get("state") in FINAL:
            error = str(reported.get("error", ""))
            return replace(status, state=RunState(reported["state"]), error=error, metrics=metrics)
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


def prepare_with(*, bus: str, rows: str, packages: UnpackedPackages) -> Prepare:
    """How tasks on this bus and these rows are prepared."""

    def prepare(spec: TaskSpec, shard_epoch: int, folder: Path) -> list[str]:
        found = [packages.folder_of(hash_) for hash_ in _packages_needed(spec, rows)]
        work = OwnWork(
            spec=spec,
            shard_epoch=shard_epoch,
            bus=bus,
            rows=rows,
            packages=str(found[0].parent),
            folder=str(folder),
            heap_mb=max(HEAP_MB_MIN, int(spec.config.resources.memory_mb * HEAP_SHARE)),
        )
        (folder / WORK_FILE).touch(mode=0o600)  # the URL of the rows may contain a password
        (folder / WORK_FILE).write_text(work.to_json())
        return [sys.executable, "-m", "penstock.streams.spark.own_process", str(folder / WORK_FILE)]

    return prepare


def _packages_needed(spec: TaskSpec, rows: str) -> list[str]:
    """The task's package, and those in intents of its predecessors: the process cannot fetch packages."""
    config = spec.config
    store, needed = open_rows(rows), [] if config.package is None else [config.package.hash]
    for partition in spec.partitions:
        try:
            intent = store.peek(interval_of(spec.job, spec.birth, config, partition)).intent
        except IntervalMissing:
            continue  # the task reports that itself, with more detail
        if intent is not None:
            needed.append(intent.package)
    return list(dict.fromkeys(needed))


def run(work: OwnWork) -> RunStatus:
    """In the process: run the task until it ends or a stop is requested."""
    task_id, folder = work.spec.task_id, Path(work.folder)
    _write_status(work, RunStatus(task_id=task_id, state=RunState.STARTING))
    cores, scratch = work.spec.config.threads, folder / "scratch"
    spark = build_session(f"penstock {task_id}", cores, scratch, heap_mb=work.heap_mb, is_shared=False)
    tasks = SparkTasks(
        spark,
        bus=work.bus,
        rows=work.rows,
        package_folder=lambda hash_: Path(work.packages) / hash_,
        checkpoints=scratch / "checkpoints",
        die=_die,
    )
    tasks.start(work.spec, shard_epoch=work.shard_epoch)
    while True:
        if (folder / STOP_FILE).exists():
            tasks.stop(task_id)
        (status,) = tasks.poll()
        _write_status(work, status)
        if status.state in FINAL:
            return status
        if not tasks.is_alive():
            _die("Spark's JVM is gone: it may have run out of memory")
        sleep_ms(POLL_MS)


def _write_status(work: OwnWork, status: RunStatus) -> None:
    path = Path(work.folder) / STATUS_FILE
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"state": status.state, "error": status.error, "metrics": status.metrics}))
    os.replace(new, path)


def _die(reason: str) -> NoReturn:
    print(reason, file=sys.stderr, flush=True)
    os._exit(70)


def main(arguments: list[str]) -> int:
    """Main function of the process; returns 0 if the task was stopped, else 1."""
    work = OwnWork.from_json(Path(arguments[0]).read_text())
    try:
        status = run(work)
    except (PenstockError, PySparkException, Py4JJavaError) as error:
        status = RunStatus(task_id=work.spec.task_id, state=RunState.FAILED, error=readable(error))
        _write_status(work, status)
    return 0 if status.state is RunState.STOPPED else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
