"""From a pipeline to jobs: check it, rewrite it, cut it (Turbine II). Pure.

A `key_by` cuts where something works per key: one job writes an internal category partitioned by the key, the
next reads it. The result is plain JSON; the control plane never imports user code.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.core.errors import PipelineError
from penstock.streams.catalogue import Catalogue
from penstock.streams.compiled import CompiledPipeline, PackageRef
from penstock.streams.cutting import Cutter
from penstock.streams.graph import Aggregate, Dedup, Graph, Join, Process, Step, Top, Window, check_graph
from penstock.streams.optimize import optimize
from penstock.streams.pipeline import Pipeline
from penstock.streams.plan_notes import notes_on
from penstock.streams.schemas import resolve_schemas
from penstock.streams.two_phase import take_apart


def compile_pipeline(pipeline: Pipeline, catalogue: Catalogue, package: PackageRef) -> CompiledPipeline:
    """Check a pipeline against the categories there are, and cut it into jobs; PipelineError on a mistake."""
    compiled = compile_graph(pipeline.graph(), catalogue, package)
    return replace(compiled, notes=tuple(notes_on(compiled.jobs, catalogue, pipeline.computations)))


def compile_graph(
    graph: Graph, catalogue: Catalogue, package: PackageRef, *, optimized: bool = True
) -> CompiledPipeline:
    """As `compile_pipeline`, for a graph from any front end; `optimized=False` cuts it as it was written."""
    check_graph(graph)
    for step in graph.steps:
        _check_neighbours(graph, step)
    whole, parted = take_apart(graph)
    schemas, rewrites = optimize(whole, catalogue) if optimized else (resolve_schemas(whole, catalogue), ())
    cutter = Cutter(schemas, package)
    jobs = cutter.jobs()
    return CompiledPipeline(
        graph=graph, package=package, jobs=jobs, rewrites=(*parted, *rewrites, *cutter.notes(jobs))
    )


def _check_neighbours(graph: Graph, step: Step) -> None:
    """A graph from elsewhere may lack what the DSL makes sure of."""
    if isinstance(step, Aggregate) != isinstance(_before(graph, step), Window):
        raise PipelineError(
            f"{step.place}: step {step.name!r} does not fit here",
            why="a window is read by aggregates, and by nothing else",
            fix="write .window(...).aggregate(...)",
        )
    if isinstance(step, Process | Window | Join | Dedup | Top):
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
        Process: f"process({getattr(step, 'computation', '')})",
        Window: "window(...)",
        Join: "join(...), on both sides",
        Dedup: "dedup(...)",
        Top: "top(...)",
    }
    return PipelineError(
        f"{step.place}: step {step.name!r} processes records that have no key",
        why=f"it runs per key, and between {before.name!r} and {step.name!r} nothing says which records "
        "belong together",
        fix=f'put .key_by("<column>") before .{calls[type(step)]}',
    )
