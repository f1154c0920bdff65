"""JSON text as the `json` module reads and writes it, in a third of the time; texts for messages. Pure.

Integers of any size, NaN, lone surrogates and the order of keys are preserved as by `json`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

import msgspec
from pydantic import ConfigDict, TypeAdapter

_decode = msgspec.json.decode
# Not msgspec's encoder: it writes NaN as null, and a value must not change silently.
_encode = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="constants")).dump_json


def dumps(value: Any) -> str:
    """JSON text of plain values."""
    try:
        return _encode(value).decode()
    except ValueError:  # a lone surrogate, which UTF-8 cannot encode; or not a JSON value
        return json.dumps(value)


def loads(text: str | bytes) -> Any:
    """The values of JSON text."""
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeError):  # NaN, infinities, a lone surrogate; or not JSON
        return json.loads(text)


# Arguments of `sa.create_engine`, for JSON columns.
JSON_TEXT: dict[str, Any] = {"json_serializer": dumps, "json_deserializer": loads}


SHOWN_MAX = 10


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """A suggestion of the closest known name; `otherwise` if none is close."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean `{near[0]}`?" if near else otherwise


def some_of(names: Iterable[str]) -> str:
    """The first names in sorted order, and how many more there are."""
    every = sorted(names)
    rest = len(every) - SHOWN_MAX
    return (", ".join(every[:SHOWN_MAX]) or "none") + (f" and {rest} more" if rest > 0 else "")


def make_known(*kinds: Any) -> None:
    """Build msgspec's type information of these types now, so that the first use is not slow."""
    for kind in kinds:
        msgspec.json.Decoder(kind)
