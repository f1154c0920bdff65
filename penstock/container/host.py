"""The hosts of containers: what starts a container's processes, sees them die, clears up, starts them again.

`ContainerHost` does so for containers of this machine. `LendableHost` runs one that joined: at home, or for
another cluster while that one needs it. It asks the cluster that its container works for. Before it goes it
checks whether it could work there. It comes home by itself when the other cluster does not want it, or falls
silent. Started again, it is at home.
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

ASK_MS: Millis = 10_000  # thousands of hosts ask: seldom, while nothing is wanted of them
UNDER_WAY_MS: Millis = 2_000  # while one is about to go, or has just come
HOME_AFTER_MS: Millis = 60_000  # so long another cluster may be silent, or not have it
# Long enough for its tasks to start elsewhere first: a starting JVM takes all the CPU there is.
RESTART_MS: Millis = 5_000
RESTART_MAX_MS: Millis = 60_000

AT_REST = ("", "here")


class Host(Protocol):
    """Whoever runs one container's processes."""

    def start(self) -> None:
        """Start it."""

    def stop(self) -> None:
        """End it, and make sure that nothing of it is left."""


class StopSignal(Protocol):
    """What a signal sets."""

    def wait(self, timeout: float) -> bool:
        """Whether it is set by then."""


@dataclass(slots=True)
class _Place:
    """Where the container works now."""

    settings: ContainerSettings
    client: Client
    host: Host
    owner: str = ""  # as that cluster has it; "": it is at home
    heard_ms: Millis = 0


@dataclass(slots=True)
class LendableHost:
    """Runs one container, at home or elsewhere."""

    home: ContainerSettings
    make_host: Callable[[ContainerSettings, Client], Host]  # with a client for its cluster
    clock: Clock
    _place: _Place | None = field(default=None, repr=False)

    def run(self, stop: StopSignal) -> None:
        """Work until told to stop; leaves nothing running."""
        self._enter(self.home)
        try:
            pause_ms = UNDER_WAY_MS
            while not stop.wait(pause_ms / 1000):
                pause_ms = ASK_MS if self.look() in AT_REST else UNDER_WAY_MS
        finally:
            self._leave()

    def look(self) -> str:
        """Ask once, and do as told; returns what the cluster has it for, "": nothing."""
        place, now_ms = self._place, self.clock.boot_ms()
        assert place is not None
        try:
            said = place.client.ask_order(place.settings.name, owner=place.owner)
        except NotFound:
            return ""  # a control plane that does not lend
        except PenstockError as error:
            if place.owner and now_ms - place.heard_ms >= HOME_AFTER_MS:
                self._go_home(f"its cluster did not answer: {error.what}")
            return ""
        if said["state"] in ("here", "asked", "draining", "ordered"):
            place.heard_ms = now_ms
        elif place.owner and now_ms - place.heard_ms >= HOME_AFTER_MS:
            self._go_home("its cluster does not take it")
            return ""
        order = said["order"]
        if order is not None:
            self._obey(place, order)
        return str(said["state"])

    def _obey(self, place: _Place, order: Mapping[str, Any]) -> None:
        try:
            if order["kind"] not in ("check", "go"):
                raise EnvironmentProblem(
                    f"this host does not know the order {order['kind'][:100]!r}",
                    why="its cluster runs a newer version",
                    fix="start the container again with that version",
                )
            settings = self._settings_for(order)
        except (PenstockError, OSError) as error:
            self._refuse(place, order, error)
            return
        if order["kind"] == "check":
            self._answer(place, order, accepted=True)
            return
        log.info("container goes", container=self.home.name, to=order["to"], url=order["url"])
        self._leave()
        if not self._answer(place, order, accepted=True):
            # It does not stand any more, or nobody answers: nothing has changed.
            self._enter(place.settings, owner=place.owner)
            return
        try:
            self._enter(settings, owner=str(order["owner"]))
        except (PenstockError, OSError) as error:
            self._go_home(f"it cannot start there: {error}")

    def _refuse(self, place: _Place, order: Mapping[str, Any], error: PenstockError | OSError) -> None:
        what, why = (error.what, error.why) if isinstance(error, PenstockError) else (str(error), "")
        log.warning("container cannot go", container=self.home.name, to=order["to"], error=what, why=why)
        self._answer(place, order, accepted=False, why=f"{what}: {why}" if why else what)

    def _answer(self, place: _Place, order: Mapping[str, Any], *, accepted: bool, why: str = "") -> bool:
        try:
            with _client(place.settings) as client:
                client.answer_order(self.home.name, number=order["number"], accepted=accepted, why=why)
        except PenstockError as error:
            log.warning("an answer was not taken", container=self.home.name, error=error.what, why=error.why)
            return False
        return True

    def _settings_for(self, order: Mapping[str, Any]) -> ContainerSettings:
        """How it works there; raises what keeps it from that."""
        if not order["owner"]:
            return self.home
        url = str(order["url"])
        # A folder of its own: what one cluster's tasks left must mean nothing to another's.
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
        # A database that is known by a variable is that of home.
        return replace(settings, store="") if settings.store.startswith("env:") else settings

    def _go_home(self, reason: str) -> None:
        log.warning("container goes home", container=self.home.name, reason=reason)
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
    """Nothing of it is left; if nobody hears that, its lease runs out by itself."""
    try:
        client.container_dead(settings.name, folder_id(settings.folder))
    except PenstockError as error:
        log.warning("the control plane was not told", container=settings.name, error=error.what)


def write_token_file(folder: Path, token: str) -> Path:
    """The token in a file that only this user can read, for the engine: arguments are seen by everybody."""
    path = folder / "token"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(token)
        path.chmod(0o600)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot use the folder {folder}", why=str(error), fix="name another one with --dir"
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
            clear_failure(child.settings.folder)
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
        kill_previous_session(child.settings.folder / "engine.pid")
        self.on_dead(child.settings.name)
        child.failures = 1 if now_ms - child.started_ms > RESTART_MAX_MS else child.failures + 1
        child.restart_at_ms = now_ms + min(RESTART_MS * 2 ** (child.failures - 1), RESTART_MAX_MS)


def reap_container(folder: Path) -> None:
    """End what a killed host left of a container. The warden goes first, or it starts another engine."""
    reaped = kill_previous_session(folder / "warden.session") + kill_previous_session(folder / "engine.pid")
    if reaped:
        log.info("reaped a previous life", container=folder.name, processes=reaped)


def run_joined(settings: ContainerSettings, stop: StopSignal) -> None:
    """Host one container of a control plane elsewhere until told to stop; leaves nothing running."""
    hidden = SECRET_VARIABLES - {DATABASE_VARIABLE}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    clock = SystemClock()

    def make_host(chosen: ContainerSettings, client: Client) -> ContainerHost:
        return ContainerHost((chosen,), environment, clock, lambda name: report_dead(client, chosen))

    LendableHost(settings, make_host, clock).run(stop)
