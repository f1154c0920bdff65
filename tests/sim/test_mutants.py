"""Planted bugs: each takes one rule away, and some seed must notice. A simulation that finds none is blind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.machine import Step
from penstock.jobs.job_store import JobRecord
from penstock.jobs.leader_store import LeaderStore
from penstock.jobs.plan_store import PlanStore
from penstock.jobs.running_store import PLANS, PlanRow, RunningRow
from penstock.jobs.state_syncer import StateSyncer
from penstock.jobs.sync_plan import PlanStep
from penstock.sim.control import Parts
from penstock.sim.options import Options, draw_options
from penstock.sim.scenario import Bugs, run_seed
from penstock.sim.simulation import InvariantBroken
from penstock.tasks.lease import Lease, Stop
from penstock.tasks.liveness import Alert, Liveness
from penstock.tasks.messages import HeartbeatReply
from penstock.tasks.shard_manager import ShardManager
from penstock.tasks.task_manager import Report, TaskManager

SEEDS_MAX = 12


class LeaseFromReceipt(Lease):
    """Counts from the arrival of the acknowledgement: a late reply then eats the margin."""

    def on_ack(self, reply: HeartbeatReply, now_ms: Millis) -> Step[Stop]:
        self.on_sent(reply.sequence, now_ms)
        return super().on_ack(reply, now_ms)


class AcknowledgesDropAtOnce(TaskManager):
    """Says "reaped" when it has only asked for the stop."""

    def report(self) -> Report:
        honest = super().report()
        entries = (entry for _, entry in sorted(self._shards.items()))
        return replace(honest, acked=tuple(entries))


class ObeysAnyAssignment(TaskManager):
    """Applies a late reply too: it undoes a DROP."""

    def on_reply(self, reply: HeartbeatReply, now_ms: Millis) -> None:
        self._assignment_version = 0
        self._shards = {shard: replace(entry, epoch=-1) for shard, entry in self._shards.items()}
        super().on_reply(reply, now_ms)


class NoGrace(Liveness):
    """Holds its own pause against the containers."""

    @property
    def stall_ms(self) -> Millis:
        return 10**12


class GracelessManager(ShardManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._liveness = NoGrace(self._profile)


class NoGraceAtTakeOver(NoGrace):
    """Takes what it finds in the store at take-over for long silent."""

    def on_registered(self, container: str, incarnation: str, now_ms: Millis) -> None:
        super().on_registered(container, incarnation, now_ms - self.profile.failover_ms)

    def _look_at_ourselves(self, now_ms: Millis) -> Iterator[Alert]:
        self._time_ms = now_ms
        return iter(())


class HastyManager(ShardManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._liveness = NoGraceAtTakeOver(self._profile)


class IgnoresTerms(LeaderStore):
    """Writes without looking whether another syncer has taken over, or what has moved since it decided."""

    def check_term(self, connection: sa.Connection) -> None:
        pass

    def unmoved(self, connection: sa.Connection, versions: Mapping[str, int]) -> set[str]:
        return set(versions)


class ComparesNothing(PlanStore):
    """Writes without comparing what it decided on."""

    def _check_plan(self, connection: sa.Connection, plan: PlanRow) -> None:
        pass

    def _check_version(self, job: str, version: int, row: RunningRow | None) -> None:
        pass


class ZombieSyncer(StateSyncer):
    leader_store, plan_store = IgnoresTerms, ComparesNothing


class NoHold(PlanStore):
    """Takes note of the hold in the plan, but leaves the level away: the task list goes on to serve the old tasks."""

    def take_hold(self, record: JobRecord, now_ms: Millis) -> None:
        plan = record.plan
        assert plan is not None
        with self._leader.writing("hold") as connection:
            connection.execute(
                sa.update(PLANS).where(PLANS.c.job == plan.job).values(step=str(PlanStep.COMMIT))
            )


class ForgetfulSyncer(StateSyncer):
    plan_store = NoHold


class OldListsAreFine(ShardManager):
    """Takes "no such task reported" for proof, without asking which list the container has obeyed."""

    def is_stopped(self, job: str, *, generation: int, list_version: int) -> bool:
        return super().is_stopped(job, generation=generation, list_version=0)


def found_by(bugs: Bugs, options: Callable[[int], Options]) -> InvariantBroken | None:
    for seed in range(SEEDS_MAX):
        try:
            run_seed(seed, bugs=bugs, options=options(seed))
        except InvariantBroken as broken:
            return broken
    return None


def with_faults(*faults: str, write_every_ms: Millis = 3_000) -> Callable[[int], Options]:
    """Short worlds in which the faults that matter for this bug are on."""

    def options(seed: int) -> Options:
        drawn = draw_options(seed)
        return replace(
            drawn,
            profile="fast",
            faults=faults,
            fault_every_ms=5_000,
            write_every_ms=write_every_ms,
            containers=5,
            jobs=6,
            poison_jobs=0,
            safety_ms=120_000,
        )

    return options


@pytest.mark.parametrize(
    ("bugs", "options", "invariant"),
    [
        (Bugs(checks_tokens=False), with_faults("container pause"), "I2"),
        (Bugs(lease=LeaseFromReceipt), with_faults("slow replies"), "I3"),
        (Bugs(task_manager=AcknowledgesDropAtOnce), with_faults("container crash", "slow stops"), "I3"),
        (Bugs(task_manager=ObeysAnyAssignment), with_faults("bad weather", "container crash"), "I1"),
        (Bugs(parts=Parts(shard_manager=GracelessManager)), with_faults("control pause"), "I6"),
        (Bugs(parts=Parts(shard_manager=HastyManager)), with_faults("control crash"), "I6"),
        (
            Bugs(parts=Parts(syncer=ZombieSyncer)),
            # Often enough that something has moved while the zombie was away: it looks again before each step.
            with_faults(
                "control zombie in a round", "slow stops", "data plane timeouts", write_every_ms=1_500
            ),
            ("I10", "I3", "no code fails"),  # whichever comes first; the syncer asserts too
        ),
        (Bugs(parts=Parts(syncer=ForgetfulSyncer)), with_faults("slow stops"), "I3"),
        (
            Bugs(parts=Parts(shard_manager=OldListsAreFine)),
            with_faults("slow stops", write_every_ms=800),
            "I3",
        ),
    ],
    ids=[
        "token check off",
        "lease from receipt",
        "drop acknowledged at once",
        "late replies obeyed",
        "no grace after a pause",
        "no grace after a take-over",
        "neither term nor version checked",
        "hold not durable",
        "stop without proof",
    ],
)
def test_a_planted_bug_is_found(
    bugs: Bugs, options: Callable[[int], Options], invariant: str | tuple[str, ...]
):
    broken = found_by(bugs, options)
    assert broken is not None, f"{SEEDS_MAX} seeds did not notice"
    assert broken.name.startswith(invariant), str(broken)
    assert f"replay with seed {broken.seed}" in str(broken)
