"""Parses SQL text to trees: sqlglot's Spark grammar with additions for pipelines. Pure.

Additions are CREATE PIPELINE, CREATE SOURCE and CREATE SINK, category names with dashes, and JOIN and LATERAL
VIEW in any order. Every node of a tree has the position of its text. Errors that sqlglot ignores silently are
raised here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar, NoReturn

from sqlglot import exp
from sqlglot.errors import ParseError, TokenError
from sqlglot.parser import Parser
from sqlglot.parsers.spark import SparkParser
from sqlglot.tokenizer_core import Token, TokenType

from penstock.core.errors import PipelineError
from penstock.streams.compile.expressions import SparkExpressions, describe_syntax_error, joined, point_at
from penstock.streams.compile.graph import CodeLocation

TEXT_CHARS_MAX = 1_000_000
CREATED = ("PIPELINE", "SOURCE", "SINK")  # what a CREATE in an SQL file may define
USE_ON = (
    "write ON a.k = b.k AND b.event_time BETWEEN a.event_time - INTERVAL 10 SECONDS "
    "AND a.event_time + INTERVAL 10 SECONDS"
)
USE_FIRST = (
    "QUALIFY row_number() OVER (PARTITION BY id, window(event_time, '1 hour') ORDER BY event_time) = 1"
)
USE_TOP = "QUALIFY row_number() OVER (PARTITION BY window ORDER BY n DESC) <= 3"
USE_INSERT = "INSERT INTO <category> SELECT … FROM <category>"
_SETTINGS = (
    "settings apply to the container's session, and would change for all of its tasks",
    "remove it; the settings of a job are in its config",
)
_CODE = ("tasks load code only from packages, never from a path", "remove it; use a Computation")
_DDL = (
    "a pipeline reads categories and writes sinks; it does not create or change anything else",
    "remove it; `penstock category NAME --create` creates a category for records from outside",
)
_APPEND = ("records can only be appended to a category", f"write {USE_INSERT}")
_REFUSED_STATEMENTS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("SET", "RESET", "USE"), _SETTINGS),
    **dict.fromkeys(("ADD", "LIST", "LOAD", "COPY"), _CODE),
    **dict.fromkeys(("CREATE", "DROP", "ALTER", "TRUNCATE", "CACHE", "REFRESH", "ANALYZE", "COMMENT"), _DDL),
    **dict.fromkeys(("UPDATE", "DELETE", "MERGE", "REPLACE"), _APPEND),
    "INSERT": ("records are appended to a sink, which is never replaced", f"write {USE_INSERT}"),
    **dict.fromkeys(
        ("SELECT", "WITH", "FROM", "VALUES", "TABLE"),
        ("its records would not be written to a sink", f"write {USE_INSERT}"),
    ),
}

_UNENDING = "a stream has no end, so the result would never be known"
_SORTING = (_UNENDING, "remove it; sort where the sink is read")
_REMEMBERING = (_UNENDING, "use a Computation that stores what it has seen")
_FOR_EVER = "it would have to store every record forever"
# sqlglot's name of a part of the tree -> its SQL keyword, why it is refused, what to do.
_REFUSED_PARTS: dict[str, tuple[str, str, str]] = {
    "hint": ("a hint", "the plan decides how a pipeline runs", "remove it"),
    "distinct": (
        "DISTINCT",
        _FOR_EVER,
        f"remove it, or keep the first record of each key within a limited time: {USE_FIRST}",
    ),
    "order": ("ORDER BY", *_SORTING),
    "sort": ("SORT BY", *_SORTING),
    "limit": ("LIMIT", _UNENDING, f"remove it; for the first records of each window use {USE_TOP}"),
    "offset": ("OFFSET", _UNENDING, "remove it, or filter by a column"),
    "having": (
        "HAVING",
        "results are filtered like other records",
        "write SELECT … FROM (SELECT … GROUP BY …) t WHERE …",
    ),
    "cluster": ("CLUSTER BY", "records of a stream are not sorted", "write DISTRIBUTE BY"),
    "except": ("EXCEPT", *_REMEMBERING),
    "intersect": ("INTERSECT", *_REMEMBERING),
    "union": ("UNION", _FOR_EVER, "write UNION ALL"),
    "comma": (",", "the join condition is missing", "write JOIN … ON"),
    "cross": ("CROSS", "every record would match every other", "write JOIN … ON keys and a time limit"),
    "right": ("RIGHT", "only LEFT JOIN is supported", "swap the sides and write LEFT JOIN"),
    "using": ("USING", "it cannot limit the time between two records", USE_ON),
}
KNOWN_PARTS = (
    "a query has WITH, SELECT, FROM, LATERAL VIEW, JOIN, WHERE, GROUP BY, QUALIFY, UNION ALL, DISTRIBUTE BY"
)
# A column named like one of these must be in backticks.
_WORDS = frozenset(
    {"FROM", "WHERE", "HAVING", "LIMIT", "OFFSET", "UNION", "EXCEPT", "INTERSECT", "MINUS", "LATERAL", "JOIN"}
    | {"INNER", "LEFT", "RIGHT", "FULL", "CROSS", "ANTI", "SEMI", "NATURAL", "ON", "USING", "QUALIFY"}
    | {"PIVOT", "UNPIVOT", "TABLESAMPLE"}
)
_CHARS = "chars"  # in a node's meta: the start and end (exclusive) of its text


def _positioned(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a parsing method, so that its node has the position of its text.

    sqlglot stores positions for names and functions only.
    """

    def parse(self: Parser, *args: Any, **kwargs: Any) -> Any:
        start = self._curr
        found = method(self, *args, **kwargs)
        node = found[1] if isinstance(found, tuple) else found  # a clause comes with its name
        if isinstance(node, exp.Expr):
            node.meta.setdefault(_CHARS, (start.start, self._prev.end + 1))
        elif self._curr is not start:  # sqlglot ignores a comma without an element after it
            self.raise_error("Invalid expression / Unexpected token", start)
        return found

    return parse


class _SparkStatements(SparkExpressions):
    class Parser(SparkExpressions.Parser):
        ADD_JOIN_ON_TRUE: ClassVar = False
        TABLE_ALIAS_TOKENS: ClassVar = {TokenType.VAR}  # without AS a keyword is not an alias
        QUERY_MODIFIER_PARSERS: ClassVar = {
            token: _positioned(parser) for token, parser in SparkParser.QUERY_MODIFIER_PARSERS.items()
        }
        _parse_disjunction = _positioned(SparkParser._parse_disjunction)
        _parse_expression = _positioned(SparkParser._parse_expression)
        _parse_lambda = _positioned(SparkParser._parse_lambda)  # an argument of a function
        _parse_ordered = _positioned(SparkParser._parse_ordered)
        _parse_from = _positioned(SparkParser._parse_from)
        _parse_table = _positioned(SparkParser._parse_table)
        _parse_lateral = _positioned(SparkParser._parse_lateral)
        _parse_join = _positioned(SparkParser._parse_join)
        _parse_cte = _positioned(SparkParser._parse_cte)
        parse_set_operation = _positioned(SparkParser.parse_set_operation)

        @_positioned
        def _parse_statement(self) -> exp.Expr | None:
            """Parse the statements of pipelines; any other one becomes a Command, and is refused later."""
            if not self._curr or self._curr.token_type == TokenType.SEMICOLON:
                return super()._parse_statement()
            if self._index:  # after WITH, or in its parentheses
                return self._parse_ddl_select()
            first, second = self._curr, self._next
            if first.token_type == TokenType.INSERT and second.token_type == TokenType.INTO:
                return super()._parse_statement()
            if first.token_type == TokenType.CREATE and second.text.upper() in CREATED:
                self._advance(2)
                name = self._parse_table(schema=True)
                options = self._match(TokenType.WITH) and self._parse_wrapped_csv(self._parse_disjunction)
                return self.expression(
                    exp.Create(
                        this=name,
                        kind=second.text.upper(),
                        properties=exp.Properties(expressions=options or []),
                    )
                )
            words = first.text.upper()
            if first.token_type == TokenType.INSERT:
                words += f" {second.text.upper()}"
            while self._curr:
                self._advance()
            return self.expression(exp.Command(this=words))

        def _parse_insert_table(self) -> Any:
            return self._parse_table(schema=True, parse_partition=True)

        def _parse_alias(self, this: exp.Expr | None, explicit: bool = False) -> exp.Expr | None:
            found = super()._parse_alias(this, explicit)
            if self._prev.token_type == TokenType.ALIAS:  # sqlglot ignores an AS without a name
                self.raise_error("Expecting a name")
            return found

        def _parse_select_query(self, *args: Any, **kwargs: Any) -> exp.Expr | None:
            if self._match(TokenType.FROM, advance=False):  # Hive's FROM … INSERT … SELECT …
                self.raise_error("Invalid expression / Unexpected token")
            return super()._parse_select_query(*args, **kwargs)

        def _parse_joins(self, alias_tokens: Collection[TokenType] | None = None) -> Iterator[Any]:
            """JOIN and LATERAL VIEW in any order; sqlglot requires all JOINs first."""
            while item := self._parse_join(alias_tokens=alias_tokens) or self._parse_lateral():
                yield item

        def _parse_table_part(self, schema: bool = False) -> exp.Expr | None:
            """Allow dashes in the name of a category that is read."""
            part = super()._parse_table_part(schema=schema)
            while not schema and isinstance(part, exp.Identifier) and self._match(TokenType.DASH):
                more = self._parse_id_var(any_token=False)
                if more is None:
                    self.raise_error("Invalid expression / Unexpected token")
                else:
                    part.set("this", f"{part.name}-{more.name}")
            return part

        def _parse_csv(self, parse_method: Callable[[], Any], sep: TokenType = TokenType.COMMA) -> list[Any]:
            """A list; sqlglot ignores a comma without an element."""

            def item() -> Any:
                found = parse_method()
                if found is None and sep in (self._prev.token_type, self._curr.token_type):
                    self.raise_error("Expecting an expression")
                return found

            return super()._parse_csv(item, sep)

        def _parse_string_as_identifier(self) -> None:
            """Not supported: a text in quotes could be a path."""

        def _parse_pipe_syntax_query(self, query: exp.Query) -> None:
            self.raise_error("Invalid expression / Unexpected token")


class SqlText:
    """An SQL text with its parsed statements. `line`: the number of its first line in the user's file."""

    def __init__(self, text: str, *, file: str, line: int = 1) -> None:
        if len(text) > TEXT_CHARS_MAX:
            raise PipelineError(
                f"{file}: the SQL has {len(text)} characters",
                why=f"the limit is {TEXT_CHARS_MAX}",
                fix="split it into several pipelines",
            )
        self.text, self._file, self._line = text, file, line
        self._lines = [0, *(at + 1 for at, char in enumerate(text) if char == "\n")]
        self._dropped: set[int] = set()  # start positions of tokens that are left out of expressions
        dialect = _SparkStatements()
        try:
            self._tokens: list[Token] = dialect.tokenize(text)
            found = dialect.parser().parse(self._tokens, text)
        except TokenError:
            raise PipelineError(
                f"{file}: the SQL does not parse",
                why="a quote (', \" or `) or a comment is opened and never closed",
                fix="close it; a quote inside text is written \\'",
            ) from None
        except ParseError as error:
            raise self._syntax_error(error) from None
        except RecursionError:
            raise PipelineError(
                f"{file}: the SQL is nested too deeply",
                why="the parser gave up",
                fix="split it into several queries",
            ) from None
        self._starts = [token.start for token in self._tokens]
        self.statements = [node for node in found if node is not None and not isinstance(node, exp.Semicolon)]

    def _syntax_error(self, error: ParseError) -> PipelineError:
        at, description = describe_syntax_error(self.text, error)
        line = bisect_right(self._lines, at) - 1
        word = str(error.errors[0].get("highlight", ""))
        unexpected = word and str(error.errors[0].get("description", "")).startswith("Invalid expression")
        return PipelineError(
            f"{self._file}:{self._line + line}: "
            + (f"{word!r} cannot be used here" if unexpected else "the SQL does not parse"),
            why=f"{description}: the statement was complete, or this part of SQL is not known"
            + point_at(self.text, at)
            if unexpected
            else description + point_at(self.text, at),
            fix="end the statement with ';', or correct this part; "
            "put a column named like an SQL keyword into backticks",
        )

    def chars(self, node: exp.Expr) -> tuple[int, int]:
        """The position of a node's text; without one, that of its first part."""
        if _CHARS in node.meta:
            found: tuple[int, int] = node.meta[_CHARS]
            return found
        inside = [part.meta.get(_CHARS) or (part.meta["start"], part.meta["end"] + 1)
                  for part in node.walk() if _CHARS in part.meta or "start" in part.meta]  # fmt: skip
        if inside:
            return min(inside)
        return self.chars(node.parent) if node.parent is not None else (0, 0)

    def place(self, at: int) -> CodeLocation:
        """The line of a character."""
        return CodeLocation(file=self._file, line=self._line + bisect_right(self._lines, at) - 1)

    def fail(self, at: exp.Expr | int, what: str, *, why: str, fix: str) -> NoReturn:
        """Raise an error for a node or a position."""
        start = at if isinstance(at, int) else self.chars(at)[0]
        raise PipelineError(f"{self.place(start)}: {what}", why=why + point_at(self.text, start), fix=fix)

    def shown(self, node: exp.Expr) -> str:
        """The text of a node, without comments and with single spaces."""
        start, end = self.chars(node)
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, end)
        tokens = self._tokens[first:last]
        without = {number for number, token in enumerate(tokens) if token.start in self._dropped}
        return joined(tokens, self.text, without)

    def drop_qualifiers(self, node: exp.Expr, names: Collection[str]) -> None:
        """Remove table names from the tree and the text, because columns of streams have no table."""
        for column in node.find_all(exp.Column):
            for part in ("catalog", "db", "table"):
                qualifier = column.args.get(part)
                if isinstance(qualifier, exp.Identifier):
                    if qualifier.name.lower() in names:
                        start = qualifier.meta["start"]
                        dot = self._tokens[bisect_left(self._starts, start) + 1]
                        self._dropped |= {start, dot.start}
                        column.set(part, None)
                    break

    def words(self, node: exp.Expr) -> str:
        """The tokens of a node, without quotes and spaces."""
        start, end = self.chars(node)
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, end)
        return "".join(token.text for token in self._tokens[first:last])

    def token_before(self, at: int) -> Token:
        """The last token before a character."""
        return self._tokens[bisect_left(self._starts, at) - 1]

    def before(self, at: int) -> str:
        """For error texts: before the token at or after a position."""
        number = bisect_left(self._starts, at)
        if number == len(self._tokens) or self._tokens[number].token_type == TokenType.SEMICOLON:
            return " at the end"
        token = self._tokens[number]
        return f" before {self.text[token.start : token.end + 1]!r}"

    def refuse_others(self, node: exp.Expr, *known: str) -> None:
        """Refuse all parts of a node except the known ones."""
        for part, value in node.args.items():
            if not value or part in known:
                continue
            first = value[0] if isinstance(value, list) else value
            self.refuse(part, first if isinstance(first, exp.Expr) else node)

    def refuse(self, part: str, node: exp.Expr | int) -> NoReturn:
        """Raise an error: this part of SQL cannot be used."""
        unknown = (part.strip("_").upper(), KNOWN_PARTS, "remove it")
        name, why, fix = _REFUSED_PARTS.get(part, unknown)
        self.fail(node, f"{name} cannot be used in a stream", why=why, fix=fix)

    def refuse_statement(self, node: exp.Expr) -> NoReturn:
        """Raise an error: this statement cannot be used."""
        if isinstance(node, exp.Create):
            self.fail(
                node,
                "CREATE PIPELINE cannot be used here",
                why="it must be the first statement of a file, and occur once",
                fix="move it to the top of the file; in Python write Pipeline(name, partitions=…)",
            )
        words = str(node.this) if isinstance(node, exp.Command) else self.shown(node)[:40]
        unknown = ("pipelines do not have this statement", f"write {USE_INSERT}")
        why, fix = _REFUSED_STATEMENTS.get(words.split(" ")[0], unknown)
        self.fail(node, f"{words} cannot be used in a pipeline", why=why, fix=fix)

    def refuse_words(self, node: exp.Expr) -> None:
        """Refuse a column that is named like an SQL keyword and is not in backticks."""
        for name in node.find_all(exp.Identifier):
            bare = not name.args.get("quoted") and name.find_ancestor(exp.Anonymous, exp.Paren) is None
            if bare and name.name.upper() in _WORDS:
                self.fail(
                    name,
                    f"an expression is expected before {name.name!r}",
                    why=f"{name.name.upper()} is an SQL keyword",
                    fix="put a column named like an SQL keyword into backticks",
                )
