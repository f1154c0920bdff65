"""QUALIFY row_number() OVER (PARTITION BY … ORDER BY …) <= k: the first of each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from sqlglot import exp

from penstock.streams.expressions import parse_text
from penstock.streams.sql_tokens import Cursor

FIRST = "QUALIFY row_number() OVER (PARTITION BY id, window(event_time, '1 hour') ORDER BY event_time) = 1"
TOP = "QUALIFY row_number() OVER (PARTITION BY window ORDER BY n DESC) <= 3"
_WINDOWS = ("window", "window.start", "window.end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Qualify:
    """Which of each group of rows: the first `count` in the order of one expression."""

    text: str
    columns: tuple[str, ...]  # of PARTITION BY, without the window
    window: str  # "window", or window(event_time, '1 hour')
    order: str
    descending: bool
    count: int


def read_qualify(cursor: Cursor, text: str) -> Qualify:
    """The parts of a QUALIFY, `text` without names of tables; or what is wrong with it."""
    node = parse_text(text)
    over = node.this if isinstance(node, exp.EQ | exp.LTE | exp.LT) else None
    if not isinstance(over, exp.Window) or over.this.name.lower() != "row_number" or over.this.expressions:
        _refuse(cursor, text, "it compares row_number() OVER (…) with a number, by =, <= or <")
    limit, order = node.args["expression"], over.args.get("order")
    if not isinstance(limit, exp.Literal) or limit.is_string or not limit.name.isdigit():
        _refuse(cursor, text, "the number is written out")
    count = int(limit.name) - isinstance(node, exp.LT)
    if count < 1 or (isinstance(node, exp.EQ) and count != 1):
        _refuse(cursor, text, "it keeps the first, or the first few")
    if over.args.get("spec") is not None or order is None or len(order.expressions) != 1:
        _refuse(cursor, text, "there is ORDER BY with one expression, and no frame of rows")
    parts = [part.sql(dialect="spark") for part in over.args.get("partition_by") or ()]
    windows = [part for part in parts if part.lower() in _WINDOWS or part.lower().startswith("window(")]
    if len(windows) != 1:
        _refuse(cursor, text, "PARTITION BY has one window: what is first is known when it is over")
    (first,) = order.expressions
    return Qualify(
        text=text,
        columns=tuple(part for part in parts if part not in windows),
        window=windows[0].lower() if windows[0].lower() in _WINDOWS else windows[0],
        order=first.this.sql(dialect="spark"),
        descending=bool(first.args.get("desc")),
        count=count,
    )


def check_first(cursor: Cursor, found: Qualify) -> None:
    """Of records: the first by event time, per columns and window."""
    if found.count != 1 or found.descending or found.order.lower() != "event_time":
        _refuse(cursor, found.text, "of records only the first by event_time is kept")
    if not found.columns or found.window in _WINDOWS:
        _refuse(cursor, found.text, "PARTITION BY has columns and a window of event_time")


def top_column(cursor: Cursor, found: Qualify, values: Sequence[str]) -> str:
    """Of results: the name of the value they are ordered by; `values`: "count(*) AS n"."""
    if found.window not in _WINDOWS:
        _refuse(cursor, found.text, "the window is that of the GROUP BY, and is called window", TOP)
    for value in values:
        *_, name = value.split()
        made = parse_text(value)
        if found.order in (name, made.unalias().sql(dialect="spark")):
            return name
    _refuse(cursor, found.text, f"results are ordered by one of their values, not by {found.order}", TOP)


def _refuse(cursor: Cursor, text: str, why: str, fix: str = "") -> NoReturn:
    cursor.fail(
        f"QUALIFY {text} cannot be used",
        why=why,
        fix=f"write {fix}" if fix else f"write {FIRST}, or after GROUP BY {TOP}",
    )
