"""Claims about restarting one task: told until it is obeyed, obeyed once, whoever else lives beside it."""

from __future__ import annotations

import pytest

from penstock.core.errors import Refused
from penstock.fleet.messages import Heartbeat, HeartbeatReply, RestartOrder
from penstock.fleet.orders import RestartOrders
from tests.fleet.harness import World, a_reply, owned
from tests.fleet.test_shard_manager import a_world
from tests.fleet.test_task_manager import running


def starts(world: World) -> dict[str, int]:
    found: dict[str, int] = {}
    for container in world.containers.values():
        for line in container.runner.log:
            if line.startswith("start "):
                found[line[6:]] = found.get(line[6:], 0) + 1
    return found


def test_one_task_is_ended_and_started_again_and_no_other():
    world = a_world()
    before = starts(world)
    where = world.manager.restart("a/1", world.now_ms, reason="it hangs", actor="olga")
    assert "a/1" in world.alive()[where]
    world.run(10_000)
    after = starts(world)
    assert after.pop("a/1") == before.pop("a/1") + 1
    assert after == before and "a/1" in world.alive()[where]
    entry = world.journal.entries("a/1")[-1]
    assert (entry.actor, entry.decision, entry.reason) == ("olga", f"restart on {where}", "it hangs")


def test_asking_twice_before_it_is_done_is_asking_once():
    world = a_world()
    before = starts(world)["a/1"]
    for _ in range(2):
        world.manager.restart("a/1", world.now_ms, reason="it hangs")
    world.run(10_000)
    assert starts(world)["a/1"] == before + 1
    world.manager.restart("a/1", world.now_ms, reason="again")
    world.run(10_000)
    assert starts(world)["a/1"] == before + 2


def test_a_new_shard_managers_orders_are_obeyed_too():
    world = a_world()
    before = starts(world)["a/1"]
    world.manager.restart("a/1", world.now_ms, reason="one")
    world.run(3_000)
    world.take_over()
    world.run(3_000)
    world.manager.restart("a/1", world.now_ms, reason="two")
    world.run(3_000)
    assert starts(world)["a/1"] == before + 2


def test_a_task_that_no_container_has_is_refused():
    with pytest.raises(Refused, match="no container runs a/9"):
        a_world().manager.restart("a/9", 0, reason="x")


def test_an_order_ends_the_backoff_of_a_task_that_gave_up():
    engine = running()
    engine.runner.crash("a/0", "boom")
    engine.at(100)
    assert engine.state_of("a/0") == "backoff"
    order = RestartOrder(task_id="a/0", number=1)
    engine.gets(a_reply(10, owned(0, 10), list_version=1, restarts=(order,)))
    assert engine.alive() == ("a/0",)
    assert engine.manager.report().order == 1


def test_a_late_reply_restarts_nothing_again():
    engine = running()
    reply = a_reply(10, owned(0, 10), list_version=1, restarts=(RestartOrder(task_id="a/0", number=5),))
    engine.gets(reply).at(1_000).at(2_000)
    started = engine.runner.log.count("start a/0")
    engine.gets(reply).at(3_000).at(4_000)
    assert engine.runner.log.count("start a/0") == started == 2


def test_an_order_for_another_life_is_dropped():
    orders = RestartOrders(term=3)
    orders.add("a/0", "c1", "i1")
    assert orders.on_heartbeat(Heartbeat(container="c2", incarnation="x", sequence=1)) == ()
    assert len(orders.on_heartbeat(Heartbeat(container="c1", incarnation="i1", sequence=1))) == 1
    assert orders.on_heartbeat(Heartbeat(container="c1", incarnation="i2", sequence=1)) == ()
    assert orders.on_heartbeat(Heartbeat(container="c1", incarnation="i1", sequence=2)) == ()


def test_orders_survive_the_wire():
    reply = a_reply(1, restarts=(RestartOrder(task_id="a/0", number=(7 << 32) + 1),))
    assert HeartbeatReply.from_json(reply.to_json()) == reply
