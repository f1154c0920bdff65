"""The tasks of a container, step by step and without Spark's JVM: its list, its engine's way to a task, its
source, and what its Python workers run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from penstock.streams.package_store import UnpackedPackages
from penstock.streams.spark.load import LoadMeter
from penstock.streams.step.step import DONE, TaskDescriptor
from tests.cli.world import World


class Container:
    """Runs what the control plane says, one step of each task at a call. What a step raises comes out."""

    def __init__(self, world: World, folder: Path) -> None:
        from penstock.streams.spark.tasks import SparkTasks

        settings = world.plane.settings
        self._world, self._folder = world, folder
        shelf = UnpackedPackages(folder / "packages", world.plane.packages.get)
        self._tasks = SparkTasks(
            cast(Any, None),  # a session, which nothing here needs
            bus=settings.bus_place,
            rows=settings.rows_place,
            package_folder=shelf.folder_of,
            checkpoints=folder / "checkpoints",
            die=lambda reason: None,
        )

    def open(self, job: str) -> list[TaskDescriptor]:
        """The job's tasks as they are on the list now, each with its intervals."""
        specs = self._world.plane.task_service.snapshot().jobs[job]
        return [self._tasks.open(spec, 1)[0] for spec in specs]

    def step(self, job: str) -> dict[str, float]:
        """One batch of all that there is, of each of its tasks; what the last task then reports."""
        from penstock.streams.spark.source import IntervalStreamReader
        from penstock.streams.spark.worker import step_function

        found: dict[str, float] = {}
        for task in self.open(job):
            text = task.to_json()
            reader = IntervalStreamReader(text, with_step=True)
            start = reader.initialOffset()
            end = reader.latestOffset(start, reader.getDefaultReadLimit())
            for partition in reader.partitions(start, end):
                rows = list(reader.read(partition))
                if rows[0].column("_kind")[0].as_py() != DONE:
                    assert not task.plan["stages"] and not task.plan["key"], "only Spark computes these"
                    with _as_a_worker(self._folder):
                        list(step_function(text)(iter(rows)))
            found = LoadMeter(task, trigger_ms=1000).measure(None, at_s=1.0, now_ms=0)
        return found

    def records(self, category: str) -> list[dict[str, Any]]:
        """Everything in a category."""
        log = self._world.plane.log
        return [
            row
            for partition, end in enumerate(log.end_offsets(category))
            for batch in log.read(category, partition, 0, end)
            for row in batch.to_pylist()
        ]


@contextmanager
def _as_a_worker(folder: Path) -> Iterator[None]:
    """Where a Python worker of Spark keeps its files: Spark says so when it starts one."""
    from pyspark import SparkFiles

    before = SparkFiles._root_directory, SparkFiles._is_running_on_worker
    SparkFiles._root_directory, SparkFiles._is_running_on_worker = str(folder), True
    try:
        yield
    finally:
        SparkFiles._root_directory, SparkFiles._is_running_on_worker = before
