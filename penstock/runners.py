"""What runs stream tasks in a container: queries in its own session, or each in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.clock import Clock
from penstock.core.errors import IntervalMissing
from penstock.jobs.births import interval_birth
from penstock.streams.package_shelf import UnpackedPackages
from penstock.streams.places import open_rows
from penstock.streams.rows.row_store import IntervalRef
from penstock.tasks.isolated_runner import STATUS_FILE, STOP_FILE, IsolatedRunner
from penstock.tasks.memory_groups import find_groups
from penstock.tasks.process_runner import ProcessRunner
from penstock.tasks.runner import RunState, RunStatus
from penstock.tasks.specs import TaskSpec

if TYPE_CHECKING:
    from penstock.streams.engine.spark_tasks import Assignment, SparkTasks

# Of a task's memory: the rest is for Python, and for what a JVM takes beside its heap.
HEAP_SHARE = 0.4
HEAP_MB_MIN = 512  # with less Spark does not start


def assignment_of(spec: TaskSpec, shard_epoch: int) -> Assignment:
    """A task spec as the engine takes it."""
    from penstock.streams.engine.spark_tasks import Assignment

    return Assignment(
        task_id=spec.task_id,
        job=spec.job,
        job_birth=spec.birth,
        generation=spec.generation,
        shard_epoch=shard_epoch,
        partitions=spec.partitions,
        config=spec.config,
    )


class SparkRunner:
    """Spark queries as the Task Manager's runner."""

    def __init__(self, tasks: SparkTasks) -> None:
        self._tasks = tasks

    def start(self, spec: TaskSpec, *, shard_epoch: int) -> None:
        """Begin a run of a task."""
        self._tasks.start(assignment_of(spec, shard_epoch))

    def stop(self, task_id: str) -> None:
        """Ask a run to end."""
        self._tasks.stop(task_id)

    def kill(self, task_id: str) -> None:
        """End a run whatever it takes."""
        self._tasks.kill(task_id)

    def poll(self) -> tuple[RunStatus, ...]:
        """Every run not yet forgotten."""
        return tuple(
            RunStatus(
                task_id=view.task_id, state=RunState(view.state), error=view.error, metrics=view.metrics
            )
            for view in self._tasks.poll()
        )

    def forget(self, task_id: str) -> None:
        """Drop a final run."""
        self._tasks.forget(task_id)


def isolated_runner(
    folder: Path, *, clock: Clock, bus: str, rows: str, packages: UnpackedPackages
) -> IsolatedRunner:
    """A runner that gives every task a process and JVM of its own."""

    def prepare(spec: TaskSpec, shard_epoch: int, place: Path) -> list[str]:
        from penstock.streams.engine.own_process import OwnWork

        found = [packages.folder_of(hash_) for hash_ in _packages_needed(spec, rows)]
        work = OwnWork(
            assignment=assignment_of(spec, shard_epoch),
            bus=bus,
            rows=rows,
            packages=str(found[0].parent),
            scratch=str(place / "scratch"),
            status_file=str(place / STATUS_FILE),
            stop_file=str(place / STOP_FILE),
            cores=int(spec.config.get("threads", 1)),
            heap_mb=max(HEAP_MB_MIN, int(spec.config["resources"]["memory_mb"] * HEAP_SHARE)),
        )
        (place / "work.json").touch(mode=0o600)  # the address of the rows may carry a password
        (place / "work.json").write_text(work.to_json())
        return [sys.executable, "-m", "penstock.streams.engine.own_process", str(place / "work.json")]

    return IsolatedRunner(
        ProcessRunner(folder / "processes", clock, find_groups()), folder / "tasks", prepare
    )


def _packages_needed(spec: TaskSpec, rows: str) -> list[str]:
    """The task's own package, and those that predecessors promised steps with: the process fetches none."""
    config, store = spec.config, open_rows(rows)
    needed = [config["package"]["hash"]]
    for partition in spec.partitions:
        birth = interval_birth(spec.birth, config["kind"], config["lineage"], partition)
        ref = IntervalRef(job=spec.job, job_birth=spec.birth, partition=partition, birth=birth)
        try:
            intent = store.peek(ref).intent
        except IntervalMissing:
            continue  # the task says so itself, with more to tell
        if intent is not None:
            needed.append(intent.package)
    return list(dict.fromkeys(needed))
