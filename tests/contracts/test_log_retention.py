"""What every bus must do with records that go, and what it tells of ranges and of readers that lag behind."""

from __future__ import annotations

import pytest

from penstock.core.errors import ConfigError, CorruptData, RecordsExpired
from penstock.core.system_clock import SystemClock
from penstock.streams.bus.log import LOW_MIN, CategorySpec, Log
from tests.contracts.buses import (
    SPEC,
    NewLog,
    assert_three_parts,
    offsets,
    publish,
    records,
    report,
    stored,
)

HOUR_MS = 3_600_000


def now_ms() -> int:
    return SystemClock().now_ms()


# Truncation


def test_truncated_records_are_gone_and_the_others_stay(log: Log):
    assert log.start_offsets("clicks") == (0, 0)
    publish(log, 0, 1, 2, 3)
    publish(log, 0, 4, 5)
    publish(log, 1, 6)
    places, ends = offsets(log, 0), log.end_offsets("clicks")
    log.truncate("clicks", {0: places[1]})
    assert log.start_offsets("clicks") == (places[1], 0)
    assert stored(log, 0, places[1]) == [2, 3, 4, 5] and stored(log, 1) == [6]
    log.truncate("clicks", {0: places[4]})
    assert stored(log, 0, places[4]) == [5] and log.end_offsets("clicks") == ends
    log.truncate("clicks", {0: ends[0]})
    assert log.start_offsets("clicks") == (ends[0], 0) and stored(log, 0, ends[0]) == []


def test_truncation_never_goes_back(log: Log):
    publish(log, 0, 1, 2, 3)
    log.truncate("clicks", {0: 2})
    log.truncate("clicks", {0: 1})
    log.truncate("clicks", {})
    assert log.start_offsets("clicks") == (2, 0)


def test_a_reader_that_retention_passed_is_told(log: Log):
    """Whatever is left, a reader whose records went gets an error, not the rest."""
    publish(log, 0, 1, 2, 3)
    log.truncate("clicks", {0: 2})
    for start in (0, 1):
        with pytest.raises(RecordsExpired) as caught:
            log.read("clicks", 0, start, 3)
        assert_three_parts(caught.value)
    with pytest.raises(RecordsExpired):
        log.times("clicks", 0, 0, 3)
    assert stored(log, 0, 2) == [3]


def test_records_that_go_while_they_are_read_are_missed_by_name(log: Log):
    """Either the reader has them in hand already, or it hears that they went; it never gets a shorter answer."""
    for seq in range(1, 6):
        large = records(seq, note="x" * 40_000)
        log.publish("clicks", producer="a", epoch=1, batches={0: large}, gapless=True)
    end = log.end_offsets("clicks")[0]
    reading = log.read("clicks", 0, 0, end)
    log.truncate("clicks", {0: end})
    try:
        assert [n for batch in reading for n in batch.column("n").to_pylist()] == [1, 2, 3, 4, 5]
    except RecordsExpired as error:
        assert_three_parts(error)


def test_what_does_not_exist_cannot_be_truncated(log: Log):
    publish(log, 0, 1)
    with pytest.raises(CorruptData) as caught:
        log.truncate("clicks", {0: log.end_offsets("clicks")[0] + 1})
    assert_three_parts(caught.value)
    with pytest.raises(ConfigError):
        log.truncate("clicks", {2: 0})
    assert log.start_offsets("clicks") == (0, 0)


def test_after_a_truncation_repeats_are_trimmed_and_new_records_follow(log: Log):
    publish(log, 0, 1, 2, gapless=True)
    end = log.end_offsets("clicks")[0]
    log.truncate("clicks", {0: end})
    assert publish(log, 0, 1, 2, gapless=True).trimmed == {0: 2}
    publish(log, 0, 3, gapless=True)
    assert stored(log, 0, end) == [3]


def test_the_watermark_outlives_the_records_below_it(log: Log):
    log.register_producer("clicks", "a")
    for step in (1, 2, 3):
        publish(log, 0, step)
        publish(log, 1, step)
        report(log, "a", step * 10, now_ms=step * 1000)
    two = log.marks("clicks", 0, above=10, up_to=2**40)[0]
    log.truncate("clicks", {p: log.marks("clicks", p, above=10, up_to=2**40)[0].end for p in (0, 1)})
    assert log.watermark("clicks") == 30
    left = log.marks("clicks", 0, above=LOW_MIN, up_to=2**40)
    assert [mark.low for mark in left] == [20, 30] and left[0] == two
    log.truncate("clicks", dict(enumerate(log.end_offsets("clicks"))))
    assert log.watermark("clicks") == 30 and log.producers("clicks") == {"a": 30}
    report(log, "a", 40, now_ms=9000)
    assert log.watermark("clicks") == 40


# Retention


def test_records_past_their_retention_go(quick_log: NewLog):
    """On Kafka the broker does this; see `test_kafka_log.py`."""
    log = quick_log()
    log.create(CategorySpec(name="brief", partitions=2, columns=SPEC.columns, retention_ms=HOUR_MS))
    assert log.describe("brief").spec.retention_ms == HOUR_MS
    for partition in (0, 1):
        log.publish("brief", producer="a", epoch=1, batches={partition: records(1, 2)}, gapless=True)
    log.clean(now_ms=now_ms(), older_than_ms=HOUR_MS)
    assert log.start_offsets("brief") == (0, 0)
    assert log.clean(now_ms=now_ms() + 2 * HOUR_MS, older_than_ms=HOUR_MS) > 0
    assert log.start_offsets("brief") == log.end_offsets("brief") == (2, 2)
    with pytest.raises(RecordsExpired):
        log.read("brief", 0, 0, 2)
    assert log.clean(now_ms=now_ms() + 2 * HOUR_MS, older_than_ms=HOUR_MS) == 0
    log.publish("brief", producer="a", epoch=1, batches={0: records(3)}, gapless=True)
    assert log.end_offsets("brief") == (3, 2)


def test_without_a_retention_everything_stays(log: Log):
    publish(log, 0, 1, 2)
    assert log.clean(now_ms=now_ms() + 1000 * HOUR_MS, older_than_ms=HOUR_MS) == 0
    assert stored(log, 0) == [1, 2]


# Times and lags


def test_the_times_of_a_range_are_those_of_its_records(log: Log):
    """`records` stamps sequence n with 1000 + n."""
    publish(log, 0, 5, 6, 7)
    publish(log, 0, 8, 9)
    places, end = offsets(log, 0), log.end_offsets("clicks")[0]
    assert log.times("clicks", 0, 0, end) == (1005, 1009)
    for low in range(5):
        for high in range(low, 5):
            found = log.times("clicks", 0, places[low], places[high] + 1)
            assert found == (1005 + low, 1005 + high), (low, high)
    assert log.times("clicks", 0, 1, 1) is None and log.times("clicks", 1, 0, 0) is None
    with pytest.raises(CorruptData):
        log.times("clicks", 0, 0, end + 1)


def test_times_before_1970_and_of_2100_are_kept(log: Log):
    for batch in (records(1, 2, ts=-5000), records(3, ts=4_102_444_800_000)):
        log.publish("clicks", producer="a", epoch=1, batches={0: batch}, gapless=True)
    assert log.times("clicks", 0, 0, log.end_offsets("clicks")[0]) == (-4999, 4_102_444_800_003)
    assert next(log.read("clicks", 0, 0, 2)).column("_ts").to_pylist() == [-4999, -4998]


def test_a_reader_at_the_end_has_no_lag(log: Log):
    publish(log, 0, 1, 2)
    lag = log.lag("clicks", dict(enumerate(log.end_offsets("clicks"))), now_ms=now_ms())
    assert (lag.records, lag.bytes, lag.ms) == (0, 0, 0)


def test_a_lag_counts_records_bytes_and_time(log: Log):
    for seq in range(1, 5):
        publish(log, 0, seq)
    publish(log, 1, 1)
    ends = log.end_offsets("clicks")
    behind = log.lag("clicks", {0: 0, 1: 0}, now_ms=now_ms() + 60_000)
    # On Kafka the ends of transactions are counted too.
    assert 5 <= behind.records <= sum(ends) and behind.bytes > 5 * 20
    assert 60_000 <= behind.ms < 180_000
    near = log.lag("clicks", {0: offsets(log, 0)[3], 1: ends[1]}, now_ms=now_ms())
    assert 1 <= near.records <= 2 and 0 < near.bytes < behind.bytes
    assert log.lag("clicks", {}, now_ms=0).records == 0
    with pytest.raises(ConfigError):
        log.lag("clicks", {7: 0}, now_ms=0)


def test_a_lag_counts_only_what_is_still_there(log: Log):
    publish(log, 0, 1, 2, 3, 4)
    log.truncate("clicks", {0: 3})
    assert 1 <= log.lag("clicks", {0: 0}, now_ms=now_ms()).records <= 2


# How much a reader takes at once


def test_a_range_is_cut_by_its_bytes_but_not_below_one_record(log: Log):
    publish(log, 0, *range(1, 101))
    publish(log, 0, *range(101, 201))
    end = log.end_offsets("clicks")[0]
    whole = log.lag("clicks", {0: 0}, now_ms=now_ms()).bytes
    assert log.within("clicks", 0, 0, end, 10 * whole) == end
    assert log.within("clicks", 0, 0, end, 1) == 1 and log.within("clicks", 0, 7, end, 1) == 8
    half = log.within("clicks", 0, 0, end, whole // 2)
    assert 80 <= half <= 120
    at, cuts = 0, 0
    while at < end:
        to = log.within("clicks", 0, at, end, whole // 10)
        assert at < to <= end
        at, cuts = to, cuts + 1
    assert 9 <= cuts <= 13
    assert log.within("clicks", 0, end, end, 1) == end and log.within("clicks", 1, 0, 0, 1) == 0
    with pytest.raises(ConfigError):
        log.within("clicks", 7, 0, 1, 1)


def test_large_records_make_a_range_short(log: Log):
    """One record of 2 MB behind many small ones, in a publish of its own."""
    publish(log, 0, *range(1, 51))
    log.publish(
        "clicks", producer="a", epoch=1, batches={0: records(51, note="x" * 2_000_000)}, gapless=False
    )
    end = log.end_offsets("clicks")[0]
    assert log.within("clicks", 0, 0, end, 100_000) < end
