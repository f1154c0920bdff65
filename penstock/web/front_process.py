"""Front and clerk as the control plane sees them: processes that it starts, tells news, and replaces."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial

from penstock.app import ControlPlane
from penstock.core.clock import Millis
from penstock.core.errors import EnvironmentProblem
from penstock.core.loop import AsideThreads, Loop
from penstock.web.api import build_api
from penstock.web.front import FrontSettings
from penstock.web.overview import ScalingHere
from penstock.web.server import ApiServer, Listening, bind

LOOK_MS: Millis = 500
NO_PIPE = -1


@dataclass(slots=True)
class _Front:
    settings: FrontSettings
    process: subprocess.Popen[str] | None = None
    told: str = ""


class FrontProcess:
    """Requests from outside go to a process of their own; what it does not answer itself goes to `api`."""

    def __init__(
        self,
        plane: ControlPlane,
        api: ApiServer,
        listener: socket.socket,
        listening: Listening,
        *,
        secret: str,
        names: tuple[str, ...] = (),
        any_address: bool = False,
    ) -> None:
        self._api, self._listener, self._listening = api, listener, listening
        self._scaling, self._wake_syncer = ScalingHere(plane), plane.wake_syncer
        self._ears = AsideThreads("front's bell", threads=4)
        tls = listening.tls
        # Of a file the control plane is the one who writes; see `web/clerk.py`.
        self._inside = bind(Listening()) if plane.database.is_shared else None
        settings = FrontSettings(
            listener=listener.fileno(),
            bell=NO_PIPE,  # each has its own
            port=api.port,
            clerk_port=0 if self._inside is None else self._inside.getsockname()[1],
            secret=secret,
            database=plane.settings.database,
            folder=str(plane.settings.folder),
            names=names,
            any_address=any_address,
            cert="" if tls is None else str(tls.cert),
            key="" if tls is None else str(tls.key),
        )
        self._fronts = [_Front(settings)]
        if self._inside is not None:
            inside = replace(settings, listener=self._inside.fileno(), is_clerk=True, cert="", key="")
            self._fronts.append(_Front(inside))
        self._loop = Loop("front", self._look, every_ms=LOOK_MS)

    @property
    def url(self) -> str:
        """Where it answers."""
        return self._listening.url(self._listener.getsockname()[1])

    @property
    def is_serving(self) -> bool:
        """Whether requests are answered; a front that died is there again in a moment."""
        return self._api.is_serving

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that answer now."""
        return tuple(front.process.pid for front in self._fronts if front.process is not None)

    def start(self) -> FrontProcess:
        """Begin to answer; what was asked before waits in the socket's queue."""
        self._api.start()
        for front in self._fronts:
            self._spawn(front)
        self._loop.start()
        return self

    def stop(self, timeout_s: float = 5) -> None:
        """End them, then what they stand in front of."""
        self._loop.stop()
        running = [front.process for front in self._fronts if front.process is not None]
        for process in running:
            process.terminate()
        for process in running:
            self._end(process, timeout_s)
        self._ears.stop()
        if self._inside is not None:
            self._inside.close()
        self._api.stop(timeout_s)

    def _end(self, process: subprocess.Popen[str], timeout_s: float) -> None:
        assert process.stdin is not None
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()

    def _spawn(self, front: _Front) -> None:
        heard, bell = os.pipe()
        try:
            front.process = self._launch(replace(front.settings, bell=bell))
        except OSError:
            os.close(heard)
            raise
        finally:
            os.close(bell)
        self._ears.start(partial(self._hear, heard))
        front.told = ""

    def _hear(self, pipe: int) -> None:
        """Wake the State Syncer for what the front changed, until there is no front any more."""
        with open(pipe, "rb", buffering=0) as rung:
            while rung.read(4096):
                self._wake_syncer()

    def _launch(self, settings: FrontSettings) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "penstock.web.front"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[settings.listener, settings.bell],
            start_new_session=True,  # Ctrl-C is for the control plane, which ends it
            text=True,
            # Not among its arguments, which everybody can read: a database's URL may have a password.
            env={**os.environ, "PENSTOCK_FRONT": json.dumps(asdict(settings))},
        )

    def _look(self) -> None:
        codes = [self._replace(front) for front in self._fronts if _is_dead(front)]
        news = json.dumps(self._scaling.all())
        for front in self._fronts:
            _tell(front, news)
        if codes:
            # The loop tells it, and waits longer each time: one that cannot start must not take all the CPU.
            raise EnvironmentProblem(
                "a front or clerk died",
                why=f"it ended with code {codes[0]}",
                fix="nothing: there is another",
            )

    def _replace(self, front: _Front) -> int:
        assert front.process is not None
        code = front.process.returncode
        self._end(front.process, 0)
        self._spawn(front)
        return code


def _is_dead(front: _Front) -> bool:
    return front.process is not None and front.process.poll() is not None


def _tell(front: _Front, news: str) -> None:
    if front.process is None or front.settings.is_clerk or news == front.told:
        return
    assert front.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is dying: the next one is told everything
        front.process.stdin.write(news + "\n")
        front.process.stdin.flush()
        front.told = news


def serve_behind_front(
    plane: ControlPlane,
    listener: socket.socket,
    behind: socket.socket,
    listening: Listening,
    names: tuple[str, ...] = (),
) -> FrontProcess:
    """The API of a control plane: itself on the socket `behind`, its front on `listener`. Not yet started."""
    any_address, secret = listening.tls is not None, secrets.token_hex(16)
    api = build_api(plane, names=names, any_address=any_address, front_secret=secret)
    server = ApiServer(api, behind)
    return FrontProcess(
        plane, server, listener, listening, secret=secret, names=names, any_address=any_address
    )
