"""The kernel's own limit of a task's memory (cgroups, version 1 or 2), where we may set one.

It holds at every moment and counts shared pages once, which looking now and then does not. An rlimit would
not do: it counts addresses, of which a JVM reserves far more than it uses.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
PREFIX = "penstock-"


@dataclass(frozen=True, slots=True)
class Files:
    """What a version of cgroups calls its files."""

    limit: str
    swap_limit: str
    peak: str
    events: str
    used: str  # which line of memory.stat is a task's own memory: not the cache of files, which can go
    swap_counts_memory: bool  # whether the limit of swap is that of memory and swap together


VERSIONS = {
    1: Files("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes",
             "memory.oom_control", "total_rss", True),
    2: Files("memory.max", "memory.swap.max", "memory.peak", "memory.events", "anon", False),
}  # fmt: skip


class MemoryGroup:
    """The group of one run: whoever is in it and what they start share one limit."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder, self._files = folder, files

    @property
    def door(self) -> str:
        """The file into which a process writes its number to enter."""
        return str(self._folder / "cgroup.procs")

    def members(self) -> list[int]:
        """The processes in it."""
        with contextlib.suppress(OSError):
            return [int(pid) for pid in Path(self.door).read_text().split()]
        return []

    def kills(self) -> int:
        """How many processes the kernel ended here for want of memory."""
        return self._line(self._files.events, "oom_kill")

    def used_mb(self) -> float:
        """What it uses now, without the cache of files."""
        return self._line("memory.stat", self._files.used) / 2**20

    def peak_mb(self) -> float:
        """The most it ever used; 0 where the kernel does not say."""
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder / self._files.peak).read_text()) / 2**20
        return 0.0

    def _line(self, file: str, name: str) -> int:
        with contextlib.suppress(OSError):
            found = re.search(rf"^{name} (\d+)$", (self._folder / file).read_text(), re.M)
            return int(found[1]) if found else 0
        return 0

    def remove(self) -> None:
        """Once it is empty; one that is not is removed by a later life."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()


class MemoryGroups:
    """Makes groups below one of which we may make some."""

    def __init__(self, parent: Path, version: int) -> None:
        self._parent, self._files, self._made = parent, VERSIONS[version], count(1)
        self._sweep()

    def make(self, name: str, limit_mb: float) -> MemoryGroup | None:
        """A group with a limit, or None if the kernel refuses."""
        folder = self._parent / f"{PREFIX}{os.getpid()}-{next(self._made)}-{name}"
        limit = int(limit_mb * 2**20)
        try:
            folder.mkdir()
            (folder / self._files.limit).write_text(str(limit))
            with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap
                swap = limit if self._files.swap_counts_memory else 0
                (folder / self._files.swap_limit).write_text(str(swap))
            with contextlib.suppress(FileNotFoundError):  # version 2: end all of a task, not its largest part
                _write_existing(folder / "memory.oom.group", "1")
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()
            return None
        return MemoryGroup(folder, self._files)

    def _sweep(self) -> None:
        """Remove what earlier processes left; a group that still has somebody in it cannot go."""
        for folder in self._parent.glob(f"{PREFIX}*"):
            owner = re.match(rf"{PREFIX}(\d+)-", folder.name)
            if owner and not psutil.pid_exists(int(owner[1])):
                with contextlib.suppress(OSError):
                    folder.rmdir()


def find_groups(root: Path = ROOT, own: str | None = None) -> MemoryGroups | None:
    """Where this process may make groups with a limit of memory; None: nowhere, memory is watched instead.

    `own`: the text of /proc/self/cgroup.
    """
    try:
        lines = (own if own is not None else Path("/proc/self/cgroup").read_text()).splitlines()
    except OSError:
        return None
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if "memory" in controllers.split(","):
            parent = root / "memory" / path.lstrip("/")
            return MemoryGroups(parent, 1) if _may_make_in(parent) else None
        if not controllers:
            # Whose processes are all in groups below it may have limits there: our own, or what a service
            # manager delegated with a group in it for the service itself.
            here = root / path.lstrip("/")
            for parent in (here, here.parent) if here != root else (here,):
                if _has_memory(parent) and _may_make_in(parent):
                    return MemoryGroups(parent, 2)
    return None


def _has_memory(parent: Path) -> bool:
    control = parent / "cgroup.subtree_control"
    try:
        if "memory" not in control.read_text().split():
            _write_existing(control, "+memory")
        return "memory" in control.read_text().split()
    except OSError:
        return False


def _may_make_in(parent: Path) -> bool:
    return parent.is_dir() and os.access(parent, os.W_OK)


def _write_existing(path: Path, text: str) -> None:
    with open(path, "r+") as file:
        file.write(text)
