"""A catalogue, two computations, and short ways to compile a pipeline over them."""

from __future__ import annotations

from pathlib import Path

from penstock.jobs.config import PackageRef
from penstock.streams.bus.log import CategorySpec
from penstock.streams.catalogue import StaticCatalogue
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.dsl.computation import Computation
from penstock.streams.dsl.pipeline import Pipeline

EXAMPLE = Path(__file__).parents[2] / "examples" / "zeitgeist"
PACKAGE = PackageRef(name="zeitgeist", version="1", hash="ab" * 32, entry="pipeline.py")
QUERIES = CategorySpec(
    name="queries",
    partitions=3,
    columns=(("query", "string"), ("lang", "string"), ("ts", "bigint"), ("score", "double")),
    format="json",
    watermark="injector",
    ts_column="ts",
)
EVENTS = CategorySpec(name="events", partitions=2, columns=(("user", "string"), ("n", "int")))
CATALOGUE = StaticCatalogue([QUERIES, EVENTS])


class Count(Computation):
    outputs = {"out": {"query": "string", "n": "bigint"}}


class Watch(Computation):
    outputs = {"counts": {"query": "string", "n": "bigint"}, "alerts": {"query": "string", "n": "bigint"}}
    late = "process"


def a_pipeline(partitions=4):
    return Pipeline("p", partitions=partitions)


def compiled(pipeline, catalogue=CATALOGUE):
    return compile_pipeline(pipeline, catalogue, PACKAGE)


def jobs_of(pipeline, catalogue=CATALOGUE):
    return {job["name"]: job for job in compiled(pipeline, catalogue).to_json()["jobs"]}


def out_of(job, stream="out"):
    return next(output for output in job["outputs"] if output["stream"] == stream)
