"""`penstock job manage`, `job readmit` and `explain` against a control plane, and what they print."""

from __future__ import annotations

from typing import Any

from penstock.cli.policies import decisions_text, managed_text
from tests.cli.test_tables import shown
from tests.cli.world import PARSE, Run, World
from tests.waiting import until

EVIL = "[bold]x[/]\x1b[2J\nnext"


def settle(world: World) -> None:
    until(lambda: PARSE in world.plane.task_service.task_counts())


def test_a_look_says_what_every_policy_answers(world: World, run: Run):
    settle(world)
    found = run("job", "manage", PARSE, "--dry-run", "--folder", world.folder, "-o", "json").json
    assert found["job"] == PARSE and found["is_dry"] and found["change"] is None
    assert {said["policy"] for said in found["said"]} == {"stragglers", "doctor", "untriaged"}
    said = run("job", "manage", PARSE, "--policy", "stragglers", "--folder", world.folder)
    assert said.code == 0 and "nothing was changed" in said.text and "stragglers" in said.text
    decisions = run("explain", PARSE, "--folder", world.folder, "-o", "json").json["decisions"]
    (entry,) = [each for each in decisions if "asked_by" in each["data"]]  # the schedule's own may be newer
    assert entry["kind"] == "policy" and entry["data"]["asked_by"].startswith("local-")


def test_decisions_are_explained_newest_first_and_in_pages(world: World, run: Run):
    settle(world)
    found = run("explain", PARSE, "--folder", world.folder, "-o", "json").json
    ids = [entry["id"] for entry in found["decisions"]]
    assert len(ids) >= 2 and ids == sorted(ids, reverse=True)
    page = run("explain", PARSE, "-n", "1", "--before", str(ids[0]), "--folder", world.folder).text
    assert "because" in page
    assert "next page: --before" in run("explain", PARSE, "-n", "1", "--folder", world.folder).text


def test_a_job_is_readmitted(world: World, run: Run):
    done = run("job", "readmit", PARSE, "--why", "mended", "--folder", world.folder)
    assert done.code == 0 and f"0 exclusions of {PARSE} ended" in done.text


def test_names_that_nothing_has_are_refused(shared: World, run: Run):
    for command in (("explain", "nope"), ("job", "manage", "nope"), ("job", "readmit", "nope", "--why", "x")):
        assert "nope" in run(*command, "--folder", shared.folder).is_refused(3)


def test_a_policy_that_the_job_has_not_is_refused(world: World, run: Run):
    settle(world)
    refused = run("job", "manage", PARSE, "-p", "doktor", "--folder", world.folder).is_refused(3)
    assert "did you mean `doctor`?" in refused


def a_said(**changes: Any) -> dict[str, Any]:
    texts = dict.fromkeys(("policy", "outcome", "reason", "symptom", "cause", "formula", "bound"), EVIL)
    return {**texts, "confidence": 0.5, "inputs": {EVIL: EVIL}, **changes}


def test_nobodys_text_steers_the_terminal():
    change = dict.fromkeys(("policy", "what", "why", "outcome", "refused"), EVIL)
    alert = dict.fromkeys(("policy", "key", "severity", "text", "what_to_do"), EVIL)
    found = {"job": EVIL, "is_dry": False, "change": change, "said": [a_said()], "alerts": [alert]}
    entry = {
        "at_ms": 1,
        "actor": EVIL,
        "decision": EVIL,
        "reason": EVIL,
        "data": {"said": [a_said()], EVIL: EVIL},
    }
    plain = {**entry, "data": {"moves": {"3": ["c1", "c2"]}}}
    decisions = {"job": EVIL, "decisions": [entry, plain], "next": 7}
    for text in (shown(managed_text(found)), shown(decisions_text(decisions))):
        assert "\x1b[2J" not in text and "[bold]x[/]" in text
    assert "formula" in shown(managed_text(found)) and "--before 7" in shown(decisions_text(decisions))
    nothing = shown(decisions_text({"job": "a", "decisions": [], "next": None}))
    assert "no decisions about a yet" in nothing


def test_a_dry_look_says_would():
    change = {"policy": "p", "what": "w", "why": "y", "outcome": "would be done", "refused": ""}
    found = {"job": "a", "is_dry": True, "change": change, "said": [a_said(outcome="applied")], "alerts": []}
    assert "would be applied" in shown(managed_text(found))
