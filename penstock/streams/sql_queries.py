"""One SELECT, with what it reads, as steps of the DSL. Pure: nothing runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from sqlglot.tokenizer_core import Token, TokenType

from penstock.streams.functions import AGGREGATES, GENERATORS
from penstock.streams.graph import safe_name
from penstock.streams.pipeline import Pipeline, Stream
from penstock.streams.sql_joins import Sides, read_condition
from penstock.streams.sql_qualify import FIRST, TOP, check_first, read_qualify, top_column
from penstock.streams.sql_tokens import Cursor
from penstock.streams.windows import WINDOW_END, WINDOW_START, Spans, session, sliding, tumbling

EVENT_TIME = "event_time"
_FILES = frozenset({"parquet", "json", "csv", "orc", "text", "avro", "delta", "iceberg", "binaryfile", "xml"})
_CATEGORY = re.compile(r"[A-Za-z0-9_.-]+")
_JOINS = {
    ("INNER", "JOIN"): "inner",
    ("JOIN",): "inner",
    ("LEFT", "OUTER", "JOIN"): "left",
    ("LEFT", "JOIN"): "left",
}
_JOINS |= {("FULL", "OUTER", "JOIN"): "outer", ("FULL", "JOIN"): "outer"}
_UNENDING = "a stream has no end, so there is no moment at which this is known"
_NOT_HERE = {
    "ORDER BY": (_UNENDING, "remove it; sort where the sink is read"),
    "SORT BY": (_UNENDING, "remove it; sort where the sink is read"),
    "LIMIT": (_UNENDING, f"remove it; the first of each window are {TOP}"),
    "OFFSET": (_UNENDING, "remove it, or filter by a column"),
    "HAVING": ("results are filtered like other records", "SELECT … FROM (SELECT … GROUP BY …) t WHERE …"),
    "CLUSTER BY": ("records of a stream are not sorted", "write DISTRIBUTE BY"),
    "EXCEPT": (_UNENDING, "use a Computation that remembers what it saw"),
    "INTERSECT": (_UNENDING, "use a Computation that remembers what it saw"),
    "MINUS": (_UNENDING, "use a Computation that remembers what it saw"),
    "CROSS": ("every record would meet every other", "JOIN … ON keys and a bound of time"),
    "RIGHT": ("one direction is enough", "change the sides and write LEFT JOIN"),
    ",": ("which records belong together is not said", "write JOIN … ON"),
}


class Query:
    """Reads one query; `source` gives the stream of a category, `sink` helps to name steps."""

    def __init__(
        self, cursor: Cursor, pipeline: Pipeline, source: Callable[[str], Stream], sink: str
    ) -> None:
        self._cursor, self._pipeline, self._source, self._sink = cursor, pipeline, source, sink
        self._named: dict[str, Stream] = {}  # WITH name AS (…)

    def read(self) -> Stream:
        """WITH …, SELECTs joined by UNION ALL, DISTRIBUTE BY."""
        cursor, outer = self._cursor, dict(self._named)
        if cursor.take("WITH"):
            while True:
                name = cursor.name("a query").lower()
                cursor.expect("AS", "(", fix="write WITH name AS (SELECT …)")
                self._named[name] = self.read()
                cursor.expect(")", fix="close the bracket of WITH name AS (…)")
                if not cursor.take(","):
                    break
        streams = [self._select()]
        at = cursor.place()
        while cursor.take("UNION"):
            if not cursor.take("ALL"):
                fix = "write UNION ALL"
                cursor.fail(
                    "UNION cannot be used", why="it would have to remember every record for ever", fix=fix
                )
            streams.append(self._select())
        stream = streams[0]
        if len(streams) > 1:
            self._pipeline._place_of_sql = at
            stream = stream.union(*streams[1:])
        if cursor.take("DISTRIBUTE BY"):
            self._here()
            stream = self._keyed(stream, [cursor.join(part) for part in self._list()])
        self._check_end()
        self._named = outer
        return stream

    def _select(self) -> Stream:
        cursor = self._cursor
        if cursor.take("("):
            stream = self.read()
            cursor.expect(")", fix="close the bracket")
            return stream
        at = cursor.place()
        cursor.expect("SELECT", fix="write SELECT … FROM <category>")
        if cursor.word().startswith("/*+"):
            cursor.fail(
                "a hint cannot be used", why="how a pipeline runs is decided by its plan", fix="remove it"
            )
        if cursor.take("DISTINCT"):
            fix = f"remove it, or keep the first of each within a bounded time: {FIRST}"
            cursor.fail(
                "DISTINCT cannot be used", why="it would have to remember every record for ever", fix=fix
            )
        items = self._list()
        cursor.expect("FROM", fix="write SELECT … FROM <category>")
        stream, names = self._from()
        if cursor.take("WHERE"):
            self._here()
            stream = stream.filter(self._plain(cursor.expression(), names))
        if cursor.take("GROUP BY"):
            return self._grouped(stream, items, names)
        if cursor.take("QUALIFY"):
            self._here()
            stream = self._first(stream, self._plain(cursor.expression(), names))
        self._pipeline._place_of_sql = at
        return self._selected(stream, items, names)

    def _first(self, stream: Stream, text: str) -> Stream:
        """The first record of each key and window: key_by, dedup."""
        found = read_qualify(self._cursor, text)
        check_first(self._cursor, found)
        spans = self._spans(found.window)
        if spans.kind != "tumbling":
            self._cursor.fail(
                f"{found.window} cannot be used here",
                why="a record would be the first of several windows, or of one that is not known yet",
                fix=f"write {FIRST}",
            )
        return self._keyed(stream, found.columns).dedup(window=spans, name=self._free("dedup"))

    def _selected(self, stream: Stream, items: Sequence[Sequence[Token]], names: set[str]) -> Stream:
        if len(items) == 1 and self._plain(items[0], names) == "*":
            return stream
        columns: list[str] = []
        for item in items:
            text = self._plain(item, names)
            if item[0].text.lower() in GENERATORS and len(item) > 1 and item[1].text == "(":
                stream = stream.flat_map(text)
                # "… AS name", or "… AS (position, name)"
                made = re.findall(r"\w+", re.split(r"\bAS\b", text, flags=re.IGNORECASE)[-1])
                columns += made
            else:
                columns.append(text)
        return stream.select(*columns)

    def _from(self) -> tuple[Stream, set[str]]:
        cursor = self._cursor
        stream, alias = self._table()
        names, timed = {alias}, frozenset({alias})
        while True:
            if cursor.take("LATERAL"):
                stream = self._lateral(stream, names)
                continue
            how = next((words for words in _JOINS if cursor.is_at(*words)), None)
            if how is None:
                return stream, names
            self._here()
            cursor.take(*how)
            right, other = self._table()
            sides = Sides(left=frozenset(names), timed=timed, right=other)
            stream = self._joined(stream, right, sides, _JOINS[how])
            names.add(other)
            timed = frozenset()  # a pair has the later of two times

    def _table(self) -> tuple[Stream, str]:
        cursor = self._cursor
        self._here()
        if cursor.is_at("(", "SELECT") or cursor.is_at("(", "WITH") or cursor.is_at("(", "("):
            cursor.take("(")
            stream = self.read()
            cursor.expect(")", fix="close the bracket of the query in FROM")
            return stream, self._alias("").lower()
        if cursor.is_at("VALUES") or cursor.is_at("TABLE"):
            cursor.fail(
                f"{cursor.word()} cannot be read", why="a pipeline reads categories", fix="name a category"
            )
        first = cursor.place()
        name = cursor.name("a category")
        while cursor.is_at("-"):  # a category may be called a-b
            cursor.take("-")
            name += f"-{cursor.name('a category')}"
        if cursor.is_at("("):
            why = "a pipeline reads categories; a function that makes rows is none"
            cursor.fail(f"{name}() cannot be read", why=why, fix="FROM <category>")
        if not _CATEGORY.fullmatch(name) or (name.split(".")[0].lower() in _FILES and "." in name):
            cursor.fail(
                f"{name!r} is no category",
                why="a stream reads categories of the bus, never files or tables",
                fix=f"publish the records to a category first (line {first.line})",
            )
        alias = self._alias(name)
        named = self._named.get(name.lower())
        return (self._source(name) if named is None else named), alias.lower()

    def _alias(self, name: str) -> str:
        cursor = self._cursor
        if cursor.take("AS") or (
            cursor.rest() and cursor.rest()[0].token_type in (TokenType.VAR, TokenType.IDENTIFIER)
        ):
            return cursor.name("the table")
        return name.rpartition(".")[2]

    def _lateral(self, stream: Stream, names: set[str]) -> Stream:
        """LATERAL VIEW [OUTER] explode(array) table AS column, …"""
        cursor = self._cursor
        fix = "write LATERAL VIEW explode(array) t AS column"
        self._here()
        cursor.expect("VIEW", fix=fix)
        outer = cursor.take("OUTER")
        function = cursor.name("a generator").lower()
        cursor.expect("(", fix=fix)
        array = self._plain(cursor.expression(), names)
        cursor.expect(")", fix=fix)
        if not cursor.is_at("AS"):
            names.add(cursor.name("the view").lower())
        cursor.expect("AS", fix=fix)
        columns = [cursor.name("a column")]
        while cursor.take(","):
            columns.append(cursor.name("a column"))
        if outer and not function.endswith("_outer"):
            function += "_outer"
        made = columns[0] if len(columns) == 1 else f"({', '.join(columns)})"
        return stream.flat_map(f"{function}({array}) AS {made}")

    def _joined(self, left: Stream, right: Stream, sides: Sides, how: str) -> Stream:
        cursor, at = self._cursor, self._pipeline._place_of_sql
        cursor.expect("ON", fix="write JOIN … ON a.key = b.key AND b.event_time BETWEEN …")
        found = read_condition(cursor, cursor.expression(), sides)
        self._pipeline._place_of_sql = at
        keyed = [
            stream.key_by(*keys, name=self._free(safe_name(f"{side}_by_{'_'.join(keys)}")))
            for stream, keys, side in ((left, found.left, min(sides.left)), (right, found.right, sides.right))
        ]
        within = (found.before_ms, found.after_ms)
        return keyed[0].join(keyed[1], within=within, how=how, name=self._free("join"))

    def _grouped(self, stream: Stream, items: Sequence[Sequence[Token]], names: set[str]) -> Stream:
        """GROUP BY columns and one window: key_by, window, aggregate, and a select if it differs."""
        at = self._cursor.place()
        keys: list[str] = []
        windows: list[str] = []
        for part in self._list():
            text = self._plain(part, names)
            (windows if part[0].text.lower() in ("window", "session_window") else keys).append(text)
        if len(windows) != 1 or not keys:
            self._cursor.fail(
                "GROUP BY needs columns and one window",
                why="results of a key are given when a window ends; without one they never are",
                fix="write GROUP BY column, window(event_time, '10 seconds')",
            )
        spans = self._spans(windows[0])
        wanted, values = [], []
        for item in items:
            text = self._plain(item, names)
            bound = re.fullmatch(r"(?:session_)?window\.(start|end)(?:\s+AS\s+(\w+))?", text, re.IGNORECASE)
            if bound:
                name = WINDOW_START if bound[1].lower() == "start" else WINDOW_END
                wanted.append(f"{name} AS {bound[2]}" if bound[2] and bound[2] != name else name)
            elif item[0].text.lower() in AGGREGATES and len(item) > 1 and item[1].text == "(":
                values.append(text)
                wanted.append(text.split()[-1])
            else:
                wanted.append(text)
        if not values:
            fix = "add one, as in count(*) AS n"
            self._cursor.fail("GROUP BY computes nothing", why="SELECT has no aggregate", fix=fix)
        self._pipeline._place_of_sql = at
        windowed = self._keyed(stream, keys).window(spans)
        result = windowed.aggregate(*values, name=self._free("aggregate"))
        made = [*keys, WINDOW_START, WINDOW_END, *(value.split()[-1] for value in values)]
        if self._cursor.take("QUALIFY"):
            self._here()
            found = read_qualify(self._cursor, self._plain(self._cursor.expression(), names))
            by = top_column(self._cursor, found, values)
            lowest, name = not found.descending, self._free("top")
            result = result.top(found.count, by=by, per=found.columns, lowest=lowest, name=name)
            return result.select(*wanted)
        return result if wanted == made else result.select(*wanted)

    def _spans(self, text: str) -> Spans:
        found = re.fullmatch(r"(\w+)\(\s*(\S+?)\s*,\s*'([^']*)'\s*(?:,\s*'([^']*)'\s*)?\)", text)
        if found is None or found[2].lower() != EVENT_TIME:
            self._cursor.fail(
                f"{text} is no window",
                why=f"windows go by the event time of records, which is called {EVENT_TIME}",
                fix=f"write window({EVENT_TIME}, '10 seconds') or session_window({EVENT_TIME}, '5 minutes')",
            )
        if found[1].lower() == "session_window":
            return session(gap=found[3])
        return tumbling(found[3]) if found[4] is None else sliding(found[3], every=found[4])

    def _keyed(self, stream: Stream, keys: Sequence[str]) -> Stream:
        return stream.key_by(*keys, name=self._free(safe_name("by_" + "_".join(keys))))

    def _free(self, name: str) -> str:
        """A name as the DSL derives it; with the sink's in front if another statement has it."""
        taken, count = self._pipeline._steps, 1
        first = safe_name(f"{self._sink}_{name}")
        found = name if name not in taken else first
        while found in taken:
            count += 1
            found = f"{first[:58]}_{count}"
        return found

    def _list(self) -> list[list[Token]]:
        parts = [self._cursor.expression()]
        while self._cursor.take(","):
            parts.append(self._cursor.expression())
        return parts

    def _plain(self, tokens: Sequence[Token], names: set[str]) -> str:
        """Text without the names of tables: columns of a stream are known by their own."""
        dropped = set()
        for number, (token, after) in enumerate(pairwise(tokens)):
            if after.text == "." and token.text.lower() in names and number not in dropped:
                dropped |= {number, number + 1}
        return self._cursor.join(tokens, dropped)

    def _here(self) -> None:
        self._pipeline._place_of_sql = self._cursor.place()

    def _check_end(self) -> None:
        word = self._cursor.word()
        if word in _NOT_HERE:
            why, fix = _NOT_HERE[word]
            self._cursor.fail(f"{word} cannot be used in a stream", why=why, fix=fix)
