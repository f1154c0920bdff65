"""Tests of a computation in memory: a script adds records, watermarks and clock times; the real step runs.

A script can be repeated with a crash after every effect, or with other batches; the result must be the same.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import ComputationFailed, PipelineError
from penstock.jobs.config import JobConfig
from penstock.jobs.tasks import single_task
from penstock.streams.bus.log import ARROW_TYPES, LOW_MAX, CategorySpec, Log
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.data_plane import StreamDataPlane, find_inputs, find_outputs, interval_of, own_interval
from penstock.streams.dsl.computation import Computation, Timer
from penstock.streams.dsl.windows import duration_ms
from penstock.streams.operators.build import logic_of
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.row_store import IntervalRef, IntervalRow, RowStore
from penstock.streams.step.outbox import Sending
from penstock.streams.step.reading import read_ranges
from penstock.streams.step.record_ids import IdFilters
from penstock.streams.step.stateful import StatefulStep
from penstock.streams.step.stateless import StatelessStep
from penstock.streams.step.step import BAD, DATA, DEAD_COLUMNS, END, InputRange, OwnedInterval, TaskDescriptor
from penstock.streams.step.vectorised import VectorComputation

IN, DEAD = "in", "dead"
_KINDS = {bool: "boolean", int: "bigint", float: "double", str: "string", bytes: "binary"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    """One record of an output stream."""

    ts: Millis
    key: str | None
    values: Mapping[str, Any]
    late: bool = False


@dataclass(slots=True)
class Schedule:
    """When steps run during a script: after which of its calls, and with how many records at most."""

    settles: frozenset[int] | None = None  # None: after each
    rows_max: int = 1_000_000
    calls: list[str] = field(default_factory=list)


class Scripted(ABC):
    """The base of runs: the calls of a script, with steps between them according to a schedule."""

    def __init__(self) -> None:
        self.trial, self.schedule = Trial(), Schedule()
        self._holds = False
        self._sequences: dict[str, dict[int, int]] = {}

    def prepare(self, schedule: Schedule, faults: Faults) -> None:
        """Set the schedule and faults of a run. Requires: the script has not started."""
        self.schedule, self.trial.faults, self.trial.rows_max = schedule, faults, schedule.rows_max

    @contextmanager
    def batch(self) -> Iterator[None]:
        """All calls inside are one batch: steps run at its end, or when results are read."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
        self._called("batch()")

    def advance_clock(self, now_ms: Millis) -> None:
        """Set the clock to this time. Steps for all earlier calls run first."""
        self.trial.settle()
        if now_ms < self.trial.now_ms:
            raise _backwards("the clock", self.trial.now_ms, now_ms)
        self.trial.now_ms = now_ms
        self._called(f"advance_clock({now_ms})", settles=True)

    def dead_letters(self, category: str = DEAD) -> list[dict[str, Any]]:
        """The dead letters with their reasons; for a pipeline those of one category."""
        return [dict(row.values) for row in self._records(category)]

    def _append(self, category: str, partition: int, row: Mapping[str, Any]) -> None:
        sequences = self._sequences.setdefault(category, {})
        sequences[partition] = sequences.get(partition, 0) + 1
        schema = self.trial.log.describe(category).spec.schema()
        batch = pa.RecordBatch.from_pydict(
            {name: [value] for name, value in {"_seq": sequences[partition], "_late": False, **row}.items()},
            schema=schema,
        )
        self.trial.log.publish(category, producer="script", epoch=1, batches={partition: batch}, gapless=True)

    def _report(self, category: str, low: Millis) -> None:
        before = self.trial.log.producers(category)["script"]
        if low < before:
            raise _backwards(f"the low watermark of {category!r}", before, low)
        report_ms = self.trial.next_report_ms()
        self.trial.log.report_low(category, producer="script", epoch=1, low=low, now_ms=report_ms)

    def _records(self, category: str) -> list[Produced]:
        """All records of a category, partition by partition."""
        self.trial.settle()
        log, found = self.trial.log, []
        for partition, end in enumerate(log.end_offsets(category)):
            for batch in log.read(category, partition, 0, end):
                for row in batch.to_pylist():
                    values = {name: value for name, value in row.items() if not name.startswith("_")}
                    found.append(Produced(ts=row["_ts"], key=row["_key"], values=values, late=row["_late"]))
        return found

    def _called(self, what: str, *, settles: bool = False) -> None:
        number, planned = len(self.schedule.calls), self.schedule.settles
        self.schedule.calls.append(what)
        if settles or (not self._holds and (planned is None or number in planned)):
            self.trial.settle()

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """Everything that must not depend on batches and crashes, by name."""


class Run(Scripted):
    """Runs one computation in memory. A step runs after each call.

    `inputs`: the columns of each input stream and their types; default: those of the first record. The clock
    starts at 0, and the low watermark before all times.
    """

    def __init__(
        self, computation: Computation, *, inputs: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        super().__init__()
        inputs = inputs or computation.inputs
        self._made = copy.deepcopy(computation)
        self._kind = type(computation)
        self._columns: dict[str, dict[str, str]] = {
            name: dict(given) for name, given in (inputs or {}).items()
        }
        self._streams = list(inputs or {IN: {}})
        self._values: dict[str, list[tuple[Any, ...]]] = {name: [] for name in self._streams}
        self._keys: set[str] = set()  # keys of records; others have no state
        for name in self._streams:
            spec = CategorySpec(name=name, partitions=1, columns=(), watermark="injector")
            self.trial.log.create(spec)
            self.trial.log.register_producer(name, "script")
        self._job = TrialJob(
            name=self._kind.__name__,
            config=JobConfig.from_stored(_config(self._kind, self._streams)),
            stages=self._with_columns,
            # A new one for each step, as in a task: attributes of `self` do not survive.
            computation=lambda: copy.deepcopy(self._made),
        )
        self.trial.add(self._job)
        self._set_columns()

    def record(self, key: str, ts: Millis, stream: str = "", /, **columns: Any) -> None:
        """Add a record with this key and event time to the only input stream, or to `stream`."""
        stream = self._stream(stream)
        known = self._known(stream, columns)
        row = tuple(_checked(columns[name], name, kind) for name, kind in known.items())
        self._append(stream, 0, {"_ts": ts, "_key": key})
        self._values[stream].append(row)
        self._keys.add(key)
        self._called(f"record({key!r}, {ts})")

    def advance_watermark(self, low: Millis, stream: str = "") -> None:
        """Set the low watermark of all inputs, or of `stream`: later records before `low` are late."""
        for name in [self._stream(stream)] if stream else self._streams:
            self._report(name, low)
        self._called(f"advance_watermark({low})")

    def close(self) -> None:
        """End all inputs: every timer at the low watermark fires."""
        self.advance_watermark(LOW_MAX)

    def outputs(self, stream: str = "out") -> list[dict[str, Any]]:
        """The columns of all records of an output stream, in order."""
        return [dict(made.values) for made in self.productions(stream)]

    def productions(self, stream: str = "out") -> list[Produced]:
        """All records of an output stream, in order, with timestamps and keys."""
        if stream not in self._kind.outputs:
            raise PipelineError(
                f"computation {self._kind.__name__!r} has no stream {stream!r}",
                why=f"it declares {', '.join(map(repr, self._kind.outputs)) or 'none'}",
                fix="use one of these, or declare the stream in `outputs`",
            )
        return self._records(f"to-{stream}")

    def state(self, key: str) -> Any:
        """The state of a key, as hooks see it; the defaults if nothing is stored."""
        stored = self._snapshot(key).states.get(key)
        codec = self._kind.state_codec
        return codec.blank() if stored is None else codec.decode(stored)

    def timers(self, key: str) -> list[Timer]:
        """The timers that are set for a key, the next one first."""
        return [
            Timer(row.key, row.tag, row.at_ms, row.hold_ms, row.late, row.wall)
            for row in self._snapshot(key).timers
            if row.key == key
        ]

    def counters(self) -> dict[str, int]:
        """The counters: records, late records, timers, productions and others."""
        self.trial.settle()
        return dict(self.trial.rows.peek(self._job.ref(0)).counters)

    @property
    def low_watermark(self) -> Millis:
        """The output low watermark: all later output records before it are late."""
        self.trial.settle()
        return self.trial.rows.peek(self._job.ref(0)).output_low

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for stream in self._kind.outputs:
            for made in self.productions(stream):
                found.setdefault(f"stream {stream!r}, key {made.key!r}", []).append(made)
        snapshot = self._snapshot()
        for key, data in snapshot.states.items():
            found[f"state of key {key!r}"] = self._kind.state_codec.plain(data)
        for row in snapshot.timers:
            found[f"timer {row.tag!r} of key {row.key!r}"] = row
        if self._kind.poison == "skip":
            found["dead letters"] = self.dead_letters()
        return {**found, "output low": self.low_watermark}

    def _snapshot(self, key: str | None = None) -> Any:
        self.trial.settle()
        ref = self._job.ref(0)
        token = self.trial.rows.peek(ref).token
        keys = sorted(self._keys) if key is None else [key]
        return self.trial.rows.snapshot(ref, token=token, keys=keys, timers_up_to=LOW_MAX, wall_up_to=LOW_MAX)

    def _stream(self, stream: str) -> str:
        if stream in self._streams or (not stream and len(self._streams) == 1):
            return stream or self._streams[0]
        raise PipelineError(
            f"there is no input stream {stream!r}" if stream else "the input stream is not specified",
            why=f"this run has {', '.join(map(repr, self._streams))}",
            fix=f"write run.record(key, ts, {self._streams[0]!r}, …)",
        )

    def _known(self, stream: str, columns: Mapping[str, Any]) -> dict[str, str]:
        if stream not in self._columns:
            self._columns[stream] = {name: _kind_of(name, columns[name]) for name in columns}
            self._set_columns()
        known = self._columns[stream]
        if set(known) != set(columns):
            raise PipelineError(
                f"a record of stream {stream!r} has other columns than those before it",
                why=f"they are {list(known)}, given were {list(columns)}",
                fix="give every record the same columns, None for null",
            )
        return known

    def _set_columns(self) -> None:
        """Write the columns of the inputs into the plan of a job with several inputs."""
        if len(self._streams) > 1:
            listed = [[name, list(self._columns.get(name, {}))] for name in self._streams]
            task = self._job.task
            assert task is not None, "the job is added first"
            computation = {**task.plan["computation"], "inputs": listed}
            self._job.task = task.with_config(plan={**task.plan, "computation": computation})

    def _with_columns(self, rows: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Add the columns of the records, which the log does not store; null for other inputs."""
        stream = self._streams[rows.column("_input")[0].as_py()]
        chosen = [self._values[stream][place] for place in rows.column("_offset").to_pylist()]
        own = {name: place for place, name in enumerate(self._columns[stream])}
        together = {name: kind for columns in self._columns.values() for name, kind in columns.items()}
        for name, kind in together.items():
            values = [row[own[name]] if name in own else None for row in chosen]
            rows = rows.append_column(name, pa.array(values, ARROW_TYPES[kind]))
        return [rows]


def _config(kind: type[Computation], streams: list[str]) -> dict[str, Any]:
    written = [(stream, f"to-{stream}", list(columns.items())) for stream, columns in kind.outputs.items()]
    if kind.poison == "skip":
        written.append(("dead", DEAD, list(DEAD_COLUMNS)))
    outputs = [
        {"stream": stream, "category": category, "partitions": 1, "columns": columns, "internal": False}
        for stream, category, columns in written
    ]
    return {
        "name": kind.__name__,
        "pipeline": kind.__name__,
        "poison": kind.poison,
        "productions": kind.productions,
        "dedup": kind.dedup,
        "kind": "stateful",
        "lineage": 0,
        "partitions": 1,
        "inputs": [{"category": name} for name in streams],
        "outputs": outputs,
        "plan": {"computation": {"class": kind.__name__, **_ids_of(kind)}},
    }


def _ids_of(kind: type[Computation]) -> dict[str, Any]:
    if not kind.record_id:
        return {}
    return {"ids": {"column": kind.record_id, "slack_ms": duration_ms(kind.record_id_slack)}}


def _kind_of(name: str, value: Any) -> str:
    """The type of a column with this first value."""
    of_items = isinstance(value, list) and bool(value)
    kind = _KINDS.get(type(value[0] if of_items else value))
    if kind is None or name.startswith("_"):
        raise PipelineError(
            f"the type of column {name!r} cannot be inferred from {value!r}",
            why=f"a column holds {', '.join(kind.__name__ for kind in _KINDS)} or lists of these, and the "
            "type is inferred from the first value; names that start with an underscore are reserved",
            fix='declare it: Run(MyComputation(), inputs={"in": {"amount": "double"}})',
        )
    return f"array<{kind}>" if of_items else kind


def _checked(value: Any, name: str, kind: str) -> Any:
    try:
        if ARROW_TYPES[kind] in (pa.int64(), pa.int32()) and isinstance(value, float):
            raise TypeError("a fraction is not a whole number")
        return pa.array([value], ARROW_TYPES[kind])[0].as_py()
    except (pa.ArrowException, TypeError, ValueError, OverflowError, KeyError) as error:
        raise PipelineError(
            f"column {name!r} cannot hold {value!r}",
            why=f"it is {kind!r}, as declared or as in the first record: {error}",
            fix=f"give it values of one type, one of {', '.join(ARROW_TYPES)}",
        ) from error


def _backwards(what: str, before: Millis, after: Millis) -> PipelineError:
    return PipelineError(
        f"{what} cannot go back from {before} to {after}",
        why="time only moves forward, as in a fleet",
        fix="advance it to a later time, or begin a new run",
    )


# --- the same script again -------------------------------------------------------------------------------

CUTS_MAX = 200
Factory = Callable[[], Any]  # makes a Computation (for example its class), a Run or a PipelineRun
Script = Callable[[Any], object]


class OutputsDiffer(AssertionError):
    """A repeated script had another result. The text has the crash or batches, and the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """How often a script ran, and the common result: productions, states, timers by name."""

    runs: int
    result: Mapping[str, Any]


def crash_everywhere(factory: Factory, script: Script) -> Tried:
    """Repeat the script with a crash after every effect, and before every commit, when user code has run.

    An effect is visible outside of the task: a commit, a publish, a report of a low watermark, a takeover.
    The crashed task is started again. `OutputsDiffer` if productions, states or timers differ from those of a
    run without a crash.
    """
    faults = Faults()
    expected = _run_script(factory, script, Schedule(), faults)
    for at in range(faults.passed):
        here = Faults(at=at)
        found = _run_script(factory, script, Schedule(), here)
        assert here.where, f"crash {at} did not happen"
        _compare(expected, found, f"with a crash {here.where}")
    return Tried(runs=faults.passed + 1, result=expected)


def cut_everywhere(factory: Factory, script: Script, *, seed: int = 0) -> Tried:
    """Repeat the script with its calls in other batches: all in one, and up to 200 other ways.

    `advance_clock` always ends a batch, and so does reading outputs, state or timers. Results must be a
    function of the records and the watermarks between them: `OutputsDiffer` if they are not.
    """
    first = Schedule()
    expected, runs = _run_script(factory, script, first, Faults()), 1
    for settles, rows_max in _cuts(len(first.calls), random.Random(seed)):
        ends = (
            "at the end alone"
            if not settles
            else f"after call {', '.join(str(n + 1) for n in sorted(settles))}"
        )
        where = f"with steps {ends}, of {rows_max} records at most"
        schedule = Schedule(settles=settles, rows_max=rows_max)
        _compare(expected, _run_script(factory, script, schedule, Faults(), where), where)
        runs += 1
    return Tried(runs=runs, result=expected)


def _cuts(calls: int, dice: random.Random) -> Iterator[tuple[frozenset[int], int]]:
    """All possible cuts if there are few; else no cut, single cuts and random ones."""
    places = range(calls)
    whole = 1_000_000
    if 2**calls <= CUTS_MAX:
        for count in range(calls):
            yield from ((frozenset(chosen), whole) for chosen in combinations(places, count))
    else:
        yield frozenset(), whole
        yield from ((frozenset({place}), whole) for place in list(places)[: CUTS_MAX // 2])
        for _ in range(CUTS_MAX // 2):
            yield (
                frozenset(place for place in places if dice.random() < 0.3),
                dice.choice((1, 2, 3, 5, whole)),
            )
    yield from ((frozenset(), rows_max) for rows_max in (1, 2, 3))


def _run_script(
    factory: Factory,
    script: Script,
    schedule: Schedule,
    faults: Faults,
    where: str = "",
) -> dict[str, Any]:
    run = _run_of(factory)
    run.prepare(schedule, faults)
    with _CrashNote(faults, where):
        script(run)
        run.trial.settle()
    return run.result()


def _run_of(factory: Factory) -> Scripted:
    made = factory()
    if isinstance(made, Computation):
        made = Run(made)
    if not isinstance(made, Scripted) or made.schedule.calls:
        raise PipelineError(
            "the script cannot be repeated",
            why=f"the factory returned {made!r}; it must return a new computation or run at each call",
            fix="pass a Computation's class, or: lambda: testing.Run(MyComputation(), inputs=…)",
        )
    return made


class _CrashNote:
    """Adds a note to exceptions of a script: the crash or the batches of this run."""

    def __init__(self, faults: Faults, where: str) -> None:
        self._faults, self._where = faults, where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        where = f"with a crash {self._faults.where}" if self._faults.where else self._where
        if error is not None and where:
            error.add_note(f"the script was run {where}")


def _compare(expected: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    for name in (*expected, *(name for name in found if name not in expected)):
        before, after = expected.get(name, "nothing"), found.get(name, "nothing")
        if before != after:
            raise OutputsDiffer(f"{name} differs {where}:\n  expected {before}\n  found    {after}")


ROUNDS_MAX = 10_000


_MARK_MS = 1000  # between two reports of a low: far enough apart for a mark each


_EFFECTS = {
    "rows": frozenset({"acquire", "commit", "delivered"}),
    "bus": frozenset({"fence", "publish", "report_low"}),
}


_NOT_FOR_USERS = ["_kind", "_meta", "_raw"]


Stages = Callable[[pa.RecordBatch], list[pa.RecordBatch]]


class Crash(BaseException):
    """A simulated crash of the process; a BaseException, so that no code catches it."""


@dataclass(slots=True)
class Faults:
    """Counts the points at which a process can crash, and crashes once, at point `at`."""

    at: int = -1
    passed: int = 0
    where: str = ""  # the point of the crash

    def point(self, where: str) -> None:
        """Pass a point, and crash there if it is point `at`."""
        number, self.passed = self.passed, self.passed + 1
        if number == self.at:
            self.where = f"{where} (point {number + 1})"
            raise Crash


class _FaultProxy:
    """Forwards every call, with fault points at each effect."""

    def __init__(self, inner: Any, name: str, trial: Trial) -> None:
        self._inner, self._name, self._trial = inner, name, trial

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)
        if name not in _EFFECTS[self._name]:
            return call

        def watched(*args: Any, **kwargs: Any) -> Any:
            effect = f"{self._name}.{name}"
            if name in ("acquire", "commit"):  # only reads are between other effects
                self._trial.faults.point(f"before {effect}")
            if name == "report_low":
                kwargs["now_ms"] = self._trial.next_report_ms()
            result = call(*args, **kwargs)
            self._trial.faults.point(f"after {effect}")
            return result

        return watched


@dataclass(slots=True, kw_only=True)
class TrialJob:
    """One job: its config, its stages without Spark, and the factory of its computation."""

    name: str
    config: JobConfig
    stages: Stages
    computation: Callable[[], Computation | VectorComputation] | None = None
    task: TaskDescriptor | None = None
    owned: dict[int, OwnedInterval] = field(default_factory=dict)  # those with a running owner
    seen: dict[int, object] = field(default_factory=dict)  # partition -> inputs of its last step

    @property
    def birth(self) -> str:
        return f"birth-{self.name}"

    def make(self, name: str) -> Computation | VectorComputation:
        """A new computation for one step."""
        assert self.computation is not None, f"job {self.name} has no class {name}"
        return self.computation()

    def ref(self, partition: int) -> IntervalRef:
        """The interval of a partition."""
        return interval_of(self.name, self.birth, self.config, partition)


class Trial:
    """A bus, rows and jobs in memory. `settle` runs steps until nothing changes."""

    def __init__(self) -> None:
        births = itertools.count(1)
        self.log = MemoryLog(new_birth=lambda: f"c{next(births)}")
        self.rows = MemoryRows()
        self.faults, self.now_ms, self.rows_max, self.crashes = Faults(), 0, 1_000_000, 0
        self._bus: Log = _FaultProxy(self.log, "bus", self)
        self._store: RowStore = _FaultProxy(self.rows, "rows", self)
        self._data = StreamDataPlane(self.log, self.rows)
        self._report_ms: Millis = 0
        self.jobs: dict[str, TrialJob] = {}

    def add(self, job: TrialJob) -> None:
        """Add a job and create its categories and rows. Add writers before readers."""
        self._data.prepare(job.name, job.birth, job.config)
        job.task = TaskDescriptor(
            spec=single_task(job.name, job.birth, job.config),
            bus="memory",
            rows="memory",
            package_folder="",
            intervals=(),
            inputs=find_inputs(self.log, job.config),
            outputs=find_outputs(self.log, job.name, job.config),
        )
        self.jobs[job.name] = job

    def next_report_ms(self) -> Millis:
        """The time of a report to the bus; independent of the clock, which the user sets."""
        self._report_ms += _MARK_MS
        return self._report_ms

    def settle(self) -> None:
        """Run steps of all jobs until nothing changes. A crashed task is started again."""
        for _ in range(ROUNDS_MAX):
            busy = [
                (job, partition)
                for job in self.jobs.values()
                for partition in range(job.config.partitions)
                if job.seen.get(partition) != self._step_inputs(job, partition)
            ]
            if not busy:
                return
            for job, partition in busy:
                self._turn(job, partition)
        raise ComputationFailed(
            "the jobs do not become idle",
            why=f"each of {ROUNDS_MAX} rounds changed something, without new records",
            fix="check for timers that set themselves again at a time that is already due",
        )

    def _step_inputs(self, job: TrialJob, partition: int) -> object:
        """Everything that a step of this interval depends on. If it is unchanged, a step would do nothing."""
        assert job.task is not None, "call add first"
        inputs = [source.category for _, source in job.task.inputs_of(partition)]
        there = [(self.log.end_offsets(name)[partition], self.log.watermark(name)) for name in inputs]
        return there, self.now_ms, self.rows.peek(job.ref(partition)).version

    def _turn(self, job: TrialJob, partition: int) -> None:
        while True:
            try:
                if partition not in job.owned:
                    job.owned[partition] = self._open(job, partition)
                before = self._step_inputs(job, partition)
                self._step(job, job.owned[partition])
                # The value before the step: changes by the step itself need one more step.
                job.seen[partition] = before
                return
            except Crash:
                self.crashes += 1
                job.owned.pop(partition, None)

    def _open(self, job: TrialJob, partition: int) -> OwnedInterval:
        assert job.task is not None, "call add first"
        interval, _ = own_interval(
            job.task.spec,
            partition,
            shard_epoch=1,
            rows=self._store,
            log=self._bus,
            outputs=job.task.outputs,
        )
        return interval

    def _step(self, job: TrialJob, interval: OwnedInterval) -> None:
        task = job.task
        assert task is not None, "call add first"
        row = self.rows.peek(interval.ref)
        spans = self._spans(task, interval, row)
        ranges = tuple(
            InputRange(category=source.category, birth=source.birth, start=start, end=end, number=number)
            for number, source in task.inputs_of(interval.ref.partition)
            for start, end in [spans[source.birth]]
        )
        found = list(read_ranges(task=task, interval=interval, spans=spans, log=self.log, rows=self.rows))
        made = [new for batch in found for new in _run_stages(batch, job.stages)]
        if job.config.kind == "stateful":
            step = StatefulStep(
                ref=interval.ref,
                token=interval.token,
                rows=self._store,
                log=self._bus,
                outputs=task.outputs,
                computation=logic_of(task, interval.ref.partition, job.make, IdFilters),
                sending=Sending.of(task.spec.config, lambda: self.now_ms),
            )
            step.run(ranges, [batch.drop_columns(_NOT_FOR_USERS) for batch in made], now_ms=self.now_ms)
            return
        self._stateless(task, interval, ranges, made, _end_of(found))

    def _stateless(
        self,
        task: TaskDescriptor,
        interval: OwnedInterval,
        ranges: Sequence[InputRange],
        made: list[pa.RecordBatch],
        event_time_max: Mapping[str, Millis],
    ) -> None:
        step = StatelessStep(
            ref=interval.ref,
            token=interval.token,
            producers=interval.producers,
            rows=self._store,
            log=self._bus,
            outputs=task.outputs,
            plan=task.logic(),
            plan_hash=task.logic_hash(),
            package="",
            lateness={s.birth: s.lateness_ms for s in task.inputs if s.watermark == "event_time"},
            stops_at_poison=task.poison == "fail",
        )
        if step.begin(ranges):
            step.finish(made, event_time_max=event_time_max, now_ms=self.now_ms)
        else:
            step.already_done(now_ms=self.now_ms)

    def _spans(
        self, task: TaskDescriptor, interval: OwnedInterval, row: IntervalRow
    ) -> dict[str, tuple[int, int]]:
        """The ranges of the next step: those of a pending intent, else up to `rows_max` available records."""
        partition, spans = interval.ref.partition, {}
        promised = row.intent.ranges if row.intent is not None else {}
        for _, source in task.inputs_of(partition):
            start = row.offsets[source.birth]
            end = self.log.end_offsets(source.category)[partition]
            spans[source.birth] = (start, min(end, start + self.rows_max))
            if row.intent is not None:
                spans[source.birth] = promised.get(source.birth, (start, start))
        return spans


def _run_stages(batch: pa.RecordBatch, stages: Stages) -> Iterator[pa.RecordBatch]:
    kinds = batch.column("_kind").to_pylist()
    wanted = [kind in (DATA, BAD) for kind in kinds]
    if any(wanted):
        yield from stages(batch if all(wanted) else batch.filter(pa.array(wanted)))


def _end_of(batches: Sequence[pa.RecordBatch]) -> dict[str, Millis]:
    last = batches[-1]
    assert last.column("_kind")[last.num_rows - 1].as_py() == END, "the last row is the end row"
    seen: dict[str, Millis] = json.loads(last.column("_meta")[last.num_rows - 1].as_py())["event_time_max"]
    return seen
