"""The straggler detector: if few tasks are busier than their peers without processing more, and most of them
are on the same hosts, they are moved elsewhere (StreamOps 5.2, Algorithm 3). Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from penstock.core.text import make_known
from penstock.scaling.policies.balance import OddTask, Uneven, judge_balance
from penstock.scaling.policies.facts import JobFacts, TaskFacts
from penstock.scaling.policies.policy import (
    Cause,
    ControlSettings,
    ExcludeContainers,
    Nothing,
    Policy,
    RaiseAlert,
    Resolution,
    Seconds,
    Share,
    Symptom,
)


class StragglerSettings(ControlSettings, frozen=True, kw_only=True):
    """How the straggler detector treats one job."""

    lag_s: Seconds | None = None  # it acts only above this lag; None: above the SLO
    z_min: Annotated[float, Meta(ge=1, le=100)] = 3.5
    share_max: Share = 0.25  # more tasks than this share are not stragglers but the norm
    places_max: Annotated[int, Meta(ge=1, le=100)] = 2  # hosts excluded at most
    exclude_minutes: Annotated[int, Meta(ge=1, le=7 * 24 * 60)] = 60


class StragglerDetector(Policy):
    """Excludes slow containers for a job, and moves its tasks from there."""

    name = "stragglers"
    priority = 60  # above the scaler: more tasks do not help against a slow host
    metrics = ("lag_s",)
    minutes = 5
    settings = StragglerSettings

    def detect(self, facts: JobFacts, settings: StragglerSettings) -> Symptom | None:
        """The lag is above the limit."""
        limit_s = facts.config.slo.lag_s if settings.lag_s is None else settings.lag_s
        lag_s = facts.last("lag_s")
        if lag_s is None or lag_s < limit_s:
            return None
        evidence = {"lag_s": lag_s, "limit_s": float(limit_s)}
        return Symptom(name="lag", text=f"it lags {lag_s:.0f} s, more than {limit_s:g} s", evidence=evidence)

    def diagnose(self, symptom: Symptom, facts: JobFacts, settings: StragglerSettings) -> Cause | None:
        """Few tasks are busier than their peers at the same rate."""
        found = judge_balance(facts.tasks, z_min=settings.z_min)
        if not isinstance(found, Uneven):
            return None
        if not found.stragglers:
            hot = found.skewed[0]
            return Cause(
                name="skew",
                text=f"{hot.task.task_id} is busier than its peers because it gets more records (skew)",
                confidence=0.8,
                evidence=_evidence(found, hot),
            )
        few_max = max(1, int(settings.share_max * len(facts.tasks)))
        if len(found.stragglers) > few_max:
            return Cause(
                name="many_stragglers",
                text=f"{len(found.stragglers)} of {len(facts.tasks)} tasks do less than their peers: "
                f"more than the {few_max} that a few slow hosts would explain",
                confidence=0.5,
                evidence={"stragglers": len(found.stragglers)},
            )
        worst = found.stragglers[0]
        return Cause(
            name="stragglers",
            text=f"{_names(found.stragglers)}: {worst.busy:.0%} busy at {worst.rate:.0f} records/s, "
            f"the other tasks {found.busy_median:.0%} at {found.rate_median:.0f}",
            confidence=0.9 if worst.rate < found.rate_median else 0.7,
            evidence=_evidence(found, worst),
        )

    def resolve(self, cause: Cause, facts: JobFacts, settings: StragglerSettings) -> Resolution:
        """Exclude the hosts that have most of the stragglers."""
        if cause.name != "stragglers":
            return Nothing(reason=f"{cause.text}; moving tasks would not help, see `penstock doctor`")
        found = judge_balance(facts.tasks, z_min=settings.z_min)
        assert isinstance(found, Uneven)
        slow = [odd.task for odd in found.stragglers]
        places = find_places(slow, places_max=settings.places_max)
        if not places:
            return RaiseAlert(
                key="stragglers_spread",
                text=f"{cause.text}; they are on more than {settings.places_max} hosts, so none is excluded",
                what_to_do=f"penstock task ls {facts.job}",
                evidence=cause.evidence,
            )
        containers = tuple(sorted({task.container for task in facts.tasks if _place(task) in places}))
        if facts.containers <= {*containers}:
            return RaiseAlert(
                key="stragglers_stay",
                text=f"{cause.text}; no other container can run this job",
                what_to_do=f"penstock container ls; then penstock task ls {facts.job}",
                evidence=cause.evidence,
            )
        moved = tuple(sorted(task.task_id for task in facts.tasks if task.container in containers))
        return ExcludeContainers(
            containers=containers,
            tasks=moved,
            minutes=settings.exclude_minutes,
            text=f"{', '.join(moved)} away from {', '.join(containers)} for {settings.exclude_minutes} min",
        )


def find_places(stragglers: Sequence[TaskFacts], *, places_max: int) -> frozenset[str]:
    """The fewest hosts with more than half of the stragglers; none if more than `places_max` are needed."""
    held: frozenset[str] = frozenset()
    count = 0
    by_place = Counter(_place(task) for task in stragglers)
    for place, tasks in sorted(by_place.items(), key=lambda item: (-item[1], item[0]))[:places_max]:
        held |= {place}
        count += tasks
        if 2 * count > len(stragglers):
            return held
    return frozenset()


def _place(task: TaskFacts) -> str:
    """The host, or the container if the host is not known."""
    return task.host or task.container


def _names(odd: Sequence[OddTask]) -> str:
    return ", ".join(found.task.task_id for found in odd[:5]) + (" …" if len(odd) > 5 else "")


def _evidence(found: Uneven, worst: OddTask) -> dict[str, float | int | str]:
    return {
        "task": worst.task.task_id,
        "container": worst.task.container,
        "busy": round(worst.busy, 3),
        "busy_median": round(found.busy_median, 3),
        "rate": round(worst.rate, 3),
        "rate_median": round(found.rate_median, 3),
        "z": round(worst.z, 2),
    }


make_known(StragglerSettings)
