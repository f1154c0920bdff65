"""The front as the control plane sees it: a process that is started, told news, and replaced when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial

from penstock.app import ControlPlane
from penstock.core.clock import Millis
from penstock.core.errors import EnvironmentProblem
from penstock.core.loop import AsideThreads, Loop
from penstock.web.api import build_api
from penstock.web.front import FrontSettings
from penstock.web.overview import ScalingHere
from penstock.web.server import ApiServer, Listening

LOOK_MS: Millis = 500
NO_PIPE = -1


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
        self._scaling, self._told = ScalingHere(plane), ""
        self._wake_syncer, self._ears = plane.wake_syncer, AsideThreads("front's bell", threads=2)
        tls = listening.tls
        self._settings = FrontSettings(
            listener=listener.fileno(),
            bell=NO_PIPE,  # each has its own
            port=api.port,
            secret=secret,
            database=plane.settings.database,
            folder=str(plane.settings.folder),
            names=names,
            any_address=any_address,
            cert="" if tls is None else str(tls.cert),
            key="" if tls is None else str(tls.key),
        )
        self._process: subprocess.Popen[str] | None = None
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
    def pid(self) -> int | None:
        """Of the process that answers now."""
        return None if self._process is None else self._process.pid

    def start(self) -> FrontProcess:
        """Begin to answer; what was asked before waits in the socket's queue."""
        self._api.start()
        self._spawn()
        self._loop.start()
        return self

    def stop(self, timeout_s: float = 5) -> None:
        """End it, then what it stands in front of."""
        self._loop.stop()
        if self._process is not None:
            self._end(self._process, timeout_s)
        self._ears.stop()
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

    def _spawn(self) -> None:
        heard, bell = os.pipe()
        settings = replace(self._settings, bell=bell)
        try:
            self._process = self._launch(settings)
        except OSError:
            os.close(heard)
            raise
        finally:
            os.close(bell)
        self._ears.start(partial(self._hear, heard))
        self._told = ""

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
        assert self._process is not None and self._process.stdin is not None
        if self._process.poll() is not None:
            code = self._process.returncode
            self._end(self._process, 0)
            self._spawn()
            # The loop tells it, and waits longer each time: one that cannot start must not take all the CPU.
            raise EnvironmentProblem(
                "the front died", why=f"it ended with code {code}", fix="nothing: there is another"
            )
        news = json.dumps(self._scaling.all())
        if news != self._told:
            with contextlib.suppress(BrokenPipeError):  # it is dying: the next one is told everything
                self._process.stdin.write(news + "\n")
                self._process.stdin.flush()
                self._told = news


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
