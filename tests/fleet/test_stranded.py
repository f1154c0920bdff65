"""Shards of a container whose engine is down: the decisions, then the whole task layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.fleet.liveness import ShardManagerSettings
from penstock.fleet.lost_engine import (
    EngineOutage,
    EngineTracker,
    KeepShards,
    MoveShards,
    decide_engine,
    decide_shard,
)
from penstock.fleet.messages import FAST, Heartbeat
from penstock.fleet.placement.placement import Refusal
from penstock.fleet.shard_store import ShardRow
from tests.fleet.harness import World, owned
from tests.fleet.test_shard_manager import TASKS, a_world

PACE = ShardManagerSettings()
MOVE_MS = 3 * FAST.heartbeat_ms


def a_down(**values: Any) -> EngineOutage:
    """One engine of five is down for a moment; the others are up for long."""
    known = {"container": "c1", "down_ms": 500, "taker_ms": 10**6, "start_ms": 40_000, "move_ms": MOVE_MS}
    return EngineOutage(**{**known, "down_count": 1, "count": 5, **values})


@pytest.mark.parametrize(
    "down",
    [
        a_down(),
        a_down(start_ms=None),  # nobody saw how long its starts take
        a_down(start_ms=2_000, down_ms=MOVE_MS),  # this time it takes longer
        a_down(down_count=2, count=3),  # too few to be a mass
        a_down(down_count=3, count=12),
        a_down(taker_ms=60_000, down_ms=90_000),  # they started together, and it is late
        a_down(down_count=4, down_ms=60_000),
    ],
)
def test_others_take_the_shards(down: EngineOutage):
    assert decide_engine(down, PACE) == MoveShards("the engine of c1 is down")


@pytest.mark.parametrize(
    ("down", "why"),
    [
        (a_down(taker_ms=None), "no other container"),
        (a_down(start_ms=2_000), "restarts faster"),
        (a_down(taker_ms=59_999, down_ms=90_000), "start together"),
        (a_down(taker_ms=0, down_ms=1), "start together"),
        (a_down(down_count=3), "many engines"),
    ],
)
def test_they_wait_for_their_engine(down: EngineOutage, why: str):
    decision = decide_engine(down, PACE)
    assert isinstance(decision, KeepShards) and why in decision.reason


def a_shard(**values: Any) -> ShardRow:
    row = ShardRow(shard=1, container="c1", epoch=5, state=owned(1, 5).state, target=None)
    return replace(row, **values)


@pytest.mark.parametrize(
    ("row", "left_ms", "down_ms", "stays"),
    [
        (a_shard(), None, 0, False),
        (a_shard(blame=1), None, 0, False),
        (a_shard(blame=2), None, 0, True),
        (a_shard(blame=2), None, 10**9, True),
        (a_shard(), 119_999, 0, True),  # it left another engine: it may be what ends them
        (a_shard(), 120_000, 0, False),
        (a_shard(), 0, 120_000, False),  # this engine was not up since: it did not meet the shard again
    ],
)
def test_a_shard_that_may_end_engines_goes_to_no_third(row, left_ms, down_ms, stays):
    found = decide_shard(row, left_ms=left_ms, down_ms=down_ms, settings=PACE)
    assert (found is not None) == stays


def a_beat(container: str, life: int, *, is_ready: bool) -> Heartbeat:
    return Heartbeat(
        container=container, incarnation=f"{container}-{life}", sequence=1, engine_ready=is_ready
    )


def test_a_late_beat_takes_no_engine_down_and_lives_that_never_are_ready_are_one_time_down():
    engines, world = EngineTracker(PACE, move_ms=MOVE_MS), a_world()
    row = next(row for row in world.store.containers() if row.name == "c1")
    engines.on_heartbeat(a_beat("c1", 1, is_ready=True), 1_000)
    engines.on_heartbeat(a_beat("c1", 1, is_ready=False), 2_000)
    assert engines.down([row]) == frozenset()
    for life, now_ms in ((2, 3_000), (3, 50_000)):
        engines.on_heartbeat(a_beat("c1", life, is_ready=False), now_ms)
    assert engines.down([row]) == frozenset()  # of a life that the store does not know
    row = replace(row, incarnation="c1-3", engine_ready=False)
    assert engines.down([row]) == {"c1"}
    engines.on_heartbeat(a_beat("c2", 1, is_ready=True), 50_000)
    rows = [row, replace(row, name="c2", incarnation="c2-1", engine_ready=True)]
    mine = [a_shard()]
    how: dict[str, Any] = {"accepting": ["c2"], "silent": ()}
    # Down since 3 000, not since its last life began; c2 was up before anybody could know.
    assert engines.check(mine, rows, now_ms=50_000, **how).leaving == {mine[0]: "the engine of c1 is down"}
    assert engines.check(mine, rows, now_ms=50_000, accepting=["c2"], silent=["c1"]).leaving == {}
    found = engines.check(mine, rows, now_ms=50_000, **how)
    refused = [Refusal(shard=1, reason="no room")]
    assert list(engines.new_reports(found, refused)) == [("c1", "no room")]
    assert list(engines.new_reports(found, refused)) == []  # once


# -- the whole task layer -------------------------------------------------------------------------------------


def lose_engine(world: World, *names: str) -> None:
    """Engines die; their wardens clear up, register and start others, which are not ready yet."""
    for name in names:
        world.kill(name)
        world.start(name)
        world.containers[name].is_ready = False


def be_ready(world: World, *names: str) -> None:
    for name in names:
        world.containers[name].is_ready = True


def reasons(world: World, subject: str) -> list[str]:
    entries = world.journal.entries(subject, kind="placement")
    return [entry.reason for entry in entries]


def test_shards_of_a_lost_engine_run_elsewhere_within_a_few_beats():
    world = a_world("c1", "c2", "c3")
    lose_engine(world, "c1")
    world.run(5_000)
    assert world.tasks_alive() == TASKS and world.alive()["c1"] == ()
    assert "c1" not in world.owners().values() and world.failed_over == []
    assert "the engine of c1 is down" in reasons(world, "shards")


def test_when_the_engine_is_back_balance_decides_and_then_all_stands_still():
    world = a_world("c1", "c2")
    lose_engine(world, "c1")
    world.run(10_000)
    assert set(world.owners().values()) == {"c2"}
    be_ready(world, "c1")
    world.run(30_000)
    assert sorted(world.owners().values()) == ["c1", "c1", "c2", "c2"]
    before = world.store.shards()
    world.run(60_000)
    assert world.store.shards() == before and world.tasks_alive() == TASKS


def test_the_only_container_keeps_its_shards_and_says_why_once():
    world = a_world("c1")
    lose_engine(world, "c1")
    world.run(90_000)
    assert set(world.owners().values()) == {"c1"}
    assert reasons(world, "c1") == ["no other container can take shards"]
    be_ready(world, "c1")
    world.run(5_000)
    assert world.tasks_alive() == TASKS


@pytest.mark.parametrize("order", ["cordon", "drain"])
def test_who_is_cordoned_or_drained_takes_nothing(order: str):
    world = a_world("c1", "c2")
    world.manager.drain("c2", world.now_ms)
    world.run(15_000)
    if order == "cordon":
        world.manager.cordon("c2", world.now_ms)
    lose_engine(world, "c1")
    world.run(70_000)
    assert set(world.owners().values()) == {"c1"}


def test_whom_a_policy_keeps_a_job_away_from_takes_none_of_its_shards():
    world = a_world("c1", "c2", "c3")
    for name in ("c2", "c3"):
        world.exclude("a", name, for_ms=10**6)
    world.run(20_000)
    held = {shard for shard, owner in world.owners().items() if owner == "c1"}
    barred = {shard for shard, _ in world.bars(world.now_ms)}
    assert held & barred
    lose_engine(world, "c1")
    world.run(20_000)
    assert {shard for shard, owner in world.owners().items() if owner == "c1"} == held & barred


def test_engines_that_all_start_anew_keep_their_shards_though_one_is_ready_first():
    world = a_world("c1", "c2", "c3")
    before = world.owners()
    world.take_over()
    lose_engine(world, "c1", "c2", "c3")
    world.run(40_000)
    be_ready(world, "c1")
    world.run(20_000)
    assert world.owners() == before
    be_ready(world, "c2")
    world.run(5_000)
    assert world.owners() == before and len(world.tasks_alive()) > 1
    world.run(60_000)  # the last one is really late
    assert "c3" not in world.owners().values() and world.tasks_alive() == TASKS


def test_an_engine_that_starts_quickly_keeps_its_shards():
    world = a_world("c1", "c2")
    for number in range(3):
        before = world.owners()
        lose_engine(world, "c1")
        world.run(2_000)
        be_ready(world, "c1")
        world.run(5_000)
        if number > 0:  # the first time nobody knows how long it takes
            assert world.owners() == before
        world.run(150_000)
    assert world.tasks_alive() == TASKS


def test_a_shard_that_ends_engines_does_not_walk_through_the_fleet():
    """The engine that has `a/0` dies whenever it runs it; others are there to take its shards all the time."""
    world = a_world("c1", "c2", "c3", "c4", "c5", balance_ms=10**9, balance_soon_ms=10**9)
    met: list[str] = []
    for _ in range(300):
        world.run(1_000)
        place = next((name for name, tasks in world.alive().items() if "a/0" in tasks), None)
        if place is not None:
            met.append(place)
            lose_engine(world, place)
        elif world.now_ms % 50_000 == 0:
            be_ready(world, *world.containers)
    assert len(met) > 4 and len(set(met)) == 2, met
    owner = {task: name for name, tasks in world.alive().items() for task in tasks}
    assert set(owner) >= set(TASKS) - {"a/0"} or met[-1] not in owner.values()


def test_a_quarantined_shard_stays():
    world = a_world("c1", "c2", "c3")
    shard = next(row.shard for row in world.store.shards() if row.container == "c1")
    for _ in range(2):
        how = {"shard": shard, "term": world.manager.term, "at_ms": 0, "reason": "a test"}
        assert world.store.withhold("c1", world.containers["c1"].incarnation, **how)
        world.start("c1")
    world.containers["c1"].is_ready = False
    world.run(20_000)
    assert [number for number, owner in world.owners().items() if owner == "c1"] == [shard]
    assert any(f"shard {shard} is quarantined" in reason for reason in reasons(world, "c1"))


def test_a_new_shard_manager_takes_what_it_does_not_hear_for_no_taker():
    """All containers of a folder start again: old rows say `ready`, nobody is."""
    world = a_world("c1", "c2")
    before = world.owners()
    world.take_over()
    world.kill("c2")
    lose_engine(world, "c1")
    world.run(2_000)  # the row of c2 still says that it is ready
    assert world.owners() == before
    world.start("c2")
    be_ready(world, "c1")
    world.run(5_000)
    assert world.owners() == before and world.tasks_alive() == TASKS
