"""A container's engine: the process that runs its tasks.

Its Task Manager gets assignments from the warden's pipe and task lists from the Task Service, and starts
tasks on runners: a Spark session for stream tasks, a process for each isolated task, and plain commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import structlog

from penstock.client.client import Client
from penstock.container.container import ContainerSettings, pop_rows_address, read_capacity
from penstock.container.process_runner import ProcessRunner, find_groups
from penstock.container.sessions import clear_failure, kill_own_session, write_failure
from penstock.container.task_manager import TaskManager
from penstock.core.clock import Clock
from penstock.core.errors import PenstockError
from penstock.core.loop import Loop
from penstock.core.system_clock import SystemClock
from penstock.fleet.messages import PROFILES, HeartbeatReply
from penstock.fleet.shard_load import ShardLoadSettings
from penstock.fleet.task_service import TaskList
from penstock.jobs.tasks import Runner, RunState, RunStatus, TaskSpec
from penstock.streams.package_store import UnpackedPackages
from penstock.streams.spark.java import require_spark

if TYPE_CHECKING:
    from penstock.streams.spark.tasks import SparkTasks

log = structlog.get_logger(__name__)

ISOLATED = "isolated"  # the runner of tasks that have a process of their own, whatever their kind
# Long polling: the service holds a request until there is a newer list, at most WAIT_S
WAIT_S, PAUSE_MS = 3.0, 20


class Engine:
    """The engine's process: a Task Manager between the warden's pipe and a Spark session."""

    def __init__(self, settings: ContainerSettings) -> None:
        self._settings = replace(settings, rows=pop_rows_address(settings.rows))
        self._profile, self._clock = PROFILES[settings.profile], SystemClock()
        self._client = Client(settings.url, settings.token_file.read_text().strip(), timeout_s=5)
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._manager: TaskManager | None = None
        self._tasks: SparkTasks | None = None
        self._stopping = False
        self._wake = threading.Event()  # set to begin the next round at once
        self._lists = TaskListFetcher(
            self._client, settings.folder / "tasks.json", self._clock, self._wake.set
        )
        # Spark and user code may print to stdout: messages to the warden use another descriptor.
        self._wire = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def run(self) -> int:
        """Run until the warden sends `stop` or ends."""
        threading.Thread(target=self._listen, name="warden", daemon=True).start()
        threading.Thread(target=self._start_runner, name="runner", daemon=True).start()
        self._lists.start()
        while True:
            self._round()
            if self._stopping and (self._manager is None or self._manager.all_stopped):
                self._report()
                return 0
            self._wake.wait(self._profile.sign_of_life_ms / 2000)
            self._wake.clear()

    def _round(self) -> None:
        now_ms = self._clock.boot_ms()
        if self._tasks is not None and not self._tasks.is_alive():
            self._die("Spark's JVM has ended")
        while not self._inbox.empty():
            message = self._inbox.get()
            if message.get("stop"):
                self._stopping = True
                if self._manager is not None:
                    self._manager.stop_all()
            elif self._manager is not None and "reply" in message:
                reply = message["reply"]
                self._manager.on_reply(reply, now_ms)
                self._lists.on_version(reply.list_version)
        if self._manager is not None:
            self._lists.deliver(self._manager, now_ms)
            self._manager.tick(now_ms)
        self._report()

    def _report(self) -> None:
        report: dict[str, Any] = {
            "engine_ready": self._manager is not None,
            "capacity": read_capacity(self._settings.capacity),
            "region": self._settings.region,
            "host": socket.gethostname(),
        }
        if self._manager is not None:
            found = self._manager.report()
            report |= {
                "acked": [asdict(entry) for entry in found.acked],
                "assignment_version": found.assignment_version,
                "list_version": found.list_version,
                "tasks": [asdict(task) for task in found.tasks],
                "loads": [asdict(load) for load in found.loads],
                "order": found.order,
            }
        try:
            self._wire.write(json.dumps({"at_ms": self._clock.boot_ms(), "report": report}) + "\n")
        except BrokenPipeError:
            self._die("the warden has ended")

    def _listen(self) -> None:
        for line in sys.stdin:
            try:
                message = json.loads(line)
                if "reply" in message:
                    message = {"reply": HeartbeatReply.from_json(message["reply"])}
            except (ValueError, TypeError) as error:
                log.warning("cannot read a message of the warden", error=str(error), line=line[:200])
                continue
            self._inbox.put(message)
            self._wake.set()
        self._die("the warden's pipe closed")

    def _start_runner(self) -> None:
        try:
            self._make_runner()
        except Exception as error:  # otherwise the engine would never become ready, without a reason
            log.exception("the engine cannot start", container=self._settings.name)
            reason = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
            self._die(reason)

    def _make_runner(self) -> None:
        processes = ProcessRunner(self._settings.folder / "tasks", self._clock, find_groups())
        runners: dict[str, Runner] = {"process": processes}
        default = None
        packages = UnpackedPackages(self._settings.folder / "packages", self._client.package)
        if self._settings.engine == "spark":
            default = self._start_spark(packages)
            runners[ISOLATED] = self._start_isolated(packages)
        pace = (
            ShardLoadSettings(report_ms=10_000) if self._settings.profile == "fast" else ShardLoadSettings()
        )
        self._manager = TaskManager(KindRunner(runners, default), load_settings=pace)
        clear_failure(self._settings.folder)
        log.info("the engine is ready", container=self._settings.name, engine=self._settings.engine)

    def _start_spark(self, packages: UnpackedPackages) -> Runner:
        # Spark's processes inherit this thread's lower priority, so that heartbeats are not delayed by their
        # work.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        require_spark()
        from penstock.streams.spark.session import build_session
        from penstock.streams.spark.tasks import SparkTasks

        spark = build_session(
            f"penstock {self._settings.name}",
            self._settings.cores,
            self._settings.folder / "scratch",
            master=self._settings.master,
        )
        self._tasks = SparkTasks(
            spark,
            bus=self._settings.bus,
            rows=self._settings.rows,
            package_folder=packages.folder_of,
            checkpoints=self._settings.checkpoints,
            die=self._die,
            on_change=self._wake.set,
        )
        return self._tasks

    def _start_isolated(self, packages: UnpackedPackages) -> Runner:
        from penstock.streams.spark.own_process import OwnProcessRunner, prepare_with

        folder = self._settings.folder / "own"
        return OwnProcessRunner(
            ProcessRunner(folder / "processes", self._clock, find_groups()),
            folder / "tasks",
            prepare_with(bus=self._settings.bus, rows=self._settings.rows, packages=packages),
        )

    def _die(self, reason: str) -> NoReturn:
        log.error("engine exits", container=self._settings.name, reason=reason)
        write_failure(self._settings.folder, reason)
        # The warden may be dead, so this process kills its children itself.
        kill_own_session()
        os._exit(70)


class KindRunner:
    """Sends each task to the runner of its kind; `default` runs all other kinds, if it is given."""

    def __init__(self, runners: Mapping[str, Runner], default: Runner | None = None) -> None:
        self._runners, self._default = dict(runners), default
        self._runner_of: dict[str, Runner] = {}
        self._refused: dict[str, RunStatus] = {}

    def start(self, spec: TaskSpec, *, shard_epoch: int) -> None:
        """Start a run on the runner of its kind; without one the run fails."""
        kind = spec.config.kind
        is_isolated = spec.config.isolation == "process"
        runner = self._runners.get(ISOLATED) if is_isolated else self._runners.get(kind, self._default)
        if runner is None:
            self._refused[spec.task_id] = RunStatus(
                task_id=spec.task_id,
                state=RunState.FAILED,
                error=f"this container cannot run tasks of kind {kind!r}: start it with another --engine",
            )
            return
        self._runner_of[spec.task_id] = runner
        runner.start(spec, shard_epoch=shard_epoch)

    def stop(self, task_id: str) -> None:
        """Request a run to stop."""
        if task_id in self._runner_of:
            self._runner_of[task_id].stop(task_id)

    def kill(self, task_id: str) -> None:
        """Kill a run."""
        if task_id in self._runner_of:
            self._runner_of[task_id].kill(task_id)

    def poll(self) -> tuple[RunStatus, ...]:
        """The status of every run of every runner."""
        runners = list(dict.fromkeys([*self._runners.values(), *((self._default,) if self._default else ())]))
        return (*self._refused.values(), *(status for runner in runners for status in runner.poll()))

    def forget(self, task_id: str) -> None:
        """Drop a run that has ended."""
        if self._refused.pop(task_id, None) is None and task_id in self._runner_of:
            self._runner_of.pop(task_id).forget(task_id)


class TaskListFetcher:
    """Fetches the container's task list in a thread, and caches it on disk for when the service is down."""

    def __init__(self, client: Client, cache: Path, clock: Clock, on_update: Callable[[], None]) -> None:
        self._client, self._cache, self._clock, self._on_update = client, cache, clock, on_update
        self._updates: queue.Queue[tuple[TaskList, bool]] = queue.Queue()  # (list, whether from the cache)
        self._version: int | None = None  # of the newest list from the service
        self._has_list = False
        self._loop = Loop("task list", self._fetch, every_ms=1_000)

    def start(self) -> TaskListFetcher:
        """Start to fetch."""
        self._loop.start()
        return self

    def on_version(self, version: int) -> None:
        """A heartbeat reply named the version of the newest list."""
        if version > (self._version or 0):
            self._loop.poke()

    def deliver(self, manager: TaskManager, now_ms: int) -> None:
        """Pass the fetched lists to the Task Manager."""
        while not self._updates.empty():
            update, is_cached = self._updates.get()
            if manager.on_task_list(update, now_ms, cached=is_cached):
                self._write_cache(manager.task_list)
            else:
                self._version = None  # the update does not fit: fetch the full list

    def _fetch(self) -> None:
        """Request a newer list. The service answers once there is one; the next request follows at once."""
        since, began_ms = self._version, self._clock.boot_ms()
        try:
            response = self._client.task_list(since, wait_s=WAIT_S)
            if response is not None or self._clock.boot_ms() - began_ms > WAIT_S * 500:
                self._loop.poke_after(PAUSE_MS)
            if response is None:
                return  # ours is the newest
            update = TaskList.from_json(response)
        except (PenstockError, ValueError) as error:
            reason = error.what if isinstance(error, PenstockError) else f"cannot be read: {error}"
            log.warning("cannot fetch the task list", error=reason)
            if not self._has_list:
                self._has_list = True  # only once: use the cached list until the service answers
                self._use_cached()
            return
        if since is None or update.version != since:
            self._version, self._has_list = update.version, True
            self._updates.put((update, False))
            self._on_update()

    def _use_cached(self) -> None:
        try:
            self._updates.put((TaskList.from_json(json.loads(self._cache.read_text())), True))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            log.info("no usable task list on disk either")

    def _write_cache(self, whole: TaskList | None) -> None:
        if whole is not None:
            temporary = self._cache.with_suffix(".new")
            temporary.write_text(json.dumps(whole.to_json()))
            temporary.replace(self._cache)
