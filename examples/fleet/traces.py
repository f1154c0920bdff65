"""What the processes themselves wrote down: who lived when, under which version. Independent of what the
control plane believes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ALIVE_MS = 1_000  # a process that wrote nothing for so long is not there


@dataclass(frozen=True)
class Life:
    """One process of a task, from its first to its last line."""

    pid: int
    version: str
    first_ms: int
    last_ms: int


def now_ms() -> int:
    """The clock that the traces are written with."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def lives_of(path: Path) -> list[Life]:
    """The lives of one task in the order of their beginnings."""
    found: dict[int, Life] = {}
    for line in path.read_text().splitlines():
        at, pid, version = line.split(" ")
        first_ms = found[int(pid)].first_ms if int(pid) in found else int(at)
        found[int(pid)] = Life(pid=int(pid), version=version, first_ms=first_ms, last_ms=int(at))
    return sorted(found.values(), key=lambda life: life.first_ms)


def alive(folder: Path) -> dict[str, Life]:
    """Trace -> the life that is there now."""
    limit_ms, found = now_ms() - ALIVE_MS, {}
    for path in sorted(folder.iterdir()):
        lives = lives_of(path)
        if lives and lives[-1].last_ms >= limit_ms:
            found[path.name] = lives[-1]
    return found


def overlaps(folder: Path) -> list[str]:
    """Every case of two processes of one task that were there together."""
    return [
        f"{path.name}: {old.pid} wrote {old.last_ms - new.first_ms} ms after {new.pid} had begun"
        for path in sorted(folder.iterdir())
        for lives in [lives_of(path)]
        for number, old in enumerate(lives)
        for new in lives[number + 1 :]
        if old.last_ms >= new.first_ms
    ]


def longest_gap_ms(folder: Path, *, since_ms: int) -> int:
    """The longest time that any task was away between two of its lives, of those that began since."""
    gaps = [
        new.first_ms - old.last_ms
        for path in folder.iterdir()
        for lives in [lives_of(path)]
        for old, new in pairwise(lives)
        if new.first_ms >= since_ms
    ]
    return max(gaps, default=0)
