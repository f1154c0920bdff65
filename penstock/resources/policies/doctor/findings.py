"""What the doctor says, and in which words. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from penstock.resources.policies.doctor.patient import Patient
from penstock.resources.policies.policy import SEVERITIES, RaiseAlert, Severity

Category = Literal["resources", "failures", "configuration", "data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to do; a command that can be copied, where there is one."""

    text: str
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Symptom, cause, evidence, what to do."""

    name: str
    category: Category
    severity: Severity
    symptom: str
    cause: str
    confidence: float
    evidence: Mapping[str, float | int | str] = field(default_factory=dict)
    todo: tuple[Advice, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_alert(self) -> RaiseAlert:
        """The same as an alarm."""
        what = "; ".join(
            f"{advice.text}: {advice.command}" if advice.command else advice.text for advice in self.todo
        )
        text = f"{self.symptom}. {self.cause}"[:2000]
        return RaiseAlert(
            key=self.name, severity=self.severity, text=text, what_to_do=what, evidence=dict(self.evidence)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotKnown:
    """A rule that could not look, and what it would have needed."""

    reason: str


Rule = Callable[[Patient], Iterator[Finding | NotKnown]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All that was found, the worst first; what was looked at and is well; what could not be looked at."""

    job: str
    findings: tuple[Finding, ...]
    ruled_out: tuple[str, ...]
    not_known: tuple[tuple[str, str], ...]  # (rule, why)

    @property
    def is_well(self) -> bool:
        """Whether nobody has to do anything."""
        return all(finding.severity == "info" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "is_well": self.is_well,
            "findings": [finding.to_json() for finding in self.findings],
            "ruled_out": list(self.ruled_out),
            "not_known": [{"rule": rule, "why": why} for rule, why in self.not_known],
        }


def rank(finding: Finding) -> tuple[int, float, str]:
    """The worst first, the surest among them."""
    return (-SEVERITIES.index(finding.severity), -finding.confidence, finding.name)


def set_command(job: str, setting: str, value: object, why: str) -> str:
    """Overrides one setting of a job."""
    return (
        f"penstock oncall set {shlex.quote(job)} {shlex.quote(f'{setting}={value}')} --why {shlex.quote(why)}"
    )


def more_tasks(patient: Patient, text: str, times: float = 2) -> tuple[Advice, ...]:
    """Gives a job more tasks, as many as it may have; where it has them already, says what to raise."""
    most = min(int(patient.config["partitions"]), int(patient.config["task_count_max"]))
    now = max(1, patient.task_count)
    wanted = min(most, int(now * times))
    if wanted > now:
        return (Advice(text=text, command=set_command(patient.job, "task_count", wanted, "a backlog")),)
    limit = "partitions" if most == int(patient.config["partitions"]) else "task_count_max"
    return (Advice(text=f"it has {now} tasks, all that its {limit} ({most}) allows: raise that first"),)


def tail_command(category: str, partition: int, offset: int) -> str:
    """Shows one record."""
    return f"penstock bus tail {shlex.quote(category)} --partition {partition} --from {offset} --lines 1"


def rollback_command(patient: Patient, why: str) -> str:
    """Back to the owner's last version; without a known one, where to find it."""
    if patient.last_good_version is None:
        return f"penstock job history {shlex.quote(patient.job)} --layer provisioner"
    return (
        f"penstock job rollback {shlex.quote(patient.job)} provisioner --to {patient.last_good_version} "
        f"--why {shlex.quote(why)}"
    )
