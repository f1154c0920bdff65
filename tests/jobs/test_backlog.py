"""Claims about what happens to records in a category that a release leaves: the old code reads them, or a plan waits."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import NotYet, StoreUnavailable
from penstock.jobs.config import JobConfig
from penstock.jobs.syncer.sync_plan import CategoryEnd, PlanStep, category_end, dropped_inputs
from tests.builders import a_body, a_job, an_output
from tests.jobs.world import Fail, World

READER, WRITER = "demo.total", "demo.by_shop"
OLD = {"category": "demo.by_shop.1", "writer": WRITER}
NEW = {"category": "demo.by_shop.2", "writer": WRITER}


def a_config(*inputs: dict[str, Any], **changes: Any) -> JobConfig:
    return JobConfig.from_stored(a_body(READER, **{"kind": "stateful", "inputs": list(inputs), **changes}))


def test_only_inputs_that_another_job_made_and_that_are_gone_are_read_to_their_end():
    outside = {"category": "sales"}
    assert [*dropped_inputs(a_config(OLD, outside), a_config(NEW))] == [("demo.by_shop.1", WRITER)]
    assert [*dropped_inputs(a_config(OLD), a_config(OLD, NEW))] == []


@pytest.mark.parametrize(
    "target",
    [
        None,
        a_config(NEW, state="stopped"),
        a_config(NEW, state="paused"),
        a_config(NEW, backlog="leave"),
        a_config(NEW, lineage=1),
        a_config(NEW, kind="stateless"),
    ],
    ids=["removed", "stopped", "paused", "given up", "reset", "another kind"],
)
def test_nothing_is_waited_for_where_the_backlog_is_given_up(target: JobConfig | None):
    assert [*dropped_inputs(a_config(OLD), target)] == []


def test_a_category_ends_with_those_who_write_it():
    outputs = [an_output(category="demo.by_shop.1")]
    writes = a_config(outputs=outputs)
    assert category_end(writes, "demo.by_shop.1") is CategoryEnd.NEVER
    assert category_end(a_config(outputs=outputs, state="paused"), "demo.by_shop.1") is CategoryEnd.NEVER
    assert category_end(a_config(outputs=outputs, state="stopped"), "demo.by_shop.1") is CategoryEnd.STOPPED
    assert category_end(writes, "demo.by_shop.0") is CategoryEnd.RETIRED
    assert category_end(None, "demo.by_shop.1") is CategoryEnd.RETIRED


@pytest.fixture
def world() -> World:
    """A writer and its reader; the old category is not read to its end."""
    world = World()
    a_job(world.service, WRITER, outputs=[an_output(category="demo.by_shop.1", internal=True)])
    a_job(world.service, READER, inputs=[OLD])
    world.settle()
    world.data.unread_of[READER, "demo.by_shop.1"] = "2 of its 8 partitions are not read to their end yet"
    return world


def release(world: World) -> None:
    world.write("provisioner", WRITER, outputs=[an_output(category="demo.by_shop.2", internal=True)])
    world.write("provisioner", READER, inputs=[NEW])


def category_read(world: World) -> str:
    row = world.store.running.row(READER)
    assert row is not None and row.is_served, "its tasks run at all times"
    return str(row.config.inputs[0].category)


def test_the_old_tasks_go_on_until_they_are_at_the_end(world: World):
    release(world)
    for _ in range(20):
        report = world.round()
        assert READER in report.open and category_read(world) == "demo.by_shop.1"
    (record,) = world.store.load([READER]).values()
    assert record.plan is not None and record.plan.step is PlanStep.PREPARE
    assert (record.plan.attempts, record.quarantine) == (0, None), "waiting is no failure"
    assert "waits until 'demo.by_shop.1' is read to its end" in record.plan.error
    assert world.store.running.row(WRITER).config.outputs[0].category == "demo.by_shop.2"
    world.data.unread_of.clear()
    world.settle()
    assert category_read(world) == "demo.by_shop.2"


def test_waiting_is_told_once_not_every_round(world: World):
    release(world)
    for _ in range(10):
        world.round()
    told = [row for row in world.store.audit() if row.subject == READER and row.action == "plan.failed"]
    assert len(told) == 1


def test_oncall_gives_the_backlog_up(world: World):
    release(world)
    world.round()
    assert category_read(world) == "demo.by_shop.1"
    world.write("oncall", READER, backlog="leave")
    world.settle()
    assert category_read(world) == "demo.by_shop.2"


def test_a_reader_that_turns_away_from_a_writer_that_goes_on_does_not_wait(world: World):
    world.write("provisioner", READER, inputs=[{"category": "sales"}])
    world.settle()
    assert category_read(world) == "sales"
    assert ("unread", READER) not in world.data.calls


def test_a_writer_that_is_to_stop_is_waited_for_before_anything_is_asked(world: World):
    world.tasks.stuck.add(WRITER)
    world.write("provisioner", WRITER, state="stopped")
    world.write("provisioner", READER, inputs=[{"category": "sales"}])
    world.round()
    assert ("unread", READER) not in world.data.calls and category_read(world) == "demo.by_shop.1"
    world.tasks.stuck.clear()
    world.data.unread_of.clear()
    world.settle()
    assert category_read(world) == "sales" and ("unread", READER) in world.data.calls


def test_a_bus_that_cannot_say_holds_the_plan_and_nothing_else(world: World):
    world.data.trouble["unread", READER] = Fail(StoreUnavailable("the bus is away"))
    release(world)
    for _ in range(5):
        world.round()
    assert category_read(world) == "demo.by_shop.1"
    world.data.trouble.clear()
    world.data.unread_of.clear()
    world.settle()
    assert category_read(world) == "demo.by_shop.2"


def test_what_is_promised_and_not_sent_keeps_producers_and_no_later_plan(world: World):
    """The rows of a writer that ended in between still hold something for the old category: its next tasks
    send it. Until then it is registered there; another release does not wait for that.
    """
    world.data.unread_of.clear()
    world.data.trouble["retire", WRITER] = Fail(NotYet("it has yet to send"))
    release(world)
    world.round()
    world.round()
    assert any(category == "demo.by_shop.1" for category, _ in world.data.registered)
    world.write("provisioner", WRITER, outputs=[an_output(category="demo.by_shop.3", internal=True)])
    for _ in range(4):
        world.round()
    assert world.store.running.row(WRITER).config.outputs[0].category == "demo.by_shop.3"
    world.data.trouble.clear()
    world.settle()
    assert {category for category, _ in world.data.registered} == {"demo.by_shop.3", "counts"}
    (record,) = world.store.load([WRITER]).values()
    assert record.retirements == ()
