"""The scaler's service deals partitions anew, on memory, SQLite and PostgreSQL: written, told, judged, undone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import VersionConflict
from penstock.db.database import Database
from penstock.scaling.policies.round import FleetState
from tests.builders import ONCALL
from tests.ready import new_place
from tests.scaling.scaler_stage import Stage, Work

JOB = "demo.count"
EVEN = (0, 0, 0, 0, 1, 1, 1, 1)
# Nearly all comes in the four partitions of the first of two tasks.
PARTS = (0.4, 0.2, 0.2, 0.16, 0.01, 0.01, 0.01, 0.01)


# The scaler's decisions are made of what it reads, whoever keeps that: one store shows them. What it writes is shown on all.
on_every_store = pytest.mark.parametrize("stage", ["memory", "sqlite", "postgres"], indirect=True)


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    database = Database(new_place(getattr(request, "param", "memory"), request, tmp_path))
    yield Stage(database)
    database.close()


def hot_job(stage: Stage, **changes: Any) -> Work:
    """A job of two tasks that could do what comes, if each did its half."""
    config = {"task_count": 2, "scaler": {"recovery_s": 600, **changes.pop("scaler", {})}}
    plain = {"input_rate": lambda s: 130.0, "parts": PARTS}
    return stage.add(Work(JOB, **{**plain, **changes.pop("work", {})}), **{**config, **changes})


def set_oncall(stage: Stage, **changes: Any) -> None:
    stage.service.patch_layer(
        JOB, "oncall", changes, actor=ONCALL, reason="a person", idempotency_key=None, now_ms=stage.now_ms
    )
    stage.works[JOB].is_patched = True


def layer(stage: Stage, name: str = "scaler") -> dict[str, Any]:
    return next((dict(row.body) for row in stage.service.view(JOB).layers if row.layer == name), {})


@on_every_store
def test_hot_partitions_are_dealt_anew_once(stage: Stage):
    work = hot_job(stage)
    assert work.mapping == EVEN
    stage.run(600, until=lambda: stage.done() != [])
    assert stage.done() == ["rebalance"]
    assert work.mapping == EVEN  # the next round of the syncer sees it
    (entry,) = (entry for entry in stage.entries() if entry.decision == "rebalance")
    assert "the busiest task has 96% of the load" in entry.reason and "from task 0 to 1" in entry.reason
    assert "after it; partition" in entry.reason and len(entry.reason) < 400
    assert entry.data["partition_tasks"] == layer(stage)["partition_tasks"]
    assert layer(stage).keys() == {"partition_tasks"}
    stage.run(1800)
    assert stage.done() == ["rebalance"] and max(work.lags) < 200
    assert set(work.mapping) == {0, 1} and work.mapping != EVEN
    assert work.mapping == tuple(layer(stage)["partition_tasks"])
    memory = stage.records.load(JOB)[0].scaler
    assert memory is not None and memory.past[-1].is_rebalance and memory.past[-1].outcome == "worked"
    assert stage.alarm_keys() == set()


def test_one_hot_partition_is_skew_and_told(stage: Stage):
    hot_job(stage, work={"parts": (0.93, *[0.01] * 7)})
    stage.run(600)
    assert stage.done() == [] and layer(stage) == {}
    assert "not_scaled" in stage.alarm_keys()
    (alarm,) = (alarm for alarm in stage.alarms.alarms(JOB) if alarm.is_firing)
    assert "skewed input" in alarm.text and "partition 0 alone has 94% of the load" in alarm.text


def test_what_did_not_help_is_undone_once(stage: Stage):
    """Plan: a sink that takes only so much, whoever sends it. The deal comes back, and is not tried again."""
    work = hot_job(stage, task_count_max=2)
    stage.run(600, until=lambda: stage.done() != [])
    work.sink_rate_max = 60.0
    stage.run(1800, until=lambda: "undo" in stage.done())
    assert stage.done() == ["rebalance", "undo"] and layer(stage) == {}
    stage.run(5)
    assert work.mapping == EVEN
    assert "action_ineffective" in stage.alarm_keys()
    stage.run(1800)
    assert stage.done() == ["rebalance", "undo"]


@on_every_store
def test_another_number_of_tasks_takes_the_deal_back_in_the_same_write(stage: Stage):
    work = hot_job(stage, work={"input_rate": lambda s: 130.0 if s < 900 else 700.0})
    stage.run(900)
    assert stage.done() == ["rebalance"]
    version = stage.service.view(JOB).expected_version
    stage.run(900, until=lambda: len(stage.done()) > 1)
    assert stage.done()[1] == "up" and layer(stage).keys() == {"task_count"}
    assert stage.service.view(JOB).expected_version == version + 1
    stage.run(5)
    assert work.task_count > 2 and list(work.mapping) == sorted(work.mapping)


def test_who_set_the_deal_keeps_it(stage: Stage):
    hot_job(stage)
    theirs = [0, 0, 0, 0, 0, 1, 1, 1]
    set_oncall(stage, partition_tasks=theirs)
    stage.run(600)
    assert stage.done() == [] and layer(stage) == {}
    assert "oncall layer sets partition_tasks" in stage.entries()[-1].reason
    assert stage.works[JOB].mapping == tuple(theirs)


@on_every_store
def test_oncalls_number_of_tasks_outlives_the_scalers_deal(stage: Stage):
    """Plan: three tasks while the scaler's deal is for two. The job runs, evenly, and the deal is back with two."""
    work = hot_job(stage)
    stage.run(600, until=lambda: stage.done() != [])
    stage.run(5)
    dealt = work.mapping
    set_oncall(stage, task_count=3)
    stage.run(5)
    assert work.mapping == (0, 0, 0, 1, 1, 1, 2, 2) and stage.service.view(JOB).problem == ""
    set_oncall(stage, task_count=None)
    stage.run(5)
    assert work.mapping == dealt != EVEN


@pytest.mark.parametrize(
    ("scaler", "fleet", "why"),
    [
        ({"advice_only": True}, FleetState(), "advice only"),
        ({}, FleetState(advice_only=True), "advice only for the fleet"),
        ({}, FleetState(rescales_running=2, rescales_max=2), "2 jobs of the fleet are being rescaled"),
    ],
)
def test_what_holds_a_resize_holds_a_new_deal(stage: Stage, scaler: Any, fleet: FleetState, why: str):
    hot_job(stage, scaler=scaler)
    stage.fleet = fleet
    stage.run(400)
    assert stage.done() == [] and layer(stage) == {}
    assert any(why in entry.reason and "from task 0 to 1" in entry.reason for entry in stage.entries())


@on_every_store
def test_who_wrote_first_wins(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    """Plan: somebody writes between look and patch. Nothing is written, nothing is expected of it."""
    hot_job(stage)
    patch, tried = type(stage.scaler._jobs).patch, []

    def late(self: Any, job: str, changes: Any, *, expected_version: int, reason: str) -> None:
        if not tried:
            tried.append(changes)
            set_oncall(stage, labels={"a": "b"})
            with pytest.raises(VersionConflict):
                patch(self, job, changes, expected_version=expected_version, reason=reason)
        patch(self, job, changes, expected_version=expected_version, reason=reason)

    monkeypatch.setattr(type(stage.scaler._jobs), "patch", late)
    stage.run(600, until=lambda: bool(tried))
    assert stage.done() == [] and layer(stage) == {} and [*tried[0]] == ["partition_tasks"]
    memory = stage.records.load(JOB)[0].scaler
    assert memory is not None and memory.past == ()
    stage.run(300)
    assert stage.done() == ["rebalance"]
