"""What a computation must declare before a pipeline may run it: its streams and their columns. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.core.clock import Millis
from penstock.core.errors import PipelineError
from penstock.streams.graph import Columns, Place, Process, check_columns, check_name
from penstock.streams.step import is_dead
from penstock.streams.windows import duration_ms

ID_TYPES = ("string", "bigint", "int", "binary")


def check_streams(streams: Mapping[str, Any], place: Place) -> None:
    """The streams that a computation reads: named, and each of them once."""
    for name, stream in streams.items():
        check_name(name, what="input stream", place=place)
        if not hasattr(stream, "key_by"):
            raise PipelineError(
                f"{place}: input {name!r} is no stream",
                why=f"it is {stream!r}",
                fix=f'write process(…, {name}=stream.key_by("<column>"))',
            )
    if not streams or len({(one.step, one.output) for one in streams.values()}) < len(streams):
        raise PipelineError(
            f"{place}: process() needs streams, each of them once",
            why="two inputs are the same stream, so their records could not be told apart"
            if streams
            else "there is none",
            fix='write p.process(MyComputation, left=a.key_by("x"), right=b.key_by("y"))',
        )


def wants_of(computation: Any, names: tuple[str, ...], place: Place) -> tuple[tuple[str, Columns], ...]:
    """The columns that a computation declares for each of its inputs; nothing if it declares none."""
    declared: Mapping[str, Mapping[str, str]] = getattr(computation, "inputs", {})
    if declared and set(declared) != set(names):
        raise PipelineError(
            f"{place}: computation {computation.__name__} reads other streams than it is given",
            why=f"it declares {', '.join(map(repr, declared))}, given are {', '.join(map(repr, names))}",
            fix="give each input its stream: p.process(MyComputation, "
            + ", ".join(f"{name}=…" for name in declared)
            + ")",
        )
    for name, columns in declared.items():
        check_columns(tuple(columns.items()), what=f"input {name!r}", place=place)
    return tuple((name, tuple(declared[name].items())) for name in names if name in declared)


def state_of(computation: Any) -> Columns:
    """The values that a computation keeps per key, with their types as text: others are another state."""
    codec = getattr(computation, "state_codec", None)
    declared: Mapping[str, str] = getattr(computation, "state", {}) if codec is None else codec.shape
    return tuple(declared.items()) if isinstance(declared, Mapping) else ()


def outputs_of(computation: Any, place: Place) -> tuple[tuple[str, Columns], ...]:
    """The streams that a computation declares, and their columns."""
    hooks: Callable[..., object] | None = getattr(
        computation, "process_record", getattr(computation, "process_batch", None)
    )
    if not isinstance(computation, type) or hooks is None:
        raise PipelineError(
            f"{place}: process() needs a class, and {computation!r} is not one that can process records",
            why="each key has its own state, so Penstock makes the objects; an object or function is shared",
            fix="write class MyComputation(Computation) and pass the class itself: .process(MyComputation)",
        )
    if "." in computation.__qualname__:
        raise PipelineError(
            f"{place}: {computation.__name__} is defined inside {computation.__qualname__.split('.')[0]}",
            why="a task finds the class by its name in the pipeline's file",
            fix="move the class to the top level of the file",
        )
    declared = getattr(computation, "outputs", None)
    if not isinstance(declared, Mapping) or not declared:
        raise PipelineError(
            f"{place}: computation {computation.__name__} declares no output streams",
            why="the columns of what it produces must be known before it runs",
            fix='add outputs = {"out": {"query": "string", "count": "bigint"}} to the class',
        )
    found = []
    for stream, columns in declared.items():
        if not isinstance(columns, Mapping) or not columns:
            raise PipelineError(
                f"{place}: stream {stream!r} of {computation.__name__} has no columns",
                why="each output stream is a dictionary of column names and types",
                fix=f'write outputs = {{"{stream}": {{"query": "string", "count": "bigint"}}}}',
            )
        check_name(stream, what="stream", place=place)
        if is_dead(stream):
            raise PipelineError(
                f"{place}: no stream of {computation.__name__} can be called {stream!r}",
                why="records that could not be read go there",
                fix="give the stream another name",
            )
        listed = tuple((str(column), str(kind)) for column, kind in columns.items())
        check_columns(listed, what=f"stream {stream!r} of {computation.__name__}", place=place)
        found.append((stream, listed))
    return tuple(found)


def ids_of(computation: Any, place: Place) -> tuple[str, Millis] | None:
    """The column with a record's own id and the slack, if the computation declares them."""
    column = getattr(computation, "record_id", "")
    if not column:
        return None
    check_name(column, what="record_id", place=place)
    return str(column), duration_ms(getattr(computation, "record_id_slack", "2h"))


def snake_case(name: str) -> str:
    """A class name as a step is called."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def check_process_inputs(step: Process, given: Sequence[Columns]) -> None:
    """Each input has the columns that the computation declares, and no name stands for two types."""
    wanted = dict(step.wants)
    known: dict[str, tuple[str, str]] = {}
    for name, columns in zip(step.inputs, given, strict=True):
        for column, kind in wanted.get(name, ()):
            if dict(columns).get(column) != kind:
                there = ", ".join(f"{one} {its}" for one, its in columns)
                raise PipelineError(
                    f"input {name!r} has no column {column!r} of type {kind}",
                    why=f"{step.computation} declares it, the stream has {there}",
                    fix=f'select it before the key_by: .select("… AS {column}", …)',
                )
        for column, kind in wanted.get(name) or columns:
            if known.setdefault(column.lower(), (column, kind)) != (column, kind):
                raise PipelineError(
                    f"column {column!r} of input {name!r} is {kind}, in another input it is "
                    f"{' '.join(known[column.lower()])}",
                    why="all inputs of a computation travel in one table, so a name has one type",
                    fix=f'rename it before the key_by: .select("{column} AS {name}_{column}", …)',
                )
        if step.ids is not None:
            _check_id(step.computation, name, step.ids[0], dict(wanted.get(name) or columns))


def _check_id(computation: str, name: str, column: str, columns: Mapping[str, str]) -> None:
    if columns.get(column) not in ID_TYPES:
        found = f"it is {columns[column]}" if column in columns else f"there are {', '.join(columns)}"
        raise PipelineError(
            f"{computation}.record_id names {column!r}, which is no column of ids of input {name!r}",
            why=f"{found}; an id is one of {', '.join(ID_TYPES)}",
            fix="keep the column up to the process() with its type, and declare it if `inputs` are declared",
        )


def settings_of(computation: Any) -> tuple[tuple[str, str], ...]:
    """What a computation asks of its job, where that is not what every job does."""
    defaults = {"poison": "fail", "productions": "strong", "dedup": "on"}
    asked = ((name, str(getattr(computation, name, usual))) for name, usual in defaults.items())
    return tuple((name, value) for name, value in asked if value != defaults[name])
