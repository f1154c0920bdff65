"""The bus on Kafka: a topic per category, and a control topic beside it that holds what is not a record.

Why it is made so: docs/decisions/0012-kafka.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import msgspec
import numpy as np
import pyarrow as pa
from confluent_kafka import Message

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, NotFound
from penstock.streams.bus import log as contract
from penstock.streams.bus.kafka import control as kafka_control
from penstock.streams.bus.kafka.category import (
    QUICK_READ_MS,
    CategoryChange,
    Decide,
    Found,
    KafkaCategories,
    WriterLost,
    begin_updates,
    finish_updates,
    seen_of,
)
from penstock.streams.bus.kafka.clients import ANSWER_S, MESSAGE_BYTES_MAX
from penstock.streams.bus.kafka.control import ControlState, ProducerState, Registration, after_publish
from penstock.streams.bus.kafka.place import KafkaPlace
from penstock.streams.bus.kafka.read import ControlRead, decode_rows, encode_rows, first_time, read_messages
from penstock.streams.bus.log import (
    LOW_MIN,
    Category,
    CategorySpec,
    Lag,
    Mark,
    Published,
    Run,
    Seen,
    TimedRun,
)

# How often a mark is tried when others write to the category at the same time.
MARK_TRIES_MAX = 3


class KafkaLog:
    """The `Log` protocol on a Kafka cluster, shared by handles, threads, processes and hosts."""

    def __init__(
        self,
        place: KafkaPlace,
        *,
        fault: Callable[[str], None] | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._place = place
        self._fault = fault or (lambda point: None)
        self._all = KafkaCategories(place, self._fault, answer_s)

    def __reduce__(self) -> tuple[object, ...]:
        # Handles travel to Spark's workers; connections do not.
        return KafkaLog, (self._place,)

    def close(self) -> None:
        """Close this process's clients; the handle may be used again."""
        self._all.close()

    def identity(self) -> str:
        """What stays the same if the address changes: the cluster's own id, and the prefix."""
        return f"kafka:{self._all.clients.cluster_id()}/{self._place.prefix}"

    # Categories

    def create(self, spec: CategorySpec) -> Category:
        """Create, or return the existing category if its spec is the same. An existing topic is adopted."""
        contract.check_spec(spec)
        topic, control = self._place.topic(spec.name), self._place.control(spec.name)
        self._fault("create:before")
        found = self._all.clients.topics([topic, control])
        if topic not in found:
            self._all.clients.create_topic(topic, spec.partitions, _topic_settings(spec))
        if control not in found:
            self._all.clients.create_topic(control, 1, {"cleanup.policy": "compact"})
        self._fault("create:topics")
        topics = self._all.settled(topic, control)
        if topics[topic].partitions != spec.partitions:
            raise ConfigError(
                f"category {spec.name!r} exists with another number of partitions",
                why=f"topic {topic!r} has {topics[topic].partitions}, asked for were {spec.partitions}",
                fix="declare it as it is, or choose another name",
            )
        wanted = Category(spec=spec, birth=topics[topic].id)

        def decide(state: ControlState, _: ProducerState) -> CategoryChange | None:
            if state.category is not None and state.category.birth == wanted.birth:
                return None
            return CategoryChange(updates=(kafka_control.category_update(wanted),))

        made = Found(wanted, topics[control].id)
        state = self._all.state(spec.name, made)
        if decide(state, ProducerState()) is not None:
            self._all.transact(spec.name, made, decide)
        self._fault("create:after")
        category = self.describe(spec.name)
        contract.check_same(category, spec)
        return category

    def describe(self, name: str) -> Category:
        """NotFound if there is none."""
        return self._all.find(name).category

    def categories(self) -> tuple[Category, ...]:
        """All categories, by name."""
        found = []
        for name in self.names():
            with suppress(NotFound):  # its topics are there, but its creator is not done, or died before
                found.append(self.describe(name))
        return tuple(found)

    def names(self) -> tuple[str, ...]:
        """The names of all categories, also of those that cannot be read."""
        return tuple(self._place.category_names(self._all.clients.names()))

    # Records

    def publish(
        self,
        category: str,
        *,
        producer: str,
        epoch: int,
        batches: Mapping[int, pa.RecordBatch],
        gapless: bool,
    ) -> Published:
        """Append what is new of each batch in one transaction, together with how far the producer is."""
        found = self._all.find(category)
        spec = found.category.spec
        arranged = contract.arrange(spec, batches)
        self._fault("publish:before")
        trimmed: dict[int, int] = {}
        tries = 0

        def decide(_: ControlState, mine: ProducerState) -> CategoryChange | None:
            nonlocal tries
            tries += 1
            contract.check_epoch(category, producer, epoch=epoch, highest=mine.epoch)
            if gapless:
                for partition, batch in arranged.items():
                    contract.check_gapless(category, partition, batch, mine.last.get(partition))
            for partition, batch in arranged.items():
                trimmed[partition] = contract.decide_trim(batch, mine.last.get(partition))
            new = {p: batch.slice(trimmed[p]) for p, batch in arranged.items() if batch.num_rows > trimmed[p]}
            data = [row for p, batch in new.items() for row in encode_rows(spec, p, batch, epoch)]
            state = after_publish(
                mine,
                epoch=epoch,
                last={p: int(contract.sequences(batch)[-1]) for p, batch in new.items()},
                records=len(data),
                size=sum(len(row.value or b"") + len(row.key or b"") + len(row.head) for row in data),
            )
            # Written also if nothing is new: only the broker knows whether a successor has been here.
            update = kafka_control.producer_update(producer, state)
            return CategoryChange(data=tuple(data), updates=(update,), state=state)

        if arranged:
            self._all.transact(category, found, decide, producer)
        self._fault("publish:after")
        appended = {p: batch.num_rows - trimmed[p] for p, batch in arranged.items()}
        return Published(appended=appended, trimmed=trimmed, retried=tries > 1)

    def start_offsets(self, category: str) -> tuple[int, ...]:
        """The first offset of each partition that is still there."""
        spec = self._all.find(category, is_recent=True).category.spec
        return self._all.clients.starts(self._place.topic(category), spec.partitions)

    def truncate(self, category: str, before: Mapping[int, int]) -> None:
        """Let the records below these offsets go, then the marks that nobody needs without them."""
        found, topic = self._all.find(category), self._place.topic(category)
        spec, clients = found.category.spec, self._all.clients
        contract.check_truncate(spec, before, clients.visible_ends(topic, spec.partitions))
        first = clients.starts(topic, spec.partitions)
        clients.delete_records(topic, {p: offset for p, offset in before.items() if offset > first[p]})
        starts = clients.starts(topic, spec.partitions)

        def decide(state: ControlState, _: ProducerState) -> CategoryChange | None:
            passed = [kafka_control.mark_update(number, None) for number in state.passed_marks(starts)]
            passed += [kafka_control.idle_update(*place, None) for place in state.passed_idle(starts)]
            return CategoryChange(updates=tuple(passed)) if passed else None

        self._change_category("truncate", category, decide)

    def end_offsets(self, category: str) -> tuple[int, ...]:
        """The last stable offsets: below them every transaction is decided, and every mark known.

        Ends are read first, then marks: one that is not there yet lies at or beyond these ends.
        """
        found = self._all.find(category, is_recent=True)
        ends = self._all.clients.visible_ends(self._place.topic(category), found.category.spec.partitions)
        seen = self._all.glance(category, found)
        if not seen.is_whole:  # a dead publisher hides what may be marks: readers wait with it
            seen = ControlRead(self._all.state(category, found), True)
        floor = seen.state.open.floor if seen.state.open is not None else ends
        return tuple(min(end, low) for end, low in zip(ends, floor, strict=True))

    def read(self, category: str, partition: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Records [start, end) in offset order."""
        return (batch for _, batch in self.scan(category, partition, start, end))

    def scan(self, category: str, partition: int, start: int, end: int) -> Iterator[Run]:
        """As `read`, each batch with the offsets of its rows."""
        spec = self._all.find(category, is_recent=True).category.spec
        return (decode_rows(spec, found) for found in self._messages(category, spec, partition, start, end))

    def scan_timed(self, category: str, partition: int, start: int, end: int) -> Iterator[TimedRun]:
        """As `scan`, with the time at which each row was appended: its message's own."""
        spec = self._all.find(category, is_recent=True).category.spec
        for found in self._messages(category, spec, partition, start, end):
            offsets, batch = decode_rows(spec, found)
            times = np.array([max(0, message.timestamp()[1]) for message in found], dtype=np.int64)
            yield offsets, times, batch

    def _messages(
        self, category: str, spec: CategorySpec, partition: int, start: int, end: int
    ) -> Iterator[list[Message]]:
        assert start >= 0, "offsets count from 0"
        contract.check_partition(spec, partition)
        if end <= start:
            return iter(())
        clients, topic = self._all.clients, self._place.topic(category)
        if end > clients.stable_ends(topic, spec.partitions)[partition]:
            contract.check_range(
                spec, partition, end, clients.visible_ends(topic, spec.partitions)[partition]
            )
        contract.check_start(category, partition, start, clients.starts(topic, spec.partitions)[partition])
        return read_messages(clients, topic, partition, start, end)

    def times(self, category: str, partition: int, start: int, end: int) -> tuple[Millis, Millis] | None:
        """The smallest and the largest `_ts` in [start, end); it is read, Kafka knows only its own times."""
        return contract.times_of(self.read(category, partition, start, end))

    def lag(self, category: str, positions: Mapping[int, int], *, now_ms: Millis) -> Lag:
        """What lies between positions and ends; bytes are estimated by the mean of what was published."""
        spec, topic = self._all.find(category, is_recent=True).category.spec, self._place.topic(category)
        clients, mean = self._all.clients, self._all.glance(category).state.record_bytes()
        ends = clients.stable_ends(topic, spec.partitions)
        starts = clients.starts(topic, spec.partitions)
        lags = []
        for partition, asked in positions.items():
            contract.check_partition(spec, partition)
            position, end = max(asked, starts[partition]), ends[partition]
            at_ms = first_time(clients, topic, partition, position, end) if position < end else None
            if at_ms is not None:  # else only ends of transactions lie there
                count = end - position
                lags.append(Lag(records=count, bytes=round(count * mean), ms=max(0, now_ms - at_ms)))
        return contract.sum_lags(lags)

    def within(self, category: str, partition: int, start: int, end: int, bytes_max: int) -> int:
        """Up to where records from `start` have about so many bytes, by the mean of what was published."""
        contract.check_partition(self._all.find(category, is_recent=True).category.spec, partition)
        mean, rows = self._all.glance(category).state.record_bytes(), end - start
        return contract.fit_bytes([(start, rows, rows * mean)] if rows > 0 else [], start, end, bytes_max)

    def published_to(self, category: str, producer: str) -> Mapping[int, int]:
        """The highest sequence this producer ever appended, per partition."""
        state = self._all.state(category).producers.get(producer)
        return {} if state is None else dict(state.last)

    def fence(self, category: str, producer: str, epoch: int, *, is_new_life: bool = False) -> None:
        """Take the producer's transactional id and leave the epoch: who had it before fails in its write."""
        found = self._all.find(category)
        known = self._all.glance(category, found).state.producers.get(producer)
        if not is_new_life and known is not None and known.epoch is not None and known.epoch >= epoch:
            return

        def decide(_: ControlState, mine: ProducerState) -> CategoryChange | None:
            if is_new_life:
                # After a try of our own whose outcome is unknown this may refuse us: a larger epoch helps.
                contract.check_new_epoch(category, producer, epoch=epoch, highest=mine.epoch)
            if mine.epoch is not None and mine.epoch >= epoch:
                return None
            state = msgspec.structs.replace(mine, epoch=epoch)
            return CategoryChange(updates=(kafka_control.producer_update(producer, state),), state=state)

        self._fault("fence:before")
        self._all.transact(category, found, decide, producer)
        self._fault("fence:after")

    # Watermarks

    def register_producer(self, category: str, producer: str) -> None:
        """Count this producer in the category's watermark, from the W there is. Repeated it does nothing."""

        def decide(state: ControlState, _: ProducerState) -> CategoryChange | None:
            if producer in state.lows():
                return None
            new = Registration(number=state.registration_number(), low=state.next_low())
            return CategoryChange(updates=(kafka_control.registration_update(producer, new),))

        self._change_category("register_producer", category, decide)

    def unregister_producer(self, category: str, producer: str) -> None:
        """Count it no longer; W rises with the next report of another producer."""

        def decide(state: ControlState, _: ProducerState) -> CategoryChange | None:
            if producer not in state.lows():
                return None
            gone = Registration(number=state.registered[producer].number, low=None)
            return CategoryChange(updates=(kafka_control.registration_update(producer, gone),))

        self._change_category("unregister_producer", category, decide)

    def producers(self, category: str) -> Mapping[str, Millis]:
        """Registered producers and their output lows."""
        return self._all.glance(category).state.lows()

    def report_low(self, category: str, *, producer: str, epoch: int, low: Millis, now_ms: Millis) -> None:
        """Raise the producer's output low under its own id; append a mark under the category's if due."""
        found = self._all.find(category, is_recent=True)
        seen = self._all.glance(category, found)
        if not seen.is_whole and producer not in seen.state.lows():
            seen = ControlRead(self._all.state(category, found), True)

        def decide(_: ControlState, mine: ProducerState) -> CategoryChange | None:
            contract.check_epoch(category, producer, epoch=epoch, highest=mine.epoch)
            lows = seen.state.lows()
            if producer not in lows:
                raise contract.not_registered(category, producer)
            number = seen.state.registered[producer].number
            raised = msgspec.structs.replace(
                mine,
                epoch=epoch,
                low=max(low, lows[producer], mine.low if mine.registration == number else LOW_MIN),
                registration=number,
            )
            if low <= lows[producer] and mine.epoch == epoch:
                return None
            return CategoryChange(updates=(kafka_control.producer_update(producer, raised),), state=raised)

        self._fault("report_low:before")
        if decide(seen.state, seen.state.producers.get(producer, ProducerState())) is not None:
            self._all.transact(category, found, decide, producer)
            seen = self._all.glance(category, found)
        self._fault("report_low:mark")
        self._mark(category, found, seen.state, now_ms)
        self._fault("report_low:after")

    def advance(self, category: str, *, now_ms: Millis) -> None:
        """Append the marks that are due, if any. Of several who try at once one does, the others see it."""
        found = self._all.find(category, is_recent=True)
        self._mark(category, found, self._all.glance(category, found).state, now_ms, {})

    def observe(self, category: str, *, partition: int, low: Millis, now_ms: Millis) -> None:
        """A reader has reached this low; idle partitions follow."""
        found = self._all.find(category, is_recent=True)
        contract.check_partition(found.category.spec, partition)
        if found.category.spec.idle_after_ms:
            self._mark(category, found, self._all.glance(category, found).state, now_ms, {partition: low})

    def observed(self, category: str) -> tuple[Seen, ...]:
        """What was noted of each partition."""
        found = self._all.find(category, is_recent=True)
        if not found.category.spec.idle_after_ms:
            return ()
        return seen_of(self._all.glance(category, found).state)

    def _mark(
        self,
        category: str,
        found: Found,
        seen: ControlState,
        now_ms: Millis,
        observed: Mapping[int, Millis] | None = None,
    ) -> None:
        """Begin the marks that are due, then make them: whoever reads in between stays below where they may
        lie.

        Otherwise a reader could pass the mark before it is there, and timers would depend on who was faster.
        """
        topic, spec, looks = self._place.topic(category), found.category.spec, observed is not None

        def begin(state: ControlState, _: ProducerState) -> CategoryChange | None:
            last, last_ms = state.watermark()
            due = contract.decide_mark(state.lows(), last=last, last_ms=last_ms, now_ms=now_ms)
            if state.open is not None or (due is None and not (looks and spec.idle_after_ms)):
                return None
            # W was read first. Above the highest ends lies nothing that was acknowledged before.
            ends = self._all.clients.highest_ends(topic, spec.partitions)
            updates = begin_updates(state, ends, observed=observed, now_ms=now_ms)
            return CategoryChange(updates=updates) if updates else None

        def finish(state: ControlState, _: ProducerState) -> CategoryChange | None:
            if state.open is None:
                return None  # another process did
            ends = self._all.clients.highest_ends(topic, spec.partitions)
            return CategoryChange(updates=finish_updates(state, ends, now_ms=now_ms))

        try:
            if begin(seen, ProducerState()) is not None:
                self._all.transact(category, found, begin, tries=MARK_TRIES_MAX, patience_ms=QUICK_READ_MS)
                self._fault("mark:begun")
            elif seen.open is None:
                return
            self._all.transact(category, found, finish, tries=MARK_TRIES_MAX, patience_ms=QUICK_READ_MS)
        except WriterLost:
            return  # other processes write to the category: the next report tries again

    def marks(self, category: str, partition: int, *, above: Millis, up_to: int) -> tuple[Mark, ...]:
        """Marks of one partition with low > `above` and end <= `up_to`, in order."""
        state = self._all.glance(category).state
        assert state.category is not None
        contract.check_partition(state.category.spec, partition)
        return state.cut_marks(partition, above=above, up_to=up_to)

    def watermark(self, category: str) -> Millis:
        """W of the last mark, LOW_MIN if none."""
        return self._all.glance(category).state.watermark()[0]

    def raise_percentile(self, category: str, *, percent: int, low: Millis) -> Millis:
        """Store the low that so many percent have reached, if it is higher."""

        def decide(state: ControlState, _: ProducerState) -> CategoryChange | None:
            if low <= state.percentiles.get(percent, LOW_MIN):
                return None
            return CategoryChange(updates=(kafka_control.percentile_update(percent, low),))

        self._change_category("raise_percentile", category, decide)
        return max(low, self._all.glance(category).state.percentiles.get(percent, LOW_MIN))

    def clean(self, *, now_ms: Millis, older_than_ms: Millis) -> int:
        """Nothing to clean: Kafka aborts open transactions and applies retention."""
        return 0

    def _change_category(self, effect: str, category: str, decide: Decide) -> None:
        found = self._all.find(category)
        self._fault(f"{effect}:before")
        if decide(self._all.state(category, found), ProducerState()) is not None:
            self._all.transact(category, found, decide)
        self._fault(f"{effect}:after")


def _topic_settings(spec: CategorySpec) -> dict[str, str]:
    return {
        "cleanup.policy": "delete",
        "retention.ms": str(spec.retention_ms or -1),
        "retention.bytes": "-1",
        "max.message.bytes": str(MESSAGE_BYTES_MAX),
    }
