"""Has it come to rest as it should? What must hold some time after the last fault (I4, I5, I11, I12)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.jobs.config import validate_config
from penstock.jobs.job_store import JobRecord, JobStore
from penstock.sim.invariants import canonical, fold
from penstock.tasks.messages import ShardState
from penstock.tasks.runner import RunState
from penstock.tasks.sharding import shard_of

if TYPE_CHECKING:
    from penstock.sim.scenario import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What is not as it should be; empty when all is well."""

    problems: tuple[str, ...]


def look(world: World, *, may_balance: bool = False) -> Rest:
    """Compare what people asked for with what lives.

    `may_balance`: the tasks of a shard that is on its way, or has just arrived, may be down. Balancing goes
    on for a while after the last fault; that it ends is another claim.
    """
    store = JobStore(world.database)
    names = [job.name for job in store.overview()]
    records = store.load(names)
    problems: list[str] = []
    wanted: set[str] = set()
    for name in sorted(records):
        record = records[name]
        problems += _plans(record, is_poison=name in world.data_plane_faults.poison)
        problems += _tasks(
            world, record, wanted, world.shard_checker.moving() if may_balance else frozenset()
        )
    for run in world.population.runs.values():
        if run.spec.task_id not in wanted:
            problems.append(f"I5 {run.id} runs, but nobody wants it")
    for shard in world.shard_store.shards():
        is_moving = shard.state is ShardState.DROPPING and not may_balance
        if shard.container is None or is_moving:
            problems.append(f"I4 shard {shard.shard} is not settled")
        elif all(host.is_lost for host in world.hosts() if host.name == shard.container):
            problems.append(f"I4 shard {shard.shard} belongs to {shard.container}, which is lost")
    return Rest(problems=tuple(problems))


def _plans(record: JobRecord, *, is_poison: bool) -> list[str]:
    name, problems = record.job.name, []
    if record.plan is not None:
        problems.append(f"I11 {name} has an open plan at {record.plan.step}: {record.plan.error}")
    if record.old is not None and record.old.is_held:
        problems.append(f"I11 {name} is held")
    if record.quarantine is not None and not is_poison:
        problems.append(f"I11 {name} is quarantined: {record.quarantine.reason}")
    if record.quarantine is not None:
        return problems
    if record.job.deleted:
        if record.old is not None:
            problems.append(f"I12 {name} was removed and is not gone")
        return problems
    expected = validate_config(name, fold(record.layers))
    if record.old is None:
        if expected.state == "running":
            problems.append(f"I12 {name} never started")
    elif canonical(record.old.config) != canonical(expected.to_json()):
        problems.append(f"I12 {name} does not run as expected")
    return problems


def _tasks(world: World, record: JobRecord, wanted: set[str], moving: frozenset[int]) -> list[str]:
    row, problems = record.old, []
    if row is None or row.state != "running" or record.plan is not None:
        return []
    for index in range(row.config["task_count"]):
        task_id = f"{record.job.name}/{index}"
        wanted.add(task_id)
        if shard_of(task_id, world.options.shard_count) in moving:
            continue
        runs = world.population.of(task_id)
        if len(runs) != 1:
            problems.append(f"I4 {task_id} has {len(runs)} live instances")
            continue
        spec = runs[0].spec
        if runs[0].state is not RunState.RUNNING:
            problems.append(f"I4 {task_id} is {runs[0].state}")
        elif spec.generation != row.generation or spec.birth != row.birth:
            problems.append(f"I5 {task_id} runs generation {spec.generation}, not {row.generation}")
        elif (
            spec.config["package"] != row.config["package"]
            or spec.config["arguments"] != row.config["arguments"]
        ):
            problems.append(f"I5 {task_id} runs an old config")
    return problems
