"""The condition of a JOIN: which columns are equal, and how far apart in time records may be. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from sqlglot import exp
from sqlglot.tokenizer_core import Token

from penstock.streams.expressions import parse_text
from penstock.streams.sql_tokens import Cursor
from penstock.streams.windows import offset_ms

_FIX = (
    "write ON a.k = b.k AND b.event_time BETWEEN a.event_time - INTERVAL 10 SECONDS "
    "AND a.event_time + INTERVAL 10 SECONDS"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Equal columns of both sides, in order, and how long before or after the left record the right one may
    be.
    """

    left: tuple[str, ...]
    right: tuple[str, ...]
    before_ms: int
    after_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Names of the tables on each side. `timed`: the left names whose event time is that of the left records.

    After a join there is none: its results have the later of two times.
    """

    left: frozenset[str]
    timed: frozenset[str]
    right: str


def read_condition(cursor: Cursor, tokens: Sequence[Token], sides: Sides) -> Condition:
    """The parts of ON, or what is wrong with it. Of several BETWEEN all must hold."""
    text = cursor.join(tokens)
    if sides.right in sides.left:
        _refuse(
            cursor,
            text,
            f"both sides are called {sides.right}",
            fix="give each side a name of its own: FROM clicks AS a JOIN clicks AS b ON …",
        )
    pairs: list[tuple[str, str]] = []
    bounds: list[tuple[int, int]] = []
    for part in _parts(parse_text(text)):
        columns = _columns(part)
        if isinstance(part, exp.EQ) and columns is not None:
            (one, first), (other, second) = columns
            if one in sides.left and other == sides.right:
                pairs.append((first, second))
            elif one == sides.right and other in sides.left:
                pairs.append((second, first))
            else:
                _refuse(cursor, text, f"{part.sql(dialect='spark')} does not compare the two sides")
        elif isinstance(part, exp.Between):
            bounds.append(_bounds(cursor, text, part, sides))
        else:
            _refuse(cursor, text, f"{part.sql(dialect='spark')} is neither an equal key nor a bound of time")
    if not pairs or not bounds:
        _refuse(cursor, text, "records wait for each other for a bounded time, and need equal keys")
    names = tuple(zip(*pairs, strict=True))
    before, after = zip(*bounds, strict=True)
    return Condition(left=names[0], right=names[1], before_ms=min(before), after_ms=min(after))


def _parts(node: exp.Expression) -> Iterator[exp.Expression]:
    if isinstance(node, exp.Paren):
        yield from _parts(node.this)
    elif isinstance(node, exp.And):
        yield from _parts(node.this)
        yield from _parts(node.expression)
    else:
        yield node


def _columns(node: exp.Expression) -> tuple[tuple[str, str], tuple[str, str]] | None:
    pair = (node.this, node.args.get("expression"))
    if not all(isinstance(side, exp.Column) for side in pair):
        return None
    (one, other) = ((side.table.lower(), side.name) for side in pair if isinstance(side, exp.Column))
    return one, other


def _bounds(cursor: Cursor, text: str, node: exp.Between, sides: Sides) -> tuple[int, int]:
    """How long before and after the left record's time the right one's may be."""
    low, high = node.args["low"], node.args["high"]
    speaks_of = _side(cursor, text, node.this, sides)
    others = {
        _side(cursor, text, bound.this if isinstance(bound, exp.Sub | exp.Add) else bound, sides)
        for bound in (low, high)
    }
    if others == {speaks_of} or len(others) > 1:
        shown = node.sql(dialect="spark")
        _refuse(cursor, text, f"{shown} does not bound the time of one side by the time of the other")
    earlier = _distance(cursor, text, low, exp.Sub)
    later = _distance(cursor, text, high, exp.Add)
    # "left BETWEEN right - earlier AND right + later" says of the right one the opposite.
    return (earlier, later) if speaks_of == "right" else (later, earlier)


def _side(cursor: Cursor, text: str, node: exp.Expression, sides: Sides) -> str:
    """Whose event time this is: "left" or "right"."""
    if not isinstance(node, exp.Column) or node.name.lower() != "event_time":
        _refuse(cursor, text, "the bounds are not between the event times of the two sides")
    table = node.table.lower()
    if table == sides.right:
        return "right"
    if table in sides.timed:
        return "left"
    if table in sides.left:
        _refuse(
            cursor,
            text,
            f"{table}.event_time is not known after a join: its results have the later of both times",
            fix="join first: FROM (SELECT … FROM a JOIN b ON …) ab JOIN c ON …, with ab.event_time, "
            "which is that later time",
        )
    names = " or ".join(f"{name}.event_time" for name in (*sorted(sides.timed), sides.right))
    _refuse(cursor, text, f"{node.sql(dialect='spark')} is the time of no side: write {names}")


def _distance(cursor: Cursor, text: str, bound: exp.Expression, sign: type[exp.Expression]) -> int:
    """How far a bound lies from the other side's time, in the direction of `sign`."""
    if isinstance(bound, exp.Column):
        return 0
    interval = bound.args.get("expression")
    if not isinstance(interval, exp.Interval):
        _refuse(cursor, text, "a bound is an event time minus or plus an INTERVAL")
    distance = offset_ms(f"{interval.this.name} {interval.text('unit')}")
    if distance and not isinstance(bound, sign):
        _refuse(
            cursor,
            text,
            f"{bound.sql(dialect='spark')} is on the wrong side: the lower bound is an event time minus an "
            "INTERVAL, the upper one plus an INTERVAL, so that equal times are always between them",
        )
    return distance


def _refuse(cursor: Cursor, text: str, why: str, *, fix: str = _FIX) -> NoReturn:
    cursor.fail(f"ON {text} cannot be used", why=why, fix=fix)
