"""The condition of a JOIN: which columns are equal, and how far apart in time records may be. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from sqlglot import exp
from sqlglot.tokenizer_core import Token

from penstock.streams.expressions import parse_text
from penstock.streams.sql_tokens import Cursor
from penstock.streams.windows import duration_ms

_FIX = (
    "write ON a.k = b.k AND b.event_time BETWEEN a.event_time - INTERVAL 10 SECONDS "
    "AND a.event_time + INTERVAL 10 SECONDS"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Equal columns of both sides, in order, and the bounds of the right one's time around the left one's."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    before_ms: int
    after_ms: int


def read_condition(cursor: Cursor, tokens: Sequence[Token], *, left: set[str], right: str) -> Condition:
    """The parts of ON, or what is wrong with it."""
    text = cursor.join(tokens)
    pairs: list[tuple[str, str]] = []
    bounds: tuple[int, int] | None = None
    for part in _parts(parse_text(text)):
        sides = _columns(part)
        if isinstance(part, exp.EQ) and sides is not None:
            (one, first), (other, second) = sides
            if one in left and other == right:
                pairs.append((first, second))
            elif one == right and other in left:
                pairs.append((second, first))
            else:
                _refuse(cursor, text, f"{part.sql(dialect='spark')} does not compare the two sides")
        elif isinstance(part, exp.Between):
            bounds = _bounds(cursor, text, part)
        else:
            _refuse(cursor, text, f"{part.sql(dialect='spark')} is neither an equal key nor a bound of time")
    if not pairs or bounds is None:
        _refuse(cursor, text, "records wait for each other for a bounded time, and need equal keys")
    names = tuple(zip(*pairs, strict=True))
    return Condition(left=names[0], right=names[1], before_ms=bounds[0], after_ms=bounds[1])


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


def _bounds(cursor: Cursor, text: str, node: exp.Between) -> tuple[int, int]:
    low, high = node.args["low"], node.args["high"]
    times = [
        node.this,
        *(bound.this if isinstance(bound, exp.Sub | exp.Add) else bound for bound in (low, high)),
    ]
    if any(not isinstance(time, exp.Column) or time.name.lower() != "event_time" for time in times):
        _refuse(cursor, text, "the bounds are not between the event times of the two sides")
    return _distance(cursor, text, low, exp.Sub), _distance(cursor, text, high, exp.Add)


def _distance(cursor: Cursor, text: str, bound: exp.Expression, sign: type[exp.Expression]) -> int:
    if isinstance(bound, exp.Column):
        return 0
    interval = bound.expression if isinstance(bound, sign) else None
    if not isinstance(interval, exp.Interval):
        _refuse(cursor, text, "a bound is an event time minus or plus an INTERVAL")
    return duration_ms(f"{interval.this.name} {interval.text('unit')}")


def _refuse(cursor: Cursor, text: str, why: str) -> NoReturn:
    cursor.fail(f"ON {text} cannot be used", why=why, fix=_FIX)
