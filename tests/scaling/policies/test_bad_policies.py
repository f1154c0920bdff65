"""Users' policies that misbehave, through the policy manager and its processes on a real store: each costs its own answer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock.scaling.metrics.frames import METRICS
from penstock.scaling.metrics.retriever import history
from tests.scaling.policies.manager_kit import JOB, TASKS, Scene, a_scene

CODE = """
import math
import os
import subprocess
import time

from penstock.scaling.policies.policy import ControlSettings
from penstock.scaling.policies.policy import *


class Sick(Policy):
    def detect(self, facts, settings):
        return Symptom(name="sick", text="it is sick")

    def diagnose(self, symptom, facts, settings):
        return Cause(name="known", text="that is known")


def wants(**changes):
    return ChangeLayer(changes=changes, text="it should be so")


class Good(Sick):
    name, priority = "good", -5

    def resolve(self, cause, facts, settings):
        return wants(threads=2)


class Hangs(Sick):
    name = "hangs"

    def detect(self, facts, settings):
        child = subprocess.Popen(["sleep", "600"])
        with open("CHILD", "w") as file:
            file.write(str(child.pid))
        while True:
            time.sleep(1)


def deep():
    found = {}
    for _ in range(100_000):
        found = {"more": found}
    return found


ANSWERS = {
    "number": lambda facts: 17,
    "nan": lambda facts: wants(task_count=math.nan),
    "negative": lambda facts: wants(task_count=-3),
    "zero": lambda facts: wants(task_count=0),
    "many": lambda facts: wants(task_count=10**30),
    "truth": lambda facts: wants(task_count=True),
    "words": lambda facts: wants(threads="two"),
    "nan_cpu": lambda facts: wants(resources={"cpu": math.nan}),
    "less_than_nothing": lambda facts: wants(resources={"cpu": -1.0}),
    "gpu": lambda facts: wants(resources={"gpu": 2}),
    "no_change": lambda facts: wants(),
    "hollow": lambda facts: wants(resources={}),
    "unknown": lambda facts: wants(owner="me", package={"hash": "0" * 64}),
    "deep": lambda facts: wants(resources=deep()),
    "stranger": lambda facts: MoveTasks(tasks=("demo.other/0",), text="not mine"),
    "elsewhere": lambda facts: ExcludeContainers(containers=("c77",), tasks=(f"{facts.job}/0",), text="no"),
    "nowhere": lambda facts: ExcludeContainers(containers=tuple(facts.containers), tasks=(), text="all"),
    "for_ever": lambda facts: ExcludeContainers(containers=("c1",), tasks=(), minutes=10**9, text="for ever"),
    "novel": lambda facts: Nothing(reason="x" * 100_000),
    "alarmist": lambda facts: RaiseAlert(key="Fire! Fire!", text="fire"),
    "huge": lambda facts: RaiseAlert(
        key="huge", text="huge", evidence={str(n): "x" * 100 for n in range(50_000)}
    ),
    "nan_evidence": lambda facts: RaiseAlert(key="odd", text="odd", evidence={"share": math.nan}),
    "greedy": lambda facts: bytearray(64 * 2**30),
    "raises": lambda facts: {}["nothing"],
    "quits": lambda facts: os._exit(3),
}


class OddSettings(ControlSettings, frozen=True, kw_only=True):
    how: str


class Odd(Sick):
    name, settings = "odd", OddSettings

    def resolve(self, cause, facts, settings):
        return ANSWERS[settings.how](facts)
"""


def of_file(child: Path) -> str:
    return CODE.replace("CHILD", str(child))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("policies")
    with a_scene(folder, of_file(folder / "child")) as scene:
        scene.add({"good": scene.own("Good", advice_only=True)})
        yield scene


@pytest.mark.parametrize(
    ("how", "told", "why"),
    [
        ("raises", "raised", "KeyError: 'nothing'"),
        ("quits", "raised", "ended without an answer"),
        ("greedy", "raised", "MemoryError"),
        ("number", "nonsense", "returned int '17'"),
        ("nan", "nonsense", "must be from 1 to 8"),
        ("negative", "nonsense", "its task_count is int '-3'"),
        ("zero", "nonsense", "its task_count is int '0'"),
        ("many", "nonsense", "must be from 1 to 8"),
        ("truth", "nonsense", "must be from 1 to 8"),
        ("words", "nonsense", "invalid values of threads"),
        ("nan_cpu", "nonsense", "resources.cpu"),
        ("less_than_nothing", "nonsense", "invalid values of resources.cpu"),
        ("gpu", "nonsense", "resources.gpu"),
        ("no_change", "nonsense", "may not change nothing"),
        ("hollow", "nonsense", "may not change nothing"),
        ("unknown", "nonsense", "may not change owner, package"),
        ("deep", "nonsense", "its verdict is invalid"),
        ("stranger", "nonsense", "not tasks of this job: demo.other/0"),
        ("elsewhere", "nonsense", "c77, where no task of this job can run"),
        ("nowhere", "nonsense", "excludes all containers of the job"),
        ("for_ever", "nonsense", "minutes"),
        ("novel", "nonsense", "2000"),
        ("alarmist", "nonsense", "key"),
        ("huge", "nonsense", "longer than 1048576 bytes"),
        ("nan_evidence", "nonsense", "NaN or infinite"),
    ],
)
def test_an_answer_that_cannot_be_changes_nothing_and_says_why(scene: Scene, how: str, told: str, why: str):
    """Plan: the job names the bad policy besides a good one that only advises; both are asked, both are told."""
    scene.set_policies({"odd": scene.own("Odd", how=how)})
    before = scene.written()
    said = scene.round(minutes=60)
    (found,) = said["odd"]
    assert found.outcome == "broken" and found.reason.startswith(f"{told}: ") and why in found.reason
    assert said["good"][0].outcome == "advised", "it costs nobody else"
    assert scene.written() == before and scene.config()["task_count"] == TASKS
    assert f"policy_{told}" in scene.alarms()
    entries = scene.plane.journal.entries(JOB, kind="policy")
    assert "odd" in {each["policy"] for entry in entries for each in entry.data["said"]}


def test_a_policy_that_hangs_is_ended_with_what_it_started_and_the_others_are_heard(tmp_path: Path):
    child = tmp_path / "child"
    with a_scene(tmp_path / "plane", of_file(child), budget_ms=5_000) as scene:
        scene.add({"hangs": scene.own("Hangs"), "good": scene.own("Good")})
        said = scene.round()
        assert said["hangs"][0].reason == "hung: no answer within 5 s" and "policy_hung" in scene.alarms()
        scene.until(lambda: scene.config()["threads"] == 2, lambda: scene.round(minutes=20))
        assert not _is_alive(int(child.read_text()))


def test_of_policies_that_fight_one_is_applied_a_round_and_nothing_flaps(tmp_path: Path):
    """Plan: two want another number of tasks each, for hours. Every round applies one change at most, each waits for
    its cool-down, and who would bring back what another changed is held and told.
    """
    code = (
        of_file(tmp_path / "child")
        + """
class More(Sick):
    name, priority = "more", 10

    def resolve(self, cause, facts, settings):
        return wants(task_count=8)


class Fewer(Sick):
    name, priority = "fewer", 5

    def resolve(self, cause, facts, settings):
        return wants(task_count=4)
"""
    )
    with a_scene(tmp_path / "plane", code) as scene:
        calm = {"cooldown_s": 600, "check_after_s": 300}
        scene.add({"more": scene.own("More", **calm), "fewer": scene.own("Fewer", **calm)})
        counts = [scene.config()["task_count"]]
        for _ in range(40):
            said = scene.round(minutes=2)
            done = [
                each for found in said.values() for each in found if each.outcome in ("applied", "undone")
            ]
            assert len(done) <= 1, "one change a round"
            counts.append(scene.config()["task_count"])
        changes = [new for old, new in pairwise(counts) if new != old]
        # The symptom stays whatever is done: what was tried is taken back once, and not tried again.
        assert changes == [8, 4], counts
        assert len(scene.written()) == 2
        said = scene.round(minutes=2)
        assert said["more"][0].outcome == "useless" and said["fewer"][0].reason.endswith(
            "the config has these values already"
        )


def test_a_fleet_that_only_advises_does_nothing_and_says_so(tmp_path: Path):
    with a_scene(tmp_path, of_file(tmp_path / "child"), advice_only=True) as scene:
        scene.add({"good": scene.own("Good")})
        (found,) = scene.round()["good"]
        assert found.outcome == "advised" and found.bound == "advice only for the fleet"
        assert scene.written() == []


def test_a_fleet_that_may_rescale_nobody_says_so(tmp_path: Path):
    code = of_file(tmp_path / "child").replace("threads=2", "task_count=2")
    with a_scene(tmp_path, code, rescales_max=0) as scene:
        scene.add({"good": scene.own("Good")})
        (found,) = scene.round()["good"]
        assert (
            found.outcome == "held"
            and "0 jobs of the fleet are being rescaled; no more may be at a time" in found.reason
        )
        assert scene.written() == []


@pytest.mark.parametrize(
    ("settings", "what", "fix"),
    [
        ({"every_s": 0}, "policies.stragglers.every_s is invalid: Expected `float` >= 1.0", "oncall set"),
        ({"priority": 5000}, "policies.stragglers.priority is invalid", "policies.stragglers.priority=VALUE"),
        ({"cooldown_s": -1}, "policies.stragglers.cooldown_s is invalid", "set a valid value"),
        ({"from_hour": 22}, "from_hour and to_hour must be set together", "set a valid value"),
        ({"from_hour": 24, "to_hour": 1}, "policies.stragglers.from_hour is invalid", "set a valid value"),
        ({"z_min": "large"}, "policies.stragglers.z_min is invalid", "policies.stragglers.z_min=VALUE"),
        ({"z_mni": 3}, "policies.stragglers.z_mni is not a setting", "did you mean `z_min`?"),
        ({"code": "ab/x.py:Y"}, "policies.stragglers.code is invalid", "set a valid value"),
    ],
)
def test_settings_out_of_range_are_refused_in_three_parts_and_the_others_go_on(
    scene: Scene, settings: dict[str, object], what: str, fix: str
):
    scene.set_policies({"stragglers": settings})
    scene.record(lag_s=500.0, until_ms=scene.clock.now_ms() + 120_000)
    said = scene.round(minutes=2)
    (found,) = said["stragglers"]
    assert found.outcome == "broken" and found.reason.startswith("settings: ")
    assert what in found.reason and fix in found.reason
    assert said["good"][0].outcome == "advised" and "policy_settings" in scene.alarms()


def _lag(scene: Scene, seconds: float = 500.0) -> None:
    scene.metrics = {"lag_s": seconds, "busy": 0.9, "processed_rate": 10.0}


def test_metrics_that_cannot_be_used_lead_to_no_action_and_say_why(scene: Scene):
    """Plan: the straggler detector needs whole minutes. It gets gaps, then old ones, then whole ones; nothing is done before it has whole ones, and each time it says why."""
    scene.set_policies({})
    _lag(scene)
    before = scene.written()
    soon_ms = scene.clock.now_ms() + 120_000
    scene.record(30, until_ms=soon_ms - 4 * 60_000, lag_s=500.0)
    scene.record(1, until_ms=soon_ms, lag_s=500.0)  # three minutes before it are not known

    def why(minutes: float) -> str:
        (found,) = scene.round(minutes)["stragglers"]
        assert found.outcome == "broken" and scene.written() == before
        return found.reason

    assert "lag_s missing in 3 of " in why(minutes=2)
    assert "min ago" in why(minutes=60)
    scene.record(30, until_ms=scene.clock.now_ms() + 120_000, lag_s=500.0)
    (found,) = scene.round(minutes=2)["stragglers"]
    assert found.outcome != "broken"


def test_reports_that_cannot_be_are_no_minutes(scene: Scene):
    """Plan: a recorder on the same store hears negative, falling and repeated numbers for minutes."""
    scene.set_policies({})
    start_ms = scene.clock.now_ms() // 60_000 * 60_000
    for second in range(0, 660, 20):
        scene.clock.set_to(start_ms + second * 1000)
        scene.metrics = {
            "at_ms": start_ms + second // 60 * 60_000,  # the same is told three times
            "started_ms": 1.0,
            "read_total": 1e6 - second,  # a total that falls
            "lag_s": -5.0,
            "lag_records": -1.0,
            "busy_ms_total": -1.0 * second,
        }
        scene.beat()
        scene.plane._record()
    answer = scene.manager.manage(JOB, policy="stragglers", is_dry=True, asked_by="a test")
    (found,) = answer["said"]
    assert found["outcome"] == "broken" and "lag_s missing" in found["reason"] and answer["change"] is None
    frame = history(scene.plane.metrics, JOB, tuple(METRICS), 8, now_ms=scene.clock.now_ms())
    known = {name for name, points in frame.values.items() if np.isfinite(points).any()}
    assert known <= {"task_count", "restarts", "oom", "exceptions"}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status").read_text() if Path(f"/proc/{pid}/status").exists() else "State:\tZ"
    return "State:\tZ" not in status
