"""A small world for the State Syncer: a real store, a bus and containers that remember, and faults on demand."""

from __future__ import annotations

import copy
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core.errors import PenstockError
from penstock.core.workers import Workers
from penstock.db.database import Database, take_term, values_of
from penstock.jobs.config import JobConfig
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.running_store import RunningRow
from penstock.jobs.syncer.plan_runner import PlanOutcome
from penstock.jobs.syncer.state_syncer import StateSyncer, SyncerSettings, SyncReport
from tests.builders import DEVELOPER, ONCALL
from tests.waiting import LIMIT_S

ROUND_MS = 6_000


class Crash(BaseException):
    """The process is gone. Nobody may catch it but the test."""


def producers_of(birth: str, config: JobConfig) -> set[tuple[str, str]]:
    """(category, producer) for everything a config writes."""
    return {
        (output.category, f"{birth}:{config.kind}:{config.lineage}:{partition}")
        for output in config.outputs
        for partition in range(config.partitions)
    }


@dataclass(frozen=True)
class Fail:
    """The call is refused; nothing is done."""

    error: BaseException


@dataclass(frozen=True)
class Lie:
    """The call does its work, and then reports an error."""

    error: BaseException


@dataclass(frozen=True)
class Hang:
    """The call waits until it is released, and does its work then."""

    is_entered: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


@dataclass
class FakeTaskLayer:
    """Containers, bus and rows behind both ports: what is registered, how far each job is fenced, who has stopped.

    A task stops at the second look, or never if its job is stuck. `trouble[call, job]` says how a call goes wrong.
    """

    point: Callable[[str], None] = lambda name: None
    registered: set[tuple[str, str]] = field(default_factory=set)
    fenced: dict[str, int] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)
    unread_of: dict[tuple[str, str], str] = field(default_factory=dict)  # (job, category): why
    looks: dict[tuple[str, int, int], int] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    trouble: dict[tuple[str, str], Fail | Lie | Hang] = field(default_factory=dict)
    refuse: Callable[[str, str, JobConfig | None], PenstockError | None] = lambda call, job, config: None

    def is_stopped(self, job: str, *, generation: int, list_version: int) -> bool:
        with self._call("is_stopped", job, None):
            key = (job, generation, list_version)
            self.looks[key] = self.looks.get(key, 0) + 1
            return job not in self.stuck and self.looks[key] > 1

    def prepare(self, job: str, birth: str, config: JobConfig) -> None:
        with self._call("prepare", job, config):
            # Cut off half-way, some are registered and some are not.
            producers = sorted(producers_of(birth, config))
            self.registered |= set(producers[::2])
            self.point("prepare half-way")
            self.registered |= set(producers)

    def unread(self, job: str, birth: str, config: JobConfig, category: str, *, is_stopped: bool) -> str:
        with self._call("unread", job, config):
            return self.unread_of.get((job, category), "")

    def fence(self, job: str, birth: str, config: JobConfig, *, generation: int) -> None:
        with self._call("fence", job, config):
            self.fenced[job] = max(generation, self.fenced.get(job, 0))

    def retire(self, job: str, birth: str, old: JobConfig, new: JobConfig | None) -> None:
        with self._call("retire", job, old):
            kept = set() if new is None else producers_of(birth, new)
            self.registered -= producers_of(birth, old) - kept

    @contextmanager
    def _call(self, call: str, job: str, config: JobConfig | None) -> Iterator[None]:
        self.calls.append((call, job))
        self.point(call)
        if (error := self.refuse(call, job, config)) is not None:
            raise error
        match self.trouble.get((call, job)):
            case Fail(error):
                raise error
            case Hang(is_entered, released):
                is_entered.set()
                assert released.wait(LIMIT_S), "nobody released the call"
        yield
        self.point(f"{call} done")
        match self.trouble.get((call, job)):
            case Lie(error):
                raise error


class World:
    """Everything a syncer lives in. `fail_at(n, error)` makes the nth point from now raise, once."""

    def __init__(
        self,
        place: Path | str | None = None,
        *,
        settings: SyncerSettings | None = None,
        workers: Workers[PlanOutcome] | None = None,
    ) -> None:
        self.points, self._fail_at, self._error, self.point_name = 0, 0, lambda: Crash(), ""
        self.database = Database(place, fault=self._point)
        self.store = JobStore(self.database)
        self.service = JobService(self.store)
        self.data = self.tasks = FakeTaskLayer(self._point)
        self.now_ms, self.round_ms = 0, ROUND_MS
        self.settings, self.workers, self.measure_ms = settings, workers, lambda: 0
        self.syncer = self.restart()

    def restart(self) -> StateSyncer:
        term = take_term(self.database, "syncer", "test")
        self.syncer = StateSyncer(
            self.store,
            self.tasks,
            self.data,
            term=term,
            settings=self.settings,
            workers=self.workers,
            measure_ms=lambda: self.measure_ms(),
        )
        return self.syncer

    def save(self) -> Callable[[], None]:
        """Remember this moment; calling the answer goes back to it, far faster than building a new world."""
        saved, now_ms = sqlite3.connect(":memory:"), self.now_ms
        raw = self.database._backend.writing.raw_connection().driver_connection
        raw.backup(saved)
        kept = copy.deepcopy((self.data.registered, self.data.fenced, self.tasks.stuck, self.tasks.looks))

        def restore() -> None:
            saved.backup(raw)
            data = copy.deepcopy(kept)
            self.data.registered, self.data.fenced, self.tasks.stuck, self.tasks.looks = data
            self.now_ms = now_ms
            self.fail_at(0)
            self.restart()

        return restore

    def fail_at(self, number: int, error: Callable[[], BaseException | None] = Crash) -> None:
        self.points, self._fail_at, self._error = 0, number, error

    def round(self) -> SyncReport:
        self.now_ms += self.round_ms
        return self.syncer.sync_once(self.now_ms)

    def settle(self, rounds_max: int = 40) -> int:
        """Run rounds until one finds nothing to do; a crash is followed by a restart. Returns the rounds."""
        for number in range(rounds_max):
            try:
                if self.round().is_idle:
                    return number
            except Crash:
                self.restart()
            except PenstockError:
                pass  # the loop logs it and calls again
        raise AssertionError(f"not settled after {rounds_max} rounds")

    def write(
        self, layer: str, job: str = "demo.count", *, actor: Actor | None = None, **changes: Any
    ) -> int:
        actor = actor or (ONCALL if layer == "oncall" else DEVELOPER)
        return self.service.patch_layer(
            job, layer, changes, actor=actor, reason="test", idempotency_key=None, now_ms=self.now_ms
        )

    def outcome(self) -> dict[str, Any]:
        """All that is durable, but for the times."""
        records = self.store.load([job.name for job in self.store.overview()])
        return {
            "running": {name: timeless(record.running) for name, record in records.items()},
            "plans": [name for name, record in records.items() if record.plan is not None],
            "quarantine": {name: timeless(record.quarantine) for name, record in records.items()},
            "retirements": [name for name, record in records.items() if record.retirements],
            "registered": self.data.registered,
            "fenced": self.data.fenced,
            "audit": [(row.action, row.subject, row.reason, dict(row.data)) for row in self.store.audit()],
        }

    def _point(self, name: str) -> None:
        self.points, self.point_name = self.points + 1, name
        if self.points == self._fail_at:
            self._fail_at = 0
            if (error := self._error()) is not None:
                raise error


def timeless(row: Any) -> dict[str, Any] | None:
    """A row without the columns that tell when."""
    if row is None:
        return None
    values = row.to_json() if isinstance(row, RunningRow) else values_of(row)
    return {name: value for name, value in values.items() if name not in ("updated_ms", "since_ms")}
