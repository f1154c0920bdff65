"""Carries out one job's plan: calls the task layer and the data plane, and makes each step durable after it.

Every step begins with what is durable: it may be repeated, may crash anywhere, may meet another target.
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
    """The task layer, as the syncer needs it."""

    def is_stopped(self, job: str, *, generation: int, list_version: int) -> bool:
        """True when no task of `job` with a generation <= `generation` runs any more.

        Proof is one of: every container with a live lease acknowledged a task list >= `list_version` and
        reaped what it no longer holds; or its lease is over. Never a guess, never a timeout.
        """


class DataPlane(Protocol):
    """The bus and the row store, as the syncer needs them."""

    def prepare(self, job: str, birth: str, config: JobConfig) -> None:
        """Create what tasks of this config will open: categories, intervals, producer registrations."""

    def unread(self, job: str, birth: str, config: JobConfig, category: str, *, is_stopped: bool) -> str:
        """Why the tasks of `config` are not at the end of this input yet; "" once they are.

        It has an end when nobody is registered as its producer any more, or its producers are stopped.
        """

    def fence(self, job: str, birth: str, config: JobConfig, *, generation: int) -> None:
        """Raise every interval of `config` to (generation, 0) with a new token, and its producers with it."""

    def retire(self, job: str, birth: str, old: JobConfig, new: JobConfig | None) -> None:
        """Unregister the producers that `old` had and `new` has not (None: the job is gone).

        NotYet while something that was promised to an output under `old` is not there yet.
        """


P = ParamSpec("P")

STEPS_MAX = 20  # in one go; a plan has four, unless others take its place meanwhile
# The environment's fault, not the plan's: it is tried again for as long as it takes.
TRANSIENT = (StoreUnavailable, DiskFull, NotYet, TaskActionFailed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerSettings:
    """How patient the syncer is."""

    fence_after_ms: Millis = 10_000  # old tasks that are not known to have stopped by then are fenced
    attempts_max: int = 3  # a plan that failed this often is given up
    batch_jobs: int = 200  # jobs in the first batch of a round; later ones follow the time it took
    batch_jobs_max: int = 2_000
    batch_ms: Millis = 100  # how long a batch may keep others from writing
    sweep_ms: Millis = 30_000  # every job is compared this often, whatever was heard of it
    round_ms: Millis | None = None  # a round begins nothing new after this time


@dataclass(slots=True)
class PlanOutcome:
    """How far a job's plan came in one go."""

    job: str
    is_committed: bool = False
    is_open: bool = False  # it waits: look again soon
    is_quarantined: bool = False
    failed: list[str] = field(default_factory=list)
    fenced: Fenced | None = None  # a successor has taken over


@dataclass(slots=True)
class _PlanRun:
    """One go at one job: what is durable as far as known here; None: to be read again."""

    outcome: PlanOutcome
    now: Now
    record: JobRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRunner:
    """Takes plans as far as they go now. It waits for no condition, but its calls may take their time."""

    leader: LeaderStore
    store: JobStore
    plans: PlanStore
    tasks: TaskActuator
    data: DataPlane
    settings: SyncerSettings

    def run(self, job: str, now: Now) -> PlanOutcome:
        """Do what is to be done for a job: its plan's steps, then what is left to retire."""
        outcome = PlanOutcome(job)
        try:
            self.leader.check()  # this may have waited for its turn for longer than the term lasted
            run = _PlanRun(outcome, now)
            for _ in range(STEPS_MAX):
                run.record = run.record or self.store.load([job]).get(job)
                if run.record is None or not self._step(run, run.record):
                    return outcome
            outcome.is_open = True  # people change their minds faster than this can follow: the next round's
        except Fenced as error:  # only our own writes get here with it: we are not the leader any more
            outcome.fenced = error
        except PenstockError as error:
            outcome.failed.append(str(error))
        return outcome

    def fail(self, job: str, error: PenstockError, now_ms: Millis) -> PlanOutcome:
        """Hold an error that came out of nowhere against the job's plan."""
        outcome = PlanOutcome(job, failed=[str(error)])
        try:
            record = self.store.load([job]).get(job)
            if record is not None and record.plan is not None:
                self._fail(outcome, record.plan, error, now_ms)
        except Fenced as fenced:
            outcome.fenced = fenced
        except PenstockError as trouble:
            outcome.failed.append(str(trouble))
        return outcome

    def _step(self, run: _PlanRun, record: JobRecord) -> bool:
        """One durable step; False when there is nothing to do, or nothing that can be done now."""
        plan = record.plan
        if plan is None:
            self._retire(run, record)
            return False
        if self._gives_way(record, plan, run.now()):
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
            case _:  # written by an earlier version, which confirmed and committed in two steps
                return self._commit(run, record, "every old task has stopped or is fenced")

    def _gives_way(self, record: JobRecord, plan: PlanRow, now_ms: Millis) -> bool:
        """Put a newer target into an open plan's place, if it is one that may not wait."""
        try:
            expected = expected_of(record)
        except PenstockError:
            return False  # what is durable goes on; the bad config is reported once it is its turn
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
            # Back to what ran, but its tasks are held already: they come back under a new generation.
            assert expected is not None
            mapping = plan_mapping(expected, old)
            sync = ComplexSync(target=expected, mapping=mapping, changed=(), reason=why)
        self.plans.replace_plan(record, sync, why, now_ms)
        return True

    def _prepare(self, run: _PlanRun, record: JobRecord, plan: PlanRow) -> bool:
        # A late retirement must not hit what this plan prepares, so it comes first.
        left = self._retire(run, record)
        if left is None:
            return False
        record = replace(record, retirements=left)
        assert plan.target is not None
        error = self._call("prepare", self.data.prepare, plan.job, plan.birth, plan.target)
        if error is not None:
            return self._fail(run.outcome, plan, error, run.now())
        if record.old is None:
            return self._commit(run, record, "nothing ran before")
        error = self._unread(plan, record.old)
        if error is not None:
            return self._fail(run.outcome, plan, error, run.now())
        run.record = self.plans.take_hold(record, run.now())
        return True

    def _unread(self, plan: PlanRow, old: RunningRow) -> PenstockError | None:
        """What the old tasks have yet to read of inputs that only they can read."""
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
                    fix="nothing, if its tasks keep up; to give these records up: "
                    f"`penstock oncall set {plan.job} backlog=leave`",
                )
        return None

    def _why_unread(self, plan: PlanRow, old: RunningRow, category: str, writer: str) -> str:
        record = self.store.load([writer]).get(writer)
        runs = None if record is None or record.old is None else record.old.config
        try:
            end = category_end(None if record is None else expected_of(record), category)
        except PenstockError:  # it stays as it runs, until somebody corrects it
            end = category_end(runs, category)
        if end is CategoryEnd.NEVER:
            return ""
        if end is CategoryEnd.STOPPED and runs is not None and runs.state != "stopped":
            return f"{writer}, which writes it, is about to stop"
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
            answer = self.tasks.is_stopped(plan.job, generation=generation, list_version=list_version)
        except PenstockError as error:
            # Nobody could say, so it is not proven; the fence is the way out.
            outcome.failed.append(str(error))
            answer = False
        self.leader.reach("is_stopped.after")
        return answer

    def _retire(self, run: _PlanRun, record: JobRecord) -> tuple[Retirement, ...] | None:
        """Unregister what is not in use any more. Returns what has to wait until tasks have sent what they
        promised, which keeps nothing else waiting; None: it went wrong.
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
        # A stop is never given up: the hold is what was asked for, and it stands.
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
        # Kept apart from our own writes: a port that says Fenced does not mean that our term is over.
        self.leader.reach(f"{name}.before")
        try:
            call(*args, **kwargs)
        except PenstockError as error:
            return error
        self.leader.reach(f"{name}.after")
        return None


def expected_of(record: JobRecord) -> JobConfig | None:
    """What the layers of a job ask for, None if it is removed; ConfigError if they do not fit together."""
    if record.job.deleted:
        return None
    return validate_config(record.job.name, merge_layers(record.layers))
