"""What a graph, and what the jobs it compiles to, make of records: slow, in plain Python, and independent of both.

A record is (key, columns). A computation is stood in for by one that tells what it was given: for each record its
key and a text of its columns, so that a wrong key, column or record shows in what comes out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlglot
from sqlglot import exp

from penstock.streams.compile.graph import (
    FilterStep,
    FlatMapStep,
    Graph,
    KeyByStep,
    ProcessStep,
    SelectStep,
    SinkStep,
    SourceStep,
    UnionStep,
)

Record = tuple[str | None, dict[str, Any]]


def value_of(node: exp.Expression, row: Mapping[str, Any]) -> Any:
    """A small part of SQL, with its three-valued logic."""
    match node:
        case exp.Paren():
            return value_of(node.this, row)
        case exp.Column():
            return row[node.name]
        case exp.Literal():
            return node.name if node.is_string else int(node.name)
        case exp.Null():
            return None
        case exp.And() | exp.Or():
            left, right = value_of(node.this, row), value_of(node.expression, row)
            decisive = isinstance(node, exp.Or)
            if decisive in (left, right):
                return decisive
            return None if left is None or right is None else not decisive
        case exp.Not():
            value = value_of(node.this, row)
            return None if value is None else not value
        case exp.Is():
            return value_of(node.this, row) is None
        case exp.Cast():
            value = value_of(node.this, row)
            return None if value is None else str(value)
    values = [
        value_of(child, row) for child in (node.expressions or [node.this, node.args.get("expression")])
    ]
    name = node.name.lower() if isinstance(node, exp.Anonymous) else ""
    if name == "array":
        return values
    if name == "to_json":
        return repr(values)
    if name == "coalesce":
        return next((value for value in values if value is not None), None)
    if None in values:
        return None
    calls: dict[Any, Any] = {
        "upper": lambda: values[0].upper(),
        "concat": lambda: "".join(map(str, values)),
        "split": lambda: values[0].split(values[1]),
        exp.Add: lambda: values[0] + values[1],
        exp.GT: lambda: values[0] > values[1],
        exp.LT: lambda: values[0] < values[1],
        exp.EQ: lambda: values[0] == values[1],
        exp.NEQ: lambda: values[0] != values[1],
    }
    return calls[name or type(node)]()


def evaluated(text: str, row: Mapping[str, Any]) -> Any:
    """The value of an expression, whose name is left out."""
    node = sqlglot.parse_one(text, dialect=_plain_functions())
    return value_of(node.this if isinstance(node, exp.Alias) else node, row)


def _plain_functions() -> Any:
    from penstock.streams.compile.expressions import SparkExpressions

    return SparkExpressions


def name_of(text: str) -> str:
    return text.rpartition(" AS ")[2] if " AS " in text else text


def key_text(keys: Sequence[str], row: Mapping[str, Any]) -> str:
    values = [evaluated(key, row) for key in keys]
    texts = [None if value is None else str(value) for value in values]
    return (texts[0] or "") if len(texts) == 1 else repr([texts])


def told(key: str | None, row: Mapping[str, Any]) -> dict[str, Any]:
    """What the stand-in for a computation produces for a record."""
    return {"query": f"{key}|{sorted(row.items())!r}", "n": len(row)}


def run_graph(graph: Graph, inputs: Mapping[str, Sequence[Record]]) -> dict[str, Counter[str]]:
    """What each sink holds: the steps as they are written, one after the other."""
    made: dict[str, list[Record]] = {}
    sinks: dict[str, Counter[str]] = {}
    for step in graph.ordered():
        given = [record for edge in graph.inputs_of(step.name) for record in made[edge.source]]
        match step:
            case SourceStep():
                made[step.name] = list(inputs[step.category])
            case FilterStep():
                made[step.name] = [record for record in given if evaluated(step.condition, record[1])]
            case SelectStep():
                made[step.name] = [
                    (key, {name_of(text): evaluated(text, row) for text in step.columns})
                    for key, row in given
                ]
            case FlatMapStep():
                made[step.name] = list(_exploded(step.generator, given))
            case UnionStep():
                made[step.name] = given
            case KeyByStep():
                made[step.name] = [(key_text(step.keys, row), row) for _, row in given]
            case ProcessStep():
                made[step.name] = [(key, told(key, row)) for key, row in given]
            case SinkStep():
                sinks[step.category] = bag(given)
    return sinks


def _exploded(generator: str, given: Iterable[Record]) -> Iterable[Record]:
    name, array = name_of(generator), generator.partition("(")[2].rpartition(")")[0]
    for key, row in given:
        for element in evaluated(array, row) or ():
            yield key, {**row, name: element}


def run_jobs(
    jobs: Sequence[Mapping[str, Any]], inputs: Mapping[str, Sequence[Record]]
) -> dict[str, Counter[str]]:
    """What each sink holds: the jobs' JSON as the engine would run it."""
    categories = {name: list(records) for name, records in inputs.items()}
    for job in jobs:
        plan, given = job["plan"], []
        reads = {
            number: [
                (key, {name: row[name] for name in plan["reads"][number]})
                for key, row in categories[source["category"]]
            ]
            for number, source in enumerate(job["inputs"])
        }
        for branch in plan.get("branches") or [{"input": 0, "stages": []}]:
            given += _staged(branch["stages"], reads[branch["input"]])
        records = _staged(plan["stages"], given)
        if plan["key"]:
            records = [(_plain(evaluated(plan["key"], row)), row) for _, row in records]
        if plan["computation"]:
            records = [(key, told(key, row)) for key, row in records]
        out = next(output for output in job["outputs"] if not output["category"].endswith(".dead"))
        names = [name for name, _ in out["columns"]]
        categories[out["category"]] = [(key, {name: row[name] for name in names}) for key, row in records]
    written = {output["category"] for job in jobs for output in job["outputs"] if not output["internal"]}
    return {name: bag(records) for name, records in categories.items() if name in written}


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


def _staged(stages: Sequence[Mapping[str, Any]], given: list[Record]) -> list[Record]:
    for stage in stages:
        match stage["op"]:
            case "filter":
                given = [record for record in given if evaluated(stage["expr"], record[1])]
            case "select":
                given = [
                    (key, {name: evaluated(text, row) for name, text, _ in stage["columns"]})
                    for key, row in given
                ]
            case "explode":
                ((name, _),) = stage["columns"]
                given = [
                    (key, {**row, name: element})
                    for key, row in given
                    for element in evaluated(stage["array"], row) or ()
                ]
            case "key":
                given = [(_plain(evaluated(stage["expr"], row)), row) for _, row in given]
    return given


def bag(records: Iterable[Record]) -> Counter[str]:
    """Records regardless of their order, nulls included."""
    return Counter(repr((key, sorted(row.items()))) for key, row in records)
