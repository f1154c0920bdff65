"""SQL text to the same graph as the DSL: each statement writes a sink. Pure: text in, steps out.

CREATE PIPELINE words WITH (partitions = 4);
INSERT INTO words SELECT lower(word) AS word FROM queries LATERAL VIEW explode(split(query, ' ')) t AS word;

Expressions go through the DSL, so the same functions are allowed and the same checks are made.
"""

from __future__ import annotations

from typing import Any

from sqlglot.tokenizer_core import TokenType

from penstock.core.errors import PipelineError
from penstock.streams.catalogue import nearest
from penstock.streams.graph import Place, Source
from penstock.streams.pipeline import Pipeline, Stream
from penstock.streams.sql_queries import Query
from penstock.streams.sql_tokens import Cursor

TEXT_CHARS_MAX = 1_000_000
_OPTIONS: dict[str, dict[str, type]] = {
    "PIPELINE": {"partitions": int},
    "SOURCE": {"start": str},
    "SINK": {"partitions": int},
}
_INSERT = "INSERT INTO <category> SELECT … FROM <category>"
_SETTINGS = (
    "settings belong to the container's session, and would change for every task in it",
    "remove it; what a job may choose is in its config",
)
_CODE = ("code comes to tasks in packages, by its hash, never from a path", "remove it; use a Computation")
_DDL = (
    "a pipeline reads categories and writes sinks; it makes and changes nothing else",
    "remove it; `penstock category NAME --create` makes a category for records from outside",
)
_APPEND = ("a category is only ever appended to", f"write {_INSERT}")
_REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("SET", "RESET", "USE"), _SETTINGS),
    **dict.fromkeys(("ADD", "ADD JAR", "ADD FILE", "ADD ARCHIVE", "LIST", "LOAD", "COPY"), _CODE),
    **dict.fromkeys(("CREATE", "DROP", "ALTER", "TRUNCATE", "CACHE", "REFRESH", "ANALYZE", "COMMENT"), _DDL),
    **dict.fromkeys(("UPDATE", "DELETE", "MERGE", "REPLACE"), _APPEND),
    **dict.fromkeys(
        ("SELECT", "WITH", "FROM", "VALUES", "TABLE"), ("its records would go nowhere", f"write {_INSERT}")
    ),
}


def pipeline_from_sql(text: str, *, file: str, name: str) -> Pipeline:
    """The pipeline that a file of SQL describes; `name` unless it says CREATE PIPELINE."""
    _check_size(text, file)
    cursor = Cursor(text, file=file)
    settings: dict[str, Any] = {}
    while cursor.take(";"):
        pass
    if cursor.is_at("CREATE", "PIPELINE"):
        cursor.take("CREATE", "PIPELINE")
        name = cursor.name("the pipeline")
        settings = _options(cursor, "PIPELINE")
        _end_of_statement(cursor)
    pipeline = Pipeline(name, partitions=settings.get("partitions", 4))
    try:
        _statements(pipeline, cursor)
    finally:
        pipeline._place_of_sql = None
    return pipeline


def add_statements(pipeline: Pipeline, text: str, *, file: str, line: int) -> None:
    """Add the statements of a text to a pipeline."""
    if not isinstance(text, str):
        raise PipelineError(
            f"{file}:{line}: sql() needs text, not {text!r}",
            why="it is read as Spark SQL",
            fix=f"write {_INSERT}",
        )
    _check_size(text, file)
    _statements(pipeline, Cursor(text, file=file, line=line))


def _statements(pipeline: Pipeline, cursor: Cursor) -> None:
    options: dict[tuple[str, str], dict[str, Any]] = {}
    places: dict[tuple[str, str], Place] = {}
    count = 0
    while not cursor.is_done:
        if cursor.take(";"):
            continue
        pipeline._place_of_sql = cursor.place()
        if cursor.is_at("CREATE", "SOURCE") or cursor.is_at("CREATE", "SINK"):
            kind = "SOURCE" if cursor.take("CREATE", "SOURCE") else "SINK"
            cursor.take("CREATE", "SINK")
            about = (kind, cursor.name(f"the {kind.lower()}"))
            options[about], places[about] = _options(cursor, kind), pipeline._place_of_sql
        else:
            count += 1
            _insert(pipeline, cursor, options, places)
        _end_of_statement(cursor)
    if not count:
        raise PipelineError(
            f"{cursor.place()}: there is no statement",
            why="a pipeline is one INSERT for each sink",
            fix=f"write {_INSERT}",
        )
    for (kind, name), place in places.items():
        raise PipelineError(
            f"{place}: {kind.lower()} {name!r} is not used",
            why=f"no statement behind it {'reads' if kind == 'SOURCE' else 'writes'} it",
            fix="put it before the statement that does, or remove it",
        )


def _insert(pipeline: Pipeline, cursor: Cursor, options: dict[Any, Any], places: dict[Any, Any]) -> None:
    if not cursor.is_at("INSERT", "INTO"):
        _refuse(cursor)
    place = cursor.place()
    cursor.take("INSERT", "INTO")
    cursor.take("TABLE")
    sink = cursor.name("the category")
    if cursor.is_at("(") or cursor.is_at("PARTITION"):
        cursor.fail(
            f"columns or partitions of {sink!r} cannot be named here",
            why="a sink has the columns of its SELECT, by name and in order",
            fix="name them in the SELECT: expression AS name",
        )

    def source(category: str) -> Stream:
        places.pop(("SOURCE", category), None)
        for step in pipeline._steps.values():
            if isinstance(step, Source) and step.category == category:
                return Stream(pipeline=pipeline, step=step.name)
        return pipeline.source(category, **options.get(("SOURCE", category), {}))

    stream = Query(cursor, pipeline, source, sink).read()
    pipeline._place_of_sql = place
    places.pop(("SINK", sink), None)
    stream.sink(sink, **options.get(("SINK", sink), {}))


def _options(cursor: Cursor, kind: str) -> dict[str, Any]:
    """WITH (name = value, …)."""
    known, found = _OPTIONS[kind], {}
    fix = f"write CREATE {kind} name WITH ({next(iter(known))} = …)"
    if not cursor.take("WITH"):
        return {}
    cursor.expect("(", fix=fix)
    while True:
        name = cursor.name("an option").lower()
        if name not in known:
            near = nearest(name, known)
            why = f"a {kind.lower()} has: {', '.join(known)}"
            cursor.fail(
                f"there is no option {name!r}", why=why, fix=f"did you mean {near!r}?" if near else fix
            )
        cursor.expect("=", fix=fix)
        (token,) = cursor.expression()[:1]
        if (token.token_type == TokenType.NUMBER) != (known[name] is int) or (
            known[name] is int and not token.text.isdigit()
        ):
            why = "it is " + ("a whole number" if known[name] is int else "text in quotes")
            cursor.fail(f"{token.text!r} is no value for {name!r}", why=why, fix=fix)
        found[name] = known[name](token.text)
        if not cursor.take(","):
            break
    cursor.expect(")", fix=fix)
    return found


def _end_of_statement(cursor: Cursor) -> None:
    if not cursor.is_done and not cursor.take(";"):
        cursor.fail(
            f"{cursor.join(cursor.rest()[:1])!r} cannot be used here",
            why="the statement was complete, or this part of SQL is not known",
            fix="end the statement with ';', or remove what follows",
        )


def _refuse(cursor: Cursor) -> None:
    word = cursor.word()
    if word == "INSERT":
        cursor.fail(
            f"INSERT {cursor.word(1)} cannot be used",
            why="a sink is appended to, never replaced",
            fix=f"write {_INSERT}",
        )
    if cursor.is_at("CREATE", "PIPELINE"):
        cursor.fail(
            "CREATE PIPELINE cannot be used here",
            why="it names a pipeline, once, as the first statement of a file",
            fix="move it to the top of the file; in Python write Pipeline(name, partitions=…)",
        )
    why, fix = _REFUSED.get(word.split(" ")[0], ("it is not a statement of pipelines", f"write {_INSERT}"))
    cursor.fail(f"{word or 'this'} cannot be used in a pipeline", why=why, fix=fix)


def _check_size(text: str, file: str) -> None:
    if len(text) > TEXT_CHARS_MAX:
        raise PipelineError(
            f"{file}: the SQL has {len(text)} characters",
            why=f"the limit is {TEXT_CHARS_MAX}",
            fix="split it into several pipelines",
        )
