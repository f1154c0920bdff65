"""Mistakes in pipelines are told in three parts; plans can be drawn, categories described."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from penstock import session, tumbling
from penstock.core.errors import ConfigError, NotFound, PipelineError
from penstock.streams.bus.log import CategorySpec
from penstock.streams.catalogue import StaticCatalogue, category_from_json, category_to_json
from penstock.streams.compile.drawing import WIDTH, draw_plan
from penstock.streams.compile.graph import CodeLocation, Edge, FilterStep, Graph, SinkStep, SourceStep
from penstock.streams.compile.plan import compile_graph
from tests.streams.plans import (
    CATALOGUE,
    EVENTS,
    PACKAGE,
    QUERIES,
    Count,
    Watch,
    a_pipeline,
    compiled,
    jobs_of,
    out_of,
)

# --- mistakes ------------------------------------------------------------------------------------------------------


def _process_without_key(p):
    p.source("queries").filter("ts > 0").process(Count).sink("counts")


def topped(p, spans, *, by="n", per=(), select=(), early=None):
    windows = p.source("queries").key_by("query").window(spans, early=early)
    results = windows.aggregate("count(*) AS n")
    (results.select(*select) if select else results).top(3, by=by, per=per).sink("x")


def counted(keyed, value):
    keyed.window(tumbling("10s")).aggregate(value).sink("x")


MISTAKES = {
    "empty": (lambda p: None, ["is empty", "p.source"]),
    "unknown category": (
        lambda p: p.source("querys").sink("x"),
        ["no category 'querys'", "did you mean 'queries'"],
    ),
    "nothing like it": (
        lambda p: p.source("zzz").sink("x"),
        ["the bus has: events, queries", "create the category"],
    ),
    "no sink": (lambda p: p.source("queries"), ["nothing reads step 'queries'", '.sink("<category>")']),
    "no sink after filter": (lambda p: p.source("queries").filter("ts > 0"), ["nothing reads step 'filter'"]),
    "one branch ends": (
        lambda p: [p.source("queries").key_by("query").process(Watch)["alerts"].sink("a")],
        ["nothing reads stream 'counts' of step 'watch'", '.stream("counts").sink'],
    ),
    "no key": (
        _process_without_key,
        ["have no key", "runs per key", '.key_by("<column>") before .process(Count)'],
    ),
    "unknown column": (
        lambda p: p.source("queries").filter("lnag = 'en'").sink("x"),
        ["step 'filter'", "no column 'lnag'", "lang (string)", "did you mean 'lang'"],
    ),
    "column dropped before": (
        lambda p: p.source("queries").select("query").filter("ts > 0").sink("x"),
        ["no column 'ts'", "the columns here are query (string)"],
    ),
    "column of another stream": (
        lambda p: p.source("queries").key_by("query").process(Count).filter("lang = 'en'").sink("x"),
        ["no column 'lang'", "query (string), n (bigint)"],
    ),
    "syntax": (
        lambda p: p.source("queries").filter("ts >").sink("x"),
        ["does not parse", "something is missing"],
    ),
    "aggregate": (
        lambda p: p.source("queries").select("count(*) AS n").sink("x"),
        ["count() cannot be used"],
    ),
    "clock": (
        lambda p: p.source("queries").select("now() AS t").sink("x"),
        ["now() cannot be used", "retried"],
    ),
    "column twice": (lambda p: p.source("queries").select("ts", "ts").sink("x"), ["two columns named 'ts'"]),
    "column twice but for case": (
        lambda p: p.source("queries").select("ts", "ts AS TS").sink("x"),
        ["two columns named 'TS'", "ignores the case"],
    ),
    "odd column name": (lambda p: p.source("queries").select("ts AS `a b`").sink("x"), ["'a b'", '"a_b"']),
    "float key": (
        lambda p: p.source("queries").key_by("score").process(Count).sink("x"),
        ["'score' cannot be a key", "double", "bigint"],
    ),
    "key with a time zone": (
        lambda p: p.source("queries").key_by("timestamp_millis(ts)").sink("x"),
        ["cannot be a key: it is timestamp", "time zone", "unix_millis(timestamp_millis(ts))"],
    ),
    "array key": (
        lambda p: p.source("queries").key_by("split(query, ' ')").sink("x"),
        ["cannot be a key: it is array<string>", "array_join"],
    ),
    "date key": (
        lambda p: p.source("queries").key_by("to_date(query)").sink("x"),
        ["it is date", "unix_date"],
    ),
    "decimal key": (lambda p: p.source("queries").key_by("ts * 1.5").sink("x"), ["it is decimal", "bigint"]),
    "binary key": (lambda p: p.source("queries").key_by("unhex(query)").sink("x"), ["it is binary", "hex("]),
    "no array": (
        lambda p: p.source("queries").flat_map("explode(query) AS w").sink("x"),
        ["'query' is not an array: it is string", "split(query, ' ')"],
    ),
    "no generator": (
        lambda p: p.source("queries").flat_map("split(query, ' ') AS w").sink("x"),
        ["is not a generator", 'write "explode(array) AS name"'],
    ),
    "unknown column in a generator": (
        lambda p: p.source("queries").flat_map("explode(split(qery, ' ')) AS w").sink("x"),
        ["no column 'qery'", "did you mean 'query'"],
    ),
    "generator without a name": (
        lambda p: p.source("queries").flat_map("explode(split(query, ' '))").sink("x"),
        ["makes 1 column, and names 0"],
    ),
    "position without a name": (
        lambda p: p.source("queries").flat_map("posexplode(split(query, ' ')) AS w").sink("x"),
        ["makes 2 columns, and names 1", "(position, name)"],
    ),
    "generator takes a name that is there": (
        lambda p: p.source("queries").flat_map("explode(split(query, ' ')) AS lang").sink("x"),
        ["two columns named 'lang'"],
    ),
    "union of different columns": (
        lambda p: p.source("queries").select("query").union(p.source("events").select("user")).sink("x"),
        [
            "'select' and 'select_2' have different columns",
            "query string",
            "user string",
            "not matched automatically",
        ],
    ),
    "union of different types": (
        lambda p: p.source("queries").select("ts AS n").union(p.source("events").select("n")).sink("x"),
        ["different columns", "n bigint", "n int"],
    ),
    "one category from two places": (
        lambda p: p.source("queries").union(p.source("queries", name="late", start="latest")).sink("x"),
        ["read from two places at once", "'earliest'", "'latest'"],
    ),
    "window without a key": (
        lambda p: p.source("queries").window(tumbling("1s")).aggregate("count(*) AS n").sink("x"),
        ["have no key", ".key_by"],
    ),
    "dedup without a key": (
        lambda p: p.source("queries").dedup(within="1h").sink("x"),
        ["have no key", ".key_by", ".dedup("],
    ),
    "top of records": (
        lambda p: p.source("queries").select("ts AS window_start").top(3, by="window_start").sink("x"),
        ["results of an aggregate", ".aggregate("],
    ),
    "top of changed windows": (
        lambda p: topped(p, tumbling("1s"), select=("n", "window_start + 1 AS window_start", "window_end")),
        ["window_start and window_end as they are"],
    ),
    "top of sessions": (lambda p: topped(p, session(gap="1s")), ["the same for all keys", "tumbling"]),
    "top of early results": (lambda p: topped(p, tumbling("1m"), early="1s"), ["one result"]),
    "top by an unknown column": (
        lambda p: topped(p, tumbling("1s"), by="nn"),
        ["no column 'nn'", "did you mean 'n'"],
    ),
    "top per an unknown column": (
        lambda p: topped(p, tumbling("1s"), per="lnag"),
        ["no column 'lnag'"],
    ),
    "top takes a name that is there": (
        lambda p: topped(p, tumbling("1s"), select=("n AS rank", "window_start", "window_end"), by="rank"),
        ["two columns named 'rank'"],
    ),
    "key that has no name": (
        lambda p: counted(p.source("queries").key_by("lower(query)"), "count(*) AS n"),
        ["the key 'lower(query)'", "has no name", "lower(query) AS name"],
    ),
    "key that is changed": (
        lambda p: counted(
            p.source("queries").key_by("query").select("upper(query) AS query"), "count(*) AS n"
        ),
        ["key column 'query'", "dropped or changed"],
    ),
    "sum of text": (
        lambda p: counted(p.source("queries").key_by("query"), "sum(lang) AS n"),
        ["sum()", "lang is string"],
    ),
    "no aggregate": (
        lambda p: counted(p.source("queries").key_by("query"), "lower(lang) AS n"),
        ["LOWER(lang) cannot be computed per window"],
    ),
    "unknown aggregate": (
        lambda p: counted(p.source("queries").key_by("query"), "cuont(lang) AS n"),
        ["did you mean count()?"],
    ),
    "DISTINCT": (
        lambda p: counted(p.source("queries").key_by("query"), "count(DISTINCT lang) AS n"),
        ["without DISTINCT", "approx_count_distinct"],
    ),
    "quantile": (
        lambda p: counted(p.source("queries").key_by("query"), "approx_percentile(score, 50) AS n"),
        ["cannot take 50.0", "0.5"],
    ),
    "value without a name": (
        lambda p: counted(p.source("queries").key_by("query"), "count(*)"),
        ["has no name", '"count(*) AS name"'],
    ),
    "join without a key": (
        lambda p: p.source("queries").join(p.source("events").key_by("user"), within=(0, "1s")).sink("x"),
        ["have no key", "on both sides"],
    ),
    "ambiguous column": (
        lambda p: (
            p.source("queries")
            .key_by("query")
            .join(p.source("events").select("user", "n AS ts").key_by("user"), within=(0, "1s"))
            .sink("x")
        ),
        ["column 'ts' is ambiguous", "right_ts"],
    ),
    "keys of other types": (
        lambda p: (
            p.source("queries").key_by("query").join(p.source("events").key_by("n"), within=(0, 5)).sink("x")
        ),
        ["do not fit: string and int", "same types"],
    ),
    "unknown key": (
        lambda p: p.source("queries").key_by("quer").process(Count).sink("x"),
        ["no column 'quer'", "did you mean 'query'"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_three_parts(mistake):
    build, said = MISTAKES[mistake]
    p = a_pipeline()
    build(p)
    with pytest.raises(PipelineError) as caught:
        compiled(p)
    error = caught.value
    assert error.what and error.why and error.fix
    assert error.what.startswith("test_plan_mistakes.py:") or mistake == "empty"
    for words in said:
        assert words in str(error)


def test_a_computation_right_behind_another_needs_a_key_too():
    p = a_pipeline()
    watched = p.source("queries").key_by("query").process(Count).filter("n > 1").process(Watch)
    watched["alerts"].sink("a")
    watched["counts"].sink("b")
    with pytest.raises(PipelineError, match="'watch' processes records that have no key"):
        compiled(p)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (CategorySpec(name="x", partitions=4, columns=(("query", "string"),)), []),
        (
            CategorySpec(name="x", partitions=4, columns=(("q", "string"),)),
            ["other columns", "q string", "query string"],
        ),
        (
            CategorySpec(name="x", partitions=9, columns=(("query", "string"),)),
            ["9 partitions, not 4", "partitions=9"],
        ),
        (
            CategorySpec(name="x", partitions=4, columns=(("query", "string"),), format="json"),
            ["from outside"],
        ),
        (
            CategorySpec(name="x", partitions=4, columns=(("query", "string"),), watermark="injector"),
            ["from outside"],
        ),
    ],
)
def test_a_sink_that_exists_must_fit(there, said):
    p = a_pipeline()
    p.source("queries").select("query").sink("x")
    catalogue = StaticCatalogue([QUERIES, there])
    if not said:
        assert out_of(jobs_of(p, catalogue)["p.x"])["category"] == "x"
        return
    with pytest.raises(PipelineError) as caught:
        compiled(p, catalogue)
    for words in said:
        assert words in str(caught.value)


def test_what_no_job_may_have_is_refused_when_the_pipeline_is_compiled():
    p = a_pipeline()
    p.source("queries").select(*(f"ts + {n} AS n{n}" for n in range(1001))).sink("wide")
    with pytest.raises(PipelineError, match="does not compile to valid job configs") as caught:
        compiled(p)
    assert "at most 1000 items" in caught.value.why and len(caught.value.why) < 1000


def test_a_graph_from_elsewhere_may_not_run_in_a_circle():
    place = CodeLocation(file="x.sql", line=1)
    graph = Graph(
        name="p",
        partitions=1,
        steps=(
            SourceStep(name="s", place=place, category="queries"),
            FilterStep(name="a", place=place, condition="ts > 0"),
            FilterStep(name="b", place=place, condition="ts > 0"),
            SinkStep(name="x", place=place, category="x"),
        ),
        edges=(
            Edge(source="b", target="a"),
            Edge(source="a", target="b"),
            Edge(source="s", target="x"),
        ),
    )
    with pytest.raises(PipelineError, match="has a cycle") as caught:
        compile_graph(graph, CATALOGUE, PACKAGE)
    assert caught.value.why and caught.value.fix


# --- drawing and catalogue -----------------------------------------------------------------------------------------


def test_the_drawing_fits_and_names_every_job_and_category():
    p = a_pipeline()
    watched = p.source("queries").filter(" AND ".join(["lang = 'en'"] * 20)).key_by("query").process(Watch)
    watched["alerts"].select("query").sink("alerts")
    watched["counts"].sink("counts")
    answer = compiled(p)
    drawn = draw_plan(answer)
    assert all(len(line) <= WIDTH for line in drawn.splitlines())
    for job in answer.jobs:
        assert job.name in drawn and all(output.category in drawn for output in job.outputs)
    order = [drawn.index(f"┌─ {job.name} ") for job in answer.jobs]
    assert all(before < after for before, after in pairwise(order))


def test_a_category_survives_json():
    assert category_from_json(json.loads(json.dumps(category_to_json(QUERIES)))) == QUERIES


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colums": []}, "did you mean 'columns'"),
        ({"columns": [["_x", "string"]]}, "'_x'"),
        ({"columns": [["x", "text"]]}, "'text'"),
        ({"columns": 5}, "not complete"),
    ],
)
def test_a_wrong_description_of_a_category_is_refused(change, said):
    with pytest.raises(ConfigError, match="category") as caught:
        category_from_json({**category_to_json(EVENTS), **change})
    assert said in str(caught.value)


def test_a_missing_category_lists_what_there_is():
    with pytest.raises(NotFound) as caught:
        CATALOGUE.describe("event")
    assert "did you mean 'events'" in str(caught.value) and "queries" in str(caught.value)
