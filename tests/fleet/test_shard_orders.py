"""What people may ask of containers and shards, and shards that nobody wants any more."""

from __future__ import annotations

import pytest

from penstock.core.errors import NotFound, Refused
from penstock.fleet.container_store import ContainerState
from penstock.fleet.messages import Heartbeat, ShardEntry, ShardState
from penstock.fleet.placement.placement import Move, Refusal
from penstock.fleet.shard_load import shard_of
from penstock.fleet.shard_store import ShardRow
from tests.fleet.harness import World
from tests.fleet.test_shard_manager import TASKS, a_world


def test_a_cordoned_container_keeps_what_it_has_and_gets_nothing_new():
    world = a_world()
    before = world.owners()
    world.manager.cordon("c1", world.now_ms)
    world.kill("c2", seen=True)
    world.run(15_000)
    assert {shard for shard, owner in world.owners().items() if owner == "c1"} == {
        shard for shard, owner in before.items() if owner == "c1"
    }
    assert any("no container accepts shards" in entry.reason for entry in world.journal.entries("shards"))
    world.manager.uncordon("c1", world.now_ms)
    world.run(15_000)
    assert set(world.owners().values()) == {"c1"}


def test_a_shard_moves_because_somebody_asks():
    world = a_world(balance_ms=10**9, balance_soon_ms=10**9)
    shard = next(shard for shard, owner in world.owners().items() if owner == "c1")
    world.manager.move(shard, "c2", world.now_ms, reason="closer to its data", actor="olga")
    epoch = world.store.shards()[shard].epoch
    world.manager.move(shard, "c2", world.now_ms)  # it is on its way there: a repeat does nothing more
    assert world.store.shards()[shard].epoch == epoch
    with pytest.raises(Refused, match="already moving"):
        world.manager.move(shard, "c1", world.now_ms)
    world.run(5_000)
    assert world.owners()[shard] == "c2" and world.tasks_alive() == TASKS
    assert ("closer to its data", "olga") in [(e.reason, e.actor) for e in world.journal.entries("shards")]
    world.manager.move(shard, "c2", world.now_ms)  # it is there: nothing to do
    with pytest.raises(NotFound, match="no container 'c9'") as unknown:
        world.manager.move(shard, "c9", world.now_ms)
    assert "c1, c2" in unknown.value.why and "container ls" in unknown.value.fix
    with pytest.raises(NotFound) as misspelt:
        world.manager.drain("c-2", world.now_ms)
    assert misspelt.value.fix == "did you mean `c2`?"
    world.manager.cordon("c1", world.now_ms)
    with pytest.raises(Refused, match="cannot take"):
        world.manager.move(shard, "c1", world.now_ms)
    world.manager.uncordon("c1", world.now_ms)
    with pytest.raises(NotFound):
        world.manager.move(99, "c2", world.now_ms)


def test_balancing_waits_for_the_moves_under_way():
    """Plan: one shard is on its way and takes its time when a container joins; that one is filled afterwards.

    A shard on its way counts at both ends: a plan made on that picture was followed by another one for ever
    (simulation, profile tasks, seed 6).
    """
    world = a_world("c1", "c2", tasks=10, shards=12, drop_timeout_ms=10**6)
    busy = {shard_of(f"a/{index}", 12) for index in range(10)}
    shard = next(shard for shard, owner in world.owners().items() if owner == "c1" and shard in busy)
    world.containers["c1"].runner.immortal |= {f"a/{index}" for index in range(10)}
    world.manager.move(shard, "c2", world.now_ms)
    world.start("c3")
    world.run(20_000)
    assert [row.shard for row in world.store.shards() if row.state is ShardState.DROPPING] == [shard]
    assert "c3" not in world.owners().values()
    world.containers["c1"].runner.immortal.clear()
    world.run(60_000)
    assert "c3" in world.owners().values() and len(world.tasks_alive()) == 10


def test_a_shard_that_cost_two_containers_goes_to_no_third():
    """Plan: a task that never stops makes one container after another lose its lease over the same shard."""
    world = a_world("c1", "c2", "c3", drop_timeout_ms=5_000)
    culprit = next(shard for shard, owner in sorted(world.owners().items()) if owner == "c1")
    for _ in range(2):
        owner = world.owners()[culprit]
        world.containers[owner].runner.immortal |= set(TASKS)
        world.manager.drain(owner, world.now_ms)
        while next(row for row in world.store.shards() if row.shard == culprit).container == owner:
            world.step()
            if world.store.containers()[int(owner[1]) - 1].state is ContainerState.WITHHELD:
                world.kill(owner)  # as its warden would at the deadline
        world.run(3_000)
        blamed = next(row for row in world.store.shards() if row.blame)
        culprit = blamed.shard
    row = next(row for row in world.store.shards() if row.shard == culprit)
    assert row.is_quarantined and row.container is None
    world.run(20_000)
    assert next(row for row in world.store.shards() if row.shard == culprit).container is None
    assert any("release" in entry.reason for entry in world.journal.entries("shards"))
    with pytest.raises(Refused, match="quarantined"):
        world.manager.move(culprit, "c3", world.now_ms)
    world.manager.release(culprit, world.now_ms, reason="its task was mended")
    world.run(5_000)
    assert next(row for row in world.store.shards() if row.shard == culprit).container is not None
    with pytest.raises(NotFound):
        world.manager.release(99, world.now_ms)


def test_a_shard_that_two_containers_dropped_only_by_a_restart_goes_to_no_third():
    """Found by the simulation: both returned in time, so neither was failed over, and the shard went on."""
    world = a_world("c1", "c2", balance_ms=10**9, balance_soon_ms=10**9)
    shard, term = next(shard for shard, owner in world.owners().items() if owner == "c1"), world.manager.term

    def row() -> ShardRow:
        return next(row for row in world.store.shards() if row.shard == shard)

    world.manager.move(shard, "c2", world.now_ms)
    for life in ("again", "once more"):
        held = next(found for found in world.store.containers() if found.name == "c1")
        how = {"term": term, "at_ms": world.now_ms}
        assert world.store.withhold("c1", held.incarnation, shard=shard, reason="slow", **how)
        world.store.register("c1", life, folder_id=held.folder_id, host="", pid=0, **how)
    assert row().is_quarantined and row().state is ShardState.DROPPING
    reaped = ShardEntry(shard=shard, epoch=row().epoch, state=ShardState.DROPPING)
    beat = Heartbeat(container="c1", incarnation="once more", sequence=1, acked=(reaped,))
    world.store.heartbeats([beat], term=term, at_ms=world.now_ms)
    assert row().container is None


def test_loads_that_were_seen_move_shards_and_sizes_bound_them():
    """Plan: two small containers and a large one tell their sizes; the large one gets most, none too much."""
    world = World(shards=16)
    for number in range(12):
        world.jobs.put(f"j{number}", mapping=(0,))
    world.sizes = {"c1": (4.0, 8e3, 0.0, 0.0), "c2": (4.0, 8e3, 0.0, 0.0), "c3": (16.0, 3.2e4, 0.0, 0.0)}
    world.start("c1", "c2", "c3")
    world.run(60_000)
    loads = world.service.reserved_loads(16)
    carried = {
        name: sum(
            loads.get(shard, (0, (0.0,)))[1][0] for shard, owner in world.owners().items() if owner == name
        )
        for name in world.sizes
    }
    assert all(carried[name] <= size[0] * 0.9 for name, size in world.sizes.items())
    assert carried["c3"] > carried["c1"] + carried["c2"]


def test_an_outlook_says_what_placement_would_do_and_changes_nothing():
    """Plan: a settled shard stays; on a draining container it would move; nowhere to go, it cannot."""
    world = a_world()
    world.run(30_000)
    used = world.service.reserved_loads(4)
    shard = next(shard for shard, owner in world.owners().items() if owner == "c1" and shard in used)
    load, decision = world.manager.outlook(shard, world.now_ms)
    assert load[0] == used[shard][1][0] and decision is None
    world.manager.drain("c1", world.now_ms)
    before = world.store.shards()
    _, decision = world.manager.outlook(shard, world.now_ms)
    assert isinstance(decision, Move) and (decision.source, decision.target) == ("c1", "c2")
    world.manager.drain("c2", world.now_ms)
    _, decision = world.manager.outlook(shard, world.now_ms)
    assert (
        isinstance(decision, Refusal)
        and decision.reason == "the containers that could take it are draining too"
    )
    assert world.store.shards() == before
    with pytest.raises(NotFound):
        world.manager.outlook(99, world.now_ms)
