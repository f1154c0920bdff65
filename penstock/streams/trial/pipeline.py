"""Tests of a whole pipeline in memory: its compiled jobs run without Spark.

Arrow computes the stages; expressions that only Spark can compute are refused.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import PipelineError
from penstock.jobs.config import JobConfig, PackageRef, validate_config
from penstock.jobs.provision import cannot_run
from penstock.streams.bus.log import LOW_MAX, CategorySpec, partitions_of
from penstock.streams.catalogue import LogCatalogue, category_from_json
from penstock.streams.compile.packages import load_pipeline
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.dsl.computation import Computation
from penstock.streams.dsl.pipeline import Pipeline
from penstock.streams.step.arrow_stages import ArrowPlan, as_type, in_arrow, plan_in_arrow
from penstock.streams.step.step import InputSpec, input_of
from penstock.streams.step.vectorised import VectorComputation
from penstock.streams.trial.run import Produced, Scripted, TrialJob

# --- stages without Spark --------------------------------------------------------------------------------

Columns = Sequence[tuple[str, str]]


def stages_in_arrow(
    job: str, plan: Mapping[str, Any], inputs: Sequence[InputSpec]
) -> Callable[[pa.RecordBatch], list[pa.RecordBatch]]:
    """A job's stages as a function of rows of one input; PipelineError if only Spark can compute them."""
    branches = plan.get("branches") or [{"input": 0, "stages": []}]
    common = {"stages": plan["stages"], "key": plan.get("key")}
    plans_of: dict[int, list[tuple[ArrowPlan, ArrowPlan]]] = {}
    for branch in branches:
        own = _planned(job, {"stages": branch["stages"]}, inputs[branch["input"]].columns)
        plans_of.setdefault(branch["input"], []).append((own, _planned(job, common, own.columns)))
    prefixed = bool(plan.get("branches"))

    def run(rows: pa.RecordBatch) -> list[pa.RecordBatch]:
        number = rows.column("_input")[0].as_py()
        plain = _without_prefix(rows, number) if prefixed else rows
        return [
            made
            for own, rest in plans_of[number]
            for before in _computed(job, own, plain)
            for made in _computed(job, rest, before)
        ]

    return run


def _planned(job: str, plan: Mapping[str, Any], columns: Columns) -> ArrowPlan:
    found = plan_in_arrow(plan, columns)
    if found is None:
        raise PipelineError(
            f"job {job} cannot run without Spark",
            why=f"only Spark can compute {', '.join(_only_spark(plan, columns))}",
            fix="test the steps before and after it separately, or run the whole "
            "pipeline with `penstock run`",
        )
    return found


def _only_spark(plan: Mapping[str, Any], columns: Columns) -> Iterator[str]:
    """The expressions that Arrow cannot compute."""
    stages = [*plan["stages"], *([{"op": "key", "expr": plan["key"]}] if plan.get("key") else [])]
    for stage in stages:
        if stage["op"] == "explode":
            yield f"explode({stage['array']})"
            columns = (*columns, *((name, kind) for name, kind in stage["columns"]))
        elif stage["op"] == "select":
            for name, text, kind in stage["columns"]:
                if not _has_form(text, kind, columns):
                    yield f"{text} AS {name}"
            columns = tuple((name, kind) for name, _, kind in stage["columns"])
        elif not _has_form(stage["expr"], "string" if stage["op"] == "key" else "", columns):
            yield str(stage["expr"])


def _has_form(text: str, kind: str, columns: Columns) -> bool:
    found = in_arrow(text, dict(columns))
    return found is not None and (not kind or as_type(found, kind) is not None)


def _computed(job: str, plan: ArrowPlan, rows: pa.RecordBatch) -> list[pa.RecordBatch]:
    if not rows.num_rows:
        return []
    made = plan.run(rows)
    if made is None:
        raise PipelineError(
            f"job {job} cannot process these records without Spark",
            why="Arrow and Spark may differ for some values: text beyond ASCII, NaN, overflow",
            fix="use other values, or run the whole pipeline with `penstock run`",
        )
    return made


def _without_prefix(rows: pa.RecordBatch, number: int) -> pa.RecordBatch:
    """The system columns, and the columns of this input without the prefix."""
    prefix = f"_i{number}_"
    selected = [
        name
        for name in rows.schema.names
        if not name.startswith("_i") or name == "_input" or name.startswith(prefix)
    ]
    chosen = rows.select(selected)
    return chosen.rename_columns([name.removeprefix(prefix) for name in selected])


# --- pipelines -------------------------------------------------------------------------------------------

# Not used: the code is in this process already.
_PACKAGE = PackageRef(name="trial", version="1", hash="0" * 64, entry="trial.py")

Category = CategorySpec | Mapping[str, Any] | str | Path


class PipelineRun(Scripted):
    """A pipeline in memory: a `Pipeline`, or the path of its file, and the categories that it reads.

    A category is a CategorySpec, its JSON form, or the path of a JSON file. Arrow computes the expressions;
    the constructor refuses those that only Spark can compute.
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
        """Add a record to a category, in the partition of its key; without key in the first one."""
        spec = self._source(category)
        unknown = [name for name in columns if name not in dict(spec.columns)]
        if unknown:
            raise PipelineError(
                f"category {category!r} has no column {unknown[0]!r}",
                why=f"it has {', '.join(name for name, _ in spec.columns)}",
                fix="use only columns of the category; missing columns are null",
            )
        own: dict[str, Any] = {name: columns.get(name) for name, _ in spec.columns}
        if spec.format == "json":
            own = {"_value": json.dumps(_stamped(columns, spec, ts)).encode()}
        elif spec.format != "typed":
            raise PipelineError(
                f"records of {category!r} cannot be made here",
                why=f"its format is {spec.format!r}",
                fix="pass the category to this run with format json or typed",
            )
        partition = 0 if key is None else int(partitions_of(pa.array([key]), spec.partitions)[0])
        self._append(category, partition, {"_ts": ts, "_key": key, **own})
        self._called(f"record({category!r}, {ts})")

    def advance_watermark(self, low: Millis, category: str = "") -> None:
        """Set the low watermark of the category, or of all inputs.

        The watermark of an event-time category follows its records; this call can only end it.
        """
        for name in [self._source(category).name] if category else self._specs:
            if self._specs[name].watermark != "event_time" or low >= LOW_MAX:
                self._report(name, low)
        self._called(f"advance_watermark({low})")

    def close(self) -> None:
        """End all inputs."""
        self.advance_watermark(LOW_MAX)

    def outputs(self, sink: str) -> list[dict[str, Any]]:
        """The columns of all records of a sink, partition by partition."""
        return [dict(made.values) for made in self.productions(sink)]

    def productions(self, sink: str) -> list[Produced]:
        """All records of a sink with timestamps and keys, partition by partition."""
        if sink not in self._sinks:
            raise PipelineError(
                f"the pipeline has no sink {sink!r}",
                why=f"it writes {', '.join(self._sinks)}",
                fix="use one of these",
            )
        return self._records(sink)

    def result(self) -> dict[str, Any]:
        """The records of the sinks, sorted, because records of different partitions have no order."""
        return {f"sink {sink!r}": sorted(self.productions(sink), key=repr) for sink in self._sinks}

    def _source(self, category: str) -> CategorySpec:
        if category not in self._specs:
            raise PipelineError(
                f"category {category!r} is not an input of this run",
                why=f"its inputs are {', '.join(self._specs) or 'none'}",
                fix="write to one of these, or pass the category to the run",
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
        return TrialJob(
            name=config["name"], config=JobConfig.from_stored(config), stages=stages, computation=made
        )


def _spec_of(category: Category) -> CategorySpec:
    if isinstance(category, CategorySpec):
        return category
    if isinstance(category, str | Path):
        return category_from_json(json.loads(Path(category).read_text(encoding="utf-8")))
    return category_from_json(category)


def _stamped(columns: Mapping[str, Any], spec: CategorySpec, ts: Millis) -> dict[str, Any]:
    """The JSON record, with the event time in its column if the category has one."""
    return {**columns, **({spec.ts_column: ts} if spec.ts_column else {})}
