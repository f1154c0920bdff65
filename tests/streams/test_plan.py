"""Pipelines become jobs: where they are cut, what is carried, how things are called, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock.core.errors import ConfigError
from penstock.jobs.config import validate_config
from penstock.streams.catalogue import StaticCatalogue, category_from_json
from penstock.streams.compile.packages import load_pipeline
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.dsl.pipeline import Pipeline
from tests.streams.plans import (
    EXAMPLE,
    PACKAGE,
    QUERIES,
    Count,
    Watch,
    a_pipeline,
    compiled,
    jobs_of,
    out_of,
)

# --- the example ---------------------------------------------------------------------------------------------------


def test_the_example_compiles_to_exactly_these_jobs():
    catalogue = StaticCatalogue([category_from_json(json.loads((EXAMPLE / "queries.json").read_text()))])
    answer = compile_pipeline(load_pipeline(EXAMPLE / "pipeline.py"), catalogue, PACKAGE).to_json()
    package = {"name": "zeitgeist", "version": "1", "hash": "ab" * 32, "entry": "pipeline.py"}
    assert answer["pipeline"] == "zeitgeist" and answer["package"] == package
    assert answer["jobs"] == [
        {
            "name": "zeitgeist.by_query",
            "pipeline": "zeitgeist",
            "kind": "stateless",
            "package": package,
            "partitions": 6,
            "inputs": [{"category": "queries", "start": "earliest"}],
            "outputs": [
                {
                    "stream": "out",
                    "category": "zeitgeist.by_query.96ab69a9",
                    "partitions": 6,
                    "columns": [["query", "string"]],
                    "internal": True,
                    "format": "typed",
                },
                {
                    "stream": "dead",
                    "category": "queries.dead",
                    "partitions": 6,
                    "columns": [
                        ["reason", "string"],
                        ["value", "binary"],
                        ["source_partition", "int"],
                        ["source_offset", "bigint"],
                    ],
                    "internal": False,
                    "format": "typed",
                },
            ],
            "plan": {
                "stages": [
                    {"op": "filter", "expr": "length(trim(query)) > 0 AND lang <> 'robot'"},
                    {"op": "select", "columns": [["query", "lower(trim(query))", "string"]]},
                ],
                "key": "query",
                "computation": None,
                "late": "process",
                "reads": [["query", "lang", "ts"]],
            },
        },
        {
            "name": "zeitgeist.count_per_second",
            "pipeline": "zeitgeist",
            "kind": "stateful",
            "package": package,
            "partitions": 6,
            "inputs": [
                {
                    "category": "zeitgeist.by_query.96ab69a9",
                    "start": "earliest",
                    "writer": "zeitgeist.by_query",
                }
            ],
            "outputs": [
                {
                    "stream": "out",
                    "category": "query_counts",
                    "partitions": 6,
                    "columns": [["query", "string"], ["second", "bigint"], ["count", "bigint"]],
                    "internal": False,
                    "format": "typed",
                }
            ],
            "plan": {
                "stages": [],
                "key": None,
                "computation": {
                    "class": "CountPerSecond",
                    "keys": ["query"],
                    "state": {"counts": "dict[int, int]"},
                },
                "late": "drop",
                "reads": [["query"]],
            },
        },
    ]
    assert [node["name"] for node in answer["graph"]["nodes"]] == [
        "queries",
        "filter",
        "select",
        "by_query",
        "count_per_second",
        "query_counts",
    ]
    assert answer["graph"]["edges"][0] == {"from": "queries", "to": "filter", "stream": "out"}
    assert answer["graph"]["nodes"][-1]["jobs"] == ["zeitgeist.count_per_second"]


# --- where jobs are cut --------------------------------------------------------------------------------------------


def test_stateless_steps_are_one_job_named_after_the_sink():
    p = a_pipeline()
    p.source("queries", start="latest").filter("ts > 0").select("query", "ts + 1 AS t").sink(
        "out", partitions=5
    )
    (job,) = jobs_of(p).values()
    assert (job["name"], job["kind"], job["partitions"]) == ("p.out", "stateless", 3)
    assert job["inputs"] == [{"category": "queries", "start": "latest"}]
    assert out_of(job) == {
        "stream": "out",
        "category": "out",
        "partitions": 5,
        "columns": [["query", "string"], ["t", "bigint"]],
        "internal": False,
        "format": "typed",
    }
    assert job["plan"]["key"] is None


def test_only_a_json_source_has_dead_letters_in_as_many_partitions_as_it_has():
    p = a_pipeline()
    p.source("queries").sink("a")
    p.source("events").sink("b")
    jobs = jobs_of(p)
    assert out_of(jobs["p.a"], "dead")["category"] == "queries.dead"
    assert out_of(jobs["p.a"], "dead")["partitions"] == 3
    assert [output["stream"] for output in jobs["p.b"]["outputs"]] == ["out"]


def test_steps_between_key_and_computation_run_before_the_shuffle_where_they_can():
    p = a_pipeline()
    keyed = p.source("queries").key_by("query")
    keyed.filter("ts > 0").select("query", "upper(lang) AS lang").process(Count).sink("counts")
    jobs = jobs_of(p)
    assert jobs["p.by_query"]["plan"]["stages"] == [
        {"op": "filter", "expr": "ts > 0"},
        {"op": "select", "columns": [["query", "query", "string"], ["lang", "upper(lang)", "string"]]},
    ]
    assert jobs["p.count"]["plan"]["stages"] == []


def test_steps_that_cannot_go_before_the_shuffle_run_in_the_stateful_job():
    p = a_pipeline()
    keyed = p.source("queries").key_by("query")
    keyed.select("upper(query) AS query").filter("query <> 'A'").process(Count).sink("counts")
    jobs = jobs_of(p)
    assert jobs["p.by_query"]["plan"]["stages"][-1]["columns"] == [["query", "`query`", "string"]]
    assert [stage["op"] for stage in jobs["p.count"]["plan"]["stages"]] == ["select", "filter"]


def test_steps_behind_a_computation_are_a_further_job():
    p = a_pipeline()
    p.source("queries").key_by("query").process(Count).filter("n > 1").sink("big")
    jobs = jobs_of(p)
    assert list(jobs) == ["p.by_query", "p.count", "p.big"]
    between = out_of(jobs["p.count"])
    assert between["internal"] and between["category"].startswith("p.count.")
    read = {"category": between["category"], "start": "earliest", "writer": "p.count"}
    assert jobs["p.big"]["inputs"] == [read]
    assert jobs["p.big"]["plan"]["key"] is None  # keyed as the computation produced it


def test_computations_in_a_row_each_have_their_shuffle():
    p = a_pipeline()
    watched = p.source("queries").key_by("query").process(Count).key_by("n").process(Watch)
    watched["alerts"].sink("alerts")
    watched["counts"].sink("counts", partitions=2)
    jobs = jobs_of(p)
    assert list(jobs) == ["p.by_query", "p.count", "p.by_n", "p.watch"]
    assert jobs["p.by_n"]["inputs"][0]["category"] == out_of(jobs["p.count"])["category"]
    assert out_of(jobs["p.watch"], "counts")["partitions"] == 2
    assert out_of(jobs["p.watch"], "alerts")["category"] == "alerts"
    assert jobs["p.watch"]["plan"]["late"] == "process"


def test_streams_with_the_same_columns_have_categories_of_their_own():
    p = a_pipeline()
    watched = p.source("queries").key_by("query").process(Watch)
    watched["alerts"].filter("n > 1").sink("a")
    watched["counts"].filter("n > 1").sink("b")
    job = jobs_of(p)["p.watch"]
    assert out_of(job, "alerts")["category"] != out_of(job, "counts")["category"]


def test_a_stream_with_a_sink_is_read_from_there():
    p = a_pipeline()
    counted = p.source("queries").key_by("query").process(Count)
    counted.sink("counts", partitions=6)
    counted.filter("n > 1").sink("big")
    counted.sink("copy")
    jobs = jobs_of(p)
    assert list(jobs) == ["p.by_query", "p.count", "p.big", "p.copy"]
    for name in ("p.big", "p.copy"):
        assert jobs[name]["inputs"][0]["category"] == "counts" and jobs[name]["partitions"] == 6
    assert jobs["p.copy"]["plan"]["stages"] == []


def test_branches_of_a_source_are_jobs_of_their_own():
    p = a_pipeline()
    english = p.source("queries").filter("lang = 'en'")
    english.select("query").sink("a")
    english.key_by("query").process(Count).sink("b")
    jobs = jobs_of(p)
    assert list(jobs) == ["p.a", "p.by_query", "p.count"]
    assert jobs["p.a"]["plan"]["stages"][0] == jobs["p.by_query"]["plan"]["stages"][0]


def test_two_computations_behind_one_key_share_the_shuffle():
    p = a_pipeline()
    keyed = p.source("queries").key_by("query")
    keyed.select("query").process(Count, name="one").sink("a")
    keyed.select("ts").process(Count, name="two").sink("b")
    jobs = jobs_of(p)
    assert list(jobs) == ["p.by_query", "p.one", "p.two"]
    assert out_of(jobs["p.by_query"])["columns"] == [["query", "string"], ["ts", "bigint"]]
    assert jobs["p.one"]["inputs"] == jobs["p.two"]["inputs"]


def test_a_key_before_a_sink_needs_no_shuffle():
    p = a_pipeline()
    p.source("queries").key_by("query").filter("ts > 0").select("query", "ts").sink("by_query_out")
    (job,) = jobs_of(p).values()
    assert job["plan"]["key"] == "query" and job["name"] == "p.by_query_out"


def test_a_key_whose_columns_are_lost_before_the_sink_is_computed_on_the_way():
    p = a_pipeline()
    p.source("queries").key_by("query").select("lang").sink("langs")
    (job,) = jobs_of(p).values()
    assert job["plan"]["key"] is None
    assert job["plan"]["stages"] == [
        {"op": "key", "expr": "query"},
        {"op": "select", "columns": [["lang", "lang", "string"]]},
    ]
    assert job["plan"]["reads"] == [["query", "lang", "ts"]]


def test_only_the_last_of_several_keys_counts():
    p = a_pipeline()
    p.source("queries").key_by("lang").filter("ts > 0").key_by("query", "ts").process(Count).sink("counts")
    jobs = jobs_of(p)
    assert list(jobs) == ["p.by_query_ts", "p.count"]
    assert jobs["p.by_query_ts"]["plan"]["key"] == "to_json(array(CAST(query AS string), CAST(ts AS string)))"


# --- what is carried -----------------------------------------------------------------------------------------------


def test_a_shuffle_carries_only_what_is_used_behind_it_and_the_key():
    p = a_pipeline()
    keyed = (
        p.source("queries").select("query", "lang", "ts", "score * 2 AS double_score").key_by("lower(lang)")
    )
    keyed.filter("ts > 0").select("query AS q").process(Count).sink("counts")
    job = jobs_of(p)["p.by_lower_lang"]
    assert out_of(job)["columns"] == [["query", "string"], ["lang", "string"]]
    first, *_ = job["plan"]["stages"]
    assert [name for name, _, _ in first["columns"]] == ["query", "lang", "ts"]  # a filter uses ts


def test_a_column_used_only_by_a_filter_ends_there():
    p = a_pipeline()
    keyed = p.source("queries").select("query", "lang", "ts").filter("lang = 'en'").key_by("query")
    keyed.select("query").process(Count).sink("counts")
    job = jobs_of(p)["p.by_query"]
    assert [stage["op"] for stage in job["plan"]["stages"]] == ["select", "filter", "select"]
    assert [name for name, _, _ in job["plan"]["stages"][0]["columns"]] == ["query", "lang"]
    assert job["plan"]["stages"][2]["columns"] == [["query", "query", "string"]]
    assert out_of(job)["columns"] == [["query", "string"]]


def test_a_computation_uses_every_column_that_reaches_it():
    p = a_pipeline()
    p.source("queries").key_by("query").process(Count).sink("counts")
    job = jobs_of(p)["p.by_query"]
    assert out_of(job)["columns"] == [list(column) for column in QUERIES.columns]
    assert job["plan"]["stages"] == []


# --- names ---------------------------------------------------------------------------------------------------------


def internal_name(key="query", partitions=4, columns=("query", "ts"), condition="ts > 0"):
    p = a_pipeline(partitions)
    stream = p.source("queries").filter(condition).select(*columns)
    stream.key_by(key, name="k").process(Count).sink("counts")
    return out_of(jobs_of(p)["p.k"])["category"]


def test_partitions_columns_and_key_are_part_of_an_internal_name():
    names = [
        internal_name(),
        internal_name(partitions=5),
        internal_name(columns=("query", "ts", "lang")),
        internal_name(columns=("ts", "query")),
        internal_name(columns=("query", "CAST(ts AS string) AS ts")),
        internal_name(key="ts"),
        internal_name(key="lower(query)"),
    ]
    assert len(set(names)) == len(names)
    assert all(name.startswith("p.k.") and len(name) == len("p.k.") + 8 for name in names)


def test_edits_that_change_no_record_layout_keep_every_name():
    assert internal_name() == internal_name(condition="ts > 100")
    assert internal_name(key="lower(query)") == internal_name(key="LOWER( query ) /* folded */")
    plain = a_pipeline()
    plain.source("queries").key_by("query").process(Count).sink("counts")
    edited = a_pipeline()
    edited.source("queries").filter("ts > 0").filter("ts > 1").key_by("query").process(Count).sink("counts")
    assert list(jobs_of(plain)) == list(jobs_of(edited))
    assert out_of(jobs_of(plain)["p.by_query"]) == out_of(jobs_of(edited)["p.by_query"])


def test_the_same_pipeline_compiles_to_the_same_json():
    assert internal_name() == internal_name()
    p = a_pipeline()
    p.source("queries").key_by("query").process(Count).sink("counts")
    assert json.dumps(compiled(p).to_json()) == json.dumps(compiled(p).to_json())


def test_every_job_is_a_valid_config_and_reads_what_was_written_before():
    p = a_pipeline()
    watched = p.source("queries").key_by("query").process(Watch)
    watched["alerts"].select("query").sink("alerts")
    watched["counts"].key_by("n").process(Count).sink("counts")
    written = {"queries"}
    for job in compiled(p).to_json()["jobs"]:
        config = validate_config(job["name"], job)
        assert config.inputs[0].category in written
        written |= {output.category for output in config.outputs}
        assert json.loads(json.dumps(job)) == job


# --- several inputs ------------------------------------------------------------------------------------------------


def a_union():
    p = a_pipeline()
    queries = p.source("queries").filter("ts > 0").select("query AS text")
    queries.union(p.source("events", start="latest").select("user AS text")).key_by("text").sink("texts")
    return jobs_of(p)["p.texts"]


def test_a_union_is_one_job_with_a_branch_for_each_input():
    job = a_union()
    assert job["inputs"] == [
        {"category": "queries", "start": "earliest"},
        {"category": "events", "start": "latest"},
    ]
    assert job["partitions"] == 3  # of queries, the larger one
    assert [branch["input"] for branch in job["plan"]["branches"]] == [0, 1]
    assert job["plan"]["reads"] == [["query", "ts"], ["user"]]
    assert (job["plan"]["stages"], job["plan"]["key"]) == ([], "text")
    assert [output["stream"] for output in job["outputs"]] == ["out", "dead"]  # events are typed
    assert validate_config(job["name"], job).to_json()["plan"]["branches"] == job["plan"]["branches"]


def test_each_json_input_has_dead_letters_of_its_own():
    p = Pipeline("p")
    p.source("one").union(p.source("two")).sink("out")
    catalogue = StaticCatalogue([replace(QUERIES, name=name) for name in ("one", "two")])
    outputs = jobs_of(p, catalogue)["p.out"]["outputs"]
    assert [(output["stream"], output["category"]) for output in outputs[1:]] == [
        ("dead", "one.dead"),
        ("dead.1", "two.dead"),
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputs": [{"category": "queries"}] * 2}, "a category is listed twice"),
        ({"inputs": [{"category": "queries"}]}, "each branch an input"),
        ({"plan": {"branches": []}}, "each input needs a branch"),
        ({"plan": {"reads": [["query"]]}}, "one list of columns for each input"),
        ({"plan": {"branches": [{"input": 0}, {"input": 99}]}}, "branches"),
        ({"plan": {"stages": [{"op": "explode", "array": "a", "type": "t", "columns": []}]}}, "columns"),
    ],
)
def test_inputs_and_branches_that_do_not_fit_are_refused(change, said):
    job = a_union()
    plan = {**job["plan"], **change.pop("plan", {})}
    with pytest.raises(ConfigError) as caught:
        validate_config(job["name"], {**job, **change, "plan": plan})
    assert said in str(caught.value)
