"""A pipeline as one Spark batch: the same plan over categories or files, the same rows as the stream.

Jobs are joined in memory where the stream joins them by a category. A computation sees the records of a key
in the order of their event times, and the low watermark follows them.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, PipelineError
from penstock.jobs.config import INPUTS_MAX
from penstock.streams.bus.log import HEADERS_FIELD, LOW_COLUMN, LOW_MAX, LOW_MIN, Category
from penstock.streams.compile.packages import load_entry
from penstock.streams.dsl.computation import Computation, Record, record_type
from penstock.streams.dsl.windows import Firing
from penstock.streams.inspect.record_lines import TABLE, LineRules, Lines, parse_lines
from penstock.streams.operators.build import operator_of
from penstock.streams.operators.windowed import STREAM
from penstock.streams.places import open_log
from penstock.streams.rows.row_store import TimerRow
from penstock.streams.spark.query import apply_stages
from penstock.streams.spark.run_errors import readable
from penstock.streams.spark.session import build_session, end_session
from penstock.streams.step.keyed_work import KeyedWork, StepInput, StepLogic, StepResult
from penstock.streams.step.outbox import Production
from penstock.streams.step.reading import rows_alone, scan_runs, schema_of
from penstock.streams.step.step import (
    BAD,
    DATA,
    SYSTEM_COLUMNS,
    InputSpec,
    dead_stream,
    input_of,
    is_dead,
    schema_ddl,
)
from penstock.streams.step.vectorised import VectorLogic
from penstock.streams.step.watermark import Cut

# Records per batch.
TABLE_ROWS = 200_000
_BATCHES = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The unpacked package with the computations."""

    folder: Path
    entry: str
    hash: str


def operated(rows: DataFrame, job: Mapping[str, Any], output: Mapping[str, Any]) -> DataFrame:
    """The output rows of a job's operator over all its rows."""
    partitions = rows.sparkSession.sparkContext.defaultParallelism
    columns = [(name, kind) for name, kind in output["columns"]]
    plan = dict(job["plan"]["computation"])
    if "firing" in plan:
        plan["firing"] = Firing().to_json()
    keyed = _keyed(rows)
    if plan["operator"] != "partial":  # partial results do not need all rows of a key together
        keyed = keyed.repartition(partitions, "_key")
    in_order = plan["operator"] == "dedup"  # so that it need not hold all records until the end
    if in_order:
        keyed = keyed.sortWithinPartitions("_ts")
    logic = partial(operator_of, plan, columns)
    function = _runner(logic, STREAM, columns, job["name"], in_order=in_order)
    return keyed.mapInArrow(function, schema_ddl(columns))


def vectorised(rows: DataFrame, job: Mapping[str, Any], output: Mapping[str, Any], code: Code) -> DataFrame:
    """The productions of a VectorComputation on one stream; records are in event-time order."""
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
    """`in_order`: rows are in event-time order, and the low watermark follows them."""

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
    """An in-memory interval for the duration of a batch."""

    def __init__(self, logic: StepLogic, stream: str, job: str) -> None:
        self._logic, self._stream, self._job = logic, stream, job
        self._states: dict[str, bytes] = {}
        self._timers: dict[tuple[str, str], TimerRow] = {}
        self._version, self._low = 0, LOW_MIN

    def add(self, table: pa.Table | None, low: Millis) -> Iterable[pa.Table]:
        """The productions of these rows, and of timers that are due at this low."""
        rows = _nothing() if table is None else table
        timers = tuple(timer for timer in self._timers.values() if timer.at_ms <= low)
        asked = {*self._logic.needed_states(rows), *(timer.key for timer in timers)}
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
        if count >= TABLE_ROWS:
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


__all__ = ["FORMATS", "BatchJob", "Code", "Span", "read_category", "read_files", "run_batch", "run_jobs"]

# Records of a partition that one Spark task reads.
PIECE_ROWS = 250_000
BATCH_ROWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Event times [start, end) in ms."""

    start: Millis = LOW_MIN
    end: Millis = LOW_MAX


def read_category(spark: SparkSession, bus: str, category: Category) -> DataFrame:
    """All records that a category has now, as rows of a task."""
    log, name = open_log(bus), category.spec.name
    spans = zip(log.start_offsets(name), log.end_offsets(name), strict=True)
    pieces = [
        (partition, start, min(end, start + PIECE_ROWS))
        for partition, (first, end) in enumerate(spans)
        for start in range(first, end, PIECE_ROWS)
    ]
    rows = spark.createDataFrame(pieces, "partition int, start bigint, stop bigint")
    source = input_of(category)
    spread = rows.repartition(max(1, len(pieces)), "partition", "start")
    return spread.mapInArrow(_range_reader(bus, source), schema_ddl(source.columns))


def read_files(spark: SparkSession, paths: Sequence[str], category: Category, form: Lines) -> DataFrame:
    """Files of the records of a category: lines of JSON, or Parquet with its columns; or tables with them
    (`table:<name>`), by any name that this Spark knows.
    """
    source = input_of(category)
    ddl = schema_ddl(source.columns)
    kinds = {_kind_of(path) for path in paths}
    if len(kinds) > 1:
        raise ConfigError(
            f"the inputs for {category.spec.name!r} are of two kinds",
            why=f"some are {', some are '.join(sorted(kinds))}",
            fix="give inputs of one kind",
        )
    if kinds == {"Parquet"}:
        return _column_rows(spark.read.parquet(*paths), category).mapInArrow(_batch_reader(category), ddl)
    if kinds == {"tables"}:
        tables = [_column_rows(spark.table(path.removeprefix(TABLE)), category) for path in paths]
        rows = reduce(DataFrame.unionByName, tables)
        return rows.mapInArrow(_batch_reader(category), ddl)
    lines = spark.read.text(list(paths)).select(
        F.monotonically_increasing_id().alias("number"), F.col("value").cast("binary").alias("line")
    )
    return lines.where("length(trim(cast(line as string))) > 0").mapInArrow(_line_reader(category, form), ddl)


def _kind_of(path: str) -> str:
    if path.startswith(TABLE):
        return "tables"
    return "Parquet" if Path(path).suffix == ".parquet" else "lines"


def run_jobs(
    jobs: Sequence[Mapping[str, Any]], inputs: Mapping[str, DataFrame], *, span: Span, code: Code
) -> dict[str, DataFrame]:
    """Run the jobs, writers before readers; returns a DataFrame per external output category."""
    for job in jobs:
        if "ids" in (job["plan"].get("computation") or {}):
            raise PipelineError(
                f"job {job['name']!r} cannot be run as a batch",
                why="its computation deduplicates by `record_id`, which only streams support",
                fix="run it as a stream, or give the batch a computation without `record_id`",
            )
    known = {name: _within(rows, span) for name, rows in inputs.items()}
    found: dict[str, DataFrame] = {}
    for job in jobs:
        rows = apply_stages(_inputs(job, known), job["plan"])
        for output in job["outputs"]:
            if is_dead(output["stream"]):
                made = _dead_letters(rows, output["stream"])
            elif job["kind"] == "stateful":
                computation = job["plan"]["computation"]
                if "operator" in computation:
                    made = operated(rows, job, output)
                elif computation.get("vectorised"):
                    made = vectorised(rows, job, output, code)
                else:
                    made = _computed(rows, job, output, code)
            else:
                made = rows.where(f"_kind = {DATA}")
            names = [name for name, _ in output["columns"] if name != LOW_COLUMN[0]]
            made = made.select(*(name for name, _ in SYSTEM_COLUMNS), *names)
            known[output["category"]] = _together(known.get(output["category"]), made)
            if not output["internal"]:
                found[output["category"]] = known[output["category"]].select("_ts", "_key", "_late", *names)
    return found


def _within(rows: DataFrame, span: Span) -> DataFrame:
    if span == Span():
        return rows
    return rows.where(F.col("_ts").between(span.start, span.end - 1))


def _together(one: DataFrame | None, other: DataFrame) -> DataFrame:
    """Union with rows of other jobs: two jobs may write one category, e.g. dead letters of one source."""
    return other if one is None else one.unionByName(other)


def _inputs(job: Mapping[str, Any], known: Mapping[str, DataFrame]) -> DataFrame:
    """The input rows of a job, with a prefix per input, because inputs may share column names."""
    frames = [known[item["category"]] for item in job["inputs"]]
    if not job["plan"].get("branches"):
        (rows,) = frames
        return rows
    system = [name for name, _ in SYSTEM_COLUMNS]
    found: DataFrame | None = None
    for number, rows in enumerate(frames):
        own = [F.col(name).alias(f"_i{number}_{name}") for name in rows.columns if name not in system]
        said = [
            F.col(name) if name != "_input" else F.lit(number).cast("tinyint").alias(name) for name in system
        ]
        renamed = rows.select(*said, *own)
        found = renamed if found is None else found.unionByName(renamed, allowMissingColumns=True)
    assert found is not None, "a job has an input"
    return found


def _dead_letters(rows: DataFrame, stream: str) -> DataFrame:
    number = next(number for number in range(INPUTS_MAX) if dead_stream(number) == stream)
    return rows.where(f"_kind = {BAD} AND _input = {number}").select(
        *(
            F.col(name) if name != "_key" else F.lit(None).cast("string").alias("_key")
            for name, _ in SYSTEM_COLUMNS
        ),
        F.col("_bad").alias("reason"),
        F.col("_raw").alias("value"),
        F.get_json_object("_meta", "$.partition").cast("int").alias("source_partition"),
        F.col("_offset").alias("source_offset"),
    )


def _computed(rows: DataFrame, job: Mapping[str, Any], output: Mapping[str, Any], code: Code) -> DataFrame:
    """The productions of a computation on one stream, with each key's records in event-time order."""
    partitions = rows.sparkSession.sparkContext.defaultParallelism
    sorted_rows = (
        rows.where(f"_kind = {DATA}")
        .withColumn("_key", F.coalesce("_key", F.lit("")))
        .repartition(partitions, "_key")
        .sortWithinPartitions("_key", "_ts", "_input", "_offset")
    )
    columns = [(name, kind) for name, kind in output["columns"]]
    function = _computation_runner(code, job["plan"]["computation"], output["stream"], job["name"], columns)
    return sorted_rows.mapInArrow(function, schema_ddl(columns))


def _range_reader(bus: str, source: InputSpec) -> _BATCHES:
    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        log = open_log(bus)
        for batch in batches:
            for piece in batch.to_pylist():
                runs = scan_runs(log, source, piece["partition"], piece["start"], piece["stop"])
                for offsets, appended, found in runs:
                    yield _placed(rows_alone(found, offsets, source, appended), piece["partition"])

    return read


def _placed(rows: pa.RecordBatch, partition: int) -> pa.RecordBatch:
    """Add the origin to rows that cannot be parsed."""
    kinds = rows.column("_kind").to_numpy(zero_copy_only=False)
    if not (kinds == BAD).any():
        return rows
    place = json.dumps({"partition": partition})
    meta = pa.array([place if kind == BAD else None for kind in kinds], pa.string())
    return rows.set_column(rows.schema.get_field_index("_meta"), "_meta", meta)


def _line_reader(category: Category, form: Lines) -> _BATCHES:
    spec, source = category.spec, input_of(category)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            numbers, lines = batch.column("number"), batch.column("line")
            if spec.format == "json" and form is Lines.VALUE:
                values = {"_ts": pa.repeat(0, len(lines)), "_value": lines}
                rows = _alone(_bus_batch(values, category, len(lines)), source)
            else:
                given = list(zip(numbers.to_pylist(), lines.to_pylist(), strict=True))
                parsed = parse_lines(given, LineRules(spec=spec, form=form, checked=spec.format != "json"))
                if parsed.bad:
                    raise ConfigError(
                        f"a line of a file is no record of {spec.name!r}",
                        why=parsed.bad[0].reason,
                        fix="correct the line, or remove it",
                    )
                records = {
                    name: parsed.records.column(name).combine_chunks() for name in parsed.records.column_names
                }
                rows = _alone(_bus_batch(records, category, len(lines)), source)
            yield _numbered(rows, numbers)

    return read


def _alone(batch: pa.RecordBatch, source: InputSpec) -> pa.RecordBatch:
    return rows_alone(batch, np.arange(batch.num_rows, dtype=np.int64), source)


def _numbered(rows: pa.RecordBatch, numbers: pa.Array) -> pa.RecordBatch:
    index = rows.schema.get_field_index("_offset")
    return rows.set_column(index, "_offset", numbers.take(rows.column("_offset")).cast(pa.int64()))


def _column_rows(rows: DataFrame, category: Category) -> DataFrame:
    """The columns as on the bus; `_ts` and `_key` if the file or table has them."""
    spec = category.spec
    wanted = (
        ["_value"]
        if spec.format != "typed" and "_value" in rows.columns
        else [name for name, _ in spec.columns]
    )
    lacking = [name for name in wanted if name not in rows.columns]
    if lacking:
        raise ConfigError(
            f"the inputs for {spec.name!r} lack the columns {', '.join(lacking)}",
            why=f"they have {', '.join(rows.columns)}",
            fix="give files or tables with the category's columns",
        )
    if wanted != ["_value"] and spec.format == "json":
        value = F.to_json(F.struct(*(F.col(name) for name in wanted))).cast("binary").alias("_value")
        columns = [value]
    else:
        kinds = {"_value": "binary", **dict(spec.columns)}
        columns = [F.col(name).cast(kinds[name]).alias(name) for name in wanted]
    stamp = (
        F.col("_ts")
        if "_ts" in rows.columns
        else F.col(spec.ts_column)
        if spec.ts_column in rows.columns
        else F.lit(0)
    )
    key = F.col("_key") if "_key" in rows.columns else F.lit(None)
    return rows.select(
        F.monotonically_increasing_id().alias("number"),
        stamp.cast("bigint").alias("_ts"),
        key.cast("string").alias("_key"),
        *columns,
    )


def _batch_reader(category: Category) -> _BATCHES:
    source = input_of(category)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = _encoded({name: batch.column(name) for name in batch.schema.names}, category)
            columns["_ts"] = columns["_ts"].fill_null(0)
            rows = _alone(_bus_batch(columns, category, batch.num_rows), source)
            yield _numbered(rows, batch.column("number"))

    return read


def _encoded(columns: dict[str, pa.Array], category: Category) -> dict[str, pa.Array]:
    """Columns of an `avro` or `bytes` category as a value on the bus."""
    spec = category.spec
    if spec.format not in ("avro", "bytes") or "_value" in columns:
        return columns
    names = [name for name, _ in spec.columns]
    if spec.format == "bytes":
        return {**columns, "_value": columns[names[0]]}
    from penstock.streams.bus.avro import encode_avro

    rows = pa.table([columns[name] for name in names], names=names).to_pylist()
    return {**columns, "_value": pa.array(encode_avro(rows, spec.columns), pa.binary())}


def _bus_batch(columns: Mapping[str, pa.Array], category: Category, length: int) -> pa.RecordBatch:
    """A batch of the category with these columns; missing ones are null."""
    schema = category.spec.schema()
    blank = {
        "_seq": pa.repeat(0, length),
        "_late": pa.repeat(False, length),
        "_key": pa.nulls(length, pa.string()),
        "_headers": pa.nulls(length, HEADERS_FIELD.type),
    }
    arrays = [{**blank, **columns}[field.name].cast(field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _computation_runner(
    code: Code, plan: Mapping[str, Any], stream: str, job: str, columns: Sequence[tuple[str, str]]
) -> _BATCHES:
    name, inputs = plan["class"], plan.get("inputs", ())
    target = InputSpec(
        category="",
        birth="",
        columns=tuple(columns),
        format="typed",
        watermark="",
        lateness_ms=0,
        ts_column="",
        partitions=1,
    )

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        computation: Computation = getattr(load_entry(code.folder, code.entry, code.hash), name)()
        made: list[Production] = []
        for _, rows in itertools.groupby(_records(batches, inputs), key=lambda pair: pair[0].key):
            pairs = list(rows)
            work = KeyedWork(computation, job=job, low=LOW_MIN)
            records = [record for record, _ in pairs]
            work.run(records, [offset for _, offset in pairs], _cuts(records))
            made += work.produced[stream]
            if len(made) >= BATCH_ROWS:
                yield _produced(made, target)
                made = []
        if made:
            yield _produced(made, target)

    return run


def _records(
    batches: Iterator[pa.RecordBatch], inputs: Sequence[tuple[str, Sequence[str]]]
) -> Iterator[tuple[Record, int]]:
    """The records of a partition; with several `inputs` (name, columns), each with its own columns."""
    system = {name for name, _ in SYSTEM_COLUMNS}
    for batch in batches:
        names = [name for name in batch.schema.names if name not in system]
        make = record_type(tuple(names))
        if inputs:
            yield from _of_inputs(batch, inputs)
            continue
        own = [batch.column(name).to_pylist() for name in names]
        # A null key becomes the empty key, as in the stream.
        keys, stamps = batch.column("_key").fill_null("").to_pylist(), batch.column("_ts").to_pylist()
        late, offsets = batch.column("_late").to_pylist(), batch.column("_offset").to_pylist()
        for index, values in enumerate(zip(*own, strict=True) if own else [()] * batch.num_rows):
            yield make(keys[index], stamps[index], bool(late[index]), tuple(values)), offsets[index]


def _of_inputs(
    batch: pa.RecordBatch, inputs: Sequence[tuple[str, Sequence[str]]]
) -> Iterator[tuple[Record, int]]:
    kinds = [record_type(tuple(columns), name) for name, columns in inputs]
    for row in batch.to_pylist():
        number = row["_input"]
        values = tuple(row[column] for column in inputs[number][1])
        yield kinds[number](row["_key"] or "", row["_ts"], bool(row["_late"]), values), row["_offset"]


def _cuts(records: Sequence[Record]) -> list[Cut]:
    """Advance the low to each new event time, and to the end after the last record."""
    cuts = [
        Cut(position=index, low=after.ts)
        for index, (before, after) in enumerate(itertools.pairwise(records), start=1)
        if after.ts > before.ts
    ]
    return [*cuts, Cut(position=len(records), low=LOW_MAX)]


def _produced(productions: Sequence[Production], target: InputSpec) -> pa.RecordBatch:
    schema = schema_of(target.columns)
    count = len(productions)
    given: dict[str, pa.Array] = {
        "_kind": pa.repeat(pa.scalar(DATA, pa.int8()), count),
        "_offset": pa.array(range(count), pa.int64()),
        "_ts": pa.array([made[0] for made in productions], pa.int64()),
        "_key": pa.array([made[1] for made in productions], pa.string()),
        "_late": pa.array([made[2] for made in productions], pa.bool_()),
    }
    for index, (name, _) in enumerate(target.columns):
        given[name] = pa.array([made[3][index] for made in productions], schema.field(name).type)
    arrays = [given[field.name] if field.name in given else pa.nulls(count, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


FORMATS = ("parquet", "ndjson")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """Jobs, inputs and target of a batch. A category without `files` is read from the bus."""

    jobs: Sequence[Mapping[str, Any]]
    categories: Sequence[Category]  # inputs of the pipeline
    files: Mapping[str, Sequence[str]]
    form: Lines
    bus: str
    span: Span
    code: Code
    target: Path
    format: str


def run_batch(job: BatchJob, *, scratch: Path, cores: int) -> dict[str, int]:
    """Run the batch in its own session; returns the number of rows per category."""
    if job.target.exists():
        raise ConfigError(
            f"{job.target} is there already",
            why="the results of two runs would be mixed",
            fix="name a folder that does not exist",
        )
    spark = build_session("penstock backfill", cores, scratch)
    try:
        return _run(spark, job)
    except (PySparkException, Py4JJavaError) as error:
        raise PipelineError(
            "the batch failed",
            why=readable(error),
            fix="correct the cause and run it again; nothing was written",
        ) from error
    finally:
        end_session(spark)


def _run(spark: SparkSession, job: BatchJob) -> dict[str, int]:
    inputs = {category.spec.name: _input(spark, job, category) for category in job.categories}
    frames = run_jobs(job.jobs, inputs, span=job.span, code=job.code)
    unfinished = job.target.with_name(f".{job.target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        counts = {}
        for name, rows in sorted(frames.items()):
            counts[name] = _written(spark, rows, str(unfinished / name), job.format)
        os.rename(unfinished, job.target)
        return counts
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _input(spark: SparkSession, job: BatchJob, category: Category) -> DataFrame:
    paths = job.files.get(category.spec.name)
    if paths:
        return read_files(spark, paths, category, job.form)
    return read_category(spark, job.bus, category)


def _written(spark: SparkSession, rows: DataFrame, path: str, format_: str) -> int:
    if format_ == "parquet":
        rows.write.parquet(path)
        return spark.read.parquet(path).count()
    rows.write.option("ignoreNullFields", "false").json(path)
    return spark.read.text(path).count()
