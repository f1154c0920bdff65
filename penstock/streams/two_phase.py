"""An aggregate in two phases: parts of each key in all partitions, and their sum where the key is. Pure.

A key with most of the records would be the work of one partition. With `two_phase=True` its records go to all
partitions in turn, each adds up its own per window, and only these partial results meet by key. Partial
results merge in any order to the same value, so the results are those of one phase.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.core.errors import PipelineError
from penstock.streams.graph import Aggregate, Edge, Graph, Step, Window
from penstock.streams.optimize import Rewrite


def take_apart(graph: Graph) -> tuple[Graph, tuple[Rewrite, ...]]:
    """The graph with each such aggregate as two steps. Requires: windows have keys and aggregates windows."""
    told = []
    for step in graph.steps:
        if isinstance(step, Aggregate) and step.two_phase:
            graph = _taken_apart(graph, step)
            reason = (
                "records of a key go to all partitions in turn and are added up there; their sums meet by key"
            )
            told.append(Rewrite(rule="two phases", steps=(step.name,), reason=reason))
    return graph, tuple(told)


def _taken_apart(graph: Graph, whole: Aggregate) -> Graph:
    into = graph.input_of(whole.name)
    window = graph.step(into.source)
    assert isinstance(window, Window), "checked before: an aggregate reads a window"
    keyed, _ = graph.key_of(graph.input_of(window.name))
    assert keyed is not None, "checked before: a window has a key"
    if window.spans.kind == "session" or not window.firing.is_plain:
        raise PipelineError(
            f"{whole.place}: step {whole.name!r} cannot have two phases",
            why="a part of a key knows neither where its sessions end nor what is new in the whole",
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
    else:  # others read the window's records where their key is
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
