"""What an intent keeps of a task's plan stays the same from version to version: a successor compares hashes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.jobs.config import JobConfig
from penstock.streams.catalogue import category_from_json
from penstock.streams.places import open_log
from penstock.streams.step.step import TaskDescriptor
from tests.support.stage import Stage

PIPELINE = """
from penstock import Computation, Pipeline, Value


class Running(Computation):
    outputs = {"out": {"word": "string", "n": "bigint"}}
    n = Value(int)

    def process_record(self, record, ctx):
        ctx.state.n += 1
        ctx.produce({"word": ctx.key, "n": ctx.state.n})


p = Pipeline("pinned", partitions=2)
queries = p.source("queries").filter("lang <> 'robot'").select("lower(trim(query)) AS word")
notes = p.source("notes").select("upper(body) AS word")
keyed = queries.union(notes).key_by("word", name="keyed")
keyed.process(Running, name="running").sink("running_counts")
"""
QUERIES: dict[str, Any] = {
    "name": "queries",
    "partitions": 3,
    "columns": [["query", "string"], ["lang", "string"], ["ts", "bigint"], ["unused", "double"]],
    "format": "json",
    "watermark": "event_time",
    "lateness_ms": 500,
    "idle_after_ms": 60_000,
    "ts_column": "ts",
}
NOTES: dict[str, Any] = {
    "name": "notes",
    "partitions": 2,
    "columns": [["body", "string"], ["at", "bigint"]],
    "format": "json",
    "watermark": "injector",
    "ts_column": "at",
}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    path = tmp_path / "pinned.py"
    path.write_text(PIPELINE)
    open_log(f"embedded:{tmp_path / 'bus'}").create(category_from_json(NOTES))
    return Stage(None, tmp_path, path, QUERIES)  # opening a task needs no Spark session


def opened(stage: Stage, job: str, **changes: Any) -> TaskDescriptor:
    """The job's only task as a container opens it: every interval acquired."""
    (spec,) = stage.specs(job, **changes)
    task, _ = stage.tasks.open(spec, 1)
    return task


def hash_of(stage: Stage, task: TaskDescriptor) -> str:
    """The hash of its plan as in an intent, but for births, which are random."""
    text = json.dumps(task.logic(), sort_keys=True)
    assert task.logic_hash() == hashlib.sha256(text.encode()).hexdigest()[:16]
    for category in stage.log.categories():
        text = text.replace(category.birth, f"birth of {category.spec.name}")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Computed by the code before the descriptor held the task's spec: such hashes are in stored intents.
@pytest.mark.parametrize(
    ("job", "changes", "pinned"),
    [
        ("pinned.keyed", {}, "4a63a0d9de50d45b"),
        ("pinned.running", {}, "6b66496cecad00d6"),
        ("pinned.running", {"poison": "skip"}, "68cd4fc01ffb6255"),
    ],
)
def test_the_hash_of_a_plan_is_the_one_that_stored_intents_have(
    stage: Stage, job: str, changes: dict[str, Any], pinned: str
):
    assert hash_of(stage, opened(stage, job, **changes)) == pinned


def test_a_descriptor_survives_its_way_to_a_worker(stage: Stage):
    task = opened(stage, "pinned.keyed")
    found = TaskDescriptor.from_json(task.to_json())
    assert found.logic() == task.logic() and found.logic_hash() == task.logic_hash()
    assert found.to_json() == task.to_json() and found.intervals == task.intervals
    assert found.spec.config == task.spec.config and found.spec.partitions == task.spec.partitions


def test_what_a_config_leaves_out_has_the_default_of_the_job_config(stage: Stage):
    task = opened(stage, "pinned.keyed")
    names = ("batch_rows_max", "batch_bytes_max", "state_cache_bytes", "poison")
    stored = json.loads(task.spec.config_json)
    bare = replace(
        task,
        spec=replace(
            task.spec, config_json=json.dumps({name: stored[name] for name in ("name", "pipeline", "kind")})
        ),
    )
    assert {name: getattr(bare, name) for name in names} == {
        name: JobConfig.model_fields[name].default for name in names
    }
