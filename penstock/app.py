"""The control plane put together: the one place that wires stores, services and loops (embedded form)."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, NotFound
from penstock.core.journal import Entry
from penstock.core.journal_store import JournalStore
from penstock.core.loop import Loop, SystemClock
from penstock.core.sql_store import Database, take_term
from penstock.core.token_store import TokenStore
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.job_view import JobView
from penstock.jobs.running_store import RunningStore
from penstock.jobs.state_syncer import StateSyncer, SyncerSettings
from penstock.resources.autoscaler import STALE_MS
from penstock.resources.controller import ResourceController, ScalableJob
from penstock.resources.metrics import JobLoad
from penstock.streams.bus.log import CategorySpec
from penstock.streams.catalogue import category_to_json
from penstock.streams.data_plane import StreamDataPlane
from penstock.streams.package_shelf import PackageShelf
from penstock.streams.places import open_log, open_rows
from penstock.tasks.container_store import ContainerState
from penstock.tasks.messages import PROFILES, Heartbeat, HeartbeatReply, TaskReport
from penstock.tasks.shard_manager import Pace, ShardManager
from penstock.tasks.shard_store import ShardStore
from penstock.tasks.sharding import SHARD_COUNT
from penstock.tasks.task_service import TaskService

log = structlog.get_logger(__name__)

SCALER = Actor(name="autoscaler", role="scaler")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one embedded installation runs."""

    folder: Path
    profile: str = "fast"
    sync_ms: Millis = 500  # the paper's 30 s sweep is for tens of thousands of jobs
    shard_ms: Millis = 500
    scaler_ms: Millis = 1_000
    bus_ms: Millis = 500
    clean_ms: Millis = 60_000  # how often the bus is searched for what dead publishers left
    clean_after_ms: Millis = 600_000

    @property
    def bus(self) -> str:
        """Where the streams lie."""
        return f"embedded:{self.folder / 'bus'}"

    @property
    def rows(self) -> str:
        """Where state lies."""
        return f"sqlite:{self.folder / 'rows'}"


class ControlPlane:
    """Every service of one control plane, and what the API asks of them."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.clock = settings, SystemClock()
        self.database = Database(settings.folder / "store.db")
        self.journal = JournalStore(self.database)
        self.tokens = TokenStore(self.database)
        self.log, rows = open_log(settings.bus), open_rows(settings.rows)
        self.packages = PackageShelf(settings.folder / "packages")
        store = JobStore(self.database)
        self.jobs = JobService(store)
        self.task_service = TaskService(RunningStore(self.database))
        holder = secrets.token_hex(4)
        self.shard_manager = ShardManager(
            ShardStore(self.database, self.journal),
            profile=PROFILES[settings.profile],
            term=take_term(self.database, "shard_manager", holder),
            list_version=self.task_service.version,
            shard_loads=lambda: self.task_service.shard_loads(SHARD_COUNT),
            pace=Pace(balance_soon_ms=1_000, moves_max=16),
            wall_of=self._wall_of,
        )
        self.syncer = StateSyncer(
            store,
            self.shard_manager,
            StreamDataPlane(self.log, rows),
            term=take_term(self.database, "syncer", holder),
            settings=SyncerSettings(fence_after_ms=6_000 if settings.profile == "fast" else 50_000),
        )
        self.controller = ResourceController(self, self.reports)
        self._cleaned_ms: Millis = 0
        self._loops = (
            Loop("state syncer", self._sync, every_ms=settings.sync_ms),
            Loop("shard manager", lambda: self._tick_shards(), every_ms=settings.shard_ms),
            Loop("bus", self._tend_bus, every_ms=settings.bus_ms),
            Loop("resources", lambda: self.controller.tick(self.clock.now_ms()), every_ms=settings.scaler_ms),
        )

    def start(self) -> None:
        """Start the loops."""
        for loop in self._loops:
            loop.start()

    def stop(self) -> None:
        """Stop the loops and close the store."""
        for loop in self._loops:
            loop.stop()
        self.database.close()

    def _sync(self) -> None:
        report = self.syncer.sync_once(self.clock.now_ms())
        for job, error in report.failed:
            log.warning("sync failed", job=job, error=error)
        if report.simple or report.complex:
            log.info("synced", simple=report.simple, complex=report.complex)
        if report.open:
            # A plan that waits for containers to stop is looked at again soon, not after a whole round.
            self._loops[0].poke_after(100)

    def _tick_shards(self) -> None:
        report = self.shard_manager.tick(self.clock.boot_ms())
        if report.failed_over:
            log.warning("failed over", containers=report.failed_over)

    def _tend_bus(self) -> None:
        now_ms = self.clock.now_ms()
        for category in self.log.categories():
            self.log.advance(category.spec.name, now_ms=now_ms)
        if now_ms - self._cleaned_ms >= self.settings.clean_ms:
            self._cleaned_ms = now_ms
            self.log.clean(now_ms=now_ms, older_than_ms=self.settings.clean_after_ms)

    def _wall_of(self, boot_ms: Millis) -> Millis:
        return self.clock.now_ms() - self.clock.boot_ms() + boot_ms

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
        versions = self.jobs.submit_pipeline(
            dict(compiled),
            actor=actor,
            reason=reason,
            idempotency_key=idempotency_key,
            now_ms=self.clock.now_ms(),
            new_birth=lambda: secrets.token_hex(8),
        )
        self._loops[0].poke()
        return {"jobs": versions}

    def plan_pipeline(self, compiled: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What submitting would change."""
        return [change.to_json() for change in self.jobs.plan_pipeline(dict(compiled))]

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
        self._loops[0].poke()
        return version

    def job_view(self, name: str) -> dict[str, Any]:
        """One job, whole."""
        return {**self.jobs.view(name).to_json(), "load": self._load(name), "tasks": self._tasks(name)}

    def job_views(self) -> list[dict[str, Any]]:
        """All jobs, a line each."""
        return [self._line(view) for view in self.jobs.views()]

    def _line(self, view: JobView) -> dict[str, Any]:
        decision = self.controller.decisions.get(view.name)
        return {
            "name": view.name,
            "pipeline": view.pipeline,
            "kind": view.config.get("kind", ""),
            "state": _state_of(view),
            "expected_version": view.expected_version,
            "generation": view.running.generation if view.running else 0,
            "task_count": view.config.get("task_count", 0),
            "running_task_count": view.running.config["task_count"] if view.running else 0,
            "package": (view.running.config["package"] if view.running else view.config.get("package", {})),
            "plan": view.plan.step if view.plan else "",
            "problem": view.problem or (view.quarantine.reason if view.quarantine else ""),
            "scaler": decision.reason if decision else "",
            "load": self._load(view.name),
            "tasks": self._tasks(view.name),
        }

    def _load(self, job: str) -> dict[str, Any] | None:
        load = self.controller.loads.get(job)
        return asdict(load) if isinstance(load, JobLoad) else None

    def _tasks(self, job: str) -> list[dict[str, Any]]:
        return [
            {"container": name, **asdict(report)} for name, report in self.shard_manager.task_reports(job)
        ]

    # -- what the scaler needs --------------------------------------------------------------------------

    def scalable_jobs(self) -> tuple[ScalableJob, ...]:
        """Every running job, as the controller sees it."""
        found = []
        for view in self.jobs.views():
            running = view.running
            if running is None or running.state != "running":
                continue
            oncall = next((row.body for row in view.layers if row.layer == "oncall"), {})
            found.append(
                ScalableJob(
                    name=view.name,
                    expected_version=view.expected_version,
                    task_count=len(set(running.mapping)),
                    generation=running.generation,
                    is_settled=view.is_in_sync and not running.is_held,
                    oncall_task_count=oncall.get("task_count"),
                    config=running.config,
                )
            )
        return tuple(found)

    def write_task_count(self, job: str, task_count: int, *, expected_version: int, reason: str) -> None:
        """The scaler's one write."""
        self.patch_layer(
            job,
            "scaler",
            {"task_count": task_count},
            expected_version=expected_version,
            actor=SCALER,
            reason=reason,
            idempotency_key=None,
        )

    def reports(self, job: str) -> tuple[TaskReport, ...]:
        """What tasks say now: the last words of a container that fell silent are no load."""
        fresh_ms = self.clock.now_ms() - STALE_MS
        rows = [row for row in self.shard_manager.containers() if row.may_run and row.seen_ms >= fresh_ms]
        return tuple(task for row in rows for task in row.tasks if task.job == job)

    # -- streams ----------------------------------------------------------------------------------------

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
        is_new = spec.name not in {category.spec.name for category in self.log.categories()}
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
        reply = self.shard_manager.on_heartbeat(beat, self.clock.boot_ms())
        return reply

    def on_container_dead(self, name: str) -> None:
        """The host saw the container end, and made sure that nothing of it is left."""
        for row in self.shard_manager.containers():
            if row.name == name:
                self.shard_manager.on_container_dead(name, row.incarnation, self.clock.boot_ms())
                self._loops[1].poke()

    def task_list(self, since: int | None) -> dict[str, Any]:
        """The task list, or what changed in it."""
        return self.task_service.snapshot(since).to_json()

    def container_log(self, name: str, *, lines: int) -> str:
        """The end of a container's log, if it runs on this host."""
        known = {row.name for row in self.shard_manager.containers()}
        path = self.settings.folder / "containers" / name / "engine.log"
        if name not in known or not path.exists():
            raise NotFound(
                f"no log of a container {name!r} here",
                why=f"containers known: {', '.join(sorted(known)) or 'none'}",
                fix="look at `penstock status` for their names",
            )
        with path.open("rb") as file:
            with contextlib.suppress(OSError):
                file.seek(-512 * 1024, 2)
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

    def status(self) -> dict[str, Any]:
        """Everything the live table shows."""
        owned: dict[str, int] = {}
        for shard in self.shard_manager.shards():
            if shard.container:
                owned[shard.container] = owned.get(shard.container, 0) + 1
        return {
            "now_ms": self.clock.now_ms(),
            "jobs": self.job_views(),
            "containers": [
                {
                    "name": row.name,
                    "state": "dead" if row.known_dead else row.state.value,
                    "ready": row.engine_ready,
                    "seen_ms": row.seen_ms,
                    "shards": owned.get(row.name, 0),
                    "tasks": len(row.tasks),
                    "pid": row.pid,
                }
                for row in self.shard_manager.containers()
                if row.state is not ContainerState.GONE or row.known_dead
            ],
            "loops": {loop.name: {"rounds": loop.rounds, "failures": loop.failures} for loop in self._loops},
        }


def _state_of(view: JobView) -> str:
    if view.problem or view.quarantine:
        return "quarantined" if view.quarantine else "invalid"
    if view.plan is not None:
        return f"changing ({view.plan.step})"
    if view.running is None:
        return "new"
    return view.running.state if view.is_in_sync else "behind"
