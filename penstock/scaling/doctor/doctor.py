"""The doctor: runs all rules of the four categories on one patient, the worst finding first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.clock import Millis
from penstock.scaling.doctor import config_rules, data_rules, failure_rules, resource_rules
from penstock.scaling.doctor.patient import METRICS, MINUTES, Examination, Finding, Patient, Rule, rank
from penstock.scaling.metrics.frames import MINUTE_MS, Frame, NoFrame
from penstock.scaling.policies.facts import JobFacts, TaskFacts
from penstock.scaling.policies.policy import Cause, ControlSettings, Policy, RaiseAlert, Resolution, Symptom

RULES: tuple[Rule, ...] = (
    *resource_rules.RULES,
    *failure_rules.RULES,
    *config_rules.RULES,
    *data_rules.RULES,
)


def examine(patient: Patient) -> Examination:
    """All findings about a job, the causes ruled out, and the rules that lack data."""
    findings: list[Finding] = []
    ruled_out: list[str] = []
    not_known: list[tuple[str, str]] = []
    for rule in RULES:
        found = [*rule(patient)]
        name = rule.__name__.replace("_", " ")
        findings += [each for each in found if isinstance(each, Finding)]
        not_known += [(name, each.reason) for each in found if not isinstance(each, Finding)]
        if not found:
            ruled_out.append(name)
    return Examination(
        job=patient.job,
        findings=tuple(sorted(findings, key=rank)),
        ruled_out=tuple(ruled_out),
        not_known=tuple(not_known),
    )


def with_now(
    stored: Frame | NoFrame, job: str, tasks: Sequence[TaskFacts], *, task_count: int, now_ms: Millis
) -> Frame | NoFrame:
    """The stored minutes, plus the newest reports of all tasks as the last one.

    Counters per minute (restarts, out of memory) are unknown for this open minute.
    """
    numbers = _numbers(tasks, task_count)
    if isinstance(stored, NoFrame) or not stored.values:
        if not numbers:
            if isinstance(stored, NoFrame):
                return stored
            return NoFrame(job=job, reason=_why_no_numbers(tasks, task_count))
        values = {name: np.array([value]) for name, value in numbers.items()}
        return Frame(job=job, first_minute=now_ms // MINUTE_MS, values=values)
    values = {name: np.append(points, numbers.get(name, np.nan)) for name, points in stored.values.items()}
    return Frame(job=job, first_minute=stored.first_minute, values=values)


def _numbers(tasks: Sequence[TaskFacts], task_count: int) -> dict[str, float]:
    """The newest reports, aggregated as in `frames.METRICS`; empty unless all tasks report."""
    if not tasks or len(tasks) < task_count or any(task.state != "running" for task in tasks):
        return {}
    return {
        "lag_s": _over(tasks, "lag_s", max),
        "lag_records": _over(tasks, "lag_records", sum),
        "busy": _over(tasks, "busy", max),
        "busy_mean": _over(tasks, "busy", sum) / len(tasks),
        "ingest_rate": _over(tasks, "arrival", sum),
        "processed_rate": _over(tasks, "rate", sum),
        "cpu": _over(tasks, "cpu", sum),
        "memory_task_mb": _over(tasks, "memory_mb", max),
    }


def _why_no_numbers(tasks: Sequence[TaskFacts], task_count: int) -> str:
    if not tasks:
        return "none of its tasks reports"
    running = sum(task.state == "running" for task in tasks)
    return f"{running} of {max(task_count, len(tasks))} tasks run and report"


def _over(tasks: Sequence[TaskFacts], name: str, add: Callable[[list[float]], float]) -> float:
    found = [getattr(task, name) for task in tasks]
    return float("nan") if None in found else float(add(found))


class JobDoctor(Policy):
    """Raises an alarm for the worst finding; `penstock doctor` shows all of them."""

    name = "doctor"
    priority = 0
    if_known = METRICS  # missing metrics are part of its result
    minutes = MINUTES

    def __init__(self) -> None:
        # Cache for the three steps. Assigned at once, because threads share this policy.
        self._last: tuple[JobFacts | None, Finding | None] = (None, None)

    def _worst(self, facts: JobFacts) -> Finding | None:
        seen, found = self._last
        if seen is not facts:
            found = worst_of(patient_of(facts))
            self._last = facts, found
        return found

    def detect(self, facts: JobFacts, settings: ControlSettings) -> Symptom | None:
        """The worst finding that needs an action."""
        found = self._worst(facts)
        if found is None:
            return None
        return Symptom(name=found.name, text=found.symptom[:2000], evidence=found.evidence)

    def diagnose(self, symptom: Symptom, facts: JobFacts, settings: ControlSettings) -> Cause | None:
        """The cause of that finding."""
        found = self._worst(facts)
        if found is None:
            return None
        return Cause(
            name=found.name, text=found.cause[:2000], confidence=found.confidence, evidence=found.evidence
        )

    def resolve(self, cause: Cause, facts: JobFacts, settings: ControlSettings) -> Resolution:
        """Raise an alert."""
        found = self._worst(facts)
        assert found is not None
        return found.to_alert()


def worst_of(patient: Patient) -> Finding | None:
    """The worst finding that is more than a hint."""
    findings = examine(patient).findings
    return findings[0] if findings and findings[0].severity != "info" else None


def patient_of(facts: JobFacts) -> Patient:
    """A patient with only what a policy's facts have."""
    return Patient(
        job=facts.job,
        at_ms=facts.at_ms,
        config=facts.config,
        task_count=facts.task_count,
        tasks=facts.tasks,
        frame=with_now(facts.frame, facts.job, facts.tasks, task_count=facts.task_count, now_ms=facts.at_ms),
        user_update_ms=facts.user_update_ms,
    )


def alerts_of(patient: Patient) -> tuple[RaiseAlert, ...]:
    """An alert for each finding that is more than a hint."""
    return tuple(found.to_alert() for found in examine(patient).findings if found.severity != "info")
