"""The doctor as a policy: it changes nothing, it tells somebody (StreamOps 5.3). Pure."""

from __future__ import annotations

from penstock.resources.policies.controls import ControlSettings
from penstock.resources.policies.doctor.examine import examine
from penstock.resources.policies.doctor.findings import Finding
from penstock.resources.policies.doctor.now_frame import with_now
from penstock.resources.policies.doctor.patient import METRICS, MINUTES, Patient
from penstock.resources.policies.facts import JobFacts
from penstock.resources.policies.policy import Cause, Policy, RaiseAlert, Resolution, Symptom


class JobDoctor(Policy):
    """Raises an alarm for the worst that it finds; the rest is on the patient's page."""

    name = "doctor"
    priority = 0
    if_known = METRICS  # what is not known is part of its answer
    minutes = MINUTES

    def __init__(self) -> None:
        # The three steps ask for the same finding. One assignment: threads share this policy.
        self._last: tuple[JobFacts | None, Finding | None] = (None, None)

    def _worst(self, facts: JobFacts) -> Finding | None:
        seen, found = self._last
        if seen is not facts:
            found = worst_of(patient_of(facts))
            self._last = facts, found
        return found

    def detect(self, facts: JobFacts, settings: ControlSettings) -> Symptom | None:
        """Anything that somebody has to do something about."""
        found = self._worst(facts)
        if found is None:
            return None
        return Symptom(name=found.name, text=found.symptom[:2000], evidence=found.evidence)

    def diagnose(self, symptom: Symptom, facts: JobFacts, settings: ControlSettings) -> Cause | None:
        """Why."""
        found = self._worst(facts)
        if found is None:
            return None
        return Cause(
            name=found.name, text=found.cause[:2000], confidence=found.confidence, evidence=found.evidence
        )

    def resolve(self, cause: Cause, facts: JobFacts, settings: ControlSettings) -> Resolution:
        """Tell."""
        found = self._worst(facts)
        assert found is not None
        return found.to_alert()


def worst_of(patient: Patient) -> Finding | None:
    """The worst finding that is more than a hint."""
    findings = examine(patient).findings
    return findings[0] if findings and findings[0].severity != "info" else None


def patient_of(facts: JobFacts) -> Patient:
    """A job's facts as a patient; what they do not have, the patient has not either."""
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
    """An alarm for each finding that is more than a hint, for whoever has the whole patient."""
    return tuple(found.to_alert() for found in examine(patient).findings if found.severity != "info")
