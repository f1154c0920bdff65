"""The invariants: safety, checked after every event, and liveness after the last fault (I4, I5, I11, I12).

Each checker compares with its own memory, and reads tables only after they were written, to keep checks
cheap.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError
from penstock.fleet.container_store import ContainerRow, ContainerState
from penstock.fleet.liveness import BRAKE_COUNT, BRAKE_FRACTION
from penstock.fleet.messages import ShardEntry, ShardState
from penstock.fleet.shard_load import shard_of
from penstock.fleet.shard_store import BLAME_MAX, ShardRow
from penstock.jobs.config import SYNC_OF, Sync, validate_config
from penstock.jobs.job_store import JobRecord, JobStore
from penstock.jobs.layers import LayerRow
from penstock.jobs.running_store import RunningRow
from penstock.jobs.tasks import RunState
from penstock.sim.data_plane import SimRun

if TYPE_CHECKING:
    from penstock.sim.fleet import Container
    from penstock.sim.scenario import World

COMPLEX = tuple(name for name, sync in SYNC_OF.items() if sync is Sync.COMPLEX)


@dataclass(slots=True)
class ShardChecker:
    """I1: one owner per shard, each change under a larger epoch. I6: no fail-over while heartbeats arrive."""

    world: World
    _shards: dict[int, ShardRow] = field(default_factory=dict)
    _states: dict[tuple[str, str], ContainerRow] = field(default_factory=dict)
    _arrived_ms: dict[tuple[str, str], Millis] = field(default_factory=dict)
    _dropped: dict[tuple[str, str, int], int] = field(default_factory=dict)  # acknowledged, with its epoch
    _moved_ms: dict[int, Millis] = field(default_factory=dict)  # the last change of each shard's record
    _gone_ms: dict[str, Millis] = field(default_factory=dict)  # fail-overs of silent containers
    failovers: int = 0

    def on_arrival(self, container: str, incarnation: str) -> None:
        """A heartbeat reached the active Shard Manager."""
        self._arrived_ms[container, incarnation] = self.world.sim.now_ms

    def on_acked(self, container: str, incarnation: str, acked: tuple[ShardEntry, ...]) -> None:
        """An engine, or its warden before it is ready, acknowledges shards as owned or released."""
        for entry in acked:
            if entry.state is ShardState.DROPPING:
                self._dropped[container, incarnation, entry.shard] = entry.epoch

    def on_start(self, run: SimRun) -> None:
        """A task starts: not allowed on a shard that this engine has released."""
        shard = shard_of(run.spec.task_id, self.world.options.shard_count)
        dropped = self._dropped.get((run.container, run.incarnation, shard), 0)
        wrong = f"{run.id} starts under epoch {run.shard_epoch}, but the shard was dropped at {dropped}"
        self.world.sim.demand(
            "I1 a dropped shard stays dropped", wrong if run.shard_epoch < dropped else None
        )

    def moving(self) -> frozenset[int]:
        """Shards whose row changed recently: they are moving, or their tasks are starting."""
        since_ms = self.world.sim.now_ms - max(6 * self.world.profile.heartbeat_ms, 10_000)
        return frozenset(shard for shard, at_ms in self._moved_ms.items() if at_ms > since_ms)

    def check(self) -> None:
        """Called after every event."""
        if "shards" not in self.world.written:
            return
        self.world.written.discard("shards")
        rows = self.world.shard_store.shards()
        self.world.sim.demand("I1 epochs only grow", self._epochs(rows))
        for container in self.world.shard_store.containers():
            before = self._states.get((container.name, container.incarnation))
            self._states[container.name, container.incarnation] = container
            if before is not None and before.registered_ms != container.registered_ms:
                # A registration that arrived late, after newer incarnations: its earlier heartbeats were
                # refused.
                self._arrived_ms.pop((container.name, container.incarnation), None)
            was_there = before is not None and before.state is not ContainerState.GONE
            if before is not None and was_there and container.state is ContainerState.GONE:
                self.failovers += 1
                self.world.sim.demand(
                    "I6 only silent containers fail over", self._failover(container, before)
                )
                self.world.sim.demand("I6 the brake holds", self._brake(container, before))

    def _epochs(self, rows: tuple[ShardRow, ...]) -> str | None:
        epochs = Counter(row.epoch for row in rows)
        duplicates = [epoch for epoch, count in epochs.items() if count > 1]
        if duplicates:
            return f"epoch {duplicates[0]} was given to two shards"
        for row in rows:
            old, self._shards[row.shard] = self._shards.get(row.shard), row
            # A changed blame does not change the owner.
            if old is None:
                continue
            if (row.epoch, row.container, row.state, row.target) == (
                old.epoch,
                old.container,
                old.state,
                old.target,
            ):
                continue
            self._moved_ms[row.shard] = self.world.sim.now_ms
            if row.epoch <= old.epoch:
                return f"shard {row.shard} changed from {old} to {row}"
            # A fail-over moves a shard directly to its new owner.
            is_given = row.container not in (None, old.container) and old.blame >= BLAME_MAX
            wrong = f"shard {row.shard} is quarantined with blame {old.blame}, but goes to {row.container}"
            self.world.sim.demand("I4 a quarantined shard is not placed", wrong if is_given else None)
        return None

    def _failover(self, now: ContainerRow, before: ContainerRow) -> str | None:
        world = self.world
        if now.known_dead:
            is_alive = any(host.incarnation == now.incarnation for host in world.hosts())
            return f"{now.name} was declared dead but is alive" if is_alive else None
        if before.state is ContainerState.WITHHELD:
            return None  # its heartbeats were not acknowledged for a full interval, on purpose
        arrived_ms = self._arrived_ms.get((now.name, now.incarnation))
        if arrived_ms is None:
            return None
        silence_ms = world.sim.now_ms - arrived_ms
        if silence_ms < 0.98 * world.profile.failover_ms:
            return f"{now.name} was failed over {silence_ms} ms after its last heartbeat arrived"
        return None

    def _brake(self, now: ContainerRow, before: ContainerRow) -> str | None:
        """When many containers fall silent together, each gets one more interval."""
        world, profile = self.world, self.world.profile
        if now.known_dead or before.state is ContainerState.WITHHELD:
            return None
        now_ms = world.sim.now_ms
        lost = {name for name, at_ms in self._gone_ms.items() if now_ms - at_ms < 0.95 * profile.failover_ms}
        self._gone_ms[now.name] = now_ms
        arrived_ms = self._arrived_ms.get((now.name, now.incarnation))
        # After store faults, containers that the brake released may not be failed over yet.
        if arrived_ms is None or world.was_store_bad(3 * profile.failover_ms):
            return None
        rows = [row for row in world.shard_store.containers() if row.may_run and row.state is not _WITHHELD]
        heard = [self._arrived_ms.get((row.name, row.incarnation), now_ms) for row in rows]
        silent = sum(now_ms - at_ms > 1.05 * profile.deadline_ms for at_ms in heard) + 1
        count, total = silent + len(lost), len(rows) + 1 + len(lost)
        silence_ms = now_ms - arrived_ms
        if count < BRAKE_COUNT or count <= BRAKE_FRACTION * total or silence_ms > 1.5 * profile.failover_ms:
            return None
        return f"{now.name} was failed over after {silence_ms} ms, with {count} of {total} silent"

    def on_ending(self, container: Container, incarnation: str, reason: str) -> None:
        """A warden kills its engine: a lease may expire only if neither Shard Manager nor store was
        reachable.
        """
        world, profile = self.world, self.world.profile
        if not reason.startswith("no heartbeat sent"):
            return
        row = self._states.get((container.name, incarnation))
        is_excused = (
            world.was_store_bad(2 * profile.deadline_ms)
            or world.network.was_cut(container.host, "store", 2 * profile.deadline_ms)
            or row is None
            or row.state is not ContainerState.LIVE
            or world.slept(container.warden, 2 * profile.deadline_ms)
            # Before the first acknowledgement no task runs, and the lease is not renewed in the store. Here a
            # late reply starts tasks, but the warden does not count it as contact; over HTTP it is dropped.
            or not container.has_contact
            or not any(run.incarnation == incarnation for run in world.population.runs.values())
        )
        wrong = f"{container.host} lost its lease though it could renew it in the store"
        world.sim.demand("I19 running tasks continue", None if is_excused else wrong)

    def on_stop(self, run: SimRun) -> None:
        """A task is stopped: not allowed while its config is the newest and its shard stays."""
        host, spec = self.world.container(run.container), run.spec
        shard = self._shards.get(shard_of(spec.task_id, self.world.options.shard_count))
        job = self.world.config_checker.running.get(spec.job)
        is_mine = shard is not None and (shard.container, shard.epoch, shard.state) == (
            host.name,
            run.shard_epoch,
            ShardState.OWNED,
        )
        is_current = (
            job is not None
            and (job.birth, job.generation, job.restart_version)
            == (spec.birth, spec.generation, spec.running_version)
            and job.state == "running"
            and job.hold_generation < job.generation
        )
        wrong = f"{run.id} is stopped on {host.host}, though neither its config nor its shard changed"
        self.world.sim.demand("I19 no needless stops", wrong if is_mine and is_current else None)


_WITHHELD = ContainerState.WITHHELD


@dataclass(slots=True)
class EffectChecker:
    """I2: no commit under an older token. I3: no two owners at once, unless a process was paused."""

    world: World
    overlap_ms: Millis = 0  # of the excused ones, from the successor's acquire to the old instance's end
    excused: Counter[str] = field(default_factory=Counter)
    _tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    _pairs: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)  # generation, shard epoch
    _fenced: dict[tuple[str, int], int] = field(default_factory=dict)  # the last token a fence gave
    _holders: dict[tuple[str, int], list[SimRun]] = field(default_factory=dict)
    _overlap_since_ms: dict[str, Millis] = field(default_factory=dict)

    def on_end(self, run: SimRun) -> None:
        """A run ended, and with it any overlap with its successor."""
        since_ms = self._overlap_since_ms.pop(run.id, None)
        if since_ms is not None:
            self.overlap_ms += self.world.sim.now_ms - since_ms

    def check(self) -> None:
        """Called after every event."""
        sim, effects = self.world.sim, self.world.data_plane.unseen
        if not effects:
            return
        for effect in effects:
            newest = self._tokens.get(effect.interval, 0)
            if effect.kind == "commit":
                late = f"{effect.run} committed {effect.interval} under token {effect.token}, {newest} is out"
                sim.demand("I2 old tokens are void", late if effect.token < newest else None)
                continue
            grown = f"token {effect.token} of {effect.interval} follows {newest}"
            sim.demand("I2 tokens grow", grown if effect.token <= newest else None)
            self._tokens[effect.interval] = effect.token
            before, self._pairs[effect.interval] = self._pairs.get(effect.interval, (0, 0)), effect.pair
            older = f"{effect.run} took {effect.interval} under {effect.pair}, {before} had it"
            sim.demand("I2 old epochs take nothing", older if effect.pair < before else None)
            if effect.kind == "fence":
                self._fenced[effect.interval] = effect.token
            else:
                sim.demand("I3 one instance at a time", self._overlap(effect.interval, effect.run))
        effects.clear()

    def _overlap(self, interval: tuple[str, int], run_id: str) -> str | None:
        run = self.world.population.runs.get(run_id)
        holders = [other for other in self._holders.get(interval, ()) if other.is_live and other.id != run_id]
        self._holders[interval] = [*holders, *([run] if run is not None else [])]
        for other in holders:
            excuse = self._excuse(other, interval)
            if excuse is None:
                return f"{run_id} takes {interval} while {other.id} lives on {other.container}"
            self.excused[excuse] += 1
            self._overlap_since_ms.setdefault(other.id, self.world.sim.now_ms)
        return None

    def _excuse(self, other: SimRun, interval: tuple[str, int]) -> str | None:
        if other.tokens[interval[1]] < self._fenced.get(interval, 0):
            return "fenced by its plan"
        return "paused" if self.was_paused(other) else None

    def was_paused(self, other: SimRun) -> bool:
        """Whether its engine or its warden was paused long enough to outlive a lease."""
        warden = self.world.container(other.container).warden
        return any(
            self.world.slept(process, 2 * self.world.profile.failover_ms)
            for process in (other.process, warden)
        )


@dataclass(slots=True)
class ConfigChecker:
    """I9, I10: a running config is exactly one expected config; generations grow with each complex change."""

    world: World
    _store: JobStore
    _versions: dict[str, int] = field(default_factory=dict)
    _allowed: dict[str, set[str]] = field(default_factory=dict)  # job birth -> all merged configs it had
    running: dict[str, RunningRow] = field(default_factory=dict)
    # (job, restart version) -> configs: a live change gives another one without a restart.
    _served: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    _seen_version: int = 0

    def check(self) -> None:
        """Called after every event."""
        written = self.world.written
        if "layers" in written:
            written.discard("layers")
            self._read_expected()
        if "running" in written:
            written.discard("running")
            version, rows = self._store.running.changed_rows(self._seen_version)
            self._seen_version = version
            for row in rows:
                self.world.sim.demand("I10 running is old or new, entire", self._row(row))
                self.world.sim.demand("I3 a plan commits after the old tasks", self._surviving_run(row))
                self.running[row.job] = row
                self._served.setdefault((row.job, row.restart_version), set()).add(
                    canonical(json.loads(row.config_json))
                )

    def on_start(self, run: SimRun) -> None:
        """A task starts: its config must be exactly one that was committed."""
        spec = run.spec
        served = self._served.get((spec.job, spec.running_version), set())
        is_served = canonical(json.loads(spec.config_json)) in served
        wrong = f"{run.id} runs a config that was never served as version {spec.running_version}"
        self.world.sim.demand("I10 tasks get what runs", None if is_served else wrong)

    def _read_expected(self) -> None:
        changed = [
            job.name for job in self._store.overview() if job.expected_version != self._versions.get(job.name)
        ]
        for name, record in self._store.load(changed).items():
            self._versions[name] = record.job.expected_version
            try:
                merged = validate_config(name, fold(record.layers)).to_json()
            except PenstockError as error:
                self.world.sim.demand("I9 every version is valid", f"{name}: {error}")
                return
            self.world.sim.demand("I9 every version is valid", None)
            self._allowed.setdefault(record.job.birth, set()).add(canonical(merged))

    def _surviving_run(self, row: RunningRow) -> str | None:
        old = self.running.get(row.job)
        if old is None or row.generation == old.generation:
            return None
        for run in self.world.population.runs.values():
            if (
                run.spec.job != row.job
                or run.spec.birth != row.birth
                or run.spec.generation >= row.generation
            ):
                continue
            rows = [
                self.world.data_plane.rows[run.spec.birth, partition] for partition in run.spec.partitions
            ]
            is_fenced = all(interval.generation >= row.generation for interval in rows)
            if not is_fenced and not self.world.effect_checker.was_paused(run):
                return f"{row.job} moved to generation {row.generation} while {run.id} lives, unfenced"
        return None

    def _row(self, row: RunningRow) -> str | None:
        old = self.running.get(row.job)
        allowed = self._allowed.get(row.birth, ())
        if row.state != "removed" and canonical(json.loads(row.config_json)) not in allowed:
            return f"{row.job} runs a config that no version of its layers ever gave"
        if row.state == "running" and len(row.mapping) != row.config.partitions:
            return f"{row.job} maps {len(row.mapping)} of {row.config.partitions} partitions"
        if row.state == "running" and sorted(set(row.mapping)) != list(range(row.config.task_count)):
            return f"{row.job} maps partitions to {sorted(set(row.mapping))}, not to its tasks"
        if old is None:
            return None
        if row.generation < old.generation:
            return f"{row.job} went from generation {old.generation} to {row.generation}"
        same = row.birth == old.birth and row.mapping == old.mapping
        same = same and all(getattr(row.config, name) == getattr(old.config, name) for name in COMPLEX)
        if not same and row.generation == old.generation:
            return f"{row.job} changed its mapping or a complex field inside generation {row.generation}"
        return None


def fold(layers: tuple[LayerRow, ...]) -> dict[str, Any]:
    """The checkers' own merge of layers: lowest first, maps merge, other values are replaced."""
    merged: dict[str, Any] = {}
    for row in sorted(layers, key=lambda row: row.precedence):
        _merge_into(merged, row.body)
    return merged


def _merge_into(bottom: dict[str, Any], top: Mapping[str, Any]) -> None:
    for key, value in top.items():
        if isinstance(value, Mapping) and isinstance(bottom.get(key), dict):
            _merge_into(bottom[key], value)
        else:
            bottom[key] = json.loads(json.dumps(value))


def canonical(config: Mapping[str, Any]) -> str:
    """A config as canonical text: equal for equal configs."""
    return json.dumps(config, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestState:
    """The differences from the expected state; empty when all is well."""

    problems: tuple[str, ...]


def check_at_rest(world: World, *, may_balance: bool = False) -> RestState:
    """Compare the expected state of the world with the actual one.

    `may_balance`: tasks of a shard that is moving or has just moved may be down. Balancing continues for a
    while after the last fault; another check requires that it ends.
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
            problems.append(f"I5 {run.id} runs, but no job expects it")
    for shard in world.shard_store.shards():
        is_moving = shard.state is ShardState.DROPPING and not may_balance
        if shard.container is None or is_moving:
            problems.append(f"I4 shard {shard.shard} is not settled")
        elif all(host.is_lost for host in world.hosts() if host.name == shard.container):
            problems.append(f"I4 shard {shard.shard} belongs to {shard.container}, which is lost")
    return RestState(problems=tuple(problems))


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
            problems.append(f"I12 {name} was removed, but its row still exists")
        return problems
    expected = validate_config(name, fold(record.layers))
    if record.old is None:
        if expected.state == "running":
            problems.append(f"I12 {name} never started")
    elif record.old.config != expected:
        problems.append(f"I12 {name} does not run as expected")
    return problems


def _tasks(world: World, record: JobRecord, wanted: set[str], moving: frozenset[int]) -> list[str]:
    row, problems = record.old, []
    if row is None or row.state != "running" or record.plan is not None:
        return []
    for index in range(row.config.task_count):
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
        elif (spec.config.package, spec.config.arguments) != (row.config.package, row.config.arguments):
            problems.append(f"I5 {task_id} runs an old config")
    return problems
