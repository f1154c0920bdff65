"""JSON records to Arrow columns; what cannot be read is set aside with its reason. Pure.

msgspec, not Arrow's own reader: that one crashes the process on a line that says `null`, and lets broken
UTF-8 through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import pyarrow as pa

from penstock.streams.bus.log import ARROW_TYPES

_JSON_TYPES: dict[str, Any] = {
    "string": str,
    "bigint": Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
    "int": Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)],
    "double": float,
    "float": float,
    "boolean": bool,
    "binary": bytes,
}
_JSON_TYPES |= {f"array<{name}>": list.__class_getitem__(kind | None) for name, kind in _JSON_TYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """`table` has a row for each readable record, `rows` says which ones those are, `bad` why the others
    are not.
    """

    table: pa.Table
    rows: tuple[int, ...] | None  # None: all of them
    bad: tuple[tuple[int, str], ...] = ()


def decode_json(values: pa.Array, columns: Sequence[tuple[str, str]]) -> Decoded:
    """Read the declared columns of each JSON object; missing ones are null, others are ignored."""
    decode = _decoder(tuple(columns)).decode
    pieces = values.to_pylist()
    try:
        return Decoded(table=_table([decode(piece) for piece in pieces], columns), rows=None)
    except (msgspec.DecodeError, UnicodeError, TypeError, RecursionError):
        pass  # at least one is bad: find out which
    objects: list[Any] = []
    rows: list[int] = []
    bad: list[tuple[int, str]] = []
    for index, piece in enumerate(pieces):
        try:
            objects.append(decode(piece))
            rows.append(index)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            bad.append((index, f"not the JSON object that was declared: {error}"))
        except TypeError:
            bad.append((index, "the record has no value"))
    return Decoded(table=_table(objects, columns), rows=tuple(rows), bad=tuple(bad))


@lru_cache(maxsize=64)
def _decoder(columns: tuple[tuple[str, str], ...]) -> msgspec.json.Decoder[Any]:
    fields = [(f"c{n}", _JSON_TYPES[kind] | None, None) for n, (_, kind) in enumerate(columns)]
    names = {f"c{n}": name for n, (name, _) in enumerate(columns)}
    return msgspec.json.Decoder(msgspec.defstruct("Row", fields, rename=names, gc=False))


def decode_bytes(values: pa.Array, columns: Sequence[tuple[str, str]]) -> Decoded:
    """Every value is its own column; none is bad."""
    schema = pa.schema([pa.field(name, ARROW_TYPES[kind]) for name, kind in columns])
    return Decoded(table=pa.table([values], schema=schema), rows=None)


def table_of(rows: Sequence[tuple[Any, ...]], columns: Sequence[tuple[str, str]]) -> pa.Table:
    """Rows of values as columns."""
    schema = pa.schema([pa.field(name, ARROW_TYPES[kind]) for name, kind in columns])
    turned = zip(*rows, strict=True) if rows else ([] for _ in columns)
    return pa.table(
        [pa.array(column, schema.field(n).type) for n, column in enumerate(turned)], schema=schema
    )


def _table(objects: list[Any], columns: Sequence[tuple[str, str]]) -> pa.Table:
    return pa.table(
        [
            pa.array([getattr(row, f"c{n}") for row in objects], ARROW_TYPES[kind])
            for n, (_, kind) in enumerate(columns)
        ],
        schema=pa.schema([pa.field(name, ARROW_TYPES[kind]) for name, kind in columns]),
    )
