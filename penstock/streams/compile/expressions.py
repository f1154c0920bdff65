"""Checks Spark SQL expressions of steps: allowed functions, columns and types. Pure: no JVM.

A job's plan may be written by hand, so the checks of the compiler are repeated where a plan is used
(`check_plan`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, TokenError
from sqlglot.parsers.spark import SparkParser
from sqlglot.tokenizer_core import Token, TokenType

from penstock.core.errors import ConfigError, PipelineError
from penstock.streams.bus.log import ARROW_TYPES
from penstock.streams.catalogue import nearest
from penstock.streams.compile.expression_types import Typer
from penstock.streams.compile.functions import AGGREGATE_NAMES, AGGREGATES, GENERATORS, can_cast, element_of
from penstock.streams.compile.graph import CodeLocation, Columns, check_columns

# No double or float: 0.1 has several texts, and NaN != NaN. No binary: it has no text.
KEY_TYPES = frozenset({"string", "int", "bigint", "boolean"})
_EXPRESSION_CHARS_MAX = 10_000
_SHOWN_CHARS_MAX = 100  # of a line in error texts
_NO_KEYS = {
    "double": ("nearly equal numbers have different texts", "CAST(ROUND({text} * 100) AS bigint)"),
    "float": ("nearly equal numbers have different texts", "CAST(ROUND({text} * 100) AS bigint)"),
    "decimal": ("1.5 and 1.50 are equal, but their texts differ", "CAST({text} * 100 AS bigint)"),
    "binary": ("bytes have no text", "hex({text})"),
    "timestamp": ("the text of a timestamp depends on the session's time zone", "unix_millis({text})"),
    "date": ("the text of a date depends on settings", "unix_date({text})"),
    "array": ("an array has several texts", "array_join({text}, ',')"),
}
# Expressions of only these have a value for every record; CAST, division and others may fail.
_CANNOT_FAIL = (
    *(exp.Column, exp.Identifier, exp.Literal, exp.Boolean, exp.Null, exp.Paren, exp.And, exp.Or, exp.Not),
    *(
        exp.EQ,
        exp.NEQ,
        exp.GT,
        exp.GTE,
        exp.LT,
        exp.LTE,
        exp.NullSafeEQ,
        exp.Is,
        exp.In,
        exp.Between,
        exp.Like,
    ),
)
_CALLS_THAT_CANNOT_FAIL = frozenset(
    {
        "lower",
        "upper",
        "length",
        "coalesce",
        "nvl",
        "isnull",
        "isnotnull",
        "startswith",
        "endswith",
        "contains",
    }
)
_SPECIAL_CALLS = ("CAST", "TRY_CAST", "TRIM", "SUBSTRING", "SUBSTR", "POSITION", "EXTRACT")
_SUGGESTED = {"decimal": "double", "smallint": "int", "tinyint": "int"}


class SparkExpressions(Spark):
    """Spark's grammar, with function names as they were written."""

    class Parser(SparkParser):
        """Every function call is an `exp.Anonymous`, except those with a special syntax."""

        FUNCTIONS: ClassVar = {}
        FUNCTION_PARSERS: ClassVar = {
            name: parser for name, parser in SparkParser.FUNCTION_PARSERS.items() if name in _SPECIAL_CALLS
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A checked generator: its array, and its new columns (position first)."""

    array: Checked
    outer: bool
    columns: Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """A checked aggregate; `argument` is None for count(*)."""

    function: str
    argument: Checked | None
    parameter: float | None
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A checked expression: its text for Spark, its type, and the columns that it reads.

    `normal` is equal for texts that differ only in spaces, comments and case.
    """

    text: str
    type: str
    columns: frozenset[str]
    normal: str


def check_filter(text: str, columns: Columns) -> Checked:
    """Check a condition."""
    node = parse_text(text)
    if isinstance(node, exp.Alias):
        raise PipelineError(
            f"a condition has no name: {text!r}",
            why=f"{node.alias!r} would be the name of a new column, but a filter makes no columns",
            fix="remove it; put strings into quotes, and combine conditions with AND or OR",
        )
    typer = Typer(dict(columns))
    type_ = typer.type_of(node)
    if type_ != "boolean":
        raise PipelineError(
            f"{text!r} is not a condition",
            why=f"its type is {type_}, but a filter needs boolean",
            fix=f"compare it with something, for example {text.strip()} IS NOT NULL",
        )
    return Checked(text=text_of(text), type=type_, columns=frozenset(typer.used), normal=_normal(text))


def check_select(text: str, columns: Columns) -> tuple[str, Checked]:
    """Check "expression AS name" or a column; returns the name and the expression."""
    node = parse_text(text)
    if isinstance(node, exp.Alias) and isinstance(node.args["alias"], exp.Identifier):
        name, text = node.alias, _without_alias(text)
        node = node.this
    elif isinstance(node, exp.Column) and isinstance(node.this, exp.Identifier):
        name = node.name
    else:
        if not isinstance(node, exp.Alias | exp.Aliases):
            _check_value(text, node, columns)  # an invalid expression is the more important error
        raise PipelineError(
            f"the result of {text!r} has no name",
            why="every selected expression needs a name, except a plain column",
            fix=f'write "{text.strip()} AS name"',
        )
    checked = _check_value(text, node, columns)
    if name.startswith("_"):
        raise PipelineError(
            f"a column cannot be named {name!r}",
            why="names that start with '_' are reserved for system columns",
            fix=f'write "{checked.text} AS {name.lstrip("_") or "name"}"',
        )
    return name, checked


def check_key(texts: Sequence[str], columns: Columns) -> Checked:
    """Check a key; returns one string expression that differs for different keys."""
    parts = check_key_parts(texts, columns)
    if len(parts) == 1:
        return parts[0]
    # A JSON array of strings: separators are unambiguous, and NULL differs from ''.
    text = f"to_json(array({', '.join(f'CAST({part.text} AS string)' for part in parts)}))"
    used = frozenset().union(*(part.columns for part in parts))
    return Checked(text=text, type="string", columns=used, normal=" , ".join(part.normal for part in parts))


def check_key_parts(texts: Sequence[str], columns: Columns) -> tuple[Checked, ...]:
    """Check each part of a key."""
    return tuple(_check_key_part(text, columns) for text in texts)


def check_flat_map(text: str, columns: Columns) -> Generated:
    """Check a key; returns one string expression, with different values for different keys."""
    node = parse_text(text)
    names: list[str] = []
    if isinstance(node, exp.Alias):
        names, node = [node.alias], node.this
    elif isinstance(node, exp.Aliases):
        names, node = [name.name for name in node.expressions], node.this
    known = GENERATORS.get(node.name.lower()) if isinstance(node, exp.Anonymous) else None
    if known is None or len(node.expressions) != 1:
        if not isinstance(node, exp.Anonymous):
            Typer(dict(columns)).type_of(node)  # an invalid expression is the more important error
        raise PipelineError(
            f"{text!r} is not a generator",
            why=f"a flat_map needs one of {', '.join(GENERATORS)}, with one array",
            fix='write "explode(array) AS name"',
        )
    outer, with_position = known
    if len(names) != 1 + with_position:
        raise PipelineError(
            f"{text!r} makes {1 + with_position} column{'s' * with_position}, and names {len(names)}",
            why="each new column needs a name",
            fix=f'write "{node.name}(array) AS {"(position, name)" if with_position else "name"}"',
        )
    array = _array_inside(text, node.expressions[0], columns)
    made = ((names[0], "int"),) if with_position else ()
    return Generated(array=array, outer=outer, columns=(*made, (names[-1], element_of(array.type))))


def _array_inside(text: str, node: exp.Expression, columns: Columns) -> Checked:
    tokens = tokens_of(text)
    depth, inside = 0, []
    for token in tokens[1:]:
        depth += {TokenType.L_PAREN: 1, TokenType.R_PAREN: -1}.get(token.token_type, 0)
        inside.append(token)
        if not depth:
            break
    checked = _check_value(text[inside[1].start : inside[-2].end + 1], node, columns)
    if not checked.type.startswith("array<"):
        raise PipelineError(
            f"{checked.text!r} is not an array: it is {checked.type}",
            why="a flat_map makes one record per element of an array",
            fix=f"make one, as in split({checked.text}, ' ')",
        )
    return checked


def check_aggregate(text: str, columns: Columns) -> tuple[str, Summed]:
    """Check a value of a window, "sum(column) AS name"; returns its name and aggregate."""
    node = parse_text(text)
    if not isinstance(node, exp.Alias) or not isinstance(node.args["alias"], exp.Identifier):
        raise PipelineError(
            f"the result of {text!r} has no name",
            why="every value of a window is a column",
            fix=f'write "{text.strip()} AS name"',
        )
    call = node.this
    name = call.name.lower() if isinstance(call, exp.Anonymous) else ""
    if name not in AGGREGATES or any(isinstance(given, exp.Distinct) for given in call.expressions):
        near = nearest(name, AGGREGATES)
        raise PipelineError(
            f"{call.sql(dialect='spark')} cannot be computed per window",
            why=f"the known functions are {', '.join(AGGREGATES)}, not combined and without DISTINCT",
            fix="use approx_count_distinct(column)"
            if name in AGGREGATES
            else f"did you mean {near}()?"
            if near
            else "compute arguments in a select before the window, and use its results in a select after it",
        )
    return node.alias, _summed(name, call, tokens_of(text), text, columns)


def _summed(name: str, call: exp.Expression, tokens: Sequence[Token], text: str, columns: Columns) -> Summed:
    function, given = AGGREGATES[name], call.expressions
    if name == "count" and (not given or isinstance(given[0], exp.Star)):
        return Summed(function="count", argument=None, parameter=None, type="bigint")
    typer = Typer(dict(columns))
    type_ = typer.aggregated(call, function)
    parameter = float(given[1].name) if len(given) > 1 else None
    if parameter is not None and not 0 <= parameter <= 1:
        raise PipelineError(
            f"{name}() cannot take {parameter}",
            why="a quantile is from 0 to 1",
            fix="write 0.5 for the median",
        )
    ends = [token for token in tokens if token.token_type in (TokenType.COMMA, TokenType.R_PAREN)]
    cut = ends[0] if len(given) > 1 and isinstance(given[0], exp.Column) else None
    inside = text[tokens[2].start : cut.start] if cut else given[0].sql(dialect=SparkExpressions)
    argument = _check_value(inside, given[0], columns)
    return Summed(
        function=AGGREGATE_NAMES.get(name, name), argument=argument, parameter=parameter, type=type_
    )


def cannot_fail(text: str) -> bool:
    """True if a checked expression has a value for every record."""
    return all(
        isinstance(node, _CANNOT_FAIL)
        or (isinstance(node, exp.Anonymous) and node.name.lower() in _CALLS_THAT_CANNOT_FAIL)
        for node in parse_text(text).walk()
    )


def _check_key_part(text: str, columns: Columns) -> Checked:
    node = parse_text(text)
    if isinstance(node, exp.Alias):
        raise PipelineError(
            f"a key has no name: {text!r}",
            why="key_by does not make columns",
            fix='make the column first: .select("... AS name"), then .key_by("name")',
        )
    type_, text = Typer(dict(columns)).type_of(node), text_of(text)
    if type_ not in KEY_TYPES:
        why, fix = next(
            (entry for kind, entry in _NO_KEYS.items() if type_.startswith(kind)),
            ("its text is not defined", "CAST({text} AS string)"),
        )
        raise PipelineError(
            f"{text!r} cannot be a key: it is {type_}",
            why="equal keys must always have equal texts, or they could go to "
            f"different partitions, and {why}",
            fix=f"use a string, int, bigint or boolean, as in {fix.format(text=text)}",
        )
    return _check_value(text, node, columns)


def check_value(text: str, columns: Columns) -> Checked:
    """Check an expression with a type that a column can have."""
    return _check_value(text, parse_text(text), columns)


def _check_value(text: str, node: exp.Expression, columns: Columns) -> Checked:
    typer = Typer(dict(columns))
    type_ = typer.type_of(node)
    text = text_of(text)
    if type_ not in ARROW_TYPES:
        known = type_ != "void"
        raise PipelineError(
            f"{text!r} has type {type_}, which a category cannot store"
            if known
            else f"the type of {text!r} is not known",
            why=f"a column on the bus is one of {', '.join(ARROW_TYPES)}",
            fix=f"wrap it in CAST({text} AS {_SUGGESTED.get(type_, 'string')})"
            if known
            else f"wrap it in CAST({text} AS type), with one of these types",
        )
    return Checked(text=text, type=type_, columns=frozenset(typer.used), normal=_normal(text))


def parse_text(text: str) -> exp.Expression:
    """Parse one expression; PipelineError if it is not valid."""
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
    if "${" in text:
        raise PipelineError(
            f"an expression cannot hold '${{': {text[:60]!r}",
            why="Spark would replace it with settings or environment variables, also inside quotes",
            fix="write the value itself; the two characters are concat('$', '{')",
        )
    try:
        tokens = tokens_of(text)
        found = SparkExpressions().parser().parse(tokens, text)
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
    kinds = [token.token_type for token in tokens]
    if kinds.count(TokenType.L_PAREN) != kinds.count(TokenType.R_PAREN):  # sqlglot lets CAST(x AS int pass
        raise PipelineError(
            f"the expression does not parse: {text!r}",
            why="a bracket is opened and never closed",
            fix="close it; the expression is Spark SQL, as in a WHERE or SELECT",
        )
    if len(found) != 1 or not isinstance(found[0], exp.Expression):
        raise PipelineError(
            f"this is not one expression: {text!r}",
            why="a ';' ends a statement, and a step takes a single expression",
            fix="remove the ';' and what follows",
        )
    return found[0]


def _syntax_error(text: str, error: ParseError) -> PipelineError:
    at, why = describe_syntax_error(text, error)
    return PipelineError(
        f"the expression does not parse: {text!r}",
        why=why + point_at(text, at),
        fix="correct the expression; it is Spark SQL, as in a WHERE or SELECT",
    )


def describe_syntax_error(text: str, error: ParseError) -> tuple[int, str]:
    """The position of a syntax error, and its description."""
    detail = error.errors[0]
    description, at = str(detail.get("description", "")), str(detail.get("highlight", ""))
    if description.startswith("Required keyword"):
        why = f"something is missing at {at!r}"
    elif missing := re.fullmatch(r"Expecting (.+)", description):
        what = missing[1] if " " in missing[1] else f"a {missing[1]!r}"
        why = f"{what} is missing after {at!r}"
    elif wrong := re.match(r"Expected (.+?) but got", description):
        why = f"a {wrong[1]} is expected, not {at!r}"
    elif description.startswith("Invalid expression"):
        why = f"{at!r} is not expected here"
    else:
        why = f"{description[:1].lower()}{description[1:]} at {at!r}"
    line, end = int(detail.get("line") or 1), int(detail.get("col") or 1)
    before = sum(len(each) for each in text.splitlines(keepends=True)[: line - 1])
    return before + max(end - len(at), 0), why


def point_at(text: str, at: int) -> str:
    """A suffix for error texts: line and column, and the line with a mark below the position."""
    start = text.rfind("\n", 0, at) + 1
    column = at - start
    shown = (text[start:].splitlines() or [""])[0]
    if len(shown) > _SHOWN_CHARS_MAX:
        cut = max(column - _SHOWN_CHARS_MAX // 2, 0)
        shown, indent = shown[cut : cut + _SHOWN_CHARS_MAX], column - cut
    else:
        indent = column
    line = text.count("\n", 0, at) + 1
    return f" (line {line}, column {column + 1})\n    {shown}\n    {' ' * indent}^"


def tokens_of(text: str) -> list[Token]:
    """The tokens of a text; TokenError if a quote is not closed."""
    return SparkExpressions().tokenize(text)


def _without_alias(text: str) -> str:
    tokens = tokens_of(text)
    cut = -2 if tokens[-2].token_type == TokenType.ALIAS else -1
    return text[: tokens[cut].start].strip()


def text_of(text: str) -> str:
    """The text without comments and with single spaces, as it is passed to Spark."""
    return joined(tokens_of(text), text)


def joined(tokens: Sequence[Token], text: str, without: Container[int] = ()) -> str:
    """The text of tokens, with one space for spaces and comments.

    `without`: indices of tokens to leave out.
    """
    parts, gap = [], False
    for number, token in enumerate(tokens):
        before = tokens[number - 1] if number else None
        if before is not None and token.start == before.start:
            continue  # 5L is parsed as 5::bigint
        gap |= before is not None and token.start > before.end + 1
        if number not in without:
            parts.append(" " * gap + text[token.start : token.end + 1])
            gap = False
    return "".join(parts)


def _normal(text: str) -> str:
    quoted = (TokenType.STRING, TokenType.RAW_STRING, TokenType.HEX_STRING)
    return " ".join(
        text[token.start : token.end + 1] if token.token_type in quoted else token.text.lower()
        for token in tokens_of(text)
    )


# --- plans from elsewhere --------------------------------------------------------------------------------

_NOWHERE = CodeLocation(file="plan", line=0)


def check_plan(plan: Mapping[str, Any], inputs: Sequence[Columns]) -> None:
    """Check every stage against its input columns; ConfigError. `inputs`: the columns of each input."""
    try:
        columns = inputs[0]
        for branch in plan.get("branches") or ():
            columns = _checked(branch["stages"], inputs[branch["input"]])
        columns = _checked(plan.get("stages", ()), columns)
        if plan.get("key"):
            _checked([{"op": "key", "expr": plan["key"]}], columns)
    except PipelineError as error:
        raise ConfigError(
            f"the job's plan cannot be run: {error.what}", why=error.why, fix=error.fix
        ) from None


def _checked(stages: Iterable[Mapping[str, Any]], columns: Columns) -> Columns:
    for stage in stages:
        match stage["op"]:
            case "filter":
                check_filter(stage["expr"], columns)
            case "key":
                check_value(stage["expr"], columns)
            case "select":
                for _, text, kind in stage["columns"]:
                    _check_type(text, check_value(text, columns).type, kind)
                columns = tuple((name, kind) for name, _, kind in stage["columns"])
            case "explode":
                found = check_value(stage["array"], columns).type
                made = tuple((name, kind) for name, kind in stage["columns"])
                _check_type(stage["array"], element_of(found), made[-1][1])
                columns = (*columns, *made)
            case other:
                raise PipelineError(
                    f"there is no stage {other!r}",
                    why="the stages are filter, select, explode and key",
                    fix="use one of these",
                )
        check_columns(columns, what=f"stage {stage['op']!r}", place=_NOWHERE)
    return columns


def _check_type(text: str, found: str, wanted: str) -> None:
    if wanted not in ARROW_TYPES or (found != wanted and not can_cast(found, wanted)):
        raise PipelineError(
            f"{text!r} cannot be converted to {wanted!r}",
            why=f"its type is {found}",
            fix=f"use one of {', '.join(ARROW_TYPES)}",
        )
