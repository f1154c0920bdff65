"""`penstock doctor` against a control plane, and what it prints."""

from __future__ import annotations

import shlex
from typing import Any

from penstock.cli.policies import doctor_text
from penstock.fleet.messages import Heartbeat, TaskReport
from tests.cli.test_tables import shown
from tests.cli.world import PARSE, Run, World
from tests.support.stage import wait_for

EVIL = "[bold]x[/]\x1b[2J\nnext"


def test_a_job_is_examined(world: World, run: Run):
    found = run("doctor", PARSE, "--folder", world.folder, "-o", "json").json
    assert found["job"] == PARSE and found["ruled_out"]
    said = run("doctor", PARSE, "--folder", world.folder).text
    assert "ruled out:" in said


def test_what_the_doctor_advises_can_be_typed_as_it_is_printed(world: World, run: Run):
    """Plan: a container beats that its task is full and far behind; every `oncall set` printed is typed."""
    plane = world.plane
    wait_for(lambda: PARSE in plane.task_service.task_counts(), "the job to be in the task list")
    generation, task_count = plane.task_service.task_counts()[PARSE]
    plane.register_container("c1", "i", folder_id="f")
    metrics = {
        "busy": 0.97,
        "lag_s": 500.0,
        "lag_records": 5e4,
        "processed_rate": 100.0,
        "batch_ms": 32_136.0,
    }
    tasks = tuple(
        TaskReport(
            task_id=f"{PARSE}/{n}",
            job=PARSE,
            generation=generation,
            shard=0,
            state="running",
            metrics=metrics,
        )
        for n in range(task_count)
    )
    plane.on_heartbeat(Heartbeat(container="c1", incarnation="i", sequence=1, tasks=tasks))
    found = run("doctor", PARSE, "--folder", world.folder, "-o", "json").json
    commands = [advice["command"] for each in found["findings"] for advice in each["todo"]]
    typed = [shlex.split(line)[1:] for line in commands if line.startswith("penstock oncall set")]
    assert any("task_count=" in word for words in typed for word in words)
    for words in typed:
        assert run(*words, "--folder", world.folder).code == 0, words


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
