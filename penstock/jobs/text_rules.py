"""Which text and which JSON may become part of a job's record: bounded, storable, and not misleading. Pure.

Control characters steer terminals and break logs; direction marks make text read other than it is; NUL and
half a character cannot be stored at all.
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
LENGTH_MAX = 1 << 20  # of all text of one request together
STRING_MAX = 100_000
KEY_MAX = 500
SHOWN_MAX = 100

_DIRECTION = "\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069"
# Also read by pydantic, whose patterns know no look-around: this form means the same to both.
LINE_PATTERN = f"^[^\\x00-\\x1f\\x7f-\\x9f{_DIRECTION}]*$"
_LINE = re.compile(f"[^\\x00-\\x1f\\x7f-\\x9f{_DIRECTION}\\ud800-\\udfff]*")
# Code and expressions have several lines.
_TEXT = re.compile(f"[^\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f-\\x9f{_DIRECTION}\\ud800-\\udfff]*")


def is_line(text: str, *, length_max: int = STRING_MAX) -> bool:
    """Whether this is one line of plain text that a store can hold."""
    return len(text) <= length_max and _LINE.fullmatch(text) is not None


def shown(text: object) -> str:
    """A name or a value as an error may repeat it: quoted, harmless and short."""
    cut = str(text)[: SHOWN_MAX + 1]
    return repr(cut if len(cut) <= SHOWN_MAX else cut[:SHOWN_MAX] + "…") if is_line(cut) else ascii(cut)


def check_line(what: str, text: object, *, length_max: int) -> None:
    """Refuse what is not one line of 1 to `length_max` characters of plain text."""
    if isinstance(text, str) and text.strip() and is_line(text, length_max=length_max):
        return
    if not isinstance(text, str):
        why = f"it is {_kind(text)}"
    elif not text.strip():
        why = "it is empty"
    elif len(text) > length_max:
        why = f"it has {len(text)} characters"
    else:
        why = "it has control characters or marks that change the direction of text"
    raise ConfigError(
        f"{what} is not valid", why=why, fix=f"use 1 to {length_max} characters of plain text on one line"
    )


def check_json(what: str, value: object) -> None:
    """Refuse what is not bounded JSON with storable text, by its path. Safe for any depth."""
    left, length = VALUES_MAX, LENGTH_MAX
    stack: list[tuple[tuple[object, ...], object]] = [((), value)]
    while stack:
        path, item = stack.pop()
        left -= 1
        if isinstance(item, str):
            length -= len(item)
        why = _trouble(item) or ("there are too many values" if left < 0 else "")
        why = why or ("all text together is too long" if length < 0 else "")
        if not why and len(path) >= DEPTH_MAX and isinstance(item, Mapping | list | tuple) and item:
            why = f"it is nested deeper than {DEPTH_MAX} levels"
        if why:
            place = ".".join(shown(part).strip("'") for part in path[:8]) + ("…" if len(path) > 8 else "")
            raise ConfigError(f"{what} cannot be taken", why=f"{place}: {why}" if place else why, fix=_FIX)
        stack.extend(((*path, key), below) for key, below in _children(item))
        if isinstance(item, Mapping):
            length -= sum(len(key) for key in item)


_FIX = "use maps, lists, plain text, booleans and finite numbers of ordinary size"


def _children(item: object) -> Iterator[tuple[object, object]]:
    if isinstance(item, Mapping):
        yield from item.items()
    elif isinstance(item, list | tuple):
        yield from enumerate(item)


def _trouble(item: object) -> str:
    match item:
        case None | bool():
            return ""
        case str():
            if len(item) > STRING_MAX:
                return f"a text of {len(item)} characters"
            return "" if _TEXT.fullmatch(item) else "text with control or direction characters"
        case int():
            return "" if -INT_MAX - 1 <= item <= INT_MAX else "a number beyond 64 bits"
        case float():
            return "" if math.isfinite(item) else "a number that is not finite"
        case Mapping():
            bad = [key for key in item if not isinstance(key, str) or not is_line(key, length_max=KEY_MAX)]
            return f"{shown(bad[0])} cannot be a key" if bad else ""
        case list() | tuple():
            return ""
    return f"{_kind(item)} is not JSON"


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
