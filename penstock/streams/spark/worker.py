"""Code of Spark's Python workers: runs the step over the rows of one interval and batch, and publishes."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.errors import CorruptData
from penstock.core.system_clock import SystemClock
from penstock.streams.compile.packages import load_entry
from penstock.streams.dsl.computation import Computation, UserCall, report_user_errors
from penstock.streams.operators.build import logic_of
from penstock.streams.places import open_log, open_rows
from penstock.streams.spark.source import turns_of
from penstock.streams.step.keyed_work import StepInput, StepLogic, StepResult
from penstock.streams.step.outbox import Sending
from penstock.streams.step.record_ids import FilterCache
from penstock.streams.step.stateful import StateCaches, StatefulStep
from penstock.streams.step.stateless import StatelessStep
from penstock.streams.step.step import (
    BAD,
    BEGIN,
    DATA,
    DONE,
    END,
    InputRange,
    OwnedInterval,
    StepReport,
    TaskDescriptor,
    task_of,
)
from penstock.streams.step.vectorised import VectorComputation

REPORT_DDL = "partition int, records bigint, published bigint, late bigint, bad bigint, behind_low bigint"
# The cache of this worker. Spark may run an interval in any worker, so changes by others are shared.
_CACHES = StateCaches()
_FILTERS = FilterCache()
_NOT_FOR_USERS = ["_kind", "_meta", "_bad", "_raw"]


def step_function(descriptor: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for `mapInArrow`: takes one interval's rows, yields one row that says what became of
    them.
    """

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is not None and first.column("_kind")[0].as_py() == DONE:
            for _ in batches:
                pass  # read to the end: Spark kills a worker that leaves input unread
            yield _report(json.loads(first.column("_meta")[0].as_py()))
            return
        rest = batches if first is None else itertools.chain([first], batches)
        yield run_now(task_of(descriptor), rest)

    return run


def run_now(task: TaskDescriptor, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch:
    """Run one interval's micro-batch with the worker's clock."""
    return run_interval(task, batches, now_ms=time.time_ns() // 1_000_000)


def run_interval(task: TaskDescriptor, batches: Iterator[pa.RecordBatch], *, now_ms: int) -> pa.RecordBatch:
    """Run one interval's micro-batch."""
    begin, rest = _begin(batches)
    partition = begin["partition"]
    interval = next(owned for owned in task.intervals if owned.ref.partition == partition)
    spans = begin["ranges"]
    ranges = tuple(
        InputRange(category=source.category, birth=source.birth, start=start, end=end, number=number)
        for number, source in task.inputs_of(partition)
        for start, end in [spans[source.birth]]
    )
    turns, clock, user = turns_of(task), SystemClock(), _UserTime()
    if turns is not None:
        turns.begin(partition, clock.boot_ms())
    if task.kind == "stateful":
        data = [batch.drop_columns(_NOT_FOR_USERS) for batch in _data(rest, {})]
        report = _stateful(task, interval, user).run(ranges, data, now_ms=now_ms)
    else:
        report = _run_stateless(task, interval, ranges, rest, now_ms)
    if turns is not None:
        rows = sum(asked.end - asked.start for asked in ranges)
        turns.end(
            partition, clock.boot_ms(), rows=rows, user_ms=user.took_ns // 1_000_000, turn_ms=task.turn_ms
        )
    return _report(
        {
            "partition": partition,
            "records": report.records,
            "published": report.published,
            "late": report.late,
            "bad": report.bad,
            "behind_low": report.behind_low,
        }
    )


def _report(said: Mapping[str, int]) -> pa.RecordBatch:
    kinds = {"partition": pa.int32()}
    arrays = [pa.array([value], kinds.get(name, pa.int64())) for name, value in said.items()]
    return pa.RecordBatch.from_arrays(arrays, names=list(said))


def _run_stateless(
    task: TaskDescriptor,
    interval: OwnedInterval,
    ranges: tuple[InputRange, ...],
    rest: Iterator[pa.RecordBatch],
    now_ms: int,
) -> StepReport:
    step = StatelessStep(
        ref=interval.ref,
        token=interval.token,
        producers={
            source.birth: interval.producers[source.birth]
            for _, source in task.inputs_of(interval.ref.partition)
        },
        rows=open_rows(task.rows),
        log=open_log(task.bus),
        outputs=task.outputs,
        plan=task.logic(),
        plan_hash=task.logic_hash(),
        package=task.package.hash,
        lateness={
            source.birth: source.lateness_ms for source in task.inputs if source.watermark == "event_time"
        },
        followed=[source.birth for source in task.inputs if source.idle_after_ms],
        stops_at_poison=task.poison == "fail",
    )
    is_mine = step.begin(ranges)
    end: dict[str, Any] = {}
    data = list(_data(rest, end))  # always drained, so that the source's worker is not blocked
    # A replay may have inputs that the plan no longer has; the next step computes the lows.
    report_at = now_ms if task.replay is None else None
    if not is_mine:
        return step.already_done(now_ms=report_at)
    return step.finish(data, event_time_max=end["event_time_max"], now_ms=report_at)


class _UserTime:
    """Measures the time that a step spends in user code."""

    def __init__(self) -> None:
        self.took_ns = 0

    def of(self, logic: StepLogic) -> StepLogic:
        """The same work, measured."""
        return _Measured(logic, self)


class _Measured:
    def __init__(self, logic: StepLogic, time_of: _UserTime) -> None:
        self._logic, self._time = logic, time_of

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return self._logic.outputs

    def needed_states(self, table: pa.Table) -> Iterable[str]:
        return self._logic.needed_states(table)

    def run(self, given: StepInput) -> StepResult:
        began_ns = time.monotonic_ns()
        try:
            return self._logic.run(given)
        finally:
            self._time.took_ns += time.monotonic_ns() - began_ns


def _stateful(task: TaskDescriptor, interval: OwnedInterval, user: _UserTime) -> StatefulStep:
    filters = partial(_FILTERS.of, task.rows, interval.ref)
    logic = logic_of(task, interval.ref.partition, partial(_made, task), filters)
    return StatefulStep(
        ref=interval.ref,
        token=interval.token,
        rows=open_rows(task.rows),
        log=open_log(task.bus),
        outputs=task.outputs,
        computation=user.of(logic) if "class" in task.plan["computation"] else logic,
        sending=Sending.of(task.config, lambda: time.monotonic_ns() // 1_000_000),
        cache=_CACHES.of(task.rows, interval.ref.job_birth, task.state_cache_bytes, _shared_folder),
    )


def _shared_folder() -> Path:
    """Of the workers of this executor; Spark removes it with the application."""
    from pyspark import SparkFiles

    return Path(SparkFiles.getRootDirectory()).absolute() / "penstock-news"


@lru_cache(maxsize=64)
def _entry(folder: Path, entry: str, hash_: str) -> ModuleType:
    return load_entry(folder, entry, hash_)


def _made(task: TaskDescriptor, name: str) -> Computation | VectorComputation:
    module = _entry(Path(task.package_folder), task.package.entry, task.package.hash)
    with report_user_errors(lambda: UserCall(task.spec.job, f"{name} is made")):
        found: Computation | VectorComputation = getattr(module, name)()
    return found


def _begin(batches: Iterator[pa.RecordBatch]) -> tuple[dict[str, Any], Iterator[pa.RecordBatch]]:
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None or first.column("_kind")[0].as_py() != BEGIN:
        raise CorruptData(
            "a batch reached the step without its range",
            why="the first row of each partition names the range that follows, and it is missing",
            fix="report it: a stage of the plan dropped a row that it must pass on",
        )

    def rest() -> Iterator[pa.RecordBatch]:
        yield first.slice(1)
        yield from batches

    return json.loads(first.column("_meta")[0].as_py()), rest()


def _data(batches: Iterator[pa.RecordBatch], end: dict[str, Any]) -> Iterator[pa.RecordBatch]:
    """The data rows (and unreadable ones); fills `end` from the last row, without which the batch is not
    whole.
    """
    for batch in batches:
        kinds = batch.column("_kind").to_numpy(zero_copy_only=False)
        if len(kinds) and kinds[-1] == END:
            end.update(json.loads(batch.column("_meta")[batch.num_rows - 1].as_py()))
        wanted = (kinds == DATA) | (kinds == BAD)
        if wanted.all():
            if batch.num_rows:
                yield batch
        elif wanted.any():
            yield batch.filter(pa.array(np.asarray(wanted)))
    if not end:
        raise CorruptData(
            "a batch reached the step without its end",
            why="the last row of each partition closes the range, and it is missing",
            fix="nothing: nothing was written, the task starts again from the committed offset",
        )
