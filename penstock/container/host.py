"""The hosts of containers: start a container's processes, and clean up and restart them when they die.

`ContainerHost` does so for containers of this machine. `LendableHost` runs one joined container, at home or
on loan to another cluster. It polls its current cluster for orders. Before it moves, it checks that it can
join the other cluster. It returns home when that cluster has no record of it or does not answer, and after a
restart.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import structlog

from penstock.client.client import Client
from penstock.container.container import (
    RUN_COMMAND,
    SECRET_VARIABLES,
    ContainerSettings,
    folder_id,
    join_settings,
)
from penstock.container.sessions import clear_failure, kill_previous_session, write_pid_file
from penstock.core.clock import Clock, Millis
from penstock.core.errors import EnvironmentProblem, NotFound, PenstockError
from penstock.core.folder import folder_lock
from penstock.core.loop import Loop
from penstock.core.system_clock import SystemClock
from penstock.settings import DATABASE_VARIABLE, ROWS_VARIABLE

log = structlog.get_logger(__name__)

ASK_MS: Millis = 10_000  # how often idle hosts poll: there may be thousands
UNDER_WAY_MS: Millis = 2_000  # how often a host polls during a move
# Without an answer or a record in another cluster for this long, it returns home
HOME_AFTER_MS: Millis = 60_000
# Its tasks start elsewhere first, because a starting JVM takes all the CPU.
RESTART_MS: Millis = 5_000
RESTART_MAX_MS: Millis = 60_000

IDLE_STATES = ("", "here")


class Host(Protocol):
    """Runs one container's processes."""

    def start(self) -> None:
        """Start the container."""

    def stop(self) -> None:
        """Stop the container; all its processes are dead afterwards."""


class StopSignal(Protocol):
    """A stop flag that a signal sets, such as `threading.Event`."""

    def wait(self, timeout: float) -> bool:
        """Wait until it is set; False after the timeout."""


@dataclass(slots=True)
class _Place:
    """The cluster where the container runs now."""

    settings: ContainerSettings
    client: Client
    host: Host
    owner: str = ""  # the owner in that cluster's records; "": it is at home
    heard_ms: Millis = 0


@dataclass(slots=True)
class LendableHost:
    """Runs one container, at home or on loan."""

    home: ContainerSettings
    make_host: Callable[[ContainerSettings, Client], Host]  # the client is for the container's cluster
    clock: Clock
    _place: _Place | None = field(default=None, repr=False)

    def run(self, stop: StopSignal) -> None:
        """Run until `stop` is set; leaves no process running."""
        self._enter(self.home)
        try:
            pause_ms = UNDER_WAY_MS
            while not stop.wait(pause_ms / 1000):
                pause_ms = ASK_MS if self.poll_order() in IDLE_STATES else UNDER_WAY_MS
        finally:
            self._leave()

    def poll_order(self) -> str:
        """Poll for an order once and execute it; returns the container's state in the cluster, ""
        for none.
        """
        place, now_ms = self._place, self.clock.boot_ms()
        assert place is not None
        try:
            response = place.client.ask_order(place.settings.name, owner=place.owner)
        except NotFound:
            return ""  # this control plane does not support lending
        except PenstockError as error:
            if place.owner and now_ms - place.heard_ms >= HOME_AFTER_MS:
                self._go_home(f"the other cluster did not answer: {error.what}")
            return ""
        if response["state"] in ("here", "asked", "draining", "ordered"):
            place.heard_ms = now_ms
        elif place.owner and now_ms - place.heard_ms >= HOME_AFTER_MS:
            self._go_home("the other cluster has no record of it")
            return ""
        order = response["order"]
        if order is not None:
            self._execute(place, order)
        return str(response["state"])

    def _execute(self, place: _Place, order: Mapping[str, Any]) -> None:
        try:
            if order["kind"] not in ("check", "go"):
                raise EnvironmentProblem(
                    f"this host cannot execute an order of kind {order['kind'][:100]!r}",
                    why="its cluster runs a newer version of penstock",
                    fix="restart the container with that version",
                )
            settings = self._settings_for(order)
        except (PenstockError, OSError) as error:
            self._refuse(place, order, error)
            return
        if order["kind"] == "check":
            self._reply(place, order, accepted=True)
            return
        log.info(
            "container moves to another cluster", container=self.home.name, to=order["to"], url=order["url"]
        )
        self._leave()
        if not self._reply(place, order, accepted=True):
            # The order was cancelled, or the cluster does not answer: stay.
            self._enter(place.settings, owner=place.owner)
            return
        try:
            self._enter(settings, owner=str(order["owner"]))
        except (PenstockError, OSError) as error:
            self._go_home(f"it cannot start in the other cluster: {error}")

    def _refuse(self, place: _Place, order: Mapping[str, Any], error: PenstockError | OSError) -> None:
        what, why = (error.what, error.why) if isinstance(error, PenstockError) else (str(error), "")
        log.warning(
            "container cannot move to another cluster",
            container=self.home.name,
            to=order["to"],
            error=what,
            why=why,
        )
        self._reply(place, order, accepted=False, why=f"{what}: {why}" if why else what)

    def _reply(self, place: _Place, order: Mapping[str, Any], *, accepted: bool, why: str = "") -> bool:
        try:
            with _client(place.settings) as client:
                client.answer_order(self.home.name, number=order["number"], accepted=accepted, why=why)
        except PenstockError as error:
            log.warning(
                "the cluster did not accept the reply to an order",
                container=self.home.name,
                error=error.what,
                why=error.why,
            )
            return False
        return True

    def _settings_for(self, order: Mapping[str, Any]) -> ContainerSettings:
        """The container's settings for the ordered cluster; raises if it cannot join."""
        if not order["owner"]:
            return self.home
        url = str(order["url"])
        # A separate folder for each cluster: their tasks must not see each other's files.
        folder = self.home.folder / "lent" / hashlib.sha256(url.encode()).hexdigest()[:12]
        settings = join_settings(
            self.home.name,
            url=url,
            token_file=write_token_file(folder, str(order["token"])),
            folder=folder,
            engine=self.home.engine,
            cores=self.home.cores,
            capacity=self.home.capacity,
            region=self.home.region,
            rows=os.environ.get(ROWS_VARIABLE, ""),
        )
        # The variable holds the address of the home cluster's database.
        return replace(settings, store="") if settings.store.startswith("env:") else settings

    def _go_home(self, reason: str) -> None:
        log.warning("container returns home", container=self.home.name, reason=reason)
        self._leave()
        self._enter(self.home)

    def _enter(self, settings: ContainerSettings, *, owner: str = "") -> None:
        client = _client(settings)
        host = self.make_host(settings, client)
        host.start()
        heard_ms = self.clock.boot_ms()
        self._place = _Place(settings=settings, client=client, host=host, owner=owner, heard_ms=heard_ms)

    def _leave(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.host.stop()
            report_dead(place.client, place.settings)
            place.client.close()


def _client(settings: ContainerSettings) -> Client:
    return Client(settings.url, settings.token_file.read_text().strip(), timeout_s=5, retries=0)


def report_dead(client: Client, settings: ContainerSettings) -> None:
    """Report that all its processes have ended. If that fails, its lease expires."""
    try:
        client.container_dead(settings.name, folder_id(settings.folder))
    except PenstockError as error:
        log.warning("cannot report the end of a container", container=settings.name, error=error.what)


def write_token_file(folder: Path, token: str) -> Path:
    """Write a token to a file that only this user can read; arguments would be visible to all users."""
    path = folder / "token"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(token)
        path.chmod(0o600)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot use the folder {folder}", why=str(error), fix="choose another folder with --dir"
        ) from error
    return path


@dataclass(slots=True)
class _Child:
    settings: ContainerSettings
    process: subprocess.Popen[bytes] | None = None
    restart_at_ms: Millis = 0
    started_ms: Millis = 0
    failures: int = 0


@dataclass(slots=True)
class ContainerHost:
    """Starts the containers of this machine, and restarts those that die (Tupperware in the
    Turbine paper).
    """

    containers: tuple[ContainerSettings, ...]
    environment: Mapping[str, str]  # of the wardens, which do not pass secrets on to their engines
    clock: Clock
    # Called once all processes of that container have ended
    on_dead: Callable[[str], object] = lambda name: None
    _children: list[_Child] = field(default_factory=list)
    _locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _loop: Loop | None = None
    _is_stopping: bool = False

    def start(self) -> None:
        """Kill processes left by a previous host, then start all containers and watch them.

        A lock allows one host per folder: a second one would kill the containers of the first.
        """
        for settings in self.containers:
            self._locks.enter_context(folder_lock(settings.folder / "host", f"container {settings.name}"))
        self._children = [_Child(settings) for settings in self.containers]
        for child in self._children:
            reap_container(child.settings.folder)
            clear_failure(child.settings.folder)
        self._loop = Loop("containers", self._check, every_ms=200).start()

    def stop(self) -> None:
        """Stop all containers; kill those that do not end in time."""
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

    def _check(self) -> None:
        now_ms = self.clock.boot_ms()
        for child in self._children:
            if child.process is None:
                if now_ms >= child.restart_at_ms and not self._is_stopping:
                    self._spawn(child, now_ms)
            elif child.process.poll() is not None:
                self._on_exit(child, now_ms)

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

    def _on_exit(self, child: _Child, now_ms: Millis) -> None:
        """A warden has ended: kill its engine's processes, and only then report the container as dead."""
        assert child.process is not None
        log.warning("container died", container=child.settings.name, code=child.process.returncode)
        child.process = None
        kill_previous_session(child.settings.folder / "engine.pid")
        self.on_dead(child.settings.name)
        child.failures = 1 if now_ms - child.started_ms > RESTART_MAX_MS else child.failures + 1
        child.restart_at_ms = now_ms + min(RESTART_MS * 2 ** (child.failures - 1), RESTART_MAX_MS)


def reap_container(folder: Path) -> None:
    """Kill a container's processes left by a killed host. The warden first: it would start another engine."""
    killed = kill_previous_session(folder / "warden.session") + kill_previous_session(folder / "engine.pid")
    if killed:
        log.info("killed processes of a previous host", container=folder.name, processes=killed)


def run_joined(settings: ContainerSettings, stop: StopSignal) -> None:
    """Host a container that joined a control plane, until `stop` is set; leaves no process running."""
    hidden = SECRET_VARIABLES - {DATABASE_VARIABLE}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    clock = SystemClock()

    def make_host(chosen: ContainerSettings, client: Client) -> ContainerHost:
        return ContainerHost((chosen,), environment, clock, lambda name: report_dead(client, chosen))

    LendableHost(settings, make_host, clock).run(stop)
