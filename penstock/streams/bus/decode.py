"""Decodes JSON records into Arrow columns; invalid records are returned with their reasons. Pure.

Arrow's own reader takes whole batches. It may only see what it reads as msgspec does, record by record: it
crashes the process on a first line that says `null`, takes NaN for a number and broken UTF-8 for text.
Whatever it must not see or refuses goes to msgspec, which says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from penstock.streams.bus.log import ARROW_TYPES

# After a record that Arrow refuses, so many are read one by one; then Arrow is tried again.
PIECE_ROWS = 2048
# Batches up to this size are read one by one, which is faster.
FEW_ROWS = 200
# Arrow's reader recurses with the nesting of a record, msgspec stops at Python's limit: far below both.
_OPENERS_MAX = 100
_BYTES_MAX = 2**30
Bytes = npt.NDArray[np.uint8]
_NOT_A_NUMBER = re.compile(rb"[:,\[] *-?(?:NaN|Inf)")
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
# Not binary, which is base64 to msgspec; not float, which Arrow does not round by way of a double.
_ARROW_READS = frozenset({"string", "bigint", "int", "double", "boolean"})
_ARROW_READS |= {f"array<{name}>" for name in _ARROW_READS}


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
    found = read_at_once(values, columns) if len(values) > FEW_ROWS else None
    if found is not None:
        return Decoded(table=found, rows=None)
    if len(values) <= PIECE_ROWS:
        return decode_one_by_one(values, columns)
    pieces = []
    for start in range(0, len(values), PIECE_ROWS):
        piece = values.slice(start, PIECE_ROWS)
        found = read_at_once(piece, columns)
        read = decode_one_by_one(piece, columns) if found is None else Decoded(table=found, rows=None)
        pieces.append((start, len(piece), read))
    return _joined(pieces)


def read_at_once(values: pa.Array, columns: Sequence[tuple[str, str]]) -> pa.Table | None:
    """The columns, by Arrow's reader; None if it may or does not read these records as msgspec would."""
    if not len(values) or values.null_count or not _ARROW_READS.issuperset(kind for _, kind in columns):
        return None
    lines = _lines(values)
    if lines is None:
        return None
    schema = pa.schema([pa.field(name, ARROW_TYPES[kind]) for name, kind in columns])
    reading = pj.ReadOptions(use_threads=False, block_size=lines.size + 1)
    parsing = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        table = pj.read_json(pa.BufferReader(lines), read_options=reading, parse_options=parsing)
    except pa.ArrowInvalid:
        return None
    # More rows than lines: a line held two objects. Fewer cannot be, each line has at least one.
    if table.num_rows != len(values) or not all(_is_plain(column) for column in table.columns):
        return None
    return table


def _lines(values: pa.Array) -> pa.Buffer | None:
    """The records as lines, if each is one object in braces, without control characters, of plain depth."""
    if values.nbytes > _BYTES_MAX:
        return None
    nothing, line_end = pa.scalar(b"", values.type), pa.scalar(b"\n", values.type)
    joined = pc.binary_join_element_wise(values, nothing, line_end)
    ends = np.frombuffer(joined.buffers()[1], np.int32)
    if (np.diff(ends) < len("{}\n")).any():
        return None
    buffer = joined.buffers()[2]
    text = np.frombuffer(buffer, np.uint8)
    are_objects = (text[ends[:-1]] == ord("{")).all() and (text[ends[1:] - 2] == ord("}")).all()
    if not are_objects or np.count_nonzero(text < ord(" ")) != len(values):
        return None
    is_fit = _is_utf8(joined) and not _is_deep(text, ends) and not _has_nan(text, buffer)
    return buffer if is_fit else None


def _is_utf8(lines: pa.Array) -> bool:
    try:
        lines.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def _is_deep(text: Bytes, ends: npt.NDArray[np.int32]) -> bool:
    openers = (text == ord("{")) | (text == ord("["))
    if np.count_nonzero(openers) == len(ends) - 1:
        return False
    return int(np.add.reduceat(openers, ends[:-1], dtype=np.int32).max()) > _OPENERS_MAX


def _has_nan(text: Bytes, buffer: pa.Buffer) -> bool:
    # Looking for two bytes is a hundred times faster than the expression, and mostly enough.
    pairs = (text[:-1] == ord("N")) & (text[1:] == ord("a")) | (text[:-1] == ord("I")) & (
        text[1:] == ord("n")
    )
    return bool(pairs.any()) and _NOT_A_NUMBER.search(buffer) is not None


def _is_plain(column: pa.ChunkedArray) -> bool:
    """False for what msgspec refuses (too large for a double) or reads differently (-0 is 0 to it)."""
    if pa.types.is_list(column.type):
        return all(_is_plain(pa.chunked_array([chunk.flatten()])) for chunk in column.chunks)
    if not pa.types.is_floating(column.type):
        return True
    numbers = column.fill_null(1.0).to_numpy()
    return bool(np.isfinite(numbers).all() and not (np.signbit(numbers) & (numbers == 0)).any())


def _joined(pieces: Sequence[tuple[int, int, Decoded]]) -> Decoded:
    """Pieces with their first row and length, as one."""
    rows = [
        start + row
        for start, length, read in pieces
        for row in (range(length) if read.rows is None else read.rows)
    ]
    bad = [(start + row, why) for start, _, read in pieces for row, why in read.bad]
    table = pa.concat_tables([read.table for _, _, read in pieces])
    return Decoded(table=table, rows=tuple(rows) if bad else None, bad=tuple(bad))


def decode_one_by_one(values: pa.Array, columns: Sequence[tuple[str, str]]) -> Decoded:
    """As `decode_json`, record by record: the reference for the fast path."""
    decode = _decoder(tuple(columns)).decode
    pieces = values.to_pylist()
    try:
        return Decoded(table=_table([decode(piece) for piece in pieces], columns), rows=None)
    except (msgspec.DecodeError, UnicodeError, TypeError, RecursionError):
        pass  # at least one is invalid: find out which
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
    """Every value is its own column; none is invalid."""
    schema = pa.schema([pa.field(name, ARROW_TYPES[kind]) for name, kind in columns])
    return Decoded(table=pa.table([values], schema=schema), rows=None)


def decode_values(format_: str, values: pa.Array, columns: Sequence[tuple[str, str]]) -> Decoded:
    """The values of a category that is not `typed`, as its columns."""
    if format_ == "avro":
        # Imported here: few categories need it, and every process that plans batches would load it.
        from penstock.streams.bus.avro import decode_avro

        return decode_avro(values, columns)
    return (decode_bytes if format_ == "bytes" else decode_json)(values, columns)


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
