"""`penstock up`: a control plane, its API and its containers as processes of this machine, until stopped."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog
from rich.console import Console

from penstock.app import ControlPlane
from penstock.cli.connection import endpoint_file, token_file, tokens_folder
from penstock.cli.lendable import LendableHost, keep_token, tell_dead
from penstock.cli.stopping import stop_on_signals
from penstock.client import Client
from penstock.container import (
    ENGINES,
    RUN_COMMAND,
    SECRET_VARIABLES,
    ContainerSettings,
    folder_lock,
    own_folder,
)
from penstock.core.clock import Clock, Millis
from penstock.core.errors import ConfigError, EnvironmentProblem, PenstockError, Refused
from penstock.core.loop import Loop
from penstock.core.system_clock import SystemClock
from penstock.core.token_store import revoke_token
from penstock.core.tuning import tune_process
from penstock.jobs.layer_writer import Actor
from penstock.settings import DATABASE_VARIABLE, ROWS_VARIABLE, Settings
from penstock.streams.engine.java import require_spark
from penstock.streams.places import hidden_password, settle_bus, settle_rows
from penstock.tasks.container_store import ContainerState
from penstock.tasks.engine_failure import forget_failure, last_failure
from penstock.tasks.messages import PROFILES
from penstock.tasks.sessions import reap_leftovers, write_pid_file
from penstock.web.front_process import FrontProcess, serve_behind_front
from penstock.web.notifying import routes_of
from penstock.web.server import Listening, Tls, bind

log = structlog.get_logger(__name__)
out = Console(highlight=False, soft_wrap=True)

# Long enough for its tasks to start elsewhere first: a starting JVM takes all the CPU there is.
RESTART_MS: Millis = 5_000
RESTART_MAX_MS: Millis = 60_000
# What an earlier version left in a folder with other rights. Nothing else in there is ours to change.
OWN_NAMES = (
    "bus",
    "bus.json",
    "containers",
    "endpoint.json",
    "lock",
    "packages",
    "policies",
    "rows",
    "rows.json",
    "store.db",
    "store.db-shm",
    "store.db-wal",
    "tokens",
)
LOCAL_ROLES = ("admin", "developer", "oncall", "reader")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What `penstock up` was asked to run."""

    folder: Path
    containers: int
    cores: int
    master: str = ""
    profile: str
    engine: str = "spark"
    listening: Listening = field(default_factory=Listening)
    names: tuple[str, ...] = ()  # what callers may call this machine, besides loopback
    ca: Path | None = None  # what this machine's own callers verify the certificate with
    database: str = ""
    bus: str = ""  # kafka://<host>:<port>/<prefix>; "": the one the folder had, else its own disk
    rows: str = ""  # postgresql://…; "": as for the bus
    alarm_webhook: str = field(default="", repr=False)
    alarm_channels: str = field(default="", repr=False)
    rescales_max: int = 10
    advice_only: bool = False

    def check(self) -> None:
        """Refuse what cannot be, before anything is started."""
        if self.profile not in PROFILES:
            known = ", ".join(PROFILES)
            raise ConfigError(f"no such profile: {self.profile!r}", why=f"known: {known}", fix="use one")
        if self.engine not in ENGINES:
            known = ", ".join(ENGINES)
            raise ConfigError(f"no such engine: {self.engine!r}", why=f"known: {known}", fix="use one")
        self.listening.check()
        routes_of(webhook=self.alarm_webhook, channels=self.alarm_channels)
        if self.containers and self.engine == "spark":
            require_spark(self.master)

    @property
    def verify_with(self) -> Path | None:
        """The CA file for this machine's own callers; a certificate that signed itself is its own."""
        if self.listening.tls is None:
            return None
        return (self.ca or self.listening.tls.cert).absolute()


def tls_of(cert: Path | None, key: Path | None) -> Tls | None:
    """The two files of a certificate: both, or none."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError(
            "TLS needs a certificate and its key",
            why=f"--tls-{'cert' if cert is None else 'key'} is missing",
            fix="give --tls-cert and --tls-key",
        )
    return Tls(cert=cert, key=key)


def run_up(settings: UpSettings) -> None:
    """Run until SIGTERM or SIGINT; leaves nothing running. What can be refused is, before anything starts."""
    settings.check()
    # What happens goes to stderr, where it can be kept apart from what the command says.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    folder = settings.folder.absolute()
    _make_folder(folder)
    with (
        folder_lock(folder, "a control plane"),
        bind(settings.listening) as listener,
        bind(Listening()) as behind,
    ):
        stop = stop_on_signals()
        tune_process()
        settled_bus, settled_rows = settle_bus(folder, settings.bus), settle_rows(folder, settings.rows)
        bus, rows = settled_bus.place, settled_rows.place
        settings = replace(settings, rows=rows)
        plane = ControlPlane(
            Settings(
                folder=folder,
                profile=settings.profile,
                database=settings.database,
                bus_place=bus,
                rows_place=rows,
                alarm_webhook=settings.alarm_webhook,
                alarm_channels=settings.alarm_channels,
                rescales_max=settings.rescales_max,
                advice_only=settings.advice_only,
            )
        )
        write_tokens(plane, folder)
        server = serve_behind_front(plane, listener, behind, settings.listening, settings.names)
        for left in sorted((folder / "containers").glob("*/")):
            reap_container(left)
        containers = _containers(settings, plane, server.url)
        host = ContainerHost(containers, environment_of(settings), plane.clock, plane.on_container_dead)
        # Everything that can refuse has had its say; what starts now may write to both.
        settled_bus.keep()
        settled_rows.keep()
        with _running(plane, server, host):
            write_endpoint(folder, server.url, settings.verify_with)
            out.print(f"the control plane answers at {server.url}")
            out.print(f"folder {folder}, bus {bus}, rows {hidden_password(rows)}", markup=False)
            out.print("`penstock dashboard` shows it in a browser; stop it with Ctrl-C")
            out.print(who_may_read(folder), style="yellow", markup=False)
            starting = Starting(plane, containers, f"at {server.url}")
            while not stop.wait(0.5):
                starting.look()
                if not server.is_serving:
                    raise EnvironmentProblem(
                        "the API ended by itself", why="see the lines above", fix="start `penstock up` again"
                    )
            out.print("stopping …")
        out.print("stopped")


class Starting:
    """Says when containers are ready, and why one is not; each thing once."""

    def __init__(self, plane: ControlPlane, containers: Sequence[ContainerSettings], where: str) -> None:
        self._plane, self._where, self._began_ms = plane, where, plane.clock.boot_ms()
        self._waiting = {settings.name: settings for settings in containers}
        self._all, self._is_up = len(containers), False
        self._failures: dict[str, str] = {}
        if containers:
            out.print(f"{self._count(self._all)} ({containers[0].engine}): starting …")
        self.look()

    def look(self) -> None:
        """Look at those that are not ready yet, and say what is new."""
        if self._is_up and not self._waiting:
            return
        ready = [name for name in self._ready() if self._waiting.pop(name, None) is not None]
        took_s = (self._plane.clock.boot_ms() - self._began_ms) / 1000
        if not self._is_up and (ready or not self._all):
            self._is_up = True
            said = f": {ready[0]} is ready after {took_s:.0f} s" if ready else ", without containers"
            out.print(f"[green]penstock is up[/] {self._where}{said}")
        if ready and not self._waiting and self._all > 1:
            out.print(f"all {self._count(self._all)} are ready after {took_s:.0f} s")
        for name, settings in self._waiting.items():
            failure = last_failure(settings.folder)
            if failure and failure != self._failures.get(name):
                self._failures[name] = failure
                out.print(f"[bold red]container {name} cannot start[/]; it tries again, Ctrl-C ends it")
                out.print(failure, markup=False)

    def _ready(self) -> list[str]:
        try:
            rows = self._plane.fleet.containers()
        except PenstockError:  # the store is away for a moment
            return []
        return [row.name for row in rows if row.engine_ready and row.state is ContainerState.LIVE]

    @staticmethod
    def _count(number: int) -> str:
        return f"{number} container{'s' * (number != 1)}"


def who_may_read(folder: Path) -> str:
    """What to know of the code of jobs: it runs as the user that has the tokens."""
    return (
        f"the code of jobs and policies runs as this user: it can read this user's files, the tokens in "
        f"{tokens_folder(folder)} too; for code that you do not trust see `penstock up` in docs/cli.md"
    )


def run_joined(settings: ContainerSettings) -> None:
    """Host one container of a control plane elsewhere, until SIGTERM or SIGINT; leaves nothing running."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    hidden = SECRET_VARIABLES - {DATABASE_VARIABLE}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    clock = SystemClock()

    def make_host(chosen: ContainerSettings, client: Client) -> ContainerHost:
        return ContainerHost((chosen,), environment, clock, lambda name: tell_dead(client, chosen))

    LendableHost(settings, make_host, clock).run(stop_on_signals())


@contextlib.contextmanager
def _running(plane: ControlPlane, server: FrontProcess, host: ContainerHost) -> Iterator[None]:
    """Start all parts; stop them in the other order, whatever happens in between."""
    with contextlib.ExitStack() as parts:
        parts.callback(plane.stop)
        plane.start()
        parts.callback(server.stop)
        server.start()
        parts.callback(host.stop)
        host.start()
        parts.callback(endpoint_file(plane.settings.folder).unlink, missing_ok=True)
        yield


@dataclass(slots=True)
class _Child:
    settings: ContainerSettings
    process: subprocess.Popen[bytes] | None = None
    restart_at_ms: Millis = 0
    started_ms: Millis = 0
    failures: int = 0


@dataclass(slots=True)
class ContainerHost:
    """What Tupperware is to Turbine: starts containers, sees them die, clears up, starts them again."""

    containers: tuple[ContainerSettings, ...]
    environment: Mapping[str, str]  # of the wardens, which keep secrets from their engines
    clock: Clock
    on_dead: Callable[[str], object] = lambda name: None  # once nothing of that container is left
    _children: list[_Child] = field(default_factory=list)
    _locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _loop: Loop | None = None
    _is_stopping: bool = False

    def start(self) -> None:
        """End what is left of a previous life, then start all containers and watch them.

        Each folder has one host: another would take the living for what a previous life left.
        """
        for settings in self.containers:
            self._locks.enter_context(folder_lock(settings.folder / "host", f"container {settings.name}"))
        self._children = [_Child(settings) for settings in self.containers]
        for child in self._children:
            reap_container(child.settings.folder)
            forget_failure(child.settings.folder)
        self._loop = Loop("containers", self._look, every_ms=200).start()

    def stop(self) -> None:
        """Stop every container in order, and make sure."""
        self._is_stopping = True
        if self._loop is not None:
            self._loop.stop()
        alive = [child.process for child in self._children if child.process is not None]
        for process in alive:
            process.terminate()
        for process in alive:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child in self._children:
            reap_container(child.settings.folder)
            child.settings.clear_checkpoints()
        self._locks.close()

    def _look(self) -> None:
        now_ms = self.clock.boot_ms()
        for child in self._children:
            if child.process is None:
                if now_ms >= child.restart_at_ms and not self._is_stopping:
                    self._spawn(child, now_ms)
            elif child.process.poll() is not None:
                self._bury(child, now_ms)

    def _spawn(self, child: _Child, now_ms: Millis) -> None:
        folder = child.settings.folder
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "warden.log").open("ab") as output:
            child.process = subprocess.Popen(
                [*RUN_COMMAND, *child.settings.arguments()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self.environment,
            )
        child.started_ms = now_ms
        (folder / "warden.pid").write_text(str(child.process.pid))
        write_pid_file(folder / "warden.session", child.process.pid)

    def _bury(self, child: _Child, now_ms: Millis) -> None:
        """The warden is dead: end what it left, and only then say that the container is."""
        assert child.process is not None
        log.warning("container died", container=child.settings.name, code=child.process.returncode)
        child.process = None
        reap_leftovers(child.settings.folder / "engine.pid")
        self.on_dead(child.settings.name)
        child.failures = 1 if now_ms - child.started_ms > RESTART_MAX_MS else child.failures + 1
        child.restart_at_ms = now_ms + min(RESTART_MS * 2 ** (child.failures - 1), RESTART_MAX_MS)


def reap_container(folder: Path) -> None:
    """End what a killed host left of a container. The warden goes first, or it starts another engine."""
    reaped = reap_leftovers(folder / "warden.session") + reap_leftovers(folder / "engine.pid")
    if reaped:
        log.info("reaped a previous life", container=folder.name, processes=reaped)


def _containers(settings: UpSettings, plane: ControlPlane, url: str) -> tuple[ContainerSettings, ...]:
    folder = plane.settings.folder
    return tuple(
        ContainerSettings(
            name=name,
            folder=folder / "containers" / name,
            url=url,
            token_file=_container_token(plane, folder / "containers" / name, name),
            bus=plane.settings.bus,
            rows=plane.settings.told_rows,
            store=plane.settings.store,
            profile=settings.profile,
            engine=settings.engine,
            cores=settings.cores,
            master=settings.master,
        )
        for name in (f"c{number}" for number in range(1, settings.containers + 1))
    )


def environment_of(settings: UpSettings) -> dict[str, str]:
    """What wardens are started with: the way to the store too, but nothing else that opens doors."""
    kept = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    if settings.verify_with is not None:
        kept["PENSTOCK_CA"] = str(settings.verify_with)
    if settings.database:
        kept[DATABASE_VARIABLE] = settings.database
    kept.pop(ROWS_VARIABLE, None)
    if settings.rows and not settings.rows.startswith("sqlite:"):
        kept[ROWS_VARIABLE] = settings.rows
    return kept


def _make_folder(folder: Path) -> None:
    """Ours alone, and all that is in it; a folder of an earlier version is corrected."""
    try:
        if folder.is_dir() and stat.S_IMODE(folder.stat().st_mode) & 0o077:
            for name in OWN_NAMES:
                _make_private(folder / name)
        own_folder(folder)
        (folder / "lock").touch()
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot use the folder {folder}", why=str(error), fix="name another one with --folder"
        ) from error


def _make_private(top: Path) -> None:
    """Take all rights of others from a file, or from a folder and what is in it. Links are left alone."""
    paths = [top]
    while paths:
        path = paths.pop()
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(mode):
            continue
        if mode & 0o077:
            path.chmod(stat.S_IMODE(mode) & ~0o077)
        if stat.S_ISDIR(mode):
            paths += path.iterdir()


def write_endpoint(folder: Path, url: str, ca: Path | None = None) -> None:
    """Say where the control plane of this folder answers, and how to know that it is the one."""
    endpoint = {"url": url, "pid": os.getpid()} | ({} if ca is None else {"ca": str(ca)})
    _write_private(endpoint_file(folder), json.dumps(endpoint))


def write_tokens(plane: ControlPlane, folder: Path) -> None:
    """Tokens for this machine, issued once and kept in files that only this user can read."""
    now_ms = plane.clock.now_ms()
    _take_back(plane, folder / "tokens")
    _make_tokens_folder(folder)
    for role in LOCAL_ROLES:
        path = token_file(folder, role)
        try:
            plane.tokens.caller(path.read_text(), now_ms=now_ms)
        except (FileNotFoundError, ValueError, Refused):
            # None yet, or of a store that is gone, or past its end.
            _write_private(path, plane.tokens.issue(f"local-{role}", role, now_ms=now_ms))
    _retire_shared_token(plane, folder / "tokens" / "container")


def _retire_shared_token(plane: ControlPlane, path: Path) -> None:
    """Take back the one token that all containers of this folder had in a former version."""
    now_ms = plane.clock.now_ms()
    with contextlib.suppress(FileNotFoundError, ValueError, Refused):
        token_id = plane.tokens.caller(path.read_text(), now_ms=now_ms).token_id
        with plane.database.transaction() as connection:
            revoke_token(connection, token_id, now_ms=now_ms)
        plane.tokens.revoked()
    path.unlink(missing_ok=True)


def _container_token(plane: ControlPlane, folder: Path, name: str) -> Path:
    """The file with a container's own token: the one that is there, or a new one."""
    path, now_ms = folder / "token", plane.clock.now_ms()
    try:
        if plane.tokens.caller(path.read_text(), now_ms=now_ms).container == name:
            return path
    except (FileNotFoundError, ValueError, Refused):
        pass  # none yet, or of a store that is gone, or past its end
    return keep_token(folder, plane.tokens.issue(name, "container", now_ms=now_ms, container=name))


def _make_tokens_folder(folder: Path) -> None:
    """With a note of whose they are: those of folders that are gone are removed."""
    place = tokens_folder(folder)
    try:
        (folder / "tokens").mkdir(mode=0o700, exist_ok=True)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in place.parent.iterdir():
            with contextlib.suppress(OSError, ValueError):
                if not Path((other / "folder").read_text(encoding="utf-8")).exists():
                    shutil.rmtree(other)
        place.chmod(0o700)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot keep tokens in {place}",
            why=str(error),
            fix="set XDG_CONFIG_HOME to a folder of this user, for `penstock up` and for other commands",
        ) from error
    _write_private(place / "folder", str(folder.resolve()))


def _take_back(plane: ControlPlane, old: Path) -> None:
    """Revoke the tokens that an earlier version kept where the code of jobs could read them."""
    for role in LOCAL_ROLES:
        path = old / role
        if not path.exists():
            continue
        now_ms = plane.clock.now_ms()
        with contextlib.suppress(ValueError, Refused):
            token = plane.tokens.caller(path.read_text(encoding="ascii"), now_ms=now_ms)
            plane.token_service.revoke(
                token.token_id,
                actor=Actor(name="penstock up", role="admin"),
                reason="it lay where the code of jobs could read it",
                idempotency_key=None,
                now_ms=now_ms,
            )
        path.unlink()


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write {path}",
            why=str(error),
            fix="look at the folder's rights and the disk's free space",
        ) from error
