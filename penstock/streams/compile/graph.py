"""The graph of a pipeline: steps and the streams between them, as values. Pure: building it runs nothing.

The DSL and SQL both build a `Graph`; `plan.py` compiles it to jobs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from penstock.core.clock import Millis
from penstock.core.errors import PipelineError
from penstock.streams.bus.log import ARROW_TYPES
from penstock.streams.dsl.windows import Firing, Spans

Columns = tuple[tuple[str, str], ...]  # (name, Spark SQL type)

DEFAULT_STREAM = "out"
PARTITIONS_MAX = 1024
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}")
_CATEGORY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,126}")
_COLUMN = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,126}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLocation:
    """The line of the user's file that defines a step."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStep:
    """Reads a category."""

    name: str
    place: CodeLocation
    category: str
    start: str = "earliest"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterStep:
    """Keeps the records for which the condition is true."""

    name: str
    place: CodeLocation
    condition: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectStep:
    """Computes new columns from each record."""

    name: str
    place: CodeLocation
    columns: tuple[str, ...]  # "expression AS name", or a column


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyByStep:
    """Partitions records by a key."""

    name: str
    place: CodeLocation
    keys: tuple[str, ...]
    spread: bool = False  # distribute the records of a key over all partitions, for a partial aggregate


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStep:
    """Runs a computation per key; the class is found by name in the package's entry module."""

    name: str
    place: CodeLocation
    computation: str
    outputs: tuple[tuple[str, Columns], ...]  # (stream, its columns)
    late: str = "drop"
    inputs: tuple[str, ...] = ("in",)  # names of the input streams, in order
    settings: tuple[tuple[str, str], ...] = ()  # of its job, where they differ from the defaults
    required_columns: tuple[
        tuple[str, Columns], ...
    ] = ()  # (input, the columns that the computation declares)
    vectorised: bool = False  # called once per batch, with tables
    state: Columns = ()  # state values per key, and their types
    ids: tuple[str, Millis] | None = None  # the column with the record id, and the slack


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkStep:
    """Writes to a category."""

    name: str
    place: CodeLocation
    category: str
    partitions: int | None = None  # None: as many as the pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatMapStep:
    """Makes one record per element of an array, with all other columns."""

    name: str
    place: CodeLocation
    generator: str  # "explode(array) AS name", or posexplode with two names


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionStep:
    """Merges streams with the same columns. Records keep their keys."""

    name: str
    place: CodeLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStep:
    """Assigns records of a key to windows, and says when windows emit results."""

    name: str
    place: CodeLocation
    spans: Spans
    firing: Firing


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateStep:
    """One record per key and window: the key columns, the window, and these values."""

    name: str
    place: CodeLocation
    columns: tuple[str, ...]  # "count(*) AS n"
    two_phase: bool = False
    phase: str = ""  # with two phases: "partial" or "combine"
    late: str = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinStep:
    """Joins two keyed streams (the first edge is the left one) on records that are near in time."""

    name: str
    place: CodeLocation
    how: str  # inner | left | outer
    before_ms: int | None = None  # right time >= left time - before_ms
    after_ms: int | None = None  # right time <= left time + after_ms
    spans: Spans | None = None  # alternative: both are in the same window
    late: str = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupStep:
    """The first record of each key within `within_ms` or a window; others are dropped."""

    name: str
    place: CodeLocation
    within_ms: int | None = None
    spans: Spans | None = None  # alternative: up to the end of its window
    late: str = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopStep:
    """The first `count` results of each window of an aggregate, ordered by a column."""

    name: str
    place: CodeLocation
    count: int
    by: str
    lowest: bool = False
    late: str = "drop"


Step = (
    SourceStep
    | FilterStep
    | SelectStep
    | FlatMapStep
    | UnionStep
    | KeyByStep
    | ProcessStep
    | WindowStep
    | AggregateStep
    | JoinStep
    | DedupStep
    | TopStep
    | SinkStep
)
# Steps of a stateless job; also a KeyByStep without a shuffle.
StatelessSteps = FilterStep | SelectStep | FlatMapStep | UnionStep
# Steps that need all records of a key in one partition: each is a job of its own.
StatefulSteps = ProcessStep | AggregateStep | JoinStep | DedupStep | TopStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """`target` reads the stream `stream` of `source`."""

    source: str
    target: str
    stream: str = DEFAULT_STREAM


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A whole pipeline."""

    name: str
    partitions: int
    steps: tuple[Step, ...]
    edges: tuple[Edge, ...]

    def step(self, name: str) -> Step:
        """The step with this name."""
        return next(step for step in self.steps if step.name == name)

    def input_of(self, name: str) -> Edge:
        """The first input of a step. Requires: not a source."""
        return next(edge for edge in self.edges if edge.target == name)

    def inputs_of(self, name: str) -> tuple[Edge, ...]:
        """All inputs of a step, in the order in which they were added."""
        return tuple(edge for edge in self.edges if edge.target == name)

    def key_of(self, edge: Edge) -> tuple[KeyByStep | None, tuple[Step, ...]]:
        """The key_by that defines the key of a stream, and the steps after it, in order."""
        between: list[Step] = []
        step = self.step(edge.source)
        while isinstance(step, FilterStep | SelectStep | FlatMapStep | WindowStep | DedupStep):
            between.append(step)
            step = self.step(self.input_of(step.name).source)
        return (step if isinstance(step, KeyByStep) else None), tuple(reversed(between))

    def readers_of(self, name: str) -> tuple[Edge, ...]:
        """The edges to the readers of a step, in the order in which they were added."""
        return tuple(edge for edge in self.edges if edge.source == name)

    def ordered(self) -> tuple[Step, ...]:
        """All steps in topological order; otherwise in the order in which they were added."""
        sorter: TopologicalSorter[str] = TopologicalSorter({step.name: [] for step in self.steps})
        for edge in self.edges:
            sorter.add(edge.target, edge.source)
        try:
            rank = {name: index for index, name in enumerate(sorter.static_order())}
        except CycleError as error:
            path = " → ".join(error.args[1])
            raise PipelineError(
                f"pipeline {self.name!r} has a cycle: {path}",
                why="a step cannot read its own output",
                fix="write the stream that closes the cycle to a sink, and read it in another pipeline",
            ) from error
        written = {step.name: index for index, step in enumerate(self.steps)}
        if all(written[edge.source] < written[edge.target] for edge in self.edges):
            return self.steps
        return tuple(sorted(self.steps, key=lambda step: rank[step.name]))

    def to_json(self) -> dict[str, Any]:
        """Nodes and edges, for drawings. Without code locations, so that moving code does not change the
        JSON.
        """
        return {
            "nodes": [_node_json(step) for step in self.steps],
            "edges": [{"from": edge.source, "to": edge.target, "stream": edge.stream} for edge in self.edges],
        }


def _node_json(step: Step) -> dict[str, Any]:
    node: dict[str, Any] = {"name": step.name}
    match step:
        case SourceStep():
            node |= {"op": "source", "category": step.category, "start": step.start}
        case FilterStep():
            node |= {"op": "filter", "condition": step.condition}
        case SelectStep():
            node |= {"op": "select", "columns": list(step.columns)}
        case FlatMapStep():
            node |= {"op": "flat_map", "generator": step.generator}
        case UnionStep():
            node |= {"op": "union"}
        case KeyByStep():
            node |= {"op": "key_by", "keys": list(step.keys)}
        case ProcessStep():
            node |= {"op": "process", "computation": step.computation, "late": step.late}
            node |= {"streams": [stream for stream, _ in step.outputs]}
            node |= {"inputs": list(step.inputs)} if len(step.inputs) > 1 else {}
        case WindowStep():
            node |= {"op": "window", **step.spans.to_json(), **step.firing.to_json()}
        case AggregateStep():
            node |= {"op": "aggregate", "columns": list(step.columns)}
            node |= {"two_phase": True} if step.two_phase else {}
        case JoinStep():
            near = {"before_ms": step.before_ms, "after_ms": step.after_ms}
            node |= {"op": "join", "how": step.how, **(step.spans.to_json() if step.spans else near)}
        case DedupStep():
            span = step.spans.to_json() if step.spans else {"within_ms": step.within_ms}
            node |= {"op": "dedup", **span}
        case TopStep():
            node |= {"op": "top", "count": step.count, "by": step.by, "lowest": step.lowest}
        case SinkStep():
            node |= {"op": "sink", "category": step.category, "partitions": step.partitions}
    return node


def check_graph(graph: Graph) -> None:
    """Check what does not depend on the catalogue: cycles, unread streams, categories with two roles."""
    graph.ordered()
    if not any(isinstance(step, SourceStep) for step in graph.steps):
        raise PipelineError(
            f"pipeline {graph.name!r} is empty",
            why="it has no source, so there is nothing to run",
            fix='begin with p.source("<category>") and end with .sink("<category>")',
        )
    sources = {step.category: step for step in graph.steps if isinstance(step, SourceStep)}
    written: dict[str, SinkStep] = {}
    for step in graph.steps:
        if isinstance(step, SinkStep):
            check_sink(step, sources=sources.values(), sinks=written.values())
            written[step.category] = step
        else:
            _check_is_read(graph, step)


def check_sink(sink: SinkStep, *, sources: Iterable[SourceStep], sinks: Iterable[SinkStep]) -> None:
    """Refuse a category that is read and written, or written twice, by one pipeline."""
    for source in sources:
        if source.category == sink.category:
            raise PipelineError(
                f"{sink.place}: category {sink.category!r} is both a source and a sink of this pipeline",
                why=f"it is read at {source.place}: the pipeline would read its own output",
                fix="use another category as sink; to use a stream several times, assign it to a variable",
            )
        if f"{source.category}.dead" == sink.category:
            raise PipelineError(
                f"{sink.place}: category {sink.category!r} cannot be a sink",
                why=f"it is the dead-letter category of {source.category!r}",
                fix="use another category as sink",
            )
    for other in sinks:
        if other.category == sink.category:
            raise PipelineError(
                f"{sink.place}: category {sink.category!r} is written twice",
                why=f"step {other.name!r} at {other.place} writes it already, and "
                "their records would be mixed",
                fix="use another category for one of the sinks",
            )


def _check_is_read(graph: Graph, step: Step) -> None:
    read = {edge.stream for edge in graph.readers_of(step.name)}
    streams = [stream for stream, _ in step.outputs] if isinstance(step, ProcessStep) else [DEFAULT_STREAM]
    for stream in streams:
        if stream in read:
            continue
        what = (
            f"stream {stream!r} of step {step.name!r}"
            if isinstance(step, ProcessStep)
            else f"step {step.name!r}"
        )
        end = (
            f'.stream("{stream}").sink("<category>")'
            if isinstance(step, ProcessStep)
            else '.sink("<category>")'
        )
        raise PipelineError(
            f"{step.place}: nothing reads {what}",
            why="its records would be computed and dropped",
            fix=f"end it with {end}, or remove it",
        )


def check_name(name: object, *, what: str, place: CodeLocation) -> str:
    """Check the name of a pipeline or a step: it becomes part of job names."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise PipelineError(
        f"{place}: {name!r} cannot be the name of a {what}",
        why="it becomes part of job names: a letter, then up to 62 letters, digits, '_' or '-'",
        fix=f'choose a name like "{safe_name(str(name))}"',
    )


def check_category(name: object, *, place: CodeLocation) -> str:
    """Check the name of a category."""
    if isinstance(name, str) and _CATEGORY.fullmatch(name) and not name.endswith("."):
        return name
    raise PipelineError(
        f"{place}: {name!r} cannot be the name of a category",
        why="a category name is a letter, then up to 126 letters, digits, '_', '-' or '.'",
        fix='choose a name like "query_counts"',
    )


def check_partitions(partitions: object, *, place: CodeLocation) -> int:
    """Check a number of partitions."""
    if isinstance(partitions, int) and not isinstance(partitions, bool) and 1 <= partitions <= PARTITIONS_MAX:
        return partitions
    raise PipelineError(
        f"{place}: partitions={partitions!r} is not possible",
        why=f"a category has 1 to {PARTITIONS_MAX} partitions; a job never has more tasks than partitions",
        fix="use the largest number of tasks that you may ever need, for example partitions=8",
    )


def check_columns(columns: Columns, *, what: str, place: CodeLocation) -> None:
    """Check that a category can have these column names and types."""
    seen: dict[str, str] = {}
    for name, kind in columns:
        if not _COLUMN.fullmatch(name):
            raise PipelineError(
                f"{place}: {what}: {name!r} cannot be the name of a column",
                why="names that start with '_' are reserved for system columns"
                if name.startswith("_")
                else "a column name is a letter, then letters, digits or '_'",
                fix=f'call it "{safe_name(name.strip("_"))}"',
            )
        if name.lower() in seen:
            raise PipelineError(
                f"{place}: {what}: there are two columns named {name!r}",
                why="Spark ignores the case of column names"
                if seen[name.lower()] != name
                else "column names must be unique",
                fix='give one of them another name: "<expression> AS other_name"',
            )
        if kind not in ARROW_TYPES:
            raise PipelineError(
                f"{place}: {what}: column {name!r} has the unknown type {kind!r}",
                why=f"a column on the bus is one of {', '.join(ARROW_TYPES)}",
                fix="use one of these types",
            )
        seen[name.lower()] = name


def safe_name(text: str) -> str:
    """The text with all characters replaced that a name cannot have."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_-")[:63]
    return name if name[:1].isalpha() else f"s_{name}"[:63].rstrip("_")
