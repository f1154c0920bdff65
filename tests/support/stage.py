"""A pipeline in one process, for tests and benches: real bus, rows and Spark tasks, started by hand instead
of by shards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.core.system_clock import SystemClock, sleep_ms
from penstock.jobs.config import JobConfig, validate_config
from penstock.jobs.tasks import FINAL, TaskSpec, map_partitions, single_task
from penstock.streams.bus.log import LOW_MIN, Log
from penstock.streams.catalogue import LogCatalogue, category_from_json
from penstock.streams.compile.packages import build_package, load_pipeline
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.data_plane import StreamDataPlane
from penstock.streams.dsl.injector import Injector
from penstock.streams.package_store import UnpackedPackages
from penstock.streams.places import open_log, open_rows
from penstock.streams.rows.row_store import IntervalRef, RowStore
from penstock.streams.step.step import OwnedInterval, TaskDescriptor, input_of


class Stage:
    """One folder: bus, rows, packages, and the jobs of one pipeline."""

    def __init__(
        self,
        spark: Any,
        folder: Path,
        pipeline: Path,
        category: dict[str, Any],
        *,
        bus: str = "",
        rows: str = "",
        checkpoints: Path | None = None,
    ) -> None:
        self.bus, self.rows_place = bus or f"embedded:{folder / 'bus'}", rows or f"sqlite:{folder / 'rows'}"
        self.log: Log = open_log(self.bus)
        self.rows: RowStore = open_rows(self.rows_place)
        self.log.create(category_from_json(category))
        self._packages: dict[str, bytes] = {}
        self._shelf = UnpackedPackages(folder / "packages", lambda hash_: self._packages[hash_])
        self.deaths: list[str] = []
        self._checkpoints, self._spark = checkpoints or folder / "checkpoints", spark
        self._epochs: dict[str, int] = {}
        self.tasks = self.new_engine()
        self.data = StreamDataPlane(self.log, self.rows)
        self.configs: dict[str, dict[str, Any]] = {}
        self.births: dict[str, str] = {}
        self.compile(pipeline)

    def new_engine(self) -> Any:
        """Another container's engine (in the same session, which does not matter to it)."""
        from penstock.streams.spark.tasks import SparkTasks

        return SparkTasks(
            self._spark,
            bus=self.bus,
            rows=self.rows_place,
            package_folder=self._shelf.folder_of,
            checkpoints=self._checkpoints,
            die=self.deaths.append,
        )

    def compile(self, pipeline: Path, **changes: Any) -> None:
        """Compile a file and prepare what its jobs need."""
        found = load_pipeline(pipeline)
        package = build_package(pipeline, found.local_files)
        self._packages[package.hash] = package.data
        compiled = compile_pipeline(found, LogCatalogue(self.log), package.ref())
        for body in compiled.to_json()["jobs"]:
            merged = {**body, "trigger_ms": 200, **changes}
            config = validate_config(body["name"], merged)
            self.configs[config.name] = config.to_json()
            self.data.prepare(config.name, self.birth(config.name), config)

    def package(self, hash_: str) -> bytes:
        """A package that was compiled here."""
        return self._packages[hash_]

    def folder_of(self, package: str) -> Path:
        """Where a package of this stage lies, unpacked."""
        return self._shelf.folder_of(package)

    def birth(self, job: str) -> str:
        """Births are fixed here: a job lives once per stage, unless `births` names another life."""
        return self.births.get(job) or f"birth-{job}".replace(".", "-")

    def specs(self, job: str, *, generation: int = 1, tasks: int = 1, **changes: Any) -> list[TaskSpec]:
        """A job's tasks as containers get them."""
        config = {**self.configs[job], **changes}
        mapping = map_partitions(config["partitions"], tasks)
        return [
            TaskSpec(
                task_id=f"{job}/{index}",
                job=job,
                birth=self.birth(job),
                index=index,
                generation=generation,
                partitions=tuple(p for p, owner in enumerate(mapping) if owner == index),
                config_json=json.dumps(config),
                running_version=1,
            )
            for index in range(tasks)
        ]

    def start(
        self, job: str, *, generation: int = 1, epoch: int = 1, tasks: int = 1, engine: Any = None
    ) -> list[str]:
        """Start all tasks of a job; returns their ids."""
        specs = self.specs(job, generation=generation, tasks=tasks)
        for spec in specs:
            (engine or self.tasks).start(spec, shard_epoch=epoch)
        return [spec.task_id for spec in specs]

    def stop(self, ids: Iterable[str], engine: Any = None) -> None:
        """Stop tasks and see them end."""
        engine = engine or self.tasks
        for task_id in ids:
            engine.stop(task_id)
        wait_for(
            lambda: all(status.state in FINAL for status in engine.poll()),
            "tasks to stop",
        )
        for task_id in list(ids):
            engine.forget(task_id)

    def injector(self, category: str, epoch: int | None = None) -> Injector:
        """Somebody who writes records; each time a new life of the same writer."""
        epoch = self._epochs.get(category, 0) + 1 if epoch is None else epoch
        self._epochs[category] = epoch
        return Injector(self.log, category, "test-injector", epoch=epoch)

    def records(self, category: str) -> list[dict[str, Any]]:
        """Everything in a category, partition by partition."""
        found: list[dict[str, Any]] = []
        for partition, end in enumerate(self.log.end_offsets(category)):
            for batch in self.log.read(category, partition, 0, end):
                found += batch.to_pylist()
        return found


def reading_task(
    folder: Path, bus: str, category: str, *, offsets: Sequence[int] | None = None, replays: bool = False
) -> TaskDescriptor:
    """A task that owns every partition of a category and makes nothing of it; its rows lie in the folder.

    `offsets`: how far it has read; None: not at all. With `replays` it reads all that is there now, once.
    """
    log, rows = open_log(bus), open_rows(f"sqlite:{folder / 'rows'}")
    found, ends, owned = log.describe(category), log.end_offsets(category), []
    for partition, offset in enumerate([0] * len(ends) if offsets is None else offsets):
        ref = IntervalRef(job="reads", job_birth="reads", partition=partition, birth=f"reads-{partition}")
        rows.create(ref, offsets={found.birth: offset}, low=LOW_MIN)
        token = rows.acquire(ref, generation=1, shard_epoch=1).token
        owned.append(OwnedInterval(ref=ref, token=token, producers={found.birth: "reads"}))
    package = {"name": "reads", "version": "1", "hash": "0", "entry": "reads.py"}
    config = JobConfig.from_stored(
        {
            "name": "reads",
            "pipeline": "reads",
            "kind": "stateless",
            "partitions": len(ends),
            "package": package,
        }
    )
    return TaskDescriptor(
        spec=single_task("reads", "reads", config),
        bus=bus,
        rows=f"sqlite:{folder / 'rows'}",
        package_folder="",
        intervals=tuple(owned),
        inputs=(input_of(found),),
        outputs=(),
        replay={str(n): {found.birth: (0, end)} for n, end in enumerate(ends)} if replays else {},
    )


def wait_for(condition: Callable[[], bool], what: str, *, seconds: float = 300) -> None:
    """Poll until it holds, or fail saying what was waited for."""
    clock = SystemClock()
    deadline_ms = clock.boot_ms() + seconds * 1000
    while not condition():
        assert clock.boot_ms() < deadline_ms, f"gave up waiting for {what}"
        sleep_ms(50)
