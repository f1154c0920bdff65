"""Observations to decide on, and a small model of a job that the scaler runs against, minute by minute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.scaling.metrics.frames import MINUTE_MS, Frame
from penstock.scaling.scaler.decide import decide, record_applied
from penstock.scaling.scaler.observation import (
    AvailableResources,
    Decision,
    DecisionSettings,
    Footprint,
    JobShape,
    Observation,
    PartitionLoads,
    Remaining,
    Resize,
    ScalerJobFacts,
    ScalingAction,
    ShapeLimits,
    TaskResources,
    parallel,
)
from penstock.scaling.scaler.pattern import History

PROACTIVE = DecisionSettings(generation="proactive")
START = 30_000_000  # a minute since the epoch
CONTAINER = AvailableResources(cpu=20, memory_mb=20_480, disk_mb=102_400, network_mbps=10_000)


def a_shape(task_count: int = 4, **task: Any) -> JobShape:
    return JobShape(task_count=task_count, task=TaskResources(**task))


def a_job(task_count: int = 4, **changes: Any) -> ScalerJobFacts:
    limits = changes.pop("limits", ShapeLimits(task_count_max=32, container=CONTAINER))
    task = changes.pop("task", TaskResources())
    return ScalerJobFacts(
        name="job",
        shape=JobShape(task_count=task_count, task=task),
        limits=limits,
        **{"partitions": 32, "changed_minute": START - 10_000, "restart_s": 0.0, **changes},
    )


def a_frame(job: ScalerJobFacts, *, minutes: int = 90, end: int = START, **metrics: Any) -> Frame:
    """Constant or given numbers. Without others: a healthy job, half busy, one record/s per per cent of a thread."""
    plain = {
        "ingest_rate": 200.0,
        "processed_rate": 200.0,
        "busy_mean": 0.5,
        "lag_records": 100.0,
        "lag_s": 1.0,
        "task_count": float(job.shape.task_count),
        **metrics,
    }
    values = {
        name: np.full(minutes, value) if np.isscalar(value) else np.asarray(value, dtype=float)
        for name, value in plain.items()
        if value is not None
    }
    return Frame(job=job.name, first_minute=end - minutes, values=values)


def an_observation(job: ScalerJobFacts | None = None, **changes: Any) -> Observation:
    """Metrics by their names; everything else as a field of the observation."""
    job = job if job is not None else a_job()
    fields = {"footprint", "remaining", "past", "demand", "settings", "frame", "now_ms", "by_partition"}
    metrics = {name: value for name, value in changes.items() if name not in fields}
    given = {name: value for name, value in changes.items() if name in fields}
    return Observation(
        job=job,
        **{"frame": a_frame(job, **metrics), "now_ms": START * MINUTE_MS, "settings": PROACTIVE, **given},
    )


def loads(*rates: float, lags: tuple[float, ...] = ()) -> PartitionLoads:
    """What each partition brings; without others, nothing waits."""
    return PartitionLoads(rates=rates, lags=lags or (0.0,) * len(rates))


def share_busy(job: ScalerJobFacts) -> float:
    """How busy tasks are on average when the busiest is busy all the time: some have a partition less."""
    n, k = job.shape.task_count, job.shape.task.threads
    if not job.partitions:
        return 1.0
    held = [len(range(task, job.partitions, n)) for task in range(n)]
    rounds = [-(-count // k) for count in held]
    return sum(rounds) / (n * max(rounds))


def at_rest(
    job: ScalerJobFacts, *, thread_rate: float, input_rate: float, backlog: float = 0.0, **changes: Any
) -> Observation:
    """A job as it looks under an input rate and backlog, whatever its shape: busy as far as it must be."""
    slots = parallel(job.shape.task_count, job.shape.task.threads, job.partitions)
    most = thread_rate * slots
    processed = most if backlog > 0 else min(input_rate, most)
    lag_s = backlog / most
    return an_observation(
        job,
        **{
            "ingest_rate": input_rate,
            "processed_rate": processed,
            "busy_mean": processed / most * share_busy(job),
            "lag_records": backlog,
            "lag_s": lag_s,
            "footprint": Footprint(thread_rate=thread_rate),
            **changes,
        },
    )


@dataclass
class JobModel:
    """A job that reads what arrives, as fast as its shape lets it, and stands still while it restarts."""

    job: ScalerJobFacts
    thread_rate: float
    input_rate: Callable[[int], float]
    settings: DecisionSettings = PROACTIVE
    footprint: Footprint = field(default_factory=Footprint)
    remaining: Remaining = field(default_factory=Remaining)
    history: History | None = None
    sink_rate_max: float = float("inf")
    minute: int = START
    backlog: float = 0.0
    past: tuple[ScalingAction, ...] = ()
    decisions: list[Decision] = field(default_factory=list)
    resizes: list[tuple[int, JobShape]] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    _rows: list[tuple[float, ...]] = field(default_factory=list)
    _first: int = START

    NAMES = ("ingest_rate", "processed_rate", "busy_mean", "lag_records", "lag_s", "task_count")

    @property
    def capacity(self) -> float:
        shape = self.job.shape
        most = self.thread_rate * parallel(shape.task_count, shape.task.threads, self.job.partitions)
        return min(most, self.sink_rate_max)

    def run(self, minutes: int, *, keep: int = 100, every: int = 1) -> JobModel:
        for minute in range(minutes):
            self._work()
            self._rows = self._rows[-keep:]
            if minute % every == 0:
                self._ask()
        return self

    def _work(self) -> None:
        since = self.minute - self.job.changed_minute
        seconds = 60.0 - (min(60.0, self.job.restart_s) if since == 0 else 0.0)
        arrived = self.input_rate(self.minute) * 60
        done = min(self.backlog + arrived, self.capacity * seconds)
        self.backlog += arrived - done
        lag_s = self.backlog / self.capacity
        self.lags.append(lag_s)
        busy = done / (self.capacity * 60) * share_busy(self.job)
        self._rows.append(
            (arrived / 60, done / 60, busy, self.backlog, lag_s, float(self.job.shape.task_count))
        )
        self.minute += 1

    def observe(self) -> Observation:
        columns = np.array(self._rows).T
        frame = Frame(
            job=self.job.name,
            first_minute=self.minute - len(self._rows),
            values=dict(zip(self.NAMES, columns, strict=True)),
        )
        return Observation(
            job=self.job,
            frame=frame,
            now_ms=self.minute * MINUTE_MS,
            footprint=self.footprint,
            remaining=self.remaining,
            past=self.past,
            settings=self.settings,
        )

    def _ask(self) -> None:
        observation = self.observe()
        history = self.history
        decision = decide(observation, (lambda: history) if history is not None else None)
        self.decisions.append(decision)
        learnt = decision.learnt
        if learnt.judged is not None:
            self.past = (*self.past[:-1], learnt.judged)
        if learnt.thread_rate is not None:
            self.footprint = replace(
                self.footprint, thread_rate=learnt.thread_rate, thread_rate_minute=self.minute
            )
        if isinstance(decision, Resize):
            action = record_applied(decision, decision.shape, observation)
            assert action is not None
            self.past = (*self.past, action)
            self.job = replace(self.job, shape=decision.shape, changed_minute=self.minute)
            self.resizes.append((self.minute, decision.shape))
