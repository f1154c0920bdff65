"""Code of several versions in one session, and what a task says when its code cannot be imported."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support.stage import Stage, wait_for

EVENTS = {
    "name": "events",
    "partitions": 2,
    "columns": [["word", "string"], ["ts", "bigint"]],
    "format": "json",
    "watermark": "event_time",
    "lateness_ms": 0,
    "ts_column": "ts",
}
PIPELINE = '''
from penstock import Computation, Pipeline
{extra}

class Shout(Computation):
    """Says the word, and which version it is."""

    outputs = {{"out": {{"said": "string"}}}}

    def process_record(self, record, ctx):
        {body}
        ctx.produce({{"said": f"{{ctx.key}} {version}"}})


p = Pipeline("shouts_{version}", partitions=2)
p.source("events").key_by("word", name="by_word").process(Shout, name="shout").sink("shouted")
'''


def a_stage(spark: Any, folder: Path, version: str, extra: str = "", body: str = "pass") -> Stage:
    folder.mkdir()
    path = folder / "pipeline.py"
    path.write_text(PIPELINE.format(version=version, extra=extra, body=body))
    stage = Stage(spark, folder, path, EVENTS)
    values = [json.dumps({"word": f"w{n}", "ts": n}).encode() for n in range(20)]
    stage.injector("events").publish([str(n) for n in range(20)], range(20), values)
    return stage


def start_all(stage: Stage) -> list[str]:
    return [task_id for job in stage.configs for task_id in stage.start(job)]


def test_two_versions_of_a_package_run_side_by_side_in_one_session(spark: Any, tmp_path: Path):
    stages = {version: a_stage(spark, tmp_path / version, version) for version in ("one", "two")}
    ids = {version: start_all(stage) for version, stage in stages.items()}
    for version, stage in stages.items():
        wait_for(lambda stage=stage: sum(stage.log.end_offsets("shouted")) >= 20, f"version {version}")
        assert {row["said"].split()[1] for row in stage.records("shouted")} == {version}
    for version, stage in stages.items():
        stage.stop(ids[version])


def failure(stage: Stage) -> str:
    ids = start_all(stage)
    wait_for(lambda: any(view.state == "failed" for view in stage.tasks.poll()), "the task to fail")
    (error,) = [view.error for view in stage.tasks.poll() if view.state == "failed"]
    stage.stop(ids)
    return str(error)


def test_a_module_that_is_missing_where_tasks_run_is_named(spark: Any, tmp_path: Path):
    """It is there when the pipeline is submitted, and not where it runs."""
    extra = f"import os\nif os.getpid() != {os.getpid()}:\n    import not_installed_here"
    error = failure(a_stage(spark, tmp_path / "missing", "one", extra))
    assert "there is no module 'not_installed_here'" in error and "install" in error, error
    assert "Traceback" not in error
