"""A compiled pipeline: jobs as values, and their JSON form for the Provision API. Pure.

Packages, outputs, stages and branches are the types of `jobs/config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.jobs.config import Branch, Output, PackageRef, Stage
from penstock.streams.compile.graph import Graph
from penstock.streams.compile.optimize import Rewrite


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInput:
    """A category that a job reads, and the columns that it reads."""

    category: str
    partitions: int
    start: str
    reads: tuple[str, ...]
    writer: str = ""  # the job of this pipeline that writes it; "": written from outside

    def to_json(self) -> dict[str, Any]:
        """The JSON form in the job's config."""
        writer = {"writer": self.writer} if self.writer else {}
        return {"category": self.category, "start": self.start, **writer}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledJob:
    """One job: inputs, stages and outputs. Without a union or join it has no branches."""

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
    settings: Mapping[str, str] = field(default_factory=dict)  # further settings of its config
    spread: bool = False  # records of a key go to all partitions in turn

    @property
    def partitions(self) -> int:
        """The number of intervals: interval p reads partition p of each input that has it."""
        return max(source.partitions for source in self.inputs)

    @property
    def operator(self) -> str:
        """The name of its operator, for example "aggregate"; "" if it has none."""
        return "" if self.computation is None else str(self.computation.get("operator", ""))

    def to_json(self) -> dict[str, Any]:
        """The body of the provisioner layer."""
        plan: dict[str, Any] = {
            "stages": [stage.model_dump(mode="json") for stage in self.stages],
            "key": self.key,
            "computation": None if self.computation is None else dict(self.computation),
            "late": self.late,
            "reads": [list(source.reads) for source in self.inputs],
        }
        if self.spread:
            plan["spread"] = True
        if self.branches:
            plan["branches"] = [branch.model_dump(mode="json") for branch in self.branches]
        return {
            "name": self.name,
            "pipeline": self.pipeline,
            "kind": self.kind,
            "package": self.package.model_dump(mode="json"),
            "partitions": self.partitions,
            "inputs": [source.to_json() for source in self.inputs],
            "outputs": [output.model_dump(mode="json") for output in self.outputs],
            "plan": plan,
            **self.settings,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPipeline:
    """What is submitted: the jobs (writers before readers), the graph, and the rewrites of it."""

    graph: Graph
    package: PackageRef
    jobs: tuple[CompiledJob, ...]
    rewrites: tuple[Rewrite, ...] = ()
    notes: tuple[str, ...] = ()  # warnings about its results, for the user

    def to_json(self) -> dict[str, Any]:
        """The body of a submission."""
        graph = self.graph.to_json()
        for node in graph["nodes"]:
            node["jobs"] = [job.name for job in self.jobs if node["name"] in job.steps]
        graph["rewrites"] = [rewrite.to_json() for rewrite in self.rewrites]
        return {
            "pipeline": self.graph.name,
            "package": self.package.model_dump(mode="json"),
            "jobs": [job.to_json() for job in self.jobs],
            "graph": graph,
        }
