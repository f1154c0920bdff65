"""Simulated tasks, and a model of the row store that they write to.

A task acquires its intervals when it starts, and commits until it ends, also while it is stopping. Starts and
stops take time; a stop may hang until the kill. The model fences by tokens and records every acquire and
commit in a ledger; the invariants read only that ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.core.clock import Millis
from penstock.core.errors import Fenced, IntervalError, IntervalMissing, PenstockError
from penstock.jobs.config import JobConfig
from penstock.jobs.tasks import FINAL, RunState, RunStatus, TaskSpec, interval_birth
from penstock.sim.simulation import SimAction, SimProcess, Simulation


@dataclass(slots=True)
class Interval:
    """The row of an interval with its owner's pair and token."""

    birth: str
    generation: int = 0
    shard_epoch: int = 0
    token: int = 0
    commits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One successful acquire, fence or commit."""

    kind: str  # acquire | fence | commit
    interval: tuple[str, int]  # (job birth, partition)
    token: int
    run: str  # the run that did it
    at_ms: Millis
    pair: tuple[int, int] = (0, 0)  # generation and shard epoch, of an acquire or a fence


@dataclass(slots=True)
class ModelDataPlane:
    """The `DataPlane` port over rows in memory. `fault(call, job)` may raise before or after the effect."""

    sim: Simulation
    fault: Callable[[str, str], None] = lambda call, job: None
    checks_tokens: bool = True
    checks_epochs: bool = True
    rows: dict[tuple[str, int], Interval] = field(default_factory=dict)
    # The part of the ledger that the invariants have not read yet
    unseen: list[Effect] = field(default_factory=list)
    acquires: int = 0
    commits: int = 0
    refused: int = 0

    def prepare(self, job: str, birth: str, config: JobConfig) -> None:
        """Create the intervals of this config; idempotent."""
        self.fault("prepare", job)
        for partition in range(config.partitions):
            born = interval_birth(birth, config.kind, config.lineage, partition)
            row = self.rows.get((birth, partition))
            if row is None:
                self.rows[birth, partition] = Interval(birth=born)
            elif row.birth != born:
                # The interval is created again: its token must not decrease.
                row.birth, row.token = born, row.token + 1
        self.fault("prepared", job)

    def unread(self, job: str, birth: str, config: JobConfig, category: str, *, is_stopped: bool) -> str:
        """Records are not modelled: everything counts as read."""
        self.fault("unread", job)
        return ""

    def fence(self, job: str, birth: str, config: JobConfig, *, generation: int) -> None:
        """Raise every interval to (generation, 0) under a new token."""
        self.fault("fence", job)
        for partition in range(config.partitions):
            row = self.rows.get((birth, partition))
            if row is None:
                raise IntervalMissing(f"{job}/{partition} has no rows")
            if row.generation >= generation:
                continue
            row.generation, row.shard_epoch, row.token = generation, 0, row.token + 1
            self._write("fence", (birth, partition), row.token, "syncer", (generation, 0))
        self.fault("fenced", job)

    def retire(self, job: str, birth: str, old: JobConfig, new: JobConfig | None) -> None:
        """Producers are not modelled: there is nothing to unregister."""
        self.fault("retire", job)

    def acquire(
        self, birth: str, partition: int, *, born: str, generation: int, shard_epoch: int, run: str
    ) -> int:
        """Take an interval: Fenced unless (generation, shard epoch) >= the stored pair. Returns the token."""
        row = self.rows.get((birth, partition))
        if row is None or row.birth != born:
            raise IntervalMissing(f"interval {birth}/{partition} is missing, or has another birth id")
        if self.checks_epochs and (generation, shard_epoch) < (row.generation, row.shard_epoch):
            self.refused += 1
            raise Fenced(f"interval {birth}/{partition} belongs to a newer owner")
        row.generation, row.shard_epoch, row.token = generation, shard_epoch, row.token + 1
        self.acquires += 1
        self._write("acquire", (birth, partition), row.token, run, (generation, shard_epoch))
        return row.token

    def commit(self, birth: str, partition: int, *, token: int, run: str) -> None:
        """Commit one step of an interval: Fenced unless the token is the stored one."""
        row = self.rows.get((birth, partition))
        if row is None:
            raise IntervalError(f"interval {birth}/{partition} has no row")
        if self.checks_tokens and row.token != token:
            self.refused += 1
            raise Fenced(f"interval {birth}/{partition} has a newer owner")
        row.commits += 1
        self.commits += 1
        self._write("commit", (birth, partition), token, run)

    def _write(
        self, kind: str, interval: tuple[str, int], token: int, run: str, pair: tuple[int, int] = (0, 0)
    ) -> None:
        self.unseen.append(
            Effect(kind=kind, interval=interval, token=token, run=run, at_ms=self.sim.now_ms, pair=pair)
        )


@dataclass(slots=True)
class SimRun:
    """One run of one task in one engine."""

    id: str
    container: str
    incarnation: str
    spec: TaskSpec
    shard_epoch: int
    process: SimProcess
    started_ms: Millis
    state: RunState = RunState.STARTING
    error: str = ""
    tokens: dict[int, int] = field(default_factory=dict)  # partition -> token, once acquired
    is_ending: bool = False
    crash: SimAction = lambda: None  # a fault: the run ends by itself

    @property
    def is_live(self) -> bool:
        """Whether it has not ended."""
        return self.state not in FINAL

    def intervals(self) -> tuple[tuple[str, int], ...]:
        """The intervals that it has acquired."""
        return tuple((self.spec.birth, partition) for partition in self.tokens)


@dataclass(slots=True)
class SimPace:
    """How long starts, stops and commits take in a container, and how often stops hang."""

    start_ms: Millis = 1_500
    stop_ms: Millis = 800
    kill_ms: Millis = 200
    commit_ms: Millis = 2_000
    hang: float = 0.0  # the share of stops that hang until the kill
    stubborn: set[str] = field(default_factory=set)  # task ids that end only with their engine


@dataclass(slots=True)
class LiveRuns:
    """All live runs of the simulated world, for the invariants."""

    runs: dict[str, SimRun] = field(default_factory=dict)
    by_task: dict[str, dict[str, SimRun]] = field(default_factory=dict)
    started: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    on_start: list[Callable[[SimRun], None]] = field(default_factory=list)
    on_stop: list[Callable[[SimRun], None]] = field(default_factory=list)
    on_end: list[Callable[[SimRun], None]] = field(default_factory=list)

    def add(self, run: SimRun) -> None:
        """Add a run that starts."""
        for observer in self.on_start:
            observer(run)
        self.started += 1
        self.runs[run.id] = run
        self.by_task.setdefault(run.spec.task_id, {})[run.id] = run

    def remove(self, run: SimRun) -> None:
        """Remove a run that has ended."""
        if self.runs.pop(run.id, None) is not None:
            del self.by_task[run.spec.task_id][run.id]
            self.ended[run.state.value] += 1
            for observer in self.on_end:
                observer(run)

    def of(self, task_id: str) -> tuple[SimRun, ...]:
        """The live runs of one task, in the order of their start."""
        return tuple(self.by_task.get(task_id, {}).values())


class SimRunner:
    """The `Runner` of one engine process. All its runs end with the process."""

    def __init__(
        self,
        process: SimProcess,
        *,
        container: str,
        incarnation: str,
        data_plane: ModelDataPlane,
        population: LiveRuns,
        pace: SimPace,
    ) -> None:
        self._process, self._data_plane = process, data_plane
        self._container, self._incarnation = container, incarnation
        self._population, self._pace = population, pace
        self._runs: dict[str, SimRun] = {}
        process.on_death.append(self._end_all)

    def start(self, spec: TaskSpec, *, shard_epoch: int) -> None:
        """Start a run."""
        assert spec.task_id not in self._runs, f"{spec.task_id}: the last run was not dropped by `forget`"
        assert self._process.is_alive, "a dead engine starts no run"
        sim = self._process.sim
        run = SimRun(
            id=f"{spec.task_id}#{self._population.started}",
            container=self._container,
            incarnation=self._incarnation,
            spec=spec,
            shard_epoch=shard_epoch,
            process=self._process,
            started_ms=sim.now_ms,
        )
        run.crash = lambda: self._end(run, RunState.FAILED, "crashed by the simulation")
        self._runs[spec.task_id] = run
        self._population.add(run)
        what = f"g{spec.generation} v{spec.running_version} e{shard_epoch}"
        sim.note(f"{self._process.name} starts {run.id} {what}")
        self._later(self._pace.start_ms, run, "acquires", self._acquire)

    def stop(self, task_id: str) -> None:
        """Request a run to stop."""
        run = self._runs.get(task_id)
        if run is None or not run.is_live or run.is_ending:
            return
        for observer in self._population.on_stop:
            observer(run)
        run.state, run.is_ending = RunState.STOPPING, True
        if task_id in self._pace.stubborn:
            return
        if self._process.sim.rng.random() >= self._pace.hang:
            self._later(self._pace.stop_ms, run, "stops", lambda run: self._end(run, RunState.STOPPED))

    def kill(self, task_id: str) -> None:
        """Kill a run."""
        run = self._runs.get(task_id)
        if run is None or not run.is_live or task_id in self._pace.stubborn:
            return
        run.state, run.is_ending = RunState.STOPPING, True
        self._later(self._pace.kill_ms, run, "is killed", lambda run: self._end(run, RunState.STOPPED))

    def poll(self) -> tuple[RunStatus, ...]:
        """The status of every run that was not dropped by `forget`."""
        return tuple(
            RunStatus(task_id=task_id, state=run.state, error=run.error)
            for task_id, run in self._runs.items()
        )

    def forget(self, task_id: str) -> None:
        """Drop a run that has ended."""
        run = self._runs.get(task_id)
        if run is not None:
            assert not run.is_live, f"{run.id} is forgotten while it is {run.state}"
            del self._runs[task_id]

    def _later(self, up_to_ms: Millis, run: SimRun, what: str, action: Callable[[SimRun], None]) -> None:
        delay_ms = self._process.sim.rng.randrange(up_to_ms // 10, up_to_ms + 1)
        self._process.after(delay_ms, f"{run.id} {what}", lambda: action(run) if run.is_live else None)

    def _acquire(self, run: SimRun) -> None:
        if run.is_ending:
            return
        spec = run.spec
        config = spec.config
        try:
            for partition in spec.partitions:
                run.tokens[partition] = self._data_plane.acquire(
                    spec.birth,
                    partition,
                    born=interval_birth(spec.birth, config.kind, config.lineage, partition),
                    generation=spec.generation,
                    shard_epoch=run.shard_epoch,
                    run=run.id,
                )
        except Fenced as error:
            self._end(run, RunState.FENCED, error.what)
            return
        except PenstockError as error:
            self._end(run, RunState.FAILED, error.what)
            return
        run.state = RunState.RUNNING
        self._later(self._pace.commit_ms, run, "commits", self._commit)

    def _commit(self, run: SimRun) -> None:
        try:
            for partition, token in run.tokens.items():
                self._data_plane.commit(run.spec.birth, partition, token=token, run=run.id)
        except Fenced as error:
            self._end(run, RunState.FENCED, error.what)
            return
        self._later(self._pace.commit_ms, run, "commits", self._commit)

    def _end(self, run: SimRun, state: RunState, error: str = "") -> None:
        run.state, run.error = state, error
        self._population.remove(run)
        self._process.sim.note(f"{run.id} ends: {state} {error}")

    def _end_all(self) -> None:
        for run in self._runs.values():
            if run.is_live:
                self._end(run, RunState.FAILED, "the engine died")
