"""`penstock doctor` against a control plane, and what it prints."""

from __future__ import annotations

from typing import Any

from penstock.cli.doctoring import doctor_text
from tests.cli.test_tables import shown
from tests.cli.world import PARSE, Run, World

EVIL = "[bold]x[/]\x1b[2J\nnext"


def test_a_job_is_examined(world: World, run: Run):
    found = run("doctor", PARSE, "--folder", world.folder, "-o", "json").json
    assert found["job"] == PARSE and found["ruled_out"]
    said = run("doctor", PARSE, "--folder", world.folder).text
    assert "well:" in said


def test_a_name_that_nothing_has_is_refused(shared: World, run: Run):
    assert "nope" in run("doctor", "nope", "--folder", shared.folder).is_refused(3)


def test_nobodys_text_steers_the_terminal():
    finding: dict[str, Any] = {
        "severity": EVIL,
        "symptom": EVIL,
        "cause": EVIL,
        "confidence": 0.5,
        "evidence": {EVIL: EVIL},
        "todo": [{"text": EVIL, "command": EVIL}],
    }
    text = shown(
        doctor_text(
            {
                "job": EVIL,
                "findings": [finding],
                "ruled_out": [EVIL],
                "not_known": [{"rule": EVIL, "why": EVIL}],
            }
        )
    )
    assert "\x1b[2J" not in text and "[bold]x[/]" in text
