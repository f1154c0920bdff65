"""The Python DSL of pipelines: every call records a step, nothing runs (MillWheel 4, 5).

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
    """Check the arguments of window()."""
    what = ""
    if not isinstance(spans, Spans):
        what, why = f"window({spans!r}) is not possible", "a window is tumbling, sliding or a session"
        fix = 'write .window(tumbling("10s")), with from penstock import tumbling'
    elif late not in ("drop", "update"):
        what, why = f"late={late!r} is not possible", "late records are dropped, or update the result"
        fix = 'write late="drop" or late="update"'
    elif mode not in ("accumulating", "discarding"):
        what, why = f"mode={mode!r} is not possible", "a further result is the whole value, or what is new"
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
    """Check the arguments of dedup()."""
    if (within is None) != (window is None) and (
        window is None or (isinstance(window, Spans) and window.kind == "tumbling")
    ):
        return
    raise PipelineError(
        f"{place}: dedup() needs within= or window=tumbling(...)",
        why="keys are stored for a limited time only; otherwise the state would grow without limit",
        fix='write .key_by("id").dedup(within="1h")',
    )


def check_top(count: object, by: object, per: tuple[object, ...], place: CodeLocation) -> None:
    """Check the arguments of top()."""
    fix = 'write .aggregate("count(*) AS n").top(3, by="n")'
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= TOP_MAX:
        raise PipelineError(
            f"{place}: top({count!r}) is not possible",
            why=f"it is a whole number from 1 to {TOP_MAX}: the number of records that are stored per window",
            fix=fix,
        )
    if not all(isinstance(name, str) and name.strip() for name in (by, *per)):
        raise PipelineError(
            f"{place}: top() needs names of columns, not by={by!r}, per={per!r}",
            why="results are ordered by a column, and listed separately for each value of the `per` columns",
            fix=fix,
        )


def check_two_phase(two_phase: object, place: CodeLocation) -> None:
    """Check the argument two_phase of aggregate()."""
    if not isinstance(two_phase, bool):
        raise PipelineError(
            f"{place}: two_phase={two_phase!r} is not possible",
            why="it is True (records of a key are first aggregated in each partition) or False",
            fix="write two_phase=True, or leave it out",
        )


# --- computations ----------------------------------------------------------------------------------------

ID_TYPES = ("string", "bigint", "int", "binary")


def check_streams(streams: Mapping[str, Any], place: CodeLocation) -> None:
    """Check that the streams of a computation have valid names and occur once."""
    for name, stream in streams.items():
        check_name(name, what="input stream", place=place)
        if not hasattr(stream, "key_by"):
            raise PipelineError(
                f"{place}: input {name!r} is not a stream",
                why=f"it is {stream!r}",
                fix=f'write process(…, {name}=stream.key_by("<column>"))',
            )
    if not streams or len({(one.step, one.output) for one in streams.values()}) < len(streams):
        raise PipelineError(
            f"{place}: process() needs streams, each of them once",
            why="two inputs are the same stream, so their records could not be distinguished"
            if streams
            else "no stream was given",
            fix='write p.process(MyComputation, left=a.key_by("x"), right=b.key_by("y"))',
        )


def required_columns_of(
    computation: Any, names: tuple[str, ...], place: CodeLocation
) -> tuple[tuple[str, Columns], ...]:
    """The columns that a computation declares for each of its inputs; nothing if it declares none."""
    declared: Mapping[str, Mapping[str, str]] = getattr(computation, "inputs", {})
    if declared and set(declared) != set(names):
        raise PipelineError(
            f"{place}: the inputs of computation {computation.__name__} do not match its declaration",
            why=f"it declares {', '.join(map(repr, declared))}, but process() got "
            f"{', '.join(map(repr, names))}",
            fix="pass one stream for each declared input: p.process(MyComputation, "
            + ", ".join(f"{name}=…" for name in declared)
            + ")",
        )
    for name, columns in declared.items():
        check_columns(tuple(columns.items()), what=f"input {name!r}", place=place)
    return tuple((name, tuple(declared[name].items())) for name in names if name in declared)


def state_of(computation: Any) -> Columns:
    """The state that a computation declares per key: names of values, and their types as text."""
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
            f"{place}: process() needs a subclass of Computation, not {computation!r}",
            why="each key has its own state, so Penstock creates the objects itself",
            fix="write class MyComputation(Computation) and pass the class itself: .process(MyComputation)",
        )
    if "." in computation.__qualname__:
        raise PipelineError(
            f"{place}: {computation.__name__} is defined inside {computation.__qualname__.split('.')[0]}",
            why="a task looks up the class by its name at the top level of the pipeline's file",
            fix="move the class to the top level of the file",
        )
    declared = getattr(computation, "outputs", None)
    if not isinstance(declared, Mapping) or not declared:
        raise PipelineError(
            f"{place}: computation {computation.__name__} declares no output streams",
            why="its output columns must be known before it runs",
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
                f"{place}: {computation.__name__} cannot have a stream named {stream!r}",
                why="this name is reserved for records that could not be read",
                fix="give the stream another name",
            )
        listed = tuple((str(column), str(kind)) for column, kind in columns.items())
        check_columns(listed, what=f"stream {stream!r} of {computation.__name__}", place=place)
        found.append((stream, listed))
    return tuple(found)


def ids_of(computation: Any, place: CodeLocation) -> tuple[str, Millis] | None:
    """The column with the record id, and the slack, if the computation declares them."""
    column = getattr(computation, "record_id", "")
    if not column:
        return None
    check_name(column, what="record_id", place=place)
    return str(column), duration_ms(getattr(computation, "record_id_slack", "2h"))


def snake_case(name: str) -> str:
    """A class name as a step name."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def check_process_inputs(step: ProcessStep, given: Sequence[Columns]) -> None:
    """Check that inputs have the declared columns, and that columns of the same name have the same type."""
    wanted = dict(step.required_columns)
    known: dict[str, tuple[str, str]] = {}
    for name, columns in zip(step.inputs, given, strict=True):
        for column, kind in wanted.get(name, ()):
            if dict(columns).get(column) != kind:
                there = ", ".join(f"{one} {its}" for one, its in columns)
                raise PipelineError(
                    f"input {name!r} has no column {column!r} of type {kind}",
                    why=f"{step.computation} declares this column, but the stream has {there}",
                    fix=f'select it before the key_by: .select("… AS {column}", …)',
                )
        for column, kind in wanted.get(name) or columns:
            if known.setdefault(column.lower(), (column, kind)) != (column, kind):
                raise PipelineError(
                    f"column {column!r} of input {name!r} is {kind}, in another input it is "
                    f"{' '.join(known[column.lower()])}",
                    why="all inputs of a computation are in one table, so columns of the "
                    "same name need the same type",
                    fix=f'rename it before the key_by: .select("{column} AS {name}_{column}", …)',
                )
        if step.ids is not None:
            _check_id(step.computation, name, step.ids[0], dict(wanted.get(name) or columns))


def _check_id(computation: str, name: str, column: str, columns: Mapping[str, str]) -> None:
    if columns.get(column) not in ID_TYPES:
        found = f"it is {columns[column]}" if column in columns else f"there are {', '.join(columns)}"
        raise PipelineError(
            f"{computation}.record_id names {column!r}, which is not an id column of input {name!r}",
            why=f"{found}; the type of an id is one of {', '.join(ID_TYPES)}",
            fix="select the column up to process(), with its type, and declare it if `inputs` are declared",
        )


def settings_of(computation: Any) -> tuple[tuple[str, str], ...]:
    """Settings of a computation for its job, where they differ from the defaults."""
    defaults = {"poison": "fail", "productions": "strong", "dedup": "on"}
    asked = ((name, str(getattr(computation, name, usual))) for name, usual in defaults.items())
    return tuple((name, value) for name, value in asked if value != defaults[name])


HOWS = ("inner", "left", "outer")


class Pipeline:
    """Builds the graph of a pipeline. Its name and partitions become part of names on the bus."""

    def __init__(self, name: str, *, partitions: int = 4) -> None:
        self._place_of_sql: CodeLocation | None = None  # while SQL is parsed: the line of the statement
        place = self._where()
        self.name = check_name(name, what="pipeline", place=place)
        self.partitions = check_partitions(partitions, place=place)
        self.place = place
        self.computations: dict[str, type] = {}  # by class name
        # The user's own modules that the file imports; set by load_pipeline.
        self.local_files: tuple[Path, ...] = ()
        self._steps: dict[str, Step] = {}
        self._edges: list[Edge] = []

    def sql(self, text: str, *, file: str = "") -> None:
        """Add INSERT statements of Spark SQL to this pipeline; `file` names the text in errors."""
        from penstock.streams.dsl.sql import add_statements  # it imports this module

        place = self._where()
        try:
            add_statements(self, text, file=file or place.file, line=1 if file else place.line)
        finally:
            self._place_of_sql = None

    def source(self, category: str, *, start: str = "earliest", name: str | None = None) -> Stream:
        """Read a category of the bus, from its first record ("earliest") or from now on ("latest")."""
        place = self._where()
        check_category(category, place=place)
        if start not in ("earliest", "latest"):
            raise PipelineError(
                f"{place}: start={start!r} is not possible",
                why="a source starts at the first record of the category, or at its "
                "end at the first submission",
                fix='write start="earliest" or start="latest"',
            )
        for step in self._steps.values():
            if isinstance(step, SinkStep):
                read = SourceStep(name=category, place=place, category=category)
                check_sink(step, sources=[read], sinks=[])
        step_name = self._name(name, safe_name(category), place)
        return self._add(SourceStep(name=step_name, place=place, category=category, start=start))

    def process(self, computation: type, *, name: str | None = None, **streams: Stream) -> Processed:
        """Run a Computation per key over several keyed streams; `record.stream` is the argument's name.

        p.process(Visits, clicks=clicks.key_by("user"), orders=orders.key_by("buyer"))
        """
        return self._process(computation, streams, name)

    def _process(self, computation: type, streams: Mapping[str, Stream], name: str | None) -> Processed:
        place = self._where()
        check_streams(streams, place)
        first = next(iter(streams.values()))
        return first._processed(computation, streams, name, place)

    def graph(self) -> Graph:
        """The steps and edges recorded so far."""
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
        """The given name, or the derived one. `numbered`: a derived name that is taken gets a number."""
        if given is not None:
            check_name(given, what="step", place=place)
        name, count = given or derived, 1
        while numbered and given is None and name in self._steps:
            count += 1
            name = f"{derived}_{count}"
        if name in self._steps:
            raise PipelineError(
                f"{place}: there are two steps named {name!r}",
                why=f"the other one is at {self._steps[name].place}; jobs and their "
                "state are identified by step names",
                fix='give this step another name: name="…"',
            )
        return name

    def _sinks(self) -> list[SinkStep]:
        return [step for step in self._steps.values() if isinstance(step, SinkStep)]

    def _sources(self) -> list[SourceStep]:
        return [step for step in self._steps.values() if isinstance(step, SourceStep)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The output records of a step. It is a value and may be used several times."""

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
        """Compute columns: "expression AS name" in Spark SQL, or a column as it is. Others are dropped."""
        place = self.pipeline._where()
        check_texts(columns, what="select", place=place)
        step_name = self.pipeline._name(name, "select", place, numbered=True)
        return self._then(SelectStep(name=step_name, place=place, columns=columns))

    def key_by(self, *keys: str, name: str | None = None) -> Stream:
        """Partition the records by a key: one or more columns or Spark SQL expressions."""
        place = self.pipeline._where()
        check_texts(keys, what="key_by", place=place)
        step_name = self.pipeline._name(name, safe_name("by_" + "_".join(keys)), place)
        return self._then(KeyByStep(name=step_name, place=place, keys=keys))

    def flat_map(self, generator: str, *, name: str | None = None) -> Stream:
        """One record per element of an array: "explode(split(text, ' ')) AS word". Other columns are kept."""
        place = self.pipeline._where()
        check_texts((generator,), what="flat_map", place=place)
        step_name = self.pipeline._name(name, "flat_map", place, numbered=True)
        return self._then(FlatMapStep(name=step_name, place=place, generator=generator))

    def union(self, *others: Stream, name: str | None = None) -> Stream:
        """The records of this stream and of other streams with the same columns."""
        place = self.pipeline._where()
        if not others or any(not isinstance(other, Stream) for other in others):
            raise PipelineError(
                f"{place}: union() needs other streams",
                why="it merges two or more streams into one",
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

        `early`: also emit results at this interval before a window ends; `late="update"`: also for each late
        record within `lateness`; `mode`: each result is the whole value ("accumulating") or only what is new
        since the last one ("discarding").
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
                why="waiting records are stored as state, so they can wait for a limited time only",
                fix='write left.key_by("user").join(right.key_by("user"), within=("10s", "10s"))',
            )
        before, after = (None, None) if within is None else (offset_ms(within[0]), offset_ms(within[1]))
        step_name = self.pipeline._name(name, "join", place)
        step = JoinStep(name=step_name, place=place, how=how, before_ms=before, after_ms=after, spans=window)
        return self._then(step, right)

    def dedup(
        self, *, within: str | int | None = None, window: Spans | None = None, name: str | None = None
    ) -> Stream:
        """Keep the first record of each key, by event time, and drop further ones for the time `within`, or
        up to the end of its `window=tumbling(...)`. The key does not change.
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
        """The first `count` results of each window, ordered by a column, with their `rank`.

        `per`: a separate list for each value of these columns. `lowest`: ascending order.
        """
        place = self.pipeline._where()
        columns = (per,) if isinstance(per, str) else tuple(per)
        check_top(count, by, columns, place)
        step_name = self.pipeline._name(name, "top", place)
        keyed = self.key_by(WINDOW_START, *columns, name=safe_name(f"{step_name}_by_window"))
        return keyed._then(TopStep(name=step_name, place=place, count=count, by=by, lowest=bool(lowest)))

    def process(self, computation: type, *, name: str | None = None) -> Processed:
        """Run a Computation per key. If it has several output streams, select one with ["stream"]."""
        return self.pipeline._process(computation, {"in": self}, name)

    def _processed(
        self, computation: type, streams: Mapping[str, Stream], name: str | None, place: CodeLocation
    ) -> Processed:
        known = self.pipeline.computations
        outputs = outputs_of(computation, place)
        class_name = computation.__name__
        if known.get(class_name, computation) is not computation:
            raise PipelineError(
                f"{place}: there are two computations named {class_name!r}",
                why="a task looks up a computation by its class name",
                fix="rename one of the classes",
            )
        step_name = self.pipeline._name(name, snake_case(class_name), place)
        late = getattr(computation, "late", "drop")
        if late not in ("drop", "process"):
            raise PipelineError(
                f"{place}: {class_name}.late is {late!r}",
                why="a late record is dropped and counted, or processed like any other record",
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
            required_columns=required_columns_of(computation, tuple(streams), place),
            state=state_of(computation),
            ids=ids_of(computation, place),
        )
        _, *others = streams.values()
        stream = self._then(step, *others)
        known[class_name] = computation
        return Processed(pipeline=stream.pipeline, step=stream.step)

    def sink(self, category: str, *, partitions: int | None = None, name: str | None = None) -> None:
        """Write to a category; by default it has the pipeline's number of partitions."""
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
                    f"{step.place}: step {step.name!r} reads streams of two pipelines",
                    why=f"one is of {self.pipeline.name!r}, the other of {stream.pipeline.name!r}",
                    fix="write one stream to a sink, and read this category with .source(...)",
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
                fix=f'select one of them: .process({producer.computation})["{near}"]',
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Processed(Stream):
    """The output of a computation: the stream "out", or by name any declared stream."""

    def __getitem__(self, stream: str) -> Stream:
        return self._pick(stream, self.pipeline._where())

    def stream(self, name: str) -> Stream:
        """The output stream with this name."""
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
        """Compute one record per key and window: the key columns, window_start, window_end, and these values.

        "count(*) AS n", and sum, min, max, avg, approx_count_distinct and approx_percentile of a column.
        `two_phase`: for keys with very many records; they are first aggregated in each partition.
        """
        place = self.pipeline._where()
        check_texts(columns, what="aggregate", place=place)
        step_name = self.pipeline._name(name, "aggregate", place)
        check_two_phase(two_phase, place)
        step = AggregateStep(name=step_name, place=place, columns=columns, two_phase=two_phase)
        return Stream(pipeline=self.pipeline, step=self.step)._then(step)


def _here() -> CodeLocation:
    """The line of user code that called into this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return CodeLocation(file=Path(frame.f_code.co_filename).name, line=frame.f_lineno)
