"""Claims about a job's settings of the scaler: typed, in any layer, and absent from what older versions stored."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from penstock.core import text as json_text
from penstock.core.errors import ConfigError
from penstock.db.database import Database
from penstock.jobs.config import LATER_PART_FIELDS, JobConfig
from penstock.jobs.job_service import JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.layer_store import LAYERS
from penstock.jobs.syncer.sync_plan import InSync, RunningView, plan_sync
from penstock.jobs.tasks import map_partitions
from tests.builders import ONCALL, a_config, a_job

OLD = {"enabled": True, "settle_s": 10.0, "task_count_min": 1}


def test_defaults_are_stored_as_they_were_before_there_were_generations():
    assert a_config().to_json()["scaler"] == OLD
    assert a_config().scaler.generation == "preactive"
    assert a_config(scaler={"generation": "preactive"}).to_json()["scaler"] == OLD


def test_other_values_are_stored_and_read_again():
    given = {"generation": "reactive", "recovery_s": 60.0, "advice_only": True}
    stored = a_config(scaler=given).to_json()
    assert stored["scaler"] == {**OLD, **given}
    assert JobConfig.from_stored(stored).scaler.generation == "reactive"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"generation": "clairvoyant"}, "generation"),
        ({"generation": 3}, "generation"),
        ({"recovery_s": 0}, "recovery_s"),
        ({"target": 0.9, "up_at": 0.8}, "up_at"),
        ({"target": 2}, "target"),
        ({"history_hours": 100}, "history_hours"),
        ({"advice_only": "yes"}, "advice_only"),
        ({"generations": "reactive"}, "generations"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as refused:
        a_config(scaler=given)
    assert said in str(refused.value) and "scaler" in str(refused.value)


@pytest.mark.parametrize(("after", "is_same"), [({}, True), ({"target": 0.6}, False)])
def test_what_an_older_version_stored_is_compared_as_it_is_meant(after: Any, is_same: bool):
    stored = JobConfig.from_stored(json_text.dumps(a_config().to_json()))
    running = RunningView(config=stored, generation=1, mapping=map_partitions(8, 1))
    assert isinstance(plan_sync(a_config(scaler=after), running), InSync) == is_same


def test_every_later_field_is_one():
    for part, names in LATER_PART_FIELDS.items():
        annotation: Any = JobConfig.model_fields[part].annotation
        assert {*names} <= annotation.model_fields.keys()


def test_limits_that_leave_no_number_of_tasks_are_refused(database: Database):
    """Plan: at least 8 and at most 4, in one layer or in two. It was accepted."""
    service = JobService(JobStore(database))
    with pytest.raises(ConfigError) as refused:
        a_job(service, "demo.other", scaler={"task_count_min": 8}, task_count_max=4)
    assert "scaler.task_count_min is 8, and task_count_max is 4" in str(refused.value)
    a_job(service, scaler={"task_count_min": 8})
    with pytest.raises(ConfigError, match="task_count_max is 4"):
        patch(service, {"task_count_max": 4})
    patch(service, {"task_count_max": 4, "scaler.task_count_min": 2})
    patch(service, {"task_count": 30})  # a number outside of the limits is clamped
    assert service.view("demo.count").config.task_count == 4
    with pytest.raises(ConfigError, match="task_count_min is 33, and task_count_max is 32"):
        a_job(service, "demo.other", scaler={"task_count_min": 33})


def test_limits_that_an_older_version_accepted_do_not_stop_other_writes(database: Database):
    """Plan: a job whose stored limits contradict each other is still read, run and changed."""
    service = JobService(JobStore(database))
    a_job(service, scaler={"task_count_min": 8})
    mine = LAYERS.c.layer == "provisioner"
    with database.transaction() as connection:
        stored = connection.execute(sa.select(LAYERS.c.body).where(mine)).scalar_one()
        body = {**stored, "task_count_max": 4}
        connection.execute(sa.update(LAYERS).where(mine).values(body=body))
    assert JobService(JobStore(database)).view("demo.count").problem == ""
    patch(JobService(JobStore(database)), {"priority": 3})


def patch(service: JobService, changes: dict[str, Any]) -> None:
    service.patch_layer(
        "demo.count", "oncall", changes, actor=ONCALL, reason="x", idempotency_key=None, now_ms=1
    )
