"""`penstock up`: a control plane, its API and its containers as processes of this machine, until told to stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import uvicorn
from rich.console import Console

from penstock.app import ControlPlane, Settings
from penstock.cli.connection import endpoint_file, token_file
from penstock.container import ContainerSettings, folder_lock
from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, EnvironmentProblem
from penstock.core.loop import Loop
from penstock.streams.engine.java import require_java
from penstock.tasks.messages import PROFILES
from penstock.tasks.sessions import reap_leftovers
from penstock.web.api import build_api

log = structlog.get_logger(__name__)
out = Console()

# Long enough for its tasks to start elsewhere first: a starting JVM takes all the CPU there is.
RESTART_MS: Millis = 5_000
RESTART_MAX_MS: Millis = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What `penstock up` was asked to run."""

    folder: Path
    containers: int
    port: int
    cores: int
    profile: str


def run_up(settings: UpSettings) -> None:
    """Run until SIGTERM or SIGINT; leaves nothing running."""
    if settings.profile not in PROFILES:
        raise ConfigError(f"no such profile: {settings.profile!r}", why=f"known: {', '.join(PROFILES)}", fix="use one")
    if settings.containers:
        require_java()
    folder = settings.folder.resolve()
    _make_folder(folder)
    with folder_lock(folder, "a control plane"), _bound(settings.port) as listener:
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        plane = ControlPlane(Settings(folder=folder, profile=settings.profile))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        _write_tokens(plane, folder)
        server = uvicorn.Server(
            uvicorn.Config(build_api(plane), log_level="warning", access_log=False, timeout_graceful_shutdown=2)
        )
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="api", daemon=True)
        serving.start()
        plane.start()
        host = ContainerHost(settings, folder, url, plane)
        host.start()
        _write_private(endpoint_file(folder), json.dumps({"url": url, "pid": os.getpid()}))
        out.print(f"[green]penstock is up[/] at {url}, {settings.containers} containers, folder {folder}")
        out.print("stop it with Ctrl-C")
        stop.wait()
        out.print("stopping …")
        endpoint_file(folder).unlink(missing_ok=True)
        host.stop()
        server.should_exit = True
        serving.join(5)
        plane.stop()
        out.print("stopped")


@dataclass(slots=True)
class _Child:
    settings: ContainerSettings
    process: subprocess.Popen[bytes] | None = None
    restart_at_ms: Millis = 0
    started_ms: Millis = 0
    failures: int = 0


@dataclass(slots=True)
class ContainerHost:
    """What Tupperware is to Turbine: starts containers, sees them die, clears up after them, starts them again."""

    settings: UpSettings
    folder: Path
    url: str
    plane: ControlPlane
    _children: list[_Child] = field(default_factory=list)
    _loop: Loop | None = None
    _is_stopping: bool = False

    def start(self) -> None:
        """Start all containers and watch them."""
        for number in range(1, self.settings.containers + 1):
            name = f"c{number}"
            child = _Child(
                ContainerSettings(
                    name=name,
                    folder=self.folder / "containers" / name,
                    url=self.url,
                    token_file=token_file(self.folder, "container"),
                    bus=self.plane.settings.bus,
                    rows=self.plane.settings.rows,
                    profile=self.settings.profile,
                    cores=self.settings.cores,
                )
            )
            self._children.append(child)
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
            reap_leftovers(child.settings.folder / "engine.pid")

    def _look(self) -> None:
        now_ms = self.plane.clock.boot_ms()
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
                [sys.executable, "-m", "penstock.cli.main", "container", *child.settings.arguments()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        child.started_ms = now_ms
        (folder / "warden.pid").write_text(str(child.process.pid))

    def _bury(self, child: _Child, now_ms: Millis) -> None:
        """The warden is dead: end what it left, and only then say that the container is."""
        assert child.process is not None
        log.warning("container died", container=child.settings.name, code=child.process.returncode)
        child.process = None
        reap_leftovers(child.settings.folder / "engine.pid")
        self.plane.on_container_dead(child.settings.name)
        child.failures = 1 if now_ms - child.started_ms > RESTART_MAX_MS else child.failures + 1
        child.restart_at_ms = now_ms + min(RESTART_MS * 2 ** (child.failures - 1), RESTART_MAX_MS)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokens").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot use the folder {folder}", why=str(error), fix="name another one with --folder"
        ) from error


def _bound(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise EnvironmentProblem(
            f"port {port} is in use",
            why=str(error),
            fix="stop what listens there, or take another with --port (0: any free one)",
        ) from error
    return listener


def _write_tokens(plane: ControlPlane, folder: Path) -> None:
    """Tokens for this machine, issued once and kept in files that only this user can read."""
    now_ms = plane.clock.now_ms()
    for role in ("admin", "developer", "oncall", "reader", "container"):
        path = token_file(folder, role)
        if not path.exists():
            _write_private(path, plane.tokens.issue(f"local-{role}", role, now_ms=now_ms))


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)
