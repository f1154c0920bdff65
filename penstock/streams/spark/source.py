"""The bus as a Spark source: one input partition per interval and batch; a batch at every trigger, also
without new records.

How much a batch may read is limited so that every task of a container gets its turn. Spark gives the slots of
a session to the oldest batch first; no task starves if each batch ends soon. So an interval may read as many
records as fit into a turn, estimated from how long its last records took. Planner, workers and driver of a
task exchange this in small files beside its scratch checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.core.clock import Millis
from penstock.core.errors import Fenced
from penstock.core.system_clock import SystemClock
from penstock.streams.bus.log import Log
from penstock.streams.places import open_log, open_rows
from penstock.streams.step.reading import read_ranges
from penstock.streams.step.step import InputSpec, OwnedInterval, TaskDescriptor, task_of

TURN_MS: Millis = 1_000  # how long a batch may hold a session's slots, if its trigger is not longer
TURN_MS_MIN: Millis = 100  # of one interval among many
ROWS_FIRST = 250  # before the first measurement
GROWTH_MAX = 20  # from one batch to the next
OVERHEAD_MS: Millis = 100  # fixed cost of a batch
PLANNED = "planned"


def turn_of(*, trigger_ms: Millis, slots: int, intervals: int) -> Millis:
    """How long one interval of a task may take, so that its whole batch takes one turn on all slots. Pure.

    A task whose trigger is longer than a turn may use all of the time between two triggers; otherwise it
    could never catch up.
    """
    whole_ms = max(TURN_MS, trigger_ms * 5 // 4)
    return max(TURN_MS_MIN, min(whole_ms, whole_ms * slots // max(1, intervals)))


def next_limit(limit: int, *, rows: int, took_ms: Millis, turn_ms: Millis) -> int:
    """How many rows the next batch may read, after a batch of `rows` that took `took_ms`. Pure."""
    if rows <= 0:
        return limit
    row_ms = max(0, took_ms - OVERHEAD_MS) / rows
    most = limit * GROWTH_MAX
    fits = most if row_ms * most <= turn_ms else max(1, int(turn_ms / row_ms))
    # A small batch is no good estimate: the limit grows only if at least half of it was used.
    return fits if fits < limit or 2 * rows >= limit else limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Totals of one interval's turns. Times are of the monotonic clock (since boot)."""

    limit: int = ROWS_FIRST
    began_ms: Millis = 0  # of the newest turn
    ended_ms: Millis = 0  # of the newest turn that ended
    waited_ms: Millis = 0  # for a slot, before the newest turn
    rows: int = 0  # total
    work_ms: Millis = 0  # total, with a slot
    user_ms: Millis = 0  # of these in user code

    def held_ms(self, now_ms: Millis) -> Millis:
        """Total time with a slot, including a turn that has not ended."""
        return self.work_ms + (max(0, now_ms - self.began_ms) if self.began_ms > self.ended_ms else 0)


class TurnFiles:
    """The turn files of one run of a task. I/O errors are ignored, as if there was no data: the folder is
    deleted with the task.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def plan(self, now_ms: Millis) -> None:
        """Note that a batch is planned, and waits for slots from now on."""
        self._write(PLANNED, str(now_ms))

    def planned_ms(self) -> Millis:
        """When the newest batch was planned; 0: no batch yet."""
        try:
            return int((self._folder / PLANNED).read_text())
        except (OSError, ValueError):
            return 0

    def of(self, partition: int) -> Turns:
        """The turns of an interval."""
        try:
            return Turns(**json.loads((self._folder / _name(partition)).read_text()))
        except (OSError, ValueError, TypeError):
            return Turns()

    def begin(self, partition: int, now_ms: Millis) -> None:
        """Note that the interval got a slot."""
        waited_ms = max(0, now_ms - (self.planned_ms() or now_ms))
        self._put(partition, replace(self.of(partition), began_ms=now_ms, waited_ms=waited_ms))

    def end(self, partition: int, now_ms: Millis, *, rows: int, user_ms: Millis, turn_ms: Millis) -> None:
        """Note that the interval's work in this batch is done."""
        known = self.of(partition)
        took_ms = max(0, now_ms - known.began_ms)
        after = replace(
            known,
            limit=next_limit(known.limit, rows=rows, took_ms=took_ms, turn_ms=turn_ms),
            ended_ms=now_ms,
            rows=known.rows + rows,
            work_ms=known.work_ms + took_ms,
            user_ms=known.user_ms + user_ms,
        )
        self._put(partition, after)

    def _put(self, partition: int, turns: Turns) -> None:
        self._write(_name(partition), json.dumps(asdict(turns)))

    def _write(self, name: str, text: str) -> None:
        new = self._folder / f".{name}.{os.getpid()}"
        with contextlib.suppress(OSError):
            new.write_text(text)
            os.replace(new, self._folder / name)


def _name(partition: int) -> str:
    return f"turns-{partition}"


class IntervalPartition(InputPartition):
    """One interval's ranges in one batch: input category birth -> [start, end)."""

    def __init__(self, index: int, spans: dict[str, tuple[int, int]]) -> None:
        super().__init__(None)
        self.index, self.spans = index, spans


class PenstockSource(DataSource):
    """`spark.readStream.format("penstock").option("task", <descriptor>)`.

    With the option `step` it may run the task's step itself, and yields a row that reports this.
    """

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> str:
        return task_of(self.options["task"]).schema_ddl()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return IntervalStreamReader(self.options["task"], with_step="step" in self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        return IntervalBatchReader(self.options["task"], with_step="step" in self.options)


class IntervalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans ranges at the driver, reads them on workers.

    Offsets are {"tick": n, "<input>:<partition>": next offset}. The tick makes every trigger a batch, so that
    timers, leftovers and watermarks never wait for data. With the trigger AvailableNow there is one tick at
    least, and the last one reaches what was there at the start.
    """

    def __init__(self, descriptor: str, *, with_step: bool) -> None:
        self._descriptor, self._with_step = descriptor, with_step
        self._seen: dict[str, int] = {}  # the ends at the last look, for Spark's own reports
        self._target: dict[str, int] | None = None

    def initialOffset(self) -> dict[str, Any]:
        task = task_of(self._descriptor)
        offset: dict[str, Any] = {"tick": 0}
        for interval in task.intervals:
            committed = committed_by(task, interval)
            for number, source in task.inputs_of(interval.ref.partition):
                offset[f"{number}:{interval.ref.partition}"] = committed[source.birth]
        return offset

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(task_of(self._descriptor).batch_rows_max)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        task = task_of(self._descriptor)
        if task.drain_file and os.path.exists(task.drain_file):
            return start
        bus = open_log(task.bus)
        self._seen = _ends(task, bus)
        reach = self._seen if self._target is None else self._target
        if reach is self._target and start["tick"] and all(start[name] >= reach[name] for name in reach):
            return start
        offset: dict[str, Any] = {"tick": start["tick"] + 1}
        if isinstance(limit, ReadAllAvailable):
            return offset | reach
        rows = max(1, getattr(limit, "max_rows", task.batch_rows_max) // max(1, len(reach)))
        size = max(1, task.batch_bytes_max // max(1, len(reach)))
        turns = turns_of(task)
        for name, (source, partition) in _named(task):
            end = min(reach[name], start[name] + rows)
            if turns is not None and end - start[name] > 1:
                most = turns.of(partition).limit // len(task.inputs_of(partition))
                end = min(end, start[name] + max(1, most))
            if end - start[name] > 1:
                end = bus.within(source.category, partition, start[name], end, size)
            offset[name] = end
        return offset

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return dict(self._seen) or None

    def prepareForTriggerAvailableNow(self) -> None:
        task = task_of(self._descriptor)
        self._target = _ends(task, open_log(task.bus))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        task = task_of(self._descriptor)
        if start["tick"] == end["tick"]:
            return []
        if (turns := turns_of(task)) is not None:
            turns.plan(SystemClock().boot_ms())
        return [
            IntervalPartition(
                index,
                {
                    source.birth: (start[name], end[name])
                    for number, source in task.inputs_of(interval.ref.partition)
                    for name in [f"{number}:{interval.ref.partition}"]
                },
            )
            for index, interval in enumerate(task.intervals)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, IntervalPartition)
        return _read(self._descriptor, partition, self._with_step)


class IntervalBatchReader(DataSourceReader):
    """The same rows as one batch over fixed ranges: how a successor repeats an intent."""

    def __init__(self, descriptor: str, *, with_step: bool) -> None:
        self._descriptor, self._with_step = descriptor, with_step

    def partitions(self) -> Sequence[InputPartition]:
        task = task_of(self._descriptor)
        assert task.replay is not None, "a batch read needs its ranges"
        found = []
        for index, interval in enumerate(task.intervals):
            promised = task.replay.get(str(interval.ref.partition))
            if promised is not None:
                # Inputs without new records count too: the low watermark is the minimum of all.
                committed = committed_by(task, interval)
                spans = {
                    source.birth: tuple(promised.get(source.birth, (committed[source.birth],) * 2))
                    for _, source in task.inputs_of(interval.ref.partition)
                }
                found.append(IntervalPartition(index, spans))  # type: ignore[arg-type]
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, IntervalPartition)
        return _read(self._descriptor, partition, self._with_step)


def _read(descriptor: str, partition: IntervalPartition, with_step: bool) -> Iterator[pa.RecordBatch]:
    task = task_of(descriptor)
    rows = read_ranges(
        task=task,
        interval=task.intervals[partition.index],
        spans=partition.spans,
        log=open_log(task.bus),
        rows=open_rows(task.rows),
    )
    # Imported here: the planner process of each query imports this module, and does not need these.
    from penstock.streams.spark.worker import run_now
    from penstock.streams.step.arrow_stages import shortcut, step_at_source

    plan = shortcut(task) if with_step else None
    if plan is None:
        yield from rows
        return

    yield from step_at_source(task, rows, plan, partial(run_now, task))


def turns_of(task: TaskDescriptor) -> TurnFiles | None:
    """The files in which a task reports its turns; None: its batches have no time limit."""
    return TurnFiles(Path(task.drain_file).parent) if task.turn_ms and task.drain_file else None


def _named(task: TaskDescriptor) -> Iterator[tuple[str, tuple[InputSpec, int]]]:
    """The name of each offset of a task, with input and partition."""
    for interval in task.intervals:
        for number, source in task.inputs_of(interval.ref.partition):
            yield f"{number}:{interval.ref.partition}", (source, interval.ref.partition)


def _ends(task: TaskDescriptor, bus: Log) -> dict[str, int]:
    ends = {source.category: bus.end_offsets(source.category) for source in task.inputs}
    return {name: ends[source.category][partition] for name, (source, partition) in _named(task)}


def committed_by(task: TaskDescriptor, interval: OwnedInterval) -> Mapping[str, int]:
    """How far the interval has come, by input; Fenced if a successor has taken it."""
    row = open_rows(task.rows).peek(interval.ref)
    if row.token != interval.token:
        raise Fenced(
            f"{task.spec.task_id}: partition {interval.ref.partition} has a new owner",
            why=f"token {interval.token} was followed by {row.token}",
            fix="nothing: the successor continues",
        )
    return row.offsets
