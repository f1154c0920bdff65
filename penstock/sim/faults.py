"""Fault injection: faults of the store, data plane, processes and links, drawn from the seed.

Every fault ends by itself; `heal` ends all of them at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.clock import Millis
from penstock.core.errors import IntervalError, OutcomeUnknown, StoreUnavailable
from penstock.fleet.shard_load import shard_of
from penstock.sim.simulation import NetworkConditions, ProcessCrashed, SimProcess, Simulation

if TYPE_CHECKING:
    from penstock.sim.scenario import World


@dataclass(slots=True)
class StoreFaults:
    """For `Database(fault=...)`: fails at begin, reports a timeout after the commit, or kills the calling
    process.

    Hits only code that runs inside a simulated process, not the checkers.
    """

    sim: Simulation
    refused: float = 0.0
    timed_out: float = 0.0
    crashed: float = 0.0
    down_until_ms: Millis = 0
    met: Counter[str] = field(default_factory=Counter)
    last_fault_ms: Millis = -(10**12)  # when it last failed a call
    commits: int = 0  # committed transactions: checkers use it to detect writes
    victim: Callable[[SimProcess], bool] = lambda process: True
    # Once, inside a round of the active control plane
    at_next_begin: Callable[[SimProcess], None] | None = None

    def __call__(self, point: str) -> None:
        """Called by the database at "begin", "commit" and "committed"."""
        if point == "committed":
            self.commits += 1
        process, rng = self.sim.current, self.sim.rng
        if process is None:
            return
        if point == "begin" and self.at_next_begin is not None and self.victim(process):
            inject, self.at_next_begin = self.at_next_begin, None
            inject(process)
        if point == "begin" and (self.sim.now_ms < self.down_until_ms or self._hits(self.refused)):
            self.met["store refused"] += 1
            self.last_fault_ms = self.sim.now_ms
            raise StoreUnavailable("the simulated store is down")
        if self.crashed and self.victim(process) and rng.random() < self.crashed:
            self.met[f"crash at {point}"] += 1
            raise ProcessCrashed
        if point == "committed" and self._hits(self.timed_out):
            self.met["store timed out after writing"] += 1
            self.last_fault_ms = self.sim.now_ms
            raise OutcomeUnknown("the simulated store committed, but did not answer")

    def _hits(self, share: float) -> bool:
        return share > 0 and self.sim.rng.random() < share

    def heal(self) -> None:
        """End all faults of the store."""
        self.refused = self.timed_out = self.crashed = 0.0
        self.down_until_ms = 0
        self.at_next_begin = None


@dataclass(slots=True)
class DataPlaneFaults:
    """Errors of `prepare`, `fence` and `retire`: before the effect, or after it (as a timeout)."""

    sim: Simulation
    refused: float = 0.0
    timed_out: float = 0.0
    poison: set[str] = field(default_factory=set)  # jobs whose prepare never succeeds
    met: Counter[str] = field(default_factory=Counter)
    on_timeout: Callable[[], None] = lambda: None  # makes the caller hang for a while

    def __call__(self, call: str, job: str) -> None:
        """Called by the model at each call's start ("prepare") and end ("prepared")."""
        if call == "prepare" and job in self.poison:
            self.met["poison prepare"] += 1
            raise IntervalError(f"{job} is poison")
        is_end = call in ("prepared", "fenced")
        share = self.timed_out if is_end else self.refused
        if share > 0 and self.sim.rng.random() < share:
            self.met[f"data plane: {call}"] += 1
            what = f"simulated failure: {call} of {job}"
            if is_end:
                self.on_timeout()
                raise OutcomeUnknown(what)
            # Some failures are the environment's, others count as failures of the plan.
            raise self.sim.rng.choice((StoreUnavailable, IntervalError))(what)

    def heal(self) -> None:
        """End all faults except poison jobs."""
        self.refused = self.timed_out = 0.0


@dataclass(slots=True)
class FaultSchedule:
    """Injects, at random times, one of the kinds of faults that the seed allows."""

    world: World
    met: Counter[str] = field(default_factory=Counter)
    is_stopped: bool = False

    def begin(self) -> None:
        """Set the permanent faults and schedule the first injection."""
        world, on, rng = self.world, set(self.world.options.faults), self.world.sim.rng
        if "store errors" in on:
            world.store_faults.refused = rng.choice((0.002, 0.01, 0.05))
        if "written but timed out" in on:
            world.store_faults.timed_out = rng.choice((0.002, 0.01, 0.05))
        if "data plane errors" in on:
            world.data_plane_faults.refused = rng.choice((0.1, 0.3))
        if "data plane timeouts" in on:
            world.data_plane_faults.timed_out = rng.choice((0.1, 0.3))
        names = [f"p.j{number}" for number in range(world.options.jobs)]
        for name in rng.sample(names, world.options.poison_jobs):
            at_ms = rng.randrange(world.options.safety_ms)
            world.sim.after(at_ms, f"{name} turns to poison", partial(self._poison, name))
        world.data_plane_faults.on_timeout = self._hang
        if "slow stops" in on:
            world.pace.hang, world.pace.stop_ms = 0.2, 4_000
        if "slow engine starts" in on:
            world.env.slow_starts = rng.choice((0.2, 0.5, 1.0))
        self._schedule_next()

    def heal(self) -> None:
        """End every fault now. Supervisors restart dead processes."""
        self.is_stopped = True
        world = self.world
        world.sim.note("heal")
        world.network.heal()
        world.store_faults.heal()
        world.data_plane_faults.heal()
        world.pace.hang = 0.0
        world.pace.stubborn.clear()
        world.control.down_until_ms = world.control.syncer_down_until_ms = 0
        world.control.task_service_down_until_ms = 0
        for process in world.processes():
            process.resume()
        world.env.slow_starts = 0.0
        for container in world.hosts():
            container.finish_start()
        for twin in world.twins:
            twin.crash(for_good=True)
        world.control.start()
        for container in world.containers:
            container.start()

    def _poison(self, name: str) -> None:
        self.world.data_plane_faults.poison.add(name)

    def _hang(self) -> None:
        services = self.world.control.active
        if services is not None:
            services.hangs_until_ms = self.world.sim.now_ms + self.world.sim.rng.randrange(100, 20_000)

    def _schedule_next(self) -> None:
        rng, mean_ms = self.world.sim.rng, self.world.options.fault_every_ms
        self.world.sim.after(1 + int(rng.expovariate(1 / mean_ms)), "fault", self._inject)

    def _inject(self) -> None:
        if self.is_stopped:
            return
        kinds = [kind for kind in self.world.options.faults if kind in _INJECTIONS]
        if kinds:
            kind = self.world.sim.rng.choice(kinds)
            self.met[kind] += 1
            self.world.sim.note(f"fault: {kind}")
            _INJECTIONS[kind](self.world, self)
        self._schedule_next()

    def pause(self, *processes: SimProcess | None) -> None:
        """Pause processes together, and resume them together after a time around the profile's deadlines."""
        sim, profile = self.world.sim, self.world.profile
        # Short pauses must have no effect; long ones create zombies.
        for_ms = sim.rng.choice((profile.heartbeat_ms, profile.deadline_ms, 2 * profile.failover_ms))
        for_ms = sim.rng.randrange(for_ms // 2, for_ms + 1)
        alive = [process for process in processes if process is not None and process.is_alive]
        for process in alive:
            process.pause()

        def resume() -> None:
            # In random order: the engine or the warden may resume first.
            for process in sim.rng.sample(alive, len(alive)):
                process.resume()

        sim.after(for_ms, "pause ends", resume)


Injection = Callable[["World", FaultSchedule], None]


def _crash_control(world: World, _schedule: FaultSchedule) -> None:
    world.control.crash()


def _crash_in_a_transaction(world: World, _schedule: FaultSchedule) -> None:
    def end() -> None:
        world.store_faults.crashed = 0.0

    # Crashes soon, at a random point of some transaction.
    world.store_faults.crashed = world.sim.rng.choice((0.02, 0.1, 0.3))
    world.sim.after(world.sim.rng.randrange(1_000, 10_000), "transactions are safe again", end)


def _pause_control(world: World, schedule: FaultSchedule) -> None:
    schedule.pause(world.control.process)


def _zombie_control(world: World, _schedule: FaultSchedule) -> None:
    world.control.become_zombie(for_ms=world.sim.rng.randrange(1_000, 2 * world.profile.failover_ms))


def _zombie_in_a_round(world: World, schedule: FaultSchedule) -> None:
    rng = world.sim.rng
    for_ms, skipped = rng.randrange(1_000, 2 * world.profile.failover_ms), rng.randrange(10)

    def inject(process: SimProcess) -> None:
        nonlocal skipped
        if process is not world.control.process or skipped > 0:
            skipped -= 1
            world.store_faults.at_next_begin = inject
        else:
            schedule.met["control zombie went on in its round"] += 1
            world.control.become_zombie_here(process, for_ms=for_ms, until_ms=world.options.safety_ms)

    world.store_faults.at_next_begin = inject


def _crash_container(world: World, _schedule: FaultSchedule) -> None:
    world.sim.rng.choice(world.containers).crash()


def _lose_container(world: World, _schedule: FaultSchedule) -> None:
    # At least two must remain, so that fail-over is possible.
    there = [container for container in world.containers if not container.is_lost]
    if len(there) > 2:
        world.sim.rng.choice(there).crash(for_good=True)


def _crash_warden(world: World, _schedule: FaultSchedule) -> None:
    world.sim.rng.choice(world.containers).crash_warden()


def _crash_engine(world: World, _schedule: FaultSchedule) -> None:
    world.sim.rng.choice(world.containers).crash_engine()


def _pause_engine(world: World, schedule: FaultSchedule) -> None:
    schedule.pause(world.sim.rng.choice(world.containers).engine)


def _pause_warden(world: World, schedule: FaultSchedule) -> None:
    schedule.pause(world.sim.rng.choice(world.containers).warden)


def _pause_container(world: World, schedule: FaultSchedule) -> None:
    container = world.sim.rng.choice(world.containers)
    schedule.pause(container.warden, container.engine)


def _cut(world: World, *links: tuple[str, str]) -> None:
    for link in links:
        world.network.cut(*link)

    def restore() -> None:
        for link in links:
            world.network.restore(*link)

    world.sim.after(world.sim.rng.randrange(1_000, 3 * world.profile.failover_ms), "links return", restore)


def _cut_links(world: World, _schedule: FaultSchedule) -> None:
    rng = world.sim.rng
    count = rng.choice((1, 1, 1, 2, len(world.containers)))
    # Sometimes cut off the store too: then the lease cannot be renewed there.
    with_store = rng.random() < 0.5
    for container in rng.sample(world.containers, min(count, len(world.containers))):
        store = ((container.host, "store"),) if with_store else ()
        _cut(world, (container.host, "control"), ("control", container.host), *store)


def _cut_one_way(world: World, _schedule: FaultSchedule) -> None:
    host = world.sim.rng.choice(world.containers).host
    _cut(world, world.sim.rng.choice(((host, "control"), ("control", host))))


def _slow_replies(world: World, schedule: FaultSchedule) -> None:
    """Delay the replies to one container; sometimes its heartbeats then are lost completely."""
    rng, profile = world.sim.rng, world.profile
    name, for_ms = (
        rng.choice(world.containers).name,
        rng.randrange(profile.deadline_ms, 3 * profile.failover_ms),
    )
    world.network.slow("control", name, rng.randrange(profile.deadline_ms // 2, profile.deadline_ms))
    world.sim.after(for_ms, "replies are fast again", lambda: world.network.slow("control", name, 0))

    def cut() -> None:
        if not schedule.is_stopped:
            _cut(world, (name, "control"), (name, "store"))

    if rng.random() < 0.5:
        world.sim.after(profile.deadline_ms, "link breaks", cut)


def _bad_network(world: World, _schedule: FaultSchedule) -> None:
    rng, profile = world.sim.rng, world.profile
    conditions = NetworkConditions(
        loss=rng.choice((0.0, 0.05, 0.3)),
        doubled=rng.choice((0.0, 0.1, 0.5)),
        late=rng.choice((0.1, 0.5, 0.9)),
        late_ms=rng.choice((profile.heartbeat_ms, profile.deadline_ms, 2 * profile.failover_ms)),
        delay_ms=rng.choice((5, 50, 500)),
    )
    world.network.conditions = conditions

    def clear() -> None:
        if world.network.conditions is conditions:  # not replaced by a later fault
            world.network.conditions = NetworkConditions()

    world.sim.after(rng.randrange(1_000, 3 * profile.failover_ms), "network recovers", clear)


def _store_down(world: World, _schedule: FaultSchedule) -> None:
    for_ms = world.sim.rng.randrange(500, world.sim.rng.choice((2_000, 2 * world.profile.failover_ms)))
    world.store_faults.down_until_ms = world.sim.now_ms + for_ms


def _crash_task(world: World, _schedule: FaultSchedule) -> None:
    runs = sorted(world.population.runs)
    if runs:
        world.population.runs[world.sim.rng.choice(runs)].crash()


def _outage_ms(world: World) -> Millis:
    """The duration of an outage: one to several leases."""
    return world.sim.rng.randrange(world.profile.deadline_ms, 5 * world.profile.failover_ms)


def _control_outage(world: World, _schedule: FaultSchedule) -> None:
    world.control.down_until_ms = world.sim.now_ms + _outage_ms(world)
    world.control.crash()


def _syncer_down(world: World, _schedule: FaultSchedule) -> None:
    world.control.syncer_down_until_ms = world.sim.now_ms + _outage_ms(world)


def _task_service_down(world: World, _schedule: FaultSchedule) -> None:
    world.control.task_service_down_until_ms = world.sim.now_ms + _outage_ms(world)


def _same_identity(world: World, _schedule: FaultSchedule) -> None:
    """Start a second container under a name that is in use."""
    twin = world.sim.rng.choice(world.twins)
    twin.start()
    world.sim.after(_outage_ms(world), f"{twin.host} is stopped", lambda: twin.crash(restarts=False))


def _stubborn_task(world: World, schedule: FaultSchedule) -> None:
    """A task that does not stop while its shard is moved repeatedly: each move makes a container lose its
    lease.
    """
    tasks = sorted(world.population.by_task)
    if not tasks:
        return
    rng = world.sim.rng
    # Long enough for the container's lease to be withheld and to expire.
    every_ms = world.control.shard_settings.drop_timeout_ms + 3 * world.profile.failover_ms
    task_id, times = rng.choice(tasks), rng.randrange(1, 4)
    shard = shard_of(task_id, world.options.shard_count)

    def move(target: str) -> None:
        if not schedule.is_stopped:
            world.move(shard, target)

    world.pace.stubborn.add(task_id)
    for number in range(times):
        target = rng.choice(world.containers).name
        world.sim.after(number * every_ms, f"shard {shard} moves", partial(move, target))
    ends = partial(world.pace.stubborn.discard, task_id)
    world.sim.after(times * every_ms, f"{task_id} ends again", ends)


def _planned_work(world: World, _schedule: FaultSchedule) -> None:
    """Drain or cordon a container and uncordon it later, or move a shard."""
    rng = world.sim.rng
    name, shard = rng.choice(world.containers).name, rng.randrange(world.options.shard_count)
    work = rng.choice(("drain", "cordon", "move", "move"))
    if work == "move":
        world.move(shard, name)
        return
    world.order(lambda manager, now_ms: (manager.drain if work == "drain" else manager.cordon)(name, now_ms))
    at_ms = rng.randrange(1, 10) * world.profile.failover_ms
    world.sim.after(at_ms, f"work on {name} ends", partial(world.uncordon, name))


_INJECTIONS: dict[str, Injection] = {
    "control crash": _crash_control,
    "control crash in a transaction": _crash_in_a_transaction,
    "control pause": _pause_control,
    "control zombie": _zombie_control,
    "control zombie in a round": _zombie_in_a_round,
    "container crash": _crash_container,
    "container loss": _lose_container,
    "warden crash": _crash_warden,
    "engine crash": _crash_engine,
    "engine pause": _pause_engine,
    "warden pause": _pause_warden,
    "container pause": _pause_container,
    "link cut": _cut_links,
    "link cut one way": _cut_one_way,
    "slow replies": _slow_replies,
    "bad network": _bad_network,
    "store down": _store_down,
    "task crash": _crash_task,
    "control outage": _control_outage,
    "syncer down": _syncer_down,
    "task service down": _task_service_down,
    "same identity": _same_identity,
    "stubborn task": _stubborn_task,
    "planned work": _planned_work,
}
