"""Which jobs a pipeline becomes: stateless steps fused, cut at shuffles, columns pruned (Turbine II). Pure.

A `key_by` cuts where a computation follows: one job writes an internal category partitioned by the key, the
next reads it. The result is plain JSON; the control plane never imports user code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.core.errors import PipelineError
from penstock.streams.catalogue import Catalogue
from penstock.streams.compiled import (
    CompiledJob,
    CompiledPipeline,
    FilterStage,
    Output,
    PackageRef,
    SelectStage,
    Stage,
)
from penstock.streams.expressions import Checked
from penstock.streams.graph import (
    DEFAULT_STREAM,
    Columns,
    Filter,
    Graph,
    KeyBy,
    Process,
    Select,
    Sink,
    Source,
    Step,
    check_graph,
)
from penstock.streams.pipeline import Pipeline
from penstock.streams.schemas import Schemas, resolve_schemas

DEAD_COLUMNS: Columns = (
    ("reason", "string"),
    ("value", "binary"),
    ("source_partition", "int"),
    ("source_offset", "bigint"),
)


def compile_pipeline(pipeline: Pipeline, catalogue: Catalogue, package: PackageRef) -> CompiledPipeline:
    """Check a pipeline against the categories there are, and cut it into jobs; PipelineError on a mistake."""
    return compile_graph(pipeline.graph(), catalogue, package)


def compile_graph(graph: Graph, catalogue: Catalogue, package: PackageRef) -> CompiledPipeline:
    """As `compile_pipeline`, for a graph from any front end."""
    check_graph(graph)
    for step in graph.steps:
        if isinstance(step, Process):
            _check_is_keyed(graph, step)
    cutter = _Cutter(resolve_schemas(graph, catalogue), package)
    return CompiledPipeline(graph=graph, package=package, jobs=cutter.jobs())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Road:
    """The stateless steps from the category a job reads to the step it ends with, and the key on the way."""

    origin: Step  # source, key_by that cuts, or process
    stream: str  # of the origin
    steps: tuple[Filter | Select, ...]
    keyed_by: KeyBy | None = None  # fused: the sink's records get this key
    crossed: tuple[str, ...] = ()  # all steps between, for people


class _Cutter:
    """Cuts one graph; each question is asked of the graph, nothing is kept between jobs."""

    def __init__(self, schemas: Schemas, package: PackageRef) -> None:
        self._schemas, self._graph, self._package = schemas, schemas.graph, package
        self._cuts = self._find_cuts()

    def jobs(self) -> tuple[CompiledJob, ...]:
        found = []
        for step in self._graph.ordered():
            if isinstance(step, KeyBy) and step.name in self._cuts:
                found.append(self._shuffle_job(step))
            elif isinstance(step, Process):
                found.append(self._stateful_job(step))
            elif isinstance(step, Sink) and not self._is_direct(step):
                found.append(self._sink_job(step))
        return tuple(found)

    def _find_cuts(self) -> frozenset[str]:
        """Key_bys behind which a computation runs, or whose key a sink can no longer compute."""
        cuts = set()
        for step in self._graph.steps:
            if isinstance(step, Process | Sink):
                keyed, between = self._nearest_key(step)
                if keyed is not None and (isinstance(step, Process) or not self._survives(keyed, between)):
                    cuts.add(keyed.name)
        return frozenset(cuts)

    def _nearest_key(self, end: Step) -> tuple[KeyBy | None, list[Filter | Select]]:
        between: list[Filter | Select] = []
        step = self._graph.step(self._graph.input_of(end.name).source)
        while isinstance(step, Filter | Select):
            between.append(step)
            step = self._graph.step(self._graph.input_of(step.name).source)
        return (step if isinstance(step, KeyBy) else None), between

    def _survives(self, keyed: KeyBy, between: Iterable[Step]) -> bool:
        """True if every column of the key passes all steps unchanged."""
        needed = self._schemas.keys[keyed.name].columns
        for step in between:
            if isinstance(step, Select):
                same = {
                    name
                    for name, checked in self._schemas.selected[step.name]
                    if checked.columns == {name} and checked.text.strip("`") == name
                }
                if not needed <= same:
                    return False
        return True

    def _road_to(self, end: Step) -> _Road:
        steps: list[Filter | Select] = []
        crossed: list[str] = []
        keyed: KeyBy | None = None
        edge = self._graph.input_of(end.name)
        while True:
            step = self._graph.step(edge.source)
            if isinstance(step, Source | Process) or (step.name in self._cuts and keyed is None):
                steps.reverse()
                crossed.reverse()
                return _Road(
                    origin=step,
                    stream=edge.stream,
                    steps=tuple(steps),
                    keyed_by=keyed,
                    crossed=tuple(crossed),
                )
            crossed.append(step.name)
            if isinstance(step, KeyBy):
                # Only the last key counts: nothing between an earlier one and it needs records together.
                keyed = keyed or (step if isinstance(end, Sink) else None)
            elif isinstance(step, Filter | Select):
                steps.append(step)
            edge = self._graph.input_of(step.name)

    def _shuffle_job(self, step: KeyBy) -> CompiledJob:
        key = self._schemas.keys[step.name]
        output = self._shuffle_output(step, key)
        return self._stateless(step, self._road_to(step), output, key.text)

    def _sink_job(self, step: Sink) -> CompiledJob:
        road = self._road_to(step)
        key = None if road.keyed_by is None else self._schemas.keys[road.keyed_by.name].text
        return self._stateless(step, road, self._sink_output(step), key)

    def _stateless(self, end: Step, road: _Road, output: Output, key: str | None) -> CompiledJob:
        partitions, category = self._origin(road)
        outputs = [output]
        source = road.origin if isinstance(road.origin, Source) else None
        if source is not None and self._schemas.sources[source.name].format in ("json", "avro"):
            # As many partitions as the source: what a category is must not depend on who reads it.
            dead = f"{source.category}.dead"
            outputs.append(
                Output(
                    stream="dead", category=dead, partitions=partitions, columns=DEAD_COLUMNS, internal=False
                )
            )
        return CompiledJob(
            name=self._job_name(end),
            pipeline=self._graph.name,
            kind="stateless",
            package=self._package,
            partitions=partitions,
            input=category,
            start="earliest" if source is None else source.start,
            stages=self._stages(road, self._columns_at(road), output.columns),
            key=key,
            computation=None,
            late="process",  # a late record keeps its flag; the computation that reads it decides
            outputs=tuple(outputs),
            steps=(*([source.name] if source else []), *road.crossed, end.name),
        )

    def _stateful_job(self, step: Process) -> CompiledJob:
        road = self._road_to(step)
        partitions, category = self._origin(road)
        sinks = tuple(
            edge.target
            for edge in self._graph.readers_of(step.name)
            if self._is_direct(self._graph.step(edge.target))
        )
        return CompiledJob(
            name=self._job_name(step),
            pipeline=self._graph.name,
            kind="stateful",
            package=self._package,
            partitions=partitions,
            input=category,
            start="earliest",
            stages=self._stages(road, self._columns_at(road), self._schemas.into(step.name)),
            key=None,
            computation=step.computation,
            late=step.late,
            outputs=tuple(self._process_output(step, stream) for stream, _ in step.outputs),
            steps=(*road.crossed, step.name, *sinks),
        )

    def _origin(self, road: _Road) -> tuple[int, str]:
        """Partitions and name of the category a road begins with."""
        match road.origin:
            case Source() as source:
                return self._schemas.sources[source.name].partitions, source.category
            case KeyBy() as step:
                output = self._shuffle_output(step, self._schemas.keys[step.name])
            case Process() as step:
                output = self._process_output(step, road.stream)
            case _:
                raise AssertionError(f"{road.origin} writes no category")
        return output.partitions, output.category

    def _columns_at(self, road: _Road) -> Columns:
        if isinstance(road.origin, KeyBy):
            return self._shuffle_output(road.origin, self._schemas.keys[road.origin.name]).columns
        return self._schemas.columns[road.origin.name, road.stream]

    def _shuffle_output(self, step: KeyBy, key: Checked) -> Output:
        """The internal category of a shuffle: the key's columns and what somebody behind it uses."""
        needed = set(key.columns)
        for end in self._graph.steps:
            if isinstance(end, Process | KeyBy | Sink) and self._is_job_end(end):
                road = self._road_to(end)
                if road.origin == step:
                    needed |= self._needed_at_origin(road, self._kept_by(end))
        there = self._schemas.columns[step.name, DEFAULT_STREAM]
        columns = tuple(column for column in there if column[0] in needed) or there[:1]
        return self._internal(step, columns, key.normal, DEFAULT_STREAM)

    def _is_job_end(self, step: Step) -> bool:
        return isinstance(step, Process | Sink) or step.name in self._cuts

    def _kept_by(self, end: Step) -> frozenset[str]:
        columns = (
            self._shuffle_output(end, self._schemas.keys[end.name]).columns
            if isinstance(end, KeyBy)
            else self._schemas.into(end.name)
        )
        return frozenset(name for name, _ in columns)

    def _process_output(self, step: Process, stream: str) -> Output:
        """A sink right behind a stream is its category; whoever else reads the stream reads it there."""
        columns = dict(step.outputs)[stream]
        for edge in self._graph.readers_of(step.name):
            reader = self._graph.step(edge.target)
            if edge.stream == stream and isinstance(reader, Sink):
                return self._sink_output(reader, stream)
        return self._internal(step, columns, f"stream {stream}", stream)

    def _is_direct(self, step: Step) -> bool:
        """True if a computation writes this sink itself: the first sink right behind one of its streams."""
        if not isinstance(step, Sink):
            return False
        edge = self._graph.input_of(step.name)
        producer = self._graph.step(edge.source)
        return isinstance(producer, Process) and (
            self._process_output(producer, edge.stream).category == step.category
        )

    def _sink_output(self, step: Sink, stream: str = DEFAULT_STREAM) -> Output:
        return Output(
            stream=stream,
            category=step.category,
            partitions=step.partitions or self._graph.partitions,
            columns=self._schemas.into(step.name),
            internal=False,
        )

    def _internal(self, step: Step, columns: Columns, key: str, stream: str) -> Output:
        partitions = self._graph.partitions
        # What the bytes mean is part of the name: a change makes a new category, never mixes with the old.
        meaning = json.dumps([partitions, columns, key, "typed"], separators=(",", ":"))
        name = f"{self._job_name(step)}.{hashlib.sha256(meaning.encode()).hexdigest()[:8]}"
        return Output(stream=stream, category=name, partitions=partitions, columns=columns, internal=True)

    def _job_name(self, step: Step) -> str:
        return f"{self._graph.name}.{step.name}"

    def _needed_at_origin(self, road: _Road, kept: frozenset[str]) -> frozenset[str]:
        needed = kept
        for step in reversed(road.steps):
            if isinstance(step, Filter):
                needed |= self._schemas.conditions[step.name].columns
            else:
                needed = frozenset().union(*(checked.columns for _, checked in self._selected(step, needed)))
        return needed

    def _selected(self, step: Select, needed: frozenset[str]) -> tuple[tuple[str, Checked], ...]:
        columns = self._schemas.selected[step.name]
        return tuple(column for column in columns if column[0] in needed) or columns[:1]

    def _stages(self, road: _Road, columns: Columns, kept: Columns) -> tuple[Stage, ...]:
        """Steps as stages, each select with only the columns that are used; at the end exactly `kept`."""
        needed = frozenset(name for name, _ in kept)
        stages: list[Stage] = []
        for step in reversed(road.steps):
            if isinstance(step, Filter):
                condition = self._schemas.conditions[step.name]
                stages.append(FilterStage(expr=condition.text))
                needed |= condition.columns
            else:
                chosen = self._selected(step, needed)
                made = tuple((name, checked.text, checked.type) for name, checked in chosen)
                stages.append(SelectStage(columns=made))
                needed = frozenset().union(*(checked.columns for _, checked in chosen))
        stages.reverse()
        for stage in stages:
            if isinstance(stage, SelectStage):
                columns = tuple((name, kind) for name, _, kind in stage.columns)
        if columns != kept:
            stages.append(SelectStage(columns=tuple((name, f"`{name}`", kind) for name, kind in kept)))
        return tuple(stages)


def _check_is_keyed(graph: Graph, step: Process) -> None:
    before = graph.step(graph.input_of(step.name).source)
    while isinstance(before, Filter | Select):
        before = graph.step(graph.input_of(before.name).source)
    if not isinstance(before, KeyBy):
        raise PipelineError(
            f"{step.place}: step {step.name!r} processes records that have no key",
            why="a computation runs per key, and between "
            f"{before.name!r} and {step.name!r} nothing says which records belong together",
            fix=f'put .key_by("<column>") before .process({step.computation})',
        )
