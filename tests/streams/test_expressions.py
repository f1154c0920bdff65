"""Spark SQL text is accepted with the type Spark gives it, or refused with what, why and what to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import PipelineError
from penstock.streams.bus.log import ARROW_TYPES
from penstock.streams.compile.expressions import check_filter, check_key, check_select
from penstock.streams.compile.functions import DENIED, FUNCTIONS

COLUMNS = (
    ("query", "string"),
    ("lang", "string"),
    ("ts", "bigint"),
    ("n", "int"),
    ("d", "double"),
    ("f", "float"),
    ("ok", "boolean"),
    ("raw", "binary"),
)


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("lower(query)", "string"),
        ("trim(BOTH ' ' FROM query)", "string"),
        ("substring(query, 1, 3)", "string"),
        ("query || '-' || ts", "string"),
        ("length(query)", "int"),
        ("n + 1", "int"),
        ("n + ts", "bigint"),
        ("ts DIV 1000", "bigint"),
        ("ts / 1000", "double"),
        ("ts % 1000", "bigint"),
        ("f + f", "float"),
        ("f + n", "double"),  # as Spark: a float cannot hold every int
        ("d * 1.5", "double"),
        ("-n", "int"),
        ("3000000000", "bigint"),
        ("1e3", "double"),
        ("5L", "bigint"),
        ("CAST(1.5 AS double)", "double"),
        ("ts::string", "string"),
        ("bigint(query)", "bigint"),
        ("CASE WHEN ok THEN n ELSE ts END", "bigint"),
        ("CASE lang WHEN 'en' THEN 1 END", "int"),
        ("if(ok, query, NULL)", "string"),
        ("coalesce(n, ts, 0)", "bigint"),
        ("nvl2(ok, n, d)", "double"),
        ("nullif(query, '')", "string"),
        ("split(query, ' ')[0]", "string"),
        ("split(query, ' ')", "array<string>"),
        ("size(split(query, ' '))", "int"),
        ("round(d, 2)", "double"),
        ("floor(d)", "bigint"),
        ("sha2(raw, 256)", "string"),
        ("unhex(query)", "binary"),
        ("date_format(timestamp_millis(ts), 'yyyy-MM-dd')", "string"),
        ("hour(timestamp_millis(ts))", "int"),
        ("EXTRACT(YEAR FROM timestamp_millis(ts))", "int"),
        ("query LIKE 'a%' AND NOT ok", "boolean"),
        ("n BETWEEN 1 AND ts", "boolean"),
        ("lang IN ('en', 'de')", "boolean"),
        ("ok IS TRUE OR query IS NOT NULL", "boolean"),
    ],
)
def test_the_type_is_the_one_spark_gives(text, type_):
    name, checked = check_select(f"{text} AS x", COLUMNS)
    assert (name, checked.text, checked.type) == ("x", text, type_)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lower(qeury) AS q", ["no column 'qeury'", "query (string)", "did you mean 'query'"]),
        ("Query AS q", ["no column 'Query'", "did you mean 'query'"]),
        ("query.x AS q", ["no column 'query.x'"]),
        ("_ts AS t", ["'_ts' cannot be used", "reserved for system columns"]),
        ("query AS _q", ["cannot be named '_q'", "reserved for system columns"]),
        ("length(query)", ["has no name", 'write "length(query) AS name"']),
        ("*", ["'*' cannot be used", "must be listed"]),
        ("query AS (a, b)", ["has no name"]),
        ("lower(query AS q", ["does not parse", "')' is missing", "column 16"]),
        ("n + = 1 AS x", ["does not parse", "column 5", "    n + = 1 AS x\n        ^"]),
        ("query AS a, lang AS b", ["does not parse", "','", "column 11"]),
        ("'open AS x", ["does not parse", "never closed"]),
        ("cast(ts AS int AS x", ["does not parse", "never closed"]),
        ("query; DROP TABLE x", ["not one expression", "';'"]),
        ("   ", ["empty"]),
        ("x" * 10_001, ["10001 characters"]),
        ("count(*) AS c", ["count() cannot", "many records", ".key_by(...)"]),
        ("sum(DISTINCT n) AS c", ["sum() cannot", "many records"]),
        ("max(n) FILTER (WHERE ok) AS c", ["many records"]),
        ("row_number() OVER (PARTITION BY n) AS c", ["a window needs many records"]),
        ("explode(split(query, ' ')) AS w", ["explode() cannot", "several records from one"]),
        ("(SELECT 1) AS x", ["a query cannot be used"]),
        ("SELECT 1", ["a query cannot be used"]),
        ("rand() AS r", ["rand() cannot", "retried", "the same"]),
        ("uuid() AS r", ["uuid() cannot", "retried"]),
        ("current_timestamp AS t", ["cannot be used", "retried"]),
        ("now() AS t", ["now() cannot", "retried"]),
        ("monotonically_increasing_id() AS i", ["retried"]),
        ("unix_timestamp() AS t", ["does not take 0 arguments"]),
        ("reflect('java.lang.System', 'exit') AS x", ["reflect() cannot", "outside of the record"]),
        ("java_method('java.lang.System', 'exit') AS x", ["outside of the record"]),
        ("input_file_name() AS x", ["cannot be used"]),
        ("lowr(query) AS x", ["lowr() is not known", "did you mean lower()"]),
        ("transform(split(query, ' '), w -> upper(w)) AS x", ["cannot be used in a step"]),
        ("lower(ts) AS x", ["needs string", "ts is bigint", "CAST(ts AS string)"]),
        ("query + 1 AS x", ["needs a number", "query is string", "CAST(query AS double)"]),
        ("coalesce(query, 5) AS x", ["different types: string, int", "CAST"]),
        ("if(ok, n) AS x", ["third argument"]),
        ("left(query) AS x", ["does not take 1 argument", "left(string, int or bigint)"]),
        ("CAST(raw AS int) AS x", ["binary cannot be cast to int"]),
        ("CAST(n AS array<int>) AS x", ["CAST to ARRAY<INT>"]),
        ("n[0] AS x", ["needs an array"]),
        ("d DIV 2 AS x", ["needs int or bigint", "CAST(d AS bigint)"]),
        ("nullif(n, ok) AS x", ["int and boolean cannot be compared"]),
        ("array_contains(split(query, ' '), 5) AS x", ["string and int cannot be compared"]),
        ("round(d, n) AS x", ["a number written out", "Spark takes no column"]),
        ("element_at(split(query, ' '), ts) AS x", ["needs int as argument 2", "CAST(ts AS int)"]),
        ("nvl2(ok, n, query) AS x", ["different types: int, string"]),
        ("1.5 AS x", ["has type decimal", "wrap it in CAST(1.5 AS double)"]),
        (
            "timestamp_millis(ts) AS x",
            ["has type timestamp", "wrap it in CAST(timestamp_millis(ts) AS string)"],
        ),
        ("NULL AS x", ["not known", "wrap it in CAST(NULL AS type)"]),
        ("array(1.5) AS x", ["has type array<decimal>", "wrap it in CAST"]),
        ("'${env:HOME}' AS x", ["cannot hold '${'", "also inside quotes"]),
    ],
)
def test_a_mistake_is_told_in_three_parts(text, said):
    with pytest.raises(PipelineError) as caught:
        check_select(text, COLUMNS)
    error = caught.value
    assert error.what and error.why and error.fix
    for words in said:
        assert words in str(error)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("query", ["is not a condition", "type is string"]),
        ("lang = 5", ["string and int cannot be compared", "CAST(5 AS string)"]),
        ("lang IN ('en', 5)", ["cannot be compared"]),
        ("n IN (SELECT 1)", ["a query cannot be used"]),
        ("EXISTS (SELECT 1)", ["a query cannot be used"]),
        ("NOT n", ["needs boolean", "n is int"]),
        ("ok en", ["a condition has no name", "'en'"]),
        ("ok AND", ["does not parse", "something is missing"]),
        ("DROP TABLE x", ["cannot be used"]),
    ],
)
def test_a_condition_must_be_one(text, said):
    with pytest.raises(PipelineError) as caught:
        check_filter(text, COLUMNS)
    assert caught.value.what and caught.value.why and caught.value.fix
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize("text", ["query", "n", "ts", "ok", "lower(query)", "ts DIV 60000"])
def test_strings_whole_numbers_and_booleans_are_keys(text):
    assert check_key([text], COLUMNS).text == text


@pytest.mark.parametrize("text", ["d", "f", "raw", "ts / 2"])
def test_what_has_no_stable_text_is_no_key(text):
    with pytest.raises(PipelineError, match="cannot be a key") as caught:
        check_key([text], COLUMNS)
    assert "could go to different partitions" in caught.value.why
    assert "bigint" in caught.value.fix


def test_a_key_makes_no_column():
    with pytest.raises(PipelineError, match="a key has no name"):
        check_key(["query AS q"], COLUMNS)


def test_several_keys_become_one_text_without_a_separator_to_confuse():
    key = check_key(["query", "n"], COLUMNS)
    assert key.text == "to_json(array(CAST(query AS string), CAST(n AS string)))"
    assert key.columns == {"query", "n"}


def test_only_columns_that_are_read_are_noted():
    _, checked = check_select("CASE WHEN ok THEN lower(query) END AS x", COLUMNS)
    assert checked.columns == {"ok", "query"}


def test_spaces_comments_and_case_do_not_change_the_normal_form():
    one = check_filter("length(query)>0 and lang='en'", COLUMNS)
    other = check_filter("  LENGTH( query ) > 0  /* not empty */ AND lang = 'en' -- english", COLUMNS)
    assert one.normal == other.normal
    assert one.normal != check_filter("length(query) > 0 AND lang = 'EN'", COLUMNS).normal


def test_a_comment_cannot_swallow_what_spark_puts_behind_the_text():
    assert check_filter("ok -- yes", COLUMNS).text == "ok"
    assert check_select("lower(query) /* x */ -- y\n AS q", COLUMNS)[1].text == "lower(query)"


def test_no_function_is_both_allowed_and_denied():
    assert not FUNCTIONS.keys() & DENIED.keys()


@given(st.text(max_size=40))
def test_any_text_is_accepted_or_refused_by_name(text):
    """Whatever a user writes: a checked expression or a PipelineError, nothing else."""
    try:
        _, checked = check_select(text, COLUMNS)
    except PipelineError as error:
        assert error.why and error.fix
    else:
        assert checked.type in ARROW_TYPES


@given(
    st.lists(
        st.sampled_from(
            ["query", "ts", "(", ")", "lower", ",", "+", "'a'", "AS", "x", "=", "1", "NOT", "[", "]", "."]
        )
    )
)
def test_any_pile_of_words_is_accepted_or_refused_by_name(words):
    try:
        check_select(" ".join(words), COLUMNS)
    except PipelineError as error:
        assert error.why and error.fix
