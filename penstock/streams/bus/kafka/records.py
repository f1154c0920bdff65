"""Rows of a category as Kafka messages, and back. Pure.

One message per record: the key is the record's, the value is `_value` as it came (json, avro, bytes), or the
columns as one msgpack array (typed). Sequence, epoch, event time and lateness are in the header `penstock`,
the producer in a header of its own; a record's own headers follow these two. The message's timestamp is left
to Kafka, as the time of appending: retention works by it, and Kafka refuses event times that lie too far off.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core.errors import ConfigError, CorruptData
from penstock.streams.bus.log import ARROW_TYPES, HEADERS_FIELD, CategorySpec

HEADER, PRODUCER = "penstock", "producer"
MESSAGE_BYTES_MAX = 16 * 1024 * 1024

_HEAD = np.dtype([("seq", ">i8"), ("ts", ">i8"), ("epoch", ">i8"), ("late", "u1")])
_MSGPACK_TYPES: dict[str, Any] = {
    "string": str,
    "bigint": int,
    "int": int,
    "double": float,
    "float": float,
    "boolean": bool,
    "binary": bytes,
}
_MSGPACK_TYPES |= {
    f"array<{name}>": list.__class_getitem__(kind | None) for name, kind in _MSGPACK_TYPES.items()
}


class Received(Protocol):
    """A message as a consumer gives it."""

    def offset(self) -> int | None:
        """Where it lies."""

    def key(self) -> bytes | None:
        """The record's key."""

    def value(self) -> bytes | None:
        """The record."""

    def headers(self) -> Any:
        """Pairs of name and bytes, or None."""

    def timestamp(self) -> tuple[int, int]:
        """(kind, ms)."""


class Outgoing(msgspec.Struct, frozen=True):
    """One message to one partition."""

    partition: int
    key: bytes | None
    value: bytes | None
    head: bytes
    headers: tuple[tuple[str, bytes | None], ...] = ()


def encode_rows(spec: CategorySpec, partition: int, batch: pa.RecordBatch, epoch: int) -> Iterator[Outgoing]:
    """One message per row. ConfigError if one is too large for a topic."""
    heads = np.empty(batch.num_rows, dtype=_HEAD)
    heads["seq"], heads["ts"] = batch.column("_seq").to_numpy(), batch.column("_ts").to_numpy()
    heads["epoch"] = epoch
    heads["late"] = batch.column("_late").to_numpy(zero_copy_only=False)
    packed, size = heads.tobytes(), _HEAD.itemsize
    keys = batch.column("_key").cast(pa.binary()).to_pylist()
    given = batch.column("_headers").to_pylist() if spec.headers else itertools.repeat(None, batch.num_rows)
    for number, (key, value, own) in enumerate(zip(keys, _values(spec, batch), given, strict=True)):
        headers = tuple(own or ())
        beside = sum(len(name.encode()) + len(content or b"") + 16 for name, content in headers)
        if len(key or b"") + len(value or b"") + beside > MESSAGE_BYTES_MAX - 1024:
            raise ConfigError(
                f"a record is too large for category {spec.name!r}",
                why=f"it has {len(value or b''):,} bytes, a Kafka topic of ours takes {MESSAGE_BYTES_MAX:,}",
                fix="send large values by reference; nothing of this publish was written",
            )
        yield Outgoing(partition, key, value, packed[number * size : (number + 1) * size], headers)


def decode_rows(
    spec: CategorySpec, messages: Sequence[Received]
) -> tuple[npt.NDArray[np.int64], pa.RecordBatch]:
    """The rows of some messages in order, and their offsets."""
    offsets = np.array([message.offset() for message in messages], dtype=np.int64)
    heads = _heads(messages)
    values = [message.value() for message in messages]
    own = _columns(spec, values, offsets) if spec.format == "typed" else [pa.array(values, pa.binary())]
    system = [
        pa.array(heads["seq"].astype(np.int64)),
        pa.array(heads["ts"].astype(np.int64)),
        _keys([message.key() for message in messages]),
        pa.array(heads["late"].astype(bool)),
    ]
    beside = [pa.array([_own_headers(message) for message in messages], HEADERS_FIELD.type)]
    columns = [*system, *own, *(beside if spec.headers else [])]
    return offsets, pa.RecordBatch.from_arrays(columns, schema=spec.schema())


def _values(spec: CategorySpec, batch: pa.RecordBatch) -> Iterator[bytes | None]:
    if spec.format != "typed":
        yield from batch.column("_value").to_pylist()
        return
    if not spec.columns:
        yield from (b"\x90" for _ in range(batch.num_rows))
        return
    encode = msgspec.msgpack.Encoder().encode
    columns = [batch.column(name).to_pylist() for name, _ in spec.columns]
    for row in zip(*columns, strict=True):
        yield encode(row)


def _own_headers(message: Received) -> list[tuple[str, bytes | None]] | None:
    """All of somebody else's message; of ours those behind our own two."""
    headers = message.headers() or []
    return (headers[2:] if headers and _is_ours(headers[0]) else headers) or None


def _is_ours(header: tuple[str, bytes]) -> bool:
    return header[0] == HEADER and len(header[1] or b"") == _HEAD.itemsize


def _heads(messages: Sequence[Received]) -> npt.NDArray[Any]:
    pieces = []
    for message in messages:
        headers = message.headers()
        if headers and _is_ours(headers[0]):
            pieces.append(headers[0][1])
        else:  # written by somebody else: its place is its sequence, Kafka's time is its event time
            pieces.append(struct.pack(">qqqB", message.offset() or 0, message.timestamp()[1], 0, 0))
    return np.frombuffer(b"".join(pieces), dtype=_HEAD)


def _keys(keys: list[bytes | None]) -> pa.Array:
    try:
        return pa.array(keys, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:  # somebody else's key that is no text
        return pa.array([None if key is None else key.decode(errors="replace") for key in keys], pa.string())


def _columns(
    spec: CategorySpec, values: list[bytes | None], offsets: npt.NDArray[np.int64]
) -> list[pa.Array]:
    kinds = [ARROW_TYPES[kind] for _, kind in spec.columns]
    try:
        if any(value is None for value in values):
            raise msgspec.DecodeError("a message has no value")
        packed = struct.pack(">BI", 0xDD, len(values)) + b"".join(
            value for value in values if value is not None
        )
        rows = _decoder(tuple(kind for _, kind in spec.columns)).decode(packed)
    except msgspec.DecodeError as error:
        raise CorruptData(
            f"category {spec.name!r} holds a message that no publisher of ours wrote",
            why=f"between offsets {offsets[0]} and {offsets[-1]}: {error}",
            fix="find out who else writes to this topic; declare it as json or bytes to read it anyway",
        ) from error
    columns = zip(*rows, strict=True) if rows else iter([()] * len(kinds))
    return [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=False)]


@lru_cache(maxsize=64)
def _decoder(kinds: tuple[str, ...]) -> msgspec.msgpack.Decoder[Any]:
    row = tuple[tuple(_MSGPACK_TYPES[kind] | None for kind in kinds)] if kinds else tuple[()]  # type: ignore[misc]
    return msgspec.msgpack.Decoder(list[row])  # type: ignore[valid-type]
