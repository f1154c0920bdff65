"""Crashes, zombies, twins and changed plans at every point of the stateless step: as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.core.errors import Fenced
from penstock.streams.step.stateless import pending_intent
from tests.streams.stateless_world import REF, World, a_world, faulty, outputs_of, undisturbed
from tests.streams.step_world import Crash, Points, crash, deaths, published


def points_of(cuts: list[int]) -> int:
    points = Points()
    faulty(a_world(), points).live(cuts)
    return points.passed


def test_every_pair_of_crashes_in_two_lives_changes_nothing() -> None:
    expected, pairs = undisturbed(), 0
    for first in deaths(points_of([2])):
        for second in deaths(1000):
            world = a_world()
            with pytest.raises(Crash):
                faulty(world, Points(first, crash)).live([2])
            points = Points(second, crash)
            try:
                faulty(world, points).live([3])
            except Crash:
                faulty(world, Points()).live([1])
                assert world.result() == expected, (first, second)
                pairs += 1
                continue
            assert points.passed <= second
            assert world.result() == expected, (first, second)
            break
    assert pairs > 100


def test_a_plan_that_changes_between_lives_never_doubles_or_loses_a_record() -> None:
    """Each life has a plan of its own. Whatever was promised is finished with the plan that promised it: every input
    record is seen exactly once, and records of one promised range all carry the same plan.
    """
    for first in deaths(points_of([2])):
        for second in deaths(1000):
            world = a_world()
            with pytest.raises(Crash):
                faulty(world, Points(first, crash), suffix="-1").live([2])
            promised = pending_intent(world.rows.peek(REF))
            points = Points(second, crash)
            try:
                faulty(world, points, suffix="-2").live([3])
            except Crash:
                faulty(world, Points(), suffix="-3").live([1])
            found = outputs_of(world)
            assert [query.split("-")[0] for query in found] == ["a", "b", "two", "two", "a"], (
                first,
                second,
                found,
            )
            plans = [query.split("-")[1] for query in found]
            assert plans == sorted(plans), (first, second, found)
            assert plans[2] == plans[3], "both records made of one are of one plan"
            if promised is not None:
                ((start, end),) = promised.ranges.values()
                rows = [row for rows in published(world.log, ["out"])["out"].values() for row in rows]
                of_range = {
                    row["query"].split("-")[1] for row in rows if start <= (row["_seq"] >> 16) - 1 < end
                }
                assert of_range <= {"1"}, (first, second, found)
            if points.passed <= second:
                break


def _run_with(world: World, at: int, act: Callable[[], object]) -> bool:
    try:
        faulty(world, Points(at, lambda: (act(), None)[1])).live([2])
    except Fenced:
        return True
    return False


def test_a_zombie_paused_at_every_point_changes_nothing_and_is_fenced() -> None:
    expected, count = undisturbed(), points_of([2])
    for at in range(count):
        world = a_world()
        fenced = _run_with(world, at, lambda world=world: faulty(world, Points()).live([3]))
        assert fenced or at in (0, count - 1), at
        assert world.result() == expected, at


def test_a_zombie_with_an_old_plan_changes_nothing() -> None:
    """Life 1 pauses, life 2 replays its promise and goes on with a new plan, life 1 wakes up with the old one."""
    for at in range(1, points_of([2]) - 1):
        world = a_world()
        kept: list[dict[str, Any]] = []

        def successor(world: World = world, kept: list[dict[str, Any]] = kept) -> None:
            faulty(world, Points(), suffix="-2").live([3])
            kept.append(world.result())

        assert _run_with(world, at, successor), at
        assert world.result() == kept[0], at
        assert [query.split("-")[0] for query in outputs_of(world)] == ["a", "b", "two", "two", "a"], at


def test_a_twin_at_every_point_changes_nothing() -> None:
    """Two workers of one token are given the same range; the second runs whole inside the first, then life goes on."""
    expected = undisturbed()
    for at in range(100):
        world = a_world()
        token = world.open().token
        twin = faulty(world, Points())
        points = Points(
            at, lambda twin=twin, token=token: (twin.run(token, 0, 4), twin.run(token, 4, 6), None)[2]
        )
        slow = faulty(world, points)
        slow.run(token, 0, 4)
        if points.passed <= at:
            break
        faulty(world, Points()).live([1])
        assert world.result() == expected, at
    assert at >= 8
