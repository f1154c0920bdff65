"""Server workers: equal processes that share the API's socket, and the parent's side of them.

Each worker serves all requests over its own handle of the store, except those that need the memory of the
control plane process. It forwards these to the control plane's own listener, to which containers send their
heartbeats directly. A worker has no state: it is replaced when it dies, and ends with its parent.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from penstock.core.clock import Millis
from penstock.core.errors import EnvironmentProblem
from penstock.core.loop import Loop, ThreadExecutor
from penstock.db.database import Database
from penstock.scaling.metrics.frames import JobLoad
from penstock.server.api import ControlProxy, build_api
from penstock.server.services import Control, ScalingHere, Services
from penstock.server.serving import ApiServer, Listening, Server, Tls, server_config
from penstock.settings import Settings

ALLOCATIONS = 50_000  # not 700: a round over 100,000 jobs makes millions of objects that stay
# Thresholds where requests are answered: a collection over 50,000 objects pauses all of them up to 0.1 s.
SERVING = (2_000, 5, 1_000)
TURN_S = 0.0005  # not 5 ms: a thread that reads ten rows from SQLite releases the GIL ten times


def tune_process(*, serving: bool = False) -> None:
    """Tune the garbage collector and the GIL: rare collections, without objects loaded by now; short turns.

    Measured in a release of 100,000 jobs: an eighth of the time went into collections that found nothing;
    under 600 requests a second beside the State Syncer, reads waited four times as long for the GIL.
    `serving`: a process that only answers requests has short and frequent collections.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*(SERVING if serving else (ALLOCATIONS, 20, 50)))
    sys.setswitchinterval(TURN_S)


CHECK_MS: Millis = 500
VARIABLE = "PENSTOCK_WORKER"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The start arguments of a worker."""

    listener: int  # file descriptor of the inherited socket
    control: str  # URL of the control plane's own listener on this machine
    named: str  # the same listener as containers reach it
    settings: dict[str, Any]
    any_address: bool = False
    cert: str = ""
    key: str = ""

    @property
    def tls(self) -> Tls | None:
        return Tls(cert=Path(self.cert), key=Path(self.key)) if self.cert else None


# --- in the worker


class Worker(Services):
    """The services of one worker; it writes a line to its parent to wake the State Syncer."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, Database(settings.database or settings.folder / "store.db"))
        self.scaling = self.scaler = ScalingElsewhere()
        os.set_blocking(sys.stdout.fileno(), False)

    def wake_syncer(self) -> None:
        # A full pipe has wake-ups enough; a broken one means that the parent has ended.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(sys.stdout.fileno(), b"\n")


class ScalingElsewhere:
    """`Scaling` as last received from the control plane, which sends a line after each change."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[dict[str, Any] | None, str]] = {}

    def take(self, line: str) -> None:
        """Replace the state by a received line."""
        self._known = msgspec.json.decode(line)

    def load_of(self, job: str) -> dict[str, Any] | None:
        return self._known.get(job, (None, ""))[0]

    def reason_of(self, job: str) -> str:
        return self._known.get(job, (None, ""))[1]


def run_worker(given: WorkerSettings) -> None:
    """Serve until standard input ends, or until SIGTERM, which completes the requests in progress."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    settings = Settings(**given.settings)
    worker = Worker(settings)
    threading.Thread(target=_listen, args=(worker.scaler,), name="control plane", daemon=True).start()
    api = build_api(
        worker,
        pass_on=ControlProxy(given.control, trust=_pinned(given.tls), named=given.named),
        names=settings.name,
        any_address=given.any_address,
    )
    tune_process(serving=True)
    Server(server_config(api, given.tls)).run(sockets=[socket.socket(fileno=given.listener)])


def _listen(scaling: ScalingElsewhere) -> None:
    try:
        for line in sys.stdin:
            scaling.take(line)
    finally:  # also if the last line is incomplete
        # The control plane has ended, and the next one needs the port.
        os._exit(0)


def _pinned(tls: Tls | None) -> ssl.SSLContext | None:
    """A TLS context that trusts only our own certificate, whatever host name is in it."""
    if tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(tls.cert)
    return context


# --- in the control plane


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[str]
    sent: str = ""  # the scaling state that it has


class ApiProcesses:
    """The API of a control plane: its own listener in this process, and workers on the public socket."""

    def __init__(
        self,
        plane: Control,
        listener: socket.socket,
        control: socket.socket,
        listening: Listening,
    ) -> None:
        self._listener, self._listening, self._plane = listener, listening, plane
        any_address, tls, names = listening.tls is not None, listening.tls, plane.settings.name
        self.control = ApiServer(build_api(plane, names=names, any_address=any_address), control, listening)
        # The addresses of alarm receivers are secrets, and workers do not need them.
        settings = plane.settings.model_copy(update={"alarm_webhook": "", "alarm_channels": ""})
        self._given = WorkerSettings(
            listener=listener.fileno(),
            control=replace(listening, name=_local(listening.host)).url(self.control.port),
            named=settings.control_url or f":{self.control.port}",
            settings=settings.model_dump(mode="json"),
            any_address=any_address,
            cert="" if tls is None else str(tls.cert),
            key="" if tls is None else str(tls.key),
        )
        self._children: list[_Child] = []
        self._count = settings.workers
        self._readers = ThreadExecutor("worker's wake-ups", threads=settings.workers + 1)
        self._scaling = ScalingHere(plane.scaler)
        self._sent: dict[str, tuple[JobLoad | None, str]] | None = None
        self._line = ""
        self._loop = Loop("workers", self._check, every_ms=CHECK_MS)

    @property
    def url(self) -> str:
        """The URL of the API."""
        return self._listening.url(self._listener.getsockname()[1])

    @property
    def is_serving(self) -> bool:
        """Whether the API is up; a dead worker does not count, since it is replaced."""
        return self.control.is_serving

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running workers."""
        return tuple(child.process.pid for child in self._children)

    def start(self) -> ApiProcesses:
        """Start listener and workers; earlier connections wait in the socket's backlog."""
        self.control.start()
        self._children = [self._spawn() for _ in range(self._count)]
        self._loop.start()
        return self

    def stop(self, timeout_s: float = 5) -> None:
        """End the workers, then the listener to which they forward requests."""
        self._loop.stop()
        for child in self._children:
            child.process.terminate()
        for child in self._children:
            _end(child, timeout_s)
        self._readers.stop()
        self.control.stop(timeout_s)

    def _spawn(self) -> _Child:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.server.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._given.listener],
            start_new_session=True,  # Ctrl-C is for the control plane, which ends its workers
            text=True,
            # Not as arguments, which all users of the machine can read: a database URL may have a password.
            env={**os.environ, VARIABLE: json.dumps(asdict(self._given))},
        )
        self._readers.start(partial(self._read, process))
        return _Child(process)

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Wake the State Syncer whenever the worker writes to its pipe, until the worker ends."""
        assert process.stdout is not None
        with process.stdout as lines:
            while os.read(lines.fileno(), 4096):
                self._plane.wake_syncer()

    def _check(self) -> None:
        scaling = self._scaling.all()
        if scaling != self._sent:  # encoded only after a change: for a large fleet the text has megabytes
            self._sent, self._line = scaling, msgspec.json.encode(scaling).decode()
        codes = []
        for number, child in enumerate(self._children):
            if child.process.poll() is not None:
                codes.append(child.process.returncode)
                _end(child, 0)
                self._children[number] = self._spawn()
            _send(self._children[number], self._line)
        if codes:
            # The error makes the loop back off: a worker that cannot start must not take all the CPU.
            raise EnvironmentProblem(
                "a server worker ended", why=f"its exit code was {codes[0]}", fix="nothing: it was replaced"
            )


def _send(child: _Child, line: str) -> None:
    if line == child.sent:
        return
    assert child.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended: its successor gets the whole state
        child.process.stdin.write(line + "\n")
        child.process.stdin.flush()
        child.sent = line


def _end(child: _Child, timeout_s: float) -> None:
    process = child.process
    assert process.stdin is not None
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(OSError):
        process.stdin.close()


def _local(host: str) -> str:
    """The address under which this machine reaches a listener at `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


if __name__ == "__main__":
    run_worker(WorkerSettings(**json.loads(os.environ[VARIABLE])))
