"""What arrives in each partition, from what there is of it at several looks."""

from __future__ import annotations

from penstock.streams.partition_rates import PartitionRates


def test_rates_stand_on_two_looks_with_some_time_between():
    rates = PartitionRates()
    assert rates.metrics() == {}
    rates.look(0.0, {3: 100, 4: 0})
    assert rates.metrics() == {}
    rates.look(2.0, {3: 200, 4: 0})
    assert rates.metrics() == {}
    rates.look(10.0, {3: 600, 4: 1})
    assert rates.metrics() == {"input_rate.3": 50.0, "input_rate.4": 0.1}


def test_they_are_of_the_last_minute():
    rates = PartitionRates()
    for second in range(0, 200, 10):
        rates.look(float(second), {0: 10 * min(second, 100)})
    assert rates.metrics() == {"input_rate.0": 0.0}


def test_other_partitions_are_another_life_and_nothing_arrives_backwards():
    rates = PartitionRates()
    rates.look(0.0, {0: 100})
    rates.look(10.0, {1: 900})
    assert rates.metrics() == {}
    rates.look(20.0, {1: 800})
    assert rates.metrics() == {"input_rate.1": 0.0}
