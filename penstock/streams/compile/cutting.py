"""Cuts a checked graph into jobs, at each shuffle (Turbine II). Pure.

All steps between two cuts run in one job, in one pass. A job reads and writes only the columns that are used.
For each end of a job (a sink, a shuffle, a stateful step) the cutter collects its `Upstream`: the paths from
the job's inputs to this end. The steps of a path become stages for Spark.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.errors import PipelineError
from penstock.jobs.config import (
    Branch,
    ExplodeStage,
    FilterStage,
    KeyStage,
    Output,
    PackageRef,
    SelectStage,
    Stage,
)
from penstock.streams.bus.log import LOW_COLUMN, has_dead_letters
from penstock.streams.compile.compiled import CompiledJob, JobInput
from penstock.streams.compile.expressions import Checked, Summed
from penstock.streams.compile.graph import (
    DEFAULT_STREAM,
    AggregateStep,
    Columns,
    DedupStep,
    Edge,
    FilterStep,
    FlatMapStep,
    JoinStep,
    KeyByStep,
    ProcessStep,
    SelectStep,
    SinkStep,
    SourceStep,
    StatefulSteps,
    Step,
    TopStep,
    UnionStep,
    WindowStep,
)
from penstock.streams.compile.optimize import Rewrite, needs_shuffle
from penstock.streams.compile.schemas import Schemas, is_column, key_columns, window_edge
from penstock.streams.dsl.windows import Firing, Spans, duration_text
from penstock.streams.step.step import DEAD_COLUMNS, dead_category, dead_stream

Shape = dict[str, str]
_WHOLE = ("int", "bigint")


def operator_shape(step: AggregateStep | JoinStep | DedupStep | TopStep, schemas: Schemas) -> Shape:
    """What the stored state of a step depends on, by name. A plan stores it: do not change the texts."""
    graph = schemas.graph
    if isinstance(step, JoinStep):
        left, right = graph.inputs_of(step.name)
        before, after = (duration_text(ms or 0) for ms in (step.before_ms, step.after_ms))
        return {
            "pairs": _in_windows(step.spans) or f"up to {before} before and {after} after",
            "left columns": listed(schemas.at(left)),
            "right columns": listed(schemas.at(right)),
        }
    edge = graph.input_of(step.name)
    if isinstance(step, DedupStep):
        span = _in_windows(step.spans) or f"for {duration_text(step.within_ms or 0)}"
        return {"repeats": f"dropped {span}", "columns": listed(schemas.at(edge))}
    if isinstance(step, TopStep):
        order = "lowest" if step.lowest else "highest"
        return {
            "lists": f"the {step.count} {order} by {step.by}",
            "columns": listed(schemas.at(edge)),
        }
    return _aggregate(step, schemas)


def listed(columns: Columns) -> str:
    """Columns in order, with their types."""
    return ", ".join(f"{name} {kind}" for name, kind in columns)


def _aggregate(step: AggregateStep, schemas: Schemas) -> Shape:
    edge: Edge = window_edge(schemas.graph, step)
    window = schemas.graph.step(edge.source)
    assert isinstance(window, WindowStep), "checked before: an aggregate reads a window"
    kinds, spans = dict(schemas.at(edge)), window.spans
    if step.phase == "partial":  # per slide; the second phase combines slides to windows
        spans = Spans(kind="tumbling", size_ms=spans.slide_ms or spans.size_ms)
    return {
        # A block stores keys as texts; their columns are converted by type.
        "key columns": listed(tuple((name, kinds[name]) for name in key_columns(schemas, edge))),
        "windows": _spans(spans),
        "results": _results(window.firing),
        # With names: two values of one kind may be swapped.
        "values": ", ".join(f"{name} {_value(value)}" for name, value in schemas.summed[step.name]),
    }


def _value(value: Summed) -> str:
    """A value's function, and the type of its partial result if that can vary."""
    if value.argument is None or value.function in ("count", "approx_percentile"):
        return f"({value.function})"
    kind = value.argument.type
    if value.function in ("sum", "avg"):  # two forms of partial results: of integers, of others
        kind = "whole numbers" if kind in _WHOLE else "doubles"
    return f"({value.function} of {kind})"


def _spans(spans: Spans) -> str:
    if spans.kind == "session":
        return f"sessions of {duration_text(spans.size_ms)}"
    if spans.slide_ms in (0, spans.size_ms):
        return f"tumbling of {duration_text(spans.size_ms)}"
    return f"sliding of {duration_text(spans.size_ms)} every {duration_text(spans.slide_ms)}"


def _in_windows(spans: Spans | None) -> str:
    return f"in windows, {_spans(spans)}" if spans else ""


def _results(firing: Firing) -> str:
    """With several results, emitted results are stored separately, as long as they may change."""
    if firing.is_plain:
        return "one for each window"
    updates = f", updated for {duration_text(firing.lateness_ms)}" if firing.late == "update" else ""
    return f"several, {firing.mode}{updates}"


# --- paths of records ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The path of records from the category a job reads, up to the last union or to the job's end."""

    origin: SourceStep | KeyByStep | StatefulSteps
    stream: str  # of the origin
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """All paths to one end of a job. `common`: the steps of all paths, after the last union."""

    paths: tuple[Path, ...]
    union: str | None  # the last one before the end
    common: tuple[Step, ...]
    kept: Columns
    crossed: tuple[str, ...]  # names of all steps on the paths, for display


def plain_steps(steps: Sequence[Step], behind: int) -> tuple[Step, ...]:
    """The steps that become stages, without the last `behind` steps."""
    return tuple(
        step for step in steps[: len(steps) - behind] if not isinstance(step, UnionStep | WindowStep)
    )


def without_keys(upstream: Upstream, except_for: Step | None = None) -> Upstream:
    """The same paths without `key_by` steps whose keys are not used."""

    def plain(steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(step for step in steps if not isinstance(step, KeyByStep) or step is except_for)

    paths = tuple(Path(origin=p.origin, stream=p.stream, steps=plain(p.steps)) for p in upstream.paths)
    return replace(upstream, paths=paths, common=plain(upstream.common))


# --- stages ----------------------------------------------------------------------------------------------


def names_of(columns: Columns) -> frozenset[str]:
    """The names of the columns."""
    return frozenset(name for name, _ in columns)


def needed_before(schemas: Schemas, steps: Sequence[Step], kept: frozenset[str]) -> frozenset[str]:
    """The input columns that the steps need for the output columns `kept`."""
    needed = kept
    for step in reversed(steps):
        needed = _before(schemas, step, needed)
    return needed


def build_stages(
    schemas: Schemas, steps: Sequence[Step], columns: Columns, kept: Columns
) -> tuple[Stage, ...]:
    """Steps as stages with only the used columns; the output columns are exactly `kept`."""
    needed = names_of(kept)
    stages: list[Stage] = []
    for step in reversed(steps):
        stages.append(_stage(schemas, step, needed))
        needed = _before(schemas, step, needed)
    stages.reverse()
    for stage in stages:
        if isinstance(stage, SelectStage):
            columns = tuple((name, kind) for name, _, kind in stage.columns)
        elif isinstance(stage, ExplodeStage):
            columns = (*columns, *stage.columns)
    if columns != kept:
        stages.append(_select((name, f"`{name}`", kind) for name, kind in kept))
    return tuple(stages)


def arguments_of(schemas: Schemas, aggregate: str) -> list[str | None]:
    """The argument column of each value of an aggregate: an existing one, or one made for it."""
    found: list[str | None] = []
    for place, (_, value) in enumerate(schemas.summed[aggregate]):
        name = None if value.argument is None else value.argument.text.strip("`")
        is_there = value.argument is None or (name is not None and is_column(value.argument, name))
        found.append(name if is_there else f"argument_{place}")
    return found


def argument_stage(schemas: Schemas, aggregate: str) -> tuple[Stage, ...]:
    """A stage that computes the arguments of an aggregate that are not plain columns."""
    made = {
        name: value.argument
        for (_, value), name in zip(schemas.summed[aggregate], arguments_of(schemas, aggregate), strict=True)
        if name is not None and value.argument is not None
    }
    if all(is_column(argument, name) for name, argument in made.items()):
        return ()
    columns = tuple((name, argument.text, argument.type) for name, argument in made.items())
    return (_select(columns),)


def side_stage(side: int, sides: Sequence[Columns]) -> Stage:
    """A stage that adds the columns of the other side of a join, as nulls."""
    columns = [("side", str(side), "int")]
    for number, kept in enumerate(sides):
        for place, (name, kind) in enumerate(kept):
            value = f"`{name}`" if number == side else f"CAST(NULL AS {kind})"
            columns.append((f"{'lr'[number]}{place}", value, kind))
    return _select(columns)


def _before(schemas: Schemas, step: Step, needed: frozenset[str]) -> frozenset[str]:
    match step:
        case FilterStep():
            return needed | schemas.conditions[step.name].columns
        case SelectStep():
            return _used(checked for _, checked in _chosen(schemas, step, needed))
        case FlatMapStep():
            generated = schemas.generated[step.name]
            return (needed - names_of(generated.columns)) | generated.array.columns
        case KeyByStep():
            return needed | schemas.keys[step.name].columns
    raise AssertionError(f"{step} is no step between a source and the end of a job")


def _stage(schemas: Schemas, step: Step, needed: frozenset[str]) -> Stage:
    match step:
        case FilterStep():
            return FilterStage(op="filter", expr=schemas.conditions[step.name].text)
        case SelectStep():
            chosen = _chosen(schemas, step, needed)
            return _select((name, checked.text, checked.type) for name, checked in chosen)
        case FlatMapStep():
            made = schemas.generated[step.name]
            array = made.array
            return ExplodeStage(
                op="explode", array=array.text, type=array.type, outer=made.outer, columns=made.columns
            )
        case KeyByStep():
            return KeyStage(op="key", expr=schemas.keys[step.name].text)
    raise AssertionError(f"{step} is no step between a source and the end of a job")


def _select(columns: Iterable[tuple[str, str, str]]) -> SelectStage:
    return SelectStage(op="select", columns=tuple(columns))


def _chosen(schemas: Schemas, step: SelectStep, needed: frozenset[str]) -> tuple[tuple[str, Checked], ...]:
    columns = schemas.selected[step.name]
    return tuple(column for column in columns if column[0] in needed) or columns[:1]


def _used(expressions: Iterable[Checked]) -> frozenset[str]:
    return frozenset().union(*(checked.columns for checked in expressions))


# --- stateful steps --------------------------------------------------------------------------------------


def dead_letter_output(step: StatefulSteps, job: str, partitions: int) -> Iterator[Output]:
    """The dead-letter category of a job that skips records for which user code raises."""
    if isinstance(step, ProcessStep) and ("poison", "skip") in step.settings:
        yield Output(
            stream=dead_stream(0),
            category=dead_category(job),
            partitions=partitions,
            columns=DEAD_COLUMNS,
            internal=False,
        )


def _key_texts(schemas: Schemas, edge: Edge) -> list[str]:
    keyed, _ = schemas.graph.key_of(edge)
    assert keyed is not None, "checked before: it has a key"
    return [part.text.strip("`") for part in schemas.key_parts[keyed.name]]


def computation_json(
    step: StatefulSteps, schemas: Schemas, kept: Callable[[Step, Edge], Columns]
) -> dict[str, Any]:
    """`computation` of a plan. `kept`: the columns of an input that it needs."""
    graph = schemas.graph
    if isinstance(step, ProcessStep):
        found: dict[str, Any] = {
            "class": step.computation,
            **({"vectorised": True} if step.vectorised else {}),
        }
        keys = [_key_texts(schemas, edge) for edge in graph.inputs_of(step.name)]
        found["keys"] = keys[0] if len(keys) == 1 else [", ".join(one) for one in keys]
        found["state"] = dict(step.state)
        if step.ids is not None:
            found["ids"] = {"column": step.ids[0], "slack_ms": step.ids[1]}
        if len(step.inputs) > 1:
            edges = zip(step.inputs, graph.inputs_of(step.name), strict=True)
            found["inputs"] = [[name, [c for c, _ in kept(step, edge)]] for name, edge in edges]
        return found
    if isinstance(step, JoinStep):
        left, right = graph.inputs_of(step.name)
        near = {"before_ms": step.before_ms, "after_ms": step.after_ms}
        return {
            "operator": "join",
            "how": step.how,
            "keys": [list(key_columns(schemas, edge)) for edge in (left, right)],
            "columns": [[list(column) for column in schemas.at(edge)] for edge in (left, right)],
            **({"window": step.spans.to_json()} if step.spans else {"within": near}),
            "state": operator_shape(step, schemas),
        }
    edge = graph.input_of(step.name)
    if isinstance(step, DedupStep):
        return {
            "operator": "dedup",
            "keys": _key_texts(schemas, edge),
            **({"window": step.spans.to_json()} if step.spans else {"within": {"within_ms": step.within_ms}}),
            "state": operator_shape(step, schemas),
        }
    if isinstance(step, TopStep):
        return {
            "operator": "top",
            "keys": list(key_columns(schemas, edge)),
            "count": step.count,
            "by": step.by,
            "lowest": step.lowest,
            "state": operator_shape(step, schemas),
        }
    edge = window_edge(graph, step)
    window = graph.step(edge.source)
    assert isinstance(window, WindowStep), "checked before: an aggregate reads a window"
    values = [
        {
            "name": name,
            "function": value.function,
            "argument": None if value.argument is None else value.argument.text,
            "column": column,
            "parameter": value.parameter,
            "type": value.type,
        }
        for (name, value), column in zip(
            schemas.summed[step.name], arguments_of(schemas, step.name), strict=True
        )
    ]
    return {
        "operator": step.phase or "aggregate",
        "keys": list(key_columns(schemas, edge)),
        "window": window.spans.to_json(),
        "firing": window.firing.to_json(),
        "columns": values,
        "state": operator_shape(step, schemas),
    }


# --- jobs ------------------------------------------------------------------------------------------------


class Cutter:
    """Cuts one graph into jobs."""

    def __init__(self, schemas: Schemas, package: PackageRef) -> None:
        self._schemas, self._graph, self._package = schemas, schemas.graph, package
        self._keys = [step for step in self._graph.steps if isinstance(step, KeyByStep)]
        self._cuts = frozenset(step.name for step in self._keys if needs_shuffle(self._graph, step))
        self._shuffles: dict[str, Output] = {}  # found so far

    def jobs(self) -> tuple[CompiledJob, ...]:
        """The jobs, each writer before its readers."""
        found = []
        for step in self._graph.ordered():
            if isinstance(step, KeyByStep) and step.name in self._cuts:
                found.append(self._shuffle_job(step))
            elif isinstance(step, StatefulSteps):
                found.append(self._stateful_job(step))
            elif isinstance(step, SinkStep) and not self._is_direct(step):
                found.append(self._sink_job(step))
        return tuple(found)

    def notes(self, jobs: Sequence[CompiledJob]) -> Iterator[Rewrite]:
        """Rewrites that cutting made, with their reasons, for `penstock plan`."""
        for key in self._keys:
            if key.name not in self._cuts:
                reason = (
                    "no later step needs the records of a key in one partition; the writer partitions them"
                )
                yield Rewrite(rule="drop shuffle", steps=(key.name,), reason=reason)
        for step in self._graph.steps:
            if isinstance(step, SourceStep):
                there, category = self._schemas.sources[step.name].columns, step.category
            elif isinstance(step, KeyByStep) and step.name in self._cuts:
                there = self._schemas.columns[step.name, DEFAULT_STREAM]
                category = self._shuffle_output(step).category
            else:
                continue
            used = {
                name for job in jobs for one in job.inputs if one.category == category for name in one.reads
            }
            if unused := [name for name, _ in there if name not in used]:
                doing = "decoded" if isinstance(step, SourceStep) else "written"
                reason = f"{', '.join(unused)} is not used, so it is not {doing}"
                yield Rewrite(rule="prune columns", steps=(step.name,), reason=reason)
        for job in jobs:
            if len(job.steps) > 2:
                reason = f"one pass over the records, in job {job.name}"
                yield Rewrite(rule="fuse", steps=job.steps, reason=reason)

    # --- the three kinds of jobs

    def _shuffle_job(self, step: KeyByStep) -> CompiledJob:
        output = self._shuffle_output(step)
        upstream = self._upstream(self._graph.input_of(step.name), _own(output))
        key = self._schemas.keys[step.name].text
        return replace(self._stateless(step, without_keys(upstream), output, key), spread=step.spread)

    def _sink_job(self, step: SinkStep) -> CompiledJob:
        output = self._sink_output(step)
        upstream, key = self._with_last_key(self._upstream(self._graph.input_of(step.name), output.columns))
        return self._stateless(step, upstream, output, key)

    def _stateless(self, end: Step, upstream: Upstream, output: Output, key: str | None) -> CompiledJob:
        inputs = self._inputs([upstream])
        branches: tuple[Branch, ...] = ()
        if len(upstream.paths) == 1:
            (path,) = upstream.paths
            start = self._read_columns(path, inputs)
            stages = build_stages(self._schemas, (*path.steps, *upstream.common), start, upstream.kept)
        else:
            together = self._together(upstream)
            branches = tuple(self._branch(path, inputs, together) for path in upstream.paths)
            stages = build_stages(self._schemas, upstream.common, together, upstream.kept)
        sources = [path.origin.name for path in upstream.paths if isinstance(path.origin, SourceStep)]
        return CompiledJob(
            name=self._job_name(end),
            pipeline=self._graph.name,
            kind="stateless",
            package=self._package,
            inputs=inputs,
            branches=branches,
            stages=stages,
            key=key,
            computation=None,
            late="process",  # a late record keeps its flag; the computation that reads it decides
            outputs=(output, *self._dead_letters(upstream, inputs)),
            steps=(*dict.fromkeys(sources), *upstream.crossed, end.name),
        )

    def _stateful_job(self, step: StatefulSteps) -> CompiledJob:
        edges = self._graph.inputs_of(step.name)
        upstreams = [self._upstream(edge, self._needed_columns(step, edge)) for edge in edges]
        inputs = self._inputs(upstreams)
        sinks = [edge.target for edge in self._graph.readers_of(step.name)]
        branches: tuple[Branch, ...] = ()
        stages: tuple[Stage, ...] = ()
        if isinstance(step, ProcessStep) and len(upstreams) > 1:
            branches = self._side_by_side(step, upstreams, inputs)
        elif isinstance(step, JoinStep):
            kept = [upstream.kept for upstream in upstreams]
            branches = tuple(
                _with_stage(branch, side_stage(side, kept))
                for side, upstream in enumerate(upstreams)
                for branch in [self._branch(upstream.paths[0], inputs, upstream.kept, upstream.common)]
            )
        else:
            ((path,), common) = upstreams[0].paths, upstreams[0].common
            start = self._read_columns(path, inputs)
            stages = build_stages(self._schemas, (*path.steps, *common), start, upstreams[0].kept)
            if isinstance(step, AggregateStep) and step.phase != "combine":
                stages = (*stages, *argument_stage(self._schemas, step.name))
        return CompiledJob(
            name=self._job_name(step),
            pipeline=self._graph.name,
            kind="stateful",
            package=self._package,
            inputs=inputs,
            branches=branches,
            stages=stages,
            key=None,
            computation=computation_json(step, self._schemas, self._needed_columns),
            late=step.late,
            outputs=(
                *(self._stateful_output(step, stream) for stream, _ in self._streams(step)),
                *dead_letter_output(step, self._job_name(step), self._graph.partitions),
            ),
            settings=dict(step.settings) if isinstance(step, ProcessStep) else {},
            steps=(
                *(name for upstream in upstreams for name in upstream.crossed),
                step.name,
                *(name for name in sinks if self._is_direct(self._graph.step(name))),
            ),
        )

    def _side_by_side(
        self, step: ProcessStep, upstreams: Sequence[Upstream], inputs: Sequence[JobInput]
    ) -> tuple[Branch, ...]:
        """One branch per input of a computation, each with the columns of all inputs (others are null)."""
        if len(inputs) < len(upstreams):
            raise PipelineError(
                f"{step.place}: two inputs of step {step.name!r} come from the same shuffle",
                why="they are the same records with the same key, and could not be distinguished",
                fix="use one input, with a column that distinguishes the records",
            )
        together = dict(column for upstream in upstreams for column in upstream.kept)
        found = []
        for upstream in upstreams:
            own = dict(upstream.kept)
            branch = self._branch(upstream.paths[0], inputs, upstream.kept, upstream.common)
            if own != together:
                columns = tuple(
                    (name, f"`{name}`" if name in own else f"CAST(NULL AS {kind})", kind)
                    for name, kind in together.items()
                )
                branch = _with_stage(branch, SelectStage(op="select", columns=columns))
            found.append(branch)
        return tuple(found)

    # --- upstream

    def _upstream(self, edge: Edge, kept: Columns) -> Upstream:
        paths = list(self._paths(edge))
        longest = paths[0].steps  # all paths share the steps after the last union
        unions = [number for number, step in enumerate(longest) if isinstance(step, UnionStep)]
        behind = len(longest) - unions[-1] - 1 if unions else 0
        crossed = {step.name for path in paths for step in path.steps}
        return Upstream(
            paths=tuple(
                Path(origin=p.origin, stream=p.stream, steps=plain_steps(p.steps, behind)) for p in paths
            ),
            union=longest[unions[-1]].name if unions else None,
            common=plain_steps(longest[len(longest) - behind :], 0),
            kept=kept,
            crossed=tuple(step.name for step in self._graph.ordered() if step.name in crossed),
        )

    def _paths(self, edge: Edge) -> Iterator[Path]:
        step = self._graph.step(edge.source)
        if isinstance(step, SourceStep | StatefulSteps) or (
            isinstance(step, KeyByStep) and step.name in self._cuts
        ):
            yield Path(origin=step, stream=edge.stream, steps=())
            return
        for before in self._graph.inputs_of(step.name):
            for path in self._paths(before):
                yield Path(origin=path.origin, stream=path.stream, steps=(*path.steps, step))

    def _with_last_key(self, upstream: Upstream) -> tuple[Upstream, str | None]:
        """The key of a sink's records: computed at the end if its columns are there, else in a stage."""
        steps = (*(upstream.paths[0].steps if len(upstream.paths) == 1 else ()), *upstream.common)
        keys = [number for number, step in enumerate(steps) if isinstance(step, KeyByStep)]
        if not keys:
            return upstream, None
        last = steps[keys[-1]]
        key = self._schemas.keys[last.name]
        if self._schemas.passes(key.columns, steps[keys[-1] :]):
            return without_keys(upstream), key.text
        return without_keys(upstream, except_for=last), None

    def _together(self, upstream: Upstream) -> Columns:
        """The columns of a union that later steps use."""
        assert upstream.union is not None, "several paths come together in a union"
        there = self._schemas.columns[upstream.union, DEFAULT_STREAM]
        needed = needed_before(self._schemas, upstream.common, names_of(upstream.kept))
        return tuple(column for column in there if column[0] in needed) or there[:1]

    def _branch(
        self, path: Path, inputs: Sequence[JobInput], kept: Columns, common: tuple[Step, ...] = ()
    ) -> Branch:
        number = [source.category for source in inputs].index(self._category(path)[0])
        start = self._read_columns(path, inputs)
        return Branch(input=number, stages=build_stages(self._schemas, (*path.steps, *common), start, kept))

    def _inputs(self, upstreams: Sequence[Upstream]) -> tuple[JobInput, ...]:
        """The inputs: each category once, with the columns that any branch reads."""
        found: dict[str, JobInput] = {}
        for upstream in upstreams:
            for path in upstream.paths:
                category, partitions = self._category(path)
                needed = self._needed(upstream, path)
                there = self._category_columns(path)
                before = found.get(category)
                start = path.origin.start if isinstance(path.origin, SourceStep) else "earliest"
                if before is not None:
                    _check_start(path.origin, before, start)
                    needed |= set(before.reads)
                reads = tuple(name for name, _ in there if name in needed) or (there[0][0],)
                is_outside = isinstance(path.origin, SourceStep)
                found[category] = JobInput(
                    category=category,
                    partitions=partitions,
                    start=start,
                    reads=reads,
                    writer="" if is_outside else self._job_name(path.origin),
                )
        return tuple(found.values())

    def _needed(self, upstream: Upstream, path: Path) -> frozenset[str]:
        kept = names_of(upstream.kept if len(upstream.paths) == 1 else self._together(upstream))
        steps = (*path.steps, *upstream.common) if len(upstream.paths) == 1 else path.steps
        needed = needed_before(self._schemas, steps, kept)
        if isinstance(path.origin, SourceStep):
            spec = self._schemas.sources[path.origin.name]
            if spec.format != "typed" and spec.ts_column:
                needed |= {spec.ts_column}  # the record's event time
        return needed

    def _read_columns(self, path: Path, inputs: Sequence[JobInput]) -> Columns:
        category, _ = self._category(path)
        reads = next(source.reads for source in inputs if source.category == category)
        return tuple(column for column in self._category_columns(path) if column[0] in reads)

    def _category_columns(self, path: Path) -> Columns:
        if isinstance(path.origin, KeyByStep):
            return _own(self._shuffle_output(path.origin))
        return self._schemas.columns[path.origin.name, path.stream]

    def _category(self, path: Path) -> tuple[str, int]:
        """Name and partitions of the category at the start of a path."""
        match path.origin:
            case SourceStep() as source:
                return source.category, self._schemas.sources[source.name].partitions
            case KeyByStep() as step:
                output = self._shuffle_output(step)
            case _ as step:
                output = self._stateful_output(step, path.stream)
        return output.category, output.partitions

    # --- outputs

    def _needed_columns(self, end: Step, edge: Edge) -> Columns:
        """The columns of an input that an end of a job uses."""
        there = self._schemas.at(edge)
        if isinstance(end, KeyByStep):
            return _own(self._shuffle_output(end))
        if isinstance(end, ProcessStep) and end.required_columns:
            place = self._graph.inputs_of(end.name).index(edge)
            wanted = dict(dict(end.required_columns)[end.inputs[place]])
            return tuple(column for column in there if column[0] in wanted)
        if isinstance(end, AggregateStep) and end.phase != "combine":
            used = set(key_columns(self._schemas, edge))
            for _, value in self._schemas.summed[end.name]:
                used |= set() if value.argument is None else value.argument.columns
            return tuple(column for column in there if column[0] in used)
        return there

    def _shuffle_output(self, step: KeyByStep) -> Output:
        """The internal category of a shuffle: the key's columns and those that later steps use."""
        if step.name in self._shuffles:
            return self._shuffles[step.name]
        key = self._schemas.keys[step.name]
        needed = set(key.columns)
        for end in self._graph.steps:
            if isinstance(end, SinkStep | StatefulSteps) or end.name in self._cuts:
                for edge in self._graph.inputs_of(end.name):
                    if all(path.origin != step for path in self._paths(edge)):
                        continue
                    upstream = self._upstream(edge, self._needed_columns(end, edge))
                    for path in upstream.paths:
                        if path.origin == step:
                            needed |= self._needed(upstream, path)
        there = self._schemas.columns[step.name, DEFAULT_STREAM]
        columns = tuple(column for column in there if column[0] in needed) or there[:1]
        if self._needs_low_column(step):
            columns = (*columns, LOW_COLUMN)
        self._shuffles[step.name] = self._internal(
            step, columns, key.normal + " spread" * step.spread, DEFAULT_STREAM
        )
        return self._shuffles[step.name]

    def _needs_low_column(self, step: KeyByStep) -> bool:
        """True if a reader of this shuffle must know how late a late record is."""
        for end in self._graph.steps:
            if isinstance(end, AggregateStep):
                window = self._graph.step(self._graph.input_of(end.name).source)
                asks = isinstance(window, WindowStep) and window.firing.late == "update"
            else:
                asks = isinstance(end, KeyByStep) and end != step and end.name in self._cuts
            reads = asks and any(path.origin == step for path in self._paths(self._graph.input_of(end.name)))
            if reads and (not isinstance(end, KeyByStep) or self._needs_low_column(end)):
                return True
        return False

    def _streams(self, step: StatefulSteps) -> tuple[tuple[str, Columns], ...]:
        if isinstance(step, ProcessStep):
            return step.outputs
        return ((DEFAULT_STREAM, self._schemas.columns[step.name, DEFAULT_STREAM]),)

    def _stateful_output(self, step: StatefulSteps, stream: str) -> Output:
        """The category of a stream: its first sink, if it has one; other readers read this category too."""
        for edge in self._graph.readers_of(step.name):
            reader = self._graph.step(edge.target)
            if edge.stream == stream and isinstance(reader, SinkStep):
                return self._sink_output(reader, stream)
        meaning = f"stream {stream}"
        if isinstance(step, DedupStep):  # readers may rely on the key, which it does not change
            keyed, _ = self._graph.key_of(self._graph.input_of(step.name))
            meaning += f" by {self._schemas.keys[keyed.name].normal}" if keyed else ""
        if isinstance(step, AggregateStep) and step.phase == "partial":
            # Its columns are the same for all partial results.
            meaning += json.dumps(operator_shape(step, self._schemas))
        return self._internal(step, dict(self._streams(step))[stream], meaning, stream)

    def _is_direct(self, step: Step) -> bool:
        """True if a stateful job writes this sink itself: the first sink of one of its streams."""
        if not isinstance(step, SinkStep):
            return False
        edge = self._graph.input_of(step.name)
        producer = self._graph.step(edge.source)
        return isinstance(producer, StatefulSteps) and (
            self._stateful_output(producer, edge.stream).category == step.category
        )

    def _sink_output(self, step: SinkStep, stream: str = DEFAULT_STREAM) -> Output:
        return Output(
            stream=stream,
            category=step.category,
            partitions=step.partitions or self._graph.partitions,
            columns=self._schemas.into(step.name),
            internal=False,
        )

    def _dead_letters(self, upstream: Upstream, inputs: Sequence[JobInput]) -> Iterator[Output]:
        specs = {
            path.origin.category: self._schemas.sources[path.origin.name]
            for path in upstream.paths
            if isinstance(path.origin, SourceStep)
        }
        for number, source in enumerate(inputs):
            if source.category in specs and has_dead_letters(specs[source.category]):
                # As many partitions as the source, because the category must not depend on its readers.
                yield Output(
                    stream=dead_stream(number),
                    category=f"{source.category}.dead",
                    partitions=source.partitions,
                    columns=DEAD_COLUMNS,
                    internal=False,
                )

    def _internal(self, step: Step, columns: Columns, key: str, stream: str) -> Output:
        partitions = self._graph.partitions
        # The name has a hash of the format, so that a change makes a new category instead of mixing records.
        meaning = json.dumps([partitions, columns, key, "typed"], separators=(",", ":"))
        name = f"{self._job_name(step)}.{hashlib.sha256(meaning.encode()).hexdigest()[:8]}"
        return Output(stream=stream, category=name, partitions=partitions, columns=columns, internal=True)

    def _job_name(self, step: Step) -> str:
        return f"{self._graph.name}.{step.name}"


def _with_stage(branch: Branch, stage: Stage) -> Branch:
    return branch.model_copy(update={"stages": (*branch.stages, stage)})


def _own(output: Output) -> Columns:
    """The columns without that of the lows."""
    return tuple(column for column in output.columns if column != LOW_COLUMN)


def _check_start(origin: Step, before: JobInput, start: str) -> None:
    if before.start != start:
        raise PipelineError(
            f"{origin.place}: category {before.category!r} is read from two places at once",
            why=f"one source of this job starts at {before.start!r}, this one at {start!r}",
            fix="use one source for both branches",
        )
