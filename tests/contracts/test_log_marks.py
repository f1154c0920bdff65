"""What every bus must do with lows and marks, run against each implementation."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.errors import Fenced, NotFound
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, CategorySpec, Log
from tests.contracts.buses import (
    EXAMPLES,
    SPEC,
    NewLog,
    all_marks,
    assert_three_parts,
    publish,
    records,
    report,
)


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
    marks = log.marks("clicks", 0, above=LOW_MIN, up_to=2**40)
    assert all_marks(log) == [(10, 1), (20, 2), (30, 3), (40, 4), (50, 5)]
    assert log.marks("clicks", 0, above=20, up_to=marks[3].end) == marks[2:4]
    assert log.marks("clicks", 0, above=20, up_to=marks[4].end - 1) == marks[2:4]
    assert log.marks("clicks", 0, above=50, up_to=2**40) == ()
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


def test_a_mark_that_came_too_soon_is_made_later_without_its_producer(log: Log):
    log.register_producer("clicks", "a")
    report(log, "a", 10, now_ms=1000)
    report(log, "a", 20, now_ms=1100)
    log.advance("clicks", now_ms=1199)
    assert all_marks(log) == [(10, 0)]
    log.advance("clicks", now_ms=1200)
    log.advance("clicks", now_ms=1500)
    assert all_marks(log) == [(10, 0), (20, 0)]


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


def test_a_percentile_is_kept_only_rises_and_is_no_mark(log: Log, new_log: NewLog):
    log.register_producer("clicks", "a")
    assert log.raise_percentile("clicks", percent=99, low=50) == 50
    assert new_log().raise_percentile("clicks", percent=99, low=20) == 50
    assert log.raise_percentile("clicks", percent=90, low=20) == 20
    assert log.raise_percentile("clicks", percent=99, low=LOW_MAX) == LOW_MAX
    log.advance("clicks", now_ms=10_000)
    assert all_marks(log) == [] and log.watermark("clicks") == LOW_MIN
    assert log.producers("clicks") == {"a": LOW_MIN}


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
def test_marks_only_rise_and_never_pass_a_low(quick_log: NewLog, steps: list[tuple[str, str, int]]):
    """Whatever happens, marks ascend in low and end, W is the last of them, and no registered low is below it."""
    log, name, now_ms, seq = quick_log(), f"c{next(EXAMPLES)}", 0, 0
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
