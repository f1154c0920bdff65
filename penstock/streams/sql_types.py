"""The types of Spark SQL that expressions meet, and Spark's ANSI rules between them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

INTEGRAL = frozenset({"tinyint", "smallint", "int", "bigint"})
NUMERIC = INTEGRAL | {"float", "double", "decimal"}
TIME = frozenset({"date", "timestamp"})
VOID = "void"  # the type of NULL
_WIDTH = {
    kind: width for width, kind in enumerate(("tinyint", "smallint", "int", "bigint", "float", "double"))
}
DATA_TYPES = {
    "TEXT": "string",
    "VARCHAR": "string",
    "CHAR": "string",
    "BIGINT": "bigint",
    "INT": "int",
    "SMALLINT": "smallint",
    "TINYINT": "tinyint",
    "DOUBLE": "double",
    "FLOAT": "float",
    "BOOLEAN": "boolean",
    "BINARY": "binary",
    "DECIMAL": "decimal",
    "DATE": "date",
    "TIMESTAMP": "timestamp",
    "TIMESTAMPTZ": "timestamp",
}
# From -> what CAST cannot make of it (ANSI). Everything becomes a string; strings become everything.
_NO_CAST = {
    "binary": NUMERIC | TIME | {"boolean"},
    "boolean": TIME | {"binary"},
    "date": NUMERIC | {"boolean", "binary"},
    "timestamp": frozenset({"boolean", "binary"}),
    **dict.fromkeys(NUMERIC, frozenset({"binary", "date"})),
}


def common_type(types: Sequence[str]) -> str | None:
    """The type that holds all of these without a cast from or to string; None if there is none."""
    return reduce(lambda left, right: left and _wider(left, right), types, VOID) or None


def _wider(left: str, right: str) -> str:
    if left == right or right == VOID:
        return left
    if left == VOID:
        return right
    if left in NUMERIC and right in NUMERIC:
        if "decimal" in (left, right):
            return "double" if {"float", "double"} & {left, right} else "decimal"
        wider = max(left, right, key=_WIDTH.__getitem__)
        # A float cannot hold every int, so Spark goes to double at once.
        return "double" if wider == "float" else wider
    return "timestamp" if {left, right} == TIME else ""


def can_cast(source: str, target: str) -> bool:
    """True if CAST makes the one of the other."""
    if source.startswith("array<"):
        return target == "string"
    return target not in _NO_CAST.get(source, frozenset())


def can_compare(left: str, right: str) -> bool:
    """True if equal and smaller mean something; text next to a time is a time: ts > '2026-01-01'."""
    return common_type([left, right]) is not None or (
        bool({left, right} & TIME) and "string" in (left, right)
    )


def element_of(array: str) -> str:
    """The type of an array's elements."""
    return array.removeprefix("array<").removesuffix(">")
