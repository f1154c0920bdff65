"""Problems whose cause nobody finds: told with what was ruled out, seldom acted on (Turbine V-D). Pure.

A single bad task is moved once: hardware is most often the cause. After its owner's update a busy job gets
more, which helps most of the time. A dependency that fails gets no more load: it would be down for longer.
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

SURE = 0.7  # a cause below this is a guess
BUSY_MIN = 0.5  # tasks that are less busy wait for something: more of them would wait too
LAG_Z_MIN = 5.0
HEADLINE = 5  # of what was ruled out, in the alert's text


class UntriagedSettings(ControlSettings, frozen=True, kw_only=True):
    """How untriaged problems of one job are treated."""

    minutes_min: Annotated[int, Meta(ge=1, le=60)] = 5  # a lag that is shorter is a hiccup
    more: Annotated[float, Meta(gt=1, le=4)] = 1.5  # so many times its tasks after an update


class Untriaged(Policy):
    """The last one asked: what no other policy explains."""

    name = "untriaged"
    priority = -50
    if_known = METRICS  # what is not known is part of its answer
    minutes = MINUTES
    settings = UntriagedSettings

    def detect(self, facts: JobFacts, settings: UntriagedSettings) -> Symptom | None:
        """Over its SLO for minutes on end."""
        slo = facts.config.slo.lag_s
        lags = facts.frame.values["lag_s"][-settings.minutes_min :]
        if len(lags) < settings.minutes_min or not bool(np.all(lags > slo)):  # also when one is not known
            return None
        text = f"it lags {lags[-1]:.0f} s, over its SLO of {slo:g} s for {settings.minutes_min} minutes"
        return Symptom(name="lag", text=text, evidence={"lag_s": float(lags[-1]), "slo_s": slo})

    def diagnose(self, symptom: Symptom, facts: JobFacts, settings: UntriagedSettings) -> Cause | None:
        """What is left when the doctor knows no cause."""
        failing = [task for task in facts.tasks if task.error and kind_of(task.error).name == "dependency"]
        if failing:
            text = f"what {failing[0].task_id} depends on fails: {summarize_error(failing[0].error)}"
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
            text = f"{bad.task_id} alone is behind: {bad.lag_s:.0f} s, for no reason that it shows"
            evidence: Evidence = {"task": bad.task_id, "container": bad.container, "lag_s": bad.lag_s or 0.0}
            return Cause(name="single_task", text=text, confidence=0.5, evidence=evidence)
        busy = facts.last("busy_mean")
        if is_fresh(patient_of(facts)) and busy is not None and busy >= BUSY_MIN:
            text = "it lags since its owner changed it, and its tasks are busy"
            return Cause(name="user_update", text=text, confidence=0.5, evidence={"busy_mean": busy})
        unknown = [rule for rule, _ in examination.not_known]
        text = f"ruled out: {_some(examination.ruled_out)}"
        text += f"; could not be looked at: {_some(unknown)}" if unknown else ""
        evidence = {"ruled_out": ", ".join(examination.ruled_out), "not_known": ", ".join(unknown)}
        return Cause(name="unknown", text=text[:2000], confidence=0.1, evidence=evidence)

    def resolve(self, cause: Cause, facts: JobFacts, settings: UntriagedSettings) -> Resolution:
        """Act only where it helps most of the time; otherwise tell."""
        match cause.name:
            case "known":
                return Nothing(reason=f"its cause is known: {cause.text}")
            case "dependency":
                return RaiseAlert(
                    key="dependency",
                    severity="warning",
                    text=f"{cause.text}; it is not scaled, that would ask more of it",
                    what_to_do=f'to spare it: penstock job pause {facts.job} --why "its dependency is down"',
                    evidence=cause.evidence,
                )
            case "single_task":
                task = str(cause.evidence["task"])
                return MoveTasks(tasks=(task,), text=f"{task} away from {cause.evidence['container']}, once")
            case "user_update":
                wanted = min(facts.task_count_max, ceil(facts.task_count * settings.more))
                if wanted > facts.task_count:
                    text = f"{facts.task_count} -> {wanted} tasks, since its owner's change"
                    return ChangeLayer(changes={"task_count": wanted}, text=text)
        return RaiseAlert(
            key="untriaged",
            severity="warning",
            text=f"nobody knows why it lags; {cause.text}"[:2000],
            what_to_do=f"see its errors: penstock task ls {facts.job}; penstock journal {facts.job}",
            evidence=cause.evidence,
        )


def find_bad_task(tasks: tuple[TaskFacts, ...]) -> TaskFacts | None:
    """The one task that is behind while its peers are not; None if there are several, or too few to say."""
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
