"""QUALIFY of SQL becomes the same dedup and top as in the DSL, or is refused in three parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock import sliding, tumbling
from penstock.core.errors import PipelineError
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.dsl.pipeline import Pipeline
from tests.streams.plans import CATALOGUE, PACKAGE
from tests.streams.test_plan_sql import INSERT, of_sql


def _first(p: Pipeline) -> None:
    keyed = p.source("queries").filter("ts > 0").key_by("query", "LOWER(lang)")
    keyed.dedup(window=tumbling("1h")).select("query", "ts").sink("out")


def _top(p: Pipeline) -> None:
    windows = p.source("queries").key_by("query", "lang").window(sliding("1m", every="10s"))
    results = windows.aggregate("count(*) AS n", "max(score) AS best")
    results.top(3, by="n", per="lang").select("query", "window_start AS since", "n", "best").sink("out")


def _lowest(p: Pipeline) -> None:
    results = p.source("queries").key_by("query").window(tumbling("1m")).aggregate("min(ts) AS first")
    results.top(1, by="first", lowest=True).select("query", "first").sink("out")


FORMS: dict[str, tuple[Any, str]] = {
    "first": (
        _first,
        """INSERT INTO out SELECT q.query, ts FROM queries q WHERE ts > 0 QUALIFY
        row_number() OVER (PARTITION BY q.query, window(event_time, '1 hour'), LOWER(lang) ORDER BY event_time) = 1""",
    ),
    "top": (
        _top,
        """INSERT INTO out SELECT query, window.start AS since, count(*) AS n, max(score) AS best FROM queries
        GROUP BY query, lang, window(event_time, '1 minute', '10 seconds')
        QUALIFY row_number() OVER (PARTITION BY window, lang ORDER BY count(*) DESC) <= 3""",
    ),
    "lowest": (
        _lowest,
        """INSERT INTO out SELECT query, min(ts) AS first FROM queries
        GROUP BY query, window(event_time, '1 minute')
        QUALIFY ROW_NUMBER() OVER (PARTITION BY window.start ORDER BY first) < 2""",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_both_forms_give_the_same_graph_and_jobs(form: str):
    build, text = FORMS[form]
    written = Pipeline("p")
    build(written)
    found = of_sql(text)
    assert found.graph().to_json() == written.graph().to_json()
    jobs = [compile_pipeline(p, CATALOGUE, PACKAGE).to_json() for p in (found, written)]
    assert json.dumps(jobs[0]) == json.dumps(jobs[1])


REFUSED: dict[str, tuple[str, list[str]]] = {
    "QUALIFY of something": (
        f"{INSERT} QUALIFY ts > 1",
        ["QUALIFY ts > 1 cannot", "row_number()", "ORDER BY"],
    ),
    "QUALIFY rank": (
        f"{INSERT} QUALIFY rank() OVER (PARTITION BY query, window(event_time, '1h') ORDER BY event_time) = 1",
        ["row_number()"],
    ),
    "QUALIFY without a window": (
        f"{INSERT} QUALIFY row_number() OVER (PARTITION BY query ORDER BY event_time) = 1",
        ["one window", "'1 hour'"],
    ),
    "QUALIFY without columns": (
        f"{INSERT} QUALIFY row_number() OVER (PARTITION BY window(event_time, '1h') ORDER BY event_time) = 1",
        ["columns and a window"],
    ),
    "QUALIFY the last": (
        f"{INSERT} QUALIFY row_number() OVER (PARTITION BY query, window(event_time, '1h') ORDER BY ts DESC) = 1",
        ["first record by event_time"],
    ),
    "QUALIFY the second": (
        f"{INSERT} QUALIFY row_number() OVER (PARTITION BY query, window(event_time, '1h') ORDER BY event_time) = 2",
        ["keep the first records"],
    ),
    "QUALIFY by no number": (
        f"{INSERT} QUALIFY row_number() OVER (PARTITION BY query, window(event_time, '1h') ORDER BY event_time) = ts",
        ["a literal"],
    ),
    "QUALIFY with a frame": (
        f"{INSERT} QUALIFY row_number() OVER (PARTITION BY query, window(event_time, '1h') "
        "ORDER BY event_time ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) = 1",
        ["without a frame"],
    ),
    "QUALIFY by a window that slides": (
        f"{INSERT} QUALIFY row_number() OVER (PARTITION BY query, window(event_time, '1h', '1m') "
        "ORDER BY event_time) = 1",
        ["exactly one window"],
    ),
    "top by something else": (
        "INSERT INTO out SELECT query, count(*) AS n FROM queries GROUP BY query, window(event_time, '1s') "
        "QUALIFY row_number() OVER (PARTITION BY window ORDER BY lang DESC) <= 3",
        ["one of their values, not by lang"],
    ),
    "top of another window": (
        "INSERT INTO out SELECT query, count(*) AS n FROM queries GROUP BY query, window(event_time, '1s') "
        "QUALIFY row_number() OVER (PARTITION BY window(event_time, '1s') ORDER BY n DESC) <= 3",
        ["is called window"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_neither_is_told_in_three_parts(case: str):
    text, said = REFUSED[case]
    with pytest.raises(PipelineError) as caught:
        compile_pipeline(of_sql(text), CATALOGUE, PACKAGE)
    error = caught.value
    assert error.what.startswith("p.sql:1: ") and error.why and error.fix
    for words in said:
        assert words in str(error)
