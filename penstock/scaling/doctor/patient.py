"""The doctor's input (`Patient`) and output (`Examination`, `Finding`). Pure: values gathered before."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.clock import Millis
from penstock.core.journal import Entry
from penstock.jobs.config import JobConfig
from penstock.scaling.metrics.frames import Frame, NoFrame
from penstock.scaling.policies.balance import Starved
from penstock.scaling.policies.facts import TaskFacts
from penstock.scaling.policies.policy import SEVERITIES, RaiseAlert, Severity

# The metrics that the doctor reads, and how many minutes.
METRICS = (
    *("lag_s", "lag_records", "busy", "busy_mean", "ingest_rate", "processed_rate"),
    *("cpu", "memory_task_mb", "oom", "restarts", "watermark_lag_s"),
)
MINUTES = 60
FRESH_MINUTES = 3  # older values are not current: the open minute, and two for clocks that are behind
GROWTH_MINUTES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFacts:
    """A category that the job reads."""

    category: str
    is_known: bool = True  # False: the bus did not answer
    exists: bool = True
    retention_ms: Millis = 0  # 0: unlimited
    lateness_ms: Millis = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkFacts:
    """How far the watermark of the job's output is behind the clock, and what holds it back."""

    category: str
    age_s: float | None  # None: there is no watermark yet, or the input has ended
    who: str = ""
    because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record that was written to the dead letters."""

    category: str  # where it came from
    partition: int
    offset: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The engine process of a container that runs tasks of the job: Spark's driver, shared by all tasks."""

    container: str
    cpu: float | None = None
    cpu_max: float | None = None
    memory_mb: float | None = None
    memory_max_mb: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """All that is known of one job. What was not gathered is None or empty, and rules that need it return
    `NotKnown`.
    """

    job: str
    at_ms: Millis
    config: JobConfig
    state: str = ""  # as in `penstock job ls`
    problem: str = ""  # why its layers are invalid, or its plan was given up
    task_count: int = 0
    tasks: tuple[TaskFacts, ...] = ()
    starved: tuple[Starved, ...] = ()  # its tasks that wait for a slot
    frame: Frame | NoFrame
    journal: tuple[Entry, ...] = ()  # its newest entries, oldest first
    watermarks: tuple[WatermarkFacts, ...] | None = None
    inputs: tuple[InputFacts, ...] | None = None
    is_package_there: bool | None = None
    dead_letters: tuple[DeadLetter, ...] = ()
    engines: tuple[EngineFacts, ...] = ()
    container_memory_mb: float | None = None  # memory of the smallest container that could run it
    user_update_ms: Millis | None = None
    last_good_version: int | None = None  # of the provisioner layer, before its owner's last change
    excluded: frozenset[str] = field(default_factory=frozenset)

    def series(self, metric: str, minutes: int = MINUTES) -> NDArray[np.float64] | None:
        """The known values of a metric, oldest first; None if there are none."""
        points = self._points(metric)[-minutes:]
        known = points[np.isfinite(points)]
        return known if len(known) else None

    def last(self, metric: str) -> float | None:
        """A metric's current value; None if it was not reported in the last minutes."""
        known = self.series(metric, FRESH_MINUTES)
        return None if known is None else float(known[-1])

    def growth(self, metric: str, minutes: int = GROWTH_MINUTES) -> float | None:
        """A metric's growth in the last minutes; None unless both ends are known."""
        points = self._points(metric)[-minutes:]
        known = points[np.isfinite(points)]
        return float(known[-1] - known[0]) if len(known) > 1 and self.last(metric) is not None else None

    def _points(self, metric: str) -> NDArray[np.float64]:
        if isinstance(self.frame, NoFrame) or metric not in self.frame.values:
            return np.zeros(0)
        return self.frame.values[metric]

    def why_unknown(self, metric: str) -> str:
        """Why a metric is not known, as text for users."""
        if isinstance(self.frame, NoFrame):
            return self.frame.reason
        known = int(np.isfinite(self._points(metric)).sum())
        if known:
            return f"it was not reported in the last {FRESH_MINUTES} minutes"
        return f"it was not reported in the last {len(self._points(metric)) or 1} minutes"

    @property
    def lag_slo_s(self) -> float:
        """The job's SLO for lag."""
        return self.config.slo.lag_s


Category = Literal["resources", "failures", "configuration", "data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A recommended action, with a command to copy if there is one."""

    text: str
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem found: symptom, cause, evidence, advice."""

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
        """The finding as an alert."""
        what = "; ".join(
            f"{advice.text}: {advice.command}" if advice.command else advice.text for advice in self.todo
        )
        text = f"{self.symptom}. {self.cause}"[:2000]
        return RaiseAlert(
            key=self.name, severity=self.severity, text=text, what_to_do=what, evidence=dict(self.evidence)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotKnown:
    """A rule lacks data; the reason."""

    reason: str


Rule = Callable[[Patient], Iterator[Finding | NotKnown]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The doctor's result: findings, worst first; rules without a finding; rules that lack data."""

    job: str
    findings: tuple[Finding, ...]
    ruled_out: tuple[str, ...]
    not_known: tuple[tuple[str, str], ...]  # (rule, why)

    @property
    def is_well(self) -> bool:
        """Whether no action is needed."""
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
    """Sort key: worst severity first, then highest confidence."""
    return (-SEVERITIES.index(finding.severity), -finding.confidence, finding.name)


def set_command(job: str, setting: str, value: object, why: str) -> str:
    """Overrides one setting of a job."""
    return (
        f"penstock oncall set {shlex.quote(job)} {shlex.quote(f'{setting}={value}')} --why {shlex.quote(why)}"
    )


def more_tasks(patient: Patient, text: str, times: float = 2) -> tuple[Advice, ...]:
    """Advice to add tasks, up to the limit; at the limit, which limit to raise."""
    most = min(patient.config.partitions, patient.config.task_count_max)
    now = max(1, patient.task_count)
    wanted = min(most, int(now * times))
    if wanted > now:
        return (Advice(text=text, command=set_command(patient.job, "task_count", wanted, "a backlog")),)
    limit = "partitions" if most == patient.config.partitions else "task_count_max"
    return (
        Advice(text=f"it has {now} tasks, and its {limit} of {most} allow no more: raise that limit first"),
    )


def tail_command(category: str, partition: int, offset: int) -> str:
    """The command that shows one record."""
    return f"penstock bus tail {shlex.quote(category)} --partition {partition} --from {offset} --lines 1"


def rollback_command(patient: Patient, why: str) -> str:
    """The command that rolls back to the owner's last version, or shows the versions if it is not known."""
    if patient.last_good_version is None:
        return f"penstock job history {shlex.quote(patient.job)} --layer provisioner"
    return (
        f"penstock job rollback {shlex.quote(patient.job)} provisioner --to {patient.last_good_version} "
        f"--why {shlex.quote(why)}"
    )
