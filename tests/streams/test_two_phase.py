"""An aggregate in two phases gives the results of one phase, and no partition has all records of a hot key."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock import Pipeline, session, sliding, testing, tumbling
from penstock.core.errors import PipelineError
from penstock.jobs.config import validate_config
from penstock.jobs.provision import state_conflict
from penstock.streams.compile.drawing import draw_plan
from penstock.streams.compile.graph import AggregateStep, Graph
from penstock.streams.compile.plan import compile_graph
from penstock.streams.dsl.windows import Spans
from tests.builders import config_of
from tests.streams.plans import CATALOGUE, PACKAGE, compiled, jobs_of

SALES = {
    "name": "sales",
    "partitions": 2,
    "columns": [
        ["shop", "string"],
        ["till", "int"],
        ["amount", "double"],
        ["word", "string"],
        ["n", "bigint"],
    ],
}
VALUES = (
    *("count(*) AS records", "count(amount) AS amounts", "sum(amount) AS total", "avg(amount) AS mean"),
    *("min(word) AS first", "max(amount) AS most", "sum(n) AS ns", "avg(n) AS mean_n"),
    *("approx_count_distinct(word) AS words", "approx_percentile(amount, 0.5) AS middle"),
)


def a_run(spans: Spans, *, two_phase: bool) -> testing.PipelineRun:
    p = Pipeline("shops", partitions=2)
    windows = p.source("sales").filter("till > 0").key_by("shop").window(spans)
    windows.aggregate(*VALUES, two_phase=two_phase).sink("per_till")
    return testing.PipelineRun(p, SALES)


def a_script(seed: int, run: testing.PipelineRun) -> None:
    """Most records are of one key; some have no values at all, some come too late."""
    draw = random.Random(seed)
    for low in (10, 45):
        with run.batch():
            some_records(draw, run, low)
            run.advance_watermark(low)
            some_records(draw, run, low)
    run.close()


def some_records(draw: random.Random, run: testing.PipelineRun, low: int) -> None:
    for _ in range(12):
        shop = draw.choice(["hot"] * 4 + ["cold", "other", None])
        word = draw.choice([None, "a", "b", "ä", ""])
        amount = draw.choice([None, 0.1, 1e300, -1e300, 1e-300, 7.25, float("inf")])
        ts, key = max(0, low + draw.randrange(-10, 40)), draw.choice("xyz")
        till, n = draw.choice([0, 1, 1, 1, 2]), draw.choice([None, 5, -(2**40)])
        run.record("sales", ts, key, shop=shop, till=till, word=word, amount=amount, n=n)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("spans", [tumbling(20), sliding(30, every=10)], ids=["tumbling", "sliding"])
def test_two_phases_give_the_results_of_one(spans: Spans, seed: int):
    results = []
    for two_phase in (False, True):
        run = a_run(spans, two_phase=two_phase)
        a_script(seed, run)
        results.append(sorted(run.productions("per_till"), key=repr))
    assert len(results[0]) > 5 and results[0] == results[1]


def test_a_hot_key_is_the_work_of_all_partitions():
    run = a_run(tumbling(1000), two_phase=True)
    with run.batch():
        for n in range(30):
            run.record("sales", n, "x", shop="hot", till=1, amount=1.0, word="w", n=1)
    run.close()
    (spread,) = (spec for spec in run.trial.log.categories() if "_spread." in spec.spec.name)
    assert run.trial.log.end_offsets(spread.spec.name) == (15, 15)
    (partial,) = (spec for spec in run.trial.log.categories() if "_partial." in spec.spec.name)
    assert sorted(run.trial.log.end_offsets(partial.spec.name)) == [0, 2]
    (row,) = run.outputs("per_till")
    assert (row["shop"], row["records"]) == ("hot", 30)


def counted(p: Pipeline, **words: Any) -> Pipeline:
    windows = p.source("queries").key_by("query").window(tumbling("10s"))
    windows.aggregate("count(*) AS n", **words).sink("counts")
    return p


def test_the_plan_says_what_was_taken_apart():
    drawn = draw_plan(compiled(counted(Pipeline("p"), two_phase=True)))
    for words in (
        "in turn to all partitions",
        "in each partition",
        "of partial results",
        "two phases: aggregate",
    ):
        assert words in drawn
    jobs = jobs_of(counted(Pipeline("p"), two_phase=True))
    assert list(jobs) == ["p.aggregate_spread", "p.aggregate_partial", "p.aggregate"]
    stored = {name: validate_config(name, job).to_json()["plan"] for name, job in jobs.items()}
    assert [plan.get("spread") for plan in stored.values()] == [True, None, None]
    # State of one phase is not that of two.
    (_, whole), other = jobs_of(counted(Pipeline("p"))).items(), jobs["p.aggregate"]
    assert "'combine'" in state_conflict(config_of(whole[1]), config_of(other))


def test_others_that_read_the_window_and_the_key_keep_them():
    p = Pipeline("p")
    windows = p.source("queries").key_by("query").window(tumbling("10s"))
    windows.aggregate("count(*) AS n", two_phase=True, name="hot").sink("a")
    windows.aggregate("max(ts) AS last", name="cold").sink("b")
    windows.aggregate("min(ts) AS first", two_phase=True, name="hot_partial").sink("c")
    jobs = jobs_of(p)
    assert {"p.by_query", "p.cold", "p.hot_spread", "p.hot_partial_2", "p.hot", "p.hot_partial"} <= set(jobs)
    # Both that are spread read one shuffle.
    assert jobs["p.hot_partial_2"]["inputs"] == jobs["p.hot_partial_partial"]["inputs"]
    assert compile_graph(p.graph(), CATALOGUE, PACKAGE, optimized=False).jobs


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        (session(gap="1s"), {}),
        (tumbling("10s"), {"early": "1s"}),
        (tumbling("10s"), {"late": "update", "lateness": "1s"}),
    ],
    ids=["session", "early", "late"],
)
def test_what_cannot_be_taken_apart_is_told(spans: Spans, words: dict[str, Any]):
    p = Pipeline("p")
    windows = p.source("queries").key_by("query").window(spans, **words)
    windows.aggregate("count(*) AS n", two_phase=True).sink("counts")
    with pytest.raises(PipelineError, match="cannot have two phases") as caught:
        compiled(p)
    assert caught.value.why and "two_phase=" in caught.value.fix


def test_two_phase_is_yes_or_no():
    with pytest.raises(PipelineError, match="two_phase=8") as caught:
        counted(Pipeline("p"), two_phase=8)
    assert caught.value.why and caught.value.fix


def test_the_graph_that_is_shown_is_the_one_that_was_written():
    graph: Graph = compiled(counted(Pipeline("p"), two_phase=True)).graph
    (step,) = (step for step in graph.steps if isinstance(step, AggregateStep))
    assert step.two_phase and not step.phase
