"""A policy of a user's own, from its file to its advice, as the documents say: packaged, named in a job, asked."""

from __future__ import annotations

import json

import pytest

from penstock.core.folder import token_file
from penstock.scaling.metrics.frames import METRICS
from penstock.scaling.policies.policy import ChangeLayer, Verdict, evaluate
from penstock.streams.compile.packages import build_package
from penstock.streams.dsl.user_code import UserCode
from tests.cli.test_policies import settle
from tests.cli.world import PARSE, Run, World
from tests.scaling.policies.kit import a_frame, some_facts
from tests.tidy_rules import ROOT
from tests.waiting import until

EXAMPLE = ROOT / "examples" / "policies" / "night_shift.py"


def test_the_worked_example_of_the_documents_is_tried_like_a_function():
    text = (ROOT / "docs" / "policies.md").read_text()
    assert "evaluate(NightShift(), facts, NightSettings(floor=1))" in text
    module = UserCode("penstock_package_example", EXAMPLE.parent, EXAMPLE.name).load()
    facts = some_facts(frame=a_frame(60, busy=0.1, lag_s=1.0))
    found = evaluate(module.NightShift(), facts, module.NightSettings(floor=1))
    assert isinstance(found, Verdict) and isinstance(found.resolution, ChangeLayer)
    assert found.resolution.changes == {"task_count": 1}
    assert {*module.NightShift.metrics} <= METRICS.keys()


def test_a_policy_is_packaged_named_in_a_job_and_asked_through_the_command(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
):
    """Plan: as docs/policies.md says. Without containers nobody reports, so its answer is why it was not asked; then
    a wrong setting of its own, and code that is not there, are told.
    """
    settle(world)
    done = run("package", EXAMPLE, "--folder", world.folder)
    hash_ = build_package(EXAMPLE).hash
    assert done.code == 0 and hash_[:12] in done.text
    code = f"{hash_}/night_shift.py:NightShift"
    monkeypatch.setenv("PENSTOCK_TOKEN", token_file(world.folder, "admin").read_text().strip())
    set_ = ("oncall", "set", PARSE, "--why", "nights", "--folder", world.folder)
    assert (
        run(*set_, f"policies.night_shift.code={json.dumps(code)}", "policies.night_shift.floor=2").code == 0
    )
    until(lambda: "night_shift" in _policies(world))
    found = _look(world, run)
    assert found["policy"] == "night_shift" and "metrics: 0 of " in found["reason"]
    assert run(*set_, f"policies.night_shift.code={json.dumps(f'{hash_}/night_shift.py:Nobody')}").code == 0
    until(lambda: "Nobody" in str(_policies(world)))
    assert "no class Nobody" in _look(world, run)["reason"]
    missing = "0" * 64 + "/night_shift.py:NightShift"
    assert run(*set_, f"policies.night_shift.code={json.dumps(missing)}").code == 0
    until(lambda: "000" in str(_policies(world)))
    gone = _look(world, run)
    assert gone["outcome"] == "broken" and "000000" in gone["reason"]
    text = run("explain", PARSE, "--folder", world.folder).text
    assert "night_shift" in text and "no class Nobody" in text


def _policies(world: World) -> dict[str, object]:
    running = world.plane.jobs.view(PARSE).running
    return {} if running is None else dict(running.config.get("policies", {}))


def _look(world: World, run: Run) -> dict[str, str]:
    answer = run("job", "manage", PARSE, "--policy", "night_shift", "--folder", world.folder, "-o", "json")
    assert answer.code == 0, answer.err
    (said,) = answer.json["said"]
    return dict(said)
