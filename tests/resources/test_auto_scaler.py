"""Claims about the scaler's service, on memory, SQLite and PostgreSQL: what it writes, and what makes it hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.core.sql_store import Database
from tests.builders import ONCALL
from tests.resources.scaler_stage import Stage, Work

JOB = "demo.count"


@pytest.fixture
def stage(place: Any) -> Iterator[Stage]:
    database = Database(place)
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
    assert stage.service.view(JOB).config["task_count"] == 8
    stage.run(60)
    assert stage.done() == ["up"] and sum(work.lags) < 500


def test_less_is_given_only_after_it_was_enough_for_as_long_as_the_job_says(stage: Stage):
    work = stage.add(Work(JOB, input_rate=steps(at0=400, at60=90)), scaler={"quiet_s": 300})
    stage.run(60)
    assert stage.done() == ["up"]
    drained = stage.run(600, until=lambda: sum(work.lags) < 100)
    quiet = stage.run(1200, until=lambda: "down" in stage.done())
    assert quiet >= 300 and drained + quiet < 900
    assert stage.service.view(JOB).config["task_count"] == 2  # 90 / 0.7 and what piles up meanwhile
    stage.run(300)
    assert stage.done() == ["up", "down"]


def test_an_oncalls_limit_holds_and_is_named(stage: Stage):
    stage.add(Work(JOB, input_rate=lambda s: 400.0))
    set_oncall(stage, task_count_max=2)
    stage.run(300)
    assert stage.service.view(JOB).config["task_count"] == 2
    up = next(entry for entry in stage.entries() if entry.decision == "up")
    assert "oncall limit of 2 tasks" in up.reason
    assert "oncall limit of 2 tasks is all there is" in stage.entries()[-1].reason
    assert stage.entries()[-1].data["bound"] == "oncall limit of 2 tasks"


def test_what_oncall_sets_is_theirs(stage: Stage):
    stage.add(Work(JOB, input_rate=lambda s: 400.0))
    set_oncall(stage, task_count=1)
    stage.run(300)
    assert stage.done() == [] and stage.service.view(JOB).config["task_count"] == 1
    assert "oncall set task_count" in stage.entries()[-1].reason


def test_tasks_that_run_out_of_memory_get_more(stage: Stage):
    work = stage.add(Work(JOB), resources={"memory_mb": 512})
    stage.run(125)
    work.failing = "java.lang.OutOfMemoryError: heap"
    stage.run(240, until=lambda: stage.done() == ["up"])
    work.failing = ""
    assert stage.service.view(JOB).config["resources"]["memory_mb"] == 768
    assert stage.service.view(JOB).config["task_count"] == 1
    assert "ended above their memory" in stage.entries()[-1].reason


def test_tasks_that_fail_are_told_and_never_scaled(stage: Stage):
    """Plan: a sink that refuses. Records pile up, and more tasks would only fail more often."""
    work = stage.add(Work(JOB, input_rate=lambda s: 90.0))
    stage.run(125)
    work.failing = "SinkError: connection refused"
    stage.run(400)
    assert stage.done() == [] and stage.alarm_keys() == {"not_scaled"}
    (alarm,) = (alarm for alarm in stage.alarms.alarms(JOB) if alarm.is_firing)
    assert "connection refused" in alarm.text and "it is not scaled" in alarm.text
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
    assert stage.service.view(JOB).config["task_count"] == 1
    assert {"action_ineffective", "not_scaled"} <= stage.alarm_keys()
    assert "did not help" in stage.entries()[-1].reason


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


def test_of_two_instances_one_acts(stage: Stage):
    stage.add(Work(JOB, input_rate=lambda s: 140.0, sink_rate_max=90.0))
    other = stage.new_scaler()
    for _ in range(900):
        stage.run(1)
        other.tick(stage.now_ms)
    assert stage.done() == ["up", "undo"]
    written = [entry for entry in stage.journal.entries(JOB, limit=1000) if entry.kind == "layer"]
    assert len([entry for entry in written if entry.actor == "scaler"]) == 2


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
    assert stage.done() == [] and stage.service.view(JOB).config["task_count"] == 1
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
    """Plan: the first job lags; the second is sized for what the first will send, in one round."""
    first = {
        "outputs": [{"stream": "out", "category": "mid", "partitions": 8, "columns": [], "internal": True}]
    }
    second = {"inputs": [{"category": "mid"}]}
    stage.add(Work("demo.first", input_rate=lambda s: 85.0 if s < 240 else 97.0, thread_rate=100.0), **first)
    stage.add(Work("demo.second", input_rate=lambda s: 45.0, thread_rate=50.0), **second)
    stage.run(600)
    assert "demo.second" in stage.scaler.decisions
    entries = stage.entries("demo.second")
    assert entries and all(entry.data["generation"] == "preactive" for entry in entries)


def test_a_job_that_is_gone_leaves_nothing(stage: Stage):
    stage.add(Work(JOB))
    stage.run(5)
    assert JOB in stage.scaler.loads
    stage.works.clear()
    stage.run(2)
    assert stage.scaler.loads == {} and stage.scaler.decisions == {}
