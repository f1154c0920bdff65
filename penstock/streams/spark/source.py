"""The bus as a Spark source: one input partition per interval and batch; a batch at every trigger, also
without new records.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
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

from penstock.core.errors import Fenced
from penstock.core.system_clock import SystemClock
from penstock.streams.bus.log import Log
from penstock.streams.places import open_log, open_rows
from penstock.streams.step.reading import read_ranges
from penstock.streams.step.step import InputSpec, OwnedInterval, TaskDescriptor
from penstock.streams.step.turns import TurnFiles


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
        return TaskDescriptor.from_json(self.options["task"]).schema_ddl()

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
        task = TaskDescriptor.from_json(self._descriptor)
        offset: dict[str, Any] = {"tick": 0}
        for interval in task.intervals:
            committed = _committed(task, interval)
            for number, source in task.inputs_of(interval.ref.partition):
                offset[f"{number}:{interval.ref.partition}"] = committed[source.birth]
        return offset

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(TaskDescriptor.from_json(self._descriptor).batch_rows_max)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        task = TaskDescriptor.from_json(self._descriptor)
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
        task = TaskDescriptor.from_json(self._descriptor)
        self._target = _ends(task, open_log(task.bus))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        task = TaskDescriptor.from_json(self._descriptor)
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
        task = TaskDescriptor.from_json(self._descriptor)
        assert task.replay is not None, "a batch read needs its ranges"
        found = []
        for index, interval in enumerate(task.intervals):
            promised = task.replay.get(str(interval.ref.partition))
            if promised is not None:
                # Inputs without new records count too: the low watermark is the minimum of all.
                committed = _committed(task, interval)
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
    task = TaskDescriptor.from_json(descriptor)
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


def _committed(task: TaskDescriptor, interval: OwnedInterval) -> Mapping[str, int]:
    row = open_rows(task.rows).peek(interval.ref)
    if row.token != interval.token:
        raise Fenced(
            f"{task.spec.task_id}: partition {interval.ref.partition} has a new owner",
            why=f"token {interval.token} was followed by {row.token}",
            fix="nothing: the successor continues",
        )
    return row.offsets
