"""What every bus must do, run against each implementation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError, CorruptData, Fenced, NotFound, PenstockError, SequenceGap
from penstock.streams.bus.embedded_log import EmbeddedLog
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, CategorySpec, Log, Mark
from penstock.streams.bus.memory_log import MemoryLog

SPEC = CategorySpec(name="clicks", partitions=2, columns=(("query", "string"), ("n", "bigint")))
NewLog = Callable[[], Log]
EXAMPLES = count()  # numbers the examples that share one bus


@pytest.fixture(params=["memory", "embedded"])
def new_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NewLog]:
    """Makes handles on one and the same bus."""
    if request.param == "memory":
        memory = MemoryLog()
        yield lambda: memory
        return
    handles: list[EmbeddedLog] = []

    def open_handle() -> EmbeddedLog:
        handles.append(EmbeddedLog(tmp_path / "bus"))
        return handles[-1]

    yield open_handle
    for handle in handles:
        handle.close()


@pytest.fixture
def log(new_log: NewLog) -> Log:
    made = new_log()
    made.create(SPEC)
    return made


def records(*seqs: int, ts: int = 1000, note: str = "q") -> pa.RecordBatch:
    """A batch for SPEC; `n` repeats the sequence, so that reads can be compared."""
    return pa.RecordBatch.from_arrays(
        [
            pa.array(seqs, pa.int64()),
            pa.array([ts + seq for seq in seqs], pa.int64()),
            pa.array([f"k{seq}" for seq in seqs], pa.string()),
            pa.array([False] * len(seqs), pa.bool_()),
            pa.array([note] * len(seqs), pa.string()),
            pa.array(seqs, pa.int64()),
        ],
        schema=SPEC.schema(),
    )


def publish(log: Log, partition: int, *seqs: int, producer: str = "a", epoch: int = 1, gapless: bool = False):
    return log.publish(
        "clicks", producer=producer, epoch=epoch, batches={partition: records(*seqs)}, gapless=gapless
    )


def stored(log: Log, partition: int, start: int = 0, end: int | None = None) -> list[int]:
    last = log.end_offsets("clicks")[partition] if end is None else end
    return [n for batch in log.read("clicks", partition, start, last) for n in batch.column("n").to_pylist()]


def report(log: Log, producer: str, low: int, now_ms: int, epoch: int = 1) -> None:
    log.report_low("clicks", producer=producer, epoch=epoch, low=low, now_ms=now_ms)


def all_marks(log: Log, partition: int = 0) -> list[tuple[int, int]]:
    return [(m.low, m.end) for m in log.marks("clicks", partition, above=LOW_MIN, up_to=2**40)]


def assert_three_parts(error: PenstockError) -> None:
    assert error.what and error.why and error.fix


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


def test_a_bus_without_categories_lists_none(new_log: NewLog):
    assert new_log().categories() == ()


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
def test_a_name_that_could_leave_its_folder_is_refused(log: Log, name: str):
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
def test_a_spec_that_cannot_be_stored_is_refused(log: Log, change: dict):
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


def test_a_json_category_keeps_values_and_null_keys(log: Log):
    spec = CategorySpec(name="raw", partitions=1, columns=(("q", "string"),), format="json")
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


def test_offsets_count_without_gaps_in_each_partition(log: Log):
    assert log.end_offsets("clicks") == (0, 0)
    both = {0: records(1, 2), 1: records(1)}
    assert log.publish("clicks", producer="a", epoch=1, batches=both, gapless=True).appended == {0: 2, 1: 1}
    publish(log, 0, 7, 9, producer="b")
    assert log.end_offsets("clicks") == (4, 1)
    assert stored(log, 0) == [1, 2, 7, 9] and stored(log, 1) == [1]


def test_every_range_reads_exactly_its_records(log: Log):
    publish(log, 0, 1, 2, 3)
    publish(log, 0, 4)
    publish(log, 0, 3, 4, 5, 6, 7)
    publish(log, 1, 8)
    for start in range(8):
        for end in range(start, 8):
            assert stored(log, 0, start, end) == list(range(start + 1, end + 1)), (start, end)


def test_an_empty_range_reads_nothing(log: Log):
    assert list(log.read("clicks", 0, 0, 0)) == []
    publish(log, 0, 1, 2)
    assert list(log.read("clicks", 0, 2, 2)) == []
    assert list(log.read("clicks", 0, 2, 1)) == []
    assert list(log.read("clicks", 0, 9, 9)) == []


def test_reading_beyond_the_end_is_an_error_not_a_short_answer(log: Log):
    publish(log, 0, 1, 2)
    with pytest.raises(CorruptData) as caught:
        log.read("clicks", 0, 0, 3)
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
    new_log: NewLog, spans: list[tuple[int, int, int]]
):
    log = new_log()
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


# Lows and marks


def test_a_new_category_has_no_watermark(log: Log):
    assert log.watermark("clicks") == LOW_MIN and all_marks(log) == [] and log.producers("clicks") == {}
    log.register_producer("clicks", "a")
    assert log.producers("clicks") == {"a": LOW_MIN}


def test_w_is_the_minimum_of_the_registered_producers(log: Log):
    log.register_producer("clicks", "a")
    log.register_producer("clicks", "b")
    report(log, "a", 100, now_ms=0)
    assert log.watermark("clicks") == LOW_MIN
    report(log, "b", 50, now_ms=0)
    assert log.watermark("clicks") == 50
    assert log.producers("clicks") == {"a": 100, "b": 50}


def test_a_mark_carries_the_end_offsets_of_its_moment(log: Log):
    log.register_producer("clicks", "a")
    publish(log, 0, 1, 2)
    report(log, "a", 10, now_ms=0)
    publish(log, 0, 3)
    publish(log, 1, 1)
    report(log, "a", 20, now_ms=200)
    assert all_marks(log, 0) == [(10, 2), (20, 3)]
    assert all_marks(log, 1) == [(10, 0), (20, 1)]


def test_marks_are_cut_by_low_and_by_offset(log: Log):
    log.register_producer("clicks", "a")
    for step in range(1, 6):
        publish(log, 0, step)
        report(log, "a", step * 10, now_ms=step * 200)
    assert log.marks("clicks", 0, above=20, up_to=4) == (Mark(low=30, end=3), Mark(low=40, end=4))
    assert log.marks("clicks", 0, above=50, up_to=9) == ()
    assert log.marks("clicks", 0, above=LOW_MIN, up_to=0) == ()


def test_lows_of_zero_and_below_make_marks_too(log: Log):
    log.register_producer("clicks", "a")
    report(log, "a", -5, now_ms=0)
    report(log, "a", 0, now_ms=200)
    assert all_marks(log) == [(-5, 0), (0, 0)]


def test_marks_come_at_most_every_200_ms(log: Log):
    log.register_producer("clicks", "a")
    report(log, "a", 10, now_ms=1000)
    report(log, "a", 20, now_ms=1199)
    assert all_marks(log) == [(10, 0)] and log.producers("clicks") == {"a": 20}
    report(log, "a", 30, now_ms=1200)
    assert all_marks(log) == [(10, 0), (30, 0)]


def test_a_mark_that_was_held_back_comes_with_a_repeated_report(log: Log):
    log.register_producer("clicks", "a")
    report(log, "a", 10, now_ms=1000)
    report(log, "a", 20, now_ms=1100)
    publish(log, 0, 1)
    report(log, "a", 20, now_ms=1200)
    assert all_marks(log) == [(10, 0), (20, 1)]
    report(log, "a", 20, now_ms=5000)
    assert all_marks(log) == [(10, 0), (20, 1)]


def test_the_last_mark_comes_at_once(log: Log):
    log.register_producer("clicks", "a")
    report(log, "a", 10, now_ms=1000)
    report(log, "a", LOW_MAX, now_ms=1001)
    assert all_marks(log) == [(10, 0), (LOW_MAX, 0)]


def test_marks_go_on_after_the_clock_was_set_back(log: Log):
    log.register_producer("clicks", "a")
    report(log, "a", 10, now_ms=1_000_000)
    report(log, "a", 20, now_ms=5)
    assert all_marks(log) == [(10, 0), (20, 0)]


def test_a_low_never_goes_back(log: Log):
    log.register_producer("clicks", "a")
    report(log, "a", 10, now_ms=0)
    report(log, "a", 5, now_ms=1000)
    assert log.producers("clicks") == {"a": 10} and all_marks(log) == [(10, 0)]


def test_a_late_producer_starts_at_w_and_holds_it(log: Log):
    log.register_producer("clicks", "a")
    report(log, "a", 10, now_ms=0)
    report(log, "a", 20, now_ms=100)  # held back: W is still 10
    log.register_producer("clicks", "b")
    assert log.producers("clicks") == {"a": 20, "b": 10}
    report(log, "a", 30, now_ms=1000)
    assert log.watermark("clicks") == 10
    report(log, "b", 25, now_ms=2000)
    assert all_marks(log) == [(10, 0), (25, 0)]


def test_registering_again_keeps_the_low(log: Log):
    log.register_producer("clicks", "a")
    report(log, "a", 10, now_ms=0)
    report(log, "a", 20, now_ms=1)
    log.register_producer("clicks", "a")
    assert log.producers("clicks") == {"a": 20}


def test_unregistering_lets_the_next_report_raise_w(log: Log):
    for producer in ("a", "b"):
        log.register_producer("clicks", producer)
        report(log, producer, 10, now_ms=0)
    report(log, "a", 50, now_ms=1000)
    log.unregister_producer("clicks", "b")
    assert log.watermark("clicks") == 10 and log.producers("clicks") == {"a": 50}
    report(log, "a", 50, now_ms=1000)
    assert log.watermark("clicks") == 50


def test_w_stays_when_the_last_producer_goes(log: Log):
    log.register_producer("clicks", "a")
    report(log, "a", 10, now_ms=0)
    log.unregister_producer("clicks", "a")
    log.unregister_producer("clicks", "a")
    assert log.watermark("clicks") == 10 and log.producers("clicks") == {}
    log.register_producer("clicks", "b")
    report(log, "b", 5, now_ms=1000)
    assert log.producers("clicks") == {"b": 10} and all_marks(log) == [(10, 0)]


def test_only_registered_producers_report(log: Log):
    with pytest.raises(NotFound) as caught:
        report(log, "a", 10, now_ms=0)
    assert_three_parts(caught.value)
    publish(log, 0, 1)  # publishing does not register
    with pytest.raises(NotFound):
        report(log, "a", 10, now_ms=0)
    log.register_producer("clicks", "a")
    log.unregister_producer("clicks", "a")
    with pytest.raises(NotFound):
        report(log, "a", 10, now_ms=0)


def test_a_fenced_report_changes_nothing(log: Log):
    log.register_producer("clicks", "a")
    log.fence("clicks", "a", 2)
    with pytest.raises(Fenced):
        report(log, "a", 10, now_ms=0, epoch=1)
    assert log.watermark("clicks") == LOW_MIN and log.producers("clicks") == {"a": LOW_MIN}


def test_a_report_of_a_new_epoch_fences_the_old_publisher(log: Log):
    log.register_producer("clicks", "a")
    publish(log, 0, 1, epoch=1)
    report(log, "a", 10, now_ms=0, epoch=2)
    report(log, "a", 10, now_ms=0, epoch=3)  # changes nothing but the epoch
    with pytest.raises(Fenced):
        publish(log, 0, 2, epoch=2)


def test_unregistering_keeps_epoch_and_sequences(log: Log):
    log.register_producer("clicks", "a")
    publish(log, 0, 1, 2, epoch=2)
    log.unregister_producer("clicks", "a")
    with pytest.raises(Fenced):
        publish(log, 0, 3, epoch=1)
    assert publish(log, 0, 2, 3, epoch=2).trimmed == {0: 1}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("low"), st.sampled_from("abc"), st.integers(0, 400)),
            st.tuples(st.just("publish"), st.sampled_from("abc"), st.integers(0, 1)),
            st.tuples(st.just("join"), st.sampled_from("abc"), st.just(0)),
            st.tuples(st.just("leave"), st.sampled_from("abc"), st.just(0)),
        ),
        max_size=30,
    ),
)
def test_marks_only_rise_and_never_pass_a_low(new_log: NewLog, steps: list[tuple[str, str, int]]):
    """Whatever happens, marks ascend in low and end, W is the last of them, and no registered low is below it."""
    log, name, now_ms, seq = new_log(), f"c{next(EXAMPLES)}", 0, 0
    log.create(CategorySpec(name=name, partitions=2, columns=SPEC.columns))
    for kind, producer, number in steps:
        now_ms, seq = now_ms + 90, seq + 1
        match kind:
            case "low" if producer in log.producers(name):
                log.report_low(name, producer=producer, epoch=1, low=number, now_ms=now_ms)
            case "publish":
                log.publish(name, producer=producer, epoch=1, batches={number: records(seq)}, gapless=False)
            case "join":
                log.register_producer(name, producer)
            case "leave":
                log.unregister_producer(name, producer)
        for partition in (0, 1):
            marks = log.marks(name, partition, above=LOW_MIN, up_to=2**40)
            assert all(a.low < b.low and a.end <= b.end for a, b in pairwise(marks))
            assert (marks[-1].low if marks else LOW_MIN) == log.watermark(name)
        assert all(low >= log.watermark(name) for low in log.producers(name).values())


# Several at once


def test_two_handles_see_and_fence_each_other(new_log: NewLog):
    one, two = new_log(), new_log()
    one.create(SPEC)
    publish(one, 0, 1, 2, epoch=1)
    assert stored(two, 0) == [1, 2] and two.published_to("clicks", "a") == {0: 2}
    publish(two, 0, 2, 3, epoch=2)
    with pytest.raises(Fenced):
        publish(one, 0, 4, epoch=1)
    assert stored(one, 0) == [1, 2, 3] and one.end_offsets("clicks") == (3, 0)
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
    assert log.end_offsets("clicks") == (40, 40)
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
