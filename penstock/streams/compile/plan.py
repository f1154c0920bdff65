"""Compiles a pipeline to jobs: checks, rewrites and cuts its graph (Turbine II). Pure.

The graph is cut at a `key_by` that a stateful step follows: one job writes an internal category partitioned
by the key, the next job reads it. The result is plain JSON; the control plane never imports user code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FunctionType

from pydantic import ValidationError

from penstock.core.errors import PipelineError
from penstock.jobs.config import PackageRef
from penstock.streams.catalogue import Catalogue, has_no_times, no_time_note
from penstock.streams.compile.compiled import CompiledJob, CompiledPipeline
from penstock.streams.compile.cutting import Cutter
from penstock.streams.compile.graph import (
    AggregateStep,
    DedupStep,
    Graph,
    JoinStep,
    ProcessStep,
    Step,
    TopStep,
    WindowStep,
    check_graph,
)
from penstock.streams.compile.optimize import optimize, split_two_phase
from penstock.streams.compile.schemas import resolve_schemas
from penstock.streams.dsl.computation import Computation
from penstock.streams.dsl.pipeline import Pipeline


def compile_pipeline(pipeline: Pipeline, catalogue: Catalogue, package: PackageRef) -> CompiledPipeline:
    """Compile a pipeline against the existing categories; PipelineError on a mistake."""
    compiled = compile_graph(pipeline.graph(), catalogue, package)
    return replace(compiled, notes=tuple(notes_on(compiled.jobs, catalogue, pipeline.computations)))


def compile_graph(
    graph: Graph, catalogue: Catalogue, package: PackageRef, *, optimized: bool = True
) -> CompiledPipeline:
    """Like `compile_pipeline`, for a graph; `optimized=False`: without rewrites."""
    check_graph(graph)
    for step in graph.steps:
        _check_neighbours(graph, step)
    whole, parted = split_two_phase(graph)
    schemas, rewrites = optimize(whole, catalogue) if optimized else (resolve_schemas(whole, catalogue), ())
    cutter = Cutter(schemas, package)
    try:
        jobs = cutter.jobs()
    except ValidationError as error:
        problems = (
            f"{problem['loc'][-1]} {problem['input']!r:.100}: {problem['msg']}" for problem in error.errors()
        )
        raise PipelineError(
            f"pipeline {graph.name!r} does not compile to valid job configs",
            why="; ".join(problems),
            fix="change these values: they are too long, or have characters that are not allowed",
        ) from None
    return CompiledPipeline(
        graph=graph, package=package, jobs=jobs, rewrites=(*parted, *rewrites, *cutter.notes(jobs))
    )


def _check_neighbours(graph: Graph, step: Step) -> None:
    """Check what the DSL guarantees, for graphs that were not built by the DSL."""
    if isinstance(step, AggregateStep) != isinstance(_before(graph, step), WindowStep):
        raise PipelineError(
            f"{step.place}: step {step.name!r} cannot be used here",
            why="aggregates read windows, and only aggregates do",
            fix="write .window(...).aggregate(...)",
        )
    if isinstance(step, ProcessStep | WindowStep | JoinStep | DedupStep | TopStep):
        for edge in graph.inputs_of(step.name):
            keyed, between = graph.key_of(edge)
            if keyed is None:
                first = graph.step((between[0] if between else step).name)
                before = graph.step(graph.input_of(first.name).source) if between else graph.step(edge.source)
                raise _no_key(step, before)


def _before(graph: Graph, step: Step) -> Step | None:
    edges = graph.inputs_of(step.name)
    return graph.step(edges[0].source) if edges else None


def _no_key(step: Step, before: Step) -> PipelineError:
    calls = {
        ProcessStep: f"process({getattr(step, 'computation', '')})",
        WindowStep: "window(...)",
        JoinStep: "join(...), on both sides",
        DedupStep: "dedup(...)",
        TopStep: "top(...)",
    }
    return PipelineError(
        f"{step.place}: step {step.name!r} processes records that have no key",
        why=f"it runs per key, and there is no key_by between {before.name!r} and {step.name!r}",
        fix=f'put .key_by("<column>") before .{calls[type(step)]}',
    )


# --- notes for the user ----------------------------------------------------------------------------------


def notes_on(
    jobs: Sequence[CompiledJob], catalogue: Catalogue, computations: Mapping[str, type]
) -> Iterator[str]:
    """Warnings: records without event times, and computations whose results may differ in a backfill.

    `computations`: class name -> class.
    """
    timed = [job.name for job in jobs if job.kind == "stateful"]
    outside = {source.category for job in jobs for source in job.inputs if not source.writer}
    for name in sorted(outside if timed else ()):
        spec = catalogue.describe(name)
        if has_no_times(spec):
            yield f"{no_time_note(spec)} Windows, joins and timers of {', '.join(timed)} use these times."
    for job in jobs:
        kind = computations.get((job.computation or {}).get("class", ""))
        if kind is not None:
            yield from _order_notes(job.name, kind)


def _order_notes(job: str, kind: type) -> Iterator[str]:
    """How a backfill changes the order of records and timers for this computation."""
    name = kind.__name__
    called = _called_in(kind)
    is_of_clock_alone = "set_wall_timer" in called and "set_timer" not in called
    sets_timers = issubclass(kind, Computation) and kind.process_timer is not Computation.process_timer
    if sets_timers and not is_of_clock_alone:
        yield (
            f"{job}: {name} uses timers. In the stream a timer fires when the low watermark reaches it, so "
            "records of its key with later times may be processed before it; in a backfill it fires before "
            "them. The results are the same only if such a record does not affect the timer: it must not set "
            "it again, delete it, or change what it produces (docs/pipelines.md, Stream and backfill)."
        )
    else:
        yield (
            f"{job}: {name} gets the records of a key in the order of arrival, but in a backfill in the "
            "order of event times. The results are the same only if they do not depend on this order "
            "(docs/pipelines.md, Stream and backfill)."
        )
    if "set_wall_timer" in called:
        yield f"{job}: {name} sets wall timers. They do not fire in a backfill."


def _called_in(kind: type) -> set[str]:
    """Names that the methods of a computation use, without those of functions outside the class."""
    bases = [base for base in reversed(kind.__mro__) if base not in (Computation, object)]
    members = {name: value for base in bases for name, value in vars(base).items()}  # with overrides
    methods = [value for value in members.values() if isinstance(value, FunctionType)]
    return set().union(*(_names(method.__code__) for method in methods))


def _names(code: CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*(_names(one) for one in inner))
