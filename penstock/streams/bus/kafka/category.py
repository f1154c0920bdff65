"""Categories on Kafka: what is there, and how it is changed in one fenced transaction."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, CorruptData, SequenceGap, StoreUnavailable
from penstock.core.system_clock import SystemClock, sleep_ms
from penstock.streams.bus import admission
from penstock.streams.bus.kafka.clients import Clients, Topic
from penstock.streams.bus.kafka.control import ControlState, ProducerState, Update
from penstock.streams.bus.kafka.place import KafkaPlace
from penstock.streams.bus.kafka.read import ControlReader, Seen
from penstock.streams.bus.kafka.records import Outgoing
from penstock.streams.bus.kafka.writer import Writer, WriterLost, Writers
from penstock.streams.bus.log import Category

# How often a write starts again because somebody else took its transactional id meanwhile.
TRIES_MAX = 12
_PAUSE_MS_MAX = 50
# Readers, who ask all the time, notice after so long that a topic is gone or another one; writers at once.
RECENT_MS = 1000
GLANCE_MS = 200  # how long a look waits for transactions of others to be decided


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one transaction writes."""

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


Decide = Callable[[ControlState, ProducerState], Change | None]


@dataclass(frozen=True, slots=True)
class Found:
    """A category, and the id of its control topic."""

    category: Category
    control_id: str

    def life(self, producer: str) -> str:
        """What tells the transactional ids of two lives of one name apart."""
        return self.category.birth if producer else self.control_id


class KafkaCategories:
    """The categories under one place, for all threads of a process; after a fork it starts anew."""

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
        """Decide on what is there and commit, under the producer's id or the category's; again if fenced."""
        here, topic, control = self._here(), self.place.topic(name), self.place.control(name)
        state = ControlState()  # a publish depends on its producer alone
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
                        return  # whoever is impatient tries another time
                    state = seen.state
                try:
                    change = decide(state, writer.state or ProducerState())
                except SequenceGap:
                    if is_new:
                        raise
                    writer.drop()  # a twin may have sent what is missing; what is remembered here is old
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
            # Several that take one id from each other would do so for ever without a difference.
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
        admission.check_name(name)
        topic, control = self.place.topic(name), self.place.control(name)
        found = self._here().clients.topics([topic, control])
        if topic not in found or control not in found:
            raise admission.missing(name)
        known = self._known.get((name, found[topic].id))
        if known is None:
            # A glance is enough to find what never changes.
            seen = self._here().control.catch_up(control, found[control].id, patience_ms=GLANCE_MS)
            if not seen.is_whole and (
                seen.state.category is None or seen.state.category.birth != found[topic].id
            ):
                seen = self._here().control.catch_up(control, found[control].id)
            known = _checked(name, seen.state.category, found[topic])
            self._known[name, known.birth] = known
        if found[topic].partitions != known.spec.partitions:
            raise ConfigError(
                f"the topic of category {name!r} has another number of partitions than the category",
                why=f"{found[topic].partitions}, not {known.spec.partitions}: keys lie elsewhere now",
                fix="stop its producers, and plan a new category with the new number of partitions",
            )
        return Found(known, found[control].id)

    def state(self, name: str, found: Found | None = None) -> ControlState:
        """What its control topic says, with everything that was committed before this call."""
        control_id = (found or self.find(name, is_recent=True)).control_id
        return self._here().control.catch_up(self.place.control(name), control_id).state

    def glance(self, name: str, found: Found | None = None) -> Seen:
        """The same, or less if somebody left a transaction open."""
        control_id = (found or self.find(name, is_recent=True)).control_id
        control = self.place.control(name)
        return self._here().control.catch_up(control, control_id, patience_ms=GLANCE_MS)

    def settled(self, topic: str, control: str) -> dict[str, Topic]:
        """Both topics, once every broker that we ask knows of them."""
        for _ in range(100):
            found = self._here().clients.topics([topic, control])
            if len(found) == 2:
                return found
            sleep_ms(50)
        raise StoreUnavailable(
            f"topic {topic!r} was created, but Kafka does not show it",
            why="for 5 seconds it was not among the topics",
            fix="look at the brokers' logs, then try again",
        )

    def _here(self) -> _OfProcess:
        if self._mine.pid != os.getpid():
            self._inherited.append(self._mine)
            self._mine = _OfProcess(self.place, self._fault, self._answer_s)
        return self._mine


def _checked(name: str, category: Category | None, topic: Topic) -> Category:
    if category is None:
        raise admission.missing(name)  # somebody is just creating it
    if category.birth != topic.id:
        raise CorruptData(
            f"the topic of category {name!r} was deleted and created again outside Penstock",
            why=f"it was born as {category.birth}, it is now {topic.id}: none of the old records are in it",
            fix="create the category again, which makes it a new one, and submit what reads it again",
        )
    return category
