"""The same task in a process and JVM of its own: same rows, stopped in order, its end by memory reported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from penstock.container.process_runner import ProcessRunner, find_groups
from penstock.core.system_clock import SystemClock
from penstock.jobs.tasks import RunState, RunStatus, TaskSpec
from penstock.streams.package_store import UnpackedPackages
from penstock.streams.spark.own_process import OwnProcessRunner, prepare_with
from tests.kin import kin_of
from tests.spark.test_tasks import CATEGORY, COUNT, PARSE, ZEITGEIST, publish, queries, reference
from tests.support.stage import Stage, wait_for

pytestmark = pytest.mark.timeout(900)


def a_spec(stage: Stage, job: str, **changes: Any) -> TaskSpec:
    settings = {"isolation": "process", "resources": {"memory_mb": 2048}, **changes}
    (spec,) = stage.specs(job, **settings)
    return spec


def spark_jvms() -> int:
    """JVMs below this process that are Spark's: not a broker of other tests, nor a worker that just ended."""
    return sum("org.apache.spark.deploy.SparkSubmit" in command for command in kin_of(os.getpid()).values())


class Isolated:
    """The runner, as a container has it."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        shelf = UnpackedPackages(folder / "unpacked", stage.package)
        self.runner = OwnProcessRunner(
            ProcessRunner(folder / "own" / "processes", SystemClock(), find_groups()),
            folder / "own" / "tasks",
            prepare_with(bus=stage.bus, rows=stage.rows_place, packages=shelf),
        )

    def status(self) -> RunStatus:
        (found,) = self.runner.poll()
        return found

    def end(self) -> None:
        for status in self.runner.poll():
            self.runner.kill(status.task_id)
        wait_for(lambda: all(s.state in ("stopped", "failed") for s in self.runner.poll()), "the end")


def test_a_task_runs_in_a_jvm_of_its_own_with_the_same_result(spark: Any, tmp_path: Path):
    stage = Stage(spark, tmp_path, ZEITGEIST / "pipeline.py", CATEGORY)
    injector = stage.injector("queries")
    publish(stage, queries(0, 1000), injector, now_ms=1000)
    injector.close(now_ms=2000)
    isolated = Isolated(stage, tmp_path)
    try:
        isolated.runner.start(a_spec(stage, PARSE), shard_epoch=1)
        ids = stage.start(COUNT)
        wait_for(lambda: isolated.status().state is RunState.RUNNING, "the task to run", seconds=150)
        assert spark_jvms() == 2
        expected = reference(queries(0, 1000))
        wait_for(lambda: sum(stage.log.end_offsets("query_counts")) >= expected.total(), "the counts")
        wait_for(lambda: isolated.status().metrics.get("memory_mb", 0) > 300, "its memory to be measured")
        isolated.runner.stop(f"{PARSE}/0")
        wait_for(lambda: isolated.status().state is RunState.STOPPED, "the task to stop")
        assert isolated.status().error == ""
        stage.stop(ids)
    finally:
        isolated.end()
    found = [(row["query"], row["second"], row["count"]) for row in stage.records("query_counts")]
    assert sorted(found) == sorted(expected)


def test_a_task_above_its_memory_is_ended_and_its_peak_is_told(spark: Any, tmp_path: Path):
    hungry = tmp_path / "pipeline.py"
    text = (ZEITGEIST / "pipeline.py").read_text()
    hungry.write_text(
        text.replace("second = record.ts // 1000", "self.all = bytearray(3 * 2**30); second = 1", 1)
    )
    stage = Stage(spark, tmp_path, hungry, CATEGORY)
    injector = stage.injector("queries")
    publish(stage, queries(0, 10), injector, now_ms=1000)
    ids = stage.start(PARSE)
    isolated = Isolated(stage, tmp_path)
    try:
        isolated.runner.start(a_spec(stage, COUNT, resources={"memory_mb": 1024}), shard_epoch=1)
        wait_for(lambda: isolated.status().state is RunState.FAILED, "the task to be ended", seconds=150)
        status = isolated.status()
        assert status.error.startswith("out of memory: it used") and "reserved 1024 MB" in status.error
        # Where the kernel limits it, it comes no further than 1024.
        assert status.metrics["memory_peak_mb"] >= 1000
    finally:
        isolated.end()
        stage.stop(ids)
