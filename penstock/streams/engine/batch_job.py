"""One Spark batch job from a compiled pipeline to a folder of results: whole, or not there at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.core.errors import ConfigError, PipelineError
from penstock.streams.bus.log import Category
from penstock.streams.engine.backfill import Code, Span, read_category, read_files, run_jobs
from penstock.streams.engine.run_errors import readable
from penstock.streams.engine.session import build_session, end_session
from penstock.streams.record_lines import Lines

FORMATS = ("parquet", "ndjson")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """What to run, over what, and where the rows go. A category without `files` is read from the bus."""

    jobs: Sequence[Mapping[str, Any]]
    categories: Sequence[Category]  # what the pipeline reads
    files: Mapping[str, Sequence[str]]
    form: Lines
    bus: str
    span: Span
    code: Code
    target: Path
    format: str


def run_batch(job: BatchJob, *, scratch: Path, cores: int) -> dict[str, int]:
    """Run it in a session of its own; returns how many rows each category got."""
    if job.target.exists():
        raise ConfigError(
            f"{job.target} is there already",
            why="results of two runs would be mixed",
            fix="name a folder that does not exist",
        )
    spark = build_session("penstock backfill", cores, scratch)
    try:
        return _run(spark, job)
    except (PySparkException, Py4JJavaError) as error:
        raise PipelineError(
            "the batch failed",
            why=readable(error),
            fix="correct what is named and run it again; nothing was written",
        ) from error
    finally:
        end_session(spark)


def _run(spark: SparkSession, job: BatchJob) -> dict[str, int]:
    inputs = {category.spec.name: _input(spark, job, category) for category in job.categories}
    frames = run_jobs(job.jobs, inputs, span=job.span, code=job.code)
    unfinished = job.target.with_name(f".{job.target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        counts = {}
        for name, rows in sorted(frames.items()):
            counts[name] = _written(spark, rows, str(unfinished / name), job.format)
        os.rename(unfinished, job.target)
        return counts
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _input(spark: SparkSession, job: BatchJob, category: Category) -> DataFrame:
    paths = job.files.get(category.spec.name)
    if paths:
        return read_files(spark, paths, category, job.form)
    return read_category(spark, job.bus, category)


def _written(spark: SparkSession, rows: DataFrame, path: str, format_: str) -> int:
    if format_ == "parquet":
        rows.write.parquet(path)
        return spark.read.parquet(path).count()
    rows.write.option("ignoreNullFields", "false").json(path)
    return spark.read.text(path).count()
