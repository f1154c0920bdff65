"""The language in which a pipeline is written: every call records a step, nothing runs (MillWheel 4, 5).

p = Pipeline("zeitgeist", partitions=4)
p.source("queries").filter("lang = 'en'").key_by("query").process(CountPerSecond).sink("query_counts")

The same in SQL: p.sql("INSERT INTO english SELECT query FROM queries WHERE lang = 'en'"), see `sql.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import PipelineError
from penstock.streams.catalogue import nearest
from penstock.streams.graph import (
    DEFAULT_STREAM,
    Aggregate,
    Dedup,
    Edge,
    Filter,
    FlatMap,
    Graph,
    Join,
    KeyBy,
    Place,
    Process,
    Select,
    Sink,
    Source,
    Step,
    Top,
    Union,
    Window,
    check_category,
    check_name,
    check_partitions,
    check_sink,
    safe_name,
)
from penstock.streams.pipeline_checks import (
    check_dedup,
    check_texts,
    check_top,
    check_two_phase,
    check_window,
)
from penstock.streams.process_checks import (
    check_streams,
    ids_of,
    outputs_of,
    settings_of,
    snake_case,
    state_of,
    wants_of,
)
from penstock.streams.windows import WINDOW_START, Firing, Spans, duration_ms, offset_ms

HOWS = ("inner", "left", "outer")


class Pipeline:
    """A graph being written down. Its name and partitions become part of names on the bus."""

    def __init__(self, name: str, *, partitions: int = 4) -> None:
        self._place_of_sql: Place | None = None  # while SQL is read: the line of its text
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
        from penstock.streams.sql import add_statements  # it writes with this file's own calls

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
            if isinstance(step, Sink):
                read = Source(name=category, place=place, category=category)
                check_sink(step, sources=[read], sinks=[])
        step_name = self._name(name, safe_name(category), place)
        return self._add(Source(name=step_name, place=place, category=category, start=start))

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

    def _where(self) -> Place:
        return self._place_of_sql or _here()

    def _add(self, step: Step, *upstream: Stream) -> Stream:
        self._steps[step.name] = step
        for stream in upstream:
            self._edges.append(Edge(source=stream.step, target=step.name, stream=stream.output))
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
        place = self.pipeline._where()
        check_texts((condition,), what="filter", place=place)
        step_name = self.pipeline._name(name, "filter", place, numbered=True)
        return self._then(Filter(name=step_name, place=place, condition=condition))

    def select(self, *columns: str, name: str | None = None) -> Stream:
        """Make new columns: "expression AS name" in Spark SQL, or a column as it is. Others are dropped."""
        place = self.pipeline._where()
        check_texts(columns, what="select", place=place)
        step_name = self.pipeline._name(name, "select", place, numbered=True)
        return self._then(Select(name=step_name, place=place, columns=columns))

    def key_by(self, *keys: str, name: str | None = None) -> Stream:
        """Bring records with the same key together: one or more columns or Spark SQL expressions."""
        place = self.pipeline._where()
        check_texts(keys, what="key_by", place=place)
        step_name = self.pipeline._name(name, safe_name("by_" + "_".join(keys)), place)
        return self._then(KeyBy(name=step_name, place=place, keys=keys))

    def flat_map(self, generator: str, *, name: str | None = None) -> Stream:
        """Make a record of each element of an array: "explode(split(text, ' ')) AS word". Columns stay."""
        place = self.pipeline._where()
        check_texts((generator,), what="flat_map", place=place)
        step_name = self.pipeline._name(name, "flat_map", place, numbered=True)
        return self._then(FlatMap(name=step_name, place=place, generator=generator))

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
        return self._then(Union(name=step_name, place=place), *others)

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
        stream = self._then(Window(name=step_name, place=place, spans=spans, firing=firing))
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
        step = Join(name=step_name, place=place, how=how, before_ms=before, after_ms=after, spans=window)
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
        return self._then(Dedup(name=step_name, place=place, within_ms=within_ms, spans=window))

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
        return keyed._then(Top(name=step_name, place=place, count=count, by=by, lowest=bool(lowest)))

    def process(self, computation: type, *, name: str | None = None) -> Processed:
        """Run a Computation per key. Choose among several output streams with ["stream"]."""
        return self.pipeline._process(computation, {"in": self}, name)

    def _processed(
        self, computation: type, streams: Mapping[str, Stream], name: str | None, place: Place
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
        step = Process(
            name=step_name,
            place=place,
            computation=class_name,
            outputs=outputs,
            late=late,
            vectorised=hasattr(computation, "process_batch"),
            settings=settings_of(computation),
            inputs=tuple(streams),
            wants=wants_of(computation, tuple(streams), place),
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
        probe = Sink(name="", place=place, category=category, partitions=partitions)
        check_sink(probe, sources=self.pipeline._sources(), sinks=self.pipeline._sinks())
        step_name = self.pipeline._name(name, safe_name(category), place)
        self._then(Sink(name=step_name, place=place, category=category, partitions=partitions))

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
        return self._pick(stream, self.pipeline._where())

    def stream(self, name: str) -> Stream:
        """The output stream of that name."""
        return self._pick(name, self.pipeline._where())

    def _pick(self, name: str, place: Place) -> Stream:
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
        step = Aggregate(name=step_name, place=place, columns=columns, two_phase=two_phase)
        return Stream(pipeline=self.pipeline, step=self.step)._then(step)


def _here() -> Place:
    """Where the user's code called into this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return Place(file=Path(frame.f_code.co_filename).name, line=frame.f_lineno)
