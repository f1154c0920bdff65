"""What the doctor is shown of a job. Pure: values only, all gathered before."""

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

# What the doctor asks the metrics store for, and of how many minutes.
METRICS = (
    *("lag_s", "lag_records", "busy", "busy_mean", "ingest_rate", "processed_rate"),
    *("cpu", "memory_task_mb", "oom", "restarts", "watermark_lag_s"),
)
MINUTES = 60
FRESH_MINUTES = 3  # what was said longer ago is no news: the open minute, and two that a clock may be behind
GROWTH_MINUTES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFacts:
    """A category that the job reads."""

    category: str
    is_known: bool = True  # False: the bus did not answer
    exists: bool = True
    retention_ms: Millis = 0  # 0: records stay
    lateness_ms: Millis = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkFacts:
    """How far behind the clock what the job writes is, and who holds it back."""

    category: str
    age_s: float | None  # None: it has not begun, or has ended
    who: str = ""
    because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record that was put aside."""

    category: str  # where it came from
    partition: int
    offset: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The engine process of a container that runs tasks of the job: Spark's driver, and what is shared."""

    container: str
    cpu: float | None = None
    cpu_max: float | None = None
    memory_mb: float | None = None
    memory_max_mb: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """One job, as whole as it could be gathered. What nobody looked at is None or empty, and then the rules
    that need it say so.
    """

    job: str
    at_ms: Millis
    config: JobConfig
    state: str = ""  # as `penstock job ls` says it
    problem: str = ""  # why its layers do not fit together, or why its plan was given up
    task_count: int = 0
    tasks: tuple[TaskFacts, ...] = ()
    starved: tuple[Starved, ...] = ()  # of its tasks, those that wait for a slot
    frame: Frame | NoFrame
    journal: tuple[Entry, ...] = ()  # the newest about it, oldest first
    watermarks: tuple[WatermarkFacts, ...] | None = None
    inputs: tuple[InputFacts, ...] | None = None
    is_package_there: bool | None = None
    dead_letters: tuple[DeadLetter, ...] = ()
    engines: tuple[EngineFacts, ...] = ()
    container_memory_mb: float | None = None  # of the smallest container that could run it
    user_update_ms: Millis | None = None
    last_good_version: int | None = None  # of the job before its owner's last change
    excluded: frozenset[str] = field(default_factory=frozenset)

    def series(self, metric: str, minutes: int = MINUTES) -> NDArray[np.float64] | None:
        """The known minutes of a metric, oldest first; None if nothing is known."""
        points = self._points(metric)[-minutes:]
        known = points[np.isfinite(points)]
        return known if len(known) else None

    def last(self, metric: str) -> float | None:
        """What a metric is now; None if nobody has said it in the last minutes."""
        known = self.series(metric, FRESH_MINUTES)
        return None if known is None else float(known[-1])

    def growth(self, metric: str, minutes: int = GROWTH_MINUTES) -> float | None:
        """By how much a metric has grown in its last minutes; None unless it is known then and now."""
        points = self._points(metric)[-minutes:]
        known = points[np.isfinite(points)]
        return float(known[-1] - known[0]) if len(known) > 1 and self.last(metric) is not None else None

    def _points(self, metric: str) -> NDArray[np.float64]:
        if isinstance(self.frame, NoFrame) or metric not in self.frame.values:
            return np.zeros(0)
        return self.frame.values[metric]

    def why_unknown(self, metric: str) -> str:
        """Why a metric is not known, for people."""
        if isinstance(self.frame, NoFrame):
            return self.frame.reason
        known = int(np.isfinite(self._points(metric)).sum())
        if known:
            return f"nobody reported it in the last {FRESH_MINUTES} minutes"
        return f"nobody reported it in the last {len(self._points(metric)) or 1} minutes"

    @property
    def lag_slo_s(self) -> float:
        """What its owner was promised."""
        return self.config.slo.lag_s


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
    most = min(patient.config.partitions, patient.config.task_count_max)
    now = max(1, patient.task_count)
    wanted = min(most, int(now * times))
    if wanted > now:
        return (Advice(text=text, command=set_command(patient.job, "task_count", wanted, "a backlog")),)
    limit = "partitions" if most == patient.config.partitions else "task_count_max"
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
