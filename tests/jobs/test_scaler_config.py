"""Claims about a job's settings of the scaler: typed, in any layer, and absent from what older versions stored."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core import json_text
from penstock.core.errors import ConfigError
from penstock.jobs.config import LATER_PART_FIELDS, JobConfig
from penstock.jobs.quick_look import QuickLook
from tests.builders import a_body, a_config

OLD = {"enabled": True, "quiet_s": 60.0, "settle_s": 10.0, "task_count_min": 1}


def test_defaults_are_stored_as_they_were_before_there_were_generations():
    assert a_config().to_json()["scaler"] == OLD
    assert a_config().scaler.generation == "preactive"
    assert a_config(scaler={"generation": "preactive"}).to_json()["scaler"] == OLD


def test_other_values_are_stored_and_read_again():
    given = {"generation": "reactive", "recovery_s": 60.0, "advice_only": True}
    stored = a_config(scaler=given).to_json()
    assert stored["scaler"] == {**OLD, **given}
    assert JobConfig.model_validate(stored).scaler.generation == "reactive"


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


@pytest.mark.parametrize(("before", "after", "is_same"), [({}, {}, True), ({}, {"target": 0.6}, False)])
def test_the_quick_look_sees_a_job_of_an_older_version_as_it_is(before: Any, after: Any, is_same: bool):
    running = json_text.dumps(a_config(scaler=before).to_json())
    body = json_text.dumps(a_body(scaler=after) if after else a_body())
    quick = QuickLook().compare("demo.count", [(10, body)], running)
    assert (quick is not None and quick.difference is None) == is_same


def test_every_later_field_is_one():
    for part, names in LATER_PART_FIELDS.items():
        annotation: Any = JobConfig.model_fields[part].annotation
        assert {*names} <= annotation.model_fields.keys()
