"""The Task Manager of a container: runs the tasks of the task list that belong to its shards (Turbine IV).

A passive machine: heartbeat replies, task lists and time come in; it drives the runner and reports the
result. No threads, no clock, no disk.
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
    """Timeouts, backoff and limits for tasks."""

    stop_timeout_ms: Millis = 10_000  # then the task is killed; repeated after each further timeout
    backoff_ms: Millis = 1_000  # before the first restart; doubles with each failure
    backoff_max_ms: Millis = 60_000
    restarts_max: int = 10  # in a row; then only one restart per `exhausted_ms`
    exhausted_ms: Millis = 300_000
    healthy_ms: Millis = 120_000  # a run of this length resets the restart budget
    list_wait_ms: Millis = 5_000  # how long task starts wait for a newer list that is known to exist


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskManagerReport:
    """The Task Manager's part of a heartbeat."""

    acked: tuple[ShardEntry, ...]
    assignment_version: int
    list_version: int
    tasks: tuple[TaskReport, ...]
    loads: tuple[ShardLoad, ...] = ()
    order: int = 0


@dataclass(slots=True)
class _Run:
    """A run in the runner."""

    spec: TaskSpec
    shard: int
    epoch: int
    started_ms: Millis
    ended_by_us_ms: Millis | None = None  # when we last stopped or killed it
    is_killed: bool = False


@dataclass(slots=True)
class _TaskFailure:
    """The failure state of a wanted task. A newer spec or epoch (another `key`) resets it."""

    key: tuple[int, int, int]
    is_fenced: bool = False
    streak: int = 0  # failures since the last healthy run
    restarts: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # by class; never decreases
    retry_at_ms: Millis = 0
    error: str = ""

    def reset(self, key: tuple[int, int, int]) -> _TaskFailure:
        """The state for a new key: only the counts stay."""
        return _TaskFailure(key=key, restarts=self.restarts, failures=self.failures)


class TaskManager:
    """Starts, stops and restarts the tasks of this container's shards. Requires: a runner without runs."""

    def __init__(
        self,
        runner: Runner,
        *,
        settings: TaskManagerSettings | None = None,
        load_settings: ShardLoadSettings | None = None,
    ) -> None:
        self._runner, self._settings = runner, settings or TaskManagerSettings()
        self._loads = ShardLoadTracker(load_settings)
        self._index = ShardTaskIndex()
        self._is_list_fresh = False  # fetched from the service by this process, not read from the cache
        self._list_version_reaped = 0
        self._list_version_announced = 0
        self._list_late_since_ms: Millis | None = None
        self._term = 0
        self._assignment_version = 0
        self._order = 0  # the newest restart order executed
        self._shards: dict[int, ShardEntry] = {}
        self._shard_count = 0
        self._runs: dict[str, _Run] = {}
        self._failures: dict[str, _TaskFailure] = {}
        self._statuses: dict[str, RunStatus] = {}
        self._wanted: dict[str, tuple[TaskSpec, ShardEntry]] | None = {}
        self._is_stopping = False

    # -- inputs -----------------------------------------------------------------------------------------

    def on_reply(self, reply: HeartbeatReply, now_ms: Millis) -> None:
        """Apply the assignment if it is the newest. Requires: the reply is for a heartbeat of this
        incarnation.
        """
        if self._is_stopping or reply.term < self._term:
            return
        self._term = reply.term
        if reply.verdict is HeartbeatVerdict.REBOOT:
            self.stop_all()
            return
        if reply.verdict is not HeartbeatVerdict.OK:
            return
        self._list_version_announced = max(self._list_version_announced, reply.list_version)
        self._execute_restarts(reply.restarts, now_ms)
        if reply.assignment_version < self._assignment_version:
            return  # a late reply would undo a DROP
        known = self._shards
        self._shards = {
            entry.shard: entry if entry.epoch > _epoch(known.get(entry.shard)) else known[entry.shard]
            for entry in reply.shards
        }
        self._assignment_version, self._shard_count = reply.assignment_version, reply.shard_count
        self._wanted = None

    def _execute_restarts(self, orders: tuple[RestartOrder, ...], now_ms: Millis) -> None:
        for order in orders:
            run, failure = self._runs.get(order.task_id), self._failures.get(order.task_id)
            if order.number <= self._order:
                continue  # executed: the acknowledgement is on its way
            if failure is not None:  # an explicit order overrides the backoff
                failure.is_fenced, failure.streak, failure.retry_at_ms, failure.error = False, 0, 0, ""
            if run is not None and run.ended_by_us_ms is None:
                self._end(order.task_id, run, now_ms)
        self._order = max((self._order, *(order.number for order in orders)))

    def on_task_list(self, update: TaskList, now_ms: Millis, *, cached: bool = False) -> bool:
        """Apply a full list or a delta. False: the delta does not fit, fetch the full list.

        A `cached` list keeps tasks running without the service, but is never acknowledged.
        """
        if self._is_stopping:
            return True
        previous = self._index.full_list
        if not self._index.apply(update):
            return False
        assert self._list is not None, "an applied list is there"
        if previous is not None and self._list.version < previous.version:
            self._list_version_reaped = 0
        self._wanted = None
        self._is_list_fresh = self._is_list_fresh or not cached
        return True

    def stop_all(self) -> None:
        """Stop all tasks for good: this incarnation has ended."""
        self._is_stopping, self._shards, self._wanted = True, {}, {}

    # -- one round --------------------------------------------------------------------------------------

    def tick(self, now_ms: Millis) -> None:
        """One round: collect ended runs, stop unwanted ones, start missing ones."""
        self._reap(now_ms)
        wanted = self._wanted_now()
        for task_id, run in self._runs.items():
            spec, entry = wanted.get(task_id, (None, None))
            if spec is None or entry is None or run.epoch != entry.epoch or needs_restart(run.spec, spec):
                self._end(task_id, run, now_ms)
            elif run.ended_by_us_ms is not None:
                self._end(task_id, run, now_ms)  # wanted again, but this run is already stopping
            else:
                run.spec = spec  # a change without a restart
        for task_id in [task_id for task_id in self._failures if task_id not in wanted]:
            del self._failures[task_id]
        if self._may_start(now_ms):
            for task_id, (spec, entry) in wanted.items():
                if task_id not in self._runs and not self._is_held_back(task_id, spec, entry, now_ms):
                    self._runner.start(spec, shard_epoch=entry.epoch)
                    self._runs[task_id] = _Run(
                        spec=spec, shard=entry.shard, epoch=entry.epoch, started_ms=now_ms
                    )
        self._statuses = {status.task_id: status for status in self._runner.poll()}
        self._loads.observe(
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
        return self._index.full_list

    def _may_start(self, now_ms: Millis) -> bool:
        """Whether tasks may start. With an outdated list only if the newer one does not arrive in time."""
        if self._list is not None and self._list.version >= self._list_version_announced:
            self._list_late_since_ms = None
            return True
        if self._list_late_since_ms is None:
            self._list_late_since_ms = now_ms
        return now_ms - self._list_late_since_ms >= self._settings.list_wait_ms

    def _is_held_back(self, task_id: str, spec: TaskSpec, entry: ShardEntry, now_ms: Millis) -> bool:
        failure = self._failures.get(task_id)
        if failure is None:
            return False
        if failure.key != _key(spec, entry.epoch):  # new code, config, generation or owner: try again
            self._failures[task_id] = failure.reset(_key(spec, entry.epoch))
            return False
        return failure.is_fenced or now_ms < failure.retry_at_ms

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
                status = RunStatus(task_id=task_id, state=RunState.FAILED, error="the runner lost it")
            elif status.state in FINAL:
                self._runner.forget(task_id)
            if status.state in FINAL:
                del self._runs[task_id]
                self._note_end(run, status, now_ms)

    def _note_end(self, run: _Run, status: RunStatus, now_ms: Millis) -> None:
        key, old = _key(run.spec, run.epoch), self._failures.get(run.spec.task_id)
        failure = _TaskFailure(key=key) if old is None else old.reset(key)
        self._failures[run.spec.task_id] = failure
        if (
            status.state is RunState.FENCED
        ):  # not a crash: another task owns the interval, so no restart and no budget used
            failure.is_fenced, failure.error = True, status.error
            return
        if run.ended_by_us_ms is not None:
            return
        is_healthy = now_ms - run.started_ms >= self._settings.healthy_ms
        failure.streak = 1 if is_healthy or old is None or old.key != key else old.streak + 1
        failure.restarts += 1
        failure.error = status.error or "it ended by itself"
        failure.failures = count_failure(failure.failures, failure.error)
        wait_ms = min(
            self._settings.backoff_ms * 2 ** min(failure.streak - 1, 30), self._settings.backoff_max_ms
        )
        if failure.streak > self._settings.restarts_max:
            failure.error = f"{failure.error} (failed {failure.streak} times in a row)"
            wait_ms = self._settings.exhausted_ms
        failure.retry_at_ms = now_ms + wait_ms

    # -- outputs ----------------------------------------------------------------------------------------

    @property
    def list_version(self) -> int:
        """The version of our list."""
        return self._list.version if self._list is not None else 0

    @property
    def task_list(self) -> TaskList | None:
        """Our full list, for the cache."""
        return self._list

    @property
    def is_list_stale(self) -> bool:
        """Whether a newer list is known to exist, or ours is from the cache."""
        return not self._is_list_fresh or self.list_version < self._list_version_announced

    @property
    def all_stopped(self) -> bool:
        """Whether no run is alive."""
        return not self._runs

    def report(self) -> TaskManagerReport:
        """The report for a heartbeat: acknowledged shards, applied list, and the state of the tasks."""
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
            loads=self._loads.report,
            order=self._order,
        )

    def _has_unlisted_runs(self) -> bool:
        for task_id, run in self._runs.items():
            spec = self._index.spec(run.spec.job, task_id)
            if spec is None or needs_restart(run.spec, spec):
                return True
        return False

    def _running_report(self, task_id: str, run: _Run) -> TaskReport:
        status, failure = self._statuses.get(task_id), self._failures.get(task_id)
        state = status.state.value if status is not None else RunState.STARTING.value
        return TaskReport(
            task_id=task_id,
            job=run.spec.job,
            generation=run.spec.generation,
            shard=run.shard,
            state=RunState.STOPPING.value if run.ended_by_us_ms is not None else state,
            running_version=run.spec.running_version,
            error=failure.error if failure is not None else "",
            restarts=failure.restarts if failure is not None else 0,
            failures=failure.failures if failure is not None else {},
            metrics=dict(status.metrics) if status is not None else {},
        )

    def _waiting_report(self, spec: TaskSpec, entry: ShardEntry) -> TaskReport:
        failure = self._failures.get(spec.task_id)
        is_fenced = failure is not None and failure.is_fenced
        is_backing_off = failure is not None and bool(failure.error)
        return TaskReport(
            task_id=spec.task_id,
            job=spec.job,
            generation=spec.generation,
            shard=entry.shard,
            state="fenced" if is_fenced else "backoff" if is_backing_off else "starting",
            error=failure.error if failure is not None else "",
            restarts=failure.restarts if failure is not None else 0,
            failures=failure.failures if failure is not None else {},
        )


def _key(spec: TaskSpec, epoch: int) -> tuple[int, int, int]:
    return (spec.generation, spec.running_version, epoch)


def _epoch(entry: ShardEntry | None) -> int:
    return -1 if entry is None else entry.epoch


class ShardTaskIndex:
    """The task list indexed by shard, updated by deltas: computes the hash once per task, not per change."""

    def __init__(self) -> None:
        self._list: TaskList | None = None
        self._shards = 0
        self._by_shard: dict[int, dict[str, TaskSpec]] = {}
        self._shard_of: dict[str, int] = {}

    @property
    def full_list(self) -> TaskList | None:
        """The current list; None before the first one."""
        return self._list

    def apply(self, update: TaskList) -> bool:
        """Apply a full list or a delta. False: the delta does not fit, the full list is needed."""
        merged = merge_list(self._list, update)
        if merged is None:
            return False
        if merged is self._list:
            return True
        previous = self._list.jobs if self._list is not None else {}
        # In an order that is the same in every process, because tasks start in the order of this index.
        changed: Iterable[str] = (
            {**previous, **merged.jobs} if update.full else (*update.jobs, *update.removed)
        )
        self._list = merged
        for job in changed:
            self._replace(previous.get(job, ()), merged.jobs.get(job, ()))
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
        """The task with this id in the list, None if it is not there."""
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
        new_ids = {spec.task_id for spec in new}
        for spec in old:
            if spec.task_id not in new_ids:
                del self._by_shard[self._shard_of.pop(spec.task_id)][spec.task_id]
        for spec in new:
            shard = self._shard_of.get(spec.task_id)
            if shard is None:
                shard = self._shard_of[spec.task_id] = shard_of(spec.task_id, self._shards)
            self._by_shard.setdefault(shard, {})[spec.task_id] = spec
