"""Reading from Kafka: ranges of a partition, and control topics up to what was committed when asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from penstock.core.clock import Millis
from penstock.core.errors import StoreUnavailable
from penstock.core.system_clock import sleep_ms
from penstock.streams.bus import admission
from penstock.streams.bus.kafka.clients import TRANSACTION_MS, Clients, is_passing, translate, translated
from penstock.streams.bus.kafka.control import ControlState

BATCH_ROWS = 10_000
_SILENCE_S, _LOOK_S, _GLANCE_S = 0.5, 0.1, 0.02
_SILENCES_MAX = 60
# A control topic is held up by a publisher that died inside a transaction, until Kafka gives up on it.
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
    """What has come; nothing after a silence. (`consume` alone waits for as many as it may give.)"""
    first = consumer.poll(silence_s)
    found = [] if first is None else [first, *(consumer.consume(rows - 1, 0) if rows > 1 else ())]
    return [message for message in found if not _is_passing(message)]


def _is_passing(message: Message) -> bool:
    error = message.error()
    return error is not None and is_passing(error)


def _cut(
    clients: Clients, topic: str, partition: int, start: int, end: int, found: list[Message]
) -> tuple[list[Message], bool]:
    """What of it lies before `end`, and whether all of that has come."""
    kept = []
    for message in found:
        error, offset = message.error(), message.offset() or 0
        if message.partition() != partition or message.topic() != topic:
            continue  # left over from what this client read before
        if error is None:
            if offset < end:
                kept.append(message)
            if offset >= end - 1:
                return kept, True
        elif error.code() == KafkaError._PARTITION_EOF:
            # Markers and aborted records are not given, so only the end itself tells that nothing more comes.
            if offset >= end:
                return kept, True
        elif error.code() in (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET):
            admission.check_start(topic, partition, start, clients.starts(topic, partition + 1)[partition])
            raise translate(KafkaException(error), f"{topic} partition {partition} could not be read")
        else:
            raise translate(KafkaException(error), f"{topic} partition {partition} could not be read")
    return kept, False


@dataclass(frozen=True, slots=True)
class Seen:
    """What a control topic says, and whether that is all that was committed."""

    state: ControlState
    is_whole: bool


class ControlReader:
    """What one process knows of control topics; it reads on where it stopped."""

    def __init__(self, clients: Clients) -> None:
        self._clients, self._lock = clients, threading.Lock()
        self._consumer: Consumer | None = None
        self._states: dict[str, tuple[str, ControlState]] = {}  # topic -> its id, and what it says

    def catch_up(self, topic: str, topic_id: str, *, patience_ms: Millis | None = None) -> Seen:
        """Everything that was committed to the topic before this call; with a patience, maybe less.

        A transaction that somebody left open hides what others committed after it, until it is decided.
        """
        end = self._clients.highest_ends(topic, 1)[0]
        silence_s, silences_max = _GLANCE_S, max(1, (patience_ms or 0) // 20)
        if patience_ms is None:
            silence_s, silences_max = _LOOK_S, _CONTROL_SILENCES_MAX
        silences = 0
        while True:
            # The lock is given back between looks: who waits for one topic must not hold up the others.
            with self._lock, translated(f"the control topic {topic!r} could not be read"):
                state = self._open(topic, topic_id)
                before = state.position
                if before < end:
                    assert self._consumer is not None
                    for message in _next(self._consumer, silence_s=silence_s):
                        self._take(message)
                silences = 0 if state.position > before else silences + 1
                if state.position >= end or (silences >= silences_max and patience_ms is not None):
                    return Seen(state.copy(), state.position >= end)
            if silences >= silences_max:
                raise _silent(topic)
            if silences:
                sleep_ms(1)

    def close(self) -> None:
        """Let the connection go; what is known is read again."""
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
        why="neither a record nor the end came for a long time; a publisher may have died in a transaction",
        fix="see whether the brokers are up; an open transaction ends by itself",
    )
