"""Inside a container: makes what runs equal to (task list x owned shards), and says what is so (Turbine IV).

Machine-like: replies, lists and time come in, the runner does the rest. No threads, no clock, no disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.core.clock import Millis
from penstock.fleet.messages import (
    HeartbeatReply,
    HeartbeatVerdict,
    RestartOrder,
    ShardEntry,
    ShardLoad,
    ShardState,
    TaskReport,
    count_failure,
)
from penstock.fleet.shard_load import ShardLoadSettings, ShardLoadTracker, shard_of
from penstock.fleet.task_service import TaskList, merge_list
from penstock.jobs.tasks import FINAL, Runner, RunState, RunStatus, TaskSpec, needs_restart


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskManagerSettings:
    """Patience with tasks."""

    stop_timeout_ms: Millis = 10_000  # then kill, and again after each further one
    backoff_ms: Millis = 1_000  # before the first restart; doubles
    backoff_max_ms: Millis = 60_000
    restarts_max: int = 10  # in a row; then only one try per `exhausted_ms`
    exhausted_ms: Millis = 300_000
    healthy_ms: Millis = 120_000  # a run of this length gives the whole budget back
    list_wait_ms: Millis = 5_000  # how long starts wait for a list that is known to exist


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskManagerReport:
    """What a beat carries of the tasks."""

    acked: tuple[ShardEntry, ...]
    assignment_version: int
    list_version: int
    tasks: tuple[TaskReport, ...]
    loads: tuple[ShardLoad, ...] = ()
    order: int = 0


@dataclass(slots=True)
class _Run:
    """A run that the runner has not forgotten."""

    spec: TaskSpec
    shard: int
    epoch: int
    started_ms: Millis
    ended_by_us_ms: Millis | None = None  # of the last stop or kill
    is_killed: bool = False


@dataclass(slots=True)
class _Trouble:
    """Why a wanted task does not run right now. It ends with a newer spec or epoch: `key`."""

    key: tuple[int, int, int]
    is_fenced: bool = False
    streak: int = 0  # failures since the last healthy run
    restarts: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # by class; only grows
    retry_at_ms: Millis = 0
    error: str = ""

    def again(self, key: tuple[int, int, int]) -> _Trouble:
        """A new chance, of which only the counts remember the last one."""
        return _Trouble(key=key, restarts=self.restarts, failures=self.failures)


class TaskManager:
    """Starts, stops and restarts the tasks of this container's shards. Requires: a runner without runs."""

    def __init__(
        self,
        runner: Runner,
        *,
        settings: TaskManagerSettings | None = None,
        load_pace: ShardLoadSettings | None = None,
    ) -> None:
        self._runner, self._settings = runner, settings or TaskManagerSettings()
        self._book = ShardLoadTracker(load_pace)
        self._index = ShardTaskIndex()
        self._is_list_fresh = False  # given by the service in this life, not read from the cache
        self._list_version_reaped = 0
        self._list_version_told = 0
        self._list_late_since_ms: Millis | None = None
        self._term = 0
        self._assignment_version = 0
        self._order = 0  # the newest restart order obeyed
        self._shards: dict[int, ShardEntry] = {}
        self._shard_count = 0
        self._runs: dict[str, _Run] = {}
        self._troubles: dict[str, _Trouble] = {}
        self._statuses: dict[str, RunStatus] = {}
        self._wanted: dict[str, tuple[TaskSpec, ShardEntry]] | None = {}
        self._is_over = False

    # -- what comes in ----------------------------------------------------------------------------------

    def on_reply(self, reply: HeartbeatReply, now_ms: Millis) -> None:
        """Take the assignment in, if it is newer than all before. Requires: of a beat of this incarnation."""
        if self._is_over or reply.term < self._term:
            return
        self._term = reply.term
        if reply.verdict is HeartbeatVerdict.REBOOT:
            self.stop_all()
            return
        if reply.verdict is not HeartbeatVerdict.OK:
            return
        self._list_version_told = max(self._list_version_told, reply.list_version)
        self._obey(reply.restarts, now_ms)
        if reply.assignment_version < self._assignment_version:
            return  # a late reply would undo a DROP
        known = self._shards
        self._shards = {
            entry.shard: entry if entry.epoch > _epoch(known.get(entry.shard)) else known[entry.shard]
            for entry in reply.shards
        }
        self._assignment_version, self._shard_count = reply.assignment_version, reply.shard_count
        self._wanted = None

    def _obey(self, orders: tuple[RestartOrder, ...], now_ms: Millis) -> None:
        for order in orders:
            run, trouble = self._runs.get(order.task_id), self._troubles.get(order.task_id)
            if order.number <= self._order:
                continue  # done: the answer to it is on its way
            if trouble is not None:  # whoever asks knows better than the backoff
                trouble.is_fenced, trouble.streak, trouble.retry_at_ms, trouble.error = False, 0, 0, ""
            if run is not None and run.ended_by_us_ms is None:
                self._end(order.task_id, run, now_ms)
        self._order = max((self._order, *(order.number for order in orders)))

    def on_task_list(self, news: TaskList, now_ms: Millis, *, cached: bool = False) -> bool:
        """Take a list or a delta in. False: it does not fit, ask for the whole list.

        A `cached` one keeps tasks running without the service, but is never acknowledged.
        """
        if self._is_over:
            return True
        had = self._index.whole
        if not self._index.take(news):
            return False
        assert self._list is not None, "a list that fitted is there"
        if had is not None and self._list.version < had.version:
            self._list_version_reaped = 0
        self._wanted = None
        self._is_list_fresh = self._is_list_fresh or not cached
        return True

    def stop_all(self) -> None:
        """This life is over: nothing is wanted any more, and nothing will be."""
        self._is_over, self._shards, self._wanted = True, {}, {}

    # -- one round --------------------------------------------------------------------------------------

    def tick(self, now_ms: Millis) -> None:
        """Reap what ended, end what is not wanted, start what is missing."""
        self._reap(now_ms)
        wanted = self._wanted_now()
        for task_id, run in self._runs.items():
            spec, entry = wanted.get(task_id, (None, None))
            if spec is None or entry is None or run.epoch != entry.epoch or needs_restart(run.spec, spec):
                self._end(task_id, run, now_ms)
            elif run.ended_by_us_ms is not None:
                self._end(task_id, run, now_ms)  # wanted again, but this run is already on its way out
            else:
                run.spec = spec  # a change that no task needs to restart for
        for task_id in [task_id for task_id in self._troubles if task_id not in wanted]:
            del self._troubles[task_id]
        if self._may_start(now_ms):
            for task_id, (spec, entry) in wanted.items():
                if task_id not in self._runs and not self._is_held_back(task_id, spec, entry, now_ms):
                    self._runner.start(spec, shard_epoch=entry.epoch)
                    self._runs[task_id] = _Run(
                        spec=spec, shard=entry.shard, epoch=entry.epoch, started_ms=now_ms
                    )
        self._statuses = {status.task_id: status for status in self._runner.poll()}
        self._book.observe(
            now_ms,
            (
                (task_id, run.spec.generation, run.shard, run.spec.config, self._statuses[task_id].metrics)
                for task_id, run in self._runs.items()
                if task_id in self._statuses and self._statuses[task_id].state is RunState.RUNNING
            ),
        )

    def _wanted_now(self) -> dict[str, tuple[TaskSpec, ShardEntry]]:
        if self._wanted is None:
            mine = [shard for shard, entry in self._shards.items() if entry.state is ShardState.OWNED]
            found = self._index.tasks_of(mine, self._shard_count) if self._shard_count else ()
            self._wanted = {spec.task_id: (spec, self._shards[shard]) for shard, spec in found}
        return self._wanted

    @property
    def _list(self) -> TaskList | None:
        return self._index.whole

    def _may_start(self, now_ms: Millis) -> bool:
        """A list known to be old is trusted only when the newer one does not come."""
        if self._list is not None and self._list.version >= self._list_version_told:
            self._list_late_since_ms = None
            return True
        if self._list_late_since_ms is None:
            self._list_late_since_ms = now_ms
        return now_ms - self._list_late_since_ms >= self._settings.list_wait_ms

    def _is_held_back(self, task_id: str, spec: TaskSpec, entry: ShardEntry, now_ms: Millis) -> bool:
        trouble = self._troubles.get(task_id)
        if trouble is None:
            return False
        if trouble.key != _key(spec, entry.epoch):  # new code, config, generation or owner: a new chance
            self._troubles[task_id] = trouble.again(_key(spec, entry.epoch))
            return False
        return trouble.is_fenced or now_ms < trouble.retry_at_ms

    def _end(self, task_id: str, run: _Run, now_ms: Millis) -> None:
        if run.ended_by_us_ms is None:
            run.ended_by_us_ms = now_ms
            self._runner.stop(task_id)
        elif now_ms - run.ended_by_us_ms >= self._settings.stop_timeout_ms:
            run.ended_by_us_ms, run.is_killed = now_ms, True
            self._runner.kill(task_id)

    def _reap(self, now_ms: Millis) -> None:
        found = {status.task_id: status for status in self._runner.poll()}
        for task_id, run in list(self._runs.items()):
            status = found.get(task_id)
            if status is None:
                status = RunStatus(
                    task_id=task_id, state=RunState.FAILED, error="the runner does not know it any more"
                )
            elif status.state in FINAL:
                self._runner.forget(task_id)
            if status.state in FINAL:
                del self._runs[task_id]
                self._note_end(run, status, now_ms)

    def _note_end(self, run: _Run, status: RunStatus, now_ms: Millis) -> None:
        key, old = _key(run.spec, run.epoch), self._troubles.get(run.spec.task_id)
        trouble = _Trouble(key=key) if old is None else old.again(key)
        self._troubles[run.spec.task_id] = trouble
        if status.state is RunState.FENCED:  # not a crash: a successor owns it, so no restart and no budget
            trouble.is_fenced, trouble.error = True, status.error
            return
        if run.ended_by_us_ms is not None:
            return
        is_healthy = now_ms - run.started_ms >= self._settings.healthy_ms
        trouble.streak = 1 if is_healthy or old is None or old.key != key else old.streak + 1
        trouble.restarts += 1
        trouble.error = status.error or "it ended by itself"
        trouble.failures = count_failure(trouble.failures, trouble.error)
        wait_ms = min(
            self._settings.backoff_ms * 2 ** min(trouble.streak - 1, 30), self._settings.backoff_max_ms
        )
        if trouble.streak > self._settings.restarts_max:
            trouble.error = f"{trouble.error} (failed {trouble.streak} times in a row)"
            wait_ms = self._settings.exhausted_ms
        trouble.retry_at_ms = now_ms + wait_ms

    # -- what goes out ----------------------------------------------------------------------------------

    @property
    def list_version(self) -> int:
        """Of the list we have: ask the Task Service for what changed since."""
        return self._list.version if self._list is not None else 0

    @property
    def task_list(self) -> TaskList | None:
        """The whole list we have, for the cache."""
        return self._list

    @property
    def is_list_stale(self) -> bool:
        """Whether a newer list is known to exist, or ours is only the cached one."""
        return not self._is_list_fresh or self.list_version < self._list_version_told

    @property
    def all_stopped(self) -> bool:
        """Nothing of any task is alive."""
        return not self._runs

    def report(self) -> TaskManagerReport:
        """What is so: shards recorded or reaped, the list obeyed, the tasks and how they do."""
        busy = {run.shard for run in self._runs.values()}
        acked = tuple(
            entry
            for _, entry in sorted(self._shards.items())
            if entry.state is ShardState.OWNED or entry.shard not in busy
        )
        if self._list is not None and self._is_list_fresh and not self._has_unlisted_runs():
            self._list_version_reaped = self._list.version
        tasks = [self._running_report(task_id, run) for task_id, run in self._runs.items()]
        tasks += [
            self._waiting_report(spec, entry)
            for task_id, (spec, entry) in self._wanted_now().items()
            if task_id not in self._runs
        ]
        return TaskManagerReport(
            acked=acked,
            assignment_version=self._assignment_version,
            list_version=self._list_version_reaped,
            tasks=tuple(sorted(tasks, key=lambda task: task.task_id)),
            loads=self._book.report,
            order=self._order,
        )

    def _has_unlisted_runs(self) -> bool:
        for task_id, run in self._runs.items():
            spec = self._index.spec(run.spec.job, task_id)
            if spec is None or needs_restart(run.spec, spec):
                return True
        return False

    def _running_report(self, task_id: str, run: _Run) -> TaskReport:
        status, trouble = self._statuses.get(task_id), self._troubles.get(task_id)
        state = status.state.value if status is not None else RunState.STARTING.value
        return TaskReport(
            task_id=task_id,
            job=run.spec.job,
            generation=run.spec.generation,
            shard=run.shard,
            state=RunState.STOPPING.value if run.ended_by_us_ms is not None else state,
            running_version=run.spec.running_version,
            error=trouble.error if trouble is not None else "",
            restarts=trouble.restarts if trouble is not None else 0,
            failures=trouble.failures if trouble is not None else {},
            metrics=dict(status.metrics) if status is not None else {},
        )

    def _waiting_report(self, spec: TaskSpec, entry: ShardEntry) -> TaskReport:
        trouble = self._troubles.get(spec.task_id)
        is_fenced = trouble is not None and trouble.is_fenced
        is_backing_off = trouble is not None and bool(trouble.error)
        return TaskReport(
            task_id=spec.task_id,
            job=spec.job,
            generation=spec.generation,
            shard=entry.shard,
            state="fenced" if is_fenced else "backoff" if is_backing_off else "starting",
            error=trouble.error if trouble is not None else "",
            restarts=trouble.restarts if trouble is not None else 0,
            failures=trouble.failures if trouble is not None else {},
        )


def _key(spec: TaskSpec, epoch: int) -> tuple[int, int, int]:
    return (spec.generation, spec.running_version, epoch)


def _epoch(entry: ShardEntry | None) -> int:
    return -1 if entry is None else entry.epoch


class ShardTaskIndex:
    """The task list by shard, kept up by deltas: a hash is computed once per task, not once per change."""

    def __init__(self) -> None:
        self._list: TaskList | None = None
        self._shards = 0
        self._by_shard: dict[int, dict[str, TaskSpec]] = {}
        self._shard_of: dict[str, int] = {}

    @property
    def whole(self) -> TaskList | None:
        """The list as it stands; None before the first one."""
        return self._list

    def take(self, news: TaskList) -> bool:
        """Bring in a list or a delta. False: it does not fit, the whole list is needed."""
        merged = merge_list(self._list, news)
        if merged is None:
            return False
        if merged is self._list:
            return True
        had = self._list.jobs if self._list is not None else {}
        # In an order that is the same in every process: tasks are started in the order they come in here.
        changed: Iterable[str] = {**had, **merged.jobs} if news.full else (*news.jobs, *news.removed)
        self._list = merged
        for job in changed:
            self._replace(had.get(job, ()), merged.jobs.get(job, ()))
        return True

    def tasks_of(self, shards: Iterable[int], shard_count: int) -> Iterable[tuple[int, TaskSpec]]:
        """(shard, task) for every task in one of these shards."""
        if shard_count != self._shards:
            self._shards, self._by_shard, self._shard_of = shard_count, {}, {}
            for specs in (self._list.jobs if self._list is not None else {}).values():
                self._replace((), specs)
        for shard in shards:
            for spec in self._by_shard.get(shard, {}).values():
                yield shard, spec

    def spec(self, job: str, task_id: str) -> TaskSpec | None:
        """The task of that id, as the list has it."""
        shard = self._shard_of.get(task_id)
        if shard is not None:
            return self._by_shard[shard][task_id]
        jobs = self._list.jobs if self._list is not None else {}
        return next((spec for spec in jobs.get(job, ()) if spec.task_id == task_id), None)

    def tasks(self, shard: int) -> Mapping[str, TaskSpec]:
        """The tasks of one shard, by id."""
        return self._by_shard.get(shard, {})

    def _replace(self, old: tuple[TaskSpec, ...], new: tuple[TaskSpec, ...]) -> None:
        if not self._shards:
            return
        kept = {spec.task_id for spec in new}
        for spec in old:
            if spec.task_id not in kept:
                del self._by_shard[self._shard_of.pop(spec.task_id)][spec.task_id]
        for spec in new:
            shard = self._shard_of.get(spec.task_id)
            if shard is None:
                shard = self._shard_of[spec.task_id] = shard_of(spec.task_id, self._shards)
            self._by_shard.setdefault(shard, {})[spec.task_id] = spec
