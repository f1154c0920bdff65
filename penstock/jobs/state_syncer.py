"""The State Syncer: drives what runs to what is expected (Turbine III-B).

A round may be repeated and may crash between any two lines: what is decided is durable before it is acted on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec

from penstock.core.clock import Millis
from penstock.core.errors import DiskFull, Fenced, PenstockError, StoreUnavailable, TaskActionFailed
from penstock.jobs.config import JobConfig, validate_config
from penstock.jobs.job_store import JobOverview, JobRecord, JobStore
from penstock.jobs.layers import DEFAULT_LAYERS, Layer, merge_layers
from penstock.jobs.plan_store import PlanStore, SimpleCommit
from penstock.jobs.ports import DataPlane, TaskActuator
from penstock.jobs.running_store import PlanRow
from penstock.jobs.sync_plan import (
    ComplexSync,
    InSync,
    PlanStep,
    SimpleSync,
    is_active,
    plan_mapping,
    plan_sync,
    step_after,
    why_replace,
)

P = ParamSpec("P")

# The environment's fault, not the plan's: it is tried again for as long as it takes.
TRANSIENT = (StoreUnavailable, DiskFull, TaskActionFailed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerSettings:
    """How patient the syncer is."""

    fence_after_ms: Millis = 10_000  # old tasks that are not known to have stopped by then are fenced
    attempts_max: int = 3  # a plan that failed this often is given up
    batch_jobs: int = 50  # jobs per transaction of simple changes and per read


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one round did, by job."""

    simple: tuple[str, ...] = ()  # a simple change was committed
    complex: tuple[str, ...] = ()  # a plan was committed
    open: tuple[str, ...] = ()  # a plan, or something to retire, is waiting: look again soon
    quarantined: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()  # (job, error)

    @property
    def is_quiet(self) -> bool:
        """Whether the round found nothing to do; quarantined jobs wait for somebody else."""
        return not (self.simple or self.complex or self.open or self.failed)


@dataclass(slots=True)
class _Round:
    simple: list[SimpleCommit] = field(default_factory=list)
    plans: list[JobRecord] = field(default_factory=list)
    retiring: list[JobRecord] = field(default_factory=list)
    simple_done: list[str] = field(default_factory=list)
    complex_done: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    def report(self) -> SyncReport:
        return SyncReport(
            simple=tuple(self.simple_done),
            complex=tuple(self.complex_done),
            open=tuple(self.open),
            quarantined=tuple(self.quarantined),
            failed=tuple(self.failed),
        )


class StateSyncer:
    """Merges, compares and plans for every job, and carries the plans out. The only writer of what runs."""

    def __init__(
        self,
        store: JobStore,
        tasks: TaskActuator,
        data: DataPlane,
        *,
        term: int,
        settings: SyncerSettings | None = None,
        layers: Sequence[Layer] = DEFAULT_LAYERS,
    ) -> None:
        self._store, self._tasks, self._data = store, tasks, data
        self._plans = PlanStore(store.database, term=term)
        self._settings = settings or SyncerSettings()
        self._urgent = frozenset(layer.name for layer in layers if layer.replaces_plan)
        # Jobs seen in sync, and at which versions: they need no closer look until one of them moves.
        self._settled: dict[str, tuple[int, int]] = {}

    def sync_once(self, now_ms: Millis) -> SyncReport:
        """Run one round. Fenced: another syncer has taken over. One bad job never stops the rest."""
        self._plans.check_leader()
        work = _Round()
        for record in self._unsettled():
            self._guarded(work, record, self._decide, now_ms)
        self._commit_simple(work, now_ms)
        for record in work.retiring:
            self._guarded(work, record, self._retire, now_ms)
        for record in work.plans:
            self._guarded(work, record, self._advance, now_ms)
        return work.report()

    def _guarded(
        self,
        work: _Round,
        record: JobRecord,
        act: Callable[[_Round, JobRecord, Millis], object],
        now_ms: Millis,
    ) -> None:
        try:
            act(work, record, now_ms)
        except Fenced:  # only our own writes get here with it: we are not the leader any more
            raise
        except PenstockError as error:
            work.failed.append((record.job.name, str(error)))

    def _unsettled(self) -> Iterator[JobRecord]:
        def is_settled(job: JobOverview) -> bool:
            return (
                self._settled.get(job.name) == (job.expected_version, job.running_version)
                and not job.has_work
            )

        names = [job.name for job in self._store.overview() if not is_settled(job)]
        for start in range(0, len(names), self._settings.batch_jobs):
            records = self._store.load(names[start : start + self._settings.batch_jobs])
            yield from (records[name] for name in sorted(records))

    def _decide(self, work: _Round, record: JobRecord, now_ms: Millis) -> None:
        job = record.job
        if record.plan is not None:
            work.plans.append(record)
            return
        if record.quarantine is not None and record.quarantine.expected_version >= job.expected_version:
            work.quarantined.append(job.name)
            work.retiring.append(record)
            return
        if record.quarantine is not None:
            self._plans.lift_quarantine(job.name, f"expected version {job.expected_version} is newer", now_ms)
        sync = plan_sync(_expected(record), None if record.old is None else record.old.view())
        if isinstance(sync, ComplexSync):
            work.plans.append(record)  # which retires first, where it matters
            return
        work.retiring.append(record)
        if record.old is not None and (
            isinstance(sync, SimpleSync) or record.old.expected_version != job.expected_version
        ):
            work.simple.append(_simple(record, sync))
        else:
            version = 0 if record.running is None else record.running.version
            self._settled[job.name] = (job.expected_version, version)

    def _commit_simple(self, work: _Round, now_ms: Millis) -> None:
        size = self._settings.batch_jobs
        for batch in (work.simple[start : start + size] for start in range(0, len(work.simple), size)):
            try:
                done = set(self._plans.commit_simple(batch, now_ms))
            except Fenced:
                raise
            except PenstockError as error:
                work.failed += [(item.job, str(error)) for item in batch]
                continue
            work.simple_done += [item.job for item in batch if item.job in done and item.config is not None]

    def _advance(self, work: _Round, record: JobRecord, now_ms: Millis) -> None:
        """Take a job's plan as far as it goes now; nothing here waits."""
        name = record.job.name
        plan = self._current_plan(record, now_ms)
        while plan is not None and plan.step is not PlanStep.COMMIT:
            plan = self._next(work, record, plan, now_ms)
        if plan is None:
            return
        self._plans.commit_plan(plan, now_ms)
        work.complex_done.append(name)
        self._retire(work, self._store.load([name])[name], now_ms)

    def _current_plan(self, record: JobRecord, now_ms: Millis) -> PlanRow | None:
        """The plan to go on with: the open one, a newer one in its place, or a new one."""
        old = None if record.old is None else record.old.view()
        try:
            expected = _expected(record)
        except PenstockError:
            if record.plan is None:
                raise
            return record.plan  # what is durable goes on; the bad config is reported once it is its turn
        sync = plan_sync(expected, old)
        if record.plan is None:
            return self._plans.open_plan(record, sync, now_ms) if isinstance(sync, ComplexSync) else None
        urgent = [row for row in record.layers if row.layer in self._urgent]
        why = why_replace(record.plan.target, record.plan.expected_version, expected, urgent)
        if why is None:
            return record.plan
        if isinstance(sync, ComplexSync):
            return self._plans.replace_plan(record, sync, why, now_ms)
        if record.old is None or not record.old.is_held:
            self._plans.drop_plan(record.plan, why, now_ms)
            return None
        # Back to what ran, but its tasks are held already: they come back under a new generation.
        assert expected is not None
        target = expected.to_json()
        again = ComplexSync(target=target, mapping=plan_mapping(target, old), changed=(), reason=why)
        return self._plans.replace_plan(record, again, why, now_ms)

    def _next(self, work: _Round, record: JobRecord, plan: PlanRow, now_ms: Millis) -> PlanRow | None:
        """Do one step and make it durable; None when the plan must wait or is given up."""
        match plan.step:
            case PlanStep.HOLD:
                return self._plans.take_hold(plan, now_ms)
            case PlanStep.PREPARE:
                # A late retirement must not hit what this plan prepares, so it comes first.
                if not self._retire(work, record, now_ms):
                    return None
                assert plan.target is not None
                error = _attempt(self._data.prepare, plan.job, plan.birth, plan.target)
                note = "everything the target needs is there"
            case _:
                if self._is_stopped(work, record, plan):
                    error, note = None, "every old task has stopped"
                elif now_ms - (plan.held_ms or 0) < self._settings.fence_after_ms:
                    work.open.append(plan.job)
                    return None
                else:
                    error, note = self._fence(record, plan), "the old tasks are fenced"
        if error is not None:
            self._fail(work, plan, error, now_ms)
            return None
        step = step_after(plan.step, plan.target, has_old=record.old is not None)
        return self._plans.move_plan(plan, step, now_ms, note=note)

    def _is_stopped(self, work: _Round, record: JobRecord, plan: PlanRow) -> bool:
        assert record.old is not None
        generation, list_version = record.old.generation, plan.running_version
        try:
            return self._tasks.is_stopped(plan.job, generation=generation, list_version=list_version)
        except PenstockError as error:
            # Nobody could say, so it is not proven; the fence is the way out.
            work.failed.append((plan.job, str(error)))
            return False

    def _fence(self, record: JobRecord, plan: PlanRow) -> PenstockError | None:
        assert record.old is not None
        old = record.old.config
        return _attempt(self._data.fence, plan.job, plan.birth, old, generation=plan.generation)

    def _fail(self, work: _Round, plan: PlanRow, error: PenstockError, now_ms: Millis) -> None:
        work.failed.append((plan.job, str(error)))
        # A stop is never given up: the hold is what was asked for, and it stands.
        counts = not isinstance(error, TRANSIENT) and is_active(plan.target)
        if counts and plan.attempts + 1 >= self._settings.attempts_max:
            self._plans.give_up(plan, str(error), now_ms)
            work.quarantined.append(plan.job)
        else:
            self._plans.note_failure(plan, str(error), now_ms, counts=counts)
            work.open.append(plan.job)

    def _retire(self, work: _Round, record: JobRecord, now_ms: Millis) -> bool:
        """Unregister what is not in use any more; True when nothing is left."""
        for item in record.retirements:
            same_life = record.old is not None and record.old.birth == item.birth
            current = record.old.config if record.old is not None and same_life else None
            error = _attempt(self._data.retire, item.job, item.birth, item.config, current)
            if error is not None:
                work.failed.append((item.job, str(error)))
                work.open.append(item.job)
                return False
            self._plans.finish_retirement(item, now_ms)
        return True


def _attempt(call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> PenstockError | None:
    # Kept apart from our own writes: a port that says Fenced does not mean that our term is over.
    try:
        call(*args, **kwargs)
    except PenstockError as error:
        return error
    return None


def _expected(record: JobRecord) -> JobConfig | None:
    if record.job.deleted:
        return None
    return validate_config(record.job.name, merge_layers(record.layers))


def _simple(record: JobRecord, sync: SimpleSync | InSync) -> SimpleCommit:
    assert record.old is not None
    change = sync if isinstance(sync, SimpleSync) else None
    return SimpleCommit(
        job=record.job.name,
        running_version=record.old.version,
        expected_version=record.job.expected_version,
        config=None if change is None else change.target,
        restarts=change is not None and change.restarts,
        reason=sync.reason,
        paths=() if change is None else tuple(item.path for item in change.changed),
    )
