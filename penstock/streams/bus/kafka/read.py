"""Reading from Kafka: ranges of a partition, and control topics up to the last committed record."""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, CorruptData, StoreUnavailable
from penstock.core.system_clock import sleep_ms
from penstock.streams.bus import log as contract
from penstock.streams.bus.kafka.clients import (
    MESSAGE_BYTES_MAX,
    TRANSACTION_MS,
    Clients,
    is_passing,
    translate,
    translated,
)
from penstock.streams.bus.kafka.control import ControlState
from penstock.streams.bus.log import ARROW_TYPES, HEADERS_FIELD, CategorySpec

HEADER, PRODUCER = "penstock", "producer"

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
    """A message of a consumer."""

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
                fix="store large values elsewhere and send references; nothing was written",
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
        else:  # of a foreign producer: offset as sequence, Kafka's timestamp as event time
            pieces.append(struct.pack(">qqqB", message.offset() or 0, message.timestamp()[1], 0, 0))
    return np.frombuffer(b"".join(pieces), dtype=_HEAD)


def _keys(keys: list[bytes | None]) -> pa.Array:
    try:
        return pa.array(keys, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:  # a foreign key that is not text
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
            fix="find the foreign producer of this topic, or declare it as json or bytes to read it",
        ) from error
    columns = zip(*rows, strict=True) if rows else iter([()] * len(kinds))
    return [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=False)]


@lru_cache(maxsize=64)
def _decoder(kinds: tuple[str, ...]) -> msgspec.msgpack.Decoder[Any]:
    row = tuple[tuple(_MSGPACK_TYPES[kind] | None for kind in kinds)] if kinds else tuple[()]  # type: ignore[misc]
    return msgspec.msgpack.Decoder(list[row])  # type: ignore[valid-type]


BATCH_ROWS = 10_000
_SILENCE_S, _LOOK_S, _GLANCE_S = 0.5, 0.1, 0.02
_SILENCES_MAX = 60
# A publisher that died inside a transaction blocks a control topic until Kafka's transaction timeout.
_CONTROL_SILENCES_MAX = 10 * (TRANSACTION_MS // 1000 + 20)


def read_messages(
    clients: Clients, topic: str, partition: int, start: int, end: int, *, rows: int = BATCH_ROWS
) -> Iterator[list[Message]]:
    """Committed messages with offsets in [start, end). Requires: `end` is at most the last stable offset."""
    with clients.consumer() as consumer, translated(f"{topic} partition {partition} could not be read"):
        consumer.assign([TopicPartition(topic, partition, start)])
        silences = 0
        while True:
            found = _next(consumer, rows)
            silences = 0 if found else silences + 1
            if silences == _SILENCES_MAX:
                raise _silent(topic)
            messages, is_done = _cut(clients, topic, partition, start, end, found)
            if messages:
                yield messages
            if is_done:
                return


def first_time(clients: Clients, topic: str, partition: int, start: int, end: int) -> Millis | None:
    """When the first record of a range was appended; None if there is none."""
    for messages in read_messages(clients, topic, partition, start, end, rows=1):
        return messages[0].timestamp()[1]
    return None


def _next(consumer: Consumer, rows: int = BATCH_ROWS, *, silence_s: float = _SILENCE_S) -> list[Message]:
    """Received messages; empty after a timeout. (`consume` alone waits for the full number.)"""
    first = consumer.poll(silence_s)
    found = [] if first is None else [first, *(consumer.consume(rows - 1, 0) if rows > 1 else ())]
    return [message for message in found if not _is_passing(message)]


def _is_passing(message: Message) -> bool:
    error = message.error()
    return error is not None and is_passing(error)


def _cut(
    clients: Clients, topic: str, partition: int, start: int, end: int, found: list[Message]
) -> tuple[list[Message], bool]:
    """The messages before `end`, and whether they are complete."""
    kept = []
    for message in found:
        error, offset = message.error(), message.offset() or 0
        if message.partition() != partition or message.topic() != topic:
            continue  # from an earlier assignment of this client
        if error is None:
            if offset < end:
                kept.append(message)
            if offset >= end - 1:
                return kept, True
        elif error.code() == KafkaError._PARTITION_EOF:
            # Markers and aborted records are not delivered, so only the end event shows completeness.
            if offset >= end:
                return kept, True
        elif error.code() in (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET):
            contract.check_start(topic, partition, start, clients.starts(topic, partition + 1)[partition])
            raise translate(KafkaException(error), f"{topic} partition {partition} could not be read")
        else:
            raise translate(KafkaException(error), f"{topic} partition {partition} could not be read")
    return kept, False


@dataclass(frozen=True, slots=True)
class ControlRead:
    """The state of a control topic, and whether it includes all committed records."""

    state: ControlState
    is_whole: bool


class ControlReader:
    """A cache of control topics' states; continues reading where it stopped."""

    def __init__(self, clients: Clients) -> None:
        self._clients, self._lock = clients, threading.Lock()
        self._consumer: Consumer | None = None
        self._states: dict[str, tuple[str, ControlState]] = {}  # topic -> its id, and what it says

    def catch_up(self, topic: str, topic_id: str, *, patience_ms: Millis | None = None) -> ControlRead:
        """Everything that was committed to the topic before this call; with a patience, maybe less.

        A transaction that somebody left open hides what others committed after it, until it is decided.
        """
        end = self._clients.highest_ends(topic, 1)[0]
        silence_s, silences_max = _GLANCE_S, max(1, (patience_ms or 0) // 20)
        if patience_ms is None:
            silence_s, silences_max = _LOOK_S, _CONTROL_SILENCES_MAX
        silences = 0
        while True:
            # The lock is released between reads: waiting for one topic must not block the others.
            with self._lock, translated(f"the control topic {topic!r} could not be read"):
                state = self._open(topic, topic_id)
                before = state.position
                if before < end:
                    assert self._consumer is not None
                    for message in _next(self._consumer, silence_s=silence_s):
                        self._take(message)
                silences = 0 if state.position > before else silences + 1
                if state.position >= end or (silences >= silences_max and patience_ms is not None):
                    return ControlRead(state.copy(), state.position >= end)
            if silences >= silences_max:
                raise _silent(topic)
            if silences:
                sleep_ms(1)

    def close(self) -> None:
        """Close the connection and drop the states."""
        with self._lock:
            if self._consumer is not None:
                self._consumer.close()
            self._consumer, self._states = None, {}

    def _open(self, topic: str, topic_id: str) -> ControlState:
        known = self._states.get(topic)
        if known is not None and known[0] == topic_id:
            return known[1]
        if self._consumer is None:
            self._consumer = self._clients.new_consumer()
        if known is not None:  # another topic under the name
            self._consumer.incremental_unassign([TopicPartition(topic, 0)])
        self._consumer.incremental_assign([TopicPartition(topic, 0, 0)])
        self._states[topic] = topic_id, ControlState()
        return self._states[topic][1]

    def _take(self, message: Message) -> None:
        topic, offset = message.topic(), message.offset() or 0
        known = self._states.get(topic or "")
        if known is None:
            return
        error = message.error()
        if error is None:
            known[1].apply(message.key() or b"", message.value())
            known[1].position = max(known[1].position, offset + 1)
        elif error.code() == KafkaError._PARTITION_EOF:
            known[1].position = max(known[1].position, offset)
        else:
            raise KafkaException(error)


def _silent(topic: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"Kafka does not give what it has of topic {topic!r}",
        why="no record and no end was received for a long time; a publisher may have died in a transaction",
        fix="check that the brokers are up; an open transaction ends after its timeout",
    )
