"""`penstock watermark` against a control plane: tables, JSON, who is named."""

from __future__ import annotations

import json

import yaml

from penstock.streams.dsl.injector import Injector
from tests.cli.world import COUNT, PARSE, Run, World
from tests.waiting import until


def settled(world: World) -> None:
    until(lambda: all(view.is_in_sync for view in world.plane.jobs.every_view()))


def test_a_pipeline_that_was_just_submitted_waits_for_its_injector(world: World, run: Run):
    settled(world)
    found = run("watermark", "zeitgeist", "--folder", world.folder, "-o", "json").json
    assert {item["because"] for item in found["held_back"]} == {"no injector has started"}
    assert {item["category"] for item in found["categories"]} >= {"queries"}
    names = {item["name"].partition("[")[0] for item in found["intervals"]}
    assert names == {PARSE, COUNT}


def test_an_interval_nobody_runs_is_named_with_the_reason(world: World, run: Run):
    settled(world)
    injector = Injector(world.plane.log, "queries", "me", epoch=1)
    injector.publish(["a"], [1], [json.dumps({"query": "x", "lang": "en", "ts": 1}).encode()])
    injector.report_low(5000, now_ms=1)
    said = run("watermark", "--folder", world.folder).text
    assert "held back by" in said and "no container runs its task" in said
    (line,) = yaml.safe_load(run("watermark", "queries", "--folder", world.folder, "-o", "yaml").out)[
        "held_back"
    ]
    assert line["who"] == "injector me" and line["low"] == 5000 and line["age_ms"] > 0


def test_a_job_is_explained_by_what_it_writes(world: World, run: Run):
    settled(world)
    found = run("watermark", PARSE, "--folder", world.folder, "-o", "json").json
    assert len(found["held_back"]) == 1 and found["held_back"][0]["category"].startswith(PARSE)


def test_a_name_that_nothing_has_is_refused(shared: World, run: Run):
    assert "there is no category, job or pipeline" in run(
        "watermark", "nope", "--folder", shared.folder
    ).is_refused(3)


def test_without_jobs_there_is_nothing_to_hold(shared: World, run: Run):
    said = run("watermark", "--folder", shared.folder)
    assert said.code == 0 and "no job has an output" in said.text


def test_a_percentile_leaves_a_silent_injector_out_and_never_goes_back(shared: World, run: Run):
    log = shared.plane.log
    for number in range(10):
        Injector(log, "queries", f"i{number}", epoch=1).report_low(1000 * number + 1, now_ms=1)
    asked = ("watermark", "queries", "--percent", "80", "--folder", shared.folder)
    (found,) = run(*asked, "-o", "json").json["categories"]
    assert (found["low"], found["percent"], found["percentile_low"]) == (1, 80, 2001)
    for number in range(10, 30):
        log.register_producer("queries", f"i{number}")
    (found,) = run(*asked, "-o", "json").json["categories"]
    assert found["percentile_low"] == 2001 and "80 % of them" in run(*asked).text
