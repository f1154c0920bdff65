"""A small world for tests of the task layer: real Shard Manager, leases and Task Managers, fake runners, no threads.

Time moves in steps of 500 ms; containers beat every second (the fast profile); messages arrive at once unless a
test holds them back. After every step the invariants of ownership are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.container.task_manager import TaskManager, TaskManagerSettings
from penstock.container.watchdog import Lease
from penstock.core import text as json_text
from penstock.core.journal import Entry
from penstock.db.database import Database, take_term
from penstock.db.journal_store import JournalStore
from penstock.fleet.exclusions import Bars, Exclusion, ExclusionStore, bars_of
from penstock.fleet.messages import FAST, Heartbeat, HeartbeatReply, HeartbeatVerdict, ShardEntry, ShardState
from penstock.fleet.shard_manager import ShardManager, ShardManagerSettings
from penstock.fleet.shard_store import ShardStore
from penstock.fleet.task_service import TaskList, TaskService
from penstock.jobs.config import JobConfig
from penstock.jobs.tasks import TaskSpec
from tests.fleet.fake_runner import FakeRunner

STEP_MS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A running row, as the Job Store would give it."""

    job: str = "a"
    birth: str = "b1"
    version: int = 1
    restart_version: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    state: str = "running"
    generation: int = 1
    mapping: tuple[int, ...] = (0,)
    hold_generation: int = 0

    @property
    def config_json(self) -> str:
        return stored_config(self.job, self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    version: int
    rows: tuple[Running, ...]


class MemoryJobs:
    """Running rows with one version counter: the Job Store as the Task Service sees it."""

    def __init__(self) -> None:
        self.rows: dict[str, Running] = {}
        self.version = 0

    def put(self, job: str, **values: Any) -> int:
        self.version += 1
        self.rows[job] = Running(
            **{"job": job, "restart_version": self.version, **values, "version": self.version}
        )
        return self.version

    def snapshot(self, *, since: int = 0) -> Page:
        rows = sorted(self.rows.values(), key=lambda row: row.version)
        return Page(version=self.version, rows=tuple(row for row in rows if row.version > since))


def a_spec(task_id: str = "a/0", **values: Any) -> TaskSpec:
    job, index = task_id.split("/")
    values["config_json"] = stored_config(job, values.pop("config", {}))
    defaults = {"birth": "b1", "generation": 1, "partitions": (0,), "running_version": 1}
    return TaskSpec(**{"task_id": task_id, "job": job, "index": int(index), **defaults, **values})


def stored_config(job: str, config: Mapping[str, Any]) -> str:
    """A job's whole config as the store has it, from what a test says of it."""
    kind = "process" if "command" in config else "stateless"
    whole = JobConfig.from_stored({"name": job, "pipeline": job, "kind": kind, **config})
    return json_text.dumps(whole.to_json())


def a_list(version: int, *specs: TaskSpec) -> TaskList:
    jobs: dict[str, tuple[TaskSpec, ...]] = {}
    for spec in specs:
        jobs[spec.job] = (*jobs.get(spec.job, ()), spec)
    return TaskList(version=version, full=True, jobs=jobs)


def owned(shard: int, epoch: int) -> ShardEntry:
    return ShardEntry(shard=shard, epoch=epoch)


def dropping(shard: int, epoch: int) -> ShardEntry:
    return ShardEntry(shard=shard, epoch=epoch, state=ShardState.DROPPING)


def a_reply(version: int, *shards: ShardEntry, **values: Any) -> HeartbeatReply:
    defaults = {"verdict": HeartbeatVerdict.OK, "term": 1, "sequence": 1, "shard_count": 1}
    return HeartbeatReply(**{**defaults, "assignment_version": version, "shards": shards, **values})


@dataclass(slots=True)
class Container:
    """What a warden and its engine do, without processes."""

    name: str
    folder_id: str
    lives: int = 0
    is_connected: bool = True
    is_alive: bool = True
    is_ready: bool = True
    given_back: tuple[ShardEntry, ...] = ()  # by its warden, while its engine is not ready
    runner: FakeRunner = field(default_factory=FakeRunner)
    manager: TaskManager = field(init=False)
    lease: Lease = field(init=False)
    sequence: int = 0
    reports_held_back: bool = False  # beats carry no acknowledgements

    @property
    def incarnation(self) -> str:
        return f"{self.name}-{self.lives}"

    def alive(self) -> tuple[str, ...]:
        return self.runner.alive() if self.is_alive else ()


class World:
    """Time, jobs, one Shard Manager, containers."""

    def __init__(self, *, shards: int = 4, **pace: Any) -> None:
        self.now_ms = 0
        self.database = Database(None)
        self.journal = JournalStore(self.database)
        self.store = ShardStore(self.database, self.journal)
        self.exclusions = ExclusionStore(self.database, self.journal)
        self.jobs = MemoryJobs()
        self.service = TaskService(self.jobs)
        self.shards, self.pace = (
            shards,
            ShardManagerSettings(**{"balance_ms": 5_000, "balance_soon_ms": 1_000, **pace}),
        )
        self.containers: dict[str, Container] = {}
        self.sizes: dict[str, tuple[float, ...]] = {}
        self.failed_over: list[str] = []
        self.alerts: list[str] = []
        self.epochs: dict[int, int] = {}
        self.is_manager_up = True
        self.manager = self.take_over()

    def take_over(self) -> ShardManager:
        """A new Shard Manager under a new term."""
        self.manager = ShardManager(
            self.store,
            profile=FAST,
            term=take_term(self.database, "shard_manager", "test"),
            shard_count=self.shards,
            list_version=self.service.version,
            reserved_loads=lambda: self.service.reserved_loads(self.shards),
            settings=self.pace,
            bars=self.bars,
        )
        return self.manager

    def bars(self, at_ms: int) -> Bars:
        """Where which shards should not be, as the store says."""
        return bars_of(
            self.exclusions.current(at_ms),
            lambda subject, birth: self.service.shards_of(subject, birth, self.shards),
        )

    def exclude(self, subject: str, container: str, *, for_ms: int, birth: str = "b1") -> None:
        """Keep a job or a task away from a container."""
        until_ms = self.now_ms + for_ms
        wish = Exclusion(
            subject=subject, birth=birth, container=container, until_ms=until_ms, reason="a test"
        )
        self.exclusions.put([wish], self.entry(subject))

    def entry(self, subject: str) -> Entry:
        return Entry(
            at_ms=self.now_ms, actor="a test", kind="exclusion", subject=subject, decision="x", reason="y"
        )

    def start(self, *names: str) -> None:
        """Containers begin a new life and register."""
        for name in names:
            container = self.containers.setdefault(name, Container(name, f"folder-{name}"))
            container.lives, container.sequence, container.is_alive = container.lives + 1, 0, True
            container.runner = FakeRunner()
            container.manager = TaskManager(
                container.runner, settings=TaskManagerSettings(stop_timeout_ms=2_000)
            )
            container.lease, container.given_back = Lease(FAST.deadline_ms), ()
            self.manager.register(
                name, container.incarnation, folder_id=container.folder_id, now_ms=self.now_ms
            )

    def kill(self, name: str, *, seen: bool = False) -> None:
        """The container and everything in it is gone; `seen`: its host notices."""
        container = self.containers[name]
        container.is_alive = False
        if seen:
            self.manager.on_container_dead(name, container.incarnation, self.now_ms)

    def beat_of(self, container: Container) -> Heartbeat:
        container.sequence += 1
        if not container.is_ready:
            return Heartbeat(
                container=container.name,
                incarnation=container.incarnation,
                sequence=container.sequence,
                acked=container.given_back,
            )
        report = container.manager.report()
        return Heartbeat(
            container=container.name,
            incarnation=container.incarnation,
            sequence=container.sequence,
            acked=() if container.reports_held_back else report.acked,
            assignment_version=report.assignment_version,
            list_version=report.list_version,
            tasks=report.tasks,
            loads=report.loads,
            order=report.order,
            capacity=self.sizes.get(container.name, ()),
            engine_ready=True,
        )

    def beat(self, name: str) -> HeartbeatReply | None:
        """One beat and its answer, as far as they get through."""
        container = self.containers[name]
        beat = self.beat_of(container)
        container.lease.on_sent(beat.sequence, self.now_ms)
        if not (container.is_connected and self.is_manager_up):
            return None
        reply = self.manager.on_heartbeat(beat, self.now_ms)
        container.lease.on_ack(reply, self.now_ms)
        if not container.is_ready:
            container.given_back = tuple(e for e in reply.shards if e.state is ShardState.DROPPING)
            return reply
        container.manager.on_reply(reply, self.now_ms)
        if container.manager.is_list_stale:
            container.manager.on_task_list(self.service.snapshot(container.manager.list_version), self.now_ms)
        return reply

    def step(self) -> None:
        self.now_ms += STEP_MS
        for name, container in sorted(self.containers.items()):
            if not container.is_alive:
                continue
            if self.now_ms % FAST.heartbeat_ms == 0:
                self.beat(name)
            if container.lease.on_time(self.now_ms).actions:
                container.manager.stop_all()
            container.manager.tick(self.now_ms)
            if container.manager.all_stopped and container.lease.on_time(self.now_ms).actions:
                self._reboot(container)
        if self.is_manager_up:
            report = self.manager.tick(self.now_ms)
            self.failed_over += report.failed_over
            self.alerts += [alert.kind for alert in report.alerts]
        self.check()

    def _reboot(self, container: Container) -> None:
        if container.is_connected and self.is_manager_up:
            self.start(container.name)

    def run(self, duration_ms: int) -> None:
        end_ms = self.now_ms + duration_ms
        while self.now_ms < end_ms:
            self.step()

    def check(self) -> None:
        """Nobody runs twice; epochs only grow."""
        alive = [task for container in self.containers.values() for task in container.alive()]
        assert len(alive) == len(set(alive)), f"run twice at {self.now_ms}: {sorted(alive)}"
        for row in self.store.shards():
            assert row.epoch >= self.epochs.get(row.shard, 0), f"{row} went back"
            self.epochs[row.shard] = row.epoch

    def alive(self) -> dict[str, tuple[str, ...]]:
        """Container -> the tasks that run there."""
        return {name: container.alive() for name, container in self.containers.items()}

    def tasks_alive(self) -> list[str]:
        return sorted(task for tasks in self.alive().values() for task in tasks)

    def owners(self) -> dict[int, str | None]:
        return {row.shard: row.container for row in self.store.shards()}
