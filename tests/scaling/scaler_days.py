"""Jobs as users have them, for hours and days: the scaler's real service on real stores, with the defaults of a job.

Tasks are modelled in steps of ten seconds. A batch costs something however few records it has, as Spark's do,
so a job whose batches run back to back (`trigger_ms` 0) is busy all the time, whatever it could still take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.fleet.messages import TaskReport
from penstock.scaling.metrics.retriever import ScalerMinutes
from penstock.scaling.policies.policy_manager import PolicyRecordStore
from penstock.scaling.scaler.auto_scaler import AutoScaler
from tests.builders import a_job
from tests.scaling.scaler_stage import START_MS, Stage, StageJobs, Work

STEP_S = 10


@dataclass
class Plant(Work):
    """A job's tasks by the minute. Rates are of the minute since the beginning."""

    partitions: int = 32
    trigger_s: float = 1.0
    batch_cost_s: float = 0.0  # what a batch takes besides its records
    thread_rate_at: Callable[[float], float] | None = None  # P by the second; 0: what it calls hangs
    arrived_rate: float = 0.0
    sent_rate: float = 0.0
    lag_s_max: float = 0.0
    batch_s: list[float] = field(default_factory=list)

    def shares(self) -> list[float]:
        return [
            len(range(place, self.partitions, self.task_count)) / self.partitions
            for place in range(self.task_count)
        ]

    def deal(self, task_count: int) -> None:
        super().deal(task_count)
        self.batch_s = [0.0] * task_count

    def pass_step(self, now_ms: int, at_s: float) -> None:
        arrived = self.input_rate(at_s) * STEP_S
        thread_rate = self.thread_rate if self.thread_rate_at is None else self.thread_rate_at(at_s)
        most = min(thread_rate, self.sink_rate_max / self.task_count) * STEP_S
        sent = 0.0
        for place, share in enumerate(self.shares()):
            self.lags[place] += arrived * share
            if now_ms < self.starts_ms:
                continue
            done = min(self.lags[place], most)
            self.lags[place] -= done
            self.read[place] += done
            sent += done
            self._be_busy(place, done / STEP_S, thread_rate, is_full=self.lags[place] > 0)
        self.sent_rate = sent / STEP_S
        self.arrived_rate = arrived / STEP_S
        self.lag_s_max = max(self.lag_s_max, self.lag_s)

    def _be_busy(self, place: int, rate: float, thread_rate: float, *, is_full: bool) -> None:
        part = min(rate / thread_rate, 1.0) if thread_rate > 0 else 1.0
        # A batch reads what came while the one before it ran.
        batch_s = min(float(STEP_S), self.batch_cost_s / (1 - part)) if part < 1 else float(STEP_S)
        is_back_to_back = batch_s > self.trigger_s and self.batch_cost_s > 0
        if is_full or is_back_to_back:
            share = 1.0
        else:
            batch_s = max(batch_s, self.trigger_s)
            share = min(1.0, self.batch_cost_s / max(self.trigger_s, 1e-9) + part)
        self.batch_s[place] = batch_s
        self.busy_ms[place] += 1000 * STEP_S * share

    @property
    def lag_s(self) -> float:
        """How long the oldest record waits."""
        return sum(self.lags) / max(self.arrived_rate, 1e-9) if sum(self.lags) > 1e-6 else 0.0

    def _report(self, place: int, now_ms: int) -> TaskReport:
        is_up = now_ms >= self.starts_ms
        share = self.shares()[place]
        waits = 0.0 if self.lags[place] > 1e-6 else self.batch_s[place] * self.arrived_rate * share
        metrics = {
            "at_ms": float(now_ms),
            "started_ms": float(self.starts_ms),
            "read_total": self.read[place],
            "written_total": self.read[place],
            "busy_ms_total": self.busy_ms[place],
            "lag_records": self.lags[place] + waits,
            "lag_s": self.lags[place] / max(self.arrived_rate * share, 1e-9) + self.batch_s[place],
        }
        return TaskReport(
            task_id=f"{self.job}/{place}",
            job=self.job,
            generation=self.generation,
            shard=place,
            state="running" if is_up else "starting",
            error="",
            restarts=0,
            metrics=metrics if is_up else {},
            failures={},
        )


class Days(Stage):
    """A stage where time goes in steps of ten seconds, as the heartbeats of the `paper` profile do."""

    def new_scaler(self) -> AutoScaler:
        store = PolicyRecordStore(self.database, self.journal)
        self.records = store
        jobs, minutes = StageJobs(self), ScalerMinutes(self.metrics)
        return AutoScaler(jobs, minutes, store, self.journal, self.alarms, heartbeat_ms=1000 * STEP_S)

    def add_plant(self, plant: Plant, **config: Any) -> Plant:
        """A job with what a user gets who says nothing but this."""
        plant.restart_s = 20
        config = {"partitions": plant.partitions, "trigger_ms": round(plant.trigger_s * 1000), **config}
        a_job(self.service, plant.job, now_ms=self.now_ms, **config)
        self.works[plant.job] = plant
        self._sync(plant)
        plant.starts_ms = self.now_ms
        return plant

    def pass_minutes(self, minutes: float, until: Callable[[], bool] | None = None) -> float:
        """So many minutes, or until something holds; returns how many they were."""
        for passed in range(round(minutes * 60 / STEP_S)):
            if until is not None and until():
                return passed * STEP_S / 60
            self.now_ms += 1000 * STEP_S
            for work in self.works.values():
                assert isinstance(work, Plant)
                self._sync(work)
                work.pass_step(self.now_ms, (self.now_ms - START_MS) / 1000)
            self.recorder.tick(self.now_ms, self.counts(), self.reports())
            self.scaler.tick(self.now_ms)
        return minutes

    def steps_of(self, job: str = "demo.count") -> list[tuple[float, str, str]]:
        """What was done: minute, direction and reason."""
        return [
            ((entry.at_ms - START_MS) / 60_000, entry.decision, entry.reason)
            for entry in self.entries(job)
            if entry.decision in ("up", "down", "undo", "rebalance")
        ]


def noisy(mean: float, sigma: float, seed: int) -> Callable[[float], float]:
    """A rate whose minutes are normally distributed around one mean."""
    rates = np.maximum(0.0, np.random.default_rng(seed).normal(mean, sigma * mean, 3 * 1440))
    return lambda s: float(rates[int(s // 60) % len(rates)])
