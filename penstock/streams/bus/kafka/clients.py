"""The clients one process has on a Kafka cluster: one to administer, consumers to read with, and what their
errors mean to us.

Clients are made when needed and never used across a fork: their threads stay behind.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewTopic,
    OffsetSpec,
)

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, PenstockError, Refused, StoreUnavailable
from penstock.core.system_clock import SystemClock, sleep_ms

ANSWER_S = 15.0  # how long one write may take
# Timeout of a read with its retries: callers of the control plane wait for 10 s.
LOOK_S = 7.0
# For so long after a read without a response, the next ones have a shorter timeout.
AWAY_MS, AWAY_LOOK_S = 10_000, 1.0
# A publisher that died inside a transaction blocks readers for so long, unless a successor starts.
TRANSACTION_MS = 10_000
_VISIBLE_TRIES, _VISIBLE_MS = 40, 5  # how often, and how far apart, a commit's marker is looked for

_EARLIEST, _LATEST = OffsetSpec.earliest(), OffsetSpec.latest()  # type: ignore[no-untyped-call]
_DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
}
_GONE = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
# Transient errors: a partition is new, or moves to another broker.
_PASSING = {
    *_GONE,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TIMED_OUT,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
}
_PASSING_MS = 50


def is_passing(error: KafkaError) -> bool:
    """Whether the error is transient."""
    return error.code() in _PASSING


def translate(error: KafkaException, what: str) -> PenstockError:
    """A client's error as a PenstockError."""
    found: KafkaError = error.args[0]
    if found.code() in _DENIED:
        return Refused(
            f"Kafka does not allow this: {what}",
            why=found.str(),
            fix="grant Penstock's user access to the topics and transactional ids under its prefix",
        )
    return StoreUnavailable(
        f"Kafka did not answer: {what}",
        why=f"{found.name()}: {found.str()}",
        fix="check that the brokers are up, then try again; a repeated publish adds no duplicates",
    )


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Translate errors of the cluster into PenstockErrors."""
    try:
        yield
    except KafkaException as error:
        raise translate(error, what) from error


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it exists."""

    id: str
    partitions: int


@dataclass(slots=True)
class _OfProcess:
    pid: int
    admin: AdminClient | None = None
    idle: list[Consumer] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Clients:
    """One process's clients of one cluster."""

    def __init__(self, settings: Mapping[str, str], *, answer_s: float = ANSWER_S) -> None:
        errors: deque[str] = deque(maxlen=1)
        self._clock, self._errors, self.answer_s = SystemClock(), errors, answer_s
        self._settings: dict[str, Any] = {
            **settings,
            "client.id": "penstock",
            # No logger: confluent-kafka raises a fatal error, such as being fenced, in a callback, and then
            # calls the logger while the exception is set, which ends in a SystemError or in a crash.
            "log_level": 0,
            # It must not reference us: in a reference cycle the garbage collector would end the client.
            "error_cb": lambda error: errors.append(error.str()),
        }
        self._away_ms: Millis | None = None  # when a read got no response
        self._mine = _OfProcess(os.getpid())
        # Clients inherited over a fork are never closed: that would wait for threads of the parent.
        self._inherited: list[_OfProcess] = []

    def cluster_id(self) -> str:
        """The id of the cluster at the address."""
        admin = self._admin()
        try:
            return str(admin.describe_cluster(request_timeout=self._look_s()).result().cluster_id)
        except KafkaException as error:
            if error.args[0].code() in _DENIED:
                raise translate(error, "the cluster could not be looked up") from error
            admin.poll(0)  # delivers the errors so far
            raise StoreUnavailable(
                f"no Kafka broker answers at {self._settings['bootstrap.servers']}",
                why=self._errors[-1] if self._errors else f"{error.args[0].name()}: {error.args[0].str()}",
                fix="start the broker, or correct the address of the bus",
            ) from error

    def topics(self, names: Sequence[str]) -> dict[str, Topic]:
        """Those of the topics that exist."""
        found = {}
        with self._looking(f"topics {', '.join(names)} could not be looked up") as look_s:
            asked = self._admin().describe_topics(TopicCollection(list(names)), request_timeout=look_s)
            for name, answer in asked.items():
                try:
                    described = answer.result()
                except KafkaException as error:
                    if error.args[0].code() not in _GONE:
                        raise
                    continue
                found[name] = Topic(str(described.topic_id), len(described.partitions))
        return found

    def names(self) -> list[str]:
        """The names of all topics that may be seen."""
        with self._looking("the topics could not be listed") as look_s:
            return sorted(self._admin().list_topics(timeout=look_s).topics)

    def create_topic(self, name: str, partitions: int, settings: Mapping[str, str]) -> None:
        """Create it, unless it exists; the broker's default says how often it is replicated."""
        new = NewTopic(name, num_partitions=partitions, replication_factor=-1, config=dict(settings))
        with translated(f"topic {name!r} could not be created"):
            try:
                self._admin().create_topics([new], request_timeout=self.answer_s)[name].result()
            except KafkaException as error:
                if error.args[0].code() == KafkaError.TOPIC_EXCEPTION:
                    raise ConfigError(
                        f"Kafka does not take {name!r} as the name of a topic",
                        why=error.args[0].str(),
                        fix="choose another name; to Kafka names that differ in dots and underscores are one",
                    ) from error
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise

    def starts(self, topic: str, partitions: int) -> tuple[int, ...]:
        """The first existing offset of each partition."""
        return self._offsets(topic, partitions, _EARLIEST, IsolationLevel.READ_UNCOMMITTED)

    def stable_ends(self, topic: str, partitions: int) -> tuple[int, ...]:
        """One past the last offset of each partition below which every transaction is decided."""
        return self._offsets(topic, partitions, _LATEST, IsolationLevel.READ_COMMITTED)

    def highest_ends(self, topic: str, partitions: int) -> tuple[int, ...]:
        """One past the last offset of each partition, decided or not; what was acknowledged lies below."""
        return self._offsets(topic, partitions, _LATEST, IsolationLevel.READ_UNCOMMITTED)

    def visible_ends(self, topic: str, partitions: int) -> tuple[int, ...]:
        """The stable ends, with what was committed before the call, unless another's transaction is open.

        A commit is durable before its marker is in the partitions, so a moment may pass between the two.
        """
        highest = self.highest_ends(topic, partitions)
        for _ in range(_VISIBLE_TRIES):
            stable = self.stable_ends(topic, partitions)
            if all(mine >= theirs for mine, theirs in zip(stable, highest, strict=True)):
                break
            sleep_ms(_VISIBLE_MS)
        return stable

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        """Delete the records below these offsets."""
        places = [TopicPartition(topic, partition, offset) for partition, offset in before.items()]
        with translated(f"records of {topic!r} could not be deleted"):
            for answer in self._admin().delete_records(places, request_timeout=self.answer_s).values():
                answer.result()

    def producer(self, transactional_id: str) -> Producer:
        """A transactional producer. Its first call must be `init_transactions`."""
        settings = {
            **self._settings,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": TRANSACTION_MS,
            "message.max.bytes": MESSAGE_BYTES_MAX,
            "queue.buffering.max.messages": 0,
            "queue.buffering.max.kbytes": 2_000_000,
            "linger.ms": 1,
            "compression.type": "lz4",
            "allow.auto.create.topics": False,
            "retry.backoff.ms": 20,
        }
        with translated(f"no producer {transactional_id!r} could be made"):
            return Producer(settings)

    def new_consumer(self) -> Consumer:
        """A consumer with manual assignment that reads committed records and reports the end."""
        settings = {
            **self._settings,
            "group.id": "penstock",  # never joined, nothing is committed under it
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
            "fetch.wait.max.ms": 10,
            "fetch.message.max.bytes": 4 * 1024 * 1024,
            "queued.max.messages.kbytes": 64 * 1024,
        }
        with translated("no consumer could be made"):
            return Consumer(settings)

    @contextmanager
    def consumer(self) -> Iterator[Consumer]:
        """An idle consumer, or a new one; idle again afterwards."""
        mine = self._here()
        try:
            consumer = mine.idle.pop()  # atomic: no two threads get the same one
        except IndexError:
            consumer = self.new_consumer()
        try:
            yield consumer
        finally:
            consumer.unassign()
            mine.idle.append(consumer)

    def close(self) -> None:
        """Close idle clients; new ones are opened when needed."""
        mine = self._here()
        while mine.idle:
            mine.idle.pop().close()
        mine.admin = None

    def _offsets(self, topic: str, partitions: int, which: Any, isolation: Any) -> tuple[int, ...]:
        asked = {TopicPartition(topic, partition): which for partition in range(partitions)}
        with self._looking(f"the offsets of {topic!r} could not be read") as look_s:
            last_ms = self._clock.boot_ms() + 1000 * look_s
            while True:
                left_s = max(0.1, (last_ms - self._clock.boot_ms()) / 1000)
                answers = self._admin().list_offsets(asked, isolation_level=isolation, request_timeout=left_s)
                try:
                    return tuple(answers[place].result().offset for place in asked)
                except KafkaException as error:
                    if not is_passing(error.args[0]) or self._clock.boot_ms() >= last_ms:
                        raise
                sleep_ms(_PASSING_MS)

    def _admin(self) -> AdminClient:
        mine = self._here()
        with mine.lock:  # the loser of a race would end its client under another's question
            if mine.admin is None:
                with translated("no connection could be made"):
                    mine.admin = AdminClient(self._settings)
            return mine.admin

    def _look_s(self) -> float:
        is_away = self._away_ms is not None and self._clock.boot_ms() - self._away_ms < AWAY_MS
        return min(AWAY_LOOK_S if is_away else LOOK_S, self.answer_s)

    @contextmanager
    def _looking(self, what: str) -> Iterator[float]:
        """For how long to wait; remembers if nobody answered."""
        try:
            with translated(what):
                yield self._look_s()
            self._away_ms = None
        except StoreUnavailable:
            self._away_ms = self._clock.boot_ms()
            raise

    def _here(self) -> _OfProcess:
        if self._mine.pid != os.getpid():
            self._inherited.append(self._mine)
            self._mine = _OfProcess(os.getpid())
        return self._mine


MESSAGE_BYTES_MAX = 16 * 1024 * 1024
