"""What routes use. Every process that serves the API has `Services`, over its own handle of the store; the
process that holds the leases is a `Control`, which has more.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.layer_writer import Asked
from penstock.jobs.layers import merge_layers
from penstock.jobs.text_rules import shown
from penstock.jobs.token_service import TokenService
from penstock.scaling.metrics.frames import JobLoad
from penstock.scaling.metrics.store import MetricStore
from penstock.settings import Settings
from penstock.streams.bus.log import CategorySpec
from penstock.streams.catalogue import category_to_json
from penstock.streams.data_plane import check_places
from penstock.streams.inspect.state_view import StateView
from penstock.streams.inspect.watermark_view import WatermarkView
from penstock.streams.package_shelf import PackageShelf
from penstock.streams.places import open_log, open_rows

if TYPE_CHECKING:  # what only the lease holder has; a worker starts sooner without it
    from penstock.alarms.service import AlarmService
    from penstock.fleet.loan_service import LendingService
    from penstock.fleet.shard_manager import ShardManager
    from penstock.fleet.task_service import TaskService
    from penstock.scaling.capacity_manager import CapacityManager
    from penstock.scaling.policies.desk import PolicyDesk
    from penstock.scaling.scaler.auto_scaler import AutoScaler


class Scaling(Protocol):
    """The auto scaler's last load and reason of each job, which no store has."""

    def load_of(self, job: str) -> JobLoad | dict[str, Any] | None:
        """The load of a job; None: not known."""

    def reason_of(self, job: str) -> str:
        """Why it has the tasks it has, "" if nothing was decided."""


class Services(ABC):
    """Everything that needs only the store, the bus and the rows: any process can serve it."""

    scaling: Scaling

    def __init__(self, settings: Settings, database: Database) -> None:
        self.settings, self.database = settings, database
        self.clock: Clock = SystemClock()
        self.journal, self.tokens = JournalStore(database), TokenStore(database)
        self.log, self.rows = open_log(settings.bus_place), open_rows(settings.rows_place)
        self.packages = PackageShelf(settings.folder / "packages")
        self.job_store = JobStore(database)
        self.jobs = JobService(self.job_store, check=partial(check_places, settings.rows_place))
        self.token_service = TokenService(self.job_store, self.tokens)
        self.fleet = FleetView(ShardStore(database, self.journal))
        self.watermarks, self.states = WatermarkView(self.log, self.rows), StateView(self.log, self.rows)
        self.metrics = MetricStore(database)

    @abstractmethod
    def wake_syncer(self) -> None:
        """Tell the State Syncer that something else is expected of a job."""

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


class Control(Services):
    """The control plane, as far as routes use it: also the memory of its loops."""

    task_service: TaskService
    lending: LendingService
    policies: PolicyDesk
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
        """Whether this instance does more than answer requests."""

    @abstractmethod
    def wake_shard_manager(self) -> None:
        """Tell the Shard Manager that something else is wanted of shards."""

    @abstractmethod
    def loop_counts(self) -> dict[str, dict[str, int]]:
        """How often each loop went round, and how often that failed."""

    @abstractmethod
    def register_container(self, name: str, incarnation: str, *, folder_id: str) -> None:
        """Register a container's new incarnation."""

    @abstractmethod
    def on_beat_arrival(self, beat: Heartbeat) -> None:
        """A heartbeat has arrived; its reply may take a while."""

    @abstractmethod
    def answer_beats(self, beats: Sequence[Heartbeat]) -> list[HeartbeatReply]:
        """The replies to heartbeats that arrived, in one transaction."""

    @abstractmethod
    def on_container_dead(self, name: str, folder_id: str | None = None) -> bool:
        """The host reports that a container ended; `folder_id` proves that it is its host."""

    @abstractmethod
    def task_list(self, since: int | None) -> tuple[int, bytes]:
        """The task list, or what changed in it, as JSON with its version."""

    @abstractmethod
    def installation(self) -> dict[str, str]:
        """What a container must know to join."""


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
        """Every job of which something is known."""
        jobs = {*list(self._scaler.loads), *list(self._scaler.decisions)}  # the scaler adds to them
        return {job: (self.load_of(job), self.reason_of(job)) for job in sorted(jobs)}


class WriteArguments:
    """Makes what every change is asked with, at this moment."""

    def __init__(self, services: Services) -> None:
        self._clock = services.clock

    def __call__(self, caller: Caller, why: str, key: str | None) -> Asked:
        return Asked(actor=actor_of(caller), reason=why, idempotency_key=key, now_ms=self._clock.now_ms())


def actor_of(caller: Caller) -> Actor:
    """Whoever holds the token, as the services know them."""
    return Actor(name=caller.name, role=caller.role)


def check_package(services: Services, job: str, config: Mapping[str, Any]) -> None:
    """NotFound if this names a package that nobody put here, and that the job does not name already."""
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
            why=f"job {shown(job)} would name code that nobody put here, and its tasks could not start",
            fix="put the package first (`penstock submit` does), or correct its hash",
        )


def version_of(if_match: str | None) -> int | None:
    """The version that an ETag names; None: whatever there is. Requires: the header's pattern was checked."""
    return None if if_match is None or if_match == "*" else int(if_match.strip('"'))
