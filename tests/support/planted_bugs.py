"""Planted bugs: each takes one rule away, and some seed of the simulation must notice.

Each is a subclass of the real part, or a simulated world without one rule.
`python -m tests.support.planted_bugs` runs all of them: after how many seeds each is found, and by which invariant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from penstock.container.task_manager import TaskManager, TaskManagerReport
from penstock.container.watchdog import EndEngine, Lease, SendHeartbeat, StopTasks, Watchdog
from penstock.core.clock import Millis, Step
from penstock.fleet.container_store import ContainerRow, read_container, read_leases
from penstock.fleet.liveness import Alert, Liveness
from penstock.fleet.messages import Heartbeat, HeartbeatReply, HeartbeatVerdict, ShardEntry, ShardState
from penstock.fleet.placement.placement import Mode, Move
from penstock.fleet.shard_manager import ShardManager
from penstock.fleet.shard_store import (
    SHARDS,
    Assignment,
    FailedOver,
    HeartbeatOutcome,
    MovePlanner,
    Renewed,
    ShardStore,
)
from penstock.fleet.task_service import TaskList
from penstock.jobs.job_store import JobRecord
from penstock.jobs.running_store import PLANS, PlanRow, RunningRow
from penstock.jobs.syncer.batches import LeaderStore
from penstock.jobs.syncer.plan_store import PlanStore
from penstock.jobs.syncer.state_syncer import StateSyncer
from penstock.jobs.syncer.sync_plan import PlanStep
from penstock.sim.fleet import Container, SimEngine, SimParts
from penstock.sim.scenario import PlantedBugs, ScenarioOptions, draw_options, run_seed
from penstock.sim.simulation import InvariantBroken

SEEDS_MAX = 20


# -- in the stores


class NoHold(PlanStore):
    """Takes note of the hold in the plan, but not as a level: the list goes on to serve the old tasks."""

    def take_hold(self, record: JobRecord, now_ms: Millis) -> None:
        with self._leader.writing("hold") as connection:
            connection.execute(
                sa.update(PLANS).where(PLANS.c.job == record.job.name).values(step=str(PlanStep.COMMIT))
            )


class AddBeforeDrop(ShardStore):
    """Gives a shard to its next container without waiting for the last one."""

    def _apply(self, connection: sa.Connection, moves: Iterable[Move]) -> None:
        moves = list(moves)
        for move in moves:
            orphan = sa.update(SHARDS).where(SHARDS.c.shard == move.shard).values(container=None)
            connection.execute(orphan)
        super()._apply(connection, [replace(move, source=None) for move in moves])


class _Reading(ShardStore):
    def _row(self, name: str) -> ContainerRow | None:
        with self._database.reading() as connection:
            return read_container(connection, name)


class LeaseUnread(_Reading):
    """Fails over whom it does not hear, though the lease was renewed in the store."""

    def fail_over(
        self, name: str, incarnation: str, *, renewals: int | None, **how: Any
    ) -> FailedOver | Renewed | None:
        found = self._row(name)
        seen = found.renewals if found is not None and renewals is not None else renewals
        return super().fail_over(name, incarnation, renewals=seen, **how)


class WithheldIsFine(ShardStore):
    """Extends a lease that is to run out."""

    def _heartbeats(
        self, connection: sa.Connection, beats: Sequence[Heartbeat], at_ms: Millis
    ) -> Iterator[HeartbeatOutcome]:
        for outcome in super()._heartbeats(connection, beats, at_ms):
            is_withheld = outcome.verdict is HeartbeatVerdict.WITHHELD
            yield replace(outcome, verdict=HeartbeatVerdict.OK) if is_withheld else outcome


class AnyIdentity(_Reading):
    """Takes whoever registers under a name for the one that was there, and lets both beat."""

    def register(
        self, name: str, incarnation: str, *, folder_id: str, **how: Any
    ) -> tuple[ContainerRow, Assignment]:
        found = self._row(name)
        known = found.folder_id if found is not None else folder_id
        return super().register(name, incarnation, folder_id=known, **how)


class BeatsOfAnyLife(_Reading):
    """Does not look at the incarnation of a beat or of a renewal."""

    def _heartbeats(
        self, connection: sa.Connection, beats: Sequence[Heartbeat], at_ms: Millis
    ) -> Iterator[HeartbeatOutcome]:
        known = {row.name: row.incarnation for row in read_leases(connection, [b.container for b in beats])}
        known = {beat.container: beat.incarnation for beat in beats} | known
        mended = [replace(beat, incarnation=known[beat.container]) for beat in beats]
        return super()._heartbeats(connection, mended, at_ms)

    def renew(self, name: str, incarnation: str) -> Assignment | None:
        found = self._row(name)
        return super().renew(name, incarnation if found is None else found.incarnation)


class AnyTerm(ShardStore):
    """Writes without looking whether another Shard Manager has taken over."""

    @contextmanager
    def _writing(self, term: int) -> Iterator[sa.Connection]:
        with self._database.transaction() as connection:
            yield connection


# -- in containers: lease, watchdog, Task Manager


class LeaseFromReceipt(Lease):
    """Counts from the arrival of the acknowledgement: a late reply then eats the margin."""

    def on_ack(self, reply: HeartbeatReply, now_ms: Millis) -> Step[StopTasks]:
        self.on_sent(reply.sequence, now_ms)
        return super().on_ack(reply, now_ms)


class OutlivesItsLease(Container):
    """Notices that the lease is over, and lets the engine go on."""

    def _end(self, engine: SimEngine, reason: str) -> None:
        if not reason.startswith("no heartbeat sent"):
            super()._end(engine, reason)


class AcknowledgesDropAtOnce(TaskManager):
    """Says "reaped" when it has only asked for the stop."""

    def report(self) -> TaskManagerReport:
        honest = super().report()
        return replace(honest, acked=tuple(entry for _, entry in sorted(self._shards.items())))


class ObeysAnyAssignment(TaskManager):
    """Applies a late reply too: it undoes a DROP."""

    def on_reply(self, reply: HeartbeatReply, now_ms: Millis) -> None:
        self._assignment_version = 0
        self._shards = {shard: replace(entry, epoch=-1) for shard, entry in self._shards.items()}
        super().on_reply(reply, now_ms)


class TrustsItsDisk(TaskManager):
    """After a restart the list on its disk is good enough."""

    _is_from_disk = False

    def on_task_list(self, news: TaskList, now_ms: Millis, *, cached: bool = False) -> bool:
        if self._is_from_disk:
            return True
        self._is_from_disk = cached
        return super().on_task_list(news, now_ms, cached=cached)


class GivesBackForAnyEngine(Watchdog):
    """Gives back what is to be dropped without its engine, also when that one is ready and runs it."""

    _to_drop: tuple[ShardEntry, ...] = ()

    def _is_for_engine(self, reply: HeartbeatReply) -> bool:
        self._to_drop = tuple(entry for entry in reply.shards if entry.state is ShardState.DROPPING)
        return super()._is_for_engine(reply)

    def check(self, now_ms: Millis) -> Step[SendHeartbeat | EndEngine]:
        step = super().check(now_ms)
        beats = [action.heartbeat for action in step.actions if isinstance(action, SendHeartbeat)]
        if not beats:
            return step
        said = beats[0]
        owned = tuple(entry for entry in said.acked if entry.state is ShardState.OWNED)
        return Step(actions=(SendHeartbeat(heartbeat=replace(said, acked=owned + self._to_drop)),))


# -- in the Shard Manager


class NoGrace(Liveness):
    """Holds its own pause against the containers."""

    @property
    def stall_ms(self) -> Millis:
        return 10**12


class NoGraceAtTakeOver(NoGrace):
    """Takes what it finds in the store at take-over for long silent."""

    def on_registered(self, container: str, incarnation: str, now_ms: Millis) -> None:
        super().on_registered(container, incarnation, now_ms - self.profile.failover_ms)

    def _check_own_delays(self, now_ms: Millis) -> Iterator[Alert]:
        self._time_ms = now_ms
        return iter(())


class NoBrake(Liveness):
    """Fails over everybody, however many fall silent together."""

    def _brake(self, now_ms: Millis) -> Iterator[Alert]:
        return iter(())


class _Judging(ShardManager):
    judge: type[Liveness] = Liveness

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._liveness = self.judge(self._profile)


class Graceless(_Judging):
    """With `NoGrace`."""

    judge = NoGrace


class Hasty(_Judging):
    """With `NoGraceAtTakeOver`."""

    judge = NoGraceAtTakeOver


class Brakeless(_Judging):
    """With `NoBrake`."""

    judge = NoBrake


class EarlyFailOver(ShardManager):
    """Fails over when the container's own deadline passes, not one margin later."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._liveness = Liveness(replace(self._profile, failover_ms=self._profile.deadline_ms))


class ForgivesAtOnce(ShardManager):
    """Gives a shard that cost two containers to a third."""

    def _plan(self, mode: Mode, now_ms: Millis) -> MovePlanner:
        plan = super()._plan(mode, now_ms)
        return lambda shards, containers: plan(tuple(replace(row, blame=0) for row in shards), containers)


class OldListsAreFine(ShardManager):
    """Takes "no such task reported" for proof, without asking which list the container has obeyed."""

    def is_stopped(self, job: str, *, generation: int, list_version: int) -> bool:
        return super().is_stopped(job, generation=generation, list_version=0)


# -- in the State Syncer


class IgnoresTerms(LeaderStore):
    """Writes without looking whether another syncer has taken over, or what has moved since it decided."""

    def check_term(self, connection: sa.Connection) -> None:
        pass

    def unchanged(self, connection: sa.Connection, versions: Mapping[str, int]) -> set[str]:
        return set(versions)


class ComparesNothing(PlanStore):
    """Writes without comparing what it decided on."""

    def _check_plan(self, connection: sa.Connection, plan: PlanRow) -> None:
        pass

    def _check_version(self, job: str, version: int, row: RunningRow | None) -> None:
        pass


class ZombieSyncer(StateSyncer):
    """Goes on after another has taken over."""

    leader_store, plan_store = IgnoresTerms, ComparesNothing


class ForgetfulSyncer(StateSyncer):
    """Holds nothing back."""

    plan_store = NoHold


# -- all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted bug, the faults it hides behind, and what must notice it."""

    name: str
    bugs: PlantedBugs
    faults: tuple[str, ...]
    noticed_by: tuple[str, ...]
    write_every_ms: Millis = 3_000
    fault_every_ms: Millis = 5_000
    containers: int = 5
    safety_ms: Millis = 120_000

    def options(self, seed: int) -> ScenarioOptions:
        """Short worlds in which the faults that matter are on."""
        return replace(
            draw_options(seed),
            profile="fast",
            faults=self.faults,
            fault_every_ms=self.fault_every_ms,
            write_every_ms=self.write_every_ms,
            containers=self.containers,
            jobs=6,
            poison_jobs=0,
            safety_ms=self.safety_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Find:
    """The first seed that noticed."""

    mutant: Mutant
    seeds: int  # how many were run
    broken: InvariantBroken | None
    without: InvariantBroken | None = (
        None  # what the same seed shows without the bug: nothing, if all is well
    )

    @property
    def is_as_expected(self) -> bool:
        """Whether it was found, by an invariant that watches over the rule it breaks, and by nothing else."""
        is_found = self.broken is not None and self.broken.name.startswith(self.mutant.noticed_by)
        return is_found and self.without is None


def hunt(mutant: Mutant, *, seeds_max: int = SEEDS_MAX, compares: bool = True, first: int = 0) -> Find:
    """Run seeds until one notices, `first` before the others.

    `compares`: run that seed without the bug too; it must find nothing.
    """
    order = sorted(range(seeds_max), key=lambda seed: (seed != first, seed))
    for tried, seed in enumerate(order, 1):
        broken = _broken(mutant.options(seed), mutant.bugs)
        if broken is not None:
            without = _broken(mutant.options(seed), PlantedBugs()) if compares else None
            return Find(mutant=mutant, seeds=tried, broken=broken, without=without)
    return Find(mutant=mutant, seeds=seeds_max, broken=None)


def _broken(options: ScenarioOptions, bugs: PlantedBugs) -> InvariantBroken | None:
    try:
        run_seed(options.seed, bugs=bugs, options=options)
    except InvariantBroken as broken:
        return broken
    return None


def hunt_all(mutants: Iterable[Mutant], tell: Callable[[str], None]) -> list[Find]:
    """Hunt each, and tell a line about it."""
    finds, width = list[Find](), max(len(mutant.name) for mutant in MUTANTS)
    for mutant in mutants:
        find = hunt(mutant)
        finds.append(find)
        if find.broken is None:
            tell(f"{mutant.name:<{width}}  NOT FOUND in {find.seeds} seeds")
        else:
            odd = "" if find.is_as_expected else f" (expected {' or '.join(mutant.noticed_by)})"
            if find.without is not None:
                odd = f" (and so does the seed without the bug: {find.without.name})"
            after = f"{find.seeds:>2} seed{'s' if find.seeds > 1 else ' '}"
            tell(f"{mutant.name:<{width}}  after {after}  {find.broken.name}{odd}")
    return finds


def _manager(kind: type[ShardManager]) -> PlantedBugs:
    return PlantedBugs(parts=SimParts(shard_manager=kind))


def _store(kind: Any) -> PlantedBugs:
    return PlantedBugs(parts=SimParts(shard_store=kind))


MUTANTS = (
    Mutant(
        name="epochs not compared when an interval is taken",
        bugs=PlantedBugs(checks_epochs=False),
        faults=("container pause",),
        noticed_by=("I2 ",),
        write_every_ms=1_000,
    ),
    Mutant(
        name="tokens not compared when a step commits",
        bugs=PlantedBugs(checks_tokens=False),
        faults=("container pause",),
        noticed_by=("I2 ",),
    ),
    Mutant(
        name="fail-over at the container's deadline",
        bugs=_manager(EarlyFailOver),
        faults=("link cut", "bad network", "container pause"),
        noticed_by=("I6 ", "I3 "),
    ),
    Mutant(
        name="DROP acknowledged before the task is reaped",
        bugs=PlantedBugs(task_manager=AcknowledgesDropAtOnce),
        faults=("container crash", "slow stops"),
        noticed_by=("I3 ",),
    ),
    Mutant(
        name="late replies obeyed: an old ADD undoes a DROP",
        bugs=PlantedBugs(task_manager=ObeysAnyAssignment),
        faults=("bad network", "container crash", "planned work"),
        noticed_by=("I1 ", "I3 ", "I19 "),
    ),
    Mutant(
        name="ADD elsewhere before DROP is acknowledged",
        bugs=_store(AddBeforeDrop),
        faults=("planned work", "container crash"),
        noticed_by=("I3 ", "I1 "),
    ),
    Mutant(
        name="fail-over right after a take-over",
        bugs=_manager(Hasty),
        faults=("control crash",),
        noticed_by=("I6 ",),
    ),
    Mutant(
        name="fail-over right after a pause of our own",
        # Meanwhile containers renew in the store: with a look at their rows nobody would be failed over.
        bugs=PlantedBugs(parts=SimParts(shard_manager=Graceless, shard_store=LeaseUnread)),
        faults=("control pause",),
        noticed_by=("I6 ",),
    ),
    Mutant(
        name="lease counted from receipt",
        bugs=PlantedBugs(lease=LeaseFromReceipt),
        faults=("slow replies",),
        noticed_by=("I3 ",),
    ),
    Mutant(
        name="engine not killed when the lease is over",
        bugs=PlantedBugs(container=OutlivesItsLease),
        faults=("link cut",),
        noticed_by=("I3 ",),
    ),
    Mutant(
        name="renewals in the store not looked at",
        bugs=_store(LeaseUnread),
        faults=("link cut", "link cut one way"),
        noticed_by=("I3 ",),
    ),
    Mutant(
        name="lease renewed while it is withheld",
        bugs=_store(WithheldIsFine),
        faults=("stubborn task",),
        noticed_by=("I3 ",),
        safety_ms=300_000,
    ),
    Mutant(
        name="two containers with one identity",
        bugs=_store(AnyIdentity),
        faults=("same identity",),
        noticed_by=("I3 ",),
    ),
    Mutant(
        name="beats of a superseded incarnation count",
        bugs=_store(BeatsOfAnyLife),
        faults=("bad network", "engine crash", "engine pause"),
        noticed_by=("I3 ", "I6 ", "I1 "),
        write_every_ms=800,
        fault_every_ms=2_500,
    ),
    Mutant(
        name="a replaced Shard Manager goes on writing",
        bugs=_store(AnyTerm),
        faults=("control zombie", "control zombie in a round"),
        noticed_by=("I6 ", "I1 ", "I3 ", "I19 "),
        # A look that moves nothing writes nothing: it takes a while until a zombie has something to write.
        safety_ms=600_000,
    ),
    Mutant(
        name="brake off",
        bugs=_manager(Brakeless),
        faults=("link cut",),
        noticed_by=("I6 the brake holds",),
        containers=6,
    ),
    Mutant(
        name="quarantine of a shard ignored",
        bugs=_manager(ForgivesAtOnce),
        faults=("stubborn task",),
        noticed_by=("I4 a quarantined shard",),
        # A few at a time: with many, each costs one container and none costs two.
        fault_every_ms=60_000,
        write_every_ms=60_000,
        safety_ms=600_000,
        containers=6,
    ),
    Mutant(
        name="warden gives back what its engine runs",
        bugs=PlantedBugs(watchdog=GivesBackForAnyEngine),
        faults=("planned work", "slow stops"),
        noticed_by=("I3 ",),
    ),
    Mutant(
        name="list on disk trusted after a restart",
        bugs=PlantedBugs(task_manager=TrustsItsDisk),
        faults=("engine crash",),
        noticed_by=("I4 ", "I5 "),
    ),
    Mutant(
        name="stop believed without proof",
        bugs=_manager(OldListsAreFine),
        faults=("slow stops",),
        noticed_by=("I3 ",),
        write_every_ms=800,
    ),
    Mutant(
        name="hold not durable",
        bugs=PlantedBugs(parts=SimParts(syncer=ForgetfulSyncer)),
        faults=("slow stops",),
        noticed_by=("I3 ",),
    ),
    Mutant(
        name="a replaced State Syncer goes on writing",
        bugs=PlantedBugs(parts=SimParts(syncer=ZombieSyncer)),
        # Often enough that something has moved while the zombie was away: it looks again before each step.
        faults=("control zombie in a round", "slow stops", "data plane timeouts"),
        noticed_by=("I10 ", "I3 ", "no code fails"),  # whichever comes first; the syncer asserts too
        write_every_ms=1_500,
    ),
)


def main() -> int:
    """Hunts all planted bugs, a line each; returns 1 when one was not found as expected."""
    finds = hunt_all(MUTANTS, lambda line: print(line, flush=True))
    found = [find for find in finds if find.is_as_expected]
    seeds = [find.seeds for find in found]
    worst = f", the last of them after {max(seeds)} seeds" if seeds else ""
    print(f"{len(found)} of {len(finds)} planted bugs found as expected{worst}")
    return 0 if len(found) == len(finds) else 1


if __name__ == "__main__":
    sys.exit(main())
