"""What a pipeline compiles to: jobs as values, and their JSON as the Provision API takes it. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from penstock.streams.graph import Columns, Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageRef:
    """User code, by the hash of its bytes; `entry` is the file in it that defines the computations."""

    name: str
    version: str
    hash: str
    entry: str

    def to_json(self) -> dict[str, Any]:
        """As in a job's config."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A category that a job writes."""

    stream: str
    category: str
    partitions: int
    columns: Columns
    internal: bool

    def to_json(self) -> dict[str, Any]:
        """As in the job's config."""
        columns = [list(column) for column in self.columns]
        return {
            "stream": self.stream,
            "category": self.category,
            "partitions": self.partitions,
            "columns": columns,
            "internal": self.internal,
            "format": "typed",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterStage:
    """Keep records."""

    expr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectStage:
    """Make columns: (name, Spark SQL, type)."""

    columns: tuple[tuple[str, str, str], ...]


Stage = FilterStage | SelectStage


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledJob:
    """One job: what it reads, does and writes."""

    name: str
    pipeline: str
    kind: str
    package: PackageRef
    partitions: int
    input: str
    start: str
    stages: tuple[Stage, ...]
    key: str | None
    computation: str | None
    late: str
    outputs: tuple[Output, ...]
    steps: tuple[str, ...]  # of the graph, in order

    def to_json(self) -> dict[str, Any]:
        """The body of the provisioner layer."""
        return {
            "name": self.name,
            "pipeline": self.pipeline,
            "kind": self.kind,
            "package": self.package.to_json(),
            "partitions": self.partitions,
            "inputs": [{"category": self.input, "start": self.start}],
            "outputs": [output.to_json() for output in self.outputs],
            "plan": {
                "stages": [_stage_json(stage) for stage in self.stages],
                "key": self.key,
                "computation": None if self.computation is None else {"class": self.computation},
                "late": self.late,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPipeline:
    """What is submitted: the jobs, writers before readers, and the graph they came from."""

    graph: Graph
    package: PackageRef
    jobs: tuple[CompiledJob, ...]

    def to_json(self) -> dict[str, Any]:
        """The body of a submission."""
        graph = self.graph.to_json()
        for node in graph["nodes"]:
            node["jobs"] = [job.name for job in self.jobs if node["name"] in job.steps]
        return {
            "pipeline": self.graph.name,
            "package": self.package.to_json(),
            "jobs": [job.to_json() for job in self.jobs],
            "graph": graph,
        }


def _stage_json(stage: Stage) -> dict[str, Any]:
    if isinstance(stage, FilterStage):
        return {"op": "filter", "expr": stage.expr}
    return {"op": "select", "columns": [list(column) for column in stage.columns]}
