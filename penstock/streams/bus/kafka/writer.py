"""Writing to Kafka: one transactional id per writer, so that the broker itself refuses who was overtaken, in
its write.

Whoever initialised a transactional id last owns it: transactions of earlier owners are finished or aborted by
then, and later ones fail. So what a writer read of the control topic after its start stays true of everything
that is written under its id, for as long as its commits succeed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from confluent_kafka import KafkaException, Producer

from penstock.core.errors import OutcomeUnknown
from penstock.streams.bus.kafka.clients import Clients, translated
from penstock.streams.bus.kafka.control import ProducerState, Update
from penstock.streams.bus.kafka.records import HEADER, PRODUCER, Outgoing

WRITERS_MAX = 64  # per process: each has a connection and threads
_COMMIT_TRIES = 3


class WriterLost(OutcomeUnknown):
    """This writer cannot go on: somebody else took its id, or an answer was lost. A new one looks again."""

    def __init__(self, transactional_id: str, error: KafkaException) -> None:
        found = error.args[0]
        super().__init__(
            f"Kafka did not commit what {transactional_id!r} wrote",
            why=f"{found.name()}: {found.str()}",
            fix="publish again: what is there already is recognised by its sequence",
        )


class Writer:
    """Commits transactions under one id. `lock` is held by whoever uses it."""

    def __init__(self, clients: Clients, transactional_id: str, fault: Callable[[str], None]) -> None:
        self.lock = threading.RLock()
        self.state: ProducerState | None = None  # of a producer's writer: as its last commit left it
        self._id = transactional_id
        self._producer: Producer | None = None
        self._clients, self._fault = clients, fault

    @property
    def is_new(self) -> bool:
        """Whether it has yet to take its id."""
        return self._producer is None

    def start(self) -> None:
        """Take the id from whoever has it. Returns when all that was written under it is decided."""
        producer = self._clients.producer(self._id)
        with translated(f"the transactional id {self._id!r} could not be taken"):
            producer.init_transactions(self._clients.answer_s)
        self._producer = producer

    def commit(
        self,
        *,
        data: Iterable[Outgoing] = (),
        topic: str = "",
        producer: str = "",
        control: str,
        updates: Iterable[Update],
    ) -> None:
        """All of it, or nothing. WriterLost: this writer is of no further use."""
        client = self._producer
        assert client is not None, "a writer starts before it commits"
        name = producer.encode()
        try:
            client.begin_transaction()
            for message in data:
                headers: list[tuple[str, str | bytes | None]] = [
                    (HEADER, message.head),
                    (PRODUCER, name),
                    *message.headers,
                ]
                client.produce(topic, message.value, message.key, message.partition, headers=headers)
            for key, value in updates:
                client.produce(control, value, key, 0)
            client.flush(self._clients.answer_s)
            self._fault("transaction:before")
            self._commit(client)
            self._fault("transaction:after")
        except KafkaException as error:
            self.drop()
            raise WriterLost(self._id, error) from error

    def drop(self) -> None:
        """Forget the client; what it left open is aborted by the next owner of the id."""
        client, self._producer, self.state = self._producer, None, None
        if client is not None:
            client.purge()

    def _commit(self, client: Producer) -> None:
        for attempt in range(_COMMIT_TRIES):
            try:
                client.commit_transaction(self._clients.answer_s)
            except KafkaException as error:
                if not error.args[0].retriable() or attempt == _COMMIT_TRIES - 1:
                    raise
            else:
                return


class Writers:
    """The writers of one process, the least used of them dropped when there are too many."""

    def __init__(self, make: Callable[[str], Writer]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._writers: OrderedDict[str, Writer] = OrderedDict()

    def get(self, transactional_id: str) -> Writer:
        """The one writer of this id here; it may be new."""
        with self._lock:
            writer = self._writers.pop(transactional_id, None) or self._make(transactional_id)
            self._writers[transactional_id] = writer
            old = next(iter(self._writers.values())) if len(self._writers) > WRITERS_MAX else None
            if old is not None and old.lock.acquire(blocking=False):  # in use: next time
                try:
                    self._writers.popitem(last=False)
                    old.drop()
                finally:
                    old.lock.release()
            return writer

    def close(self) -> None:
        """Let all of them go."""
        with self._lock:
            for writer in self._writers.values():
                with writer.lock:
                    writer.drop()
            self._writers.clear()
