"""How long each partition stood still around an event: watched from outside, in the committed offsets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from penstock.client import Client
from penstock.jobs.tasks import interval_birth
from penstock.streams.places import open_rows
from penstock.streams.rows.row_store import IntervalRef

LOOK_S = 0.1


class PauseWatch:
    """Looks ten times a second which partitions moved on. A pause is the longest time one did not."""

    finished: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, client: Client, rows: str, jobs: Sequence[str]) -> None:
        self._client, self._rows, self._jobs = client, open_rows(rows), tuple(jobs)
        self._refs: list[IntervalRef] = []
        self._read: dict[IntervalRef, int] = {}
        self._moves: dict[IntervalRef, list[float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pauses", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        for name in self._jobs:
            job = self._client.job(name)
            config = job["running"]["config"]
            for partition in range(config["partitions"]):
                birth = interval_birth(job["birth"], config["kind"], config["lineage"], partition)
                self._refs.append(
                    IntervalRef(job=name, job_birth=job["birth"], partition=partition, birth=birth)
                )
        self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join()

    def is_moving(self) -> bool:
        """Whether every partition moved on within the last two seconds."""
        now = time.monotonic()
        return all(self._moves.get(ref, [0.0])[-1] > now - 2 for ref in self._refs)

    @property
    def read(self) -> int:
        """How many records of all partitions were read so far."""
        return sum(self._read.values())

    @contextmanager
    def event(self, name: str) -> Iterator[None]:
        """Measure the pause of whatever happens inside, and the second after."""
        began = time.monotonic()
        yield
        time.sleep(2)
        pause = self.longest(began, time.monotonic())
        PauseWatch.finished.append((f"pause: {name}", f"{pause:.1f} s"))

    def longest(self, began: float, ended: float) -> float:
        """The longest pause of a partition between two moments, and the one that one of them falls into."""
        longest = 0.0
        for moves in self._moves.values():
            before = [at for at in moves if at < began][-1:]
            points = [*before, *(at for at in moves if began <= at <= ended)]
            for earlier, later in zip(points, [*points[1:], ended], strict=True):
                longest = max(longest, later - earlier)
        return longest

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            for ref in self._refs:
                read = sum(self._rows.peek(ref).offsets.values())
                if self._read.get(ref) != read:
                    self._read[ref] = read
                    self._moves.setdefault(ref, []).append(time.monotonic())
