"""SQL becomes the same graph and the same jobs as the DSL, or is refused in three parts with its line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import session, sliding, tumbling
from penstock.core.errors import PipelineError
from penstock.streams.bus.log import CategorySpec
from penstock.streams.catalogue import StaticCatalogue
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.dsl.pipeline import Pipeline
from penstock.streams.dsl.sql import pipeline_from_sql
from tests.streams.plans import EVENTS, PACKAGE, QUERIES

NOTES = CategorySpec(
    name="notes",
    partitions=2,
    columns=(("body", "string"), ("tongue", "string"), ("at", "bigint")),
    format="json",
)
DASHED = CategorySpec(name="raw.my-notes", partitions=1, columns=NOTES.columns)
CATALOGUE = StaticCatalogue([QUERIES, EVENTS, NOTES, DASHED])


def of_sql(text: str, name: str = "p") -> Pipeline:
    return pipeline_from_sql(text, file="p.sql", name=name)


def _plain(p: Pipeline) -> None:
    p.source("queries").filter("lang = 'en'").select("lower(query) AS query", "ts").sink("out")


def _as_it_is(p: Pipeline) -> None:
    p.source("queries").sink("out")


def _keyed(p: Pipeline) -> None:
    p.source("queries").select("query", "ts").key_by("lower(query)").sink("out", partitions=7)


def _words(p: Pipeline) -> None:
    stream = p.source("queries").flat_map("explode(split(query, ' ')) AS word")
    stream.filter("word <> ''").select("word", "lang").sink("out")


def _positions(p: Pipeline) -> None:
    stream = p.source("queries").flat_map("posexplode_outer(split(query, ' ')) AS (at, word)")
    stream.select("at", "word").sink("out")


def _generator_in_select(p: Pipeline) -> None:
    p.source("queries").flat_map("explode(split(query, ' ')) AS word").select("lang", "word").sink("out")


def _union(p: Pipeline) -> None:
    queries = p.source("queries").filter("ts > 0").select("query AS text", "ts")
    notes = p.source("notes", start="latest").select("body AS text", "at AS ts")
    queries.union(notes).key_by("text").sink("out")


def _nested(p: Pipeline) -> None:
    p.source("queries").filter("lang = 'en'").select("query", "ts").filter("ts > 0").sink("out")


def _window(p: Pipeline) -> None:
    keyed = p.source("queries").filter("lang = 'en'").key_by("query", "lang")
    keyed.window(tumbling("10s")).aggregate("count(*) AS n", "max(score) AS best").select(
        "query", "window_start AS since", "n", "best"
    ).sink("out")


def _sliding(p: Pipeline) -> None:
    p.source("queries").key_by("query").window(sliding("1m", every="10s")).aggregate("count(*) AS n").sink(
        "out"
    )


def _session(p: Pipeline) -> None:
    p.source("queries").key_by("query").window(session(gap="30m")).aggregate("avg(score) AS mean").sink("out")


def _join(p: Pipeline) -> None:
    queries = p.source("queries").select("query", "lang")
    notes = p.source("notes")
    pairs = queries.key_by("lang", name="q_by_lang").join(
        notes.key_by("tongue", name="n_by_tongue"), within=("10s", "5m"), how="left"
    )
    pairs.select("query", "body").sink("out")


FORMS: dict[str, tuple[Any, str]] = {
    "plain": (_plain, "INSERT INTO out SELECT lower(query) AS query, ts FROM queries WHERE lang = 'en'"),
    "as it is": (_as_it_is, "INSERT INTO out SELECT * FROM queries;"),
    "as it is, by name": (_as_it_is, "INSERT INTO TABLE out SELECT q.* FROM queries q"),
    "keyed": (
        _keyed,
        "CREATE SINK out WITH (partitions = 7); INSERT INTO out SELECT query, ts FROM queries DISTRIBUTE BY lower(query)",
    ),
    "words": (
        _words,
        """-- words
        INSERT INTO out SELECT word, q.lang FROM queries AS q
        LATERAL VIEW explode(split(q.query, ' ')) t AS word WHERE t.word <> ''""",
    ),
    "positions": (
        _positions,
        "INSERT INTO out SELECT at, word FROM queries LATERAL VIEW OUTER posexplode(split(query, ' ')) t AS at, word",
    ),
    "positions in SELECT": (
        _positions,
        "INSERT INTO out SELECT posexplode_outer(split(query, ' ')) AS (at, word) FROM queries",
    ),
    "generator in SELECT": (
        _generator_in_select,
        "INSERT INTO out SELECT lang, explode(split(query, ' ')) AS word FROM queries",
    ),
    "union": (
        _union,
        """CREATE SOURCE notes WITH (start = 'latest');
        INSERT INTO out SELECT query AS text, ts FROM queries WHERE ts > 0
        UNION ALL SELECT body AS text, at AS ts FROM notes DISTRIBUTE BY text""",
    ),
    "nested": (
        _nested,
        """INSERT INTO out WITH english AS (SELECT query, ts FROM queries WHERE lang = 'en')
        SELECT * FROM english WHERE ts > 0;""",
    ),
    "window": (
        _window,
        """INSERT INTO out SELECT query, window.start AS since, count(*) AS n, max(score) AS best
        FROM queries WHERE lang = 'en' GROUP BY query, lang, window(event_time, '10 seconds')""",
    ),
    "sliding": (
        _sliding,
        """INSERT INTO out SELECT query, window.start, window.end, count(*) AS n FROM queries
        GROUP BY query, window(event_time, '1 minute', '10 seconds')""",
    ),
    "session": (
        _session,
        """INSERT INTO out SELECT query, session_window.start, session_window.end, avg(score) AS mean
        FROM queries GROUP BY query, session_window(event_time, '30 minutes')""",
    ),
    "join": (
        _join,
        """INSERT INTO out SELECT q.query, n.body FROM (SELECT query, lang FROM queries) q
        LEFT JOIN notes n ON q.lang = n.tongue
        AND n.event_time BETWEEN q.event_time - INTERVAL 10 SECONDS AND q.event_time + INTERVAL 5 MINUTES""",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_both_forms_of_a_pipeline_give_the_same_graph_and_jobs(form: str):
    build, text = FORMS[form]
    written = Pipeline("p")
    build(written)
    found = of_sql(text)
    assert found.graph().to_json() == written.graph().to_json()
    jobs = [compile_pipeline(p, CATALOGUE, PACKAGE).to_json() for p in (found, written)]
    assert json.dumps(jobs[0]) == json.dumps(jobs[1])


def test_a_file_names_its_pipeline_and_its_partitions():
    p = of_sql(
        "CREATE PIPELINE words WITH (partitions = 3); INSERT INTO out SELECT * FROM queries", name="file"
    )
    assert (p.name, p.partitions) == ("words", 3)
    assert of_sql("INSERT INTO out SELECT * FROM queries", name="file").name == "file"


def test_sql_in_python_knows_its_line():
    p = Pipeline("p")
    p.sql("INSERT INTO out SELECT query FROM queries")
    source, _, _ = p.graph().steps
    assert source.place.file == "test_plan_sql.py"
    p.sql("INSERT INTO more\n SELECT query\n FROM notes", file="more.sql")
    assert [str(step.place) for step in p.graph().steps[3:]] == ["more.sql:3", "more.sql:2", "more.sql:1"]
    p.source("events").sink("third")
    assert p.graph().steps[-1].place.file == "test_plan_sql.py"


def test_statements_share_sources_and_never_names_of_jobs():
    p = of_sql(
        "INSERT INTO a SELECT query FROM queries DISTRIBUTE BY query;"
        "INSERT INTO b SELECT query, ts FROM queries DISTRIBUTE BY query;"
        "INSERT INTO c SELECT * FROM raw.my-notes"
    )
    names = [step.name for step in p.graph().steps]
    assert names.count("queries") == 1 and "by_query" in names and "b_by_query" in names


INSERT = "INSERT INTO out SELECT query FROM queries"
REFUSED: dict[str, tuple[str, list[str]]] = {
    "SET": ("SET spark.sql.shuffle.partitions = 1", ["SET cannot be used", "all of its tasks", "config"]),
    "SET behind a statement": (f"{INSERT}; SET x = 1", ["p.sql:1", "SET cannot be used"]),
    "ADD JAR": ("ADD JAR 'x.jar'", ["ADD JAR cannot be used", "packages"]),
    "ADD FILE": ("ADD FILE 'x'", ["cannot be used", "packages"]),
    "DROP": (f"{INSERT};\nDROP TABLE x", ["p.sql:2", "DROP cannot be used", "penstock category"]),
    "CREATE TABLE": ("CREATE TABLE x (a int)", ["CREATE cannot be used"]),
    "CREATE FUNCTION": ("CREATE TEMPORARY FUNCTION f AS 'x'", ["CREATE cannot be used"]),
    "a SELECT alone": (
        "SELECT query FROM queries",
        ["SELECT cannot be used", "not be written to a sink", "INSERT INTO"],
    ),
    "DELETE": ("DELETE FROM queries", ["DELETE cannot be used", "appended"]),
    "OVERWRITE": ("INSERT OVERWRITE out SELECT * FROM queries", ["INSERT OVERWRITE", "never replaced"]),
    "CALL": ("CALL x()", ["CALL cannot be used"]),
    "nothing": (" ; -- nothing", ["no statement", "INSERT INTO"]),
    "two without ';'": (
        f"{INSERT} INSERT INTO x SELECT 1 FROM queries",
        ["'INSERT' cannot be used here", "';'"],
    ),
    "file": (
        "INSERT INTO out SELECT * FROM parquet.`/etc/x`",
        ["'parquet./etc/x' is not a category", "not files"],
    ),
    "file by name": ("INSERT INTO out SELECT * FROM json.data", ["is not a category", "not files"]),
    "path": ("INSERT INTO out SELECT * FROM `/etc/passwd`", ["is not a category"]),
    "table function": ("INSERT INTO out SELECT * FROM range(10)", ["range() cannot be read"]),
    "read_files": ("INSERT INTO out SELECT * FROM read_files('/x')", ["read_files() cannot be read"]),
    "values": ("INSERT INTO out SELECT * FROM VALUES (1)", ["VALUES cannot be read"]),
    "columns of the sink": (
        "INSERT INTO out (a) SELECT query FROM queries",
        ["cannot be named here", "AS name"],
    ),
    "reflect": (
        "INSERT INTO out SELECT reflect('java.lang.Runtime', 'x') AS y FROM queries",
        ["reflect() cannot be used", "outside of the record"],
    ),
    "java_method": (
        "INSERT INTO out SELECT query FROM queries WHERE java_method('a', 'b') = 'x'",
        ["java_method() cannot be used"],
    ),
    "variables": ("INSERT INTO out SELECT '${env:HOME}' AS x FROM queries", ["cannot hold '${'"]),
    "clock": ("INSERT INTO out SELECT now() AS x FROM queries", ["now() cannot be used", "retried"]),
    "rand": ("INSERT INTO out SELECT query FROM queries WHERE rand() < 0.5", ["rand() cannot be used"]),
    "unknown function": ("INSERT INTO out SELECT lowr(query) AS x FROM queries", ["did you mean lower()"]),
    "unknown column": ("INSERT INTO out SELECT query FROM queries WHERE lnag = 'x'", ["did you mean 'lang'"]),
    "unknown category": ("INSERT INTO out SELECT query FROM querys", ["no category 'querys'", "'queries'"]),
    "unknown table": ("INSERT INTO out SELECT x.query FROM queries q", ["no column 'x.query'"]),
    "aggregate without GROUP BY": (
        "INSERT INTO out SELECT count(*) AS n FROM queries",
        ["count() cannot be used"],
    ),
    "scalar subquery": ("INSERT INTO out SELECT (SELECT 1) AS x FROM queries", ["a query cannot be used"]),
    "IN subquery": (
        "INSERT INTO out SELECT query FROM queries WHERE query IN (SELECT body FROM notes)",
        ["a query cannot be used", "read other data as a stream"],
    ),
    "EXISTS": (
        "INSERT INTO out SELECT query FROM queries WHERE EXISTS (SELECT 1)",
        ["a query cannot be used"],
    ),
    "hint": ("INSERT INTO out SELECT /*+ COALESCE(1) */ query FROM queries", ["a hint cannot be used"]),
    "DISTINCT": (
        "INSERT INTO out SELECT DISTINCT query FROM queries",
        ["DISTINCT cannot", "forever", "QUALIFY row_number()"],
    ),
    "UNION": (f"{INSERT} UNION SELECT body AS query FROM notes", ["UNION ALL", "forever"]),
    "ORDER BY": (f"{INSERT} ORDER BY query", ["ORDER BY cannot", "no end"]),
    "LIMIT": (f"{INSERT} LIMIT 5", ["LIMIT cannot", "no end"]),
    "OVER": ("INSERT INTO out SELECT row_number() OVER (ORDER BY ts) AS n FROM queries", ["many records"]),
    "HAVING": (
        "INSERT INTO out SELECT query, count(*) AS n FROM queries GROUP BY query, window(event_time, '1s') HAVING n > 1",
        ["HAVING cannot"],
    ),
    "no window": (
        "INSERT INTO out SELECT query, count(*) AS n FROM queries GROUP BY query",
        ["one window", "never"],
    ),
    "window by a column": (
        "INSERT INTO out SELECT query, count(*) AS n FROM queries GROUP BY query, window(ts, '10 seconds')",
        ["is not a valid window", "event_time"],
    ),
    "strange length": (
        "INSERT INTO out SELECT query, count(*) AS n FROM queries GROUP BY query, window(event_time, '3 moons')",
        ["'3 moons' is not a duration"],
    ),
    "neither key nor value": (
        "INSERT INTO out SELECT lang, count(*) AS n FROM queries GROUP BY query, window(event_time, '10s')",
        ["no column 'lang'"],
    ),
    "different columns": (
        "INSERT INTO out SELECT query FROM queries UNION ALL SELECT body FROM notes",
        ["different columns", "query string", "body string"],
    ),
    "comma join": ("INSERT INTO out SELECT query FROM queries, notes", [", cannot be used", "JOIN … ON"]),
    "CROSS JOIN": ("INSERT INTO out SELECT query FROM queries CROSS JOIN notes", ["CROSS cannot"]),
    "join without time": (
        "INSERT INTO out SELECT query FROM queries q JOIN notes n ON q.lang = n.tongue",
        ["a limit for the time", "INTERVAL"],
    ),
    "join on <": (
        "INSERT INTO out SELECT query FROM queries q JOIN notes n ON q.ts < n.at",
        ["neither an equal key"],
    ),
    "unknown option": (
        "CREATE SINK out WITH (partition = 2);" + INSERT,
        ["no option", "did you mean 'partitions'"],
    ),
    "option of another type": ("CREATE SINK out WITH (partitions = 'x');" + INSERT, ["whole number"]),
    "unused source": ("CREATE SOURCE x WITH (start = 'latest');" + INSERT, ["'x' is not used"]),
    "pipeline twice": (f"{INSERT}; CREATE PIPELINE y", ["CREATE PIPELINE cannot be used here"]),
    "no FROM": ("INSERT INTO out SELECT 1 AS x", ["FROM is expected at the end"]),
    "a word as a column": ("INSERT INTO out SELECT offset FROM queries", ["backticks"]),
    "nothing selected": ("INSERT INTO out SELECT FROM queries", ["an expression is expected"]),
    "a comma with nothing behind it": (
        "INSERT INTO out SELECT query, FROM queries",
        ["an expression is missing"],
    ),
    "a comma with nothing before it": (
        "INSERT INTO out SELECT query, count(*) AS n FROM queries GROUP BY , query, window(event_time, '1s')",
        ["an expression is missing"],
    ),
    "AS with nothing behind it": ("INSERT INTO out SELECT query AS, ts FROM queries", ["a name is missing"]),
    "FROM before SELECT": ("INSERT INTO out FROM queries SELECT query", ["'FROM' cannot be used here"]),
    "several INSERTs of one FROM": (
        "INSERT INTO out FROM queries INSERT INTO x SELECT 1 AS x",
        ["'FROM' cannot be used here"],
    ),
    "SELECT ALL": ("INSERT INTO out SELECT ALL query FROM queries", ["ALL cannot be used here"]),
    "a text as a category": ("INSERT INTO out SELECT query FROM '/etc/passwd'", ["a table name is expected"]),
    "an empty part of a name": (
        "INSERT INTO out SELECT query FROM raw..notes",
        ["raw..notes cannot be read"],
    ),
    "a star behind a category": ("INSERT INTO out SELECT query FROM queries *", ["queries * cannot be read"]),
    "pipes": (f"{INSERT} |> WHERE ts > 1", ["'|>' cannot be used here"]),
    "clauses in another order": (f"{INSERT} DISTRIBUTE BY query WHERE ts > 1", ["in this order"]),
    "DISTRIBUTE BY before UNION ALL": (
        f"{INSERT} DISTRIBUTE BY query UNION ALL SELECT body AS query FROM notes",
        ["DISTRIBUTE BY cannot be used here", "after the last"],
    ),
    "ROLLUP": (
        "INSERT INTO out SELECT query, count(*) AS n FROM queries GROUP BY query, window(event_time, '1s') WITH ROLLUP",
        ["ROLLUP cannot be used"],
    ),
    "SEMI JOIN": (
        "INSERT INTO out SELECT query FROM queries q LEFT SEMI JOIN notes n ON q.lang = n.tongue",
        ["LEFT SEMI JOIN cannot be used"],
    ),
    "JOIN without ON": (
        "INSERT INTO out SELECT query FROM queries JOIN notes",
        ["ON is expected at the end"],
    ),
    "TABLESAMPLE": (f"{INSERT} TABLESAMPLE (5 PERCENT)", ["cannot be"]),
    "a bracket that stays open": (
        "INSERT INTO out SELECT cast(ts AS int AS x FROM queries",
        ["never closed"],
    ),
    "nested without end": (
        "INSERT INTO out SELECT " + "(" * 3000 + "ts" + ")" * 3000 + " AS x FROM queries",
        ["nested too deeply"],
    ),
    "open quote": ("INSERT INTO out SELECT 'x FROM queries", ["never closed"]),
    "too long": ("-" * 1_000_001, ["1000001 characters"]),
    "written twice": (f"{INSERT}; {INSERT}", ["written twice"]),
    "self feeding": ("INSERT INTO queries SELECT * FROM queries", ["both a source and a sink"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_pipeline_is_told_in_three_parts(case: str):
    text, said = REFUSED[case]
    with pytest.raises(PipelineError) as caught:
        compile_pipeline(of_sql(text), CATALOGUE, PACKAGE)
    error = caught.value
    assert error.what and error.why and error.fix
    for words in said:
        assert words in str(error)


def test_what_is_refused_is_shown_at_its_line_and_column():
    text = "INSERT INTO out\nSELECT query\nFROM queries -- all\n  LIMIT 5"
    with pytest.raises(PipelineError) as caught:
        of_sql(text)
    assert caught.value.what == "p.sql:4: LIMIT cannot be used in a stream"
    assert caught.value.why.endswith("(line 4, column 3)\n      LIMIT 5\n      ^")
    with pytest.raises(PipelineError) as caught:
        Pipeline("p").sql(text.replace("  LIMIT 5", "WHERE"), file="more.sql")
    assert caught.value.what == "more.sql:4: the SQL does not parse"
    assert "(line 4, column 1)\n    WHERE\n    ^" in caught.value.why


def test_joins_and_lateral_views_come_in_any_order():
    """sqlglot by itself reads all joins first, then all lateral views."""
    near = "n.event_time BETWEEN q.event_time AND q.event_time + INTERVAL 1 SECOND"
    join = f"JOIN notes n ON q.lang = n.tongue AND {near}"
    view = "LATERAL VIEW explode(split(query, ' ')) t AS word"
    for parts, kinds in ((f"{join} {view}", ["join", "flat_map"]), (f"{view} {join}", ["flat_map", "join"])):
        graph = of_sql(f"INSERT INTO out SELECT word, body FROM queries q {parts}").graph()
        found = [node["op"] for node in graph.to_json()["nodes"]]
        assert [op for op in found if op in kinds] == kinds


PIECES = st.sampled_from(
    [
        "INSERT",
        "INTO",
        "out",
        "SELECT",
        "query",
        ",",
        "ts",
        "*",
        "(",
        ")",
        "FROM",
        "queries",
        "notes",
        "WHERE",
        "lang",
        "=",
        "'en'",
        "AND",
        "UNION",
        "ALL",
        "GROUP",
        "BY\n",
        "",
        "",
        "",
        "window",
        "(",
        "event_time",
        ",",
        "'10s'",
        ")",
        "count(*)",
        "AS",
        "n",
        "DISTRIBUTE",
        "BY",
        "JOIN",
        "ON",
        "q",
        ".",
        "LATERAL",
        "VIEW",
        "explode",
        "split",
        ";",
        "WITH",
        "x",
        "CREATE\n",
        "",
        "",
        "",
        "SOURCE",
        "SINK",
        "PIPELINE",
        "partitions",
        "=",
        "4",
        "LEFT",
        "left(",
        "`a",
        "b`",
        '"text"',
        "/*+",
        "*/",
        "--",
        "${x}",
        "[",
        "]",
        "{",
        "}",
        "::",
        "5L",
        "e'x",
        "INTERVAL",
        "1",
        "DAY",
        "BETWEEN\n",
        "",
        "",
        "",
        "CASE",
        "WHEN",
        "THEN",
        "END",
        "NOT",
        "NULL",
        "IS",
        "QUALIFY row_number() OVER (PARTITION BY window ORDER BY n) <=",
        "DISTINCT",
        "FROM",
        "IN",
        "EXISTS",
        "OVER",
        "HAVING",
        "LIMIT",
        "SET",
        "ADD",
        "JAR",
        "\\",
        "\n",
        "@",
        "#",
        "$",
        "?",
        ":",
        "|>",
        "->",
        "=>",
    ]
)


@settings(max_examples=500)
@given(st.lists(PIECES, max_size=25))
def test_no_text_breaks_the_reader(pieces: list[str]):
    for text in (" ".join(pieces), "INSERT INTO out SELECT " + " ".join(pieces) + " FROM queries"):
        try:
            compile_pipeline(of_sql(text), CATALOGUE, PACKAGE)
        except PipelineError as error:
            assert error.what and error.why and error.fix
