"""What a job that keeps state runs per key, as its plan says it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock.streams.compiled import Output
from penstock.streams.graph import Columns, Dedup, Edge, Join, Process, Stateful, Step, Top, Window
from penstock.streams.kept_shape import operator_shape
from penstock.streams.schemas import Schemas, key_columns, window_edge
from penstock.streams.stages import arguments_of
from penstock.streams.step import DEAD_COLUMNS, dead_category, dead_stream


def put_aside(step: Stateful, job: str, partitions: int) -> Iterator[Output]:
    """Where the records go at which user code raises, if they are to be put aside."""
    if isinstance(step, Process) and ("poison", "skip") in step.settings:
        yield Output(
            stream=dead_stream(0),
            category=dead_category(job),
            partitions=partitions,
            columns=DEAD_COLUMNS,
            internal=False,
        )


def _key_texts(schemas: Schemas, edge: Edge) -> list[str]:
    keyed, _ = schemas.graph.key_of(edge)
    assert keyed is not None, "checked before: it has a key"
    return [part.text.strip("`") for part in schemas.key_parts[keyed.name]]


def computation_json(
    step: Stateful, schemas: Schemas, kept: Callable[[Step, Edge], Columns]
) -> dict[str, Any]:
    """The plan's word on what runs per key; `kept`: which columns of a stream it gets."""
    graph = schemas.graph
    if isinstance(step, Process):
        found: dict[str, Any] = {
            "class": step.computation,
            **({"vectorised": True} if step.vectorised else {}),
        }
        keys = [_key_texts(schemas, edge) for edge in graph.inputs_of(step.name)]
        found["keys"] = keys[0] if len(keys) == 1 else [", ".join(one) for one in keys]
        found["state"] = dict(step.state)
        if step.ids is not None:
            found["ids"] = {"column": step.ids[0], "slack_ms": step.ids[1]}
        if len(step.inputs) > 1:
            edges = zip(step.inputs, graph.inputs_of(step.name), strict=True)
            found["inputs"] = [[name, [c for c, _ in kept(step, edge)]] for name, edge in edges]
        return found
    if isinstance(step, Join):
        left, right = graph.inputs_of(step.name)
        near = {"before_ms": step.before_ms, "after_ms": step.after_ms}
        return {
            "operator": "join",
            "how": step.how,
            "keys": [list(key_columns(schemas, edge)) for edge in (left, right)],
            "columns": [[list(column) for column in schemas.at(edge)] for edge in (left, right)],
            **({"window": step.spans.to_json()} if step.spans else {"within": near}),
            "state": operator_shape(step, schemas),
        }
    edge = graph.input_of(step.name)
    if isinstance(step, Dedup):
        return {
            "operator": "dedup",
            "keys": _key_texts(schemas, edge),
            **({"window": step.spans.to_json()} if step.spans else {"within": {"within_ms": step.within_ms}}),
            "state": operator_shape(step, schemas),
        }
    if isinstance(step, Top):
        return {
            "operator": "top",
            "keys": list(key_columns(schemas, edge)),
            "count": step.count,
            "by": step.by,
            "lowest": step.lowest,
            "state": operator_shape(step, schemas),
        }
    edge = window_edge(graph, step)
    window = graph.step(edge.source)
    assert isinstance(window, Window), "checked before: an aggregate reads a window"
    values = [
        {
            "name": name,
            "function": value.function,
            "argument": None if value.argument is None else value.argument.text,
            "column": column,
            "parameter": value.parameter,
            "type": value.type,
        }
        for (name, value), column in zip(
            schemas.summed[step.name], arguments_of(schemas, step.name), strict=True
        )
    ]
    return {
        "operator": step.phase or "aggregate",
        "keys": list(key_columns(schemas, edge)),
        "window": window.spans.to_json(),
        "firing": window.firing.to_json(),
        "columns": values,
        "state": operator_shape(step, schemas),
    }
