"""Translates SQL text to the graph of a pipeline: each INSERT writes a sink. Pure: text in, steps out.

CREATE PIPELINE words WITH (partitions = 4);
INSERT INTO words SELECT lower(word) AS word FROM queries LATERAL VIEW explode(split(query, ' ')) t AS word;

sqlglot parses the text with Spark's grammar, and the tree is translated to calls of the DSL. Parts of SQL
that are not known here are refused. Expressions are passed to the DSL as text, so the same functions are
allowed and the same checks apply.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sqlglot import exp
from sqlglot.tokenizer_core import TokenType

from penstock.core.errors import PipelineError
from penstock.streams.catalogue import nearest
from penstock.streams.compile.functions import AGGREGATES, GENERATORS
from penstock.streams.compile.graph import SourceStep, safe_name
from penstock.streams.dsl.pipeline import Pipeline, Stream
from penstock.streams.dsl.sql_grammar import KNOWN_PARTS, USE_FIRST, USE_INSERT, USE_ON, USE_TOP, SqlText
from penstock.streams.dsl.windows import (
    WINDOW_END,
    WINDOW_START,
    Spans,
    offset_ms,
    session,
    sliding,
    tumbling,
)

EVENT_TIME = "event_time"

_FROM = "write SELECT … FROM <category>"
_LATERAL = "write LATERAL VIEW explode(array) t AS column"
_CLAUSES = ("from_", "joins", "where", "group", "qualify", "distribute")  # in the order of a query
_JOINS = {("", ""): "inner", ("", "INNER"): "inner"}
_JOINS |= {("LEFT", ""): "left", ("LEFT", "OUTER"): "left", ("FULL", ""): "outer", ("FULL", "OUTER"): "outer"}
_FILES = frozenset({"parquet", "json", "csv", "orc", "text", "avro", "delta", "iceberg", "binaryfile", "xml"})
_CATEGORY_CHARS = frozenset("_.-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_WINDOWS = ("window", "session_window")
_OPTIONS: dict[str, dict[str, type]] = {
    "PIPELINE": {"partitions": int},
    "SOURCE": {"start": str},
    "SINK": {"partitions": int},
}


def pipeline_from_sql(text: str, *, file: str, name: str) -> Pipeline:
    """The pipeline of an SQL file; `name`: its name without CREATE PIPELINE."""
    source = SqlText(text, file=file)
    statements, options = source.statements, dict[str, Any]()
    if statements and isinstance(statements[0], exp.Create) and statements[0].args["kind"] == "PIPELINE":
        name, options = _name(source, statements[0].this), _options(source, statements[0])
        statements = statements[1:]
    pipeline = Pipeline(name, partitions=options.get("partitions", 4))
    try:
        _write(pipeline, source, statements)
    finally:
        pipeline._place_of_sql = None
    return pipeline


def add_statements(pipeline: Pipeline, text: str, *, file: str, line: int) -> None:
    """Add the statements of a text to a pipeline."""
    if not isinstance(text, str):
        raise PipelineError(
            f"{file}:{line}: sql() needs text, not {text!r}",
            why="it is parsed as Spark SQL",
            fix=f"write {USE_INSERT}",
        )
    source = SqlText(text, file=file, line=line)
    _write(pipeline, source, source.statements)


def _write(pipeline: Pipeline, source: SqlText, statements: Sequence[exp.Expr]) -> None:
    options: dict[tuple[str, str], dict[str, Any]] = {}
    unused: dict[tuple[str, str], exp.Expr] = {}

    def read(category: str) -> Stream:
        unused.pop(("SOURCE", category), None)
        for step in pipeline._steps.values():
            if isinstance(step, SourceStep) and step.category == category:
                return Stream(pipeline=pipeline, step=step.name)
        return pipeline.source(category, **options.get(("SOURCE", category), {}))

    inserts = 0
    for node in statements:
        pipeline._place_of_sql = source.place(source.chars(node)[0])
        if isinstance(node, exp.Create) and node.args["kind"] != "PIPELINE":
            about = (node.args["kind"], _name(source, node.this))
            options[about], unused[about] = _options(source, node), node
            continue
        if not isinstance(node, exp.Insert):
            source.refuse_statement(node)
        inserts += 1
        sink = _sink_of(source, node)
        stream = _Query(source, pipeline, read, sink).read(node.expression)
        pipeline._place_of_sql = source.place(source.chars(node)[0])
        unused.pop(("SINK", sink), None)
        stream.sink(sink, **options.get(("SINK", sink), {}))
    if not inserts:
        source.fail(
            max(len(source.text) - 1, 0),
            "there is no statement",
            why="a pipeline is one INSERT for each sink",
            fix=f"write {USE_INSERT}",
        )
    for (kind, name), node in unused.items():
        source.fail(
            node,
            f"{kind.lower()} {name!r} is not used",
            why=f"no later statement {'reads' if kind == 'SOURCE' else 'writes'} it",
            fix="move it before the statement that does, or remove it",
        )


def _sink_of(source: SqlText, node: exp.Insert) -> str:
    """The category that an INSERT writes."""
    table = node.this
    if isinstance(table, exp.Schema) or table.args.get("partition") or node.args.get("partition"):
        source.fail(
            table,
            "columns or partitions of a sink cannot be named here",
            why="a sink has the columns of its SELECT, with these names and in this order",
            fix="name them in the SELECT: expression AS name",
        )
    sink = _name(source, table)
    source.refuse_others(node, "this", "expression")
    if node.expression is None:
        source.fail(
            source.chars(node)[1], "SELECT is expected", why="there is no query", fix=f"write {USE_INSERT}"
        )
    return sink


def _name(source: SqlText, node: exp.Expr) -> str:
    """A name, with dots between its parts."""
    parts = node.parts if isinstance(node, exp.Table) else []
    name = ".".join(part.name for part in parts if isinstance(part, exp.Identifier))
    if not name or source.words(node) != name:
        source.fail(
            node, f"{source.shown(node)!r} is not a name", why="a name is expected here", fix="write a name"
        )
    return name


def _options(source: SqlText, node: exp.Create) -> dict[str, Any]:
    """WITH (name = value, …)."""
    kind: str = node.args["kind"]
    known, found = _OPTIONS[kind], {}
    fix = f"write CREATE {kind} name WITH ({next(iter(known))} = …)"
    for option in node.args["properties"].expressions:
        if not isinstance(option, exp.EQ) or not isinstance(option.this, exp.Column) or option.this.table:
            source.fail(
                option, f"{source.shown(option)!r} is not an option", why="an option is name = value", fix=fix
            )
        name, value = option.this.name.lower(), option.expression
        if name not in known:
            near = nearest(name, known)
            why = f"a {kind.lower()} has: {', '.join(known)}"
            source.fail(
                option,
                f"there is no option {name!r}",
                why=why,
                fix=f"did you mean {near!r}?" if near else fix,
            )
        text = value.name if isinstance(value, exp.Literal) else source.shown(value)
        is_number = isinstance(value, exp.Literal) and not value.is_string and text.isdigit()
        if not isinstance(value, exp.Literal) or is_number != (known[name] is int):
            why = "it is " + ("a whole number" if known[name] is int else "text in quotes")
            source.fail(option, f"{text!r} is not a valid value for {name!r}", why=why, fix=fix)
        found[name] = known[name](text)
    return found


# --- queries -----------------------------------------------------------------------------------------------


class _Query:
    """Translates one query; `source` gives the stream of a category, `sink` is used in step names."""

    def __init__(self, text: SqlText, pipeline: Pipeline, source: Callable[[str], Stream], sink: str) -> None:
        self._text, self._pipeline, self._source, self._sink = text, pipeline, source, sink
        self._named: dict[str, Stream] = {}  # WITH name AS (…)

    def read(self, node: exp.Expr) -> Stream:
        """WITH …, a SELECT, several of them with UNION ALL, or a query in parentheses; DISTRIBUTE BY."""
        outer, distribute = dict(self._named), node.args.get("distribute")
        if (named := node.args.get("with_")) is not None:
            self._text.refuse_others(named, "expressions")
            for query in named.expressions:
                self._text.refuse_others(query, "this", "alias")
                self._named[self._alias(query).lower()] = self.read(query.this)
        match node:
            case exp.Select():
                stream = self._select(node)
            case exp.SetOperation():
                stream = self._union(node)
            case exp.Subquery():
                self._text.refuse_others(node, "this", "with_", "distribute")
                stream = self.read(node.this)
            case _:
                self._cannot_be_read(node)
        if distribute is not None:
            self._set_line(distribute.expressions[0])
            stream = self._keyed(stream, [self._text.shown(part) for part in distribute.expressions])
        self._named = outer
        return stream

    def _union(self, node: exp.SetOperation) -> Stream:
        top, operands = node, []
        while True:
            if not isinstance(node, exp.Union) or node.args.get("distinct"):
                self._text.refuse(type(node).__name__.lower(), node)
            self._text.refuse_others(
                node, "this", "expression", *(("with_", "distribute") if node is top else ())
            )
            operands.append(node.expression)
            if not isinstance(node.this, exp.SetOperation):
                break
            node = node.this
        streams = []
        for operand in (node.this, *reversed(operands)):
            for part in ("with_", "distribute") if not isinstance(operand, exp.Subquery) else ():
                if operand.args.get(part) is not None:
                    self._text.fail(
                        operand.args[part],
                        f"{'WITH' if part == 'with_' else 'DISTRIBUTE BY'} cannot be used here",
                        why="it applies to all queries of a UNION ALL",
                        fix="write WITH before the first query, DISTRIBUTE BY after "
                        "the last, or use parentheses",
                    )
            streams.append(self.read(operand))
        self._set_line(node)
        return streams[0].union(*streams[1:])

    def _select(self, node: exp.Select) -> Stream:
        text, items = self._text, node.expressions
        text.refuse_others(node, "with_", "expressions", *_CLAUSES)
        starts = [
            (text.chars(value[0] if isinstance(value, list) else value)[0], clause)
            for clause in _CLAUSES
            if (value := node.args.get(clause))
        ]
        if not items:
            position = text.before(starts[0][0]) if starts else ""
            fix = "add one; put a column named like an SQL keyword into backticks"
            text.fail(node, f"an expression is expected{position}", why="there is none", fix=fix)
        select = text.token_before(text.chars(items[0])[0])
        if select.token_type != TokenType.SELECT:
            text.fail(select.start, f"{select.text} cannot be used here", why=KNOWN_PARTS, fix=_FROM)
        if starts != sorted(starts):
            text.fail(
                node, "the parts of this query cannot be used in this order", why=KNOWN_PARTS, fix=_FROM
            )
        if node.args.get("from_") is None:
            end = text.chars(items[-1])[1]
            fail = f"FROM is expected{text.before(end)}"
            text.fail(end, fail, why="the statement is not complete here", fix=_FROM)
        stream, names = self._from(node)
        if (where := node.args.get("where")) is not None:
            self._set_line(where.this)
            stream = stream.filter(self._plain(where.this, names))
        qualify = node.args.get("qualify")
        if (group := node.args.get("group")) is not None:
            return self._grouped(stream, group, items, qualify, names)
        if qualify is not None:
            self._set_line(qualify.this)
            stream = self._first(stream, qualify.this, names)
        self._pipeline._place_of_sql = text.place(select.start)
        return self._selected(stream, items, names)

    def _selected(self, stream: Stream, items: Sequence[exp.Expr], names: Collection[str]) -> Stream:
        if len(items) == 1 and self._plain(items[0], names) == "*":
            return stream
        columns: list[str] = []
        for item in items:
            text, value = self._plain(item, names), item.unalias()
            if isinstance(item, exp.Aliases):
                value = item.this
            if isinstance(value, exp.Anonymous) and value.name.lower() in GENERATORS:
                stream = stream.flat_map(text)
                named = item.expressions if isinstance(item, exp.Aliases) else [item.args.get("alias")]
                columns += [name.name for name in named if name is not None]
            else:
                columns.append(text)
        return stream.select(*columns)

    def _from(self, node: exp.Select) -> tuple[Stream, set[str]]:
        stream, alias = self._table(node.args["from_"].this)
        names, timed = {alias}, frozenset({alias})
        for item in node.args.get("joins") or ():
            if isinstance(item, exp.Lateral):
                stream = self._lateral(item, stream, names)
                continue
            how = self._how(item)
            self._set_line(item)
            right, other = self._table(item.this)
            at = self._pipeline._place_of_sql
            if item.args.get("on") is None:
                end = self._text.chars(item)[1]
                fail = f"ON is expected{self._text.before(end)}"
                self._text.fail(end, fail, why="the statement is not complete here", fix=USE_ON)
            sides = _Sides(left=frozenset(names), timed=timed, right=other)
            found = _Condition(self._text, item.args["on"], sides)
            self._pipeline._place_of_sql = at
            stream = self._joined(stream, right, found, how)
            names.add(other)
            timed = frozenset()  # a pair has the later of two times
        return stream, names

    def _table(self, node: exp.Expr) -> tuple[Stream, str]:
        """The stream that FROM or JOIN reads, and its name in the query."""
        self._set_line(node)
        if isinstance(node, exp.Subquery) and isinstance(node.this, exp.Query):
            self._text.refuse_others(node, "this", "alias")
            return self.read(node.this), self._alias(node).lower()
        if not isinstance(node, exp.Table):
            self._cannot_be_read(node)
        if node.name.upper() == "TABLE" or not all(isinstance(part, exp.Identifier) for part in node.parts):
            if isinstance(node.this, exp.Anonymous | exp.Func):
                name, why = (
                    f"{node.this.name}()",
                    "a pipeline reads categories, not table functions",
                )
                self._text.fail(node, f"{name} cannot be read", why=why, fix="FROM <category>")
            self._cannot_be_read(node)
        name = ".".join(part.name for part in node.parts)
        if not _CATEGORY_CHARS.issuperset(name) or (name.split(".")[0].lower() in _FILES and "." in name):
            self._text.fail(
                node,
                f"{name!r} is not a category",
                why="a stream reads categories of the bus, not files or tables",
                fix="publish the records to a category first",
            )
        self._text.refuse_others(node, "this", "db", "catalog", "alias")
        alias = self._alias(node)
        if self._text.words(node).upper() not in {f"{name}{word}{alias}".upper() for word in ("", "AS")}:
            shown = self._text.shown(node)
            self._text.fail(
                node, f"{shown} cannot be read", why="this is not the name of a category", fix=_FROM
            )
        alias = alias or name.rpartition(".")[2]
        named = self._named.get(name.lower())
        return (self._source(name) if named is None else named), alias.lower()

    def _cannot_be_read(self, node: exp.Expr) -> NoReturn:
        word = "VALUES" if isinstance(node, exp.Values) else self._text.shown(node)[:40]
        self._text.fail(
            node,
            f"{word} cannot be read",
            why="a pipeline reads categories",
            fix="name a category, or write (SELECT …)",
        )

    def _alias(self, node: exp.Expr) -> str:
        alias = node.args.get("alias")
        if isinstance(alias, exp.TableAlias):
            self._text.refuse_others(alias, "this")
        return node.alias

    def _lateral(self, node: exp.Lateral, stream: Stream, names: set[str]) -> Stream:
        """LATERAL VIEW [OUTER] explode(array) table AS column, …"""
        self._set_line(node)
        call, alias = node.this, node.args.get("alias")
        columns = [self._text.shown(column) for column in alias.args.get("columns") or ()] if alias else []
        is_call = isinstance(call, exp.Anonymous) and len(call.expressions) == 1
        if alias is None or not node.args.get("view") or not is_call or not columns:
            self._text.fail(
                node,
                f"{self._text.shown(node)} cannot be used in a stream",
                why="LATERAL VIEW makes records from one array, and must name their columns",
                fix=_LATERAL,
            )
        function, array = call.name.lower(), self._plain(call.expressions[0], names)
        if alias.name:
            names.add(alias.name.lower())
        if node.args.get("outer") and not function.endswith("_outer"):
            function += "_outer"
        made = columns[0] if len(columns) == 1 else f"({', '.join(columns)})"
        return stream.flat_map(f"{function}({array}) AS {made}")

    def _how(self, node: exp.Join) -> str:
        """The kind of a JOIN: inner, left or outer."""
        if self._text.shown(node).startswith(","):
            self._text.refuse("comma", node)
        side, kind = node.side, node.kind
        if (side, kind) not in _JOINS or node.method:
            refused = next((word for word in ("cross", "right") if word.upper() in (side, kind)), None)
            self._text.refuse(refused or f"{node.method} {side} {kind} JOIN".strip(), node)
        self._text.refuse_others(node, "this", "on", "side", "kind")
        return _JOINS[side, kind]

    def _joined(self, left: Stream, right: Stream, found: _Condition, how: str) -> Stream:
        sides = found.sides
        keyed = [
            stream.key_by(*keys, name=self._free(safe_name(f"{side}_by_{'_'.join(keys)}")))
            for stream, keys, side in ((left, found.left, min(sides.left)), (right, found.right, sides.right))
        ]
        within = (found.before_ms, found.after_ms)
        return keyed[0].join(keyed[1], within=within, how=how, name=self._free("join"))

    def _grouped(
        self,
        stream: Stream,
        group: exp.Group,
        items: Sequence[exp.Expr],
        qualify: exp.Qualify | None,
        names: Collection[str],
    ) -> Stream:
        """GROUP BY columns and one window: key_by, window, aggregate, and a select if the columns differ."""
        self._text.refuse_others(group, "expressions", "all")
        keys: list[str] = []
        windows: list[exp.Expr] = []
        for part in group.expressions:
            text = self._plain(part, names)
            first = part.parts[0].name if isinstance(part, exp.Column) else part.name
            if isinstance(part, exp.Column | exp.Anonymous) and first.lower() in _WINDOWS:
                windows.append(part)
            else:
                keys.append(text)
        if len(windows) != 1 or not keys or group.args.get("all") is not None:
            self._text.fail(
                group,
                "GROUP BY needs columns and one window",
                why="results are emitted when a window ends; without a window they would never be emitted",
                fix="write GROUP BY column, window(event_time, '10 seconds')",
            )
        spans = self._spans(windows[0])
        wanted: list[str] = []
        values: dict[str, exp.Expr] = {}  # an aggregate's name -> what it computes
        texts: list[str] = []
        for item in items:
            text, value, name = self._plain(item, names), item.unalias(), ""
            if isinstance(item, exp.Alias):
                name = item.args["alias"].sql(dialect="spark")
            if bound := _bound(value):
                wanted.append(f"{bound} AS {name}" if name and name != bound else bound)
            elif isinstance(value, exp.Anonymous) and value.name.lower() in AGGREGATES:
                texts.append(text)
                values[name] = value
                wanted.append(name)
            else:
                wanted.append(text)
        if not values:
            fix = "add one, as in count(*) AS n"
            self._text.fail(group, "GROUP BY computes nothing", why="SELECT has no aggregate", fix=fix)
        self._set_line(group.expressions[0])
        result = self._keyed(stream, keys).window(spans).aggregate(*texts, name=self._free("aggregate"))
        if qualify is not None:
            self._set_line(qualify.this)
            found = _Qualify(self._text, qualify.this, names)
            by, lowest = found.top_column(values), not found.descending
            result = result.top(found.count, by=by, per=found.columns, lowest=lowest, name=self._free("top"))
            return result.select(*wanted)
        made = [*keys, WINDOW_START, WINDOW_END, *values]
        return result if wanted == made else result.select(*wanted)

    def _first(self, stream: Stream, node: exp.Expr, names: Collection[str]) -> Stream:
        """The first record of each key and window: key_by, dedup."""
        found = _Qualify(self._text, node, names)
        found.check_first()
        spans = self._spans(found.window)
        if spans.kind != "tumbling":
            self._text.fail(
                found.window,
                f"{self._text.shown(found.window)} cannot be used here",
                why="a record must be in exactly one window, with a known end",
                fix=f"write {USE_FIRST}",
            )
        return self._keyed(stream, found.columns).dedup(window=spans, name=self._free("dedup"))

    def _spans(self, node: exp.Expr) -> Spans:
        """window(event_time, '1 minute'), with a third argument that slides it, or session_window()."""
        time, *lengths = node.expressions or [exp.Null()]
        is_session = node.name.lower() == "session_window"
        is_window = isinstance(time, exp.Column) and time.sql(dialect="spark").lower() == EVENT_TIME
        is_window &= len(lengths) in ((1,) if is_session else (1, 2))
        if not is_window or not all(
            isinstance(length, exp.Literal) and length.is_string for length in lengths
        ):
            self._text.fail(
                node,
                f"{self._text.shown(node)} is not a valid window",
                why=f"windows use the event time of records, which is called {EVENT_TIME}",
                fix=f"write window({EVENT_TIME}, '10 seconds') or session_window({EVENT_TIME}, '5 minutes')",
            )
        texts = [length.name for length in lengths]
        if is_session:
            return session(gap=texts[0])
        return tumbling(texts[0]) if len(texts) == 1 else sliding(texts[0], every=texts[1])

    def _keyed(self, stream: Stream, keys: Sequence[str]) -> Stream:
        return stream.key_by(*keys, name=self._free(safe_name("by_" + "_".join(keys))))

    def _free(self, name: str) -> str:
        """A step name as the DSL derives it; if it is taken, with the sink's name in front."""
        taken, count = self._pipeline._steps, 1
        first = safe_name(f"{self._sink}_{name}")
        found = name if name not in taken else first
        while found in taken:
            count += 1
            found = f"{first[:58]}_{count}"
        return found

    def _plain(self, node: exp.Expr, names: Collection[str]) -> str:
        """The text of an expression without the names of tables."""
        self._text.drop_qualifiers(node, names)
        self._text.refuse_words(node)
        return self._text.shown(node)

    def _set_line(self, node: exp.Expr) -> None:
        """Set the line of the next steps."""
        self._pipeline._place_of_sql = self._text.place(self._text.chars(node)[0])


def _bound(node: exp.Expr) -> str:
    """The column for window.start or window.end, else ""."""
    if isinstance(node, exp.Column) and len(node.parts) == 2 and node.table.lower() in _WINDOWS:
        return {"start": WINDOW_START, "end": WINDOW_END}.get(node.name.lower(), "")
    return ""


# --- JOIN … ON ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """The table names of each side. `timed`: left names that have the event time of the left records.

    After a join there is none: its results have the later of two times.
    """

    left: frozenset[str]
    timed: frozenset[str]
    right: str


class _Condition:
    """The condition of a JOIN: equal columns, and bounds on the time between the records.

    `left` and `right`: equal columns, in order. `before_ms`, `after_ms`: how long before or after the left
    record the right one may be; several BETWEEN are combined.
    """

    def __init__(self, text: SqlText, on: exp.Expr, sides: _Sides) -> None:
        self._text, self._on, self.sides = text, on, sides
        if sides.right in sides.left:
            self._refuse(
                f"both sides are called {sides.right}",
                fix="give each side a name of its own: FROM clicks AS a JOIN clicks AS b ON …",
            )
        pairs: list[tuple[str, str]] = []
        bounds: list[tuple[int, int]] = []
        for part in _conjuncts(on):
            if isinstance(part, exp.EQ) and isinstance(part.this, exp.Column):
                pairs.append(self._pair(part))
            elif isinstance(part, exp.Between):
                bounds.append(self._bounds(part))
            else:
                self._refuse(f"{part.sql(dialect='spark')} is neither an equal key nor a bound of time")
        if not pairs or not bounds:
            self._refuse("it needs equal keys, and a limit for the time between the records")
        self.left = tuple(left for left, _ in pairs)
        self.right = tuple(right for _, right in pairs)
        self.before_ms = min(before for before, _ in bounds)
        self.after_ms = min(after for _, after in bounds)

    def _pair(self, node: exp.EQ) -> tuple[str, str]:
        """The column of the left side and the one of the right."""
        one, other = node.this, node.expression
        if not isinstance(other, exp.Column):
            self._refuse(f"{node.sql(dialect='spark')} is neither an equal key nor a bound of time")
        first, second = one.table.lower(), other.table.lower()
        if first in self.sides.left and second == self.sides.right:
            return one.name, other.name
        if first == self.sides.right and second in self.sides.left:
            return other.name, one.name
        self._refuse(f"{node.sql(dialect='spark')} does not compare the two sides")

    def _bounds(self, node: exp.Between) -> tuple[int, int]:
        """How long before and after the left record the right one may be."""
        low, high = node.args["low"], node.args["high"]
        side = self._side(node.this)
        others = {
            self._side(bound.this if isinstance(bound, exp.Sub | exp.Add) else bound) for bound in (low, high)
        }
        if others == {side} or len(others) > 1:
            shown = node.sql(dialect="spark")
            self._refuse(f"{shown} does not bound the time of one side by the time of the other")
        earlier, later = self._distance(low, exp.Sub), self._distance(high, exp.Add)
        # "left BETWEEN right - earlier AND right + later" is the opposite for the right side.
        return (earlier, later) if side == "right" else (later, earlier)

    def _side(self, node: exp.Expr) -> str:
        """The side of this event time: "left" or "right"."""
        if not isinstance(node, exp.Column) or node.name.lower() != EVENT_TIME:
            self._refuse("the bounds are not between the event times of the two sides")
        table, sides = node.table.lower(), self.sides
        if table == sides.right:
            return "right"
        if table in sides.timed:
            return "left"
        if table in sides.left:
            self._refuse(
                f"{table}.event_time is not known after a join: its results have the later of both times",
                fix="join first: FROM (SELECT … FROM a JOIN b ON …) ab JOIN c ON …, with ab.event_time, "
                "which is that later time",
            )
        names = " or ".join(f"{name}.event_time" for name in (*sorted(sides.timed), sides.right))
        self._refuse(f"{node.sql(dialect='spark')} is not the time of a side: write {names}")

    def _distance(self, bound: exp.Expr, sign: type[exp.Expr]) -> int:
        """The distance of a bound from the other side's time, in the direction of `sign`."""
        if isinstance(bound, exp.Column):
            return 0
        interval = bound.args.get("expression")
        if not isinstance(interval, exp.Interval) or interval.this is None:
            self._refuse("a bound is an event time minus or plus an INTERVAL")
        distance = offset_ms(f"{interval.this.name} {interval.text('unit')}")
        if distance and not isinstance(bound, sign):
            self._refuse(
                f"{bound.sql(dialect='spark')} is on the wrong side: the lower bound is an event time minus "
                "an INTERVAL, the upper one plus an INTERVAL, so that equal times are always between them"
            )
        return distance

    def _refuse(self, why: str, *, fix: str = USE_ON) -> NoReturn:
        self._text.fail(self._on, f"ON {self._text.shown(self._on)} cannot be used", why=why, fix=fix)


def _conjuncts(node: exp.Expr) -> Iterator[exp.Expr]:
    """The conditions of an AND, without parentheses."""
    if isinstance(node, exp.Paren):
        yield from _conjuncts(node.this)
    elif isinstance(node, exp.And):
        yield from _conjuncts(node.this)
        yield from _conjuncts(node.expression)
    else:
        yield node


# --- QUALIFY -----------------------------------------------------------------------------------------------


class _Qualify:
    """QUALIFY row_number() OVER (PARTITION BY … ORDER BY …) <= k: the first `count` of each group of rows.

    `columns`: of PARTITION BY, without the window. `window`: a column of that name, or window(event_time, …).
    """

    def __init__(self, text: SqlText, node: exp.Expr, names: Collection[str]) -> None:
        self._text, self._node = text, node
        text.drop_qualifiers(node, names)
        over = node.this if isinstance(node, exp.EQ | exp.LTE | exp.LT) else None
        if (
            not isinstance(over, exp.Window)
            or over.this.name.lower() != "row_number"
            or over.this.expressions
        ):
            self._refuse("it must compare row_number() OVER (…) with a number, by =, <= or <")
        limit, order = node.expression, over.args.get("order")
        if not isinstance(limit, exp.Literal) or limit.is_string or not limit.name.isdigit():
            self._refuse("the number must be a literal")
        self.count = int(limit.name) - isinstance(node, exp.LT)
        if self.count < 1 or (isinstance(node, exp.EQ) and self.count != 1):
            self._refuse("it must keep the first records: = 1, <= k or < k")
        if over.args.get("spec") is not None or order is None or len(order.expressions) != 1:
            self._refuse("it needs ORDER BY with one expression, without a frame")
        parts = over.args.get("partition_by") or ()
        windows = [part for part in parts if _is_window(part)]
        if len(windows) != 1:
            self._refuse("PARTITION BY needs one window: the first records are known when it ends")
        self.window: exp.Expr = windows[0]
        self.columns = tuple(part.sql(dialect="spark") for part in parts if part is not self.window)
        self._order = order.expressions[0].this.sql(dialect="spark")
        self.descending = bool(order.expressions[0].args.get("desc"))

    def check_first(self) -> None:
        """Check that it keeps the first record by event time, per columns and window."""
        if self.count != 1 or self.descending or self._order.lower() != EVENT_TIME:
            self._refuse("without GROUP BY, only the first record by event_time can be kept")
        if not self.columns or isinstance(self.window, exp.Column):
            self._refuse("PARTITION BY needs columns and a window of event_time")

    def top_column(self, values: dict[str, exp.Expr]) -> str:
        """The name of the value that orders the results."""
        if not isinstance(self.window, exp.Column):
            self._refuse("PARTITION BY must use the window of the GROUP BY, which is called window", USE_TOP)
        for name, value in values.items():
            if self._order in (name, value.sql(dialect="spark")):
                return name
        self._refuse(f"results must be ordered by one of their values, not by {self._order}", USE_TOP)

    def _refuse(self, why: str, fix: str = "") -> NoReturn:
        self._text.fail(
            self._node,
            f"QUALIFY {self._text.shown(self._node)} cannot be used",
            why=why,
            fix=f"write {fix}" if fix else f"write {USE_FIRST}, or after GROUP BY {USE_TOP}",
        )


def _is_window(node: exp.Expr) -> bool:
    if isinstance(node, exp.Column):
        return node.sql(dialect="spark").lower() in ("window", "window.start", "window.end")
    return isinstance(node, exp.Anonymous) and node.name.lower() == "window"
