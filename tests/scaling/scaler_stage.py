"""A small fleet whose tasks are modelled second by second, on real stores: the scaler's service runs on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.alarms.store import AlarmStore
from penstock.core.journal import Entry
from penstock.db.database import Database
from penstock.db.journal_store import JournalStore
from penstock.fleet.messages import TaskReport, count_failure
from penstock.jobs.job_service import JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.syncer.sync_plan import plan_mapping
from penstock.scaling.metrics.retriever import ScalerMinutes
from penstock.scaling.metrics.store import MetricRecorder, MetricStore
from penstock.scaling.policies.policy_manager import PolicyRecordStore
from penstock.scaling.policies.round import FleetState, flat
from penstock.scaling.scaler.auto_scaler import AutoScaler
from penstock.scaling.scaler.observe import ClusterCapacity, ScalableJob
from tests.builders import SCALER, a_job

START_MS = 28_000_000 * 60_000
DONE = ("up", "down", "undo", "rebalance")


@dataclass
class Work:
    """A job's tasks: each reads its share of the input, as fast as a thread can and as the sink lets it."""

    job: str
    input_rate: Callable[[float], float] = lambda s: 100.0
    thread_rate: float = 100.0
    sink_rate_max: float = float("inf")
    hot_share: float = 0.0  # of the input: what the first task gets, however many there are
    parts: tuple[float, ...] = ()  # of the input: what each partition gets; then they are known by partition
    mapping: tuple[int, ...] = ()
    waits: list[float] = field(default_factory=list)  # by partition
    restart_s: int = 3
    memory_mb: float | None = None
    failing: str = ""  # every task fails with this, every ten seconds
    is_silent: bool = False
    task_count: int = 1
    is_patched: bool = True
    generation: int = 1
    seen: tuple[Any, ...] = ()
    changed_ms: int = 0
    starts_ms: int = 0
    lags: list[float] = field(default_factory=list)
    busy_ms: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)

    def deal(self, task_count: int) -> None:
        """Another number of tasks: what waits is dealt to them."""
        waiting = sum(self.lags)
        self.task_count = task_count
        self.lags = [waiting * share for share in self.shares()]
        if self.parts:
            self.waits = self.waits or [0.0] * len(self.parts)
            self.lags = [
                sum(wait for wait, task in zip(self.waits, self.mapping, strict=True) if task == place)
                for place in range(task_count)
            ]
        self.busy_ms, self.read = [0.0] * task_count, [0.0] * task_count

    def shares(self) -> list[float]:
        if self.parts:
            return [
                sum(part for part, task in zip(self.parts, self.mapping, strict=True) if task == place)
                for place in range(self.task_count)
            ]
        rest = (1 - self.hot_share) / self.task_count
        return [self.hot_share + rest if not place else rest for place in range(self.task_count)]

    def second(self, now_ms: int, at_s: float) -> None:
        arrived = self.input_rate(at_s)
        for partition, part in enumerate(self.parts):
            self.waits[partition] += arrived * part
        for place, share in enumerate(self.shares()):
            self.lags[place] += arrived * share
            if now_ms < self.starts_ms or self.failing:
                continue
            most = min(self.thread_rate, self.sink_rate_max / self.task_count)
            done = min(self.lags[place], most)
            self.lags[place] -= done
            self.read[place] += done
            for partition, task in enumerate(self.mapping if self.parts else ()):
                if task == place and done:
                    self.waits[partition] *= self.lags[place] / (self.lags[place] + done)
            self.busy_ms[place] += 1000 * done / self.thread_rate
            if done == most < self.thread_rate:
                self.busy_ms[place] += 1000 * (1 - done / self.thread_rate)  # it waits for the sink

    def reports(self, now_ms: int) -> list[TaskReport]:
        return [self._report(place, now_ms) for place in range(self.task_count)]

    def _report(self, place: int, now_ms: int) -> TaskReport:
        is_up = now_ms >= self.starts_ms and not self.failing
        metrics: dict[str, float] = {}
        if is_up:
            lag = self.lags[place]
            metrics = {
                "at_ms": float(now_ms),
                "started_ms": float(self.starts_ms),
                "read_total": self.read[place],
                "written_total": self.read[place],
                "busy_ms_total": self.busy_ms[place],
                "lag_records": lag,
                "lag_s": lag / self.thread_rate,
                "input_rate": 1.0,
                "processed_rate": min(self.thread_rate, self.input_rate(0)),
                "busy": 0.5,
            }
            for partition, part in enumerate(self.parts):
                if self.mapping[partition] == place:
                    metrics[f"input_rate.{partition}"] = self.input_rate((now_ms - START_MS) / 1000) * part
                    metrics[f"lag_records.{partition}"] = self.waits[partition]
            if self.memory_mb is not None:
                metrics["memory_mb"] = self.memory_mb
        return TaskReport(
            task_id=f"{self.job}/{place}",
            job=self.job,
            generation=self.generation,
            shard=place,
            state="running" if is_up else "backoff" if self.failing else "starting",
            error=self.failing,
            restarts=sum(self.failures.values()),
            metrics=metrics,
            failures=dict(self.failures),
        )


class Stage:
    """Jobs, their tasks and the time. Several scalers may stand on it."""

    def __init__(self, database: Database) -> None:
        self.database, self.now_ms = database, START_MS
        self.service = JobService(JobStore(database))
        self.journal, self.metrics = JournalStore(database), MetricStore(database)
        self.alarms = AlarmStore(database, self.journal, ())
        self.recorder = MetricRecorder(self.metrics)
        self.works: dict[str, Work] = {}
        self.capacity, self.fleet = ClusterCapacity(), FleetState()
        self.scaler = self.new_scaler()

    def new_scaler(self) -> AutoScaler:
        """A scaler as a control plane that just began has it."""
        store = PolicyRecordStore(self.database, self.journal)
        self.records = store
        return AutoScaler(
            StageJobs(self), ScalerMinutes(self.metrics), store, self.journal, self.alarms, heartbeat_ms=1000
        )

    def add(self, work: Work, **config: Any) -> Work:
        scaler = {"settle_s": 5, "recovery_s": 60, **config.pop("scaler", {})}
        config = {"slo": {"lag_s": 5}, "trigger_ms": 0, **config}
        a_job(self.service, work.job, now_ms=self.now_ms, scaler=scaler, **config)
        self.works[work.job] = work
        self._sync(work)
        work.starts_ms = self.now_ms
        return work

    def run(self, seconds: int, until: Callable[[], bool] | None = None) -> int:
        """So many seconds, or until something holds; returns how many they were."""
        for passed in range(seconds):
            if until is not None and until():
                return passed
            self.now_ms += 1000
            for work in self.works.values():
                self._sync(work)
                if work.failing and self.now_ms // 1000 % 10 == 0:
                    work.failures = count_failure(work.failures, work.failing)
                work.second(self.now_ms, (self.now_ms - START_MS) / 1000)
            if self.now_ms // 1000 % 5 == 0:
                self.recorder.tick(self.now_ms, self.counts(), self.reports())
            self.scaler.tick(self.now_ms)
        return seconds

    def counts(self) -> dict[str, tuple[int, int]]:
        return {name: (work.generation, work.task_count) for name, work in self.works.items()}

    def reports(self) -> dict[str, list[TaskReport]]:
        return {name: work.reports(self.now_ms) for name, work in self.works.items() if not work.is_silent}

    def _sync(self, work: Work) -> None:
        """What the State Syncer does, at once."""
        if not work.is_patched:
            return
        work.is_patched = False
        config = self.service.view(work.job).config
        mapping = plan_mapping(config, None)
        wanted = (config.task_count, config.threads, config.resources, mapping)
        if wanted == work.seen:
            return
        work.generation += bool(work.seen)
        work.seen, work.changed_ms = wanted, self.now_ms
        work.starts_ms = self.now_ms + 1000 * work.restart_s
        work.mapping = mapping
        work.deal(config.task_count)

    # -- what tests ask

    def entries(self, job: str = "demo.count") -> list[Entry]:
        return [entry for entry in self.journal.entries(job, limit=1000) if entry.kind == "scale"]

    def done(self, job: str = "demo.count") -> list[str]:
        return [entry.decision for entry in self.entries(job) if entry.decision in DONE]

    def alarm_keys(self, job: str = "demo.count") -> set[str]:
        return {alarm.key for alarm in self.alarms.alarms(job) if alarm.is_firing}


class StageJobs:
    """The scaler's `JobLayer` on a stage: what is expected runs at once."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def task_counts(self) -> Mapping[str, tuple[int, int]]:
        return self._stage.counts()

    def task_reports(self) -> Mapping[str, Sequence[TaskReport]]:
        return self._stage.reports()

    def scalable_jobs(self, names: Sequence[str]) -> tuple[ScalableJob, ...]:
        return tuple(self._job(name) for name in names)

    def _job(self, name: str) -> ScalableJob:
        view, work = self._stage.service.view(name), self._stage.works[name]
        layers = {row.layer: row for row in view.layers}
        made = layers["provisioner"].at_ms
        return ScalableJob(
            name=name,
            birth=view.birth,
            pipeline=view.pipeline,
            expected_version=view.expected_version,
            generation=work.generation,
            task_count=work.task_count,
            mapping=work.mapping,
            is_settled=not work.is_patched,
            config=view.config,
            layer=layers["scaler"].body if "scaler" in layers else {},
            oncall=frozenset(flat(layers["oncall"].body)) if "oncall" in layers else frozenset(),
            created_ms=view.created_ms,
            changed_ms=work.changed_ms,
            updated_ms=made if made > view.created_ms else None,
        )

    def capacity(self) -> ClusterCapacity:
        return self._stage.capacity

    def fleet(self) -> FleetState:
        return self._stage.fleet

    def patch(self, job: str, changes: Mapping[str, Any], *, expected_version: int, reason: str) -> None:
        self._stage.service.patch_layer(
            job,
            "scaler",
            flat(changes),
            expected_version=expected_version,
            actor=SCALER,
            reason=reason,
            idempotency_key=None,
            now_ms=self._stage.now_ms,
        )
        self._stage.works[job].is_patched = True
