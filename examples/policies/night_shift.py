"""A control policy of one's own: at night a job keeps only as many tasks as its last hour needed."""

from __future__ import annotations

from math import ceil
from typing import Annotated

from msgspec import Meta

from penstock.scaling.policies.facts import JobFacts
from penstock.scaling.policies.policy import (
    Cause,
    ChangeLayer,
    ControlSettings,
    Nothing,
    Policy,
    Resolution,
    Symptom,
)


class NightSettings(ControlSettings, frozen=True, kw_only=True):
    """What a job may say in `policies.night_shift`, besides what every policy has."""

    floor: Annotated[int, Meta(ge=1, le=1000)] = 2
    busy_max: Annotated[float, Meta(gt=0, le=1)] = 0.6  # the tasks that stay may be so busy


class NightShift(Policy):
    """Fewer tasks while a job has little to do. `from_hour` and `to_hour` say when the night is."""

    name = "night_shift"
    priority = -10  # everything else comes first
    metrics = ("busy", "lag_s")
    minutes = 60
    settings = NightSettings

    def detect(self, facts: JobFacts, settings: NightSettings) -> Symptom | None:
        """Much idle time for an hour, and nothing waits."""
        busy, lag_s = facts.frame.values["busy"].max(), facts.frame.values["lag_s"].max()
        if facts.task_count <= settings.floor or lag_s > facts.config.slo.lag_s / 2:
            return None
        if not busy < settings.busy_max / 2:  # also when it is not known
            return None
        evidence = {"busy_max": busy, "tasks": facts.task_count}
        return Symptom(name="idle", text=f"at most {busy:.0%} busy for an hour", evidence=evidence)

    def diagnose(self, symptom: Symptom, facts: JobFacts, settings: NightSettings) -> Cause | None:
        """A task whose numbers are missing may be the busy one."""
        if any(task.state != "running" for task in facts.tasks):
            return None
        return Cause(name="too_many_tasks", text="it has more tasks than its input needs", confidence=0.8)

    def resolve(self, cause: Cause, facts: JobFacts, settings: NightSettings) -> Resolution:
        """As many as would have been busy to `busy_max` at the busiest moment of the hour."""
        busy = float(facts.frame.values["busy"].max())
        wanted = max(settings.floor, ceil(busy * facts.task_count / settings.busy_max))
        if wanted >= facts.task_count:
            return Nothing(reason=f"{wanted} tasks are needed")
        return ChangeLayer(
            changes={"task_count": wanted}, text=f"{facts.task_count} -> {wanted} tasks for the night"
        )
