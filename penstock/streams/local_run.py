"""A pipeline in this process alone: bus, state and Spark in one folder, no control plane, no containers.

The same tasks as in a fleet, one per job. What they did stays in the folder: run again, they go on.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.clock import Clock
from penstock.core.errors import ComputationFailed
from penstock.jobs.config import validate_config
from penstock.streams.bus.log import LOW_MAX, CategorySpec, Log
from penstock.streams.bus_copy import close_input, content_hash, publish_lines
from penstock.streams.catalogue import LogCatalogue
from penstock.streams.compiled import CompiledPipeline
from penstock.streams.data_plane import StreamDataPlane
from penstock.streams.package_shelf import UnpackedPackages
from penstock.streams.packages import Package, build_package, load_pipeline
from penstock.streams.places import open_log, open_rows
from penstock.streams.plan import compile_pipeline
from penstock.streams.record_lines import LineRules, Lines, lines_of

if TYPE_CHECKING:
    from penstock.streams.engine.spark_tasks import RunView, SparkTasks

TRIGGER_MS = 200
SETTLED_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlace:
    """A folder that holds everything of a local run; its streams may be elsewhere."""

    folder: Path
    bus_place: str = ""  # "": an embedded log in the folder

    @property
    def bus(self) -> str:
        return self.bus_place or f"embedded:{self.folder / 'bus'}"

    @property
    def rows(self) -> str:
        return f"sqlite:{self.folder / 'rows'}"

    def birth(self, job: str) -> str:
        """The same each time in this folder. On a bus that others use too, no other folder's is like it."""
        own = ""
        if self.bus_place:
            file = self.folder / "birth"
            if not file.exists():
                file.write_text(secrets.token_hex(8))
            own = f"{file.read_text().strip()}-"
        return f"local-{own}{job}".replace(".", "-")


class LocalRun:
    """Prepares a pipeline in a folder, starts its tasks, and sees how far they are."""

    def __init__(self, place: LocalPlace, clock: Clock) -> None:
        self._place, self._clock = place, clock
        self.log: Log = open_log(place.bus)
        self._configs: dict[str, dict[str, Any]] = {}
        self._tasks: SparkTasks | None = None
        self._package: Package | None = None
        self._closed: set[str] = set()
        self._shown: dict[tuple[str, int], int] = {}
        self._seen: tuple[int, ...] = ()
        self._still = 0

    def create(self, specs: Sequence[CategorySpec]) -> None:
        """Categories for records from outside."""
        for spec in specs:
            self.log.create(spec)

    def compile(self, pipeline: Path) -> CompiledPipeline:
        """Compile a file against the folder's categories, and prepare what its jobs need."""
        found = load_pipeline(pipeline)
        self._package = build_package(pipeline, found.local_files, name=found.name)
        compiled = compile_pipeline(found, LogCatalogue(self.log), self._package.ref())
        data = StreamDataPlane(self.log, open_rows(self._place.rows))
        for body in compiled.to_json()["jobs"]:
            config = validate_config(body["name"], {**body, "trigger_ms": TRIGGER_MS}).to_json()
            self._configs[config["name"]] = config
            data.prepare(config["name"], self._place.birth(config["name"]), config)
        sinks = {
            output["category"]
            for config in self._configs.values()
            for output in config["outputs"]
            if not output["internal"]
        }
        for sink in sorted(sinks):
            for partition, end in enumerate(self.log.end_offsets(sink)):
                self._shown[sink, partition] = end
        return compiled

    def publish(self, category: str, paths: Sequence[str], form: Lines, *, close: bool) -> int:
        """Files of records, each once however often it is run; `close`: nothing more comes."""
        spec, epoch, appended, producers = self.log.describe(category).spec, self._clock.now_ms(), 0, []
        for path in paths:
            with open(path, "rb") as file:
                producers.append(f"file:{content_hash(file)}")
                rules = LineRules(spec=spec, form=form, now_ms=epoch)
                done = publish_lines(self.log, file, rules, name=path, producer=producers[-1], epoch=epoch)
                appended += done.appended
        # Only now: behind the word of the first file the records of the second would be late.
        for producer in producers if close and spec.watermark == "injector" else ():
            close_input(self.log, category, producer=producer, epoch=epoch, now_ms=self._clock.now_ms())
        if close:
            self._closed.add(category)
        return appended

    def start(self, spark: Any) -> None:
        """One task per job."""
        from penstock.streams.engine.spark_tasks import Assignment, SparkTasks

        package = self._package
        assert package is not None, "compile comes first"
        shelf = UnpackedPackages(self._place.folder / "packages", lambda hash_: package.data)
        self._tasks = SparkTasks(
            spark,
            bus=self._place.bus,
            rows=self._place.rows,
            package_folder=shelf.folder_of,
            checkpoints=self._place.folder / "checkpoints",
            die=_give_up,
        )
        for name, config in self._configs.items():
            self._tasks.start(
                Assignment(
                    task_id=f"{name}/0",
                    job=name,
                    job_birth=self._place.birth(name),
                    generation=1,
                    shard_epoch=1,
                    partitions=range(config["partitions"]),
                    config=config,
                )
            )

    def look(self) -> tuple[RunView, ...]:
        """How the tasks are; ComputationFailed if one ended with an error."""
        assert self._tasks is not None, "start comes first"
        now_ms = self._clock.now_ms()
        for category in self.log.categories():
            self.log.advance(category.spec.name, now_ms=now_ms)
        views = self._tasks.poll()
        for view in views:
            if view.state in ("failed", "fenced"):
                raise ComputationFailed(
                    f"task {view.task_id} {view.state}",
                    why=view.error,
                    fix="correct what is named and run it again: it goes on with the record that failed",
                )
        return views

    def is_done(self, views: Sequence[RunView]) -> bool:
        """Whether all that was given is read, and what follows from it has settled."""
        ends = tuple(sum(self.log.end_offsets(name)) for name in sorted(self._categories()))
        is_idle = all(
            view.state == "running" and _is_through(view.metrics, self._is_bounded()) for view in views
        )
        self._still = self._still + 1 if is_idle and ends == self._seen else 0
        self._seen = ends
        return self._still >= SETTLED_ROUNDS

    def new_records(self) -> Iterator[tuple[str, bytes]]:
        """What came into the sinks since the last call, as (category, line)."""
        for (sink, partition), offset in list(self._shown.items()):
            end = self.log.end_offsets(sink)[partition]
            spec = self.log.describe(sink).spec
            for offsets, batch in self.log.scan(sink, partition, offset, end):
                for line in lines_of(batch, spec, partition=partition, offsets=offsets):
                    yield sink, line
            self._shown[sink, partition] = max(offset, end)

    def stop(self) -> bool:
        """Ask every task to end; True when all have."""
        assert self._tasks is not None, "start comes first"
        for view in self._tasks.poll():
            self._tasks.stop(view.task_id)
        return all(view.state in ("stopped", "failed", "fenced") for view in self._tasks.poll())

    def _categories(self) -> set[str]:
        return {output["category"] for config in self._configs.values() for output in config["outputs"]}

    def _is_bounded(self) -> bool:
        """Whether every input that nobody here writes ends by its injector's word."""
        outside = {config["inputs"][0]["category"] for config in self._configs.values()} - self._categories()
        return all(
            name in self._closed and self.log.describe(name).spec.watermark == "injector" for name in outside
        )


def _is_through(metrics: Mapping[str, float], is_bounded: bool) -> bool:
    if not metrics or metrics["lag_records"]:
        return False
    return not is_bounded or metrics["output_low"] >= LOW_MAX


def _give_up(reason: str) -> None:
    raise ComputationFailed("a task does not end", why=reason, fix="end the command with Ctrl-C again")
