"""What a pipeline is made of: steps and the streams between them, as values. Pure: building one runs nothing.

The DSL records a `Graph`; SQL text becomes the same one. `plan.py` turns it into jobs.
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
    """The line of the user's file that made a step."""

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
    """Says which records belong together."""

    name: str
    place: CodeLocation
    keys: tuple[str, ...]
    spread: bool = False  # records of a key go to all partitions: what reads them adds up a part of each key


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStep:
    """Runs a computation per key; the class is known by its name in the package's entry module."""

    name: str
    place: CodeLocation
    computation: str
    outputs: tuple[tuple[str, Columns], ...]  # (stream, its columns)
    late: str = "drop"
    inputs: tuple[str, ...] = ("in",)  # what the computation calls the streams it reads, in their order
    settings: tuple[tuple[str, str], ...] = ()  # of its job, where they are not the defaults
    wants: tuple[tuple[str, Columns], ...] = ()  # (input, the columns that the computation declares)
    vectorised: bool = False  # called once per batch, with tables
    state: Columns = ()  # the values it keeps per key, and their types
    ids: tuple[str, Millis] | None = None  # the column with a record's own id, and for how long it counts


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkStep:
    """Writes to a category that others may read."""

    name: str
    place: CodeLocation
    category: str
    partitions: int | None = None  # None: as the pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatMapStep:
    """Makes a record of each element of an array, beside the columns there are."""

    name: str
    place: CodeLocation
    generator: str  # "explode(array) AS name", or posexplode with two names


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionStep:
    """All records of several streams with the same columns. Each keeps the key it has."""

    name: str
    place: CodeLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStep:
    """Says which records of a key are counted together, and when results are given."""

    name: str
    place: CodeLocation
    spans: Spans
    firing: Firing


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateStep:
    """One record per key and window: the key's columns, the window, and these values."""

    name: str
    place: CodeLocation
    columns: tuple[str, ...]  # "count(*) AS n"
    two_phase: bool = False
    phase: str = ""  # of one that was taken apart: "partial" or "combine"
    late: str = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinStep:
    """Pairs of records of two keyed streams (the first edge is the left one), near each other in time."""

    name: str
    place: CodeLocation
    how: str  # inner | left | outer
    before_ms: int | None = None  # the right one's time is at least the left one's minus this
    after_ms: int | None = None  # and at most plus this
    spans: Spans | None = None  # instead: both are in the same window
    late: str = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupStep:
    """The first record of each key, and again when `within_ms` or its window is over; others are dropped."""

    name: str
    place: CodeLocation
    within_ms: int | None = None
    spans: Spans | None = None  # instead: up to the end of its window
    late: str = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopStep:
    """The first records of each window, keyed by it, in the order of a column; of results of an aggregate."""

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
StatelessSteps = (
    FilterStep | SelectStep | FlatMapStep | UnionStep
)  # what a job does on the way; KeyBy too where nothing follows
# What needs the records of a key together: a job of its own.
StatefulSteps = ProcessStep | AggregateStep | JoinStep | DedupStep | TopStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """`target` reads the stream `stream` of `source`."""

    source: str
    target: str
    stream: str = DEFAULT_STREAM


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A whole pipeline, as recorded."""

    name: str
    partitions: int
    steps: tuple[Step, ...]
    edges: tuple[Edge, ...]

    def step(self, name: str) -> Step:
        """The step of that name."""
        return next(step for step in self.steps if step.name == name)

    def input_of(self, name: str) -> Edge:
        """The stream a step reads. Requires: not a source."""
        return next(edge for edge in self.edges if edge.target == name)

    def inputs_of(self, name: str) -> tuple[Edge, ...]:
        """All streams a step reads, in the order of writing."""
        return tuple(edge for edge in self.edges if edge.target == name)

    def key_of(self, edge: Edge) -> tuple[KeyByStep | None, tuple[Step, ...]]:
        """The key_by whose key the records of a stream have, and the steps from there on, nearest last."""
        between: list[Step] = []
        step = self.step(edge.source)
        while isinstance(step, FilterStep | SelectStep | FlatMapStep | WindowStep | DedupStep):
            between.append(step)
            step = self.step(self.input_of(step.name).source)
        return (step if isinstance(step, KeyByStep) else None), tuple(reversed(between))

    def readers_of(self, name: str) -> tuple[Edge, ...]:
        """Who reads from a step, in the order of writing."""
        return tuple(edge for edge in self.edges if edge.source == name)

    def ordered(self) -> tuple[Step, ...]:
        """All steps, each after those it reads from; otherwise in the order of writing."""
        sorter: TopologicalSorter[str] = TopologicalSorter({step.name: [] for step in self.steps})
        for edge in self.edges:
            sorter.add(edge.target, edge.source)
        try:
            rank = {name: place for place, name in enumerate(sorter.static_order())}
        except CycleError as error:
            path = " → ".join(error.args[1])
            raise PipelineError(
                f"pipeline {self.name!r} runs in a circle: {path}",
                why="a step cannot wait for its own output",
                fix="write the stream that goes back to a sink, and read it in another pipeline",
            ) from error
        written = {step.name: place for place, step in enumerate(self.steps)}
        if all(written[edge.source] < written[edge.target] for edge in self.edges):
            return self.steps
        return tuple(sorted(self.steps, key=lambda step: rank[step.name]))

    def to_json(self) -> dict[str, Any]:
        """Nodes and edges for those who draw them; no lines of files, so that moving code changes nothing."""
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
    """Refuse what no catalogue could make right: circles, dead ends, categories with two roles."""
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
                why=f"it is read at {source.place}: the pipeline would feed itself",
                fix="sink to a category of another name; to go on from a stream, keep it in a variable",
            )
        if f"{source.category}.dead" == sink.category:
            raise PipelineError(
                f"{sink.place}: category {sink.category!r} cannot be a sink",
                why=f"records of {source.category!r} that do not parse are written there",
                fix="sink to a category of another name",
            )
    for other in sinks:
        if other.category == sink.category:
            raise PipelineError(
                f"{sink.place}: category {sink.category!r} is written twice",
                why=f"step {other.name!r} at {other.place} writes it already; two would mix their records",
                fix="give one of the sinks another category",
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
            f"{step.place}: {what} leads nowhere",
            why="nothing reads it, so its records would be computed and thrown away",
            fix=f"end it with {end}, or remove it",
        )


def check_name(name: object, *, what: str, place: CodeLocation) -> str:
    """A name of a pipeline or a step: it becomes part of names of jobs."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise PipelineError(
        f"{place}: {name!r} cannot be the name of a {what}",
        why="names become parts of job names: a letter, then up to 62 letters, digits, '_' or '-'",
        fix=f'choose a name like "{safe_name(str(name))}"',
    )


def check_category(name: object, *, place: CodeLocation) -> str:
    """A name of a category."""
    if isinstance(name, str) and _CATEGORY.fullmatch(name) and not name.endswith("."):
        return name
    raise PipelineError(
        f"{place}: {name!r} cannot be the name of a category",
        why="categories are named by a letter, then up to 126 letters, digits, '_', '-' or '.'",
        fix='choose a name like "query_counts"',
    )


def check_partitions(partitions: object, *, place: CodeLocation) -> int:
    """A number of partitions."""
    if isinstance(partitions, int) and not isinstance(partitions, bool) and 1 <= partitions <= PARTITIONS_MAX:
        return partitions
    raise PipelineError(
        f"{place}: partitions={partitions!r} is not possible",
        why=f"a category has 1 to {PARTITIONS_MAX} partitions; a job never has more tasks than partitions",
        fix="use the largest number of tasks you may ever need, for example partitions=8",
    )


def check_columns(columns: Columns, *, what: str, place: CodeLocation) -> None:
    """Column names and types that a category can have."""
    seen: dict[str, str] = {}
    for name, kind in columns:
        if not _COLUMN.fullmatch(name):
            raise PipelineError(
                f"{place}: {what}: {name!r} cannot be the name of a column",
                why="names starting with '_' belong to Penstock"
                if name.startswith("_")
                else "columns are named by a letter, then letters, digits or '_'",
                fix=f'call it "{safe_name(name.strip("_"))}"',
            )
        if name.lower() in seen:
            raise PipelineError(
                f"{place}: {what}: column {name!r} comes twice",
                why="Spark does not tell upper from lower case in names of columns"
                if seen[name.lower()] != name
                else "each column has one value",
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
    """The nearest text that may be a name."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_-")[:63]
    return name if name[:1].isalpha() else f"s_{name}"[:63].rstrip("_")
