"""The whole task layer in one process: `World` steps time, beats, tasks, leases and the Shard Manager."""

from __future__ import annotations

from random import Random

import pytest

from penstock.core.errors import NotFound, OutcomeUnknown, Refused
from penstock.db.database import take_term
from penstock.fleet.container_store import ContainerState
from penstock.fleet.messages import FAST, Heartbeat, HeartbeatVerdict, ShardState
from penstock.fleet.shard_manager import CANARY, ShardManager
from penstock.jobs.syncer.plan_runner import TaskActuator
from tests.fleet.harness import World

TASKS = ["a/0", "a/1", "a/2", "a/3"]


def a_world(*names: str, tasks: int = 4, **pace: int) -> World:
    """A settled world: every task runs, loads are level."""
    world = World(**pace)
    world.jobs.put("a", mapping=tuple(range(tasks)))
    world.start(*(names or ("c1", "c2")))
    world.run(15_000)
    assert world.tasks_alive() == [f"a/{n}" for n in range(tasks)]
    return world


def test_shards_and_tasks_are_spread_over_the_containers():
    world = a_world()
    assert sorted(world.owners().values()) == ["c1", "c1", "c2", "c2"]
    world.run(60_000)
    assert world.failed_over == [] and world.alerts == []


def test_a_settled_world_stands_still():
    world = a_world()
    before = world.store.shards()
    world.run(60_000)
    assert world.store.shards() == before


def test_containers_that_are_not_ready_get_no_shards():
    world = World()
    world.start("c1", "c2")
    world.containers["c2"].is_ready = False
    world.run(20_000)
    assert set(world.owners().values()) == {"c1"}
    world.containers["c2"].is_ready = True
    world.run(20_000)
    assert sorted(world.owners().values()) == ["c1", "c1", "c2", "c2"]


# -- movement -----------------------------------------------------------------------------------------------


def test_a_shard_is_given_away_only_after_its_drop_is_acknowledged():
    world = a_world("c1", "c2")
    slow = world.containers["c1"]
    slow.runner.immortal |= set(TASKS)
    held = {shard for shard, owner in world.owners().items() if owner == "c1"}
    world.manager.drain("c1", world.now_ms)
    world.run(20_000)
    rows = [row for row in world.store.shards() if row.shard in held]
    busy = {task.shard for _, task in world.manager.task_reports() if task.state == "stopping"}
    assert busy and all(
        row.container == "c1" and row.state is ShardState.DROPPING for row in rows if row.shard in busy
    )
    slow.runner.immortal.clear()
    world.run(10_000)
    assert set(world.owners().values()) == {"c2"} and world.tasks_alive() == TASKS


def test_a_drained_container_ends_empty_and_comes_back_when_uncordoned():
    world = a_world()
    world.manager.drain("c1", world.now_ms)
    world.run(15_000)
    assert set(world.owners().values()) == {"c2"}
    world.manager.uncordon("c1", world.now_ms)
    world.run(15_000)
    assert sorted(world.owners().values()) == ["c1", "c1", "c2", "c2"]
    with pytest.raises(NotFound):
        world.manager.drain("c9", world.now_ms)


def test_an_unacknowledged_add_takes_back_that_shard_and_the_container_lives_on():
    world = World(add_timeout_ms=3_000, balance_ms=10**9, balance_soon_ms=10**9)
    world.start("c1")
    world.run(3_000)
    world.start("c2")
    world.run(2_000)
    world.containers["c1"].reports_held_back = True
    world.take_over()  # forgets what was acknowledged
    world.run(2_000)
    assert set(world.owners().values()) == {"c1"}
    world.run(6_000)
    assert {row.state for row in world.store.shards()} == {ShardState.DROPPING}
    world.containers["c1"].reports_held_back = False
    world.run(3_000)
    assert set(world.owners().values()) == {"c2"} and world.failed_over == []


def test_a_drop_that_never_ends_costs_the_container_its_lease():
    world = a_world(drop_timeout_ms=5_000)
    world.containers["c1"].runner.immortal |= set(TASKS)
    world.manager.drain("c1", world.now_ms)
    # c1 beats all the time; it is failed over only through withheld acknowledgements. Its immortal tasks are
    # then killed with their container, as the warden would.
    while world.store.containers()[0].state is ContainerState.LIVE:
        world.step()
    reply = world.beat("c1")
    assert reply is not None and reply.verdict is HeartbeatVerdict.WITHHELD
    world.run(7_500)
    world.kill("c1")
    world.run(10_000)
    assert world.failed_over == ["c1"] and world.tasks_alive() == TASKS


def test_late_and_doubled_beats_change_no_owner():
    world = a_world()
    container = world.containers["c1"]
    old = [world.beat_of(container) for _ in range(3)]
    world.manager.drain("c1", world.now_ms)
    world.run(15_000)
    before = world.store.shards()
    for beat in (*old, *reversed(old)):
        world.manager.on_heartbeat(beat, world.now_ms)
    assert world.store.shards() == before


# -- failover -----------------------------------------------------------------------------------------------


def test_a_dead_container_is_failed_over_and_its_tasks_run_elsewhere():
    world = a_world()
    world.kill("c1")
    world.run(11_000)
    assert world.failed_over == []
    world.run(3_000)
    assert world.failed_over == ["c1"] and world.alive()["c2"] == tuple(TASKS)


def test_an_exit_that_was_seen_is_failed_over_at_once():
    world = a_world()
    world.kill("c1", seen=True)
    world.run(1_500)
    assert world.alive()["c2"] == tuple(TASKS)
    assert not world.manager.on_container_dead("c1", "c1-1", world.now_ms)


def test_a_failed_over_container_returns_new_and_empty_and_is_filled_in_steps():
    world = a_world(moves_max=1)
    world.kill("c1", seen=True)
    world.run(5_000)
    world.start("c1")
    world.run(1_500)
    assert world.alive()["c1"] == ()
    world.run(15_000)
    assert sorted(world.owners().values()) == ["c1", "c1", "c2", "c2"] and world.tasks_alive() == TASKS


def test_a_container_that_returns_in_time_keeps_its_shards_under_new_epochs():
    world = a_world()
    before = {row.shard: row.epoch for row in world.store.shards() if row.container == "c1"}
    world.kill("c1")
    world.run(5_000)
    world.start("c1")
    after = {row.shard: row.epoch for row in world.store.shards() if row.container == "c1"}
    assert set(after) == set(before) and all(after[shard] > before[shard] for shard in before)
    assert world.alive()["c1"] == ()  # nothing before the first acknowledgement
    world.run(3_000)
    assert len(world.alive()["c1"]) == 2 and world.failed_over == []


def test_a_partitioned_container_stops_itself_before_its_shards_move():
    """`World.check` sees to it that no task ever runs twice."""
    world = a_world()
    world.containers["c1"].is_connected = False
    world.run(8_500)
    assert world.alive()["c1"] == () and world.failed_over == []
    world.run(5_000)
    assert world.failed_over == ["c1"] and world.alive()["c2"] == tuple(TASKS)
    world.containers["c1"].is_connected = True
    world.run(20_000)
    assert world.tasks_alive() == TASKS and len(world.alive()["c1"]) == 2


def test_a_container_that_renews_its_row_is_not_failed_over():
    world = a_world()
    world.containers["c1"].is_connected = False
    for _ in range(15):
        assert world.store.renew("c1", "c1-1") is not None
        world.containers["c1"].lease.on_renewed(world.now_ms, world.now_ms)
        world.run(3_000)
    assert world.failed_over == [] and world.tasks_alive() == TASKS


def test_a_shard_manager_that_takes_over_grants_a_full_interval():
    world = a_world()
    world.kill("c1")
    world.run(10_000)
    world.take_over()
    world.run(11_500)
    assert world.failed_over == []
    world.run(1_500)
    assert world.failed_over == ["c1"]


def test_a_paused_shard_manager_fails_nobody_over_when_it_wakes():
    world = a_world()
    world.is_manager_up = False
    world.run(6_000)  # within every lease
    world.is_manager_up = True
    world.run(60_000)
    assert world.failed_over == []
    assert [container.lives for container in world.containers.values()] == [1, 1]


def test_after_a_long_pause_containers_that_rebooted_keep_their_shards():
    world = a_world()
    world.is_manager_up = False
    world.run(60_000)
    assert world.tasks_alive() == []  # neither Shard Manager nor store: stopped at the deadline
    world.is_manager_up = True
    world.run(5_000)
    assert world.failed_over == [] and world.tasks_alive() == TASKS
    assert sorted(world.owners().values()) == ["c1", "c1", "c2", "c2"]


def test_when_most_containers_vanish_at_once_it_holds_and_alerts():
    world = a_world("c1", "c2", "c3", "c4", "c5")
    for name in ("c1", "c2", "c3"):
        world.containers[name].is_connected = False
    world.run(16_000)
    assert world.failed_over == [] and world.alerts == ["brake"]
    for name in ("c1", "c2", "c3"):
        world.containers[name].is_connected = True
    world.run(20_000)
    assert world.failed_over == [] and world.tasks_alive() == TASKS


def test_the_canary_goes_through_the_queue_of_all_beats():
    lost: list[Heartbeat] = []
    world = a_world()
    world.manager = ShardManager(
        world.store,
        profile=FAST,
        term=take_term(world.database, "shard_manager", "test"),
        shard_count=4,
        list_version=world.service.version,
        reserved_loads=dict,
        settings=world.pace,
        send_canary=lost.append,
    )
    world.kill("c1")
    world.run(30_000)
    assert world.failed_over == [] and world.alerts == ["canary_late"]
    assert lost[0].container == CANARY
    world.manager.on_heartbeat(lost[-1], world.now_ms)
    for _ in range(30):
        world.step()
        world.manager.on_heartbeat(lost[-1], world.now_ms)
    assert world.failed_over == ["c1"]


def test_a_beat_that_waits_for_the_round_to_end_has_arrived():
    """The same round, with and without a beat in the queue at the moment the container is due."""
    for has_beat in (True, False):
        world = a_world()
        world.containers["c1"].is_connected = False
        world.run(11_500)
        world.now_ms += 500
        if has_beat:
            world.manager._inbox.append((world.beat_of(world.containers["c1"]), world.now_ms))
        assert world.manager.tick(world.now_ms).failed_over == ([] if has_beat else ["c1"])


def test_a_death_whose_record_seemed_to_fail_is_noticed_in_the_next_round():
    world = a_world()

    def fault(point: str) -> None:
        if point == "committed":
            raise OutcomeUnknown("the answer was lost")

    world.database._fault = fault
    with pytest.raises(OutcomeUnknown):
        world.kill("c1", seen=True)
    world.database._fault = lambda point: None
    world.step()
    assert world.failed_over == ["c1"]


def test_a_second_container_of_a_live_name_is_refused():
    world = a_world()
    with pytest.raises(Refused):
        world.manager.register("c1", "other-1", folder_id="elsewhere", now_ms=world.now_ms)
    world.run(5_000)
    assert world.tasks_alive() == TASKS


# -- stopped, for certain -------------------------------------------------------------------------------------


def is_stopped(world: World, version: int) -> bool:
    return world.manager.is_stopped("a", generation=1, list_version=version)


def test_the_shard_manager_is_what_the_syncer_needs():
    actuator: TaskActuator = World().manager
    assert actuator.is_stopped("a", generation=1, list_version=1)  # no container, no task


def test_a_held_job_is_stopped_once_every_container_reaped_it():
    world = a_world()
    world.containers["c2"].runner.hanging |= set(TASKS)
    version = world.jobs.put("a", mapping=(0, 1, 2, 3), hold_generation=1)
    assert not is_stopped(world, version)
    while not is_stopped(world, version):
        assert world.now_ms < 30_000
        world.step()
        if is_stopped(world, version):
            assert world.tasks_alive() == []
    assert world.failed_over == []


def test_an_unheard_container_proves_nothing_until_its_lease_is_over():
    world = a_world()
    world.containers["c1"].is_connected = False
    version = world.jobs.put("a", mapping=(0, 1, 2, 3), hold_generation=1)
    while world.failed_over == []:
        assert not is_stopped(world, version)
        world.step()
    world.run(1_000)
    assert is_stopped(world, version)


def test_an_exit_that_was_seen_is_proof():
    world = a_world()
    world.containers["c1"].is_connected = False
    version = world.jobs.put("a", mapping=(0, 1, 2, 3), hold_generation=1)
    world.run(3_000)
    assert not is_stopped(world, version)
    world.kill("c1", seen=True)
    assert is_stopped(world, version)


def test_a_container_that_just_registered_must_prove_it_too():
    world = a_world()
    version = world.jobs.put("a", mapping=(0, 1, 2, 3), hold_generation=1)
    world.run(4_000)
    assert is_stopped(world, version)
    world.start("c3")
    assert not is_stopped(world, version)
    world.run(2_500)
    assert is_stopped(world, version)


def test_a_report_of_an_old_generation_is_proof_of_the_contrary():
    world = a_world()
    assert not world.manager.is_stopped("a", generation=1, list_version=0)
    assert world.manager.is_stopped("a", generation=0, list_version=0)
    assert world.manager.is_stopped("b", generation=9, list_version=0)


# -- stores that fail, and everything at once -----------------------------------------------------------------


def test_a_write_that_happened_but_seemed_to_fail_is_noticed():
    """Every third commit of the Shard Manager reports an unknown outcome; the world must still converge."""
    world = World()
    commits = [0]

    def fault(point: str) -> None:
        if point == "committed":
            commits[0] += 1
            if commits[0] % 3 == 0:
                raise OutcomeUnknown("the answer was lost")

    world.jobs.put("a", mapping=(0, 1, 2, 3))
    world.start("c1", "c2")
    world.run(10_000)
    world.database._fault = fault
    end_ms = world.now_ms + 30_000
    world.kill("c1")
    while world.now_ms < end_ms:
        try:
            world.step()
        except OutcomeUnknown:
            continue
    world.database._fault = lambda point: None
    world.run(20_000)
    assert world.alive()["c2"] == tuple(TASKS)


FAULTS = ("cut", "mend", "kill", "kill seen", "start", "take over", "down", "up", "job", "hang", "cordon")


def inject(world: World, fault: str, name: str, number: int) -> None:
    container = world.containers[name]
    match fault:
        case "cut" | "mend":
            container.is_connected = fault == "mend"
        case "kill" | "kill seen" if container.is_alive:
            world.kill(name, seen=fault == "kill seen" and world.is_manager_up)
        case "start" if not container.is_alive and world.is_manager_up:
            world.start(name)
        case "take over":
            world.take_over()
        case "down" | "up":
            world.is_manager_up = fault == "up"
        case "job":
            world.jobs.put("a", mapping=(0, 1, 2, 3), generation=number)
        case "hang":
            container.runner.hanging |= set(TASKS)
        case "cordon" if world.is_manager_up:
            order = (world.manager.drain, world.manager.cordon, world.manager.uncordon)[number % 3]
            order(name, world.now_ms)


def test_whatever_happens_no_task_runs_twice_and_in_the_end_each_runs_once(seed):
    """Safety is checked after every step of a dozen faults; liveness after a calm minute."""
    rng, world = Random(seed), World()
    world.jobs.put("a", mapping=(0, 1, 2, 3))
    world.start("c1", "c2", "c3")
    for number in range(2, 14):
        inject(world, rng.choice(FAULTS), rng.choice(("c1", "c2", "c3")), number)
        for _ in range(rng.randrange(1, 30)):
            world.step()
    world.is_manager_up = True
    for name, container in world.containers.items():
        container.is_connected = True
        if not container.is_alive:
            world.start(name)
        world.manager.uncordon(name, world.now_ms)
    world.run(60_000)
    assert world.tasks_alive() == TASKS
    assert all(row.state is ShardState.OWNED for row in world.store.shards())
    loads = sorted(len(tasks) for tasks in world.alive().values())
    assert loads[-1] - loads[0] <= 1
