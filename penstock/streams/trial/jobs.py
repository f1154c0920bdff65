"""Jobs in memory, step by step: the real steps on the memory log and rows, a clock moved by hand, crashes on
order. What `penstock.testing` is made of.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import ComputationFailed
from penstock.jobs.config import JobConfig
from penstock.jobs.tasks import single_task
from penstock.streams.bus.log import Log
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.data_plane import StreamDataPlane, find_inputs, find_outputs, interval_of, own_interval
from penstock.streams.dsl.computation import Computation
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.row_store import IntervalRef, IntervalRow, RowStore
from penstock.streams.step.outbox import Sending
from penstock.streams.step.reading import read_ranges
from penstock.streams.step.record_ids import IdFilters
from penstock.streams.step.stateful import StatefulStep
from penstock.streams.step.stateless import StatelessStep
from penstock.streams.step.step import InputRange
from penstock.streams.step.task import BAD, DATA, END, OwnedInterval, TaskDescriptor
from penstock.streams.step.task_logic import logic_of
from penstock.streams.step.vectorised import VectorComputation

ROUNDS_MAX = 10_000
_MARK_MS = 1000  # between two reports of a low: far enough apart for a mark each
_EFFECTS = {
    "rows": frozenset({"acquire", "commit", "delivered"}),
    "bus": frozenset({"fence", "publish", "report_low"}),
}

_NOT_FOR_USERS = ["_kind", "_meta", "_raw"]

Stages = Callable[[pa.RecordBatch], list[pa.RecordBatch]]


class Crash(BaseException):
    """A process that is gone: nothing in the code may catch it."""


@dataclass(slots=True)
class Faults:
    """Counts the points at which a process may die, and crashes once, at the point `at`."""

    at: int = -1
    passed: int = 0
    where: str = ""  # it crashed

    def point(self, where: str) -> None:
        """One more point."""
        number, self.passed = self.passed, self.passed + 1
        if number == self.at:
            self.where = f"{where} (point {number + 1})"
            raise Crash


class _Watched:
    """Passes every call on, and tells of each effect."""

    def __init__(self, inner: Any, name: str, trial: Trial) -> None:
        self._inner, self._name, self._trial = inner, name, trial

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)
        if name not in _EFFECTS[self._name]:
            return call

        def watched(*args: Any, **kwargs: Any) -> Any:
            effect = f"{self._name}.{name}"
            if name in ("acquire", "commit"):  # else nothing but reads lies behind the effect before
                self._trial.faults.point(f"before {effect}")
            if name == "report_low":
                kwargs["now_ms"] = self._trial.next_report_ms()
            result = call(*args, **kwargs)
            self._trial.faults.point(f"after {effect}")
            return result

        return watched


@dataclass(slots=True, kw_only=True)
class TrialJob:
    """One job: its config, what its stages do without Spark, how its computation is made for each step."""

    name: str
    config: Mapping[str, Any]
    stages: Stages
    computation: Callable[[], Computation | VectorComputation] | None = None
    task: TaskDescriptor | None = None
    parsed: JobConfig = field(init=False)  # the config, typed
    owned: dict[int, OwnedInterval] = field(default_factory=dict)  # those with a living owner
    seen: dict[int, object] = field(default_factory=dict)  # what each interval's last step went by

    def __post_init__(self) -> None:
        self.parsed = JobConfig.from_stored(self.config)

    @property
    def birth(self) -> str:
        return f"birth-{self.name}"

    def make(self, name: str) -> Computation | VectorComputation:
        """A computation for one step, as new."""
        assert self.computation is not None, f"job {self.name} has no class {name}"
        return self.computation()

    def ref(self, partition: int) -> IntervalRef:
        """The interval of a partition."""
        return interval_of(self.name, self.birth, self.parsed, partition)


class Trial:
    """A bus, rows and jobs in memory. `settle` lets every job do all that can be done now."""

    def __init__(self) -> None:
        births = itertools.count(1)
        self.log = MemoryLog(new_birth=lambda: f"c{next(births)}")
        self.rows = MemoryRows()
        self.faults, self.now_ms, self.rows_max, self.crashes = Faults(), 0, 1_000_000, 0
        self._bus: Log = _Watched(self.log, "bus", self)
        self._store: RowStore = _Watched(self.rows, "rows", self)
        self._data = StreamDataPlane(self.log, self.rows)
        self._report_ms: Millis = 0
        self.jobs: dict[str, TrialJob] = {}

    def add(self, job: TrialJob) -> None:
        """Create what a job needs. Writers come before readers."""
        self._data.prepare(job.name, job.birth, job.parsed)
        job.task = TaskDescriptor(
            spec=single_task(job.name, job.birth, job.config),
            bus="memory",
            rows="memory",
            package_folder="",
            intervals=(),
            inputs=find_inputs(self.log, job.parsed),
            outputs=find_outputs(self.log, job.name, job.parsed),
        )
        self.jobs[job.name] = job

    def next_report_ms(self) -> Millis:
        """The time of a report to the bus; apart from the clock, which the user moves."""
        self._report_ms += _MARK_MS
        return self._report_ms

    def settle(self) -> None:
        """Steps of all jobs until nothing changes any more. Who crashes is started again and goes on."""
        for _ in range(ROUNDS_MAX):
            busy = [
                (job, partition)
                for job in self.jobs.values()
                for partition in range(job.parsed.partitions)
                if job.seen.get(partition) != self._seen_by(job, partition)
            ]
            if not busy:
                return
            for job, partition in busy:
                self._turn(job, partition)
        raise ComputationFailed(
            "the jobs do not come to rest",
            why=f"each of {ROUNDS_MAX} rounds changed something, without new records",
            fix="look for timers that set themselves again at a time that has come",
        )

    def _seen_by(self, job: TrialJob, partition: int) -> object:
        """All that a step of this interval depends on. Seen again as it was, another step does nothing."""
        assert job.task is not None, "add comes first"
        inputs = [source.category for _, source in job.task.inputs_of(partition)]
        there = [(self.log.end_offsets(name)[partition], self.log.watermark(name)) for name in inputs]
        return there, self.now_ms, self.rows.peek(job.ref(partition)).version

    def _turn(self, job: TrialJob, partition: int) -> None:
        while True:
            try:
                if partition not in job.owned:
                    job.owned[partition] = self._open(job, partition)
                before = self._seen_by(job, partition)
                self._step(job, job.owned[partition])
                # As it was before the step: what the step itself changed is looked at once more.
                job.seen[partition] = before
                return
            except Crash:
                self.crashes += 1
                job.owned.pop(partition, None)

    def _open(self, job: TrialJob, partition: int) -> OwnedInterval:
        assert job.task is not None, "add comes first"
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
        assert task is not None, "add comes first"
        row = self.rows.peek(interval.ref)
        spans = self._spans(task, interval, row)
        ranges = tuple(
            InputRange(category=source.category, birth=source.birth, start=start, end=end, number=number)
            for number, source in task.inputs_of(interval.ref.partition)
            for start, end in [spans[source.birth]]
        )
        found = list(read_ranges(task=task, interval=interval, spans=spans, log=self.log, rows=self.rows))
        made = [new for batch in found for new in _worked(batch, job.stages)]
        if job.parsed.kind == "stateful":
            step = StatefulStep(
                ref=interval.ref,
                token=interval.token,
                rows=self._store,
                log=self._bus,
                outputs=task.outputs,
                computation=logic_of(task, interval.ref.partition, job.make, IdFilters()),
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
        """What the next step reads: what a predecessor promised, else as much as there is and may be."""
        partition, spans = interval.ref.partition, {}
        promised = row.intent.ranges if row.intent is not None else {}
        for _, source in task.inputs_of(partition):
            start = row.offsets[source.birth]
            end = self.log.end_offsets(source.category)[partition]
            spans[source.birth] = (start, min(end, start + self.rows_max))
            if row.intent is not None:
                spans[source.birth] = promised.get(source.birth, (start, start))
        return spans


def _worked(batch: pa.RecordBatch, stages: Stages) -> Iterator[pa.RecordBatch]:
    kinds = batch.column("_kind").to_pylist()
    wanted = [kind in (DATA, BAD) for kind in kinds]
    if any(wanted):
        yield from stages(batch if all(wanted) else batch.filter(pa.array(wanted)))


def _end_of(batches: Sequence[pa.RecordBatch]) -> dict[str, Millis]:
    last = batches[-1]
    assert last.column("_kind")[last.num_rows - 1].as_py() == END, "a range ends with its end"
    seen: dict[str, Millis] = json.loads(last.column("_meta")[last.num_rows - 1].as_py())["event_time_max"]
    return seen
