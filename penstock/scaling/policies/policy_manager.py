"""Wires the policies for a control plane: built-in ones, stores, threads, scheduled and requested rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa

from penstock.core.clock import Clock, Millis
from penstock.core.errors import CorruptData, NotFound, Refused
from penstock.core.journal import Entry
from penstock.core.loop import WorkerThreads
from penstock.core.system_clock import sleep_ms
from penstock.core.text import some_of
from penstock.core.workers import Finished, Now, Stuck, Workers
from penstock.db.bulk import ByName
from penstock.db.database import METADATA, NAME, Database, upsert
from penstock.db.journal_store import JournalStore
from penstock.fleet.container_store import ContainerRow, ContainerState
from penstock.fleet.exclusions import Bars, Exclusion, ExclusionStore, bars_of
from penstock.fleet.messages import ShardState, TaskReport
from penstock.fleet.shard_load import shard_of
from penstock.fleet.shard_store import FleetView
from penstock.fleet.task_service import TaskService
from penstock.jobs.job_reads import JobView
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.layer_writer import REASON_MAX
from penstock.jobs.layers import DEFAULT_LAYERS
from penstock.jobs.running_store import RunningRow, RunningStore
from penstock.jobs.text_rules import is_line
from penstock.scaling.doctor.doctor import JobDoctor
from penstock.scaling.metrics.frames import MINUTE_MS, Frame, NoFrame
from penstock.scaling.metrics.retriever import MetricQuery, Retriever, history
from penstock.scaling.metrics.store import MetricStore
from penstock.scaling.policies.facts import JobFacts, task_facts
from penstock.scaling.policies.policy import Action, ChangeLayer, ExcludeContainers, MoveTasks, Policy
from penstock.scaling.policies.ports import AlertSink, ManagedJob, RecordUpdate
from penstock.scaling.policies.process import BuiltInPolicy, UserPolicies
from penstock.scaling.policies.round import FleetState, PolicyRecord, RoundJob, Signals, flat, outcome_to_json
from penstock.scaling.policies.service import Answer, PolicyService, RequestedRound
from penstock.scaling.policies.stragglers import StragglerDetector
from penstock.scaling.policies.untriaged import UntriagedPolicy

LAYER = "scaler"
STALE_MS: Millis = 10_000  # older reports of a container are ignored
ALL = "all"  # `policies.all` of a job applies to all of its policies
MOVED_MS: Millis = 10 * 60_000  # for this time a moved task is kept off its old container
CHANGING_MS: Millis = 10 * 60_000  # a rescale counts as running for at most this time

Reports = tuple[tuple[str, TaskReport], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """An installation's limits for policies."""

    rescales_max: int = 10
    advice_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _FleetSnapshot:
    """Tasks and containers of the fleet at one moment."""

    at_ms: Millis = -(10**15)
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by job: generation, tasks
    reports: Mapping[str, Reports] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)
    takers: frozenset[str] = frozenset()  # containers that accept new shards
    exclusions: tuple[Exclusion, ...] = ()
    changing: frozenset[str] = frozenset()

    def of(self, job: str) -> Reports:
        """The reports of a job's tasks in the running generation."""
        generation = self.counts.get(job, (0, 0))[0]
        return tuple(found for found in self.reports.get(job, ()) if found[1].generation == generation)


class FleetJobs:
    """The `ManagedJobs` of a control plane, on any instance. Thread-safe: a snapshot is one assignment."""

    def __init__(
        self,
        *,
        jobs: JobService,
        running: RunningStore,
        fleet: FleetView,
        tasks: TaskService,
        metrics: MetricStore,
        exclusions: ExclusionStore,
        clock: Clock,
        shards: int,
        limits: FleetLimits,
        wake: Callable[[Action], None] = lambda action: None,
    ) -> None:
        """`wake(action)`: an action was written; wake the service that carries it out."""
        self._jobs, self._running, self._fleet, self._tasks = jobs, running, fleet, tasks
        self._metrics, self._retriever = metrics, Retriever(metrics)
        self._exclusions, self._clock, self._shards = exclusions, clock, shards
        self._limits, self._wake = limits, wake
        self._last = _FleetSnapshot()
        self._views: dict[str, JobView | None] = {}  # as of the start of the job's round
        self._rescaled: dict[str, Millis] = {}  # jobs rescaled by these policies that are not settled yet

    def names(self) -> tuple[str, ...]:
        """Every job that has tasks; takes a new snapshot of the fleet."""
        names = self._take_snapshot().counts
        for gone in self._views.keys() - names:
            self._views.pop(gone, None)
        return tuple(sorted(names))

    def job(self, name: str) -> ManagedJob | None:
        return self.jobs([name]).get(name)

    def jobs(self, names: Sequence[str]) -> dict[str, ManagedJob]:
        views = self._jobs.views_of(names)
        # Policies get the job as it was at the start of the round.
        self._views |= {name: views.get(name) for name in names}
        return {name: job for name, view in views.items() if (job := self._managed(name, view)) is not None}

    def _managed(self, name: str, view: JobView) -> ManagedJob | None:
        running = _running(view)
        if running is None:
            return None
        policies = dict[str, Any](running.config.policies)
        advice_only = policies.get(ALL) == {"advice_only": True}
        if advice_only or policies.get(ALL) == {"advice_only": False}:
            del policies[ALL]  # any other value is an error, which the service reports
        metrics = [report.metrics for _, report in self._last.of(name)]
        return ManagedJob(
            round_job=RoundJob(
                name=name,
                config=running.config,
                layer=_body(view, LAYER),
                is_settled=_is_settled(view, running),
                oncall=_above(view),
                advice_only=advice_only,
            ),
            settings=policies,
            signals=Signals(lag_s=_most(metrics, "lag_s"), busy=_most(metrics, "busy")),
            expected_version=view.expected_version,
        )

    def facts(
        self, name: str, metrics: tuple[str, ...], minutes: int, if_known: tuple[str, ...] = ()
    ) -> JobFacts | NoFrame:
        view = self._views.get(name) or self._view(name)
        is_recent = 0 <= self._clock.now_ms() - self._last.at_ms <= STALE_MS
        snapshot = self._last if is_recent else self._take_snapshot()
        return self._facts(name, view, snapshot, metrics, minutes, if_known)

    def facts_now(self, name: str, if_known: tuple[str, ...], minutes: int) -> JobFacts | NoFrame:
        """The same for a user's request: a new snapshot, and all metrics optional."""
        return self._facts(name, self._view(name), self._take_snapshot(), (), minutes, if_known)

    def _facts(
        self,
        name: str,
        view: JobView | None,
        snapshot: _FleetSnapshot,
        metrics: tuple[str, ...],
        minutes: int,
        if_known: tuple[str, ...],
    ) -> JobFacts | NoFrame:
        now_ms = self._clock.now_ms()
        running = None if view is None else _running(view)
        if view is None or running is None or name not in snapshot.counts:
            return NoFrame(job=name, reason="the job does not run", metrics=metrics)
        reports, task_count = snapshot.of(name), snapshot.counts[name][1]
        reported = len({report.task_id for _, report in reports})
        if metrics and reported < task_count:
            return NoFrame(job=name, reason=f"{reported} of {task_count} tasks report", metrics=metrics)
        frame = self._frame(name, metrics, minutes, if_known, now_ms)
        if isinstance(frame, NoFrame):
            return frame
        excluded = {item.container for item in snapshot.exclusions if item.subject == name}
        owner = next((row for row in view.layers if row.layer == "provisioner"), None)
        return JobFacts(
            job=name,
            at_ms=now_ms,
            config=running.config,
            task_count=task_count,
            frame=frame,
            tasks=task_facts(reports, snapshot.hosts),
            is_settled=_is_settled(view, running),
            oncall=_above(view),
            containers=snapshot.takers - excluded | {container for container, _ in reports},
            user_update_ms=None if owner is None else owner.at_ms,
        )

    def fleet(self) -> FleetState:
        running = self._last.changing | self._rescaled.keys()
        return FleetState(
            rescales_running=len(running),
            rescales_max=self._limits.rescales_max,
            advice_only=self._limits.advice_only,
        )

    def apply(self, name: str, policy: str, action: Action, *, expected_version: int, reason: str) -> None:
        now_ms, why = self._clock.now_ms(), _line(reason)
        match action:
            case ChangeLayer():
                self._jobs.patch_layer(
                    name,
                    LAYER,
                    flat(action.changes),
                    expected_version=expected_version,
                    actor=Actor(name=f"policy {policy}", role="scaler"),
                    reason=why,
                    idempotency_key=None,
                    now_ms=now_ms,
                )
                if action.is_rescale:
                    self._rescaled[name] = now_ms
            case ExcludeContainers():
                self._exclude(name, policy, action, why, now_ms)
            case MoveTasks():
                self._move(name, policy, action, why, now_ms)
        self._wake(action)

    def readmit(self, name: str, *, by: str, why: str) -> int:
        """End a job's exclusions from containers; returns how many there were."""
        decision = "may run on any container again"
        return self._exclusions.lift(name, _entry(name, by, decision, why, self._clock.now_ms()))

    # -- reading ----------------------------------------------------------------------------------------

    def _take_snapshot(self) -> _FleetSnapshot:
        now_ms, counts = self._clock.now_ms(), self._tasks.task_counts()
        rows = [row for row in self._fleet.containers() if row.may_run and row.seen_ms >= now_ms - STALE_MS]
        reports: dict[str, list[tuple[str, TaskReport]]] = {}
        for row in rows:
            for task in row.tasks:
                reports.setdefault(task.job, []).append((row.name, task))
        hosts = {row.name: row.host for row in rows}
        self._last = _FleetSnapshot(
            at_ms=now_ms,
            counts=counts,
            reports={job: tuple(found) for job, found in reports.items()},
            # If all containers are on one host, hosts are left out: the container is the place then.
            hosts=hosts if len({*hosts.values()}) > 1 else {},
            takers=frozenset(row.name for row in rows if _takes(row)),
            exclusions=self._exclusions.current(now_ms),
            changing=self._running.changing(),
        )
        self._forget_settled(now_ms)
        return self._last

    def _forget_settled(self, now_ms: Millis) -> None:
        views = self._jobs.views_of(list(self._rescaled)) if self._rescaled else {}
        self._rescaled = {
            name: at_ms
            for name, at_ms in self._rescaled.items()
            if name in views and not views[name].is_in_sync and 0 <= now_ms - at_ms < CHANGING_MS
        }

    def _view(self, name: str) -> JobView | None:
        try:
            view = self._jobs.view(name)
        except NotFound:
            return None  # removed while its tasks are still stopping
        return None if _running(view) is None else view

    def _frame(
        self, name: str, metrics: tuple[str, ...], minutes: int, if_known: tuple[str, ...], now_ms: Millis
    ) -> Frame | NoFrame:
        frame: Frame | NoFrame = Frame(job=name, first_minute=now_ms // MINUTE_MS - minutes, values={})
        if metrics:
            frame = self._retriever.frame(name, MetricQuery(metrics=metrics, minutes=minutes), now_ms=now_ms)
        if isinstance(frame, NoFrame) or not if_known:
            return frame
        end_ms = (frame.first_minute + minutes) * MINUTE_MS  # both end with the same minute
        rest = history(self._metrics, name, if_known, minutes, now_ms=end_ms)
        return Frame(job=name, first_minute=frame.first_minute, values={**frame.values, **rest.values})

    # -- exclusions and moves ---------------------------------------------------------------------------

    def _exclude(self, name: str, policy: str, action: ExcludeContainers, why: str, now_ms: Millis) -> None:
        snapshot, birth = self._take_snapshot(), self._birth(name)
        known = {item.container for item in snapshot.exclusions if item.subject == name}
        if not snapshot.takers - known - {*action.containers}:
            raise _no_target(name, action.containers, snapshot.takers)
        until_ms = now_ms + action.minutes * MINUTE_MS
        exclusions = [
            Exclusion(subject=name, birth=birth, container=container, until_ms=until_ms, reason=why)
            for container in action.containers
        ]
        decision = f"excluded from {', '.join(action.containers)} for {action.minutes} min"
        self._exclusions.put(exclusions, _entry(name, f"policy {policy}", decision, why, now_ms))

    def _move(self, name: str, policy: str, action: MoveTasks, why: str, now_ms: Millis) -> None:
        snapshot, birth = self._take_snapshot(), self._birth(name)
        homes = {report.task_id: container for container, report in snapshot.of(name)}
        shards = {row.shard: row for row in self._fleet.shards()}
        exclusions = []
        for task in action.tasks:
            home, row = homes.get(task), shards.get(shard_of(task, self._shards))
            if home is None or row is None:
                raise Refused(
                    f"no container runs {task} now",
                    why="its job is stopped or being changed, or its shard is moving",
                    fix=f"see where the job's tasks run: `penstock task ls {name}`",
                )
            if row.state is ShardState.DROPPING or row.container != home:
                raise Refused(
                    f"{task} is moving already",
                    why=f"its shard {row.shard} is leaving {home}",
                    fix="nothing to do: the policy decides again after the move",
                )
            if row.is_quarantined:
                raise Refused(
                    f"{task} cannot be moved",
                    why=f"its shard {row.shard} cost {row.blame} containers and is quarantined",
                    fix=f"check its tasks, then release it: `penstock shard release {row.shard}`",
                )
            if not snapshot.takers - {home}:
                raise _no_target(task, (home,), snapshot.takers)
            until_ms = now_ms + MOVED_MS
            exclusions.append(
                Exclusion(subject=task, birth=birth, container=home, until_ms=until_ms, reason=why)
            )
        moves = ", ".join(f"{item.subject} away from {item.container}" for item in exclusions)
        decision = f"{moves}, with its shard"
        self._exclusions.put(exclusions, _entry(name, f"policy {policy}", decision, why, now_ms))

    def _birth(self, name: str) -> str:
        view = self._view(name)
        if view is None or view.running is None:
            raise Refused(
                f"{name} does not run any more", why="it was stopped or removed", fix="nothing to do"
            )
        return view.running.birth


def _entry(name: str, actor: str, decision: str, reason: str, now_ms: Millis) -> Entry:
    return Entry(at_ms=now_ms, actor=actor, kind="exclusion", subject=name, decision=decision, reason=reason)


def _no_target(subject: str, away: tuple[str, ...], takers: frozenset[str]) -> Refused:
    return Refused(
        f"{subject} cannot leave {', '.join(away)}",
        why=f"no other container accepts shards; those that do: {some_of(takers)}",
        fix="add a container, or uncordon one of `penstock container ls`",
    )


def _takes(row: ContainerRow) -> bool:
    is_live = row.state is ContainerState.LIVE and row.engine_ready
    return is_live and not (row.known_dead or row.cordoned or row.draining)


def _running(view: JobView) -> RunningRow | None:
    return view.running if view.running is not None and view.running.state == "running" else None


def _is_settled(view: JobView, running: RunningRow) -> bool:
    return view.is_in_sync and not running.is_held


def _body(view: JobView, layer: str) -> Mapping[str, Any]:
    return next((row.body for row in view.layers if row.layer == layer), {})


def _above(view: JobView) -> frozenset[str]:
    """The config paths set in layers above the scaler's: oncall, or a custom one."""
    own = next(layer.precedence for layer in DEFAULT_LAYERS if layer.name == LAYER)
    return frozenset(path for row in view.layers if row.precedence > own for path in flat(row.body))


def _most(metrics: Sequence[Mapping[str, float]], name: str) -> float | None:
    return max((values[name] for values in metrics if name in values), default=None)


def _line(reason: str) -> str:
    """A policy's reason as one line of plain text, which a layer write requires."""
    return "".join(letter if is_line(letter) else " " for letter in reason)[:REASON_MAX] or "no reason"


POLICY_RECORDS = sa.Table(
    "policy_records",
    METADATA,
    sa.Column("job", NAME, primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)
_ROWS = ByName(sa.select(*POLICY_RECORDS.c), POLICY_RECORDS.c.job)
_VERSIONS = ByName(sa.select(POLICY_RECORDS.c.job, POLICY_RECORDS.c.version), POLICY_RECORDS.c.job)


class PolicyRecordStore:
    """The `PolicyRecords` in the database. Writes compare the version: of two writers one is refused."""

    def __init__(self, database: Database, journal: JournalStore) -> None:
        self._database, self._journal = database, journal

    def load(self, job: str) -> tuple[PolicyRecord, int]:
        """The record and its version; an empty one has version 0."""
        found = self.load_all([job])[job]
        if isinstance(found, CorruptData):
            raise found
        return found

    def load_all(self, jobs: Sequence[str]) -> Mapping[str, tuple[PolicyRecord, int] | CorruptData]:
        """The same for many jobs; CorruptData in place of a record that is damaged."""
        found: dict[str, tuple[PolicyRecord, int] | CorruptData] = {job: (PolicyRecord(), 0) for job in jobs}
        if jobs:
            with self._database.reading() as connection:
                rows = _ROWS.rows(connection, jobs)
            found |= {job: _read(job, version, body) for job, version, body in rows}
        return found

    def save(self, job: str, record: PolicyRecord, version: int) -> bool:
        """Store the record if the version is still this one."""
        return not self.save_all([RecordUpdate(job=job, record=record, version=version)])

    def save_all(self, updates: Sequence[RecordUpdate]) -> frozenset[str]:
        """Store updates whose version still matches, with their journal entries; returns the other jobs."""
        if not updates:
            return frozenset()
        with self._database.transaction() as connection:
            versions = dict(map(tuple, _VERSIONS.rows(connection, [item.job for item in updates])))
            won = [item for item in updates if versions.get(item.job, 0) == item.version]
            upsert(connection, POLICY_RECORDS, [_row(item) for item in won], replace=("version", "body"))
            entries = [item.entry for item in won if item.entry is not None]
            self._journal.append_entries(connection, entries)
        return frozenset(item.job for item in updates) - {item.job for item in won}

    def forget(self, job: str) -> None:
        """Delete the record of a removed job."""
        with self._database.transaction() as connection:
            connection.execute(sa.delete(POLICY_RECORDS).where(POLICY_RECORDS.c.job == job))


def _row(update: RecordUpdate) -> dict[str, Any]:
    body = msgspec.json.encode(update.record).decode()
    return {"job": update.job, "version": update.version + 1, "body": body}


def _read(job: str, version: int, body: str) -> tuple[PolicyRecord, int] | CorruptData:
    try:
        return msgspec.json.decode(body, type=PolicyRecord), int(version)
    except msgspec.DecodeError as error:
        return CorruptData(
            f"the policy record of {job} cannot be read",
            why=str(error),
            fix="delete its row in the table policy_records; until then policies do not run on this job",
        )


# All built-in policies. A new one is added here.
BUILT_IN: tuple[Callable[[], Policy], ...] = (
    StragglerDetector,
    JobDoctor,
    UntriagedPolicy,
)
THREADS = 2  # for built-in policies; more would only compete with the API's threads for the CPU
USER_THREADS = 4  # for users' policies, which run in processes
REST_MS: Millis = 50  # about four times what one slice of jobs takes
BUDGET_MS: Millis = 10_000  # timeout for one answer of a user's policy
# Longer than the start and answer timeouts of a user's policy, which end its process first.
STUCK_MS: Millis = 45_000


class PolicyLimits(Protocol):
    """The settings that policies need."""

    @property
    def shards(self) -> int:
        """Number of shards."""

    @property
    def rescales_max(self) -> int:
        """How many jobs may be rescaled at a time."""

    @property
    def advice_only(self) -> bool:
        """Whether actions are only reported, never applied."""


class PolicyControlPlane(Protocol):
    """The parts of a control plane that policies need."""

    @property
    def settings(self) -> PolicyLimits:
        """Its settings."""

    @property
    def clock(self) -> Clock:
        """The time."""

    @property
    def is_syncing(self) -> bool:
        """Whether this instance is active, so that scheduled rounds run here."""

    database: Database
    journal: JournalStore
    jobs: JobService
    fleet: FleetView
    task_service: TaskService
    metrics: MetricStore

    def wake_syncer(self) -> None:
        """Called after a change of a job's config."""

    def wake_shard_manager(self) -> None:
        """Called after a change of exclusions."""


class SplitWorkers:
    """Separate threads for users' policies, so that built-in ones run even if all of those hang.

    A key is a job and a policy, as in `PolicyService`.
    """

    def __init__(self, own: Workers[Answer], users: Workers[Answer], names: frozenset[str]) -> None:
        self._own, self._users, self._names = own, users, names

    def start(self, key: str, work: Callable[[Now], Answer], now_ms: Millis) -> None:
        is_own = key.rpartition(" ")[2] in self._names
        (self._own if is_own else self._users).start(key, work, now_ms)

    def busy(self) -> frozenset[str]:
        return self._own.busy() | self._users.busy()

    def take_finished(self) -> tuple[Finished[Answer], ...]:
        return (*self._own.take_finished(), *self._users.take_finished())

    def stuck(self) -> tuple[Stuck, ...]:
        return (*self._own.stuck(), *self._users.stuck())


class PolicyManager:
    """The policies of one instance. Scheduled rounds run on the active instance, requested ones on any."""

    def __init__(
        self,
        parts: PolicyControlPlane,
        alarms: AlertSink,
        folder_of: Callable[[str], Path],
        *,
        budget_ms: Millis = BUDGET_MS,
    ) -> None:
        """`alarms`: receives the alerts. `folder_of(hash)`: the folder of an unpacked package."""
        clock, settings = parts.clock, parts.settings
        self._parts, self._clock, self._shards = parts, clock, settings.shards
        self.exclusions = ExclusionStore(parts.database, parts.journal)
        self.jobs = FleetJobs(
            jobs=parts.jobs,
            running=RunningStore(parts.database),
            fleet=parts.fleet,
            tasks=parts.task_service,
            metrics=parts.metrics,
            exclusions=self.exclusions,
            clock=clock,
            shards=settings.shards,
            limits=FleetLimits(rescales_max=settings.rescales_max, advice_only=settings.advice_only),
            wake=self._wake,
        )
        own = [BuiltInPolicy(policy()) for policy in BUILT_IN]
        self._users = UserPolicies(folder_of, clock, budget_ms=budget_ms)
        threads: WorkerThreads[Answer] = WorkerThreads(
            "policies", clock, size=THREADS, stuck_after_ms=STUCK_MS
        )
        others: WorkerThreads[Answer] = WorkerThreads(
            "users' policies", clock, size=USER_THREADS, stuck_after_ms=STUCK_MS
        )
        self._threads = threads, others
        self.service = PolicyService(
            self.jobs,
            PolicyRecordStore(parts.database, parts.journal),
            alarms,
            parts.journal,
            own,
            SplitWorkers(threads, others, frozenset(policy.name for policy in own)),
            load=self._users.load,
            rest=partial(sleep_ms, REST_MS),
        )

    def tick(self) -> None:
        """One tick of the schedule, if this instance is active."""
        if self._parts.is_syncing:
            self.service.tick(self._clock.now_ms())
        else:
            self.service.stand_by()

    def manage(self, job: str, *, policy: str | None, is_dry: bool, asked_by: str) -> dict[str, Any]:
        """Run a requested round on one job; returns its result as JSON values."""
        now = self._clock.now_ms
        done = self.service.manage(job, now=now, policy=policy, is_dry=is_dry, asked_by=asked_by)
        return {"job": job, "at_ms": now(), **round_to_json(done)}

    def bars(self, at_ms: Millis) -> Bars:
        """Which containers are excluded for which shards now."""
        exclusions = self.exclusions.current(at_ms)
        shards_of = self._parts.task_service.shards_of
        return bars_of(exclusions, lambda subject, birth: shards_of(subject, birth, self._shards))

    def stop(self) -> None:
        """Stop the threads and the processes of users' policies."""
        for threads in self._threads:
            threads.stop()
        self._users.stop()

    def _wake(self, action: Action) -> None:
        if isinstance(action, ChangeLayer):
            self._parts.wake_syncer()
        else:
            self._parts.wake_shard_manager()


def round_to_json(done: RequestedRound) -> Mapping[str, Any]:
    """The result of a requested round: the action if there is one, every policy's outcome, every alert."""
    apply, decision = done.decision.apply, done.decision
    said = [outcome_to_json(each, done.verdicts.get(each.policy)) for each in decision.outcomes]
    off = "disabled for this job"
    said += [_empty_answer(policy, "off", off) for policy in done.off if policy not in done.verdicts]
    outcome = "would be done" if done.is_dry else "not done" if done.refused else "done"
    return {
        "is_dry": done.is_dry,
        "change": None
        if apply is None
        else {
            "policy": apply.policy,
            "what": apply.action.text,
            "why": apply.reason,
            "outcome": outcome,
            "refused": done.refused,
        },
        "said": said,
        "alerts": [
            {
                "policy": policy,
                "key": alert.key,
                "severity": alert.severity,
                "text": alert.text,
                "what_to_do": alert.what_to_do,
            }
            for policy, alert in decision.alerts
        ],
    }


def _empty_answer(policy: str, outcome: str, reason: str) -> dict[str, Any]:
    texts = dict.fromkeys(("symptom", "cause", "formula", "bound"), "")
    return {
        "policy": policy,
        "outcome": outcome,
        "reason": reason,
        "confidence": None,
        "inputs": {},
        **texts,
    }
