"""What a task has yet to read is what the bus says: records, bytes, and for how long the oldest has waited."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.system_clock import SystemClock
from penstock.streams.bus.log import CategorySpec
from penstock.streams.dsl.injector import Injector
from penstock.streams.places import open_log, open_rows
from penstock.streams.rows.row_store import Changes
from penstock.streams.spark.load import BusyTime, PartitionRates
from penstock.streams.step.step import TaskDescriptor
from tests.support.stage import reading_task, wait_for

SPEC = CategorySpec(name="in", partitions=2, columns=(("n", "bigint"),), format="json", watermark="injector")


def a_task(folder: Path, *, offsets: tuple[int, int]) -> TaskDescriptor:
    """Two intervals that have read so far of a category with 10 records in each partition."""
    bus = f"embedded:{folder / 'bus'}"
    log = open_log(bus)
    log.create(SPEC)
    keys = ["0" if n % 2 else "4" for n in range(20)]  # these two keys lie in two partitions
    Injector(log, "in", "a", epoch=1).publish(keys, list(range(20)), [b'{"n": 1}'] * 20)
    assert log.end_offsets("in") == (10, 10)
    return reading_task(folder, bus, "in", offsets=offsets)


@pytest.mark.parametrize(("offsets", "waiting"), [((0, 0), 20), ((10, 4), 6), ((10, 10), 0)])
def test_lag_is_what_the_bus_has_beyond_the_committed_offsets(
    tmp_path: Path, offsets: tuple[int, int], waiting: int
):
    from penstock.streams.spark.load import LoadMeter

    meter = LoadMeter(a_task(tmp_path, offsets=offsets), trigger_ms=1000)
    found = meter.measure(None, at_s=1.0, now_ms=SystemClock().now_ms() + 5000)
    assert found["lag_records"] == waiting
    assert (found["lag_bytes"] > 0) == (waiting > 0)
    assert (5 <= found["lag_s"] < 60) if waiting else found["lag_s"] == 0
    by_partition = {n: found.get(f"lag_records.{n}", 0) for n in (0, 1, 2, 3)}
    assert {n: count for n, count in by_partition.items() if count} == {
        n: 10 - offset for n, offset in enumerate(offsets) if offset < 10
    }
    # Before its first batch it has no totals, and without a watermark it is not behind one.
    assert not {"read_total", "busy_ms_total", "at_ms", "watermark_lag_s"} & found.keys()


def test_what_arrives_is_known_by_partition(tmp_path: Path):
    """Plan: ten looks of a second; meanwhile one partition gets ten more, and nothing is read."""
    from penstock.streams.spark.load import LoadMeter

    task = a_task(tmp_path, offsets=(10, 4))
    meter, now_ms = LoadMeter(task, trigger_ms=1000), SystemClock().now_ms()
    found = meter.measure(None, at_s=0.0, now_ms=now_ms)
    assert not any(name.startswith("input_rate.") for name in found)
    Injector(open_log(task.bus), "in", "b", epoch=1).publish(["0"] * 10, [30] * 10, [b'{"n": 1}'] * 10)
    grown = next(n for n, end in enumerate(open_log(task.bus).end_offsets("in")) if end == 20)
    for second in range(1, 11):
        found = meter.measure(None, at_s=float(second), now_ms=now_ms)
    assert (found[f"input_rate.{grown}"], found[f"input_rate.{1 - grown}"]) == (1.0, 0.0)


def test_while_the_bus_is_away_nothing_is_known(tmp_path: Path):
    """Not what was seen before: the scaler would take it for news."""
    from penstock.streams.spark.load import LoadMeter, LoadWatch

    task = a_task(tmp_path, offsets=(0, 0))
    watch = LoadWatch(LoadMeter(task, trigger_ms=1000), lambda: None).start()
    try:
        wait_for(lambda: bool(watch.last), "the first look")
        (tmp_path / "bus").rename(tmp_path / "away")
        wait_for(lambda: not watch.last, "the next one")
        (tmp_path / "away").rename(tmp_path / "bus")
        wait_for(lambda: bool(watch.last), "it to be known again")
    finally:
        watch.stop()


def counted(folder: Path) -> dict[str, float]:
    """What a task tells that has read 14 of 20 records, of which some were late or dead letters."""
    from penstock.streams.spark.load import LoadMeter

    task = a_task(folder, offsets=(10, 4))
    rows, interval = open_rows(task.rows), task.intervals[0]
    row = rows.peek(interval.ref)
    counters = {"records": 14, "late": 5, "dropped": 3, "bad": 2, "poison": 1}
    changes = Changes(offsets={}, counters=counters)
    rows.commit(interval.ref, token=row.token, version=row.version, changes=changes)
    return LoadMeter(task, trigger_ms=1000).measure(None, at_s=1.0, now_ms=SystemClock().now_ms())


def test_what_was_late_dropped_or_put_aside_is_told_by_name(tmp_path: Path):
    """Records at which user code raised are dead letters as those are that could not be read."""
    found = counted(tmp_path)
    assert [found[name] for name in ("records", "late", "dropped", "bad", "lag_records")] == [14, 5, 3, 3, 6]


def test_each_batch_counts_once():
    busy = BusyTime()
    assert busy.update([(0, 100.0)], is_running=False, at_ms=0) == 100
    assert busy.update([(0, 100.0)], is_running=False, at_ms=1000) == 100
    assert busy.update([(2, 30.0), (1, 20.0), (2, 30.0)], is_running=False, at_ms=2000) == 150
    assert busy.last_seen == 2


def test_a_long_batch_counts_while_it_runs():
    busy = BusyTime()
    busy.update([(0, 100.0)], is_running=True, at_ms=1_000)
    assert busy.update([], is_running=True, at_ms=31_000) == 30_100
    assert busy.update([], is_running=True, at_ms=61_000) == 60_100
    assert busy.update([(1, 60_500.0)], is_running=False, at_ms=62_000) == 60_600


def test_a_new_query_numbers_its_batches_anew():
    busy = BusyTime()
    busy.update([(7, 100.0)], is_running=False, at_ms=0)
    busy.new_query()
    assert busy.update([(0, 50.0)], is_running=False, at_ms=10) == 150


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(-1, 9), st.floats(-1, 1e5))), st.booleans(), st.floats(0, 1e6)
        )
    )
)
def test_it_never_goes_back(looks):
    busy, last = BusyTime(), 0.0
    for ended, is_running, at_ms in looks:
        total = busy.update(ended, is_running=is_running, at_ms=at_ms)
        assert total >= last
        last = total


def test_rates_stand_on_two_looks_with_some_time_between():
    rates = PartitionRates()
    assert rates.metrics() == {}
    rates.add(0.0, {3: 100, 4: 0})
    assert rates.metrics() == {}
    rates.add(2.0, {3: 200, 4: 0})
    assert rates.metrics() == {}
    rates.add(10.0, {3: 600, 4: 1})
    assert rates.metrics() == {"input_rate.3": 50.0, "input_rate.4": 0.1}


def test_they_are_of_the_last_minute():
    rates = PartitionRates()
    for second in range(0, 200, 10):
        rates.add(float(second), {0: 10 * min(second, 100)})
    assert rates.metrics() == {"input_rate.0": 0.0}


def test_other_partitions_are_another_life_and_nothing_arrives_backwards():
    rates = PartitionRates()
    rates.add(0.0, {0: 100})
    rates.add(10.0, {1: 900})
    assert rates.metrics() == {}
    rates.add(20.0, {1: 800})
    assert rates.metrics() == {"input_rate.1": 0.0}
