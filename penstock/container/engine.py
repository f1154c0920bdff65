"""A container's engine: the process that runs its tasks.

A Task Manager between the warden's pipe, the Task Service, and the runners: a Spark session for stream tasks,
a process each for those that ask for it, and plain commands.
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
from penstock.container.container import ContainerSettings, read_capacity, take_rows
from penstock.container.process_runner import ProcessRunner, find_groups
from penstock.container.sessions import forget_failure, kill_own_session, note_failure
from penstock.container.task_manager import TaskManager
from penstock.core.clock import Clock
from penstock.core.errors import PenstockError
from penstock.core.loop import Loop
from penstock.core.system_clock import SystemClock
from penstock.fleet.messages import PROFILES, HeartbeatReply
from penstock.fleet.shard_load import LoadPace
from penstock.fleet.task_service import TaskList
from penstock.jobs.tasks import Runner, RunState, RunStatus, TaskSpec
from penstock.streams.package_store import UnpackedPackages
from penstock.streams.spark.java import require_spark

if TYPE_CHECKING:
    from penstock.streams.spark.tasks import SparkTasks

log = structlog.get_logger(__name__)

ISOLATED = "isolated"  # instead of a kind: tasks in a process of their own
WAIT_S, PAUSE_MS = 3.0, 20  # the service holds a request until there is a newer list, at most so long


class Engine:
    """The engine's process: a Task Manager between the warden's pipe and a Spark session."""

    def __init__(self, settings: ContainerSettings) -> None:
        self._settings = replace(settings, rows=take_rows(settings.rows))
        self._profile, self._clock = PROFILES[settings.profile], SystemClock()
        self._client = Client(settings.url, settings.token_file.read_text().strip(), timeout_s=5)
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._manager: TaskManager | None = None
        self._tasks: SparkTasks | None = None
        self._stopping = False
        self._wake = threading.Event()  # set: the next round begins at once
        self._lists = TaskLists(self._client, settings.folder / "tasks.json", self._clock, self._wake.set)
        # Spark and user code may print to stdout: messages to the warden get a descriptor of their own.
        self._wire = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def run(self) -> int:
        """Work until the warden says stop, or is gone."""
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
            self._die("Spark's JVM is gone")
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
            self._lists.give(self._manager, now_ms)
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
            self._die("the warden is gone")

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
        except Exception as error:  # otherwise it would stay in "starting" without a reason
            log.exception("the engine cannot start", container=self._settings.name)
            what = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
            self._die(what)

    def _make_runner(self) -> None:
        processes = ProcessRunner(self._settings.folder / "tasks", self._clock, find_groups())
        runners: dict[str, Runner] = {"process": processes}
        otherwise = None
        packages = UnpackedPackages(self._settings.folder / "packages", self._client.package)
        if self._settings.engine == "spark":
            otherwise = self._start_spark(packages)
            runners[ISOLATED] = self._own_processes(packages)
        pace = LoadPace(report_ms=10_000) if self._settings.profile == "fast" else LoadPace()
        self._manager = TaskManager(KindRunner(runners, otherwise), load_pace=pace)
        forget_failure(self._settings.folder)
        log.info("the engine is ready", container=self._settings.name, engine=self._settings.engine)

    def _start_spark(self, packages: UnpackedPackages) -> Runner:
        # Spark's processes inherit this thread's lower priority, so heartbeats are sent before their work.
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

    def _own_processes(self, packages: UnpackedPackages) -> Runner:
        from penstock.streams.spark.own_process import OwnProcessRunner, prepare_with

        folder = self._settings.folder / "own"
        return OwnProcessRunner(
            ProcessRunner(folder / "processes", self._clock, find_groups()),
            folder / "tasks",
            prepare_with(bus=self._settings.bus, rows=self._settings.rows, packages=packages),
        )

    def _die(self, reason: str) -> NoReturn:
        log.error("engine exits", container=self._settings.name, reason=reason)
        note_failure(self._settings.folder, reason)
        # The warden may be gone: what this process started is killed here.
        kill_own_session()
        os._exit(70)


class KindRunner:
    """Sends tasks to `runners` by kind; `otherwise` takes the kinds that are not named, if it is there."""

    def __init__(self, runners: Mapping[str, Runner], otherwise: Runner | None = None) -> None:
        self._runners, self._otherwise = dict(runners), otherwise
        self._of: dict[str, Runner] = {}
        self._refused: dict[str, RunStatus] = {}

    def start(self, spec: TaskSpec, *, shard_epoch: int) -> None:
        """Begin a run on the runner of its kind, or refuse it."""
        kind = str(spec.config.get("kind", ""))
        is_isolated = spec.config.get("isolation") == "process"
        runner = self._runners.get(ISOLATED) if is_isolated else self._runners.get(kind, self._otherwise)
        if runner is None:
            self._refused[spec.task_id] = RunStatus(
                task_id=spec.task_id,
                state=RunState.FAILED,
                error=f"this container runs no tasks of kind {kind!r}: start it with an engine that does",
            )
            return
        self._of[spec.task_id] = runner
        runner.start(spec, shard_epoch=shard_epoch)

    def stop(self, task_id: str) -> None:
        """Ask a run to end."""
        if task_id in self._of:
            self._of[task_id].stop(task_id)

    def kill(self, task_id: str) -> None:
        """End a run whatever it takes."""
        if task_id in self._of:
            self._of[task_id].kill(task_id)

    def poll(self) -> tuple[RunStatus, ...]:
        """Every run of every runner."""
        runners = list(
            dict.fromkeys([*self._runners.values(), *((self._otherwise,) if self._otherwise else ())])
        )
        return (*self._refused.values(), *(status for runner in runners for status in runner.poll()))

    def forget(self, task_id: str) -> None:
        """Drop a final run."""
        if self._refused.pop(task_id, None) is None and task_id in self._of:
            self._of.pop(task_id).forget(task_id)


class TaskLists:
    """Fetches the container's task list in a thread, and keeps it on disk for when the service is away."""

    def __init__(self, client: Client, cache: Path, clock: Clock, on_news: Callable[[], None]) -> None:
        self._client, self._cache, self._clock, self._on_news = client, cache, clock, on_news
        self._found: queue.Queue[tuple[TaskList, bool]] = queue.Queue()  # and whether it is the cached one
        self._version: int | None = None  # of the newest list that the service gave
        self._has_list = False
        self._loop = Loop("task list", self._fetch, every_ms=1_000)

    def start(self) -> TaskLists:
        """Begin to fetch."""
        self._loop.start()
        return self

    def on_version(self, version: int) -> None:
        """A heartbeat reply said that there is a list of this version."""
        if version > (self._version or 0):
            self._loop.poke()

    def give(self, manager: TaskManager, now_ms: int) -> None:
        """Give the lists that arrived to the Task Manager."""
        while not self._found.empty():
            news, is_cached = self._found.get()
            if manager.on_task_list(news, now_ms, cached=is_cached):
                self._keep(manager.task_list)
            else:
                self._version = None  # it does not fit: fetch the whole list

    def _fetch(self) -> None:
        """Request a newer list. The service answers once there is one: the next request follows at once."""
        since, began_ms = self._version, self._clock.boot_ms()
        try:
            found = self._client.task_list(since, wait_s=WAIT_S)
            if found is not None or self._clock.boot_ms() - began_ms > WAIT_S * 500:
                self._loop.poke_after(PAUSE_MS)
            if found is None:
                return  # it is the newest
            news = TaskList.from_json(found)
        except (PenstockError, ValueError) as error:
            what = error.what if isinstance(error, PenstockError) else f"cannot be read: {error}"
            log.warning("no task list", error=what)
            if not self._has_list:
                self._has_list = True  # once: go on with the cached list until the service answers
                self._use_cached()
            return
        if since is None or news.version != since:
            self._version, self._has_list = news.version, True
            self._found.put((news, False))
            self._on_news()

    def _use_cached(self) -> None:
        try:
            self._found.put((TaskList.from_json(json.loads(self._cache.read_text())), True))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            log.info("no usable task list on disk either")

    def _keep(self, whole: TaskList | None) -> None:
        if whole is not None:
            temporary = self._cache.with_suffix(".new")
            temporary.write_text(json.dumps(whole.to_json()))
            temporary.replace(self._cache)
