"""What every bus must do for event-time categories: idle partitions follow, and append times never change."""

from __future__ import annotations

import pytest

from penstock.core.errors import ConfigError
from penstock.core.system_clock import SystemClock
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, CategorySpec, Log, Seen
from tests.contracts.buses import SPEC, NewLog, assert_three_parts, offsets, publish, records, report

IDLE = CategorySpec(
    name="clicks", partitions=2, columns=SPEC.columns, watermark="event_time", idle_after_ms=10_000
)


@pytest.fixture
def idle_log(new_log: NewLog) -> Log:
    made = new_log()
    made.create(IDLE)
    return made


def observe(log: Log, partition: int, low: int, now_ms: int) -> None:
    log.observe("clicks", partition=partition, low=low, now_ms=now_ms)


def idle_marks(log: Log, partition: int) -> list[tuple[int, int]]:
    """Each idle mark's low, and how many records of the partition lie before it."""
    found = log.marks("clicks", partition, above=LOW_MIN, up_to=2**40)
    places = offsets(log, partition)
    return [(mark.low, sum(place < mark.end for place in places)) for mark in found if mark.idle]


def follow(log: Log) -> None:
    """Partition 1 has two records and then none; partition 0 goes on."""
    publish(log, 1, 1, 2)
    publish(log, 0, 1)
    observe(log, 0, 100, now_ms=0)
    observe(log, 1, 50, now_ms=0)
    publish(log, 0, 2)
    observe(log, 0, 200, now_ms=10_000)


def test_an_idle_partition_gets_marks_of_its_own_at_its_end(idle_log: Log):
    follow(idle_log)
    assert idle_marks(idle_log, 1) == [(200, 2)] and idle_marks(idle_log, 0) == []
    publish(idle_log, 0, 3)
    observe(idle_log, 0, 300, now_ms=12_000)
    assert idle_marks(idle_log, 1) == [(200, 2), (300, 2)]


def test_idle_marks_are_there_for_whoever_comes_later(idle_log: Log, new_log: NewLog):
    follow(idle_log)
    again = new_log()
    assert idle_marks(again, 1) == [(200, 2)]
    assert [seen.follows for seen in again.observed("clicks")] == [LOW_MIN, 200]
    observe(again, 0, 200, now_ms=11_000)
    observe(again, 0, 150, now_ms=13_000)  # a reader that is behind changes nothing
    assert idle_marks(again, 1) == [(200, 2)] and again.observed("clicks")[0].low == 200


def test_a_partition_that_speaks_again_keeps_its_marks_and_follows_no_longer(idle_log: Log):
    follow(idle_log)
    publish(idle_log, 1, 3)
    publish(idle_log, 0, 3)
    observe(idle_log, 0, 300, now_ms=12_000)
    observe(idle_log, 1, 60, now_ms=12_000)
    assert idle_marks(idle_log, 1) == [(200, 2)]


def test_somebody_who_only_looks_marks_too(idle_log: Log):
    publish(idle_log, 0, 1)
    observe(idle_log, 0, 100, now_ms=0)
    publish(idle_log, 0, 2)
    observe(idle_log, 0, 150, now_ms=9_000)
    idle_log.advance("clicks", now_ms=10_500)
    assert idle_marks(idle_log, 1) == [(150, 0)]


def test_marks_of_producers_are_no_idle_marks(idle_log: Log):
    idle_log.register_producer("clicks", "a")
    report(idle_log, "a", 70, now_ms=0)
    follow(idle_log)
    report(idle_log, "a", LOW_MAX, now_ms=20_000)
    found = idle_log.marks("clicks", 1, above=LOW_MIN, up_to=2**40)
    assert [(mark.low, mark.idle) for mark in found] == [(70, False), (200, True), (LOW_MAX, False)]


def test_idle_marks_are_cut_by_low_and_by_offset(idle_log: Log):
    follow(idle_log)
    (mark,) = idle_log.marks("clicks", 1, above=LOW_MIN, up_to=2**40)
    assert idle_log.marks("clicks", 1, above=LOW_MIN, up_to=mark.end - 1) == ()
    assert idle_log.marks("clicks", 1, above=200, up_to=2**40) == ()


def test_of_passed_idle_marks_the_last_stays(idle_log: Log):
    follow(idle_log)
    publish(idle_log, 0, 3)
    observe(idle_log, 0, 300, now_ms=12_000)
    idle_log.truncate("clicks", {1: idle_log.end_offsets("clicks")[1]})
    assert [mark.low for mark in idle_log.marks("clicks", 1, above=LOW_MIN, up_to=2**40)] == [300]


def test_without_idle_after_nothing_is_noted(new_log: NewLog):
    log = new_log()
    log.create(CategorySpec(name="clicks", partitions=2, columns=SPEC.columns, watermark="event_time"))
    follow(log)
    assert idle_marks(log, 1) == [] and log.observed("clicks") == ()


def test_a_partition_nobody_looked_at_is_not_known(idle_log: Log):
    assert idle_log.observed("clicks") == (Seen(), Seen())
    with pytest.raises(ConfigError):
        observe(idle_log, 2, 5, now_ms=0)


@pytest.mark.parametrize(
    "change",
    [{"idle_after_ms": -1}, {"ahead_max_ms": -1}, {"idle_after_ms": 5, "watermark": "injector"}],
    ids=str,
)
def test_limits_that_mean_nothing_are_refused(new_log: NewLog, change: dict):
    given = {"name": "bad", "partitions": 1, "columns": (), "watermark": "event_time", **change}
    with pytest.raises(ConfigError) as caught:
        new_log().create(CategorySpec(**given))
    assert_three_parts(caught.value)


def test_each_record_has_the_time_at_which_it_was_appended(log: Log):
    before = SystemClock().now_ms()
    publish(log, 0, 1, 2)
    publish(log, 0, 3)
    after = SystemClock().now_ms()
    runs = list(log.scan_timed("clicks", 0, 0, log.end_offsets("clicks")[0]))
    assert [n for _, _, batch in runs for n in batch.column("n").to_pylist()] == [1, 2, 3]
    times = [int(at) for _, appended, _ in runs for at in appended]
    assert len(times) == 3 and all(before - 1000 <= at <= after for at in times)
    assert [int(o) for run, _, _ in runs for o in run] == offsets(log, 0)


def test_times_of_records_stay_when_others_come_and_go(log: Log):
    for number in range(1, 6):
        log.publish("clicks", producer="a", epoch=1, batches={0: records(number)}, gapless=False)

    def times() -> dict[int, int]:
        start, end = log.start_offsets("clicks")[0], log.end_offsets("clicks")[0]
        return {
            int(o): int(t)
            for run, at, _ in log.scan_timed("clicks", 0, start, end)
            for o, t in zip(run, at, strict=True)
        }

    before = times()
    log.truncate("clicks", {0: sorted(before)[2]})
    log.clean(now_ms=SystemClock().now_ms(), older_than_ms=0)
    assert times() == {offset: at for offset, at in before.items() if offset >= sorted(before)[2]}
