"""Runs a pipeline in this process: bus, state and Spark in one folder, without control plane and containers.

It runs the same tasks as a fleet, one per job. Their state stays in the folder, and the next run continues.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.clock import Clock
from penstock.core.errors import ComputationFailed, ConfigError
from penstock.jobs.config import JobConfig, validate_config
from penstock.jobs.tasks import FINAL, RunState, RunStatus, single_task
from penstock.streams.bus.copy import close_input, content_hash, publish_lines
from penstock.streams.bus.log import LOW_MAX, CategorySpec, Log
from penstock.streams.catalogue import LogCatalogue
from penstock.streams.compile.compiled import CompiledPipeline
from penstock.streams.compile.packages import Package, build_package, load_pipeline
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.data_plane import StreamDataPlane, intervals_of
from penstock.streams.inspect.record_lines import LineRules, Lines, lines_of
from penstock.streams.inspect.state_view import is_in_blocks
from penstock.streams.package_store import UnpackedPackages
from penstock.streams.places import open_log, open_rows
from penstock.streams.rows.row_store import IntervalRef, key_after

if TYPE_CHECKING:
    from penstock.streams.spark.tasks import SparkTasks

TRIGGER_MS = 200
SETTLED_ROUNDS = 4
PAGE = 10_000  # timers per read


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFolder:
    """The folder of a local run; its bus may be elsewhere."""

    folder: Path
    bus_place: str = ""  # "": an embedded log in the folder

    @property
    def bus(self) -> str:
        return self.bus_place or f"embedded:{self.folder / 'bus'}"

    @property
    def rows(self) -> str:
        return f"sqlite:{self.folder / 'rows'}"

    def birth(self, job: str) -> str:
        """A birth id that is stable for this folder; on a shared bus it differs between folders."""
        own = ""
        if self.bus_place:
            file = self.folder / "birth"
            if not file.exists():
                file.write_text(secrets.token_hex(8))
            own = f"{file.read_text().strip()}-"
        return f"local-{own}{job}".replace(".", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """Totals of one job of a run, and what is still pending.

    `dropped`: late records that are in no result. `open_keys`: keys with open windows or timers that wait for
    a later low watermark.
    """

    job: str
    records: int = 0
    late: int = 0
    dropped: int = 0
    dead_letters: int = 0
    waiting: int = 0  # unread records
    wall_timers: int = 0
    open_keys: int = 0

    @property
    def line(self) -> str:
        """One line of text for the user."""
        return (
            f"{self.job}: {self.records:,} records read, {self.late:,} late, {self.dropped:,} dropped, "
            f"{self.dead_letters:,} dead letters, {self.waiting:,} waiting"
        )


def notes_for(jobs: Sequence[JobSummary], open_inputs: Sequence[str], *, is_kept: bool) -> Iterator[str]:
    """Warnings about a run that has ended: dropped and pending records, and what to do. Pure."""
    for job in jobs:
        if job.dropped:
            yield (
                f"{job.job}: {job.dropped:,} of {job.records:,} records were late and are in no result; "
                'give their category a larger `lateness_ms`, or include them with late="update" '
                '(windows) or late = "process" (computations)'
            )
        if job.dead_letters:
            yield f"{job.job}: {job.dead_letters:,} records are dead letters; each has its reason there"
        if job.waiting:
            yield f"{job.job}: {job.waiting:,} records are unread, because the run was ended before"
        if job.open_keys:
            why = f"{', '.join(open_inputs) or 'the input'} has not ended"
            why += " (with --folder it stays open for more records)" * (is_kept and bool(open_inputs))
            yield (
                f"{job.job}: {job.open_keys:,} keys have open windows or pending timers, because {why}; "
                "they close with later records, or at the end of a run of all files without --folder"
            )
        if job.wall_timers:
            yield (
                f"{job.job}: {job.wall_timers:,} wall timers are pending: the run "
                "ended before they were due; "
                "run it with --follow until they have fired"
            )


class LocalRun:
    """Prepares a pipeline in a folder, starts its tasks, and reports their progress."""

    def __init__(self, place: LocalFolder, clock: Clock, *, is_kept: bool) -> None:
        """`is_kept`: the folder stays, and a later run may add records."""
        self._place, self._clock, self._is_kept = place, clock, is_kept
        self.log: Log = open_log(place.bus)
        self._rows = open_rows(place.rows)
        self._configs: dict[str, JobConfig] = {}
        self._tasks: SparkTasks | None = None
        self._package: Package | None = None
        self._closed: set[str] = set()
        self._shown: dict[tuple[str, int], int] = {}
        self._seen: tuple[int, ...] = ()
        self._still = 0

    def create(self, specs: Sequence[CategorySpec]) -> None:
        """Create categories for records from outside."""
        for spec in specs:
            self.log.create(spec)

    def compile(self, pipeline: Path) -> CompiledPipeline:
        """Compile a file against the folder's categories, and prepare what its jobs need."""
        found = load_pipeline(pipeline)
        self._package = build_package(pipeline, found.local_files, name=found.name)
        compiled = compile_pipeline(found, LogCatalogue(self.log), self._package.ref())
        data = StreamDataPlane(self.log, self._rows)
        for body in compiled.to_json()["jobs"]:
            config = validate_config(body["name"], {**body, "trigger_ms": TRIGGER_MS})
            self._configs[config.name] = config
            data.prepare(config.name, self._place.birth(config.name), config)
        sinks = {
            output.category
            for config in self._configs.values()
            for output in config.outputs
            if not output.internal
        }
        for sink in sorted(sinks):
            for partition, end in enumerate(self.log.end_offsets(sink)):
                self._shown[sink, partition] = end
        return compiled

    def publish(self, category: str, paths: Sequence[str], form: Lines, *, close: bool) -> int:
        """Publish files of records, each once even in repeated runs. `close`: no further files will come.

        Then the input ends, and all windows with it. An input whose watermark follows event times does not
        end if the folder is kept, because the next run may add records.
        """
        spec, epoch, appended, producers = self.log.describe(category).spec, self._clock.now_ms(), 0, []
        for path in paths:
            with open(path, "rb") as file:
                producers.append(f"file:{content_hash(file)}")
                self._check_open(category, path, producers[-1])
                rules = LineRules(spec=spec, form=form, now_ms=epoch)
                done = publish_lines(self.log, file, rules, name=path, producer=producers[-1], epoch=epoch)
                appended += done.appended
        if close and (spec.watermark == "injector" or not self._is_kept):
            # After all files: the end of the first file would make the records of the second one late.
            for producer in producers:
                close_input(self.log, category, producer=producer, epoch=epoch, now_ms=self._clock.now_ms())
            self._closed.add(category)
        return appended

    def _check_open(self, category: str, path: str, producer: str) -> None:
        """Refuse new records for an input that has ended: all of them would be late."""
        ended = self.log.watermark(category) >= LOW_MAX
        if ended and os.path.getsize(path) and not self.log.published_to(category, producer):
            raise ConfigError(
                f"{path} cannot be added: the input {category!r} of this folder has ended",
                why="an earlier run closed the input after its files; further "
                "records would be late, and dropped",
                fix="use a new --folder for all files together, or --follow while more files come",
            )

    def start(self, spark: Any) -> None:
        """Start one task per job."""
        from penstock.streams.spark.tasks import SparkTasks

        package = self._package
        assert package is not None, "compile comes first"
        packages = UnpackedPackages(self._place.folder / "packages", lambda hash_: package.data)
        self._tasks = SparkTasks(
            spark,
            bus=self._place.bus,
            rows=self._place.rows,
            package_folder=packages.folder_of,
            checkpoints=self._place.folder / "checkpoints",
            die=_raise_not_stopping,
        )
        for name, config in self._configs.items():
            spec = single_task(name, self._place.birth(name), config)
            self._tasks.start(spec, shard_epoch=1)

    def poll(self) -> tuple[RunStatus, ...]:
        """The statuses of the tasks; ComputationFailed if a task ended with an error."""
        assert self._tasks is not None, "start comes first"
        now_ms = self._clock.now_ms()
        for category in self.log.categories():
            self.log.advance(category.spec.name, now_ms=now_ms)
        statuses = self._tasks.poll()
        for status in statuses:
            if status.state in (RunState.FAILED, RunState.FENCED):
                raise ComputationFailed(
                    f"task {status.task_id} {status.state}",
                    why=status.error,
                    fix="correct the cause and run it again: it continues with the record that failed",
                )
        return statuses

    def is_done(self, statuses: Sequence[RunStatus]) -> bool:
        """Whether all input is read, and the number of output records has not changed for some rounds."""
        ends = tuple(sum(self.log.end_offsets(name)) for name in sorted(self._categories()))
        is_idle = all(
            status.state is RunState.RUNNING
            and _is_through(status.metrics, self._ends(status.task_id.rpartition("/")[0]))
            for status in statuses
        )
        self._still = self._still + 1 if is_idle and ends == self._seen else 0
        self._seen = ends
        return self._still >= SETTLED_ROUNDS

    def summary(self) -> tuple[JobSummary, ...]:
        """The summary of each job."""
        return tuple(self._summary_of(name) for name in self._configs)

    def open_inputs(self) -> tuple[str, ...]:
        """Inputs from outside that have not ended."""
        outside = {item.category for config in self._configs.values() for item in config.inputs}
        return tuple(sorted(outside - self._categories() - self._closed))

    def new_records(self) -> Iterator[tuple[str, bytes]]:
        """New records of the sinks since the last call, as (category, line)."""
        for (sink, partition), offset in list(self._shown.items()):
            end = self.log.end_offsets(sink)[partition]
            spec = self.log.describe(sink).spec
            for offsets, batch in self.log.scan(sink, partition, offset, end):
                for line in lines_of(batch, spec, partition=partition, offsets=offsets):
                    yield sink, line
            self._shown[sink, partition] = max(offset, end)

    def stop(self) -> bool:
        """Stop all tasks; True when all have ended."""
        assert self._tasks is not None, "start comes first"
        for status in self._tasks.poll():
            self._tasks.stop(status.task_id)
        return all(status.state in FINAL for status in self._tasks.poll())

    def _categories(self) -> set[str]:
        return {output.category for config in self._configs.values() for output in config.outputs}

    def _ends(self, job: str) -> bool:
        """Whether all inputs of a job end: closed here, or written by jobs whose inputs end."""
        writers: dict[str, list[str]] = {}
        for name, config in self._configs.items():
            for output in config.outputs:
                writers.setdefault(output.category, []).append(name)
        return all(
            all(self._ends(writer) for writer in writers[item.category])
            if item.category in writers
            else item.category in self._closed
            for item in self._configs[job].inputs
        )

    def _summary_of(self, job: str) -> JobSummary:
        config, counts = self._configs[job], Counter[str]()
        in_blocks = is_in_blocks(config.computation)
        births = {item.category: self.log.describe(item.category).birth for item in config.inputs}
        positions: dict[str, dict[int, int]] = {category: {} for category in births}
        for ref in intervals_of(job, self._place.birth(job), config):
            row = self._rows.peek(ref)
            counts.update(row.counters)
            for category, birth in births.items():
                if birth in row.offsets:
                    positions[category][ref.partition] = row.offsets[birth]
            wall, waiting = self._timers_of(ref)
            counts["wall_timers"] += wall
            stored_keys = row.kept.keys if in_blocks and row.kept is not None else None
            counts["open_keys"] += waiting if stored_keys is None else stored_keys
        now_ms = self._clock.now_ms()
        return JobSummary(
            job=job,
            records=counts["records"],
            late=counts["late"],
            dropped=counts["dropped"],
            dead_letters=counts["bad"] + counts["poison"],
            waiting=sum(
                self.log.lag(name, at, now_ms=now_ms).records for name, at in positions.items() if at
            ),
            wall_timers=counts["wall_timers"],
            open_keys=counts["open_keys"],
        )

    def _timers_of(self, ref: IntervalRef) -> tuple[int, int]:
        """The number of wall timers, and of keys with timers at the low watermark."""
        wall, keys, start = 0, set[str](), ("", "")
        while found := self._rows.scan_timers(ref, start=start, limit=PAGE):
            for one in found:
                if one.timer is not None and one.timer.wall:
                    wall += 1
                else:
                    keys.add(one.key)
            start = (found[-1].key, key_after(found[-1].tag))
        return wall, len(keys)


def _is_through(metrics: Mapping[str, float], is_bounded: bool) -> bool:
    if not metrics or metrics["lag_records"]:
        return False
    return not is_bounded or metrics["output_low"] >= LOW_MAX


def _raise_not_stopping(reason: str) -> None:
    raise ComputationFailed("a task does not stop", why=reason, fix="stop the command with Ctrl-C again")
