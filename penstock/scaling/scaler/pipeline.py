"""Decides a whole pipeline in one step: rates are propagated through its graph, so that every job is sized
for what its upstream jobs will send after their own decisions (DS2; StreamOps 5.1). Pure.

Backwards as well: no job is made larger than its downstream jobs can follow at their largest size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import networkx as nx
import numpy as np

from penstock.scaling.metrics.frames import Frame, NoFrame, Points
from penstock.scaling.scaler.decide import LookBack, decide
from penstock.scaling.scaler.growth import task_range, threads_limit
from penstock.scaling.scaler.load import Load, assess
from penstock.scaling.scaler.observation import Decision, Demand, Hold, Observation, Resize, parallel
from penstock.scaling.scaler.window import LoadWindow, optional, read_window

_DRAIN_METRICS = ("ingest_rate", "processed_rate", "lag_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEdge:
    """One job feeds another. Selectivity: records sent per record processed; None: as measured."""

    above: str
    below: str
    selectivity: float | None = None


@dataclass(frozen=True, slots=True)
class _Measured:
    window: LoadWindow
    load: Load
    rate_max: float  # at the largest shape its limits allow


def decide_pipeline(
    observations: Mapping[str, Observation],
    edges: Iterable[JobEdge],
    look_back: Mapping[str, LookBack] | None = None,
) -> dict[str, Decision]:
    """A decision for every job, upstream first. A job without metrics holds, and does not affect others."""
    graph = _graph(observations, edges)
    seen = {name: found for name in graph if (found := _measure(observations[name])) is not None}
    _set_selectivities(graph, observations, seen)
    useful = _useful_rates(graph, seen)
    decisions: dict[str, Decision] = {}
    rates: dict[str, float] = {}
    drained: dict[str, Points] = {}
    for name in nx.topological_sort(graph):
        sent = sum(
            rates[above] * graph.edges[above, name]["selectivity"]
            for above in graph.predecessors(name)
            if above in rates
        )
        limit, bottleneck = useful[name]
        frame, drained[name] = _without_drained(graph, observations, drained, name)
        observation = replace(
            observations[name],
            frame=frame,
            demand=Demand(input_rate=sent, useful_rate=limit, bottleneck=bottleneck),
        )
        decision = decide(observation, (look_back or {}).get(name))
        decisions[name] = decision
        if name in seen:
            rates[name] = _rate_after(observation, seen[name], decision, sent)
    return decisions


def _without_drained(
    graph: Any, observations: Mapping[str, Observation], drained: Mapping[str, Points], name: str
) -> tuple[Frame | NoFrame, Points]:
    """A job's minutes without the input that came only while an upstream job drained a backlog, now gone.

    Also returns, by minute, the part of its own rate that drained its backlog; empty if there is none. While
    the backlog drains, downstream jobs must take that rate. Afterwards it does not predict their input.
    """
    frame, job = observations[name].frame, observations[name].job
    if isinstance(frame, NoFrame) or any(metric not in frame.values for metric in _DRAIN_METRICS):
        return frame, np.zeros(0)
    ingest, processed, lag_s = (frame.values[metric] for metric in _DRAIN_METRICS)
    with np.errstate(invalid="ignore"):
        is_behind = lag_s > job.slo_lag_s / 2
    if not is_behind.any() and not any(len(drained[above]) for above in graph.predecessors(name)):
        return frame, np.zeros(0)
    extra = np.zeros(frame.minutes)
    for above in graph.predecessors(name):
        source = observations[above].frame
        if isinstance(source, Frame) and len(drained[above]):
            sent = graph.edges[above, name]["selectivity"] * drained[above]
            extra += _in_minutes_of(frame, sent, source.first_minute)
    steady = np.maximum(0.0, ingest - extra) if extra.any() else ingest
    with np.errstate(invalid="ignore"):
        was_behind = is_behind | np.concatenate(([False], is_behind[:-1])) | (extra > 0)
        own = np.where(was_behind, np.maximum(0.0, processed - steady), 0.0)
    if not lag_s[-1] <= job.slo_lag_s / 2:
        own = np.zeros(0)  # it still drains
    if extra.any():
        frame = replace(frame, values={**frame.values, "ingest_rate": steady})
    return frame, np.where(np.isfinite(own), own, 0.0)


def _in_minutes_of(frame: Frame, points: Points, first_minute: int) -> Points:
    """Align points to this frame's minutes; 0 for missing minutes."""
    found = np.zeros(frame.minutes)
    begin = max(frame.first_minute, first_minute)
    end = min(frame.first_minute + frame.minutes, first_minute + len(points))
    if begin < end:
        found[begin - frame.first_minute : end - frame.first_minute] = points[
            begin - first_minute : end - first_minute
        ]
    return found


def _graph(observations: Mapping[str, Observation], edges: Iterable[JobEdge]) -> Any:
    graph = nx.DiGraph()
    graph.add_nodes_from(sorted(observations))
    for edge in edges:
        if edge.above in graph and edge.below in graph:
            graph.add_edge(edge.above, edge.below, selectivity=edge.selectivity)
    # Jobs in a cycle have no order: each is decided by its own measurements.
    for circle in list(nx.strongly_connected_components(graph)):
        graph.remove_edges_from([*graph.subgraph(circle).edges])
    return graph


def _measure(observation: Observation) -> _Measured | None:
    window = read_window(observation)
    if isinstance(window, Hold):
        return None
    load = assess(observation, window)
    job = observation.job
    _, most = task_range(job)
    slots = parallel(most, threads_limit(job, observation.settings), job.partitions)
    return _Measured(window, load, load.thread_rate * slots)


def _set_selectivities(
    graph: Any, observations: Mapping[str, Observation], seen: Mapping[str, _Measured]
) -> None:
    """Fill in measured selectivities. If a job has one upstream job, its input rate is the best measure."""
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


def _useful_rates(graph: Any, seen: Mapping[str, _Measured]) -> dict[str, tuple[float, str]]:
    """Per job the largest rate that a downstream job can follow, and the name of the bottleneck."""
    useful: dict[str, tuple[float, str]] = {}
    for name in reversed(list(nx.topological_sort(graph))):
        best: tuple[float, str] = (0.0, "")
        below = [*graph.successors(name)]
        for consumer in below:
            best = max(best, _taken(graph, seen, useful, name, consumer))
        useful[name] = best if below and best[0] < inf else (inf, "")
    return useful


def _taken(
    graph: Any,
    seen: Mapping[str, _Measured],
    useful: Mapping[str, tuple[float, str]],
    name: str,
    consumer: str,
) -> tuple[float, str]:
    selectivity = graph.edges[name, consumer]["selectivity"]
    if consumer not in seen or selectivity <= 0:
        return inf, ""
    others = sum(
        seen[other].window.processed_rate * graph.edges[other, consumer]["selectivity"]
        for other in graph.predecessors(consumer)
        if other != name and other in seen
    )
    limit, bottleneck = min((seen[consumer].rate_max, consumer), useful[consumer])
    return max(0.0, limit - others) / selectivity, bottleneck


def _rate_after(observation: Observation, seen: _Measured, decision: Decision, sent: float) -> float:
    """The rate of the job after its decision: its input, and its backlog within t."""
    shape = decision.shape if isinstance(decision, Resize) else observation.job.shape
    slots = parallel(shape.task_count, shape.task.threads, observation.job.partitions)
    needed = max(sent, seen.load.input_rate) + seen.window.lag_records / observation.settings.recovery_s
    return min(needed, seen.load.thread_rate * slots)
