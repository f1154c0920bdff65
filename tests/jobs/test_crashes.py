"""I11: a plan crashed at any point and run again ends as one that never crashed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError, Fenced, OutcomeUnknown
from tests.builders import ADMIN, DEVELOPER, a_body, a_job, a_pipeline, an_output
from tests.jobs.world import Crash, World


def started(path: Path | None = None) -> World:
    world = World(path)
    a_job(world.service)
    world.settle()
    return world


def first_start(path: Path | None = None) -> World:
    world = World(path)
    a_job(world.service)
    return world


def rescale(path: Path | None = None) -> World:
    world = started(path)
    world.write("provisioner", task_count=3)
    return world


def stop(path: Path | None = None) -> World:
    world = started(path)
    world.write("oncall", state="stopped")
    return world


def paused(path: Path | None = None) -> World:
    world = started(path)
    world.write("oncall", state="paused")
    return world


def resumed(path: Path | None = None) -> World:
    world = paused(path)
    world.settle()
    world.write("oncall", state=None, task_count=3)
    return world


def new_outputs_behind_a_fence(path: Path | None = None) -> World:
    """The old tasks never report, so they are fenced; the old output's producers are retired."""
    world = started(path)
    world.tasks.stuck.add("demo.count")
    world.write("provisioner", outputs=[an_output(category="other")], task_count=2)
    return world


def given_up_at_prepare(path: Path | None = None) -> World:
    world = started(path)
    world.data.refuse = lambda call, job, config: ConfigError("no") if call == "prepare" else None
    world.write("provisioner", outputs=[an_output(category="other")])
    return world


def given_up_at_the_fence(path: Path | None = None) -> World:
    world = started(path)
    world.tasks.stuck.add("demo.count")
    world.data.refuse = lambda call, job, config: ConfigError("no") if call == "fence" else None
    world.write("provisioner", outputs=[an_output(category="other")])
    return world


def replaced_while_held(path: Path | None = None) -> World:
    """A rescale with new outputs is held and waits; then an admin asks for something else above it."""
    world = started(path)
    world.write("provisioner", outputs=[an_output(category="other")], task_count=3)
    world.round()
    world.write("oncall", actor=ADMIN, task_count=5, outputs=[an_output(category="third")])
    return world


def removed(path: Path | None = None) -> World:
    world = started(path)
    world.service.remove("demo.count", actor=DEVELOPER, reason="gone", idempotency_key=None, now_ms=0)
    return world


def new_package(path: Path | None = None) -> World:
    world = World(path)
    births = itertools.count()
    for version in ("1", "2"):
        bodies = [a_body(f"demo.j{number}", arguments={"v": version}) for number in range(3)]
        world.service.submit_pipeline(
            a_pipeline(*bodies),
            actor=DEVELOPER,
            reason="release",
            idempotency_key=None,
            now_ms=0,
            new_birth=lambda: f"birth{next(births)}",
        )
        if version == "1":
            world.settle()
    return world


SCENARIOS = [
    first_start,
    rescale,
    stop,
    paused,
    resumed,
    new_outputs_behind_a_fence,
    given_up_at_prepare,
    given_up_at_the_fence,
    replaced_while_held,
    removed,
    new_package,
]
Scenario = Callable[..., World]


def uncrashed(scenario: Scenario) -> tuple[World, Callable[[], None], int, dict[str, Any]]:
    """The world, the way back to where the change was just made, how many points it takes, and where it ends."""
    world = scenario()
    restore = world.save()
    restore()
    world.fail_at(0)
    world.settle()
    points, outcome = world.points, world.outcome()
    assert points > 8
    return world, restore, points, outcome


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_crash_at_any_point_ends_as_no_crash(scenario: Scenario) -> None:
    world, restore, points, expected = uncrashed(scenario)
    for number in range(1, points + 1):
        restore()
        world.fail_at(number)
        world.settle()
        assert world.outcome() == expected, f"crashed at point {number} of {points}"


@pytest.mark.parametrize(
    "scenario",
    [rescale, given_up_at_the_fence, replaced_while_held, new_package],
    ids=lambda scenario: scenario.__name__,
)
def test_a_store_or_port_that_fails_once_changes_nothing_in_the_end(scenario: Scenario) -> None:
    world, restore, points, expected = uncrashed(scenario)
    for number in range(1, points + 1):
        restore()
        world.fail_at(number, lambda: OutcomeUnknown("away"))
        world.settle()
        outcome = world.outcome()
        # That a port was away is written down; everything else is as if it had not been.
        outcome["audit"] = [row for row in outcome["audit"] if row[2] != "away"]
        assert outcome == expected, f"failed at point {number} of {points}"


@pytest.mark.parametrize(
    "scenario",
    [rescale, paused, given_up_at_the_fence, replaced_while_held, removed, new_package],
    ids=lambda scenario: scenario.__name__,
)
def test_a_successor_at_any_point_ends_as_if_there_had_been_one_syncer(scenario: Scenario) -> None:
    """The old syncer does not know, and goes on with its round: every write of it is refused from there on."""
    world, restore, points, expected = uncrashed(scenario)
    fenced = 0

    def take_over() -> None:
        if world.point_name != "commit":  # nobody else can write in the middle of a transaction
            world.restart()

    for number in range(1, points + 1):
        restore()
        old = world.syncer
        world.fail_at(number, take_over)
        try:
            while world.points < number:
                world.now_ms += world.round_ms
                old.sync_once(world.now_ms)
        except Fenced:
            fenced += 1  # otherwise it was replaced after its last write of this round
        if world.syncer is old:
            continue
        world.settle()
        assert world.outcome() == expected, f"replaced at point {number} of {points}"
        with pytest.raises(Fenced):
            old.sync_once(world.now_ms)
    assert fenced > points // 2


def test_a_second_crash_soon_after_the_first_changes_nothing() -> None:
    world, restore, points, expected = uncrashed(rescale)
    world.round_ms = (
        1_000  # two crashes must not bring the fence's deadline, which would be another way to the end
    )
    for first, second in itertools.product(range(1, points + 1), (1, 4, 9)):
        restore()
        world.fail_at(first)
        with pytest.raises(Crash):
            for _ in range(40):
                world.round()
        world.restart()
        world.fail_at(second)
        world.settle()
        assert world.outcome() == expected, f"crashed at {first}, then at {second}"


@pytest.mark.parametrize(
    "scenario", [rescale, new_outputs_behind_a_fence], ids=lambda scenario: scenario.__name__
)
def test_a_plan_goes_on_after_the_file_is_opened_again(scenario: Scenario, tmp_path: Path) -> None:
    """Each round is a new process on the same file."""
    expected = uncrashed(scenario)[-1]
    world = scenario(tmp_path / "store.db")
    for _ in range(20):
        world.round()
        world.database.close()
        again = World(tmp_path / "store.db")
        again.data.registered, again.data.fenced = world.data.registered, world.data.fenced
        again.tasks.stuck, again.tasks.looks, again.now_ms = (
            world.tasks.stuck,
            world.tasks.looks,
            world.now_ms,
        )
        world = again
    assert world.outcome() == expected
    world.database.close()
