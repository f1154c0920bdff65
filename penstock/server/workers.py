"""Server workers: a few equal processes that share the socket of the API, and their parent's side of them.

Each has the whole API over its own handle of the store, and serves every request but those that need the
memory of the process that holds the leases. These it passes on to that process's own listener, to which
containers send their heartbeats directly. A worker keeps nothing: it is replaced when it dies, and ends with
its parent.
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
from penstock.server.api import PassOn, build_api
from penstock.server.services import Control, ScalingHere, Services
from penstock.server.serving import ApiServer, Listening, Server, Tls, server_config
from penstock.settings import Settings

ALLOCATIONS = 50_000  # more objects than before, not 700: a round over 100,000 jobs makes millions that stay
# Where somebody waits for an answer: to look through 50,000 takes up to 0.1 s, in which all wait.
SERVING = (2_000, 5, 1_000)
TURN_S = 0.0005  # not 5 ms: a thread that asks SQLite for ten rows gives its turn away ten times


def tune_process(*, serving: bool = False) -> None:
    """Garbage in cycles is looked for rarely, never in what is loaded by now; threads take short turns.

    Measured in a release of 100,000 jobs: an eighth of the time went into collections that found nothing; and
    under 600 requests a second beside the State Syncer: reads waited four times as long for their turns.
    `serving`: it only answers requests. Collections are short and frequent.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*(SERVING if serving else (ALLOCATIONS, 20, 50)))
    sys.setswitchinterval(TURN_S)


CHECK_MS: Millis = 500
VARIABLE = "PENSTOCK_WORKER"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker is given when it starts."""

    listener: int  # the inherited socket's number
    control: str  # where the control plane's own listener is, as this machine reaches it
    named: str  # and as containers are told
    settings: dict[str, Any]
    any_address: bool = False
    cert: str = ""
    key: str = ""

    @property
    def tls(self) -> Tls | None:
        return Tls(cert=Path(self.cert), key=Path(self.key)) if self.cert else None


# --- in the worker


class Worker(Services):
    """The services of one worker, which writes a line to its parent when the syncer should look."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, Database(settings.database or settings.folder / "store.db"))
        self.scaling = self.scaler = ScalingElsewhere()
        os.set_blocking(sys.stdout.fileno(), False)

    def wake_syncer(self) -> None:
        # A full pipe was written to often enough, and a broken one means that the parent has ended.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(sys.stdout.fileno(), b"\n")


class ScalingElsewhere:
    """`Scaling` as the control plane last sent it, a line whenever it changes."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[dict[str, Any] | None, str]] = {}

    def take(self, line: str) -> None:
        """Replace everything."""
        self._known = msgspec.json.decode(line)

    def load_of(self, job: str) -> dict[str, Any] | None:
        return self._known.get(job, (None, ""))[0]

    def reason_of(self, job: str) -> str:
        return self._known.get(job, (None, ""))[1]


def run_worker(given: WorkerSettings) -> None:
    """Serve until standard input ends, or SIGTERM, which lets requests under way finish."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    settings = Settings(**given.settings)
    worker = Worker(settings)
    threading.Thread(target=_listen, args=(worker.scaler,), name="control plane", daemon=True).start()
    api = build_api(
        worker,
        pass_on=PassOn(given.control, trust=_pinned(given.tls), named=given.named),
        names=settings.name,
        any_address=given.any_address,
    )
    tune_process(serving=True)
    Server(server_config(api, given.tls)).run(sockets=[socket.socket(fileno=given.listener)])


def _listen(scaling: ScalingElsewhere) -> None:
    try:
        for line in sys.stdin:
            scaling.take(line)
    finally:  # also when the last line is half a line
        # Without the control plane there is nothing to serve, and the next one needs the port.
        os._exit(0)


def _pinned(tls: Tls | None) -> ssl.SSLContext | None:
    """Trust the certificate that we show ourselves, and no other, whatever name is in it."""
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
    told: str = ""  # what it knows of the scaler


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
        # The worker needs no address of those who are told of alarms, and they are secrets.
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
        self._news = ""
        self._loop = Loop("workers", self._check, every_ms=CHECK_MS)

    @property
    def url(self) -> str:
        """Where the API is."""
        return self._listening.url(self._listener.getsockname()[1])

    @property
    def is_serving(self) -> bool:
        """Whether requests are answered; a worker that died is replaced in a moment."""
        return self.control.is_serving

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the workers that run now."""
        return tuple(child.process.pid for child in self._children)

    def start(self) -> ApiProcesses:
        """Begin to answer; requests that came before wait in the socket's queue."""
        self.control.start()
        self._children = [self._spawn() for _ in range(self._count)]
        self._loop.start()
        return self

    def stop(self, timeout_s: float = 5) -> None:
        """End the workers, then the listener that they pass requests on to."""
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
            # Not among its arguments, which everybody can read: a database's URL may have a password.
            env={**os.environ, VARIABLE: json.dumps(asdict(self._given))},
        )
        self._readers.start(partial(self._read, process))
        return _Child(process)

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Wake the State Syncer for what the worker changed, until the worker has ended."""
        assert process.stdout is not None
        with process.stdout as lines:
            while os.read(lines.fileno(), 4096):
                self._plane.wake_syncer()

    def _check(self) -> None:
        scaling = self._scaling.all()
        if scaling != self._sent:  # it changes much less often; of a large fleet the text is megabytes
            self._sent, self._news = scaling, msgspec.json.encode(scaling).decode()
        codes = []
        for number, child in enumerate(self._children):
            if child.process.poll() is not None:
                codes.append(child.process.returncode)
                _end(child, 0)
                self._children[number] = self._spawn()
            _send(self._children[number], self._news)
        if codes:
            # The loop waits longer each time: one that cannot start must not take all the CPU.
            raise EnvironmentProblem(
                "a server worker died", why=f"it ended with code {codes[0]}", fix="nothing: there is another"
            )


def _send(child: _Child, news: str) -> None:
    if news == child.told:
        return
    assert child.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is dying: the next one is sent everything
        child.process.stdin.write(news + "\n")
        child.process.stdin.flush()
        child.told = news


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
    """How this machine reaches what listens at `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


if __name__ == "__main__":
    run_worker(WorkerSettings(**json.loads(os.environ[VARIABLE])))
