from __future__ import annotations

import pytest

from penstock.core.errors import ConfigError
from penstock.jobs.config import SYNC_OF, JobConfig, Sync, validate_config
from tests.builders import a_body, a_config, an_output


def test_defaults_fill_what_no_layer_says() -> None:
    config = a_config()
    assert (config.task_count, config.task_count_max, config.state) == (1, 32, "running")
    assert (config.slo.lag_s, config.resources.memory_mb, config.trigger_ms) == (90, 512, 1000)


def test_the_plain_form_reads_back_as_the_same_config() -> None:
    config = a_config(labels={"team": "search"}, arguments={"a": "b"})
    assert JobConfig.model_validate(config.to_json()) == config


@pytest.mark.parametrize(
    ("asked", "cap", "partitions", "got"), [(64, 32, 8, 8), (64, 4, 8, 4), (3, 32, 8, 3)]
)
def test_limits_clamp_the_task_count_and_do_not_refuse(
    asked: int, cap: int, partitions: int, got: int
) -> None:
    assert a_config(task_count=asked, task_count_max=cap, partitions=partitions).task_count == got


@pytest.mark.parametrize(
    ("changes", "path", "hint"),
    [
        ({"task_cout": 3}, "task_cout: there is no such field", "did you mean `task_count`?"),
        ({"slo": {"lags": 3}}, "slo.lags: there is no such field", "did you mean `slo.lag_s`?"),
        ({"inputs": [{"categroy": "q"}]}, "inputs[0].categroy", "did you mean `inputs[0].category`?"),
        (
            {"task_count": 0},
            "task_count: Input should be greater than or equal to 1",
            "correct the named fields",
        ),
        ({"name": "../etc"}, "name: String should match pattern", "correct the named fields"),
        ({"slo": {"lag_s": float("nan")}}, "slo.lag_s", "correct the named fields"),
        ({"kind": "stateful"}, "a stateful job needs plan.computation", "correct the named fields"),
        (
            {"plan": {"computation": {"class": "C"}}},
            "a stateless job may not have",
            "correct the named fields",
        ),
        ({"outputs": [an_output(), an_output(category="b")]}, "two outputs have the same stream", "correct"),
        ({"inputs": []}, "inputs: ", "correct the named fields"),
    ],
)
def test_a_bad_field_is_named_with_its_path_and_what_to_do(
    changes: dict[str, object], path: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config("demo.count", a_body(**changes))
    assert path in caught.value.why
    assert hint in caught.value.fix
    assert "demo.count" in caught.value.what


def test_a_config_under_another_jobs_name_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config("demo.other", a_body("demo.count"))
    assert "demo.count" in caught.value.why


def test_every_field_says_what_a_change_of_it_costs() -> None:
    fields = {kind: {name for name, sync in SYNC_OF.items() if sync is kind} for kind in Sync}
    assert fields[Sync.COMPLEX] == {
        "task_count",
        "partitions",
        "inputs",
        "outputs",
        "kind",
        "lineage",
        "state",
    }
    assert fields[Sync.LIVE] == {"slo", "scaler", "priority", "labels", "owner", "task_count_max"}
    assert set().union(*fields.values()) == set(JobConfig.model_fields)
