"""One round's turn: what it may still give, and what becomes of a decision in it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.core.clock import Millis
from penstock.core.journal import Entry
from penstock.resources.policies.records import JobRecord
from penstock.resources.policies.round import FleetState
from penstock.resources.scaler.carry_out import changes_of, fit, one_decision
from penstock.resources.scaler.observation import Decision, Hold, Rebalance, Remaining, Resize, Step, to_data
from penstock.resources.scaler.observe import Capacity, ScalableJob, settings_of
from penstock.resources.scaler.pipeline import Edge
from penstock.resources.scaler.shapes import KINDS, TINY, Room, Shape
from penstock.tasks.messages import TaskReport

ACTOR = "autoscaler"
_SCALED = ("task_count", "threads", "resources", "partition_tasks")


class Turn:
    """What the jobs of one round have between them."""

    def __init__(
        self,
        capacity: Capacity,
        fleet: FleetState,
        reports: Mapping[str, Sequence[TaskReport]],
        now_ms: Millis,
    ) -> None:
        self.capacity, self.fleet, self.reports, self.now_ms = capacity, fleet, reports, now_ms

    @property
    def remaining(self) -> Remaining:
        """What is left after those that were first."""
        return Remaining(room=self.capacity.remaining, privileged_only=self.capacity.privileged_only)

    def short_of(self, job: ScalableJob, shape: Shape) -> str:
        """Of which resource too little is left for a shape; "": of none."""
        for kind in KINDS:
            more = shape.total(kind) - job.shape.total(kind)
            if more > 0 and more > getattr(self.capacity.remaining, kind) + TINY:
                return kind
        return ""

    def spend(self, job: ScalableJob, shape: Shape) -> None:
        """A job got a shape."""
        left = {
            kind: getattr(self.capacity.remaining, kind) - max(0.0, shape.total(kind) - job.shape.total(kind))
            for kind in KINDS
        }
        self.capacity = replace(self.capacity, remaining=Room(**left))
        if (shape.task_count, shape.mapping) != (job.task_count, job.shape.mapping):
            self.fleet = replace(self.fleet, rescales_running=self.fleet.rescales_running + 1)


def resolve(
    job: ScalableJob, decision: Step, record: JobRecord, turn: Turn
) -> tuple[Decision, Shape | None, JobRecord]:
    """The decision as it can be carried out now and the record of it, or why it is not."""
    applied = fit(decision, job)
    if not changes_of(job, applied):
        theirs = ", ".join(sorted(path for path in job.oncall if path.partition(".")[0] in _SCALED))
        if not theirs:
            return _held(decision, "but as it can be written it is so already", "shape"), None, record
        return _held(decision, f"but oncall set {theirs}", f"oncall: {theirs}"), None, record
    if short := turn.short_of(job, applied):
        return _held(decision, f"but not enough {short} is left", f"capacity: {short}"), None, record
    advice_only = bool(job.config["scaler"].get("advice_only", False))
    outcome = one_decision(
        decision, applied, job, record, turn.fleet, advice_only=advice_only, now_ms=turn.now_ms
    )
    if outcome.apply is None:
        said = outcome.said[-1]
        bound = f"{said.outcome}: {said.reason.rpartition(': ')[2]}"
        return _held(decision, f"{said.outcome}: {said.reason}", bound), None, record
    return replace(decision, reason=outcome.apply.reason), applied, outcome.record


def _held(decision: Step, why: str, bound: str) -> Hold:
    return Hold(
        reason=f"{decision.reason}; {why}",
        bound=bound,
        formula=decision.formula,
        inputs=decision.inputs,
        learnt=decision.learnt,
    )


def edges_of(jobs: Iterable[ScalableJob]) -> list[Edge]:
    """Which of these jobs feeds which: one writes what the other reads."""
    members = [*jobs]
    writers: dict[str, list[str]] = {}
    for job in members:
        for output in job.config.get("outputs", ()):
            writers.setdefault(output["category"], []).append(job.name)
    return [
        Edge(above=above, below=job.name)
        for job in members
        for source in job.config.get("inputs", ())
        for above in writers.get(source["category"], ())
        if above != job.name
    ]


def entry_of(job: ScalableJob, decision: Decision, applied: Shape | None, now_ms: Millis) -> Entry:
    """A decision for the journal: inputs, formula, bounds, reason."""
    data = to_data(decision) | {"generation": settings_of(job.config).generation}
    done = "nothing" if isinstance(decision, Hold) else type(decision).__name__.lower()
    if applied is not None and isinstance(decision, Resize | Rebalance):
        data["applied"] = applied.to_data()
        done = decision.direction
    return Entry(
        at_ms=now_ms,
        actor=ACTOR,
        kind="scale",
        subject=job.name,
        decision=done,
        reason=decision.reason,
        data=data,
    )
