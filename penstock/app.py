"""The control plane: the one place that wires stores, services and loops together."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from penstock.alarms import checks as levels
from penstock.alarms.checks import BehindLow, CategoryTrouble, LoopTrouble
from penstock.alarms.delivery import AlarmSender, SendError, routes_of
from penstock.alarms.service import AlarmFacts, AlarmService, AlarmWatch
from penstock.alarms.store import AlarmStore
from penstock.core.clock import Clock, Millis
from penstock.core.errors import Fenced, PenstockError, StoreUnavailable
from penstock.core.loop import Loop, ThreadExecutor, WorkerThreads
from penstock.core.system_clock import sleep_ms
from penstock.core.text import some_of
from penstock.core.workers import REST_MS, Rest, RoundPace, no_rest
from penstock.db.database import Database, open_database
from penstock.db.journal_store import JournalStore
from penstock.db.leases import RoleLease
from penstock.fleet.container_store import ContainerRow
from penstock.fleet.loan_service import LendingService, LoanStore
from penstock.fleet.messages import PROFILES, Heartbeat, HeartbeatReply, TaskReport
from penstock.fleet.shard_manager import ShardManager, ShardManagerSettings
from penstock.fleet.shard_store import FleetView, ShardStore
from penstock.fleet.task_service import TaskService
from penstock.jobs.job_reads import JobView
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.running_store import RunningStore
from penstock.jobs.syncer.plan_runner import PlanOutcome
from penstock.jobs.syncer.state_syncer import StateSyncer, SyncerSettings
from penstock.scaling import capacity_manager
from penstock.scaling.capacity import Stock
from penstock.scaling.capacity_manager import CapacityManager, LayerPatcher
from penstock.scaling.metrics.retriever import ScalerMinutes
from penstock.scaling.metrics.store import MetricRecorder, MetricStore
from penstock.scaling.policies.policy_manager import PolicyManager, PolicyRecordStore
from penstock.scaling.policies.ports import AlertSink
from penstock.scaling.policies.round import FleetState, flat
from penstock.scaling.scaler.apply import ACTOR
from penstock.scaling.scaler.auto_scaler import AutoScaler
from penstock.scaling.scaler.observation import KINDS, AvailableResources
from penstock.scaling.scaler.observe import ClusterCapacity, ScalableJob
from penstock.server.services import Control, ScalingHere
from penstock.settings import Settings
from penstock.streams.bus.care import BusCare, FailingCategory
from penstock.streams.data_plane import StreamDataPlane
from penstock.streams.package_store import UnpackedPackages
from penstock.streams.places import identify, identify_rows

REPORT_AGE_MAX_MS: Millis = 10_000  # older task reports do not count as load
SCALER = Actor(name=ACTOR, role="scaler")
KINDS_WITHOUT_LAG = ("process", "spark")  # the scaler skips jobs of these kinds


class ScalerJobs:
    """The auto scaler's access to jobs, tasks and fleet (its port `JobLayer`)."""

    def __init__(
        self,
        jobs: JobService,
        tasks: TaskService,
        fleet: FleetView,
        patch: LayerPatcher,
        clock: Callable[[], Clock],
        *,
        stock: Callable[[], Stock | None],
        rest: Rest = no_rest,
    ) -> None:
        """`stock`: the capacity manager's current view of the cluster."""
        self._jobs, self._tasks, self._fleet, self._patch = jobs, tasks, fleet, patch
        self._clock, self._stock, self._rest = clock, stock, rest
        self.fleet_state: Callable[[], FleetState] = FleetState  # replaced by the policies' view

    def task_counts(self) -> Mapping[str, tuple[int, int]]:
        """For each job with tasks: its generation and its number of tasks."""
        return self._tasks.task_counts()

    def task_reports(self) -> dict[str, list[TaskReport]]:
        """The current task reports by job, without those of containers that fell silent."""
        found: dict[str, list[TaskReport]] = {}
        oldest_ms = self._clock().now_ms() - REPORT_AGE_MAX_MS
        for row in self._fleet.containers():
            for task in row.tasks if row.may_run and row.seen_ms >= oldest_ms else ():
                found.setdefault(task.job, []).append(task)
        return found

    def scalable_jobs(self, names: Sequence[str]) -> tuple[ScalableJob, ...]:
        """Those of these jobs that run and have a lag metric."""
        slices = RoundPace(self._rest).slices(names)
        views = [view for some in slices for view in self._jobs.views_of(some).values()]
        return tuple(job for view in views if (job := _scalable(view)) is not None)

    def capacity(self) -> ClusterCapacity:
        """The smallest container's capacity and the fleet's free capacity; unlimited unless all
        report one.
        """
        rows = [row for row in self._fleet.containers() if row.may_run and not row.draining]
        if not rows or not all(row.capacity for row in rows):
            return ClusterCapacity()
        stock = self._stock()  # expensive: sums over all jobs
        return ClusterCapacity() if stock is None else _capacity(rows, stock)

    def fleet(self) -> FleetState:
        """The fleet-wide limits now."""
        return self.fleet_state()

    def patch(self, job: str, changes: Mapping[str, Any], *, expected_version: int, reason: str) -> None:
        """Write the scaler layer: the scaler's only write."""
        self._patch(
            job,
            "scaler",
            flat(changes),  # by path: other values in the layer stay
            expected_version=expected_version,
            actor=SCALER,
            reason=reason,
            idempotency_key=None,
        )


def build_scaler(
    database: Database,
    journal: JournalStore,
    metrics: MetricStore,
    jobs: ScalerJobs,
    alarms: AlertSink,
    *,
    profile: str,
    rest: Rest = no_rest,
) -> AutoScaler:
    """The auto scaler on a control plane's store."""
    return AutoScaler(
        jobs,
        ScalerMinutes(metrics),
        PolicyRecordStore(database, journal),
        journal,
        alarms,
        heartbeat_ms=PROFILES[profile].heartbeat_ms,
        rest=rest,
    )


def _scalable(view: JobView) -> ScalableJob | None:
    running = view.running
    if running is None or running.state != "running" or running.config.kind in KINDS_WITHOUT_LAG:
        return None
    layers = {row.layer: row for row in view.layers}
    oncall = layers["oncall"].body if "oncall" in layers else {}
    made = layers.get("provisioner")
    updated_ms = made.at_ms if made is not None and made.at_ms > view.created_ms else None
    return ScalableJob(
        name=view.name,
        birth=view.birth,
        pipeline=view.pipeline,
        expected_version=view.expected_version,
        generation=running.generation,
        task_count=len(set(running.mapping)),
        mapping=running.mapping,
        is_settled=view.is_in_sync and not running.is_held,
        config=running.config,
        layer=layers["scaler"].body if "scaler" in layers else {},
        oncall=frozenset(flat(oncall)),
        created_ms=view.created_ms,
        changed_ms=running.updated_ms,
        updated_ms=updated_ms,
    )


def _capacity(rows: Sequence[ContainerRow], stock: Stock) -> ClusterCapacity:
    amounts = [dict(zip(KINDS, row.capacity, strict=False)) for row in rows]
    capacity = ClusterCapacity(
        container=AvailableResources(
            **{kind: min(amount[kind] for amount in amounts) for kind in stock.total}
        ),
        remaining=AvailableResources(**stock.remaining),
    )
    if not stock.short_of:
        return capacity
    # Short of capacity: only privileged jobs may use the reserve for failures.
    rest = {kind: max(0.0, most - stock.reserved[kind]) for kind, most in stock.total.items()}
    return replace(capacity, remaining=AvailableResources(**rest), privileged_only=True)


class AlarmLoop:
    """The alarm service of one control plane, and its rounds."""

    def __init__(
        self,
        plane: ControlPlane,
        jobs: JobStore,
        loops: Callable[[], Iterable[Loop]],
        categories: Callable[[], Iterable[FailingCategory]],
    ) -> None:
        settings = plane.settings
        routes = routes_of(webhook=settings.alarm_webhook, channels=settings.alarm_channels)
        store = AlarmStore(plane.database, plane.journal, [route.name for route in routes])
        self.service = AlarmService(jobs, store, routes)
        self._workers: WorkerThreads[SendError] = WorkerThreads("alarms", plane.clock)
        facts = AlarmFacts(
            plane.jobs,
            plane.fleet,
            plane.journal,
            lambda: _failing_loops(loops()),
            BehindLow(store.alarms),
            categories=lambda: _failing_categories(categories()),
            rest=partial(sleep_ms, REST_MS),
        )
        sources = {
            levels.SOURCE: lambda now_ms: levels.decide_levels(facts.observe(now_ms), now_ms),
            capacity_manager.SOURCE: plane.capacity.levels,
        }
        self._watch = AlarmWatch(
            store,
            AlarmSender(store, routes, self._workers),
            sources,
            plane.jobs.inactive,
            (capacity_manager.SOURCE,),
        )

    def tick(self, now_ms: Millis) -> bool:
        """One round; returns whether a notice is being sent, so that the next round should come soon."""
        return self._watch.tick(now_ms)

    def stop(self) -> None:
        """Stop sending. A notice in progress may be sent again after a restart."""
        self._workers.stop()


def _failing_loops(loops: Iterable[Loop]) -> tuple[LoopTrouble, ...]:
    return tuple(
        LoopTrouble(name=loop.name, streak=loop.streak, error=loop.last_error)
        for loop in loops
        if loop.streak
    )


def _failing_categories(categories: Iterable[FailingCategory]) -> tuple[CategoryTrouble, ...]:
    return tuple(
        CategoryTrouble(
            name=category.name,
            streak=category.streak,
            error=str(category.error.what),
            why=category.error.why,
        )
        for category in categories
    )


log = structlog.get_logger(__name__)


class ControlPlane(Control):
    """All services of one control plane, and its loops."""

    def __init__(self, settings: Settings) -> None:
        database = open_database(
            settings.database or settings.folder / "store.db",
            lambda: {"bus": identify(settings.bus_place), "rows": identify_rows(settings.rows_place)},
        )
        super().__init__(settings, database)
        self._rows_identity = identify_rows(settings.rows_place)
        self.task_service = TaskService(RunningStore(self.database))
        loans = LoanStore(self.database, self.journal)
        self.lending = LendingService(loans, self.fleet, self.tokens, self)
        self._data_plane = StreamDataPlane(self.log, self.rows, rows_place=settings.rows_place)
        self._workers: WorkerThreads[PlanOutcome] = WorkerThreads("state syncer", self.clock)
        self._background = ThreadExecutor("state syncer background", threads=2)
        self._shard_manager: ShardManager | None = None
        self._syncer: StateSyncer | None = None
        holder = secrets.token_hex(8)
        self._shard_lease = RoleLease(self.database, "shard_manager", holder, lease_ms=settings.lease_ms)
        self._sync_lease = RoleLease(self.database, "syncer", holder, lease_ms=settings.lease_ms)
        # A SQLite file has one process: an earlier holder of the leases is dead.
        self._renew_leases(seize=not self.database.is_shared)
        self._recorder = MetricRecorder(self.metrics)
        self._bus_care = BusCare(self.log, clean_ms=settings.clean_ms, clean_after_ms=settings.clean_after_ms)
        rest = partial(sleep_ms, REST_MS)
        self.capacity = CapacityManager(
            self.jobs, self.fleet, self.patch_layer, settings.capacity_patience_ms, rest=rest
        )
        self._alarming = AlarmLoop(self, self.job_store, lambda: self._loops, lambda: self._bus_care.failing)
        self.alarms = self._alarming.service
        self._scaled = ScalerJobs(
            self.jobs,
            self.task_service,
            self.fleet,
            self.patch_layer,
            lambda: self.clock,
            stock=self.capacity.stock,
            rest=rest,
        )
        self.scaler = build_scaler(
            self.database,
            self.journal,
            self.metrics,
            self._scaled,
            self.alarms.store,
            profile=settings.profile,
            rest=rest,
        )
        self.scaling = ScalingHere(self.scaler)
        unpacked = UnpackedPackages(settings.folder / "policies", self.packages.get)
        self.policies = PolicyManager(self, self.alarms.store, unpacked.folder_of)
        self._scaled.fleet_state = self.policies.jobs.fleet  # scaler and policies share the limit on rescales
        self._loops: tuple[Loop, ...] = (
            # Under load, longer pauses between rounds: each round then takes more changes at once.
            Loop(
                "state syncer",
                self._sync,
                every_ms=settings.sync_ms,
                gap_ms=settings.sync_gap_ms,
                share_max=0.1,
                rest_max_ms=500,
            ),
            Loop("shard manager", lambda: self._tick_shards(), every_ms=settings.shard_ms, share_max=0.3),
            Loop("bus", self._maintain_bus, every_ms=settings.bus_ms, share_max=0.2),
            # Rounds over all jobs pause regularly themselves.
            Loop("resources", self._scale, every_ms=settings.scaler_ms, share_max=0.5),
            Loop("metrics", self._record, every_ms=settings.metrics_ms, share_max=0.1),
            Loop("capacity", self._check_capacity, every_ms=settings.capacity_ms, share_max=0.1),
            Loop("alarms", self._run_alarms, every_ms=settings.alarms_ms, share_max=0.2),
            Loop("policies", lambda: self.policies.tick(), every_ms=settings.policies_ms),
        )

    def _renew_leases(self, *, seize: bool = False) -> None:
        """Renew or take the leases of Shard Manager and State Syncer, of which one instance may be active."""
        now_ms = self.clock.now_ms()
        term = self._shard_lease.renew(now_ms, seize=seize)
        if term is None:
            self._shard_manager = None
        elif self._shard_manager is None or self._shard_manager.term != term:
            log.info("shard manager is active here", term=term)
            self._shard_manager = self._new_shard_manager(term)
        term = self._sync_lease.renew(now_ms, seize=seize)
        if term is None:
            self._syncer = None
        elif self._syncer is None or self._syncer.term != term:
            log.info("state syncer is active here", term=term)
            self._syncer = self._new_syncer(term)

    def _new_shard_manager(self, term: int) -> ShardManager:
        return ShardManager(
            ShardStore(self.database, self.journal),
            profile=PROFILES[self.settings.profile],
            term=term,
            list_version=self.task_service.version,
            reserved_loads=lambda: self.task_service.reserved_loads(self.settings.shards),
            shard_count=self.settings.shards,
            settings=ShardManagerSettings(balance_soon_ms=1_000, moves_max=16),
            wall_of=self._wall_of,
            bars=lambda at_ms: self.policies.bars(at_ms),
        )

    def _new_syncer(self, term: int) -> StateSyncer:
        return StateSyncer(
            self.job_store,
            self.fleet,
            self._data_plane,
            term=term,
            settings=SyncerSettings(
                fence_after_ms=6_000 if self.settings.profile == "fast" else 50_000,
                round_ms=self.settings.lease_ms // 4,  # the lease is renewed between rounds
            ),
            workers=self._workers,
            # With SQLite a thread of its own is slower: every row switches threads.
            background=self._background if self.database.is_shared else None,
            measure_ms=self.clock.boot_ms,
        )

    @property
    def shard_manager(self) -> ShardManager:
        """The Shard Manager, if it is active in this process; StoreUnavailable if not."""
        if self._shard_manager is None:
            raise StoreUnavailable(
                "this control plane is a standby",
                why="another control plane on the same database holds the Shard Manager's lease",
                fix="send the request to that one; this one takes over when its lease expires",
            )
        return self._shard_manager

    @property
    def is_syncing(self) -> bool:
        """Whether the State Syncer is active here, and with it the loops that work on jobs."""
        return self._syncer is not None

    @property
    def is_active(self) -> bool:
        """Whether Shard Manager and State Syncer are active in this instance."""
        return self._shard_manager is not None and self._syncer is not None

    def start(self) -> None:
        """Start the loops."""
        for loop in self._loops:
            loop.start()

    def stop(self) -> None:
        """Stop the loops and close the store."""
        for loop in self._loops:
            loop.stop()
        self._recorder.stop()
        self._alarming.stop()
        self.policies.stop()
        self._workers.stop()
        self._background.stop()
        with contextlib.suppress(PenstockError):  # if the store is unavailable, the leases expire
            self._shard_lease.release()
            self._sync_lease.release()
        self.database.close()

    def _sync(self) -> None:
        self._renew_leases()
        if self._syncer is None:
            return
        try:
            report = self._syncer.sync_once(self.clock.now_ms())
        except Fenced:
            self._sync_lease.invalidate()
            raise
        for job, error in report.failed:
            log.warning("sync failed", job=job, error=error)
        if report.simple or report.complex:
            log.info("synced", simple=some_of(report.simple), complex=some_of(report.complex))
        if report.left:
            self._loops[0].poke()
        elif report.open:
            # An open plan waits for containers to stop: check it again soon.
            self._loops[0].poke_after(100)

    def _tick_shards(self) -> None:
        if self._shard_manager is None:
            return
        try:
            report = self._shard_manager.tick(self.clock.boot_ms())
        except Fenced:
            self._shard_lease.invalidate()
            raise
        if report.failed_over:
            log.warning("failed over", containers=report.failed_over)

    def _scale(self) -> None:
        if self.is_syncing:
            self.scaler.tick(self.clock.now_ms())

    def _record(self) -> None:
        if self._syncer is None:
            self._recorder.stand_by()
        else:
            counts, reports = self.task_service.task_counts(), self.task_reports()
            self._recorder.tick(self.clock.now_ms(), counts, reports)

    def _check_capacity(self) -> None:
        if self._syncer is not None:
            self.capacity.tick(self.clock.now_ms())

    def _run_alarms(self) -> None:
        if self._syncer is not None and self._alarming.tick(self.clock.now_ms()):
            self._loops[-1].poke_after(50)

    def _maintain_bus(self) -> None:
        if not self.is_active:
            return
        self._bus_care.tick(now_ms=self.clock.now_ms(), boot_ms=self.clock.boot_ms())

    def _wall_of(self, boot_ms: Millis) -> Millis:
        return self.clock.now_ms() - self.clock.boot_ms() + boot_ms

    def wake_syncer(self) -> None:
        """A job changed: start the next round now."""
        self._loops[0].poke()

    def wake_shard_manager(self) -> None:
        """A shard order was given: start the next round now."""
        self._loops[1].poke()

    def loop_counts(self) -> dict[str, dict[str, int]]:
        """The numbers of rounds and failures of each loop."""
        return {loop.name: {"rounds": loop.rounds, "failures": loop.failures} for loop in self._loops}

    # -- jobs -------------------------------------------------------------------------------------------

    def patch_layer(
        self,
        job: str,
        layer: str,
        changes: Mapping[str, Any],
        *,
        expected_version: int | None,
        actor: Actor,
        reason: str,
        idempotency_key: str | None,
    ) -> int:
        """Change one layer of one job."""
        version = self.jobs.patch_layer(
            job,
            layer,
            changes,
            expected_version=expected_version,
            actor=actor,
            reason=reason,
            idempotency_key=idempotency_key,
            now_ms=self.clock.now_ms(),
        )
        self.wake_syncer()
        return version

    def task_reports(self) -> dict[str, list[TaskReport]]:
        """The current task reports by job."""
        return self._scaled.task_reports()

    # -- containers -------------------------------------------------------------------------------------

    def register_container(self, name: str, incarnation: str, *, folder_id: str) -> None:
        """Register an incarnation of a container."""
        self.shard_manager.register(name, incarnation, folder_id=folder_id, now_ms=self.clock.boot_ms())

    def on_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Answer one heartbeat."""
        return self.shard_manager.on_heartbeat(heartbeat, self.clock.boot_ms())

    def on_beat_arrival(self, heartbeat: Heartbeat) -> None:
        """A heartbeat was received; it is answered later."""
        self.shard_manager.on_arrival(heartbeat, self.clock.boot_ms())

    def answer_beats(self, heartbeats: Sequence[Heartbeat]) -> list[HeartbeatReply]:
        """Answer received heartbeats together."""
        return self.shard_manager.answer_heartbeats(heartbeats, self.clock.boot_ms())

    def on_container_dead(self, name: str, folder_id: str | None = None) -> bool:
        """A host reports that all processes of a container ended; `folder_id` proves that it is its host."""
        for row in self.fleet.containers():
            if row.name == name and folder_id in (None, row.folder_id):
                self.wake_shard_manager()
                now_ms = self.clock.boot_ms()
                return self.shard_manager.on_container_dead(name, row.incarnation, now_ms)
        return False

    def task_list(self, since: int | None) -> tuple[int, bytes]:
        """(version, JSON) of the task list, or of the changes since a version."""
        return self.task_service.encoded_at(since)

    def installation(self) -> dict[str, str]:
        """What a container needs to know to join."""
        return {
            "profile": self.settings.profile,
            "bus": self.settings.bus_place,
            "store": self.settings.store,
            "rows": self.settings.rows_argument,
            "rows_identity": self._rows_identity,
            "host": socket.gethostname(),
        }
