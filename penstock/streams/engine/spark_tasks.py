"""The runs of a container's tasks: each a thread that owns its intervals, starts a query, and sees it end."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.jobs.births import interval_birth, producer_of
from penstock.streams.data_plane import find_outputs
from penstock.streams.engine.load import LoadMeter, LoadWatch
from penstock.streams.engine.own_query import (
    OwnQuery,
    QueryLease,
    progress_metrics,
    start_own_query,
)
from penstock.streams.engine.poison import find_poison, is_of_values
from penstock.streams.engine.query import replay, start_query
from penstock.streams.engine.run_errors import is_fenced, readable
from penstock.streams.places import checkpoint_folder, open_log, open_rows
from penstock.streams.rows.row_store import Intent, IntervalRef, IntervalRow
from penstock.streams.step import is_dead, open_interval
from penstock.streams.task import (
    BATCH_BYTES_MAX,
    OwnedInterval,
    TaskDescriptor,
    input_from,
    input_of,
    output_from,
    settings_of,
)
from penstock.streams.turns import TurnFiles, turn_of

log = structlog.get_logger(__name__)

# A batch that runs when a task is asked to stop may take this long to end.
DRAIN_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a run is asked to do: a task spec's content and the shard epoch it runs under."""

    task_id: str
    job: str
    job_birth: str
    generation: int
    shard_epoch: int
    partitions: Sequence[int]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run as seen from outside. `state`: starting, running, stopping, stopped, failed or fenced."""

    task_id: str
    state: str
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


class SparkTasks:
    """Starts and stops task runs in one Spark session."""

    def __init__(
        self,
        spark: SparkSession,
        *,
        bus: str,
        rows: str,
        package_folder: Callable[[str], Path],
        checkpoints: Path,
        die: Callable[[str], None],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._spark, self._bus, self._rows = spark, bus, rows
        self._package_folder, self._checkpoints, self._die = package_folder, checkpoints, die
        self.on_change = on_change  # called when a run has come to another state
        self._runs: dict[str, _Run] = {}

    def is_alive(self) -> bool:
        """Whether Spark's JVM still runs: without it this process is of no use."""
        process = self._spark.sparkContext._gateway.proc  # type: ignore[union-attr]
        return process.poll() is None

    def start(self, assignment: Assignment) -> None:
        """Begin a run. Requires: no run of this task id is known."""
        assert assignment.task_id not in self._runs, f"{assignment.task_id} already has a run"
        run = (_OwnRun if assignment.config["kind"] == "spark" else _Run)(self, assignment)
        self._runs[assignment.task_id] = run
        run.start()

    def stop(self, task_id: str) -> None:
        """Ask a run to end."""
        if task_id in self._runs:
            self._runs[task_id].ask_to_stop()

    def kill(self, task_id: str) -> None:
        """End a run that did not stop: first its Spark jobs; if it still lives at the next call, the whole
        engine.
        """
        run = self._runs.get(task_id)
        if run is None or run.is_final():
            return
        if run.kills >= 1:
            self._die(f"task {task_id} did not stop")
        run.kill()

    def poll(self) -> tuple[RunView, ...]:
        """Every run not yet forgotten."""
        return tuple(run.view() for run in list(self._runs.values()))

    def forget(self, task_id: str) -> None:
        """Drop a run that has ended."""
        run = self._runs.pop(task_id, None)
        assert run is None or run.is_final(), f"{task_id} still runs"

    # What a run does, in order.

    def open(self, assignment: Assignment) -> tuple[TaskDescriptor, tuple[IntervalRow, ...]]:
        """Acquire every interval of the task; only then is anything read."""
        bus, rows = open_log(self._bus), open_rows(self._rows)
        config = assignment.config
        sources = [bus.describe(item["category"]) for item in config["inputs"]]
        reads = config["plan"].get("reads") or [None] * len(sources)
        outputs = find_outputs(bus, assignment.job, config)
        intervals, found = [], []
        for partition in assignment.partitions:
            ref = IntervalRef(
                job=assignment.job,
                job_birth=assignment.job_birth,
                partition=partition,
                birth=interval_birth(assignment.job_birth, config["kind"], config["lineage"], partition),
            )
            producer_for = partial(_producer, assignment, partition)
            row = open_interval(
                ref=ref,
                generation=assignment.generation,
                shard_epoch=assignment.shard_epoch,
                producer_for=producer_for,
                rows=rows,
                log=bus,
                outputs=outputs,
            )
            producers = {birth: producer_for(birth) for birth in row.offsets}
            intervals.append(OwnedInterval(ref=ref, token=row.token, producers=producers))
            found.append(row)
        package = config["package"]
        descriptor = TaskDescriptor(
            task_id=assignment.task_id,
            job=assignment.job,
            kind=config["kind"],
            bus=self._bus,
            rows=self._rows,
            intervals=tuple(intervals),
            inputs=tuple(input_of(source, columns) for source, columns in zip(sources, reads, strict=True)),
            outputs=outputs,
            plan=config["plan"],
            package_hash=package["hash"],
            package_folder=str(self._package_folder(package["hash"])),
            package_entry=package["entry"],
            arguments=config.get("arguments", {}),
            batch_rows_max=config["batch_rows_max"],
            batch_bytes_max=config.get("batch_bytes_max", BATCH_BYTES_MAX),
            **settings_of(config),
        )
        return descriptor, tuple(found)

    def replay_intents(self, task: TaskDescriptor, rows: Sequence[IntervalRow]) -> None:
        """Finish, with their own plan and package, the ranges that a predecessor began to publish."""
        for interval, row in zip(task.intervals, rows, strict=True):
            if row.intent is None:
                continue
            log.info(
                "replaying",
                task=task.task_id,
                partition=interval.ref.partition,
                ranges=dict(row.intent.ranges),
            )
            replay(self._spark, self._promised(task, interval, row.intent))

    def _promised(self, task: TaskDescriptor, interval: OwnedInterval, intent: Intent) -> TaskDescriptor:
        """The task as it was when it promised this."""
        return replace(
            task,
            intervals=(interval,),
            inputs=tuple(input_from(item) for item in intent.plan["inputs"]),
            outputs=tuple(output_from(item) for item in intent.plan["outputs"]),
            plan=intent.plan["plan"],
            package_hash=intent.package,
            package_folder=str(self._package_folder(intent.package)),
            replay={str(interval.ref.partition): dict(intent.ranges)},
        )

    def without_poison(
        self, task: TaskDescriptor, error: Exception
    ) -> tuple[TaskDescriptor, tuple[IntervalRow, ...]] | None:
        """The task with the records set aside that made it fail; None if no single records did."""
        may_skip = task.poison != "fail" and any(is_dead(item.stream) for item in task.outputs)
        if task.kind != "stateless" or not may_skip or not is_of_values(error):
            return None
        rows = tuple(open_rows(self._rows).peek(interval.ref) for interval in task.intervals)
        poisoned = {
            partition: {birth: dict(found) for birth, found in births.items()}
            for partition, births in task.poisoned.items()
        }
        is_news = False
        for interval, row in zip(task.intervals, rows, strict=True):
            partition = interval.ref.partition
            # The step may have failed before it promised anything.
            tried = task if row.intent is None else self._promised(task, interval, row.intent)
            spans = self._next_spans(task, row, partition) if row.intent is None else row.intent.ranges
            for birth, (start, end) in spans.items():
                found = find_poison(self._spark, tried, interval, birth, (start, end))
                if found:
                    log.warning("poison", task=task.task_id, partition=partition, records=found)
                    poisoned.setdefault(str(partition), {}).setdefault(birth, {}).update(found)
                    is_news = True
        return (replace(task, poisoned=poisoned), rows) if is_news else None

    def _next_spans(
        self, task: TaskDescriptor, row: IntervalRow, partition: int
    ) -> dict[str, tuple[int, int]]:
        """What the next step would read at most, by input."""
        bus, found = open_log(self._bus), {}
        for _, source in task.inputs_of(partition):
            start = row.offsets[source.birth]
            end = bus.end_offsets(source.category)[partition]
            found[source.birth] = (start, min(end, start + task.batch_rows_max))
        return found

    def start_query(self, task: TaskDescriptor, trigger_ms: int) -> tuple[StreamingQuery, Path]:
        """Start the query on an empty scratch checkpoint named after the tokens."""
        tokens = "-".join(str(interval.token) for interval in task.intervals)
        scratch = self._checkpoints / f"{task.task_id.replace('/', '_')}-{tokens}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        session, turn_ms = self._spark.sparkContext, 0
        if str(session.master).startswith("local"):  # executors elsewhere do not see the folder
            slots = session.defaultParallelism
            turn_ms = turn_of(trigger_ms=trigger_ms, slots=slots, intervals=len(task.intervals))
        task = replace(task, drain_file=str(scratch / "drain"), turn_ms=turn_ms)
        return start_query(self._spark, task, checkpoint=scratch / "spark", trigger_ms=trigger_ms), scratch

    def own_query(self, assignment: Assignment) -> tuple[OwnQuery, QueryLease]:
        """A query that a user brought, and the lease that it needs before its start."""
        config, package = assignment.config, assignment.config["package"]
        birth = interval_birth(assignment.job_birth, config["kind"], config["lineage"], 0)
        query = OwnQuery(
            task_id=assignment.task_id,
            ref=IntervalRef(job=assignment.job, job_birth=assignment.job_birth, partition=0, birth=birth),
            generation=assignment.generation,
            shard_epoch=assignment.shard_epoch,
            package_folder=self._package_folder(package["hash"]),
            package_entry=package["entry"],
            package_hash=package["hash"],
            function=config["plan"]["computation"]["function"],
            arguments=config.get("arguments", {}),
        )
        folder = checkpoint_folder(self._rows, assignment.job, config)
        is_given = "checkpoint" in config["plan"]["computation"]
        return query, QueryLease(
            query, open_rows(self._rows), folder / birth, mounted=folder if is_given else None
        )

    def start_own_query(self, query: OwnQuery, checkpoint: Path) -> StreamingQuery:
        """Start it in a session of its own."""
        return start_own_query(self._spark, query, checkpoint)

    def cancel(self, query: StreamingQuery) -> None:
        """Cancel the Spark jobs of a query that does not end by itself."""
        self._spark.sparkContext.cancelJobGroup(str(query.runId))


def _producer(assignment: Assignment, partition: int, input_birth: str) -> str:
    return producer_of(
        job_birth=assignment.job_birth,
        kind=assignment.config["kind"],
        lineage=assignment.config["lineage"],
        input_birth=input_birth,
        partition=partition,
    )


class _Run:
    """One life of one task."""

    def __init__(self, owner: SparkTasks, assignment: Assignment) -> None:
        self._owner, self.assignment = owner, assignment
        self._state, self._error, self.kills = "starting", "", 0
        self._stop = threading.Event()
        self._query: StreamingQuery | None = None
        self._load: LoadWatch | None = None
        self._scratch: Path | None = None
        self._thread = threading.Thread(target=self._body, name=f"task {assignment.task_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self) -> None:
        self._stop.set()

    def kill(self) -> None:
        self.kills += 1
        self._stop.set()
        if self._query is not None:
            self._owner.cancel(self._query)

    def is_final(self) -> bool:
        return self._state in ("stopped", "failed", "fenced")

    def view(self) -> RunView:
        state = self._state
        if state in ("starting", "running") and self._stop.is_set():
            state = "stopping"
        return RunView(
            task_id=self.assignment.task_id, state=state, error=self._error, metrics=self._metrics()
        )

    def _metrics(self) -> dict[str, float]:
        return self._load.last if self._load is not None else {}

    def _turns(self) -> TurnFiles | None:
        return None if self._scratch is None else TurnFiles(self._scratch)

    def _has_begun(self) -> bool:
        """Whether a step of it has had its turn: a batch may take long, and it runs all the same."""
        turns = self._turns()
        return turns is not None and any(turns.of(p).began_ms for p in self.assignment.partitions)

    def _body(self) -> None:
        try:
            self._work()
            self._state = "stopped"
        except Exception as error:
            # A thread's border: whatever ended the run becomes its final state, never a silent death.
            self._error = readable(error)
            if self._stop.is_set():
                self._state = "stopped"
            else:
                self._state = "fenced" if is_fenced(error) else "failed"
            log.warning(
                "run ended", task=self.assignment.task_id, state=self._state, error=self._error[:2000]
            )
        finally:
            if self._load is not None:
                self._load.stop()
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)
            self._owner.on_change()

    def _work(self) -> None:
        trigger_ms = self.assignment.config["trigger_ms"]
        task, rows = self._owner.open(self.assignment)
        meter = LoadMeter(task, trigger_ms=trigger_ms, turns=self._turns)
        self._load = LoadWatch(meter, lambda: self._query).start()
        while not self._stop.is_set():
            try:
                self._owner.replay_intents(task, rows)
                if not self._stop.is_set():
                    self._query, self._scratch = self._owner.start_query(task, trigger_ms)
                    self._watch(self._query, self._scratch)
                return
            except Exception as error:
                # Records that no plan can compute are put aside, if the job is to go on without them.
                found = None if self._stop.is_set() else self._owner.without_poison(task, error)
                if found is None:
                    raise
                task, rows = found

    def _watch(self, query: StreamingQuery, scratch: Path) -> None:
        while not self._stop.wait(0.2):
            if not query.isActive:
                query.awaitTermination()  # raises what ended it
                return
            if self._state == "starting" and (query.lastProgress is not None or self._has_begun()):
                self._state = "running"
                self._owner.on_change()
        (scratch / "drain").touch()
        patience = time.monotonic() + DRAIN_S
        while (
            query.isActive
            and query.status["isTriggerActive"]
            and time.monotonic() < patience
            and not self.kills
        ):
            time.sleep(0.05)
        query.stop()  # cuts a batch off if one still runs: harmless, but noisy and wasted


class _OwnRun(_Run):
    """One life of a query that a user brought."""

    def _metrics(self) -> dict[str, float]:
        return progress_metrics(self._query)

    def _work(self) -> None:
        query, lease = self._owner.own_query(self.assignment)
        with lease.held() as checkpoint:
            if self._stop.is_set():
                return
            self._query = self._owner.start_own_query(query, checkpoint)
            try:
                self._watch_lease(self._query, lease)
            finally:
                self._query.stop()

    def _watch_lease(self, query: StreamingQuery, lease: QueryLease) -> None:
        while not self._stop.wait(0.5):
            lease.check()
            if not query.isActive:
                query.awaitTermination()  # raises what ended it
                return
            self._state = "running"
        patience = time.monotonic() + DRAIN_S
        while query.isActive and query.status["isTriggerActive"] and time.monotonic() < patience:
            if self.kills:
                return
            time.sleep(0.05)
