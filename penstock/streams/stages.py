"""Steps on a road as stages for Spark, each with only the columns that somebody uses. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.streams.compiled import ExplodeStage, FilterStage, KeyStage, SelectStage, Stage
from penstock.streams.expressions import Checked
from penstock.streams.graph import Columns, Filter, FlatMap, KeyBy, Select, Step
from penstock.streams.schemas import Schemas, is_column


def names_of(columns: Columns) -> frozenset[str]:
    """The names alone."""
    return frozenset(name for name, _ in columns)


def needed_before(schemas: Schemas, steps: Sequence[Step], kept: frozenset[str]) -> frozenset[str]:
    """What the steps read of what reaches them, if `kept` is used behind them."""
    needed = kept
    for step in reversed(steps):
        needed = _before(schemas, step, needed)
    return needed


def build_stages(
    schemas: Schemas, steps: Sequence[Step], columns: Columns, kept: Columns
) -> tuple[Stage, ...]:
    """Steps as stages, each select with only the columns that are used; at the end exactly `kept`."""
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
        stages.append(SelectStage(columns=tuple((name, f"`{name}`", kind) for name, kind in kept)))
    return tuple(stages)


def arguments_of(schemas: Schemas, aggregate: str) -> list[str | None]:
    """The column that each value of an aggregate is computed of: one that is there, or one made for it."""
    found: list[str | None] = []
    for place, (_, value) in enumerate(schemas.summed[aggregate]):
        name = None if value.argument is None else value.argument.text.strip("`")
        is_there = value.argument is None or (name is not None and is_column(value.argument, name))
        found.append(name if is_there else f"argument_{place}")
    return found


def argument_stage(schemas: Schemas, aggregate: str) -> tuple[Stage, ...]:
    """Computes what the values of an aggregate are made of, where that is more than a column."""
    made = {
        name: value.argument
        for (_, value), name in zip(schemas.summed[aggregate], arguments_of(schemas, aggregate), strict=True)
        if name is not None and value.argument is not None
    }
    if all(is_column(argument, name) for name, argument in made.items()):
        return ()
    columns = tuple((name, argument.text, argument.type) for name, argument in made.items())
    return (SelectStage(columns=columns),)


def side_stage(side: int, sides: Sequence[Columns]) -> Stage:
    """Gives the rows of one side of a join the columns of both, null where they are the other's."""
    columns = [("side", str(side), "int")]
    for number, kept in enumerate(sides):
        for place, (name, kind) in enumerate(kept):
            value = f"`{name}`" if number == side else f"CAST(NULL AS {kind})"
            columns.append((f"{'lr'[number]}{place}", value, kind))
    return SelectStage(columns=tuple(columns))


def _before(schemas: Schemas, step: Step, needed: frozenset[str]) -> frozenset[str]:
    match step:
        case Filter():
            return needed | schemas.conditions[step.name].columns
        case Select():
            return _used(checked for _, checked in _chosen(schemas, step, needed))
        case FlatMap():
            generated = schemas.generated[step.name]
            return (needed - names_of(generated.columns)) | generated.array.columns
        case KeyBy():
            return needed | schemas.keys[step.name].columns
    raise AssertionError(f"{step} is not on a road")


def _stage(schemas: Schemas, step: Step, needed: frozenset[str]) -> Stage:
    match step:
        case Filter():
            return FilterStage(expr=schemas.conditions[step.name].text)
        case Select():
            chosen = _chosen(schemas, step, needed)
            return SelectStage(columns=tuple((name, checked.text, checked.type) for name, checked in chosen))
        case FlatMap():
            made = schemas.generated[step.name]
            array = made.array
            return ExplodeStage(array=array.text, type=array.type, outer=made.outer, columns=made.columns)
        case KeyBy():
            return KeyStage(expr=schemas.keys[step.name].text)
    raise AssertionError(f"{step} is not on a road")


def _chosen(schemas: Schemas, step: Select, needed: frozenset[str]) -> tuple[tuple[str, Checked], ...]:
    columns = schemas.selected[step.name]
    return tuple(column for column in columns if column[0] in needed) or columns[:1]


def _used(expressions: Iterable[Checked]) -> frozenset[str]:
    return frozenset().union(*(checked.columns for checked in expressions))
