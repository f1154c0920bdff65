"""A query that a user brings as it is: its place lasts, two never run, and its mistakes are told."""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.jobs.config import JobConfig, validate_config
from penstock.jobs.tasks import single_task
from penstock.streams.compile.packages import build_package
from penstock.streams.data_plane import StreamDataPlane
from penstock.streams.package_store import UnpackedPackages
from penstock.streams.places import open_log, open_rows
from tests.support.stage import wait_for

CODE = """
import pathlib

def elsewhere(spark, checkpoint, arguments):
    rows = spark.readStream.format("rate").load()
    return rows.writeStream.format("noop").option("checkpointLocation", arguments["own"]).start()

def nothing(spark, checkpoint, arguments):
    return 5

def counted(spark, checkpoint, arguments):
    rows = spark.readStream.schema("n bigint").json(arguments["source"])
    def keep(batch, number):
        counts = {row["rest"]: row["count"] for row in batch.collect()}
        pathlib.Path(arguments["counts"]).write_text(repr(counts))
    counts = rows.groupBy((rows.n % 3).alias("rest")).count()
    return (
        counts.writeStream.outputMode("complete").foreachBatch(keep).option("checkpointLocation", checkpoint)
        .trigger(processingTime="200 milliseconds").start()
    )

def copied(spark, checkpoint, arguments):
    rows = spark.readStream.schema("n bigint").json(arguments["source"])
    return (
        rows.writeStream.format("json").option("path", arguments["target"]).option("checkpointLocation", checkpoint)
        .trigger(processingTime="200 milliseconds").start()
    )
"""
JOB = "own.query"


class OwnQueries:
    """A folder, a package, and engines that run its functions."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        (folder / "source").mkdir()
        entry = folder / "queries.py"
        entry.write_text(CODE)
        self.package = build_package(entry)
        self.bus, self.rows = f"embedded:{folder / 'bus'}", f"sqlite:{folder / 'rows'}"
        self.deaths: list[str] = []

    def config(self, function: str, **arguments: str) -> JobConfig:
        body = {
            "pipeline": "own",
            "kind": "spark",
            "package": self.package.ref().model_dump(),
            "plan": {"computation": {"function": function}},
            "arguments": {
                "source": str(self.folder / "source"),
                "target": str(self.folder / "out"),
                **arguments,
            },
        }
        config = validate_config(JOB, body)
        StreamDataPlane(open_log(self.bus), open_rows(self.rows)).prepare(JOB, "b1", config)
        return config

    def engine(self) -> Any:
        from penstock.streams.spark.tasks import SparkTasks

        shelf = UnpackedPackages(self.folder / "packages", lambda hash_: self.package.data)
        return SparkTasks(
            self.spark,
            bus=self.bus,
            rows=self.rows,
            package_folder=shelf.folder_of,
            checkpoints=self.folder / "scratch",
            die=self.deaths.append,
        )

    def start(self, engine: Any, config: JobConfig, *, epoch: int = 1) -> None:
        engine.start(single_task(JOB, "b1", config), shard_epoch=epoch)

    def add(self, name: str, *numbers: int) -> None:
        new = self.folder / f".{name}"
        new.write_text("".join(json.dumps({"n": n}) + "\n" for n in numbers))
        new.rename(self.folder / "source" / f"{name}.json")

    def out(self) -> list[int]:
        found = []
        for path in (self.folder / "out").glob("*.json"):
            found += [json.loads(line)["n"] for line in path.read_text().splitlines()]
        return sorted(found)


@pytest.fixture
def queries(spark: Any, tmp_path: Path) -> OwnQueries:
    return OwnQueries(spark, tmp_path)


def state(engine: Any) -> str:
    return str(engine.poll()[0].state)


def stop(engine: Any) -> None:
    engine.stop(f"{JOB}/0")
    wait_for(lambda: state(engine) in ("stopped", "failed", "fenced"), "the end")


@pytest.mark.smoke
def test_it_goes_on_from_its_checkpoint_and_never_runs_twice(queries: OwnQueries):
    """Run, a second start is refused, stop; a successor goes on from a copy; a newer owner ends it as fenced."""
    config = queries.config("copied")
    queries.add("a", 1, 2, 3)
    first, second = queries.engine(), queries.engine()
    queries.start(first, config)
    wait_for(lambda: queries.out() == [1, 2, 3] and state(first) == "running", "the first rows")
    queries.start(second, config)
    wait_for(lambda: state(second) == "failed", "the second start to be refused")
    assert "runs already" in second.poll()[0].error and state(first) == "running"
    stop(first)
    second.forget(f"{JOB}/0")
    queries.add("b", 4)
    queries.start(second, config, epoch=2)
    wait_for(lambda: queries.out() == [1, 2, 3, 4], "the successor")
    birth = hashlib.sha256(b"b1/spark/0/0").hexdigest()[:16]
    kept = sorted(path.name for path in (queries.folder / "query_checkpoints" / birth).iterdir())
    assert kept == ["1", "2", "lease"]
    from penstock.streams.rows.row_store import IntervalRef

    ref = IntervalRef(job=JOB, job_birth="b1", partition=0, birth=birth)
    assert open_rows(queries.rows).peek(ref).offsets == {"checkpoint": 2}
    open_rows(queries.rows).fence(ref, generation=9)
    wait_for(lambda: state(second) == "fenced", "the old owner to be fenced")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nothing", "started no query"),
        ("absent", "has no function 'absent'"),
        ("elsewhere", "checkpoint elsewhere"),
    ],
)
def test_what_is_no_query_of_ours_is_told(queries: OwnQueries, function: str, said: str):
    engine = queries.engine()
    queries.start(engine, queries.config(function, own=str(queries.folder / "own")))
    wait_for(lambda: state(engine) == "failed", "the failure")
    assert said in engine.poll()[0].error


def test_its_state_goes_with_its_checkpoint(queries: OwnQueries):
    """Counts go on where the last life ended, on a copy of its state."""
    counts = queries.folder / "counts"
    config = queries.config("counted", counts=str(counts))
    queries.add("a", *range(9))
    engine = queries.engine()
    queries.start(engine, config)
    wait_for(lambda: _counts(counts) == {0: 3, 1: 3, 2: 3}, "the first counts")
    stop(engine)
    engine.forget(f"{JOB}/0")
    queries.add("b", 9)
    queries.start(engine, config, epoch=2)
    wait_for(lambda: _counts(counts) == {0: 4, 1: 3, 2: 3}, "the next life")
    stop(engine)


def _counts(path: Path) -> dict[int, int]:
    text = path.read_text() if path.exists() else ""
    return dict(ast.literal_eval(text)) if text.endswith("}") else {}
