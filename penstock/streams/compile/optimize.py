"""Rewrites of a graph, each with its reason, before it is cut into jobs. Pure.

`optimize` reduces the work without changing results: fewer shuffles, and filters and projections before them.
`split_two_phase` makes two steps of an aggregate with `two_phase=True`. A key with most of the records would
be the work of one partition; in two phases its records go to all partitions in turn, each adds up its own per
window, and only these partial results meet by key. They merge in any order to the same value, so the results
are those of one phase. What is cut, carried and read is decided later, in `cutting.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.errors import PipelineError
from penstock.streams.catalogue import Catalogue
from penstock.streams.compile.expressions import cannot_fail
from penstock.streams.compile.graph import (
    AggregateStep,
    Edge,
    FilterStep,
    FlatMapStep,
    Graph,
    KeyByStep,
    SelectStep,
    SinkStep,
    StatefulSteps,
    Step,
    WindowStep,
)
from penstock.streams.compile.schemas import Schemas, resolve_schemas


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A change of the graph: the rule, the steps, and why it is correct and useful."""

    rule: str
    steps: tuple[str, ...]
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The JSON form for `penstock plan`."""
        return {"rule": self.rule, "steps": list(self.steps), "reason": self.reason}


Found = tuple[Graph, Rewrite] | None


def optimize(graph: Graph, catalogue: Catalogue) -> tuple[Schemas, tuple[Rewrite, ...]]:
    """The schemas of the rewritten graph, and the rewrites. Requires: the graph passed its checks."""
    schemas, rewrites = resolve_schemas(graph, catalogue), []
    while (found := _first(schemas)) is not None:
        changed, rewrite = found
        rewrites.append(rewrite)
        schemas = resolve_schemas(changed, catalogue)
    return schemas, tuple(rewrites)


def _first(schemas: Schemas) -> Found:
    # Rules that drop a shuffle come first, because they save most. Each rule moves a filter or a select
    # towards the source, or removes a step, so the loop ends.
    rules: tuple[Callable[[Schemas, Step], Found], ...] = (
        _unused_key,
        _same_key,
        _filter_below_key,
        _select_below_key,
        _filter_below_select,
        _filter_below_flat_map,
    )
    for rule in rules:
        for step in schemas.graph.steps:
            found = rule(schemas, step)
            if found is not None:
                return found
    return None


def key_is_used(graph: Graph, step: KeyByStep) -> bool:
    """True if records reach a sink or a stateful step with this key."""
    return any(not isinstance(reader, KeyByStep) for reader in _next_ends(graph, step))


def needs_shuffle(graph: Graph, step: KeyByStep) -> bool:
    """True if a later step needs all records of a key in one partition."""
    return any(isinstance(reader, StatefulSteps) for reader in _next_ends(graph, step))


def _next_ends(graph: Graph, step: Step) -> Iterable[Step]:
    for edge in graph.readers_of(step.name):
        reader = graph.step(edge.target)
        if isinstance(reader, KeyByStep | StatefulSteps | SinkStep):
            yield reader
        else:
            yield from _next_ends(graph, reader)


def _unused_key(schemas: Schemas, step: Step) -> Found:
    graph = schemas.graph
    if not isinstance(step, KeyByStep) or key_is_used(graph, step):
        return None
    reason = f"the key of {step.name} is replaced by a later one before anything uses it"
    return _without(graph, step), Rewrite(rule="drop shuffle", steps=(step.name,), reason=reason)


def _same_key(schemas: Schemas, step: Step) -> Found:
    graph = schemas.graph
    if not isinstance(step, KeyByStep) or not needs_shuffle(graph, step):
        return None
    for other in graph.steps:
        if other is step or not isinstance(other, KeyByStep) or not needs_shuffle(graph, other):
            continue
        same = (schemas.keys[step.name].normal, step.spread) == (
            schemas.keys[other.name].normal,
            other.spread,
        )
        ours, theirs = graph.input_of(step.name), graph.input_of(other.name)
        if same and (ours.source, ours.stream) == (theirs.source, theirs.stream):
            edges = tuple(
                replace(edge, source=step.name) if edge.source == other.name else edge
                for edge in graph.edges
                if edge.target != other.name
            )
            steps = tuple(kept for kept in graph.steps if kept is not other)
            reason = f"{other.name} partitions the same records by the same key: it reads {step.name}"
            rewrite = Rewrite(rule="share shuffle", steps=(other.name, step.name), reason=reason)
            return replace(graph, steps=steps, edges=edges), rewrite
    return None


def _filter_below_key(schemas: Schemas, step: Step) -> Found:
    above = _only_reader(schemas.graph, step, KeyByStep)
    if not isinstance(step, FilterStep) or not _is_shuffle(schemas.graph, above):
        return None
    assert above is not None
    reason = f"records that {step.name} drops need not go through {above.name}"
    rewrite = Rewrite(rule="push filter", steps=(step.name, above.name), reason=reason)
    return _swapped(schemas.graph, above, step), rewrite


def _select_below_key(schemas: Schemas, step: Step) -> Found:
    above = _only_reader(schemas.graph, step, KeyByStep)
    if not isinstance(step, SelectStep) or not _is_shuffle(schemas.graph, above):
        return None
    assert above is not None
    key = schemas.keys[above.name].columns
    if not schemas.passes(key, [step]):
        return None
    selected = schemas.selected[step.name]
    after = {name for name, _ in selected} | key
    before = key.union(*(checked.columns for _, checked in selected))
    if len(after) > len(before):
        return None  # the written records would be larger
    reason = f"{above.name} writes {', '.join(sorted(after))} instead of {', '.join(sorted(before))}"
    if after == before:
        reason = f"{above.name} writes the same columns, and its readers need not compute them"
    rewrite = Rewrite(rule="push projection", steps=(step.name, above.name), reason=reason)
    return _swapped(schemas.graph, above, step), rewrite


def _filter_below_select(schemas: Schemas, step: Step) -> Found:
    above = _only_reader(schemas.graph, step, SelectStep)
    if not isinstance(step, FilterStep) or not isinstance(above, SelectStep):
        return None
    used = schemas.conditions[step.name].columns
    keyed, _ = schemas.graph.key_of(schemas.graph.input_of(above.name))
    if keyed is None or not used <= schemas.unchanged(above):
        return None
    unchanged = ", ".join(sorted(used)) or "any used column"
    reason = f"{above.name} does not change {unchanged}, so the filter can be before it"
    rewrite = Rewrite(rule="push filter", steps=(step.name, above.name), reason=reason)
    return _swapped(schemas.graph, above, step), rewrite


def _filter_below_flat_map(schemas: Schemas, step: Step) -> Found:
    above = _only_reader(schemas.graph, step, FlatMapStep)
    if not isinstance(step, FilterStep) or not isinstance(above, FlatMapStep):
        return None
    condition = schemas.conditions[step.name]
    made = {name for name, _ in schemas.generated[above.name].columns}
    # Records without elements did not reach the filter: a condition that can fail must not be moved.
    if condition.columns & made or not cannot_fail(step.condition):
        return None
    reason = f"it does not use the columns that {above.name} makes, so it can be evaluated once per record"
    rewrite = Rewrite(rule="push filter", steps=(step.name, above.name), reason=reason)
    return _swapped(schemas.graph, above, step), rewrite


def _is_shuffle(graph: Graph, step: Step | None) -> bool:
    return isinstance(step, KeyByStep) and needs_shuffle(graph, step)


def _only_reader(graph: Graph, step: Step, kind: type[Step]) -> Step | None:
    """The input of `step`, if it is of this kind and has no other reader."""
    if not isinstance(step, FilterStep | SelectStep):
        return None
    above = graph.step(graph.input_of(step.name).source)
    return above if isinstance(above, kind) and len(graph.readers_of(above.name)) == 1 else None


def _without(graph: Graph, step: Step) -> Graph:
    into = graph.input_of(step.name)
    edges = tuple(
        replace(edge, source=into.source, stream=into.stream) if edge.source == step.name else edge
        for edge in graph.edges
        if edge.target != step.name
    )
    return replace(graph, steps=tuple(kept for kept in graph.steps if kept is not step), edges=edges)


def _swapped(graph: Graph, above: Step, below: Step) -> Graph:
    """Swap two steps, where `below` is the only reader of `above`."""

    def turned(edge: Edge) -> Edge:
        if edge.target == above.name:
            return replace(edge, target=below.name)
        if edge.source == above.name:
            return Edge(source=below.name, target=above.name)
        return replace(edge, source=above.name) if edge.source == below.name else edge

    places = {above.name: below, below.name: above}
    steps = tuple(places.get(step.name, step) for step in graph.steps)
    return replace(graph, steps=steps, edges=tuple(turned(edge) for edge in graph.edges))


# --- an aggregate in two phases --------------------------------------------------------------------------


def split_two_phase(graph: Graph) -> tuple[Graph, tuple[Rewrite, ...]]:
    """The graph with two steps for each such aggregate. Requires: windows have keys, aggregates windows."""
    rewrites = []
    for step in graph.steps:
        if isinstance(step, AggregateStep) and step.two_phase:
            graph = _split_aggregate(graph, step)
            reason = (
                "records of a key are aggregated in all partitions; the partial results are combined by key"
            )
            rewrites.append(Rewrite(rule="two phases", steps=(step.name,), reason=reason))
    return graph, tuple(rewrites)


def _split_aggregate(graph: Graph, whole: AggregateStep) -> Graph:
    into = graph.input_of(whole.name)
    window = graph.step(into.source)
    assert isinstance(window, WindowStep), "checked before: an aggregate reads a window"
    keyed, _ = graph.key_of(graph.input_of(window.name))
    assert keyed is not None, "checked before: a window has a key"
    if window.spans.kind == "session" or not window.firing.is_plain:
        raise PipelineError(
            f"{whole.place}: step {whole.name!r} cannot have two phases",
            why="a partial result has only a part of the records of a session or of an early result",
            fix="leave two_phase= out, or use tumbling(...) or sliding(...) without early= and late=",
        )
    taken = {step.name for step in graph.steps}
    spread = replace(keyed, name=_free(f"{whole.name}_spread", taken), spread=True)
    partial = replace(whole, name=_free(f"{whole.name}_partial", taken), two_phase=False, phase="partial")
    combined = replace(whole, two_phase=False, phase="combine")
    before = graph.input_of(window.name)
    gone, own = {into}, window
    made: list[Step] = [spread]
    if len(graph.readers_of(window.name)) == 1:
        gone.add(before)
    else:  # other steps read the window too
        own = replace(window, name=_free(f"{whole.name}_window", taken))
        made.append(own)
    steps: list[Step] = []
    for step in graph.steps:
        steps += [*made, partial, combined] if step is whole else [step]
    edges = (
        *(edge for edge in graph.edges if edge not in gone),
        Edge(source=before.source, target=spread.name, stream=before.stream),
        Edge(source=spread.name, target=own.name),
        Edge(source=own.name, target=partial.name),
        Edge(source=partial.name, target=combined.name),
    )
    return replace(graph, steps=tuple(steps), edges=edges)


def _free(name: str, taken: Iterable[str]) -> str:
    found = name[:63]
    count = 1
    while found in taken:
        count += 1
        found = f"{name[:59]}_{count}"
    return found
