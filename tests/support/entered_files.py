"""Which functions of penstock every Python process of a run enters: the caller, the control plane, containers,
Spark's planners and the workers forked for it.

A `Watch` makes a folder. A process that has it on its PYTHONPATH starts with `record`, and so do the processes that
it starts. They append a line for each function that they enter for the first time in a phase; the number of the phase
is a byte that all of them see.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = str(ROOT / "penstock") + os.sep
PHASE, ENTERED = "phase", "entered"
HAS_LOCALS = 1  # CO_OPTIMIZED: a function, not the body of a module or a class
START = """\
from tests.support.entered_files import record

record({folder!r})
"""


class Entry(NamedTuple):
    """A function that a process entered."""

    phase: int
    pid: int
    role: str
    thread: str
    file: str  # relative to the package
    function: str


class Watch:
    """One run: what its processes need in their environment, and what they entered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(START.format(folder=str(folder)))
        (folder / ENTERED).touch()
        (folder / PHASE).write_bytes(b"\0")
        self.phase = 0

    @property
    def path(self) -> str:
        """For PYTHONPATH."""
        return os.pathsep.join([str(self._folder), str(ROOT)])

    def begin(self) -> int:
        """The next phase; what a process enters from now on is noted anew."""
        self.phase += 1
        with (self._folder / PHASE).open("r+b") as file:
            file.write(bytes([self.phase]))
        return self.phase

    def entries(self, *phases: int) -> list[Entry]:
        """What was entered, in this order."""
        found = []
        whole, _, _ = (self._folder / ENTERED).read_text().rpartition("\n")
        for line in whole.splitlines():
            phase, pid, role, thread, file, function = line.split("\t")
            if not phases or int(phase) in phases:
                found.append(Entry(int(phase), int(pid), role, thread, file, function))
        return found


def record(folder: str) -> None:
    """Note from now on what this process, its threads and its forks enter."""
    with open(os.path.join(folder, PHASE), "r+b") as file:
        phase = mmap.mmap(file.fileno(), 1)
    entered = os.open(os.path.join(folder, ENTERED), os.O_WRONLY | os.O_APPEND)
    # By id: to compute the hash of a code takes longer than the rest. They are kept, so that no id comes again.
    seen: dict[int, CodeType] = {}
    now = phase[0]
    starter = os.getpid()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal now
        if event != "call":
            return
        if (current := phase[0]) != now:
            seen.clear()  # first: another thread must not take what it sees now for what it saw then
            now = current
        code = frame.f_code
        if id(code) in seen:
            return
        if code.co_filename.startswith(PACKAGE) and code.co_flags & HAS_LOCALS:
            if _is_importing(frame):
                return
            process = os.getpid()
            words = (
                str(now),
                str(process),
                role_of(is_fork=process != starter),
                threading.current_thread().name,
                code.co_filename.removeprefix(PACKAGE),
                code.co_qualname,
            )
            os.write(entered, ("\t".join(words) + "\n").encode())
        seen[id(code)] = code

    os.register_at_fork(after_in_child=seen.clear)
    threading.setprofile(note)
    sys.setprofile(note)


def _is_importing(frame: FrameType) -> bool:
    """Whether an import calls it, to find a module or while one of ours is loaded: that is no step of any way."""
    above: FrameType | None = frame.f_back
    if above is not None and above.f_code.co_filename.startswith("<frozen importlib"):
        return True
    while above is not None:
        code = above.f_code
        if (
            not code.co_flags & HAS_LOCALS
            and code.co_filename.startswith(PACKAGE)
            and above.f_globals.get("__name__") != "__main__"
        ):
            return True
        above = above.f_back
    return False


ROLES: tuple[tuple[str, str, str], ...] = (  # a word of the command, what the process is, what its forks are
    ("penstock.streams.spark.planner_host", "planner host", "planner"),
    ("penstock.streams.spark.worker_daemon", "worker daemon", "worker"),
    ("pyspark.daemon", "worker daemon", "worker"),
    ("pyspark.sql.streaming.python_streaming_source_runner", "planner", "planner"),
    ("penstock.server.workers", "server worker", "server worker"),
    ("--incarnation", "engine", "engine"),
    ("container", "warden", "warden"),
    ("up", "control plane", "control plane"),
)


def role_of(*, is_fork: bool) -> str:
    """What this process is in the platform."""
    for word, role, of_fork in ROLES:
        if word in sys.orig_argv:
            return of_fork if is_fork else role
    return "caller"
