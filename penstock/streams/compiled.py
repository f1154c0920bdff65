"""What a pipeline compiles to: jobs as values, and their JSON as the Provision API takes it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.streams.graph import Columns, Graph
from penstock.streams.optimize import Rewrite


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
class JobInput:
    """A category that a job reads, and which of its columns."""

    category: str
    partitions: int
    start: str
    reads: tuple[str, ...]
    writer: str = ""  # the job of this pipeline that makes it; "": it comes from outside

    def to_json(self) -> dict[str, Any]:
        """As in the job's config."""
        writer = {"writer": self.writer} if self.writer else {}
        return {"category": self.category, "start": self.start, **writer}


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterStage:
    """Keep records."""

    expr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectStage:
    """Make columns: (name, Spark SQL, type)."""

    columns: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplodeStage:
    """Make a record of each element of an array; `columns`: position (if wanted) and element."""

    array: str
    type: str
    outer: bool
    columns: Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStage:
    """Give records their key on the way, from columns that are gone later."""

    expr: str


Stage = FilterStage | SelectStage | ExplodeStage | KeyStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """What happens to the records of one input before they come together with others."""

    input: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledJob:
    """One job: what it reads, does and writes. Without a union or join it has no branches."""

    name: str
    pipeline: str
    kind: str
    package: PackageRef
    inputs: tuple[JobInput, ...]
    branches: tuple[Branch, ...]
    stages: tuple[Stage, ...]
    key: str | None
    computation: Mapping[str, Any] | None
    late: str
    outputs: tuple[Output, ...]
    steps: tuple[str, ...]  # of the graph, in order
    settings: Mapping[str, str] = field(default_factory=dict)  # of its config, beside what is above
    spread: bool = False  # records of a key go to all partitions in turn

    @property
    def partitions(self) -> int:
        """Interval p reads partition p of each input that has one."""
        return max(source.partitions for source in self.inputs)

    @property
    def operator(self) -> str:
        """What it runs instead of user code, as in "aggregate"; "" if it runs none."""
        return "" if self.computation is None else str(self.computation.get("operator", ""))

    def to_json(self) -> dict[str, Any]:
        """The body of the provisioner layer."""
        plan: dict[str, Any] = {
            "stages": [stage_json(stage) for stage in self.stages],
            "key": self.key,
            "computation": None if self.computation is None else dict(self.computation),
            "late": self.late,
            "reads": [list(source.reads) for source in self.inputs],
        }
        if self.spread:
            plan["spread"] = True
        if self.branches:
            plan["branches"] = [
                {"input": branch.input, "stages": [stage_json(stage) for stage in branch.stages]}
                for branch in self.branches
            ]
        return {
            "name": self.name,
            "pipeline": self.pipeline,
            "kind": self.kind,
            "package": self.package.to_json(),
            "partitions": self.partitions,
            "inputs": [source.to_json() for source in self.inputs],
            "outputs": [output.to_json() for output in self.outputs],
            "plan": plan,
            **self.settings,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPipeline:
    """What is submitted: the jobs, writers before readers, their graph, and what was rewritten in it."""

    graph: Graph
    package: PackageRef
    jobs: tuple[CompiledJob, ...]
    rewrites: tuple[Rewrite, ...] = ()
    notes: tuple[str, ...] = ()  # what people should know before they rely on its results

    def to_json(self) -> dict[str, Any]:
        """The body of a submission."""
        graph = self.graph.to_json()
        for node in graph["nodes"]:
            node["jobs"] = [job.name for job in self.jobs if node["name"] in job.steps]
        graph["rewrites"] = [rewrite.to_json() for rewrite in self.rewrites]
        return {
            "pipeline": self.graph.name,
            "package": self.package.to_json(),
            "jobs": [job.to_json() for job in self.jobs],
            "graph": graph,
        }


def stage_json(stage: Stage) -> dict[str, Any]:
    """A stage as in a job's plan."""
    match stage:
        case FilterStage():
            return {"op": "filter", "expr": stage.expr}
        case SelectStage():
            return {"op": "select", "columns": [list(column) for column in stage.columns]}
        case ExplodeStage():
            columns = [list(column) for column in stage.columns]
            return {
                "op": "explode",
                "array": stage.array,
                "type": stage.type,
                "outer": stage.outer,
                "columns": columns,
            }
        case KeyStage():
            return {"op": "key", "expr": stage.expr}
