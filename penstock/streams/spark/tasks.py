"""The runs of a container's tasks: each is a thread that owns its intervals and runs a Spark query."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.core.errors import ConfigError, CorruptData, EnvironmentProblem, Fenced, PipelineError, Refused
from penstock.jobs.tasks import FINAL, RunState, RunStatus, TaskSpec
from penstock.streams.compile.packages import load_entry
from penstock.streams.data_plane import find_inputs, find_outputs, interval_of, own_interval
from penstock.streams.places import checkpoint_folder, open_log, open_rows
from penstock.streams.rows.row_store import Changes, Intent, IntervalRef, IntervalRow, RowStore
from penstock.streams.spark.load import LoadMeter, LoadWatch
from penstock.streams.spark.query import replay, start_query
from penstock.streams.spark.run_errors import find_poison, is_fenced, is_of_values, readable
from penstock.streams.spark.source import TurnFiles, committed_by, turn_of
from penstock.streams.step.step import OwnedInterval, TaskDescriptor, input_from, is_dead, output_from

STATE_SETTINGS = {
    "stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "stateStore.checkpointFormatVersion": "2",
    "minBatchesToRetain": "10",
}
POINTER = "checkpoint"  # in the interval's offsets: the number of the current copy


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnQuery:
    """A task of kind `spark`, its interval, and the folder of its package."""

    spec: TaskSpec
    shard_epoch: int
    ref: IntervalRef
    package_folder: Path


class QueryLease:
    """The lease to run one query: acquired before its start, released when it has ended."""

    def __init__(self, query: OwnQuery, rows: RowStore, root: Path, *, mounted: Path | None = None) -> None:
        """`mounted`: a shared folder that must exist already on this machine."""
        self._query, self._rows, self._root, self._mounted = query, rows, root, mounted
        self.token = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[Path]:
        """Hold the lease; returns the checkpoint path. Refused while another runs, Fenced if one is newer."""
        if self._mounted is not None and not self._mounted.is_dir():
            raise EnvironmentProblem(
                f"{self._query.spec.task_id} cannot reach its checkpoint",
                why=f"there is no folder {self._mounted} on this machine",
                fix="mount it here as on the others; the task is tried again",
            )
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / "lease").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Refused(
                    f"{self._query.spec.task_id} runs already",
                    why="another process holds its lease; two would write everything twice",
                    fix="nothing: it is tried again, and starts when the other one has ended",
                ) from error
            yield self._own_checkpoint()

    def check(self) -> None:
        """Fenced if a successor has taken the interval."""
        found = self._rows.peek(self._query.ref).token
        if found != self.token:
            raise Fenced(
                f"{self._query.spec.task_id} has a new owner",
                why=f"token {self.token} was followed by {found}",
                fix="nothing: the successor goes on",
            )

    def _own_checkpoint(self) -> Path:
        """Copy the last checkpoint under a new name, then move the pointer; until then the old one is
        current.
        """
        query = self._query
        row = self._rows.acquire(query.ref, generation=query.spec.generation, shard_epoch=query.shard_epoch)
        self.token = row.token
        last, mine = row.offsets.get(POINTER, 0), self._root / str(row.token)
        if last and not (self._root / str(last)).is_dir():
            raise CorruptData(
                f"the checkpoint of {query.spec.task_id} is not there",
                why=f"its place says copy {last}, and {self._root} has none of that number",
                fix="bring the folder back (is the storage mounted?); to read everything anew and "
                "without state, set a larger `lineage`",
            )
        if not last:
            mine.mkdir(exist_ok=True)  # so that a later loss is detected
        else:
            unfinished = self._root / f".{row.token}"
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(self._root / str(last), unfinished)
            unfinished.rename(mine)
        self._rows.commit(
            query.ref, token=row.token, version=row.version, changes=Changes(offsets={POINTER: row.token})
        )
        for old in self._root.iterdir():  # the last one is kept for investigations
            if old.is_dir() and old.name.isdigit() and int(old.name) < last:
                shutil.rmtree(old, ignore_errors=True)
        return mine


def start_own_query(spark: SparkSession, query: OwnQuery, checkpoint: Path) -> StreamingQuery:
    """Run the user's function and check its return value."""
    config = query.spec.config
    package, name = config.code, config.computation["function"]
    function = getattr(load_entry(query.package_folder, package.entry, package.hash), name, None)
    if not callable(function):
        raise PipelineError(
            f"{package.entry} has no function {name!r}",
            why="the job says that it starts the query",
            fix="define it at the top level: def NAME(spark, checkpoint, arguments)",
        )
    found: Any = function(_own_session(spark), str(checkpoint), dict(config.arguments))
    if not isinstance(found, StreamingQuery):
        raise PipelineError(
            f"{name} of {package.entry} started no query",
            why=f"it gave back {type(found).__name__}",
            fix="end it with: return frame.writeStream … .start()",
        )
    used = _checkpoint_of(found)
    if not used.endswith(str(checkpoint)):
        found.stop()
        raise ConfigError(
            f"the query of {query.spec.task_id} keeps its checkpoint elsewhere",
            why=f"it uses {used}; its place would be lost, or shared, when it moves",
            fix='pass what the function is given: .option("checkpointLocation", checkpoint)',
        )
    return found


def _own_session(spark: SparkSession) -> SparkSession:
    """A session with its own settings, whose state can grow and be copied."""
    own = spark.newSession()
    for name, value in STATE_SETTINGS.items():
        own.conf.set(f"spark.sql.streaming.{name}", value)
    return own


def _checkpoint_of(query: StreamingQuery) -> str:
    wrapped: Any = query._jsq
    return str(wrapped.streamingQuery().resolvedCheckpointRoot()).removeprefix("file:").rstrip("/")


def progress_metrics(query: StreamingQuery | None) -> dict[str, float]:
    """Metrics from Spark's progress of the last batch."""
    progress: Any = query.lastProgress if query is not None else None
    if progress is None:
        return {}
    return {
        "input_rate": float(progress["inputRowsPerSecond"] or 0),
        "processed_rate": float(progress["processedRowsPerSecond"] or 0),
        "batch_ms": float(progress["durationMs"].get("triggerExecution", 0)),
    }


log = structlog.get_logger(__name__)

# Timeout of the current batch when a task is stopped.
DRAIN_S = 3.0


class SparkTasks:
    """A `Runner` whose runs are queries of one Spark session."""

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
        """Whether Spark's JVM still runs; without it this process must end."""
        process = self._spark.sparkContext._gateway.proc  # type: ignore[union-attr]
        return process.poll() is None

    def start(self, spec: TaskSpec, *, shard_epoch: int) -> None:
        """Start a run. Requires: there is no run of this task id."""
        assert spec.task_id not in self._runs, f"{spec.task_id} already has a run"
        run = (_OwnRun if spec.config.kind == "spark" else _Run)(self, spec, shard_epoch)
        self._runs[spec.task_id] = run
        run.start()

    def stop(self, task_id: str) -> None:
        """Request the end of a run."""
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

    def poll(self) -> tuple[RunStatus, ...]:
        """The status of every run that is not forgotten."""
        return tuple(run.status() for run in list(self._runs.values()))

    def forget(self, task_id: str) -> None:
        """Drop a run that has ended."""
        run = self._runs.pop(task_id, None)
        assert run is None or run.is_final(), f"{task_id} still runs"

    # What a run does, in order.

    def open(self, spec: TaskSpec, shard_epoch: int) -> tuple[TaskDescriptor, tuple[IntervalRow, ...]]:
        """Acquire every interval of the task, before anything is read."""
        bus, rows = open_log(self._bus), open_rows(self._rows)
        config = spec.config
        inputs = find_inputs(bus, config)
        outputs = find_outputs(bus, spec.job, config)
        opened = [
            own_interval(spec, partition, shard_epoch=shard_epoch, rows=rows, log=bus, outputs=outputs)
            for partition in spec.partitions
        ]
        descriptor = TaskDescriptor(
            spec=spec,
            bus=self._bus,
            rows=self._rows,
            package_folder=str(self._package_folder(config.code.hash)),
            intervals=tuple(interval for interval, _ in opened),
            inputs=inputs,
            outputs=outputs,
        )
        return descriptor, tuple(row for _, row in opened)

    def replay_intents(self, task: TaskDescriptor, rows: Sequence[IntervalRow]) -> None:
        """Complete a predecessor's intents, with their plan and package."""
        for interval, row in zip(task.intervals, rows, strict=True):
            if row.intent is None:
                continue
            log.info(
                "replaying",
                task=task.spec.task_id,
                partition=interval.ref.partition,
                ranges=dict(row.intent.ranges),
            )
            replay(self._spark, self._promised(task, interval, row.intent))

    def _promised(self, task: TaskDescriptor, interval: OwnedInterval, intent: Intent) -> TaskDescriptor:
        """The task as of an intent."""
        return replace(
            task.with_config(
                plan=intent.plan["plan"],
                package={**task.package.model_dump(mode="json"), "hash": intent.package},
            ),
            package_folder=str(self._package_folder(intent.package)),
            intervals=(interval,),
            inputs=tuple(input_from(item) for item in intent.plan["inputs"]),
            outputs=tuple(output_from(item) for item in intent.plan["outputs"]),
            replay={str(interval.ref.partition): dict(intent.ranges)},
        )

    def without_poison(
        self, task: TaskDescriptor, error: Exception
    ) -> tuple[TaskDescriptor, tuple[IntervalRow, ...]] | None:
        """The task without the records that made it fail; None if it did not fail for single records."""
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
            # The step may have failed before it wrote an intent.
            tried = task if row.intent is None else self._promised(task, interval, row.intent)
            spans = self._next_spans(task, row, partition) if row.intent is None else row.intent.ranges
            for birth, (start, end) in spans.items():
                found = find_poison(self._spark, tried, interval, birth, (start, end))
                if found:
                    log.warning("poison", task=task.spec.task_id, partition=partition, records=found)
                    poisoned.setdefault(str(partition), {}).setdefault(birth, {}).update(found)
                    is_news = True
        return (replace(task, poisoned=poisoned), rows) if is_news else None

    def _next_spans(
        self, task: TaskDescriptor, row: IntervalRow, partition: int
    ) -> dict[str, tuple[int, int]]:
        """The largest range that the next step would read, by input."""
        bus, found = open_log(self._bus), {}
        for _, source in task.inputs_of(partition):
            start = row.offsets[source.birth]
            end = bus.end_offsets(source.category)[partition]
            found[source.birth] = (start, min(end, start + task.batch_rows_max))
        return found

    def start_query(self, task: TaskDescriptor, trigger_ms: int) -> tuple[StreamingQuery, Path]:
        """Start the query with an empty temporary checkpoint named after the tokens."""
        tokens = "-".join(str(interval.token) for interval in task.intervals)
        scratch = self._checkpoints / f"{task.spec.task_id.replace('/', '_')}-{tokens}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        session, turn_ms = self._spark.sparkContext, 0
        if str(session.master).startswith("local"):  # remote executors do not see the folder
            slots = session.defaultParallelism
            turn_ms = turn_of(trigger_ms=trigger_ms, slots=slots, intervals=len(task.intervals))
        task = replace(task, drain_file=str(scratch / "drain"), turn_ms=turn_ms)
        return start_query(self._spark, task, checkpoint=scratch / "spark", trigger_ms=trigger_ms), scratch

    def own_query(self, spec: TaskSpec, shard_epoch: int) -> tuple[OwnQuery, QueryLease]:
        """A user's own query, with the lease that it needs."""
        config = spec.config
        query = OwnQuery(
            spec=spec,
            shard_epoch=shard_epoch,
            ref=interval_of(spec.job, spec.birth, config, 0),
            package_folder=self._package_folder(config.code.hash),
        )
        folder = checkpoint_folder(self._rows, spec.job, config)
        is_given = "checkpoint" in config.computation
        return query, QueryLease(
            query, open_rows(self._rows), folder / query.ref.birth, mounted=folder if is_given else None
        )

    def start_own_query(self, query: OwnQuery, checkpoint: Path) -> StreamingQuery:
        """Start it in a session of its own."""
        return start_own_query(self._spark, query, checkpoint)

    def cancel(self, query: StreamingQuery) -> None:
        """Cancel the Spark jobs of a query that does not stop."""
        self._spark.sparkContext.cancelJobGroup(str(query.runId))


class _Run:
    """One run of one task."""

    def __init__(self, owner: SparkTasks, spec: TaskSpec, shard_epoch: int) -> None:
        self._owner, self._spec, self._shard_epoch = owner, spec, shard_epoch
        self._state, self._error, self.kills = RunState.STARTING, "", 0
        self._stop = threading.Event()
        self._query: StreamingQuery | None = None
        self._load: LoadWatch | None = None
        self._scratch: Path | None = None
        self._thread = threading.Thread(target=self._body, name=f"task {spec.task_id}", daemon=True)

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
        return self._state in FINAL

    def status(self) -> RunStatus:
        state = self._state
        if state not in FINAL and self._stop.is_set():
            state = RunState.STOPPING
        return RunStatus(task_id=self._spec.task_id, state=state, error=self._error, metrics=self._metrics())

    def _metrics(self) -> dict[str, float]:
        return self._load.last if self._load is not None else {}

    def _turns(self) -> TurnFiles | None:
        return None if self._scratch is None else TurnFiles(self._scratch)

    def _has_begun(self) -> bool:
        """Whether a step of it has had its turn: a batch may take long, and it runs all the same."""
        turns = self._turns()
        return turns is not None and any(turns.of(p).began_ms for p in self._spec.partitions)

    def _body(self) -> None:
        try:
            self._work()
            self._state = RunState.STOPPED
        except Exception as error:
            # The end of a thread: every exception becomes the run's final state.
            self._error = readable(error)
            if self._stop.is_set():
                self._state = RunState.STOPPED
            else:
                self._state = RunState.FENCED if is_fenced(error) else RunState.FAILED
            log.warning("run ended", task=self._spec.task_id, state=self._state, error=self._error[:2000])
        finally:
            if self._load is not None:
                self._load.stop()
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)
            self._owner.on_change()

    def _work(self) -> None:
        trigger_ms = self._spec.config.trigger_ms
        task, rows = self._owner.open(self._spec, self._shard_epoch)
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
                # Whatever ended the run: if an interval has a newer owner, it is fenced and did not crash.
                for interval in task.intervals:
                    committed_by(task, interval)
                # Poison records become dead letters, if the job skips them.
                found = None if self._stop.is_set() else self._owner.without_poison(task, error)
                if found is None:
                    raise
                task, rows = found

    def _watch(self, query: StreamingQuery, scratch: Path) -> None:
        while not self._stop.wait(0.2):
            if not query.isActive:
                query.awaitTermination()  # raises the query's error
                return
            if self._state is RunState.STARTING and (query.lastProgress is not None or self._has_begun()):
                self._state = RunState.RUNNING
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
        query.stop()  # aborts a running batch, which is safe but wastes its work


class _OwnRun(_Run):
    """One run of a user's own query."""

    def _metrics(self) -> dict[str, float]:
        return progress_metrics(self._query)

    def _work(self) -> None:
        query, lease = self._owner.own_query(self._spec, self._shard_epoch)
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
                query.awaitTermination()  # raises the query's error
                return
            self._state = RunState.RUNNING
        patience = time.monotonic() + DRAIN_S
        while query.isActive and query.status["isTriggerActive"] and time.monotonic() < patience:
            if self.kills:
                return
            time.sleep(0.05)
