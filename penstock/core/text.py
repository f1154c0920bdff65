"""JSON columns as text: what `json` writes and reads, in a third of the time. Pure.

Numbers of any size, NaN, odd strings and the order of keys come back as with `json`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

import msgspec
from pydantic import ConfigDict, TypeAdapter

_decode = msgspec.json.decode
# Not msgspec's: it writes NaN as null, and what cannot be kept must not change silently.
_encode = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="constants")).dump_json


def dumps(value: Any) -> str:
    """JSON text of plain values."""
    try:
        return _encode(value).decode()
    except ValueError:  # half a surrogate pair, which UTF-8 has no form for; or no plain value
        return json.dumps(value)


def loads(text: str | bytes) -> Any:
    """The values of JSON text."""
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeError):  # NaN, infinities, half a surrogate pair; or no JSON
        return json.loads(text)


# What an engine's JSON columns use.
JSON_TEXT: dict[str, Any] = {"json_serializer": dumps, "json_deserializer": loads}


SHOWN_MAX = 10


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """A suggestion, or what to do when no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean `{near[0]}`?" if near else otherwise


def some_of(names: Iterable[str]) -> str:
    """Names in a line: a few, and how many more there are."""
    every = sorted(names)
    rest = len(every) - SHOWN_MAX
    return (", ".join(every[:SHOWN_MAX]) or "none") + (f" and {rest} more" if rest > 0 else "")


def make_known(*kinds: Any) -> None:
    """Have msgspec gather what it needs of these types, and of those that they hold, now."""
    for kind in kinds:
        msgspec.json.Decoder(kind)
