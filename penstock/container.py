"""A container put together: the warden's process, and the engine's process with its Task Manager and Spark
session.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import queue
import secrets
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import structlog

from penstock.client import Client
from penstock.core.errors import ConfigError, EnvironmentProblem, PenstockError, Refused
from penstock.core.journal_store import JournalStore
from penstock.core.sql_store import Database
from penstock.core.system_clock import SystemClock
from penstock.runners import SparkRunner, isolated_runner
from penstock.streams.engine.java import require_spark
from penstock.streams.package_shelf import UnpackedPackages
from penstock.streams.places import identify_rows, open_log
from penstock.task_lists import TaskLists
from penstock.tasks.engine_failure import forget_failure, note_failure
from penstock.tasks.kind_runner import ISOLATED, KindRunner
from penstock.tasks.memory_groups import find_groups
from penstock.tasks.messages import PROFILES, Heartbeat, HeartbeatReply
from penstock.tasks.process_runner import ProcessRunner
from penstock.tasks.runner import Runner
from penstock.tasks.sessions import kill_own_session
from penstock.tasks.shard_load import KINDS, LoadPace
from penstock.tasks.shard_store import ShardStore
from penstock.tasks.task_manager import TaskManager
from penstock.tasks.warden import Renewal, Warden

if TYPE_CHECKING:
    from penstock.streams.engine.spark_tasks import SparkTasks

log = structlog.get_logger(__name__)

# `spark` runs processes too; `process` needs no JVM and runs nothing else.
ENGINES = ("spark", "process")
# What opens the control plane's doors: not for engines, where user code runs.
_SECRETS = ("DATABASE", "TOKEN", "URL", "ALARM_WEBHOOK", "ALARM_CHANNELS")
SECRET_VARIABLES = frozenset(f"PENSTOCK_{name}" for name in _SECRETS)
ROWS_VARIABLE = "PENSTOCK_ROWS"
RUN_COMMAND = (sys.executable, "-m", "penstock.cli.main", "container", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """What a container is told when it starts."""

    name: str
    folder: Path
    url: str
    token_file: Path
    bus: str
    rows: str  # sqlite:<folder>, or env:NAME as for the store
    store: str = ""  # a SQLite file, or env:NAME for a URL that must not be seen in a list of processes
    profile: str = "fast"
    cores: int = 2
    master: str = ""  # another Spark for its tasks, e.g. spark://host:7077; "": in the engine's own JVM
    engine: str = "spark"  # or "process": no JVM, commands only
    capacity: str = ""  # cpu,memory_mb,disk_mb,network_mbps; "": not limited
    region: str = ""

    def check(self) -> None:
        """Refuse what cannot be, before anything is started."""
        if self.engine not in ENGINES:
            known = ", ".join(ENGINES)
            raise ConfigError(f"no such engine: {self.engine!r}", why=f"known: {known}", fix="use one")
        if self.profile not in PROFILES:
            known = ", ".join(PROFILES)
            raise ConfigError(f"no such profile: {self.profile!r}", why=f"known: {known}", fix="use one")
        read_capacity(self.capacity)
        if self.engine == "spark":
            require_spark(self.master)
            open_log(self.bus)  # refuses what is no bus; a broker may be away for a while
            # The folder of rows is made with the first job; what is behind a network is not a folder.
            needed = {"streams": self.bus.partition(":")} if self.bus.startswith("embedded:") else {}
            if self.rows.startswith("sqlite:"):
                needed["state"] = self.rows.rpartition("/")[0].partition(":")
            for what, (_, _, path) in needed.items():
                if not os.path.isdir(path):  # False too where another user may not look
                    raise EnvironmentProblem(
                        "Spark tasks cannot run here",
                        why=f"{path}, where the control plane keeps its {what}, is not on this machine",
                        fix="join from that machine, or with --engine process",
                    )

    @property
    def checkpoints(self) -> Path:
        """Where Spark's scratch checkpoints go: memory where there is some, since nobody reads them again."""
        memory = Path("/dev/shm")
        if not (memory.is_dir() and os.access(memory, os.W_OK)):
            return self.folder / "checkpoints"
        return memory / f"penstock-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]}"

    def clear_checkpoints(self) -> None:
        """Remove them. Requires: no engine runs."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def arguments(self) -> list[str]:
        """The same settings as command line arguments."""
        found = []
        for key, value in asdict(self).items():
            found += [f"--{key.replace('_', '-')}", str(value)]
        return found


def read_capacity(text: str) -> tuple[float, ...]:
    """cpu,memory_mb,disk_mb,network_mbps as numbers; empty: not limited."""
    if not text:
        return ()
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) != len(KINDS) or not all(0 <= part < 1e12 for part in found):
        raise ConfigError(
            f"not a capacity: {text[:100]!r}",
            why=f"it is {len(KINDS)} numbers: {','.join(KINDS)}",
            fix="e.g. --capacity 4,8192,0,0; 0: of that it has none to give",
        )
    return found


def join_settings(
    name: str,
    *,
    url: str,
    token_file: Path,
    folder: Path,
    engine: str,
    capacity: str,
    region: str,
    bus: str = "",
    rows: str = "",
) -> ContainerSettings:
    """What a container needs to know, as the control plane that it joins tells it; `bus` and `rows`: as they
    are reached from here.
    """
    with Client(url, token_file.read_text().strip()) as client:
        told = client.installation()
    if (speaks_for := told.get("container", name)) not in ("", name):
        raise Refused(
            f"this token does not speak for the container {name!r}",
            why=f"it is that of {speaks_for!r}; each container has one of its own",
            fix=f"use `--name {speaks_for}`, or issue one: `penstock token new {name} --role container`",
        )
    is_here = told["host"] == socket.gethostname()
    settings = ContainerSettings(
        name=name,
        folder=folder,
        url=url,
        token_file=token_file,
        bus=bus or str(told["bus"]),
        rows=str(told["rows"]),
        store=reachable_store(str(told["store"]), is_here=is_here, variables=os.environ),
        profile=str(told["profile"]),
        engine=engine,
        capacity=capacity,
        region=region,
    )
    settings.check()
    if engine == "spark" and settings.rows.startswith("env:"):
        _check_rows(rows, str(told["rows_identity"]))
        os.environ[ROWS_VARIABLE] = rows  # for the engine; not in its arguments, which everybody sees
    return settings


def _check_rows(rows: str, expected: str) -> None:
    found = identify_rows(rows, make=False) if rows else ""
    if found != expected:
        raise EnvironmentProblem(
            "Spark tasks cannot run here",
            why="the rows at the given address are not those of the control plane"
            if rows
            else "the control plane keeps its state in a database, and its address was not given",
            fix=f"give it with --rows, better as {ROWS_VARIABLE}, or join with --engine process",
        )


def take_rows(place: str) -> str:
    """The row store's address; one from the environment is taken out of it: commands of users need none."""
    if not place.startswith("env:"):
        return place
    return os.environ.pop(place.removeprefix("env:"), "")


def reachable_store(store: str, *, is_here: bool, variables: Mapping[str, str]) -> str:
    """The store, if this machine can reach it, else ""; the path of a file means nothing elsewhere."""
    if store.startswith("env:"):
        return store if variables.get(store.removeprefix("env:")) else ""
    return store if is_here and os.access(store, os.R_OK | os.W_OK) else ""


def own_folder(folder: Path) -> None:
    """Make a folder that only this user can look into. What this process makes from now on is its own too."""
    os.umask(0o077)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


@contextlib.contextmanager
def folder_lock(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder for this process alone; the lock dies with it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise EnvironmentProblem(
                f"another process already runs {what} in {folder}",
                why="it holds the folder's lock: two would undo each other's work",
                fix="stop the other one, or name another folder with --folder (with --join: --dir)",
            ) from error
        yield


def folder_id(folder: Path) -> str:
    """A name for this folder that survives restarts: proof that a container is the one that was here
    before.
    """
    path = folder / "folder_id"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()


class _Link:
    """The Shard Manager over HTTP, and the store behind it, as the warden needs them."""

    def __init__(self, client: Client, identity: str, store: str) -> None:
        self._client, self._identity, self._store = client, identity, store
        self._shards: ShardStore | None = None

    def register(self, container: str, incarnation: str) -> None:
        self._client.register(container, incarnation, self._identity)

    def beat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        return self._client.beat(heartbeat)

    def renew(self, container: str, incarnation: str) -> Renewal | None:
        if self._shards is None:
            database = open_store(self._store)
            self._shards = ShardStore(database, JournalStore(database))
        found = self._shards.renew(container, incarnation)
        return None if found is None else Renewal(assignment_version=found.version, shards=found.shards)


def open_store(store: str) -> Database:
    """The control plane's database: a file that is there, or the URL in the variable named after `env:`."""
    if store.startswith("env:") and (url := os.environ.get(store.removeprefix("env:"))):
        return Database(url)
    if not store or not os.path.isfile(store):
        raise EnvironmentProblem(
            "this container cannot reach the control plane's store",
            why=f"there is no {store}" if store else "it was given none",
            fix="start it with the store of its control plane, or make that control plane answer",
        )
    return Database(Path(store))


def run_warden(settings: ContainerSettings) -> None:
    """The warden's process: returns after SIGTERM or SIGINT, with nothing left running."""
    profile = PROFILES[settings.profile]
    with folder_lock(settings.folder, f"container {settings.name}"):
        client = Client(
            settings.url, settings.token_file.read_text().strip(), timeout_s=profile.deadline_ms / 4000
        )
        warden = Warden(
            container=settings.name,
            folder=settings.folder,
            engine_command=[*RUN_COMMAND, *settings.arguments()],
            environment={key: value for key, value in os.environ.items() if key not in SECRET_VARIABLES},
            link=_Link(client, folder_id(settings.folder), settings.store),
            profile=profile,
            clock=SystemClock(),
            new_incarnation=lambda: secrets.token_hex(6),
            after_engine=settings.clear_checkpoints,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: warden.stop())
        warden.run()


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
        self._news = threading.Event()  # something came in: the next round is now
        self._lists = TaskLists(self._client, settings.folder / "tasks.json", self._clock, self._news.set)
        # Spark and user code may print; the protocol must not be mixed with that.
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
                self._say()
                return 0
            self._news.wait(self._profile.sign_of_life_ms / 2000)
            self._news.clear()

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
        self._say()

    def _say(self) -> None:
        report: dict[str, Any] = {
            "engine_ready": self._manager is not None,
            "capacity": read_capacity(self._settings.capacity),
            "region": self._settings.region,
            "host": socket.gethostname(),
        }
        if self._manager is not None:
            said = self._manager.report()
            report |= {
                "acked": [asdict(entry) for entry in said.acked],
                "assignment_version": said.assignment_version,
                "list_version": said.list_version,
                "tasks": [asdict(task) for task in said.tasks],
                "loads": [asdict(load) for load in said.loads],
                "order": said.order,
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
                log.warning("the warden said something unreadable", error=str(error), line=line[:200])
                continue
            self._inbox.put(message)
            self._news.set()
        self._die("the warden's pipe closed")

    def _start_runner(self) -> None:
        try:
            self._make_runner()
        except Exception as error:  # or it would be starting for ever, and nobody would know why
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
            runners[ISOLATED] = isolated_runner(
                self._settings.folder / "own",
                clock=self._clock,
                bus=self._settings.bus,
                rows=self._settings.rows,
                packages=packages,
            )
        pace = LoadPace(report_ms=10_000) if self._settings.profile == "fast" else LoadPace()
        self._manager = TaskManager(KindRunner(runners, otherwise), load_pace=pace)
        forget_failure(self._settings.folder)
        log.info("the engine is ready", container=self._settings.name, engine=self._settings.engine)

    def _start_spark(self, packages: UnpackedPackages) -> Runner:
        # Spark's processes inherit this thread's priority: the thread that gives signs of life stays above
        # them.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        require_spark()
        from penstock.streams.engine.session import build_session
        from penstock.streams.engine.spark_tasks import SparkTasks

        spark = build_session(
            f"penstock {self._settings.name}",
            self._settings.cores,
            self._settings.folder / "scratch",
            master=self._settings.master,
        )
        tasks = SparkTasks(
            spark,
            bus=self._settings.bus,
            rows=self._settings.rows,
            package_folder=packages.folder_of,
            checkpoints=self._settings.checkpoints,
            die=self._die,
            on_change=self._news.set,
        )
        self._tasks = tasks
        return SparkRunner(tasks)

    def _die(self, reason: str) -> NoReturn:
        log.error("engine exits", container=self._settings.name, reason=reason)
        note_failure(self._settings.folder, reason)
        # Nobody may be there to clear up after it: what it started goes first.
        kill_own_session()
        os._exit(70)
