"""Lag without a known cause: an alert that lists what was ruled out, seldom an action (Turbine V-D). Pure.

A single bad task is moved once: the cause is mostly hardware. A job that is busy after its owner's update
gets more tasks, which mostly helps. If a dependency fails the job is not scaled: more load makes it worse.
"""

from __future__ import annotations

from math import ceil
from statistics import median
from typing import Annotated

import numpy as np
from msgspec import Meta

from penstock.core.text import make_known
from penstock.fleet.messages import summarize_error
from penstock.scaling.doctor.doctor import examine, patient_of
from penstock.scaling.doctor.failure_rules import is_fresh, kind_of
from penstock.scaling.doctor.patient import METRICS, MINUTES
from penstock.scaling.policies.balance import robust_z
from penstock.scaling.policies.facts import JobFacts, TaskFacts
from penstock.scaling.policies.policy import (
    Cause,
    ChangeLayer,
    ControlSettings,
    Evidence,
    MoveTasks,
    Nothing,
    Policy,
    RaiseAlert,
    Resolution,
    Symptom,
)

SURE = 0.7  # a cause with less confidence is a guess
BUSY_MIN = 0.5  # less busy tasks wait for something, and more tasks would wait too
LAG_Z_MIN = 5.0
HEADLINE = 5  # ruled out causes that the alert's text lists


class UntriagedSettings(ControlSettings, frozen=True, kw_only=True):
    """How untriaged problems of one job are handled."""

    minutes_min: Annotated[int, Meta(ge=1, le=60)] = 5  # a shorter lag is ignored
    more: Annotated[float, Meta(gt=1, le=4)] = 1.5  # factor of the task count after an update


class UntriagedPolicy(Policy):
    """The policy of last resort: handles lag that no other policy explains."""

    name = "untriaged"
    priority = -50
    if_known = METRICS  # missing metrics are listed in its verdict
    minutes = MINUTES
    settings = UntriagedSettings

    def detect(self, facts: JobFacts, settings: UntriagedSettings) -> Symptom | None:
        """The lag was over the SLO in each of the last minutes."""
        slo = facts.config.slo.lag_s
        lags = facts.frame.values["lag_s"][-settings.minutes_min :]
        if len(lags) < settings.minutes_min or not bool(np.all(lags > slo)):  # NaN compares false
            return None
        text = f"it lags {lags[-1]:.0f} s, over its SLO of {slo:g} s for {settings.minutes_min} minutes"
        return Symptom(name="lag", text=text, evidence={"lag_s": float(lags[-1]), "slo_s": slo})

    def diagnose(self, symptom: Symptom, facts: JobFacts, settings: UntriagedSettings) -> Cause | None:
        """The doctor's cause if it is sure; else a bad task, an update, or unknown."""
        failing = [task for task in facts.tasks if task.error and kind_of(task.error).name == "dependency"]
        if failing:
            text = f"a dependency of {failing[0].task_id} fails: {summarize_error(failing[0].error)}"
            return Cause(name="dependency", text=text, confidence=0.8, evidence={"tasks": len(failing)})
        examination = examine(patient_of(facts))
        known = [
            found
            for found in examination.findings
            if found.severity != "info" and found.confidence >= SURE and found.name != "backpressure"
        ]
        if known:
            return Cause(name="known", text=known[0].cause[:1000], confidence=known[0].confidence)
        bad = find_bad_task(facts.tasks)
        if bad is not None:
            text = f"only {bad.task_id} lags, by {bad.lag_s:.0f} s, and it reports no reason"
            evidence: Evidence = {"task": bad.task_id, "container": bad.container, "lag_s": bad.lag_s or 0.0}
            return Cause(name="single_task", text=text, confidence=0.5, evidence=evidence)
        busy = facts.last("busy_mean")
        if is_fresh(patient_of(facts)) and busy is not None and busy >= BUSY_MIN:
            text = "it has lagged since its owner's last change, and its tasks are busy"
            return Cause(name="user_update", text=text, confidence=0.5, evidence={"busy_mean": busy})
        unknown = [rule for rule, _ in examination.not_known]
        text = f"ruled out: {_some(examination.ruled_out)}"
        text += f"; could not be checked: {_some(unknown)}" if unknown else ""
        evidence = {"ruled_out": ", ".join(examination.ruled_out), "not_known": ", ".join(unknown)}
        return Cause(name="unknown", text=text[:2000], confidence=0.1, evidence=evidence)

    def resolve(self, cause: Cause, facts: JobFacts, settings: UntriagedSettings) -> Resolution:
        """Act only where it mostly helps; otherwise raise an alert."""
        match cause.name:
            case "known":
                return Nothing(reason=f"its cause is known: {cause.text}")
            case "dependency":
                return RaiseAlert(
                    key="dependency",
                    severity="warning",
                    text=f"{cause.text}; not scaled, as that would add load to the dependency",
                    what_to_do="to take load off the dependency: "
                    f'penstock job pause {facts.job} --why "its dependency is down"',
                    evidence=cause.evidence,
                )
            case "single_task":
                task = str(cause.evidence["task"])
                return MoveTasks(tasks=(task,), text=f"{task} away from {cause.evidence['container']}, once")
            case "user_update":
                wanted = min(facts.task_count_max, ceil(facts.task_count * settings.more))
                if wanted > facts.task_count:
                    text = f"{facts.task_count} -> {wanted} tasks after its owner's change"
                    return ChangeLayer(changes={"task_count": wanted}, text=text)
        return RaiseAlert(
            key="untriaged",
            severity="warning",
            text=f"it lags for an unknown reason; {cause.text}"[:2000],
            what_to_do=f"see its errors: penstock task ls {facts.job}; penstock journal {facts.job}",
            evidence=cause.evidence,
        )


def find_bad_task(tasks: tuple[TaskFacts, ...]) -> TaskFacts | None:
    """The only task that lags; None if several lag, or there are too few to compare."""
    lags = [task.lag_s for task in tasks if task.lag_s is not None]
    if len(lags) < len(tasks) or len(tasks) < 3:
        return None
    z = robust_z(lags, spread_min=max(1.0, 0.25 * median(lags)))
    odd = [task for number, task in enumerate(tasks) if z[number] >= LAG_Z_MIN]
    return odd[0] if len(odd) == 1 else None


def _some(names: list[str] | tuple[str, ...]) -> str:
    rest = len(names) - HEADLINE
    return (", ".join(names[:HEADLINE]) or "nothing") + (f" and {rest} more" if rest > 0 else "")


make_known(UntriagedSettings)
