"""How long a change takes to reach a large fleet, in simulated time: 2,000 containers, 120,000 tasks.

- release: another package for every job, until the last task runs it; several, at random moments.
- new job: from its creation until all its tasks run, for 100 jobs created at random moments.

Both in two configurations. `paper`: syncer rounds every 30 s, lists cached for 90 s and polled every 60 s.
`notified`: a write wakes the syncer, and the reply to a heartbeat (every 10 s) tells of a newer list.

State Syncer, tables (SQLite), Task Service and 2,000 Task Managers are the real ones; a round of the syncer
takes as long as it does here. Stopping a task takes 0.2 to 2 s, starting one 0.5 to 5 s. A Task Manager is
given only the tasks of its shards: 2,000 copies of the list do not fit into one process. Three of them have
a twin with the whole list, which must come to the same.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.syncer import a_body, expect_change, seed_jobs
from penstock.container.task_manager import TaskManager
from penstock.core.clock import Millis
from penstock.db.database import Database, take_term
from penstock.fleet.messages import HeartbeatReply, HeartbeatVerdict, ShardEntry
from penstock.fleet.shard_load import ShardLoadSettings, shard_of
from penstock.fleet.task_service import TaskList, TaskService
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.running_store import RunningSnapshot, RunningStore
from penstock.jobs.syncer.state_syncer import StateSyncer
from penstock.jobs.tasks import FINAL, RunState, RunStatus, TaskSpec

TASKS_PER_JOB = 4
SHARDS_PER_CONTAINER = 10
ROUND_MS: Millis = 1_000  # of a Task Manager with something to do
LIMITS_S = {"paper": 300.0, "notified": 30.0}
STOP_MS, START_MS = (200, 2_000), (500, 5_000)
DEVELOPER = Actor(name="bench", role="developer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How news travels."""

    name: str
    sync_ms: Millis  # between the syncer's rounds
    ask_ms: Millis  # between two polls, or two heartbeats, of a container
    cache_ms: Millis  # how long the Task Service serves what it has read
    is_notified: bool


SETUPS = (
    Setup(name="paper", sync_ms=30_000, ask_ms=60_000, cache_ms=90_000, is_notified=False),
    Setup(name="notified", sync_ms=30_000, ask_ms=10_000, cache_ms=0, is_notified=True),
)


class Time:
    """Simulated time."""

    def __init__(self) -> None:
        self.now_ms: Millis = 0
        self._heap: list[tuple[Millis, int, Callable[[], None]]] = []
        self._n = 0

    def at(self, when_ms: Millis, action: Callable[[], None]) -> None:
        self._n += 1
        heapq.heappush(self._heap, (max(when_ms, self.now_ms), self._n, action))

    def run_while(self, is_on: Callable[[], bool], *, limit_ms: Millis) -> None:
        """Let things happen until `is_on` says no."""
        while is_on():
            when_ms, _, action = heapq.heappop(self._heap)
            assert when_ms < limit_ms, f"it is not over after {limit_ms} simulated ms"
            self.now_ms = when_ms
            action()


@dataclass(slots=True)
class CachedRows:
    """The running table as a Task Service sees it that reads it again only after a while (Turbine IV-E)."""

    rows: RunningStore
    clock: Time
    cache_ms: Millis
    hidden_until_ms: Millis = 0  # a round of the syncer is under way: what it wrote is not there yet
    _read_ms: Millis = -(10**12)

    def snapshot(self, *, since: int = 0) -> RunningSnapshot:
        is_cached = self.clock.now_ms - self._read_ms < self.cache_ms
        if since and (is_cached or self.clock.now_ms < self.hidden_until_ms):
            return RunningSnapshot(version=since, rows=())
        self._read_ms = self.clock.now_ms
        return self.rows.snapshot(since=since)


class TimedRunner:
    """Starts and stops that take a while, in simulated time."""

    def __init__(self, clock: Time, rng: Random, on_running: Callable[[TaskSpec, Millis], None]) -> None:
        self._clock, self._rng, self._on_running = clock, rng, on_running
        self._runs: dict[str, tuple[RunState, Millis]] = {}  # the state it is in, and until when
        self._seen: dict[str, RunStatus] = {}

    def start(self, spec: TaskSpec, *, shard_epoch: int) -> None:
        assert spec.task_id not in self._runs
        until_ms = self._clock.now_ms + self._rng.randrange(*START_MS)
        self._runs[spec.task_id] = (RunState.STARTING, until_ms)
        self._on_running(spec, until_ms)

    def stop(self, task_id: str) -> None:
        self._runs[task_id] = (RunState.STOPPING, self._clock.now_ms + self._rng.randrange(*STOP_MS))

    def kill(self, task_id: str) -> None:
        self._runs[task_id] = (RunState.STOPPED, self._clock.now_ms)

    def poll(self) -> tuple[RunStatus, ...]:
        for task_id in self._runs:
            state, seen = self._state(task_id), self._seen.get(task_id)
            if seen is None or seen.state is not state:
                self._seen[task_id] = RunStatus(task_id=task_id, state=state)
        return tuple(self._seen.values())

    def forget(self, task_id: str) -> None:
        assert self._state(task_id) in FINAL
        del self._runs[task_id], self._seen[task_id]

    def is_busy(self) -> bool:
        return any(self._state(task_id) is not RunState.RUNNING for task_id in self._runs)

    def _state(self, task_id: str) -> RunState:
        state, until_ms = self._runs[task_id]
        if self._clock.now_ms < until_ms:
            return state
        return {RunState.STARTING: RunState.RUNNING, RunState.STOPPING: RunState.STOPPED}.get(state, state)


class Deals:
    """What of each answer of the Task Service concerns which container: dealt once per answer."""

    def __init__(self, shard_count: int) -> None:
        self._shard_count = shard_count
        self._dealt: dict[tuple[int, int], dict[int, dict[str, tuple[TaskSpec, ...]]]] = {}
        self._shards: dict[str, int] = {}

    def part(self, news: TaskList, container: int, has: Mapping[str, object]) -> TaskList:
        """`has`: the jobs on the list that the container has."""
        key = (0 if news.full else news.since, news.version)
        if key not in self._dealt:
            self._dealt[key] = self._deal(news)
        jobs = self._dealt[key].get(container, {})
        # A job that it has no task of any more is not on its part of the list any more.
        gone = (job for job in has if job not in jobs and (job in news.jobs or job in news.removed))
        removed = () if news.full else tuple(gone)
        return TaskList(version=news.version, full=news.full, jobs=jobs, removed=removed, since=news.since)

    def _deal(self, news: TaskList) -> dict[int, dict[str, tuple[TaskSpec, ...]]]:
        dealt: dict[int, dict[str, tuple[TaskSpec, ...]]] = {}
        for job, specs in news.jobs.items():
            for spec in specs:
                shard = self._shards.get(spec.task_id)
                if shard is None:
                    shard = self._shards[spec.task_id] = shard_of(spec.task_id, self._shard_count)
                jobs = dealt.setdefault(shard // SHARDS_PER_CONTAINER, {})
                jobs[job] = (*jobs.get(job, ()), spec)
        return dealt


class Container:
    """A Task Manager, and the loop that asks for lists and gives it rounds."""

    def __init__(self, fleet: Fleet, number: int, *, has_whole_list: bool = False) -> None:
        self._fleet, self.number, self._has_whole_list = fleet, number, has_whole_list
        on_running = fleet.on_running if not has_whole_list else lambda spec, at_ms: None
        self.runner = TimedRunner(fleet.clock, Random(f"runner {number}"), on_running)
        self.manager = TaskManager(self.runner, load_settings=ShardLoadSettings(sample_ms=600_000))
        self._is_ticking = False

    def begin(self) -> None:
        first = self.number * SHARDS_PER_CONTAINER
        shards = tuple(ShardEntry(shard=first + n, epoch=1) for n in range(SHARDS_PER_CONTAINER))
        self._hear(0, shards)
        self._fetch()
        setup, rng = self._fleet.setup, self._fleet.rng
        self._fleet.clock.at(rng.randrange(setup.ask_ms), self._ask)
        self._shards = shards

    def _ask(self) -> None:
        fleet = self._fleet
        fleet.clock.at(fleet.clock.now_ms + fleet.setup.ask_ms, self._ask)
        if fleet.setup.is_notified:
            self._hear(fleet.service.version(), self._shards)
            if not self.manager.is_list_stale:
                return
        self._fetch()

    def _hear(self, list_version: int, shards: tuple[ShardEntry, ...]) -> None:
        reply = HeartbeatReply(
            verdict=HeartbeatVerdict.OK,
            term=1,
            sequence=1,
            assignment_version=1,
            shards=shards,
            shard_count=self._fleet.shard_count,
            list_version=list_version,
        )
        self.manager.on_reply(reply, self._fleet.clock.now_ms)

    def _fetch(self) -> None:
        fleet = self._fleet
        news = fleet.answer(self.manager.list_version)
        if not self._has_whole_list:
            has = self.manager.task_list.jobs if self.manager.task_list is not None else {}
            news = fleet.deals.part(news, self.number, has)
        assert self.manager.on_task_list(news, fleet.clock.now_ms)
        if not self._is_ticking:
            self._is_ticking = True
            self._tick()

    def _tick(self) -> None:
        clock = self._fleet.clock
        self.manager.tick(clock.now_ms)
        self._is_ticking = self.runner.is_busy()
        if self._is_ticking:
            clock.at(clock.now_ms + ROUND_MS, self._tick)


class Fleet:
    """One configuration from a settled start."""

    def __init__(self, database: Database, setup: Setup, containers: int) -> None:
        self.setup, self.clock, self.rng = setup, Time(), Random(f"fleet {setup.name}")
        self.shard_count = containers * SHARDS_PER_CONTAINER
        store = JobStore(database)
        self.jobs = JobService(store)
        self.rows = CachedRows(RunningStore(database), self.clock, setup.cache_ms)
        self.service = TaskService(self.rows)
        self.syncer = StateSyncer(store, self, self, term=take_term(database, "syncer", setup.name))
        self.deals = Deals(self.shard_count)
        self.awaited: dict[str, str] = {}  # task -> the package that it is to run
        self.ran_ms: dict[str, Millis] = {}  # when a task that was awaited began to work
        self.containers = [Container(self, number) for number in range(containers)]
        chosen = {0, containers // 3, containers - 1}
        self.twins = [Container(self, number, has_whole_list=True) for number in sorted(chosen)]
        self.sync_s = 0.0
        self._sync_due_ms: Millis | None = None
        self._answers: dict[int, dict[int, TaskList]] = {}  # of the newest version

    def begin(self, tasks: Iterable[str]) -> None:
        """Everything runs as expected."""
        self.syncer.sync_once(0)
        self._sync_at(self.rng.randrange(self.setup.sync_ms))
        for container in (*self.containers, *self.twins):
            container.begin()
        self.wait_for(dict.fromkeys(tasks, "r0"))

    def wait_for(self, awaited: Mapping[str, str]) -> None:
        """Let time pass until these tasks run these packages."""
        self.awaited |= awaited
        self.clock.run_while(lambda: bool(self.awaited), limit_ms=self.clock.now_ms + 3_600_000)

    def pass_time(self, duration_ms: Millis) -> None:
        until_ms = self.clock.now_ms + duration_ms
        self.clock.run_while(lambda: self.clock.now_ms < until_ms, limit_ms=until_ms + 10**6)

    def on_running(self, spec: TaskSpec, at_ms: Millis) -> None:
        """A task works from that moment on."""

        def arrive() -> None:
            if self.awaited.get(spec.task_id) == spec.config.code.version:
                del self.awaited[spec.task_id]
                self.ran_ms[spec.task_id] = at_ms

        self.clock.at(at_ms, arrive)

    def answer(self, since: int) -> TaskList:
        """What the Task Service answers; containers that ask the same thing share it."""
        version = self.service.version()
        if version not in self._answers:
            self._answers = {version: {}}
        asked = self._answers[version]
        if since not in asked:
            asked[since] = self.service.snapshot(since or None)
        return asked[since]

    def written(self) -> None:
        """Somebody wrote: told at once, or found in the next round."""
        if self.setup.is_notified:
            self._sync_at(self.clock.now_ms + 200)

    def _sync_at(self, when_ms: Millis) -> None:
        if self._sync_due_ms is None or when_ms < self._sync_due_ms:
            self._sync_due_ms = when_ms
            self.clock.at(when_ms, lambda: self._sync(when_ms))

    def _sync(self, when_ms: Millis) -> None:
        if self._sync_due_ms != when_ms:
            return  # an earlier round took its place
        began = time.perf_counter()
        report = self.syncer.sync_once(self.clock.now_ms)
        took_s = time.perf_counter() - began
        self.sync_s = max(self.sync_s, took_s)
        assert not report.failed
        self._sync_due_ms, self.rows.hidden_until_ms = None, self.clock.now_ms + int(took_s * 1000)
        pause_ms = 100 if report.open or report.left else self.setup.sync_ms
        self._sync_at(self.clock.now_ms + int(took_s * 1000) + pause_ms)

    # The task layer and the data plane, as far as the syncer needs them here: all new jobs, nothing to stop.

    def is_stopped(self, job: str, *, generation: int, list_version: int) -> bool:
        return True

    def prepare(self, job: str, birth: str, config: Mapping[str, Any]) -> None:
        pass

    def fence(self, job: str, birth: str, config: Mapping[str, Any], *, generation: int) -> None:
        pass

    def retire(self, job: str, birth: str, old: Mapping[str, Any], new: Mapping[str, Any] | None) -> None:
        pass

    def check_twins(self) -> None:
        """Who has the whole list runs the same."""
        for twin in self.twins:
            mine = {status.task_id for status in self.containers[twin.number].runner.poll()}
            assert mine == {status.task_id for status in twin.runner.poll()}, f"container {twin.number}"


def measure(
    database: Database,
    setup: Setup,
    names: list[str],
    options: argparse.Namespace,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Both changes in one configuration."""
    fleet = Fleet(database, setup, options.containers)
    tasks = [f"{name}/{index}" for name in names for index in range(TASKS_PER_JOB)]
    fleet.begin(tasks)
    releases: list[float] = []
    for number in range(options.releases):
        fleet.pass_time(fleet.rng.randrange(180_000))
        began_ms, old, new = fleet.clock.now_ms, f"r{number}", f"r{number + 1}"
        expect_change(database, names, f'"version":"{old}"', f'"version":"{new}"')
        fleet.written()
        fleet.wait_for(dict.fromkeys(tasks, new))
        releases += [(fleet.ran_ms[task] - began_ms) / 1000 for task in tasks]
        tell(f"{setup.name}: release {number + 1} took {max(releases[-len(tasks) :]):.0f} simulated seconds")
    new_jobs = _new_jobs(fleet, options.new_jobs)
    fleet.check_twins()
    return {"release": _spread(releases), "new job": _spread(new_jobs), "sync_round_s": fleet.sync_s}


def _new_jobs(fleet: Fleet, count: int) -> list[float]:
    clock, created_ms = fleet.clock, dict[str, Millis]()

    def create(name: str) -> None:
        created_ms[name] = clock.now_ms
        fleet.jobs.create(
            name,
            a_body(name, package="first", task_count=TASKS_PER_JOB),
            birth=f"birth of {name}",
            actor=DEVELOPER,
            reason="bench",
            idempotency_key=f"create {name}",
            now_ms=clock.now_ms,
        )
        fleet.written()

    names = [f"new.job{number:03d}" for number in range(count)]
    for name in names:
        clock.at(clock.now_ms + fleet.rng.randrange(300_000), partial(create, name))
    tasks = {name: [f"{name}/{index}" for index in range(TASKS_PER_JOB)] for name in names}
    fleet.wait_for({task: "first" for name in names for task in tasks[name]})
    return [(max(fleet.ran_ms[task] for task in tasks[name]) - created_ms[name]) / 1000 for name in names]


def _spread(seconds: list[float]) -> dict[str, float]:
    found = sorted(seconds)
    return {"p50_s": statistics.median(found), "p99_s": found[int(0.99 * len(found))], "max_s": found[-1]}


def main() -> int:
    """Measure, print, and with --check fail when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--containers", type=int, default=2_000)
    parser.add_argument("--tasks", type=int, default=120_000)
    parser.add_argument("--new-jobs", type=int, default=100)
    parser.add_argument("--releases", type=int, default=2, help="the slowest task of all of them counts")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--check", action="store_true", help="exit 1 when a limit is missed")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    console = Console(stderr=options.json)
    for setup in SETUPS:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            database = Database(Path(folder) / "store.db")
            names = [f"p{n % 100:02d}.job{n:06d}" for n in range(options.tasks // TASKS_PER_JOB)]
            seed_jobs(database, names, task_count=TASKS_PER_JOB)
            results[setup.name] = measure(database, setup, names, options, console.print)
            database.close()
    missed = [
        f"{name}: the release took {found['release']['max_s']:.0f} s, the limit is {LIMITS_S[name]:.0f} s"
        for name, found in results.items()
        if found["release"]["max_s"] > LIMITS_S[name]
    ]
    _print(console, results, options)
    for line in missed:
        console.print(line)
    if options.json:
        facts = {"bench": "fleet", "tasks": options.tasks, "cpu_s": round(time.process_time(), 1)}
        print(json.dumps({**facts, "results": results, "limits_s": LIMITS_S, "ok": not missed}))
    return 1 if options.check and missed else 0


def _print(console: Console, results: Mapping[str, Mapping[str, Any]], options: argparse.Namespace) -> None:
    title = f"{options.containers:,} containers, {options.tasks:,} tasks; simulated seconds"
    table = Table(title=title, title_justify="left")
    for column in ("configuration", "change", "p50", "p99", "last", "limit"):
        table.add_column(column, justify="left" if column in ("configuration", "change") else "right")
    for name, found in results.items():
        for change, limit in (("release", f"{LIMITS_S[name]:.0f}"), ("new job", "")):
            row = found[change]
            values = [f"{row[key]:.1f}" for key in ("p50_s", "p99_s", "max_s")]
            table.add_row(name, change, *values, limit)
    console.print(table)
    for name, found in results.items():
        console.print(f"{name}: the longest round of the syncer took {found['sync_round_s']:.1f} s")
    console.print(f"{time.process_time():.0f} s of CPU")


if __name__ == "__main__":
    sys.exit(main())
