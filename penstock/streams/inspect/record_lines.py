"""Converts records of the bus to lines of JSON, and back. Pure: bytes in, Arrow out.

Two forms. `value`: a line is a record's value, the JSON object that the category declares, for any format on
the bus; for a `bytes` category the line itself. `record`: a line is a whole record, {"key", "ts", "value",
…}, as `penstock bus tail` prints it; bytes that are not JSON are in `value_base64`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError
from penstock.streams.bus.decode import decode_json, decode_values
from penstock.streams.bus.log import ARROW_TYPES, HEADERS_FIELD, LOW_MAX, CategorySpec, partitions_of
from penstock.streams.catalogue import nearest

LINE_BYTES_MAX = 32 * 2**20
TABLE = "table:"  # in place of a file: before the name of a table
_BREAKS = re.compile(rb"[\r\n]")


class Lines(StrEnum):
    """What a line holds."""

    VALUE = "value"
    RECORD = "record"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRules:
    """How lines become records of a category, and which of its columns are their key and event time."""

    spec: CategorySpec
    form: Lines = Lines.VALUE
    key_column: str = ""
    ts_column: str = ""
    now_ms: Millis = 0  # the event time of records that name none
    checked: bool = True  # False: values are not checked, and may be unreadable

    def __post_init__(self) -> None:
        names = [name for name, _ in self.spec.columns]
        for option, column in (("key", self.key_column), ("ts", self.ts_column)):
            if column and column not in names:
                near = nearest(column, names)
                raise ConfigError(
                    f"category {self.spec.name!r} has no column {column!r} for the {option}",
                    why=f"its columns are {', '.join(names)}",
                    fix=f"did you mean {near!r}?" if near else "name one of them",
                )

    @property
    def ts_from(self) -> str:
        """The column with the event time, "" if values have none."""
        return self.ts_column or self.spec.ts_column


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that is not a valid record, and the reason."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedLines:
    """`records`: `_seq` (the line's number), `_ts`, `_key`, `_late`, own columns, `_partition`."""

    records: pa.Table
    bad: tuple[BadLine, ...]


class _Bytes(msgspec.Struct):
    base64: bytes


class _Record(msgspec.Struct):
    value: msgspec.Raw = msgspec.Raw(b"")
    value_base64: bytes | None = None
    key: str | None = None
    ts: int | None = None
    late: bool = False
    partition: int | None = None
    offset: int | None = None
    headers: list[tuple[str, str | _Bytes | None]] | None = None


_RECORDS = msgspec.json.Decoder(_Record)


def parse_lines(lines: Sequence[tuple[int, bytes]], rules: LineRules) -> ParsedLines:
    """Parse numbered lines to records; bad lines are returned separately."""
    bad: dict[int, str] = {}
    drafts: dict[int, _Record] = {}
    for number, line in lines:
        if len(line) > LINE_BYTES_MAX:
            bad[number] = f"it is longer than {LINE_BYTES_MAX} bytes"
        elif rules.form is Lines.VALUE:
            drafts[number] = _Record(value=msgspec.Raw(line))
        else:
            try:
                drafts[number] = _drafted(line)
            except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
                bad[number] = f"not a record: {error}"
            else:
                if drafts[number].headers and not rules.spec.headers:
                    bad[number] = "it has headers, but the category was created without headers"
    numbers = sorted(drafts)
    values, unfit = _values([drafts[number] for number in numbers], rules.spec)
    decoded = decode_values(rules.spec.format, values, rules.spec.columns)
    unread = {numbers[index]: unfit.get(index, reason) for index, reason in decoded.bad}
    # An unchecked value is stored as it is, unless it has no bytes at all.
    if rules.checked or rules.spec.format == "typed":
        bad |= unread
    bad |= {numbers[index]: reason for index, reason in unfit.items()}
    rows = range(len(numbers)) if decoded.rows is None else decoded.rows
    place = {numbers[index]: row for row, index in enumerate(rows)}
    kept = [number for number in numbers if number not in bad]
    columns = _columns(decoded.table, [place.get(number) for number in kept])
    stamps = _stamps(kept, drafts, columns, rules, bad)
    keys = _keys(kept, drafts, columns, rules)
    fit = [index for index, number in enumerate(kept) if number not in bad]
    own: dict[str, pa.Array] = columns
    if rules.spec.format != "typed":
        order = {number: index for index, number in enumerate(numbers)}
        own = {"_value": values.take(pa.array([order[number] for number in kept], pa.int64()))}
    whole = pa.table(
        {
            "_seq": pa.array(kept, pa.int64()),
            "_ts": pa.array(stamps, pa.int64()),
            "_key": keys,
            "_late": pa.array([drafts[number].late for number in kept], pa.bool_()),
            **own,
            **({"_headers": _headers(kept, drafts)} if rules.spec.headers else {}),
            "_partition": _targets(kept, keys, drafts, rules.spec.partitions),
        }
    ).take(pa.array(fit, pa.int64()))
    return ParsedLines(
        records=whole, bad=tuple(BadLine(number=number, reason=bad[number]) for number in sorted(bad))
    )


def lines_of(
    batch: pa.RecordBatch, spec: CategorySpec, *, partition: int, offsets: npt.NDArray[np.int64]
) -> Iterator[bytes]:
    """Each record of a batch as a line of the form `record`, without a line break."""
    parts = _value_parts(batch, spec)
    for offset, row, part in zip(offsets.tolist(), batch.to_pylist(), parts, strict=True):
        record: dict[str, Any] = {
            "partition": partition,
            "offset": offset,
            "ts": row["_ts"],
            "key": row["_key"],
        }
        if row["_late"]:
            record["late"] = True
        record |= part
        if spec.headers and row["_headers"]:
            record["headers"] = [(name, _header_part(content)) for name, content in row["_headers"]]
        yield msgspec.json.encode(record)


def split_by_partition(records: pa.Table, spec: CategorySpec) -> dict[int, pa.RecordBatch]:
    """Records with their `_partition` as what a publish takes."""
    targets = records.column("_partition").to_numpy()
    schema = spec.schema()
    if spec.headers and "_headers" not in records.column_names:
        records = records.append_column("_headers", pa.nulls(records.num_rows, HEADERS_FIELD.type))
    batches = {}
    for partition in np.unique(targets).tolist():
        part = records.take(pa.array(np.flatnonzero(targets == partition)))
        arrays = [part.column(name).cast(schema.field(name).type).combine_chunks() for name in schema.names]
        batches[int(partition)] = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return batches


def target_partitions(keys: pa.Array, unkeyed: Sequence[int], partitions: int) -> pa.Array:
    """The partition by key; records without a key go to `unkeyed`."""
    by_key = partitions_of(keys, partitions)
    is_null = keys.is_null().to_numpy(zero_copy_only=False)
    rest = np.asarray(unkeyed, dtype=np.int64) % partitions
    return pa.array(np.where(is_null, rest, by_key), pa.int64())


def _drafted(line: bytes) -> _Record:
    record = _RECORDS.decode(line)
    if record.value_base64 is None and not bytes(record.value):
        raise ValueError("it has neither `value` nor `value_base64`")
    return record


def _values(drafts: Sequence[_Record], spec: CategorySpec) -> tuple[pa.Array, dict[int, str]]:
    """The stored value of each record, and the reason for each that cannot be an Avro record."""
    found: list[bytes | None] = [
        bytes(draft.value) if draft.value_base64 is None else draft.value_base64 for draft in drafts
    ]
    unfit: dict[int, str] = {}
    if spec.format == "avro":
        from penstock.streams.bus.avro import encode_avro

        plain = [index for index, draft in enumerate(drafts) if draft.value_base64 is None]
        decoded = decode_json(pa.array([found[index] for index in plain], pa.binary()), spec.columns)
        places = range(len(plain)) if decoded.rows is None else decoded.rows
        for place, value in zip(places, encode_avro(decoded.table.to_pylist(), spec.columns), strict=True):
            found[plain[place]] = value
        for place, reason in decoded.bad:
            found[plain[place]], unfit[plain[place]] = None, reason
    return pa.array(found, pa.binary()), unfit


def _value_parts(batch: pa.RecordBatch, spec: CategorySpec) -> Iterator[dict[str, Any]]:
    """The JSON field with the value of each record."""
    names = [name for name, _ in spec.columns]
    if spec.format == "typed":
        return ({"value": {name: row[name] for name in names}} for row in batch.to_pylist())
    values = batch.column("_value")
    if spec.format != "avro":
        return (_value_part(value) for value in values.to_pylist())
    decoded = decode_values(spec.format, values, spec.columns)
    places = range(batch.num_rows) if decoded.rows is None else decoded.rows
    read = dict(zip(places, decoded.table.to_pylist(), strict=True))
    return (
        {"value": read[place]} if place in read else _in_base64(value)
        for place, value in enumerate(values.to_pylist())
    )


def _in_base64(value: bytes | None) -> dict[str, Any]:
    return {"value_base64": None if value is None else base64.b64encode(value).decode()}


def _value_part(value: bytes | None) -> dict[str, Any]:
    """The bytes if they are one line of JSON; else base64."""
    try:
        msgspec.json.decode(value or b"")
        is_plain = value is not None and value == value.strip() and _BREAKS.search(value) is None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        is_plain = False
    return {"value": msgspec.Raw(value)} if is_plain and value else _in_base64(value)


def _header_part(content: bytes | None) -> str | dict[str, str] | None:
    """Text unchanged, other bytes in base64."""
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def _headers(kept: Sequence[int], drafts: Mapping[int, _Record]) -> pa.Array:
    def content(part: str | _Bytes | None) -> bytes | None:
        return part.base64 if isinstance(part, _Bytes) else None if part is None else part.encode()

    found = (drafts[number].headers for number in kept)
    return pa.array(
        [[(name, content(part)) for name, part in pairs] if pairs else None for pairs in found],
        HEADERS_FIELD.type,
    )


def _columns(table: pa.Table, rows: Sequence[int | None]) -> dict[str, pa.Array]:
    places = pa.array(rows, pa.int64())
    return {name: table.column(name).combine_chunks().take(places) for name in table.column_names}


def _stamps(
    kept: Sequence[int],
    drafts: Mapping[int, _Record],
    columns: Mapping[str, pa.Array],
    rules: LineRules,
    bad: dict[int, str],
) -> list[int]:
    """Event times; records without a valid one are bad."""
    named = columns[rules.ts_from].to_pylist() if rules.ts_from else [None] * len(kept)
    found = []
    for number, of_value in zip(kept, named, strict=True):
        stamp = drafts[number].ts
        if stamp is None:
            stamp = of_value
        if stamp is None and rules.ts_from and rules.checked:
            bad[number] = f"no event time: column {rules.ts_from!r} is missing or null"
        stamp = rules.now_ms if stamp is None else stamp
        if isinstance(stamp, bool) or not isinstance(stamp, int) or not -LOW_MAX < stamp < LOW_MAX:
            bad[number] = (
                f"{stamp!r} is not an event time: it must be a whole number of milliseconds since 1970"
            )
            stamp = 0
        found.append(stamp)
    return found


def _keys(
    kept: Sequence[int], drafts: Mapping[int, _Record], columns: Mapping[str, pa.Array], rules: LineRules
) -> pa.Array:
    given = pa.array([drafts[number].key for number in kept], pa.string())
    if not rules.key_column:
        return given
    kind = columns[rules.key_column].type
    if kind == ARROW_TYPES["binary"]:
        raise ConfigError(
            f"column {rules.key_column!r} cannot be the key",
            why="its type is binary, but a key is text",
            fix="name a column of text or numbers",
        )
    return pc.coalesce(given, columns[rules.key_column].cast(pa.string()))


def _targets(kept: Sequence[int], keys: pa.Array, drafts: Mapping[int, _Record], partitions: int) -> pa.Array:
    def unkeyed(number: int) -> int:
        partition = drafts[number].partition
        return number if partition is None else partition

    return target_partitions(keys, [unkeyed(number) for number in kept], partitions)
