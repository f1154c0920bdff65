"""Injectors of several processes, and injectors that wait for their consumers."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import ConfigError, NotFound
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, CategorySpec, partition_of
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.dsl.injector import (
    Injector,
    SkewLimit,
    dismiss_injector,
    expect_injectors,
    measure_skew,
)


def a_log(watermark: str = "injector") -> MemoryLog:
    log = MemoryLog()
    log.create(
        CategorySpec(name="in", partitions=2, columns=(("q", "string"),), format="json", watermark=watermark)
    )
    log.create(CategorySpec(name="out", partitions=1, columns=(("q", "string"),)))
    return log


def test_a_process_that_is_expected_and_has_not_come_holds_the_watermark():
    log = a_log()
    expect_injectors(log, "in", ["a", "b"])
    Injector(log, "in", "a", epoch=1).report_low(100, now_ms=0)
    assert log.watermark("in") == LOW_MIN
    Injector(log, "in", "b", epoch=1).report_low(70, now_ms=300)
    assert log.watermark("in") == 70


def test_a_process_that_stopped_holds_where_it_was_until_its_next_life():
    log = a_log()
    expect_injectors(log, "in", ["a", "b"])
    for name in ("a", "b"):
        Injector(log, "in", name, epoch=1).report_low(50, now_ms=0)
    Injector(log, "in", "a", epoch=2).report_low(900, now_ms=1000)
    assert log.watermark("in") == 50
    Injector(log, "in", "b", epoch=2).report_low(800, now_ms=2000)
    assert log.watermark("in") == 800


def test_one_that_comes_no_more_is_dismissed_and_told_so():
    log = a_log()
    expect_injectors(log, "in", ["a", "b"])
    late = Injector(log, "in", "b", epoch=1)
    Injector(log, "in", "a", epoch=1).report_low(100, now_ms=0)
    dismiss_injector(log, "in", "b", now_ms=1000)
    assert log.watermark("in") == 100
    with pytest.raises(NotFound):
        late.report_low(50, now_ms=2000)


def test_one_that_has_sent_all_does_not_hold_and_all_of_them_end_it():
    log = a_log()
    expect_injectors(log, "in", ["a", "b"])
    a, b = (Injector(log, "in", name, epoch=1) for name in ("a", "b"))
    a.close(now_ms=0)
    b.report_low(40, now_ms=0)
    assert log.watermark("in") == 40
    b.close(now_ms=1)
    assert log.watermark("in") == LOW_MAX


def test_expecting_again_only_adds():
    log = a_log()
    expect_injectors(log, "in", ["a"])
    Injector(log, "in", "a", epoch=1).report_low(100, now_ms=0)
    expect_injectors(log, "in", ["a", "b"])
    assert log.producers("in") == {"a": 100, "b": 100}


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_a_set_that_is_none_is_refused(names: list[str]):
    with pytest.raises(ConfigError):
        expect_injectors(a_log(), "in", names)


def test_a_category_that_does_not_wait_for_injectors_expects_none():
    with pytest.raises(ConfigError, match="does not wait"):
        expect_injectors(a_log("event_time"), "in", ["a"])


@pytest.mark.parametrize(
    ("low", "lows", "spread"),
    [
        (100, {"x": 40, "y": 70}, 60),
        (100, {"x": LOW_MIN}, 90),  # has not begun: counted from where the injector began, 10
        (100, {"x": 200}, 0),
        (100, {"x": LOW_MAX}, 0),
        (LOW_MAX, {"x": 40}, 0),  # the end never waits
        (LOW_MIN, {"x": 40}, 0),
    ],
)
def test_the_spread_is_to_the_slowest_consumer(low: int, lows: dict[str, int], spread: int):
    assert measure_skew(low, lows, first=10, skew_max_ms=50).spread_ms == spread


def test_an_injector_too_far_ahead_waits_until_its_consumer_follows_and_shows_it():
    log, seen = a_log(), []
    log.register_producer("out", "job")
    log.report_low("out", producer="job", epoch=1, low=1000, now_ms=0)

    def pause(ms: int) -> None:
        seen.append(ahead.waits)
        if len(seen) == 3:
            log.report_low("out", producer="job", epoch=1, low=5000, now_ms=1000)

    ahead = Injector(log, "in", "me", epoch=1, skew_max_ms=2000, paced_by=["out"], pause=pause)
    ahead.publish(["a"], [1500], [b"{}"])
    ahead.report_low(2500, now_ms=0)
    ahead.publish(["a"], [2500], [b"{}"])
    assert seen == [] and ahead.waits is None
    ahead.report_low(6000, now_ms=500)
    ahead.publish(["a"], [6000], [b"{}"])
    assert len(seen) == 3 and ahead.waits is None
    assert {(skew.category, skew.slowest, skew.spread_ms) for skew in seen} == {("out", 1000, 5000)}
    assert sum(log.end_offsets("in")) == 3


def test_the_end_is_told_without_waiting():
    log = a_log()
    mine = Injector(log, "in", "me", epoch=1, skew_max_ms=5, paced_by=["out"], pause=lambda ms: pytest.fail())
    mine.report_low(10, now_ms=0)
    mine.close(now_ms=300)
    mine.publish(["a"], [11], [b"{}"])
    assert log.watermark("in") == LOW_MAX


@pytest.mark.parametrize(("bound", "by"), [(0, ["out"]), (5, [])])
def test_a_limit_needs_a_bound_and_somebody_to_be_paced_by(bound: int, by: list[str]):
    with pytest.raises(ConfigError):
        SkewLimit(a_log(), skew_max_ms=bound, paced_by=by)


def an_event_time_log(**more: Any) -> MemoryLog:
    log = MemoryLog()
    log.create(
        CategorySpec(
            name="in",
            partitions=2,
            columns=(("at", "bigint"),),
            format="json",
            watermark="event_time",
            lateness_ms=100,
            **more,
        )
    )
    log.create(CategorySpec(name="out", partitions=1, columns=()))
    log.register_producer("out", "job")
    return log


class Waited(Exception):
    """It would have waited."""


def a_paced(log: MemoryLog) -> Injector:
    def pause(ms: int) -> None:
        raise Waited

    return Injector(log, "in", "me", epoch=1, skew_max_ms=1000, paced_by=["out"], pause=pause)


def test_where_the_watermark_follows_event_times_the_records_say_how_far_an_injector_is():
    log = an_event_time_log()
    mine = a_paced(log)
    mine.publish(["a"], [5000], [b"{}"])
    mine.publish(["a", "a"], [6001, 5500], [b"{}"] * 2)
    with pytest.raises(Waited):
        mine.publish(["a"], [5400], [b"{}"])
    assert mine.waits is not None and (mine.waits.low, mine.waits.spread_ms) == (5901, 1001)
    log.report_low("out", producer="job", epoch=1, low=4901, now_ms=0)
    mine.publish(["a"], [5400], [b"{}"])
    log.report_low("out", producer="job", epoch=1, low=4902, now_ms=1000)
    mine.publish(["a"], [6902], [b"{}"])  # an older record did not take its low back
    with pytest.raises(Waited):
        mine.publish(["a"], [5400], [b"{}"])
    assert mine.waits.low == 6802 and sum(log.end_offsets("in")) == 5


def test_what_goes_to_a_partition_that_is_behind_does_not_wait_for_itself():
    log = an_event_time_log()
    mine = a_paced(log)
    one = "a"
    other = next(key for key in "bcdefgh" if partition_of(key, 2) != partition_of(one, 2))
    for at in (1000, 9000):
        mine.publish([one], [at], [b"{}"])
    mine.publish([other], [1000], [b"{}"])
    with pytest.raises(Waited):
        mine.publish([one], [9001], [b"{}"])
    mine.publish([one, other], [9001, 1500], [b"{}"] * 2)


def test_the_event_time_may_be_a_column_and_records_from_the_future_do_not_count():
    log = an_event_time_log(ts_column="at", ahead_max_ms=3_600_000)
    mine = a_paced(log)
    mine.publish(["a"], [1], [b'{"at": 5000}'])
    mine.publish(["a"] * 4, [1] * 4, [b'{"at": %d}' % 2**60, b"{", b"[]", b'{"at": null}'])
    mine.publish(["a"], [1], [b'{"at": 9000}'])
    with pytest.raises(Waited):
        mine.publish(["a"], [1], [b'{"at": 9000}'])
