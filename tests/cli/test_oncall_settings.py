"""What an operator sets reaches the tasks: from the command, through layers and task list, to the step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.core.errors import ComputationFailed
from penstock.streams.dsl.injector import Injector
from tests.cli.by_hand import Container
from tests.cli.world import Run, World
from tests.waiting import until

HALVES = """
from penstock import Computation, Pipeline


class Halves(Computation):
    outputs = {"out": {"k": "string", "n": "bigint"}}

    def process_record(self, record, ctx):
        ctx.produce({"k": ctx.key, "n": share(record["n"])})


def share(n):
    return 100 // n


p = Pipeline("shops", partitions=1)
p.source("numbers").key_by("k").process(Halves).sink("quotients")
"""
BATCHES = """
import pyarrow as pa
from penstock import Pipeline
from penstock.streams.step.vectorised import VectorComputation


class Whole(VectorComputation):
    outputs = {"out": {"n": "bigint"}}

    def process_batch(self, records, states):
        return pa.table({"_key": pa.array([], pa.string())}), {}


p = Pipeline("whole", partitions=1)
p.source("numbers").key_by("k").process(Whole).sink("sums")
"""
SHUFFLE, JOB = "shops.by_k", "shops.halves"


class Records:
    """Records of one key, of one injector."""

    def __init__(self, world: World) -> None:
        self.injector = Injector(world.plane.log, "numbers", "test", epoch=1)

    def __call__(self, *numbers: int, ts: int = 1000) -> None:
        values = [json.dumps({"k": "a", "n": n, "ts": ts}).encode() for n in numbers]
        self.injector.publish(["a"] * len(numbers), [ts] * len(numbers), values)


@pytest.fixture
def shops(empty: World, run: Run, tmp_path: Path) -> Container:
    """A pipeline whose computation cannot take a zero."""
    folder = ("--folder", empty.folder)
    numbers = (
        "numbers",
        "--create",
        "--columns",
        "k:string,n:bigint,ts:bigint",
        "--ts",
        "ts",
        "--partitions",
        "1",
    )
    assert run("category", *numbers, "--watermark", "injector", *folder).code == 0
    (tmp_path / "shops.py").write_text(HALVES)
    done = run("submit", tmp_path / "shops.py", *folder)
    assert done.code == 0, done.err
    until(lambda: all(view.is_in_sync for view in empty.plane.jobs.every_view()))
    return Container(empty, tmp_path)


@pytest.fixture
def inject(empty: World) -> Records:
    return Records(empty)


def settle(world: World, job: str) -> None:
    until(lambda: world.plane.jobs.view(job).is_in_sync)


def test_poison_skip_by_an_operator_puts_aside_what_user_code_raises_at(
    empty: World, shops: Container, inject: Records, run: Run
):
    folder = ("--folder", empty.folder)
    inject(1, 0, 2)
    shops.step(SHUFFLE)
    with pytest.raises(ComputationFailed, match="ZeroDivisionError"):
        shops.step(JOB)
    generation = empty.plane.task_service.snapshot().jobs[JOB][0].generation

    assert run("oncall", "set", JOB, "poison=skip", "--why", "one record", *folder).code == 0
    settle(empty, JOB)
    assert "poison skip: records" in run("job", "get", JOB, *folder).text
    (spec,) = empty.plane.task_service.snapshot().jobs[JOB]
    assert (spec.config.poison, spec.generation) == ("skip", generation), "a simple change: tasks restart"
    metrics = shops.step(JOB)
    assert sorted(row["n"] for row in shops.records("quotients")) == [50, 100]
    (letter,) = shops.records(f"{JOB}.dead")
    assert letter["reason"].startswith("ZeroDivisionError")
    assert json.loads(letter["value"]) == {"k": "a", "n": 0, "ts": 1000}
    assert (metrics["bad"], metrics["lag_records"]) == (1, 0)

    # Taken back it stops again, and what was put aside stays there.
    assert run("oncall", "clear", JOB, "poison", "--why", "corrected", *folder).code == 0
    settle(empty, JOB)
    inject(0)
    shops.step(SHUFFLE)
    with pytest.raises(ComputationFailed, match="ZeroDivisionError"):
        shops.step(JOB)
    assert len(shops.records(f"{JOB}.dead")) == 1


def test_an_operator_may_stop_a_job_at_records_that_its_pipeline_skips(
    empty: World, shops: Container, inject: Records, run: Run, tmp_path: Path
):
    folder = ("--folder", empty.folder)
    (tmp_path / "shops.py").write_text(HALVES.replace("    outputs", '    poison = "skip"\n    outputs'))
    assert run("submit", tmp_path / "shops.py", *folder).code == 0
    assert run("oncall", "set", JOB, "poison=fail", "--why", "look at it", *folder).code == 0
    settle(empty, JOB)
    inject(0)
    shops.step(SHUFFLE)
    with pytest.raises(ComputationFailed, match="ZeroDivisionError"):
        shops.step(JOB)


def test_skip_is_refused_where_no_single_record_can_be_blamed(
    empty: World, shops: Container, run: Run, tmp_path: Path
):
    folder = ("--folder", empty.folder)
    (tmp_path / "whole.py").write_text(BATCHES)
    assert run("submit", tmp_path / "whole.py", *folder).code == 0
    said = run("oncall", "set", "whole.whole", "poison=skip", "--why", "x", *folder).is_refused()
    assert "process_batch" in said


def test_late_records_count_once_an_operator_says_so(
    empty: World, shops: Container, inject: Records, run: Run
):
    """Plan: `plan.late=process` is what the doctor prints for a job with late records. One comes before."""
    folder = ("--folder", empty.folder)
    log = empty.plane.log
    inject(10, ts=1000)
    inject.injector.report_low(5000, now_ms=1)
    log.advance("numbers", now_ms=10_000)
    inject(20, ts=2000)
    for _ in range(2):
        shops.step(SHUFFLE)
        shops.step(JOB)
    assert [row["n"] for row in shops.records("quotients")] == [10]
    assert run("oncall", "set", JOB, "plan.late=process", "--why", "late records count", *folder).code == 0
    settle(empty, JOB)
    inject(50, ts=3000)
    shops.step(SHUFFLE)
    shops.step(JOB)
    assert [row["n"] for row in shops.records("quotients")] == [10, 2]
