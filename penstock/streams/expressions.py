"""May a stateless step use this Spark SQL text, what does it read, what does it give? Pure: no JVM."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import sqlglot
from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, TokenError
from sqlglot.parsers.spark import SparkParser
from sqlglot.tokenizer_core import Token, TokenType

from penstock.core.errors import PipelineError
from penstock.streams.bus.log import ARROW_TYPES
from penstock.streams.expression_types import Typer
from penstock.streams.graph import Columns

# No double or float: 0.1 has many texts, NaN is not itself. No binary: its text depends on the reader.
KEY_TYPES = frozenset({"string", "int", "bigint", "boolean"})
_EXPRESSION_CHARS_MAX = 10_000
_SPECIAL_CALLS = ("CAST", "TRY_CAST", "TRIM", "SUBSTRING", "SUBSTR", "POSITION", "EXTRACT")
_SUGGESTED = {"decimal": "double", "smallint": "int", "tinyint": "int"}


class _SparkExpressions(Spark):
    """Spark's grammar that keeps the names of functions as they were written."""

    class Parser(SparkParser):
        FUNCTIONS: ClassVar = {}
        FUNCTION_PARSERS: ClassVar = {
            name: parser for name, parser in SparkParser.FUNCTION_PARSERS.items() if name in _SPECIAL_CALLS
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """An expression that passed: its text for Spark, the type it gives, the columns it reads.

    `normal` is equal for texts that differ in spaces, comments and case only.
    """

    text: str
    type: str
    columns: frozenset[str]
    normal: str


def check_filter(text: str, columns: Columns) -> Checked:
    """A condition."""
    node = _parse(text)
    if isinstance(node, exp.Alias):
        raise PipelineError(
            f"a condition has no name: {text!r}",
            why=f"{node.alias!r} would be the name of a new column, and a filter makes none",
            fix="remove it; strings go into quotes, and parts are joined by AND or OR",
        )
    typer = Typer(dict(columns))
    type_ = typer.type_of(node)
    if type_ != "boolean":
        raise PipelineError(
            f"{text!r} is no condition",
            why=f"it gives {type_}, and a filter needs true or false",
            fix=f"compare it with something, for example {text.strip()} IS NOT NULL",
        )
    return Checked(text=_bare(text), type=type_, columns=frozenset(typer.used), normal=_normal(text))


def check_select(text: str, columns: Columns) -> tuple[str, Checked]:
    """The name of a new column, and its expression. The text is "expression AS name", or a column."""
    node = _parse(text)
    if isinstance(node, exp.Alias) and isinstance(node.args["alias"], exp.Identifier):
        name, text = node.alias, _without_alias(text)
        node = node.this
    elif isinstance(node, exp.Column) and isinstance(node.this, exp.Identifier):
        name = node.name
    else:
        if not isinstance(node, exp.Alias | exp.Aliases):
            _check_value(text, node, columns)  # what is wrong with it matters more than its name
        raise PipelineError(
            f"the result of {text!r} has no name",
            why="every selected column needs a name, except a column taken as it is",
            fix=f'write "{text.strip()} AS name"',
        )
    checked = _check_value(text, node, columns)
    if name.startswith("_"):
        raise PipelineError(
            f"a column cannot be called {name!r}",
            why="names starting with '_' belong to Penstock",
            fix=f'write "{checked.text} AS {name.lstrip("_") or "name"}"',
        )
    return name, checked


def check_key(texts: Sequence[str], columns: Columns) -> Checked:
    """The key of a record, as one expression that gives a string; different keys give different strings."""
    parts = [_check_key_part(text, columns) for text in texts]
    if len(parts) == 1:
        return parts[0]
    # A JSON array of strings: no separator can be mistaken for a part, and NULL differs from ''.
    text = f"to_json(array({', '.join(f'CAST({part.text} AS string)' for part in parts)}))"
    used = frozenset().union(*(part.columns for part in parts))
    return Checked(text=text, type="string", columns=used, normal=" , ".join(part.normal for part in parts))


def _check_key_part(text: str, columns: Columns) -> Checked:
    node = _parse(text)
    if isinstance(node, exp.Alias):
        raise PipelineError(
            f"a key has no name: {text!r}",
            why="key_by only says which records belong together, it makes no column",
            fix='make the column first: .select("... AS name"), then .key_by("name")',
        )
    checked = _check_value(text, node, columns)
    if checked.type not in KEY_TYPES:
        raise PipelineError(
            f"{checked.text!r} cannot be a key: it is {checked.type}",
            why="equal values of it may have different texts, so equal keys could go to different places",
            fix=f"use a string, int, bigint or boolean, as in CAST(ROUND({checked.text} * 100) AS bigint)"
            if checked.type in ("double", "float")
            else f"use a string, int, bigint or boolean, as in hex({checked.text})",
        )
    return checked


def _check_value(text: str, node: exp.Expression, columns: Columns) -> Checked:
    typer = Typer(dict(columns))
    type_ = typer.type_of(node)
    text = _bare(text)
    if type_ not in ARROW_TYPES:
        known = type_ != "void"
        raise PipelineError(
            f"{text!r} gives {type_}, which no category can hold"
            if known
            else f"the type of {text!r} is not known",
            why=f"a column on the bus is one of {', '.join(ARROW_TYPES)}",
            fix=f"wrap it in CAST({text} AS {_SUGGESTED.get(type_, 'string')})"
            if known
            else f"wrap it in CAST({text} AS type), with one of these types",
        )
    return Checked(text=text, type=type_, columns=frozenset(typer.used), normal=_normal(text))


def _parse(text: str) -> exp.Expression:
    if not isinstance(text, str) or not text.strip():
        raise PipelineError(
            f"an expression is empty: {text!r}",
            why="a step needs Spark SQL text",
            fix="write a column or an expression, for example \"lang = 'en'\"",
        )
    if len(text) > _EXPRESSION_CHARS_MAX:
        raise PipelineError(
            f"an expression has {len(text)} characters: {text[:40]!r}…",
            why=f"the limit is {_EXPRESSION_CHARS_MAX}",
            fix="split it into several steps, or use a Computation",
        )
    try:
        found = sqlglot.parse(text, dialect=_SparkExpressions)
    except ParseError as error:
        raise _syntax_error(text, error) from None
    except TokenError:
        raise PipelineError(
            f"the expression does not parse: {text!r}",
            why="a quote (', \" or `) or a comment is opened and never closed",
            fix="close it; a quote inside text is written \\'",
        ) from None
    except RecursionError:
        raise PipelineError(
            f"the expression is nested too deeply: {text[:40]!r}…",
            why="the parser gave up",
            fix="split it into several steps",
        ) from None
    if len(found) != 1 or not isinstance(found[0], exp.Expression):
        raise PipelineError(
            f"this is not one expression: {text!r}",
            why="a ';' ends a statement, and a step takes a single expression",
            fix="remove the ';' and what follows",
        )
    return found[0]


def _syntax_error(text: str, error: ParseError) -> PipelineError:
    detail = error.errors[0]
    description, at = str(detail.get("description", "")), str(detail.get("highlight", ""))
    line, end = int(detail.get("line") or 1), int(detail.get("col") or 1)
    column = max(end - len(at) + 1, 1)
    if description.startswith("Required keyword"):
        why = f"something is missing at {at!r}"
    elif missing := re.fullmatch(r"Expecting (\S+)", description):
        why = f"a {missing[1]!r} is missing after {at!r}"
    elif description.startswith("Invalid expression"):
        why = f"{at!r} is not expected here"
    else:
        why = f"{description[:1].lower()}{description[1:]} at {at!r}"
    shown = (text.splitlines() or [""])[min(line, len(text.splitlines())) - 1]
    return PipelineError(
        f"the expression does not parse: {text!r}",
        why=f"{why} (line {line}, column {column})\n    {shown}\n    {' ' * (column - 1)}^",
        fix="correct the expression; it is Spark SQL, as in a WHERE or SELECT",
    )


def _tokens(text: str) -> list[Token]:
    return _SparkExpressions().tokenize(text)


def _without_alias(text: str) -> str:
    tokens = _tokens(text)
    cut = -2 if tokens[-2].token_type == TokenType.ALIAS else -1
    return text[: tokens[cut].start].strip()


def _bare(text: str) -> str:
    """Without spaces and comments around it: one to the end of the line would swallow what comes after."""
    tokens = _tokens(text)
    return text[tokens[0].start : tokens[-1].end + 1]


def _normal(text: str) -> str:
    quoted = (TokenType.STRING, TokenType.RAW_STRING, TokenType.HEX_STRING)
    return " ".join(
        text[token.start : token.end + 1] if token.token_type in quoted else token.text.lower()
        for token in _tokens(text)
    )
