"""Kills all processes of a session: Spark's Python workers have their own process groups, but share a
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
    """SIGKILL every process of a session; returns their number."""
    killed = 0
    for process in _members(session_id):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
            killed += 1
    return killed


def kill_own_session() -> None:
    """SIGKILL all other processes of this process's session. Does nothing unless it leads the session."""
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
    """Record a session leader, so that its successor can kill the session. The start time detects reused
    pids.
    """
    path.write_text(json.dumps({"pid": pid, "started": psutil.Process(pid).create_time()}))


def kill_previous_session(path: Path) -> int:
    """Kill the session recorded by a previous process, if it still is the same; returns how many
    were killed.
    """
    try:
        data = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return 0
    try:
        same = abs(psutil.Process(data["pid"]).create_time() - data["started"]) < 0.01
    except psutil.NoSuchProcess:
        # The leader is dead; its orphans keep the session id, which is not reused while they live.
        same = True
    killed = kill_session(data["pid"]) if same else 0
    while killed and is_session_alive(data["pid"]):
        sleep_ms(20)  # a process that was sent SIGKILL may still finish a write
    path.unlink(missing_ok=True)
    return killed


CHARS_MAX = 4_000


def write_failure(folder: Path, reason: str) -> None:
    """Store why the engine ends."""
    with contextlib.suppress(OSError):  # it is in the log too
        _file(folder).write_text(reason[:CHARS_MAX], encoding="utf-8")


def clear_failure(folder: Path) -> None:
    """Delete the reason: an engine is ready, or the container starts again."""
    with contextlib.suppress(OSError):
        _file(folder).unlink(missing_ok=True)


def last_failure(folder: Path) -> str:
    """Why the last engine ended; "" if one became ready since, or if the folder is on another machine."""
    try:
        return _file(folder).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _file(folder: Path) -> Path:
    return folder / "failure"
