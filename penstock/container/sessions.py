"""Killing all of a process's kin: Spark's Python workers sit in process groups of their own, but in one
session.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import psutil

from penstock.core.system_clock import sleep_ms


def kill_session(session_id: int) -> int:
    """SIGKILL every process of a session; returns how many there were."""
    killed = 0
    for process in _members(session_id):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
            killed += 1
    return killed


def kill_own_session() -> None:
    """SIGKILL everything this process started in its session. Nothing, unless it leads one."""
    if os.getsid(0) != os.getpid():
        return
    for process in _members(os.getpid()):
        if process != os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def is_session_alive(session_id: int) -> bool:
    """Whether any process of the session still runs (a zombie does not)."""
    return bool(_members(session_id))


def _members(session_id: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session_id and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return found


def write_pid_file(path: Path, pid: int) -> None:
    """Record a session leader, so that a next life can reap it: a pid alone may be reused, a start time is
    not.
    """
    path.write_text(json.dumps({"pid": pid, "started": psutil.Process(pid).create_time()}))


def kill_previous_session(path: Path) -> int:
    """Kill the session that a previous life recorded, if it is still that one; returns how many died."""
    try:
        data = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return 0
    try:
        same = abs(psutil.Process(data["pid"]).create_time() - data["started"]) < 0.01
    except psutil.NoSuchProcess:
        # The leader is gone; orphans keep its session id, which no new process takes while they live.
        same = True
    killed = kill_session(data["pid"]) if same else 0
    while killed and is_session_alive(data["pid"]):
        sleep_ms(20)  # a process that was sent SIGKILL may still finish a write
    path.unlink(missing_ok=True)
    return killed


CHARS_MAX = 4_000


def write_failure(folder: Path, reason: str) -> None:
    """Say why the engine ends."""
    with contextlib.suppress(OSError):  # it is in the log too
        _file(folder).write_text(reason[:CHARS_MAX], encoding="utf-8")


def clear_failure(folder: Path) -> None:
    """An engine is ready, or another life of the container begins."""
    with contextlib.suppress(OSError):
        _file(folder).unlink(missing_ok=True)


def last_failure(folder: Path) -> str:
    """Why the last engine ended, if none was ready since; "" if one was, or if the folder is elsewhere."""
    try:
        return _file(folder).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _file(folder: Path) -> Path:
    return folder / "failure"
