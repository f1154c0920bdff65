"""The resource loop: looks at every job's load, asks the scaler, writes the scaler layer with the reason."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError
from penstock.resources.autoscaler import Hold, Rescale, ScalerLimits, decide_task_count
from penstock.resources.metrics import Incomplete, JobLoad, add_up
from penstock.tasks.messages import TaskReport

LOOKS_MAX = 600
TURN_MAX = 1_000  # jobs that one round looks at: a round must not take longer than the scaler's interval

Reports = Mapping[str, Sequence[TaskReport]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalableJob:
    """A job as the controller sees it."""

    name: str
    expected_version: int
    task_count: int
    generation: int
    is_settled: bool  # runs, with no plan open and nothing held
    oncall_task_count: int | None  # set by a person: then it is theirs
    config: Mapping[str, Any]


class JobLayer(Protocol):
    """The job layer, as the controller needs it."""

    def task_reports(self) -> Reports:
        """What tasks say now, by job: of others there is nothing to decide on."""

    def scalable_jobs(self, names: Sequence[str]) -> tuple[ScalableJob, ...]:
        """Those of these jobs that could be scaled."""

    def write_task_count(self, job: str, task_count: int, *, expected_version: int, reason: str) -> None:
        """Write the scaler layer; VersionConflict if somebody wrote since."""


@dataclass(slots=True)
class _Watch:
    generation: int
    looks: deque[JobLoad] = field(default_factory=lambda: deque(maxlen=LOOKS_MAX))


class ResourceController:
    """One policy in this version: the reactive auto scaler. The only writer of the scaler layer."""

    def __init__(self, jobs: JobLayer) -> None:
        self._jobs = jobs
        self._watched: dict[str, _Watch] = {}
        self._last = ""  # the last job of the round before, where not all get their turn
        self.loads: dict[str, JobLoad | Incomplete] = {}
        self.decisions: dict[str, Hold | Rescale] = {}

    def tick(self, now_ms: Millis) -> None:
        """One look at every job, or in a large fleet at the next few. One that fails is left for the next."""
        reports = self._jobs.task_reports()  # once: a fleet's tasks are many
        names = sorted(reports)
        turn = self._next_turn(names)
        jobs = self._jobs.scalable_jobs(turn)
        left = {*turn} - {job.name for job in jobs}
        for gone in (self._watched.keys() - {*names}) | (self._watched.keys() & left):
            del self._watched[gone]
            self.loads.pop(gone, None)
            self.decisions.pop(gone, None)
        for job in jobs:
            try:
                self._look(job, reports[job.name], now_ms)
            except PenstockError as error:
                self.decisions[job.name] = Hold(reason=f"the last decision was not written: {error.what}")

    def _next_turn(self, names: Sequence[str]) -> Sequence[str]:
        if len(names) <= TURN_MAX:
            return names
        begin = bisect_right(names, self._last)
        turn = [*names[begin:], *names[:begin]][:TURN_MAX]
        self._last = turn[-1]
        return turn

    def _look(self, job: ScalableJob, reports: Sequence[TaskReport], now_ms: Millis) -> None:
        watch = self._watched.get(job.name)
        if watch is None or watch.generation != job.generation:
            # What was seen under another number of tasks says nothing about this one.
            watch = self._watched[job.name] = _Watch(job.generation)
        load = add_up(reports, task_count=job.task_count, generation=job.generation, at_ms=now_ms)
        self.loads[job.name] = load
        if isinstance(load, Incomplete):
            watch.looks.clear()  # what was seen before a gap and after it is not one stretch of lag
            self.decisions[job.name] = Hold(reason=load.reason)
            return
        watch.looks.append(load)
        decision = self._decide(job, tuple(watch.looks), now_ms)
        self.decisions[job.name] = decision
        if isinstance(decision, Rescale):
            self._jobs.write_task_count(
                job.name, decision.task_count, expected_version=job.expected_version, reason=decision.reason
            )
            watch.looks.clear()

    def _decide(self, job: ScalableJob, looks: tuple[JobLoad, ...], now_ms: Millis) -> Hold | Rescale:
        settings = job.config["scaler"]
        if not settings["enabled"]:
            return Hold(reason="the scaler is switched off for this job")
        if not job.is_settled:
            return Hold(reason="a change is under way")
        if job.oncall_task_count is not None:
            return Hold(reason=f"oncall set {job.oncall_task_count} tasks")
        limits = ScalerLimits(
            lag_slo_s=job.config["slo"]["lag_s"],
            quiet_s=settings["quiet_s"],
            settle_s=settings["settle_s"],
            task_count_min=settings["task_count_min"],
            task_count_max=min(job.config["task_count_max"], job.config["partitions"]),
        )
        return decide_task_count(looks, limits, now_ms=now_ms)
