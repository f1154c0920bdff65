"""Warm planners for a session: the host that forks them, and the Python by which Spark reaches it."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

from penstock.streams.engine import planner_client
from penstock.streams.engine.planner_client import SOCKET

RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"
END_S = 5
OPENED = Path("/proc/self/fd")  # on Linux: what we have open, under a short name
_SCRIPT = """\
#!/bin/sh
# What Spark knows as Python. It starts one for each query; that one comes warm from the planner host.
if [ "$2" = {runner} ]; then
    exec {python} -I -S {client} {folder} {python} "$@"
fi
# Those that look at a source once per query: of them Spark has a daemon, but not ours.
if [ "$2" = pyspark.daemon ]; then
    shift 2
    exec {python} -m penstock.streams.engine.worker_daemon "$@"
fi
exec {python} "$@"
"""


class Planners:
    """The planner host of one session. If it dies, queries start without it, slower."""

    def __init__(self, folder: Path) -> None:
        (folder / SOCKET).unlink(missing_ok=True)
        self.python = folder / "python"
        names = {"runner": RUNNER, "python": sys.executable, "client": planner_client.__file__}
        self.python.write_text(
            _SCRIPT.format(
                **{name: shlex.quote(str(value)) for name, value in {**names, "folder": folder}.items()}
            )
        )
        self.python.chmod(0o700)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            _bind(listener, folder)
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.streams.engine.planner_host", str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )

    @property
    def pid(self) -> int:
        """The host's process id."""
        return self._process.pid

    def end(self) -> None:
        """Let it end, and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _bind(listener: socket.socket, folder: Path) -> None:
    """Bind it in this folder, whose path may be longer than that of a socket."""
    if not OPENED.exists():
        listener.bind(str(folder / SOCKET))
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        listener.bind(str(OPENED / str(opened) / SOCKET))
    finally:
        os.close(opened)
