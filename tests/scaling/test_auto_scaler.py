"""Claims about the scaler's service, on memory, SQLite and PostgreSQL: what it writes, and what makes it hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from penstock.db.database import Database
from penstock.scaling.policies.policy import MoveTasks
from penstock.scaling.policies.policy_manager import POLICY_RECORDS
from penstock.scaling.policies.round import FleetState, OpenAction, PolicyRecord, RecordedChange
from penstock.scaling.scaler.apply import with_part
from penstock.scaling.scaler.observation import AvailableResources, ScalerMemory
from penstock.scaling.scaler.observe import ClusterCapacity
from tests.builders import ADMIN, ONCALL
from tests.ready import new_place
from tests.scaling.scaler_stage import Stage, Work

JOB = "demo.count"


# The scaler's decisions are made of what it reads, whoever keeps that: one store shows them. What it writes is shown on all.
on_every_store = pytest.mark.parametrize("stage", ["memory", "sqlite", "postgres"], indirect=True)


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    database = Database(new_place(getattr(request, "param", "memory"), request, tmp_path))
    yield Stage(database)
    database.close()


def steps(**rates: float) -> Any:
    """An input by the second from which it holds: `at0=100, at60=500`."""
    ordered = sorted((int(name[2:]), rate) for name, rate in rates.items())
    return lambda s: [rate for begin, rate in ordered if begin <= s][-1]


def set_oncall(stage: Stage, **changes: Any) -> None:
    stage.service.patch_layer(
        JOB, "oncall", changes, actor=ONCALL, reason="a person", idempotency_key=None, now_ms=stage.now_ms
    )
    stage.works[JOB].is_patched = True


@on_every_store
def test_a_backlog_gets_more_tasks_within_seconds(stage: Stage):
    """Plan: input of four threads hits one. From the moment the SLO is broken it takes about ten seconds."""
    work = stage.add(Work(JOB, input_rate=steps(at0=50, at30=400)))
    stage.run(30)
    assert stage.done() == []
    broken = stage.run(60, until=lambda: max(work.lags) / work.thread_rate > 5)
    acted = stage.run(60, until=lambda: stage.done() == ["up"])
    assert broken < 10 and acted <= 10
    (entry,) = (entry for entry in stage.entries() if entry.decision == "up")
    assert "over the SLO of 5 s" in entry.reason and "1 -> 8 tasks" in entry.reason, entry.reason
    assert entry.data["inputs"]["P"] == pytest.approx(100) and entry.data["formula"]
    assert stage.service.view(JOB).config.task_count == 8
    stage.run(60)
    assert stage.done() == ["up"] and sum(work.lags) < 500


def test_less_is_given_only_after_it_was_enough_for_as_long_as_the_job_says(stage: Stage):
    work = stage.add(Work(JOB, input_rate=steps(at0=400, at60=90)), scaler={"quiet_s": 300})
    stage.run(60)
    assert stage.done() == ["up"]
    drained = stage.run(600, until=lambda: sum(work.lags) < 100)
    quiet = stage.run(1200, until=lambda: "down" in stage.done())
    assert quiet >= 300 and drained + quiet < 900
    assert stage.service.view(JOB).config.task_count == 2  # 90 / 0.7 and what piles up meanwhile
    stage.run(300)
    assert stage.done() == ["up", "down"]


def test_an_oncalls_limit_holds_and_is_named(stage: Stage):
    stage.add(Work(JOB, input_rate=lambda s: 400.0))
    set_oncall(stage, task_count_max=2)
    stage.run(300)
    assert stage.service.view(JOB).config.task_count == 2
    up = next(entry for entry in stage.entries() if entry.decision == "up")
    assert "oncall limit of 2 tasks" in up.reason
    assert "at its limit: oncall limit of 2 tasks" in stage.entries()[-1].reason
    assert stage.entries()[-1].data["bound"] == "oncall limit of 2 tasks"


def test_what_oncall_sets_is_theirs(stage: Stage):
    stage.add(Work(JOB, input_rate=lambda s: 400.0))
    set_oncall(stage, task_count=1)
    stage.run(300)
    assert stage.done() == [] and stage.service.view(JOB).config.task_count == 1
    assert "oncall layer sets task_count" in stage.entries()[-1].reason


def test_tasks_that_run_out_of_memory_get_more(stage: Stage):
    work = stage.add(Work(JOB), resources={"memory_mb": 512})
    stage.run(125)
    work.failing = "java.lang.OutOfMemoryError: heap"
    stage.run(240, until=lambda: stage.done() == ["up"])
    work.failing = ""
    assert stage.service.view(JOB).config.resources.memory_mb == 768
    assert stage.service.view(JOB).config.task_count == 1
    assert "ran out of memory" in stage.entries()[-1].reason


def test_tasks_that_fail_are_told_and_never_scaled(stage: Stage):
    """Plan: a sink that refuses. Records pile up, and more tasks would only fail more often."""
    work = stage.add(Work(JOB, input_rate=lambda s: 90.0))
    stage.run(125)
    work.failing = "SinkError: connection refused"
    stage.run(400)
    assert stage.done() == [] and stage.alarm_keys() == {"not_scaled"}
    (alarm,) = (alarm for alarm in stage.alarms.alarms(JOB) if alarm.is_firing)
    assert "connection refused" in alarm.text and "the job is not scaled" in alarm.text
    work.failing, work.failures = "", {}
    stage.run(900)
    assert stage.alarm_keys() == set()


def test_failures_that_come_and_go_do_not_make_it_look_like_a_need(stage: Stage):
    """Plan: a task that fails every 40 s and works in between, behind its SLO all the time."""
    work = stage.add(Work(JOB, input_rate=lambda s: 80.0))
    stage.run(65)
    for _ in range(10):
        work.failing = "SinkError: connection reset"
        stage.run(20)
        work.failing = ""
        stage.run(20)
    assert stage.done() == []
    assert "not_scaled" in stage.alarm_keys()


def test_a_hot_key_is_not_scaled(stage: Stage):
    """Plan: four tasks, one of which gets nearly everything. More tasks would not take any of it."""
    stage.add(Work(JOB, input_rate=lambda s: 130.0, hot_share=0.9), task_count=4)
    stage.run(420)
    assert stage.done() == []
    assert "skewed input" in stage.entries()[-1].reason
    assert "not_scaled" in stage.alarm_keys()


def test_what_did_not_help_is_taken_back_and_not_tried_again(stage: Stage):
    """Plan: the sink takes 90/s and 140 arrive. More is tried, undone, told; for hours it is not tried again."""
    stage.add(Work(JOB, input_rate=lambda s: 140.0, sink_rate_max=90.0))
    stage.run(1800)
    assert stage.done() == ["up", "undo"]
    assert stage.service.view(JOB).config.task_count == 1
    assert {"action_ineffective", "not_scaled"} <= stage.alarm_keys()
    assert "did not help" in stage.entries()[-1].reason


@on_every_store
def test_a_new_control_plane_knows_what_was_done_and_expected(stage: Stage):
    """Plan: after the step up another instance goes on: it judges the step, and takes it back."""
    stage.add(Work(JOB, input_rate=lambda s: 140.0, sink_rate_max=90.0))
    stage.run(120)
    assert stage.done() == ["up"]
    stage.scaler = stage.new_scaler()
    stage.run(900)
    assert stage.done() == ["up", "undo"]
    stage.scaler = stage.new_scaler()
    stage.run(600)
    assert stage.done() == ["up", "undo"] and "action_ineffective" in stage.alarm_keys()


@on_every_store
def test_of_two_instances_one_acts(stage: Stage):
    stage.add(Work(JOB, input_rate=lambda s: 140.0, sink_rate_max=90.0))
    other = stage.new_scaler()
    for _ in range(900):
        stage.run(1)
        other.tick(stage.now_ms)
    assert stage.done() == ["up", "undo"]
    written = [entry for entry in stage.journal.entries(JOB, limit=1000) if entry.kind == "layer"]
    assert len([entry for entry in written if entry.actor == "scaler"]) == 2


@on_every_store
def test_a_write_that_somebody_else_was_first_with_is_decided_again(stage: Stage):
    """Plan: a person writes between the look and the write of the scaler, once."""
    stage.add(Work(JOB, input_rate=lambda s: 400.0))
    jobs = stage.scaler._jobs
    plain = jobs.patch
    raced: list[int] = []

    def patch(job: str, changes: Any, *, expected_version: int, reason: str) -> None:
        if not raced:
            raced.append(expected_version)
            set_oncall(stage, priority=3)
        plain(job, changes, expected_version=expected_version, reason=reason)

    jobs.patch = patch  # type: ignore[method-assign]
    stage.run(60)
    assert raced and stage.done() == ["up"]
    record, _ = stage.records.load(JOB)
    assert record.scaler is not None and len(record.scaler.past) == 1


def test_without_metrics_nothing_is_done_and_that_is_told_once(stage: Stage):
    work = stage.add(Work(JOB, input_rate=lambda s: 400.0))
    work.is_silent = True
    stage.run(600)
    assert stage.done() == []
    reasons = [entry.reason for entry in stage.entries()]
    assert 1 <= len(reasons) <= 2, reasons
    assert stage.entries()[-1].data["bound"] == "metrics"


def test_reasons_are_told_when_they_change_and_not_each_minute(stage: Stage):
    stage.add(Work(JOB, input_rate=lambda s: 55.0 + 3 * (s // 7 % 2)))
    stage.run(1200)
    assert stage.done() == []
    assert 1 <= len(stage.entries()) <= 4, [entry.reason for entry in stage.entries()]
    assert {"inputs", "formula", "bound", "generation"} <= set(stage.entries()[-1].data)


@pytest.mark.parametrize("setting", ["enabled", "advice_only"])
def test_it_can_be_switched_off_or_only_advise(stage: Stage, setting: str):
    stage.add(Work(JOB, input_rate=lambda s: 400.0), scaler={setting: setting == "advice_only"})
    stage.run(200)
    assert stage.done() == [] and stage.service.view(JOB).config.task_count == 1
    told = "switched off" if setting == "enabled" else "advice only"
    assert any(told in entry.reason for entry in stage.entries())


@pytest.mark.parametrize("generation", ["reactive", "proactive", "preactive"])
def test_a_job_names_the_generation_that_decides_for_it(stage: Stage, generation: str):
    stage.add(Work(JOB, input_rate=lambda s: 400.0), scaler={"generation": generation})
    stage.run(120)
    up = next(entry for entry in stage.entries() if entry.decision == "up")
    assert up.data["generation"] == generation
    assert ("time_lagged" in up.data["inputs"]) == (generation == "reactive")


def test_how_long_a_restart_takes_is_measured(stage: Stage):
    stage.add(Work(JOB, input_rate=lambda s: 400.0, restart_s=12))
    stage.run(120)
    record, _ = stage.records.load(JOB)
    assert record.scaler is not None and record.scaler.restarts_s[-1] == pytest.approx(13, abs=3)


def test_a_pipeline_is_sized_as_a_whole(stage: Stage):
    """Plan: the first job needs three times its tasks; the second gets enough of what it will then be sent."""
    output = {"stream": "out", "category": "mid", "partitions": 8, "columns": [], "internal": True}
    slow = {"slo": {"lag_s": 3600}}  # nobody is in a hurry
    stage.add(Work("demo.first", input_rate=lambda s: 300.0), outputs=[output], **slow)
    second = Work("demo.second", input_rate=lambda s: 100.0, thread_rate=120.0)
    stage.add(second, inputs=[{"category": "mid"}], **slow)
    stage.run(400, until=lambda: bool(stage.done("demo.first")))
    (first_up,) = (entry for entry in stage.entries("demo.first") if entry.decision == "up")
    (second_up,) = (entry for entry in stage.entries("demo.second") if entry.decision == "up")
    assert first_up.at_ms == second_up.at_ms
    assert second_up.data["inputs"]["X"] > 290  # 100 arrive as yet


def test_when_not_all_can_have_more_the_first_get_it_and_others_a_part(stage: Stage):
    """Plan: cores for nine more tasks; both jobs want seven more. The one of the higher priority is first."""
    stage.capacity = ClusterCapacity(
        container=AvailableResources(cpu=64), remaining=AvailableResources(cpu=9)
    )
    slow = {"slo": {"lag_s": 3600}}
    stage.add(Work("demo.low", input_rate=lambda s: 400.0), **slow)
    stage.add(Work("demo.top", input_rate=lambda s: 400.0), priority=5, **slow)
    stage.run(400, until=lambda: bool(stage.done("demo.low")))
    counts = {name: stage.service.view(name).config.task_count for name in ("demo.low", "demo.top")}
    assert counts == {"demo.top": 8, "demo.low": 3}
    (entry,) = (entry for entry in stage.entries("demo.low") if entry.decision == "up")
    assert "capacity: cpu" in entry.data["bounds"] and "limited by" in entry.reason


@on_every_store
def test_in_seconds_too_privileged_jobs_are_first_and_others_get_a_part(stage: Stage):
    """Plan: both are over their SLO in the same second, and there are cores for nine more tasks."""
    stage.capacity = ClusterCapacity(
        container=AvailableResources(cpu=64), remaining=AvailableResources(cpu=9)
    )
    names = ("demo.a_plain", "demo.z_privileged")
    for name in names:
        stage.add(Work(name, input_rate=lambda s: 400.0))
    stage.service.patch_layer(
        names[1], "oncall", {"privileged": True}, actor=ADMIN, reason="x", idempotency_key=None, now_ms=stage.now_ms
    )  # fmt: skip
    stage.run(120, until=lambda: all(stage.done(name) for name in names))
    counts = {name: stage.service.view(name).config.task_count for name in names}
    assert counts == {"demo.a_plain": 3, "demo.z_privileged": 8}
    (entry,) = (entry for entry in stage.entries(names[0]) if entry.decision == "up")
    assert "capacity: cpu" in entry.data["bounds"]


def test_a_privileged_job_comes_before_others_that_are_in_a_hurry(stage: Stage):
    """Plan: nothing is left. Then there are cores for nine more tasks, in the very second in which a privileged
    job is looked at by minutes and another one, of a higher priority, is over its SLO.
    """
    stage.capacity = ClusterCapacity(
        container=AvailableResources(cpu=64), remaining=AvailableResources(cpu=0)
    )
    plain, first = "demo.a_plain", "demo.z_privileged"
    stage.add(Work(plain, input_rate=lambda s: 400.0), priority=9)
    stage.add(Work(first, input_rate=lambda s: 400.0), slo={"lag_s": 3600})
    stage.service.patch_layer(
        first, "oncall", {"privileged": True}, actor=ADMIN, reason="x", idempotency_key=None, now_ms=stage.now_ms
    )  # fmt: skip
    stage.run(420)
    for name in (plain, first):
        assert stage.done(name) == [] and stage.entries(name)[-1].data["bound"] == "capacity: cpu"
    stage.capacity = ClusterCapacity(
        container=AvailableResources(cpu=64), remaining=AvailableResources(cpu=9)
    )
    stage.scaler._looked.clear()  # all are due
    stage.run(1)
    assert [stage.done(name) for name in (plain, first)] == [["up"], ["up"]]
    counts = {name: stage.service.view(name).config.task_count for name in (plain, first)}
    assert counts == {plain: 3, first: 8}
    given = sum(count - 1 for count in counts.values())
    assert given == 9, "all that there was, and no more"
    (entry,) = (entry for entry in stage.entries(plain) if entry.decision == "up")
    assert "capacity: cpu" in entry.data["bounds"] and "capacity: cpu" in entry.reason


def test_an_action_of_a_higher_policy_is_waited_for(stage: Stage):
    stage.add(Work(JOB, input_rate=lambda s: 400.0))
    moved = OpenAction(
        policy="stragglers",
        priority=60,
        symptom="lag",
        action=MoveTasks(tasks=(f"{JOB}/0",), text="away from c1"),
        undo=None,
        at_ms=stage.now_ms,
        check_ms=stage.now_ms + 60_000,
    )
    assert stage.records.save(JOB, PolicyRecord(open=moved), 0)
    stage.run(50)
    assert stage.done() == [] and any("away from c1" in entry.reason for entry in stage.entries())
    record, version = stage.records.load(JOB)
    assert record.open == moved
    assert stage.records.save(JOB, with_part(record, open=None), version)  # it was judged
    stage.run(60)
    assert stage.done() == ["up"]
    record, _ = stage.records.load(JOB)
    assert record.open is not None and record.open.policy == "scaler"


def test_what_another_policy_changed_is_not_brought_back(stage: Stage):
    """Plan: somebody went from 8 tasks to 1 a minute ago. The scaler would go back to 8."""
    stage.add(Work(JOB, input_rate=lambda s: 400.0))
    change = RecordedChange(policy="night_shift", path="task_count", old=8, new=1, at_ms=stage.now_ms)
    assert stage.records.save(JOB, PolicyRecord(changes=(change,)), 0)
    stage.run(120)
    assert stage.done() == []
    assert any("night_shift changed" in entry.reason for entry in stage.entries())


def test_a_fleet_that_only_advises_or_is_busy_holds_it(stage: Stage):
    stage.fleet = FleetState(rescales_running=10, rescales_max=10)
    stage.add(Work(JOB, input_rate=lambda s: 400.0))
    stage.run(60)
    assert stage.done() == [] and "jobs of the fleet are being rescaled" in stage.entries()[-1].reason
    stage.fleet = FleetState()
    stage.run(10)
    assert stage.done() == ["up"]


@on_every_store
def test_a_job_of_the_same_name_is_another_job(stage: Stage):
    stage.add(Work(JOB))
    old = ScalerMemory(birth="an earlier life", thread_rate=7.0, restarts_s=(500.0,))
    assert stage.records.save(JOB, PolicyRecord(scaler=old), 0)
    stage.run(130)
    record, _ = stage.records.load(JOB)
    assert record.scaler is not None and record.scaler.birth == f"birth-{JOB}"
    assert record.scaler.thread_rate != 7.0 and record.scaler.restarts_s == ()


@on_every_store
def test_a_job_that_is_gone_leaves_nothing(stage: Stage):
    stage.add(Work(JOB))
    stage.run(5)
    assert JOB in stage.scaler.loads
    stage.works.clear()
    stage.run(2)
    assert stage.scaler.loads == {} and stage.scaler.decisions == {}


@on_every_store
def test_a_damaged_record_costs_its_own_job_only(stage: Stage):
    """Plan: of two jobs that lag one's record is damaged; the other is served, and the first says why not."""
    other = "demo.other"
    stage.add(Work(JOB, input_rate=lambda s: 400.0))
    stage.add(Work(other, input_rate=lambda s: 400.0))
    assert stage.records.save(JOB, PolicyRecord(), 0)
    with stage.database.transaction() as connection:
        connection.execute(sa.update(POLICY_RECORDS).values(body='{"open'))
    stage.run(60, until=lambda: stage.works[other].task_count > 1)
    assert stage.works[other].task_count == 8 and stage.works[JOB].task_count == 1
    assert "cannot be read" in stage.scaler.decisions[JOB].reason


def test_many_jobs_are_looked_at_over_several_rounds_and_pipelines_as_a_whole(stage: Stage):
    """Plan: four pipelines of 30 jobs. A round looks at 50 at least, and at no pipeline in part."""
    for number in range(120):
        stage.add(Work(f"line{number % 4}.job{number:03}"))
    seen = []
    for _ in range(4):
        stage.now_ms += 1000
        stage.scaler.tick(stage.now_ms)
        seen.append(len(stage.scaler.decisions))
    assert seen == [60, 120, 120, 120]


def test_of_more_jobs_than_a_minute_has_time_for_nobody_is_left_out(stage: Stage):
    """Plan: rounds come so rarely that all are due each time, and each serves half of them."""
    for number in range(120):
        stage.add(Work(f"line{number % 4}.job{number:03}"))
    for _ in range(3):
        stage.scaler.decisions.clear()
        for _ in range(2):
            stage.now_ms += 60_000
            stage.scaler.tick(stage.now_ms)
        assert len(stage.scaler.decisions) == 120
