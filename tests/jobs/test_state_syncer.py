from __future__ import annotations

import pytest
import sqlalchemy as sa

from penstock.core.errors import (
    CorruptData,
    DiskFull,
    Fenced,
    PenstockError,
    StoreUnavailable,
    TaskActionFailed,
)
from penstock.db.database import take_term
from penstock.db.journal_store import JournalStore
from penstock.jobs import layer_store
from penstock.jobs.layers import LayerRow
from penstock.jobs.running_store import RUNNING, RunningRow
from penstock.jobs.syncer.sync_plan import PlanStep
from penstock.jobs.tasks import has_tasks
from tests.builders import DEVELOPER, a_job, an_output
from tests.jobs.world import World, producers_of


@pytest.fixture
def world() -> World:
    world = World()
    a_job(world.service)
    world.settle()
    return world


def running(world: World, job: str = "demo.count") -> RunningRow:
    row = world.store.running.row(job)
    assert row is not None
    return row


def test_a_new_job_runs_after_one_round_as_generation_one() -> None:
    world = World()
    job = a_job(world.service, task_count=2)
    assert world.round().complex == (job,)
    row = running(world)
    assert (row.generation, row.mapping, row.is_served) == (1, (0, 0, 0, 0, 1, 1, 1, 1), True)
    assert world.data.registered == producers_of(row.birth, row.config)
    assert world.tasks.looks == {}


def test_expected_is_running_within_two_rounds_and_then_there_is_silence(world: World) -> None:
    """I12, for several jobs and a change of each sort."""
    for number in range(5):
        a_job(world.service, f"demo.j{number}")
    world.write("provisioner", arguments={"a": "1"})
    world.write("oncall", job="demo.j0", state="stopped")
    world.round()
    world.round()
    assert all(view.is_in_sync for view in world.service.views())
    before, calls = world.outcome(), len(world.data.calls)
    for _ in range(30):
        assert world.round().is_idle
    assert world.outcome() == before and len(world.data.calls) == calls


def test_a_simple_change_keeps_generation_and_mapping_and_restarts_in_place(world: World) -> None:
    before = running(world)
    world.write("provisioner", **{"package.version": "2"})
    assert world.round().simple == ("demo.count",)
    after = running(world)
    assert (after.generation, after.mapping, after.hold_generation) == (before.generation, before.mapping, 0)
    assert after.version == after.restart_version > before.version
    assert after.config.package.version == "2"


def test_a_live_change_moves_the_list_but_restarts_nothing(world: World) -> None:
    before = running(world)
    world.write("provisioner", **{"slo.lag_s": 5})
    world.round()
    after = running(world)
    assert after.version > before.version and after.restart_version == before.restart_version


def test_a_write_that_changes_nothing_is_noted_without_a_new_list(world: World) -> None:
    before = running(world)
    version = world.write("provisioner", task_count=1)
    world.round()
    after = running(world)
    assert (after.version, after.expected_version) == (before.version, version)


def test_a_rescale_holds_confirms_and_commits_under_the_next_generation(world: World) -> None:
    before = running(world)
    world.write("provisioner", task_count=4)
    assert world.round().open == ("demo.count",)
    held = running(world)
    assert not held.is_served and held.hold_generation == before.generation
    assert held.version > before.version and held.config == before.config
    assert list(world.tasks.looks) == [("demo.count", before.generation, held.version)]
    assert world.round().complex == ("demo.count",)
    after = running(world)
    assert (after.generation, after.hold_generation, after.is_served) == (before.generation + 1, 0, True)
    assert after.mapping == (0, 0, 1, 1, 2, 2, 3, 3) and after.config.task_count == 4
    assert world.data.fenced == {}


def test_a_job_with_an_open_plan_gets_no_simple_sync_and_newer_versions_wait(world: World) -> None:
    world.tasks.stuck.add("demo.count")
    world.write("provisioner", task_count=4)
    world.round()
    world.write("provisioner", threads=3, task_count=2)
    world.round()
    assert running(world).config.threads == 1
    world.tasks.stuck.clear()
    world.round()
    first = running(world)
    assert (first.config.task_count, first.config.threads, first.generation) == (4, 1, 2)
    world.settle()
    last = running(world)
    assert (last.config.task_count, last.config.threads, last.generation) == (2, 3, 3)


def test_tasks_that_do_not_report_are_fenced_after_the_deadline_never_before(world: World) -> None:
    world.tasks.stuck.add("demo.count")
    world.write("provisioner", task_count=2)
    world.round()
    held_ms = world.now_ms
    world.syncer.sync_once(held_ms + 9_999)
    assert world.data.fenced == {} and not running(world).is_served
    world.syncer.sync_once(held_ms + 10_000)
    assert world.data.fenced == {"demo.count": 2} and running(world).generation == 2


def test_a_task_layer_that_cannot_answer_proves_nothing_and_the_fence_is_the_way_out(world: World) -> None:
    def away(job: str, *, generation: int, list_version: int) -> bool:
        raise TaskActionFailed("no answer")

    world.tasks.is_stopped = away  # type: ignore[method-assign]
    world.write("provisioner", task_count=2)
    assert world.round().failed[0][0] == "demo.count"
    assert not running(world).is_served
    world.settle()
    assert world.data.fenced == {"demo.count": 2} and running(world).is_served


def test_a_stop_leaves_zero_tasks_and_a_start_brings_them_back(world: World) -> None:
    before = running(world)
    world.write("oncall", state="stopped")
    world.settle()
    stopped = running(world)
    assert (stopped.state, stopped.is_served, stopped.mapping) == ("stopped", False, before.mapping)
    assert [call for call, _ in world.data.calls].count("prepare") == 1
    world.write("oncall", state=None)
    world.settle()
    assert running(world).is_served and running(world).generation > stopped.generation


def test_changed_outputs_are_prepared_before_the_hold_and_retired_after_the_commit(world: World) -> None:
    old = producers_of(running(world).birth, running(world).config)
    world.write("provisioner", outputs=[an_output(category="other")])
    world.round()
    assert world.data.registered > old
    world.settle()
    row = running(world)
    assert world.data.registered == producers_of(row.birth, row.config)


def refuse_prepare(world: World, job: str, error: PenstockError) -> None:
    world.data.refuse = lambda call, name, config: error if (call, name) == ("prepare", job) else None


def test_a_plan_given_up_before_the_hold_leaves_the_old_tasks_alone(world: World) -> None:
    before = running(world)
    refuse_prepare(world, "demo.count", CorruptData("broken category"))
    world.write("provisioner", outputs=[an_output(category="other")])
    reports = [world.round() for _ in range(3)]
    assert [report.quarantined for report in reports] == [(), (), ("demo.count",)]
    assert running(world) == before
    view = world.service.view("demo.count")
    assert view.quarantine is not None and "broken category" in view.quarantine.reason and view.plan is None
    alert = JournalStore(world.database).entries("demo.count")[-1]
    assert (alert.kind, alert.decision) == ("alert", "job.quarantined")
    world.settle()
    assert world.data.registered == producers_of(before.birth, before.config)


def test_a_plan_given_up_after_the_hold_runs_the_old_config_under_a_further_generation(world: World) -> None:
    before = running(world)
    world.tasks.stuck.add("demo.count")
    world.data.refuse = lambda call, job, config: CorruptData("no") if call == "fence" else None
    world.write("provisioner", outputs=[an_output(category="other")])
    world.settle()
    after = running(world)
    assert after.config == before.config and after.mapping == before.mapping and after.is_served
    assert after.generation == before.generation + 2  # the number in between belonged to the plan
    assert world.service.view("demo.count").quarantine is not None
    assert world.data.registered == producers_of(before.birth, before.config)


def test_a_first_start_given_up_leaves_nothing_running() -> None:
    world = World()
    job = a_job(world.service)
    refuse_prepare(world, job, CorruptData("no"))
    world.settle()
    assert world.store.running.row(job) is None and world.data.registered == set()
    assert world.round().quarantined == (job,)


def test_a_new_version_lifts_the_quarantine(world: World) -> None:
    refuse_prepare(world, "demo.count", CorruptData("no"))
    world.write("provisioner", task_count=2)
    world.settle()
    world.data.refuse = lambda call, job, config: None
    assert world.round().quarantined == ("demo.count",) and running(world).config.task_count == 1
    world.write("oncall", task_count=3)
    world.settle()
    assert running(world).config.task_count == 3
    assert world.service.view("demo.count").quarantine is None


@pytest.mark.parametrize("error", [StoreUnavailable("away"), DiskFull("full")])
def test_trouble_of_the_environment_is_tried_again_for_as_long_as_it_takes(
    world: World, error: PenstockError
) -> None:
    refuse_prepare(world, "demo.count", error)
    world.write("provisioner", task_count=2)
    audit = len(world.store.audit())
    for _ in range(10):
        assert world.round().open == ("demo.count",)
    assert len(world.store.audit()) == audit + 2  # opened, and the trouble once
    world.data.refuse = lambda call, job, config: None
    world.settle()
    assert running(world).config.task_count == 2


def test_a_stop_is_never_given_up(world: World) -> None:
    world.tasks.stuck.add("demo.count")
    world.data.refuse = lambda call, job, config: CorruptData("no") if call == "fence" else None
    world.write("oncall", state="stopped")
    for _ in range(10):
        world.round()
        assert not running(world).is_served
    world.tasks.stuck.clear()
    world.settle()
    assert running(world).state == "stopped"


def test_a_poison_job_delays_no_other(world: World) -> None:
    """I13: one job fails at every call, one has a config that no longer validates; the others go on as if alone."""
    names = [a_job(world.service, f"demo.j{number}") for number in range(4)]
    bad = a_job(world.service, "demo.a_bad")
    invalid = a_job(world.service, "demo.a_invalid")
    with world.store.transaction() as connection:
        row = LayerRow(layer="base", precedence=0, body={"nonsense": 1}, version=1)
        layer_store.put_layer(connection, invalid, row, birth="b")
    refuse_prepare(world, bad, CorruptData("poison"))
    world.write("provisioner", threads=2)
    report = world.round()
    assert set(report.complex) == set(names) and report.simple == ("demo.count",)
    assert {job for job, _ in report.failed} == {bad, invalid}


def test_an_oncall_change_replaces_a_held_plan_and_the_hold_stays(world: World) -> None:
    world.tasks.stuck.add("demo.count")
    world.write("provisioner", outputs=[an_output(category="other")])
    world.round()
    hold = running(world)
    world.write("oncall", task_count=5)
    world.round()
    plan = world.service.view("demo.count").plan
    assert plan is not None and plan.target is not None
    assert (plan.generation, plan.target.task_count) == (3, 5)
    # Time counts from the first hold: after its deadline the replaced plan fences under its own generation.
    assert running(world).hold_generation == hold.hold_generation and running(world).version == hold.version
    world.settle()
    row = running(world)
    assert (row.generation, row.config.task_count, world.data.fenced) == (3, 5, {"demo.count": 3})
    assert world.data.registered == producers_of(row.birth, row.config)


def test_a_stop_replaces_an_open_plan_and_what_it_prepared_is_retired(world: World) -> None:
    world.tasks.stuck.add("demo.count")
    world.write("provisioner", outputs=[an_output(category="other")])
    world.round()
    world.write("provisioner", state="stopped", outputs=[an_output()])
    world.tasks.stuck.clear()
    world.settle()
    row = running(world)
    assert row.state == "stopped" and world.data.registered == producers_of(row.birth, row.config)


def test_taking_back_an_oncall_change_drops_a_plan_that_holds_nothing_yet(world: World) -> None:
    before = running(world)
    refuse_prepare(world, "demo.count", StoreUnavailable("away"))
    world.write("oncall", task_count=3)
    world.round()
    world.write("oncall", task_count=None)
    world.round()
    world.settle()
    after = running(world)
    assert (after.generation, after.version) == (before.generation, before.version)
    assert world.service.view("demo.count").is_in_sync


def test_taking_back_an_oncall_change_under_a_hold_brings_the_old_config_back(world: World) -> None:
    before = running(world)
    world.tasks.stuck.add("demo.count")
    world.write("oncall", task_count=3)
    world.round()
    world.write("oncall", task_count=None)
    world.tasks.stuck.clear()
    world.settle()
    after = running(world)
    assert after.is_served and after.config == before.config and after.generation == 3


def test_nothing_is_prepared_while_something_is_still_to_be_retired(world: World) -> None:
    """A late retirement would unregister what the next plan registers."""
    first = [an_output()]
    world.data.refuse = lambda call, job, config: StoreUnavailable("away") if call == "retire" else None
    world.write("provisioner", outputs=[an_output(category="other")])
    world.round()
    world.round()
    world.write("provisioner", outputs=first)
    world.round()
    assert world.data.calls[-1][0] == "retire" and running(world).config.outputs[0].category == "other"
    world.data.refuse = lambda call, job, config: None
    world.settle()
    row = running(world)
    assert row.config.outputs[0].category == "counts"
    assert world.data.registered == producers_of(row.birth, row.config)


def test_a_removal_stops_retires_and_leaves_a_tombstone_in_the_list(world: World) -> None:
    since = world.store.running.snapshot().version
    world.service.remove("demo.count", actor=DEVELOPER, reason="gone", idempotency_key=None, now_ms=0)
    world.settle()
    snapshot = world.store.running.snapshot(since=since)
    assert [(row.job, row.state, has_tasks(row)) for row in snapshot.rows] == [
        ("demo.count", "removed", False)
    ]
    assert world.data.registered == set() and world.service.views().items == ()


def test_a_syncer_with_an_old_term_is_fenced_and_writes_nothing(world: World) -> None:
    world.write("provisioner", task_count=2)
    stale = world.syncer
    take_term(world.database, "syncer", "successor")
    before = world.outcome()
    with pytest.raises(Fenced):
        stale.sync_once(world.now_ms + 1)
    assert world.outcome() == before


def test_a_syncer_that_loses_its_term_in_the_middle_of_a_round_stops_there(world: World) -> None:
    """A successor takes over while the old syncer prepares: the old one's next write is refused."""
    world.write("provisioner", task_count=2)
    stale = world.syncer

    def take_over(call: str, job: str, config: object) -> None:
        if call == "prepare":
            world.restart()

    world.data.refuse = take_over
    with pytest.raises(Fenced):
        stale.sync_once(world.now_ms + 1)
    world.data.refuse = lambda call, job, config: None
    plan = world.service.view("demo.count").plan
    assert plan is not None and plan.step is PlanStep.PREPARE
    world.settle()
    assert running(world).config.task_count == 2


def test_a_plan_is_not_committed_over_a_running_row_that_moved(world: World) -> None:
    world.write("provisioner", task_count=2)
    world.round()
    with world.store.transaction() as connection:
        connection.execute(sa.update(RUNNING).values(version=99))
    moved = running(world)
    report = world.round()
    assert report.complex == () and "was changed by another writer" in report.failed[0][1]
    assert running(world) == moved and world.service.view("demo.count").plan is not None


def test_a_port_that_says_fenced_is_the_jobs_trouble_not_the_syncers(world: World) -> None:
    refuse_prepare(world, "demo.count", Fenced("a producer is ahead"))
    world.write("provisioner", task_count=2)
    assert world.round().failed[0][0] == "demo.count"


def test_readers_that_page_by_version_miss_nothing(world: World) -> None:
    seen: dict[str, int] = {}
    version = 0
    for number in range(6):
        a_job(world.service, f"demo.j{number}")
        world.write("provisioner", task_count=number % 3 + 1)
        world.round()
        snapshot = world.store.running.snapshot(since=version)
        assert all(row.version > version for row in snapshot.rows)
        seen |= {row.job: row.version for row in snapshot.rows}
        version = snapshot.version
    full = world.store.running.snapshot()
    assert seen == {row.job: row.version for row in full.rows} and full.version == version
