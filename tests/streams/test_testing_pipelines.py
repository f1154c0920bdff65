"""Whole pipelines in the testing kit: the jobs as planned, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import VectorComputation, session, testing, tumbling
from penstock.core.errors import PipelineError
from penstock.streams.dsl.computation import Computation, Context, Record, Timer, Value
from penstock.streams.dsl.pipeline import Pipeline

ZEITGEIST = Path(__file__).parent.parent.parent / "examples" / "zeitgeist"
SALES = {
    "name": "sales",
    "partitions": 2,
    "columns": [["shop", "string"], ["amount", "double"]],
    "watermark": "event_time",
    "lateness_ms": 1000,
}
RETURNS = {"name": "returns", "partitions": 1, "columns": [["shop", "string"], ["amount", "double"]]}


class SumPerSecond(Computation):
    outputs = {"out": {"shop": "string", "second": "bigint", "total": "double"}}
    sums = Value(dict[int, float])

    def process_record(self, record: Record, ctx: Context) -> None:
        second = record.ts // 1000
        ctx.state.sums[second] = ctx.state.sums.get(second, 0.0) + record["amount"]
        ctx.set_timer(str(second), (second + 1) * 1000)

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        second = int(timer.tag)
        ctx.produce({"shop": ctx.key, "second": second, "total": ctx.state.sums.pop(second)})


def a_queries_day(run: testing.PipelineRun) -> None:
    for ts, query, lang in [
        (100, "Cats", "en"), (200, "cats", "de"), (300, "dogs", "robot"), (900, "dogs", "en"), (1500, "cats", "en"),
    ]:  # fmt: skip
        run.record("queries", ts, query, query=query, lang=lang)
    run.advance_watermark(1000)
    run.record("queries", 1900, "cats", query="cats", lang="en")
    run.record("queries", 500, "cats", query="cats", lang="en")
    run.close()


COUNTS = """
from penstock import Pipeline
from zeitgeist import CountPerSecond

p = Pipeline("counts", partitions=3)
asked = p.source("queries").filter("length(query) > 0 AND lang <> 'robot'").select("lower(query) AS query")
asked.key_by("query").process(CountPerSecond).sink("query_counts")
"""


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    """A file with a pipeline, and beside it the example with the computation."""
    (tmp_path / "zeitgeist.py").write_text((ZEITGEIST / "pipeline.py").read_text())
    (tmp_path / "counts.py").write_text(COUNTS)
    return tmp_path / "counts.py"


def test_a_pipeline_runs_in_memory_as_its_file_says(counts: Path) -> None:
    run = testing.PipelineRun(counts, ZEITGEIST / "queries.json")
    a_queries_day(run)
    found = sorted(tuple(row.values()) for row in run.outputs("query_counts"))
    assert found == [("cats", 0, 2), ("cats", 1, 2), ("dogs", 0, 1)]
    assert {made.ts for made in run.productions("query_counts")} == {999, 1999}


def test_all_that_only_spark_computes_is_named() -> None:
    with pytest.raises(PipelineError) as caught:
        testing.PipelineRun(ZEITGEIST / "pipeline.py", ZEITGEIST / "queries.json")
    assert caught.value.why == (
        "only Spark can compute length(trim(query)) > 0 AND lang <> 'robot', lower(trim(query)) AS query"
    )


def test_a_pipeline_survives_a_crash_after_every_effect_of_every_job() -> None:
    def small() -> testing.PipelineRun:
        p = Pipeline("shops", partitions=1)
        keyed = p.source("returns").filter("amount > 0").key_by("shop")
        keyed.process(SumPerSecond).sink("sums")
        return testing.PipelineRun(p, RETURNS)

    def script(run: testing.PipelineRun) -> None:
        run.record("returns", 100, shop="n", amount=2.0)
        run.record("returns", 200, shop="n", amount=-2.0)
        run.advance_watermark(1000)

    crashed, cut = testing.crash_everywhere(small, script), testing.cut_everywhere(small, script)
    assert crashed.runs > 20 and crashed.result == cut.result
    (made,) = crashed.result["sink 'sums'"]
    assert made.values == {"shop": "n", "second": 0, "total": 2.0}


def test_unions_event_times_and_dead_letters_are_as_in_a_fleet(counts: Path) -> None:
    p = Pipeline("shops", partitions=2)
    refunds = p.source("returns").select("shop", "0.0 - amount AS amount")
    p.source("sales").union(refunds).key_by("shop").process(SumPerSecond).sink("sums")
    run = testing.PipelineRun(p, SALES, RETURNS)
    run.record("sales", 100, "x", shop="n", amount=5.0)
    run.record("returns", 500, shop="n", amount=2.0)
    run.record("sales", 3500, "x", shop="n", amount=1.0)
    assert run.outputs("sums") == []
    run.close()
    assert run.outputs("sums") == [
        {"shop": "n", "second": 0, "total": 3.0},
        {"shop": "n", "second": 3, "total": 1.0},
    ]

    bad = testing.PipelineRun(counts, ZEITGEIST / "queries.json")
    bad._append("queries", 0, {"_ts": 5, "_key": None, "_value": b"no json"})
    (letter,) = bad.dead_letters("queries.dead")
    assert letter["value"] == b"no json" and letter["source_offset"] == 0


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda s: s.filter("shop LIKE 'n%'"), "only Spark can compute .*LIKE"),
        (
            lambda s: s.select("reverse(shop) AS shop", "amount"),
            r"only Spark can compute .*everse\(.*AS shop",
        ),
        (lambda s: s.flat_map("explode(split(shop, ' ')) AS word"), r"only Spark can compute explode"),
        (lambda s: s.key_by("concat(shop, 'x')").process(SumPerSecond), "only Spark can compute .*concat"),
    ],
)
def test_an_expression_that_only_spark_computes_is_named(build: Any, said: str) -> None:
    p = Pipeline("shops", partitions=1)
    build(p.source("returns")).sink("sums")
    with pytest.raises(PipelineError, match=f"(?is){said}"):
        testing.PipelineRun(p, RETURNS)


def test_values_that_only_spark_computes_are_told() -> None:
    p = Pipeline("shops", partitions=1)
    p.source("returns").select("upper(shop) AS shop").sink("shops")
    run = testing.PipelineRun(p, RETURNS)
    with pytest.raises(PipelineError, match="cannot process these records"):
        run.record("returns", 1, shop="é", amount=1.0)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda run: run.record("sales", 1, shop="x"), "is not an input of this run"),
        (lambda run: run.record("returns", 1, price=1.0), "has no column 'price'"),
        (lambda run: run.outputs("so_far"), "has no sink 'so_far'"),
    ],
)
def test_mistakes_are_told(act: Any, said: str) -> None:
    p = Pipeline("shops", partitions=1)
    p.source("returns").sink("copies")
    with pytest.raises(PipelineError, match=said):
        act(testing.PipelineRun(p, RETURNS))


class Totals(VectorComputation):
    """Counts its records per key, over tables."""

    outputs = {"out": {"n": "bigint"}}
    state = {"n": "bigint"}

    def process_batch(self, records: pa.Table, states: pa.Table) -> tuple[pa.Table, dict[str, pa.Table]]:
        known = dict(zip(states.column("_key").to_pylist(), states.column("n").to_pylist(), strict=True))
        stamps = {}
        for key, ts in zip(
            records.column("_key").to_pylist(), records.column("_ts").to_pylist(), strict=True
        ):
            known[key], stamps[key] = known.get(key, 0) + 1, ts
        changed = pa.table({"_key": list(known), "n": pa.array(list(known.values()), pa.int64())})
        counts = pa.array([known[key] for key in stamps], pa.int64())
        made = pa.table({"_key": list(stamps), "_ts": list(stamps.values()), "n": counts})
        return changed, {"out": made}


def every_operator() -> testing.PipelineRun:
    p = Pipeline("shops", partitions=2)
    sales = p.source("sales")
    first = sales.key_by("shop").dedup(within="1s")
    first.sink("first")
    counts = sales.key_by("shop", name="counted").window(tumbling("1s")).aggregate("sum(amount) AS total")
    counts.top(1, by="total").select("shop", "total", "rank").sink("best")
    returns = p.source("returns").select("shop", "amount AS back").key_by("shop", name="returned")
    first.join(returns, within=("0s", "1s"), how="left").sink("pairs")
    sales.key_by("shop", name="for_totals").process(Totals).sink("so_far")
    return testing.PipelineRun(p, SALES, RETURNS)


def a_day_of_sales(run: testing.PipelineRun) -> None:
    with run.batch():
        for ts, shop, amount in [(100, "a", 1.0), (150, "a", 2.0), (900, "b", 2.5), (1200, "a", 7.0)]:
            run.record("sales", ts, shop, shop=shop, amount=amount)
        run.record("returns", 600, "a", shop="a", amount=0.5)
    run.close()


def test_windows_joins_and_the_like_run_in_the_kit():
    run = every_operator()
    a_day_of_sales(run)
    firsts = sorted((row["shop"], row["amount"]) for row in run.outputs("first"))
    assert firsts == [("a", 1.0), ("a", 7.0), ("b", 2.5)]
    best = sorted((row["total"], row["shop"], row["rank"]) for row in run.outputs("best"))
    assert best == [(3.0, "a", 1), (7.0, "a", 1)]
    pairs = sorted((row["shop"], row["amount"], row["back"]) for row in run.outputs("pairs"))
    assert pairs == [("a", 1.0, 0.5), ("a", 7.0, None), ("b", 2.5, None)]
    assert sorted(row["n"] for row in run.outputs("so_far"))[-1] == 3


def test_what_no_version_runs_yet_is_told_when_the_run_is_made():
    p = Pipeline("shops", partitions=2)
    left = p.source("sales").key_by("shop")
    right = p.source("returns").select("shop", "amount AS back").key_by("shop", name="returned")
    left.join(right, window=session(gap="1s")).sink("pairs")
    with pytest.raises(PipelineError, match="cannot be run yet") as caught:
        testing.PipelineRun(p, SALES, RETURNS)
    assert "session windows" in caught.value.why and caught.value.fix
