"""A key that is NULL is a key of its own: in groups, dedup, top and computations; in a join it is equal to none."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import testing, tumbling
from penstock.streams.bus.log import NULL_KEY, has_null_part, key_texts, key_values
from penstock.streams.dsl.computation import Computation, Context, Record, Value
from penstock.streams.dsl.pipeline import Pipeline
from penstock.streams.dsl.sql import pipeline_from_sql
from penstock.streams.operators.windowed import key_columns_of

EVENTS = {
    "name": "events",
    "partitions": 2,
    "columns": [["name", "string"], ["n", "bigint"], ["yes", "boolean"]],
    "watermark": "injector",
}
OTHERS = EVENTS | {"name": "others"}
NAMES = [None, "", None, "a", "", "[null]", None, "[[null]"]

Texts = st.lists(
    st.one_of(
        st.none(), st.text(max_size=4), st.from_regex(r"\[{0,3}null\]", fullmatch=True), st.just("[null]\n")
    )
)


@given(values=Texts)
def test_each_value_of_a_key_has_a_text_of_its_own_and_comes_back(values: list[str | None]):
    texts = key_texts(pa.array(values, pa.string()))
    assert not texts.null_count
    assert key_values(texts).to_pylist() == values
    assert len(set(texts.to_pylist())) == len(set(values))
    for value, text in zip(values, texts.to_pylist(), strict=True):
        assert text == value or text in (NULL_KEY, f"[{value}")


def test_no_key_but_null_and_what_looks_like_it_has_another_text_than_before():
    """What is stored under its key is found again: '' is '', and so are texts with brackets."""
    kept = ["", "a", "null", "null]", "[null", "[null] ", '[null,"a"]', "x[null]", "[NULL]", "[]null]"]
    assert key_texts(pa.array(kept)).to_pylist() == kept
    assert key_texts(pa.array([None, "[null]", "[[null]"])).to_pylist() == ["[null]", "[[null]", "[[[null]"]


def test_which_keys_have_null_in_them():
    single = pa.array([NULL_KEY, "", "[[null]", "null"])
    assert has_null_part(single, 1).tolist() == [True, False, False, False]
    several = pa.array(['[null,"a"]', '["null","a"]', '["",","]', '["a",null]', '["\\",null,\\"","a"]'])
    assert has_null_part(several, 2).tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("kind", ["bigint", "boolean"])
def test_a_number_shows_null_for_the_text_that_null_had_before(kind: str):
    found = key_columns_of(pa.array(["", NULL_KEY]), [("k", kind)])
    assert found["k"].to_pylist() == [None, None]


def run_of(p: Pipeline, names: list[str | None] = NAMES, **also: Any) -> testing.PipelineRun:
    run = testing.PipelineRun(p, EVENTS, OTHERS)
    with run.batch():
        for number, name in enumerate(names):
            is_one = None if name is None else name == "a"
            run.record("events", 10 * number, name=name, n=None if name is None else len(name), yes=is_one)
    run.close()
    return run


GROUPED = """
INSERT INTO out SELECT {key}, count(*) AS times FROM events GROUP BY {key}, window(event_time, '1 minute')
"""


@pytest.mark.parametrize("form", ["sql", "python"])
def test_group_by_one_text_column_keeps_null_apart_from_the_empty_text(form: str):
    if form == "sql":
        p = pipeline_from_sql(GROUPED.format(key="name"), file="p.sql", name="p")
    else:
        p = Pipeline("p")
        p.source("events").key_by("name").window(tumbling("1m")).aggregate("count(*) AS times").sink("out")
    rows = run_of(p).outputs("out")
    found = [(row["name"], row["times"]) for row in rows]
    assert sorted(found, key=repr) == sorted(
        [(None, 3), ("", 2), ("a", 1), ("[null]", 1), ("[[null]", 1)], key=repr
    )


@pytest.mark.parametrize(
    ("key", "expected"),
    [("n", {(None, 3), (0, 2), (1, 1), (6, 1), (7, 1)}), ("yes", {(None, 3), (False, 4), (True, 1)})],
)
def test_group_by_a_number_has_one_group_of_all_nulls(key: str, expected: set[Any]):
    run = run_of(pipeline_from_sql(GROUPED.format(key=key), file="p.sql", name="p"))
    assert {(row[key], row["times"]) for row in run.outputs("out")} == expected


def test_the_first_of_each_key_is_given_for_null_and_for_the_empty_text():
    p = Pipeline("p")
    p.source("events").key_by("name").dedup(within="1h").sink("out")
    assert sorted((row["name"] for row in run_of(p).outputs("out")), key=repr) == sorted(set(NAMES), key=repr)


def test_a_top_lists_null_and_the_empty_text_apart():
    p = Pipeline("p")
    counted = p.source("events").key_by("name").window(tumbling("1m")).aggregate("count(*) AS times")
    counted.top(2, by="times").sink("best")
    best = run_of(p).outputs("best")
    assert [(row["rank"], row["name"], row["times"]) for row in best] == [(1, None, 3), (2, "", 2)]


class Counts(Computation):
    outputs = {"out": {"key": "string", "name": "string", "times": "bigint"}}
    times = Value(int)

    def process_record(self, record: Record, ctx: Context) -> None:
        ctx.state.times += 1
        ctx.produce({"key": ctx.key, "name": record["name"], "times": ctx.state.times})


def test_a_computation_sees_null_as_a_key_with_a_text_and_a_state_of_its_own():
    """And its productions carry that key on: a group behind it that is keyed anew finds NULL in the column."""
    p = Pipeline("p")
    made = p.source("events").key_by("name").process(Counts)
    made.sink("out")
    behind = made.key_by("name", name="again").window(tumbling("1m")).aggregate("max(times) AS times")
    behind.sink("most")
    run = run_of(p)
    last = {row["key"]: (row["name"], row["times"]) for row in run.outputs("out")}
    assert last == {
        "[null]": (None, 3),
        "": ("", 2),
        "a": ("a", 1),
        "[[null]": ("[null]", 1),
        "[[[null]": ("[[null]", 1),
    }
    assert {(row["name"], row["times"]) for row in run.outputs("most")} == set(last.values())


JOINED = {"inner": "JOIN", "left": "LEFT JOIN", "outer": "FULL JOIN"}


@pytest.mark.parametrize("how", JOINED)
@pytest.mark.parametrize("form", ["sql", "python"])
def test_null_joins_nothing_and_the_empty_text_joins_itself(how: str, form: str):
    if form == "sql":
        p = pipeline_from_sql(
            f"INSERT INTO out SELECT l, r FROM (SELECT name, n AS l FROM events) a {JOINED[how]} "
            "(SELECT name, n AS r FROM others) b ON a.name = b.name AND b.event_time BETWEEN "
            "a.event_time - INTERVAL 10 SECONDS AND a.event_time + INTERVAL 10 SECONDS",
            file="p.sql",
            name="p",
        )
    else:
        p = Pipeline("p")
        left = p.source("events").select("name", "n AS l").key_by("name")
        right = p.source("others").select("name", "n AS r").key_by("name", name="other")
        left.join(right, within=("10s", "10s"), how=how).select("l", "r").sink("out")
    run = testing.PipelineRun(p, EVENTS, OTHERS)
    with run.batch():
        for number, name in enumerate([None, "", "[null]", "a"]):
            run.record("events", 100, name=name, n=number)
            run.record("others", 200, name=None if name == "a" else name, n=10 + number)
    run.close()
    pairs = {(1, 11), (2, 12)}
    alone = {"inner": set(), "left": {(0, None), (3, None)}}
    alone["outer"] = alone["left"] | {(None, 10), (None, 13)}
    found = [(row["l"], row["r"]) for row in run.outputs("out")]
    assert set(found) == pairs | alone[how] and len(found) == len(set(found))
    stamps = {(row.values["l"], row.values["r"]): row.ts for row in run.productions("out")}
    expected = {(0, None): 10_100, (None, 10): 10_200}
    assert {pair: stamps[pair] for pair in expected if pair in stamps}.items() <= expected.items()
