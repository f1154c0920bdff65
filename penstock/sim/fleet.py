"""Simulated containers: the real Task Manager and Lease in an engine and a warden that fail like processes.

The warden follows the rules of `tasks/warden.py`, event by event: register, spawn, beat, watch, kill, again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.core.clock import Millis
from penstock.sim.control import ControlPlane, Services
from penstock.sim.data_plane import ModelDataPlane
from penstock.sim.network import Network
from penstock.sim.runner import Pace, Population, SimRunner
from penstock.sim.simulation import Process, ProcessClock, Simulation
from penstock.tasks.lease import Lease
from penstock.tasks.messages import Heartbeat, HeartbeatReply, Profile, Verdict
from penstock.tasks.task_manager import Report, TaskManager, TaskManagerSettings
from penstock.tasks.task_service import TaskList

ENGINE_START_MS: Millis = 3_000  # until its first sign of life
ENGINE_START_LIMIT_MS: Millis = 60_000
KILL_MS: Millis = 500
RESTART_MS: Millis = 15_000


@dataclass(slots=True, kw_only=True)
class Surroundings:
    """What every container of a world shares."""

    sim: Simulation
    network: Network
    control: ControlPlane
    data_plane: ModelDataPlane
    population: Population
    profile: Profile
    pace: Pace
    settings: TaskManagerSettings
    lease: type[Lease] = Lease
    task_manager: type[TaskManager] = TaskManager
    on_arrival: Callable[[str, str], None] = lambda container, incarnation: None  # a beat reached the active
    # An engine of (container, incarnation) says what is so.
    on_report: Callable[[str, str, Report], None] = lambda container, incarnation, report: None
    met: Counter[str] = field(default_factory=Counter)


class Engine:
    """One life of an engine process: the real Task Manager over a simulated runner."""

    def __init__(self, around: Surroundings, container: Container, incarnation: str) -> None:
        self.incarnation = incarnation
        self.process = Process(
            sim=around.sim, name=f"{container.name}.engine.{incarnation}", clock=container.clock
        )
        runner = SimRunner(
            self.process,
            container=container.name,
            incarnation=incarnation,
            data_plane=around.data_plane,
            population=around.population,
            pace=around.pace,
        )
        self.manager = around.task_manager(runner, settings=around.settings)
        self._around, self._container = around, container
        self._asked_ms: Millis | None = None
        self.process.after(around.sim.rng.randrange(200, ENGINE_START_MS), "is up", self._begin)

    def on_reply(self, reply: HeartbeatReply) -> None:
        """The warden passed a reply on, through the pipe."""
        self.process.run("reply", lambda: self.manager.on_reply(reply, self.process.clock.boot_ms()))

    def _begin(self) -> None:
        if self._container.cached_list is not None:
            self.manager.on_task_list(self._container.cached_list, self.process.clock.boot_ms(), cached=True)
        self._round()
        self.process.every(self._around.profile.sign_of_life_ms, "round", self._round)

    def _round(self) -> None:
        now_ms = self.process.clock.boot_ms()
        self.manager.tick(now_ms)
        if self.manager.is_list_stale:
            self._ask_for_list(now_ms)
        report = self.manager.report()
        self._around.on_report(self._container.name, self.incarnation, report)
        self._container.on_sign(self.incarnation, now_ms, report)

    def _ask_for_list(self, now_ms: Millis, *, whole: bool = False) -> None:
        if self._asked_ms is not None and now_ms - self._asked_ms < self._around.profile.heartbeat_ms:
            return
        self._asked_ms = now_ms
        since = None if whole else self.manager.list_version

        def answer(life: Services) -> Callable[[], None] | None:
            news = self._around.control.guarded(life, lambda: life.task_service.snapshot(since))
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
    """A host with a warden on it, which keeps one engine after another alive."""

    def __init__(self, around: Surroundings, name: str, clock: ProcessClock) -> None:
        self.name, self.clock = name, clock
        self.cached_list: TaskList | None = None  # on disk
        self.is_lost = False  # for good: nobody will start it again
        self._around, self._sim = around, around.sim
        self._incarnations = 0
        self._warden: Process | None = None
        self._engine: Engine | None = None
        self._registering = ""
        self._lease: Lease | None = None
        self._sequence = 0
        self._sign_ms: Millis | None = None
        self._spawned_ms: Millis = 0
        self._report: Report | None = None

    @property
    def warden(self) -> Process | None:
        """The living one."""
        return self._warden if self._warden is not None and self._warden.is_alive else None

    @property
    def engine(self) -> Process | None:
        """The living one."""
        return self._engine.process if self._engine is not None and self._engine.process.is_alive else None

    @property
    def incarnation(self) -> str:
        """Of the living engine."""
        return self._engine.incarnation if self._engine is not None and self.engine is not None else ""

    # -- what happens to it -------------------------------------------------------------------------------

    def start(self) -> None:
        """Boot: reap what a former life left, then register."""
        if self.warden is not None or self.is_lost:
            return
        if self.engine is not None:
            self.engine.kill()
        self._engine, self._lease = None, None
        warden = Process(sim=self._sim, name=f"{self.name}.warden", clock=self.clock)
        self._warden = warden
        profile = self._around.profile
        warden.every(profile.heartbeat_ms, "beat", self._beat)
        warden.every(profile.sign_of_life_ms // 2, "watch", self._watch)
        warden.run("register", self._register)

    def crash(self, *, for_good: bool = False) -> None:
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

    def _restart_later(self) -> None:
        self._sim.after(self._sim.rng.randrange(500, RESTART_MS), f"{self.name} boots", self.start)

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
        caller: Process,
        label: str,
        handle: Callable[[Services], Callable[[], None] | None],
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
                    back = f"{self.name} <- {label}"
                    network.send("control", self.name, back, lambda: caller.run(back, answer))

            life.process.run(f"{label} of {self.name}", serve)

        network.send(self.name, "control", f"control <- {label} of {self.name}", arrive)

    def _register(self) -> None:
        warden = self._warden
        assert warden is not None
        self._incarnations += 1
        incarnation = f"{self._incarnations}"
        self._registering = incarnation

        def handle(life: Services) -> Callable[[], None] | None:
            def register() -> bool:
                now_ms = life.process.clock.boot_ms()
                life.shard_manager.register(self.name, incarnation, folder_id=self.name, now_ms=now_ms)
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
        assert self.engine is None, f"{self.name} has an engine already"
        self._registering = ""
        self._engine = Engine(self._around, self, incarnation)
        self._lease = self._around.lease(deadline_ms=self._around.profile.deadline_ms)
        self._sequence, self._sign_ms, self._report = 0, None, None
        self._spawned_ms = self.clock.boot_ms()

    def on_sign(self, incarnation: str, at_ms: Millis, report: Report) -> None:
        """The engine wrote a sign of life into the pipe."""

        def take() -> None:
            if self.incarnation == incarnation:
                self._sign_ms, self._report = at_ms, report

        if self._warden is not None:
            self._warden.run("sign of life", take)

    def _beat(self) -> None:
        engine, lease, report = self._engine, self._lease, self._report
        if engine is None or lease is None or report is None or not engine.process.is_alive:
            return
        self._sequence += 1
        beat = Heartbeat(
            container=self.name,
            incarnation=engine.incarnation,
            sequence=self._sequence,
            acked=report.acked,
            assignment_version=report.assignment_version,
            list_version=report.list_version,
            tasks=report.tasks,
            engine_ready=True,
        )
        lease.on_sent(beat.sequence, self.clock.boot_ms())

        def handle(life: Services) -> Callable[[], None] | None:
            now_ms = life.process.clock.boot_ms()
            reply = self._around.control.guarded(life, lambda: life.shard_manager.on_heartbeat(beat, now_ms))
            return None if reply is None else lambda: self._on_reply(engine, reply)

        assert self._warden is not None
        self.ask(
            self._warden,
            "beat",
            handle,
            on_arrival=lambda: self._around.on_arrival(self.name, engine.incarnation),
        )

    def _on_reply(self, engine: Engine, reply: HeartbeatReply) -> None:
        if engine is not self._engine or self._lease is None:
            return
        self._lease.on_ack(reply, self.clock.boot_ms())
        if reply.verdict is Verdict.OK:
            engine.on_reply(reply)

    def _watch(self) -> None:
        engine, lease = self._engine, self._lease
        if engine is None or lease is None:
            return
        now_ms = self.clock.boot_ms()
        profile = self._around.profile
        limit_ms = profile.engine_stale_ms if self._sign_ms is not None else ENGINE_START_LIMIT_MS
        is_stale = now_ms - (self._sign_ms or self._spawned_ms) > limit_ms
        stops = lease.on_time(now_ms).actions
        if engine.process.is_alive and not stops and not is_stale:
            return
        why = "it died" if not engine.process.is_alive else stops[0].reason if stops else "no sign of life"
        self._around.met["engine ended: " + why.split(" in the last")[0]] += 1
        self._sim.note(f"{self.name} ends its engine: {why}")
        self._lease = None  # no more beats for this one
        assert self._warden is not None
        self._warden.after(self._sim.rng.randrange(1, KILL_MS), "engine killed", lambda: self._reaped(engine))

    def _reaped(self, engine: Engine) -> None:
        engine.process.kill()
        if self._engine is engine:
            self._engine = None
            self._register()
