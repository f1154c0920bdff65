"""What goes wrong, and when? Faults of stores, data plane, processes and links, drawn from the seed.

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
    """`Database(fault=...)`: refuses at begin, lies after the commit, or kills whoever is in the transaction.

    Only code that runs inside a simulated process is hit: checkers read undisturbed.
    """

    sim: Simulation
    refused: float = 0.0
    timed_out: float = 0.0
    crashed: float = 0.0
    down_until_ms: Millis = 0
    met: Counter[str] = field(default_factory=Counter)
    struck_ms: Millis = -(10**12)  # when it last failed somebody
    commits: int = 0  # grows with every transaction that committed: tells checkers when to look again
    victim: Callable[[SimProcess], bool] = lambda process: True
    at_next_begin: Callable[[SimProcess], None] | None = (
        None  # once, inside a round of the active control plane
    )

    def __call__(self, point: str) -> None:
        """Called by the database at "begin", "commit" and "committed"."""
        if point == "committed":
            self.commits += 1
        process, rng = self.sim.current, self.sim.rng
        if process is None:
            return
        if point == "begin" and self.at_next_begin is not None and self.victim(process):
            strike, self.at_next_begin = self.at_next_begin, None
            strike(process)
        if point == "begin" and (self.sim.now_ms < self.down_until_ms or self._strikes(self.refused)):
            self.met["store refused"] += 1
            self.struck_ms = self.sim.now_ms
            raise StoreUnavailable("the simulated store is down")
        if self.crashed and self.victim(process) and rng.random() < self.crashed:
            self.met[f"crash at {point}"] += 1
            raise ProcessCrashed
        if point == "committed" and self._strikes(self.timed_out):
            self.met["store timed out after writing"] += 1
            self.struck_ms = self.sim.now_ms
            raise OutcomeUnknown("the simulated store wrote, but did not answer")

    def _strikes(self, share: float) -> bool:
        return share > 0 and self.sim.rng.random() < share

    def heal(self) -> None:
        """A store that works."""
        self.refused = self.timed_out = self.crashed = 0.0
        self.down_until_ms = 0
        self.at_next_begin = None


@dataclass(slots=True)
class DataPlaneFaults:
    """Errors of `prepare`, `fence` and `retire`: before the effect, or after it (done, but timed out)."""

    sim: Simulation
    refused: float = 0.0
    timed_out: float = 0.0
    poison: set[str] = field(default_factory=set)  # jobs whose prepare never succeeds
    met: Counter[str] = field(default_factory=Counter)
    on_timeout: Callable[[], None] = lambda: None  # whoever asked hangs for a while

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
            # Some failures are the environment's, some count against the plan.
            raise self.sim.rng.choice((StoreUnavailable, IntervalError))(what)

    def heal(self) -> None:
        """A data plane that works; poison stays poison."""
        self.refused = self.timed_out = 0.0


@dataclass(slots=True)
class FaultSchedule:
    """Strikes at random moments with one of the kinds the seed allows."""

    world: World
    met: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    def begin(self) -> None:
        """Set the standing faults and arm the first stroke."""
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
            world.around.slow_starts = rng.choice((0.2, 0.5, 1.0))
        self._arm()

    def heal(self) -> None:
        """End every fault now. Dead processes are brought back by their supervisors."""
        self.is_over = True
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
        world.around.slow_starts = 0.0
        for container in world.hosts():
            container.hurry()
        for twin in world.twins:
            twin.crash(for_good=True)
        world.control.start()
        for container in world.containers:
            container.start()

    def _poison(self, name: str) -> None:
        self.world.data_plane_faults.poison.add(name)

    def _hang(self) -> None:
        life = self.world.control.active
        if life is not None:
            life.hangs_until_ms = self.world.sim.now_ms + self.world.sim.rng.randrange(100, 20_000)

    def _arm(self) -> None:
        rng, mean_ms = self.world.sim.rng, self.world.options.fault_every_ms
        self.world.sim.after(1 + int(rng.expovariate(1 / mean_ms)), "fault", self._strike)

    def _strike(self) -> None:
        if self.is_over:
            return
        strokes = [kind for kind in self.world.options.faults if kind in _STROKES]
        if strokes:
            kind = self.world.sim.rng.choice(strokes)
            self.met[kind] += 1
            self.world.sim.note(f"fault: {kind}")
            _STROKES[kind](self.world, self)
        self._arm()

    def pause(self, *processes: SimProcess | None) -> None:
        """Pause together; go on together, after a time around the profile's deadlines."""
        sim, profile = self.world.sim, self.world.profile
        # Short ones must do no harm at all; the long ones make zombies.
        for_ms = sim.rng.choice((profile.heartbeat_ms, profile.deadline_ms, 2 * profile.failover_ms))
        for_ms = sim.rng.randrange(for_ms // 2, for_ms + 1)
        alive = [process for process in processes if process is not None and process.is_alive]
        for process in alive:
            process.pause()

        def resume() -> None:
            # An engine may be ahead of its warden by an event or the other way round.
            for process in sim.rng.sample(alive, len(alive)):
                process.resume()

        sim.after(for_ms, "pause ends", resume)


Stroke = Callable[["World", FaultSchedule], None]


def _crash_control(world: World, _schedule: FaultSchedule) -> None:
    world.control.crash()


def _crash_in_a_transaction(world: World, _schedule: FaultSchedule) -> None:
    def over() -> None:
        world.store_faults.crashed = 0.0

    # Soon, at whichever point of whichever transaction comes: this is the crash "between any two lines".
    world.store_faults.crashed = world.sim.rng.choice((0.02, 0.1, 0.3))
    world.sim.after(world.sim.rng.randrange(1_000, 10_000), "transactions are safe again", over)


def _pause_control(world: World, schedule: FaultSchedule) -> None:
    schedule.pause(world.control.process)


def _zombie_control(world: World, _schedule: FaultSchedule) -> None:
    world.control.become_zombie(for_ms=world.sim.rng.randrange(1_000, 2 * world.profile.failover_ms))


def _zombie_in_a_round(world: World, schedule: FaultSchedule) -> None:
    rng = world.sim.rng
    for_ms, skipped = rng.randrange(1_000, 2 * world.profile.failover_ms), rng.randrange(10)

    def strike(process: SimProcess) -> None:
        nonlocal skipped
        if process is not world.control.process or skipped > 0:
            skipped -= 1
            world.store_faults.at_next_begin = strike
        else:
            schedule.met["control zombie went on in its round"] += 1
            world.control.become_zombie_here(process, for_ms=for_ms, until_ms=world.options.safety_ms)

    world.store_faults.at_next_begin = strike


def _crash_container(world: World, _schedule: FaultSchedule) -> None:
    world.sim.rng.choice(world.containers).crash()


def _lose_container(world: World, _schedule: FaultSchedule) -> None:
    # At least two stay, or there is nowhere to fail over to.
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

    def mend() -> None:
        for link in links:
            world.network.mend(*link)

    world.sim.after(world.sim.rng.randrange(1_000, 3 * world.profile.failover_ms), "links return", mend)


def _cut_links(world: World, _schedule: FaultSchedule) -> None:
    rng = world.sim.rng
    count = rng.choice((1, 1, 1, 2, len(world.containers)))
    # At times the store is lost with it: then nothing is left to renew the lease in.
    with_store = rng.random() < 0.5
    for container in rng.sample(world.containers, min(count, len(world.containers))):
        store = ((container.host, "store"),) if with_store else ()
        _cut(world, (container.host, "control"), ("control", container.host), *store)


def _cut_one_way(world: World, _schedule: FaultSchedule) -> None:
    host = world.sim.rng.choice(world.containers).host
    _cut(world, world.sim.rng.choice(((host, "control"), ("control", host))))


def _slow_replies(world: World, schedule: FaultSchedule) -> None:
    """Answers to one container get late, and at times its beats then stop coming through at all."""
    rng, profile = world.sim.rng, world.profile
    name, for_ms = (
        rng.choice(world.containers).name,
        rng.randrange(profile.deadline_ms, 3 * profile.failover_ms),
    )
    world.network.slow("control", name, rng.randrange(profile.deadline_ms // 2, profile.deadline_ms))
    world.sim.after(for_ms, "replies are fast again", lambda: world.network.slow("control", name, 0))

    def cut() -> None:
        if not schedule.is_over:
            _cut(world, (name, "control"), (name, "store"))

    if rng.random() < 0.5:
        world.sim.after(profile.deadline_ms, "link breaks", cut)


def _bad_weather(world: World, _schedule: FaultSchedule) -> None:
    rng, profile = world.sim.rng, world.profile
    weather = NetworkConditions(
        loss=rng.choice((0.0, 0.05, 0.3)),
        doubled=rng.choice((0.0, 0.1, 0.5)),
        late=rng.choice((0.1, 0.5, 0.9)),
        late_ms=rng.choice((profile.heartbeat_ms, profile.deadline_ms, 2 * profile.failover_ms)),
        delay_ms=rng.choice((5, 50, 500)),
    )
    world.network.weather = weather

    def clear() -> None:
        if world.network.weather is weather:  # not a later one's
            world.network.weather = NetworkConditions()

    world.sim.after(rng.randrange(1_000, 3 * profile.failover_ms), "weather clears", clear)


def _store_down(world: World, _schedule: FaultSchedule) -> None:
    for_ms = world.sim.rng.randrange(500, world.sim.rng.choice((2_000, 2 * world.profile.failover_ms)))
    world.store_faults.down_until_ms = world.sim.now_ms + for_ms


def _crash_task(world: World, _schedule: FaultSchedule) -> None:
    runs = sorted(world.population.runs)
    if runs:
        world.population.runs[world.sim.rng.choice(runs)].crash()


def _outage_ms(world: World) -> Millis:
    """Longer than a lease, at times many of them."""
    return world.sim.rng.randrange(world.profile.deadline_ms, 5 * world.profile.failover_ms)


def _control_outage(world: World, _schedule: FaultSchedule) -> None:
    world.control.down_until_ms = world.sim.now_ms + _outage_ms(world)
    world.control.crash()


def _syncer_down(world: World, _schedule: FaultSchedule) -> None:
    world.control.syncer_down_until_ms = world.sim.now_ms + _outage_ms(world)


def _task_service_down(world: World, _schedule: FaultSchedule) -> None:
    world.control.task_service_down_until_ms = world.sim.now_ms + _outage_ms(world)


def _same_identity(world: World, _schedule: FaultSchedule) -> None:
    """Somebody starts a second container under a name that is taken."""
    twin = world.sim.rng.choice(world.twins)
    twin.start()
    world.sim.after(_outage_ms(world), f"{twin.host} is stopped", lambda: twin.crash(restarts=False))


def _stubborn_task(world: World, schedule: FaultSchedule) -> None:
    """A task does not end while somebody moves its shard again and again: each time costs a container."""
    tasks = sorted(world.population.by_task)
    if not tasks:
        return
    rng = world.sim.rng
    # Long enough for the container's lease to be withheld, and to run out.
    every_ms = world.control.pace.drop_timeout_ms + 3 * world.profile.failover_ms
    task_id, times = rng.choice(tasks), rng.randrange(1, 4)
    shard = shard_of(task_id, world.options.shard_count)

    def move(target: str) -> None:
        if not schedule.is_over:
            world.move(shard, target)

    world.pace.stubborn.add(task_id)
    for number in range(times):
        target = rng.choice(world.containers).name
        world.sim.after(number * every_ms, f"shard {shard} moves", partial(move, target))
    ends = partial(world.pace.stubborn.discard, task_id)
    world.sim.after(times * every_ms, f"{task_id} ends again", ends)


def _planned_work(world: World, _schedule: FaultSchedule) -> None:
    """Somebody drains or cordons a container and takes it back later, or moves a shard."""
    rng = world.sim.rng
    name, shard = rng.choice(world.containers).name, rng.randrange(world.options.shard_count)
    work = rng.choice(("drain", "cordon", "move", "move"))
    if work == "move":
        world.move(shard, name)
        return
    world.order(lambda manager, now_ms: (manager.drain if work == "drain" else manager.cordon)(name, now_ms))
    at_ms = rng.randrange(1, 10) * world.profile.failover_ms
    world.sim.after(at_ms, f"work on {name} is over", partial(world.take_back, name))


_STROKES: dict[str, Stroke] = {
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
    "bad weather": _bad_weather,
    "store down": _store_down,
    "task crash": _crash_task,
    "control outage": _control_outage,
    "syncer down": _syncer_down,
    "task service down": _task_service_down,
    "same identity": _same_identity,
    "stubborn task": _stubborn_task,
    "planned work": _planned_work,
}
