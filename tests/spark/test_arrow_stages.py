"""What Arrow computes at the source is what Spark computes: value by value, stage by stage, and in a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bench.stateless import CATEGORY
from penstock.streams.bus.log import ARROW_TYPES
from penstock.streams.spark.query import apply_stages
from penstock.streams.step.arrow_stages import in_arrow, plan_in_arrow
from penstock.streams.step.reading import schema_of
from penstock.streams.step.step import BAD, BEGIN, DATA, END
from tests.streams.arrow_cases import COLUMNS, EXPRESSIONS, ROWS, batch
from tests.support.stage import Stage, wait_for

PLAN = {
    "stages": [
        {"op": "filter", "expr": "s <> 'ping' OR d > 1"},
        {
            "op": "select",
            "columns": [["kind", "upper(s)", "string"], ["twice", "d * 2", "double"], ["n", "n", "bigint"]],
        },
        {"op": "filter", "expr": "n IS NULL OR n <> 9"},
    ],
    "key": "n",
}
LOUD = """
from penstock import Pipeline

p = Pipeline("loud", partitions=2)
p.source("events").filter("kind <> 'ping'").select("user", "upper(kind) AS kind", "amount * 2 AS twice").sink("loud")
"""


def test_every_expression_gives_what_spark_gives(spark: Any):
    rows = batch()
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    frame = spark.createDataFrame(pa.Table.from_batches([rows])).coalesce(1)
    theirs = frame.selectExpr(*(f"{text} AS c{n}" for n, text in enumerate(EXPRESSIONS))).collect()
    for number, text in enumerate(EXPRESSIONS):
        expression = in_arrow(text, dict(COLUMNS))
        assert expression is not None
        found = expression.compute(columns)
        ours = found.to_pylist() if isinstance(found, pa.Array) else [found.as_py()] * len(ROWS)
        # As text: -0.0 equals 0.0.
        assert [repr(value) for value in ours] == [repr(row[number]) for row in theirs], text


def _rows_between() -> pa.RecordBatch:
    """Data, and the rows around it, as a source gives them."""
    data = batch()
    kinds = [BEGIN, *[DATA] * data.num_rows, BAD, END]
    schema, count = schema_of(COLUMNS), len(kinds)
    given = {
        "_kind": pa.array(kinds, pa.int8()),
        "_input": pa.array([0] * count, pa.int8()),
        "_offset": pa.array(range(count), pa.int64()),
        "_key": pa.array(["k"] * count, pa.string()),
        "_bad": pa.array([None] * (count - 2) + ["why", None], pa.string()),
    }
    for name, kind in COLUMNS:
        given[name] = pa.array([None, *data.column(name).to_pylist(), None, None], ARROW_TYPES[kind])
    arrays = [given[field.name] if field.name in given else pa.nulls(count, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def test_a_plan_makes_the_same_rows(spark: Any):
    rows, plan = _rows_between(), plan_in_arrow(PLAN, COLUMNS)
    assert plan is not None
    frame = spark.createDataFrame(pa.Table.from_batches([rows])).coalesce(1)
    theirs = [row.asDict() for row in apply_stages(frame, PLAN).collect()]
    made = plan.run(rows)
    assert made is not None
    ours = sorted((row for part in made for row in part.to_pylist()), key=lambda row: row["_offset"])
    assert [repr(list(row.items())) for row in ours] == [repr(list(row.items())) for row in theirs]


def test_both_give_a_key_the_same_text(spark: Any):
    """NULL, '' and what looks like the text of NULL, from a filter on, so that Spark may put stages together."""
    values = [None, "", "[null]", "[[null]", "[null]\n", "x[null]", '[null,"a"]', "null", "$1", "ß[null]"]
    plan = {"stages": [{"op": "filter", "expr": "s IS NULL OR s <> 'x'"}], "key": "s"}
    columns = (("s", "string"),)
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array([*values, "elsewhere"])
            if field.name in ("s", "_key")
            else pa.array([*[DATA] * len(values), BAD], pa.int8())
            if field.name == "_kind"
            else pa.array(range(len(values) + 1), pa.int64())
            if field.name == "_offset"
            else pa.nulls(len(values) + 1, field.type)
            for field in schema_of(columns)
        ],
        schema=schema_of(columns),
    )
    in_arrow_ = plan_in_arrow(plan, columns)
    assert in_arrow_ is not None
    made = in_arrow_.run(rows)
    assert made is not None
    ours = {row["_offset"]: row["_key"] for part in made for row in part.to_pylist()}
    frame = spark.createDataFrame(pa.Table.from_batches([rows])).coalesce(1)
    theirs = {row["_offset"]: row["_key"] for row in apply_stages(frame, plan).collect()}
    assert ours == theirs
    assert list(ours.values())[:4] == ["[null]", "", "[[null]", "[[[null]"]
    assert ours[len(values)] == "elsewhere"


@pytest.fixture
def stage(spark: Any, tmp_path: Path) -> Stage:
    path = tmp_path / "loud.py"
    path.write_text(LOUD)
    return Stage(spark, tmp_path, path, CATEGORY)


@pytest.mark.smoke
def test_a_stream_takes_either_way_and_each_record_once(stage: Stage):
    """Batches that Arrow works on, one with a letter that only Spark can capitalise, and records that do not
    parse, over two lives of the task.
    """
    words = ["view", "ping", "straße", "buy", None, "ŉ"]
    rounds = [words[:2], words, words[3:5], [*words[:1], "look"]]
    sent: list[tuple[int, str | None]] = []
    injector = stage.injector("events")
    for number, kinds in enumerate(rounds):
        first = len(sent)
        sent += [(first + place, kind) for place, kind in enumerate(kinds * 50)]
        values = [
            json.dumps({"user": "u", "kind": kind, "amount": n, "ts": n}).encode() for n, kind in sent[first:]
        ]
        values[7] = b"{"
        injector.publish(["k"] * len(values), [n for n, _ in sent[first:]], values)
        ids = stage.start("loud.loud", epoch=number + 1)
        wait_for(lambda: _lag(stage) == 0, "all to be read")
        stage.stop(ids)
    lost = {sum(len(kinds) * 50 for kinds in rounds[:number]) + 7 for number in range(len(rounds))}
    expected = [(kind.upper(), n * 2.0) for n, kind in sent if kind not in (None, "ping") and n not in lost]
    assert [(row["kind"], row["twice"]) for row in stage.records("loud")] == expected
    (dead,) = (name for category in stage.log.categories() if "dead" in (name := category.spec.name))
    assert [row["value"] for row in stage.records(dead)] == [b"{"] * len(rounds)


def _lag(stage: Stage) -> float | None:
    (view,) = stage.tasks.poll()
    assert view.state not in ("failed", "fenced"), view.error
    return view.metrics.get("lag_records")
