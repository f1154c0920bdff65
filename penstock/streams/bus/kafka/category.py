"""Categories on Kafka: lookup, and changes in one fenced transaction."""

from __future__ import annotations

import os
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from confluent_kafka import (
    KafkaException,
    Producer,
)

from penstock.core.clock import Millis
from penstock.core.errors import (
    ConfigError,
    CorruptData,
    OutcomeUnknown,
    SequenceGap,
    StoreUnavailable,
)
from penstock.core.system_clock import SystemClock, sleep_ms
from penstock.streams.bus import idle
from penstock.streams.bus import log as contract
from penstock.streams.bus.kafka.clients import Clients, Topic, translated
from penstock.streams.bus.kafka.control import (
    ControlState,
    MarkRecord,
    OpenMark,
    ProducerState,
    Update,
    idle_update,
    mark_update,
    open_update,
    seen_update,
)
from penstock.streams.bus.kafka.place import KafkaPlace
from penstock.streams.bus.kafka.read import (
    HEADER,
    PRODUCER,
    ControlRead,
    ControlReader,
    Outgoing,
)
from penstock.streams.bus.log import Category, Mark, Seen


def begin_updates(
    state: ControlState, ends: tuple[int, ...], *, observed: Mapping[int, Millis] | None, now_ms: Millis
) -> tuple[Update, ...]:
    """What is noted of partitions, and the mark that is due, begun. `ends`: read after `state`.

    `observed` None: partitions are not looked at.
    """
    if state.open is not None:
        return ()
    assert state.category is not None
    last, last_ms = state.watermark()
    due = contract.decide_mark(state.lows(), last=last, last_ms=last_ms, now_ms=now_ms)
    seen = seen_of(state)
    noted = idle.decide_idle(
        seen,
        ends,
        observed=observed or {},
        idle_after_ms=0 if observed is None else state.category.spec.idle_after_ms,
        now_ms=now_ms,
        last=last,
    )
    marks = idle.due_marks(seen, noted)
    updates = [seen_update(partition, one) for partition, one in noted.items()]
    if due is not None or marks:
        updates.append(open_update(OpenMark(low=last if due is None else due, floor=ends, idle=marks)))
    return tuple(updates)


def finish_updates(state: ControlState, ends: tuple[int, ...], *, now_ms: Millis) -> tuple[Update, ...]:
    """Complete the mark that was begun, at these ends. Nothing if another process did."""
    if state.open is None:
        return ()
    updates = [open_update(None)]
    if state.open.low > state.watermark()[0]:
        mark = MarkRecord(low=state.open.low, ends=ends, at_ms=now_ms)
        updates.insert(0, mark_update(state.mark_number(), mark))
    for partition, low in state.open.idle.items():
        number = max((number for number, _ in state.idle_of(partition)), default=0) + 1
        updates.insert(0, idle_update(partition, number, Mark(low=low, end=ends[partition], idle=True)))
    return tuple(updates)


def seen_of(state: ControlState) -> tuple[Seen, ...]:
    """The recorded progress of each partition."""
    assert state.category is not None
    return tuple(state.seen.get(partition, Seen()) for partition in range(state.category.spec.partitions))


# Retries of a write whose transactional id was taken by another process.
TRIES_MAX = 12
_PAUSE_MS_MAX = 50
# Readers use a cached lookup for so long, and then notice that a topic was deleted or recreated; writers at
# once.
RECENT_MS = 1000
QUICK_READ_MS = 200  # how long a read waits for open transactions of others


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryChange:
    """The writes of one transaction."""

    updates: tuple[Update, ...]
    data: tuple[Outgoing, ...] = ()
    state: ProducerState | None = None  # the producer's, once it is committed


class _OfProcess:
    """Everything with threads or connections."""

    def __init__(self, place: KafkaPlace, fault: Callable[[str], None], answer_s: float) -> None:
        self.pid = os.getpid()
        self.clients = Clients(place.settings(os.environ), answer_s=answer_s)
        self.writers = Writers(lambda name: Writer(self.clients, name, fault))
        self.control = ControlReader(self.clients)


Decide = Callable[[ControlState, ProducerState], CategoryChange | None]


@dataclass(frozen=True, slots=True)
class Found:
    """A category, and the id of its control topic."""

    category: Category
    control_id: str

    def life(self, producer: str) -> str:
        """A part of transactional ids that differs between two lives of one category name."""
        return self.category.birth if producer else self.control_id


class KafkaCategories:
    """The categories at one place, for all threads of a process; fork-safe."""

    def __init__(self, place: KafkaPlace, fault: Callable[[str], None], answer_s: float) -> None:
        self.place, self._fault, self._answer_s = place, fault, answer_s
        self._mine = _OfProcess(place, fault, answer_s)
        self._inherited: list[_OfProcess] = []  # over a fork: never touched again
        self._known: dict[tuple[str, str], Category] = {}  # by name and birth: a spec never changes
        self._looked: dict[str, tuple[Millis, Found]] = {}  # when each category was last looked up
        self._clock = SystemClock()

    @property
    def clients(self) -> Clients:
        """This process's clients."""
        return self._here().clients

    def close(self) -> None:
        """Close this process's clients."""
        here = self._here()
        here.writers.close()
        here.control.close()
        here.clients.close()

    def transact(
        self,
        name: str,
        found: Found,
        decide: Decide,
        producer: str = "",
        *,
        tries: int = TRIES_MAX,
        patience_ms: Millis | None = None,
    ) -> None:
        """Decide and commit, under the producer's id or the category's; retry if fenced."""
        here, topic, control = self._here(), self.place.topic(name), self.place.control(name)
        state = ControlState()  # a publish depends only on its producer
        writer = here.writers.get(f"{control}:{found.life(producer)}:{producer}")
        for attempt in range(tries):
            with writer.lock:
                is_new = writer.is_new
                if is_new:
                    writer.start()
                    self._fault("writer:started")
                if writer.state is None and producer:
                    state = here.control.catch_up(control, found.control_id).state
                    writer.state = state.producers.get(producer, ProducerState())
                elif not producer:
                    seen = here.control.catch_up(control, found.control_id, patience_ms=patience_ms)
                    if not seen.is_whole:
                        return  # the caller does not wait: it tries later
                    state = seen.state
                try:
                    change = decide(state, writer.state or ProducerState())
                except SequenceGap:
                    if is_new:
                        raise
                    writer.drop()  # a twin may have sent the missing records; the cached state is old
                    continue
                if change is None:
                    return
                try:
                    writer.commit(
                        data=change.data,
                        topic=topic,
                        producer=producer,
                        control=control,
                        updates=change.updates,
                    )
                except WriterLost:
                    if attempt == tries - 1:
                        raise
                else:
                    if producer:
                        writer.state = change.state
                    return
            # Without jitter, processes that take one id from each other would do so for ever.
            sleep_ms(random.randint(1, _PAUSE_MS_MAX))
        raise AssertionError("the last try returns or raises")

    def find(self, name: str, *, is_recent: bool = False) -> Found:
        """The category as it is now, or with `is_recent` as it was within the last second."""
        now_ms, looked = self._clock.boot_ms(), self._looked.get(name)
        if is_recent and looked is not None and now_ms - looked[0] < RECENT_MS:
            return looked[1]
        self._looked.pop(name, None)
        found = self._find(name)
        self._looked[name] = now_ms, found
        return found

    def _find(self, name: str) -> Found:
        contract.check_name(name)
        topic, control = self.place.topic(name), self.place.control(name)
        found = self._here().clients.topics([topic, control])
        if topic not in found or control not in found:
            raise contract.missing(name)
        known = self._known.get((name, found[topic].id))
        if known is None:
            # A quick read is enough: spec and birth never change.
            seen = self._here().control.catch_up(control, found[control].id, patience_ms=QUICK_READ_MS)
            if not seen.is_whole and (
                seen.state.category is None or seen.state.category.birth != found[topic].id
            ):
                seen = self._here().control.catch_up(control, found[control].id)
            known = _checked(name, seen.state.category, found[topic])
            self._known[name, known.birth] = known
        if found[topic].partitions != known.spec.partitions:
            raise ConfigError(
                f"the topic of category {name!r} has another number of partitions than the category",
                why=f"{found[topic].partitions}, not {known.spec.partitions}: keys have moved",
                fix="stop its producers, and plan a new category with the new number of partitions",
            )
        return Found(known, found[control].id)

    def state(self, name: str, found: Found | None = None) -> ControlState:
        """The state of its control topic, with everything that was committed before this call."""
        control_id = (found or self.find(name, is_recent=True)).control_id
        return self._here().control.catch_up(self.place.control(name), control_id).state

    def glance(self, name: str, found: Found | None = None) -> ControlRead:
        """The same; may be older if another process has an open transaction."""
        control_id = (found or self.find(name, is_recent=True)).control_id
        control = self.place.control(name)
        return self._here().control.catch_up(control, control_id, patience_ms=QUICK_READ_MS)

    def settled(self, topic: str, control: str) -> dict[str, Topic]:
        """Wait until the brokers know both topics."""
        for _ in range(100):
            found = self._here().clients.topics([topic, control])
            if len(found) == 2:
                return found
            sleep_ms(50)
        raise StoreUnavailable(
            f"topic {topic!r} was created, but Kafka does not show it",
            why="for 5 seconds it was not among the topics",
            fix="check the brokers' logs, then try again",
        )

    def _here(self) -> _OfProcess:
        if self._mine.pid != os.getpid():
            self._inherited.append(self._mine)
            self._mine = _OfProcess(self.place, self._fault, self._answer_s)
        return self._mine


def _checked(name: str, category: Category | None, topic: Topic) -> Category:
    if category is None:
        raise contract.missing(name)  # its creation is not complete
    if category.birth != topic.id:
        raise CorruptData(
            f"the topic of category {name!r} was deleted and created again outside Penstock",
            why=f"its topic id was {category.birth}, it is now {topic.id}: the old records are lost",
            fix="create the category again as a new one, and submit its readers again",
        )
    return category


WRITERS_MAX = 64  # per process: each has a connection and threads


_COMMIT_TRIES = 3


class WriterLost(OutcomeUnknown):
    """This writer is unusable: another process took its id, or a response was lost. Use a new one."""

    def __init__(self, transactional_id: str, error: KafkaException) -> None:
        found = error.args[0]
        super().__init__(
            f"Kafka did not commit what {transactional_id!r} wrote",
            why=f"{found.name()}: {found.str()}",
            fix="publish again: duplicates are recognised by their sequences",
        )


class Writer:
    """Commits transactions under one id. Its user holds `lock`."""

    def __init__(self, clients: Clients, transactional_id: str, fault: Callable[[str], None]) -> None:
        self.lock = threading.RLock()
        self.state: ProducerState | None = None  # of a producer's writer: as its last commit left it
        self._id = transactional_id
        self._producer: Producer | None = None
        self._clients, self._fault = clients, fault

    @property
    def is_new(self) -> bool:
        """Whether it has not taken its id yet."""
        return self._producer is None

    def start(self) -> None:
        """Take the id from its owner. Returns when all transactions under it are decided."""
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
        """Write all or nothing. WriterLost: this writer is unusable."""
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
        """Drop the client; the next owner of the id aborts its open transaction."""
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
    """A cache of the writers of one process; drops the least recently used."""

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
        """Drop all writers."""
        with self._lock:
            for writer in self._writers.values():
                with writer.lock:
                    writer.drop()
            self._writers.clear()
