"""What the tasks of a drill leave behind, and what it proves: who took effect when, and whether ever two at once.

A task writes down every twentieth of a second that it lives, on a clock that all processes of a machine share.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

# One file per process; its name says which task, where, and under which epoch.
WORKER = """
import os, sys, time
folder, task, linger_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
place = os.getcwd().split(os.sep)[-4]
name = "~".join((task.replace("/", "_"), place, os.environ["PENSTOCK_EPOCH"], str(os.getpid())))
end_s = float("inf")
if linger_s:
    import signal
    def linger(*_):
        global end_s
        end_s = time.monotonic() + linger_s
    signal.signal(signal.SIGTERM, linger)
file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while time.monotonic() < end_s:
    os.write(file, b"%.3f\\n" % time.monotonic())
    time.sleep(0.05)
"""


def worker_command(marks: Path, *, linger_s: float = 0) -> list[str]:
    """The command of a task that marks, and goes on for a while after it was asked to stop."""
    return [sys.executable, "-S", "-c", WORKER, str(marks), "{task}", str(linger_s)]


@dataclass(frozen=True, slots=True)
class Run:
    """One process of a task."""

    task: str
    place: str  # the container
    epoch: int  # of its shard, as the process was told it
    pid: int
    marks: tuple[float, ...]  # when it took effect

    @property
    def first(self) -> float:
        return self.marks[0]

    @property
    def last(self) -> float:
        return self.marks[-1]

    def longest_silence(self, since: float) -> float:
        """The longest time between two marks, after some moment."""
        times = [mark for mark in self.marks if mark >= since]
        return max((after - before for before, after in pairwise(times)), default=0.0)


@dataclass(frozen=True, slots=True)
class Overlap:
    """An older process of a task took effect after a newer one had begun to."""

    older: Run
    newer: Run
    marks: int

    @property
    def seconds(self) -> float:
        """From the first of those late marks to the last."""
        late = [mark for mark in self.older.marks if mark >= self.newer.first]
        return late[-1] - late[0]

    def __str__(self) -> str:
        older, newer = self.older, self.newer
        return (
            f"{older.task}: {older.pid} on {older.place} (epoch {older.epoch}) marked {self.marks} times within "
            f"{self.seconds:.2f} s beside {newer.pid} on {newer.place} (epoch {newer.epoch})"
        )


def read_runs(folder: Path) -> list[Run]:
    """Every process that marked, in the order of their first marks."""
    found = []
    for path in folder.iterdir():
        task, place, epoch, pid = path.name.split("~")
        whole = path.read_bytes().rpartition(b"\n")[0]  # the last line may be half written
        marks = tuple(float(line) for line in whole.split())
        if marks:
            found.append(Run(task=task, place=place, epoch=int(epoch), pid=int(pid), marks=marks))
    return sorted(found, key=lambda run: run.first)


def runs_of(runs: Sequence[Run], task: str) -> list[Run]:
    """Those of one task."""
    return [run for run in runs if run.task == task]


def overlaps_in(runs: Sequence[Run]) -> Iterator[Overlap]:
    """Every pair of processes of one task that took effect at once."""
    for number, newer in enumerate(runs):
        for older in runs[:number]:
            late = sum(mark >= newer.first for mark in older.marks)
            if older.task == newer.task and late:
                yield Overlap(older, newer, late)


def epochs_out_of_order(runs: Sequence[Run]) -> Iterator[str]:
    """A newer process elsewhere must have the larger epoch, or whoever it writes to cannot tell them apart."""
    for number, newer in enumerate(runs):
        for older in runs[:number]:
            if older.task == newer.task and older.place != newer.place and older.epoch >= newer.epoch:
                yield f"{newer.task}: epoch {newer.epoch} on {newer.place} after {older.epoch} on {older.place}"


def recovery_s(runs: Sequence[Run], task: str, fault: float) -> float | None:
    """From the fault to the first mark of a process that began after it; None: there is none yet."""
    return next((run.first - fault for run in runs_of(runs, task) if run.first > fault), None)


def is_marking(runs: Sequence[Run], task: str, *, within_s: float = 1.0) -> bool:
    """Whether a task took effect a moment ago."""
    limit = time.monotonic() - within_s
    return any(run.last >= limit for run in runs_of(runs, task))
