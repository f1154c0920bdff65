"""What runs below a process. Processes end while one looks: those are not in the answer, and are no error."""

from __future__ import annotations

import contextlib

import psutil


def kin_of(pid: int) -> dict[psutil.Process, str]:
    """Everything below it that still runs, with its command line."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # and what is left of one, a zombie
                found[process] = " ".join(process.cmdline())
    return found


def kill_all(kin: dict[psutil.Process, str]) -> None:
    """SIGKILL to those that still run."""
    for process in kin:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
