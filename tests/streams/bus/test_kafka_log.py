"""What only the Kafka log can get wrong: topics that others touch, transactions left open, lost brokers."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from penstock.core.errors import (
    ConfigError,
    CorruptData,
    EnvironmentProblem,
    Fenced,
    NotFound,
    RecordsExpired,
    StoreUnavailable,
)
from penstock.streams.bus.kafka import category as kafka_category
from penstock.streams.bus.kafka.category import RECENT_MS
from penstock.streams.bus.kafka.clients import Clients
from penstock.streams.bus.kafka.log import KafkaLog
from penstock.streams.bus.kafka.place import KafkaPlace, parse_place
from penstock.streams.bus.kafka.read import Outgoing
from penstock.streams.bus.log import LOW_MIN, CategorySpec
from penstock.streams.places import open_log
from tests.contracts.buses import assert_three_parts
from tests.streams.bus.publishers import SPEC, do_work, heard, publish, records, start, stored
from tests.waiting import LIMIT_S, until


@pytest.fixture
def place(kafka: Any) -> KafkaPlace:
    return parse_place(kafka.new_place())


@pytest.fixture
def log(place: KafkaPlace) -> Iterator[KafkaLog]:
    made = KafkaLog(place)
    made.create(SPEC)
    yield made
    made.close()


@pytest.fixture
def admin(place: KafkaPlace) -> AdminClient:
    return AdminClient({"bootstrap.servers": place.brokers})


def raw_producer(place: KafkaPlace, **settings: Any) -> Producer:
    """Somebody who is not Penstock."""
    return Producer({"bootstrap.servers": place.brokers, **settings})


# Topics that others touch


def test_a_topic_that_is_deleted_is_missed_by_name(log: KafkaLog, place: KafkaPlace, admin: AdminClient):
    publish(log, "a", 1, 3)
    admin.delete_topics([place.topic("clicks")])[place.topic("clicks")].result()
    with pytest.raises(NotFound) as caught:
        publish(log, "a", 4, 6)
    assert_three_parts(caught.value)
    time.sleep(RECENT_MS / 1000)
    with pytest.raises(NotFound):
        log.end_offsets("clicks")
    assert log.categories() == ()


def test_a_topic_made_anew_is_another_category(log: KafkaLog, place: KafkaPlace, admin: AdminClient):
    """Nothing of the old life counts: neither marks nor sequences; whoever reads it on is told."""
    log.register_producer("clicks", "a")
    publish(log, "a", 1, 3)
    log.report_low("clicks", producer="a", epoch=1, low=7, now_ms=0)
    old, topic = log.describe("clicks").birth, place.topic("clicks")
    admin.delete_topics([topic])[topic].result()
    until(lambda: topic not in admin.list_topics(timeout=LIMIT_S).topics)
    admin.create_topics([NewTopic(topic, 2, 1)])[topic].result()
    until(lambda: topic in admin.list_topics(timeout=LIMIT_S).topics)
    with pytest.raises(CorruptData) as caught:
        publish(log, "a", 4, 6)
    assert_three_parts(caught.value)
    again = log.create(SPEC)
    assert again.birth != old
    assert log.watermark("clicks") == LOW_MIN and log.producers("clicks") == {}
    assert publish(log, "a", 1, 3).appended == {0: 3, 1: 3}
    assert stored(log, 0) == [1, 2, 3]


def test_a_topic_whose_partitions_grew_stops_by_name(log: KafkaLog, place: KafkaPlace, admin: AdminClient):
    topic = place.topic("clicks")
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result()
    until(lambda: len(admin.list_topics(timeout=LIMIT_S).topics[topic].partitions) == 3)
    with pytest.raises(ConfigError) as caught:
        publish(log, "a", 1, 3)
    assert_three_parts(caught.value)


def test_somebody_elses_topic_is_adopted_and_read(place: KafkaPlace, admin: AdminClient):
    topic = place.topic("raw")
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    sender, now_ms = raw_producer(place), int(time.time() * 1000)
    sender.produce(topic, b'{"q": 1}', key=b"k", timestamp=now_ms, partition=0)
    sender.produce(topic, None, key=b"\xff", timestamp=now_ms + 1, partition=0)
    sender.flush(LIMIT_S)
    log = KafkaLog(place)
    with pytest.raises(ConfigError) as caught:
        log.create(CategorySpec(name="raw", partitions=2, columns=(("q", "bigint"),), format="json"))
    assert_three_parts(caught.value)
    spec = CategorySpec(name="raw", partitions=1, columns=(("q", "bigint"),), format="json")
    log.create(spec)
    (batch,) = log.read("raw", 0, 0, 2)
    assert batch.to_pylist() == [
        {"_seq": 0, "_ts": now_ms, "_key": "k", "_late": False, "_value": b'{"q": 1}'},
        {"_seq": 1, "_ts": now_ms + 1, "_key": "\ufffd", "_late": False, "_value": None},
    ]
    log.close()


def test_somebody_elses_message_in_a_typed_topic_is_damage(log: KafkaLog, place: KafkaPlace):
    publish(log, "a", 1, 3)
    sender = raw_producer(place)
    sender.produce(place.topic("clicks"), b"hello", partition=0)
    sender.flush(LIMIT_S)
    assert stored(log, 1) == [1, 2, 3]
    with pytest.raises(CorruptData) as caught:
        stored(log, 0)
    assert_three_parts(caught.value)


def test_names_that_kafka_takes_for_the_same_are_refused(log: KafkaLog):
    log.create(CategorySpec(name="a.b", partitions=1, columns=()))
    with pytest.raises(ConfigError) as caught:
        log.create(CategorySpec(name="a_b", partitions=1, columns=()))
    assert_three_parts(caught.value)


# Records


def test_a_record_too_large_for_a_topic_is_refused_whole(log: KafkaLog):
    with pytest.raises(ConfigError) as caught:
        log.publish(
            "clicks",
            producer="a",
            epoch=1,
            batches={0: records(1, 3), 1: records(1, 1, "x" * 20_000_000)},
            gapless=True,
        )
    assert_three_parts(caught.value)
    assert log.end_offsets("clicks") == (0, 0) and log.published_to("clicks", "a") == {}
    publish(log, "a", 1, 1, "y" * 10_000_000)
    assert stored(log, 0) == [1]


def test_the_broker_lets_records_go_that_are_past_their_retention(log: KafkaLog):
    log.create(CategorySpec(name="brief", partitions=2, columns=SPEC.columns, retention_ms=500))
    log.publish("brief", producer="a", epoch=1, batches={0: records(1, 3)}, gapless=True)
    end = log.end_offsets("brief")[0]
    until(lambda: log.start_offsets("brief")[0] == end)
    with pytest.raises(RecordsExpired):
        log.read("brief", 0, 0, end)
    log.publish("brief", producer="a", epoch=1, batches={0: records(2, 4)}, gapless=True)
    assert log.published_to("brief", "a") == {0: 4}


# Transactions


def test_a_transaction_left_open_holds_back_the_end_and_no_mark(log: KafkaLog, place: KafkaPlace):
    """Somebody's open transaction lies before a's records; the mark of a must still come after them."""
    log.register_producer("clicks", "a")
    stranger = raw_producer(place, **{"transactional.id": "stranger", "transaction.timeout.ms": 60_000})
    stranger.init_transactions(10)
    stranger.begin_transaction()
    stranger.produce(place.topic("clicks"), b"\x91\xa1x", partition=0)
    stranger.flush(LIMIT_S)
    publish(log, "a", 1, 3)
    log.report_low("clicks", producer="a", epoch=1, low=50, now_ms=0)
    assert log.end_offsets("clicks")[0] == 0 and stored(log, 1) == [1, 2, 3]
    (mark,) = log.marks("clicks", 0, above=LOW_MIN, up_to=2**40)
    assert mark.end >= 4, "all that was published before lies before the mark"
    assert log.marks("clicks", 0, above=LOW_MIN, up_to=0) == ()
    stranger.abort_transaction(10)
    assert stored(log, 0) == [1, 2, 3]


def test_nobody_reads_past_a_mark_that_is_being_made(place: KafkaPlace, log: KafkaLog):
    """A producer dies between the two halves of a mark; readers stay below it until somebody makes it."""
    log.register_producer("clicks", "a")
    publish(log, "a", 1, 3)

    def die(point: str) -> None:
        if point == "mark:begun":
            raise InterruptedError

    dying = KafkaLog(place, fault=die)
    with pytest.raises(InterruptedError):
        dying.report_low("clicks", producer="a", epoch=1, low=50, now_ms=0)
    dying.close()
    publish(log, "a", 4, 6)
    assert stored(log, 0) == [1, 2, 3] and log.watermark("clicks") == LOW_MIN
    log.register_producer("clicks", "b")
    assert log.producers("clicks") == {"a": 50, "b": 50}
    log.advance("clicks", now_ms=1)
    assert stored(log, 0) == [1, 2, 3, 4, 5, 6] and log.watermark("clicks") == 50
    (mark,) = log.marks("clicks", 0, above=LOW_MIN, up_to=2**40)
    assert mark.end >= 7


def test_nobody_reads_past_the_mark_of_an_idle_partition_that_is_being_made(place: KafkaPlace, log: KafkaLog):
    """A reader dies between the two halves; the partition speaks again, and its records wait for the mark."""
    spec = CategorySpec(
        name="idle", partitions=2, columns=SPEC.columns, watermark="event_time", idle_after_ms=1000
    )
    log.create(spec)

    def send(partition: int, seq: int) -> None:
        log.publish("idle", producer="a", epoch=1, batches={partition: records(seq, seq)}, gapless=False)

    def die(point: str) -> None:
        if point == "mark:begun":
            raise InterruptedError

    send(0, 1)
    log.observe("idle", partition=0, low=100, now_ms=0)
    send(0, 2)
    dying = KafkaLog(place, fault=die)
    with pytest.raises(InterruptedError):
        dying.observe("idle", partition=0, low=200, now_ms=1000)
    dying.close()
    send(1, 1)
    assert log.end_offsets("idle")[1] == 0 and log.watermark("idle") == LOW_MIN
    log.advance("idle", now_ms=1001)
    (mark,) = log.marks("idle", 1, above=LOW_MIN, up_to=2**40)
    assert (mark.low, mark.idle) == (200, True) and log.end_offsets("idle")[1] >= 1


def test_a_writer_that_lost_its_answer_looks_and_repeats_nothing(place: KafkaPlace, log: KafkaLog):
    """The commit went through, its answer did not: the publish is taken up again and finds everything there."""
    lost = []

    def fault(point: str) -> None:
        if point == "transaction:after" and not lost:
            lost.append(point)
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the answer was lost"))

    slow = KafkaLog(place, fault=fault)
    answer = publish(slow, "a", 1, 10)
    assert answer.trimmed == {0: 10, 1: 10} and answer.retried
    assert lost and stored(log, 0) == list(range(1, 11))
    slow.close()


def test_an_old_owner_that_takes_the_id_back_is_refused_and_the_new_one_goes_on(place: KafkaPlace):
    old, new = KafkaLog(place), KafkaLog(place)
    new.create(SPEC)
    publish(old, "a", 1, 3, epoch=1)
    publish(new, "a", 4, 6, epoch=2)
    for _ in range(2):
        with pytest.raises(Fenced):
            publish(old, "a", 4, 9, epoch=1)
        publish(new, "a", 4, 6, epoch=2)
    publish(new, "a", 7, 9, epoch=2)
    assert stored(new, 0) == stored(new, 1) == list(range(1, 10))
    old.close()
    new.close()


def work_on_kafka_until(told: Connection, place: KafkaPlace, exit_at: int) -> None:
    """The process vanishes at the `exit_at`-th point of all effects together."""
    points = count()

    def fault(point: str) -> None:
        if next(points) == exit_at:
            os._exit(9)

    do_work(KafkaLog(place, fault=fault), told.send)
    told.send(-1)


@pytest.mark.timeout(300)
def test_a_process_that_vanishes_at_any_kind_of_point_leaves_old_or_new(kafka: Any):
    """Exit once at every kind of point there is, then do everything again on what is left, as a successor would."""
    passed: list[str] = []
    whole = KafkaLog(parse_place(kafka.new_place()), fault=passed.append)
    do_work(whole, lambda seq: None)
    whole.close()
    kinds = {kind: [n for n, point in enumerate(passed) if point == kind] for kind in dict.fromkeys(passed)}
    assert len(kinds) >= 15 and "transaction:before" in kinds
    for kind, places in kinds.items():
        place = parse_place(kafka.new_place())
        process, told = start(work_on_kafka_until, place, places[len(places) // 2])
        acknowledged = heard(told)
        process.join()
        assert process.exitcode == 9
        log = KafkaLog(place)
        if log.categories():
            assert len(stored(log, 1)) >= max(acknowledged, default=0), kind
            log.fence(
                "clicks", "a", 2
            )  # as every successor does first; it ends what its predecessor left open
        do_work(log, lambda seq: None, epoch=2)
        assert stored(log, 0) == stored(log, 1) == list(range(1, 31)), kind
        assert log.published_to("clicks", "a") == {0: 30, 1: 30} and log.producers("clicks") == {"a": 9}
        assert [m.low for m in log.marks("clicks", 0, above=LOW_MIN, up_to=2**40)] == [5, 9]
        log.close()


# Clients


def test_a_handle_can_be_pickled_and_used_after_close_and_fork(log: KafkaLog):
    publish(log, "a", 1, 10)
    copy = pickle.loads(pickle.dumps(log))
    assert stored(copy, 0) == list(range(1, 11))
    copy.close()
    assert stored(copy, 0) == list(range(1, 11))
    copy.close()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            publish(log, "a", 11, 20)
            assert stored(log, 0) == list(range(1, 21))
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    publish(log, "a", 21, 30)
    assert stored(log, 1) == list(range(1, 31))


def test_more_producers_than_writers_take_turns(log: KafkaLog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kafka_category, "WRITERS_MAX", 2)
    for round_ in range(2):
        for name in "abc":
            publish(log, name, round_ + 1, round_ + 1)
    assert sorted(stored(log, 0)) == [1, 1, 1, 2, 2, 2]


def test_a_broker_that_does_not_answer_is_named(kafka: Any):
    slow = KafkaLog(KafkaPlace("127.0.0.1:9"), answer_s=0.5)
    for call in (lambda: slow.describe("clicks"), lambda: slow.create(SPEC), slow.categories):
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert_three_parts(caught.value)


def test_a_broker_that_stops_answering_loses_and_doubles_nothing(kafka: Any, place: KafkaPlace):
    log = KafkaLog(place, answer_s=1.0)
    log.create(SPEC)
    publish(log, "a", 1, 10)
    kafka.freeze()
    try:
        with pytest.raises(StoreUnavailable):
            publish(log, "a", 11, 20)
    finally:
        kafka.thaw()
    again = KafkaLog(place)
    publish(again, "a", 1, 20)
    assert stored(again, 0) == stored(again, 1) == list(range(1, 21))
    log.close()
    again.close()


# Places


NO_PLACES = (
    "kafka: kafka:// kafka:///x kafka://host/x kafka://h:1/a/b kafka://h:1/ä kafka://u:p@h:1/"
    " kafka://h:1/x?what=1 kafka:h:1/x"
)


@pytest.mark.parametrize("place", NO_PLACES.split())
def test_a_place_that_is_none_is_refused(place: str):
    with pytest.raises(ConfigError) as caught:
        open_log(place)
    assert_three_parts(caught.value)
    assert "p@" not in str(caught.value)


def test_secrets_come_from_the_environment():
    place = parse_place("kafka://h:1,h:2/p-?security.protocol=SASL_SSL&sasl.password=KAFKA_PASSWORD")
    assert place.settings({"KAFKA_PASSWORD": "geheim"})["sasl.password"] == "geheim"
    assert "geheim" not in repr(place) and place.topic("a") == "p-a"
    with pytest.raises(ConfigError) as caught:
        place.settings({})
    assert_three_parts(caught.value)


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    import sys

    for module in [name for name in sys.modules if name.startswith("penstock.streams.bus.kafka.log")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    for module in ("clients", "category", "read"):
        monkeypatch.delitem(sys.modules, f"penstock.streams.bus.kafka.{module}", raising=False)
    with pytest.raises(EnvironmentProblem) as caught:
        open_log("kafka://127.0.0.1:1/never-opened")
    assert_three_parts(caught.value)


@pytest.mark.parametrize("_", range(3))
def test_a_writer_that_is_overtaken_inside_its_transaction_is_lost_in_good_order(
    log: KafkaLog, place: KafkaPlace, _: int
):
    """Not with a SystemError, nor with a crash, which is what a logger called amid the error would make of it."""
    clients = Clients(place.settings())

    def data() -> Iterator[Outgoing]:
        for partition in (0, 1):
            yield Outgoing(partition, None, b"1", b"")
        time.sleep(0.3)  # these are with the broker
        kafka_category.Writer(clients, "w", lambda point: None).start()
        for number in range(
            400
        ):  # several requests fail: the second one is told of amid the first one's error
            yield Outgoing(number % 2, None, b"2" * 20_000, b"")

    old = kafka_category.Writer(clients, "w", lambda point: None)
    old.start()
    with pytest.raises(kafka_category.WriterLost) as caught:
        old.commit(data=data(), topic=place.topic("clicks"), control=place.control("clicks"), updates=())
    assert_three_parts(caught.value)
    assert old.is_new and stored(log, 0) == []  # type: ignore[arg-type]
    clients.close()
