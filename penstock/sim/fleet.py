"""Simulated containers: the real Task Manager in an engine, the real `Watchdog` and `Lease` in a warden.

What the warden does with threads and processes is done here with events; the decisions are its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from penstock.container.task_manager import TaskManager, TaskManagerSettings
from penstock.container.watchdog import Contact, EndEngine, Lease, Renewal, Watchdog
from penstock.core.clock import Millis
from penstock.core.errors import Fenced, PenstockError, StoreUnavailable
from penstock.db.database import Database, take_term
from penstock.db.journal_store import JournalStore
from penstock.fleet.messages import Heartbeat, HeartbeatReply, Profile, ShardEntry
from penstock.fleet.shard_load import ShardLoadSettings
from penstock.fleet.shard_manager import ShardManager, ShardManagerSettings
from penstock.fleet.shard_store import Assignment, ShardStore
from penstock.fleet.task_service import TaskList, TaskService
from penstock.jobs.job_service import JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.syncer.plan_runner import DataPlane
from penstock.jobs.syncer.state_syncer import StateSyncer, SyncReport
from penstock.sim.data_plane import LiveRuns, ModelDataPlane, SimPace, SimRunner
from penstock.sim.simulation import Network, ProcessClock, ProcessCrashed, SimProcess, Simulation

ENGINE_START_MS: Millis = 3_000  # until its first sign of life
SLOW_STARTS_MS: tuple[Millis, ...] = (4_000, 16_000, 90_000)  # from there until a slow one is ready, at most
KILL_MS: Millis = 500
STORE_MS: Millis = 300  # until the store has a question, and as long until its answer is there
BOOT_MS: Millis = 15_000


@dataclass(slots=True, kw_only=True)
class SimEnvironment:
    """What every container of a world shares."""

    sim: Simulation
    network: Network
    control: SimControlPlane
    data_plane: ModelDataPlane
    population: LiveRuns
    profile: Profile
    pace: SimPace
    settings: TaskManagerSettings
    load_pace: ShardLoadSettings
    watch_ms: Millis  # between two looks of a warden
    shard_store: ShardStore  # as containers reach it, past the control plane
    slow_starts: float = 0.0  # the share of engines that live long before they are ready
    lease: type[Lease] = Lease
    watchdog: type[Watchdog] = Watchdog
    task_manager: type[TaskManager] = TaskManager
    on_arrival: Callable[[str, str], None] = lambda container, incarnation: None  # a beat reached the active
    # An engine of (container, incarnation), or its warden for it, says which shards it recorded or gave back.
    on_acked: Callable[[str, str, tuple[ShardEntry, ...]], None] = lambda container, incarnation, acked: None
    # A warden ends the engine of (container, incarnation), and why.
    on_ending: Callable[[Container, str, str], None] = lambda container, incarnation, reason: None
    met: Counter[str] = field(default_factory=Counter)


class SimEngine:
    """One life of an engine process: the real Task Manager over a simulated runner."""

    def __init__(self, around: SimEnvironment, container: Container, incarnation: str) -> None:
        self.incarnation = incarnation
        self.process = SimProcess(
            sim=around.sim, name=f"{container.host}.engine.{incarnation}", clock=container.clock
        )
        runner = SimRunner(
            self.process,
            container=container.host,
            incarnation=incarnation,
            data_plane=around.data_plane,
            population=around.population,
            pace=around.pace,
        )
        self.manager = around.task_manager(runner, settings=around.settings, load_pace=around.load_pace)
        self._around, self._container = around, container
        self._asked_ms: Millis | None = None
        self._is_ready = False
        self.process.after(around.sim.rng.randrange(200, ENGINE_START_MS), "is up", self._begin)

    def on_reply(self, reply: HeartbeatReply) -> None:
        """The warden passed a reply on, through the pipe."""
        if self._is_ready:  # before that nobody is there to take it
            self.process.run("reply", lambda: self.manager.on_reply(reply, self.process.clock.boot_ms()))

    def _begin(self) -> None:
        rng = self._around.sim.rng
        if rng.random() < self._around.slow_starts:
            self._around.met["slow engine start"] += 1
            self.process.after(rng.randrange(1, rng.choice(SLOW_STARTS_MS)), "is ready", self.be_ready)
        else:
            self.be_ready()
        self._round()
        self.process.every(self._around.profile.sign_of_life_ms, "round", self._round)

    def be_ready(self) -> None:
        """Its session is there: it has a Task Manager from now on. May be repeated."""
        if self._is_ready:
            return
        self._is_ready = True
        if self._container.cached_list is not None:
            self.manager.on_task_list(self._container.cached_list, self.process.clock.boot_ms(), cached=True)

    def _round(self) -> None:
        now_ms = self.process.clock.boot_ms()
        if not self._is_ready:
            said = Heartbeat(container=self._container.name, incarnation=self.incarnation, sequence=0)
            self._container.on_sign(self.incarnation, now_ms, said)
            return
        self.manager.tick(now_ms)
        if self.manager.is_list_stale:
            self._ask_for_list(now_ms)
        report = self.manager.report()
        self._around.on_acked(self._container.host, self.incarnation, report.acked)
        said = Heartbeat(
            container=self._container.name,
            incarnation=self.incarnation,
            sequence=0,
            acked=report.acked,
            assignment_version=report.assignment_version,
            list_version=report.list_version,
            tasks=report.tasks,
            loads=report.loads,
            engine_ready=True,
        )
        self._container.on_sign(self.incarnation, now_ms, said)

    def _ask_for_list(self, now_ms: Millis, *, whole: bool = False) -> None:
        if self._asked_ms is not None and now_ms - self._asked_ms < self._around.profile.heartbeat_ms:
            return
        self._asked_ms = now_ms
        since = None if whole else self.manager.list_version

        def answer(life: SimServices) -> Callable[[], None] | None:
            news = self._around.control.guarded(life, lambda: self._around.control.task_list(life, since))
            return None if news is None else lambda: self._take_list(news)

        self._container.ask(self.process, "task list", answer)

    def _take_list(self, news: TaskList) -> None:
        self._asked_ms = None
        now_ms = self.process.clock.boot_ms()
        if self.manager.on_task_list(news, now_ms):
            self._container.cached_list = self.manager.task_list
        else:
            self._ask_for_list(now_ms, whole=True)


class Container:
    """A host with a warden on it, which keeps one engine after another alive.

    `name` is what it is called; two hosts may be started with one name, by mistake.
    """

    def __init__(self, around: SimEnvironment, name: str, clock: ProcessClock, *, host: str = "") -> None:
        self.name, self.clock, self.host = name, clock, host or name
        self.cached_list: TaskList | None = None  # on disk
        self.is_lost = False  # for good: nobody will start it again
        self._around, self._sim = around, around.sim
        self._incarnations = 0
        self._warden: SimProcess | None = None
        self._engine: SimEngine | None = None
        self._registering = ""
        self._watchdog: Watchdog | None = None
        self._contact = Contact()

    @property
    def warden(self) -> SimProcess | None:
        """The living one."""
        return self._warden if self._warden is not None and self._warden.is_alive else None

    @property
    def engine(self) -> SimProcess | None:
        """The living one."""
        return self._engine.process if self._engine is not None and self._engine.process.is_alive else None

    @property
    def incarnation(self) -> str:
        """Of the living engine."""
        return self._engine.incarnation if self._engine is not None and self.engine is not None else ""

    @property
    def has_contact(self) -> bool:
        """Whether its warden was ever answered in time."""
        return self._contact.is_made

    # -- what happens to it -------------------------------------------------------------------------------

    def start(self) -> None:
        """Boot: reap what a former life left, then register."""
        if self.warden is not None or self.is_lost:
            return
        if self.engine is not None:
            self.engine.kill()
        self._engine, self._watchdog, self._contact = None, None, Contact()
        warden = SimProcess(sim=self._sim, name=f"{self.host}.warden", clock=self.clock)
        self._warden = warden
        warden.every(self._around.watch_ms, "watch", self._watch)
        warden.run("register", self._register)

    def crash(self, *, for_good: bool = False, restarts: bool = True) -> None:
        """Everything of it dies at once."""
        incarnation = self.incarnation
        self.is_lost = self.is_lost or for_good
        for process in (self.warden, self.engine):
            if process is not None:
                process.kill()
        if incarnation and self._sim.rng.random() < 0.5:
            self._sim.after(
                self._sim.rng.randrange(1, 2_000), "exit seen", lambda: self._tell_exit(incarnation)
            )
        if restarts:
            self._restart_later()

    def crash_warden(self) -> None:
        """Only the warden dies; the engine notices that the pipe is closed."""
        if self.warden is None:
            return
        self.warden.kill()
        if self._engine is not None:
            engine = self._engine.process
            engine.after(100, "pipe is closed", engine.kill)
        self._restart_later()

    def crash_engine(self) -> None:
        """Only the engine dies; the warden notices."""
        if self.engine is not None:
            self.engine.kill()

    def hurry(self) -> None:
        """An engine that starts slowly is ready now."""
        if self._engine is not None and self.engine is not None:
            self.engine.run("hurries", self._engine.be_ready)

    def _restart_later(self) -> None:
        self._sim.after(self._sim.rng.randrange(500, BOOT_MS), f"{self.host} boots", self.start)

    def _tell_exit(self, incarnation: str) -> None:
        life = self._around.control.answering()
        if life is None:
            return

        def tell() -> None:
            now_ms = life.process.clock.boot_ms()
            self._around.control.guarded(
                life, lambda: life.shard_manager.on_container_dead(self.name, incarnation, now_ms)
            )

        life.process.run("exit seen", tell)

    # -- the warden's rules -------------------------------------------------------------------------------

    def ask(
        self,
        caller: SimProcess,
        label: str,
        handle: Callable[[SimServices], Callable[[], None] | None],
        *,
        on_arrival: Callable[[], None] = lambda: None,
    ) -> None:
        """A request to the control plane and its reply, each a message of its own."""
        network, control = self._around.network, self._around.control

        def arrive() -> None:
            life = control.answering()
            if life is None:
                return
            if life is control.active:
                on_arrival()

            def serve() -> None:
                answer = handle(life)
                if answer is not None:
                    back = f"{self.host} <- {label}"
                    network.send("control", self.host, back, lambda: caller.run(back, answer))

            life.process.run(f"{label} of {self.host}", serve)

        network.send(self.host, "control", f"control <- {label} of {self.host}", arrive)

    def _register(self) -> None:
        warden = self._warden
        assert warden is not None
        self._incarnations += 1
        incarnation = f"{self.host}.{self._incarnations}"
        self._registering = incarnation

        def handle(life: SimServices) -> Callable[[], None] | None:
            def register() -> bool:
                now_ms = life.process.clock.boot_ms()
                life.shard_manager.register(self.name, incarnation, folder_id=self.host, now_ms=now_ms)
                return True

            done = self._around.control.guarded(life, register)
            return None if done is None else lambda: self._spawn(incarnation)

        def retry() -> None:
            if self._registering == incarnation:
                self._register()

        self.ask(warden, "registration", handle)
        warden.after(2 * self._around.profile.heartbeat_ms, "registration timed out", retry)

    def _spawn(self, incarnation: str) -> None:
        if self._registering != incarnation:
            return  # the answer to an attempt that was given up
        assert self.engine is None, f"{self.host} has an engine already"
        self._registering = ""
        self._engine = SimEngine(self._around, self, incarnation)
        self._watchdog = self._around.watchdog(
            container=self.name,
            incarnation=incarnation,
            profile=self._around.profile,
            started_ms=self.clock.boot_ms(),
            lease=self._around.lease(deadline_ms=self._around.profile.deadline_ms),
        )

    def on_sign(self, incarnation: str, at_ms: Millis, said: Heartbeat) -> None:
        """The engine wrote a sign of life into the pipe."""

        def take() -> None:
            if self.incarnation == incarnation and self._watchdog is not None:
                self._watchdog.on_sign(at_ms, said)

        if self._warden is not None:
            self._warden.run("sign of life", take)

    def _watch(self) -> None:
        engine, watchdog = self._engine, self._watchdog
        if engine is None or watchdog is None:
            return
        now_ms = self.clock.boot_ms()
        if not engine.process.is_alive:
            self._end(engine, "it ended by itself")
            return
        for action in watchdog.check(now_ms).actions:
            if isinstance(action, EndEngine):
                self._end(engine, action.reason)
            else:
                watchdog.on_sent(action.heartbeat, now_ms)
                self._send(engine, action.heartbeat)

    def _send(self, engine: SimEngine, beat: Heartbeat) -> None:
        """One beat. Its answer may come late, twice or never; a late one is no sign of a Shard Manager."""
        warden, state = self._warden, {"waits": True}
        assert warden is not None
        self._around.on_acked(self.host, engine.incarnation, beat.acked)

        def handle(life: SimServices) -> Callable[[], None] | None:
            now_ms = life.process.clock.boot_ms()
            reply = self._around.control.guarded(life, lambda: life.shard_manager.on_heartbeat(beat, now_ms))
            return None if reply is None else lambda: take(reply)

        def take(reply: HeartbeatReply) -> None:
            if engine is not self._engine or self._watchdog is None:
                return
            if state.pop("waits", False):
                self._contact.on_answer(reply)
            if self._watchdog.on_reply(reply, self.clock.boot_ms()):
                engine.on_reply(reply)

        def give_up() -> None:
            if state.pop("waits", False) and engine is self._engine and self._contact.on_silence():
                self._renew(engine, beat)

        arrived = partial(self._around.on_arrival, self.name, engine.incarnation)
        self.ask(warden, "beat", handle, on_arrival=arrived)
        warden.after(self._around.profile.deadline_ms // 4, "beat timed out", give_up)

    def _renew(self, engine: SimEngine, beat: Heartbeat) -> None:
        """Past the control plane, in the store itself."""
        sim, warden, begun_ms = self._sim, self._warden, self.clock.boot_ms()
        assert warden is not None

        def ask() -> None:
            if self._around.network.is_cut(self.host, "store"):
                return
            self._around.met["renewals in the store"] += 1
            try:
                found = self._around.shard_store.renew(self.name, engine.incarnation)
            except PenstockError:
                return
            warden.after(sim.rng.randrange(1, STORE_MS), "the store answers", partial(answer, found))

        def answer(found: Assignment | None) -> None:
            if engine is not self._engine or self._watchdog is None:
                return
            renewal = None
            if found is not None:
                renewal = Renewal(assignment_version=found.version, shards=found.shards)
            reply = self._contact.reply_from_store(beat, renewal)
            if self._watchdog.on_renewed(reply, begun_ms, self.clock.boot_ms()):
                engine.on_reply(reply)

        warden.after(sim.rng.randrange(1, STORE_MS), "renewal", ask)

    def _end(self, engine: SimEngine, reason: str) -> None:
        self._around.met["engine ended: " + reason.split(" in the last")[0].split(" for ")[0]] += 1
        self._sim.note(f"{self.host} ends its engine: {reason}")
        self._around.on_ending(self, engine.incarnation, reason)
        self._watchdog = None  # no more beats for this one
        assert self._warden is not None
        self._warden.after(self._sim.rng.randrange(1, KILL_MS), "engine killed", lambda: self._reaped(engine))

    def _reaped(self, engine: SimEngine) -> None:
        engine.process.kill()
        if self._engine is engine:
            self._engine = None
            self._register()


ResultType = TypeVar("ResultType")

SYNC_MS: Millis = 10_000
SYNC_SOON_MS: Millis = 1_000
RESTART_MS: Millis = 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimParts:
    """How the services of one life are made: a planted bug replaces one of these."""

    syncer: type[StateSyncer] = StateSyncer
    shard_manager: type[ShardManager] = ShardManager
    shard_store: type[ShardStore] = ShardStore
    task_service: type[TaskService] = TaskService


@dataclass(slots=True, kw_only=True)
class SimServices:
    """One life of the control plane."""

    process: SimProcess
    job_service: JobService
    syncer: StateSyncer
    shard_manager: ShardManager
    task_service: TaskService
    sync_due_ms: Millis = 0
    hangs_until_ms: Millis = 0  # the syncer waits for an answer of the data plane


@dataclass(slots=True)
class SimControlPlane:
    """Whoever answers under the control plane's address."""

    sim: Simulation
    database: Database
    data_plane: DataPlane
    profile: Profile
    shard_count: int
    clock: ProcessClock  # of the host: all lives share it
    parts: SimParts = field(default_factory=SimParts)
    active: SimServices | None = None
    zombies: list[SimServices] = field(default_factory=list)
    lives: int = 0
    met: Counter[str] = field(default_factory=Counter)
    on_sync: Callable[[SyncReport], None] = lambda report: None
    sync_ms: Millis = SYNC_MS  # between rounds that find nothing to do
    pace: ShardManagerSettings = field(default_factory=ShardManagerSettings)
    tick_ms: Millis = 0  # between rounds of the Shard Manager; 0: a quarter of a heartbeat
    down_until_ms: Millis = 0  # nobody starts it before
    syncer_down_until_ms: Millis = 0
    task_service_down_until_ms: Millis = 0
    _is_starting: bool = False

    @property
    def process(self) -> SimProcess | None:
        """Of the active life."""
        return None if self.active is None else self.active.process

    def processes(self) -> list[SimProcess]:
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
        process = SimProcess(sim=self.sim, name=f"control{self.lives}", clock=self.clock)
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

    def become_zombie_here(self, process: SimProcess, *, for_ms: Millis, until_ms: Millis) -> None:
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

    def answering(self) -> SimServices | None:
        """Who gets a message that arrives now: at times a zombie that still holds the connection."""
        awake = [life for life in self.zombies if life.process.is_alive and not life.process.is_paused]
        if awake and self.sim.rng.random() < 0.3:
            return self.sim.rng.choice(awake)
        if self.active is None or not self.active.process.is_alive:
            return None
        return self.active

    def task_list(self, life: SimServices, since: int | None) -> TaskList:
        """What the Task Service of this life answers."""
        if self.sim.now_ms < self.task_service_down_until_ms:
            self.met["task service down"] += 1
            raise StoreUnavailable("the simulated Task Service is down")
        return life.task_service.snapshot(since)

    def poke(self) -> None:
        """Something was written: sync soon."""
        if self.active is not None:
            self.active.sync_due_ms = min(self.active.sync_due_ms, self.sim.now_ms + SYNC_SOON_MS)

    def guarded(self, life: SimServices, action: Callable[[], ResultType]) -> ResultType | None:
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

    def _boot(self, process: SimProcess) -> None:
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
        life = SimServices(
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

    def _on_death(self, life: SimServices) -> None:
        if life in self.zombies:
            self.zombies.remove(life)
        if self.active is life:
            self.active = None
            self._restart_later()

    def _send_canary(self, life: SimServices, beat: Heartbeat) -> None:
        def arrive() -> None:
            self.guarded(life, lambda: life.shard_manager.on_heartbeat(beat, life.process.clock.boot_ms()))

        life.process.after(1, "canary", arrive)

    def _tick(self, life: SimServices) -> None:
        self.guarded(life, lambda: life.shard_manager.tick(life.process.clock.boot_ms()))

    def _sync(self, life: SimServices) -> None:
        now_ms = self.sim.now_ms
        if now_ms < max(life.sync_due_ms, life.hangs_until_ms, self.syncer_down_until_ms):
            return
        life.sync_due_ms = now_ms + SYNC_SOON_MS
        report = self.guarded(life, lambda: life.syncer.sync_once(life.process.clock.now_ms()))
        if report is not None:
            self.on_sync(report)
            if report.is_quiet:
                life.sync_due_ms = now_ms + self.sync_ms
