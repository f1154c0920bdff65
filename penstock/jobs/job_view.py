"""One job for people: its layers with provenance, the merge, what runs, and what is on its way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError
from penstock.jobs.config import validate_config
from penstock.jobs.job_store import JobRecord
from penstock.jobs.layers import LayerRow, merge_layers, provenance
from penstock.jobs.running_store import PlanRow, QuarantineRow, RunningRow


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """Everything there is to know of a job at one moment."""

    name: str
    birth: str
    pipeline: str
    created_ms: Millis
    expected_version: int
    layers: tuple[LayerRow, ...]
    config: Mapping[str, Any]  # the merge, validated, with defaults; as merged if it is not valid
    problem: str  # why the merge is not valid, "" if it is
    provenance: Mapping[str, str]  # path -> layer; a path that is absent has its default
    running: RunningRow | None
    plan: PlanRow | None
    quarantine: QuarantineRow | None

    @property
    def is_in_sync(self) -> bool:
        """Whether what runs is what is expected."""
        if self.plan is not None or self.quarantine is not None or self.problem:
            return False
        if self.running is None:
            return self.config.get("state") == "stopped"
        return self.running.expected_version == self.expected_version

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_in_sync": self.is_in_sync}


def view_of(record: JobRecord) -> JobView:
    """The view of a record; it says what is wrong with an invalid merge instead of raising."""
    config: Mapping[str, Any] = {}
    decided: Mapping[str, str] = {}
    problem = ""
    try:
        config = merge_layers(record.layers)
        decided = provenance(record.layers)
        config = validate_config(record.job.name, config).to_json()
    except PenstockError as error:
        problem = str(error)
    return JobView(
        name=record.job.name,
        birth=record.job.birth,
        pipeline=record.job.pipeline,
        created_ms=record.job.created_ms,
        expected_version=record.job.expected_version,
        layers=record.layers,
        config=config,
        problem=problem,
        provenance=decided,
        running=record.old,
        plan=record.plan,
        quarantine=record.quarantine,
    )
