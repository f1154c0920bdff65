"""Claims about exclusions: shards with a task of the job leave, stay away, come back; nothing is lost for a wish."""

from __future__ import annotations

import pytest

from penstock.core.errors import Refused
from penstock.core.journal import Entry
from penstock.db.database import Database
from penstock.db.journal_store import JournalStore
from penstock.fleet.exclusions import LONGEST_MS, Exclusion, ExclusionStore, bars_in_force, bars_of
from penstock.fleet.shard_load import shard_of
from tests.fleet.harness import World

HOUR_MS = 3_600_000


def a_world(*names: str, shards: int = 16) -> World:
    """A job of four tasks and one of eight on some containers, settled."""
    world = World(shards=shards)
    world.jobs.put("a", mapping=(0, 1, 2, 3))
    world.jobs.put("b", mapping=tuple(range(8)))
    world.start(*(names or ("c1", "c2", "c3")))
    world.run(20_000)
    assert len(world.tasks_alive()) == 12
    return world


def homes(world: World, job: str, tasks: int) -> dict[str, str]:
    owners = world.owners()
    return {f"{job}/{n}": owners[shard_of(f"{job}/{n}", world.shards)] for n in range(tasks)}


def test_shards_with_a_task_of_the_job_leave_stay_away_and_may_come_back():
    world = a_world()
    place = next(iter(homes(world, "a", 4).values()))
    world.exclude("a", place, for_ms=60_000)
    world.run(15_000)
    assert place not in homes(world, "a", 4).values() and len(world.tasks_alive()) == 12
    assert place in world.owners().values(), "shards without a task of the job stay"
    entries = world.journal.entries(kind="placement")
    assert f"a is excluded from {place}" in {entry.reason for entry in entries}
    world.run(40_000)
    assert place not in homes(world, "a", 4).values()
    before = world.owners()
    world.run(60_000)
    assert world.exclusions.current(world.now_ms) == ()
    # It is over: what was full of others' shards may get some of these again, or not; nothing is lost.
    assert before.keys() == world.owners().keys() and len(world.tasks_alive()) == 12


def test_the_shard_of_one_task_leaves_and_others_of_its_job_stay():
    world = a_world()
    task, place = next(iter(homes(world, "a", 4).items()))
    world.exclude(task, place, for_ms=60_000)
    world.run(15_000)
    assert homes(world, "a", 4)[task] != place
    with pytest.raises(Refused) as caught:
        world.manager.move(shard_of(task, world.shards), place, world.now_ms)
    assert "is excluded" in caught.value.why and "readmit" in caught.value.fix


def test_a_wish_costs_no_task_its_place():
    """Plan: every other container dies; then all are excluded; then a new one comes and takes what it should."""
    world = a_world("c1", "c2")
    world.exclude("a", "c1", for_ms=HOUR_MS)
    world.run(15_000)
    assert set(homes(world, "a", 4).values()) == {"c2"}
    world.kill("c2", seen=True)
    world.run(20_000)
    assert set(world.owners().values()) == {"c1"} and len(world.tasks_alive()) == 12
    world.start("c3")
    world.run(20_000)
    assert set(homes(world, "a", 4).values()) == {"c3"} and len(world.tasks_alive()) == 12


def test_a_place_without_room_elsewhere_is_kept():
    """Plan: the only other container is far too small for the shards that should leave."""
    world = a_world("c1", "c2")
    world.sizes = {"c2": (0.001, 1.0, 1.0, 1.0)}
    world.exclude("a", "c1", for_ms=HOUR_MS)
    world.run(20_000)
    assert len(world.tasks_alive()) == 12
    world.kill("c2", seen=True)
    world.run(20_000)
    assert len(world.tasks_alive()) == 12


def test_an_emptied_container_is_filled_with_others_and_the_fleet_comes_to_rest():
    """Plan: nearly all that has load is kept away, so the container stays nearly empty: nothing may go to and fro."""
    world = World(shards=16)
    world.jobs.put("a", mapping=tuple(range(8)))
    world.start("c1", "c2", "c3")
    world.run(20_000)
    world.exclude("a", "c3", for_ms=HOUR_MS)
    world.run(30_000)
    assert "c3" not in homes(world, "a", 8).values()
    owners = world.owners()
    world.run(60_000)
    assert world.owners() == owners, "it goes on moving"


def test_another_life_of_the_job_is_not_meant():
    world = a_world()
    owners = world.owners()
    world.exclude("a", "c1", for_ms=HOUR_MS, birth="another")
    world.run(20_000)
    assert world.owners() == owners


def test_a_shard_that_can_go_nowhere_else_has_no_bars():
    bars = {(1, "c1"): "a", (1, "c2"): "a", (2, "c1"): "a"}
    assert bars_in_force(bars, ("c1", "c2")) == {(2, "c1"): "a"}
    assert bars_in_force(bars, ()) == {}
    wishes = [Exclusion(subject="a", birth="b", container="c1", until_ms=9)]
    assert set(bars_of(wishes, lambda subject, birth: {3, 5})) == {(3, "c1"), (5, "c1")}


# -- the store ----------------------------------------------------------------------------------------------


def an_entry(at_ms: int) -> Entry:
    return Entry(at_ms=at_ms, actor="p", kind="exclusion", subject="a", decision="away", reason="slow")


def a_wish(subject: str = "a", container: str = "c1", until_ms: int = 100) -> Exclusion:
    return Exclusion(subject=subject, birth="b1", container=container, until_ms=until_ms, reason="slow")


def test_exclusions_survive_are_prolonged_end_and_are_journalled(place):
    database = Database(place)
    journal = JournalStore(database)
    store = ExclusionStore(database, journal)
    store.put([a_wish(), a_wish("a/2", "c2")], an_entry(1))
    store.put([a_wish(until_ms=200)], an_entry(2))
    other = ExclusionStore(database, journal)
    assert other.current(50) == (a_wish(until_ms=200), a_wish("a/2", "c2"))
    assert other.current(150) == (a_wish(until_ms=200),) and other.current(200) == ()
    store.put([a_wish("b", "c1", 1_000)], an_entry(300))
    assert store.current(10) == (a_wish("b", "c1", 1_000),), "what was over is swept"
    assert [entry.decision for entry in journal.entries("a")] == ["away"] * 3
    database.close()


def test_a_job_is_readmitted_everywhere_with_its_tasks(place):
    database = Database(place)
    journal = JournalStore(database)
    store = ExclusionStore(database, journal)
    store.put([a_wish(), a_wish("a/2", "c2"), a_wish("ab", "c3")], an_entry(1))
    assert store.lift("a", an_entry(2)) == 2 and store.lift("a", an_entry(3)) == 0
    assert store.current(10) == (a_wish("ab", "c3"),)
    assert len(journal.entries("a")) == 2
    database.close()


def test_an_end_that_no_exclusion_can_have_is_of_a_wrong_clock():
    database = Database(None)
    store = ExclusionStore(database, JournalStore(database))
    store.put([a_wish(until_ms=LONGEST_MS + 100)], an_entry(1))
    assert store.current(10) == () and len(store.current(200)) == 1
