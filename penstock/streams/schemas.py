"""What each stream of a pipeline looks like: every expression checked against what reaches it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.core.errors import NotFound, PipelineError
from penstock.streams.bus.log import CategorySpec
from penstock.streams.catalogue import Catalogue, no_category
from penstock.streams.expressions import Checked, check_filter, check_key, check_select
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
    check_columns,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schemas:
    """A graph whose names and types are known to fit."""

    graph: Graph
    columns: dict[tuple[str, str], Columns] = field(default_factory=dict)  # (step, stream) -> what comes out
    conditions: dict[str, Checked] = field(default_factory=dict)  # filter -> its condition
    selected: dict[str, tuple[tuple[str, Checked], ...]] = field(
        default_factory=dict
    )  # select -> its columns
    keys: dict[str, Checked] = field(default_factory=dict)  # key_by -> its key
    sources: dict[str, CategorySpec] = field(default_factory=dict)  # source -> what it reads

    def into(self, step: str) -> Columns:
        """The columns that reach a step."""
        edge = self.graph.input_of(step)
        return self.columns[edge.source, edge.stream]


def resolve_schemas(graph: Graph, catalogue: Catalogue) -> Schemas:
    """Check every step against the columns that reach it; the first mistake raises PipelineError."""
    schemas = Schemas(graph=graph)
    for step in graph.ordered():
        with _telling_where(step):
            _resolve(step, schemas, catalogue)
    return schemas


def _resolve(step: Step, schemas: Schemas, catalogue: Catalogue) -> None:
    out = (step.name, DEFAULT_STREAM)
    match step:
        case Source():
            spec = _describe(step.category, catalogue)
            schemas.sources[step.name] = spec
            schemas.columns[out] = spec.columns
        case Filter():
            columns = schemas.into(step.name)
            schemas.conditions[step.name] = check_filter(step.condition, columns)
            schemas.columns[out] = columns
        case Select():
            selected = tuple(check_select(text, schemas.into(step.name)) for text in step.columns)
            made = tuple((name, checked.type) for name, checked in selected)
            check_columns(made, what=f"step {step.name!r}", place=step.place)
            schemas.selected[step.name] = selected
            schemas.columns[out] = made
        case KeyBy():
            columns = schemas.into(step.name)
            schemas.keys[step.name] = check_key(step.keys, columns)
            schemas.columns[out] = columns
        case Process():
            for stream, columns in step.outputs:
                schemas.columns[step.name, stream] = columns
        case Sink():
            _check_existing(step, schemas, catalogue)


@contextmanager
def _telling_where(step: Step) -> Iterator[None]:
    place = f"{step.place}: "
    try:
        yield
    except PipelineError as error:
        if error.what.startswith(place):
            raise
        raise PipelineError(
            f"{place}step {step.name!r}: {error.what}", why=error.why, fix=error.fix
        ) from None


def _describe(category: str, catalogue: Catalogue) -> CategorySpec:
    try:
        return catalogue.describe(category)
    except NotFound:
        missing = no_category(category, catalogue.names())
        raise PipelineError(missing.what, why=missing.why, fix=missing.fix) from None


def _check_existing(sink: Sink, schemas: Schemas, catalogue: Catalogue) -> None:
    """A category that is there already is kept as it is: the sink must fit it."""
    try:
        there = catalogue.describe(sink.category)
    except NotFound:
        return  # the plan creates it
    columns, partitions = schemas.into(sink.name), sink.partitions or schemas.graph.partitions
    another = "sink to a category of another name"
    if there.format != "typed" or there.watermark != "producers":
        raise PipelineError(
            f"category {sink.category!r} cannot be written by a pipeline",
            why=f"it exists for records from outside (format {there.format}, watermark {there.watermark})",
            fix=another,
        )
    if there.columns != columns:
        raise PipelineError(
            f"category {sink.category!r} exists with other columns",
            why=f"it has {_listed(there.columns)}; this pipeline writes {_listed(columns)}",
            fix=f"{another}, or select the columns it has",
        )
    if there.partitions != partitions:
        raise PipelineError(
            f"category {sink.category!r} exists with {there.partitions} partitions, not {partitions}",
            why="the partitions of a category never change: keys would move",
            fix=f'write .sink("{sink.category}", partitions={there.partitions}), or {another}',
        )


def _listed(columns: Columns) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns)
