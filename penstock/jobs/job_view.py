"""One job for people: its layers with provenance, the merge, what runs, and what is on its way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError
from penstock.db.database import values_of
from penstock.jobs.config import JobConfig, validate_config
from penstock.jobs.guarantees import guarantees_of
from penstock.jobs.job_store import JobRecord
from penstock.jobs.layers import LayerRow, Provenance, merge_layers, provenance
from penstock.jobs.running_store import PlanRow, QuarantineRow, RunningRow

STATES = (
    "new",  # nothing of it runs yet
    "running",
    "paused",
    "stopped",
    "changing",  # a plan is open
    "behind",  # something else is expected than runs, and the next round will see to it
    "invalid",  # the layers do not fit together
    "quarantined",  # a plan was given up; what ran before runs on
    "removed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """Everything there is to know of a job at one moment."""

    name: str
    birth: str
    pipeline: str
    created_ms: Millis
    removed: bool
    expected_version: int
    layers: tuple[LayerRow, ...]
    expected: JobConfig | None  # the merge, validated, with defaults; None: it is not valid
    merged: Mapping[str, Any]  # the same as JSON, for people; as the layers say it if it is not valid
    problem: str  # why the merge is not valid, "" if it is
    running: RunningRow | None
    plan: PlanRow | None
    quarantine: QuarantineRow | None

    @property
    def config(self) -> JobConfig:
        """What is expected to run. Requires: there is no `problem`."""
        assert self.expected is not None, self.problem
        return self.expected

    @property
    def provenance(self) -> Mapping[str, Provenance]:
        """By path, who decided it; a path that is absent has its default."""
        try:
            return provenance(self.layers)
        except PenstockError:
            return {}  # the layers cannot be merged: `problem` says why

    @property
    def guarantees(self) -> list[str]:
        """What it promises about its productions, in words."""
        return [] if self.expected is None else list(guarantees_of(self.expected))

    @property
    def is_in_sync(self) -> bool:
        """Whether what runs is what is expected."""
        if self.plan is not None or self.quarantine is not None or self.problem:
            return False
        if self.running is None:
            return self.removed or self.config.state != "running"
        return self.running.expected_version == self.expected_version

    @property
    def state(self) -> str:
        """One word for people, out of `STATES`."""
        if self.removed:
            return "removed"
        if self.quarantine is not None:
            return "quarantined"
        if self.problem:
            return "invalid"
        if self.plan is not None:
            return "changing"
        if self.running is None:
            return self.config.state if self.is_in_sync else "new"
        return self.running.state if self.is_in_sync else "behind"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with every field, `state` and `is_in_sync`.

        `provenance` maps a path to {layer, actor, at_ms, reason, version}: the layer that decides it, and the
        write of that layer which last changed it. A path that is not there has its default.
        """
        return {
            "name": self.name,
            "birth": self.birth,
            "pipeline": self.pipeline,
            "created_ms": self.created_ms,
            "removed": self.removed,
            "expected_version": self.expected_version,
            "layers": [row.to_json() for row in self.layers],
            "config": self.merged,
            "guarantees": self.guarantees,
            "problem": self.problem,
            "provenance": {path: values_of(found) for path, found in self.provenance.items()},
            "running": None if self.running is None else self.running.to_json(),
            "plan": None if self.plan is None else self.plan.to_json(),
            "quarantine": None if self.quarantine is None else values_of(self.quarantine),
            "is_in_sync": self.is_in_sync,
            "state": self.state,
        }


def view_of(record: JobRecord) -> JobView:
    """The view of a record; it says what is wrong with an invalid merge instead of raising."""
    expected: JobConfig | None = None
    merged: Mapping[str, Any] = {}
    problem = ""
    try:
        merged = merge_layers(record.layers)
        expected = validate_config(record.job.name, merged)
        merged = expected.to_json()
    except PenstockError as error:
        problem = str(error)
    return JobView(
        name=record.job.name,
        birth=record.job.birth,
        pipeline=record.job.pipeline,
        created_ms=record.job.created_ms,
        removed=record.job.deleted,
        expected_version=record.job.expected_version,
        layers=record.layers,
        expected=expected,
        merged=merged,
        problem=problem,
        running=record.old,
        plan=record.plan,
        quarantine=record.quarantine,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A provisioner layer was written."""

    version: int  # the job's expected version now
    created: bool  # whether the job began a life with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A pipeline was submitted: of each job its expected version now, and what was done to it."""

    jobs: Mapping[str, int]
    done: Mapping[str, str]  # created | updated | unchanged | reset | stopped

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Submitted:
        """From a kept answer. Earlier releases kept the versions alone."""
        if set(answer) == {"jobs", "done"}:
            return cls(jobs=answer["jobs"], done=answer["done"])
        return cls(jobs=answer, done={})


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSet:
    """A job was asked to run, pause or stop."""

    version: int
    layer: str  # which was written
    effective: str  # what the merge says now: a higher layer may hold another state


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some jobs by name, and where the next page begins (None: this was the last)."""

    items: tuple[JobView, ...]
    next: str | None

    def __iter__(self) -> Iterator[JobView]:
        return iter(self.items)
