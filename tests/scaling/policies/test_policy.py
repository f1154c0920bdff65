"""A policy's answers are checked before anybody acts on them; its settings before it is asked."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from penstock.core.errors import ConfigError
from penstock.scaling.policies.policy import (
    Broken,
    Cause,
    ChangeLayer,
    ControlSettings,
    ExcludeContainers,
    MoveTasks,
    Nothing,
    Policy,
    RaiseAlert,
    Symptom,
    Verdict,
    evaluate,
    read_settings,
    split_settings,
)
from penstock.scaling.policies.process import (
    BuiltInPolicy,
    facts_from_json,
    facts_to_json,
    find_misdeclared,
    run_policy,
)
from tests.scaling.policies.kit import a_frame, some_facts

LAG = Symptom(name="lag", text="it lags")
QUIET = Nothing(reason="so it is")
SMALL = Cause(name="small", text="too few tasks", confidence=0.8)


class Says(Policy):
    """Answers what it is told to."""

    name = "says"

    def __init__(self, symptom: Any = LAG, cause: Any = SMALL, resolution: Any = QUIET) -> None:
        self.symptom, self.cause, self.resolution = symptom, cause, resolution

    def detect(self, facts, settings):
        return self.symptom

    def diagnose(self, symptom, facts, settings):
        return self.cause

    def resolve(self, cause, facts, settings):
        return self.resolution


class NightSettings(ControlSettings, frozen=True, kw_only=True):
    floor: Annotated[int, Meta(ge=1, le=100)] = 4


def test_the_three_steps_follow_one_another_and_end_early():
    facts = some_facts()
    assert evaluate(Says(symptom=None), facts, ControlSettings()).resolution == Nothing(reason="no symptom")
    unknown = evaluate(Says(cause=None), facts, ControlSettings())
    assert (
        isinstance(unknown, Verdict) and unknown.symptom == LAG and "not found" in unknown.resolution.reason
    )
    action = ChangeLayer(changes={"task_count": 8}, text="more")
    verdict = evaluate(Says(resolution=action), facts, ControlSettings())
    assert verdict == Verdict(policy="says", symptom=LAG, cause=SMALL, resolution=action)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Says(symptom="lag"), "detect must return"),
        (Says(symptom=Symptom(name="Not A Word", text="x")), "is invalid"),
        (Says(cause=0.7), "diagnose must return"),
        (Says(cause=Cause(name="sure", text="x", confidence=1.7)), "is invalid"),
        (Says(cause=Cause(name="sure", text="x", evidence={"a": float("nan")})), "NaN or infinite"),
        (Says(resolution=None), "resolve must return"),
        (Says(resolution=ChangeLayer(changes={}, text="x")), "nothing"),
        (Says(resolution=ChangeLayer(changes={"privileged": True}, text="x")), "privileged"),
        (Says(resolution=ChangeLayer(changes={"command": ["rm"]}, text="x")), "command"),
        (Says(resolution=ChangeLayer(changes={"task_count": 0}, text="x")), "must be from 1"),
        (Says(resolution=ChangeLayer(changes={"task_count": True}, text="x")), "must be from 1"),
        (Says(resolution=ChangeLayer(changes={"task_count": 17}, text="above the partitions")), "1 to 16"),
        (
            Says(resolution=ChangeLayer(changes={"resources": {"memory_mb": -1}}, text="x")),
            "resources.memory_mb",
        ),
        (Says(resolution=ChangeLayer(changes={"resources": 4}, text="x")), "resources"),
        (Says(resolution=ChangeLayer(changes={"trigger_ms": "fast"}, text="x")), "trigger_ms"),
        (Says(resolution=ChangeLayer(changes={"threads": object()}, text="x")), "is invalid"),
        (Says(resolution=MoveTasks(tasks=("other/0",), text="x")), "not tasks of this job"),
        (Says(resolution=MoveTasks(tasks=(), text="x")), "names none"),
        (Says(resolution=ExcludeContainers(containers=("c9",), tasks=(), text="x")), "c9"),
        (
            Says(
                resolution=ExcludeContainers(containers=("c0", "c1", "c2", "c3", "spare"), tasks=(), text="x")
            ),
            "excludes all containers",
        ),
    ],
)
def test_nonsense_is_told_as_such(policy: Policy, why: str):
    answer = evaluate(policy, some_facts(), ControlSettings())
    assert isinstance(answer, Broken) and answer.how == "nonsense" and why in answer.text


def test_numbers_of_numpy_are_numbers():
    cause = Cause(name="busy", text="x", evidence={"busy": np.float64(0.9), "tasks": np.int64(4)})
    answer = evaluate(
        Says(cause=cause, resolution=RaiseAlert(key="busy", text="x")), some_facts(), ControlSettings()
    )
    assert isinstance(answer, Verdict) and answer.cause is not None
    assert answer.cause.evidence == {"busy": 0.9, "tasks": 4}
    assert {type(value) for value in answer.cause.evidence.values()} == {float, int}


def test_settings_are_typed_and_have_defaults():
    read = read_settings(NightSettings, "night", {"floor": 6, "every_s": 30, "advice_only": True})
    assert (read.floor, read.every_s, read.advice_only, read.cooldown_s) == (6, 30, True, 600)
    assert split_settings({"floor": 6, "every_s": 30}) == ({"every_s": 30}, {"floor": 6})


@pytest.mark.parametrize(
    ("given_settings", "what", "why"),
    [
        ({"floor": 0}, "policies.night.floor", "0"),
        ({"floor": "six"}, "policies.night.floor", "six"),
        ({"every_s": -1}, "policies.night.every_s", "-1"),
        ({"cooldown_s": 1e9}, "policies.night.cooldown_s", "1000000000"),
        ({"from_hour": 24, "to_hour": 3}, "policies.night.from_hour", "24"),
        ({"from_hour": 22}, "policies.night", "from_hour"),
        ({"flor": 6}, "policies.night.flor", "settings of night are"),
        ({"code": "../../etc/passwd:x"}, "policies.night.code", "passwd"),
    ],
)
def test_a_setting_out_of_range_is_refused_in_three_parts(given_settings, what, why):
    with pytest.raises(ConfigError) as caught:
        read_settings(NightSettings, "night", given_settings)
    assert what in caught.value.what and why in caught.value.what + caught.value.why and caught.value.fix
    broken = run_policy(_night(), some_facts(), given_settings)
    assert isinstance(broken, Broken) and broken.how == "settings"


def _night() -> Policy:
    class Night(Policy):
        name, settings = "night", NightSettings

    return Night()


@pytest.mark.parametrize(
    "wrong",
    [{"name": "no word"}, {"priority": 2000}, {"minutes": 0}, {"metrics": ("lag",)}, {"minutes": 10**9}],
)
def test_a_policy_that_declares_what_is_not_is_refused(wrong):
    policy = type("Wrong", (Policy,), {"name": "wrong", **wrong})()
    assert find_misdeclared(policy)
    with pytest.raises(AssertionError):
        BuiltInPolicy(policy)


@given(st.lists(st.one_of(st.floats(-1e12, 1e12), st.just(float("nan"))), min_size=1, max_size=30))
def test_facts_cross_the_border_as_they_are(points):
    facts = some_facts(frame=a_frame(lag_s=np.array(points)))
    back = facts_from_json(facts_to_json(facts))
    assert np.array_equal(back.frame.values["lag_s"], facts.frame.values["lag_s"], equal_nan=True)
    assert back.tasks == facts.tasks and back.containers == facts.containers and back.config == facts.config
