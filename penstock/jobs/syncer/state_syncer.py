"""The State Syncer: brings running configs in line with expected configs (Turbine III-B).

A round may crash at any line and be repeated: each decision is stored before it is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from penstock.core.clock import Millis
from penstock.core.errors import Fenced, PenstockError
from penstock.core.workers import BackgroundExecutor, Finished, InlineExecutor, InlineWorkers, Now, Workers
from penstock.jobs.job_store import JobRecord, JobStore
from penstock.jobs.syncer.batches import (
    BatchResult,
    FastComparer,
    LeaderStore,
    RunningJob,
    SimpleCommit,
    SyncStore,
    commit_simple,
    fast_commit,
    open_plans,
    pass_failpoint,
    simple_commit,
    version_of,
)
from penstock.jobs.syncer.plan_runner import (
    DataPlane,
    PlanOutcome,
    PlanRunner,
    SyncerSettings,
    TaskActuator,
    expected_of,
)
from penstock.jobs.syncer.plan_store import PlanStore
from penstock.jobs.syncer.sync_plan import ComplexSync, SimpleSync, plan_batch, plan_sync

__all__ = ["StateSyncer", "SyncReport", "SyncerSettings"]

FIRST_JOBS = 10
READ_JOBS = 250  # jobs per read: larger batches exceed the CPU cache
Item = TypeVar("Item", SimpleCommit, tuple[JobRecord, ComplexSync])


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """The results of one round, and of plans that finished since the last one, by job."""

    simple: tuple[str, ...] = ()  # a simple change was committed
    complex: tuple[str, ...] = ()  # a plan was committed
    open: tuple[str, ...] = ()  # a plan or a retirement waits or is running: run the next round soon
    quarantined: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()  # (job, error)
    left: int = 0  # jobs that are left to the next round

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to do. Quarantined jobs do not count: they wait for a new config."""
        return not (self.simple or self.complex or self.open or self.failed or self.left)


@dataclass(slots=True)
class _Round:
    now_ms: Millis
    occupied: frozenset[str] = frozenset()  # jobs with a plan, a quarantine or a retirement
    commits: list[SimpleCommit] = field(default_factory=list)  # to be written
    plans: list[tuple[JobRecord, ComplexSync]] = field(default_factory=list)  # to be opened
    runs: list[str] = field(default_factory=list)  # jobs whose plan or retirements must be executed
    retiring: set[str] = field(default_factory=set)
    writing: tuple[Sequence[SimpleCommit], Callable[[], BatchResult]] | None = None  # the running write
    simple: list[str] = field(default_factory=list)
    complex: list[str] = field(default_factory=list)
    open: dict[str, None] = field(default_factory=dict)  # used as an ordered set
    failed: list[tuple[str, str]] = field(default_factory=list)


class StateSyncer:
    """Compares every job's expected config with its running config, and executes plans. The only writer of
    running configs.

    One instance per term. `workers` execute plans, one call per job at a time; syncers of all terms may share
    them. `background` writes a batch and reads the next jobs while this thread decides. `measure_ms` is a
    clock for durations, `reach` is called at each of `FAILPOINTS`.
    """

    leader_store: type[LeaderStore] = LeaderStore
    plan_store: type[PlanStore] = PlanStore

    def __init__(
        self,
        store: JobStore,
        tasks: TaskActuator,
        data: DataPlane,
        *,
        term: int,
        settings: SyncerSettings | None = None,
        workers: Workers[PlanOutcome] | None = None,
        background: BackgroundExecutor | None = None,
        measure_ms: Callable[[], Millis] = lambda: 0,
        reach: Callable[[str], None] = pass_failpoint,
    ) -> None:
        self.term = term
        self._store, self._records = store, SyncStore(store.database)
        self._settings = settings or SyncerSettings()
        self._leader = self.leader_store(store.database, term=term, reach=reach, measure_ms=measure_ms)
        self._plans = self.plan_store(self._leader)
        self._runner = PlanRunner(
            leader=self._leader,
            store=self._store,
            plans=self._plans,
            tasks=tasks,
            data=data,
            settings=self._settings,
        )
        self._measure_ms = measure_ms
        self._workers: Workers[PlanOutcome] = InlineWorkers() if workers is None else workers
        self._background: BackgroundExecutor = InlineExecutor() if background is None else background
        # Plan runs whose result was not collected yet.
        self._started: dict[str, Callable[[Now], PlanOutcome]] = {}
        self._alerted: set[str] = set()  # jobs with an alert about a call that hangs
        # Jobs in sync, with (expected, running) version: skipped until one of the versions changes.
        self._settled: dict[str, tuple[int, int]] = {}
        self._due: set[str] = set()  # jobs to be checked in the next round
        self._quarantined: set[str] = set()
        self._seen_version = 0  # of the counter of expected versions
        self._swept_ms: Millis | None = None
        self._comparer = FastComparer()
        self._batch_jobs = {"simple": self._settings.batch_jobs, "open": self._settings.batch_jobs}

    def sync_once(self, now_ms: Millis) -> SyncReport:
        """Run one round. Fenced: another syncer is the leader. An error of one job does not affect others."""
        self._leader.check()
        work = _Round(now_ms)
        self._collect(work)
        left = self._check_all(work, self._jobs_to_check(now_ms))
        self._write(work, all_of_it=True)
        self._collect(work)
        self._report_unfinished(work)
        return SyncReport(
            simple=tuple(work.simple),
            complex=tuple(work.complex),
            open=tuple(work.open),
            quarantined=tuple(sorted(self._quarantined)),
            failed=tuple(work.failed),
            left=left,
        )

    def _jobs_to_check(self, now_ms: Millis) -> list[str]:
        """Changed jobs, unfinished jobs, and every `sweep_ms` all jobs that are not in sync."""
        changed = self._store.changed_since(self._seen_version)
        if changed.version < self._seen_version:  # another database, or one that was restored from a backup
            self._settled.clear()
            self._swept_ms = None
        # A changed job stays due until it is settled, so that an error loses nothing.
        self._due.update(changed.jobs)
        self._seen_version = changed.version
        if self._swept_ms is None or not 0 <= now_ms - self._swept_ms < self._settings.sweep_ms:
            settled = self._settled
            self._due.update(
                job.name
                for job in self._store.overview()
                if job.has_work or settled.get(job.name) != (job.expected_version, job.running_version)
            )
            self._swept_ms = now_ms
        return sorted(self._due - self._workers.busy() - self._started.keys())

    def _check_all(self, work: _Round, names: Sequence[str]) -> int:
        """Check jobs until the time limit of the round; returns how many are left."""
        if not names:
            return 0
        work.occupied = self._records.occupied()
        began_ms, limit_ms = self._measure_ms(), self._settings.round_ms
        # A small first batch, so that the fast comparison learns the values of a release.
        start, end = 0, FIRST_JOBS
        read = self._read_ahead(work, names[start:end])
        while start < len(names) and (limit_ms is None or self._measure_ms() - began_ms < limit_ms):
            # Reading ahead is safe: a row that changes after the read is left out of its batch.
            running, read = read(), self._read_ahead(work, names[end : end + READ_JOBS])
            self._check_jobs(work, names[start:end], running)
            start, end = end, end + READ_JOBS
        return max(0, len(names) - start)

    def _read_ahead(self, work: _Round, names: Sequence[str]) -> Callable[[], Sequence[RunningJob]]:
        free = [name for name in names if name not in work.occupied]
        return self._background.start(partial(self._records.running_jobs, free)) if free else tuple

    def _check_jobs(self, work: _Round, names: Sequence[str], running: Sequence[RunningJob]) -> None:
        """Decide for some jobs, and write full batches."""
        others = self._check_fast(work, names, running)
        records = self._store.load(others) if others else {}
        for name in others:
            record = records.get(name)
            if record is None:
                self._due.discard(name)
                continue
            try:
                self._decide(work, record)
            except Fenced:
                raise
            except PenstockError as error:
                work.failed.append((name, str(error)))
        self._write(work)

    def _check_fast(self, work: _Round, names: Sequence[str], running: Sequence[RunningJob]) -> list[str]:
        """Decide for jobs that the fast comparison can handle; returns the others."""
        others = set(names)
        for row, expected_version, bodies in running:
            comparison = self._comparer.compare(row.job, bodies, row.config_json)
            if comparison is None:
                continue
            others.discard(row.job)
            self._quarantined.discard(row.job)
            if comparison.difference is not None or row.expected_version != expected_version:
                work.commits.append(fast_commit(row, expected_version, comparison))
            else:
                self._settle(work, row.job, expected_version, row.version)
        return sorted(others)

    def _decide(self, work: _Round, record: JobRecord) -> None:
        job, quarantine = record.job, record.quarantine
        self._quarantined.discard(job.name)
        if record.plan is not None:
            work.runs.append(job.name)
            return
        if record.retirements:
            work.retiring.add(job.name)
        if quarantine is not None and quarantine.expected_version >= job.expected_version:
            self._quarantined.add(job.name)
            self._settle(work, job.name, job.expected_version, version_of(record))
            return
        if quarantine is not None:
            why = f"expected version {job.expected_version} is newer"
            self._plans.lift_quarantine(job.name, why, work.now_ms)
        sync = plan_sync(expected_of(record), None if record.old is None else record.old.view())
        if isinstance(sync, ComplexSync):
            work.plans.append((record, sync))
        elif record.old is not None and (
            isinstance(sync, SimpleSync) or record.old.expected_version != job.expected_version
        ):
            work.commits.append(simple_commit(record, sync))
            if isinstance(sync, SimpleSync):
                self._comparer.learn(record.layers, sync.target)
        else:
            self._settle(work, job.name, job.expected_version, version_of(record))

    def _settle(self, work: _Round, job: str, expected_version: int, running_version: int) -> None:
        if job in work.retiring:
            work.runs.append(job)
        else:
            self._settled[job] = (expected_version, running_version)
            self._due.discard(job)

    def _write(self, work: _Round, *, all_of_it: bool = False) -> None:
        """Write decisions in full batches (`all_of_it`: all of them), and start plans."""
        while self._is_full("simple", work.commits, all_of_it):
            self._finish_writing(work)
            if not self._is_full("simple", work.commits, all_of_it):
                break  # the batch size grew: wait until the batch is full
            batch = self._take_batch("simple", work.commits)
            write = partial(commit_simple, self._leader, batch, now_ms=work.now_ms)
            work.writing = (batch, self._background.start(write))
        if all_of_it:
            self._finish_writing(work)
        while self._is_full("open", work.plans, all_of_it):
            decided = self._take_batch("open", work.plans)
            open_ = partial(open_plans, self._leader, decided, now_ms=work.now_ms)
            opened = self._result(work, "open", [record.job.name for record, _ in decided], open_)
            work.runs += opened.versions
        for name in work.runs:
            plan_run = partial(self._runner.run, name)
            self._workers.start(name, plan_run, work.now_ms)
            self._started[name] = plan_run
        work.runs.clear()

    def _finish_writing(self, work: _Round) -> None:
        """Wait for the running write, and settle its jobs."""
        if work.writing is None:
            return
        (batch, wait), work.writing = work.writing, None
        versions = self._result(work, "simple", [item.job for item in batch], wait).versions
        for item in batch:
            version = versions.get(item.job)
            if version is None:
                continue  # the row changed meanwhile: the next round checks the job again
            self._settle(work, item.job, item.expected_version, version)
            if item.is_change:
                work.simple.append(item.job)

    def _is_full(self, kind: str, items: Sequence[object], all_of_it: bool) -> bool:
        return len(items) >= (1 if all_of_it else self._batch_jobs[kind])

    def _take_batch(self, kind: str, items: list[Item]) -> list[Item]:
        batch = items[: self._batch_jobs[kind]]
        del items[: len(batch)]
        return batch

    def _result(
        self, work: _Round, kind: str, jobs: Sequence[str], wait: Callable[[], BatchResult]
    ) -> BatchResult:
        """The result of a write transaction; adapts the size of the next batch to the time it took."""
        try:
            result = wait()
        except Fenced:
            raise
        except PenstockError as error:
            work.failed += [(job, str(error)) for job in jobs]
            # If one job causes the error, a smaller batch affects fewer others.
            self._batch_jobs[kind] = max(1, self._batch_jobs[kind] // 4)
            return BatchResult(versions={}, took_ms=0)
        self._batch_jobs[kind] = plan_batch(
            self._batch_jobs[kind],
            written=len(jobs),
            took_ms=result.took_ms,
            aim_ms=self._settings.batch_ms,
            jobs_max=self._settings.batch_jobs_max,
        )
        return result

    def _collect(self, work: _Round) -> None:
        """Collect the results of finished plan runs."""
        for finished in self._workers.take_finished():
            self._alerted.discard(finished.key)
            if self._started.get(finished.key) is not finished.work:
                continue  # started in an earlier term: its writes are stored, or were fenced
            del self._started[finished.key]
            outcome = self._outcome(finished, work.now_ms)
            if outcome.fenced is not None:
                raise outcome.fenced
            work.failed += [(outcome.job, error) for error in outcome.failed]
            if outcome.is_committed:
                work.complex.append(outcome.job)
            if outcome.is_quarantined:
                self._quarantined.add(outcome.job)
            # A job whose plan was dropped must be checked again.
            if outcome.is_open or not (outcome.is_committed or outcome.is_quarantined):
                work.open[outcome.job] = None

    def _outcome(self, finished: Finished[PlanOutcome], now_ms: Millis) -> PlanOutcome:
        if finished.result is not None:
            return finished.result
        problem = PenstockError(
            f"the plan of job {finished.key!r} failed with an unexpected error",
            why=f"{type(finished.error).__name__}: {finished.error}",
            fix="look at the log of the control plane, and report this bug",
        )
        return self._runner.fail(finished.key, problem, now_ms)

    def _report_unfinished(self, work: _Round) -> None:
        for name in sorted(self._workers.busy() | self._started.keys()):
            work.open[name] = None
        for stuck in self._workers.stuck():
            problem = PenstockError(
                f"the plan of job {stuck.key!r} is blocked by a call that hangs",
                why=f"the call started {stuck.for_ms // 1000} s ago, and a second one could conflict with it",
                fix="check the bus and the row store; a restart of the control plane repeats the call",
            )
            work.failed.append((stuck.key, str(problem)))
            if stuck.key not in self._alerted:
                self._leader.alert(stuck.key, "job.stuck", str(problem), work.now_ms)
                self._alerted.add(stuck.key)
