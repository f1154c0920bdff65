"""A whole pipeline in one step: rates are carried through its graph, so that every job is sized for what the
jobs above it will send once their own plans are carried out (DS2; StreamOps 5.1). Pure.

And back: no job is made larger than the jobs below it can follow at their largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import networkx as nx

from penstock.resources.frames import Frame
from penstock.resources.scaler.decide import LookBack, decide
from penstock.resources.scaler.growth import task_range, threads_limit
from penstock.resources.scaler.load import Load, assess
from penstock.resources.scaler.observation import Decision, Demand, Hold, Observation, Resize
from penstock.resources.scaler.shapes import parallel
from penstock.resources.scaler.window import Window, optional, read_window


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One job feeds another. Selectivity: records sent per record processed; None: as measured."""

    above: str
    below: str
    selectivity: float | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    window: Window
    load: Load
    rate_max: float  # at the largest shape its limits allow


def decide_pipeline(
    observations: Mapping[str, Observation],
    edges: Iterable[Edge],
    look_back: Mapping[str, LookBack] | None = None,
) -> dict[str, Decision]:
    """A decision for every job, those above first. One without numbers holds, and tells others nothing."""
    graph = _graph(observations, edges)
    seen = {name: found for name in graph if (found := _look(observations[name])) is not None}
    _set_selectivities(graph, observations, seen)
    useful = _useful_rates(graph, seen)
    decisions: dict[str, Decision] = {}
    rates: dict[str, float] = {}
    for name in nx.topological_sort(graph):
        sent = sum(
            rates[above] * graph.edges[above, name]["selectivity"]
            for above in graph.predecessors(name)
            if above in rates
        )
        limit, bottleneck = useful[name]
        observation = replace(
            observations[name],
            demand=Demand(input_rate=sent, useful_rate=limit, bottleneck=bottleneck),
        )
        decision = decide(observation, (look_back or {}).get(name))
        decisions[name] = decision
        if name in seen:
            rates[name] = _rate_after(observation, seen[name], decision, sent)
    return decisions


def _graph(observations: Mapping[str, Observation], edges: Iterable[Edge]) -> Any:
    graph = nx.DiGraph()
    graph.add_nodes_from(sorted(observations))
    for edge in edges:
        if edge.above in graph and edge.below in graph:
            graph.add_edge(edge.above, edge.below, selectivity=edge.selectivity)
    # Jobs in a circle cannot be sized one after the other: each is decided by what it is seen doing.
    for circle in list(nx.strongly_connected_components(graph)):
        graph.remove_edges_from([*graph.subgraph(circle).edges])
    return graph


def _look(observation: Observation) -> _Seen | None:
    window = read_window(observation)
    if isinstance(window, Hold):
        return None
    load = assess(observation, window)
    job = observation.job
    _, most = task_range(job)
    slots = parallel(most, threads_limit(job, observation.settings), job.partitions)
    return _Seen(window, load, load.thread_rate * slots)


def _set_selectivities(
    graph: Any, observations: Mapping[str, Observation], seen: Mapping[str, _Seen]
) -> None:
    """What an edge carries, best where one job alone feeds another: then it is what arrives there."""
    for above, below in graph.edges:
        given = graph.edges[above, below]["selectivity"]
        if given is not None and 0 <= given < inf:
            continue
        measured = 0.0
        if above in seen and seen[above].window.processed_rate > 0:
            processed = seen[above].window.processed_rate
            if graph.in_degree(below) == 1 and below in seen:
                measured = seen[below].window.input_rate / processed
            else:
                frame = observations[above].frame
                sent = optional(frame.values, "output_rate") if isinstance(frame, Frame) else 0.0
                measured = sent / processed if sent == sent else 0.0
        graph.edges[above, below]["selectivity"] = measured


def _useful_rates(graph: Any, seen: Mapping[str, _Seen]) -> dict[str, tuple[float, str]]:
    """Per job the rate above which no job below it can follow, and which of them that is."""
    useful: dict[str, tuple[float, str]] = {}
    for name in reversed(list(nx.topological_sort(graph))):
        best: tuple[float, str] = (0.0, "")
        below = [*graph.successors(name)]
        for consumer in below:
            best = max(best, _taken(graph, seen, useful, name, consumer))
        useful[name] = best if below and best[0] < inf else (inf, "")
    return useful


def _taken(
    graph: Any, seen: Mapping[str, _Seen], useful: Mapping[str, tuple[float, str]], name: str, consumer: str
) -> tuple[float, str]:
    selectivity = graph.edges[name, consumer]["selectivity"]
    if consumer not in seen or selectivity <= 0:
        return inf, ""
    others = sum(
        seen[other].window.processed_rate * graph.edges[other, consumer]["selectivity"]
        for other in graph.predecessors(consumer)
        if other != name and other in seen
    )
    limit, who = min((seen[consumer].rate_max, consumer), useful[consumer])
    return max(0.0, limit - others) / selectivity, who


def _rate_after(observation: Observation, seen: _Seen, decision: Decision, sent: float) -> float:
    """What the job will process once its decision is carried out: its input and its backlog within t."""
    shape = decision.shape if isinstance(decision, Resize) else observation.job.shape
    slots = parallel(shape.task_count, shape.task.threads, observation.job.partitions)
    needed = max(sent, seen.load.input_rate) + seen.window.lag_records / observation.settings.recovery_s
    return min(needed, seen.load.thread_rate * slots)
