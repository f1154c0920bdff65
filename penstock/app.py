"""The control plane put together: the one place that wires stores, services and loops (embedded form)."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import structlog

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, Fenced, NotFound, PenstockError, StoreUnavailable
from penstock.core.installation_store import open_database
from penstock.core.journal import Entry
from penstock.core.journal_store import JournalStore
from penstock.core.lease_store import RoleLease
from penstock.core.loop import AsideThreads, Loop, WorkerThreads
from penstock.core.near_names import some_of
from penstock.core.pace import REST_MS
from penstock.core.system_clock import SystemClock, sleep_ms
from penstock.core.token_store import TokenStore
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.plan_runner import Outcome
from penstock.jobs.running_store import RunningStore
from penstock.jobs.state_syncer import StateSyncer, SyncerSettings
from penstock.jobs.token_service import TokenService
from penstock.resources.capacity_manager import CapacityManager
from penstock.resources.metric_store import MetricStore
from penstock.resources.policy_desk import PolicyDesk
from penstock.resources.recorder import MetricRecorder
from penstock.scaling import JobsOfPlane, build_scaler
from penstock.settings import Settings
from penstock.streams.bus.log import CategorySpec
from penstock.streams.bus_care import BusCare
from penstock.streams.catalogue import category_to_json
from penstock.streams.data_plane import StreamDataPlane, check_places
from penstock.streams.package_shelf import PackageShelf, UnpackedPackages
from penstock.streams.places import identify, identify_rows, open_log, open_rows
from penstock.streams.state_view import StateView
from penstock.streams.watermark_view import WatermarkView
from penstock.tasks.fleet_view import FleetView
from penstock.tasks.lending_service import LendingService
from penstock.tasks.loan_store import LoanStore
from penstock.tasks.messages import PROFILES, Heartbeat, HeartbeatReply, TaskReport
from penstock.tasks.shard_manager import Pace, ShardManager
from penstock.tasks.shard_store import ShardStore
from penstock.tasks.task_service import TaskService
from penstock.web.alarming import Alarming

log = structlog.get_logger(__name__)


class ControlPlane:
    """Every service of one control plane, and what the API asks of them."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.clock = settings, SystemClock()
        self.database = open_database(
            settings.database or settings.folder / "store.db",
            lambda: {"bus": identify(settings.bus), "rows": identify_rows(settings.rows)},
        )
        self.journal = JournalStore(self.database)
        self.tokens = TokenStore(self.database)
        self.log, rows = open_log(settings.bus), open_rows(settings.rows)
        self._rows_identity = identify_rows(settings.rows)
        self.packages = PackageShelf(settings.folder / "packages")
        self._store = JobStore(self.database)
        self.jobs = JobService(self._store, check=partial(check_places, settings.rows))
        self.token_service = TokenService(self._store, self.tokens)
        self.task_service = TaskService(RunningStore(self.database))
        self.fleet = FleetView(ShardStore(self.database, self.journal))
        loans = LoanStore(self.database, self.journal)
        self.lending = LendingService(loans, self.fleet, self.tokens, self)
        self._data_plane = StreamDataPlane(self.log, rows, rows_place=settings.rows)
        self.watermarks, self.states = WatermarkView(self.log, rows), StateView(self.log, rows)
        self._workers: WorkerThreads[Outcome] = WorkerThreads("state syncer", self.clock)
        self._aside = AsideThreads("state syncer aside", threads=2)
        self._shard_manager: ShardManager | None = None
        self._syncer: StateSyncer | None = None
        holder = secrets.token_hex(8)
        self._shard_lease = RoleLease(self.database, "shard_manager", holder, lease_ms=settings.lease_ms)
        self._sync_lease = RoleLease(self.database, "syncer", holder, lease_ms=settings.lease_ms)
        # Whoever opens a file of its own is alone with it: a holder from before is gone.
        self._lead(seize=not self.database.is_shared)
        self.metrics = MetricStore(self.database)
        self._recorder = MetricRecorder(self.metrics)
        self._bus_care = BusCare(self.log, clean_ms=settings.clean_ms, clean_after_ms=settings.clean_after_ms)
        rest = partial(sleep_ms, REST_MS)
        self.capacity: CapacityManager = CapacityManager(
            self.jobs, self.fleet, self.patch_layer, settings.capacity_patience_ms, rest=rest
        )
        self._alarming = Alarming(self, self._store, lambda: self._loops, lambda: self._bus_care.failing)
        self.alarms = self._alarming.service
        self._scaled = JobsOfPlane(
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
        unpacked = UnpackedPackages(settings.folder / "policies", self.packages.get)
        self.policies = PolicyDesk(self, self.alarms.store, unpacked.folder_of)
        self._scaled.fleet_state = self.policies.jobs.fleet  # the cap on rescales is one for all
        self._loops: tuple[Loop, ...] = (
            # Under many changes a round takes more of them at once, instead of most of the time for itself.
            Loop(
                "state syncer",
                self._sync,
                every_ms=settings.sync_ms,
                gap_ms=settings.sync_gap_ms,
                share_max=0.1,
                rest_max_ms=500,
            ),
            Loop("shard manager", lambda: self._tick_shards(), every_ms=settings.shard_ms, share_max=0.3),
            Loop("bus", self._tend_bus, every_ms=settings.bus_ms, share_max=0.2),
            # Rounds over all jobs rest while they last.
            Loop("resources", self._scale, every_ms=settings.scaler_ms, share_max=0.5),
            Loop("metrics", self._record, every_ms=settings.metrics_ms, share_max=0.1),
            Loop("capacity", self._keep_capacity, every_ms=settings.capacity_ms, share_max=0.1),
            Loop("alarms", self._tell, every_ms=settings.alarms_ms, share_max=0.2),
            Loop("policies", lambda: self.policies.tick(), every_ms=settings.policies_ms),
        )

    def _lead(self, *, seize: bool = False) -> None:
        """Keep or take the roles of which one instance may be active, as far as they are free."""
        now_ms = self.clock.now_ms()
        term = self._shard_lease.keep(now_ms, seize=seize)
        if term is None:
            self._shard_manager = None
        elif self._shard_manager is None or self._shard_manager.term != term:
            log.info("shard manager is active here", term=term)
            self._shard_manager = self._new_shard_manager(term)
        term = self._sync_lease.keep(now_ms, seize=seize)
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
            pace=Pace(balance_soon_ms=1_000, moves_max=16),
            wall_of=self._wall_of,
            bars=lambda at_ms: self.policies.bars(at_ms),
        )

    def _new_syncer(self, term: int) -> StateSyncer:
        return StateSyncer(
            self._store,
            self.fleet,
            self._data_plane,
            term=term,
            settings=SyncerSettings(
                fence_after_ms=6_000 if self.settings.profile == "fast" else 50_000,
                round_ms=self.settings.lease_ms // 4,  # the lease is renewed between rounds
            ),
            workers=self._workers,
            # SQLite gives way to other threads with every row, which takes longer than it saves.
            aside=self._aside if self.database.is_shared else None,
            measure_ms=self.clock.boot_ms,
        )

    @property
    def shard_manager(self) -> ShardManager:
        """The active Shard Manager, if it is in this process."""
        if self._shard_manager is None:
            raise StoreUnavailable(
                "this control plane is a standby",
                why="another one on the same database holds the lease of the Shard Manager",
                fix="ask that one; this one takes over by itself when it falls silent",
            )
        return self._shard_manager

    @property
    def is_syncing(self) -> bool:
        """Whether the State Syncer is active here, and with it whatever else looks at jobs."""
        return self._syncer is not None

    @property
    def is_active(self) -> bool:
        """Whether this instance does more than answer questions."""
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
        self._aside.stop()
        with contextlib.suppress(PenstockError):  # a store that is away frees the leases by itself
            self._shard_lease.release()
            self._sync_lease.release()
        self.database.close()

    def _sync(self) -> None:
        self._lead()
        if self._syncer is None:
            return
        try:
            report = self._syncer.sync_once(self.clock.now_ms())
        except Fenced:
            self._sync_lease.doubt()
            raise
        for job, error in report.failed:
            log.warning("sync failed", job=job, error=error)
        if report.simple or report.complex:
            log.info("synced", simple=some_of(report.simple), complex=some_of(report.complex))
        if report.left:
            self._loops[0].poke()
        elif report.open:
            # A plan that waits for containers to stop is looked at again soon, not after a whole round.
            self._loops[0].poke_after(100)

    def _tick_shards(self) -> None:
        if self._shard_manager is None:
            return
        try:
            report = self._shard_manager.tick(self.clock.boot_ms())
        except Fenced:
            self._shard_lease.doubt()
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

    def _keep_capacity(self) -> None:
        if self._syncer is not None:
            self.capacity.tick(self.clock.now_ms())

    def _tell(self) -> None:
        if self._syncer is not None and self._alarming.tick(self.clock.now_ms()):
            self._loops[-1].poke_after(50)

    def _tend_bus(self) -> None:
        if not self.is_active:
            return
        self._bus_care.tick(now_ms=self.clock.now_ms(), boot_ms=self.clock.boot_ms())

    def _wall_of(self, boot_ms: Millis) -> Millis:
        return self.clock.now_ms() - self.clock.boot_ms() + boot_ms

    def wake_syncer(self) -> None:
        """Something else is expected of a job: do not wait for the next round."""
        self._loops[0].poke()

    def wake_shard_manager(self) -> None:
        """Something else is wanted of shards: do not wait for the next round."""
        self._loops[1].poke()

    def loop_counts(self) -> dict[str, dict[str, int]]:
        """How often each loop went round, and how often that failed."""
        return {loop.name: {"rounds": loop.rounds, "failures": loop.failures} for loop in self._loops}

    # -- jobs -------------------------------------------------------------------------------------------

    def submit_pipeline(
        self, compiled: Mapping[str, Any], *, actor: Actor, reason: str, idempotency_key: str | None
    ) -> dict[str, Any]:
        """Store a compiled pipeline in the provisioner layer of its jobs."""
        package = compiled.get("package")
        hash_ = str(package.get("hash", "")) if isinstance(package, Mapping) else ""
        if hash_ and not self.packages.has(hash_):
            raise NotFound(
                f"the package {hash_[:12]}… is not here",
                why="it must be put before the pipeline",
                fix="submit again",
            )
        done = self.jobs.submit_pipeline(
            dict(compiled),
            actor=actor,
            reason=reason,
            idempotency_key=idempotency_key,
            now_ms=self.clock.now_ms(),
            new_birth=lambda: secrets.token_hex(8),
        )
        self.wake_syncer()
        return asdict(done)

    def plan_pipeline(self, compiled: Mapping[str, Any]) -> dict[str, Any]:
        """What submitting would change, and the other file whose pipeline it would replace."""
        changes, replaces = self.jobs.plan_submit(dict(compiled))
        return {"changes": [change.to_json() for change in changes], "replaces": replaces}

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
        """What tasks say now, by job."""
        return self._scaled.task_reports()

    # -- streams ----------------------------------------------------------------------------------------

    def category_views(self) -> dict[str, Any]:
        """Every category, and of those that cannot be read why."""
        views, unreadable = [], {}
        for name in self.log.names():
            try:
                views.append(self.category_view(name))
            except NotFound:
                continue  # it is just being made
            except PenstockError as error:
                unreadable[name] = f"{error.what}: {error.why}"
        return {"categories": views, **({"unreadable": unreadable} if unreadable else {})}

    def category_view(self, name: str) -> dict[str, Any]:
        """One category: spec, birth, how much is in it, how far its watermark is."""
        category = self.log.describe(name)
        return {
            "spec": category_to_json(category.spec),
            "birth": category.birth,
            "end_offsets": list(self.log.end_offsets(name)),
            "watermark": self.log.watermark(name),
        }

    def create_category(self, spec: CategorySpec, *, actor: str) -> bool:
        """Create a category for records from outside; False if it was there, with the same spec."""
        if spec.watermark not in ("event_time", "injector"):
            raise ConfigError(
                f"no such watermark: {spec.watermark!r}",
                why="records from outside have `event_time` or `injector`; `producers` is for jobs' outputs",
                fix="choose one of the two",
            )
        is_new = spec.name not in self.log.names()
        self.log.create(spec)
        entry = Entry(
            at_ms=self.clock.now_ms(),
            actor=actor,
            kind="category",
            subject=spec.name,
            # Said in both cases: the bus is no part of this transaction, and a crash may lie in between.
            decision="created" if is_new else "asked for again: it was there",
            reason="asked to",
        )
        self.journal.append(None, entry)
        return is_new

    # -- containers -------------------------------------------------------------------------------------

    def register_container(self, name: str, incarnation: str, *, folder_id: str) -> None:
        """A container's new life."""
        self.shard_manager.register(name, incarnation, folder_id=folder_id, now_ms=self.clock.boot_ms())

    def on_heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """A beat and its answer."""
        return self.shard_manager.on_heartbeat(beat, self.clock.boot_ms())

    def on_beat_arrival(self, beat: Heartbeat) -> None:
        """A beat is here; its answer may take a while."""
        self.shard_manager.on_arrival(beat, self.clock.boot_ms())

    def answer_beats(self, beats: Sequence[Heartbeat]) -> list[HeartbeatReply]:
        """The answers to beats that arrived, together."""
        return self.shard_manager.answer_beats(beats, self.clock.boot_ms())

    def on_container_dead(self, name: str, folder_id: str | None = None) -> bool:
        """The host saw it end, and made sure that nothing of it is left; `folder_id` proves whose host."""
        for row in self.fleet.containers():
            if row.name == name and folder_id in (None, row.folder_id):
                self.wake_shard_manager()
                now_ms = self.clock.boot_ms()
                return self.shard_manager.on_container_dead(name, row.incarnation, now_ms)
        return False

    def task_list(self, since: int | None) -> tuple[int, bytes]:
        """The task list, or what changed in it, as JSON with its version."""
        return self.task_service.encoded_at(since)

    def installation(self) -> dict[str, str]:
        """What a container must know to join."""
        told = {name: str(getattr(self.settings, name)) for name in ("profile", "bus", "store")}
        rows = {"rows": self.settings.told_rows, "rows_identity": self._rows_identity}
        return {**told, **rows, "host": socket.gethostname()}
