"""A whole pipeline tried by hand: its jobs as they are planned, in memory, without Spark."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import PipelineError
from penstock.jobs.config import validate_config
from penstock.jobs.provision import cannot_run
from penstock.streams.bus.log import LOW_MAX, CategorySpec
from penstock.streams.catalogue import LogCatalogue, category_from_json
from penstock.streams.compiled import PackageRef
from penstock.streams.computation import Computation
from penstock.streams.keys import partitions_of
from penstock.streams.packages import load_pipeline
from penstock.streams.pipeline import Pipeline
from penstock.streams.plan import compile_pipeline
from penstock.streams.task import input_of
from penstock.streams.trial import TrialJob
from penstock.streams.trial_run import Produced, Scripted
from penstock.streams.trial_stages import stages_in_arrow
from penstock.streams.vectorised import VectorComputation

# A task would find its code by this; here it is in this process already.
_PACKAGE = PackageRef(name="trial", version="1", hash="0" * 64, entry="trial.py")

Category = CategorySpec | Mapping[str, Any] | str | Path


class PipelineRun(Scripted):
    """A pipeline in memory: a `Pipeline`, or the path of its file, and the categories that it reads.

    A category is given as its JSON form, or as the path of such a file. Expressions are computed by Arrow;
    one that only Spark computes is named when the run is made.
    """

    def __init__(self, pipeline: Pipeline | str | Path, *categories: Category) -> None:
        super().__init__()
        if not isinstance(pipeline, Pipeline):
            pipeline = load_pipeline(Path(pipeline))
        self._specs = {spec.name: spec for spec in map(_spec_of, categories)}
        for spec in self._specs.values():
            self.trial.log.create(spec)
            self.trial.log.register_producer(spec.name, "script")
        compiled = compile_pipeline(pipeline, LogCatalogue(self.trial.log), _PACKAGE)
        for body in compiled.to_json()["jobs"]:
            config = validate_config(body["name"], body).to_json()
            self.trial.add(self._job(config, pipeline.computations))
        self._sinks = sorted({o.category for job in compiled.jobs for o in job.outputs if not o.internal})

    def record(self, category: str, ts: Millis, key: str | None = None, /, **columns: Any) -> None:
        """A record arrives in a category. Its key says in which partition: the first one without."""
        spec = self._source(category)
        unknown = [name for name in columns if name not in dict(spec.columns)]
        if unknown:
            raise PipelineError(
                f"category {category!r} has no column {unknown[0]!r}",
                why=f"it has {', '.join(name for name, _ in spec.columns)}",
                fix="give only columns of the category; those that are missing are null",
            )
        own: dict[str, Any] = {name: columns.get(name) for name, _ in spec.columns}
        if spec.format == "json":
            own = {"_value": json.dumps(_stamped(columns, spec, ts)).encode()}
        elif spec.format != "typed":
            raise PipelineError(
                f"records of {category!r} cannot be made here",
                why=f"its format is {spec.format!r}",
                fix="give the category to this run as json or typed",
            )
        partition = 0 if key is None else int(partitions_of(pa.array([key]), spec.partitions)[0])
        self._append(category, partition, {"_ts": ts, "_key": key, **own})
        self._called(f"record({category!r}, {ts})")

    def advance_watermark(self, low: Millis, category: str = "") -> None:
        """From now on no record before `low` comes, in the category or in all that are read.

        A category that takes its watermark from event time follows its records; it only knows the end.
        """
        for name in [self._source(category).name] if category else self._specs:
            if self._specs[name].watermark != "event_time" or low >= LOW_MAX:
                self._report(name, low)
        self._called(f"advance_watermark({low})")

    def close(self) -> None:
        """Nothing more comes."""
        self.advance_watermark(LOW_MAX)

    def outputs(self, sink: str) -> list[dict[str, Any]]:
        """The columns of all records of a sink, partition by partition."""
        return [dict(made.values) for made in self.productions(sink)]

    def productions(self, sink: str) -> list[Produced]:
        """All records of a sink with stamps and keys, partition by partition."""
        if sink not in self._sinks:
            raise PipelineError(
                f"the pipeline has no sink {sink!r}",
                why=f"it writes {', '.join(self._sinks)}",
                fix="ask for one of these",
            )
        return self._records(sink)

    def result(self) -> dict[str, Any]:
        """The sinks. Between records of two partitions there is no order, so these are sorted."""
        return {f"sink {sink!r}": sorted(self.productions(sink), key=repr) for sink in self._sinks}

    def _source(self, category: str) -> CategorySpec:
        if category not in self._specs:
            raise PipelineError(
                f"category {category!r} is not read here",
                why=f"this run was given {', '.join(self._specs) or 'no category'}",
                fix="write to one of these, or give the run the category too",
            )
        return self._specs[category]

    def _job(self, config: Mapping[str, Any], computations: Mapping[str, type]) -> TrialJob:
        made: Callable[[], Computation | VectorComputation] | None = None
        refused = cannot_run(config["name"], config)
        if refused is not None:
            raise PipelineError(refused.what, why=refused.why, fix=refused.fix)
        if config["kind"] == "stateful" and "class" in config["plan"]["computation"]:
            blank = computations[config["plan"]["computation"]["class"]]()
            made = lambda: copy.deepcopy(blank)  # noqa: E731
        sources = [self.trial.log.describe(item["category"]) for item in config["inputs"]]
        reads = config["plan"]["reads"]
        inputs = [input_of(source, columns) for source, columns in zip(sources, reads, strict=True)]
        stages = stages_in_arrow(config["name"], config["plan"], inputs)
        return TrialJob(name=config["name"], config=config, stages=stages, computation=made)


def _spec_of(category: Category) -> CategorySpec:
    if isinstance(category, CategorySpec):
        return category
    if isinstance(category, str | Path):
        return category_from_json(json.loads(Path(category).read_text(encoding="utf-8")))
    return category_from_json(category)


def _stamped(columns: Mapping[str, Any], spec: CategorySpec, ts: Millis) -> dict[str, Any]:
    """A JSON record whose event time is in one of its columns has it there."""
    return {**columns, **({spec.ts_column: ts} if spec.ts_column else {})}
