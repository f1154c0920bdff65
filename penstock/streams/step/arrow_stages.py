"""Computes the stages of a plan with Arrow, where the rows are read. Pure: no JVM, no Spark.

The result is equal to that of Spark; if that is not certain, the batch goes through Spark. If Arrow can
compute the whole plan, the step runs at the source too (`step_at_source`), for the whole range of an
interval: if two workers published parts of it, its records would lose their order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from penstock.streams.bus.log import ARROW_TYPES, key_texts
from penstock.streams.compile.expressions import parse_text
from penstock.streams.step.reading import control_row, row_schema
from penstock.streams.step.step import DATA, DONE, SYSTEM_COLUMNS, TaskDescriptor

Columns = Mapping[str, pa.Array]
Compute = Callable[[Columns], Any]  # an array, or a scalar for all rows

_TEXT = re.compile(r"[ -~]*")
_INTEGRAL = ("int", "bigint")
_COMPARED: dict[type[exp.Expression], Callable[..., Any]] = {
    exp.EQ: pc.equal,
    exp.NEQ: pc.not_equal,
    exp.GT: pc.greater,
    exp.GTE: pc.greater_equal,
    exp.LT: pc.less,
    exp.LTE: pc.less_equal,
}
# An integer overflow stops a task in Spark; Arrow's checked functions raise an error too.
_COUNTED: dict[type[exp.Expression], tuple[Callable[..., Any], Callable[..., Any]]] = {
    exp.Add: (pc.add_checked, pc.add),
    exp.Sub: (pc.subtract_checked, pc.subtract),
    exp.Mul: (pc.multiply_checked, pc.multiply),
}
_CASES = {"upper": pc.ascii_upper, "ucase": pc.ascii_upper, "lower": pc.ascii_lower, "lcase": pc.ascii_lower}
_LENGTHS = ("length", "char_length", "character_length", "len")


class Unsure(Exception):
    """Spark must compute these values."""


class _NoForm(Exception):
    """Only Spark can compute this expression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowExpression:
    """An expression for Arrow with its type. `compute` may raise `Unsure` or pa.ArrowInvalid."""

    type: str
    compute: Compute
    text: str = ""  # of a literal


def in_arrow(text: str, columns: Mapping[str, str]) -> ArrowExpression | None:
    """The expression for Arrow; None if only Spark can compute it. Requires: it passed its checks."""
    if "\\" in text:
        return None  # Spark has its own rules for escapes
    try:
        found = _built(parse_text(text), columns)
    except _NoForm:
        return None
    return None if found.type == "decimal" else found


def as_type(given: ArrowExpression, kind: str) -> ArrowExpression | None:
    """The expression with a CAST; None if only Spark can compute it."""
    try:
        return _cast(given, kind)
    except _NoForm:
        return None


def _built(node: exp.Expression, columns: Mapping[str, str]) -> ArrowExpression:
    match node:
        case exp.Paren():
            return _built(node.this, columns)
        case exp.Column():
            return _column(node, columns)
        case exp.Literal() | exp.Boolean():
            return _literal(node)
        case exp.Neg():
            return _negative(node, columns)
        case exp.Not():
            return _boolean(pc.invert, [_built(node.this, columns)])
        case exp.And():
            return _boolean(pc.and_kleene, _pair(node, columns))
        case exp.Or():
            return _boolean(pc.or_kleene, _pair(node, columns))
        case exp.Is():
            return _is_null(node, columns)
        case exp.In():
            return _among(node, columns)
        case exp.Between():
            return _between(node, columns)
        case exp.Cast():
            return _cast_of(node, columns)
        case exp.Anonymous():
            return _called(node.name.lower(), [_built(given, columns) for given in node.expressions])
    if type(node) in _COMPARED:
        return _compared(_COMPARED[type(node)], *_pair(node, columns))
    if type(node) in _COUNTED:
        return _counted(_COUNTED[type(node)], *_pair(node, columns))
    raise _NoForm


def _pair(node: exp.Expression, columns: Mapping[str, str]) -> list[ArrowExpression]:
    return [_built(node.this, columns), _built(node.args["expression"], columns)]


def _column(node: exp.Column, columns: Mapping[str, str]) -> ArrowExpression:
    name = node.name
    if len(node.parts) != 1 or name not in columns:
        raise _NoForm
    return ArrowExpression(type=columns[name], compute=lambda rows: rows[name])


def _constant(value: Any, kind: str, text: str = "") -> ArrowExpression:
    scalar = pa.scalar(value, ARROW_TYPES[kind])
    return ArrowExpression(type=kind, compute=lambda rows: scalar, text=text)


def _literal(node: exp.Expression) -> ArrowExpression:
    if isinstance(node, exp.Boolean):
        return _constant(bool(node.this), "boolean")
    text = node.name
    if node.args.get("is_string"):
        if _TEXT.fullmatch(text) is None:
            raise _NoForm
        return _constant(text, "string")
    return _number(text)


def _number(text: str) -> ArrowExpression:
    if re.fullmatch(r"-?\d+", text):
        value = int(text)
        if abs(value) < 2**31:
            return _constant(value, "int", text)
        if 2**31 < abs(value) < 2**63:  # -2147483648 can be parsed as a literal or as a negation
            return _constant(value, "bigint", text)
        raise _NoForm
    if re.fullmatch(r"-?\d+\.\d+", text) and len(text) < 18:
        # A decimal: with a double it becomes a double; otherwise only Spark has the rules.
        return ArrowExpression(type="decimal", compute=_never, text=text)
    raise _NoForm


def _never(rows: Columns) -> Any:
    raise AssertionError("decimals are not computed")


def _negative(node: exp.Neg, columns: Mapping[str, str]) -> ArrowExpression:
    inner = _built(node.this, columns)
    if inner.text and not inner.text.startswith("-"):
        return _number(f"-{inner.text}")
    if inner.type not in (*_INTEGRAL, "double"):
        raise _NoForm
    negate = pc.negate if inner.type == "double" else pc.negate_checked
    return ArrowExpression(type=inner.type, compute=lambda rows: negate(inner.compute(rows)))


def _boolean(function: Callable[..., Any], given: Sequence[ArrowExpression]) -> ArrowExpression:
    if any(one.type != "boolean" for one in given):
        raise _NoForm
    return ArrowExpression(
        type="boolean", compute=lambda rows: function(*(one.compute(rows) for one in given))
    )


def _is_null(node: exp.Is, columns: Mapping[str, str]) -> ArrowExpression:
    if not isinstance(node.expression, exp.Null):
        raise _NoForm
    inner = _built(node.this, columns)
    if inner.type == "decimal":
        raise _NoForm
    return ArrowExpression(type="boolean", compute=lambda rows: pc.is_null(inner.compute(rows)))


def _common(left: ArrowExpression, right: ArrowExpression) -> str:
    kinds = {left.type, right.type}
    if len(kinds) == 1 and kinds <= {"string", "int", "bigint", "double"}:
        return left.type
    if kinds == set(_INTEGRAL):
        return "bigint"
    if "double" in kinds and kinds <= {"double", "int", "bigint", "decimal"}:
        return "double"
    raise _NoForm


def _compared(
    function: Callable[[Any, Any], Any], left: ArrowExpression, right: ArrowExpression
) -> ArrowExpression:
    kind = _common(left, right)
    one, other = _cast(left, kind).compute, _cast(right, kind).compute
    if kind == "double":  # NaN equals itself and is the largest value in Spark, but not in Arrow
        return ArrowExpression(
            type="boolean", compute=lambda rows: function(_numbers(one(rows)), _numbers(other(rows)))
        )
    return ArrowExpression(type="boolean", compute=lambda rows: function(one(rows), other(rows)))


def _numbers(values: Any) -> Any:
    if isinstance(values, pa.Array) and pc.any(pc.is_nan(values)).as_py():
        raise Unsure
    return values


def _counted(
    functions: tuple[Callable[..., Any], Callable[..., Any]], left: ArrowExpression, right: ArrowExpression
) -> ArrowExpression:
    kind = _common(left, right)
    if kind == "string":
        raise _NoForm
    function = functions[kind == "double"]
    one, other = _cast(left, kind).compute, _cast(right, kind).compute
    return ArrowExpression(type=kind, compute=lambda rows: function(one(rows), other(rows)))


def _among(node: exp.In, columns: Mapping[str, str]) -> ArrowExpression:
    present = {name for name, value in node.args.items() if value}
    if present != {"this", "expressions"}:
        raise _NoForm
    value = _built(node.this, columns)
    found = [_compared(pc.equal, value, _built(one, columns)) for one in node.expressions]
    return reduce(lambda left, right: _boolean(pc.or_kleene, [left, right]), found)


def _between(node: exp.Between, columns: Mapping[str, str]) -> ArrowExpression:
    if node.args.get("symmetric"):
        raise _NoForm
    value = _built(node.this, columns)
    low = _compared(pc.greater_equal, value, _built(node.args["low"], columns))
    high = _compared(pc.less_equal, value, _built(node.args["high"], columns))
    return _boolean(pc.and_kleene, [low, high])


def _cast_of(node: exp.Cast, columns: Mapping[str, str]) -> ArrowExpression:
    kinds = {"TEXT": "string", "BIGINT": "bigint", "INT": "int", "DOUBLE": "double", "BOOLEAN": "boolean"}
    kind = kinds.get(node.to.this.name)
    if kind is None or node.to.expressions:
        raise _NoForm
    if isinstance(node.this, exp.Null):
        nothing = pa.scalar(None, ARROW_TYPES[kind])
        return ArrowExpression(type=kind, compute=lambda rows: nothing)
    return _cast(_built(node.this, columns), kind)


def _cast(given: ArrowExpression, kind: str) -> ArrowExpression:
    if given.type == kind:
        return given
    if given.type == "decimal" and kind == "double":
        return _constant(float(given.text), kind)
    if (given.type, kind) not in {
        ("int", "bigint"),
        ("int", "double"),
        ("bigint", "double"),
        ("int", "string"),
        ("bigint", "string"),
        ("boolean", "string"),
    }:
        raise _NoForm
    target = ARROW_TYPES[kind]
    return ArrowExpression(type=kind, compute=lambda rows: given.compute(rows).cast(target))


def _called(name: str, given: Sequence[ArrowExpression]) -> ArrowExpression:
    kinds = [one.type for one in given]
    if name in _CASES and kinds == ["string"]:
        change = _CASES[name]
        return ArrowExpression(type="string", compute=lambda rows: change(_ascii(given[0].compute(rows))))
    if name in _LENGTHS and kinds == ["string"]:
        return ArrowExpression(type="int", compute=lambda rows: pc.utf8_length(given[0].compute(rows)))
    if name in ("isnull", "isnotnull") and len(given) == 1 and "decimal" not in kinds:
        ask = pc.is_null if name == "isnull" else pc.is_valid
        return ArrowExpression(type="boolean", compute=lambda rows: ask(given[0].compute(rows)))
    if name in ("coalesce", "nvl", "ifnull") and len(set(kinds)) == 1 and "decimal" not in kinds:
        return ArrowExpression(
            type=kinds[0], compute=lambda rows: pc.coalesce(*(one.compute(rows) for one in given))
        )
    raise _NoForm


def _ascii(values: Any) -> Any:
    if isinstance(values, pa.Array) and pc.all(pc.string_is_ascii(values)).as_py() is False:
        raise Unsure
    return values


_SYSTEM = [name for name, _ in SYSTEM_COLUMNS]
_Stage = Callable[[pa.RecordBatch], pa.RecordBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowPlan:
    """A plan that Arrow can compute; `columns`: of its output."""

    stages: tuple[_Stage, ...]
    columns: tuple[tuple[str, str], ...]

    def run(self, rows: pa.RecordBatch) -> list[pa.RecordBatch] | None:
        """The output rows; None: Spark must compute them. Control rows pass unchanged."""
        is_data = pc.equal(rows.column("_kind"), DATA)
        data = pc.sum(is_data).as_py() or 0
        if not data:
            return [self._passed(rows)]
        try:
            if data == rows.num_rows:
                return [self._worked(rows)]
            others = self._passed(rows.filter(pc.invert(is_data)))
            return [self._worked(rows.filter(is_data)), others]
        except (Unsure, pa.ArrowInvalid):
            return None

    def _worked(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        for stage in self.stages:
            rows = stage(rows)
        return rows

    def _passed(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        own = {name: pa.nulls(rows.num_rows, ARROW_TYPES[kind]) for name, kind in self.columns}
        return _with_own(rows, own)


def plan_in_arrow(plan: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> ArrowPlan | None:
    """The plan for Arrow; None if only Spark can compute it. Requires: it passed its checks."""
    return _planned(json.dumps(plan), tuple(columns))


@lru_cache(maxsize=64)
def _planned(text: str, columns: tuple[tuple[str, str], ...]) -> ArrowPlan | None:
    plan = json.loads(text)
    if plan.get("branches") or _is_per_record(plan.get("computation")):
        return None
    stages = list(plan["stages"])
    if plan.get("key"):
        stages.append({"op": "key", "expr": plan["key"]})
    made: list[_Stage] = []
    for stage in stages:
        found = _stage(stage, dict(columns))
        if found is None:
            return None
        made.append(found)
        if stage["op"] == "select":
            columns = tuple((name, kind) for name, _, kind in stage["columns"])
    return ArrowPlan(stages=tuple(made), columns=columns)


def _is_per_record(computation: Mapping[str, Any] | None) -> bool:
    return computation is not None and "class" in computation and not computation.get("vectorised")


def _stage(stage: Mapping[str, Any], columns: Mapping[str, str]) -> _Stage | None:
    if stage["op"] == "filter":
        return _filter(in_arrow(stage["expr"], columns))
    if stage["op"] == "key":
        return _key(in_arrow(stage["expr"], columns))
    if stage["op"] == "select":
        made = {name: _typed(expr, kind, columns) for name, expr, kind in stage["columns"]}
        return _select(made)
    return None


def _typed(text: str, kind: str, columns: Mapping[str, str]) -> ArrowExpression | None:
    found = in_arrow(text, columns)
    return None if found is None else as_type(found, kind)


def _filter(condition: ArrowExpression | None) -> _Stage | None:
    if condition is None:
        return None
    # NULL drops the row, as in Spark.
    return lambda rows: rows.filter(_as_array(condition, rows))


def _key(key: ArrowExpression | None) -> _Stage | None:
    text = None if key is None else as_type(key, "string")
    if text is None:
        return None
    place = _SYSTEM.index("_key")

    def run(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.set_column(place, "_key", key_texts(_as_array(text, rows)))

    return run


def _select(made: Mapping[str, ArrowExpression | None]) -> _Stage | None:
    known = {name: one for name, one in made.items() if one is not None}
    if len(known) != len(made):
        return None
    return lambda rows: _with_own(rows, {name: _as_array(one, rows) for name, one in known.items()})


def _as_array(expression: ArrowExpression, rows: pa.RecordBatch) -> pa.Array:
    found = expression.compute(dict(zip(rows.schema.names, rows.columns, strict=True)))
    return found if isinstance(found, pa.Array) else pa.repeat(found, rows.num_rows)


def _with_own(rows: pa.RecordBatch, own: Mapping[str, pa.Array]) -> pa.RecordBatch:
    system = [rows.column(name) for name in _SYSTEM]
    return pa.RecordBatch.from_arrays([*system, *own.values()], names=[*_SYSTEM, *own])


# --- a step at the source ---------------------------------------------------------------------------------

Step = Callable[[Iterator[pa.RecordBatch]], pa.RecordBatch]


def shortcut(task: TaskDescriptor) -> ArrowPlan | None:
    """The task's plan for Arrow, if its step can run at the source."""
    if len(task.inputs) != 1 or not (task.kind == "stateless" or _is_operator(task)):
        return None
    return plan_in_arrow(task.plan, task.inputs[0].columns)


def _is_operator(task: TaskDescriptor) -> bool:
    """True for operators and vectorised computations: they use Arrow tables."""
    computation = task.plan.get("computation") or {}
    return "operator" in computation or bool(computation.get("vectorised"))


def step_at_source(
    task: TaskDescriptor, rows: Iterator[pa.RecordBatch], plan: ArrowPlan, step: Step
) -> Iterator[pa.RecordBatch]:
    """One row with the report of `step`; or the unchanged rows, if Spark must compute the plan."""
    read: list[pa.RecordBatch] = []
    made: list[pa.RecordBatch] = []
    for batch in rows:
        read.append(batch)
        found = plan.run(batch)
        if found is None:
            yield from read
            yield from rows
            return
        made += found
    (report,) = step(iter(made)).to_pylist()
    yield control_row(row_schema(task), DONE, report)
