"""What every bus must do, run against each implementation; lows and marks have a file of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError, CorruptData, EpochUsed, Fenced, NotFound, SequenceGap
from penstock.streams.bus.kafka.log import KafkaLog
from penstock.streams.bus.log import ARROW_TYPES, CategorySpec, Log
from tests.contracts.buses import (
    EXAMPLES,
    SPEC,
    NewLog,
    assert_three_parts,
    offsets,
    publish,
    records,
    stored,
)

# Categories


def test_creating_again_returns_the_same_birth(new_log: NewLog):
    first = new_log().create(SPEC)
    assert first.spec == SPEC and first.birth
    assert new_log().create(SPEC) == first
    assert new_log().describe("clicks") == first


def test_two_categories_have_different_births(log: Log):
    other = log.create(CategorySpec(name="other", partitions=1, columns=()))
    assert other.birth != log.describe("clicks").birth
    assert [category.spec.name for category in log.categories()] == ["clicks", "other"]
    assert log.names() == ("clicks", "other")


def test_a_bus_without_categories_lists_none(new_log: NewLog):
    assert new_log().categories() == new_log().names() == ()


def test_another_spec_under_the_same_name_is_refused(log: Log):
    with pytest.raises(ConfigError) as caught:
        log.create(CategorySpec(name="clicks", partitions=3, columns=SPEC.columns))
    assert_three_parts(caught.value)
    assert log.describe("clicks").spec == SPEC


def test_every_field_of_a_spec_comes_back(log: Log):
    spec = CategorySpec(
        name="raw.v1_x-y",
        partitions=3,
        columns=(("at", "bigint"), ("ok", "boolean")),
        format="json",
        watermark="event_time",
        lateness_ms=500,
        ts_column="at",
    )
    log.create(spec)
    assert log.describe("raw.v1_x-y").spec == spec


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", ".hidden", "-a", "a b", "a\n", "ä", "a" * 129, "a\0b"]
)
def test_a_name_that_could_leave_its_folder_is_refused(new_log: NewLog, name: str):
    log = new_log()
    with pytest.raises(ConfigError) as caught:
        log.create(CategorySpec(name=name, partitions=1, columns=()))
    assert_three_parts(caught.value)
    with pytest.raises(ConfigError):
        log.describe(name)


@pytest.mark.parametrize(
    "change",
    [
        {"partitions": 0},
        {"columns": (("a", "varchar"),)},
        {"columns": (("a", "int"), ("a", "int"))},
        {"columns": (("_seq", "bigint"),)},
        {"format": "xml"},
        {"watermark": "moon"},
        {"lateness_ms": -1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_spec_that_cannot_be_stored_is_refused(new_log: NewLog, change: dict):
    log = new_log()
    with pytest.raises(ConfigError) as caught:
        log.create(CategorySpec(**{"name": "bad", "partitions": 1, "columns": (), **change}))
    assert_three_parts(caught.value)
    with pytest.raises(NotFound):
        log.describe("bad")


def test_every_method_names_a_missing_category(log: Log):
    calls: Sequence[Callable[[], object]] = (
        lambda: log.describe("gone"),
        lambda: log.publish("gone", producer="a", epoch=1, batches={0: records(1)}, gapless=False),
        lambda: log.end_offsets("gone"),
        lambda: log.read("gone", 0, 0, 1),
        lambda: log.published_to("gone", "a"),
        lambda: log.fence("gone", "a", 1),
        lambda: log.register_producer("gone", "a"),
        lambda: log.unregister_producer("gone", "a"),
        lambda: log.producers("gone"),
        lambda: log.report_low("gone", producer="a", epoch=1, low=1, now_ms=0),
        lambda: log.marks("gone", 0, above=0, up_to=0),
        lambda: log.watermark("gone"),
    )
    for call in calls:
        with pytest.raises(NotFound) as caught:
            call()
        assert_three_parts(caught.value)


# Publishing and reading


def test_records_come_back_as_they_were_published(log: Log):
    sent = records(1, 2, 3)
    log.publish("clicks", producer="a", epoch=1, batches={0: sent}, gapless=True)
    (read,) = log.read("clicks", 0, 0, 3)
    assert read.schema.equals(SPEC.schema()) and read.equals(sent)


VALUES: dict[str, list[object]] = {
    "string": ["", "ä\n\0", "[null]"],
    "bigint": [0, 2**63 - 1, -(2**63)],
    "int": [0, 2**31 - 1, -(2**31)],
    "double": [-0.0, 5e-324, float("inf")],
    "float": [1.5, -(2.0**100), float("-inf")],
    "boolean": [True, False, True],
    "binary": [b"", b"\xff\0", b"ab"],
}


def test_values_of_every_type_of_column_come_back(log: Log):
    """Each type and an array of it: values, no value, an array with one in it, an empty one, and no array."""
    assert set(ARROW_TYPES) == {*VALUES, *(f"array<{kind}>" for kind in VALUES)}
    columns = tuple((kind.translate({60: "_", 62: None}), kind) for kind in ARROW_TYPES)
    spec = CategorySpec(name="typed", partitions=1, columns=columns)
    log.create(spec)
    own = [
        [[*VALUES[kind[6:-1]], None], [], [None], None]
        if kind.startswith("array<")
        else [*VALUES[kind], None]
        for _, kind in columns
    ]
    system = [[1, 2, 3, 4], [7] * 4, [None, "", "[null]", "k"], [False] * 4]
    sent = pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip([*system, *own], spec.schema(), strict=True)],
        schema=spec.schema(),
    )
    log.publish("typed", producer="a", epoch=1, batches={0: sent}, gapless=True)
    read = pa.Table.from_batches(log.read("typed", 0, 0, log.end_offsets("typed")[0]))
    assert read.equals(pa.Table.from_batches([sent]))


@pytest.mark.parametrize("format_", ["json", "avro", "bytes"])
def test_a_category_of_an_edge_keeps_values_and_null_keys(log: Log, format_: str):
    spec = CategorySpec(name="raw", partitions=1, columns=(("q", "binary"),), format=format_)
    log.create(spec)
    arrays = [
        pa.array([5]),
        pa.array([7]),
        pa.array([None], pa.string()),
        pa.array([True]),
        pa.array([b'{"q":1}']),
    ]
    sent = pa.RecordBatch.from_arrays(arrays, schema=spec.schema())
    log.publish("raw", producer="a", epoch=1, batches={0: sent}, gapless=False)
    assert next(log.read("raw", 0, 0, 1)).to_pylist() == sent.to_pylist()


def test_offsets_ascend_in_each_partition(log: Log):
    assert log.end_offsets("clicks") == (0, 0)
    both = {0: records(1, 2), 1: records(1)}
    assert log.publish("clicks", producer="a", epoch=1, batches=both, gapless=True).appended == {0: 2, 1: 1}
    publish(log, 0, 7, 9, producer="b")
    assert stored(log, 0) == [1, 2, 7, 9] and stored(log, 1) == [1]
    for partition, end in enumerate(log.end_offsets("clicks")):
        places = offsets(log, partition)
        assert places[0] == 0 and places == sorted(set(places)) and places[-1] < end
    assert isinstance(log, KafkaLog) or log.end_offsets("clicks") == (4, 1)  # there without gaps


def test_every_range_reads_exactly_its_records(log: Log):
    publish(log, 0, 1, 2, 3)
    publish(log, 0, 4)
    publish(log, 0, 3, 4, 5, 6, 7)
    publish(log, 1, 8)
    places, last = offsets(log, 0), log.end_offsets("clicks")[0]
    assert len(places) == 7
    for start in range(last + 1):
        for end in range(start, last + 1, 1 if start % 3 == 0 else 4):
            expected = [seq for seq, place in enumerate(places, start=1) if start <= place < end]
            assert stored(log, 0, start, end) == expected, (start, end)


def test_an_empty_range_reads_nothing(log: Log):
    assert list(log.read("clicks", 0, 0, 0)) == []
    publish(log, 0, 1, 2)
    assert list(log.read("clicks", 0, 2, 2)) == []
    assert list(log.read("clicks", 0, 2, 1)) == []
    assert list(log.read("clicks", 0, 9, 9)) == []


def test_reading_beyond_the_end_is_an_error_not_a_short_answer(log: Log):
    publish(log, 0, 1, 2)
    with pytest.raises(CorruptData) as caught:
        log.read("clicks", 0, 0, log.end_offsets("clicks")[0] + 1)
    assert_three_parts(caught.value)


def test_a_read_shows_what_there_was_when_it_began(log: Log):
    publish(log, 0, 1, 2)
    reading = log.read("clicks", 0, 0, 2)
    publish(log, 0, 3)
    assert [n for batch in reading for n in batch.column("n").to_pylist()] == [1, 2]


@pytest.mark.parametrize("partition", [-1, 2])
def test_a_partition_that_is_not_there_is_refused(log: Log, partition: int):
    for call in (
        lambda: publish(log, partition, 1),
        lambda: log.read("clicks", partition, 0, 0),
        lambda: log.marks("clicks", partition, above=0, up_to=0),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert_three_parts(caught.value)


def test_a_large_batch_comes_back_whole(log: Log):
    seqs = range(1, 20_001)
    log.publish("clicks", producer="a", epoch=1, batches={0: records(*seqs), 1: records(*seqs)}, gapless=True)
    assert stored(log, 0) == list(seqs)
    assert stored(log, 1, 19_990) == list(range(19_991, 20_001))


def test_a_slice_of_a_larger_batch_can_be_published(log: Log):
    log.publish("clicks", producer="a", epoch=1, batches={0: records(1, 2, 3, 4).slice(2, 1)}, gapless=False)
    assert stored(log, 0) == [3]


def test_publishing_nothing_changes_nothing(log: Log):
    assert log.publish("clicks", producer="a", epoch=1, batches={}, gapless=True).appended == {}
    done = publish(log, 0)
    assert (done.appended, done.trimmed) == ({0: 0}, {0: 0})
    assert log.end_offsets("clicks") == (0, 0) and log.published_to("clicks", "a") == {}


# Schemas


def test_a_batch_of_another_schema_is_refused_by_name(log: Log):
    renamed = records(1).rename_columns(["_seq", "_ts", "_key", "_late", "query", "m"])
    fewer = records(1).select(["_seq", "_ts", "_key", "_late", "query"])
    retyped = records(1).set_column(5, "n", pa.array([1], pa.int32()))
    reordered = records(1).select(["_ts", "_seq", "_key", "_late", "query", "n"])
    nulls = pa.RecordBatch.from_arrays(
        [pa.array([None], pa.int64()), *records(1).columns[1:]], names=SPEC.schema().names
    )
    for batch in (renamed, fewer, retyped, reordered, nulls):
        with pytest.raises(ConfigError) as caught:
            log.publish("clicks", producer="a", epoch=1, batches={0: records(1), 1: batch}, gapless=False)
        assert_three_parts(caught.value)
    assert log.end_offsets("clicks") == (0, 0)


def test_nullable_flags_of_a_batch_do_not_matter(log: Log):
    loose = pa.RecordBatch.from_arrays(records(1).columns, names=SPEC.schema().names)
    log.publish("clicks", producer="a", epoch=1, batches={0: loose}, gapless=False)
    assert next(log.read("clicks", 0, 0, 1)).schema.equals(SPEC.schema())


# Trimming


def test_a_repeated_publish_appends_nothing(log: Log):
    publish(log, 0, 1, 2, gapless=True)
    again = publish(log, 0, 1, 2, gapless=True)
    assert (again.appended, again.trimmed) == ({0: 0}, {0: 2})
    assert stored(log, 0) == [1, 2]


def test_the_new_tail_of_an_overlapping_batch_is_kept(log: Log):
    publish(log, 0, 1, 2, 3, gapless=True)
    done = publish(log, 0, 2, 3, 4, 5, gapless=True)
    assert (done.appended, done.trimmed) == ({0: 2}, {0: 2})
    assert stored(log, 0) == [1, 2, 3, 4, 5]


def test_partitions_are_trimmed_each_by_its_own_mark(log: Log):
    publish(log, 0, 1, 2, 3)
    publish(log, 1, 1)
    both = {0: records(1, 2, 3), 1: records(1, 2, 3)}
    done = log.publish("clicks", producer="a", epoch=1, batches=both, gapless=False)
    assert (done.appended, done.trimmed) == ({0: 0, 1: 2}, {0: 3, 1: 1})
    assert stored(log, 0) == [1, 2, 3] and stored(log, 1) == [1, 2, 3]


def test_sequences_of_one_producer_do_not_trim_another(log: Log):
    publish(log, 0, 1, 2, producer="a")
    publish(log, 0, 1, 2, producer="b")
    assert stored(log, 0) == [1, 2, 1, 2]


def test_a_producer_without_a_mark_is_not_trimmed(log: Log):
    """Stateless sequences begin with the input's first offset, which is 0."""
    publish(log, 0, 0, 5)
    assert stored(log, 0) == [0, 5]


def test_published_to_tells_the_highest_sequence_per_partition(log: Log):
    assert log.published_to("clicks", "a") == {}
    publish(log, 0, 1, 2)
    publish(log, 1, 40)
    publish(log, 0, 1)
    assert log.published_to("clicks", "a") == {0: 2, 1: 40}
    assert log.published_to("clicks", "b") == {}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 1)), max_size=12))
def test_however_batches_overlap_each_sequence_appears_once(
    quick_log: NewLog, spans: list[tuple[int, int, int]]
):
    log = quick_log()
    log.create(SPEC)
    # Examples share the bus, so each has a producer and a starting point of its own.
    before, producer = log.end_offsets("clicks"), f"p{next(EXAMPLES)}"
    marks = {0: 0, 1: 0}
    expected: dict[int, list[int]] = {0: [], 1: []}
    for first, length, partition in spans:
        seqs = range(first, first + length)
        publish(log, partition, *seqs, producer=producer)
        expected[partition] += [seq for seq in seqs if seq > marks[partition]]
        marks[partition] = max(marks[partition], seqs[-1])
    for partition in (0, 1):
        assert stored(log, partition, before[partition]) == expected[partition]


# Gaps


def test_a_gap_before_the_first_new_record_is_refused(log: Log):
    with pytest.raises(SequenceGap) as caught:
        publish(log, 0, 2, gapless=True)
    assert_three_parts(caught.value)
    publish(log, 0, 1, 2, gapless=True)
    with pytest.raises(SequenceGap):
        publish(log, 0, 4, gapless=True)
    assert stored(log, 0) == [1, 2]


def test_a_gap_inside_a_batch_is_refused(log: Log):
    with pytest.raises(SequenceGap):
        publish(log, 0, 1, 3, gapless=True)
    assert stored(log, 0) == []


def test_a_gap_in_one_partition_writes_to_none(log: Log):
    with pytest.raises(SequenceGap):
        log.publish("clicks", producer="a", epoch=5, batches={0: records(1), 1: records(2)}, gapless=True)
    assert log.end_offsets("clicks") == (0, 0) and log.published_to("clicks", "a") == {}
    publish(log, 0, 1, epoch=1)  # the refused epoch did not count either


def test_gaps_are_allowed_where_nobody_asked_for_gapless(log: Log):
    publish(log, 0, 10, 20)
    publish(log, 0, 500)
    assert stored(log, 0) == [10, 20, 500]


@pytest.mark.parametrize("seqs", [(2, 1), (1, 1)])
def test_sequences_that_do_not_ascend_are_a_bug(log: Log, seqs: tuple[int, ...]):
    with pytest.raises(AssertionError):
        publish(log, 0, *seqs)
    assert log.end_offsets("clicks") == (0, 0)


# Fencing


def test_a_smaller_epoch_is_fenced_and_writes_nothing(log: Log):
    publish(log, 0, 1, epoch=2)
    with pytest.raises(Fenced) as caught:
        publish(log, 0, 2, epoch=1)
    assert_three_parts(caught.value)
    assert stored(log, 0) == [1]
    publish(log, 0, 2, epoch=2)
    assert stored(log, 0) == [1, 2]


def test_a_fully_trimmed_publish_still_raises_the_epoch(log: Log):
    publish(log, 0, 1, epoch=1)
    publish(log, 0, 1, epoch=2)
    with pytest.raises(Fenced):
        publish(log, 0, 2, epoch=1)


def test_a_fenced_publish_raises_even_if_all_of_it_is_there(log: Log):
    publish(log, 0, 1, epoch=2)
    with pytest.raises(Fenced):
        publish(log, 0, 1, epoch=1)


def test_fence_refuses_smaller_epochs_before_the_successor_publishes(log: Log):
    log.fence("clicks", "a", 3)
    with pytest.raises(Fenced):
        publish(log, 0, 1, epoch=2)
    publish(log, 0, 1, epoch=3)
    log.fence("clicks", "a", 1)  # never goes back
    with pytest.raises(Fenced):
        publish(log, 0, 2, epoch=2)


def test_fencing_one_producer_leaves_the_others(log: Log):
    log.fence("clicks", "a", 3)
    publish(log, 0, 1, producer="b", epoch=1)
    assert stored(log, 0) == [1]


@pytest.mark.parametrize("used", [3, 4])
def test_a_new_life_with_an_epoch_that_was_used_is_refused_and_changes_nothing(log: Log, used: int):
    log.fence("clicks", "a", 3, is_new_life=True)
    publish(log, 0, 1, epoch=used)
    with pytest.raises(EpochUsed, match="epoch 3") as caught:
        log.fence("clicks", "a", 3, is_new_life=True)
    assert_three_parts(caught.value)
    assert f"at least {used + 1}" in caught.value.fix
    publish(log, 0, 2, epoch=used)  # the life that is there goes on
    log.fence("clicks", "a", used + 1, is_new_life=True)
    with pytest.raises(Fenced):
        publish(log, 0, 3, epoch=used)
    assert stored(log, 0) == [1, 2]


def test_of_several_new_lives_with_one_epoch_one_begins(new_log: NewLog):
    new_log().create(SPEC)
    handles, begin, outcomes = [new_log() for _ in range(4)], threading.Barrier(4), []

    def start(log: Log) -> None:
        begin.wait()
        try:
            log.fence("clicks", "a", 7, is_new_life=True)
        except EpochUsed as error:
            outcomes.append(error)
        else:
            outcomes.append(None)

    threads = [threading.Thread(target=start, args=(log,)) for log in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4 and outcomes.count(None) == 1


# Several at once


def test_two_handles_see_and_fence_each_other(new_log: NewLog):
    one, two = new_log(), new_log()
    one.create(SPEC)
    publish(one, 0, 1, 2, epoch=1)
    assert stored(two, 0) == [1, 2] and two.published_to("clicks", "a") == {0: 2}
    publish(two, 0, 2, 3, epoch=2)
    with pytest.raises(Fenced):
        publish(one, 0, 4, epoch=1)
    assert stored(one, 0) == [1, 2, 3] and one.end_offsets("clicks")[1] == 0
    two.register_producer("clicks", "a")
    one.report_low("clicks", producer="a", epoch=2, low=7, now_ms=0)
    assert two.watermark("clicks") == 7


def test_threads_of_one_handle_publish_side_by_side(log: Log):
    def work(name: str) -> None:
        for seq in range(1, 21):
            publish(log, seq % 2, seq, producer=name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stored(log, 0)) == len(stored(log, 1)) == 40
    assert sorted(stored(log, 0)) == sorted([*range(2, 21, 2)] * 4)


def test_threads_that_create_the_same_category_get_one_birth(new_log: NewLog):
    births: list[str] = []
    start = threading.Barrier(8)

    def work() -> None:
        log = new_log()
        start.wait()
        births.append(log.create(SPEC).birth)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(births) == 8 and len(set(births)) == 1
