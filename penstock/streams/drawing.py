"""A compiled pipeline as text: one box per job, the categories between them. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from penstock.streams.compiled import CompiledJob, CompiledPipeline, FilterStage, Output

WIDTH = 100


def draw_plan(compiled: CompiledPipeline) -> str:
    """The jobs in the order in which records pass them, for `penstock plan`."""
    count = len(compiled.jobs)
    ref = compiled.package
    hashed = "" if ref.hash.startswith(ref.version) else f" ({ref.hash[:12]})"
    lines = [
        f"pipeline {compiled.graph.name}: {count} job{'s' * (count != 1)}",
        f"package {ref.name} {ref.version}{hashed}",
    ]
    writers = {output.category: job.name for job in compiled.jobs for output in job.outputs}
    for job in compiled.jobs:
        lines += ["", *_draw_job(job, writers.get(job.input))]
    return "\n".join(lines) + "\n"


def _draw_job(job: CompiledJob, writer: str | None) -> Iterator[str]:
    origin = f"from {writer}" if writer else f"source, {job.start}"
    yield f"   {job.input}  ({_partitions(job.partitions)}, {origin})"
    yield "   │"
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
    for stage in job.stages:
        if isinstance(stage, FilterStage):
            yield "filter", _one_line(stage.expr)
        else:
            yield "select", ", ".join(_column(name, expr, kind) for name, expr, kind in stage.columns)
    if job.key is not None:
        yield "key", _one_line(job.key)
    if job.computation is not None:
        yield "process", f"{job.computation} (per key; late records: {job.late})"
    if len(job.stages) == 0 and job.key is None and job.computation is None:
        yield "copy", "every record as it is"


def _column(name: str, expr: str, kind: str) -> str:
    made = name if expr.strip("`") == name else f"{_one_line(expr)} AS {name}"
    return f"{made} {kind}"


def _row(label: str, text: str) -> Iterator[str]:
    for part in textwrap.wrap(text, WIDTH - 14) or [""]:
        yield f"│ {label:<8} {part:<{WIDTH - 13}} │"
        label = ""


def _draw_output(job: CompiledJob, output: Output, *, last: bool) -> Iterator[str]:
    branch, below = ("└", " ") if last else ("├", "│")
    kind = "internal" if output.internal else "dead letters" if output.stream == "dead" else "sink"
    stream = f"{output.stream}: " if job.kind == "stateful" and len(job.outputs) > 1 else ""
    yield f"   {branch}─► {stream}{output.category}  ({kind}, {_partitions(output.partitions)})"
    columns = ", ".join(f"{name} {type_}" for name, type_ in output.columns)
    for part in textwrap.wrap(columns, WIDTH - 10):
        yield f"   {below}     {part}"


def _partitions(count: int) -> str:
    return f"{count} partition{'s' * (count != 1)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
