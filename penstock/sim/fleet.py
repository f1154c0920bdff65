"""Simulated containers and control plane: real Task Manager, `Watchdog`, `Lease`, Shard Manager and State
Syncer.

Events replace threads and processes; the decisions are made by the real code.
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

ENGINE_START_MS: Millis = 3_000  # time to an engine's first sign of life
# Maximum further time until a slow engine is ready
SLOW_STARTS_MS: tuple[Millis, ...] = (4_000, 16_000, 90_000)
KILL_MS: Millis = 500
STORE_MS: Millis = 300  # maximum delay of a request to the store, and of its response
BOOT_MS: Millis = 15_000


@dataclass(slots=True, kw_only=True)
class SimEnvironment:
    """What all containers of a world share."""

    sim: Simulation
    network: Network
    control: SimControlPlane
    data_plane: ModelDataPlane
    population: LiveRuns
    profile: Profile
    pace: SimPace
    settings: TaskManagerSettings
    load_settings: ShardLoadSettings
    watch_ms: Millis  # the interval of a warden's checks
    shard_store: ShardStore  # as containers reach it, without the control plane
    slow_starts: float = 0.0  # the share of engines that take long to become ready
    lease: type[Lease] = Lease
    watchdog: type[Watchdog] = Watchdog
    task_manager: type[TaskManager] = TaskManager
    # A heartbeat reached the active control plane
    on_arrival: Callable[[str, str], None] = lambda container, incarnation: None
    # The engine of (container, incarnation), or its warden, acknowledges shards as owned or released.
    on_acked: Callable[[str, str, tuple[ShardEntry, ...]], None] = lambda container, incarnation, acked: None
    # A warden kills the engine of (container, incarnation), for a reason.
    on_ending: Callable[[Container, str, str], None] = lambda container, incarnation, reason: None
    met: Counter[str] = field(default_factory=Counter)


class SimEngine:
    """One engine process: the real Task Manager with a simulated runner."""

    def __init__(self, env: SimEnvironment, container: Container, incarnation: str) -> None:
        self.incarnation = incarnation
        self.process = SimProcess(
            sim=env.sim, name=f"{container.host}.engine.{incarnation}", clock=container.clock
        )
        runner = SimRunner(
            self.process,
            container=container.host,
            incarnation=incarnation,
            data_plane=env.data_plane,
            population=env.population,
            pace=env.pace,
        )
        self.manager = env.task_manager(runner, settings=env.settings, load_settings=env.load_settings)
        self._env, self._container = env, container
        self._asked_ms: Millis | None = None
        self._is_ready = False
        self.process.after(env.sim.rng.randrange(200, ENGINE_START_MS), "is up", self._begin)

    def on_reply(self, reply: HeartbeatReply) -> None:
        """The warden passed a reply on, through the pipe."""
        if self._is_ready:  # earlier there is no Task Manager to take it
            self.process.run("reply", lambda: self.manager.on_reply(reply, self.process.clock.boot_ms()))

    def _begin(self) -> None:
        rng = self._env.sim.rng
        if rng.random() < self._env.slow_starts:
            self._env.met["slow engine start"] += 1
            self.process.after(rng.randrange(1, rng.choice(SLOW_STARTS_MS)), "is ready", self.be_ready)
        else:
            self.be_ready()
        self._round()
        self.process.every(self._env.profile.sign_of_life_ms, "round", self._round)

    def be_ready(self) -> None:
        """The engine is ready: its Task Manager works from now on. Idempotent."""
        if self._is_ready:
            return
        self._is_ready = True
        if self._container.cached_list is not None:
            self.manager.on_task_list(self._container.cached_list, self.process.clock.boot_ms(), cached=True)

    def _round(self) -> None:
        now_ms = self.process.clock.boot_ms()
        if not self._is_ready:
            report_message = Heartbeat(
                container=self._container.name, incarnation=self.incarnation, sequence=0
            )
            self._container.on_sign(self.incarnation, now_ms, report_message)
            return
        self.manager.tick(now_ms)
        if self.manager.is_list_stale:
            self._fetch_list(now_ms)
        report = self.manager.report()
        self._env.on_acked(self._container.host, self.incarnation, report.acked)
        report_message = Heartbeat(
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
        self._container.on_sign(self.incarnation, now_ms, report_message)

    def _fetch_list(self, now_ms: Millis, *, is_full: bool = False) -> None:
        if self._asked_ms is not None and now_ms - self._asked_ms < self._env.profile.heartbeat_ms:
            return
        self._asked_ms = now_ms
        since = None if is_full else self.manager.list_version

        def answer(services: SimServices) -> Callable[[], None] | None:
            update = self._env.control.guarded(services, lambda: self._env.control.task_list(services, since))
            return None if update is None else lambda: self._apply_list(update)

        self._container.ask(self.process, "task list", answer)

    def _apply_list(self, update: TaskList) -> None:
        self._asked_ms = None
        now_ms = self.process.clock.boot_ms()
        if self.manager.on_task_list(update, now_ms):
            self._container.cached_list = self.manager.task_list
        else:
            self._fetch_list(now_ms, is_full=True)


class Container:
    """A host with a warden, which runs one engine after another.

    `name` is the container's name; two hosts may use one name by mistake.
    """

    def __init__(self, env: SimEnvironment, name: str, clock: ProcessClock, *, host: str = "") -> None:
        self.name, self.clock, self.host = name, clock, host or name
        self.cached_list: TaskList | None = None  # on disk
        self.is_lost = False  # permanently: it is never restarted
        self._env, self._sim = env, env.sim
        self._incarnations = 0
        self._warden: SimProcess | None = None
        self._engine: SimEngine | None = None
        self._registering = ""
        self._watchdog: Watchdog | None = None
        self._contact = Contact()

    @property
    def warden(self) -> SimProcess | None:
        """The live process, None if there is none."""
        return self._warden if self._warden is not None and self._warden.is_alive else None

    @property
    def engine(self) -> SimProcess | None:
        """The live process, None if there is none."""
        return self._engine.process if self._engine is not None and self._engine.process.is_alive else None

    @property
    def incarnation(self) -> str:
        """The incarnation of the live engine, "" if there is none."""
        return self._engine.incarnation if self._engine is not None and self.engine is not None else ""

    @property
    def has_contact(self) -> bool:
        """Whether its warden ever got a reply in time."""
        return self._contact.is_made

    # -- starts and faults --------------------------------------------------------------------------------

    def start(self) -> None:
        """Boot: kill the last engine, then register."""
        if self.warden is not None or self.is_lost:
            return
        if self.engine is not None:
            self.engine.kill()
        self._engine, self._watchdog, self._contact = None, None, Contact()
        warden = SimProcess(sim=self._sim, name=f"{self.host}.warden", clock=self.clock)
        self._warden = warden
        warden.every(self._env.watch_ms, "watch", self._watch)
        warden.run("register", self._register)

    def crash(self, *, for_good: bool = False, restarts: bool = True) -> None:
        """Kill warden and engine at once."""
        incarnation = self.incarnation
        self.is_lost = self.is_lost or for_good
        for process in (self.warden, self.engine):
            if process is not None:
                process.kill()
        if incarnation and self._sim.rng.random() < 0.5:
            self._sim.after(
                self._sim.rng.randrange(1, 2_000), "exit observed", lambda: self._report_exit(incarnation)
            )
        if restarts:
            self._restart_later()

    def crash_warden(self) -> None:
        """Kill only the warden; the engine ends when it notices the closed pipe."""
        if self.warden is None:
            return
        self.warden.kill()
        if self._engine is not None:
            engine = self._engine.process
            engine.after(100, "pipe is closed", engine.kill)
        self._restart_later()

    def crash_engine(self) -> None:
        """Kill only the engine; the warden notices."""
        if self.engine is not None:
            self.engine.kill()

    def finish_start(self) -> None:
        """Make a slowly starting engine ready now."""
        if self._engine is not None and self.engine is not None:
            self.engine.run("finishes its start", self._engine.be_ready)

    def _restart_later(self) -> None:
        self._sim.after(self._sim.rng.randrange(500, BOOT_MS), f"{self.host} boots", self.start)

    def _report_exit(self, incarnation: str) -> None:
        services = self._env.control.answering()
        if services is None:
            return

        def report() -> None:
            now_ms = services.process.clock.boot_ms()
            self._env.control.guarded(
                services, lambda: services.shard_manager.on_container_dead(self.name, incarnation, now_ms)
            )

        services.process.run("exit observed", report)

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
        network, control = self._env.network, self._env.control

        def arrive() -> None:
            services = control.answering()
            if services is None:
                return
            if services is control.active:
                on_arrival()

            def serve() -> None:
                answer = handle(services)
                if answer is not None:
                    back = f"{self.host} <- {label}"
                    network.send("control", self.host, back, lambda: caller.run(back, answer))

            services.process.run(f"{label} of {self.host}", serve)

        network.send(self.host, "control", f"control <- {label} of {self.host}", arrive)

    def _register(self) -> None:
        warden = self._warden
        assert warden is not None
        self._incarnations += 1
        incarnation = f"{self.host}.{self._incarnations}"
        self._registering = incarnation

        def handle(services: SimServices) -> Callable[[], None] | None:
            def register() -> bool:
                now_ms = services.process.clock.boot_ms()
                services.shard_manager.register(self.name, incarnation, folder_id=self.host, now_ms=now_ms)
                return True

            done = self._env.control.guarded(services, register)
            return None if done is None else lambda: self._spawn(incarnation)

        def retry() -> None:
            if self._registering == incarnation:
                self._register()

        self.ask(warden, "registration", handle)
        warden.after(2 * self._env.profile.heartbeat_ms, "registration timed out", retry)

    def _spawn(self, incarnation: str) -> None:
        if self._registering != incarnation:
            return  # the reply to an attempt that was given up
        assert self.engine is None, f"{self.host} has an engine already"
        self._registering = ""
        self._engine = SimEngine(self._env, self, incarnation)
        self._watchdog = self._env.watchdog(
            container=self.name,
            incarnation=incarnation,
            profile=self._env.profile,
            started_ms=self.clock.boot_ms(),
            lease=self._env.lease(deadline_ms=self._env.profile.deadline_ms),
        )

    def on_sign(self, incarnation: str, at_ms: Millis, report_message: Heartbeat) -> None:
        """The engine wrote a sign of life to the pipe."""

        def take() -> None:
            if self.incarnation == incarnation and self._watchdog is not None:
                self._watchdog.on_sign(at_ms, report_message)

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

    def _send(self, engine: SimEngine, heartbeat: Heartbeat) -> None:
        """Send one heartbeat. Its reply may come late, twice or never; a late one does not count
        as contact.
        """
        warden, state = self._warden, {"waits": True}
        assert warden is not None
        self._env.on_acked(self.host, engine.incarnation, heartbeat.acked)

        def handle(services: SimServices) -> Callable[[], None] | None:
            now_ms = services.process.clock.boot_ms()
            reply = self._env.control.guarded(
                services, lambda: services.shard_manager.on_heartbeat(heartbeat, now_ms)
            )
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
                self._renew(engine, heartbeat)

        arrived = partial(self._env.on_arrival, self.name, engine.incarnation)
        self.ask(warden, "heartbeat", handle, on_arrival=arrived)
        warden.after(self._env.profile.deadline_ms // 4, "heartbeat timed out", give_up)

    def _renew(self, engine: SimEngine, heartbeat: Heartbeat) -> None:
        """Renew the lease directly in the store."""
        sim, warden, begun_ms = self._sim, self._warden, self.clock.boot_ms()
        assert warden is not None

        def ask() -> None:
            if self._env.network.is_cut(self.host, "store"):
                return
            self._env.met["renewals in the store"] += 1
            try:
                found = self._env.shard_store.renew(self.name, engine.incarnation)
            except PenstockError:
                return
            warden.after(sim.rng.randrange(1, STORE_MS), "the store answers", partial(answer, found))

        def answer(found: Assignment | None) -> None:
            if engine is not self._engine or self._watchdog is None:
                return
            renewal = None
            if found is not None:
                renewal = Renewal(assignment_version=found.version, shards=found.shards)
            reply = self._contact.reply_from_store(heartbeat, renewal)
            if self._watchdog.on_renewed(reply, begun_ms, self.clock.boot_ms()):
                engine.on_reply(reply)

        warden.after(sim.rng.randrange(1, STORE_MS), "renewal", ask)

    def _end(self, engine: SimEngine, reason: str) -> None:
        self._env.met["engine ended: " + reason.split(" in the last")[0].split(" for ")[0]] += 1
        self._sim.note(f"{self.host} ends its engine: {reason}")
        self._env.on_ending(self, engine.incarnation, reason)
        self._watchdog = None  # no more heartbeats for this engine
        assert self._warden is not None
        self._warden.after(
            self._sim.rng.randrange(1, KILL_MS), "engine killed", lambda: self._on_killed(engine)
        )

    def _on_killed(self, engine: SimEngine) -> None:
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
    """The classes of the services; a planted bug replaces one of them."""

    syncer: type[StateSyncer] = StateSyncer
    shard_manager: type[ShardManager] = ShardManager
    shard_store: type[ShardStore] = ShardStore
    task_service: type[TaskService] = TaskService


@dataclass(slots=True, kw_only=True)
class SimServices:
    """The services of one control plane process."""

    process: SimProcess
    job_service: JobService
    syncer: StateSyncer
    shard_manager: ShardManager
    task_service: TaskService
    sync_due_ms: Millis = 0
    hangs_until_ms: Millis = 0  # until then the syncer waits for the data plane


@dataclass(slots=True)
class SimControlPlane:
    """The control plane processes behind one address: the active one, and zombies."""

    sim: Simulation
    database: Database
    data_plane: DataPlane
    profile: Profile
    shard_count: int
    clock: ProcessClock  # of the host: all processes share it
    parts: SimParts = field(default_factory=SimParts)
    active: SimServices | None = None
    zombies: list[SimServices] = field(default_factory=list)
    lives: int = 0
    met: Counter[str] = field(default_factory=Counter)
    on_sync: Callable[[SyncReport], None] = lambda report: None
    sync_ms: Millis = SYNC_MS  # between idle rounds
    shard_settings: ShardManagerSettings = field(default_factory=ShardManagerSettings)
    tick_ms: Millis = 0  # between rounds of the Shard Manager; 0: a quarter of a heartbeat
    down_until_ms: Millis = 0  # it is not started before
    syncer_down_until_ms: Millis = 0
    task_service_down_until_ms: Millis = 0
    _is_starting: bool = False

    @property
    def process(self) -> SimProcess | None:
        """The active process."""
        return None if self.active is None else self.active.process

    def processes(self) -> list[SimProcess]:
        """All live processes."""
        lives = [*self.zombies, *([self.active] if self.active is not None else [])]
        return [services.process for services in lives if services.process.is_alive]

    def start(self) -> None:
        """Start a new process; retry soon if the store fails."""
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
        """Kill the active process; the supervisor restarts it."""
        if self.active is not None:
            self.active.process.kill()

    def become_zombie(self, *, for_ms: Millis) -> None:
        """Pause the active process and start another; later the old one continues as if it were active."""
        if self.active is None or not self.active.process.is_alive:
            return
        old, self.active = self.active, None
        old.process.pause()
        self.zombies.append(old)
        self.sim.after(for_ms, "the zombie wakes", old.process.resume)
        self._restart_later()

    def become_zombie_here(self, process: SimProcess, *, for_ms: Millis, until_ms: Millis) -> None:
        """Pause the active process inside its round; the round continues when this returns.

        Other events, including those of a successor, happen meanwhile: the round then writes outdated
        decisions.
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
        # Events queued during the pause run after this round.
        self.sim.after(0, "the zombie's round ends", process.resume)

    def answering(self) -> SimServices | None:
        """The process that receives a message now: sometimes a zombie that still holds the connection."""
        awake = [
            services
            for services in self.zombies
            if services.process.is_alive and not services.process.is_paused
        ]
        if awake and self.sim.rng.random() < 0.3:
            return self.sim.rng.choice(awake)
        if self.active is None or not self.active.process.is_alive:
            return None
        return self.active

    def task_list(self, services: SimServices, since: int | None) -> TaskList:
        """The response of this process's Task Service."""
        if self.sim.now_ms < self.task_service_down_until_ms:
            self.met["task service down"] += 1
            raise StoreUnavailable("the simulated Task Service is down")
        return services.task_service.snapshot(since)

    def poke(self) -> None:
        """A job was written: sync soon."""
        if self.active is not None:
            self.active.sync_due_ms = min(self.active.sync_due_ms, self.sim.now_ms + SYNC_SOON_MS)

    def guarded(self, services: SimServices, action: Callable[[], ResultType]) -> ResultType | None:
        """Run part of a service as its loop does: an error ends the round, a lost term ends the process."""
        try:
            return action()
        except Fenced:
            self.met["fenced"] += 1
            services.process.kill()
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
            settings=self.shard_settings,
            send_canary=lambda heartbeat: self._send_canary(services, heartbeat),
            wall_of=lambda now_ms: process.clock.now_ms(),
        )
        services = SimServices(
            process=process,
            job_service=JobService(store),
            syncer=self.parts.syncer(store, manager, self.data_plane, term=syncer_term),
            shard_manager=manager,
            task_service=tasks,
        )
        self.active = services
        process.on_death.append(lambda: self._on_death(services))
        tick_ms = self.tick_ms or max(1_000, self.profile.heartbeat_ms // 4)
        process.every(tick_ms, "tick", lambda: self._tick(services))
        process.every(500, "sync", lambda: self._sync(services))

    def _on_death(self, services: SimServices) -> None:
        if services in self.zombies:
            self.zombies.remove(services)
        if self.active is services:
            self.active = None
            self._restart_later()

    def _send_canary(self, services: SimServices, heartbeat: Heartbeat) -> None:
        def arrive() -> None:
            self.guarded(
                services,
                lambda: services.shard_manager.on_heartbeat(heartbeat, services.process.clock.boot_ms()),
            )

        services.process.after(1, "canary", arrive)

    def _tick(self, services: SimServices) -> None:
        self.guarded(services, lambda: services.shard_manager.tick(services.process.clock.boot_ms()))

    def _sync(self, services: SimServices) -> None:
        now_ms = self.sim.now_ms
        if now_ms < max(services.sync_due_ms, services.hangs_until_ms, self.syncer_down_until_ms):
            return
        services.sync_due_ms = now_ms + SYNC_SOON_MS
        report = self.guarded(services, lambda: services.syncer.sync_once(services.process.clock.now_ms()))
        if report is not None:
            self.on_sync(report)
            if report.is_idle:
                services.sync_due_ms = now_ms + self.sync_ms
