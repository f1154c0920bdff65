"""Avro records to Arrow columns, and back. Pure.

A record of an `avro` category is one Avro value, without a container and without a schema id: a record with
the category's columns in their order, each a union of null and its type.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import fastavro
import pyarrow as pa

from penstock.streams.bus.decode import Decoded, table_of

_TYPES = {
    "string": "string",
    "bigint": "long",
    "int": "int",
    "double": "double",
    "float": "float",
    "boolean": "boolean",
    "binary": "bytes",
}


def encode_avro(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]]) -> list[bytes]:
    """What an `avro` category takes as values."""
    schema, made = _schema(tuple(columns)), []
    for row in rows:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, schema, dict(row))
        made.append(out.getvalue())
    return made


def decode_avro(values: pa.Array, columns: Sequence[tuple[str, str]]) -> Decoded:
    """Read each value; what is no such record, or has bytes left over, is set aside with its reason."""
    schema = _schema(tuple(columns))
    found: list[tuple[Any, ...]] = []
    rows: list[int] = []
    bad: list[tuple[int, str]] = []
    for index, value in enumerate(values.to_pylist()):
        reason = "the record has no value"
        if value is not None:
            source = io.BytesIO(value)
            try:
                row: Any = fastavro.schemaless_reader(source, schema, None)
            except (EOFError, ValueError, IndexError, KeyError, OverflowError, StopIteration) as error:
                reason = f"not the Avro record that was declared: {type(error).__name__} {error}".strip()
            else:
                if source.tell() == len(value):
                    found.append(tuple(row[name] for name, _ in columns))
                    rows.append(index)
                    continue
                reason = f"{len(value) - source.tell()} bytes follow the Avro record that was declared"
        bad.append((index, reason))
    return Decoded(table=table_of(found, columns), rows=tuple(rows) if bad else None, bad=tuple(bad))


@lru_cache(maxsize=64)
def _schema(columns: tuple[tuple[str, str], ...]) -> Any:
    fields = [{"name": name, "type": ["null", _type(kind)], "default": None} for name, kind in columns]
    return fastavro.parse_schema({"type": "record", "name": "Record", "fields": fields})


def _type(kind: str) -> Any:
    if not kind.startswith("array<"):
        return _TYPES[kind]
    return {"type": "array", "items": ["null", _TYPES[kind.removeprefix("array<").removesuffix(">")]]}
