"""The control plane as a process that dies, pauses and returns: real syncer, Shard Manager, Task Service.

All lives share one store. Each takes new terms; a replaced one that wakes up still believes in its old ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.core.clock import Millis
from penstock.core.errors import Fenced, PenstockError, StoreUnavailable
from penstock.db.database import Database, take_term
from penstock.db.journal_store import JournalStore
from penstock.fleet.messages import Heartbeat, Profile
from penstock.fleet.shard_manager import Pace, ShardManager
from penstock.fleet.shard_store import ShardStore
from penstock.fleet.task_service import TaskList, TaskService
from penstock.jobs.job_service import JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.syncer.plan_runner import DataPlane
from penstock.jobs.syncer.state_syncer import StateSyncer, SyncReport
from penstock.sim.simulation import Process, ProcessClock, ProcessCrashed, Simulation

Answer = TypeVar("Answer")

SYNC_MS: Millis = 10_000
SYNC_SOON_MS: Millis = 1_000
RESTART_MS: Millis = 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How the services of one life are made: a planted bug replaces one of these."""

    syncer: type[StateSyncer] = StateSyncer
    shard_manager: type[ShardManager] = ShardManager
    shard_store: type[ShardStore] = ShardStore
    task_service: type[TaskService] = TaskService


@dataclass(slots=True, kw_only=True)
class Services:
    """One life of the control plane."""

    process: Process
    job_service: JobService
    syncer: StateSyncer
    shard_manager: ShardManager
    task_service: TaskService
    sync_due_ms: Millis = 0
    hangs_until_ms: Millis = 0  # the syncer waits for an answer of the data plane


@dataclass(slots=True)
class ControlPlane:
    """Whoever answers under the control plane's address."""

    sim: Simulation
    database: Database
    data_plane: DataPlane
    profile: Profile
    shard_count: int
    clock: ProcessClock  # of the host: all lives share it
    parts: Parts = field(default_factory=Parts)
    active: Services | None = None
    zombies: list[Services] = field(default_factory=list)
    lives: int = 0
    met: Counter[str] = field(default_factory=Counter)
    on_sync: Callable[[SyncReport], None] = lambda report: None
    sync_ms: Millis = SYNC_MS  # between rounds that find nothing to do
    pace: Pace = field(default_factory=Pace)
    tick_ms: Millis = 0  # between rounds of the Shard Manager; 0: a quarter of a heartbeat
    down_until_ms: Millis = 0  # nobody starts it before
    syncer_down_until_ms: Millis = 0
    task_service_down_until_ms: Millis = 0
    _is_starting: bool = False

    @property
    def process(self) -> Process | None:
        """Of the active life."""
        return None if self.active is None else self.active.process

    def processes(self) -> list[Process]:
        """Of every life that is not over."""
        lives = [*self.zombies, *([self.active] if self.active is not None else [])]
        return [life.process for life in lives if life.process.is_alive]

    def start(self) -> None:
        """Begin a new life, or try again soon when the store does not let it."""
        self._is_starting = False
        if self.sim.now_ms < self.down_until_ms:
            self._restart_later()
            return
        if self.active is not None and self.active.process.is_alive:
            return
        self.lives += 1
        process = Process(sim=self.sim, name=f"control{self.lives}", clock=self.clock)
        process.run("start", lambda: self._boot(process))
        if self.active is None or self.active.process is not process:
            process.kill()
            self._restart_later()

    def crash(self) -> None:
        """SIGKILL: the supervisor starts it again."""
        if self.active is not None:
            self.active.process.kill()

    def become_zombie(self, *, for_ms: Millis) -> None:
        """Pause the active life and start another one; later the old one goes on as if it were the active."""
        if self.active is None or not self.active.process.is_alive:
            return
        old, self.active = self.active, None
        old.process.pause()
        self.zombies.append(old)
        self.sim.after(for_ms, "the zombie wakes", old.process.resume)
        self._restart_later()

    def become_zombie_here(self, process: Process, *, for_ms: Millis, until_ms: Millis) -> None:
        """Pause the active life between two lines of its round; when this returns, it goes on with the next.

        Meanwhile all else goes on, a successor included: the round then writes what it decided long ago.
        """
        old, self.active = self.active, None
        assert old is not None and old.process is process
        process.pause()
        process.is_inside = True
        self.zombies.append(old)
        self._restart_later()
        self.sim.run_inside(min(self.sim.now_ms + for_ms, until_ms))
        process.is_inside = False
        if not process.is_alive:
            raise ProcessCrashed
        # What came in during the pause is for after this round.
        self.sim.after(0, "the zombie's round is over", process.resume)

    def answering(self) -> Services | None:
        """Who gets a message that arrives now: at times a zombie that still holds the connection."""
        awake = [life for life in self.zombies if life.process.is_alive and not life.process.is_paused]
        if awake and self.sim.rng.random() < 0.3:
            return self.sim.rng.choice(awake)
        if self.active is None or not self.active.process.is_alive:
            return None
        return self.active

    def task_list(self, life: Services, since: int | None) -> TaskList:
        """What the Task Service of this life answers."""
        if self.sim.now_ms < self.task_service_down_until_ms:
            self.met["task service down"] += 1
            raise StoreUnavailable("the simulated Task Service is down")
        return life.task_service.snapshot(since)

    def poke(self) -> None:
        """Something was written: sync soon."""
        if self.active is not None:
            self.active.sync_due_ms = min(self.active.sync_due_ms, self.sim.now_ms + SYNC_SOON_MS)

    def guarded(self, life: Services, action: Callable[[], Answer]) -> Answer | None:
        """Run a part of a service as its loop would: an error costs the round, a lost term ends the life."""
        try:
            return action()
        except Fenced:
            self.met["fenced"] += 1
            life.process.kill()
        except PenstockError as error:
            self.met[type(error).__name__] += 1
        return None

    def _restart_later(self) -> None:
        if not self._is_starting:
            self._is_starting = True
            soon_ms = max(0, self.down_until_ms - self.sim.now_ms) + self.sim.rng.randrange(200, RESTART_MS)
            self.sim.after(soon_ms, "control plane starts", self.start)

    def _boot(self, process: Process) -> None:
        try:
            syncer_term = take_term(self.database, "syncer", process.name)
            shard_term = take_term(self.database, "shard_manager", process.name)
        except PenstockError:
            return
        store = JobStore(self.database)
        tasks = self.parts.task_service(store.running)
        manager = self.parts.shard_manager(
            self.parts.shard_store(self.database, JournalStore(self.database)),
            profile=self.profile,
            term=shard_term,
            list_version=tasks.version,
            reserved_loads=lambda: tasks.reserved_loads(self.shard_count),
            shard_count=self.shard_count,
            pace=self.pace,
            send_canary=lambda beat: self._send_canary(life, beat),
            wall_of=lambda now_ms: process.clock.now_ms(),
        )
        life = Services(
            process=process,
            job_service=JobService(store),
            syncer=self.parts.syncer(store, manager, self.data_plane, term=syncer_term),
            shard_manager=manager,
            task_service=tasks,
        )
        self.active = life
        process.on_death.append(lambda: self._on_death(life))
        tick_ms = self.tick_ms or max(1_000, self.profile.heartbeat_ms // 4)
        process.every(tick_ms, "tick", lambda: self._tick(life))
        process.every(500, "sync", lambda: self._sync(life))

    def _on_death(self, life: Services) -> None:
        if life in self.zombies:
            self.zombies.remove(life)
        if self.active is life:
            self.active = None
            self._restart_later()

    def _send_canary(self, life: Services, beat: Heartbeat) -> None:
        def arrive() -> None:
            self.guarded(life, lambda: life.shard_manager.on_heartbeat(beat, life.process.clock.boot_ms()))

        life.process.after(1, "canary", arrive)

    def _tick(self, life: Services) -> None:
        self.guarded(life, lambda: life.shard_manager.tick(life.process.clock.boot_ms()))

    def _sync(self, life: Services) -> None:
        now_ms = self.sim.now_ms
        if now_ms < max(life.sync_due_ms, life.hangs_until_ms, self.syncer_down_until_ms):
            return
        life.sync_due_ms = now_ms + SYNC_SOON_MS
        report = self.guarded(life, lambda: life.syncer.sync_once(life.process.clock.now_ms()))
        if report is not None:
            self.on_sync(report)
            if report.is_quiet:
                life.sync_due_ms = now_ms + self.sync_ms
