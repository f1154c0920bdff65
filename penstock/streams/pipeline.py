"""The language in which a pipeline is written: every call records a step, nothing runs (MillWheel 4, 5).

p = Pipeline("zeitgeist", partitions=4)
p.source("queries").filter("lang = 'en'").key_by("query").process(CountPerSecond).sink("query_counts")
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import PipelineError
from penstock.streams.catalogue import nearest
from penstock.streams.graph import (
    DEFAULT_STREAM,
    Columns,
    Edge,
    Filter,
    Graph,
    KeyBy,
    Place,
    Process,
    Select,
    Sink,
    Source,
    Step,
    check_category,
    check_columns,
    check_name,
    check_partitions,
    check_sink,
    safe_name,
)


class Pipeline:
    """A graph being written down. Its name and partitions become part of names on the bus."""

    def __init__(self, name: str, *, partitions: int = 4) -> None:
        place = _here()
        self.name = check_name(name, what="pipeline", place=place)
        self.partitions = check_partitions(partitions, place=place)
        self.place = place
        self.computations: dict[str, type] = {}  # by class name
        self.local_files: tuple[
            Path, ...
        ] = ()  # the user's own modules that the file imports; set by load_pipeline
        self._steps: dict[str, Step] = {}
        self._edges: list[Edge] = []

    def source(self, category: str, *, start: str = "earliest", name: str | None = None) -> Stream:
        """Read a category of the bus, from its beginning ("earliest") or from now on ("latest")."""
        place = _here()
        check_category(category, place=place)
        if start not in ("earliest", "latest"):
            raise PipelineError(
                f"{place}: start={start!r} is not possible",
                why="a source begins where the category begins, or at its end on the first submission",
                fix='write start="earliest" or start="latest"',
            )
        for step in self._steps.values():
            if isinstance(step, Sink):
                read = Source(name=category, place=place, category=category)
                check_sink(step, sources=[read], sinks=[])
        step_name = self._name(name, safe_name(category), place)
        return self._add(Source(name=step_name, place=place, category=category, start=start), None)

    def graph(self) -> Graph:
        """What was written down so far."""
        steps, edges = tuple(self._steps.values()), tuple(self._edges)
        return Graph(name=self.name, partitions=self.partitions, steps=steps, edges=edges)

    def _add(self, step: Step, upstream: Stream | None) -> Stream:
        self._steps[step.name] = step
        if upstream is not None:
            self._edges.append(Edge(source=upstream.step, target=step.name, stream=upstream.output))
        return Stream(pipeline=self, step=step.name)

    def _name(self, given: str | None, derived: str, place: Place, *, numbered: bool = False) -> str:
        """A given name is kept; a derived one that never names a job is numbered when it repeats."""
        if given is not None:
            check_name(given, what="step", place=place)
        name, count = given or derived, 1
        while numbered and given is None and name in self._steps:
            count += 1
            name = f"{derived}_{count}"
        if name in self._steps:
            raise PipelineError(
                f"{place}: there are two steps called {name!r}",
                why=f"the other one is at {self._steps[name].place}; jobs and state are found by these names",
                fix='give this one a name of its own: name="…"',
            )
        return name

    def _sinks(self) -> list[Sink]:
        return [step for step in self._steps.values() if isinstance(step, Sink)]

    def _sources(self) -> list[Source]:
        return [step for step in self._steps.values() if isinstance(step, Source)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The records that come out of a step. A value: it may be used several times."""

    pipeline: Pipeline
    step: str
    output: str = DEFAULT_STREAM

    def filter(self, condition: str, *, name: str | None = None) -> Stream:
        """Keep the records for which a Spark SQL condition is true."""
        place = _here()
        _check_texts((condition,), what="filter", place=place)
        step_name = self.pipeline._name(name, "filter", place, numbered=True)
        return self._then(Filter(name=step_name, place=place, condition=condition))

    def select(self, *columns: str, name: str | None = None) -> Stream:
        """Make new columns: "expression AS name" in Spark SQL, or a column as it is. Others are dropped."""
        place = _here()
        _check_texts(columns, what="select", place=place)
        step_name = self.pipeline._name(name, "select", place, numbered=True)
        return self._then(Select(name=step_name, place=place, columns=columns))

    def key_by(self, *keys: str, name: str | None = None) -> Stream:
        """Bring records with the same key together: one or more columns or Spark SQL expressions."""
        place = _here()
        _check_texts(keys, what="key_by", place=place)
        step_name = self.pipeline._name(name, safe_name("by_" + "_".join(keys)), place)
        return self._then(KeyBy(name=step_name, place=place, keys=keys))

    def process(self, computation: type, *, name: str | None = None) -> Processed:
        """Run a Computation per key. Choose among several output streams with ["stream"]."""
        place = _here()
        known = self.pipeline.computations
        outputs = _outputs_of(computation, place)
        class_name = computation.__name__
        if known.get(class_name, computation) is not computation:
            raise PipelineError(
                f"{place}: there are two computations called {class_name!r}",
                why="a task finds a computation by the name of its class",
                fix="rename one of the classes",
            )
        step_name = self.pipeline._name(name, _snake_case(class_name), place)
        late = getattr(computation, "late", "drop")
        if late not in ("drop", "process"):
            raise PipelineError(
                f"{place}: {class_name}.late is {late!r}",
                why="a record behind the low watermark is dropped and counted, or processed as any other",
                fix='set late = "drop" or late = "process"',
            )
        step = Process(name=step_name, place=place, computation=class_name, outputs=outputs, late=late)
        stream = self._then(step)
        known[class_name] = computation
        return Processed(pipeline=stream.pipeline, step=stream.step)

    def sink(self, category: str, *, partitions: int | None = None, name: str | None = None) -> None:
        """Write to a category that others may read; by default with the pipeline's number of partitions."""
        place = _here()
        check_category(category, place=place)
        if partitions is not None:
            check_partitions(partitions, place=place)
        probe = Sink(name="", place=place, category=category, partitions=partitions)
        check_sink(probe, sources=self.pipeline._sources(), sinks=self.pipeline._sinks())
        step_name = self.pipeline._name(name, safe_name(category), place)
        self._then(Sink(name=step_name, place=place, category=category, partitions=partitions))

    def _then(self, step: Step) -> Stream:
        self._check_output(step.place)
        return self.pipeline._add(step, self)

    def _check_output(self, place: Place) -> None:
        producer = self.pipeline._steps[self.step]
        if not isinstance(producer, Process):
            return
        streams = [stream for stream, _ in producer.outputs]
        if self.output not in streams:
            near = nearest(self.output, streams) or streams[0]
            raise PipelineError(
                f"{place}: computation {producer.computation} has no stream {self.output!r}",
                why=f"it declares {', '.join(map(repr, streams))}",
                fix=f'take one of them: .process({producer.computation})["{near}"]',
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Processed(Stream):
    """What a computation produces: by itself the stream "out", by name any stream it declares."""

    def __getitem__(self, stream: str) -> Stream:
        return self._pick(stream, _here())

    def stream(self, name: str) -> Stream:
        """The output stream of that name."""
        return self._pick(name, _here())

    def _pick(self, name: str, place: Place) -> Stream:
        chosen = Stream(pipeline=self.pipeline, step=self.step, output=name)
        chosen._check_output(place)
        return chosen


def _outputs_of(computation: Any, place: Place) -> tuple[tuple[str, Columns], ...]:
    hooks: Callable[..., object] | None = getattr(computation, "process_record", None)
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
        listed = tuple((str(column), str(kind)) for column, kind in columns.items())
        check_columns(listed, what=f"stream {stream!r} of {computation.__name__}", place=place)
        found.append((stream, listed))
    return tuple(found)


def _check_texts(texts: tuple[str, ...], *, what: str, place: Place) -> None:
    if texts and all(isinstance(text, str) and text.strip() for text in texts):
        return
    wrong = next((text for text in texts if not isinstance(text, str) or not text.strip()), None)
    raise PipelineError(
        f"{place}: {what}() needs Spark SQL text" + (f", not {wrong!r}" if texts else ""),
        why="expressions run inside Spark, so they are given as text",
        fix={
            "filter": "write .filter(\"lang = 'en'\")",
            "select": 'write .select("lower(query) AS query", "ts")',
            "key_by": 'write .key_by("query")',
        }[what],
    )


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _here() -> Place:
    """Where the user's code called into this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return Place(file=Path(frame.f_code.co_filename).name, line=frame.f_lineno)
