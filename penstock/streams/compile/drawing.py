"""A compiled pipeline as text: one box per job, the categories between them. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.jobs.config import (
    ExplodeStage,
    FilterStage,
    JobConfig,
    KeyStage,
    Output,
    SelectStage,
    Stage,
    guarantees_of,
)
from penstock.jobs.provision import cannot_run
from penstock.streams.compile.compiled import CompiledJob, CompiledPipeline
from penstock.streams.compile.graph import Graph
from penstock.streams.compile.optimize import Rewrite

WIDTH = 100


def draw_plan(compiled: CompiledPipeline) -> str:
    """The text of `penstock plan`: the jobs in the order of the data flow."""
    count = len(compiled.jobs)
    ref = compiled.package
    hashed = "" if ref.hash.startswith(ref.version) else f" ({ref.hash[:12]})"
    lines = [
        f"pipeline {compiled.graph.name}: {count} job{'s' * (count != 1)}",
        f"package {ref.name} {ref.version}{hashed}",
    ]
    lines += ["", *_draw_graph(compiled.graph)]
    writers = {output.category: job.name for job in compiled.jobs for output in job.outputs}
    for job in compiled.jobs:
        lines += ["", *_draw_job(job, writers)]
    lines += _draw_rewrites(compiled.rewrites)
    lines += _draw_refusals(compiled)
    lines += _draw_notes(compiled.notes)
    return "\n".join(lines) + "\n"


def _draw_graph(graph: Graph) -> Iterator[str]:
    """The steps, one line for each chain between forks and joins."""
    for step in graph.ordered():
        before = graph.inputs_of(step.name)
        if len(before) == 1 and len(graph.readers_of(before[0].source)) == 1:
            continue  # it is in the line of the step before it
        stretch = [edge.source for edge in before[:1] if len(before) == 1] + [step.name]
        while len(readers := graph.readers_of(stretch[-1])) == 1:
            stretch.append(readers[0].target)
            if len(graph.inputs_of(stretch[-1])) > 1:
                break
        if len(stretch) > 1:
            text = " → ".join(stretch)
            yield from textwrap.wrap(text, WIDTH, initial_indent="   ", subsequent_indent="     ")


def _draw_job(job: CompiledJob, writers: Mapping[str, str]) -> Iterator[str]:
    for source in job.inputs:
        writer = writers.get(source.category)
        origin = f"from {writer}" if writer else f"source, {source.start}"
        yield f"   {source.category}  ({_partitions(source.partitions)}, {origin})"
        yield from textwrap.wrap(
            f"reads {', '.join(source.reads)}", WIDTH, initial_indent="   │  ", subsequent_indent="   │  "
        )
    yield "   ▼"
    title = f"┌─ {job.name} ─ {job.kind} "
    yield title + "─" * (WIDTH - len(title) - 1) + "┐"
    for label, text in _contents(job):
        yield from _row(label, text)
    yield "└──┬" + "─" * (WIDTH - 5) + "┘"
    for index, output in enumerate(job.outputs):
        yield from _draw_output(job, output, last=index == len(job.outputs) - 1)


def _contents(job: CompiledJob) -> Iterator[tuple[str, str]]:
    yield "steps", " → ".join(job.steps)
    for branch in job.branches:
        yield "branch", f"of {job.inputs[branch.input].category}"
        yield from ((f" {label}", text) for label, text in map(_stage, branch.stages))
    if job.branches:
        yield "together", "from here on all branches" if job.operator != "join" else "pairs, as below"
    yield from map(_stage, job.stages)
    if job.key is not None:
        yield "key", _one_line(job.key) + "; in turn to all partitions" * job.spread
    if job.computation is not None:
        yield _computation(job.computation, job.late)
    yield from (("promise", text) for text in guarantees_of(JobConfig.from_stored(job.to_json())))
    if job.computation is not None and "ids" in job.computation:
        column, slack_ms = job.computation["ids"]["column"], job.computation["ids"]["slack_ms"]
        yield (
            "ids",
            f"a record whose {column} came before under its key is dropped, for {slack_ms / 1000:g} s",
        )
    if not job.stages and not job.branches and job.key is None and job.computation is None:
        yield "copy", "every record as it is"


def _stage(stage: Stage) -> tuple[str, str]:
    match stage:
        case FilterStage():
            return "filter", _one_line(stage.expr)
        case SelectStage():
            return "select", ", ".join(_column(name, expr, kind) for name, expr, kind in stage.columns)
        case ExplodeStage():
            made = ", ".join(f"{name} {kind}" for name, kind in stage.columns)
            return "explode", f"{_one_line(stage.array)} AS {made}{', or NULL' * stage.outer}"
        case KeyStage():
            return "key", _one_line(stage.expr)


def _computation(computation: Mapping[str, Any], late: str) -> tuple[str, str]:
    if "class" in computation:
        return "process", f"{computation['class']} (per key; late records: {late})"
    spans = computation.get("window") or computation.get("within") or {}
    near = ", ".join(f"{name} {value}" for name, value in spans.items())
    if computation["operator"] == "join":
        return "join", f"{computation['how']}, {near}"
    if computation["operator"] == "dedup":
        return "dedup", f"the first per {', '.join(computation['keys'])}, {near} (late records: {late})"
    if computation["operator"] == "top":
        order = "lowest" if computation["lowest"] else "highest"
        return "top", f"{computation['count']} with the {order} {computation['by']} per " + ", ".join(
            computation["keys"]
        )
    values = ", ".join(
        f"{value['function']}({value['argument'] or '*'}) AS {value['name']} {value['type']}"
        for value in computation["columns"]
    )
    if computation["operator"] == "partial":
        keys = ", ".join(computation["keys"])
        return "partial", f"{near}; {values} (per {keys} in each partition; late records: {late})"
    if computation["operator"] == "combine":
        near += ", of partial results"
    return "window", f"{near}; {values} (per {', '.join(computation['keys'])}; late records: {late})"


def _draw_rewrites(rewrites: Sequence[Rewrite]) -> Iterator[str]:
    if rewrites:
        yield from ("", "what was rewritten:")
    for rewrite in rewrites:
        text = f"{rewrite.rule}: {', '.join(rewrite.steps)}: {rewrite.reason}"
        yield from textwrap.wrap(text, WIDTH, initial_indent=" - ", subsequent_indent="   ")


def _draw_refusals(compiled: CompiledPipeline) -> Iterator[str]:
    jobs = [job for job in compiled.jobs if cannot_run(job.name, job.to_json()) is not None]
    if jobs:
        yield from ("", "this version cannot run these jobs, so `penstock submit` refuses the pipeline:")
    for job in jobs:
        yield f" - {job.name}: {job.operator}"


def _draw_notes(notes: Sequence[str]) -> Iterator[str]:
    if notes:
        yield from ("", "what to know:")
    for note in notes:
        yield from textwrap.wrap(
            note, WIDTH, initial_indent=" - ", subsequent_indent="   ", break_on_hyphens=False
        )


def _column(name: str, expr: str, kind: str) -> str:
    made = name if expr.strip("`") == name else f"{_one_line(expr)} AS {name}"
    return f"{made} {kind}"


def _row(label: str, text: str) -> Iterator[str]:
    for part in textwrap.wrap(text, WIDTH - 14) or [""]:
        yield f"│ {label:<8} {part:<{WIDTH - 13}} │"
        label = ""


def _draw_output(job: CompiledJob, output: Output, *, last: bool) -> Iterator[str]:
    branch, below = ("└", " ") if last else ("├", "│")
    kind = "internal" if output.internal else "dead letters" if output.category.endswith(".dead") else "sink"
    stream = f"{output.stream}: " if job.kind == "stateful" and len(job.outputs) > 1 else ""
    yield f"   {branch}─► {stream}{output.category}  ({kind}, {_partitions(output.partitions)})"
    columns = ", ".join(f"{name} {type_}" for name, type_ in output.columns)
    for part in textwrap.wrap(columns, WIDTH - 10):
        yield f"   {below}     {part}"


def _partitions(count: int) -> str:
    return f"{count} partition{'s' * (count != 1)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
