"""Runs one seed: build a world, change jobs at random times while faults happen, end the faults, and require
that the world comes to rest.

Every change of a job goes through the real Job Service of the control plane that answers, and is repeated
with the same idempotency key until its outcome is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from penstock.container.task_manager import TaskManager, TaskManagerSettings
from penstock.container.watchdog import Lease, Watchdog
from penstock.core.clock import Millis
from penstock.core.errors import StoreUnavailable, UserError
from penstock.db.database import Database
from penstock.db.journal_store import JournalStore
from penstock.fleet.messages import PROFILES
from penstock.fleet.shard_load import ShardLoadSettings
from penstock.fleet.shard_manager import ShardManager, ShardManagerSettings
from penstock.fleet.shard_store import ShardStore
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.syncer.state_syncer import SyncReport
from penstock.sim.data_plane import LiveRuns, ModelDataPlane, SimPace
from penstock.sim.faults import DataPlaneFaults, FaultSchedule, StoreFaults
from penstock.sim.fleet import SYNC_MS, Container, SimControlPlane, SimEnvironment, SimParts
from penstock.sim.invariants import ConfigChecker, EffectChecker, ShardChecker, check_at_rest
from penstock.sim.simulation import Network, SimProcess, Simulation, draw_clock

# Each kind is enabled only in some seeds: a fault that is always on could hide bugs that need its absence.
FAULT_KINDS = (
    "control crash",
    "control crash in a transaction",
    "control pause",
    "control zombie",
    "control zombie in a round",
    "container crash",
    "container loss",
    "warden crash",
    "engine crash",
    "engine pause",
    "warden pause",
    "container pause",
    "link cut",
    "link cut one way",
    "slow replies",
    "bad network",
    "store down",
    "store errors",
    "written but timed out",
    "data plane errors",
    "data plane timeouts",
    "task crash",
    "slow stops",
    "control outage",
    "syncer down",
    "task service down",
    "same identity",
    "stubborn task",
    "planned work",
    "slow engine starts",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOptions:
    """The parameters of a run."""

    seed: int
    profile: str
    containers: int
    shard_count: int
    jobs: int
    faults: tuple[str, ...]
    fault_every_ms: Millis
    write_every_ms: Millis
    poison_jobs: int
    safety_ms: Millis
    task_counts: tuple[int, int] = (1, 5)  # of a job: minimum and maximum
    is_large: bool = False  # fewer events per container, so that hours of a large fleet can be simulated

    def describe(self) -> str:
        """One line, printed before the run."""
        return (
            f"seed {self.seed}: {self.profile} profile, {self.containers} containers, "
            f"{self.shard_count} shards, "
            f"{self.jobs} jobs ({self.poison_jobs} poison), a fault each {self.fault_every_ms / 1000:.0f} s, "
            f"a write each {self.write_every_ms / 1000:.0f} s; faults: {', '.join(self.faults) or 'none'}"
        )


def draw_options(seed: int) -> ScenarioOptions:
    """Draw the parameters of a seed."""
    # A separate random stream: a change of this function must not change the events of every seed.
    rng = Random(f"options {seed}")
    profile = rng.choice(("paper", "fast"))
    share = rng.choice((0.15, 0.4, 0.6, 0.9))
    scale = 4 if profile == "paper" else 1
    return ScenarioOptions(
        seed=seed,
        profile=profile,
        containers=rng.randint(3, 8),
        shard_count=rng.choice((8, 16, 24)),
        jobs=rng.randint(4, 10),
        faults=tuple(kind for kind in FAULT_KINDS if rng.random() < share),
        fault_every_ms=rng.choice((4_000, 8_000, 15_000)) * scale,
        write_every_ms=rng.choice((5_000, 10_000, 20_000)) * scale,
        poison_jobs=rng.choice((0, 0, 0, 1, 2)),
        safety_ms=900_000 if profile == "paper" else 180_000,
    )


def draw_fleet_options(seed: int) -> ScenarioOptions:
    """Parameters of `--profile tasks`: two hours of 30 containers and about 300 tasks, paper profile."""
    rng = Random(f"fleet options {seed}")
    share = rng.choice((0.15, 0.4, 0.6, 0.9))
    kinds = [kind for kind in FAULT_KINDS if not kind.startswith("data plane")]
    return ScenarioOptions(
        seed=seed,
        profile="paper",
        containers=30,
        shard_count=rng.choice((48, 60)),
        jobs=60,
        faults=tuple(kind for kind in kinds if rng.random() < share),
        fault_every_ms=rng.choice((45_000, 90_000, 180_000)),
        write_every_ms=rng.choice((60_000, 120_000, 240_000)),
        poison_jobs=0,
        safety_ms=7_200_000,
        task_counts=(3, 7),
        is_large=True,
    )


DRAWS = {"jobs": draw_options, "tasks": draw_fleet_options}


IDLE_ROUNDS = 30
IDLE_ROUND_MS: Millis = 1_000
SETTLED_MS: Millis = 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedBugs:
    """Classes that replace the real ones, to plant bugs. The defaults are the real classes."""

    parts: SimParts = field(default_factory=SimParts)
    lease: type[Lease] = Lease
    watchdog: type[Watchdog] = Watchdog
    task_manager: type[TaskManager] = TaskManager
    checks_tokens: bool = True
    checks_epochs: bool = True
    container: type[Container] = Container


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioReport:
    """The results of one seed."""

    seed: int
    trace: str
    events: int
    simulated_ms: Millis
    rest_ms: Millis  # from the last fault until the world was at rest
    faults: Counter[str]
    evaluated: Counter[str]
    writes: Counter[str]
    starts: int
    commits: int
    refused: int  # refused acquires and commits of old owners
    failovers: int
    excused: Counter[str]  # overlaps of two instances that the invariant permits
    overlap_ms: Millis  # their total duration

    def line(self) -> str:
        """A summary in one line."""
        return (
            f"seed {self.seed}: ok, {self.events} events in {self.simulated_ms / 60_000:.0f} min, "
            f"{sum(self.faults.values())} faults, {sum(self.writes.values())} writes, {self.starts} starts, "
            f"{self.failovers} failovers, {self.refused} refused, at rest after {self.rest_ms / 1000:.0f} s, "
            f"trace {self.trace[:8]}"
        )


class World:
    """All parts of one run, wired together."""

    def __init__(self, options: ScenarioOptions, bugs: PlantedBugs | None = None) -> None:
        bugs = bugs or PlantedBugs()
        self.options, self.sim = options, Simulation(options.seed)
        self.profile = PROFILES[options.profile]
        if options.profile == "paper":
            # Signs of life in the ratio of the fast profile: a quarter of the events, the same races.
            sign_ms = 10_000 if options.is_large else 2_000
            self.profile = replace(self.profile, sign_of_life_ms=sign_ms, engine_stale_ms=4 * sign_ms)
        self.store_faults = StoreFaults(self.sim)
        self.database = Database(None, fault=self.store_faults)
        self.written: set[str] = set()
        # Checkers need to know which tables were written.
        self.database.on_statement(self._on_statement)
        self.shard_store = ShardStore(self.database, JournalStore(self.database))
        self.data_plane_faults = DataPlaneFaults(self.sim)
        self.data_plane = ModelDataPlane(
            self.sim,
            fault=self.data_plane_faults,
            checks_tokens=bugs.checks_tokens,
            checks_epochs=bugs.checks_epochs,
        )
        self.network, self.population = Network(self.sim), LiveRuns()
        self.pace = SimPace(commit_ms=120_000 if options.is_large else 2 * self.profile.sign_of_life_ms)
        host = draw_clock(self.sim)
        self.control = SimControlPlane(
            sim=self.sim,
            database=self.database,
            data_plane=self.data_plane,
            profile=self.profile,
            shard_count=options.shard_count,
            clock=replace(host, wall_offset_ms=0),
            parts=bugs.parts,
            tick_ms=self.profile.heartbeat_ms if options.is_large else 0,
            sync_ms=30_000 if options.is_large else SYNC_MS,
            shard_settings=ShardManagerSettings(balance_soon_ms=20_000)
            if options.is_large
            else ShardManagerSettings(),
        )
        self.store_faults.victim = lambda process: process.name.startswith("control")
        self.shard_checker, self.effect_checker = ShardChecker(self), EffectChecker(self)
        self.config_checker = ConfigChecker(self, JobStore(self.database))
        self.population.on_start += [self.config_checker.on_start, self.shard_checker.on_start]
        env = SimEnvironment(
            sim=self.sim,
            network=self.network,
            control=self.control,
            data_plane=self.data_plane,
            population=self.population,
            profile=self.profile,
            pace=self.pace,
            # A third of the heartbeat interval, plus a little: waiting for the next check shortens the lease.
            watch_ms=self.profile.heartbeat_ms // 3 + 2
            if options.is_large
            else self.profile.sign_of_life_ms // 2,
            load_settings=ShardLoadSettings(sample_ms=60_000 if options.is_large else 10_000),
            shard_store=bugs.parts.shard_store(self.database, JournalStore(self.database)),
            settings=TaskManagerSettings(backoff_max_ms=8_000, restarts_max=10**6, stop_timeout_ms=5_000),
            lease=bugs.lease,
            watchdog=bugs.watchdog,
            task_manager=bugs.task_manager,
            on_arrival=self.shard_checker.on_arrival,
            on_acked=self.shard_checker.on_acked,
            on_ending=self.shard_checker.on_ending,
        )
        self.env = env
        names = [f"c{number}" for number in range(options.containers)]
        self.containers = [bugs.container(env, name, draw_clock(self.sim)) for name in names]
        # Hosts that a fault may start under a name that is in use.
        self.twins = [
            bugs.container(env, name, draw_clock(self.sim), host=f"{name}.twin") for name in names[:2]
        ]
        self._by_host = {host.host: host for host in self.hosts()}
        self.faults, self.workload = FaultSchedule(self), Workload(self)
        self.population.on_stop.append(self.shard_checker.on_stop)
        self.population.on_end.append(self.effect_checker.on_end)
        self.sim.watch(self.shard_checker.check)
        self.sim.watch(self.effect_checker.check)
        self.sim.watch(self.config_checker.check)

    def container(self, host: str) -> Container:
        """A container by its host, because two may share a name."""
        return self._by_host[host]

    def hosts(self) -> list[Container]:
        """All containers, including those started by mistake."""
        return [*self.containers, *self.twins]

    def processes(self) -> list[SimProcess]:
        """All live processes."""
        found = self.control.processes()
        for container in self.hosts():
            found += [process for process in (container.warden, container.engine) if process is not None]
        return found

    def slept(self, process: SimProcess | None, within_ms: Millis) -> bool:
        """Whether a process is paused, or was within the last `within_ms`."""
        since_ms = self.sim.now_ms - within_ms
        return process is not None and (process.is_paused or process.resumed_ms > since_ms)

    def was_store_bad(self, within_ms: Millis) -> bool:
        """Whether a store fault happened within the last `within_ms`."""
        return self.store_faults.last_fault_ms > self.sim.now_ms - within_ms

    def order(self, work: Callable[[ShardManager, Millis], None]) -> None:
        """Give an operator's order to the active Shard Manager, if there is one."""
        services = self.control.active
        if services is None or services.process.is_paused:
            return
        manager, clock = services.shard_manager, services.process.clock

        def ask() -> None:
            self.control.guarded(services, lambda: work(manager, clock.boot_ms()))

        services.process.run("an order", ask)

    def move(self, shard: int, target: str) -> None:
        """Order the move of a shard."""
        self.order(lambda manager, now_ms: manager.move(shard, target, now_ms))

    def release(self, shard: int) -> None:
        """Order the release of a quarantined shard."""
        self.order(lambda manager, now_ms: manager.release(shard, now_ms))

    def uncordon(self, name: str) -> None:
        """Order the end of a cordon or drain."""
        self.order(lambda manager, now_ms: manager.uncordon(name, now_ms))

    def _on_statement(self, statement: str) -> None:
        if statement.startswith("SELECT"):
            return
        words = statement.split(None, 3)
        table = words[1] if words[0] == "UPDATE" else words[2] if len(words) > 2 else ""
        if statement.startswith("UPDATE containers SET state="):
            self.written.add("shards")  # a lease ended, possibly of a container without shards
        if table in ("shards", "layers", "running", "jobs"):
            self.written.add("layers" if table == "jobs" else table)


def run_seed(
    seed: int, *, bugs: PlantedBugs | None = None, options: ScenarioOptions | None = None
) -> ScenarioReport:
    """Run one seed; raises InvariantBroken with the seed in its message."""
    world = World(options or draw_options(seed), bugs)
    try:
        return _run(world)
    finally:
        world.database.close()


def _run(world: World) -> ScenarioReport:
    sim, options = world.sim, world.options
    world.control.start()
    for container in world.containers:
        container.start()
    world.workload.begin()
    world.faults.begin()
    sim.run(options.safety_ms)
    rest_ms = _come_to_rest(world)
    _stay_at_rest(world)
    faults = world.faults.met + world.store_faults.met + world.data_plane_faults.met
    faults += Counter({"slow engine start": world.env.met["slow engine start"]})
    faults += Counter({f"message {kind}": n for kind, n in world.network.met.items() if kind != "sent"})
    return ScenarioReport(
        seed=options.seed,
        trace=sim.trace,
        events=sim.events_total,
        simulated_ms=sim.now_ms,
        rest_ms=rest_ms,
        faults=faults,
        evaluated=sim.evaluated,
        writes=world.workload.done,
        starts=world.population.started,
        commits=world.data_plane.commits,
        refused=world.data_plane.refused,
        failovers=world.shard_checker.failovers,
        excused=world.effect_checker.excused,
        overlap_ms=world.effect_checker.overlap_ms,
    )


def rest_bound_ms(world: World) -> Millis:
    """The maximum time from the last fault until the world is at rest: 120 s in the paper profile (I4)."""
    # Plans, starts and rounds take the same time in both profiles, so there is a minimum.
    return max(2 * world.profile.failover_ms, 45_000)


def _come_to_rest(world: World) -> Millis:
    sim = world.sim
    world.workload.is_stopped = True
    world.faults.heal()
    # A delayed message counts as a fault until it has arrived.
    sim.run(world.network.last_due_ms)
    healed_ms, bound_ms = sim.now_ms, rest_bound_ms(world)
    while True:
        sim.run(sim.now_ms + 1_000)
        _lift_quarantines(world)
        _end_planned_work(world)
        # Run the checkers after these orders: a shard that is released and then placed must not look as if it
        # had been placed while quarantined.
        sim.check()
        problems = check_at_rest(world, may_balance=True).problems
        late = sim.now_ms - healed_ms >= bound_ms
        summary = f"{bound_ms} ms after the last fault: {'; '.join(problems[:5])} ({len(problems)} in all)"
        sim.demand("I4 I5 I11 I12 comes to rest", summary if problems and late else None)
        if not problems:
            return sim.now_ms - healed_ms


def _lift_quarantines(world: World) -> None:
    """An oncall ends the quarantine of every job that is not poison."""
    poison = world.data_plane_faults.poison
    for name, record in JobStore(world.database).load(sorted(world.workload.names)).items():
        if record.quarantine is not None and name not in poison and not record.job.deleted:
            world.workload.touch(name)


def _end_planned_work(world: World) -> None:
    """An oncall uncordons all containers and releases all quarantined shards."""
    for row in world.shard_store.containers():
        if row.cordoned:
            world.uncordon(row.name)
    for shard in world.shard_store.shards():
        if shard.is_quarantined:
            world.release(shard.shard)


def _stay_at_rest(world: World) -> None:
    """I12: nothing happens for 30 rounds."""
    sim, reports = world.sim, list[SyncReport]()
    _settle(world)
    world.control.on_sync, world.control.sync_ms = reports.append, IDLE_ROUND_MS
    started, shards = world.population.started, world.shard_store.shards()
    while len(reports) < IDLE_ROUNDS:
        sim.run(sim.now_ms + IDLE_ROUND_MS)
        busy = [report for report in reports if not report.is_idle]
        sim.demand("I12 then no action", f"a round did {busy[0]}" if busy else None)
        restarted = world.population.started - started
        sim.demand("I12 then no restart", f"{restarted} tasks were restarted" if restarted else None)
        moved = [row for row, old in zip(world.shard_store.shards(), shards, strict=True) if row != old]
        sim.demand("I12 then no move", f"{moved} moved" if moved else None)
        problems = check_at_rest(world).problems
        sim.demand("I4 stays at rest", "; ".join(problems) if problems else None)


def _settle(world: World) -> None:
    """Wait for the end of balancing, which may continue for a while after everything runs."""
    # A large fleet has more to move, a few shards at a time.
    bound_ms = 900_000 if world.options.is_large else 300_000
    sim, unchanged_since_ms, limit_ms = world.sim, world.sim.now_ms, world.sim.now_ms + bound_ms
    seen = _moving_parts(world)
    # A move takes two heartbeats: without a change during three, balancing has ended.
    while sim.now_ms - unchanged_since_ms < max(SETTLED_MS, 3 * world.profile.heartbeat_ms):
        sim.run(sim.now_ms + 1_000)
        # A task that did not stop before the last fault may make its container lose its lease only now.
        _end_planned_work(world)
        sim.check()
        endless = f"shards still move after {bound_ms} ms" if sim.now_ms > limit_ms else None
        sim.demand("I12 balancing ends", endless)
        if (now := _moving_parts(world)) != seen:
            seen, unchanged_since_ms = now, sim.now_ms


def _moving_parts(world: World) -> tuple[object, ...]:
    """The state that changes during balancing; containers that return start it again."""
    lives = [(row.name, row.incarnation, row.state) for row in world.shard_store.containers()]
    return world.shard_store.shards(), lives, world.population.started


DEVELOPER = Actor(name="dev", role="developer")
ONCALL = Actor(name="olga", role="oncall")
SCALER = Actor(name="scaler", role="scaler")

Write = Callable[[JobService, str, int], None]  # (service, idempotency key, now)


@dataclass(slots=True)
class Workload:
    """Clients that change jobs at random until `is_stopped`."""

    world: World
    done: Counter[str] = field(default_factory=Counter)
    is_stopped: bool = False
    names: list[str] = field(default_factory=list)
    _requests: int = 0

    def begin(self) -> None:
        """Create some jobs at once, the others over time, and schedule the first change."""
        options, rng = self.world.options, self.world.sim.rng
        self.names = [f"p.j{number}" for number in range(options.jobs)]
        for name in self.names:
            late_ms = 60_000 if options.is_large else options.safety_ms // 2
            within_ms = rng.choice((1_000, 1_000, late_ms))
            self.world.sim.after(rng.randrange(within_ms), "create", partial(self._create, name))
        self._schedule_next()

    def touch(self, name: str) -> None:
        """An oncall writes a label: the new expected version ends a quarantine."""
        label = str(self.world.sim.rng.randrange(10**6))
        self._patch("touch", name, "oncall", ONCALL, {"labels.looked": label})

    def _schedule_next(self) -> None:
        rng, mean_ms = self.world.sim.rng, self.world.options.write_every_ms
        self.world.sim.after(1 + int(rng.expovariate(1 / mean_ms)), "a client writes", self._change)

    def _change(self) -> None:
        if self.is_stopped:
            return
        rng = self.world.sim.rng
        name, count = rng.choice(self.names), rng.randint(*self.world.options.task_counts)
        if self.world.options.is_large and rng.random() < 0.05:
            self._release_all()
        changes: tuple[Callable[[], None], ...] = (
            lambda: self._patch("rescale", name, "scaler", SCALER, {"task_count": count}),
            lambda: self._patch("rescale", name, "scaler", SCALER, {"task_count": count}),
            lambda: self._patch("provision", name, "provisioner", DEVELOPER, {"task_count": count}),
            lambda: self._patch(
                "release", name, "provisioner", DEVELOPER, {"package.version": str(rng.randrange(10**6))}
            ),
            lambda: self._patch(
                "live change", name, "provisioner", DEVELOPER, {"priority": rng.randrange(10)}
            ),
            lambda: self._patch("override", name, "oncall", ONCALL, {"task_count": count}),
            lambda: self._patch("override", name, "oncall", ONCALL, {"batch_rows_max": 1000 + count}),
            lambda: self._patch("take back", name, "oncall", ONCALL, {"task_count": None}),
            lambda: self._patch("stop", name, "oncall", ONCALL, {"state": "stopped"}),
            lambda: self._patch("pause", name, "oncall", ONCALL, {"state": "paused"}),
            lambda: self._patch("start", name, "oncall", ONCALL, {"state": None}),
            lambda: self._patch("start", name, "oncall", ONCALL, {"state": None}),
            lambda: self._patch(
                "reset", name, "provisioner", DEVELOPER, {"lineage": rng.randrange(1, 10**6)}
            ),
            lambda: self._remove(name) if rng.random() < 0.5 else None,
            lambda: self._create(name),
            lambda: self._create(name),
        )
        rng.choice(changes)()
        self._schedule_next()

    def _release_all(self) -> None:
        """Release a new version of every job, within a few seconds."""
        rng, version = self.world.sim.rng, str(self.world.sim.rng.randrange(10**6))
        for name in self.names:
            release = partial(
                self._patch, "release of all", name, "provisioner", DEVELOPER, {"package.version": version}
            )
            self.world.sim.after(rng.randrange(5_000), "release of all", release)

    def _create(self, name: str) -> None:
        rng = self.world.sim.rng
        low, high = self.world.options.task_counts
        birth, partitions, count = f"{rng.getrandbits(64):016x}", rng.randint(2, 6), rng.randint(low, high)
        if self.world.options.is_large:
            partitions = rng.randint(high, high + 3)
        body: dict[str, Any] = {
            "pipeline": "p",
            "kind": "stateless",
            "package": {"name": "p", "version": "1", "hash": "0" * 64, "entry": "m"},
            "task_count": count,
            "partitions": partitions,
            "inputs": [{"category": "in"}],
            "outputs": [],
            "plan": {},
        }

        def write(service: JobService, key: str, now_ms: int) -> None:
            service.create(
                name, body, birth=birth, actor=DEVELOPER, reason="new", idempotency_key=key, now_ms=now_ms
            )

        self._request("create", write)

    def _remove(self, name: str) -> None:
        def write(service: JobService, key: str, now_ms: int) -> None:
            service.remove(name, actor=DEVELOPER, reason="not needed", idempotency_key=key, now_ms=now_ms)

        self._request("remove", write)

    def _patch(self, kind: str, name: str, layer: str, actor: Actor, changes: dict[str, Any]) -> None:
        def write(service: JobService, key: str, now_ms: int) -> None:
            service.patch_layer(
                name, layer, changes, actor=actor, reason=kind, idempotency_key=key, now_ms=now_ms
            )

        self._request(kind, write)

    def _request(self, kind: str, write: Write) -> None:
        self._requests += 1
        self._attempt(kind, f"request {self._requests}", write)

    def _attempt(self, kind: str, key: str, write: Write) -> None:
        world = self.world

        def again() -> None:
            world.sim.after(1_000, f"{key} ({kind}) again", lambda: self._attempt(kind, key, write))

        services = world.control.answering()
        if services is None or services.process.is_paused:
            again()
            return

        def serve() -> None:
            try:
                write(services.job_service, key, services.process.clock.now_ms())
            except StoreUnavailable:
                again()
            except UserError as error:
                self.done[f"{kind}: {type(error).__name__}"] += 1
            else:
                self.done[kind] += 1
                world.control.poke()

        services.process.run(f"{key} ({kind})", serve)
        if not services.process.is_alive:
            again()  # it died meanwhile: the outcome is unknown
