"""Who holds a watermark back: a function of the topology and its lows."""

from __future__ import annotations

import pytest

from penstock.streams.bus.log import LOW_MAX, LOW_MIN
from penstock.streams.inspect.watermark_view import (
    CategoryLow,
    HeldBack,
    InputLow,
    IntervalLow,
    ProducerLow,
    Topology,
    find_holder,
    percentile_low,
    upstream,
)


def a_category(name: str, low: int, kind: str = "producers", **others: object) -> CategoryLow:
    return CategoryLow(name=name, kind=kind, low=low, **others)  # type: ignore[arg-type]


def an_interval(partition: int, low: int, output: int | None = None, **others: object) -> IntervalLow:
    given: dict = {"inputs": (InputLow(category="in", low=low, waiting=0),), **others}
    return IntervalLow(
        job="j", partition=partition, input_low=low, output_low=low if output is None else output, **given
    )


def two_stages(*intervals: IntervalLow, source: CategoryLow, out_low: int | None = None) -> Topology:
    """in -> j -> out, with an interval for each partition."""
    producers = tuple(
        ProducerLow(name=f"i{one.partition}", low=one.output_low, place=("j", one.partition))
        for one in intervals
    )
    low = min(one.output_low for one in intervals) if out_low is None else out_low
    return Topology(
        categories={"in": source, "out": a_category("out", low, producers=producers)},
        intervals={("j", one.partition): one for one in intervals},
    )


def injected(low: int, *lows: tuple[str, int]) -> CategoryLow:
    return a_category(
        "in", low, "injector", producers=tuple(ProducerLow(name=name, low=at) for name, at in lows)
    )


def holder(topology: Topology) -> HeldBack:
    return find_holder(topology, "out")


def test_the_slowest_injector_is_named_through_the_jobs_between():
    topology = two_stages(an_interval(0, 50), an_interval(1, 50), source=injected(50, ("a", 90), ("b", 50)))
    found = holder(topology)
    assert (found.holder, found.path) == ("injector b", ("out", "j[0]", "in"))
    assert found.text == "held back by injector b, because it last reported 1970-01-01T00:00:00.050Z"


def test_an_injector_that_never_came_is_named():
    topology = two_stages(an_interval(0, LOW_MIN), source=injected(LOW_MIN, ("a", 90), ("b", LOW_MIN)))
    assert holder(topology).text == "held back by injector b, because it has not reported yet"
    empty = two_stages(an_interval(0, LOW_MIN), source=injected(LOW_MIN))
    assert holder(empty).reason == "no injector has started"


def test_an_interval_with_records_to_read_holds_what_its_input_has_passed():
    behind = an_interval(1, 20, inputs=(InputLow(category="in", low=20, waiting=1234),))
    topology = two_stages(an_interval(0, 90), behind, source=injected(90, ("a", 90)))
    assert holder(topology).holder == "j[1]" and "1,234 records of in" in holder(topology).reason


def test_why_an_interval_does_not_go_on_is_said_with_it():
    behind = an_interval(
        0, 20, inputs=(InputLow(category="in", low=20, waiting=3),), trouble="the job is stopped"
    )
    found = holder(two_stages(behind, source=injected(90, ("a", 90))))
    assert found.reason == "it has 3 records of in to read; the job is stopped"


@pytest.mark.parametrize(
    ("outbox", "because"),
    [
        (30, "production of 1970-01-01T00:00:00.030Z is not sent"),
        (None, "a timer holds it"),
        (70, "a timer holds"),
    ],
)
def test_an_interval_that_holds_itself_says_with_what(outbox: int | None, because: str):
    holding = an_interval(0, 80, 30, outbox=outbox)
    found = holder(two_stages(holding, source=injected(80, ("a", 80))))
    assert found.holder == "j[0]" and because in found.reason


def test_a_partition_without_newer_records_is_named():
    source = a_category("in", 40, "event_time", partitions=(90, 40), lateness_ms=10)
    topology = two_stages(an_interval(0, 90), an_interval(1, 40), source=source)
    assert holder(topology).holder == "partition 1 of in"
    assert "newest record is from 1970-01-01T00:00:00.050Z; without idle_after_ms" in holder(topology).reason
    assert find_holder(topology, "in").holder == "partition 1 of in"


def test_a_partition_that_has_never_had_a_record_is_named():
    source = a_category("in", LOW_MIN, "event_time", partitions=(90, LOW_MIN), idle_after_ms=5)
    topology = two_stages(an_interval(0, 90), an_interval(1, LOW_MIN), source=source)
    assert holder(topology).text == "held back by partition 1 of in, because it has no records yet"


def test_a_low_that_was_not_told_holds():
    topology = two_stages(an_interval(0, 80), source=injected(80, ("a", 80)), out_low=50)
    told = topology.categories["out"]
    early = CategoryLow(
        name="out", kind="producers", low=50, producers=(ProducerLow(name="i0", low=50, place=("j", 0)),)
    )
    assert told.low == 50
    found = find_holder(
        Topology(categories={**topology.categories, "out": early}, intervals=topology.intervals), "out"
    )
    assert "has not reported it" in found.reason


def test_a_producer_that_no_job_has_is_named():
    gone = a_category("out", 5, producers=(ProducerLow(name="x", low=5),))
    found = find_holder(Topology(categories={"out": gone}), "out")
    assert found.holder == "producer x" and "belongs to no running job" in found.reason


def test_nobody_holds_what_has_ended():
    assert find_holder(Topology(categories={"out": a_category("out", LOW_MAX)}), "out").text == (
        "nothing holds it back: the input has ended"
    )


def test_a_cycle_ends():
    loop = an_interval(0, 5, inputs=(InputLow(category="out", low=5, waiting=0),))
    topology = two_stages(loop, source=injected(9, ("a", 9)))
    assert "cycle" in holder(topology).reason


def test_upstream_is_the_category_and_all_it_depends_on_once():
    topology = two_stages(an_interval(0, 50), an_interval(1, 50), source=injected(50, ("a", 50)))
    assert upstream(topology, "out") == ("out", "in") and upstream(topology, "in") == ("in",)
    assert upstream(topology, "gone") == ()


@pytest.mark.parametrize(("percent", "low"), [(100, 0), (99, 1), (90, 10), (50, 50), (1, 99)])
def test_a_percentile_leaves_the_slowest_out(percent: int, low: int):
    lows = tuple(ProducerLow(name=f"p{n}", low=n) for n in range(100))
    assert percentile_low(a_category("x", 0, producers=lows), percent) == low


@pytest.mark.parametrize(
    ("records", "percent", "low"),
    [
        ((9, 300, 300, 400), 99, 20),  # the slowest has less than one in a hundred
        ((11, 300, 300, 400), 99, 10),
        ((10, 300, 300, 390), 99, 20),  # just one in a hundred
        ((9, 300, 300, 400), 100, 10),
        ((4, 4, 300, 692), 99, 30),  # two together
        ((0, 300, 300, 400), 99, 20),  # who has had none counts as one
        ((0, 0, 0, 0), 75, 20),
        ((0, 0, 0, 0), 99, 10),
    ],
)
def test_a_straggler_with_a_small_share_of_the_records_is_left_out(
    records: tuple[int, ...], percent: int, low: int
):
    lows = (10, 20, 30, 40)
    producers = tuple(
        ProducerLow(name=f"p{n}", low=at, records=count)
        for n, (at, count) in enumerate(zip(lows, records, strict=True))
    )
    assert percentile_low(a_category("x", 10, producers=producers), percent) == low
    partitions = a_category("x", 10, "event_time", partitions=lows, records=records)
    assert percentile_low(partitions, percent) == low


def test_a_percentile_is_never_below_the_exact_low():
    assert percentile_low(a_category("x", 7), 99) == 7
    assert percentile_low(a_category("x", LOW_MAX, producers=(ProducerLow(name="a", low=3),)), 99) == LOW_MAX
    assert percentile_low(a_category("x", 5, "event_time", partitions=(5, 9)), 50) == 9
