from __future__ import annotations

import json
import re

import pytest

from penstock.core.errors import ConfigError, CorruptData
from penstock.jobs.config import FIELD_WRITERS, SYNC_OF, JobConfig, Sync, validate_config, writers_of
from tests.builders import a_body, a_config, a_process, an_output
from tests.tidy_rules import ROOT


def test_defaults_fill_what_no_layer_says() -> None:
    config = a_config()
    assert (config.task_count, config.task_count_max, config.state) == (1, 32, "running")
    assert (config.slo.lag_s, config.resources.memory_mb, config.trigger_ms) == (90, 512, 1000)


def test_what_is_stored_reads_back_as_the_same_config() -> None:
    """Whatever it says; and what it is stored as again is the same text."""
    for config in (
        a_config(),
        a_config(scaler={"target": 0.6}, dedup="off", backlog="leave", policies={"a": {"on": 1.5, "n": 1}}),
        a_config(
            partitions=2, task_count=2, partition_tasks=[1, 0], inputs=[{"category": "a", "writer": "w"}]
        ),
        validate_config("demo.tick", a_process()),
    ):
        text = json.dumps(config.to_json())
        assert JobConfig.from_stored(text) == config == JobConfig.from_stored(json.loads(text))
        assert json.dumps(JobConfig.from_stored(text).to_json()) == text


@pytest.mark.parametrize("missing", ["policies", "privileged", "slo", "threads"])
def test_a_stored_config_of_an_older_version_has_the_defaults_of_what_it_does_not_say(missing: str) -> None:
    stored = {name: value for name, value in a_config().to_json().items() if name != missing}
    assert JobConfig.from_stored(json.dumps(stored)) == a_config()


def test_a_stored_config_is_read_by_the_rules_it_was_written_by() -> None:
    """Two outputs of one category are refused today; a field of a later version is not known."""
    twice = [an_output(), an_output(stream="again")]
    stored = {**a_config().to_json(), "outputs": twice, "invented_later": 1}
    with pytest.raises(ConfigError):
        validate_config("demo.count", stored)
    assert len(JobConfig.from_stored(json.dumps(stored)).outputs) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"task_count": NaN}', '{"owner": "\\ud800"}'])
def test_what_is_no_config_is_said_to_be_corrupt(text: str) -> None:
    with pytest.raises(CorruptData, match="the stored config of job"):
        JobConfig.from_stored(text, job="demo.a")


def test_the_plain_form_reads_back_as_the_same_config() -> None:
    config = a_config(labels={"team": "search"}, arguments={"a": "b"})
    assert validate_config("demo.count", config.to_json()) == config


@pytest.mark.parametrize(
    ("asked", "cap", "partitions", "got"), [(64, 32, 8, 8), (64, 4, 8, 4), (3, 32, 8, 3)]
)
def test_limits_clamp_the_task_count_and_do_not_refuse(
    asked: int, cap: int, partitions: int, got: int
) -> None:
    assert a_config(task_count=asked, task_count_max=cap, partitions=partitions).task_count == got


@pytest.mark.parametrize(
    ("asked", "cap", "privileged", "partitions", "got", "cap_got"),
    [
        (40, 50, False, 64, 32, 32),  # more than 32 is for privileged jobs
        (40, 50, True, 64, 40, 50),
        (60, 50, True, 64, 50, 50),
        (60, 100, True, 48, 48, 100),
        (1_000_000, 1_000_000, True, 4096, 4096, 1_000_000),
        (40, 16, False, 64, 16, 16),
        (2, 50, False, 64, 2, 32),
    ],
)
def test_more_than_32_tasks_are_for_privileged_jobs(
    asked: int, cap: int, privileged: bool, partitions: int, got: int, cap_got: int
) -> None:
    config = a_config(task_count=asked, task_count_max=cap, privileged=privileged, partitions=partitions)
    assert (config.task_count, config.task_count_max) == (got, cap_got)
    # What was clamped is stable: as a config of its own it is the same.
    assert validate_config(config.name, config.to_json()) == config


def test_nothing_is_reserved_unless_it_is_asked_for() -> None:
    resources = a_config(resources={"cpu": 2, "disk_mb": 10}).resources
    assert (resources.cpu, resources.memory_mb, resources.disk_mb, resources.network_mbps) == (
        2,
        512,
        10,
        0,
    )


def test_policies_have_settings_of_plain_values() -> None:
    settings = {"threshold": 0.5, "rounds": 3, "mode": "advise", "enabled": True, "window": None}
    assert a_config(policies={"straggler": settings}).to_json()["policies"] == {"straggler": settings}


def test_every_field_says_who_may_set_it() -> None:
    assert FIELD_WRITERS.keys() == JobConfig.model_fields.keys()
    assert {field for field, roles in FIELD_WRITERS.items() if "developer" not in roles} == {"privileged"}
    assert writers_of("no_such_field") == frozenset(), "a field that is in no list is nobody's"


def test_the_documents_have_the_same_table() -> None:
    told: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "cli.md").read_text().splitlines():
        cells = line.strip("|").split(" | ")
        if len(cells) == 2 and set(re.findall("`([a-z]+)`", cells[1])) in map(set, FIELD_WRITERS.values()):
            fields = re.sub(r"\(.*?\)", "", cells[0])
            roles = set(re.findall("`([a-z]+)`", cells[1]))
            told |= {field: roles for field in re.findall("`([a-z_]+)`", fields)}
    assert told == {field: set(roles) for field, roles in FIELD_WRITERS.items()}


@pytest.mark.parametrize("role", ["oncall", "scaler"])
@pytest.mark.parametrize(
    "path",
    ["command", "package.hash", "environment.PATH", "arguments.x", "plan", "kind", "policies.mine.code"],
)
def test_who_only_tunes_never_decides_what_code_runs(role: str, path: str) -> None:
    assert writers_of(path) == {"admin", "developer"} and role not in writers_of(path)
    assert "oncall" in writers_of("plan.late"), "the doctor tells operators to set it"


@pytest.mark.parametrize(
    "changes",
    [
        {"task_count": "3"},
        {"task_count": True},
        {"task_count": 3.0},
        {"threads": 1025},
        {"privileged": 1},
        {"privileged": "yes"},
        {"owner": 7},
        {"state": "Running"},
        {"resources": {"cpu": "1"}},
        {"resources": {"cpu": True}},
        {"resources": {"cpu": float("inf")}},
        {"resources": {"memory_mb": 2**70}},
        {"labels": {"team": 7}},
        {"labels": {"": "x"}},
        {"labels": {"a b": "x"}},
        {"arguments": {"a": 1}},
        {"arguments": {"a": "b\x00"}},
        {"owner": "\u202eme"},
        {"policies": {"a": 1}},
        {"policies": {"a/b": {}}},
        {"policies": {"a": {"b": [1]}}},
        {"policies": {"a": {"b": 2**63}}},
        {"policies": {"a": {"b": "x" * 1001}}},
        {"package": {"name": "d", "version": "1", "hash": "not a hash", "entry": "d"}},
        {"outputs": [an_output(stream="a b")]},
        {"outputs": [an_output(columns=[["a", "b", "c"]])]},
        {"outputs": [an_output(internal="no")]},
    ],
)
def test_values_are_taken_as_they_are_and_within_bounds(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config("demo.count", a_body(**changes))
    assert next(iter(changes)) in caught.value.why and caught.value.fix
    assert str(caught.value).replace("\n", "").isprintable()


def test_a_long_name_is_not_repeated_in_full() -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config("x" * 1_000_000, {"y" * 1_000_000: 1})
    assert len(str(caught.value)) < 1_500


@pytest.mark.parametrize(
    ("changes", "path", "hint"),
    [
        ({"task_cout": 3}, "task_cout: there is no such field", "did you mean `task_count`?"),
        ({"slo": {"lags": 3}}, "slo.lags: there is no such field", "did you mean `slo.lag_s`?"),
        ({"inputs": [{"categroy": "q"}]}, "inputs[0].categroy", "did you mean `inputs[0].category`?"),
        (
            {"task_count": 0},
            "task_count: Input should be greater than or equal to 1",
            "correct these fields",
        ),
        ({"name": "../etc"}, "name: String should match pattern", "correct these fields"),
        ({"slo": {"lag_s": float("nan")}}, "slo.lag_s", "correct these fields"),
        ({"kind": "stateful"}, "a stateful job needs plan.computation", "correct these fields"),
        (
            {"plan": {"computation": {"class": "C"}}},
            "a stateless job may not have",
            "correct these fields",
        ),
        ({"outputs": [an_output(), an_output(category="b")]}, "two outputs have the same stream", "correct"),
        ({"inputs": []}, "inputs: ", "correct these fields"),
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
        "partition_tasks",
        "inputs",
        "outputs",
        "kind",
        "lineage",
        "state",
    }
    assert fields[Sync.LIVE] == {
        "backlog",
        "slo",
        "scaler",
        "policies",
        "priority",
        "privileged",
        "labels",
        "owner",
        "task_count_max",
    }
    assert set().union(*fields.values()) == set(JobConfig.model_fields)


def test_fields_that_came_later_are_stored_only_where_they_say_something() -> None:
    """A job of an earlier version is stored as it was, so it is not restarted."""
    plain = a_config().to_json()
    assert not {"isolation", "poison"} & set(plain)
    changed = a_config(isolation="process", poison="fail", resources={"memory_mb": 2048}).to_json()
    assert (changed["isolation"], changed["poison"]) == ("process", "fail")
    assert validate_config("demo.count", changed).to_json() == changed


def test_a_jvm_of_its_own_needs_memory() -> None:
    with pytest.raises(ConfigError, match="not valid") as caught:
        a_config(isolation="process")
    assert "at least 1024" in caught.value.why


QUERY = {
    "pipeline": "own",
    "kind": "spark",
    "package": {"name": "own", "version": "1", "hash": "aa", "entry": "own.py"},
    "plan": {"computation": {"function": "main"}},
}


def test_a_query_as_it_is_runs_as_one_task() -> None:
    config = validate_config("own.query", {**QUERY, "task_count": 8})
    assert (config.task_count, config.partitions) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"package": None}, "package: Field required"),
        ({"plan": {}}, "plan.computation.function"),
        ({"partitions": 4}, "runs as one task"),
        ({"inputs": [{"category": "queries"}]}, "inputs: a job of kind `spark` has no such field"),
        ({"command": ["ls"]}, "command: a job of kind `spark` has no such field"),
        ({"plan": {"computation": {"function": "main"}, "key": "a"}}, "may only have `computation`"),
    ],
)
def test_a_query_as_it_is_has_nothing_of_ours(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config("own.query", {**QUERY, **changes})
    assert why in caught.value.why
