"""Executes the plan of one job: calls the task layer and the data plane, and stores each finished step.

Every step starts from the stored state, so it can be repeated after a crash, also with another target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ParamSpec, Protocol

from penstock.core.clock import Millis
from penstock.core.errors import DiskFull, Fenced, NotYet, PenstockError, StoreUnavailable, TaskActionFailed
from penstock.core.workers import Now
from penstock.jobs.config import JobConfig, validate_config
from penstock.jobs.job_store import JobRecord, JobStore
from penstock.jobs.layers import merge_layers
from penstock.jobs.running_store import PlanRow, Retirement, RunningRow
from penstock.jobs.syncer.batches import LeaderStore
from penstock.jobs.syncer.plan_store import PlanStore
from penstock.jobs.syncer.sync_plan import (
    CategoryEnd,
    ComplexSync,
    PlanStep,
    category_end,
    dropped_inputs,
    is_active,
    plan_mapping,
    plan_sync,
    why_replace,
)


class TaskActuator(Protocol):
    """What the syncer needs from the task layer."""

    def is_stopped(self, job: str, *, generation: int, list_version: int) -> bool:
        """True when no task of `job` with a generation <= `generation` runs any more.

        Proof, for each container: it acknowledged a task list >= `list_version` and reaped the tasks that are
        not in it, or its lease has expired. A guess or a timeout is no proof.
        """


class DataPlane(Protocol):
    """What the syncer needs from the bus and the row store."""

    def prepare(self, job: str, birth: str, config: JobConfig) -> None:
        """Create what tasks of this config open: categories, intervals, producer registrations."""

    def unread(self, job: str, birth: str, config: JobConfig, category: str, *, is_stopped: bool) -> str:
        """Why the tasks of `config` have not read this input to its end; "" if they have.

        An input has an end when it has no registered producer any more, or its producers are stopped.
        """

    def fence(self, job: str, birth: str, config: JobConfig, *, generation: int) -> None:
        """Raise every interval of `config` to (generation, 0) with a new token, and its producers with it."""

    def retire(self, job: str, birth: str, old: JobConfig, new: JobConfig | None) -> None:
        """Unregister the producers that `old` has and `new` does not have (None: the job is removed).

        NotYet while productions of `old` are not published yet.
        """


P = ParamSpec("P")

STEPS_MAX = 20  # per run; a plan has four, unless it is replaced meanwhile
# Errors of the environment, not of the plan: retried without limit.
TRANSIENT = (StoreUnavailable, DiskFull, NotYet, TaskActionFailed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerSettings:
    """Timeouts, retries and batch sizes of the State Syncer."""

    fence_after_ms: Millis = 10_000  # old tasks whose stop is not confirmed by then are fenced
    attempts_max: int = 3  # after this many failures a plan is given up
    batch_jobs: int = 200  # initial batch size; then it follows the measured time
    batch_jobs_max: int = 2_000
    batch_ms: Millis = 100  # target time of a batch's write transaction
    sweep_ms: Millis = 30_000  # all jobs are compared this often, changed or not
    round_ms: Millis | None = None  # after this time, a round starts no new batch of jobs


@dataclass(slots=True)
class PlanOutcome:
    """The result of one run of a job's plan."""

    job: str
    is_committed: bool = False
    is_open: bool = False  # it waits: run it again in the next round
    is_quarantined: bool = False
    failed: list[str] = field(default_factory=list)
    fenced: Fenced | None = None  # this syncer is no longer the leader


@dataclass(slots=True)
class _PlanRun:
    """One run of one job's plan; `record` None: to be read from the store."""

    outcome: PlanOutcome
    now: Now
    record: JobRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRunner:
    """Executes the steps of plans that are possible now. It does not wait, but its calls may block."""

    leader: LeaderStore
    store: JobStore
    plans: PlanStore
    tasks: TaskActuator
    data: DataPlane
    settings: SyncerSettings

    def run(self, job: str, now: Now) -> PlanOutcome:
        """Execute the steps of a job's plan, then its retirements."""
        outcome = PlanOutcome(job)
        try:
            self.leader.check()  # it may have been queued until after the end of the term
            run = _PlanRun(outcome, now)
            for _ in range(STEPS_MAX):
                run.record = run.record or self.store.load([job]).get(job)
                if run.record is None or not self._step(run, run.record):
                    return outcome
            outcome.is_open = True  # the plan is replaced again and again: the next round continues
        except Fenced as error:  # raised by our own writes: this syncer is not the leader any more
            outcome.fenced = error
        except PenstockError as error:
            outcome.failed.append(str(error))
        return outcome

    def fail(self, job: str, error: PenstockError, now_ms: Millis) -> PlanOutcome:
        """Record an unexpected error as a failure of the job's plan."""
        outcome = PlanOutcome(job, failed=[str(error)])
        try:
            record = self.store.load([job]).get(job)
            if record is not None and record.plan is not None:
                self._fail(outcome, record.plan, error, now_ms)
        except Fenced as fenced:
            outcome.fenced = fenced
        except PenstockError as store_error:
            outcome.failed.append(str(store_error))
        return outcome

    def _step(self, run: _PlanRun, record: JobRecord) -> bool:
        """Execute one step; False if there is none, or none that is possible now."""
        plan = record.plan
        if plan is None:
            self._retire(run, record)
            return False
        if self._replace_if_urgent(record, plan, run.now()):
            run.record = None
            return True
        match plan.step:
            case PlanStep.PREPARE:
                return self._prepare(run, record, plan)
            case PlanStep.HOLD:
                run.record = self.plans.take_hold(record, run.now())
                return True
            case PlanStep.CONFIRM:
                return self._confirm(run, record, plan)
            case _:  # stored by an earlier version, which stored COMMIT as a step of its own
                return self._commit(run, record, "every old task has stopped or is fenced")

    def _replace_if_urgent(self, record: JobRecord, plan: PlanRow, now_ms: Millis) -> bool:
        """Replace the open plan if the newest expected config must not wait for it."""
        try:
            expected = expected_of(record)
        except PenstockError:
            return False  # the plan continues; the invalid config is reported after it
        if expected == plan.target:
            return False
        urgent = {layer.name for layer in self.store.layer_kinds() if layer.replaces_plan}
        why = why_replace(
            plan.target,
            plan.expected_version,
            expected,
            [row for row in record.layers if row.layer in urgent],
        )
        if why is None:
            return False
        old = None if record.old is None else record.old.view()
        sync = plan_sync(expected, old)
        if not isinstance(sync, ComplexSync):
            if record.old is None or not record.old.is_held:
                self.plans.drop_plan(plan, why, now_ms)
                return True
            # Back to the running config, but its tasks are held already: they need a new generation.
            assert expected is not None
            mapping = plan_mapping(expected, old)
            sync = ComplexSync(target=expected, mapping=mapping, changed=(), reason=why)
        self.plans.replace_plan(record, sync, why, now_ms)
        return True

    def _prepare(self, run: _PlanRun, record: JobRecord, plan: PlanRow) -> bool:
        # Retirements first: a late one could unregister what this plan prepares.
        waiting = self._retire(run, record)
        if waiting is None:
            return False
        record = replace(record, retirements=waiting)
        assert plan.target is not None
        error = self._call("prepare", self.data.prepare, plan.job, plan.birth, plan.target)
        if error is not None:
            return self._fail(run.outcome, plan, error, run.now())
        if record.old is None:
            return self._commit(run, record, "nothing ran before")
        error = self._check_backlog(plan, record.old)
        if error is not None:
            return self._fail(run.outcome, plan, error, run.now())
        run.record = self.plans.take_hold(record, run.now())
        return True

    def _check_backlog(self, plan: PlanRow, old: RunningRow) -> PenstockError | None:
        """The error if the old tasks have not read a dropped input to its end."""
        for category, writer in dropped_inputs(old.config, plan.target):
            self.leader.reach("unread.before")
            try:
                why = self._why_unread(plan, old, category, writer)
            except PenstockError as error:
                return error
            self.leader.reach("unread.after")
            if why:
                idle = "" if is_active(old.config) else f", and the job is {old.config.state}"
                return NotYet(
                    f"the new plan of {plan.job} waits until {category!r} is read to its end",
                    why=f"{why}; the new code reads another category, only the old code can read this one"
                    + idle,
                    fix="nothing, if its tasks make progress; to drop these records: "
                    f"`penstock oncall set {plan.job} backlog=leave`",
                )
        return None

    def _why_unread(self, plan: PlanRow, old: RunningRow, category: str, writer: str) -> str:
        record = self.store.load([writer]).get(writer)
        runs = None if record is None or record.old is None else record.old.config
        try:
            end = category_end(None if record is None else expected_of(record), category)
        except PenstockError:  # invalid: its running config stays until it is corrected
            end = category_end(runs, category)
        if end is CategoryEnd.NEVER:
            return ""
        if end is CategoryEnd.STOPPED and runs is not None and runs.state != "stopped":
            return f"its writer {writer} has not stopped yet"
        return self.data.unread(
            plan.job, plan.birth, old.config, category, is_stopped=end is CategoryEnd.STOPPED
        )

    def _confirm(self, run: _PlanRun, record: JobRecord, plan: PlanRow) -> bool:
        if self._is_stopped(run.outcome, record, plan):
            return self._commit(run, record, "every old task has stopped")
        if run.now() - (plan.held_ms or 0) < self.settings.fence_after_ms:
            run.outcome.is_open = True
            return False
        assert record.old is not None
        old = record.old.config
        error = self._call("fence", self.data.fence, plan.job, plan.birth, old, generation=plan.generation)
        if error is not None:
            return self._fail(run.outcome, plan, error, run.now())
        return self._commit(run, record, "the old tasks are fenced")

    def _commit(self, run: _PlanRun, record: JobRecord, proof: str) -> bool:
        run.record = self.plans.commit_plan(record, run.now(), proof=proof)
        run.outcome.is_committed = True
        return True

    def _is_stopped(self, outcome: PlanOutcome, record: JobRecord, plan: PlanRow) -> bool:
        assert record.old is not None
        generation, list_version = record.old.generation, plan.running_version
        self.leader.reach("is_stopped.before")
        try:
            is_stopped = self.tasks.is_stopped(plan.job, generation=generation, list_version=list_version)
        except PenstockError as error:
            # Not proven; after `fence_after_ms` the tasks are fenced.
            outcome.failed.append(str(error))
            is_stopped = False
        self.leader.reach("is_stopped.after")
        return is_stopped

    def _retire(self, run: _PlanRun, record: JobRecord) -> tuple[Retirement, ...] | None:
        """Unregister producers that are not in use any more. Returns the retirements that wait for unsent
        productions, which do not block the plan; None: a call failed.
        """
        done: list[Retirement] = []
        waiting: list[Retirement] = []
        problem: PenstockError | None = None
        for item in record.retirements:
            same_life = record.old is not None and record.old.birth == item.birth
            current = record.old.config if record.old is not None and same_life else None
            problem = self._call("retire", self.data.retire, item.job, item.birth, item.config, current)
            if problem is None:
                done.append(item)
                continue
            run.outcome.failed.append(str(problem))
            run.outcome.is_open = True
            if not isinstance(problem, NotYet):
                break
            waiting.append(item)
            problem = None
        if done:
            self.plans.finish_retirements(done, run.now())
        return tuple(waiting) if problem is None else None

    def _fail(self, outcome: PlanOutcome, plan: PlanRow, error: PenstockError, now_ms: Millis) -> bool:
        if str(error) not in outcome.failed:
            outcome.failed.append(str(error))
        # A plan that stops a job is never given up: its hold is what was requested.
        counts = not isinstance(error, TRANSIENT) and is_active(plan.target)
        if counts and plan.attempts + 1 >= self.settings.attempts_max:
            self.plans.give_up(plan, str(error), now_ms)
            outcome.is_quarantined = True
        else:
            self.plans.note_failure(plan, str(error), now_ms, counts=counts)
            outcome.is_open = True
        return False

    def _call(
        self, name: str, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs
    ) -> PenstockError | None:
        # Apart from our own writes: a Fenced from a port does not mean that our term has ended.
        self.leader.reach(f"{name}.before")
        try:
            call(*args, **kwargs)
        except PenstockError as error:
            return error
        self.leader.reach(f"{name}.after")
        return None


def expected_of(record: JobRecord) -> JobConfig | None:
    """The expected config of a job; None if it is removed; ConfigError if the merge is invalid."""
    if record.job.deleted:
        return None
    return validate_config(record.job.name, merge_layers(record.layers))
