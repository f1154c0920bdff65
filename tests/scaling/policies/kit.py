"""Facts, policies and a small fleet in memory, with defaults that are well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.core.errors import CorruptData, PenstockError
from penstock.core.journal import Entry
from penstock.jobs.config import JobConfig
from penstock.scaling.metrics.frames import MINUTE_MS, Frame, NoFrame
from penstock.scaling.policies.facts import JobFacts, TaskFacts
from penstock.scaling.policies.policy import Action, ChangeLayer, RaiseAlert
from penstock.scaling.policies.ports import ManagedJob, RecordUpdate
from penstock.scaling.policies.round import FleetState, PolicyRecord, RoundJob, Signals, flat
from tests.builders import a_stored_config, an_output

NOW_MS = 1_790_000_000_000


def a_config(**changes: Any) -> JobConfig:
    fields = {
        "name": "shops.total",
        "pipeline": "shops",
        "kind": "stateful",
        "task_count": 4,
        "task_count_max": 32,
        "partitions": 16,
        "threads": 1,
        "trigger_ms": 1000,
        "batch_rows_max": 50_000,
        "priority": 0,
        "privileged": False,
        "resources": {"cpu": 1.0, "memory_mb": 1024, "disk_mb": 0, "network_mbps": 0.0},
        "slo": {"lag_s": 90.0},
        "isolation": "process",
        "inputs": [{"category": "sales", "start": "earliest"}],
        "outputs": [an_output(category="totals", partitions=4)],
        "package": {"name": "shops", "version": "7", "hash": "ab" * 32, "entry": "shops.py"},
        **changes,
    }
    return a_stored_config(**fields)


def a_frame(minutes: int = 15, job: str = "shops.total", **metrics: Any) -> Frame:
    values = {
        name: np.asarray(points, dtype=np.float64) if np.ndim(points) else np.full(minutes, float(points))
        for name, points in metrics.items()
    }
    return Frame(job=job, first_minute=NOW_MS // MINUTE_MS - minutes, values=values)


def a_task(number: int = 0, container: str = "", **facts: Any) -> TaskFacts:
    given = {"busy": 0.5, "rate": 1000.0, "lag_records": 10.0, "lag_s": 1.0, "memory_mb": 300.0} | facts
    return TaskFacts(task_id=f"shops.total/{number}", container=container or f"c{number}", **given)


def some_facts(*tasks: TaskFacts, **changes: Any) -> JobFacts:
    shown = tasks or tuple(a_task(number) for number in range(4))
    values: dict[str, Any] = {
        "job": "shops.total",
        "at_ms": NOW_MS,
        "config": a_config(),
        "task_count": len(shown),
        "frame": a_frame(lag_s=200.0),
        "tasks": shown,
        "containers": frozenset({task.container for task in shown} | {"spare"}),
    }
    return JobFacts(**(values | changes))


def a_job(**changes: Any) -> RoundJob:
    values: dict[str, Any] = {"name": "shops.total", "config": a_config(), "layer": {}}
    return RoundJob(**(values | changes))


@dataclass
class MemoryRecords:
    """The store of records, in memory."""

    kept: dict[str, tuple[PolicyRecord, int]] = field(default_factory=dict)
    journal: MemoryJournal = field(default_factory=lambda: MemoryJournal())

    def load(self, job: str) -> tuple[PolicyRecord, int]:
        return self.kept.get(job, (PolicyRecord(), 0))

    def save(self, job: str, record: PolicyRecord, version: int) -> bool:
        if self.load(job)[1] != version:
            return False
        self.kept[job] = record, version + 1
        return True

    def load_all(self, jobs: Sequence[str]) -> dict[str, tuple[PolicyRecord, int] | CorruptData]:
        return {job: self.load(job) for job in jobs}

    def save_all(self, updates: Sequence[RecordUpdate]) -> frozenset[str]:
        lost = frozenset(item.job for item in updates if not self.save(item.job, item.record, item.version))
        self.journal.kept += [
            item.entry for item in updates if item.job not in lost and item.entry is not None
        ]
        return lost


@dataclass
class MemoryAlerts:
    """Who is told, in memory."""

    now: dict[tuple[str, str], tuple[RaiseAlert, ...]] = field(default_factory=dict)

    def report(self, job: str, alerts: Mapping[str, tuple[RaiseAlert, ...]], now_ms: int) -> None:
        self.report_all({job: alerts}, now_ms)

    def report_all(self, seen: Mapping[str, Mapping[str, tuple[RaiseAlert, ...]]], now_ms: int) -> None:
        for job, alerts in seen.items():
            self.now |= {(job, policy): found for policy, found in alerts.items()}

    def keys(self) -> set[str]:
        return {alert.key for found in self.now.values() for alert in found}


@dataclass
class MemoryJournal:
    """The journal, in memory."""

    kept: list[Entry] = field(default_factory=list)

    def append(self, connection: object, entry: Entry) -> None:
        self.kept.append(entry)

    def entries(self, *_: object, **__: object) -> tuple[Entry, ...]:
        return tuple(self.kept)


@dataclass
class MemoryFleet:
    """A few jobs whose configs change when something is applied."""

    configs: dict[str, dict[str, Any]]
    frame: Frame | NoFrame
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    applied: list[tuple[str, str, Action]] = field(default_factory=list)
    state: FleetState = field(default_factory=FleetState)
    refuse: PenstockError | None = None
    signals: Signals = field(default_factory=Signals)
    minutes: list[int] = field(default_factory=list)  # how many were asked for, each time

    def names(self) -> list[str]:
        return sorted(self.configs)

    def job(self, name: str) -> ManagedJob | None:
        if name not in self.configs:
            return None
        job = RoundJob(name=name, config=self.configs[name], layer={})
        return ManagedJob(round_job=job, settings=self.settings, signals=self.signals, expected_version=1)

    def jobs(self, names: Sequence[str]) -> dict[str, ManagedJob]:
        return {name: job for name in names if (job := self.job(name)) is not None}

    def facts(
        self, name: str, metrics: tuple[str, ...], minutes: int, if_known: tuple[str, ...] = ()
    ) -> JobFacts | NoFrame:
        self.minutes.append(minutes)
        if isinstance(self.frame, NoFrame):
            return self.frame
        return some_facts(job=name, config=self.configs[name], frame=self.frame)

    def fleet(self) -> FleetState:
        return self.state

    def apply(self, name: str, policy: str, action: Action, *, expected_version: int, reason: str) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.applied.append((name, policy, action))
        if isinstance(action, ChangeLayer):
            for path, value in flat(action.changes).items():
                if "." not in path:
                    value = getattr(a_config(), path) if value is None else value
                    self.configs[name] = self.configs[name].model_copy(update={path: value})
