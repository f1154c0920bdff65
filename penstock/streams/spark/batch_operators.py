"""Windows and joins over all that there is, as one Spark batch: the stream's logic, and one cut at the end.

Nothing is late in a batch, and a window gives one result: early ones and updates are about waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from penstock.core.clock import Millis
from penstock.streams.bus.log import LOW_MAX, LOW_MIN
from penstock.streams.compile.packages import load_entry
from penstock.streams.dsl.windows import Firing
from penstock.streams.operators.build import operator_of
from penstock.streams.operators.windowed import STREAM
from penstock.streams.rows.row_store import TimerRow
from penstock.streams.step.logic import StepInput, StepLogic, StepResult
from penstock.streams.step.reading import schema_of
from penstock.streams.step.task import DATA, schema_ddl
from penstock.streams.step.vectorised import VectorLogic
from penstock.streams.step.watermark import Cut

# Records that are worked on together.
PIECE_ROWS = 200_000
_BATCHES = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The unpacked package that computations come from."""

    folder: Path
    entry: str
    hash: str


def operated(rows: DataFrame, job: Mapping[str, Any], output: Mapping[str, Any]) -> DataFrame:
    """What the operator of a job makes of all its rows."""
    partitions = rows.sparkSession.sparkContext.defaultParallelism
    columns = [(name, kind) for name, kind in output["columns"]]
    plan = dict(job["plan"]["computation"])
    if "firing" in plan:
        plan["firing"] = Firing().to_json()
    keyed = _keyed(rows)
    if plan["operator"] != "partial":  # a part of a key is added up wherever it is read
        keyed = keyed.repartition(partitions, "_key")
    in_order = plan["operator"] == "dedup"  # so that it need not keep all records until the end
    if in_order:
        keyed = keyed.sortWithinPartitions("_ts")
    logic = partial(operator_of, plan, columns)
    function = _runner(logic, STREAM, columns, job["name"], in_order=in_order)
    return keyed.mapInArrow(function, schema_ddl(columns))


def vectorised(rows: DataFrame, job: Mapping[str, Any], output: Mapping[str, Any], code: Code) -> DataFrame:
    """The productions of a VectorComputation on one stream; records come in the order of their times."""
    partitions = rows.sparkSession.sparkContext.defaultParallelism
    columns = [(name, kind) for name, kind in output["columns"]]
    ordered = _keyed(rows).repartition(partitions, "_key").sortWithinPartitions("_ts", "_offset")
    logic = partial(_vector_logic, code, job["plan"]["computation"]["class"])
    return ordered.mapInArrow(_runner(logic, output["stream"], columns, job["name"]), schema_ddl(columns))


def _vector_logic(code: Code, name: str) -> StepLogic:
    return VectorLogic(getattr(load_entry(code.folder, code.entry, code.hash), name)())


def _keyed(rows: DataFrame) -> DataFrame:
    return rows.where(f"_kind = {DATA}").withColumn("_key", F.coalesce("_key", F.lit("")))


def _runner(
    logic: Callable[[], StepLogic],
    stream: str,
    columns: Sequence[tuple[str, str]],
    job: str,
    *,
    in_order: bool = False,
) -> _BATCHES:
    """`in_order`: rows come by their event times, and the low watermark follows them."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        work = _Whole(logic(), stream, job)
        for table in _pieces(batches):
            low = table.column("_ts")[table.num_rows - 1].as_py() if in_order else LOW_MIN
            for made in work.add(table, low):
                yield _row_batch(made, columns)
        for made in work.add(None, LOW_MAX):
            yield _row_batch(made, columns)

    return run


class _Whole:
    """An interval in memory, for as long as a batch lasts."""

    def __init__(self, logic: StepLogic, stream: str, job: str) -> None:
        self._logic, self._stream, self._job = logic, stream, job
        self._states: dict[str, bytes] = {}
        self._timers: dict[tuple[str, str], TimerRow] = {}
        self._version, self._low = 0, LOW_MIN

    def add(self, table: pa.Table | None, low: Millis) -> Iterable[pa.Table]:
        """What these rows make, and what is due when nothing before `low` can come any more."""
        rows = _nothing() if table is None else table
        timers = tuple(timer for timer in self._timers.values() if timer.at_ms <= low)
        asked = {*self._logic.wanted(rows), *(timer.key for timer in timers)}
        result = self._logic.run(
            StepInput(
                job=self._job,
                version=self._version,
                low=self._low,
                table=rows,
                cuts=[Cut(position=rows.num_rows, low=low)] if low > self._low else [],
                states=self._read(asked),
                timers=timers,
                read=self._read,
                now_ms=0,
            )
        )
        self._keep(result)
        self._low = low
        made = result.produced.get(self._stream)
        return [made] if isinstance(made, pa.Table) and made.num_rows else []

    def _read(self, names: Iterable[str]) -> dict[str, bytes]:
        return {name: self._states[name] for name in names if name in self._states}

    def _keep(self, result: StepResult) -> None:
        self._version += 1
        for name, state in result.states.items():
            if state is None:
                self._states.pop(name, None)
            else:
                self._states[name] = state
        for gone in result.timers_deleted:
            self._timers.pop(gone, None)
        self._timers.update({(timer.key, timer.tag): timer for timer in result.timers_set})


def _pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    found: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        found.append(batch)
        count += batch.num_rows
        if count >= PIECE_ROWS:
            yield _on_time(pa.Table.from_batches(found))
            found, count = [], 0
    if count:
        yield _on_time(pa.Table.from_batches(found))


def _on_time(table: pa.Table) -> pa.Table:
    flags = pa.repeat(pa.scalar(False), table.num_rows)
    return table.set_column(table.column_names.index("_late"), "_late", flags)


def _nothing() -> pa.Table:
    return schema_of(()).empty_table()


def _row_batch(made: pa.Table, columns: Sequence[tuple[str, str]]) -> pa.RecordBatch:
    schema, count = schema_of(columns), made.num_rows
    given = {name: made.column(name) for name in ("_ts", "_key", "_late", *(name for name, _ in columns))}
    given["_kind"] = pa.repeat(pa.scalar(DATA, pa.int8()), count)
    given["_offset"] = pa.array(range(count), pa.int64())
    arrays = [
        given[field.name].cast(field.type) if field.name in given else pa.nulls(count, field.type)
        for field in schema
    ]
    (batch,) = pa.Table.from_arrays(arrays, schema=schema).combine_chunks().to_batches()
    return batch
