"""The services that routes call. Every API process has `Services`, over its own handle of the store; the
process that holds the leases has `Control`, which adds the services with state in memory.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from penstock.core.clock import Clock
from penstock.core.errors import ConfigError, NotFound, PenstockError
from penstock.core.journal import Entry
from penstock.core.system_clock import SystemClock
from penstock.db.database import Database
from penstock.db.journal_store import JournalStore
from penstock.db.tokens import Caller, TokenStore
from penstock.fleet.messages import Heartbeat, HeartbeatReply
from penstock.fleet.shard_store import FleetView, ShardStore
from penstock.jobs.job_reads import Submitted
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.layer_writer import CallOptions
from penstock.jobs.layers import merge_layers
from penstock.jobs.text_rules import shown
from penstock.jobs.token_service import TokenService
from penstock.scaling.metrics.frames import JobLoad
from penstock.scaling.metrics.store import MetricStore
from penstock.server import replies
from penstock.settings import Settings
from penstock.streams.bus.log import CategorySpec
from penstock.streams.catalogue import category_to_json
from penstock.streams.data_plane import check_places
from penstock.streams.inspect.state_view import StateView
from penstock.streams.inspect.watermark_view import WatermarkView
from penstock.streams.package_store import PackageStore
from penstock.streams.places import open_log, open_rows

if TYPE_CHECKING:  # what only the lease holder has; a worker starts sooner without it
    from penstock.alarms.service import AlarmService
    from penstock.fleet.loan_service import LendingService
    from penstock.fleet.shard_manager import ShardManager
    from penstock.fleet.task_service import TaskService
    from penstock.scaling.capacity_manager import CapacityManager
    from penstock.scaling.policies.policy_manager import PolicyManager
    from penstock.scaling.scaler.auto_scaler import AutoScaler


class Scaling(Protocol):
    """The auto scaler's last load and last decision for each job; they are in memory only."""

    def load_of(self, job: str) -> JobLoad | dict[str, Any] | None:
        """The load of a job; None: unknown."""

    def reason_of(self, job: str) -> str:
        """The reason of the last scaling decision; "" if there is none."""


class Services(ABC):
    """Services that need only the store, the bus and the rows: any API process can provide them."""

    scaling: Scaling

    def __init__(self, settings: Settings, database: Database) -> None:
        self.settings, self.database = settings, database
        self.clock: Clock = SystemClock()
        self.journal, self.tokens = JournalStore(database), TokenStore(database)
        self.log, self.rows = open_log(settings.bus_place), open_rows(settings.rows_place)
        self.packages = PackageStore(settings.folder / "packages")
        self.job_store = JobStore(database)
        self.jobs = JobService(self.job_store, check=partial(check_places, settings.rows_place))
        self.token_service = TokenService(self.job_store, self.tokens)
        self.fleet = FleetView(ShardStore(database, self.journal))
        self.watermarks, self.states = WatermarkView(self.log, self.rows), StateView(self.log, self.rows)
        self.metrics = MetricStore(database)

    @abstractmethod
    def wake_syncer(self) -> None:
        """Wake the State Syncer: a job's expected config changed."""

    # -- jobs -------------------------------------------------------------------------------------------

    def submit_pipeline(
        self, compiled: Mapping[str, Any], *, actor: Actor, reason: str, idempotency_key: str | None
    ) -> Submitted:
        """Store a compiled pipeline in the provisioner layer of its jobs."""
        package = compiled.get("package")
        hash_ = str(package.get("hash", "")) if isinstance(package, Mapping) else ""
        if hash_ and not self.packages.has(hash_):
            raise NotFound(
                f"the package {hash_[:12]}… is not stored on this server",
                why="a pipeline's package must be uploaded before the pipeline",
                fix="submit again with `penstock submit`, which uploads both",
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
        return done

    # -- streams ----------------------------------------------------------------------------------------

    def category_views(self) -> replies.Categories:
        """Every category; for those that cannot be read, the error."""
        views, unreadable = [], {}
        for name in self.log.names():
            try:
                views.append(self.category_view(name))
            except NotFound:
                continue  # its creation is not complete
            except PenstockError as error:
                unreadable[name] = f"{error.what}: {error.why}"
        return replies.Categories(categories=views, unreadable=unreadable)

    def category_view(self, name: str) -> replies.CategoryReply:
        """One category: spec, birth, end offsets and watermark."""
        category = self.log.describe(name)
        return replies.CategoryReply(
            spec=category_to_json(category.spec),
            birth=category.birth,
            end_offsets=list(self.log.end_offsets(name)),
            watermark=self.log.watermark(name),
        )

    def create_category(self, spec: CategorySpec, *, actor: str) -> bool:
        """Create a category for external records; False if it exists already with the same spec."""
        if spec.watermark not in ("event_time", "injector"):
            raise ConfigError(
                f"no such watermark: {spec.watermark!r}",
                why="a category for external records has `event_time` or `injector`; "
                "`producers` is for outputs of jobs",
                fix="choose `event_time` or `injector`",
            )
        is_new = spec.name not in self.log.names()
        self.log.create(spec)
        entry = Entry(
            at_ms=self.clock.now_ms(),
            actor=actor,
            kind="category",
            subject=spec.name,
            # Written in both cases: a crash after `create` may have lost the first entry.
            decision="created" if is_new else "create repeated: it exists already",
            reason="requested",
        )
        self.journal.append(None, entry)
        return is_new


class Control(Services):
    """Services of the control plane process, which also has the state of its loops in memory."""

    task_service: TaskService
    lending: LendingService
    policies: PolicyManager
    capacity: CapacityManager
    scaler: AutoScaler
    alarms: AlarmService

    @property
    @abstractmethod
    def shard_manager(self) -> ShardManager:
        """The active Shard Manager; StoreUnavailable where it is in another process."""

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether this instance is the active control plane, not a standby."""

    @abstractmethod
    def wake_shard_manager(self) -> None:
        """Wake the Shard Manager: what is wanted of shards changed."""

    @abstractmethod
    def loop_counts(self) -> dict[str, dict[str, int]]:
        """Rounds and failed rounds of each loop."""

    @abstractmethod
    def register_container(self, name: str, incarnation: str, *, folder_id: str) -> None:
        """Register a container's new incarnation."""

    @abstractmethod
    def on_beat_arrival(self, beat: Heartbeat) -> None:
        """Record the arrival of a heartbeat, before it is processed."""

    @abstractmethod
    def answer_beats(self, beats: Sequence[Heartbeat]) -> list[HeartbeatReply]:
        """Process a batch of heartbeats in one transaction; returns their replies."""

    @abstractmethod
    def on_container_dead(self, name: str, folder_id: str | None = None) -> bool:
        """The container's host reports that it ended; `folder_id` proves that the caller is its host."""

    @abstractmethod
    def task_list(self, since: int | None) -> tuple[int, bytes]:
        """The task list, or its changes since a version, as JSON; and its version."""

    @abstractmethod
    def installation(self) -> dict[str, str]:
        """The settings that a container needs to join."""


class ScalingHere:
    """`Scaling` in the process of the scaler."""

    def __init__(self, scaler: AutoScaler) -> None:
        self._scaler = scaler

    def load_of(self, job: str) -> JobLoad | None:
        load = self._scaler.loads.get(job)
        return load if isinstance(load, JobLoad) else None

    def reason_of(self, job: str) -> str:
        decision = self._scaler.decisions.get(job)
        return decision.reason if decision else ""

    def all(self) -> dict[str, tuple[JobLoad | None, str]]:
        """Load and reason of every job that has one of them."""
        jobs = {*list(self._scaler.loads), *list(self._scaler.decisions)}  # copies: the scaler adds to both
        return {job: (self.load_of(job), self.reason_of(job)) for job in sorted(jobs)}


class WriteArguments:
    """Makes the arguments that every write takes: actor, reason, idempotency key and time."""

    def __init__(self, services: Services) -> None:
        self._clock = services.clock

    def __call__(self, caller: Caller, why: str, key: str | None) -> CallOptions:
        return CallOptions(
            actor=actor_of(caller), reason=why, idempotency_key=key, now_ms=self._clock.now_ms()
        )


def actor_of(caller: Caller) -> Actor:
    """The caller as the services' actor."""
    return Actor(name=caller.name, role=caller.role)


def check_package(services: Services, job: str, config: Mapping[str, Any]) -> None:
    """NotFound if the config names a package that is neither stored nor named by the job already."""
    package = config.get("package")
    hash_ = package.get("hash") if isinstance(package, Mapping) else config.get("package.hash")
    if not isinstance(hash_, str) or services.packages.may_have(hash_):
        return
    try:
        merged = merge_layers(services.jobs.view(job).layers)
    except NotFound:
        merged = {}
    if (merged.get("package") or {}).get("hash") != hash_:
        raise NotFound(
            f"there is no package {hash_[:12]!r}",
            why=f"job {shown(job)} would name code that was never uploaded, and its tasks could not start",
            fix="upload the package first (`penstock submit` does), or correct its hash",
        )


def version_of(if_match: str | None) -> int | None:
    """The version in an ETag; None: any version. Requires: the header's pattern was checked."""
    return None if if_match is None or if_match == "*" else int(if_match.strip('"'))
