"""A user's policy in a process of its own: the worked example, and every way to misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.core.system_clock import SystemClock
from penstock.core.workers import InlineWorkers
from penstock.policy_host import load_policy
from penstock.scaling.policies.policy import Broken, ChangeLayer, Nothing, Verdict
from penstock.scaling.policies.process import Declared, ProcessPolicy, UserPolicies
from penstock.scaling.policies.service import PolicyService
from penstock.streams.compile.packages import build_package
from penstock.streams.package_store import PackageStore, UnpackedPackages
from tests.scaling.policies.kit import (
    NOW_MS,
    MemoryAlerts,
    MemoryFleet,
    MemoryJournal,
    MemoryRecords,
    a_config,
    a_frame,
    some_facts,
)
from tests.tidy_rules import ROOT

EXAMPLE = ROOT / "examples" / "policies" / "night_shift.py"
WRONG = """
import os
from penstock.scaling.policies.policy import *

class Wrong(Policy):
    name = "wrong"

    def detect(self, facts, settings):
        print('{"verdict": null}')  # must not be taken for an answer
        how = facts.config["owner"]  # as policies of users read it when a config was a map
        if how == "raises":
            return {}["nothing"]
        if how == "dies":
            os._exit(9)
        if how == "spins":
            while True:
                pass
        if how == "odd":
            return 17
        if how == "long":
            return Symptom(name="x", text="x", evidence={str(n): "x" * 100 for n in range(20_000)})
        return None

class Other:
    pass

class Dear(Wrong):
    def __init__(self):
        raise ValueError("too dear")
"""
Load = Callable[..., ProcessPolicy]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Policies by file and class, packaged and unpacked as a job's are."""
    folder = tmp_path_factory.mktemp("policies")
    (folder / "wrong.py").write_text(WRONG)
    (folder / "broken.py").write_text("import no_such_module\n")
    shelf = PackageStore(folder / "shelf")
    unpacked = UnpackedPackages(folder / "unpacked", shelf.get)
    # A short budget only where it must run out: a loaded machine may take long for anything.
    patient = UserPolicies(unpacked.folder_of, SystemClock(), budget_ms=60_000)
    hasty: list[UserPolicies] = []

    def load(name: str, file: str, *, in_haste: bool = False) -> ProcessPolicy:
        path, _, class_name = file.partition(":")
        package = build_package(Path(path) if path.startswith("/") else folder / path)
        shelf.put(package.hash, package.data)
        policies = patient
        if in_haste:
            policies = UserPolicies(unpacked.folder_of, SystemClock(), budget_ms=200)
            hasty.append(policies)
        return policies.load(name, f"{package.hash}/{package.entry}:{class_name}")

    yield load
    for policies in (patient, *hasty):
        policies.stop()


def facts(how: str = "", **changes):
    return some_facts(config=a_config(owner=how), **changes)


def test_the_example_declares_and_decides(load: Load):
    policy = load("night_shift", f"{EXAMPLE}:NightShift")
    assert policy.declare() == Declared(priority=-10, metrics=("busy", "lag_s"), minutes=60)
    idle = facts(frame=a_frame(60, busy=0.1, lag_s=1.0))
    verdict = policy.run(idle, {"floor": 1})
    assert isinstance(verdict, Verdict) and isinstance(verdict.resolution, ChangeLayer)
    assert verdict.resolution.changes == {"task_count": 1}
    busy = policy.run(facts(frame=a_frame(60, busy=0.9, lag_s=1.0)), {})
    assert isinstance(busy, Verdict) and isinstance(busy.resolution, Nothing)
    wrong = policy.run(idle, {"floor": 0})
    assert (
        isinstance(wrong, Broken) and wrong.how == "settings" and "policies.night_shift.floor" in wrong.text
    )


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", "raised"),
        ("dies", "raised"),
        ("odd", "nonsense"),
        ("spins", "hung"),
        ("long", "nonsense"),
    ],
)
def test_whatever_a_policy_does_it_is_told_and_the_next_question_is_answered(load: Load, how: str, told: str):
    policy = load("wrong", "wrong.py:Wrong", in_haste=told == "hung")
    assert isinstance(policy.declare(), Declared)
    answer = policy.run(facts(how), {})
    assert isinstance(answer, Broken) and answer.how == told
    if told == "hung":
        return  # its process was ended: the next test starts one
    assert isinstance(policy.run(facts(), {}), Verdict)


def test_a_process_that_was_ended_is_started_again_for_the_next_question(load: Load):
    policy = load("wrong", "wrong.py:Wrong")
    policy.declare()
    policy.stop()
    assert isinstance(policy.run(facts(), {}), Verdict)


def test_a_policy_that_cannot_be_imported_says_why(load: Load):
    answer = load("broken", "broken.py:Any").declare()
    assert isinstance(answer, Broken) and "no_such_module" in answer.text


@pytest.mark.parametrize(
    ("name", "class_name", "why"),
    [
        ("wrong", "Missing", "no class Missing"),
        ("wrong", "Other", "no class Other"),
        ("right", "Wrong", "its name is 'wrong'"),
        ("wrong", "Dear", "ValueError: too dear"),
    ],
)
def test_a_class_that_is_no_policy_says_why(tmp_path: Path, name: str, class_name: str, why: str):
    (tmp_path / "wrong.py").write_text(WRONG)
    answer = load_policy(tmp_path, "wrong.py", class_name, name)
    assert isinstance(answer, Broken) and why in answer.text


def test_a_job_brings_its_own_policy_through_its_settings(load: Load, tmp_path: Path):
    """Plan: the job's config names the package; the service loads it, asks it, applies what it says."""
    loaded = load("night_shift", f"{EXAMPLE}:NightShift")
    fleet = MemoryFleet(configs={"shops.total": a_config()}, frame=a_frame(60, busy=0.1, lag_s=1.0))
    code = f"{build_package(EXAMPLE).hash}/night_shift.py:NightShift"
    fleet.settings = {"night_shift": {"code": code, "floor": 2}}
    asked = []
    service = PolicyService(
        fleet,
        MemoryRecords(),
        MemoryAlerts(),
        MemoryJournal(),
        [],
        InlineWorkers(),
        load=lambda name, code: asked.append((name, code)) or loaded,
    )
    service.tick(NOW_MS)
    assert asked == [("night_shift", code)]
    assert [action.changes for _, _, action in fleet.applied] == [{"task_count": 2}]
