"""A vectorised computation: one call per interval and micro-batch, with tables of records and states.

For computations with Arrow or numpy, which are many times faster than a call per record:

>>> class RunningCount(VectorComputation):
...     outputs = {"out": {"user": "string", "n": "bigint"}}
...     state = {"n": "bigint"}
...
...     def process_batch(self, records, states):
...         counts = records.group_by("_key").aggregate([("_ts", "count"), ("_ts", "max")])
...         found = counts.join(states, "_key").sort_by("_key")
...         n = pc.add(found["_ts_count"], pc.fill_null(found["n"], 0))
...         rows = {"_key": found["_key"], "_ts": found["_ts_max"], "user": found["_key"], "n": n}
...         return pa.table({"_key": found["_key"], "n": n}), {"out": pa.table(rows)}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.errors import PipelineError, ProductionRefused, StateMismatch, StateRefused
from penstock.streams.bus.log import ARROW_TYPES, LOW_COLUMN
from penstock.streams.dsl.computation import UserCall, report_user_errors
from penstock.streams.operators.windowed import Lateness
from penstock.streams.step.keyed_work import StepInput, StepResult


class VectorComputation:
    """User code for all records of one interval and micro-batch. It has state, but no timers.

    How records are grouped into batches is not part of the log: a production per batch is an update, and only
    the last one of a key is final. Do not store anything on `self`.
    """

    outputs: ClassVar[Mapping[str, Mapping[str, str]]] = {}  # stream -> column -> Spark SQL type
    # Column -> Spark SQL type: one row per key, stored in this order. Add new columns at the end.
    state: ClassVar[Mapping[str, str]] = {}
    late: ClassVar[str] = "drop"  # or "process"
    record_id: ClassVar[str] = ""  # as of a Computation
    record_id_slack: ClassVar[str] = "2h"

    def process_batch(self, records: pa.Table, states: pa.Table) -> tuple[pa.Table, Mapping[str, pa.Table]]:
        """New states and productions. `records`: `_key`, `_ts`, `_late` and the columns, in order.

        `states`: `_key` and the state's columns, for keys that have a state; null where a column is newer
        than the state. Return the changed states (keys of this batch, each once; a row with only nulls
        deletes the state), and a table per stream with `_key`, `_ts` (not before the key's first record in
        this batch) and the stream's columns.
        """
        raise PipelineError(
            f"computation {type(self).__name__!r} cannot process records",
            why="it does not define process_batch",
            fix="define process_batch(self, records, states)",
        )


class VectorLogic:
    """Runs a VectorComputation as the work of a step."""

    def __init__(self, computation: VectorComputation, *, late: str | None = None) -> None:
        """`late`: the job's setting for late records; None: that of the computation."""
        self._computation, self._late = computation, late or computation.late
        self._names = tuple(computation.state)

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return self._computation.outputs

    def needed_states(self, table: pa.Table) -> Iterable[str]:
        found: list[str] = table.column("_key").unique().to_pylist()
        return found

    def run(self, given: StepInput) -> StepResult:
        flags = Lateness.of(given)
        records = given.table
        if self._late == "drop" and flags.late.any():
            records = records.filter(pa.array(~flags.late))
        counters = flags.counters(0, given.table.num_rows - records.num_rows)
        if not records.num_rows:
            return StepResult(counters={**counters, "productions": 0})
        states, produced = self._called(records, given)
        tables = {stream: self._checked(stream, table, records, given) for stream, table in produced.items()}
        count = sum(table.num_rows for table in tables.values())
        return StepResult(
            states=self._changed(self._fitting(states, given), given.states),
            produced=tables,
            counters={**counters, "productions": count},
        )

    def _called(self, records: pa.Table, given: StepInput) -> tuple[pa.Table, Mapping[str, pa.Table]]:
        own = [name for name in records.column_names if name not in ("_input", "_offset", LOW_COLUMN[0])]
        states = self._decoded(given.states, given.job)
        place = UserCall(given.job, f"a batch of {records.num_rows} records")
        with report_user_errors(lambda: place):
            changed, produced = self._computation.process_batch(records.select(own), states)
            if not isinstance(produced, Mapping):
                raise TypeError(
                    f"process_batch returned {type(produced).__name__} instead of a mapping of tables"
                )
        return changed, produced

    def _checked(self, stream: str, table: pa.Table, records: pa.Table, given: StepInput) -> pa.Table:
        """A stream's productions with late flags; ProductionRefused if they are not valid."""
        job, columns = given.job, self._computation.outputs.get(stream)
        if columns is None:
            raise _unfit(job, stream, f"the declared streams are {', '.join(self._computation.outputs)}")
        declared = {"_key": "string", "_ts": "bigint", **columns}
        if not isinstance(table, pa.Table) or set(table.column_names) != declared.keys():
            found = table.column_names if isinstance(table, pa.Table) else type(table).__name__
            raise _unfit(
                job, stream, f"the declared columns are {', '.join(declared)}, but it returned {found}"
            )
        try:
            table = table.select(list(declared)).cast(_schema(declared))
        except (pa.ArrowException, ValueError) as error:
            raise _unfit(job, stream, str(error)) from error
        if table.column("_ts").null_count or table.column("_key").null_count:
            raise _unfit(job, stream, "a key or a timestamp is null")
        firsts = records.group_by("_key").aggregate([("_ts", "min")])
        placed = pc.index_in(table.column("_key"), value_set=firsts.column("_key").combine_chunks())
        earliest = firsts.column("_ts_min").take(placed)
        if placed.null_count or pc.any(pc.less(table.column("_ts"), earliest)).as_py():
            raise ProductionRefused(
                f"a production for stream {stream!r} is before its key's records (job {job!r})",
                why="downstream may already treat it as late",
                fix="use the timestamp of a record of its key in this batch, or a later one",
                job=job,
            )
        return table.append_column("_late", pc.less(table.column("_ts"), given.low))

    def _decoded(self, states: Mapping[str, bytes], job: str) -> pa.Table:
        decode = msgspec.msgpack.Decoder(list[Any]).decode
        names = self._names
        try:
            rows = [decode(row) for row in states.values()]
            if any(len(row) > len(names) for row in rows):
                raise ValueError(f"a row has more values than the columns {', '.join(names) or 'none'}")
            # A row from before a column was added is shorter.
            columns = [[row[n] if n < len(row) else None for row in rows] for n in range(len(names))]
            arrays = [
                pa.array(column, ARROW_TYPES[self._computation.state[name]])
                for name, column in zip(names, columns, strict=True)
            ]
        except (msgspec.DecodeError, msgspec.ValidationError, pa.ArrowException, ValueError) as error:
            raise StateMismatch(
                f"the states of job {job!r} do not fit computation {type(self._computation).__name__!r}",
                why=f"{error}; another version of the computation wrote them",
                fix="declare the state's columns as they were stored, or reset the job's state",
            ) from error
        return pa.table([pa.array(list(states), pa.string()), *arrays], names=["_key", *self._names])

    def _fitting(self, states: pa.Table, given: StepInput) -> pa.Table:
        """The states that user code returned, with the declared types; StateRefused if they are not valid."""
        declared = {"_key": "string", **self._computation.state}
        if not isinstance(states, pa.Table) or not declared.keys() <= set(states.column_names):
            found = states.column_names if isinstance(states, pa.Table) else type(states).__name__
            raise self._refused(
                given.job, f"the declared columns are {', '.join(declared)}, but it returned {found}"
            )
        try:
            schema = _schema(declared)
            fitting = states.select(schema.names).cast(schema)
        except (pa.ArrowException, ValueError) as error:
            raise self._refused(given.job, str(error)) from error
        keys = fitting.column("_key")
        if keys.null_count or len(keys.unique()) < len(keys):
            raise self._refused(given.job, "a key is null, or occurs twice")
        # Only keys of this batch: the state of another key may belong to another interval.
        foreign = keys.filter(
            pc.invert(pc.is_in(keys, value_set=given.table.column("_key").combine_chunks()))
        )
        if len(foreign):
            key = str(foreign[0])
            raise self._refused(given.job, f"key {key!r} has no record in this batch", key)
        return fitting

    def _refused(self, job: str, why: str, key: str = "") -> StateRefused:
        return StateRefused(
            f"states of computation {type(self._computation).__name__!r} cannot be stored (job {job!r})",
            why=why,
            fix="return a table with _key and the declared columns, one row for each key of the batch "
            "whose state changed",
            job=job,
            key=key,
        )

    def _changed(self, states: pa.Table, before: Mapping[str, bytes]) -> dict[str, bytes | None]:
        columns = [states.column(name).to_pylist() for name in self._names]
        encode = msgspec.msgpack.Encoder().encode
        found: dict[str, bytes | None] = {}
        for key, *values in zip(states.column("_key").to_pylist(), *columns, strict=True):
            row = None if all(value is None for value in values) else encode(values)
            if before.get(key) != row:
                found[key] = row
        return found


def _schema(declared: Mapping[str, str]) -> pa.Schema:
    return pa.schema([(name, ARROW_TYPES[kind]) for name, kind in declared.items()])


def _unfit(job: str, stream: str, why: str) -> ProductionRefused:
    return ProductionRefused(
        f"a production of job {job!r} for stream {stream!r} does not match the declaration",
        why=why,
        fix="return a table with _key, _ts and exactly the declared columns, in their types",
        job=job,
    )
