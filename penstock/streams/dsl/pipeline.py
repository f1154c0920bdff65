"""The language in which a pipeline is written: every call records a step, nothing runs (MillWheel 4, 5).

p = Pipeline("zeitgeist", partitions=4)
p.source("queries").filter("lang = 'en'").key_by("query").process(CountPerSecond).sink("query_counts")

The same in SQL: p.sql("INSERT INTO english SELECT query FROM queries WHERE lang = 'en'"), see `sql.py`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.clock import Millis
from penstock.core.errors import PipelineError
from penstock.streams.catalogue import nearest
from penstock.streams.compile.graph import (
    DEFAULT_STREAM,
    AggregateStep,
    CodeLocation,
    Columns,
    DedupStep,
    Edge,
    FilterStep,
    FlatMapStep,
    Graph,
    JoinStep,
    KeyByStep,
    ProcessStep,
    SelectStep,
    SinkStep,
    SourceStep,
    Step,
    TopStep,
    UnionStep,
    WindowStep,
    check_category,
    check_columns,
    check_name,
    check_partitions,
    check_sink,
    safe_name,
)
from penstock.streams.dsl.windows import WINDOW_START, Firing, Spans, duration_ms, offset_ms
from penstock.streams.step.step import is_dead

TOP_MAX = 10_000


def check_window(spans: object, late: object, mode: object, place: CodeLocation) -> None:
    """Check a window, and when it gives results."""
    what = ""
    if not isinstance(spans, Spans):
        what, why = f"window({spans!r}) is not possible", "a window is tumbling, sliding or a session"
        fix = 'write .window(tumbling("10s")), with from penstock import tumbling'
    elif late not in ("drop", "update"):
        what, why = f"late={late!r} is not possible", "what comes too late is dropped or updates the result"
        fix = 'write late="drop" or late="update"'
    elif mode not in ("accumulating", "discarding"):
        what, why = f"mode={mode!r} is not possible", "a further result is the whole again, or what is new"
        fix = 'write mode="accumulating" or mode="discarding"'
    if what:
        raise PipelineError(f"{place}: {what}", why=why, fix=fix)


def check_texts(texts: tuple[str, ...], *, what: str, place: CodeLocation) -> None:
    """Check the expressions of a step."""
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
            "flat_map": "write .flat_map(\"explode(split(text, ' ')) AS word\")",
            "aggregate": 'write .aggregate("count(*) AS n")',
        }[what],
    )


def check_dedup(within: object, window: object, place: CodeLocation) -> None:
    """Check how long a record is remembered."""
    if (within is None) != (window is None) and (
        window is None or (isinstance(window, Spans) and window.kind == "tumbling")
    ):
        return
    raise PipelineError(
        f"{place}: dedup() needs within= or window=tumbling(...)",
        why="what was seen is remembered for a bounded time, or state would grow for ever",
        fix='write .key_by("id").dedup(within="1h")',
    )


def check_top(count: object, by: object, per: tuple[object, ...], place: CodeLocation) -> None:
    """Check how many results a top keeps, and by which column."""
    fix = 'write .aggregate("count(*) AS n").top(3, by="n")'
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= TOP_MAX:
        raise PipelineError(
            f"{place}: top({count!r}) is not possible",
            why=f"it is a whole number from 1 to {TOP_MAX}: so many records are kept per window",
            fix=fix,
        )
    if not all(isinstance(name, str) and name.strip() for name in (by, *per)):
        raise PipelineError(
            f"{place}: top() needs names of columns, not by={by!r}, per={per!r}",
            why="it goes by a column of the results, and has a list for each value of other columns",
            fix=fix,
        )


def check_two_phase(two_phase: object, place: CodeLocation) -> None:
    """Check the switch for an aggregate in two phases."""
    if not isinstance(two_phase, bool):
        raise PipelineError(
            f"{place}: two_phase={two_phase!r} is not possible",
            why="records of a key are added up in one place, or in all partitions first",
            fix="write two_phase=True, or leave it out",
        )


# --- computations ----------------------------------------------------------------------------------------

ID_TYPES = ("string", "bigint", "int", "binary")


def check_streams(streams: Mapping[str, Any], place: CodeLocation) -> None:
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


def required_columns_of(
    computation: Any, names: tuple[str, ...], place: CodeLocation
) -> tuple[tuple[str, Columns], ...]:
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


def outputs_of(computation: Any, place: CodeLocation) -> tuple[tuple[str, Columns], ...]:
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


def ids_of(computation: Any, place: CodeLocation) -> tuple[str, Millis] | None:
    """The column with a record's own id and the slack, if the computation declares them."""
    column = getattr(computation, "record_id", "")
    if not column:
        return None
    check_name(column, what="record_id", place=place)
    return str(column), duration_ms(getattr(computation, "record_id_slack", "2h"))


def snake_case(name: str) -> str:
    """A class name as a step is called."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def check_process_inputs(step: ProcessStep, given: Sequence[Columns]) -> None:
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


HOWS = ("inner", "left", "outer")


class Pipeline:
    """A graph being written down. Its name and partitions become part of names on the bus."""

    def __init__(self, name: str, *, partitions: int = 4) -> None:
        self._place_of_sql: CodeLocation | None = None  # while SQL is read: the line of its text
        place = self._where()
        self.name = check_name(name, what="pipeline", place=place)
        self.partitions = check_partitions(partitions, place=place)
        self.place = place
        self.computations: dict[str, type] = {}  # by class name
        self.local_files: tuple[
            Path, ...
        ] = ()  # the user's own modules that the file imports; set by load_pipeline
        self._steps: dict[str, Step] = {}
        self._edges: list[Edge] = []

    def sql(self, text: str, *, file: str = "") -> None:
        """Add INSERT statements of Spark SQL to this pipeline; `file` names the text in errors."""
        from penstock.streams.dsl.sql import add_statements  # it writes with this file's own calls

        place = self._where()
        try:
            add_statements(self, text, file=file or place.file, line=1 if file else place.line)
        finally:
            self._place_of_sql = None

    def source(self, category: str, *, start: str = "earliest", name: str | None = None) -> Stream:
        """Read a category of the bus, from its beginning ("earliest") or from now on ("latest")."""
        place = self._where()
        check_category(category, place=place)
        if start not in ("earliest", "latest"):
            raise PipelineError(
                f"{place}: start={start!r} is not possible",
                why="a source begins where the category begins, or at its end on the first submission",
                fix='write start="earliest" or start="latest"',
            )
        for step in self._steps.values():
            if isinstance(step, SinkStep):
                read = SourceStep(name=category, place=place, category=category)
                check_sink(step, sources=[read], sinks=[])
        step_name = self._name(name, safe_name(category), place)
        return self._add(SourceStep(name=step_name, place=place, category=category, start=start))

    def process(self, computation: type, *, name: str | None = None, **streams: Stream) -> Processed:
        """Run a Computation per key over several keyed streams; `record.stream` is the name given here.

        p.process(Visits, clicks=clicks.key_by("user"), orders=orders.key_by("buyer"))
        """
        return self._process(computation, streams, name)

    def _process(self, computation: type, streams: Mapping[str, Stream], name: str | None) -> Processed:
        place = self._where()
        check_streams(streams, place)
        first = next(iter(streams.values()))
        return first._processed(computation, streams, name, place)

    def graph(self) -> Graph:
        """What was written down so far."""
        steps, edges = tuple(self._steps.values()), tuple(self._edges)
        return Graph(name=self.name, partitions=self.partitions, steps=steps, edges=edges)

    def _where(self) -> CodeLocation:
        return self._place_of_sql or _here()

    def _add(self, step: Step, *upstream: Stream) -> Stream:
        self._steps[step.name] = step
        for stream in upstream:
            self._edges.append(Edge(source=stream.step, target=step.name, stream=stream.output))
        return Stream(pipeline=self, step=step.name)

    def _name(self, given: str | None, derived: str, place: CodeLocation, *, numbered: bool = False) -> str:
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

    def _sinks(self) -> list[SinkStep]:
        return [step for step in self._steps.values() if isinstance(step, SinkStep)]

    def _sources(self) -> list[SourceStep]:
        return [step for step in self._steps.values() if isinstance(step, SourceStep)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The records that come out of a step. A value: it may be used several times."""

    pipeline: Pipeline
    step: str
    output: str = DEFAULT_STREAM

    def filter(self, condition: str, *, name: str | None = None) -> Stream:
        """Keep the records for which a Spark SQL condition is true."""
        place = self.pipeline._where()
        check_texts((condition,), what="filter", place=place)
        step_name = self.pipeline._name(name, "filter", place, numbered=True)
        return self._then(FilterStep(name=step_name, place=place, condition=condition))

    def select(self, *columns: str, name: str | None = None) -> Stream:
        """Make new columns: "expression AS name" in Spark SQL, or a column as it is. Others are dropped."""
        place = self.pipeline._where()
        check_texts(columns, what="select", place=place)
        step_name = self.pipeline._name(name, "select", place, numbered=True)
        return self._then(SelectStep(name=step_name, place=place, columns=columns))

    def key_by(self, *keys: str, name: str | None = None) -> Stream:
        """Bring records with the same key together: one or more columns or Spark SQL expressions."""
        place = self.pipeline._where()
        check_texts(keys, what="key_by", place=place)
        step_name = self.pipeline._name(name, safe_name("by_" + "_".join(keys)), place)
        return self._then(KeyByStep(name=step_name, place=place, keys=keys))

    def flat_map(self, generator: str, *, name: str | None = None) -> Stream:
        """Make a record of each element of an array: "explode(split(text, ' ')) AS word". Columns stay."""
        place = self.pipeline._where()
        check_texts((generator,), what="flat_map", place=place)
        step_name = self.pipeline._name(name, "flat_map", place, numbered=True)
        return self._then(FlatMapStep(name=step_name, place=place, generator=generator))

    def union(self, *others: Stream, name: str | None = None) -> Stream:
        """All records of this stream and of others with the same columns."""
        place = self.pipeline._where()
        if not others or any(not isinstance(other, Stream) for other in others):
            raise PipelineError(
                f"{place}: union() needs other streams",
                why="it puts the records of two or more streams into one",
                fix="write .union(other), where other is a stream of this pipeline",
            )
        step_name = self.pipeline._name(name, "union", place, numbered=True)
        return self._then(UnionStep(name=step_name, place=place), *others)

    def window(
        self,
        spans: Spans,
        *,
        early: str | int | None = None,
        late: str = "drop",
        lateness: str | int = 0,
        mode: str = "accumulating",
        name: str | None = None,
    ) -> Windowed:
        """Group the records of each key by event time: tumbling("10s"), sliding(...) or session(...).

        `early`: give results so often before a window ends; `late="update"`: again for each late record
        within `lateness`; `mode`: each result is the whole ("accumulating") or what is new ("discarding").
        """
        place = self.pipeline._where()
        check_window(spans, late, mode, place)
        firing = Firing(
            early_ms=None if early is None else duration_ms(early),
            late=late,
            lateness_ms=offset_ms(lateness),
            mode=mode,
        )
        step_name = self.pipeline._name(name, "window", place, numbered=True)
        stream = self._then(WindowStep(name=step_name, place=place, spans=spans, firing=firing))
        return Windowed(pipeline=stream.pipeline, step=stream.step)

    def join(
        self,
        right: Stream,
        *,
        within: tuple[str | int, str | int] | None = None,
        window: Spans | None = None,
        how: str = "inner",
        name: str | None = None,
    ) -> Stream:
        """Pair records of two streams with equal keys, `within=(before, after)` or per window."""
        place = self.pipeline._where()
        if not isinstance(right, Stream) or how not in HOWS or (within is None) == (window is None):
            raise PipelineError(
                f"{place}: join() needs another stream, one of {', '.join(HOWS)}, and within= or window=",
                why="records wait for each other for a bounded time only, and what waits is kept as state",
                fix='write left.key_by("user").join(right.key_by("user"), within=("10s", "10s"))',
            )
        before, after = (None, None) if within is None else (offset_ms(within[0]), offset_ms(within[1]))
        step_name = self.pipeline._name(name, "join", place)
        step = JoinStep(name=step_name, place=place, how=how, before_ms=before, after_ms=after, spans=window)
        return self._then(step, right)

    def dedup(
        self, *, within: str | int | None = None, window: Spans | None = None, name: str | None = None
    ) -> Stream:
        """Keep the first record of each key, by event time, and drop those that come `within` so long after
        it; with `window=tumbling(...)` up to the end of its window. The key stays.
        """
        place = self.pipeline._where()
        check_dedup(within, window, place)
        step_name = self.pipeline._name(name, "dedup", place)
        within_ms = None if within is None else duration_ms(within)
        return self._then(DedupStep(name=step_name, place=place, within_ms=within_ms, spans=window))

    def top(
        self,
        count: int,
        *,
        by: str,
        per: str | Sequence[str] = (),
        lowest: bool = False,
        name: str | None = None,
    ) -> Stream:
        """Of the results of each window the first `count` by a column, with their `rank`.

        `per`: each value of these columns has a list of its own. `lowest`: the smallest values come first.
        """
        place = self.pipeline._where()
        columns = (per,) if isinstance(per, str) else tuple(per)
        check_top(count, by, columns, place)
        step_name = self.pipeline._name(name, "top", place)
        keyed = self.key_by(WINDOW_START, *columns, name=safe_name(f"{step_name}_by_window"))
        return keyed._then(TopStep(name=step_name, place=place, count=count, by=by, lowest=bool(lowest)))

    def process(self, computation: type, *, name: str | None = None) -> Processed:
        """Run a Computation per key. Choose among several output streams with ["stream"]."""
        return self.pipeline._process(computation, {"in": self}, name)

    def _processed(
        self, computation: type, streams: Mapping[str, Stream], name: str | None, place: CodeLocation
    ) -> Processed:
        known = self.pipeline.computations
        outputs = outputs_of(computation, place)
        class_name = computation.__name__
        if known.get(class_name, computation) is not computation:
            raise PipelineError(
                f"{place}: there are two computations called {class_name!r}",
                why="a task finds a computation by the name of its class",
                fix="rename one of the classes",
            )
        step_name = self.pipeline._name(name, snake_case(class_name), place)
        late = getattr(computation, "late", "drop")
        if late not in ("drop", "process"):
            raise PipelineError(
                f"{place}: {class_name}.late is {late!r}",
                why="a record behind the low watermark is dropped and counted, or processed as any other",
                fix='set late = "drop" or late = "process"',
            )
        step = ProcessStep(
            name=step_name,
            place=place,
            computation=class_name,
            outputs=outputs,
            late=late,
            vectorised=hasattr(computation, "process_batch"),
            settings=settings_of(computation),
            inputs=tuple(streams),
            wants=required_columns_of(computation, tuple(streams), place),
            state=state_of(computation),
            ids=ids_of(computation, place),
        )
        _, *others = streams.values()
        stream = self._then(step, *others)
        known[class_name] = computation
        return Processed(pipeline=stream.pipeline, step=stream.step)

    def sink(self, category: str, *, partitions: int | None = None, name: str | None = None) -> None:
        """Write to a category that others may read; by default with the pipeline's number of partitions."""
        place = self.pipeline._where()
        check_category(category, place=place)
        if partitions is not None:
            check_partitions(partitions, place=place)
        probe = SinkStep(name="", place=place, category=category, partitions=partitions)
        check_sink(probe, sources=self.pipeline._sources(), sinks=self.pipeline._sinks())
        step_name = self.pipeline._name(name, safe_name(category), place)
        self._then(SinkStep(name=step_name, place=place, category=category, partitions=partitions))

    def _then(self, step: Step, *others: Stream) -> Stream:
        for stream in (self, *others):
            stream._check_output(step.place)
            if stream.pipeline is not self.pipeline:
                raise PipelineError(
                    f"{step.place}: step {step.name!r} mixes streams of two pipelines",
                    why=f"one is of {self.pipeline.name!r}, the other of {stream.pipeline.name!r}",
                    fix="write the other one to a sink, and read that with .source(...)",
                )
        return self.pipeline._add(step, self, *others)

    def _check_output(self, place: CodeLocation) -> None:
        producer = self.pipeline._steps[self.step]
        if not isinstance(producer, ProcessStep):
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
        return self._pick(stream, self.pipeline._where())

    def stream(self, name: str) -> Stream:
        """The output stream of that name."""
        return self._pick(name, self.pipeline._where())

    def _pick(self, name: str, place: CodeLocation) -> Stream:
        chosen = Stream(pipeline=self.pipeline, step=self.step, output=name)
        chosen._check_output(place)
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowed:
    """Records grouped by key and window, to be aggregated."""

    pipeline: Pipeline
    step: str

    def aggregate(self, *columns: str, two_phase: bool = False, name: str | None = None) -> Stream:
        """One record per key and window: the key's columns, window_start, window_end, and these values.

        "count(*) AS n", and sum, min, max, avg, approx_count_distinct and approx_percentile of a column.
        `two_phase`: the records of a key are added up in all partitions first, for keys that have very many.
        """
        place = self.pipeline._where()
        check_texts(columns, what="aggregate", place=place)
        step_name = self.pipeline._name(name, "aggregate", place)
        check_two_phase(two_phase, place)
        step = AggregateStep(name=step_name, place=place, columns=columns, two_phase=two_phase)
        return Stream(pipeline=self.pipeline, step=self.step)._then(step)


def _here() -> CodeLocation:
    """Where the user's code called into this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return CodeLocation(file=Path(frame.f_code.co_filename).name, line=frame.f_lineno)
