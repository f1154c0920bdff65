"""What the stored rows of an operator depend on, as its plan says it (`plan.computation.state`). Pure.

Rows are read by place: a window's rows are named after its time, its values and the columns of records that
wait are numbered. Whatever gives a row another meaning is part of the shape, in words that fit "its windows
are …", and `jobs/state_fit.py` compares shapes before new code meets old rows. The rest may change: how a
column is computed, how often early results come, which quantile is asked for, which sides of a join are kept.
"""

from __future__ import annotations

from penstock.streams.compile.expressions import Summed
from penstock.streams.compile.graph import Aggregate, Columns, Dedup, Edge, Join, Top, Window
from penstock.streams.compile.schemas import Schemas, key_columns, window_edge
from penstock.streams.dsl.windows import Firing, Spans, duration_text

Shape = dict[str, str]
_WHOLE = ("int", "bigint")


def operator_shape(step: Aggregate | Join | Dedup | Top, schemas: Schemas) -> Shape:
    """Of each thing that the step's rows depend on what it is."""
    graph = schemas.graph
    if isinstance(step, Join):
        left, right = graph.inputs_of(step.name)
        before, after = (duration_text(ms or 0) for ms in (step.before_ms, step.after_ms))
        return {
            "pairs": _in_windows(step.spans) or f"up to {before} before and {after} after",
            "left columns": listed(schemas.at(left)),
            "right columns": listed(schemas.at(right)),
        }
    edge = graph.input_of(step.name)
    if isinstance(step, Dedup):
        span = _in_windows(step.spans) or f"for {duration_text(step.within_ms or 0)}"
        return {"repeats": f"dropped {span}", "columns": listed(schemas.at(edge))}
    if isinstance(step, Top):
        order = "lowest" if step.lowest else "highest"
        return {
            "lists": f"the {step.count} {order} by {step.by}",
            "columns": listed(schemas.at(edge)),
        }
    return _aggregate(step, schemas)


def listed(columns: Columns) -> str:
    """Columns in their order, with their types."""
    return ", ".join(f"{name} {kind}" for name, kind in columns)


def _aggregate(step: Aggregate, schemas: Schemas) -> Shape:
    edge: Edge = window_edge(schemas.graph, step)
    window = schemas.graph.step(edge.source)
    assert isinstance(window, Window), "checked before: an aggregate reads a window"
    kinds, spans = dict(schemas.at(edge)), window.spans
    if step.phase == "partial":  # it knows steps alone; how many make a window is the second phase's
        spans = Spans(kind="tumbling", size_ms=spans.slide_ms or spans.size_ms)
    return {
        # A block has many keys, as texts: their columns are made of them by type.
        "key columns": listed(tuple((name, kinds[name]) for name in key_columns(schemas, edge))),
        "windows": _spans(spans),
        "results": _results(window.firing),
        # The name too: two values of one kind may change places.
        "values": ", ".join(f"{name} {_value(value)}" for name, value in schemas.summed[step.name]),
    }


def _value(value: Summed) -> str:
    """A value's function, and the type of what is kept for it where it is not always the same."""
    if value.argument is None or value.function in ("count", "approx_percentile"):
        return f"({value.function})"
    kind = value.argument.type
    if value.function in ("sum", "avg"):  # all whole numbers are kept alike, and so are all others
        kind = "whole numbers" if kind in _WHOLE else "doubles"
    return f"({value.function} of {kind})"


def _spans(spans: Spans) -> str:
    if spans.kind == "session":
        return f"sessions of {duration_text(spans.size_ms)}"
    if spans.slide_ms in (0, spans.size_ms):
        return f"tumbling of {duration_text(spans.size_ms)}"
    return f"sliding of {duration_text(spans.size_ms)} every {duration_text(spans.slide_ms)}"


def _in_windows(spans: Spans | None) -> str:
    return f"in windows, {_spans(spans)}" if spans else ""


def _results(firing: Firing) -> str:
    """With several results, what was given is kept apart, and what is over for as long as it may change."""
    if firing.is_plain:
        return "one for each window"
    updates = f", updated for {duration_text(firing.lateness_ms)}" if firing.late == "update" else ""
    return f"several, {firing.mode}{updates}"
