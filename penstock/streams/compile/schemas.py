"""The columns of each stream of a pipeline; checks every expression against its input columns. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.core.errors import NotFound, PipelineError
from penstock.streams.bus.log import CategorySpec
from penstock.streams.catalogue import Catalogue, nearest, no_category
from penstock.streams.compile.expressions import (
    Checked,
    Generated,
    Summed,
    check_aggregate,
    check_filter,
    check_flat_map,
    check_key,
    check_key_parts,
    check_select,
)
from penstock.streams.compile.graph import (
    DEFAULT_STREAM,
    AggregateStep,
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
    check_columns,
)
from penstock.streams.dsl.pipeline import check_process_inputs
from penstock.streams.dsl.windows import PARTIAL_COLUMNS, RANK, WINDOW_END, WINDOW_START


@dataclass(frozen=True, slots=True, kw_only=True)
class Schemas:
    """A checked graph, with the columns of its streams and its parsed expressions."""

    graph: Graph
    columns: dict[tuple[str, str], Columns] = field(default_factory=dict)  # (step, stream) -> what comes out
    conditions: dict[str, Checked] = field(default_factory=dict)  # filter -> its condition
    selected: dict[str, tuple[tuple[str, Checked], ...]] = field(
        default_factory=dict
    )  # select -> its columns
    generated: dict[str, Generated] = field(default_factory=dict)  # flat_map -> its array and new columns
    summed: dict[str, tuple[tuple[str, Summed], ...]] = field(default_factory=dict)  # aggregate -> its values
    keys: dict[str, Checked] = field(default_factory=dict)  # key_by -> its key
    key_parts: dict[str, tuple[Checked, ...]] = field(default_factory=dict)
    sources: dict[str, CategorySpec] = field(default_factory=dict)  # source -> what it reads

    def into(self, step: str) -> Columns:
        """The columns of a step's first input."""
        return self.at(self.graph.input_of(step))

    def at(self, edge: Edge) -> Columns:
        """The columns of the stream of an edge."""
        return self.columns[edge.source, edge.stream]

    def passes(self, names: Iterable[str], steps: Iterable[Step]) -> bool:
        """True if the steps do not change these columns."""
        wanted = set(names)
        return all(wanted <= self.unchanged(step) for step in steps if isinstance(step, SelectStep))

    def unchanged(self, step: SelectStep) -> set[str]:
        """The columns that a select does not change."""
        return {name for name, checked in self.selected[step.name] if is_column(checked, name)}


def is_column(checked: Checked, name: str) -> bool:
    """True if an expression is just this column."""
    return checked.columns == {name} and checked.text.strip("`") == name


def resolve_schemas(graph: Graph, catalogue: Catalogue) -> Schemas:
    """Check every step against the columns that reach it; the first mistake raises PipelineError."""
    schemas = Schemas(graph=graph)
    for step in graph.ordered():
        with _with_location(step):
            _resolve(step, schemas, catalogue)
    return schemas


def _resolve(step: Step, schemas: Schemas, catalogue: Catalogue) -> None:
    out = (step.name, DEFAULT_STREAM)
    match step:
        case SourceStep():
            spec = _describe(step.category, catalogue)
            schemas.sources[step.name] = spec
            schemas.columns[out] = spec.columns
        case FilterStep():
            columns = schemas.into(step.name)
            schemas.conditions[step.name] = check_filter(step.condition, columns)
            schemas.columns[out] = columns
        case SelectStep():
            selected = tuple(check_select(text, schemas.into(step.name)) for text in step.columns)
            made = tuple((name, checked.type) for name, checked in selected)
            check_columns(made, what=f"step {step.name!r}", place=step.place)
            schemas.selected[step.name] = selected
            schemas.columns[out] = made
        case FlatMapStep():
            columns = schemas.into(step.name)
            schemas.generated[step.name] = made_of = check_flat_map(step.generator, columns)
            schemas.columns[out] = (*columns, *made_of.columns)
            check_columns(schemas.columns[out], what=f"step {step.name!r}", place=step.place)
        case UnionStep():
            schemas.columns[out] = _united(step, schemas)
        case KeyByStep():
            columns = schemas.into(step.name)
            schemas.keys[step.name] = check_key(step.keys, columns)
            schemas.key_parts[step.name] = check_key_parts(step.keys, columns)
            schemas.columns[out] = columns
        case WindowStep() | DedupStep():
            schemas.columns[out] = schemas.into(step.name)
        case TopStep():
            schemas.columns[out] = _topped(step, schemas)
        case AggregateStep():
            schemas.columns[out] = _aggregated(step, schemas)
        case JoinStep():
            schemas.columns[out] = _joined(step, schemas)
        case ProcessStep():
            check_process_inputs(step, [schemas.at(edge) for edge in schemas.graph.inputs_of(step.name)])
            for stream, columns in step.outputs:
                schemas.columns[step.name, stream] = columns
        case SinkStep():
            _check_existing(step, schemas, catalogue)


def _united(step: UnionStep, schemas: Schemas) -> Columns:
    edges = schemas.graph.inputs_of(step.name)
    first = schemas.at(edges[0])
    for edge in edges[1:]:
        other = schemas.at(edge)
        if other != first:
            raise PipelineError(
                f"{edges[0].source!r} and {edge.source!r} have different columns",
                why=f"the first has {_listed(first)}, the other has "
                f"{_listed(other)}; columns are not matched "
                "automatically",
                fix=f'select the same names, types and order before: .select("{first[0][0]}", …)',
            )
    return first


def key_columns(schemas: Schemas, edge: Edge) -> tuple[str, ...]:
    """The key columns of a stream; PipelineError if a part of the key is not a column."""
    keyed, between = schemas.graph.key_of(edge)
    assert keyed is not None, "checked before: it has a key"
    for part in schemas.key_parts[keyed.name]:
        name = part.text.strip("`")
        if not is_column(part, name):
            raise PipelineError(
                f"the key {part.text!r} of step {keyed.name!r} has no name",
                why="each result carries its key, so every part of it must be a column",
                fix=f'make the column first: .select("{part.text} AS name", …).key_by("name")',
            )
        if not schemas.passes([name], between):
            raise PipelineError(
                f"the key column {name!r} of step {keyed.name!r} is dropped or changed before it is used",
                why="each result carries its key",
                fix="select before .key_by(...), or keep the column as it is",
            )
    return tuple(part.text.strip("`") for part in schemas.key_parts[keyed.name])


def window_edge(graph: Graph, step: AggregateStep) -> Edge:
    """The edge from the window to its aggregate; for the second phase, the edge to the first one."""
    edge = graph.input_of(step.name)
    return graph.input_of(edge.source) if step.phase == "combine" else edge


def _aggregated(step: AggregateStep, schemas: Schemas) -> Columns:
    edge = window_edge(schemas.graph, step)
    columns, keys = schemas.at(edge), key_columns(schemas, edge)
    summed = tuple(check_aggregate(text, columns) for text in step.columns)
    schemas.summed[step.name] = summed
    if step.phase == "partial":
        return PARTIAL_COLUMNS
    made = (
        *((name, dict(columns)[name]) for name in keys),
        (WINDOW_START, "bigint"),
        (WINDOW_END, "bigint"),
        *((name, value.type) for name, value in summed),
    )
    check_columns(made, what=f"step {step.name!r}", place=step.place)
    return made


def _joined(step: JoinStep, schemas: Schemas) -> Columns:
    left_edge, right_edge = schemas.graph.inputs_of(step.name)
    left, right = schemas.at(left_edge), schemas.at(right_edge)
    left_keys, right_keys = key_columns(schemas, left_edge), key_columns(schemas, right_edge)
    types = [dict(left)[name] for name in left_keys], [dict(right)[name] for name in right_keys]
    if types[0] != types[1]:
        raise PipelineError(
            f"the keys of the two sides do not fit: {', '.join(types[0])} and {', '.join(types[1])}",
            why="keys are equal when their texts are, and texts of different types may be equal by accident",
            fix="key both sides by as many columns, of the same types",
        )
    once = {name for name, other in zip(left_keys, right_keys, strict=True) if name == other}
    taken = {name.lower() for name, _ in left}
    for name, _ in right:
        if name not in once and name.lower() in taken:
            raise PipelineError(
                f"column {name!r} is ambiguous: both sides have one",
                why="a result has the columns of both sides, and each of them needs a name of its own",
                fix=f'rename it on one side before the key_by: .select("{name} AS right_{name}", …)',
            )
    return (*left, *(column for column in right if column[0] not in once))


def _topped(step: TopStep, schemas: Schemas) -> Columns:
    graph, edge = schemas.graph, schemas.graph.input_of(step.name)
    columns, between = schemas.at(edge), []
    before = graph.step(edge.source)
    while isinstance(before, FilterStep | SelectStep | KeyByStep):
        between.append(before)
        before = graph.step(graph.input_of(before.name).source)
    if not isinstance(before, AggregateStep) or not schemas.passes((WINDOW_START, WINDOW_END), between):
        raise PipelineError(
            "top(...) needs the results of an aggregate, with window_start and window_end as they are",
            why="it emits the first results of each window when the window ends",
            fix='write .window(...).aggregate("count(*) AS n").top(3, by="n")',
        )
    window = graph.step(graph.input_of(before.name).source)
    if isinstance(window, WindowStep) and (window.spans.kind == "session" or not window.firing.is_plain):
        raise PipelineError(
            "top(...) needs windows that are the same for all keys and give one result",
            why="sessions differ between keys, and early results and updates "
            "would be counted as other results",
            fix='use .window(tumbling("1m")) or sliding(...), without early= and late=',
        )
    if step.by not in dict(columns):
        near = nearest(step.by, dict(columns))
        raise PipelineError(
            f"there is no column {step.by!r} to order by",
            why=f"the results have {_listed(columns)}",
            fix=f"did you mean {near!r}?" if near else "name one of these",
        )
    made = (*columns, (RANK, "int"))
    check_columns(made, what=f"step {step.name!r}", place=step.place)
    return made


@contextmanager
def _with_location(step: Step) -> Iterator[None]:
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


def _check_existing(sink: SinkStep, schemas: Schemas, catalogue: Catalogue) -> None:
    """Check a sink against its category, if it exists: a category is never changed."""
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
            why="the number of partitions of a category never changes, because keys would move",
            fix=f'write .sink("{sink.category}", partitions={there.partitions}), or {another}',
        )


def _listed(columns: Columns) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns)
