"""Validation of text and JSON that becomes part of a job's record: bounded, storable, not misleading. Pure.

Control characters can control a terminal and break logs; direction marks reorder displayed text; NUL and lone
surrogates cannot be stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.core.errors import ConfigError

INT_MAX = 2**63 - 1
DEPTH_MAX = 32
VALUES_MAX = 50_000
LENGTH_MAX = 1 << 20  # of all text of one request
STRING_MAX = 100_000
KEY_MAX = 500
SHOWN_MAX = 100

_DIRECTION = "\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069"
# Used by pydantic too, whose patterns have no look-around: this form is valid in both.
LINE_PATTERN = f"^[^\\x00-\\x1f\\x7f-\\x9f{_DIRECTION}]*$"
_LINE = re.compile(f"[^\\x00-\\x1f\\x7f-\\x9f{_DIRECTION}\\ud800-\\udfff]*")
# Code and expressions may have several lines.
_TEXT = re.compile(f"[^\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f-\\x9f{_DIRECTION}\\ud800-\\udfff]*")


def is_line(text: str, *, length_max: int = STRING_MAX) -> bool:
    """Whether the text is one line of plain, storable text."""
    return len(text) <= length_max and _LINE.fullmatch(text) is not None


def shown(text: object) -> str:
    """A name or a value for use in a message: quoted, escaped and cut."""
    cut = str(text)[: SHOWN_MAX + 1]
    return repr(cut if len(cut) <= SHOWN_MAX else cut[:SHOWN_MAX] + "…") if is_line(cut) else ascii(cut)


def check_line(what: str, text: object, *, length_max: int) -> None:
    """ConfigError unless the text is one line of 1 to `length_max` characters of plain text."""
    if isinstance(text, str) and text.strip() and is_line(text, length_max=length_max):
        return
    if not isinstance(text, str):
        why = f"it is {_kind(text)}"
    elif not text.strip():
        why = "it is empty"
    elif len(text) > length_max:
        why = f"it has {len(text)} characters"
    else:
        why = "it contains control characters, or characters that change the direction of text"
    raise ConfigError(
        f"{what} is not valid", why=why, fix=f"use 1 to {length_max} characters of plain text on one line"
    )


def check_json(what: str, value: object) -> None:
    """ConfigError with the path of the first value that is not bounded JSON with storable text. Any depth."""
    left, length = VALUES_MAX, LENGTH_MAX
    stack: list[tuple[tuple[object, ...], object]] = [((), value)]
    while stack:
        path, item = stack.pop()
        left -= 1
        if isinstance(item, str):
            length -= len(item)
        why = _problem(item) or (f"it has more than {VALUES_MAX} values" if left < 0 else "")
        why = why or (f"its text has more than {LENGTH_MAX} characters in total" if length < 0 else "")
        if not why and len(path) >= DEPTH_MAX and isinstance(item, Mapping | list | tuple) and item:
            why = f"it is nested deeper than {DEPTH_MAX} levels"
        if why:
            place = ".".join(shown(part).strip("'") for part in path[:8]) + ("…" if len(path) > 8 else "")
            raise ConfigError(f"{what} is not valid", why=f"{place}: {why}" if place else why, fix=_JSON_FIX)
        stack.extend(((*path, key), below) for key, below in _children(item))
        if isinstance(item, Mapping):
            length -= sum(len(key) for key in item)


_JSON_FIX = "use maps, lists, plain text, booleans and finite 64-bit numbers"


def _children(item: object) -> Iterator[tuple[object, object]]:
    if isinstance(item, Mapping):
        yield from item.items()
    elif isinstance(item, list | tuple):
        yield from enumerate(item)


def _problem(item: object) -> str:
    match item:
        case None | bool():
            return ""
        case str():
            if len(item) > STRING_MAX:
                return f"it is a text of {len(item)} characters, and {STRING_MAX} are the limit"
            return (
                ""
                if _TEXT.fullmatch(item)
                else "it contains control characters, or characters that change the direction of text"
            )
        case int():
            return "" if -INT_MAX - 1 <= item <= INT_MAX else "it is a number of more than 64 bits"
        case float():
            return "" if math.isfinite(item) else "it is not a finite number"
        case Mapping():
            bad = [key for key in item if not isinstance(key, str) or not is_line(key, length_max=KEY_MAX)]
            return f"{shown(bad[0])} is not a valid key" if bad else ""
        case list() | tuple():
            return ""
    return f"{_kind(item)} is not JSON"


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
