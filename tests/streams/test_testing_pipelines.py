"""Whole pipelines in the testing kit: the jobs as planned, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import testing
from penstock.core.errors import PipelineError
from penstock.streams.computation import Computation, Context, Record, Timer, Value
from penstock.streams.pipeline import Pipeline

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
        "only Spark computes length(trim(query)) > 0 AND lang <> 'robot', lower(trim(query)) AS query"
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
        (lambda s: s.filter("shop LIKE 'n%'"), "only Spark computes .*LIKE"),
        (lambda s: s.select("reverse(shop) AS shop", "amount"), r"only Spark computes .*everse\(.*AS shop"),
        (lambda s: s.flat_map("explode(split(shop, ' ')) AS word"), r"only Spark computes explode"),
        (lambda s: s.key_by("concat(shop, 'x')").process(SumPerSecond), "only Spark computes .*concat"),
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
    with pytest.raises(PipelineError, match="without Spark on these records"):
        run.record("returns", 1, shop="é", amount=1.0)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda run: run.record("sales", 1, shop="x"), "is not read here"),
        (lambda run: run.record("returns", 1, price=1.0), "has no column 'price'"),
        (lambda run: run.outputs("totals"), "has no sink 'totals'"),
    ],
)
def test_mistakes_are_told(act: Any, said: str) -> None:
    p = Pipeline("shops", partitions=1)
    p.source("returns").sink("copies")
    with pytest.raises(PipelineError, match=said):
        act(testing.PipelineRun(p, RETURNS))
