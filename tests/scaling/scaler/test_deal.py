"""Properties of a deal of partitions: whatever the loads, it covers all, helps clearly or not at all, and settles."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.jobs.tasks import map_partitions
from penstock.scaling.scaler.rebalance import GAIN_MIN, BetterMapping, NoBetterMapping, find_better_mapping


@st.composite
def deals(draw: st.DrawFn) -> tuple[list[int], tuple[int, ...]]:
    """Loads in whole numbers, and a deal that leaves no task without a partition."""
    tasks = draw(st.integers(1, 6))
    partitions = draw(st.integers(tasks, 24))
    loads = draw(
        st.lists(
            st.one_of(st.integers(0, 20), st.integers(0, 10_000)), min_size=partitions, max_size=partitions
        )
    )
    rest = draw(st.lists(st.integers(0, tasks - 1), min_size=partitions - tasks, max_size=partitions - tasks))
    return loads, tuple(draw(st.permutations([*range(tasks), *rest])))


def busiest(loads: list[int], mapping: tuple[int, ...]) -> int:
    sums: Counter[int] = Counter()
    for load, task in zip(loads, mapping, strict=True):
        sums[task] += load
    return max(sums.values())


@given(deals())
def test_every_partition_has_a_task_and_every_task_a_partition(case: tuple[list[int], tuple[int, ...]]):
    loads, mapping = case
    found = find_better_mapping(loads, mapping)
    if isinstance(found, BetterMapping):
        assert len(found.mapping) == len(mapping) and set(found.mapping) == set(mapping)
        assert found.moved == tuple(p for p in range(len(mapping)) if mapping[p] != found.mapping[p]) != ()


@given(deals())
def test_what_is_done_is_worth_it(case: tuple[list[int], tuple[int, ...]]):
    loads, mapping = case
    found, before, total = find_better_mapping(loads, mapping), busiest(loads, mapping), sum(loads)
    if isinstance(found, BetterMapping):
        after = busiest(loads, found.mapping)
        assert after <= (1 - GAIN_MIN) * before * (1 + 1e-6)
        assert (found.share_before, found.share_after) == pytest.approx((before / total, after / total))
    elif total:
        assert found.share == pytest.approx(before / total) and found.share_best <= found.share
        # Nothing can be better than the largest partition alone, or than all tasks alike.
        floor = max(max(loads) / total, 1 / len(set(mapping)))
        assert found.share_best >= floor - 1e-6


@given(deals())
def test_it_settles(case: tuple[list[int], tuple[int, ...]]):
    """Asked again with the same loads after it was done, it has nothing to do."""
    loads, mapping = case
    found = find_better_mapping(loads, mapping)
    if isinstance(found, BetterMapping):
        assert isinstance(find_better_mapping(loads, found.mapping), NoBetterMapping)


@given(deals(), st.sampled_from([2, 10, 1000, 1_000_000]))
def test_the_unit_does_not_matter(case: tuple[list[int], tuple[int, ...]], unit: int):
    loads, mapping = case
    assert find_better_mapping([load * unit for load in loads], mapping) == find_better_mapping(
        loads, mapping
    )


@given(deals(), st.randoms(use_true_random=False))
def test_the_names_of_the_tasks_do_not_matter(case: tuple[list[int], tuple[int, ...]], rng: object):
    """Other names, the same answer: worth it or not, and about as good."""
    loads, mapping = case
    names = [*range(max(mapping) + 1)]
    rng.shuffle(names)  # type: ignore[attr-defined]
    one, other = (
        find_better_mapping(loads, mapping),
        find_better_mapping(loads, tuple(names[task] for task in mapping)),
    )
    if isinstance(one, NoBetterMapping) and isinstance(other, NoBetterMapping):
        assert one.share == pytest.approx(other.share)


@given(deals(), st.floats(0.2, 0.6))
def test_who_asks_for_more_gets_no_more_often_a_deal(case: tuple[list[int], tuple[int, ...]], gain: float):
    loads, mapping = case
    if isinstance(find_better_mapping(loads, mapping, gain_min=gain), BetterMapping):
        assert isinstance(find_better_mapping(loads, mapping), BetterMapping)


def test_hot_partitions_of_one_task_are_spread_by_one_move():
    found = find_better_mapping([90, 90, 90, 2, 2, 2], (0, 0, 0, 1, 1, 1))
    assert isinstance(found, BetterMapping) and len(found.moved) == 1
    assert found.share_before == pytest.approx(270 / 276) and found.share_after < 0.7


def test_partitions_that_bring_little_stay_where_they_are():
    loads = [40, 30, 20, 10, *[1] * 20]
    found = find_better_mapping(loads, map_partitions(24, 3))
    assert isinstance(found, BetterMapping) and len(found.moved) <= 5, found


def test_one_hot_partition_is_told_apart():
    found = find_better_mapping([1000, 10, 10, 10, 10, 10], (0, 0, 0, 1, 1, 1))
    assert isinstance(found, NoBetterMapping) and found.hot == 0 and "partition 0 alone" in found.reason
    # A task that has it and much else is relieved of the rest.
    assert isinstance(find_better_mapping([1000, 300, 300, 10, 10, 10], (0, 0, 0, 1, 1, 1)), BetterMapping)


@pytest.mark.parametrize(
    ("loads", "reason"),
    [
        ([0.0] * 4, "no records arrive"),
        ([1.0, float("nan"), 1.0, 1.0], "not known"),
        ([1.0, float("inf"), 1.0, 1.0], "not known"),
        ([1.0, -1.0, 1.0, 1.0], "not known"),
        ([1e308] * 4, "not known"),
        ([10.0, 10.0, 10.0, 11.0], "the busiest task has"),
    ],
)
def test_loads_that_say_nothing_change_nothing(loads: list[float], reason: str):
    found = find_better_mapping(loads, (0, 0, 1, 1))
    assert isinstance(found, NoBetterMapping) and reason in found.reason and found.hot is None
