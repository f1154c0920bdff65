"""The doctor's look: every rule of the four categories on one patient, the worst finding first. Pure."""

from __future__ import annotations

from penstock.resources.policies.doctor import (
    config_rules,
    data_rules,
    failure_rules,
    resource_rules,
    slot_rules,
)
from penstock.resources.policies.doctor.findings import Examination, Finding, Rule, rank
from penstock.resources.policies.doctor.patient import Patient

RULES: tuple[Rule, ...] = (
    *resource_rules.RULES,
    *failure_rules.RULES,
    *config_rules.RULES,
    *data_rules.RULES,
    *slot_rules.RULES,
)


def examine(patient: Patient) -> Examination:
    """Everything that is wrong with a job, what was ruled out, and what could not be looked at."""
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
